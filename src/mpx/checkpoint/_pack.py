"""What the processes of a job save: a record, and arrays for Orbax."""

import zlib
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import PyTree

from mpx._jax._processes import gather
from mpx.checkpoint._checksums import checksums
from mpx.checkpoint._leaves import open_state, spans_processes, to_rows, to_stored
from mpx.checkpoint._manifest import Manifest, check_arrays


class Packed(NamedTuple):
    """What a process saves.

    Attributes:
        manifest: The record, without contents.
        stored: The arrays, by name.
        contents: The value or the checksum of each leaf.
    """

    manifest: Manifest
    stored: dict[str, Any]
    contents: list[Any]

    @property
    def spanning(self) -> set[str]:
        """The names of the arrays that lie on several processes."""
        return {name for name, array in self.stored.items() if spans_processes(array)}

    @property
    def kinds(self) -> int:
        """A hash of what must be the same on all processes."""
        leaves = [(name, leaf[:2]) for name, leaf in self.manifest.leaves.items()]
        return zlib.crc32(repr((leaves, sorted(self.spanning))).encode())

    def for_orbax(self, rows: list[list[Any]]) -> tuple[Manifest, dict[str, Any]]:
        """Returns the record and the arrays to write, given the contents of all processes."""
        manifest = self.manifest.holding(rows, self.spanning)

        def written(name: str, array: Any) -> Any:
            if manifest.leaves[name].is_per_process:
                return to_rows(array)
            is_copy = len(rows) > 1 and name not in self.spanning
            return np.asarray(array) if is_copy else array  # Orbax takes the first's

        return manifest, {name: written(name, x) for name, x in self.stored.items()}


def pack(state: PyTree) -> Packed:
    opened = open_state(state)
    check_arrays(opened)
    manifest = Manifest.of(state, opened)
    stored = {
        name: to_stored(leaf)
        for name, leaf in zip(opened.names, opened.leaves, strict=True)
        if name in manifest.leaves and manifest.leaves[name].is_stored
    }
    sums = dict(zip(stored, checksums(stored.values()), strict=True))
    contents = [
        sums.get(name, 0) if leaf.shape is not None else leaf.contents[0]
        for name, leaf in manifest.leaves.items()
    ]
    return Packed(manifest, stored, contents)


def check_same_state(kinds: list[int], manifest: Manifest) -> None:
    """Raises if the processes save states of different structures."""
    if len({*kinds}) == 1:
        return
    shown = [f"`{name}`, {leaf.shown}" for name, leaf in manifest.leaves.items()]
    first, *others = map(set, gather(shown))
    for process, leaves in enumerate(others, 1):
        if kinds[process] != kinds[0]:
            only = [*(first - leaves), *(leaves - first)] or ["shardings"]
            raise ValueError(
                "All processes must save states of the same structure, but process "
                f"{process} and process 0 differ in {', '.join(sorted(only)[:5])}."
            )
