"""Writing checkpoints and reading them, through Orbax."""

import contextlib
import os
import pathlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import IO, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from mpx._jax._arguments import as_count, check_choice
from mpx._jax._processes import gather_results
from mpx._jax._tree import is_array
from mpx.checkpoint._leaves import (
    checksums,
    from_stored,
    placed,
    spans_processes,
    stored_type,
    to_stored,
)
from mpx.checkpoint._manifest import Leaf, Manifest, damaged, open_state, pack

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

ARRAYS, RECORD = "state", "mpx"  # the names of what a checkpoint consists of
Path = str | os.PathLike[str]
Folder = Any  # an `etils.epath.Path`
Manager = Any  # an `orbax.checkpoint.CheckpointManager`
Fields = Literal["saved", "template"]
# The managers of this process that write, and the files that it has locked, by folder.
_writing: dict[str, Manager] = {}
_locks: dict[str, IO[str]] = {}


class Checkpointer(contextlib.AbstractContextManager["Checkpointer"]):
    """Writes checkpoints of one run into a folder while training goes on.

    `save` copies the state to the host and returns; a thread of Orbax writes it. A process
    that is killed leaves the last complete checkpoint as it was. Leave the `with` block, or
    call `close`, to wait for the last one.

    Nothing in the folder changes before the first `save`: other processes may read while one
    job writes. A second job that writes gets an error, except in object stores, which have
    no locks.

    Examples:
        >>> import tempfile, jax.numpy as jnp
        >>> state = {"w": jnp.ones(2), "step": 0}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with Checkpointer(folder, keep=2) as checkpoints:
        ...         saved = [checkpoints.save(step, state) for step in range(3)]
        ...         print(checkpoints.steps(), checkpoints.restore(state)["step"])
        [1, 2] 0
    """

    def __init__(
        self,
        path: Path,
        *,
        keep: int | None = None,
        asynchronous: bool = True,
        read_only: bool = False,
        **options: object,
    ) -> None:
        """Looks for checkpoints in the folder, which need not exist.

        Args:
            path: The folder.
            keep: How many checkpoints stay; older ones, or worse ones with `best_fn`, are
                removed when a new one is complete. `None` keeps all.
            asynchronous: Whether `save` returns before everything is written.
            read_only: Whether `save` and `delete` are errors.
            **options: Options of `orbax.checkpoint.CheckpointManagerOptions`, such as
                `save_interval_steps`, `keep_period`, `best_fn` and `best_mode`.
        """
        own = "max_to_keep", "enable_async_checkpointing", "create", "step_", "cleanup_"
        for name in (x for x in options if x.startswith(own)):
            raise TypeError(
                f"`{name}` cannot be chosen: pass `keep` or `asynchronous`; the folder of a "
                "checkpoint has the number of its step, and the first save makes it."
            )
        keep = None if keep is None else as_count(keep, "keep", at_least=1)
        _orbax()
        from etils import epath  # a part of Orbax's interface, with object stores

        if not isinstance(path, str | os.PathLike):
            raise TypeError(
                f"The path must be a string or a path, but {type(path).__name__} was "
                "given. It comes first: `save(path, state)`."
            )
        self._path: Folder = epath.Path(path).expanduser().absolute()
        self._options = {**options, "max_to_keep": keep}
        self._asynchronous, self._read_only = asynchronous, read_only
        self._manager = self._open()

    def save(
        self, step: int, state: PyTree, *, metrics: PyTree = None, force: bool = False
    ) -> bool:
        """Saves a state, unless the options of Orbax say that this step is not saved.

        Waits for the checkpoint before if that is not written yet. Returns whether the
        state is saved.

        Args:
            step: The number of the checkpoint, larger than those that there are.
            state: Any training state; see `save`.
            metrics: What `best_fn` compares: numbers in any tree.
            force: Whether to save at every step, whatever the options say.
        """
        step = as_count(step, "step", at_least=0)
        compares = self._options.get("best_fn") is not None
        others = self._options.get("preservation_policy") is not None
        if compares != (metrics is not None) and (compares or not others):
            raise ValueError(
                "`best_fn` of the Checkpointer compares the `metrics` that `save` gets: "
                "pass both, or neither."
            )
        latest = self._manager.latest_step()
        is_next = latest is None or step > latest
        skips = not force and not self._read_only and is_next
        if skips and not self._manager.should_save(step):
            if not self._manager.is_saving_in_progress():
                self.wait()  # raises if the checkpoint before was not written
            return False
        manifest, arrays = pack(state, self.wait)
        self._become_writer()
        latest = self._manager.latest_step()
        if latest is not None and step <= latest:
            raise ValueError(
                f"{self._path} has a checkpoint of step {latest}, so step {step} cannot be "
                "saved: `restore` takes the latest. Remove the later ones with "
                "`Checkpointer.delete(step)`, or save to another folder."
            )
        args = _orbax().args
        items = {RECORD: args.JsonSave(manifest.to_json())}
        if arrays:
            items[ARRAYS] = args.PyTreeSave(arrays)
        metrics = jax.tree.map(lambda x: x.item() if hasattr(x, "item") else x, metrics)
        try:
            self._manager.save(
                step, args=args.Composite(**items), metrics=metrics, force=True
            )
        except Exception as error:
            self._fail(error)
            raise
        return True

    def restore(
        self,
        template: PyTree,
        *,
        step: int | None = None,
        partial: bool = False,
        fields: Fields | None = None,
    ) -> PyTree:
        """Restores a state; see `restore`. Waits for a checkpoint that is being written."""
        check_choice(fields, "fields", ("saved", "template", None))
        # Again, since the only one may be replaced by the next while they are listed.
        steps = self.steps() or self.steps()
        if not steps or (step is not None and step not in steps):
            which = "" if step is None else f" of step {step}"
            has = f", which has those of the steps {steps}" if steps else ""
            raise FileNotFoundError(
                f"There is no checkpoint{which} in {self._path}{has}."
            )
        number = steps[-1] if step is None else step
        where, opened = self._path / str(number), open_state(template)
        wanted = opened.manifest
        found: list[Manifest] = []

        def read_record() -> None:
            found.append(_read_manifest(where))
            compared = opened.fields if fields is None else set[str]()
            found[0].check(wanted, f"{where}", compared, partial=partial)

        try:
            gather_results(read_record)
            kept = opened.fields if fields == "template" else set[str]()
            leaves = ((name, found[0].leaves[name]) for name in wanted.leaves)
            # A number of the template may have been an array.
            saved = {k: x for k, x in leaves if x.shape is not None or k not in kept}
            return opened.close(self._read_leaves(where, opened.leaves, saved))
        except (FileNotFoundError, ValueError):
            alone = jax.process_count() == 1
            if step is not None or not alone or self.latest() in (None, number):
                raise
        # A writer has removed the checkpoint while it was read.
        return self.restore(template, partial=partial, fields=fields)

    def steps(self) -> list[int]:
        """Returns the numbers of the checkpoints, in order. Waits for one being written."""
        self.wait()
        if not self._is_writer:
            _while_others_write(self._manager.reload)  # another process may write
        return sorted(self._manager.all_steps())

    def latest(self) -> int | None:
        """Returns the number of the latest checkpoint, `None` if there is none."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """Returns the number of the best checkpoint, `None` if there is none."""
        if "best_fn" not in self._options:
            raise ValueError(
                "The best checkpoint is that with the best metrics: make the Checkpointer "
                "with `best_fn`, and pass `metrics` to `save`."
            )
        return self._manager.best_step() if self.steps() else None

    def metrics(self, step: int) -> PyTree:
        """Returns the metrics that were saved with a checkpoint, `None` without any."""
        return self._manager.metrics(step) if step in self.steps() else None

    def reached_preemption(self, step: int) -> bool:
        """Returns whether the scheduler ends the job: all processes are told."""
        return self._manager.reached_preemption(step)

    def delete(self, step: int) -> None:
        """Removes a checkpoint; one that is not there is a `FileNotFoundError`."""
        self.wait()
        self._become_writer()
        self._manager.delete(step)

    def wait(self) -> None:
        """Waits until everything is written. Raises what went wrong while writing."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._fail(error)
            raise

    def close(self) -> None:
        """Waits until everything is written, and ends the threads of Orbax."""
        try:
            self.wait()
        finally:
            self._resign()
            self._manager.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self, *, writes: bool = False) -> Manager:
        """Returns a manager; one that does not write changes nothing."""
        ocp, options = _orbax(), dict(self._options)
        options["cleanup_tmp_directories"] = writes
        options["enable_async_checkpointing"] = writes and self._asynchronous
        if not writes:  # `read_only` logs warnings
            options |= dict(create=False, async_options=None, save_root_metadata=False)
        options = ocp.CheckpointManagerOptions(**options)
        return _while_others_write(
            lambda: ocp.CheckpointManager(self._path, options=options)
        )

    def _become_writer(self) -> None:
        """Starts a manager that writes, which removes what a killed process left."""
        if self._read_only:
            raise ValueError(
                "Nothing can be saved or removed: the Checkpointer of "
                f"{self._path} was made with `read_only=True`."
            )
        if all(gather_results(lambda: self._is_writer)):
            return
        gather_results(lambda: jax.process_index() or _lock(self._path))
        earlier = _writing.get(str(self._path))
        if earlier is not None:
            earlier.wait_until_finished()  # of a Checkpointer that was not closed
        self._manager.close()
        _writing[str(self._path)] = self._manager = self._open(writes=True)

    @property
    def _is_writer(self) -> bool:
        """Whether no other Checkpointer of this process writes or has written since."""
        return _writing.get(str(self._path)) is self._manager

    def _resign(self) -> None:
        if self._is_writer:
            del _writing[str(self._path)]
            if (file := _locks.pop(str(self._path), None)) is not None:
                file.close()

    def _fail(self, error: Exception) -> None:
        """Reads the folder anew after a failed write; the next `save` cleans up."""
        self._resign()
        writer, self._manager = self._manager, self._open()
        with contextlib.suppress(Exception):  # that is `error` again
            writer.close()
        error.add_note(
            f"The checkpoint was not written to {self._path}, which has those of the steps "
            f"{sorted(self._manager.all_steps())}."
        )

    def _read_leaves(
        self, where: Folder, templates: Mapping[str, PyTree], saved: Mapping[str, Leaf]
    ) -> list[PyTree]:
        """Restores the leaves of these records; others are the template's."""
        targets = {
            name: leaf
            if hasattr(leaf := templates[name], "dtype")
            else jax.ShapeDtypeStruct((), jnp.dtype(record.dtype))  # a Python number
            for name, record in saved.items()
            if record.is_stored
        }
        arrays = self._read_arrays(where, targets, saved)
        leaves = dict(templates)
        for name, record in saved.items():
            leaf = targets.get(name, templates[name])
            if not hasattr(leaf, "dtype"):
                leaves[name] = record.number
                continue
            if record.is_stored:
                array = arrays.pop(name)
            elif record.shape is None:
                array = to_stored(np.asarray(record.number, leaf.dtype))
            else:  # without elements
                kind = stored_type(leaf)
                array = np.zeros(kind.shape, kind.dtype)
            leaves[name] = from_stored(array, leaf)
        return [*leaves.values()]

    def _read_arrays(
        self, where: Folder, targets: Mapping[str, PyTree], saved: Mapping[str, Leaf]
    ) -> dict[str, PyTree]:
        """Reads arrays to where their templates lie; compares them with their checksums."""
        ocp = _orbax()
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
            arrays = self._manager.restore(
                int(where.name), args=ocp.args.Composite(**{ARRAYS: args})
            )[ARRAYS]
            arrays = {name: arrays[name] for name in targets}
        except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
            fault = f"the arrays in {where / ARRAYS} cannot be read: {error!r}"
            raise damaged(where, fault) from error
        missing = [name for name, array in arrays.items() if not is_array(array)]
        if missing:  # with `partial_restore` Orbax returns what it was given
            raise damaged(where, f"`{ARRAYS}/_METADATA` does not list {missing}")
        arrays = {name: placed(x, targets[name]) for name, x in arrays.items()}
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
        return arrays


def _read_manifest(where: Folder) -> Manifest:
    if not (where / RECORD).exists():
        raise ValueError(
            f"{where} was not written by `mpx.checkpoint`: its record is missing. What "
            "Orbax wrote, Orbax restores: `orbax.checkpoint.StandardCheckpointer`."
        )
    try:
        record = _orbax().JsonCheckpointHandler().restore(where / RECORD)
    except (FileNotFoundError, ValueError) as error:
        fault = f"its record, `{RECORD}/metadata`, cannot be read: {error}"
        raise damaged(where, fault) from error
    return Manifest.from_json(record, f"{where}")


def _lock(folder: Folder) -> None:
    """Makes this process the only writer of a folder; its lock ends with it."""
    if fcntl is None or "://" in str(folder) or str(folder) in _locks:
        return
    folder.mkdir(parents=True, exist_ok=True)
    file = (pathlib.Path(str(folder)) / ".mpx-writer").open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        with file:
            raise RuntimeError(
                f"Another process (pid {file.read()}) writes checkpoints to {folder}. Give "
                "this one another folder, or end the other."
            ) from None
    except OSError:  # a file system without locks
        file.close()
        return
    file.truncate(0)
    file.write(f"{os.getpid()} on {os.uname().nodename}")
    file.flush()
    _locks[str(folder)] = file


def _while_others_write(call: Callable[[], Manager]) -> Manager:
    """Calls a function again if a checkpoint is removed between its list and its files."""
    for _ in range(99):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return call()
    return call()


def _orbax() -> ModuleType:
    """Imports Orbax when it is needed: `import mpx` must not."""
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError(
            "`mpx.checkpoint` writes with Orbax, which is not installed: "
            'pip install "mpx-jax[checkpoint]".'
        ) from error
    return orbax.checkpoint


def save(
    path: Path, state: PyTree, *, step: int | None = None, keep: int | None = None
) -> int:
    """Saves a training state, and returns when it is written.

    Saved are arrays of any dtype and sharding, typed PRNG keys, NumPy arrays and Python
    numbers, in any tree of any framework. Functions, strings and static fields are code:
    `restore` takes them from its template. Use a `Checkpointer` to go on with training
    while a checkpoint is written.

    Args:
        path: The folder of the run. Each checkpoint is a folder in it.
        state: The state.
        step: The number of the checkpoint, larger than those that there are; `None` is
            the next one.
        keep: How many checkpoints stay; see `Checkpointer`.

    Returns:
        The number of the checkpoint.

    Raises:
        TypeError: If a leaf has no values, as a `ShapeDtypeStruct`.
        ValueError: If there is a checkpoint of this step or of a later one, or if the
            processes have different values.

    Examples:
        >>> import tempfile, jax.numpy as jnp
        >>> from mpx.checkpoint import restore
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
    of `ShapeDtypeStruct`s, as `jax.eval_shape` and `eqx.filter_eval_shape` make it. A
    Python number and an array of no axes may stand for each other.

    Args:
        path: The folder of the run.
        template: A state of the same structure; NNX modules in the result are new.
        step: The number of the checkpoint; `None` is the latest.
        partial: Whether the checkpoint may hold more than the template: to restore the
            parameters alone, for example.
        fields: Where fields of Equinox modules that are Python numbers come from if they
            differ: `"saved"`, as numbers that the run changes, or `"template"`, as the
            rate of a dropout. `None` raises.

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
    with Checkpointer(path, read_only=True) as checkpoints:
        return checkpoints.restore(template, step=step, partial=partial, fields=fields)
