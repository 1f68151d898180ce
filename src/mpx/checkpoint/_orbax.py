"""Orbax, which is imported when it is needed, and its managers."""

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

ARRAYS, RECORD = "state", "mpx"
"""The names of what a checkpoint consists of."""
Path = str | os.PathLike[str]


def reader(path: Any, options: Mapping[str, Any]) -> Any:
    """Returns a manager that writes, makes and removes nothing: another one may write.

    `read_only=True` does the same, but logs three warnings.
    """
    options = {name: x for name, x in options.items() if name != "async_options"}
    return _while_others_write(
        lambda: manager(
            path,
            **options,
            create=False,
            enable_async_checkpointing=False,
            save_root_metadata=False,
        )
    )


def reload(found: Any) -> None:
    """Makes a manager list its folder anew."""
    _while_others_write(found.reload)


def _while_others_write(call: Callable[[], Any]) -> Any:
    """Calls a function again if a checkpoint is removed between its list and its files."""
    for _ in range(99):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return call()
    return call()


def manager(path: Any, **options: Any) -> Any:
    """Returns a `CheckpointManager` with these options."""
    ocp = orbax()
    return ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(**options))


def absolute(path: Path) -> Any:
    """Returns a path as Orbax wants it, which may be one of an object store."""
    orbax()
    from etils import epath  # a part of Orbax's interface

    return epath.Path(path).expanduser().absolute()


def orbax() -> Any:
    """Imports Orbax when it is needed: `import mpx` must not."""
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError(
            "`mpx.checkpoint` writes with Orbax, which is not installed: "
            'pip install "mpx-jax[checkpoint]".'
        ) from error
    return orbax.checkpoint
