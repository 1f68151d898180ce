"""Progress of long work, shown on a terminal only."""

import contextlib
import sys
from collections.abc import Callable, Iterator

Tell = Callable[[str], None]
"""A function that is called with the name of each step before it starts."""


def silent(step: str) -> None:
    """Shows nothing."""


@contextlib.contextmanager
def progress(what: str) -> Iterator[Tell]:
    """Yields a function that writes one line, or nothing if stderr is no terminal."""
    if not sys.stderr.isatty():
        yield silent
        return

    def write(step: str) -> None:
        sys.stderr.write(f"\r\x1b[K{what}: {step}")
        sys.stderr.flush()

    try:
        yield write
    finally:
        sys.stderr.write("\r\x1b[K")
