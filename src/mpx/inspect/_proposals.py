"""Proposals: the shortest keep-lists that are predicted to be good enough."""

import dataclasses
import math
from collections.abc import Collection, Sequence

from mpx.inspect._groups import Keep
from mpx.inspect._judged import Judged
from mpx.inspect._policies import PrecisionPolicy, policy_for, seconds, selected

LIMITS = {"bf16": 0.05, "f16": 0.05, "fp8": 0.25}
"""The gradient errors that are left without a remark. They are a judgement: about what one
16-bit or 8-bit rounding of every operand does to the gradient of a healthy model."""
MOST_VANISHING = 0.5
"""The share of numbers that f16 may make zero."""


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A policy, and what is predicted for it.

    Attributes:
        name: `"bf16"`, `"f16"` or `"fp8"`.
        policy: The policy; `policy.apply(loss)` applies it, and `str(policy)` is its code.
        error: The predicted relative error of the gradient.
        default: The same without any keep-list.
        kept: The labels of the groups that stay in f32, or of fp8 in 16 bits.
        remark: What to know before it is used.
    """

    name: str
    policy: PrecisionPolicy
    error: float
    default: float
    kept: tuple[str, ...]
    remark: str = ""


def propose(known: Judged, name: str, limit: float) -> Proposal:
    """Returns the policy with the shortest keep-list that is predicted to be good enough."""
    if name == "fp8":
        return _propose_fp8(known, limit)
    predicted, active = known.predicted, known.active
    kept = forced(known, name)
    kept += keep_list(known, name, limit, kept)
    low = active - selected(known.groups, kept)
    error = math.sqrt(predicted.square(name, low))
    remarks = []
    if name == "f16":
        remarks.append(
            "Take the gradient with `mpx.value_and_grad` and a loss scaling."
        )
    if error > limit:
        remarks.append(f"No keep-list reaches {limit:g}.")
    if active and not low:
        remarks.append(
            "Nothing is left in 16 bits: the operations at fault have no name that is "
            "theirs alone. Put them into a `jax.named_scope`, or use another format."
        )
    return Proposal(
        name,
        policy_for(name, kept),
        error,
        math.sqrt(predicted.square(name, active)),
        _labels(known, active - low),
        " ".join(remarks),
    )


def forced(known: Judged, name: str) -> list[Keep]:
    """Returns selectors of the groups whose numbers f16 cannot hold."""
    if name != "f16":
        return []
    predicted = known.predicted
    bad = [
        i
        for i in sorted(known.active)
        if predicted.overflows(i) or predicted.vanishing(i) > MOST_VANISHING
    ]
    return list(dict.fromkeys(known.groups[i].selector for i in bad))


def keep_list(
    known: Judged, half: str, limit: float, kept: Sequence[Keep] = ()
) -> list[Keep]:
    """Returns selectors that bring the predicted error below a limit, greedily.

    Each one is that with the largest decrease of the squared error for the time it costs.
    """
    found: list[Keep] = []
    while True:
        low = known.active - selected(known.groups, [*kept, *found])
        if known.predicted.square(half, low) <= limit**2:
            return found
        best = best_keep(known, half, low)
        if best is None:
            return found
        found.append(best)


def best_keep(known: Judged, half: str, low: set[int]) -> Keep | None:
    """Returns the selector that pays most if it is added; `None` if none does."""
    square = known.predicted.square(half, low)
    time = seconds(known.work, half, low)
    everything = seconds(known.work, half, ()) - seconds(known.work, half, known.active)
    scores: dict[Keep, float] = {}
    for selector in dict.fromkeys(known.groups[i].selector for i in sorted(low)):
        rest = low - selected(known.groups, [selector])
        gain = square - known.predicted.square(half, rest)
        slower = seconds(known.work, half, rest) - time
        if gain > 0 and (len(rest) > 0 or len(low) == 1):
            scores[selector] = gain / (slower + 0.01 * everything + 1e-15)
    return max(scores, key=scores.__getitem__, default=None)


def _propose_fp8(known: Judged, limit: float) -> Proposal:
    base = propose(known, "bf16", min(limit, LIMITS["bf16"]))
    kept = [Keep("keep", x) for x in base.policy.keep]
    kept += [Keep("functions", x) for x in base.policy.functions]
    low = known.active - selected(known.groups, kept)
    chosen, kept_fp8 = set(known.fp8 & low), list[Keep]()
    default = math.sqrt(known.predicted.square("bf16", known.active, known.fp8))
    while known.predicted.square("bf16", low, chosen) > limit**2 and chosen:
        worst = max(chosen, key=lambda i: known.predicted.recipe.get(i, 0.0))
        kept_fp8.append(known.groups[worst].selector)
        chosen -= selected(known.groups, kept_fp8)
    left = known.fp8 & low
    remark = ""
    if not known.fp8:
        remark = (
            "fp8 changes nothing here: no matmul with a parameter is large enough to "
            "gain. `mpx.inspect.report(mpx.fp8(loss), ...)` says why."
        )
    elif not chosen:
        remark = "No linear layer is left in fp8: use bf16."
    is_fp8 = bool(chosen)
    return Proposal(
        "fp8",
        policy_for("bf16", kept, is_fp8=is_fp8, kept_fp8=kept_fp8 if is_fp8 else ()),
        math.sqrt(known.predicted.square("bf16", low, chosen)),
        default,
        (*base.kept, *_labels(known, left - chosen)),
        remark,
    )


def _labels(known: Judged, groups: Collection[int]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(known.groups[i].label for i in sorted(groups)))
