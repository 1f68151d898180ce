"""A model of the zoo, and what its files share: random data and losses."""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

Loss = Callable[..., Array]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model that is ready to train.

    Attributes:
        loss: The f32 loss, `loss(params, batch)`, or `loss(params, beside, batch)`; it
            closes over no data.
        params: The parameters; every floating leaf is trained.
        batch: A pytree of arrays.
        own: The same loss in bf16 by an option of the library itself, if it has one.
        learning_rate: For AdamW.
        beside: Parameters that the loss reads and does not train: frozen ones, or those
            of the rival.
        rival: A model that is trained at the same time, by an optimizer of its own. Each
            has the other's parameters beside its own.
    """

    loss: Loss
    params: Any
    batch: Any
    own: Loss | None = None
    learning_rate: float = 1e-3
    beside: Any = None
    rival: "Case | None" = None

    @property
    def args(self):
        """The arguments of the loss behind the parameters."""
        return (self.batch,) if self.beside is None else (self.beside, self.batch)

    @property
    def holds(self):
        """Which arguments hold parameters, as `mpx.amp(params=)` takes them."""
        return None if self.beside is None else (0, 1)


@dataclasses.dataclass(frozen=True)
class Model:
    """One line of the zoo.

    Attributes:
        name: What the table calls it.
        package: The distribution that it comes from.
        make: A function without arguments that imports the package.
        notes: Why a route does not do what one may expect, by the name of the route.
    """

    name: str
    package: str
    make: Callable[[], Case]
    notes: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Lazy:
    """A package that is imported when it is used: the registry needs none of them."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name) -> Any:
        return getattr(importlib.import_module(self._name), name)


def key(seed):
    """Returns a PRNG key of the kind that compiles fastest."""
    return jax.random.key(seed, impl="unsafe_rbg")


def normal(seed, *shape):
    """Returns normal random numbers, f32."""
    return jax.random.normal(key(seed), shape)


def tokens(seed, vocabulary, *shape):
    """Returns random token ids, int32."""
    return jax.random.randint(key(seed), shape, 0, vocabulary)


def at_least_f32(x):
    """Widens 16-bit numbers, as a careful loss does with the result of a model."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def cross_entropy(logits, labels):
    """Returns the mean cross entropy, computed in f32."""
    logp = jax.nn.log_softmax(at_least_f32(logits))
    return -jnp.mean(jnp.take_along_axis(logp, labels[..., None], axis=-1))


def next_token(logits, ids):
    """Returns the loss of a causal language model."""
    return cross_entropy(logits[:, :-1], ids[:, 1:])


def squared_error(prediction, target):
    """Returns the mean squared error, computed in f32."""
    return jnp.mean(jnp.square(at_least_f32(prediction) - at_least_f32(target)))
