"""Measured policies: their gradients against f32, their times, and the best of them."""

import concurrent.futures
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from mpx._casting._half import gradient_function
from mpx._jax._progress import Tell, silent
from mpx._scaling._loss_scaling import StaticLossScaling
from mpx.inspect._pieces import Pieces, cheap_options
from mpx.inspect._predictions import DOUBT, Predictions, relative_change
from mpx.inspect._program import Program, gradient, program
from mpx.inspect._result import percent
from mpx.inspect._search import (
    Candidate,
    Judged,
    Option,
    PrecisionPolicy,
    candidate,
    front,
    option,
)

_COUNT = 3  # policies of the frontier that are measured at a time
_OFF = 2.0  # predictions that are off by more are replaced
_ROUNDS = 3
_NEAR = 1.02  # policies within this factor of the fastest are about as fast
_LEANER = 0.95
_TURNS = 9
_LEAST_TIME = 0.02  # seconds of calls, so that one measurement is longer than its noise


class Bench:
    """Measures the gradients of policies against the gradient in f32.

    Attributes:
        has_gpu: Whether policies are timed.
        done: The measurements of each policy, as fields of `Candidate`.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        scale: float,
    ) -> None:
        self._call, self._scale = (func, args, kwargs), scale
        self.has_gpu = jax.default_backend() == "gpu"
        self.done: dict[PrecisionPolicy, dict[str, Any]] = {}
        self._runs: dict[PrecisionPolicy, Callable[[], list[Array]]] = {}

    @functools.cached_property
    def _exact(self) -> list[Array]:
        """The gradient in f32, multiplied in full f32."""
        func, args, kwargs = self._call
        with jax.default_matmul_precision("highest"):
            grad = gradient(program(func, args, kwargs))
            return Pieces(grad.__call__, *grad.arrays)(*grad.arrays)[1:]

    def measure(
        self, policies: Sequence[PrecisionPolicy], tell: Tell = silent
    ) -> list[float]:
        """Returns the error of the gradient under each policy."""
        todo = [x for x in dict.fromkeys(policies) if x not in self.done]
        if todo:
            tell("measuring")
            with concurrent.futures.ThreadPoolExecutor(len(todo)) as pool:
                jobs, grads = [], []
                for policy in todo:
                    tell(f"compiling {policy}", part=True)
                    grads.append(self._gradient(policy))
                    lowered = jax.jit(grads[-1].__call__).lower(*grads[-1].arrays)
                    cheap = None if self.has_gpu else cheap_options()
                    jobs.append(pool.submit(lowered.compile, compiler_options=cheap))
                every = [job.result() for job in jobs]  # before anything is timed
            for policy, compiled, grad in zip(todo, every, grads, strict=True):
                tell(f"measuring {policy}", part=True)
                run = functools.partial(compiled, *grad.arrays)
                error = relative_change(run()[1:], self._exact)
                analysis = compiled.memory_analysis()
                self._runs[policy] = run
                self.done[policy] = {
                    "error": error if math.isfinite(error) else math.inf,
                    "memory": getattr(analysis, "temp_size_in_bytes", None),
                }
        return [self.done[policy]["error"] for policy in policies]

    def _gradient(self, policy: PrecisionPolicy) -> Program:
        func, args, kwargs = self._call
        with gradient_function():
            forward = program(policy.apply(func), args, kwargs)
            scaling = StaticLossScaling(self._scale) if policy.half == "f16" else None
            return gradient(forward, scaling)

    def time(self, tell: Tell = silent) -> None:
        """Times the measured policies on a GPU, in turn, and adds how far times spread."""
        if not self.has_gpu:
            return
        tell("timing")
        counts = {
            policy: math.ceil(_LEAST_TIME / max(_seconds(call, 2), 1e-9))
            for policy, call in self._runs.items()
        }
        found: dict[PrecisionPolicy, list[float]] = {x: [] for x in counts}
        for _ in range(_TURNS):
            for policy, call in self._runs.items():
                found[policy].append(_seconds(call, counts[policy]))
        for policy, times in found.items():
            low, middle, high = np.quantile(times, (0.1, 0.5, 0.9))
            self.done[policy] |= {"time": float(middle), "spread": float(high - low)}


def _seconds(call: Callable[[], list[Array]], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times - 1):
        call()
    jax.block_until_ready(call())
    return (time.perf_counter() - start) / times


def measure_frontier(
    known: Judged,
    bench: Bench,
    halves: Sequence[str],
    limit: float,
    *,
    with_fp8: bool,
    tell: Tell = silent,
) -> tuple[list[Candidate], set[str]]:
    """Returns the frontier and the default, the first of `halves`, some of them measured.

    Also returns the groups whose predictions were replaced by measurements.
    """
    default, names = option(known, halves[0]), set[str]()
    best: list[Option] = []
    for _ in range(_ROUNDS):
        best = front(known, halves, with_fp8=with_fp8)
        chosen = [x for x in best if x.error <= limit][:_COUNT] or best[-1:]
        _, *errors = bench.measure([x.policy for x in (default, *chosen)], tell)
        pairs = zip(chosen, errors, strict=True)
        off = [x for x, error in pairs if _is_off(x.error, error)]
        if not off:
            break
        tell("measuring single groups", part=True)
        predicted = _repaired(known, off[0], names)
        if predicted is known.predicted:
            break
        known = known._replace(predicted=predicted)
    # The rest of the frontier, until a policy is good enough. Those after the measured
    # ones come first: they are slower and more exact.
    last = max((i for i, x in enumerate(best) if x.policy in bench.done), default=-1)
    left = [x.policy for x in (*best[last + 1 :], *best[:last])]
    left = [x for x in left if x not in bench.done]
    while left and not any(x["error"] <= limit for x in bench.done.values()):
        bench.measure(left[:_COUNT], tell)
        left = left[_COUNT:]
    bench.time(tell)
    every = {x.policy: x for x in (*best, option(known, default.half))}
    found = [
        dataclasses.replace(candidate(known, x), **bench.done.get(policy, {}))
        for policy, x in every.items()
    ]
    return sorted(found, key=lambda x: x.predicted_time), names


def _is_off(predicted: float, measured: float) -> bool:
    if predicted == 0 or not math.isfinite(measured):
        return False
    return not 1 / _OFF <= measured / predicted <= _OFF


def _repaired(
    known: Judged, found: Option, names: set[str], most: int = 3
) -> Predictions:
    """Returns predictions in which the worst groups of an option have been measured.

    Each is emulated alone. Those in doubt come first, then those with the largest share.
    """
    predicted, half = known.predicted, found.half

    def urgency(i: int) -> tuple[bool, float]:
        is_doubtful = predicted.share_of_doubt(half, i) > DOUBT
        return is_doubtful, predicted.square(half, [i], alone=True)

    todo = [i for i in found.low if known.groups[i].label not in names]
    worst = sorted(todo, key=urgency, reverse=True)[:most]
    exact = known.study.emulate(known.arrays, half, ())[1:] if worst else []
    for i in worst:
        grads = known.study.emulate(known.arrays, half, (i,), alone=True)[1:]
        square = relative_change(grads, exact) ** 2
        predicted = predicted.replaced(half, i, square)
        names.add(known.groups[i].label)
    return predicted


def choose(
    candidates: Sequence[Candidate], half: str, limit: float, has_gpu: bool
) -> tuple[PrecisionPolicy, str]:
    """Returns the fastest measured policy within the limit, and why in one sentence."""
    seen = [(x, x.error) for x in candidates if x.error is not None]
    good = [x for x, error in seen if error <= limit]
    if not good:
        best, error = min(seen, key=lambda pair: pair[1])
        return best.policy, (
            f"No policy of the frontier reaches {limit:g}: this is the most exact, with "
            f"{error:.1e}. Pass a larger `max_grad_error`, or stay in f32."
        )
    usual, usual_error = next(
        pair for pair in seen if pair[0].policy == PrecisionPolicy(half)
    )
    best = _fastest(good, usual, has_gpu)
    by = (
        "as timed on this GPU" if has_gpu else "by the cost table of an H200; not timed"
    )
    if usual is best:
        return best.policy, f"The default of `amp` is best within {limit:g}, {by}."
    remark = f"The fastest policy within {limit:g}, {by}."
    if usual_error > limit:
        return best.policy, (
            f"{remark} The default of `amp` has an error of {usual_error:.1e}."
        )
    times = _clock(best, has_gpu), _clock(usual, has_gpu)
    slower, faster = (usual, best) if times[0] < times[1] else (best, usual)
    same = _is_tie(slower, faster, has_gpu)
    changes = ["the same time within its spread" if same else _change("time", *times)]
    if best.memory is not None and usual.memory:
        changes.append(_change("memory", best.memory, usual.memory))
    return (
        best.policy,
        f"{remark} Compared with the default of `amp`: {', '.join(changes)}.",
    )


def _change(what: str, new: float, old: float) -> str:
    share = 1 - new / max(old, 1e-30)
    return f"{percent(abs(share))} {'less' if share >= 0 else 'more'} {what}"


def _clock(candidate: Candidate, has_gpu: bool) -> float:
    return (candidate.time or 0.0) if has_gpu else candidate.predicted_time


def _is_tie(slower: Candidate, faster: Candidate, has_gpu: bool) -> bool:
    """Returns whether two times differ by no more than they vary from run to run."""
    noise = (slower.spread or 0.0) + (faster.spread or 0.0)
    least = _clock(faster, has_gpu)
    return _clock(slower, has_gpu) <= max(_NEAR * least, least + noise)


def _fastest(good: Sequence[Candidate], usual: Candidate, has_gpu: bool) -> Candidate:
    """Returns the fastest candidate; the default or the leanest of those about as fast."""
    fastest = min(good, key=lambda x: _clock(x, has_gpu))
    near = [x for x in good if _is_tie(x, fastest, has_gpu)]
    # What a program needs on a CPU says nothing about a GPU.
    sizes = {id(x): x.memory for x in near if has_gpu and x.memory}
    lean = min(near, key=lambda x: sizes.get(id(x), math.inf))
    if usual not in near:
        return lean if sizes else fastest
    is_leaner = sizes.get(id(lean), math.inf) < _LEANER * sizes.get(id(usual), 0)
    return lean if is_leaner else usual
