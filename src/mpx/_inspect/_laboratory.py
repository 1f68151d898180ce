"""The laboratory: gradients of policies and of single groups, measured against f32."""

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from mpx._half import gradient_function
from mpx._inspect._advice import DOUBT
from mpx._inspect._candidates import Option
from mpx._inspect._judged import Judged
from mpx._inspect._policies import PrecisionPolicy
from mpx._inspect._predictions import Predictions
from mpx._inspect._program import gradient, program
from mpx._inspect._sensitivity import norm
from mpx._loss_scaling import StaticLossScaling


class Laboratory:
    """Measures policies against the gradient in f32."""

    def __init__(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        scale: float,
    ) -> None:
        self.call, self.scale = (func, args, kwargs), scale
        self.has_gpu = jax.default_backend() == "gpu"
        self.done: dict[PrecisionPolicy, dict[str, Any]] = {}

    @functools.cached_property
    def exact(self) -> list[Any]:
        """The gradient in f32, multiplied in full f32."""
        func, args, kwargs = self.call
        with jax.default_matmul_precision("highest"):
            grad = gradient(program(func, args, kwargs))
            return jax.jit(grad.__call__)(*grad.arrays)[1:]

    def measure(self, policy: PrecisionPolicy) -> dict[str, Any]:
        """Returns error, time and memory of the gradient under a policy."""
        if policy not in self.done:
            self.done[policy] = self._measure(policy)
        return self.done[policy]

    def _measure(self, policy: PrecisionPolicy) -> dict[str, Any]:
        func, args, kwargs = self.call
        with gradient_function():
            forward = program(policy.apply(func), args, kwargs)
            scaling = StaticLossScaling(self.scale) if policy.half == "f16" else None
            grad = gradient(forward, scaling)
        compiled = jax.jit(grad.__call__).lower(*grad.arrays).compile()
        outs = compiled(*grad.arrays)
        error = float(
            norm([a - b for a, b in zip(outs[1:], self.exact, strict=True)])
            / norm(self.exact)
        )
        analysis = compiled.memory_analysis()
        return {
            "error": error if math.isfinite(error) else math.inf,
            "time": _timed(compiled, grad.arrays) if self.has_gpu else None,
            "memory": getattr(analysis, "temp_size_in_bytes", None),
        }


def _timed(call: Callable[..., Any], arrays: Sequence[Any]) -> float:
    """Returns the median time of a call."""
    found = []
    for _ in range(7):
        start = time.perf_counter()
        jax.block_until_ready(call(*arrays))
        found.append(time.perf_counter() - start)
    return sorted(found)[len(found) // 2]


def repaired(
    known: Judged, option: Option, names: set[str], most: int = 3
) -> Predictions:
    """Returns predictions in which the worst groups of an option have been measured.

    Each is emulated alone. Those in doubt come first, then those with the largest share.
    """
    predicted, half = known.predicted, option.half

    def urgency(i: int) -> tuple[bool, float]:
        is_doubtful = predicted.share_of_doubt(half, i) > DOUBT
        return is_doubtful, predicted.square(half, [i], alone=True)

    todo = [i for i in option.low(known) if known.groups[i].label not in names]
    worst = sorted(todo, key=urgency, reverse=True)[:most]
    if not worst:
        return predicted
    exact = known.study.emulate(known.arrays, half, ())[1:]
    size = float(norm(exact))
    for i in worst:
        grads = known.study.emulate(known.arrays, half, (i,), alone=True)[1:]
        change = float(norm([a - b for a, b in zip(grads, exact, strict=True)]))
        predicted = predicted.replaced(half, i, (change / size) ** 2)
        names.add(known.groups[i].label)
    return predicted
