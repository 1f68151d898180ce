"""Writing checkpoints and reading them, through Orbax."""

import contextlib
import os
import pathlib
from typing import IO

import jax
from jaxtyping import PyTree

from mpx._jax._arguments import as_count
from mpx._jax._processes import gather_results
from mpx.checkpoint._manifest import Packed, pack
from mpx.checkpoint._restore import (
    ARRAYS,
    RECORD,
    Fields,
    Folder,
    Manager,
    Path,
    absolute,
    manager,
    orbax,
    read,
    reader,
    while_others_write,
)

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_OWN = {
    "max_to_keep": "pass `keep`",
    "enable_async_checkpointing": "pass `asynchronous`",
    **dict.fromkeys(["create", "cleanup_tmp_directories"], "the first `save` does so"),
    **dict.fromkeys(
        ["step_prefix", "step_format_fixed_length", "step_name_format"],
        "the folder of a checkpoint has the number of its step",
    ),
}
"""Options of Orbax that a `Checkpointer` sets, and what to do instead."""
_writing: dict[str, Manager] = {}
"""The managers of this process that write, by folder."""
_locks: dict[str, IO[str]] = {}
"""The files whose locks this process holds, by folder."""


class Checkpointer:
    """Writes checkpoints of one run into a folder while training goes on.

    `save` copies the state to the host and returns; a thread of Orbax writes it. A process
    that is killed leaves the last complete checkpoint as it was. Leave the `with` block, or
    call `close`, to wait for the last one.

    Nothing in the folder changes before the first `save`, so other processes may read while
    one job writes. A second process that writes to the same folder gets an error, unless the
    file system has no locks, as object stores: give each job its own folder.

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
        for name in filter(_OWN.get, options):
            raise TypeError(f"`{name}` cannot be chosen: {_OWN[name]}.")
        keep = None if keep is None else as_count(keep, "keep", at_least=1)
        self._path = absolute(path)
        self._options = {**options, "max_to_keep": keep}
        self._asynchronous, self._read_only = asynchronous, read_only
        self._is_writer = False
        self._manager = reader(self._path, self._options)

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
        self._check_writes("saved")
        self._check_metrics(metrics)
        latest = self._manager.latest_step()
        is_next = latest is None or step > latest
        if is_next and not force and not self._manager.should_save(step):
            if not self._manager.is_saving_in_progress():
                self.wait()  # raises if the checkpoint before was not written
            return False
        packed: list[Packed] = []

        def prepare() -> PyTree:
            self.wait()
            packed.append(pack(state))
            return [packed[0].rows, self._is_writer]

        found = gather_results(prepare)
        manifest, arrays = packed[0].agreed([rows for rows, _ in found])
        if not all(is_writer for _, is_writer in found):
            self._become_writer()
        latest = self._manager.latest_step()
        if latest is not None and step <= latest:
            raise ValueError(
                f"{self._path} has a checkpoint of step {latest}, so step {step} cannot be "
                "saved: `restore` takes the latest. Remove the later ones with "
                "`Checkpointer.delete(step)`, or save to another folder."
            )
        args = orbax().args
        items = {RECORD: args.JsonSave(manifest.to_json())}
        if arrays:
            items[ARRAYS] = args.PyTreeSave(arrays)
        if metrics is not None:
            metrics = jax.tree.map(
                lambda x: x.item() if hasattr(x, "item") else x, metrics
            )
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
        self.steps()  # those of another process, too
        place = self._manager, self._path
        return read(*place, template, step=step, partial=partial, fields=fields)

    def steps(self) -> list[int]:
        """Returns the numbers of the checkpoints, in order. Waits for one being written."""
        self.wait()
        if not self._is_writer:
            while_others_write(self._manager.reload)  # another process may write
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
        self._check_writes("removed")
        self.wait()
        if not all(gather_results(lambda: self._is_writer)):
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

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_writes(self, what: str) -> None:
        if self._read_only:
            raise ValueError(
                f"Nothing can be {what}: the Checkpointer of {self._path} was made with "
                "`read_only=True`."
            )

    def _check_metrics(self, metrics: PyTree) -> None:
        needs = self._options.get("best_fn") is not None
        if needs and metrics is None:
            raise ValueError("`best_fn` compares metrics: pass `metrics` to `save`.")
        takes = needs or self._options.get("preservation_policy") is not None
        if metrics is not None and not takes:
            raise ValueError(
                "Metrics are stored for `best_fn` only: pass it to the Checkpointer."
            )

    def _become_writer(self) -> None:
        """Starts a manager that writes, which removes what a killed process left."""
        gather_results(lambda: jax.process_index() or _lock(self._path))
        earlier = _writing.get(str(self._path))
        if earlier is not None:
            earlier.wait_until_finished()  # of a Checkpointer that was not closed
        self._manager.close()
        self._manager = manager(
            self._path,
            **self._options,
            enable_async_checkpointing=self._asynchronous,
            cleanup_tmp_directories=True,
        )
        _writing[str(self._path)] = self._manager
        self._is_writer = True

    def _resign(self) -> None:
        if _writing.get(str(self._path)) is self._manager:
            del _writing[str(self._path)]
            if (file := _locks.pop(str(self._path), None)) is not None:
                file.close()
        self._is_writer = False

    def _fail(self, error: Exception) -> None:
        """Reads the folder anew after a failed write; the next `save` cleans up."""
        self._resign()
        writer, self._manager = self._manager, reader(self._path, self._options)
        with contextlib.suppress(Exception):  # that is `error` again
            writer.close()
        steps = sorted(self._manager.all_steps())
        error.add_note(
            f"The checkpoint was not written to {self._path}, which has those of the steps "
            f"{steps}."
        )


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
        TypeError: If a leaf has no values, as a `ShapeDtypeStruct`.
        ValueError: If there is a checkpoint of this step or of a later one, or if values
            that do not span processes differ between them.

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
