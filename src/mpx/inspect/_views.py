"""What a report knows of `amp` and of `fp8`: their decisions, as they were made."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpx._amp._call import Recording
from mpx._amp._decide import IN_KERNEL, PRESETS, RAGGED
from mpx._amp._facts import Decision
from mpx._amp._rules import REASONS, UNKNOWN, Rule
from mpx._fp8._selection import Matmul
from mpx._jax._formats import short_name
from mpx._program._queries import ATTENTION, CROSS_ENTROPY, MATMULS
from mpx.inspect._result import Result, Table, percent, short_source


@dataclasses.dataclass(frozen=True)
class AmpView(Result):
    """What `amp` decided about the operations of a function.

    A decision stands for one operation and has the fields `primitive`, `rule`, `reason`,
    `scope`, `source` (file and line), `params` (the arguments that it reads), `before`
    (dtypes of the operands as written), `after` (dtypes of the results), `shapes` of the
    operands and `flops` (of a matmul, else 0). Equal ones are listed once.

    Attributes:
        dtype: The compute dtype: `bf16` or `f16`.
        rules: The name of the rules, such as `safe`.
        decisions: One for each operation that autocast had to decide about.
    """

    dtype: str
    rules: str
    decisions: tuple[Decision, ...]

    @property
    def matmuls(self) -> tuple[Decision, ...]:
        """The matmuls and convolutions, and attention that cuDNN runs as a whole."""
        return tuple(
            x
            for x in self.decisions
            if x.primitive in MATMULS
            or x.primitive in CROSS_ENTROPY
            or (x.primitive in ATTENTION and x.rule == Rule.LOW)
        )

    @property
    def kept(self) -> tuple[Decision, ...]:
        """The operations in f32 or as written, by a rule or because it was asked for."""
        return tuple(
            x for x in self.decisions if self._is_kept(x) and not _is_opaque(x)
        )

    @property
    def opaque(self) -> tuple[Decision, ...]:
        """The operations that run as written because autocast does not know them."""
        return tuple(x for x in self.decisions if _is_opaque(x))

    @property
    def ragged(self) -> tuple[Decision, ...]:
        """The ragged matmuls in 16 bits; `reason` says whether in a grouped kernel."""
        return tuple(
            x for x in self.decisions if x.primitive in RAGGED and x.rule == Rule.LOW
        )

    @property
    def recognised(self) -> tuple["Recognised", ...]:
        """Attention and experts that were found, in a kernel or not."""
        found = (_recognised(x) for x in self.decisions)
        return tuple(dict.fromkeys(x for x in found if x is not None))

    def tables(self) -> Sequence[Table]:
        """Returns what was recognised, what stays in f32 and what is unknown."""
        found = [
            (x.what, "found" if x.found else "missed", x.reason, x.source)
            for x in self.recognised
        ]
        head = ("recognised", "", "how, or why not", "source")
        return [
            *([Table(head, found)] if found else []),
            grouped(
                "in f32 or as written", _kept(self.kept), "Nothing is kept in f32."
            ),
            grouped("unknown, as written", _kept(self.opaque), "Nothing is unknown."),
        ]

    def _is_kept(self, decision: Decision) -> bool:
        if decision in self.ragged:
            return False
        if decision.primitive in CROSS_ENTROPY and decision.rule == Rule.LOW:
            return False  # its sums, which are its results, are f32
        if decision.rule == Rule.LOW:
            return short_dtypes(decision.after[:1]) != self.dtype
        if decision.rule in PRESETS:
            return not decision.reason.startswith(_BY_USER)
        return decision.rule in (Rule.F32, Rule.ORIGINAL)


_BY_USER = ("policy ", "scope ", "function ", "parameter ")


class Recognised(NamedTuple):
    """Attention or experts in a program.

    Attributes:
        what: `attention` or `experts`.
        found: Whether it runs in its kernel.
        reason: How it runs, or why not so.
        source: File and line.
    """

    what: str
    found: bool
    reason: str
    source: str


def _recognised(decision: Decision) -> Recognised | None:
    name, reason = decision.primitive, decision.reason
    if name == "attention" or name in ATTENTION:
        what, found = "attention", name in ATTENTION and decision.rule == Rule.LOW
        reason = "cuDNN's kernel" if found else reason
    elif name in RAGGED and decision.rule == Rule.LOW:
        what, found = "experts", reason == IN_KERNEL
    else:
        return None
    return Recognised(what, found, reason, short_source(decision.source))


def _is_opaque(decision: Decision) -> bool:
    reasons = (UNKNOWN, REASONS["pallas_call"])
    return decision.rule == Rule.ORIGINAL and decision.reason in reasons


def short_dtypes(names: Iterable[Any]) -> str:
    """Returns `f32`, or `f32×bf16` if the dtypes differ."""
    return "×".join(dict.fromkeys(_short_dtype(name) for name in names))


def _short_dtype(name: Any) -> str:
    try:
        return short_name(np.dtype(name))
    except TypeError:  # the dtype of a PRNG key
        return str(name)


def grouped(what: str, kept: Iterable[tuple[str, str, str]], empty: str) -> Table:
    """Returns one row for each primitive and reason, with the first of its sources."""
    groups: dict[tuple[str, str], dict[str, None]] = {}
    for primitive, reason, source in kept:
        groups.setdefault((primitive, reason), {})[source] = None
    rows = []
    for key, (first, *more) in groups.items():
        rows.append((*key, f"{first} and {len(more)} more" if more else first))
    return Table((what, "why", "source"), rows) if rows else Table.text(empty)


def _kept(decisions: Iterable[Decision]) -> Iterator[tuple[str, str, str]]:
    return ((x.primitive, x.reason, short_source(x.source)) for x in decisions)


@dataclasses.dataclass(frozen=True)
class Fp8View(Result):
    """What `fp8` decided about the matmuls of the forward pass.

    Attributes:
        recipe: The recipe.
        matmuls: All that multiplies in the forward pass: matmuls, ragged ones,
            convolutions and fused attention. The fields are `param` (the parameter that it
            reads, such as `params/layers/w1`; "" without one), `scope` (joined by `/`),
            `source` (file and line), `shape` (rows, summed length, columns), `times` (how
            often it runs, in scans and over batch dimensions), `dtype` (of the operands),
            `reason` (why it is not fp8; "" if it is), `flops` and `primitive`.
    """

    recipe: str
    matmuls: tuple[Matmul, ...]

    @property
    def changed(self) -> tuple[Matmul, ...]:
        """The matmuls that run in fp8."""
        return tuple(x for x in self.matmuls if not x.reason)

    @property
    def kept(self) -> tuple[Matmul, ...]:
        """The matmuls that stay as they are."""
        return tuple(x for x in self.matmuls if x.reason)

    @property
    def share(self) -> float:
        """The share of all these operations that run in fp8, from 0 to 1."""
        total = sum(x.flops for x in self.matmuls)
        return sum(x.flops for x in self.changed) / total if total else 0.0

    def tables(self) -> Sequence[Table]:
        """Returns the share, and the matmuls with the reason against fp8."""
        total = sum(x.flops for x in self.matmuls) or 1
        rows = [
            (
                x.param or "–",
                "×".join(map(str, x.shape)),
                str(x.times),
                percent(x.flops / total),
                x.reason or "fp8",
                x.scope,
                short_source(x.source),
            )
            for x in self.matmuls
        ]
        head = ("parameter", "shape", "times", "FLOPs", "fp8, or why not", "scope")
        if not rows:
            return [Table.text("No matmuls that fp8 could change.")]
        share = f"{percent(self.share)} of the forward matmul operations run in fp8."
        return [Table((*head, "source"), rows, share, frozenset({2, 3}))]


def amp_view(recording: Recording) -> AmpView | None:
    """Returns what `amp` decided, if a function under it was called."""
    if not recording.casts:
        return None
    return AmpView(
        dtype="×".join(dict.fromkeys(short_name(x) for x, _ in recording.casts)),
        rules=", ".join(dict.fromkeys(str(x.base) for _, x in recording.casts)),
        decisions=tuple(dict.fromkeys(recording.decisions)),
    )


def fp8_view(recording: Recording) -> Fp8View | None:
    """Returns what `fp8` decided, if a function under it was called."""
    if not recording.recipes:
        return None
    names = dict.fromkeys(type(recipe).__name__ for recipe in recording.recipes)
    return Fp8View(", ".join(names), tuple(recording.matmuls))
