"""Error feedback: what sums in 8 bits have rounded away is added in the next step.

With the gradient g of a device, its residual r and the rounding Q to 8-bit blocks, a step is

    q = Q(g + r)            sent
    r = (g + r) − q         kept

Over any number of steps the devices have sent the sum of their gradients, up to one residual
each. Without it, what rounds to zero in one step does so in all of them.
"""

from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import PyTree

from mpx._casting._reduction import F32
from mpx._jax._compat import is_tracer
from mpx._jax._formats import parse_float_dtype
from mpx._jax._sharding import axes_of, spec_of
from mpx._jax._tree import AxisName, is_floating, named_leaves
from mpx._wire._sums import sum_8_bits

Split = Callable[[Array, Array], tuple[Array, Array]]
"""Returns the sum of gradients with residuals, and the new residuals."""


class ErrorFeedback(eqx.Module):
    """What `reduce_dtype="e4m3"` has rounded away of the gradients, on each device.

    Pass it to a function made by `value_and_grad` or `accumulate` behind the scaling;
    `result.feedback` is the one for the next step. A step that is skipped leaves it alone.
    It is a pytree of arrays, to be jitted, donated and saved like any other. After a restart
    on another number of devices make a new one: one rounding of one step is lost.

    Attributes:
        residual: By parameter, `[devices, *shape]`: the gradient of an earlier step, without
            the loss scale, that its device has not sent yet.

    Examples:
        >>> from mpx import NoLossScaling, value_and_grad
        >>> policy = "p=f32,c=f32,o=f32,r=e4m3"
        >>> loss = lambda w, x: jnp.sum(w * x)
        >>> kinds = (jax.sharding.AxisType.Auto,)
        >>> mesh = jax.make_mesh((1,), ("data",), axis_types=kinds)
        >>> specs = P(), P("data"), P(), P("data")
        >>> @jax.jit
        ... @jax.shard_map(
        ...     mesh=mesh, in_specs=specs, out_specs=(P(), P("data")), check_vma=False
        ... )
        ... def step(scaling, feedback, w, x):
        ...     take = value_and_grad(loss, axis_name="data", policy=policy)
        ...     result = take(scaling, feedback, w, x)
        ...     return result.grads, result.feedback
        >>> w, x = jnp.zeros(2), jnp.float32([448.0, 17.0])  # e4m3 has 16 and 18
        >>> feedback, sent = ErrorFeedback.init(w, mesh, "data"), []
        >>> for _ in range(4):
        ...     grads, feedback = step(NoLossScaling(), feedback, w, x)
        ...     sent.append(float(grads[1]))
        >>> sent
        [16.0, 18.0, 16.0, 18.0]
    """

    residual: PyTree

    @classmethod
    def init(
        cls,
        params: PyTree,
        mesh: Mesh,
        axis_name: AxisName,
        *,
        dtype: DTypeLike = jnp.float32,
    ) -> "ErrorFeedback":
        """Makes an empty one: a copy of the parameters on each device.

        Args:
            params: The parameters, or arrays like their gradients: a tuple of them for
                several `argnums`. `jax.ShapeDtypeStruct`s give `jax.ShapeDtypeStruct`s.
            mesh: The mesh of the devices.
            axis_name: The axis or axes of the mesh over which the gradients are summed.
            dtype: The dtype of the residuals. bf16 halves their memory, but gradients below
                1/256 of a residual are then lost.

        Raises:
            ValueError: If the mesh has no such axis, or the dtype is not floating.

        Examples:
            >>> mesh = jax.make_mesh((1,), ("data",))
            >>> ErrorFeedback.init({"w": jnp.ones(2)}, mesh, "data").residual
            {'w': Array([[0., 0.]], dtype=float32)}
        """
        dtype = parse_float_dtype(dtype, "dtype")
        axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
        if not {*axes} <= {*mesh.axis_names}:
            raise ValueError(
                f"`axis_name={axis_name!r}` names no axis of the mesh, whose axes are "
                f"{mesh.axis_names}. Use the axis over which the batch is sharded."
            )
        count = int(np.prod([mesh.shape[name] for name in axes]))

        def zeros(leaf: PyTree) -> PyTree:
            if not is_floating(leaf):
                return None
            shape = (count, *leaf.shape)
            sharding = NamedSharding(mesh, _stacked_spec(leaf, axes))
            if isinstance(leaf, jax.ShapeDtypeStruct):
                return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
            return jnp.zeros(shape, dtype, device=sharding)

        return cls(jax.tree.map(zeros, params))


def _stacked_spec(leaf: PyTree, axes: tuple[str, ...]) -> P:
    """Returns how copies of an array are sharded: as it is, over the other axes."""
    sharding = None if is_tracer(leaf) else getattr(leaf, "sharding", None)
    entries = [
        tuple(name for name in names if name not in axes)
        for names in axes_of(getattr(sharding, "spec", ()))
    ]
    # As results of programs have it: a step must not compile again for its own results.
    while entries and not entries[-1]:
        entries.pop()
    return spec_of([axes, *entries])


def take_feedback(
    args: Sequence[PyTree],
) -> tuple[ErrorFeedback | None, Sequence[PyTree]]:
    """Splits off the `ErrorFeedback` that comes before the arguments of a function."""
    if args and isinstance(args[0], ErrorFeedback):
        return args[0], args[1:]
    return None, args


def mean_with_feedback(
    grads: PyTree, feedback: ErrorFeedback, scaling: PyTree, axis_name: AxisName
) -> tuple[PyTree, ErrorFeedback]:
    """Returns the mean over devices of gradients that are sent as 8-bit blocks."""
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    count = lax.axis_size(axes)

    def split(grad: Array, residual: Array) -> tuple[Array, Array]:
        total, rest = sum_8_bits(grad + residual[0], axes)
        return total / count, rest[None]

    return with_feedback(grads, feedback, scaling, split, stacked=False)


def with_feedback(
    grads: PyTree,
    feedback: ErrorFeedback,
    scaling: PyTree,
    split: Split,
    *,
    stacked: bool,
) -> tuple[PyTree, ErrorFeedback]:
    """Sums gradients with the residuals of the step before, by a function of one leaf.

    Residuals are kept without the loss scale. `stacked` gradients have an axis for devices,
    as residuals have.
    """
    leaves, structure = jax.tree.flatten(grads)
    before, after = jax.tree.flatten(feedback.residual)
    _check_shapes(
        feedback, [x.shape if stacked else (1, *x.shape) for x in leaves], stacked
    )
    sums, rests = [], []
    for grad, residual in zip(leaves, before, strict=True):
        total, rest = split(grad.astype(F32), scaling.scale(residual.astype(F32)))
        sums.append(total)
        rests.append(scaling.unscale(rest).astype(residual.dtype))
    return structure.unflatten(sums), ErrorFeedback(after.unflatten(rests))


def _check_shapes(
    feedback: ErrorFeedback, wanted: Sequence[tuple[int, ...]], stacked: bool
) -> None:
    """Raises a `ValueError` unless the residuals have these shapes."""
    found = [(name, x.shape) for name, x in named_leaves(feedback.residual)]
    remedy = "Make it with `mpx.ErrorFeedback.init(params, mesh, axis_name)`" + (
        "." if stacked else " and pass it into the `shard_map` with `P(axis_name)`."
    )
    if len(found) != len(wanted):
        raise ValueError(
            f"The `ErrorFeedback` has {len(found)} residuals, but there are "
            f"{len(wanted)} gradients. {remedy}"
        )
    for (name, shape), expected in zip(found, wanted, strict=True):
        if shape != expected:
            raise ValueError(
                f"The residual `{name}` of the `ErrorFeedback` has the shape {shape} here, "
                f"but its gradient needs {expected}. {remedy}"
            )
