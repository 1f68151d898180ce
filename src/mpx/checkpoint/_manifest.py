"""What a checkpoint records about itself, and whether it fits a template."""

import dataclasses
import importlib.metadata
import json
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from mpx._jax._compat import is_tracer
from mpx._jax._processes import gather
from mpx._jax._tree import flatten_with_names
from mpx._jax._version import __version__
from mpx._jax._warn import warn
from mpx._optim import FlashState
from mpx._scaling._loss_scaling import LossScaling
from mpx.checkpoint._leaves import (
    Leaf,
    Opened,
    checksums,
    describe,
    open_state,
    python_scalar,
    spans_processes,
    to_rows,
    to_stored,
)

FORMAT = 2
"""The version of the format of checkpoints; raised when old code could not read new ones."""
Json = dict[str, Any]
_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The record of a checkpoint.

    Attributes:
        leaves: What each leaf is, by name. Static leaves are not among them.
        scalings: The type and the static options of each loss scaling, by name.
        compressed: The format of each state of a compressed optimizer, by name.
        versions: The versions of the packages that wrote it.
    """

    leaves: dict[str, Leaf]
    scalings: dict[str, Json]
    compressed: dict[str, Json]
    versions: dict[str, str]

    @classmethod
    def of(cls, state: PyTree, opened: Opened) -> "Manifest":
        """Describes a state."""
        found = zip(opened.names, map(describe, opened.leaves), strict=True)
        packages = ("jax", "jaxlib", "orbax-checkpoint")
        versions = {name: importlib.metadata.version(name) for name in packages}
        return cls(
            {name: leaf for name, leaf in found if leaf is not None},
            _options(state, LossScaling),
            _options(state, FlashState),
            {"mpx": __version__, **versions},
        )

    def holding(
        self, rows: Sequence[Sequence[PyTree]], spanning: Collection[str]
    ) -> "Manifest":
        """Returns the record with the contents of the leaves.

        `rows` are the values and checksums of each process, in the order of the leaves.
        The checksum of `spanning` arrays, which lie on several processes, is the sum.
        """
        leaves = {}
        for (name, leaf), *found in zip(self.leaves.items(), *rows, strict=True):
            if name in spanning:
                found = [sum(found) % 2**32]
            elif len(set(map(repr, found))) == 1:  # NaN is not equal to itself
                found = found[:1]
            leaves[name] = leaf._replace(contents=tuple(found))
        return dataclasses.replace(self, leaves=leaves)

    def to_json(self) -> Json:
        """Returns the record as it is written."""
        leaves = {
            name: {key: x for key, x in leaf._asdict().items() if x is not None}
            for name, leaf in self.leaves.items()
        }
        record = {"format": FORMAT, **dataclasses.asdict(self), "leaves": leaves}
        return {**record, "checksum": _checksum(record)}

    @classmethod
    def from_json(cls, record: PyTree, where: str) -> "Manifest":
        """Reads a record; raises if it was written by a newer version, or is damaged."""
        try:
            rest = {key: value for key, value in record.items() if key != "checksum"}
            if rest["format"] > FORMAT:
                raise ValueError(
                    f"The checkpoint {where} has the format {rest['format']}, but mpx "
                    f"{__version__} reads formats up to {FORMAT}. It was written by mpx "
                    f"{rest['versions']['mpx']}: install that version or a later one."
                )
            # Format 1 had no checksums.
            has_checksum = rest["format"] > 1 or "checksum" in record
            if has_checksum and record["checksum"] != _checksum(rest):
                raise damaged(where, "its record, `mpx/metadata`, was changed")
            leaves = {name: _leaf(leaf) for name, leaf in rest["leaves"].items()}
            return cls(leaves, rest["scalings"], rest["compressed"], rest["versions"])
        except (AttributeError, KeyError, TypeError) as error:
            raise damaged(
                where, f"its record, `mpx/metadata`, is incomplete: {error!r}"
            ) from error

    def check(
        self,
        template: "Manifest",
        where: str,
        *,
        partial: bool,
        spanning: Collection[str] = (),
    ) -> None:
        """Raises unless a template has the leaves of this checkpoint; names all differences.

        `partial` allows more leaves than the template has; `spanning` are those of its
        arrays that lie on several processes.
        """
        saved, wanted = self.leaves, template.leaves
        missing = [name for name in wanted if name not in saved]
        extra = [] if partial else [name for name in saved if name not in wanted]
        differ = [n for n in wanted if n in saved and not wanted[n].restores(saved[n])]
        changed = [
            *_scaling_faults(self.scalings, template.scalings, partial),
            *_layout_faults(self.compressed, template.compressed),
            *_listed(
                {
                    name: f"`{name}` is {saved[name].shown}, but the template has "
                    f"{wanted[name].shown}"
                    for name in differ
                }
            ),
        ]
        faults = [
            *changed,
            *_listed(
                {
                    name: f"`{name}` is missing: the template has {wanted[name].shown}"
                    for name in missing
                }
            ),
            *_listed(
                {
                    name: f"`{name}` is not expected: it holds {saved[name].shown}"
                    for name in extra
                }
            ),
        ]
        own = _process_faults([(n, saved[n]) for n in wanted if n in saved], spanning)
        if faults or own:
            lines = "".join(f"\n  - {fault}" for fault in [*faults, *own])
            remedy = _remedy(bool(changed), not missing) if faults else _OWN_REMEDY
            raise ValueError(
                f"The checkpoint {where} does not fit the template:{lines}\n{remedy}"
            )
        _warn_of_options(self.scalings, template.scalings, where)

    def check_fields(self, fields: Mapping[str, object], where: str) -> None:
        """Raises if fields of modules, Python numbers, are not those that were saved."""
        faults = {}
        for name, value in fields.items():
            saved, wanted = self.leaves.get(name), describe(value)
            if saved is None or wanted is None or saved.shape is not None:
                continue
            old = python_scalar(saved, jax.process_index())
            if wanted.shape is None and repr(old) != repr(value):
                faults[name] = f"`{name}` was {old}, but is {value} in the template"
        if faults:
            lines = "".join(f"\n  - {fault}" for fault in _listed(faults))
            raise ValueError(
                f"Fields of modules are not as in the checkpoint {where}:{lines}\n"
                'Pass `fields="template"` if they are options of the code, as the rate of a '
                'dropout, or `fields="saved"` if the run has changed them. Numbers that a '
                "run changes are better kept in arrays."
            )

    def check_contents(
        self,
        found: Mapping[str, Sequence[int]],
        spanning: Collection[str],
        where: str,
    ) -> None:
        """Raises unless arrays have the checksums with which they were saved."""
        wrong = []
        for name, sums in found.items():
            saved = self.leaves[name].contents
            total = [sum(sums) % 2**32] if name in spanning else [*sums]
            if saved and total != [*saved] * (len(total) // len(saved)):
                wrong.append(name)
        if wrong:
            shown = ", ".join(_listed({name: f"`{name}`" for name in wrong}))
            raise damaged(where, f"what was read for {shown} is not what was saved")


def damaged(where: str, what: str) -> ValueError:
    """Returns the error for a checkpoint whose files are not as they were written."""
    return ValueError(
        f"The checkpoint {where} is damaged: {what}. Restore another one with `step=`, and "
        "remove this one with `Checkpointer.delete`."
    )


def _checksum(record: Json) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def _leaf(leaf: Json) -> Leaf:
    """Reads the record of a leaf; format 1 had values of Python scalars and no checksums."""
    shape = tuple(leaf["shape"]) if "shape" in leaf else None
    contents = (leaf["value"],) if "value" in leaf else leaf.get("contents", ())
    return Leaf(leaf["dtype"], shape, tuple(contents))


def _listed(faults: Mapping[str, str]) -> list[str]:
    """Returns the first faults, by name, and how many more there are."""
    shown = [*faults.values()][:_SHOWN]
    if len(faults) > _SHOWN:
        last = [*faults][-1]
        shown.append(f"and {len(faults) - _SHOWN} more like this, up to `{last}`")
    return shown


def _process_faults(
    leaves: Sequence[tuple[str, Leaf]], spanning: Collection[str]
) -> list[str]:
    """Describes values of single processes that these processes cannot restore."""
    faults, now = {}, jax.process_count()
    for name, leaf in leaves:
        count = len(leaf.contents)
        if leaf.is_per_process and count != now:
            faults[name] = (
                f"each of {count} processes saved its own `{name}`, but {now} restore it"
            )
        elif leaf.is_per_process and name in spanning:
            faults[name] = (
                f"each process saved its own `{name}`, but in the template it is one array "
                "that lies on several processes"
            )
    return _listed(faults)


_OWN_REMEDY = (
    "Restore with as many processes as saved, or leave these leaves out of the template and "
    "pass `partial=True`."
)


def _remedy(changed: bool, only_extra: bool) -> str:
    """Returns what to do about the differences."""
    if changed:
        return (
            "Make the template with the dtypes and options that the checkpoint was saved "
            "with, and convert what is restored: `mpx.cast_tree` changes dtypes, "
            "`mpx.checkpoint.to_f32` and `from_f32` the layout of optimizer states."
        )
    if only_extra:
        return "To restore a part of a checkpoint, pass `partial=True`."
    return "Make the template with the code that made the state that was saved."


# --- Loss scalings and compressed states ----------------------------------------------


def _options(state: PyTree, kind: type) -> dict[str, Json]:
    """Returns the type and the static fields of each module of a kind in a state."""
    named, _ = flatten_with_names(state, is_leaf=lambda x: isinstance(x, kind))
    return {
        name: {"type": type(node).__name__, **_static_fields(node)}
        for name, node in named
        if isinstance(node, kind)
    }


def _static_fields(node: PyTree) -> Json:
    fields = (x.name for x in dataclasses.fields(node) if x.metadata.get("static"))
    values = {name: getattr(node, name) for name in fields}
    if isinstance(node, FlashState) and isinstance(node.layout, dict):
        values["layout"] = next(iter(node.layout), None)
    # Plain Python, as JSON has it.
    return {k: list(x) if isinstance(x, tuple) else x for k, x in values.items()}


def _scaling_faults(saved: Json, wanted: Json, partial: bool) -> list[str]:
    """Describes loss scalings that are missing or of another type."""
    faults = []
    for name in {**wanted, **({} if partial else saved)}:
        came, expected = (
            found[name]["type"] if name in found else "no loss scaling"
            for found in (saved, wanted)
        )
        if came != expected:
            faults.append(
                f"`{name}` is {came}, but the template has {expected}: the scale and its "
                "counters would be lost or made up"
            )
    return faults


def _layout_faults(saved: Json, wanted: Json) -> list[str]:
    """Describes states of compressed optimizers that are stored in another way."""
    faults = []
    for name in wanted:
        if name in saved and saved[name] != wanted[name]:
            came, expected = saved[name], wanted[name]
            keys = [key for key in expected if came.get(key) != expected[key]]
            differ = " and ".join(
                f"{key} {came.get(key)!r} instead of {expected[key]!r}" for key in keys
            )
            faults.append(
                f"`{name}`, the state of a compressed optimizer, has the {differ}: its "
                "codes mean something else"
            )
    return faults


def _warn_of_options(saved: Json, wanted: Json, where: str) -> None:
    for name, options in wanted.items():
        old = saved.get(name, {})
        keys = [key for key in options if old.get(key) != options[key]]
        if keys:
            changes = ", ".join(f"{k}={options[k]} (was {old.get(k)})" for k in keys)
            warn(
                f"The loss scaling `{name}` goes on with other options than those of "
                f"{where}: {changes}. They are part of the code and come from the "
                "template."
            )


def check_arrays(opened: Opened) -> None:
    """Raises if a state that is to be saved holds leaves without values."""
    for name, leaf in zip(opened.names, opened.leaves, strict=True):
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


class Packed(NamedTuple):
    """What a process saves: the record without contents, arrays by name, and contents."""

    manifest: Manifest
    stored: dict[str, PyTree]
    contents: list[PyTree]

    @property
    def spanning(self) -> set[str]:
        """The names of the arrays that lie on several processes."""
        return {name for name, array in self.stored.items() if spans_processes(array)}

    @property
    def kinds(self) -> int:
        """A hash of what must be the same on all processes."""
        leaves = [(name, leaf[:2]) for name, leaf in self.manifest.leaves.items()]
        return zlib.crc32(repr((leaves, sorted(self.spanning))).encode())

    def for_orbax(self, rows: list[list[PyTree]]) -> tuple[Manifest, dict[str, PyTree]]:
        """Returns the record and the arrays to write, given the contents of all processes."""
        manifest = self.manifest.holding(rows, self.spanning)

        def written(name: str, array: PyTree) -> PyTree:
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
