"""Reading checkpoints with Orbax: into the structure and to the devices of a template."""

import contextlib
import os
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from mpx._jax._arguments import check_choice
from mpx._jax._processes import gather_results
from mpx._jax._tree import is_array
from mpx.checkpoint._leaves import (
    Opened,
    checksums,
    from_stored,
    is_numpy,
    open_state,
    placed,
    spans_processes,
    stored_type,
    to_stored,
)
from mpx.checkpoint._manifest import Leaf, Manifest, damaged

ARRAYS, RECORD = "state", "mpx"
"""The names of what a checkpoint consists of."""
Path = str | os.PathLike[str]
Folder = Any
"""A path of `etils.epath`."""
Manager = Any
"""An `orbax.checkpoint.CheckpointManager`."""
T = TypeVar("T")


def reader(path: Folder, options: Mapping[str, object]) -> Manager:
    """Returns a manager that changes nothing (`read_only` logs warnings)."""
    options = {name: x for name, x in options.items() if name != "async_options"}
    return while_others_write(
        lambda: manager(
            path,
            **options,
            create=False,
            enable_async_checkpointing=False,
            save_root_metadata=False,
        )
    )


def while_others_write(call: Callable[[], T]) -> T:
    """Calls a function again if a checkpoint is removed between its list and its files."""
    for _ in range(99):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return call()
    return call()


def manager(path: Folder, **options: object) -> Manager:
    """Returns a `CheckpointManager` with these options."""
    ocp = orbax()
    return ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(**options))


def absolute(path: Path) -> Folder:
    """Returns a path as Orbax wants it, which may be one of an object store."""
    orbax()
    from etils import epath  # a part of Orbax's interface

    return epath.Path(path).expanduser().absolute()


def orbax() -> ModuleType:
    """Imports Orbax when it is needed: `import mpx` must not."""
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError(
            "`mpx.checkpoint` writes with Orbax, which is not installed: "
            'pip install "mpx-jax[checkpoint]".'
        ) from error
    return orbax.checkpoint


Fields = Literal["saved", "template"]


def restore(
    path: Path,
    template: PyTree,
    *,
    step: int | None = None,
    partial: bool = False,
    fields: Fields | None = None,
) -> PyTree:
    """Restores a training state that `save` or a `Checkpointer` saved.

    Each array gets the sharding that it has in the template, so a run can go on with
    another number of devices or another layout. A template is a freshly made state, or one
    of `ShapeDtypeStruct`s, as `jax.eval_shape` and `eqx.filter_eval_shape` make it.
    Functions, strings and static fields come from it. A Python number and an array of no
    axes may stand for each other; an array is restored as it was saved.

    Args:
        path: The folder of the run.
        template: A state of the same structure. It is not changed; NNX modules in the
            result are new.
        step: The number of the checkpoint; `None` is the latest.
        partial: Whether the checkpoint may hold more than the template: to restore the
            parameters alone, for example.
        fields: Python numbers and booleans in fields of Equinox modules may be options of
            the code, as the rate of a dropout, or numbers that the run has changed. If
            they differ, `"saved"` restores them, `"template"` keeps those of the
            template, and `None` raises.

    Returns:
        The state, bit for bit as it was saved.

    Raises:
        FileNotFoundError: If there is no such checkpoint.
        ValueError: If the checkpoint does not fit the template (the leaves are named), or
            is damaged: each array is compared with the checksum that was saved with it.

    Examples:
        >>> import tempfile, jax.numpy as jnp
        >>> from mpx.checkpoint import save
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     step = save(folder, {"w": jnp.ones(2), "bias": jnp.ones(())})
        ...     restore(folder, {"w": jnp.zeros(2)}, partial=True)
        {'w': Array([1., 1.], dtype=float32)}
    """
    folder = absolute(path)
    if not folder.exists():
        raise FileNotFoundError(f"There is no folder {folder} to restore from.")
    with reader(folder, {}) as found:
        return read(found, folder, template, step=step, partial=partial, fields=fields)


def read(
    manager: Manager,
    path: Folder,
    template: PyTree,
    *,
    step: int | None,
    partial: bool,
    fields: Fields | None,
) -> PyTree:
    """Reads a checkpoint with a manager of Orbax; see `restore`."""
    check_choice(fields, "fields", ("saved", "template", None))
    steps: list[int] = sorted(manager.all_steps())
    if not steps:  # the first may be new, or the only one replaced by the next
        while_others_write(manager.reload)
        steps = sorted(manager.all_steps())
    if not steps or (step is not None and step not in steps):
        which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise FileNotFoundError(
            f"There is {which} in {path}, which has those of the steps {steps}."
        )
    number = steps[-1] if step is None else step
    where, opened = path / str(number), open_state(template)
    wanted = Manifest.of(template, opened)
    compared = opened.fields if fields is None else set[str]()
    found: list[Manifest] = []

    def read_record() -> None:
        found.append(_read_manifest(where))
        found[0].check(wanted, f"{where}", compared, partial=partial)

    try:
        gather_results(read_record)
        saved = {name: found[0].leaves[name] for name in wanted.leaves}
        kept = opened.fields if fields == "template" else set[str]()
        return _read_state(manager, where, opened, saved, kept)
    except (FileNotFoundError, ValueError):
        while_others_write(manager.reload)
        latest = manager.latest_step()
        if step is not None or latest in (None, number) or jax.process_count() > 1:
            raise
    # A writer has removed the checkpoint while it was read.
    return read(manager, path, template, step=None, partial=partial, fields=fields)


def _read_manifest(where: Folder) -> Manifest:
    if not (where / RECORD).exists():
        raise ValueError(
            f"{where} was not written by `mpx.checkpoint`: its record is missing. What "
            "Orbax wrote, Orbax restores: `orbax.checkpoint.StandardCheckpointer`."
        )
    try:
        record = orbax().JsonCheckpointHandler().restore(where / RECORD)
    except (FileNotFoundError, ValueError) as error:
        raise damaged(
            f"{where}", f"its record, `{RECORD}/metadata`, cannot be read: {error}"
        ) from error
    return Manifest.from_json(record, f"{where}")


def _read_state(
    manager: Manager,
    where: Folder,
    opened: Opened,
    saved: Mapping[str, Leaf],
    kept: set[str],
) -> PyTree:
    """Restores the leaves that were saved; static and kept ones are the template's."""
    targets = {}
    for name, leaf in saved.items():
        template = opened.leaves[name]
        if leaf.is_stored and not hasattr(template, "dtype"):
            # A Python number, saved as an array.
            template = jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype))
        if leaf.is_stored:
            targets[name] = template
    arrays = _read_arrays(manager, where, targets, saved)
    leaves = []
    for name, leaf in opened.leaves.items():
        record = saved.get(name)
        if record is None:
            new = leaf
        elif record.is_stored:
            new = from_stored(arrays.pop(name), targets[name])
        elif record.shape is not None:
            kind = stored_type(leaf)
            new = from_stored(np.zeros(kind.shape, kind.dtype), leaf)
        elif hasattr(leaf, "dtype"):
            number = np.asarray(record.number, leaf.dtype)
            new = from_stored(to_stored(number), leaf)
        else:
            new = leaf if name in kept else record.number
        leaves.append(new)
    return opened.close(leaves)


def _read_arrays(
    manager: Manager,
    where: Folder,
    targets: Mapping[str, PyTree],
    saved: Mapping[str, Leaf],
) -> dict[str, PyTree]:
    """Reads arrays to where their templates lie, and compares them with their checksums."""
    ocp = orbax()
    if not targets:
        return {}
    types = {name: stored_type(leaf) for name, leaf in targets.items()}

    def how(kind: PyTree) -> PyTree:
        if kind.sharding is None:
            return ocp.RestoreArgs(restore_type=np.ndarray, dtype=kind.dtype)
        return ocp.ArrayRestoreArgs(
            sharding=kind.sharding, global_shape=kind.shape, dtype=kind.dtype
        )

    args = ocp.args.PyTreeRestore(
        item=types,
        restore_args={name: how(kind) for name, kind in types.items()},
        partial_restore=True,
    )
    try:
        arrays = manager.restore(
            int(where.name), args=ocp.args.Composite(**{ARRAYS: args})
        )[ARRAYS]
        arrays = {name: arrays[name] for name in targets}
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        fault = f"the arrays in {where / ARRAYS} cannot be read: {error!r}"
        raise damaged(f"{where}", fault) from error
    missing = [name for name, array in arrays.items() if not is_array(array)]
    if missing:  # with `partial_restore` Orbax returns what it was given
        raise damaged(f"{where}", f"`{ARRAYS}/_METADATA` does not list {missing}")
    for name, kind in types.items():
        if not is_numpy(targets[name]):
            arrays[name] = placed(arrays[name], kind.sharding)
    _check_contents(arrays, saved, f"{where}")
    return arrays


def _check_contents(
    arrays: Mapping[str, PyTree], saved: Mapping[str, Leaf], where: str
) -> None:
    processes = gather_results(lambda: checksums(arrays.values()))
    wrong = []
    for name, *parts in zip(arrays, *processes, strict=True):
        spans = spans_processes(arrays[name])
        found = sum(parts) % 2**32 if spans else parts[jax.process_index()]
        if found != saved[name].value:
            wrong.append(f"`{name}`")
    if wrong:
        shown = ", ".join(wrong[:5])
        raise damaged(where, f"what was read for {shown} is not what was saved")
