"""Warnings that point at the user's line."""

import sys
import warnings

_LIBRARIES = {"beartype", "equinox", "flax", "haiku", "jax", "jaxtyping", "mpx"}


def warn(message: str) -> None:
    """Warns, with the line of the nearest caller that is no library.

    Python shows a warning once for each such line.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_library(frame.f_globals):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def _is_library(names: dict[str, object]) -> bool:
    name = str(names.get("__name__"))
    own = name.startswith(("contextlib", "functools"))
    return own or name.partition(".")[0] in _LIBRARIES
