"""Matmuls in 16 bits whose gradients come out in f32.

In the backward pass the gradient of a weight is a matmul over the whole batch. By default
its result is 16 bits, like that of the forward matmul, and then cast to the f32 of the
weight. Here the accumulator itself is the result: nothing is rounded.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from mpx._amp._policy import AmpPolicy
from mpx._amp._values import F32, NEUTRAL, Meta, as_array, cast
from mpx._compat import bind, open_jaxpr


def weights_of(values: Sequence[Any], metas: Sequence[Meta]) -> tuple[int, ...]:
    """Returns which operands of a matmul are f32 arguments of the function."""
    return tuple(
        i
        for i, (value, meta) in enumerate(zip(values[:2], metas[:2], strict=True))
        if meta.leaf is not None and value.dtype == F32
    )


def matmul(amp: Any, eqn: Any, values: Sequence[Any], weights: tuple[int, ...]) -> Any:
    """Runs a low matmul; the gradients with respect to `weights` are f32 matmul results.

    Args:
        amp: The settings.
        eqn: A matmul that has no reason to stay as it is written.
        values: Its operands.
        weights: Which of the first two are f32 and want a gradient in f32.
    """
    lhs, rhs, *rest = [as_array(value) for value in values]
    exact = dataclasses.replace(
        amp,
        policy=AmpPolicy(),
        cache={},
        made={},
        decisions=None,
        f32_weight_grads=False,
        f32_results=True,
    )
    rounded = dataclasses.replace(exact, made={}, f32_results=False)

    def forward(lhs: Any, rhs: Any) -> tuple[Any, tuple[Any, Any]]:
        low = cast(lhs, amp.dtype), cast(rhs, amp.dtype)
        (out,) = bind(eqn, [*low, *rest], preferred_element_type=amp.dtype)
        return out, low

    def backward(low: tuple[Any, Any], cotangent: Any) -> tuple[Any, Any]:
        types = [jax.typeof(x).update(dtype=F32) for x in (*low, cotangent)]

        def grad(i: int) -> Any:
            def transposed(lhs: Any, rhs: Any, cotangent: Any) -> Any:
                operands = [lhs, rhs]

                def call(x: Any) -> Any:
                    operands[i] = x
                    return bind(eqn, [*operands, *rest])[0]

                return jax.linear_transpose(call, operands[i])(cotangent)[0]

            # JAX transposes the matmul in f32, and its only matmul is run low.
            body, consts = open_jaxpr(jax.make_jaxpr(transposed)(*types))
            run = exact.run if i in weights else rounded.run
            args = [*low, cotangent]
            (out,), _ = run(body, consts, args, [NEUTRAL] * len(args), ())
            return cast(out, given[i])

        return grad(0), grad(1)

    given = (lhs.dtype, rhs.dtype)
    call = jax.custom_vjp(lambda lhs, rhs: forward(lhs, rhs)[0])
    call.defvjp(forward, backward)
    return call(lhs, rhs)
