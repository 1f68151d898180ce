"""What a checkpoint records about itself, and whether it fits a template."""

import dataclasses
import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from mpx._checkpoint._leaves import Leaf, Opened, describe
from mpx._compat import is_tracer
from mpx._loss_scaling import LossScaling
from mpx._optim import FlashState
from mpx._tree import flatten_with_names
from mpx._version import __version__
from mpx._warn import warn

FORMAT = 1
"""The version of the format of checkpoints; raised when old code could not read new ones."""
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
    scalings: dict[str, dict[str, Any]]
    compressed: dict[str, dict[str, Any]]
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

    def to_json(self) -> dict[str, Any]:
        """Returns the record as it is written."""
        leaves = {
            name: {
                key: value for key, value in leaf._asdict().items() if value is not None
            }
            for name, leaf in self.leaves.items()
        }
        return {"format": FORMAT, **dataclasses.asdict(self), "leaves": leaves}

    @classmethod
    def from_json(cls, record: Any, where: str) -> "Manifest":
        """Reads a record.

        Raises:
            ValueError: If it was written by a newer version.
        """
        format = record["format"]
        if format > FORMAT:
            raise ValueError(
                f"The checkpoint {where} has the format {format}, but mpx {__version__} "
                f"reads formats up to {FORMAT}. It was written by mpx "
                f"{record['versions']['mpx']}: install that version or a later one."
            )
        leaves = {
            name: Leaf(leaf["dtype"], _shape(leaf), leaf.get("value"))
            for name, leaf in record["leaves"].items()
        }
        return cls(leaves, record["scalings"], record["compressed"], record["versions"])

    def check(self, template: "Manifest", where: str, *, partial: bool) -> None:
        """Raises unless a template has the leaves of this checkpoint.

        Args:
            template: The record of the template.
            where: The name of the checkpoint, for messages.
            partial: Whether the checkpoint may hold more than the template.

        Raises:
            ValueError: If they differ; all differences are named.
        """
        saved, wanted = self.leaves, template.leaves
        missing = [name for name in wanted if name not in saved]
        extra = [] if partial else [name for name in saved if name not in wanted]
        changed = [
            *_scaling_faults(self.scalings, template.scalings, partial),
            *_layout_faults(self.compressed, template.compressed),
            *_listed(
                [n for n in wanted if n in saved and not wanted[n].same(saved[n])],
                lambda name: (
                    f"`{name}` is {saved[name].shown}, but the template has "
                    f"{wanted[name].shown}"
                ),
            ),
        ]
        faults = [
            *changed,
            *_listed(
                missing,
                lambda name: (
                    f"`{name}` is missing: the template has {wanted[name].shown}"
                ),
            ),
            *_listed(
                extra,
                lambda name: f"`{name}` is not expected: it holds {saved[name].shown}",
            ),
        ]
        if faults:
            lines = "".join(f"\n  - {fault}" for fault in faults)
            raise ValueError(
                f"The checkpoint {where} does not fit the template:{lines}\n"
                f"{_remedy(bool(changed), not missing)}"
            )
        _warn_of_options(self.scalings, template.scalings, where)


def _shape(leaf: Mapping[str, Any]) -> tuple[int, ...] | None:
    return tuple(leaf["shape"]) if "shape" in leaf else None


def _listed(names: Sequence[str], show: Any) -> list[str]:
    shown = [show(name) for name in names[:_SHOWN]]
    if len(names) > _SHOWN:
        last = names[-1]
        shown.append(f"and {len(names) - _SHOWN} more like this, up to `{last}`")
    return shown


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


def _options(state: PyTree, kind: type) -> dict[str, dict[str, Any]]:
    """Returns the type and the static fields of each module of a kind in a state."""
    named, _ = flatten_with_names(state, is_leaf=lambda x: isinstance(x, kind))
    return {
        name: {"type": type(node).__name__, **_static_fields(node)}
        for name, node in named
        if isinstance(node, kind)
    }


def _static_fields(node: Any) -> dict[str, Any]:
    fields = (x.name for x in dataclasses.fields(node) if x.metadata.get("static"))
    values = {name: getattr(node, name) for name in fields}
    # Plain Python, as JSON has it.
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
    } | ({"layout": next(iter(node.layout), None)} if _has_layout(node) else {})


def _has_layout(node: Any) -> bool:
    return isinstance(node, FlashState) and isinstance(node.layout, dict)


def _scaling_faults(
    saved: Mapping[str, Any], wanted: Mapping[str, Any], partial: bool
) -> list[str]:
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


def _layout_faults(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
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


def _warn_of_options(
    saved: Mapping[str, Any], wanted: Mapping[str, Any], where: str
) -> None:
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
    """Raises if a state that is to be saved holds leaves without values.

    Raises:
        TypeError: If a leaf is a `ShapeDtypeStruct`; it is named.
        ValueError: If an array was deleted, by donation for one.
    """
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
