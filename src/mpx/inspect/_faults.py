"""Faults of a run for readers: what kind each is, and what to do about it."""

import dataclasses
import math
import sys
from typing import Literal, NamedTuple

import numpy as np

from mpx._jax._formats import FORMATS
from mpx._program._queries import MATMULS, names
from mpx.inspect._blame import EPSILON, Blame, Verdict
from mpx.inspect._places import Place
from mpx.inspect._record import NAN, Node, nearest_param
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


class Call(NamedTuple):
    """How the function was called.

    Attributes:
        route: How it came to low precision: `amp`, `fp8` or "" if unknown.
        scale: The loss scale; 1 without.
        scaled: Whether a loss scaling was passed.
        headroom: The factor by which the gradients may grow before one overflows.
    """

    route: str
    scale: float
    scaled: bool
    headroom: float = math.inf


@dataclasses.dataclass(frozen=True)
class Fault:
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
        """Returns the fault in a few lines."""
        place = self.place
        where = [f"`{place.param}`"] if place.param else []
        where += [f"scope `{place.scope}`"] if place.scope else []
        where += [f"after `{self.near}`"] if self.near and not place.param else []
        line = (
            f"{place.source} in `{place.function}`" if place.function else place.source
        )
        line += f", called from {self.caller}" if self.caller else ""
        rows = {
            "operation": ", ".join([f"`{place.primitive}`", *where, *self._steps()]),
            "line": line,
            "operands": "; ".join(map(_shown, self.operands)),
            "result": self._result(),
            "format": self._format(),
            "effect": self.effect,
            "remedy": self.remedy,
        }
        return "\n".join(f"  {key:<10} {row}" for key, row in rows.items() if row)

    def _steps(self) -> list[str]:
        return [
            f"step {step} of a loop" + (f" of {count}" if count else "")
            for step, count in self.step
        ]

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


def fault_of(verdict: Verdict, blame: Blame, call: Call) -> Fault:
    """Returns a verdict for readers."""
    node = blame.nodes[verdict.node]
    call = call._replace(headroom=blame.headroom)
    decides = verdict.cause in ("loop", "decision")  # no result is made of it
    backward = verdict.node not in blame.forward and not decides
    birth = verdict.birth
    finding = node.findings[birth.out if birth and birth.node == verdict.node else 0]
    kind = _kind(verdict, node, blame)
    low = node.format or FORMATS["f32"]
    if kind in ("decision", "convergence"):
        low = blame.format or low
    limits = {"overflow": low.max, "underflow": low.smallest}
    if node.eqn is None:
        name = next(filter(None, node.names), "a constant")
        place = Place("input", name, "", "unknown", "", False)
    else:
        place = node.place(backward)
    parents = [x for x in node.parents if x[0] >= 0]
    sources = [blame.nodes[i].findings[j] for i, j in parents]
    near = "" if place.param else nearest_param(blame.nodes, verdict.node)
    return Fault(
        kind=kind,
        place=place,
        near=near,
        caller="" if node.eqn is None else _caller(node),
        step=node.around.steps,
        format=low.name,
        limit=limits.get(kind, low.eps),
        operands=tuple(x.shadow for x in sources if not math.isnan(x.shadow[0])),
        result=finding.shadow,
        got=finding.own,
        effect=_effect(verdict, blame),
        remedy=_remedy(kind, node, place, call)
        + _and_also(verdict, blame, place, call),
    )


def _caller(node: Node) -> str:
    """Returns the first line outside installed packages, if it is not the first."""
    frames = node.around.frames
    own = [frame for frame in frames if not _is_installed(frame[1])]
    if not own or own[0] == frames[0]:
        return ""
    return source_of(own)


def _is_installed(file: str) -> bool:
    return "site-packages" in file or file.startswith(sys.base_prefix + "/lib/python")


def _kind(verdict: Verdict, node: Node, blame: Blame) -> Kind:
    if node.eqn is None:
        return "input"
    named: dict[str, Kind] = {
        "constant": "constant",
        "decision": "decision",
        "loop": "convergence",
        "sum": "accumulation" if node.primitive in _ADDS else "precision",
    }
    if verdict.cause in named:
        return named[verdict.cause]
    if verdict.cause == "birth":
        return _kind_of_birth(verdict, node, blame)
    return _kind_of_error(node, blame)


def _kind_of_birth(verdict: Verdict, node: Node, blame: Blame) -> Kind:
    birth = verdict.birth
    assert birth is not None
    finding = node.findings[birth.out]
    classes = finding.classes
    is_nan = classes is not None and bool((classes[birth.where] == NAN).all())
    in_shadow = finding.shadow_classes is not None
    if not in_shadow and node.format and finding.largest > node.format.max:
        return "overflow"
    if is_nan:
        return "nan"
    operands = [blame.nodes[i].findings[j] for i, j in node.parents if i >= 0]
    zero = any(x.zeros for x in operands) or 0 in node.written
    if node.primitive in _SINGULAR and (zero or not in_shadow):
        return "singularity" if in_shadow or zero else "underflow"
    return "overflow"


def _kind_of_error(node: Node, blame: Blame) -> Kind:
    assert node.format is not None
    worst = max(node.findings, key=lambda x: x.error)
    if not worst.local_is_finite:
        return "overflow"
    sources = [blame.nodes[i].findings[j].largest for i, j in node.parents if i >= 0]
    is_small = worst.largest < max(sources, default=0.0) / 8
    tiny = node.format.tiny
    is_zero = math.isinf(worst.error)
    if (
        node.primitive in _DIFFERENCES
        and is_small
        and (worst.largest > tiny or is_zero)
    ):
        return "cancellation"
    if worst.flushed > 0.05 or worst.largest < tiny or worst.smallest < tiny / 8:
        return "underflow"
    if node.primitive in _TOTALS:
        return "accumulation"
    return "cancellation" if node.primitive in _DIFFERENCES else "precision"


def _effect(verdict: Verdict, blame: Blame) -> str:
    birth = verdict.birth
    if birth is not None:
        node = blame.nodes[birth.node]
        classes = node.findings[birth.out].classes
        kinds = [] if classes is None else np.unique(classes[classes != 0]).tolist()
        what = (
            "nan"
            if kinds == [NAN]
            else "infinite numbers"
            if NAN not in kinds
            else ("infinite numbers and nan")
        )
        if birth.node != verdict.node and node.eqn is not None:
            place = node.place(False)
            return f"`{place.primitive}` at {place.source} makes {what} of it"
        return f"{what}, which reach {_reached(blame)}"
    if verdict.cause == "loop":
        return "the loop ends after {} steps in f32, but not after {} here".format(
            *verdict.steps
        )
    if verdict.influence is None:
        return ""
    share = verdict.influence
    amount = "by more than 100 %" if share > 1 else f"by {100 * share:.3g} %"
    if verdict.cause == "decision":
        return f"falls differently in f32, which changes the {verdict.result} {amount}"
    return f"changes the {verdict.result} {amount}, with all else in f32"


def _reached(blame: Blame) -> str:
    pairs = zip(blame.outputs.names, blame.outputs.own, strict=True)
    names = [name for name, x in pairs if not np.isfinite(x).all()]
    if not names:
        return "no result"
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"the {names[0]}{more}"


# --- Remedies -------------------------------------------------------------------------


def _in_f32(place: Place, call: Call) -> str:
    """Returns how to keep a place in f32."""
    if call.route:
        selector = place.param if place.primitive in MATMULS else ""
        selector = selector.partition("/")[2] or selector or place.scope
        if selector:
            return f'keep it in f32: `mpx.{call.route}(fn, keep="{selector}")`'
        return "keep it in f32: put it under `with mpx.amp_stop():`"
    return "compute it in f32: cast its operands with `.astype(jnp.float32)`"


def _and_also(verdict: Verdict, blame: Blame, place: Place, call: Call) -> str:
    """Returns which other lines have to be in f32, too, if some have to."""
    if not verdict.is_mended:
        return (
            "; f32 for this line alone does not help, because its operands have lost their "
            "digits before"
        )
    nodes = [blame.nodes[i] for i in verdict.with_nodes]
    lines = dict.fromkeys(source_of(x.around.frames) for x in nodes)
    if not lines:
        return ""
    return (
        f"; together with {', '.join(lines)}: f32 for one of them alone does not help"
    )


def _remedy(kind: Kind, node: Node, place: Place, call: Call) -> str:
    if kind == "input":
        return "look at where this array comes from: the data, or an earlier step"
    makers = {
        "overflow": _for_overflow,
        "underflow": _for_underflow,
        "constant": _for_constant,
        "singularity": _for_singularity,
        "nan": _for_nan,
        "decision": _for_decision,
        "convergence": _for_convergence,
    }
    if kind in makers:
        return makers[kind](node, place, call)
    keep = _in_f32(place, call)
    if kind == "accumulation":
        return f"add up in f32: make the accumulator an f32 array, or {keep}"
    if kind == "cancellation":
        return (
            "avoid the difference of large numbers (a variance is mean((x - mean)²), not "
            f"mean(x²) - mean²), or {keep}"
        )
    if place.primitive in ("sin", "cos", "tan"):
        return (
            f"compute positions and angles in f32, and cast sine and cosine; or {keep}"
        )
    return keep


def _for_overflow(node: Node, place: Place, call: Call) -> str:
    keep = _in_f32(place, call)
    if place.backward and call.scale > 1 and call.headroom * call.scale >= 1:
        fits = 2.0 ** math.floor(math.log2(call.headroom * call.scale))
        return (
            f"the loss scale {call.scale:g} is too large here, {fits:g} would do: "
            "`DynamicLossScaling` lowers it by itself and skips this step"
        )
    if place.primitive in ("exp", "exp2", "pow", "expm1"):
        fix = (
            "subtract the maximum before `exp`, as `jax.nn.softmax` and `logsumexp` do"
        )
        return fix if node.format is None else f"{fix}; or {keep}"
    if node.format is None:
        return "make its operands smaller: f32 itself overflows"
    other = "" if node.format.name == "bf16" else "; or use bf16, whose range is f32's"
    return f"{keep}{other}"


def _for_underflow(node: Node, place: Place, call: Call) -> str:
    keep = _in_f32(place, call)
    if place.backward and node.format and node.format.name in ("f16", "e5m2", "e4m3"):
        if not call.scaled:
            return "use a loss scaling, such as `mpx.DynamicLossScaling.pow2()`"
        return f"use a larger loss scale than {call.scale:g}; or {keep}"
    if place.primitive == "log":
        return (
            f"use `jax.nn.log_softmax` or `log_sigmoid` in place of the log; or {keep}"
        )
    return f"{keep}; or scale the numbers up first"


def _for_constant(node: Node, place: Place, call: Call) -> str:
    name = (node.format or FORMATS["f32"]).name
    if 0 in node.written and place.primitive in ("add", "max", "mul", "div"):
        return (
            f"a constant here is 0 in {name}, probably a small epsilon: "
            f"add it in f32, or choose one above {(node.format or FORMATS['f32']).tiny:.1g}"
        )
    small = [x for x in node.written if 0 < abs(x) < EPSILON]
    if small and place.primitive in ("add", "max"):
        return (
            f"the epsilon {small[0]:g} is too small: divided by it, numbers exceed those of "
            "the format, here or in the gradient. Choose a larger one, or compute what "
            "depends on it in f32"
        )
    if place.primitive in ("select_n", "add", "broadcast_in_dim", "max"):
        return (
            "a row is masked completely, or the fill value overflows: use a finite number "
            f"that {name} holds, such as `jnp.finfo(x.dtype).min`, or compute it in f32"
        )
    return f"the constant is not finite in {name}: compute this in f32"


def _for_singularity(node: Node, place: Place, call: Call) -> str:
    if place.backward:
        return (
            "the derivative of this line is infinite at this operand: add an epsilon "
            "inside, or replace the operand by a safe one with `jnp.where` before the "
            "operation, not after it"
        )
    if place.primitive in ("log", "log1p"):
        return "use `log_softmax`, `log_sigmoid` or `logsumexp`, or add an epsilon"
    return "add an epsilon to the denominator, or replace zeros before the operation"


def _for_nan(node: Node, place: Place, call: Call) -> str:
    if place.primitive in ("sqrt", "rsqrt", "log", "pow"):
        return "the operand is negative: clip it at 0, or look at how it is computed"
    if place.primitive in ("acos", "asin", "atanh", "erf_inv"):
        return "the operand leaves [-1, 1] by rounding: clip it"
    return "the operands have no such result: replace them before the operation"


def _for_decision(node: Node, place: Place, call: Call) -> str:
    keep = _in_f32(place, call)
    return (
        f"do not let the loss depend on a comparison of nearly equal numbers, or {keep}"
    )


def _for_convergence(node: Node, place: Place, call: Call) -> str:
    return (
        "the tolerance is finer than the format resolves: choose one above the relative "
        f"distance of its numbers, or {_in_f32(place, call)}"
    )
