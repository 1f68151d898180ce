"""Sums over devices of gradients that each device has of its own part of a batch.

Under automatic sharding such gradients are stacked along a first axis that is sharded over
the axes of the batch. XLA makes a sum over that axis one all-reduce, or a reduce-scatter
where the parameter is sharded.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from mpx._casting._context import Reduce, Shards
from mpx._jax._tree import is_floating


def sum_of_shards(x: Array, dtype: Reduce) -> Array:
    """Returns the sum over the first axis, sent in `dtype` if that is narrower."""
    low = x
    if dtype is not None and is_floating(x):
        low = x if np.dtype(dtype).itemsize >= x.dtype.itemsize else x.astype(dtype)
    # `jnp.sum` would widen first, and XLA sends what it sums.
    return lax.reduce(low, np.zeros((), low.dtype), lax.add, (0,)).astype(x.dtype)


def sharded_alike(x: Array, like: PyTree) -> Array:
    """Returns an array that XLA shards as another one of its shape.

    Shardings spread through operations on elements. No number is above infinity.
    """
    return lax.select(like > jnp.inf, jnp.zeros_like(x), x)


def pin_shards(tree: PyTree, shards: Shards) -> PyTree:
    """Returns stacked arrays with the first axis sharded, and the others as they are."""

    def pin(x: Array) -> Array:
        rest = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
        sharding = NamedSharding(shards.mesh, PartitionSpec(shards.axes, *rest))
        return lax.with_sharding_constraint(x, sharding)

    return jax.tree.map(pin, tree)


def largest_of_shards(tree: PyTree) -> PyTree:
    """Returns the maxima over the first axis of all arrays, by one reduction."""
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return tree
    flat = jnp.concatenate([x.reshape(x.shape[0], -1) for x in leaves], axis=1)
    ends = np.cumsum([math.prod(x.shape[1:]) for x in leaves])
    parts = jnp.split(jnp.max(flat, axis=0), ends[:-1])
    shapes = [x.shape[1:] for x in leaves]
    return structure.unflatten(map(jnp.reshape, parts, shapes))
