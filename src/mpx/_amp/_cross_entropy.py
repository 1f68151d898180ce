"""Cross entropy by `linear_cross_entropy` under autocast: the dtype of its matmuls."""

import dataclasses

import numpy as np

from mpx._amp._casts import as_written, original
from mpx._amp._facts import F32, Chosen, Run, Settings, is_eligible
from mpx._amp._matmuls import PRESETS
from mpx._amp._rules import Rule
from mpx._jax._compat import bind, default_matmul_precision
from mpx._program._interpreter import Op, Values, arrays_of

_HIGHEST = ("highest", "float32")


def choose(amp: Settings, op: Op) -> Chosen:
    """Returns how the operation runs: in the compute dtype, or as it is written."""
    head = op.eqn.params["head"]
    if head.dtype != F32:
        return Chosen(as_written)
    region = amp.region_rule(op.eqn, op.scopes)
    rule, reason = region or amp.rule("dot_general", {}, op.facts[:2])
    if rule == Rule.LOW:
        asked = head.precision in _HIGHEST
        if asked and default_matmul_precision() not in _HIGHEST:
            return Chosen(original, rule, "precision=HIGHEST was asked for")
        return Chosen(_run(amp.dtype, None), rule, reason)
    if rule in PRESETS:
        return Chosen(_run(F32, PRESETS[Rule(rule)]), rule, reason)
    return Chosen(original, rule if isinstance(rule, str) else Rule.ORIGINAL, reason)


def _run(dtype: np.dtype, precision: object) -> Run:
    def run(amp: Settings, op: Op) -> Values:
        head = op.eqn.params["head"]
        # The hidden states and the weight may be held in 16 bits. But logits that are
        # kept are in an array of the weight's dtype as it was written.
        free = 2 if head.kept is None else 1
        values = [
            amp.widen(x) if i >= free and is_eligible(var.aval) else x
            for i, (x, var) in enumerate(zip(op.values, op.eqn.invars, strict=True))
        ]
        # In a loop, what is kept would be stacked over the iterations.
        may_keep = head.may_keep and not amp.in_loop
        head = dataclasses.replace(
            head, dtype=dtype, precision=precision, may_keep=may_keep
        )
        return bind(op.eqn, arrays_of(values), head=head)

    return run
