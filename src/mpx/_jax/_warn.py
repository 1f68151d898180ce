"""Warnings that name the line of the user, and lines that say how far long work is."""

import pathlib
import sys
import warnings

import jax

# Other packages are beside JAX, and generated code has a name such as "<string>".
_LIBRARIES = (
    str(pathlib.Path(warnings.__file__).parent),
    str(pathlib.Path(jax.__file__).parents[1]),
    str(pathlib.Path(__file__).parents[1]),
    "<",
)


def warn(message: str) -> None:
    """Warns at the innermost line that is in no library; Python shows it once a line."""
    frame = sys._getframe()
    while frame.f_back and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    place = frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(message, RuntimeWarning, *place, registry=registry)


def tell(step: str) -> None:
    """Shows how far long work is: a line in place of the last one, on a terminal only."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{step}")
        sys.stderr.flush()
