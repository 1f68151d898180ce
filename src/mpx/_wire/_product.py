"""A matmul in 16 bits on f32 weights, whose weight gradient has a dtype of its own.

With x of 16 bits, w of f32 and the rounding r to 16 bits,

    y = x · r(w)         16 bits
    dx = dy · r(w)ᵀ      16 bits
    dw = xᵀ · dy         in the dtype that goes over the wire, and from there to f32

Under automatic sharding XLA sums over devices what the matmul for dw returns, so that the
dtype of its result is the dtype of the sum. By JAX's rules dw would have the dtype of y.

The product has tangents, and so forward-mode derivatives: the tangent of w goes through a
primitive that is linear in it, and whose transpose is the matmul above.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import PyTree

from mpx._casting._context import (
    COMPUTE,
    F32,
    Reduce,
    on_several_devices,
    weight_grad_dtype,
)
from mpx._jax._compat import (
    Primitive,
    bind,
    convert_dtype,
    eval_equation,
    is_tracer,
    open_jaxpr,
)
from mpx._jax._private import private
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
from mpx._program._queries import CALLS, MATMULS, SHAPE_ONLY, Equation, holds, names

LINEAR = "mpx_linear"
"""The primitive through which the tangent of a weight goes."""
Multiply = Callable[[Equation, Values, np.dtype], Values]
"""Runs a matmul of 16-bit operands; the last argument is the dtype of the result."""
_ENTERED = (*CALLS, "scan", "cond")
_HOLDING = {*MATMULS, "gather"}
_BROADCASTING = names("add sub mul div max min")


@dataclasses.dataclass(frozen=True, eq=False)
class Product:
    """A product of two operands, and further arguments that are not differentiated."""

    call: Callable[
        ..., PyTree
    ]  # the product of operands in f32, which holds one matmul
    compute: np.dtype  # of the operands of the matmul, and of the result
    grads: tuple[
        np.dtype, np.dtype
    ]  # in which those of the operands leave their matmuls
    multiply: Multiply

    def run(self, *operands: PyTree) -> PyTree:
        return self._low(self.call, operands, self.compute)

    def transposed(
        self, side: int, struct: PyTree, operands: PyTree, cotangent: PyTree
    ) -> PyTree:
        """Returns the gradient with respect to one operand, in its dtype; it is not read."""
        known = [x for i, x in enumerate(operands) if i != side]

        def call(*args: PyTree) -> PyTree:
            *known, cotangent = args

            def product(x: PyTree) -> PyTree:
                return self.call(*known[:side], x, *known[side:])

            return jax.linear_transpose(product, _wide(struct))(cotangent)[0]

        grad = self._low(call, [*known, cotangent], self.grads[side])
        return convert_dtype(grad, struct.dtype)

    def _low(self, call: PyTree, args: Sequence[PyTree], dtype: np.dtype) -> PyTree:
        """Runs a function that is traced in f32 with its only matmul in 16 bits."""
        types = [_wide(jax.typeof(x)) for x in args]
        body, consts = open_jaxpr(jax.make_jaxpr(call)(*types))
        visitor = _Low(compute=self.compute, result=dtype, multiply=self.multiply)
        (out,), _ = visitor.run(body, consts, list(args), [None] * len(args), ())
        return convert_dtype(out, dtype)


def _wide(struct: Any) -> Any:
    return struct.update(dtype=F32, weak_type=False) if _is_floating(struct) else struct


def _is_floating(x: PyTree) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


@dataclasses.dataclass(eq=False, kw_only=True)
class _Low(Visitor):
    """Runs matmuls on operands of the compute dtype, for results of another."""

    compute: np.dtype
    result: np.dtype
    multiply: Multiply

    def equation(self, op: Op) -> Outcome:
        name, values = op.eqn.primitive.name, arrays_of(op.values)
        if name in HANDLERS:
            return HANDLERS[name](self, op)
        if name in MATMULS:
            low = [convert_dtype(x, self.compute) for x in values[:2]]
            return self.multiply(op.eqn, [*low, *values[2:]], self.result), [None]
        floats = {x.dtype for x in values if _is_floating(x)}
        if len(floats) > 1:  # such as zeros of f32 that pad an operand
            values = [convert_dtype(x, F32) if _is_floating(x) else x for x in values]
        outs = bind(op.eqn, values)
        return outs, [None] * len(outs)


def plain_multiply(eqn: Equation, args: Values, dtype: np.dtype) -> Values:
    """Runs a matmul of 16-bit operands whose result may be wider."""
    if np.dtype(dtype).itemsize <= args[0].dtype.itemsize:
        return bind(eqn, args, preferred_element_type=dtype)

    def elsewhere(*args: PyTree) -> Values:
        return bind(eqn, args, preferred_element_type=dtype)

    def on_cpu(*args: PyTree) -> Values:
        # XLA has no such matmul on CPUs for all shapes. The products are the same.
        return elsewhere(*(convert_dtype(x, dtype) for x in args[:2]), *args[2:])

    return lax.platform_dependent(*args, cpu=on_cpu, default=elsewhere)


def multiply_for(
    eqn: Equation,
    operands: Sequence[PyTree],
    weights: Mapping[int, tuple[PyTree, np.dtype]],
    multiply: Multiply = plain_multiply,
) -> PyTree:
    """Returns a matmul in 16 bits whose weight gradients have a dtype of their own.

    `weights` has by side, 0 or 1, the weight whose rounded copy the operand is, and the
    dtype in which its gradient leaves the backward matmul.
    """
    if private("matmul_grads") is None:
        return multiply(eqn, list(operands), operands[0].dtype)[0]

    def call(*operands: PyTree) -> PyTree:
        return bind(eqn, operands, preferred_element_type=F32)[0]

    compute = np.dtype(operands[0].dtype)
    grads = [weights[side][1] if side in weights else compute for side in (0, 1)]
    product = Product(call, compute, (grads[0], grads[1]), multiply)

    def run(sides: PyTree, rest: PyTree, weights: PyTree) -> PyTree:
        return product.run(*sides, *rest)

    def tangents(primals: PyTree, tangents: PyTree) -> tuple[PyTree, PyTree]:
        sides, rest, _ = primals
        # The first derivative of a weight does not go through its copy, others do.
        moved = [tangents[2].get(side, x) for side, x in enumerate(tangents[0])]
        out, zero = run(*primals), jax.custom_derivatives.SymbolicZero
        parts = _parts(product, [*sides, *rest], moved, zero)
        return out, functools.reduce(lax.add, parts) if parts else jnp.zeros_like(out)

    differentiable = jax.custom_jvp(run)
    differentiable.defjvp(tangents, symbolic_zeros=True)
    originals = {side: weight for side, (weight, _) in weights.items()}
    return differentiable(list(operands[:2]), list(operands[2:]), originals)


def _parts(
    product: Product, primals: PyTree, tangents: PyTree, zero: type
) -> list[PyTree]:
    """Returns the terms of the derivative of a product."""
    return [
        _linear().bind(*primals[:side], x, *primals[side + 1 :], product=product)
        for side, x in enumerate(tangents[:2])
        if type(x) is not zero
    ]


@functools.cache
def _linear() -> Primitive:
    names, primitive = private("matmul_grads"), Primitive(LINEAR)

    def run(*operands: PyTree, product: Product) -> PyTree:
        return product.run(*operands)

    def result_type(*avals: PyTree, product: Product) -> PyTree:
        return jax.make_jaxpr(product.run)(*avals).out_avals[0]

    def jvp(primals: PyTree, tangents: PyTree, *, product: Product) -> PyTree:
        out = primitive.bind(*primals, product=product)
        parts = _parts(product, primals, tangents, names.Zero)
        if not parts:
            return out, names.Zero(jax.typeof(out).to_tangent_aval())
        return out, functools.reduce(lax.add, parts)

    def transpose(
        cotangent: PyTree, *operands: PyTree, product: Product
    ) -> list[PyTree]:
        grads: list[PyTree] = [None] * len(operands)
        side = 0 if names.is_undefined_primal(operands[0]) else 1
        if type(cotangent) is not names.Zero:
            struct = operands[side].aval
            grads[side] = product.transposed(side, struct, operands, cotangent)
        return grads

    def batch(
        operands: PyTree, dims: PyTree, *, product: Product
    ) -> tuple[PyTree, int]:
        mapped = dataclasses.replace(product, call=jax.vmap(product.call, dims))
        return primitive.bind(*operands, product=mapped), 0

    primitive.def_impl(run)
    primitive.def_abstract_eval(result_type)
    names.primitive_jvps[primitive] = jvp
    names.primitive_transposes[primitive] = transpose
    names.primitive_batchers[primitive] = batch
    names.register_lowering(primitive, names.lower_fun(run, multiple_results=False))
    return primitive


# --- Functions that cast their parameters -----------------------------------------------
# A policy casts f32 parameters to 16 bits and calls the user's function on the copies. The
# gradient of a table would add up in 16 bits, row by row; those of weights would come out of
# matmuls in 16 bits, and XLA would sum them over devices in that. Here the function is
# evaluated again with each copy held in f32 until something reads it: a gather reads the f32
# rows, a matmul takes it as a weight, and everything else gets the copy.


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
        wanted = op.eqn.params.get("preferred_element_type") or compute
        is_low = op.eqn.invars[1].aval.dtype == np.dtype(wanted) == compute
        weights = {}
        for side in self._held(op) if is_low else ():
            dtype = weight_grad_dtype(self.choice, op.values[side], compute)
            if dtype != compute:
                weights[side] = op.values[side], dtype
        if not weights:
            return eval_equation(op.eqn, operands)[0]
        return multiply_for(op.eqn, operands, weights)
