"""What a checkpoint records about itself, and whether it fits a template."""

import itertools
import json
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from mpx._jax._compat import __version__, is_tracer
from mpx._jax._tree import dtype_of, flatten_with_names, shape_of
from mpx._optim._state import FlashState
from mpx._scaling._loss_scaling import LossScaling
from mpx.checkpoint._leaves import (
    Opened,
    checksums,
    open_state,
    spans_processes,
    to_stored,
)

FORMAT = 3
"""The version of the format of checkpoints; raised when code of before could not read it."""
_SHOWN = 5
_REMEDY = (
    "Make the template with the code, the dtypes and the options that the checkpoint was "
    "saved with, and convert what is restored: `mpx.cast_tree` changes dtypes, "
    "`mpx.checkpoint.to_f32` and `from_f32` optimizer states. To restore a part of a "
    "checkpoint, pass `partial=True`. For numbers in fields of modules, pass "
    '`fields="template"` if they are options of the code, as the rate of a dropout, or '
    '`fields="saved"` if the run has changed them.'
)


class Leaf(NamedTuple):
    """What a leaf is, as a checkpoint records it."""

    dtype: str  # such as `bfloat16` or `key<fry>`; `int` and the like for a number
    shape: tuple[int, ...] | None  # `None` for a Python number
    value: PyTree = 0  # that of a Python number, or the checksum of an array

    @property
    def shown(self) -> str:
        """The leaf in an error message."""
        if self.shape is None:
            return f"a Python {self.dtype}"
        return f"{self.dtype}{list(self.shape)}"

    @property
    def is_stored(self) -> bool:
        """Whether there are bytes to store for it; empty arrays have none."""
        return self.shape is not None and 0 not in self.shape and self.dtype != "float0"

    @property
    def number(self) -> PyTree:
        """The Python scalar."""
        return complex(*self.value) if self.dtype == "complex" else self.value

    def restores(self, saved: "Leaf") -> bool:
        """Returns whether a saved leaf fits this one of a template.

        A Python number and an array of no axes fit each other if no digit is lost: a
        step count begins as a number and comes out of `jit` as an array.
        """
        if (self.dtype, self.shape) == (saved.dtype, saved.shape):
            return True
        number, array = (self, saved) if self.shape is None else (saved, self)
        if number.shape is not None or array.shape != ():
            return False
        try:
            dtype = jnp.dtype(array.dtype)
            is_alike = jnp.issubdtype(dtype, _KINDS[number.dtype])
            if number is self or not is_alike:
                return is_alike
            stored = np.asarray(number.number, dtype).item()
        except (TypeError, OverflowError):  # a PRNG key, float0, or too large
            return False
        return stored == number.number or number.number != number.number  # NaN


_KINDS = {
    "bool": np.bool_,
    "int": jnp.integer,
    "float": jnp.floating,
    "complex": jnp.complexfloating,
}


def _described(leaf: PyTree) -> Leaf | None:
    """Returns what a leaf is; `None` for functions, strings and other static leaves."""
    if type(leaf) in (bool, int, float, complex):
        value = [leaf.real, leaf.imag] if isinstance(leaf, complex) else leaf
        return Leaf(type(leaf).__name__, None, value)
    dtype = dtype_of(leaf)
    if dtype is None:
        return None
    name = "float0" if dtype == jax.dtypes.float0 else str(dtype)
    return Leaf(name, shape_of(leaf))


class Manifest(NamedTuple):
    """The record of a checkpoint."""

    leaves: dict[str, Leaf]  # by name, without static ones
    # Loss scalings and compressed states: the leaves of another one mean something else.
    nodes: dict[str, str]

    @classmethod
    def of(cls, state: PyTree, opened: Opened) -> "Manifest":
        """Describes a state."""
        found = {name: _described(leaf) for name, leaf in opened.leaves.items()}
        named, _ = flatten_with_names(state, is_leaf=_is_node)
        nodes = {}
        for name, node in named:
            if isinstance(node, LossScaling):
                nodes[name] = type(node).__name__
            elif isinstance(node, FlashState):
                layout = node.layout if isinstance(node.layout, dict) else {}
                kind = f"{'-'.join(node.moments)} {next(iter(layout), '')}"
                nodes[name] = f"FlashState {node.format} {kind}"
        return cls({name: x for name, x in found.items() if x is not None}, nodes)

    def to_json(self) -> dict[str, Any]:
        """Returns the record as it is written."""
        leaves = {name: leaf._asdict() for name, leaf in self.leaves.items()}
        record = {"format": FORMAT, "mpx": __version__, "nodes": self.nodes}
        record["leaves"] = leaves
        return {**record, "checksum": _checksum(record)}

    @classmethod
    def from_json(cls, record: PyTree, where: str) -> "Manifest":
        """Reads a record; raises if it is of another version, or damaged."""
        rest = dict(record)
        checksum = rest.pop("checksum", None)
        if (version := rest.get("format", FORMAT)) != FORMAT:
            raise ValueError(
                f"The checkpoint {where} has the format {version}, but mpx {__version__} "
                f"reads the format {FORMAT}. Install the version of mpx that wrote it."
            )
        if checksum != _checksum(rest):
            raise damaged(where, "its record, `mpx/metadata`, was changed")
        leaves = {name: Leaf(**leaf) for name, leaf in rest["leaves"].items()}
        for name, leaf in leaves.items():
            if leaf.shape is not None:
                leaves[name] = leaf._replace(shape=tuple(leaf.shape))
        return cls(leaves, rest["nodes"])

    def check(
        self, template: "Manifest", where: str, fields: set[str], *, partial: bool
    ) -> None:
        """Raises unless a template has what this checkpoint has; names the differences.

        The values of the numbers in `fields` must agree, too.
        """
        names = dict.fromkeys([*template.nodes, *template.leaves])
        if not partial:
            names |= dict.fromkeys([*self.nodes, *self.leaves])
        faults = []
        for name in names:
            saved, wanted = self.leaves.get(name), template.leaves.get(name)
            came, expected = self._shown(name), template._shown(name)
            if saved and wanted and wanted.restores(saved):
                numbers = [x.number for x in (saved, wanted) if x.shape is None]
                if name in fields and len({*map(repr, numbers)}) == 2:
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


def damaged(where: str, what: str) -> ValueError:
    """Returns the error for a checkpoint whose files are not as they were written."""
    return ValueError(
        f"The checkpoint {where} is damaged: {what}. Restore another one with `step=`, and "
        "remove this one with `Checkpointer.delete`."
    )


def _checksum(record: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def _is_node(node: object) -> bool:
    return isinstance(node, LossScaling | FlashState)


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
        for rows in zip(*processes, strict=True):
            (name, _, spans, _), values = rows[0], [row[3] for row in rows]
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
    for name, leaf in opened.leaves.items():
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
    leaves = manifest.leaves
    names = [name for name, leaf in leaves.items() if leaf.is_stored]
    stored = {name: to_stored(opened.leaves[name]) for name in names}
    for name, value in zip(names, checksums(stored.values()), strict=True):
        leaves[name] = leaves[name]._replace(value=value)
    return Packed(manifest, stored)
