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

from mpx._jax._compat import Primitive, bind, convert_dtype, open_jaxpr
from mpx._jax._private import private
from mpx._program import HANDLERS
from mpx._program._interpreter import Op, Outcome, Values, Visitor, arrays_of
from mpx._program._queries import MATMULS, Equation

_F32 = np.dtype(np.float32)
LINEAR = "mpx_linear"
"""The primitive through which the tangent of a weight goes."""
Multiply = Callable[[Equation, Values, np.dtype], Values]
"""Runs a matmul of 16-bit operands; the last argument is the dtype of the result."""


@dataclasses.dataclass(frozen=True, eq=False)
class Product:
    """A product of two operands, and further arguments that are not differentiated.

    Attributes:
        call: The product as a function of its operands, in f32. It holds one matmul.
        compute: The dtype of the operands of the matmul, and of the result.
        grads: The dtypes in which the gradients of the two operands leave their matmuls.
        multiply: Runs the matmul.
    """

    call: Callable[..., PyTree]
    compute: np.dtype
    grads: tuple[np.dtype, np.dtype]
    multiply: Multiply

    def run(self, *operands: PyTree) -> PyTree:
        """Returns the product in the compute dtype."""
        return self._low(self.call, operands, self.compute)

    def transposed(
        self, side: int, struct: PyTree, operands: PyTree, cotangent: PyTree
    ) -> PyTree:
        """Returns the gradient with respect to one operand, in the operand's dtype.

        Its place in `operands` is not read.
        """
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
    if not jnp.issubdtype(struct.dtype, jnp.floating):
        return struct
    return struct.update(dtype=_F32, weak_type=False)


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
            values = [convert_dtype(x, _F32) if _is_floating(x) else x for x in values]
        outs = bind(op.eqn, values)
        return outs, [None] * len(outs)


def plain_multiply(eqn: Equation, args: Values, dtype: np.dtype) -> Values:
    """Runs a matmul of 16-bit operands whose result may be wider."""
    if np.dtype(dtype).itemsize <= args[0].dtype.itemsize:
        return bind(eqn, args, preferred_element_type=dtype)

    def on_cpu(*args: PyTree) -> Values:
        # XLA has no such matmul on CPUs for all shapes. The products are the same.
        wide = [convert_dtype(x, dtype) for x in args[:2]]
        return bind(eqn, [*wide, *args[2:]], preferred_element_type=dtype)

    def elsewhere(*args: PyTree) -> Values:
        return bind(eqn, args, preferred_element_type=dtype)

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
        return bind(eqn, operands, preferred_element_type=_F32)[0]

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


# --- The primitive: a product, linear in one operand ----------------------------------


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
