"""What a checkpoint records about a training state, and whether that fits a template."""

import collections
import itertools
import json
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr
from jaxtyping import PyTree

from mpx._jax._compat import __version__, is_tracer
from mpx._jax._nnx import nnx_module, put_back, take_out
from mpx._jax._processes import gather_results
from mpx._jax._tree import dtype_of, flatten_with_names, path_name, types_around
from mpx._optim._state import FlashState
from mpx._scaling._loss_scaling import LossScaling
from mpx.checkpoint._leaves import checksums, spans_processes, to_stored

FORMAT = 3
"""The version of the format of checkpoints; raised when code of before could not read it."""
_SHOWN = 5
_NUMBERS = (bool, int, float, complex)
_REMEDY = (
    "Make the template with the code, dtypes and options that the checkpoint was saved with, "
    "and convert what is restored: `mpx.cast_tree` changes dtypes, `mpx.checkpoint.to_f32` "
    "and `from_f32` optimizer states. To restore a part, pass `partial=True`. For numbers in "
    'fields of modules, pass `fields="template"` if they are options of the code, as the '
    'rate of a dropout, or `fields="saved"` if the run has changed them.'
)


class Leaf(NamedTuple):
    """What a leaf is, as a checkpoint records it."""

    dtype: str  # such as `bfloat16` or `key<fry>`; `int` and the like for a number
    shape: list[int] | None  # `None` for a Python number
    value: PyTree = 0  # that of a Python number, or the checksum of an array

    @property
    def shown(self) -> str:
        """The leaf in an error message."""
        is_number = self.shape is None
        return f"a Python {self.dtype}" if is_number else f"{self.dtype}{self.shape}"

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
        if number.shape is not None or array.shape != []:
            return False
        try:
            dtype = jnp.dtype(array.dtype)
            fits = type(np.zeros((), dtype).item()).__name__ == number.dtype
            if fits and number is saved:
                stored = np.asarray(number.number, dtype).item()
                fits = stored == number.number or number.number != number.number  # NaN
        except (TypeError, OverflowError):  # a PRNG key, float0, or too large
            return False
        return fits


class Manifest(NamedTuple):
    """The record of a checkpoint."""

    leaves: dict[str, Leaf]  # by name, without static ones
    # Loss scalings and compressed states: the leaves of another one mean something else.
    nodes: dict[str, str]

    def to_json(self) -> dict[str, PyTree]:
        """Returns the record as it is written."""
        leaves = {name: leaf._asdict() for name, leaf in self.leaves.items()}
        record = dict(format=FORMAT, mpx=__version__, nodes=self.nodes, leaves=leaves)
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
        faults, parts = [], (self._parts, template._parts)
        if all(parts) and not {*parts[0]} & {*parts[1]}:
            holds, has = (", ".join(f"`{x}`" for x in part) for part in parts)
            faults.append(f"it holds {holds}, but the template {has}")
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

    @property
    def _parts(self) -> list[str]:
        """The names of the top level."""
        return [*dict.fromkeys(name.partition("/")[0] for name in self.leaves)]

    def _shown(self, name: str) -> str:
        if name in self.leaves:
            return self.leaves[name].shown
        return self.nodes.get(name, "nothing")


def damaged(where: object, what: str) -> ValueError:
    """Returns the error for a checkpoint whose files are not as they were written."""
    return ValueError(
        f"The checkpoint {where} is damaged: {what}. Restore another one with `step=`, and "
        "remove this one with `Checkpointer.delete`."
    )


def _checksum(record: dict[str, PyTree]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


# --- Training states ------------------------------------------------------------------


class Opened(NamedTuple):
    """A training state as a flat list, with NNX objects taken apart."""

    leaves: dict[str, PyTree]  # by unique names such as `model/layers/0/weight`
    manifest: Manifest
    fields: set[str]  # numbers in fields of Equinox modules: options, maybe
    close: Callable[[Sequence[PyTree]], PyTree]  # for other leaves, NNX made anew


def open_state(state: PyTree) -> Opened:
    """Flattens and describes a training state, which may hold NNX objects."""
    plain, objects = take_out(state)
    graphdef, rest = None, None
    if objects:
        graphdef, rest = nnx_module().split(tuple(objects.values()))
    flat, structure = jax.tree_util.tree_flatten_with_path((plain, rest))
    owners = list(objects)

    def name_of(path: tuple[PyTree, ...], shown: Callable[[PyTree], str]) -> str:
        if path[0].idx == 0:
            return shown(path[1:])
        return "/".join(filter(None, (owners[path[1].key], shown(path[2:]))))

    def close(leaves: Sequence[PyTree]) -> PyTree:
        plain, rest = structure.unflatten(leaves)
        if not objects:
            return plain
        new = nnx_module().merge(graphdef, rest)
        return put_back(plain, dict(zip(objects, new, strict=True)))

    times = collections.Counter(name_of(path, path_name) for path, _ in flat)
    leaves, fields = {}, set()
    for (path, leaf), types in zip(flat, types_around(structure), strict=True):
        name = name_of(path, path_name)
        if times[name] > 1:  # a key with a slash may look like nested ones
            name = name_of(path, keystr)
        leaves[name] = leaf
        holders = [x for x in types if x not in (dict, list, tuple)]
        if type(leaf) in _NUMBERS and holders and issubclass(holders[-1], eqx.Module):
            fields.add(name)
    described = {name: _described(leaf) for name, leaf in leaves.items()}
    named, _ = flatten_with_names(
        state, is_leaf=lambda x: isinstance(x, LossScaling | FlashState)
    )
    manifest = Manifest(
        {name: leaf for name, leaf in described.items() if leaf is not None},
        {name: kind for name, node in named if (kind := _kind(node))},
    )
    return Opened(leaves, manifest, fields, close)


def _described(leaf: PyTree) -> Leaf | None:
    """Returns what a leaf is; `None` for functions, strings and other static leaves."""
    if type(leaf) in _NUMBERS:
        value = [leaf.real, leaf.imag] if isinstance(leaf, complex) else leaf
        return Leaf(type(leaf).__name__, None, value)
    dtype = dtype_of(leaf)
    if dtype is None:
        return None
    name = "float0" if dtype == jax.dtypes.float0 else str(dtype)
    return Leaf(name, list(leaf.shape))


def _kind(node: PyTree) -> str | None:
    """Returns what a loss scaling or a compressed state is; `None` for leaves."""
    if isinstance(node, FlashState):
        layout = node.layout if isinstance(node.layout, dict) else {}
        moments = "-".join(node.moments)
        return f"FlashState {node.format} {moments} {next(iter(layout), '')}"
    return type(node).__name__ if isinstance(node, LossScaling) else None


def pack(state: PyTree, wait: Callable[[], None]) -> tuple[Manifest, dict[str, PyTree]]:
    """Calls `wait`, and returns the record and the arrays to write.

    The checksum of an array that lies on several processes is the sum of theirs. All
    other leaves must be equal: those of the first process are written.
    """
    manifest, stored = Manifest({}, {}), dict[str, PyTree]()

    def prepare() -> list[list[PyTree]]:
        nonlocal manifest, stored
        wait()
        manifest, stored = _pack_own(state)
        return [
            [name, leaf.shown, spans_processes(stored.get(name)), leaf.value]
            for name, leaf in manifest.leaves.items()
        ]

    processes = gather_results(prepare)
    leaves = manifest.leaves
    nothing = ["", "nothing", None, None]
    for rows in itertools.zip_longest(*processes, fillvalue=nothing):
        (name, _, spans, _), values = rows[0], [row[3] for row in rows]
        for number, row in enumerate(rows):
            if row[:3] != rows[0][:3]:
                raise ValueError(
                    "All processes must save states of the same structure, but process "
                    f"{number} has {row[:2]} where process 0 has {rows[0][:2]}."
                )
        if spans:
            leaves[name] = leaves[name]._replace(value=sum(values) % 2**32)
        elif len({*map(repr, values)}) > 1:  # NaN is not equal to itself
            raise ValueError(
                f"`{name}` differs between processes, and only the value of one can be "
                "saved. Make it an array over all processes with "
                "`jax.make_array_from_process_local_data`, or derive it from what they "
                "share and `jax.process_index()`."
            )
    if len(processes) > 1:
        for name, array in stored.items():
            stored[name] = array if spans_processes(array) else np.asarray(array)
    return manifest, stored


def _pack_own(state: PyTree) -> tuple[Manifest, dict[str, PyTree]]:
    """Returns the record and the arrays of this process."""
    opened = open_state(state)
    for name, leaf in opened.leaves.items():
        fault = None
        if isinstance(leaf, jax.ShapeDtypeStruct):
            fault = "is a ShapeDtypeStruct without values: a template is for `restore`"
        elif is_tracer(leaf):
            fault = "is traced: checkpoints are written outside of `jit`"
        elif isinstance(leaf, jax.Array) and leaf.is_deleted():
            fault = "was deleted, probably donated to a step: save what that returned"
        if fault is not None:
            raise TypeError(f"`{name}` {fault}.")
    leaves = opened.manifest.leaves
    names = [name for name, leaf in leaves.items() if leaf.is_stored]
    stored = {name: to_stored(opened.leaves[name]) for name in names}
    for name, value in zip(names, checksums(stored.values()), strict=True):
        leaves[name] = leaves[name]._replace(value=value)
    return opened.manifest, stored
