"""`shard_map` without devices: the shards are leading axes of each value.

A body runs under `jax.vmap`, with one named axis for each axis of the mesh, so that its
collectives work.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from mpx._jax._compat import bind, primitive_name
from mpx._program._queries import Equation

Axes = tuple[tuple[str, int], ...]
"""Names and sizes of the axes of a mesh."""

# They change only what JAX knows of a value.
MARKS = ("pvary", "pcast", "sharding_constraint", "reshard", "mesh_cast")


def axes_of(eqn: Equation) -> Axes:
    """Returns the axes that a `shard_map` maps over."""
    params = eqn.params
    manual = params.get("newly_manual_axes", params.get("manual_axes"))
    sizes = dict(params["mesh"].shape)
    return tuple((name, sizes[name]) for name in sizes if not manual or name in manual)


def _axes_by_dimension(spec: Any) -> list[tuple[str, ...]]:
    names = [() if x is None else x for x in tuple(spec)]
    return [(x,) if isinstance(x, str) else tuple(x) for x in names]


def split(x: Any, spec: Any, axes: Axes) -> Any:
    """Returns an array as its shards, with one leading axis for each axis of the mesh."""
    sizes, shape, front = dict(axes), [], {}
    named = _axes_by_dimension(spec)
    for i, size in enumerate(np.shape(x)):
        for name in named[i] if i < len(named) else ():
            front[name] = len(shape)
            shape.append(sizes[name])
            size //= sizes[name]
        shape.append(size)
    x = np.reshape(x, shape)
    order = [front[name] for name, _ in axes if name in front]
    rest = [i for i in range(len(shape)) if i not in order]
    x = np.transpose(x, [*order, *rest])
    for i, (name, size) in enumerate(axes):
        if name not in front:
            x = np.repeat(np.expand_dims(x, i), size, axis=i)
    return x


def join(x: Any, spec: Any, axes: Axes) -> Any:
    """Returns the array that has some shards."""
    named = _axes_by_dimension(spec)
    used = {name for names in named for name in names}
    x = np.asarray(x)[tuple(slice(None) if name in used else 0 for name, _ in axes)]
    leading = [name for name, _ in axes if name in used]
    dims = x.ndim - len(leading)
    order, shape = [], []
    for i in range(dims):
        names = named[i] if i < len(named) else ()
        order += [*(leading.index(name) for name in names), len(leading) + i]
        count = int(
            np.prod([x.shape[leading.index(name)] for name in names], dtype=int)
        )
        shape.append(count * x.shape[len(leading) + i])
    return np.reshape(np.transpose(x, order), shape)


def run_on_shards(
    eqn: Equation, args: Sequence[Any], changes: dict[str, Any], axes: Axes
) -> list[Any]:
    """Runs an equation on every shard."""
    name = primitive_name(eqn)
    if name in MARKS:
        return [args[0]]

    def call(_: Any, *xs: Any) -> Any:
        if name == "psum_invariant":
            return [lax.psum(x, eqn.params["axes"]) for x in xs]
        return bind(eqn, xs, **changes)

    # Constants have no shards. The first operand is there for equations without any.
    pairs = zip(args, eqn.invars, strict=True)
    mapped = [0 if np.ndim(x) > atom.aval.ndim else None for x, atom in pairs]
    for axis, size in reversed(axes):
        call = jax.vmap(call, (0, *mapped), axis_name=axis, axis_size=size)
    return list(call(np.zeros([size for _, size in axes]), *args))
