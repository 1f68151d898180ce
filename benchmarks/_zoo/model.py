"""A model of the zoo, and what its files share: random data, losses, kinds of modules."""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

Loss = Callable[..., Array]
BF16 = jnp.bfloat16


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


class Model(NamedTuple):
    """The package, the function that imports it, and notes by route that explain it."""

    package: str
    make: Callable[[], Case]
    notes: Mapping[str, str]


REGISTRY: dict[str, Model] = {}


def model(name, package, notes=None):
    """Adds a model to the table, under the name that the page calls it."""

    def add(make):
        REGISTRY[name] = Model(package, make, notes or {})
        return make

    return add


class Lazy:
    """A package that is imported when it is used: the registry needs none of them."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name) -> Any:
        return getattr(importlib.import_module(self._name), name)


def settings(text):
    """Returns the integers that a text lists: `depth=2 width=64`."""
    return {name: int(x) for name, x in (pair.split("=") for pair in text.split())}


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


def regression(model, batch):
    """Returns the squared error of a model of all but the last of a batch."""
    *inputs, target = batch
    return squared_error(model(*inputs), target)


def each(model, batch):
    """Returns the squared error of a model of one example."""
    return regression(jax.vmap(model), batch)


# --- cases of modules -------------------------------------------------------------------


def of_equinox(model, call, batch, **options):
    """Makes a case of a module and a function of module and batch."""
    params, static = eqx.partition(model, eqx.is_inexact_array)
    loss = lambda params, batch: call(eqx.combine(params, static), batch)  # noqa: E731
    return Case(loss, params, batch, **options)


def of_linen(make, batch, score=regression, inputs=None, seed=2):
    """Makes a case of a Linen module, whose own option for bf16 is `dtype`.

    `score(apply, batch)` is the loss, and `inputs` those of the first call.
    """

    def of(module):
        apply = lambda params: functools.partial(module.apply, params)  # noqa: E731
        return lambda params, batch: score(apply(params), batch)

    inputs = batch[:-1] if inputs is None else inputs
    params = jax.jit(make(None).init)(key(seed), *inputs)
    return Case(of(make(None)), params, batch, of(make(BF16)))


def of_nnx(model, call, batch, own=None):
    """Makes a case of an NNX module."""
    from flax import nnx

    def of(model):
        graph, params, rest = nnx.split(model, nnx.Param, ...)

        def loss(params, batch):
            # New variables: those of another trace could not be written to.
            state = jax.tree.map(lambda x: x, rest)
            return call(nnx.merge(graph, params, state), batch)

        return params, loss

    params, loss = of(model)
    return Case(loss, params, batch, None if own is None else of(own)[1])
