"""Candidates: policies from the fastest on, with what is predicted for each."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from mpx.inspect._groups import Keep
from mpx.inspect._judged import Judged
from mpx.inspect._policies import PrecisionPolicy, policy_for, seconds, selected
from mpx.inspect._proposals import best_keep, forced

_MOST_KEPT = 12


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A policy with its predictions, and measurements if it was proposed.

    Attributes:
        policy: The policy.
        predicted_error: The predicted error of the gradient, relative to the gradient.
        predicted_time: The predicted time of what the policy can change, in seconds on the
            GPU of the cost table.
        error: The measured error, `None` if it was not measured. It is infinite if the
            gradient is not finite.
        time: The measured seconds of a gradient; `None` without a GPU.
        spread: How far that time varied between runs, in seconds.
        memory: The bytes that the compiled gradient needs besides its arguments and results.
    """

    policy: PrecisionPolicy
    predicted_error: float
    predicted_time: float
    error: float | None = None
    time: float | None = None
    spread: float | None = None
    memory: int | None = None


class Option(NamedTuple):
    """A policy as groups.

    Attributes:
        half: The 16-bit format.
        kept: Selectors of what stays in f32.
        fp8: The groups whose matmuls run in fp8.
        kept_fp8: Selectors of what does not.
    """

    half: str
    kept: tuple[Keep, ...] = ()
    fp8: frozenset[int] = frozenset()
    kept_fp8: tuple[Keep, ...] = ()

    def low(self, known: Judged) -> set[int]:
        """Returns the groups in 16 bits."""
        return known.active - selected(known.groups, self.kept)

    @property
    def policy(self) -> PrecisionPolicy:
        """The policy."""
        return policy_for(
            self.half, self.kept, is_fp8=bool(self.fp8), kept_fp8=self.kept_fp8
        )

    def candidate(self, known: Judged) -> Candidate:
        """Returns the policy with its predictions."""
        low = self.low(known)
        return Candidate(
            self.policy,
            math.sqrt(known.predicted.square(self.half, low, self.fp8)),
            seconds(known.work, self.half, low, self.fp8),
        )


def options(known: Judged, halves: Sequence[str], with_fp8: bool) -> list[Option]:
    """Returns policies from the fastest on, each with one more selector than the last.

    The sum of squares makes the greedy order good: against an exhaustive search it is
    within a few percent at equal cost.
    """
    found = []
    for half in halves:
        kept = forced(known, half)
        found.append(Option(half, tuple(kept)))
        while len(kept) < _MOST_KEPT:
            best = best_keep(known, half, found[-1].low(known))
            if best is None:
                break
            kept.append(best)
            found.append(Option(half, tuple(kept)))
    if with_fp8 and known.fp8 and "bf16" in halves:
        for option in [x for x in found if x.half == "bf16"][:4]:
            found += _with_fp8(known, option)
    return found


def _with_fp8(known: Judged, option: Option) -> list[Option]:
    chosen = known.fp8 & option.low(known)
    kept: list[Keep] = []
    found = []
    while chosen and len(kept) < _MOST_KEPT:
        found.append(option._replace(fp8=frozenset(chosen), kept_fp8=tuple(kept)))

        def loss(i: int) -> float:
            cost = known.work[i]
            saved = cost.seconds("bf16") - cost.seconds("fp8")
            return known.predicted.recipe.get(i, 0.0) / (saved + 1e-15)

        worst = max(sorted(chosen), key=loss)
        kept.append(known.groups[worst].selector)
        chosen = chosen - selected(known.groups, kept)
    return found


def front(options: Sequence[Option], known: Judged) -> list[Option]:
    """Returns the options that no other beats in both time and error, fastest first."""
    scored = [(x.candidate(known), x) for x in options]
    scored.sort(key=lambda pair: (pair[0].predicted_time, pair[0].predicted_error))
    best, found = math.inf, []
    for candidate, option in scored:
        if candidate.predicted_error < best:
            best = candidate.predicted_error
            found.append(option)
    return found
