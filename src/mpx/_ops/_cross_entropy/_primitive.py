"""The statistics of logits as JAX primitives, with rules for derivatives and `vmap`.

    statistics: operands → logsumexp, chosen, perhaps total; perhaps kept logits
    tangent:    the same and tangents of operands → tangents of the results
    backward:   the same and cotangents of the results → gradients of operands

`tangent` is linear in its tangents, and its transpose is `backward`. As primitives, they
can be given another compute dtype by `amp`: see `Head`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from mpx._jax._compat import Primitive, as_varying, varying_axes
from mpx._jax._private import private
from mpx._ops._cross_entropy._chunks import (
    Chunks,
    Head,
    Kept,
    Operands,
    gradients,
    statistics,
)
from mpx._program._queries import CROSS_ENTROPY

_jax = private("cross_entropy")
_STATISTICS, _TANGENT, _BACKWARD = CROSS_ENTROPY
Aval = Any
"""The type of a value: shape, dtype, sharding."""


def bind_statistics(head: Head, operands: Operands) -> list[Array]:
    """Returns the statistics of each token, as one operation."""
    given = [x for x in operands if x is not None]
    names = sorted(frozenset().union(*(varying_axes(jax.typeof(x)) for x in given)))
    # Marked here, so that the transpose of the mark sums gradients over devices.
    given = [as_varying(x, names) for x in given] if names else given
    return list(statistics_p.bind(*given, head=head))


# --- The operations in plain JAX ------------------------------------------------------


def _opened(head: Head, given: Sequence[Any]) -> tuple[Operands, list[Any]]:
    """Returns the operands among given values, and the others."""
    count = 3 + head.has_bias
    hidden, weight, *bias, labels = given[:count]
    return Operands(hidden, weight, bias[0] if bias else None, labels), [*given[count:]]


def _statistics(*given: Array, head: Head) -> list[Array]:
    found, kept = statistics(head, _opened(head, given)[0])
    return [*found, *(kept or ())]


def _backward(*given: Array, head: Head, wrt: tuple[int, ...]) -> list[Array]:
    operands, (logsumexp, *rest) = _opened(head, given)
    kept = None
    if head.kept is not None:
        kept, rest = Kept(*rest[:2]), rest[2:]
    return gradients(head, operands, logsumexp, rest, kept=kept, wrt=wrt)


def differentiable_statistics(head: Head, operands: Operands) -> list[Array]:
    """Returns the statistics by operations that JAX can differentiate as often as needed.

    The operands are rounded to the compute dtype and multiplied in f32.
    """
    rounded = [
        x.astype(head.dtype).astype(head.wide)
        for x in (operands.hidden, operands.weight)
    ]
    wide = dataclasses.replace(head, dtype=head.wide, kept=None)
    operands = operands._replace(hidden=rounded[0], weight=rounded[1])
    return statistics(wide, operands, remat=True)[0]


def _function_of(
    head: Head, given: Sequence[Array], wrt: Sequence[int]
) -> tuple[Callable[..., list[Array]], list[Array]]:
    """Returns the statistics as a function of some operands, and those operands."""
    operands, _ = _opened(head, given)

    def call(*chosen: Array) -> list[Array]:
        changed = dict(zip([Operands._fields[i] for i in wrt], chosen, strict=True))
        return differentiable_statistics(head, operands._replace(**changed))

    return call, [operands[i] for i in wrt]


def _plain_tangent(*given: Array, head: Head, wrt: tuple[int, ...]) -> list[Array]:
    call, chosen = _function_of(head, given, wrt)
    return jax.jvp(call, chosen, list(given[-len(wrt) :]))[1]


def _plain_backward(*given: Array, head: Head, wrt: tuple[int, ...]) -> list[Array]:
    """Returns the gradients as a function of operands and cotangents alone."""
    call, chosen = _function_of(head, given, wrt)
    cotangents = list(given[-2 - head.has_total :])
    return list(jax.vjp(call, *chosen)[1](cotangents))


# --- Rules ----------------------------------------------------------------------------


def _types(hidden: Aval, weight: Aval, *rest: Aval, head: Head) -> list[Aval]:
    del rest
    tokens = _like(hidden, hidden.shape[:-1], head.wide)
    found = [tokens] * (2 + head.has_total)
    if head.kept is None:
        return found
    chunks = Chunks(head, hidden, weight)
    return [*found, weight, _like(hidden, (chunks.count, chunks.kept), head.wide)]


def _like(aval: Aval, shape: Sequence[int], dtype: np.dtype) -> Aval:
    sharding = NamedSharding(aval.sharding.mesh, PartitionSpec(*[None] * len(shape)))
    return aval.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, head: Head
) -> tuple[list[Any], list[Any]]:
    given = _opened(head, tangents)[0]
    wrt = tuple(i for i, x in enumerate(given[:3]) if x is not None and not _is_zero(x))
    count = 2 + head.has_total
    wanted = count if head.kept is None else count + len(Kept._fields)
    if 1 in wrt and head.kept is None:
        head = head.keeping(*primals[:2])
    outs = statistics_p.bind(*primals, head=head)
    moved = [_zero(x) for x in outs[:wanted]]
    if wrt:
        saved = [outs[0], *outs[count:]]
        chosen = [given[i] for i in wrt]
        moved[:count] = tangent_p.bind(*primals, *saved, *chosen, head=head, wrt=wrt)
    return outs[:wanted], moved


def _zero(x: Array) -> Any:
    return _jax.Zero(jax.typeof(x).to_tangent_aval())


def _is_zero(tangent: Any) -> bool:
    return type(tangent) is _jax.Zero


def _transpose(
    cotangents: Sequence[Any], *given: Any, head: Head, wrt: tuple[int, ...]
) -> list[Any]:
    known = given[: -len(wrt)]
    grads: Sequence[Any] = [None] * len(wrt)
    if not all(map(_is_zero, cotangents)):
        full = [_jax.instantiate_zeros(x) for x in cotangents]
        grads = backward_p.bind(*known, *full, head=head, wrt=wrt)
    return [*[None] * len(known), *grads]


def _differentiated(func: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the derivative of an operation that is itself a derivative.

    What was saved for it depends on the operands alone, as the operation itself does.
    """

    def rule(
        primals: Sequence[Array], tangents: Sequence[Any], **params: Any
    ) -> tuple[Any, Any]:
        free = [i for i, x in enumerate(tangents) if not _is_zero(x)]

        def call(*chosen: Array) -> list[Array]:
            full = list(primals)
            for i, x in zip(free, chosen, strict=True):
                full[i] = x
            return func(*full, **params)

        chosen = [primals[i] for i in free]
        return jax.jvp(call, chosen, [tangents[i] for i in free])

    return rule


def _batched(
    primitive: Primitive, given: Sequence[Any], dims: Sequence[Any], **params: Any
) -> tuple[list[Any], list[Any]]:
    """Maps an operation: the new axis is one of tokens, or there is a loop over it."""
    size = next(x.shape[d] for x, d in zip(given, dims, strict=True) if d is not None)
    front = [
        x if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(given, dims, strict=True)
    ]
    head, is_shared = params["head"], all(d is None for d in dims[1:-1])
    if primitive is statistics_p and is_shared and head.kept is None:
        for i in (0, len(front) - 1):
            if dims[i] is None:
                front[i] = jnp.broadcast_to(front[i], (size, *front[i].shape))
        outs = primitive.bind(*front, **params)
        return outs, [0] * len(outs)

    def each(slices: list[Array]) -> list[Array]:
        rest = iter(slices)
        args = [
            x if d is None else next(rest) for x, d in zip(front, dims, strict=True)
        ]
        return primitive.bind(*args, **params)

    mapped = [x for x, d in zip(front, dims, strict=True) if d is not None]
    outs = lax.map(each, mapped)
    return outs, [0] * len(outs)


def _define(name: str, types: Callable[..., Any], run: Callable[..., Any]) -> Primitive:
    primitive = Primitive(name)

    @functools.lru_cache(maxsize=256)
    def compiled(**params: Any) -> Callable[..., Any]:
        return jax.jit(functools.partial(primitive.bind, **params))

    primitive.multiple_results = True
    primitive.def_impl(lambda *given, **params: compiled(**params)(*given))
    primitive.def_abstract_eval(types)
    _jax.primitive_batchers[primitive] = functools.partial(_batched, primitive)
    _jax.register_lowering(primitive, _jax.lower_fun(run, multiple_results=True))
    return primitive


statistics_p = _define(_STATISTICS, _types, _statistics)
tangent_p = _define(
    _TANGENT,
    lambda *avals, head, wrt: _types(*avals, head=dataclasses.replace(head, kept=None)),
    _plain_tangent,
)
backward_p = _define(
    _BACKWARD,
    lambda *avals, head, wrt: [_opened(head, avals)[0][i] for i in wrt],
    _backward,
)
_jax.primitive_jvps[statistics_p] = _jvp
_jax.primitive_jvps[tangent_p] = _differentiated(_plain_tangent)
_jax.primitive_jvps[backward_p] = _differentiated(_plain_backward)
_jax.primitive_transposes[tangent_p] = _transpose
