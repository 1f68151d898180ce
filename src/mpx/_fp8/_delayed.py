"""Delayed scaling: the largest magnitudes that it observes and keeps.

A maximum over a sharded tensor is an all-reduce of one number, and XLA merges those of a
loop's body only with each other: scanned layers would reduce once a layer. Nothing needs
these maxima before the next step. So each device keeps those of what it holds, in an array
with an axis for devices, until all of them are there.
"""

import functools
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float32, PyTree

from mpx._casting._reduction import automatic_size, in_shards
from mpx._fp8._scales import largest_magnitude
from mpx._jax._compat import is_tracer
from mpx._jax._private import private
from mpx._jax._sharding import Parts, axes_of, partitioned, spec_of, unpadded
from mpx._kernels import plain_under_vmap
from mpx._wire._sums import largest_of_shards


class Fp8State(eqx.Module):
    """The largest magnitudes of the last steps, for each matmul of a function.

    Made by `init` of a function under `fp8` with `DelayedScaling`; a pytree of f32
    arrays, to be jitted, donated, sharded and saved like any other. The gradient of a
    function with respect to it is not one: it holds the magnitudes of that call.

    Attributes:
        amaxes: By matmul, f32[*lengths of scans, history, 3]: the newest step first;
            activation, weight and gradient. 0 stands for "not seen". The key is the path of
            the parameter and which of its uses this is, as in `params/layers/0/up:0`, so
            that another `jit` or `checkpoint` around a layer leaves a saved state usable.
    """

    amaxes: dict[str, Float32[Array, "*lengths history 3"]]

    def update(self, observed: "Fp8State") -> "Fp8State":
        """Returns the state for the next step.

        A maximum that was not observed (in a branch not taken) or is not finite (in a
        step that overflowed) does not enter: the last one stands for it.

        Args:
            observed: The gradient of a function with respect to this state.
        """

        def push(history: Array, found: Array) -> Array:
            new, last = found[..., 0, :], history[..., 0, :]
            new = jnp.where(jnp.isfinite(new) & (new > 0), new, last)
            return jnp.concatenate([new[..., None, :], history[..., :-1, :]], axis=-2)

        return jax.tree.map(push, self, observed)

    def largest(self) -> dict[str, tuple[Array, Array]]:
        """Returns the maxima over the history, and the probes that observe new ones."""
        return {
            path: (lax.stop_gradient(jnp.max(history, axis=-2)), history[..., 0, :])
            for path, history in self.amaxes.items()
        }


def empty_state(keys: Mapping[str, tuple[int, ...]], history: int) -> Fp8State:
    """Returns a state in which nothing has been seen, from the lengths of scans by key."""
    return Fp8State(
        {
            path: jnp.zeros((*lengths, history, 3), jnp.float32)
            for path, lengths in keys.items()
        }
    )


def check_history(state: Fp8State, history: int) -> None:
    """Raises a `ValueError` if a state was made for another length of the history."""
    for key, amaxes in state.amaxes.items():
        if amaxes.shape[-2:] != (history, 3):
            raise ValueError(
                f"`{key}` of the scales has the shape {amaxes.shape}, but "
                f"`DelayedScaling(history={history})` keeps (..., {history}, 3). Use the "
                "recipe that they were made with, or make them anew with `.init(*args)`."
            )


def check_keys(missing: set[str], used: set[str], given: set[str]) -> None:
    """Raises a `ValueError` unless each matmul has found scales and each of them a matmul.

    Args:
        missing: The keys of matmuls without scales.
        used: The keys of those with scales.
        given: The keys of the state.
    """
    found = {
        "it has none for": missing - given,
        "it has them for other lengths of scans around": missing & given,
        "nothing uses": given - used - missing,
    }
    faults = [
        f"{fault} {', '.join(f'`{key}`' for key in sorted(keys))}"
        for fault, keys in found.items()
        if keys
    ]
    if faults:
        raise ValueError(
            f"The `Fp8State` has other scales than this call needs: {'; '.join(faults)}. "
            "It was made for other arguments or another function: make it anew with "
            "`.init(*args)`."
        )


Scales = dict[str, tuple[Any, Any]]
"""By the key of a matmul: the maxima that were seen before, and the probe."""


def automatic_devices(tree: PyTree) -> int:
    """Returns over how many devices XLA shards the arrays of a call, 1 if unknown.

    It is 1 as well inside a `vmap` over shards, where each has its own maxima.
    """
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    sizes = {automatic_size(x) for x in arrays} - {1}
    if len(sizes) != 1 or in_shards() or private("kernels") is None:
        return 1
    return sizes.pop()


def with_devices(scales: Scales, devices: int) -> Scales:
    """Returns delayed scales whose probes have an axis for devices, before the last.

    The gradient of a probe is the maxima of a matmul, of each device apart. Those of all
    probes become one set of maxima by one reduction, behind the backward pass.
    """
    if devices == 1:
        return scales
    probes: Any = _spread(devices, {key: probe for key, (_, probe) in scales.items()})
    return {key: (seen, probes[key]) for key, (seen, _) in scales.items()}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _spread(devices: int, probes: dict[str, Array]) -> dict[str, Array]:
    return jax.tree.map(lambda x: jnp.stack([x] * devices, axis=-2), probes)


def _spread_forward(devices: int, probes: dict[str, Array]) -> tuple[Any, None]:
    return _spread(devices, probes), None


def _spread_backward(devices: int, _: None, observed: dict[str, Array]) -> Any:
    first = jax.tree.map(lambda x: jnp.moveaxis(x, -2, 0), observed)
    return (largest_of_shards(first),)


_spread.defvjp(_spread_forward, _spread_backward)


def maxima_of(x: Array, shape: tuple[int, ...]) -> Float32[Array, "..."]:
    """Returns the largest magnitude of an array, or of what each device holds of it.

    Args:
        x: The array.
        shape: That of the result: `()`, or `(devices,)` for those of the devices of a mesh
            with automatic axes. Their maximum is the largest magnitude of the array: some
            may be that already.
    """
    if not shape:
        return largest_magnitude(x)
    (devices,) = shape

    def plain(x: Array) -> Array:
        return jnp.broadcast_to(largest_magnitude(x), (devices,))

    if automatic_size(x) != devices or not x.ndim or not is_tracer(x):
        return plain(x)
    mesh = jax.typeof(x).sharding.mesh
    apart = PartitionSpec(mesh.axis_names)

    def parts(mesh: Any, args: Any, _: Any) -> Parts:
        (x,) = args
        entries = unpadded(axes_of(x.sharding.spec, len(x.shape)), x.shape, mesh)
        given = NamedSharding(mesh, spec_of(entries))
        return Parts(
            lambda x: largest_magnitude(x)[None], (given,), NamedSharding(mesh, apart)
        )

    def kernel(x: Array) -> Array:
        rule = " ".join(f"d{i}" for i in range(x.ndim)) + " -> n"
        out = partitioned(plain, (x,), parts, rule=rule)
        return lax.with_sharding_constraint(out, NamedSharding(mesh, apart))

    return plain_under_vmap(kernel, plain)(x)
