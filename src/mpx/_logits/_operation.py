"""The statistics of logits that cross entropy needs, as differentiable functions.

They have no forward-mode derivative.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero

from mpx._logits._chunks import (
    F32,
    Chunks,
    Operands,
    Statistics,
    Wanted,
    gradients,
    statistics,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scores(spec: Chunks, operands: Operands) -> Statistics:
    """Returns the statistics of each token.

    The backward pass computes the logits again. The highest logit has no gradient.
    """
    return statistics(spec, operands)[0]


def _scores_forward(spec: Chunks, primals: Any) -> tuple[Any, Any]:
    operands = _values(primals)
    found, _ = statistics(spec, operands)
    return found, (operands, found.logsumexp, _wanted(primals))


def _scores_backward(spec: Chunks, saved: Any, cotangents: Any) -> tuple[Any]:
    operands, logsumexp, wanted = saved
    given = [
        jnp.zeros_like(logsumexp) if isinstance(x, SymbolicZero) else x
        for x in cotangents[:2]
    ]
    found = gradients(spec, operands, logsumexp, given, wanted)
    return (_as_cotangents(found, operands),)


scores.defvjp(_scores_forward, _scores_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def loss(
    spec: Chunks,
    func: Callable[..., Array],
    operands: Operands,
    rest: Sequence[Array],
) -> Array:
    """Returns a scalar: `func(statistics, *rest)`.

    If it is differentiated, the forward pass computes the gradients, up to the factor that
    the backward pass brings. So the logits of `spec.kept` tokens can wait in the memory of
    the gradient of the weights and are computed once.
    """
    return func(statistics(spec, operands)[0], *rest)


def _loss_forward(
    spec: Chunks, func: Callable[..., Array], primals: Any, others: Any
) -> tuple[Any, Any]:
    operands, wanted = _values(primals), _wanted(primals)
    if not wanted.weight:  # no gradient in the memory of which logits could wait
        spec = dataclasses.replace(spec, kept=0)
    of_tokens, kept = statistics(spec, operands)
    out, pullback = jax.vjp(func, of_tokens, *_values(others))
    for_tokens, *for_rest = pullback(jnp.ones_like(out))
    found = gradients(
        spec, operands, of_tokens.logsumexp, for_tokens[:2], wanted, kept=kept
    )
    smooth = [x if jnp.issubdtype(x.dtype, jnp.floating) else None for x in for_rest]
    # Cast only after they are scaled: in 16 bits they might leave the range before.
    like = [None if x is None else jnp.zeros(0, x.dtype) for x in operands]
    return out, (found, like, smooth)


def _loss_backward(
    spec: Chunks, func: Callable[..., Array], saved: Any, cotangent: Any
) -> tuple[Any, Sequence[Any]]:
    found, like, smooth = saved
    scaled = [None if x is None else x.astype(F32) * cotangent for x in found]
    rest = [None if x is None else x * cotangent.astype(x.dtype) for x in smooth]
    return _as_cotangents(scaled, like), rest


loss.defvjp(_loss_forward, _loss_backward, symbolic_zeros=True)


def _values(primals: Any) -> Any:
    return jax.tree.map(lambda x: x.value, primals)


def _wanted(primals: Any) -> Wanted:
    return Wanted(*(x is not None and x.perturbed for x in primals[:3]))


def _as_cotangents(found: Sequence[Any], like: Sequence[Any]) -> Any:
    """Returns gradients in the dtypes of the operands; labels have none."""
    hidden, weight, bias = (
        None if x is None else x.astype(given.dtype)
        for x, given in zip(found, like[:3], strict=True)
    )
    return Operands(hidden, weight, bias, None)  # pyright: ignore[reportArgumentType]
