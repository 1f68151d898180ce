"""Packages that only some results need, imported when they are used."""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any


def extra(module: str, purpose: str) -> Any:
    """Returns a module of the extra `inspect`.

    Raises:
        ImportError: If it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f'{purpose} needs {package}: `pip install "mpx-jax[inspect]"`.'
        ) from error


@contextlib.contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[str], None]]:
    """Yields a function that is called with the name of each step before it starts.

    Nothing is shown if stderr is no terminal. With `rich` it is a bar, else a line.
    """
    if not sys.stderr.isatty():
        yield lambda step: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        done = [0]

        def tell(step: str) -> None:
            done[0] += 1
            sys.stderr.write(f"\r\x1b[K{what}: {step} ({done[0]}/{total})")
            sys.stderr.flush()

        yield tell
        sys.stderr.write("\r\x1b[K")
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)

        def advance(step: str) -> None:
            bar.update(task, description=f"{what}: {step}", advance=1)

        yield advance
