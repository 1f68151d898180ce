"""What is at fault, told to the reader: the finding, its place and its remedy."""

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from mpx._fp8 import Fp8Function
from mpx._jax._formats import FORMATS
from mpx._program._queries import MATMULS, names
from mpx._scaling._loss_scaling import LossScaling
from mpx.inspect._blame import EPSILON, Blame, Verdict
from mpx.inspect._program import Place
from mpx.inspect._record import NAN, Node
from mpx.inspect._result import source_of

Kind = Literal[
    "overflow",
    "underflow",
    "cancellation",
    "accumulation",
    "precision",
    "constant",
    "singularity",
    "nan",
    "input",
    "decision",
    "convergence",
]
"""What went wrong.

`overflow`: a result exceeds the largest number of its format. `underflow`: numbers became
zero. `cancellation`: a difference of nearly equal numbers has lost its digits.
`accumulation`: a sum has lost terms that are small beside it. `precision`: the format has
too few digits for the operation. `constant`: a number in the code became infinite or zero
in its format, or is infinite. `singularity`: a finite operand has an infinite result, such
as the logarithm of zero. `nan`: an operand outside the domain. `input`: an argument is not
finite. `decision`: a comparison has another result in f32, and the loss with it.
`convergence`: a loop that ends in f32 does not end.
"""
_SINGULAR = frozenset(
    names("div log log1p rsqrt pow integer_pow atanh rem digamma tan")
)
_ADDS = frozenset(
    names("add add_any sub mul reduce_sum cumsum dot_general scatter-add")
)
_DIFFERENCES = frozenset(names("add add_any sub reduce_sum cumsum dot_general"))
_TOTALS = frozenset(names("reduce_sum cumsum scatter-add reduce_window_sum"))


@dataclasses.dataclass(frozen=True)
class Finding:
    """An operation at fault.

    Attributes:
        kind: What went wrong: see the list in the guide.
        place: Where: primitive, parameter, scope, source line, forward or backward.
        near: The parameter that was read last on the way to it; "" if none was.
        caller: The line of your code that called a library, if the place is in one.
        step: The steps of the loops around it: (number of the step, number of steps).
        format: The format in which it computes: `f16`, `bf16`, `e4m3`, `e5m2`, `f32`.
        limit: The number of this format that matters: its largest for an overflow, its
            smallest for an underflow, else the relative distance of its numbers.
        operands: The smallest and largest number of each floating operand, in f32.
        result: The same of the result as it should be, in f32.
        got: The same of the finite numbers of the actual result.
        effect: What it leads to.
        remedy: What to do.
    """

    kind: Kind
    place: Place
    near: str
    caller: str
    step: tuple[tuple[int, int], ...]
    format: str
    limit: float
    operands: tuple[tuple[float, float], ...]
    result: tuple[float, float]
    got: tuple[float, float]
    effect: str
    remedy: str

    @property
    def label(self) -> str:
        """The parameter, scope or function by which you know the place."""
        return self.place.param or self.place.scope or self.near or self.place.label

    def __str__(self) -> str:
        """Returns the finding in a few lines."""
        place = self.place
        where = [f"`{place.primitive}`"]
        where += [f"`{place.param}`"] if place.param else []
        where += [f"scope `{place.scope}`"] if place.scope else []
        where += [f"after `{self.near}`"] if self.near and not place.param else []
        for step, count in self.step:
            where.append(f"step {step} of a loop" + (f" of {count}" if count else ""))
        line = place.source
        line += f" in `{place.function}`" if place.function else ""
        line += f", called from {self.caller}" if self.caller else ""
        rows = {
            "operation": ", ".join(where),
            "line": line,
            "operands": "; ".join(map(_shown, self.operands)),
            "result": self._result(),
            "format": self._format(),
            "effect": self.effect,
            "remedy": self.remedy,
        }
        return "\n".join(f"  {key:<10} {row}" for key, row in rows.items() if row)

    def _result(self) -> str:
        if self.kind in ("input", "constant", "decision", "convergence"):
            return ""
        return f"{_shown(self.result)} in f32, {_shown(self.got)} here"

    def _format(self) -> str:
        if self.kind == "overflow":
            return f"{self.format}: largest number {self.limit:.5g}"
        if self.kind == "underflow":
            return f"{self.format}: smallest number {self.limit:.2g}"
        if self.kind not in ("constant", "singularity", "nan", "input"):
            return f"{self.format}: relative distance of numbers {self.limit:.2g}"
        return self.format


def _shown(ends: tuple[float, float]) -> str:
    low, high = ends
    if math.isnan(low):
        return "nothing finite"
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


_REMEDIES = (
    # kind, for these operations or for any, what to do
    ("input", (), "look at where this array comes from: the data, or an earlier step"),
    ("accumulation", (), "add up in f32: make the accumulator an f32 array, or {keep}"),
    (
        "cancellation",
        (),
        "avoid the difference of large numbers (a variance is mean((x - mean)²), not "
        "mean(x²) - mean²), or {keep}",
    ),
    (
        "decision",
        (),
        "do not let the loss depend on a comparison of nearly equal numbers, or {keep}",
    ),
    (
        "convergence",
        (),
        "the tolerance is finer than the format resolves: choose one above the relative "
        "distance of its numbers, or {keep}",
    ),
    (
        "derivative",
        (),
        "the derivative of this line is infinite at this operand: add an epsilon inside, or "
        "replace the operand by a safe one with `jnp.where` before the operation, not after "
        "it",
    ),
    (
        "singularity",
        ("log", "log1p"),
        "use `log_softmax`, `log_sigmoid` or `logsumexp`, or add an epsilon",
    ),
    (
        "singularity",
        (),
        "add an epsilon to the denominator, or replace zeros before the operation",
    ),
    (
        "nan",
        ("sqrt", "rsqrt", "log", "pow"),
        "the operand is negative: clip it at 0, or look at how it is computed",
    ),
    (
        "nan",
        ("acos", "asin", "atanh", "erf_inv"),
        "the operand leaves [-1, 1] by rounding: clip it",
    ),
    ("nan", (), "the operands have no such result: replace them before the operation"),
    (
        "precision",
        ("sin", "cos", "tan"),
        "compute positions and angles in f32, and cast sine and cosine; or {keep}",
    ),
)


class Reader:
    """Turns verdicts about a run into findings: the kind, the effect and the remedy."""

    def __init__(
        self, blame: Blame, func: Callable[..., Any], scaling: LossScaling | None
    ) -> None:
        self._blame, self._recording = blame, blame.recording
        self._wrapper = "amp" if hasattr(func, "mpx_autocast") else ""
        self._wrapper = "fp8" if isinstance(func, Fp8Function) else self._wrapper
        self._has_scaling = scaling is not None
        self.scale = 1.0 if scaling is None else float(scaling.loss_scaling)

    def finding(self, verdict: Verdict) -> Finding:
        """Returns a verdict for readers."""
        blame, node = self._blame, self._blame.nodes[verdict.node]
        decides = verdict.cause in ("loop", "decision")  # no result is made of it
        backward = verdict.node not in blame.forward and not decides
        origin = verdict.origin
        out = origin.out if origin and origin.node == verdict.node else 0
        kind = self._kind(verdict, node)
        low = (blame.format if decides else node.format) or FORMATS["f32"]
        limits = {"overflow": low.max, "underflow": low.smallest}
        if node.eqn is None:
            name = next(filter(None, node.names), "a constant")
            place, caller = Place("input", name, "", "unknown", "", False), ""
        else:
            place, caller = node.place(backward), _caller(node)
        sources = self._recording.operands(node)
        return Finding(
            kind=kind,
            place=place,
            near="" if place.param else self._nearest_param(verdict.node),
            caller=caller,
            step=node.around.steps,
            format=low.name,
            limit=limits.get(kind, low.eps),
            operands=tuple(x.shadow for x in sources if not math.isnan(x.shadow[0])),
            result=node.stats[out].shadow,
            got=node.stats[out].own,
            effect=self._effect(verdict),
            remedy=self._remedy(kind, node, place) + self._and_also(verdict),
        )

    def _nearest_param(self, index: int) -> str:
        """Returns the parameter that was read last before a node, on the way to it."""
        found = (self._blame.nodes[i] for i in self._recording.before([index]))
        params = (name for node in found if node.eqn is not None for name in node.names)
        return next(filter(None, params), "")

    def _kind(self, verdict: Verdict, node: Node) -> Kind:
        if node.eqn is None:
            return "input"
        match verdict.cause:
            case "constant" | "decision":
                return verdict.cause
            case "loop":
                return "convergence"
            case "sum":
                return "accumulation" if node.primitive in _ADDS else "precision"
            case "origin":
                return self._kind_of_origin(verdict, node)
        return self._kind_of_error(node)

    def _kind_of_origin(self, verdict: Verdict, node: Node) -> Kind:
        assert verdict.origin is not None
        stats = node.stats[verdict.origin.out]
        classes, in_shadow = stats.classes, stats.shadow_classes is not None
        if not in_shadow and node.format and stats.largest > node.format.max:
            return "overflow"
        if classes is not None and (classes[verdict.origin.where] == NAN).all():
            return "nan"
        operands = self._recording.operands(node)
        zero = any(x.zeros for x in operands) or 0 in node.written
        if node.primitive in _SINGULAR and (zero or not in_shadow):
            return "singularity" if in_shadow or zero else "underflow"
        return "overflow"

    def _kind_of_error(self, node: Node) -> Kind:
        assert node.format is not None
        worst = max(node.stats, key=lambda x: x.error)
        if not worst.local_is_finite:
            return "overflow"
        sizes = [x.largest for x in self._recording.operands(node)]
        is_small = worst.largest < max(sizes, default=0.0) / 8
        tiny, subtracts = node.format.tiny, node.primitive in _DIFFERENCES
        is_known = worst.largest > tiny or math.isinf(worst.error)
        if subtracts and is_small and is_known:
            return "cancellation"
        if worst.flushed > 0.05 or worst.largest < tiny or worst.smallest < tiny / 8:
            return "underflow"
        if node.primitive in _TOTALS:
            return "accumulation"
        return "cancellation" if subtracts else "precision"

    def _effect(self, verdict: Verdict) -> str:
        if verdict.origin is not None:
            node = self._blame.nodes[verdict.origin.node]
            classes = node.stats[verdict.origin.out].classes
            kinds = [] if classes is None else np.unique(classes[classes != 0]).tolist()
            what = "infinite numbers" + (" and nan" if NAN in kinds else "")
            what = "nan" if kinds == [NAN] else what
            if verdict.origin.node != verdict.node and node.eqn is not None:
                place = node.place(False)
                return f"`{place.primitive}` at {place.source} makes {what} of it"
            return f"{what}, which reach {self._reached()}"
        if verdict.cause == "loop":
            return "the loop ends after {} steps in f32, but not after {} here".format(
                *verdict.steps
            )
        if verdict.influence is None:
            return ""
        share, result = verdict.influence, verdict.result
        amount = "by more than 100 %" if share > 1 else f"by {100 * share:.3g} %"
        if verdict.cause == "decision":
            return f"falls differently in f32, which changes the {result} {amount}"
        return f"changes the {result} {amount}, with all else in f32"

    def _reached(self) -> str:
        pairs = zip(self._blame.names, self._blame.own, strict=True)
        reached = [name for name, x in pairs if not np.isfinite(x).all()]
        if not reached:
            return "no result"
        more = f" and {len(reached) - 1} more" if len(reached) > 1 else ""
        return f"the {reached[0]}{more}"

    def _and_also(self, verdict: Verdict) -> str:
        """Returns which other lines have to be in f32, too, if some have to."""
        if not verdict.is_mended:
            return (
                "; f32 for this line alone does not help, because its operands have lost "
                "their digits before"
            )
        nodes = [self._blame.nodes[i] for i in verdict.with_nodes]
        lines = ", ".join(dict.fromkeys(source_of(x.around.frames) for x in nodes))
        if not lines:
            return ""
        return f"; together with {lines}: f32 for one of them alone does not help"

    def _in_f32(self, place: Place) -> str:
        """Returns how to keep a place in f32."""
        if self._wrapper:
            selector = place.param if place.primitive in MATMULS else ""
            selector = selector.partition("/")[2] or selector or place.scope
            if selector:
                return f'keep it in f32: `mpx.{self._wrapper}(fn, keep="{selector}")`'
            return "keep it in f32: put it under `with mpx.amp_stop():`"
        return "compute it in f32: cast its operands with `.astype(jnp.float32)`"

    def _remedy(self, kind: Kind, node: Node, place: Place) -> str:
        keep = self._in_f32(place)
        if kind == "overflow":
            return self._for_overflow(node, place, keep)
        if kind == "underflow":
            return self._for_underflow(node, place, keep)
        if kind == "constant":
            return _for_constant(node)
        which = "derivative" if kind == "singularity" and place.backward else kind
        fitting = (
            text
            for name, primitives, text in _REMEDIES
            if name == which and (not primitives or place.primitive in primitives)
        )
        return next(fitting, "{keep}").format(keep=keep)

    def _for_overflow(self, node: Node, place: Place, keep: str) -> str:
        room = self._blame.headroom * self.scale
        if place.backward and self.scale > 1 and room >= 1:
            fits = 2.0 ** math.floor(math.log2(room))
            return (
                f"the loss scale {self.scale:g} is too large here, {fits:g} would do: "
                "`DynamicLossScaling` lowers it by itself and skips this step"
            )
        if place.primitive in ("exp", "exp2", "pow", "expm1"):
            fix = "subtract the maximum before `exp`, as `jax.nn.softmax` and `logsumexp` do"
            return fix if node.format is None else f"{fix}; or {keep}"
        if node.format is None:
            return "make its operands smaller: f32 itself overflows"
        is_bf16 = node.format.name == "bf16"
        return keep if is_bf16 else f"{keep}; or use bf16, whose range is f32's"

    def _for_underflow(self, node: Node, place: Place, keep: str) -> str:
        short = node.format and node.format.name in ("f16", "e5m2", "e4m3")
        if place.backward and short:
            if not self._has_scaling:
                return "use a loss scaling, such as `mpx.DynamicLossScaling.pow2()`"
            return f"use a larger loss scale than {self.scale:g}; or {keep}"
        if place.primitive == "log":
            return f"use `jax.nn.log_softmax` or `log_sigmoid` in place of the log; or {keep}"
        return f"{keep}; or scale the numbers up first"


def _for_constant(node: Node) -> str:
    low, name = node.format or FORMATS["f32"], node.primitive
    if 0 in node.written and name in ("add", "max", "mul", "div"):
        return (
            f"a constant here is 0 in {low.name}, probably a small epsilon: "
            f"add it in f32, or choose one above {low.tiny:.1g}"
        )
    small = [x for x in node.written if 0 < abs(x) < EPSILON]
    if small and name in ("add", "max"):
        return (
            f"the epsilon {small[0]:g} is too small: divided by it, numbers exceed those of "
            "the format, here or in the gradient. Choose a larger one, or compute what "
            "depends on it in f32"
        )
    if name in ("select_n", "add", "broadcast_in_dim", "max"):
        return (
            "a row is masked completely, or the fill value overflows: use a finite number "
            f"that {low.name} holds, such as `jnp.finfo(x.dtype).min`, or compute it in f32"
        )
    return f"the constant is not finite in {low.name}: compute this in f32"


def _caller(node: Node) -> str:
    """Returns the first line outside installed packages, if it is not the first."""
    frames, library = node.around.frames, f"{sys.base_prefix}/lib/python"
    own = [
        frame
        for frame in frames
        if "site-packages" not in frame[1] and not frame[1].startswith(library)
    ]
    return source_of(own) if own and own[0] != frames[0] else ""
