"""Progress of long work, shown on a terminal only."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Protocol, runtime_checkable


@runtime_checkable
class Tell(Protocol):
    """A function that is told what happens next."""

    def __call__(self, step: str, *, part: bool = False) -> None:
        """Shows a step before it starts, or a `part` of the one that goes on."""
        ...


def silent(step: str, *, part: bool = False) -> None:
    """Shows nothing."""


@contextlib.contextmanager
def progress(total: int, what: str) -> Iterator[Tell]:
    """Yields a function that is called with the name of each step before it starts.

    It writes one line, and nothing if stderr is no terminal. There are about `total` steps.
    """
    if not sys.stderr.isatty():
        yield silent
        return
    done = 0

    def write(step: str, *, part: bool = False) -> None:
        nonlocal done
        done += not part
        sys.stderr.write(f"\r\x1b[K{what}: {step} ({done}/{total})")
        sys.stderr.flush()

    try:
        yield write
    finally:
        sys.stderr.write("\r\x1b[K")
