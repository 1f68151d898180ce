"""Warnings that point at the caller's line, however deep mpx and JAX stand in between."""

import contextlib
import pathlib
import sys
import warnings

import equinox
import jax

_LIBRARIES = (
    *(str(pathlib.Path(str(lib.__file__)).parent) for lib in (equinox, jax)),
    str(pathlib.Path(__file__).parent),
    str(contextlib.__file__),
)


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the innermost line that is neither in mpx nor in JAX or Equinox.

    Python's default filter then shows it once for each such line.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
