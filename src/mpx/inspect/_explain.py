"""`explain`: the first operation that goes wrong in low precision, and what to do."""

import contextlib
import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import jax
import numpy as np

from mpx._casting._context import is_amp, is_fp8
from mpx._fp8 import Fp8State
from mpx._jax._compat import REMAT_SCOPE, source_frames
from mpx._jax._formats import FORMATS
from mpx._program._queries import MATMULS
from mpx._scaling._loss_scaling import LossScaling, NoLossScaling, StaticLossScaling
from mpx.inspect._blame import EPSILON, Blame, Verdict, in_fp8, matmul_of
from mpx.inspect._equations import to_host
from mpx.inspect._program import Place, Program, gradient, program, unwrapped
from mpx.inspect._result import Result, Table, and_more, rough, source_of
from mpx.inspect._run import Node, before

_REMEDIES = {
    "overflow": "{keep}",
    "overflow, short": "{keep}; or use bf16, whose range is f32's",
    "overflow, f32": "make its operands smaller: f32 itself overflows",
    "overflow, exp": "subtract the maximum before `exp`, as `jax.nn.softmax` and "
    "`logsumexp` do{or_keep}",
    "overflow, scale": "the loss scale {scale:g} is too large here, {fits:g} would do: "
    "`DynamicLossScaling` lowers it by itself and skips this step",
    "underflow": "{keep}; or scale the numbers up first",
    "underflow, log": "use `jax.nn.log_softmax` or `log_sigmoid` in place of the log; or "
    "{keep}",
    "underflow, no scale": "use a loss scaling, such as `mpx.DynamicLossScaling.pow2()`",
    "underflow, scale": "use a larger loss scale than {scale:g}; or {keep}",
    "cancellation": "avoid the difference of large numbers (a variance is "
    "mean((x - mean)²), not mean(x²) - mean²); or {keep}, and the lines before it, too",
    "accumulation": "add up in f32: make the accumulator an f32 array, or {keep}",
    "clipping": "choose a scale that holds it: a larger `{role}_max` in `StaticScaling`, more "
    "`margin` in `DelayedScaling`, or `CurrentScaling()`, which clips nothing; or {keep}",
    "precision, fp8": "{keep}",
    "precision": "{keep}; positions and angles in f32, too, before their sine and cosine",
    "constant": "a number here is infinite in its format, or masks a whole row: use a "
    "finite one that {low.name} holds, such as `jnp.finfo(x.dtype).min`, or compute this "
    "in f32",
    "constant, small": "a small number here, probably an epsilon, is 0 in {low.name}, or "
    "its reciprocal is infinite: choose one above {least:.1g}, or compute what depends on "
    "it in f32",
    "singularity": "add an epsilon, replace zeros before the operation, or use "
    "`log_softmax`, `log_sigmoid` or `logsumexp` for a logarithm",
    "singularity, derivative": "the derivative of this line is infinite at this operand: "
    "add an epsilon inside, or replace the operand by a safe one with `jnp.where` before "
    "the operation, not after it",
    "nan": "the operand is outside the domain, maybe by a rounding: clip it before the "
    "operation, or look at how it is computed",
    "input": "look at where this array comes from: the data, or an earlier step",
    "decision": "do not let the loss depend on a comparison of nearly equal numbers; or "
    "{keep}, and the lines before it, too",
    "convergence": "the tolerance is finer than the format resolves: choose one above the "
    "relative distance of its numbers, or {keep}",
}
"""What to do, for each kind of fault and, after a comma, for the cases that have their own."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """An operation at fault.

    Attributes:
        kind: What went wrong: see the list in the guide.
        place: Where: primitive, parameter, scope, source line, forward or backward.
        near: The parameter that was read last on the way to it; "" if none was.
        caller: The line of your code that called a library, if the place is in one.
        step: The steps of the loops around it: (number of the step, number of steps).
        format: The format in which it computes: `f16`, `bf16`, `e4m3`, `int8`, `f32` …
        limit: The number of this format that matters: its largest for an overflow, its
            smallest for an underflow, else the relative distance of its numbers.
        operands: The smallest and largest number of each floating operand, in f32.
        result: The same of the result as it should be, in f32.
        got: The same of the finite numbers of the actual result.
        effect: What it leads to.
        remedy: What to do.
    """

    kind: str
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
        where += [f"after `{self.near}`"] if self.near else []
        for step, count in self.step:
            where.append(f"step {step} of a loop" + (f" of {count}" if count else ""))
        line = place.source
        line += f" in `{place.function}`" if place.function else ""
        line += f", called from {self.caller}" if self.caller else ""
        limits = {"overflow": "largest number", "underflow": "smallest number"}
        limits["clipping"] = "largest number at this scale"
        limit = limits.get(self.kind, "relative distance of numbers")
        limit = f": {limit} {self.limit:.5g}" if self.kind not in _NO_LIMIT else ""
        result = f"{_shown(self.result)} in f32, {_shown(self.got)} here"
        rows = {
            "operation": ", ".join(where),
            "line": line,
            "operands": "; ".join(map(_shown, self.operands)),
            "result": "" if self.kind in _NO_RESULT else result,
            "format": self.format + limit,
            "effect": self.effect,
            "remedy": self.remedy,
        }
        return "\n".join(f"  {key:<10} {row}" for key, row in rows.items() if row)


def _shown(ends: tuple[float, float]) -> str:
    low, high = ends
    if math.isnan(low):
        return "nothing finite"
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


# --- What a verdict means -------------------------------------------------------------

_NO_RESULT = ("input", "constant", "decision", "convergence", "clipping")
_NO_LIMIT = ("constant", "singularity", "nan", "input")


class _Reader:
    """Turns verdicts about a run into findings: the kind, the effect and the remedy."""

    def __init__(
        self, blame: Blame, func: Callable[..., Any], scaling: LossScaling | None
    ) -> None:
        self._blame, self._has_scaling = blame, scaling is not None
        # What `amp` keeps is f32 under `fp8`, too; what `fp8` keeps has 16 bits.
        self._wrapper = "amp" if is_amp(func) else "fp8" if is_fp8(func) else ""
        self.scale = 1.0 if scaling is None else float(scaling.loss_scaling)

    def finding(self, verdict: Verdict) -> Finding:
        blame, kind, node = self._blame, verdict.kind, verdict.node
        decides = kind in ("convergence", "decision")  # no result is made of it
        backward = node not in blame.forward and not decides
        low = (blame.format if decides else node.format) or FORMATS["f32"]
        limits = {"overflow": low.max, "underflow": low.smallest}
        # What `fp8` does for a matmul is told as that matmul, with its parameter.
        parts = matmul_of(node, blame.nodes)
        place, near = parts[0].place, ""
        param = next(filter(None, (x.place.param for x in parts)), "")
        backward = backward or place.backward
        place = dataclasses.replace(place, param=param, backward=backward)
        if not param:  # the parameter that was read last
            near = next(filter(None, (x.param for x in before([node]))), "")
        sources, effect = node.operands, verdict.effect
        role = ""
        if kind == "clipping":
            # Its operand is the product of the numbers and the inverse of their scale.
            sources = sources[0].operands[:1]
            limits[kind] = low.max * sources[0].largest / node.largest
            is_weight = any(x.param for x in in_fp8(node))
            role = "weight" if is_weight else "grad" if backward else "activation"
            what = "gradient" if role == "grad" else role
            effect = f"clips the {what} to {limits[kind]:.3g}, which {effect}"
        return Finding(
            kind=kind,
            place=place,
            near=near,
            caller=_caller(node),
            step=node.steps,
            format=low.name,
            limit=limits.get(kind, low.eps),
            operands=tuple(x.shadow for x in sources if not math.isnan(x.shadow[0])),
            result=node.shadow,
            got=node.own,
            effect=effect,
            remedy=self._remedy(kind, node, place, role),
        )

    def _remedy(self, kind: str, node: Node, place: Place, role: str) -> str:
        keep = "compute it in f32: cast its operands with `.astype(jnp.float32)`"
        wrapper = "fp8" if node.in_fp8 else self._wrapper
        if wrapper:
            selector = place.param if place.primitive in MATMULS else ""
            selector = selector.partition("/")[2] or selector or place.scope
            kept = "f32" if wrapper == "amp" else "16 bits"
            keep = f'keep it in {kept}: `mpx.{wrapper}(fn, keep="{selector}")`'
            if not selector:
                keep = f"keep it in {kept}: put it under `with mpx.amp_stop():`"
        low, room = node.format or FORMATS["f32"], self._blame.headroom * self.scale
        short, backward = low.name in ("f16", "e5m2", "e4m3"), place.backward
        cases = {
            "overflow, scale": backward and self.scale > 1 and room >= 1,
            "overflow, exp": place.primitive in ("exp", "exp2", "pow", "expm1"),
            "overflow, short": short,
            "overflow, f32": node.format is None,
            "underflow, no scale": backward and short and not self._has_scaling,
            "underflow, scale": backward and short,
            "underflow, log": place.primitive == "log",
            "constant, small": any(abs(x) < EPSILON for x in node.written),
            "singularity, derivative": backward,
            "precision, fp8": node.in_fp8,
        }
        chosen = (x for x, holds in cases.items() if holds and x.startswith(f"{kind},"))
        return _REMEDIES[next(chosen, kind)].format(
            keep=keep,
            role=role,
            or_keep=f"; or {keep}" if node.format else "",
            low=low,
            least=1 / low.max,
            scale=self.scale,
            fits=2.0 ** math.floor(math.log2(room)) if 0 < room < math.inf else 1.0,
        )


def _caller(node: Node) -> str:
    """Returns the first line outside installed packages, if it is not the first."""
    eqns = (x for x in (node.eqn, *reversed(node.here.callers)) if x is not None)
    frames = [frame for eqn in eqns for frame in source_frames(eqn)]
    library = f"{sys.base_prefix}/lib/python"
    own = (x for x in frames if "site-packages" not in x[1])
    first = next((x for x in own if not x[1].startswith(library)), None)
    return source_of([first]) if first and first != frames[0] else ""


# --- The explanation ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Explanation(Result):
    """What goes wrong in a function in low precision; made by `explain`.

    Attributes:
        ok: Whether nothing does.
        verdict: `"wrong"` if a number is not finite, or if loss or gradients have lost most
            of the digits of their format; `"inaccurate"` if their error is smaller than
            that, but larger than roundings explain; else `"ok"`.
        fault: The first operation at fault; `None` if there is none.
        others: Further ones, in the order of execution.
        loss: The loss of the compiled function.
        loss_in_f32: The loss of the function in f32.
        loss_error: The error of the loss, relative to that in f32.
        grad_errors: For each gradient of the compiled function the norm of its error,
            relative to the gradient in f32; to the other gradients if that is zero.
            Empty if the function has no scalar loss or no parameters.
        unstable: The gradients that are not judged: a single rounding of the parameters
            changes them. That of a bias before a normalization is zero but for roundings.
        formats: The formats below f32 that were met.
        equations: How many operations were run, with each step of a loop.
        scale: The loss scale.
        notes: What else to know.
    """

    ok: bool
    verdict: Literal["ok", "inaccurate", "wrong"]
    fault: Finding | None
    others: tuple[Finding, ...]
    loss: float
    loss_in_f32: float
    loss_error: float
    grad_errors: dict[str, float]
    unstable: tuple[str, ...]
    formats: tuple[str, ...]
    equations: int
    scale: float
    notes: tuple[str, ...]

    def tables(self) -> list[Table]:
        """Returns the fault, further ones, and what was looked at."""
        parts = []
        start = "Inaccurate" if self.verdict == "inaccurate" else "At fault"
        for finding in (self.fault, *self.others) if self.fault else ():
            way = "backward" if finding.place.backward else "forward"
            head = f"{start}: {finding.kind} in the {way} pass, at `{finding.label}`"
            parts.append(Table.text(str(finding), head))
            start = "Also"
        if not parts:
            text = f"The result is {self.verdict}, but no operation alone is."
            parts.append(Table.text("Nothing is wrong." if self.ok else text))
        return [*parts, Table.text(self._looked_at())]

    def _looked_at(self) -> str:
        formats = ", ".join(self.formats) or "nothing below f32"
        what = "loss and gradient" if self.grad_errors else "the forward pass only"
        lines = [f"Looked at {what}: {self.equations} operations; {formats}."]
        lines.append(f"loss {self.loss:.6g}, in f32 {self.loss_in_f32:.6g}")
        if 0.005 < self.loss_error < math.inf:
            lines[-1] += f" (off by {rough(self.loss_error)})"
        errors = {k: x for k, x in self.grad_errors.items() if k not in self.unstable}
        if errors:
            name, worst = max(errors.items(), key=lambda x: x[1])
            lines.append(f"largest error of a gradient: {rough(worst)} (`{name}`)")
        if self.unstable:
            names = and_more([f"`{x}`" for x in self.unstable])
            lines.append(f"not judged, zero but for roundings: {names}")
        if self.scale != 1:
            lines.append(f"loss scale {self.scale:g}")
        return "\n".join([*lines, *self.notes])


def _told_once(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Leaves out what the backward pass computes again, if it was told before."""
    told = set()
    for found in findings:
        key = found.kind, found.place.primitive, found.place.source, found.operands
        if key not in told or REMAT_SCOPE not in found.place.scope:
            yield found
        told.add(key)


def explain(
    func: Callable[..., Any],
    /,
    *args: Any,
    scaling: LossScaling | float | None = None,
    **kwargs: Any,
) -> Explanation:
    """Names the first operation whose result is wrong in low precision but not in f32.

    The loss and its gradient with respect to the parameters are computed on the given arrays:
    compiled, as in training, and in f32, without `amp`, `fp8` and casts to fewer bits. The
    errors that are reported are the distances of these two. To find the operation at fault,
    the program also runs operation by operation, once as it is and once in f32. A number that
    is not finite is traced to the operation that made it. A finite result is inaccurate if it
    differs from that in f32 by more than its format explains; an operation is at fault if it
    alone makes it so. Without any low precision, numbers that are not finite are traced.

    It is meant for one call on a small batch: each operation runs by itself, on the CPU.

    Args:
        func: What you train: a function that returns a scalar loss first, under
            `mpx.amp`, `mpx.fp8`, with casts of its own, or in plain f32. Of any other
            function only the forward pass is looked at.
        *args: Its positional arguments. The first holds the parameters.
        scaling: The loss scaling, as in a real step, or the scale as a number.
        **kwargs: Its keyword arguments.

    Raises:
        TypeError: If an argument is a shape without values, or `scaling` is no scaling.

    Examples:
        >>> import jax.numpy as jnp
        >>> def loss(w, x):
        ...     e = jnp.exp((x @ w).astype(jnp.float16))
        ...     return jnp.mean(e / e.sum(-1, keepdims=True)).astype(jnp.float32)
        >>> found = explain(loss, jnp.full((4, 4), 5.0), jnp.ones((2, 4)))
        >>> found.fault.kind, found.fault.place.primitive, found.fault.limit
        ('overflow', 'exp', 65504.0)
    """
    scaling = _as_scaling(scaling)
    # NumPy warns of constants that overflow; they are reported here.
    with np.errstate(all="ignore"):
        forward = program(func, args, kwargs)
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in forward.arrays):
            raise TypeError(
                "`explain` runs the function and needs arrays, but a "
                "`jax.ShapeDtypeStruct` was given. Pass the batch and the parameters; "
                "`mpx.inspect.report` takes shapes."
            )
        whole, labels = _with_gradient(forward, scaling)
        # As written: without `amp` and `fp8`.
        plain = tuple(x for x in args if not isinstance(x, Fp8State))
        exact, _ = _with_gradient(program(unwrapped(func)[0], plain, kwargs), None)
    device = jax.config.values["jax_default_device"]

    def compiled() -> list[Any]:
        with jax.default_device(device):
            return [to_host(x) for x in jax.jit(whole.__call__)(*whole.arrays)]

    with jax.default_device(_cpu()), np.errstate(all="ignore"):
        blame = Blame(whole, exact, labels, compiled)
        reader, judgement = _Reader(blame, func, scaling), blame.judgement
        found = _told_once(reader.finding(x) for x in blame.verdicts)
        fault, *others = [*found] or [None]
        errors = [*blame.errors.tolist(), 0.0]
        params = [forward.names[i] for i in forward.params if whole is not forward]
        formats = {x.format.name for x in blame.nodes if x.format is not None}
        return Explanation(
            ok=judgement == "ok",
            verdict=judgement,
            fault=fault,
            others=tuple(filter(None, others)),
            loss=_first(blame.actual),
            loss_in_f32=_first(blame.exact),
            loss_error=errors[0] if forward.has_loss else 0.0,
            grad_errors=dict(zip(params, errors[1:], strict=False)),
            unstable=tuple(itertools.compress(params, blame.unstable)),
            formats=tuple(sorted(formats)),
            equations=blame.recording.equations,
            scale=reader.scale,
            notes=blame.notes,
        )


def _as_scaling(scaling: LossScaling | float | None) -> LossScaling | None:
    if scaling is None or isinstance(scaling, LossScaling):
        return scaling
    with contextlib.suppress(TypeError, ValueError):
        return StaticLossScaling(float(scaling))
    raise TypeError(
        "`scaling` must be a loss scaling such as `mpx.DynamicLossScaling.pow2()` or a "
        f"positive number, but {type(scaling).__name__} was given. Pass the scaling of "
        "the training state, not the state."
    )


def _with_gradient(
    forward: Program, scaling: LossScaling | None
) -> tuple[Program, list[str]]:
    """Returns the program to look at, and the names of its results."""
    if not forward.has_loss or not forward.params:
        labels = [f"result {i}" for i in range(len(forward.jaxpr.out_avals))]
        return forward, ["loss", *labels[1:]] if forward.has_loss else labels
    names = [f"gradient of `{forward.names[i]}`" for i in forward.params]
    return gradient(forward, scaling or NoLossScaling()), ["loss", *names]


def _cpu() -> Any:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise RuntimeError(
            "`explain` runs the operations on the CPU, but JAX was started without it. Name "
            "it beside the accelerator: `JAX_PLATFORMS=cuda,cpu`, or leave that unset."
        ) from error


def _first(outs: list[np.ndarray]) -> float:
    return float(outs[0].reshape(-1)[0]) if outs and outs[0].size else math.nan
