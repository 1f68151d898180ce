"""The laboratory: gradients of policies and of single groups, measured against f32."""

import concurrent.futures
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from mpx._casting._half import gradient_function
from mpx._jax._progress import Tell, silent
from mpx._scaling._loss_scaling import StaticLossScaling
from mpx.inspect._advice import DOUBT
from mpx.inspect._candidates import Option
from mpx.inspect._judged import Judged
from mpx.inspect._pieces import Pieces, cheap_options
from mpx.inspect._policies import PrecisionPolicy
from mpx.inspect._predictions import Predictions
from mpx.inspect._program import Program, gradient, program
from mpx.inspect._sensitivity import norm

_TURNS = 9
_LEAST_TIME = 0.02  # seconds of calls, so that one measurement is longer than its noise


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
        self._calls: dict[PrecisionPolicy, Callable[[], Any]] = {}

    @functools.cached_property
    def exact(self) -> list[Any]:
        """The gradient in f32, multiplied in full f32."""
        func, args, kwargs = self.call
        with jax.default_matmul_precision("highest"):
            grad = gradient(program(func, args, kwargs))
            return Pieces(grad.__call__, *grad.arrays)(*grad.arrays)[1:]

    def measure(
        self, policies: Sequence[PrecisionPolicy], tell: Tell = silent
    ) -> list[dict[str, Any]]:
        """Returns error and memory of the gradient under each policy."""
        todo = [x for x in dict.fromkeys(policies) if x not in self.done]
        if todo:
            tell("measuring")
            made = self._compiled(todo, tell)
            for policy, (compiled, grad) in zip(todo, made, strict=True):
                tell(f"measuring {policy}", part=True)
                self.done[policy] = self._measured(compiled, grad)
                self._calls[policy] = functools.partial(compiled, *grad.arrays)
        return [self.done[policy] for policy in policies]

    def time(self, tell: Tell = silent) -> None:
        """Times the measured policies on a GPU, in turn, and adds how far times spread."""
        if not self.has_gpu:
            return
        tell("timing")
        counts = {
            policy: math.ceil(_LEAST_TIME / max(_seconds(call, 2), 1e-9))
            for policy, call in self._calls.items()
        }
        found: dict[PrecisionPolicy, list[float]] = {x: [] for x in counts}
        for _ in range(_TURNS):
            for policy, call in self._calls.items():
                found[policy].append(_seconds(call, counts[policy]))
        for policy, times in found.items():
            low, middle, high = np.quantile(times, (0.1, 0.5, 0.9))
            self.done[policy] |= {"time": float(middle), "spread": float(high - low)}

    def _compiled(
        self, policies: Sequence[PrecisionPolicy], tell: Tell
    ) -> list[tuple[Any, Program]]:
        """Returns the gradients under some policies, compiled at the same time."""
        with concurrent.futures.ThreadPoolExecutor(len(policies)) as pool:
            jobs, grads = [], []
            for policy in policies:
                tell(f"compiling {policy}", part=True)
                grads.append(self._gradient(policy))
                lowered = jax.jit(grads[-1].__call__).lower(*grads[-1].arrays)
                options = None if self.has_gpu else cheap_options()
                jobs.append(pool.submit(lowered.compile, compiler_options=options))
            # All of them before anything is timed.
            return list(zip([job.result() for job in jobs], grads, strict=True))

    def _gradient(self, policy: PrecisionPolicy) -> Program:
        func, args, kwargs = self.call
        with gradient_function():
            forward = program(policy.apply(func), args, kwargs)
            scaling = StaticLossScaling(self.scale) if policy.half == "f16" else None
            return gradient(forward, scaling)

    def _measured(self, compiled: Any, grad: Program) -> dict[str, Any]:
        outs = compiled(*grad.arrays)
        error = float(_distance(outs[1:], self.exact) / norm(self.exact))
        analysis = compiled.memory_analysis()
        return {
            "error": error if math.isfinite(error) else math.inf,
            "memory": getattr(analysis, "temp_size_in_bytes", None),
        }


def _distance(a: Sequence[Any], b: Sequence[Any]) -> Any:
    return norm([x - y for x, y in zip(a, b, strict=True)])


def _seconds(call: Callable[[], Any], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times - 1):
        call()
    jax.block_until_ready(call())
    return (time.perf_counter() - start) / times


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
        change = float(_distance(grads, exact))
        predicted = predicted.replaced(half, i, (change / size) ** 2)
        names.add(known.groups[i].label)
    return predicted
