"""Matmuls in 16 bits whose gradients come out in f32.

In the backward pass the gradient of a weight is a matmul over the whole batch. By default
its result is 16 bits, like that of the forward matmul, and then cast to the f32 of the
weight. Here the accumulator itself is the result: nothing is rounded.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from mpx._amp._policy import AmpRules
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
    args = [as_array(value) for value in values]
    given = [value.dtype for value in args]
    exact = dataclasses.replace(
        amp,
        rules=AmpRules(),
        cache={},
        made={},
        decisions=None,
        f32_weight_grads=False,
        f32_results=True,
    )
    rounded = dataclasses.replace(exact, made={}, f32_results=False)

    # The group sizes of a ragged matmul are arguments too: held by the functions here,
    # they would be tracers of another trace where the backward one is run.
    def forward(lhs: Any, rhs: Any, *rest: Any) -> tuple[Any, tuple[Any, ...]]:
        low = cast(lhs, amp.dtype), cast(rhs, amp.dtype)
        (out,) = bind(eqn, [*low, *rest], preferred_element_type=amp.dtype)
        return out, (*low, *rest)

    def backward(kept: tuple[Any, ...], cotangent: Any) -> tuple[Any, ...]:
        lhs, rhs, *rest = kept
        operands = [lhs, rhs, cotangent, *rest]
        types = [jax.typeof(x).update(dtype=F32) for x in operands[:3]]
        types += [jax.typeof(x) for x in rest]

        def grad(i: int) -> Any:
            def transposed(lhs: Any, rhs: Any, cotangent: Any, *rest: Any) -> Any:
                def call(x: Any) -> Any:
                    return bind(eqn, [x, rhs, *rest] if i == 0 else [lhs, x, *rest])[0]

                return jax.linear_transpose(call, (lhs, rhs)[i])(cotangent)[0]

            # JAX transposes the matmul in f32, and its only matmul is run low.
            body, consts = open_jaxpr(jax.make_jaxpr(transposed)(*types))
            run = exact.run if i in weights else rounded.run
            (out,), _ = run(body, consts, operands, [NEUTRAL] * len(operands), ())
            return cast(out, given[i])

        return grad(0), grad(1), *[None] * len(rest)

    call = jax.custom_vjp(lambda *args: forward(*args)[0])
    call.defvjp(forward, backward)
    return call(*args)
