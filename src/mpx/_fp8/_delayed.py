"""Delayed scaling: the largest magnitudes that it observes and keeps."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, PyTree


class Fp8State(eqx.Module):
    """The largest magnitudes of the last steps, for each matmul of a function.

    Made by `init` of a function under `fp8` with `DelayedScaling`; a pytree of f32
    arrays, to be jitted, donated, sharded and saved like any other. The gradient of a
    function with respect to it is not one: it holds the magnitudes of that call. Those of
    several calls under one gradient would be added: `accumulate` takes the largest.

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

    def rescaled(self, factor: Array | float) -> "Fp8State":
        """Returns the state for a loss scale that is `factor` times as large.

        The magnitudes of gradients grow with it: without this the next step is clipped.
        `mpx.value_and_grad` and `mpx.accumulate` call it.
        """
        return jax.tree.map(lambda history: history.at[..., 2].multiply(factor), self)

    def largest(self, history: int) -> dict[str, tuple[Array, Array]]:
        """Returns the maxima over the history, and the probes that observe new ones.

        Raises a `ValueError` if the state was made for another length of the history.
        """
        found = {}
        for key, amaxes in self.amaxes.items():
            if amaxes.shape[-2:] != (history, 3):
                raise ValueError(
                    f"`{key}` of the scales has the shape {amaxes.shape}, but "
                    f"`DelayedScaling(history={history})` keeps (..., {history}, 3). Use "
                    "the recipe that they were made with, or make them anew with "
                    "`.init(*args)`."
                )
            largest = lax.stop_gradient(jnp.max(amaxes, axis=-2))
            found[key] = largest, amaxes[..., 0, :]
        return found


def check_keys(
    wanted: dict[str, tuple[int, ...]], given: dict[str, tuple[int, ...]]
) -> None:
    """Raises a `ValueError` unless each matmul has scales and each of these a matmul.

    Both are the lengths of the scans around a matmul, by key.
    """
    both = wanted.keys() & given.keys()
    other = "it has them for other lengths of scans around"
    found = {
        "it has none for": wanted.keys() - both,
        other: {key for key in both if wanted[key] != given[key]},
        "nothing uses": given.keys() - both,
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
            "`.init(*args)`. Or other arguments hold the parameters than `init`, which sees "
            "no gradient, took for them: name these by `fp8(..., params=...)`."
        )


Scales = dict[str, tuple[PyTree, PyTree]]
"""By the key of a matmul: the maxima that were seen before, and the probe."""
