"""What the primitives of the operations share: definition, derivatives, `vmap`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import PyTree

from mpx._jax._compat import Primitive, as_varying, varying_axes
from mpx._program._interpreter import function_of

Run = Callable[..., PyTree]
Names = Any
"""The private names of JAX that an operation needs, from `private`."""
Aval = Any
"""The type of a value: shape, dtype, sharding."""
Dims = Sequence[int | None]
"""The axis along which each operand is mapped."""


def define(
    names: Names, name: str, types: Run, run: Run, batched: Run, *, several: bool = True
) -> Primitive:
    """Returns a primitive that is typed by `types`, lowered to `run`, mapped by `batched`."""
    primitive = Primitive(name)

    @functools.lru_cache(maxsize=256)
    def compiled(**params: object) -> Run:
        return jax.jit(functools.partial(primitive.bind, **params))

    primitive.multiple_results = several
    primitive.def_impl(lambda *operands, **params: compiled(**params)(*operands))
    primitive.def_abstract_eval(types)
    names.register_lowering(primitive, names.lower_fun(run, multiple_results=several))
    names.primitive_batchers[primitive] = functools.partial(batched, primitive)
    return primitive


def varying_alike(operands: Sequence[Array]) -> Sequence[Array]:
    """Marks operands as varying over the same mesh axes; its transpose sums gradients."""
    axes = sorted(frozenset().union(*(varying_axes(jax.typeof(x)) for x in operands)))
    return [as_varying(x, axes) for x in operands] if axes else operands


def zero_tangent(names: Names, x: Array) -> PyTree:
    """Returns the symbolic zero of the tangents of an array."""
    return names.Zero(jax.typeof(x).to_tangent_aval())


def typed_like(aval: Aval, shape: Sequence[int], dtype: DTypeLike) -> Aval:
    """Returns a type of another shape and dtype, replicated where axes are explicit."""
    sharding = NamedSharding(aval.sharding.mesh, PartitionSpec(*[None] * len(shape)))
    return aval.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def define_derivatives(
    names: Names,
    labels: Sequence[str],
    func: Run,
    *,
    count: Callable[..., int],
    types: Run,
    batched: Run,
    gradients: Run | None = None,
) -> tuple[Primitive, Primitive]:
    """Returns primitives for the tangents of a function and for their transpose.

    Both take the operands of the function, `count` of its parameters; what was saved,
    which depends on these alone; and last the tangents of the operands `wrt`, or the
    cotangents of all results. `types` are those of tangents of the results. Given what was
    saved, `gradients` may be faster than JAX's.
    """

    def run_tangent(*given: Array, wrt: tuple[int, ...], **params: object) -> PyTree:
        run, known = functools.partial(func, **params), given[: count(**params)]
        moved = list(given[-len(wrt) :])
        return jax.jvp(*function_of(run, known, wrt), moved)[1]

    def run_backward(*given: Array, wrt: tuple[int, ...], **params: object) -> PyTree:
        run, known = functools.partial(func, **params), given[: count(**params)]
        call, chosen = function_of(run, known, wrt)
        outs, vjp = jax.vjp(call, *chosen)
        return list(vjp(list(given[-len(outs) :])))

    tangent = define(names, labels[0], types, run_tangent, batched)
    like = lambda *avals, wrt, **_: [avals[i] for i in wrt]  # noqa: E731
    backward = define(names, labels[1], like, gradients or run_backward, batched)

    def transpose(
        cotangents: PyTree, *given: PyTree, wrt: tuple[int, ...], **params: object
    ) -> list[PyTree]:
        known = given[: -len(wrt)]
        grads: Sequence[PyTree] = [None] * len(wrt)
        if not all(type(x) is names.Zero for x in cotangents):
            full = [names.instantiate_zeros(x) for x in cotangents]
            grads = backward.bind(*known, *full, wrt=wrt, **params)
        return [*[None] * len(known), *grads]

    def differentiated(
        run: Run, primals: Sequence[Array], tangents: Sequence[PyTree], **params: object
    ) -> tuple[PyTree, PyTree]:
        free = [i for i, x in enumerate(tangents) if type(x) is not names.Zero]
        run, moved = functools.partial(run, **params), [tangents[i] for i in free]
        return jax.jvp(*function_of(run, primals, free), moved)

    for primitive, run in ((tangent, run_tangent), (backward, run_backward)):
        names.primitive_jvps[primitive] = functools.partial(differentiated, run)
    names.primitive_transposes[tangent] = transpose
    return tangent, backward


def mapped_alike(operands: Sequence[Array], dims: Dims) -> list[Array]:
    """Returns operands that are all mapped along their first axis, of which one is mapped."""
    pairs = list(zip(operands, dims, strict=True))
    size = next(x.shape[d] for x, d in pairs if d is not None)
    return [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in pairs
    ]


def run_each(
    primitive: Primitive, operands: Sequence[Array], dims: Dims, **params: object
) -> tuple[PyTree, PyTree]:
    """Maps an operation by running it once for each element, along the first axis."""
    mapped = [i for i, d in enumerate(dims) if d is not None]
    call, _ = function_of(functools.partial(primitive.bind, **params), operands, mapped)
    pairs = zip(operands, dims, strict=True)
    moved = [jnp.moveaxis(x, d, 0) for x, d in pairs if d is not None]
    outs = lax.map(lambda slices: call(*slices), moved)
    return outs, jax.tree.map(lambda _: 0, outs)
