"""The statistics of logits that cross entropy needs, as differentiable functions.

Both functions take the operands of the logits: hidden states (tokens, width), weights, a
bias (vocabulary) or `None`, and labels (tokens). They have no forward-mode derivative.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_derivatives import SymbolicZero

from mpx._logits._chunks import Chunks, Wanted, gradients, statistics


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scores(
    spec: Chunks, hidden: Array, weight: Array, bias: Array | None, labels: Array
) -> tuple[Array, Array]:
    """Returns the logsumexp and the chosen logit of each token, in f32.

    The backward pass computes the logits again.
    """
    return statistics(spec, hidden, weight, bias, labels)[:2]


def _scores_forward(spec: Chunks, *primals: Any) -> tuple[Any, Any]:
    operands = _values(primals)
    logsumexp, chosen, _ = statistics(spec, *operands)
    return (logsumexp, chosen), (operands, logsumexp, _wanted(primals))


def _scores_backward(spec: Chunks, saved: Any, cotangents: Any) -> tuple[Any, ...]:
    operands, logsumexp, wanted = saved
    for_sum, for_chosen = (
        jnp.zeros_like(logsumexp) if isinstance(x, SymbolicZero) else x
        for x in cotangents
    )
    found = gradients(spec, operands, logsumexp, (for_sum, for_chosen), wanted)
    return (*_in_dtypes(found, operands), None)


scores.defvjp(_scores_forward, _scores_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def loss(
    spec: Chunks,
    func: Callable[..., Array],
    hidden: Array,
    weight: Array,
    bias: Array | None,
    labels: Array,
    *rest: Array,
) -> Array:
    """Returns a scalar: `func(logsumexp, chosen, *rest)`.

    If it is differentiated, the forward pass computes the gradients, up to the factor that
    the backward pass brings. So the logits of `spec.kept` tokens can wait in the memory of
    the gradient of the weights and are computed once.
    """
    return func(*statistics(spec, hidden, weight, bias, labels)[:2], *rest)


def _loss_forward(
    spec: Chunks, func: Callable[..., Array], *primals: Any
) -> tuple[Any, Any]:
    values = _values(primals)
    operands, rest = values[:4], values[4:]
    logsumexp, chosen, kept = statistics(spec, *operands)
    out, pullback = jax.vjp(func, logsumexp, chosen, *rest)
    for_sum, for_chosen, *for_rest = pullback(jnp.ones_like(out))
    wanted = _wanted(primals)
    found = gradients(spec, operands, logsumexp, (for_sum, for_chosen), wanted, kept)
    types = [None if x is None else jnp.zeros((), x.dtype) for x in operands[:3]]
    smooth = [x if _is_float(x) else None for x in for_rest]
    return out, (found, types, smooth)


def _loss_backward(
    spec: Chunks, func: Callable[..., Array], saved: Any, cotangent: Any
) -> tuple[Any, ...]:
    found, types, smooth = saved
    scaled = [None if x is None else x * cotangent for x in found]
    rest = [None if x is None else x * cotangent.astype(x.dtype) for x in smooth]
    return (*_in_dtypes(scaled, types), None, *rest)


loss.defvjp(_loss_forward, _loss_backward, symbolic_zeros=True)


def _values(primals: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(None if x is None else x.value for x in primals)


def _wanted(primals: Sequence[Any]) -> Wanted:
    return Wanted(*(x is not None and x.perturbed for x in primals[:3]))


def _in_dtypes(found: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    return [
        None if x is None else x.astype(given.dtype)
        for x, given in zip(found, like, strict=False)
    ]


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(np.result_type(x), jnp.floating)
