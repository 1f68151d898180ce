"""The statistics of logits as JAX primitives, with rules for derivatives and `vmap`.

    statistics: operands → logsumexp, chosen, perhaps total; perhaps kept logits
    tangent:    the same and tangents of operands → tangents of the results
    backward:   the same and cotangents of the results → gradients of operands

`tangent` is linear in its tangents, and its transpose is `backward`. As primitives, they
can be given another compute dtype by `amp`: see `Head`.
"""

import dataclasses
from collections.abc import Sequence

from jax import Array
from jaxtyping import PyTree

from mpx._jax._compat import Primitive
from mpx._jax._private import private
from mpx._ops import _primitives as ops
from mpx._ops._cross_entropy._chunks import (
    Chunks,
    Head,
    Operands,
    gradients,
    statistics,
)
from mpx._program._queries import CROSS_ENTROPY

_jax = private("cross_entropy")
_STATISTICS, _TANGENT, _BACKWARD = CROSS_ENTROPY


def bind_statistics(head: Head, operands: Operands) -> list[Array]:
    """Returns the statistics of each token, as one operation."""
    given = [x for x in operands if x is not None]
    return list(statistics_p.bind(*ops.varying_alike(given), head=head))


# --- The operations in plain JAX ------------------------------------------------------


def _opened(head: Head, given: Sequence[PyTree]) -> tuple[Operands, list[PyTree]]:
    """Returns the operands among given values, and the others."""
    count = 3 + head.has_bias
    hidden, weight, *bias, labels = given[:count]
    return Operands(hidden, weight, bias[0] if bias else None, labels), [*given[count:]]


def _statistics(*given: Array, head: Head) -> list[Array]:
    return statistics(head, _opened(head, given)[0])


def _backward(*given: Array, head: Head, wrt: tuple[int, ...]) -> list[Array]:
    operands, (logsumexp, *rest) = _opened(head, given)
    count = 0 if head.kept is None else 2
    kept, cotangents = rest[:count], rest[count:]
    return gradients(head, operands, logsumexp, cotangents, kept=kept, wrt=wrt)


def _differentiable(*given: Array, head: Head) -> list[Array]:
    """Returns the statistics by operations that JAX can differentiate as often as needed.

    The operands are rounded to the compute dtype and multiplied in f32.
    """
    hidden, weight, *rest = _opened(head, given)[0]
    rounded = [x.astype(head.dtype).astype(head.wide) for x in (hidden, weight)]
    wide = dataclasses.replace(head, dtype=head.wide, kept=None)
    return statistics(wide, Operands(*rounded, *rest), remat=True)


# --- Rules ----------------------------------------------------------------------------


def _types(hidden: PyTree, weight: PyTree, *rest: PyTree, head: Head) -> list[PyTree]:
    del rest
    tokens = ops.typed_like(hidden, hidden.shape[:-1], head.wide)
    found = [tokens] * (2 + head.has_total)
    if head.kept is None:
        return found
    chunks = Chunks(head, Operands(hidden, weight))
    shape = (chunks.count, chunks.kept)
    return [*found, weight, ops.typed_like(hidden, shape, head.wide)]


def _jvp(primals: PyTree, tangents: PyTree, *, head: Head) -> tuple[PyTree, PyTree]:
    given = _opened(head, tangents)[0]
    zeros = (type(None), _jax.Zero)
    wrt = tuple(i for i, x in enumerate(given[:3]) if not isinstance(x, zeros))
    count = 2 + head.has_total
    wanted = count if head.kept is None else count + 2
    if 1 in wrt and head.kept is None:
        head = head.keeping(*primals[:2])
    outs = statistics_p.bind(*primals, head=head)
    moved = [ops.zero_tangent(_jax, x) for x in outs[:wanted]]
    if wrt:
        saved = [outs[0], *outs[count:]]
        chosen = [given[i] for i in wrt]
        moved[:count] = tangent_p.bind(*primals, *saved, *chosen, head=head, wrt=wrt)
    return outs[:wanted], moved


def _batched(
    primitive: Primitive, given: Sequence[PyTree], dims: ops.Dims, **params: PyTree
) -> tuple[list[Array], list[int]]:
    """Maps an operation: the new axis is one of tokens, or there is a loop over it."""
    is_shared = all(d is None for d in dims[1:-1]) and params["head"].kept is None
    if primitive is not statistics_p or not is_shared:
        return ops.run_each(primitive, given, dims, **params)
    hidden, *shared, labels = given
    hidden, labels = ops.mapped_alike((hidden, labels), (dims[0], dims[-1]))
    outs = primitive.bind(hidden, *shared, labels, **params)
    return outs, [0] * len(outs)


statistics_p = ops.define(_jax, _STATISTICS, _types, _statistics, _batched)
tangent_p, backward_p = ops.define_derivatives(
    _jax,
    (_TANGENT, _BACKWARD),
    _differentiable,
    count=lambda head: 3 + head.has_bias,
    types=lambda *avals, head, wrt: _types(*avals, head=head)[: 2 + head.has_total],
    batched=_batched,
    gradients=_backward,
)
_jax.primitive_jvps[statistics_p] = _jvp
