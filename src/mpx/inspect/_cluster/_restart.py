"""Save, kill, restore: whether a job that dies ends with the same bits."""

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import tempfile
from typing import Any, NoReturn

import jax
from jaxtyping import PyTree

from mpx.checkpoint._checkpointer import Checkpointer
from mpx.inspect._cluster._checks import Check
from mpx.inspect._cluster._exchange import digests, gather
from mpx.inspect._cluster._training import STEPS, Training

SAVED, RESTARTED = "save and restore", "kill and restart"


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a job must come to, from an undisturbed run.

    Attributes:
        devices: How many devices it had.
        saved: The hash of the state in the checkpoint.
        end: The hash of the state at the end.
    """

    devices: int
    saved: str
    end: str


class Restart:
    """The folder of a job that is killed and started again.

    Process 0 alone reads and writes the record of what to expect and tells the others, so
    that nothing depends on how soon a shared file system shows a new file.
    """

    def __init__(self, training: Training, directory: str | None) -> None:
        """Finds out where this start of the job stands.

        Args:
            training: The training run.
            directory: A folder that all processes see, or `None`.
        """
        self._training = training
        self._temporary = None
        self._undisturbed: tuple[Expected, PyTree] | None = None
        if directory is None and jax.process_count() == 1:
            self._temporary = tempfile.TemporaryDirectory()
            directory = self._temporary.name
        # A name of its own: it is removed at the end.
        self.folder: pathlib.Path | None = None
        if directory is not None:
            self.folder = pathlib.Path(directory).absolute() / "mpx-doctor"
        record = None
        if self.folder and jax.process_index() == 0:
            path = self.folder / "expected.json"
            record = json.loads(path.read_text()) if path.exists() else None
            if record is None:
                shutil.rmtree(self.folder, ignore_errors=True)
        record = gather(record)[0]
        self.expected = None if record is None else Expected(**record)

    @property
    def can_kill(self) -> bool:
        """Whether this start has saved and restored, so that a kill can follow."""
        return self._undisturbed is not None

    def check(self) -> list[Check]:
        """Saves, restores and compares; or goes on where a killed job left off."""
        try:
            return self._check()
        except ImportError as error:  # on all processes, or versions would differ
            return [Check(SAVED, None, f"not run: {error}")]

    def _check(self) -> list[Check]:
        if self.folder is None:
            why = "not run: pass `--directory`, a folder that all processes see"
            return [Check(SAVED, None, why)]
        unseen = self._unseen()
        if unseen:
            text = (
                f"{self.folder} is not one folder: the processes {unseen} do not see it"
            )
            return [Check(SAVED, False, text)]
        calm = self._training.calm(STEPS)
        saved, _ = self._training.run(self._training.start(), 0, calm)
        end, _ = self._training.run(saved, STEPS, calm)
        now = Expected(self._training.mesh.size, self._digest(saved), self._digest(end))
        if self.expected is not None:
            return [self._resume(self.expected, now)]
        with Checkpointer(self.folder / "run") as checkpoints:
            checkpoints.save(STEPS, saved)
            restored, found = self._go_on(checkpoints)
        same = (restored, found) == (now.saved, now.end)
        self._undisturbed = (now, end) if same else None
        text = f"{STEPS} steps, checkpoint, {STEPS} steps: {now.end}; restored: {found}"
        return [
            Check(SAVED, same, text),
            Check(RESTARTED, None, "not run: pass `--kill N`"),
        ]

    def kill(self, process: int) -> NoReturn:
        """Ends one process while a second checkpoint is being written.

        The others go on, as they would in a real job: what becomes of them is up to JAX
        and to the launcher.
        """
        assert self.folder is not None
        assert self._undisturbed is not None
        expected, end = self._undisturbed
        if jax.process_index() == 0:
            record = json.dumps(dataclasses.asdict(expected))
            (self.folder / "part").write_text(record)
            (self.folder / "part").replace(self.folder / "expected.json")
        gather(None)  # the record is there
        checkpoints = Checkpointer(self.folder / "run")
        checkpoints.save(2 * STEPS, end)
        if jax.process_index() == process:
            os.kill(os.getpid(), signal.SIGKILL)
        checkpoints.close()
        gather(None)  # waits for the dead process
        raise RuntimeError(f"Process {process} was to be killed, but it answers.")

    def end(self, *, keep: bool) -> None:
        """Removes the folder, unless it is kept, so that the next start is a first one."""
        if self.folder is not None and not keep:
            gather(None)  # nobody reads it any more
            if jax.process_index() == 0:
                shutil.rmtree(self.folder, ignore_errors=True)
        if self._temporary is not None:
            self._temporary.cleanup()

    def _unseen(self) -> list[int]:
        """Returns the processes that do not read what process 0 writes."""
        assert self.folder is not None
        token, path = gather(os.urandom(8).hex())[0], self.folder / "token"
        if jax.process_index() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            path.write_text(token)
        gather(None)  # it is written
        sees = path.exists() and path.read_text() == token
        return [i for i, seen in enumerate(gather(sees)) if not seen]

    def _resume(self, expected: Expected, now: Expected) -> Check:
        assert self.folder is not None
        if expected.devices != now.devices:
            text = (
                f"the job that was killed had {expected.devices} devices, this one has "
                f"{now.devices}: restart it as it was, or remove {self.folder}"
            )
            return Check(RESTARTED, False, text)
        with Checkpointer(self.folder / "run") as checkpoints:
            step = checkpoints.latest()
            restored, found = self._go_on(checkpoints)
        wanted = expected.saved if step == STEPS else expected.end
        text = f"resumed after step {step} of {2 * STEPS}: "
        if restored != wanted:
            text += f"the restored state is {restored}, but {wanted} was saved"
        elif found != expected.end:
            text += f"ended with {found}, but the undisturbed run with {expected.end}"
            if now.end != expected.end:
                text += (
                    f" (and this start, undisturbed, with {now.end}: the programs of two "
                    "starts differ. On GPUs set XLA_FLAGS=--xla_gpu_deterministic_ops=true)"
                )
        else:
            text += f"ended with {found}, as the undisturbed run"
        return Check(RESTARTED, (restored, found) == (wanted, expected.end), text)

    def _go_on(self, checkpoints: Checkpointer) -> tuple[str, str]:
        """Restores the latest checkpoint and trains to the end; returns both hashes."""
        state = checkpoints.restore(self._training.template())
        restored = self._digest(state)
        if checkpoints.latest() == STEPS:
            calm = self._training.calm(STEPS)
            state, _ = self._training.run(state, STEPS, calm)
        return restored, self._digest(state)

    def _digest(self, state: PyTree) -> Any:
        """Returns the hash of a state, the same on all processes."""
        return "+".join(
            sorted(
                {x for row in gather(digests(state, self._training.mesh)) for x in row}
            )
        )
