"""The dtype in which gradients are summed over devices: the option and who set it."""

import contextlib
import math
from typing import NamedTuple

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.typing import DTypeLike
from jaxtyping import PyTree

from mpx._jax._compat import make_jit_context
from mpx._jax._formats import parse_float_dtype
from mpx._jax._tree import AxisName

COMPUTE = "compute"
"""Sums gradients in the dtype of the matmul that makes them."""
F32 = np.dtype(np.float32)
Reduce = np.dtype | str | None

_chosen = make_jit_context(None)
_plain = make_jit_context(False)
_shards = make_jit_context(False)


def parse_reduce(dtype: DTypeLike | None) -> Reduce:
    """Returns what a user may pass for `reduce_dtype`: a dtype, "compute" or `None`."""
    if dtype is None or (isinstance(dtype, str) and dtype == COMPUTE):
        return dtype
    return parse_float_dtype(dtype, "reduce_dtype")


def reducing_in(dtype: Reduce) -> contextlib.AbstractContextManager[object]:
    """Sets what `amp` without an option of its own does in the code inside."""
    return _chosen(dtype)


def chosen_reduce() -> Reduce:
    """Returns what a gradient function around the call has chosen."""
    return _chosen.value


def over_shards() -> contextlib.AbstractContextManager[object]:
    """Marks a `jax.vmap` over the shards of a batch, each on its own devices."""
    return _shards(True)


def in_shards() -> bool:
    """Returns whether a `jax.vmap` around the call is one over shards."""
    return _shards.value


def plain_matmuls() -> contextlib.AbstractContextManager[object]:
    """Makes `amp` write its matmuls as plain ones, for a transformation around it."""
    return _plain(True)


def amp_reduce(own: Reduce) -> Reduce:
    """Returns what `amp` does, whose own option comes before that of the gradient."""
    if _plain.value:
        return COMPUTE
    return _chosen.value if own is None else own


def weight_grad_dtype(choice: Reduce, weight: Array, compute: np.dtype) -> np.dtype:
    """Returns the dtype in which the matmul for a weight's gradient gives its result.

    XLA sums over devices what that matmul returns, before any cast. `None` is f32 if the
    weight is on several devices, else the compute dtype: nothing is summed over devices.
    """
    if choice is None:
        return F32 if on_several_devices(weight) else compute
    return compute if choice == COMPUTE else np.dtype(choice)


class Shards(NamedTuple):
    """The shards of a batch: the mesh, and the axes over which it is sharded."""

    mesh: Mesh | AbstractMesh
    axes: tuple[str, ...]

    @property
    def size(self) -> int:
        """The number of shards."""
        return math.prod(self.mesh.shape[name] for name in self.axes)


def shards_of(axis_name: AxisName | None, tree: PyTree) -> Shards | None:
    """Returns the axes of a mesh that are named, if no transformation has bound them."""
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name or ())
    if not axes or _are_bound(axes):
        return None
    meshes = [jax.sharding.get_abstract_mesh()]
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    meshes += [jax.typeof(x).sharding.mesh for x in arrays]
    found = [mesh for mesh in meshes if {*axes} <= {*mesh.axis_names}]
    if not found:
        raise ValueError(
            f"`axis_name={axis_name!r}` names no axis: neither a `jax.shard_map` or "
            "`jax.vmap` around the call nor the mesh of the arguments has it. Use the name "
            "of an axis of the mesh over which the batch is sharded, and put the arguments "
            "on that mesh or call inside `with jax.set_mesh(mesh):`."
        )
    kinds = dict(zip(found[0].axis_names, found[0].axis_types, strict=True))
    if any(kinds[name] != AxisType.Auto for name in axes):
        raise ValueError(
            f"`axis_name={axis_name!r}` is an explicit axis of the mesh, for which the "
            "batch cannot be split without changing the function. Call it inside "
            "`jax.shard_map`, or make the axis automatic: "
            "`jax.make_mesh(..., axis_types=(AxisType.Auto,))`."
        )
    return Shards(found[0], axes)


def _are_bound(axes: tuple[str, ...]) -> bool:
    try:
        lax.axis_size(axes)
    except NameError:
        return False
    return True


def on_several_devices(x: Array) -> bool:
    """Returns whether XLA may sum gradients of an array over devices."""
    mesh = jax.typeof(x).sharding.mesh
    return mesh.size > 1 and not mesh.are_all_axes_manual


def automatic_size(x: Array) -> int:
    """Returns the number of devices over which XLA may shard an array; else 1."""
    mesh = jax.typeof(x).sharding.mesh
    automatic = all(kind == AxisType.Auto for kind in mesh.axis_types or ())
    return mesh.size if automatic and mesh.axis_names else 1
