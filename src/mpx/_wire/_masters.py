"""Runs a function that casts its parameters, with weight gradients of another dtype.

A policy casts f32 parameters to 16 bits and calls the user's function on the copies. Their
gradients would come out of matmuls in 16 bits, and XLA would sum them over devices in that.
Here the function is evaluated again with each copy held in f32 until something reads it: a
matmul takes it as a weight (see `_product`), and everything else gets the copy.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from mpx._compat import bind, convert_dtype, eval_equation, open_jaxpr
from mpx._jaxpr import HANDLERS
from mpx._jaxpr._interpreter import (
    Kind,
    Op,
    Outcome,
    Values,
    Visitor,
    arrays_of,
    cast_all,
    dtypes_of,
)
from mpx._jaxpr._queries import CALLS, MATMULS, SHAPE_ONLY, holds, names
from mpx._wire._options import (
    COMPUTE,
    F32,
    Reduce,
    on_several_devices,
    weight_grad_dtype,
)
from mpx._wire._product import multiply_for

_ENTERED = (*CALLS, "scan", "cond")
_BROADCASTING = names("add sub mul div max min")


def with_masters(
    func: Callable[..., Any], params: PyTree, rest: PyTree, choice: Reduce
) -> Any:
    """Calls a function of parameters that it casts, and of further arguments.

    Args:
        func: The function; its results are arrays.
        params: Its parameters.
        rest: Its second argument.
        choice: The dtype in which weight gradients leave their matmuls.
    """
    leaves, structure = jax.tree.flatten((params, rest))
    by_default = choice is None and not any(map(on_several_devices, leaves))
    if by_default or choice == COMPUTE:
        return func(params, rest)
    count = len(jax.tree.leaves(params))

    def flat(*leaves: Any) -> Any:
        return func(*jax.tree.unflatten(structure, leaves))

    jaxpr, shape = jax.make_jaxpr(flat, return_shape=True)(*leaves)
    body, consts = open_jaxpr(jaxpr)
    facts = [i < count for i in range(len(leaves))]
    visitor = _Masters(choice=choice)
    outs, _ = visitor.run(body, consts, leaves, facts, ())
    outs = cast_all(arrays_of(outs), dtypes_of([x.aval for x in body.outvars]))
    return jax.tree.unflatten(jax.tree.structure(shape), outs)


@dataclasses.dataclass(eq=False, kw_only=True)
class _Masters(Visitor):
    """Holds rounded parameters in f32. The fact is whether a value is a parameter.

    A value with another dtype than its variable is such a copy before it is rounded.
    """

    unknown = False
    choice: Reduce

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
        if name in MATMULS and self._held(op):
            return [self._matmul(op)], [False]
        if name in _ENTERED and holds(eqn, MATMULS):
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
            if op.eqn.primitive.name in _BROADCASTING and value.ndim == len(shape):
                # A bias: a broadcast becomes a sum in the backward pass, in f32.
                value = jnp.broadcast_to(value, shape)
            return convert_dtype(value, var.aval.dtype)

        return list(map(rounded, op.eqn.invars, op.values))

    def _matmul(self, op: Op) -> Any:
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
