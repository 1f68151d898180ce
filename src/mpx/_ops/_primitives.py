"""What the primitives of the operations share: definition, second derivatives, `vmap`.

Each operation passes `names`, the private names of JAX that it needs.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import PyTree

from mpx._jax._compat import Primitive, as_varying, varying_axes

Run = Callable[..., PyTree]
Names = Any
"""Private names of JAX, from `private`."""


def define(
    names: Names, name: str, types: Run, run: Run, *, multiple_results: bool = True
) -> Primitive:
    """Returns a primitive whose types are those of `types`, and that is lowered to `run`."""
    primitive = Primitive(name)

    @functools.lru_cache(maxsize=256)
    def compiled(**params: object) -> Run:
        return jax.jit(functools.partial(primitive.bind, **params))

    primitive.multiple_results = multiple_results
    primitive.def_impl(lambda *operands, **params: compiled(**params)(*operands))
    primitive.def_abstract_eval(types)
    lowering = names.lower_fun(run, multiple_results=multiple_results)
    names.register_lowering(primitive, lowering)
    return primitive


def varying_alike(operands: Sequence[Array]) -> Sequence[Array]:
    """Marks operands as varying over the same mesh axes.

    The transpose of the mark sums gradients over devices.
    """
    axes = sorted(frozenset().union(*(varying_axes(jax.typeof(x)) for x in operands)))
    return [as_varying(x, axes) for x in operands] if axes else operands


def zero_tangent(names: Names, x: Array) -> PyTree:
    """Returns the symbolic zero of the tangents of an array."""
    return names.Zero(jax.typeof(x).to_tangent_aval())


def function_of(
    func: Run, operands: Sequence[Array], wrt: Sequence[int]
) -> tuple[Run, list[Array]]:
    """Returns a function of some of its operands, with the others fixed, and the former."""

    def call(*chosen: Array) -> PyTree:
        replaced = dict(zip(wrt, chosen, strict=True))
        return func(*(replaced.get(i, x) for i, x in enumerate(operands)))

    return call, [operands[i] for i in wrt]


def linearise(
    names: Names, tangent: Primitive, backward: Primitive, runs: Sequence[Run]
) -> None:
    """Defines the derivatives of the derivatives of an operation.

    `tangent` takes operands, what was saved, and the tangents of the operands `wrt`;
    `backward`, its transpose, takes the cotangents of the results instead. What was saved
    depends on the operands alone: `runs` compute both from these.
    """

    def transpose(
        cotangents: Sequence[PyTree],
        *given: PyTree,
        wrt: tuple[int, ...],
        **params: object,
    ) -> list[PyTree]:
        known = given[: -len(wrt)]
        grads: Sequence[PyTree] = [None] * len(wrt)
        if not all(type(x) is names.Zero for x in cotangents):
            full = [names.instantiate_zeros(x) for x in cotangents]
            grads = backward.bind(*known, *full, wrt=wrt, **params)
        return [*[None] * len(known), *grads]

    def differentiated(func: Run) -> Run:
        def rule(
            primals: Sequence[Array], tangents: Sequence[PyTree], **params: object
        ) -> tuple[PyTree, PyTree]:
            free = [i for i, x in enumerate(tangents) if type(x) is not names.Zero]
            run = lambda *full: list(func(*full, **params))  # noqa: E731
            call, chosen = function_of(run, primals, free)
            return jax.jvp(call, chosen, [tangents[i] for i in free])

        return rule

    for primitive, run in zip((tangent, backward), runs, strict=True):
        names.primitive_jvps[primitive] = differentiated(run)
    names.primitive_transposes[tangent] = transpose


def mapped_alike(operands: Sequence[Array], dims: Sequence[int | None]) -> list[Array]:
    """Returns operands that are all mapped along their first axis, of which one is mapped."""
    pairs = list(zip(operands, dims, strict=True))
    size = next(x.shape[d] for x, d in pairs if d is not None)
    return [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in pairs
    ]


def run_each(
    primitive: Primitive,
    operands: Sequence[Array],
    dims: Sequence[int | None],
    **params: object,
) -> PyTree:
    """Maps an operation by running it once for each element, along the first axis."""
    pairs = list(zip(operands, dims, strict=True))
    mapped = [jnp.moveaxis(x, d, 0) for x, d in pairs if d is not None]

    def each(slices: list[Array]) -> PyTree:
        given = iter(slices)
        args = [x if d is None else next(given) for x, d in pairs]
        return primitive.bind(*args, **params)

    return lax.map(each, mapped)
