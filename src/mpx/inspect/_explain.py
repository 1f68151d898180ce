"""`explain`: the first operation that goes wrong in low precision, and what to do."""

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import numpy as np

from mpx._fp8 import Fp8State
from mpx._scaling._loss_scaling import LossScaling, NoLossScaling, StaticLossScaling
from mpx.inspect._blame import Blame
from mpx.inspect._equations import to_host
from mpx.inspect._findings import Finding, Reader
from mpx.inspect._program import Program, gradient, program, unwrapped
from mpx.inspect._result import Result, Table


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
        unstable: The gradients that are not judged: a single rounding of the parameters
            changes them. That of a bias before a normalization is zero but for roundings.
        formats: The formats below f32 that were met.
        equations: How many operations were run, with each step of a loop.
        scale: The loss scale.
        has_gradient: Whether the gradient was looked at: the function returns a scalar
            first, and has parameters.
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
    has_gradient: bool
    notes: tuple[str, ...]

    def tables(self) -> list[Table]:
        """Returns the fault, further ones, and what was looked at."""
        parts = []
        if self.fault is not None:
            start = "Inaccurate" if self.verdict == "inaccurate" else "At fault"
            parts.append(Table.text(str(self.fault), _headline(start, self.fault)))
        elif self.ok:
            parts.append(Table.text("Nothing is wrong."))
        else:
            parts.append(
                Table.text(f"The result is {self.verdict}, but no operation alone is.")
            )
        for other in self.others:
            parts.append(Table.text(str(other), _headline("Also", other)))
        return [*parts, Table.text(self._looked_at())]

    def _looked_at(self) -> str:
        formats = ", ".join(self.formats) or "nothing below f32"
        what = "loss and gradient" if self.has_gradient else "the forward pass only"
        lines = [f"Looked at {what}: {self.equations} operations; {formats}."]
        is_off = 0.005 < self.loss_error < math.inf
        off = f" (off by {_amount(self.loss_error)})" if is_off else ""
        lines.append(f"loss {self.loss:.6g}, in f32 {self.loss_in_f32:.6g}{off}")
        errors = {k: x for k, x in self.grad_errors.items() if k not in self.unstable}
        if errors:
            name, worst = max(errors.items(), key=lambda x: x[1])
            lines.append(f"largest error of a gradient: {_amount(worst)} (`{name}`)")
        if self.unstable:
            more = f" and {len(self.unstable) - 1} more" if self.unstable[1:] else ""
            lines.append(
                f"not judged, zero but for roundings: `{self.unstable[0]}`{more}"
            )
        if self.scale != 1:
            lines.append(f"loss scale {self.scale:g}")
        return "\n".join([*lines, *self.notes])


def _amount(error: float) -> str:
    if not math.isfinite(error):
        return "not finite"
    return "more than 1000 %" if error > 10 else f"{float(f'{100 * error:.2g}'):g} %"


def _headline(start: str, fault: Finding) -> str:
    way = "backward" if fault.place.backward else "forward"
    return f"{start}: {fault.kind} in the {way} pass, at `{fault.label}`"


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
    alone makes it so, and the remedy is tried. Without any low precision, numbers that are not
    finite are traced.

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
            "`explain` runs the function and needs arrays, but a `jax.ShapeDtypeStruct` "
            "was given. Pass the batch and the parameters; `mpx.inspect.report` takes "
            "shapes."
        )
    with np.errstate(all="ignore"):
        whole, labels = _with_gradient(forward, scaling)
        # As written: without `amp` and `fp8`.
        plain = tuple(x for x in args if not isinstance(x, Fp8State))
        exact, _ = _with_gradient(program(unwrapped(func)[0], plain, kwargs), None)
    device = jax.config.values["jax_default_device"]

    def compiled() -> list[Any]:
        with jax.default_device(device):
            return [to_host(x) for x in jax.jit(whole.__call__)(*whole.arrays)]

    # On the CPU, where NumPy runs most operations and few have to be compiled.
    with _progress() as tick, jax.default_device(_cpu()):
        blame = Blame(whole, exact, labels, compiled, tick)
        return _explanation(blame, Reader(blame, func, scaling), whole)


def _as_scaling(scaling: Any) -> LossScaling | None:
    if scaling is None or isinstance(scaling, LossScaling):
        return scaling
    if isinstance(scaling, int | float) or np.ndim(scaling) == 0:
        with contextlib.suppress(TypeError, ValueError):
            return StaticLossScaling(scaling)
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


def _explanation(blame: Blame, reader: "Reader", whole: Program) -> Explanation:
    findings = [reader.finding(x) for x in blame.verdicts]
    has_gradient = any(blame.is_grad)
    known = [str(whole.names[i]) for i in whole.params] if has_gradient else []
    grads = list(zip(known, blame.errors[1:], blame.stable[1:], strict=False))
    formats = {x.format.name for x in blame.nodes if x.format is not None}
    has_loss = "loss" in blame.names[:1]
    return Explanation(
        ok=blame.judgement == "ok",
        verdict=blame.judgement,
        fault=findings[0] if findings else None,
        others=tuple(findings[1:]),
        loss=_first(blame.actual),
        loss_in_f32=_first(blame.exact),
        loss_error=blame.errors[0] if has_loss else 0.0,
        grad_errors={name: x for name, x, _ in grads},
        unstable=tuple(name for name, _, stable in grads if not stable),
        formats=tuple(sorted(formats)),
        equations=sum(x.eqn is not None for x in blame.nodes),
        scale=reader.scale,
        has_gradient=has_gradient,
        notes=blame.notes,
    )


def _first(outs: list[np.ndarray]) -> float:
    return float(outs[0].reshape(-1)[0]) if outs and outs[0].size else float("nan")


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[], None]]:
    """Shows how many operations have run, in a terminal, from the third second on."""
    start, count, shown = time.monotonic(), 0, 0.0

    def tick() -> None:
        nonlocal count, shown
        count += 1
        now = time.monotonic()
        if now - start > 3 and now - shown > 0.5 and sys.stderr.isatty():
            shown = now
            print(f"\rexplain: {count} operations", end="", file=sys.stderr, flush=True)

    try:
        yield tick
    finally:
        if shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
