"""Progress of long work, shown on a terminal only."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Protocol, runtime_checkable


@runtime_checkable
class Tell(Protocol):
    """A function that is told what happens next."""

    def __call__(self, step: str, *, part: bool = False) -> None:
        """Shows a step before it starts."""
        ...


def silent(step: str, *, part: bool = False) -> None:
    """Shows nothing."""


@contextlib.contextmanager
def progress(total: int, what: str) -> Iterator[Tell]:
    """Yields a function that is called with the name of each step before it starts.

    Nothing is shown if stderr is no terminal. With `rich` it is a bar, else a line.
    """
    if not sys.stderr.isatty():
        yield silent
        return
    try:
        from rich.console import Console
        from rich.progress import Progress, TimeElapsedColumn
    except ImportError:
        done = [0]

        def write(step: str, *, part: bool = False) -> None:
            done[0] += not part
            sys.stderr.write(f"\r\x1b[K{what}: {step} ({done[0]}/{total})")
            sys.stderr.flush()

        try:
            yield write
        finally:
            sys.stderr.write("\r\x1b[K")
        return
    columns = (*Progress.get_default_columns()[:-1], TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task, done = bar.add_task(what, total=total), [-1]

        def advance(step: str, *, part: bool = False) -> None:
            done[0] += not part
            bar.update(task, description=f"{what}: {step}", completed=done[0])

        yield advance
