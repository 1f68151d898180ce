"""Which process writes to a folder of checkpoints.

Object stores and many network file systems have no locks, and a lock must not outlive a
process that is killed. So a writer puts its name into a file, and reads it before each
checkpoint. Who comes later may replace the name, unless the writer is known to run: then the
earlier writer finds another name than its own, and stops.
"""

import contextlib
import datetime
import json
import os
import pathlib
import socket
import uuid
from typing import Any

_FILE = ".mpx-writer"


class Claim:
    """The right of a job to write to a folder. Only process 0 of a job holds it."""

    def __init__(self, folder: Any) -> None:
        self._folder = folder
        self._mine: dict[str, Any] | None = None

    def hold(self) -> bool:
        """Makes sure that this job is the writer, and returns whether it became it now.

        Raises:
            RuntimeError: If another process writes to the folder.
        """
        found = self._read()
        if self._mine is not None and found == self._mine:
            return False
        if self._mine is not None and found is not None:
            raise RuntimeError(
                f"{_shown(found)} has taken over {self._folder}, so this process stops "
                f"writing checkpoints to it. {_REMEDY}"
            )
        if found is not None and found["pid"] != os.getpid() and _runs(found):
            raise RuntimeError(
                f"{_shown(found)} writes checkpoints to {self._folder}. {_REMEDY}"
            )
        self._mine = {
            "token": uuid.uuid4().hex,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process": _identity(os.getpid()),
            "since": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / _FILE).write_text(json.dumps(self._mine))
        return True

    def is_lost(self) -> bool:
        """Returns whether another process has replaced this writer."""
        return self._mine is not None and self._read() not in (None, self._mine)

    def release(self) -> None:
        """Lets others write."""
        if self._mine is not None and self._read() == self._mine:
            with contextlib.suppress(FileNotFoundError):
                (self._folder / _FILE).unlink()
        self._mine = None

    def _read(self) -> dict[str, Any] | None:
        try:
            found = json.loads((self._folder / _FILE).read_text())
            return (
                found
                if {"token", "host", "pid", "process", "since"} <= {*found}
                else None
            )
        except (FileNotFoundError, TypeError, ValueError):
            return None  # nobody, or one who was killed while writing it


_REMEDY = "End one of the two, or give each its own folder."


def _shown(writer: dict[str, Any]) -> str:
    who = "Checkpointer of this process" if writer["pid"] == os.getpid() else "process"
    return f"Another {who} (pid {writer['pid']} on {writer['host']}, since {writer['since']})"


def _runs(writer: dict[str, Any]) -> bool:
    """Returns whether a writer is known to run: on this machine, under Linux."""
    return writer["process"] is not None and writer["process"] == _identity(
        writer["pid"]
    )


def _identity(pid: int) -> list[str] | None:
    """Returns what tells a process from all others, also from a later one of its number.

    These are the boot of the machine and the tick at which the process was started.
    """
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # The name in parentheses may hold spaces; the tick is the 20th field after it.
        fields = (
            pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        )
        is_dead = fields[0] in ("Z", "X")  # killed, but not yet waited for
        return None if is_dead else [boot, fields[19]]
    except OSError:
        return None
