"""What a checkpoint records about itself, and whether it fits a template."""

import itertools
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from mpx._jax._compat import is_tracer
from mpx._jax._tree import flatten_with_names
from mpx._jax._version import __version__
from mpx._optim._state import FlashState
from mpx._scaling._loss_scaling import LossScaling
from mpx.checkpoint._leaves import (
    Leaf,
    Opened,
    checksums,
    describe,
    open_state,
    spans_processes,
    to_stored,
)

FORMAT = 3
"""The version of the format of checkpoints; raised when code of before could not read it."""
Json = dict[str, Any]
_SHOWN = 5
_REMEDY = (
    "Make the template with the code, the dtypes and the options that the checkpoint was "
    "saved with, and convert what is restored: `mpx.cast_tree` changes dtypes, "
    "`mpx.checkpoint.to_f32` and `from_f32` optimizer states. To restore a part of a "
    "checkpoint, pass `partial=True`. For numbers in fields of modules, pass "
    '`fields="template"` if they are options of the code, as the rate of a dropout, or '
    '`fields="saved"` if the run has changed them.'
)


class Manifest(NamedTuple):
    """The record of a checkpoint.

    Attributes:
        leaves: What each leaf is, by name. Static leaves are not among them.
        nodes: What each loss scaling and each state of a compressed optimizer is, by name:
            their leaves would mean something else in another one.
    """

    leaves: dict[str, Leaf]
    nodes: dict[str, str]

    @classmethod
    def of(cls, state: PyTree, opened: Opened) -> "Manifest":
        """Describes a state."""
        found = zip(opened.names, map(describe, opened.leaves), strict=True)
        named, _ = flatten_with_names(state, is_leaf=_is_node)
        return cls(
            {name: leaf for name, leaf in found if leaf is not None},
            {name: _described(node) for name, node in named if _is_node(node)},
        )

    def to_json(self) -> Json:
        """Returns the record as it is written."""
        leaves = {name: leaf._asdict() for name, leaf in self.leaves.items()}
        record = {"format": FORMAT, "mpx": __version__, "nodes": self.nodes}
        record["leaves"] = leaves
        return {**record, "checksum": _checksum(record)}

    @classmethod
    def from_json(cls, record: PyTree, where: str) -> "Manifest":
        """Reads a record; raises if it is of another version, or damaged."""
        try:
            rest = {key: value for key, value in record.items() if key != "checksum"}
            if rest["format"] != FORMAT:
                raise ValueError(
                    f"The checkpoint {where} has the format {rest['format']}, but mpx "
                    f"{__version__} reads the format {FORMAT}. Install the version of mpx "
                    "that wrote it."
                )
            if record["checksum"] != _checksum(rest):
                raise damaged(where, "its record, `mpx/metadata`, was changed")
            leaves = {name: Leaf(**leaf) for name, leaf in rest["leaves"].items()}
            for name, leaf in leaves.items():
                if leaf.shape is not None:
                    leaves[name] = leaf._replace(shape=tuple(leaf.shape))
            return cls(leaves, rest["nodes"])
        except (AttributeError, KeyError, TypeError) as error:
            raise damaged(
                where, f"its record, `mpx/metadata`, is incomplete: {error!r}"
            ) from error

    def check(
        self, template: "Manifest", where: str, fields: Iterable[str], *, partial: bool
    ) -> None:
        """Raises unless a template has what this checkpoint has; names the differences.

        `fields` are the leaves that configure modules and whose values must agree, too.
        `partial` allows more than the template has.
        """
        names = dict.fromkeys([*template.nodes, *template.leaves])
        if not partial:
            names |= dict.fromkeys([*self.nodes, *self.leaves])
        faults = []
        for name in names:
            saved, wanted = self.leaves.get(name), template.leaves.get(name)
            came, expected = self._shown(name), template._shown(name)
            if saved and wanted and wanted.restores(saved):
                numbers = saved.number, wanted.number
                is_number = saved.shape is None is wanted.shape
                if (
                    name in fields
                    and is_number
                    and repr(numbers[0]) != repr(numbers[1])
                ):
                    faults.append(
                        f"`{name}` was {numbers[0]}, but is {numbers[1]} in the template"
                    )
            elif came != expected:
                faults.append(f"`{name}` is {came}, but the template has {expected}")
        if faults:
            if len(faults) > _SHOWN:
                faults[_SHOWN:] = [f"and {len(faults) - _SHOWN} more"]
            lines = "".join(f"\n  - {fault}" for fault in faults)
            raise ValueError(
                f"The checkpoint {where} does not fit the template:{lines}\n{_REMEDY}"
            )

    def _shown(self, name: str) -> str:
        if name in self.leaves:
            return self.leaves[name].shown
        return self.nodes.get(name, "nothing")

    def check_contents(self, found: Mapping[str, int], where: str) -> None:
        """Raises unless arrays have the checksums with which they were saved."""
        wrong = [name for name, x in found.items() if x != self.leaves[name].value]
        if wrong:
            shown = ", ".join(f"`{name}`" for name in wrong[:_SHOWN])
            raise damaged(where, f"what was read for {shown} is not what was saved")


def damaged(where: str, what: str) -> ValueError:
    """Returns the error for a checkpoint whose files are not as they were written."""
    return ValueError(
        f"The checkpoint {where} is damaged: {what}. Restore another one with `step=`, and "
        "remove this one with `Checkpointer.delete`."
    )


def _checksum(record: Json) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def _is_node(node: object) -> bool:
    return isinstance(node, LossScaling | FlashState)


def _described(node: LossScaling | FlashState) -> str:
    if isinstance(node, LossScaling):
        return type(node).__name__
    layout = next(iter(node.layout), "") if isinstance(node.layout, dict) else ""
    return f"FlashState {node.format} {'-'.join(node.moments)} {layout}"


# --- Saving ---------------------------------------------------------------------------


class Packed(NamedTuple):
    """What a process saves: the record, and arrays by name."""

    manifest: Manifest
    stored: dict[str, PyTree]

    @property
    def rows(self) -> list[list[PyTree]]:
        """For each leaf its name, its kind, whether it spans processes, and its value."""
        return [
            [name, leaf.shown, spans_processes(self.stored.get(name)), leaf.value]
            for name, leaf in self.manifest.leaves.items()
        ]

    def agreed(
        self, processes: Sequence[list[list[PyTree]]]
    ) -> tuple[Manifest, dict[str, PyTree]]:
        """Returns the record and the arrays to write, given the rows of all processes.

        The checksum of an array that lies on several processes is the sum of theirs. All
        other leaves must be equal: those of the first process are written.
        """
        for number, rows in enumerate(processes):
            for one, other in itertools.zip_longest(processes[0], rows):
                if one is None or other is None or one[:3] != other[:3]:
                    raise ValueError(
                        "All processes must save states of the same structure, but "
                        f"process {number} has {other and other[:2]} where process 0 has "
                        f"{one and one[:2]}."
                    )
        leaves = dict(self.manifest.leaves)
        for (name, _, spans, first), *others in zip(*processes, strict=True):
            values = [first, *(row[3] for row in others)]
            if spans:
                leaves[name] = leaves[name]._replace(value=sum(values) % 2**32)
            elif len(set(map(repr, values))) > 1:  # NaN is not equal to itself
                raise ValueError(
                    f"`{name}` differs between processes, and only the value of one can be "
                    "saved. Make it an array over all processes with "
                    "`jax.make_array_from_process_local_data`, or derive it from what they "
                    "share and `jax.process_index()`."
                )
        arrays = {
            name: np.asarray(x) if len(processes) > 1 and not spans_processes(x) else x
            for name, x in self.stored.items()
        }
        return Manifest(leaves, self.manifest.nodes), arrays


def pack(state: PyTree) -> Packed:
    """Returns what this process saves of a state."""
    opened = open_state(state)
    named = dict(zip(opened.names, opened.leaves, strict=True))
    for name, leaf in named.items():
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(
                f"`{name}` is a ShapeDtypeStruct, which has no values to save. Pass the "
                "state itself; a template is for `restore`."
            )
        if is_tracer(leaf):
            raise TypeError(
                f"`{name}` is traced: checkpoints are written outside of `jit`."
            )
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ValueError(
                f"`{name}` was deleted, probably donated to a step. Save the state that "
                "the step returned."
            )
    manifest = Manifest.of(state, opened)
    stored = {
        name: to_stored(named[name])
        for name, leaf in manifest.leaves.items()
        if leaf.is_stored
    }
    for name, value in zip(stored, checksums(stored.values()), strict=True):
        manifest.leaves[name] = manifest.leaves[name]._replace(value=value)
    return Packed(manifest, stored)
