"""The state of delayed scaling: what the largest magnitudes were."""

from collections.abc import Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32


class Fp8State(eqx.Module):
    """The largest magnitudes of the last steps, for each matmul of a function.

    Made by `init` of a function under `fp8` with `DelayedScaling`; a pytree of f32
    arrays, to be jitted, donated, sharded and saved like any other. The gradient of a
    function with respect to it is not one: it holds the magnitudes of that call.

    Attributes:
        amaxes: By the path of a matmul, f32[*lengths of scans, history, 3]: the newest
            step first; activation, weight and gradient. 0 stands for "not seen".
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


def empty_state(sites: Mapping[str, tuple[int, ...]], history: int) -> Fp8State:
    """Returns a state in which nothing has been seen."""
    return Fp8State(
        {
            path: jnp.zeros((*lengths, history, 3), jnp.float32)
            for path, lengths in sites.items()
        }
    )
