"""Writing checkpoints and reading them, through Orbax."""

import os
from types import TracebackType
from typing import Any

import numpy as np
from jaxtyping import PyTree

from mpx._arguments import as_count
from mpx._checkpoint._leaves import (
    empty_like,
    from_stored,
    open_state,
    python_scalar,
    stored_type,
    to_stored,
)
from mpx._checkpoint._manifest import Manifest, check_arrays
from mpx._warn import warn

_ARRAYS, _RECORD = "state", "mpx"
Path = str | os.PathLike[str]


class Checkpointer:
    """Writes checkpoints of one run into a folder while training goes on.

    `save` copies the state to the host and returns; a thread of Orbax writes it. What is
    written becomes a checkpoint by a rename, at the end: a process that is killed leaves
    the last checkpoint as it was. Leave the `with` block, or call `close`, to wait for the
    last one.

    Examples:
        >>> import tempfile, jax.numpy as jnp
        >>> state = {"w": jnp.ones(2), "step": 0}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with Checkpointer(folder, keep=2) as checkpoints:
        ...         for step in range(3):
        ...             checkpoints.save(step, {**state, "step": step})
        ...         checkpoints.wait()
        ...         print(checkpoints.steps(), checkpoints.restore(state)["step"])
        [1, 2] 2
    """

    def __init__(
        self, path: Path, *, keep: int | None = None, asynchronous: bool = True
    ) -> None:
        """Makes the folder, and removes what a killed process did not finish.

        Args:
            path: The folder. One run writes to it at a time.
            keep: How many checkpoints stay; older ones are removed when a new one is
                complete. `None` keeps all.
            asynchronous: Whether `save` returns before everything is written.

        Raises:
            ImportError: If Orbax is not installed.
        """
        keep = None if keep is None else as_count(keep, "keep", at_least=1)
        self._path = _absolute(path)
        self._manager = _manager(
            self._path,
            max_to_keep=keep,
            enable_async_checkpointing=asynchronous,
            cleanup_tmp_directories=True,
        )

    def save(self, step: int, state: PyTree) -> None:
        """Saves a state. Waits for the one before if that is not written yet.

        Args:
            step: The number of the checkpoint, larger than those that there are.
            state: Any training state; see `save`.

        Raises:
            TypeError: If a leaf has no values, as a `ShapeDtypeStruct`.
            ValueError: If there is a checkpoint of this step or of a later one.
        """
        step = as_count(step, "step", at_least=0)
        opened = open_state(state)
        check_arrays(opened)
        manifest = Manifest.of(state, opened)
        self.wait()
        latest = self.latest()
        if latest is not None and step <= latest:
            raise ValueError(
                f"{self._path} has a checkpoint of step {latest}, so step {step} cannot be "
                "saved: `restore` takes the latest. Remove the later ones with "
                "`Checkpointer.delete(step)`, or save to another folder."
            )
        pairs = zip(opened.names, opened.leaves, strict=True)
        arrays = {
            name: to_stored(leaf)
            for name, leaf in pairs
            if name in manifest.leaves and manifest.leaves[name].is_stored
        }
        args = _orbax().args
        items = {_RECORD: args.JsonSave(manifest.to_json())}
        if arrays:
            items[_ARRAYS] = args.PyTreeSave(arrays)
        # Without `force` Orbax may decide not to save, and says so only in its result.
        self._manager.save(step, args=args.Composite(**items), force=True)

    def restore(
        self, template: PyTree, *, step: int | None = None, partial: bool = False
    ) -> PyTree:
        """Restores a state; see `restore`. Waits for a checkpoint that is being written.

        Args:
            template: A state of the same structure.
            step: The number of the checkpoint; `None` is the latest.
            partial: Whether the checkpoint may hold more than the template.

        Raises:
            FileNotFoundError: If there is no such checkpoint.
            ValueError: If the checkpoint does not fit the template.
        """
        self.wait()
        return _restore(self._manager, self._path, template, step, partial)

    def steps(self) -> list[int]:
        """Returns the numbers of the complete checkpoints, in order."""
        return sorted(self._manager.all_steps())

    def latest(self) -> int | None:
        """Returns the number of the latest complete checkpoint, `None` if there is none."""
        return max(self.steps(), default=None)

    def delete(self, step: int) -> None:
        """Removes a checkpoint.

        Args:
            step: Its number.
        """
        self.wait()
        self._manager.delete(step)

    def wait(self) -> None:
        """Waits until everything is written. Raises what went wrong while writing."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits until everything is written, and ends the threads of Orbax."""
        self.wait()
        self._manager.close()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def save(
    path: Path, state: PyTree, *, step: int | None = None, keep: int | None = None
) -> int:
    """Saves a training state, and returns when it is written.

    Saved are arrays of any dtype (also float8 and 4-bit ones), sharded or not, typed PRNG
    keys, NumPy arrays and Python numbers, in any tree: Equinox modules, NNX modules and
    states, dicts of Linen and Haiku, optax states, loss scalings, compressed optimizer
    states and fp8 histories. Functions, strings and static fields are code, and are not
    saved: `restore` takes them from its template.

    Use a `Checkpointer` to go on with training while a checkpoint is written.

    Args:
        path: The folder of the run. Each checkpoint is a folder in it.
        state: The state.
        step: The number of the checkpoint, larger than those that there are; `None` is
            the next one.
        keep: How many checkpoints stay; older ones are removed when this one is complete.
            `None` keeps all.

    Returns:
        The number of the checkpoint.

    Raises:
        ImportError: If Orbax is not installed.
        TypeError: If a leaf has no values, as a `ShapeDtypeStruct`.
        ValueError: If there is a checkpoint of this step or of a later one.

    Examples:
        >>> import tempfile, jax.numpy as jnp
        >>> state = {"w": jnp.ones(2, jnp.bfloat16), "epoch": 7}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     number = save(folder, state)
        ...     restored = restore(folder, {"w": jnp.zeros(2, jnp.bfloat16), "epoch": 0})
        >>> number, restored
        (0, {'epoch': 7, 'w': Array([1, 1], dtype=bfloat16)})
    """
    with Checkpointer(path, keep=keep, asynchronous=False) as checkpointer:
        latest = checkpointer.latest()
        step = (0 if latest is None else latest + 1) if step is None else step
        checkpointer.save(step, state)
    return step


def restore(
    path: Path, template: PyTree, *, step: int | None = None, partial: bool = False
) -> PyTree:
    """Restores a training state that `save` or a `Checkpointer` saved.

    The template tells the structure and where arrays are to lie: each array gets the
    sharding that it has in the template, so a run can go on with another number of
    devices or another layout. A template is a freshly made state, or one of
    `ShapeDtypeStruct`s, as `jax.eval_shape` and `eqx.filter_eval_shape` make it. Functions,
    strings and static fields come from the template, and so do Python numbers and booleans
    that are fields of Equinox modules, as the rate of a dropout.

    Args:
        path: The folder of the run.
        template: A state of the same structure. It is not changed; NNX modules in the
            result are new.
        step: The number of the checkpoint; `None` is the latest.
        partial: Whether the checkpoint may hold more than the template: to restore the
            parameters alone, for example.

    Returns:
        The state, bit for bit as it was saved.

    Raises:
        FileNotFoundError: If there is no such checkpoint.
        ImportError: If Orbax is not installed.
        ValueError: If the checkpoint does not fit the template: every leaf that is
            missing, not expected, or of another shape or dtype is named.

    Examples:
        >>> import tempfile, jax.numpy as jnp
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     step = save(folder, {"w": jnp.ones(2), "bias": jnp.ones(())})
        ...     restore(folder, {"w": jnp.zeros(2)}, partial=True)
        {'w': Array([1., 1.], dtype=float32)}
    """
    folder = _absolute(path)
    if not folder.exists():
        raise FileNotFoundError(f"There is no folder {folder} to restore from.")
    # Nothing is written, made or removed: another process may be saving. `read_only=True`
    # does the same, but logs three warnings.
    options = {
        "create": False,
        "enable_async_checkpointing": False,
        "save_root_metadata": False,
    }
    with _manager(folder, **options) as manager:
        return _restore(manager, folder, template, step, partial)


def _restore(
    manager: Any, path: Any, template: PyTree, step: int | None, partial: bool
) -> PyTree:
    steps: list[int] = sorted(manager.all_steps())
    if not steps or (step is not None and step not in steps):
        which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise FileNotFoundError(
            f"There is {which} in {path}, which has those of the steps {steps}."
        )
    number = steps[-1] if step is None else step
    where = f"{path / str(number)}"
    manifest = _read_manifest(manager, number, where)
    opened = open_state(template)
    wanted = Manifest.of(template, opened)
    manifest.check(wanted, where, partial=partial)
    pairs = dict(zip(opened.names, opened.leaves, strict=True))
    stored = {
        name: pairs[name] for name in wanted.leaves if wanted.leaves[name].is_stored
    }
    arrays = _read_arrays(manager, number, stored)
    leaves = []
    for name, leaf, configures in zip(
        opened.names, opened.leaves, opened.configures, strict=True
    ):
        saved = manifest.leaves.get(name)
        if name in arrays:
            leaf = from_stored(arrays.pop(name), leaf)
        elif saved is not None and saved.shape is not None:
            leaf = empty_like(leaf)
        elif saved is not None and configures:
            _warn_of_configuration(name, leaf, python_scalar(saved), where)
        elif saved is not None:
            leaf = python_scalar(saved)
        leaves.append(leaf)
    return opened.close(leaves)


def _read_manifest(manager: Any, step: int, where: str) -> Manifest:
    ocp = _orbax()
    try:
        items = manager.restore(
            step, args=ocp.args.Composite(**{_RECORD: ocp.args.JsonRestore()})
        )
    except (FileNotFoundError, KeyError, ValueError):
        items = {}
    record = items.get(_RECORD)
    if record is None:
        raise ValueError(
            f"{where} was not written by `mpx.checkpoint`: its record is missing. What "
            "Orbax wrote, Orbax restores: `orbax.checkpoint.StandardCheckpointer`."
        )
    return Manifest.from_json(record, where)


def _read_arrays(manager: Any, step: int, stored: dict[str, Any]) -> dict[str, Any]:
    """Reads arrays to where their templates lie, or as NumPy arrays."""
    ocp = _orbax()
    if not stored:
        return {}
    types = {name: stored_type(leaf) for name, leaf in stored.items()}

    def target(kind: Any) -> Any:
        if kind.sharding is None:
            return ocp.RestoreArgs(restore_type=np.ndarray, dtype=kind.dtype)
        return ocp.ArrayRestoreArgs(
            sharding=kind.sharding, global_shape=kind.shape, dtype=kind.dtype
        )

    args = ocp.args.PyTreeRestore(
        item=types,
        restore_args={name: target(kind) for name, kind in types.items()},
        partial_restore=True,
    )
    found = manager.restore(step, args=ocp.args.Composite(**{_ARRAYS: args}))
    return dict(found[_ARRAYS])


def _warn_of_configuration(name: str, leaf: Any, saved: Any, where: str) -> None:
    if leaf != saved:
        warn(
            f"`{name}` is {leaf} in the template, but was {saved} in {where}. As a field "
            "of a module it comes from the template; a number that a run changes should "
            "be an array."
        )


def _manager(path: Any, **options: Any) -> Any:
    ocp = _orbax()
    return ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(**options))


def _absolute(path: Path) -> Any:
    """Returns a path as Orbax wants it, which may be one of an object store."""
    _orbax()
    from etils import epath  # a part of Orbax's interface

    return epath.Path(path).expanduser().absolute()


def _orbax() -> Any:
    """Imports Orbax when it is needed: `import mpx` must not."""
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError(
            "`mpx.checkpoint` writes with Orbax, which is not installed: "
            'pip install "mpx-jax[checkpoint]".'
        ) from error
    return orbax.checkpoint
