"""Runs a function that casts its parameters, with gradients that are summed in f32.

A policy casts f32 parameters to 16 bits and calls the user's function on the copies. The
gradient of a table would add up in 16 bits, row by row; those of weights would come out of
matmuls in 16 bits, and XLA would sum them over devices in that. Here the function is
evaluated again with each copy held in f32 until something reads it: a gather reads the f32
rows, a matmul takes it as a weight (see `_product`), and everything else gets the copy.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from mpx._casting._context import (
    COMPUTE,
    F32,
    Reduce,
    on_several_devices,
    weight_grad_dtype,
)
from mpx._jax._compat import bind, convert_dtype, eval_equation, is_tracer, open_jaxpr
from mpx._program import HANDLERS
from mpx._program._interpreter import (
    Kind,
    Op,
    Outcome,
    Values,
    Visitor,
    arrays_of,
    cast_all,
    dtypes_of,
)
from mpx._program._queries import CALLS, MATMULS, SHAPE_ONLY, holds, names
from mpx._wire._product import multiply_for

_ENTERED = (*CALLS, "scan", "cond")
_HOLDING = {*MATMULS, "gather"}
_BROADCASTING = names("add sub mul div max min")


def with_masters(
    func: Callable[..., PyTree],
    params: PyTree,
    rest: PyTree,
    choice: Reduce,
    *,
    is_mapped: bool,
    look: Callable[[PyTree], object],
) -> PyTree:
    """Calls a function of parameters that it casts, and of further arguments.

    `choice` is the dtype in which weight gradients leave their matmuls. `is_mapped` tells
    that mpx sums over devices, and not XLA. `look` gets the program that is run.
    """
    leaves, structure = jax.tree.flatten((params, rest))
    has_several = not is_mapped and any(map(on_several_devices, leaves))
    is_plain = choice == COMPUTE and has_several
    count = 0 if is_plain else len(jax.tree.leaves(params))
    known, results = [], jax.tree.structure(None)

    def flat(*leaves: PyTree) -> list[PyTree]:
        nonlocal known, results
        out, results = jax.tree.flatten(func(*jax.tree.unflatten(structure, leaves)))
        known = [None if is_tracer(x) else x for x in out]
        return [x for x in out if is_tracer(x)]

    jaxpr = jax.make_jaxpr(flat)(*leaves)
    look(jaxpr)
    body, consts = open_jaxpr(jaxpr)
    facts = [i < count for i in range(len(leaves))]
    holds_weights = choice != COMPUTE and (
        has_several or not (is_mapped or choice is None)
    )
    visitor = _Masters(choice=choice, holds_weights=holds_weights)
    outs, _ = visitor.run(body, consts, leaves, facts, ())
    outs = cast_all(arrays_of(outs), dtypes_of([x.aval for x in body.outvars]))
    # What was not computed comes back as it is: arrays of NumPy, state that is untouched.
    traced = iter(outs)
    out = [next(traced) if x is None else x for x in known]
    return jax.tree.unflatten(results, out)


@dataclasses.dataclass(eq=False, kw_only=True)
class _Masters(Visitor):
    """Holds rounded parameters in f32. The fact is whether a value is a parameter.

    A value with another dtype than its variable is such a copy before it is rounded.
    """

    unknown = False
    choice: Reduce  # the dtype in which weight gradients leave their matmuls
    holds_weights: bool  # whether weights and biases are held, and not tables only

    def fact_inside(self, fact: bool, var: Any, kind: Kind) -> bool:
        return fact and kind in ("operand", "slice")

    def equation(self, op: Op) -> Outcome:
        """Runs one equation."""
        eqn, name = op.eqn, op.eqn.primitive.name
        is_param = bool(op.facts) and op.facts[0]
        if name == "convert_element_type" and is_param:
            (value,), (out,) = op.values, eqn.outvars
            if value.dtype == F32 and out.aval.dtype.itemsize == 2:
                return [value], [True]
        if name in SHAPE_ONLY and is_param:
            return bind(eqn, op.values), [True]
        if name == "gather" and is_param:
            # An embedding: what is read is rounded, and the gradients add up in f32.
            return bind(eqn, op.values), [False]
        if name in MATMULS and self.holds_weights and self._held(op):
            return [self._matmul(op)], [False]
        entered, held = _ENTERED, _HOLDING
        if not self.holds_weights:
            # Not loops: what they do not change would be rounded in each round.
            entered, held = CALLS if any(op.facts) else (), {"gather"}
        if name in entered and holds(eqn, held):
            return HANDLERS[name](self, op)
        return eval_equation(eqn, self._rounded(op)), [False] * len(eqn.outvars)

    def _held(self, op: Op) -> list[int]:
        """Returns which operands of a matmul are held in f32."""
        pairs = zip(op.eqn.invars[:2], arrays_of(op.values[:2]), strict=True)
        return [
            i
            for i, (var, x) in enumerate(pairs)
            if op.facts[i] and x.dtype != var.aval.dtype
        ]

    def _rounded(self, op: Op) -> Values:
        """Returns the operands in the dtypes that they have in the function."""
        shape = op.eqn.outvars[0].aval.shape if op.eqn.outvars else ()

        def rounded(var: Any, value: Any) -> Any:
            if not isinstance(value, jax.Array) or value.dtype == var.aval.dtype:
                return value
            broadcasts = op.eqn.primitive.name in _BROADCASTING and self.holds_weights
            if broadcasts and value.ndim == len(shape):
                # A bias: a broadcast becomes a sum in the backward pass, in f32.
                value = jnp.broadcast_to(value, shape)
            return convert_dtype(value, var.aval.dtype)

        return list(map(rounded, op.eqn.invars, op.values))

    def _matmul(self, op: Op) -> PyTree:
        operands, compute = self._rounded(op), op.eqn.invars[0].aval.dtype
        wanted = op.eqn.params.get("preferred_element_type")
        same = op.eqn.invars[1].aval.dtype == compute
        if not same or (wanted is not None and np.dtype(wanted) != compute):
            return eval_equation(op.eqn, operands)[0]
        weights = {}
        for side in self._held(op):
            dtype = weight_grad_dtype(self.choice, op.values[side], compute)
            if dtype != compute:
                weights[side] = op.values[side], dtype
        if not weights:
            return eval_equation(op.eqn, operands)[0]
        return multiply_for(op.eqn, operands, weights)
