"""Reports of the precision in which operations run, as tables."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mpx._amp._chunked import IN_CHUNKS
from mpx._amp._facts import Decision
from mpx._amp._functions import trace
from mpx._amp._grouped import RAGGED
from mpx._amp._matmuls import PRESETS
from mpx._amp._policy import AmpRules
from mpx._amp._rules import MATMULS, REASONS, UNKNOWN, Rule
from mpx._formats import short_name
from mpx._jaxpr._queries import ATTENTION, matmul_flops


@dataclasses.dataclass(frozen=True)
class AmpReport:
    """The operations of a function under `amp`; made by `mpx.inspect.report`, printed as a table.

    A decision stands for one operation and has the fields `primitive`, `rule`, `reason`,
    `scope`, `source` (file and line), `params` (the arguments that it reads), `before`
    (dtypes of the operands as written), `after` (dtypes of the results), `shapes` of the
    operands and `flops` (of a matmul, else 0). Equal ones are listed once.

    Attributes:
        dtype: The compute dtype: `bf16` or `f16`.
        rules: The rules.
        decisions: One for each operation that autocast had to decide about.
        flops: The operations of all matmuls by the dtype in which they multiply. Unlike
            in `decisions` each is counted as often as it runs: in every call of its
            function and step of its scan. A while loop counts as one step, a branch as
            the largest of its alternatives, `shard_map` as one device.
    """

    dtype: str
    rules: AmpRules
    decisions: tuple[Decision, ...]
    flops: Mapping[str, int]

    @property
    def matmuls(self) -> tuple[Decision, ...]:
        """The matmuls and convolutions, and attention that cuDNN runs as a whole."""
        return tuple(
            x
            for x in self.decisions
            if x.primitive in MATMULS
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
    def shares(self) -> dict[str, float]:
        """The share of the matmuls' operations by dtype, the largest first."""
        total = sum(self.flops.values())
        ordered = sorted(self.flops.items(), key=lambda item: -item[1])
        return {dtype: count / total for dtype, count in ordered}

    def _is_kept(self, decision: Decision) -> bool:
        if decision in self.ragged:
            return False
        if decision.rule == Rule.LOW:
            return _short_dtypes(decision.after[:1]) != self.dtype
        if decision.rule in PRESETS:
            return not decision.reason.startswith(_BY_USER)
        return decision.rule in (Rule.F32, Rule.ORIGINAL)

    @property
    def ragged(self) -> tuple[Decision, ...]:
        """The ragged matmuls in 16 bits; `reason` says whether in a grouped kernel."""
        return tuple(
            x for x in self.decisions if x.primitive in RAGGED and x.rule == Rule.LOW
        )

    def __str__(self) -> str:
        """Returns the tables as text."""
        head = ("ragged matmul", "runs", "source")
        return "\n".join(
            [
                f"amp to {self.dtype}, rules {self.rules.base}. {self._summary()}",
                "",
                *table(
                    ("matmul", "dtype", "shapes", "argument", "scope", "source"),
                    [_matmul_row(x) for x in self.matmuls],
                    "no matmuls",
                ),
                "",
                *([*table(head, _grouped(self.ragged), ""), ""] if self.ragged else []),
                *table(
                    ("in f32 or as written", "why", "source"),
                    _grouped(self.kept),
                    "nothing kept",
                ),
                "",
                *table(
                    ("unknown, as written", "why", "source"),
                    _grouped(self.opaque),
                    "nothing unknown",
                ),
            ]
        )

    def _summary(self) -> str:
        shares = [f"{100 * x:.1f} % in {name}" for name, x in self.shares.items()]
        return f"Matmul operations: {', '.join(shares) or 'none'}."


_BY_USER = ("policy ", "scope ", "function ", "parameter ")


def _is_opaque(decision: Decision) -> bool:
    reasons = (UNKNOWN, REASONS["pallas_call"])
    return decision.rule == Rule.ORIGINAL and decision.reason in reasons


def _short_dtypes(names: tuple[str, ...]) -> str:
    """Returns `f32`, or `f32×bf16` if the dtypes differ."""
    return "×".join(dict.fromkeys(_short_dtype(name) for name in names))


def _short_dtype(name: str) -> str:
    try:
        return short_name(np.dtype(name))
    except TypeError:  # the dtype of a PRNG key
        return name


def short_source(source: str) -> str:
    """Returns a file's name as seen from here or from the installed packages."""
    path = pathlib.Path(source)
    if "site-packages" in path.parts:
        return "/".join(path.parts[path.parts.index("site-packages") + 1 :])
    if path.is_relative_to(pathlib.Path.cwd()):
        return str(path.relative_to(pathlib.Path.cwd()))
    return "/".join(path.parts[-2:])


def _matmul_row(decision: Decision) -> tuple[str, ...]:
    before, after = _short_dtypes(decision.before[:2]), _short_dtypes(decision.after)
    if decision.rule in PRESETS and decision.reason.startswith(_BY_USER):
        after = decision.rule
    if decision.rule not in list(Rule):
        after = f"by {decision.rule}"  # a user's function
    shapes = [",".join(map(str, shape)) for shape in decision.shapes[:2]]
    in_chunks = decision.reason == IN_CHUNKS
    return (
        "logits in chunks" if in_chunks else decision.primitive,
        f"{before} -> {after}",
        " @ ".join(f"({shape})" for shape in shapes),
        " ".join(decision.params),
        decision.scope,
        short_source(decision.source),
    )


def _grouped(decisions: tuple[Decision, ...]) -> list[tuple[str, ...]]:
    """Returns one row for each primitive and reason, with the first of its places."""
    groups: dict[tuple[str, str], list[str]] = {}
    for x in decisions:
        groups.setdefault((x.primitive, x.reason), []).append(short_source(x.source))
    return [
        (primitive, reason, _first(list(dict.fromkeys(sources))))
        for (primitive, reason), sources in groups.items()
    ]


def _first(sources: list[str]) -> str:
    more = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
    return sources[0] + more


def table(head: tuple[str, ...], rows: list[tuple[str, ...]], empty: str) -> list[str]:
    if not rows:
        return [empty]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, tuple("-" * width for width in widths), *rows]
    return [
        "  ".join(
            cell.ljust(width) for cell, width in zip(line, widths, strict=True)
        ).rstrip()
        for line in lines
    ]


def amp_report(func: Callable[..., Any], *args: Any, **kwargs: Any) -> AmpReport:
    """Reports on a call of a function under `amp`; see `mpx.inspect.report`."""
    make = getattr(func, "mpx_autocast", None)
    if make is None:
        raise TypeError(
            "`report` takes a function under `mpx.amp` or `mpx.fp8`, but "
            f"{func!r} was given. Wrap it: `mpx.inspect.report(mpx.amp(func), ...)`."
        )
    autocast = make()
    autocast.decisions = []
    jaxpr = trace(autocast, getattr(func, "__wrapped__"), args, kwargs)  # noqa: B009
    return AmpReport(
        dtype=short_name(autocast.dtype),
        rules=autocast.rules,
        decisions=tuple(dict.fromkeys(autocast.decisions)),
        flops=dict(matmul_flops(jaxpr, _multiplied_in)),
    )


def _multiplied_in(eqn: Any) -> str:
    for rule, preset in PRESETS.items():
        if eqn.params.get("precision") == preset:
            return rule
    return _short_dtypes(tuple(str(var.aval.dtype) for var in eqn.invars[:2]))
