"""The table of planted faults, and what its files share."""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import placed
from scripts import script

cast = script("_models").cast


@dataclasses.dataclass(frozen=True)
class Case:
    """A call to explain: the function, its arguments, and the loss scaling."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    scaling: Any = None


@dataclasses.dataclass(frozen=True)
class Planted:
    """A planted fault.

    The line at fault ends with a comment: an arrow `<-` and the name of the function that
    makes the case.
    """

    name: str
    make: Callable[[], Case]
    path: str  # a part of the parameter path, the scope or the function to be named
    kinds: tuple[str, ...]  # that describe it
    backward: bool  # in the backward pass only

    @property
    def place(self):
        """The file that holds the marked lines, and their numbers."""
        file = Path(inspect.getfile(inspect.unwrap(self.make)))
        lines = file.read_text().splitlines()
        mark = f"# <- {self.name}"
        numbers = {i for i, x in enumerate(lines, 1) if x.rstrip().endswith(mark)}
        assert numbers, f"{file} has no line that ends with {mark!r}"
        return file.name, numbers


PLANTED: dict[str, Planted] = {}
HEALTHY: dict[str, Callable[[], Case]] = {}


def made(func, args, how, scaling):
    """Returns the function that makes a case: that of a loss, unless there are no arguments."""
    if not args:
        return func
    make = lambda: Case(how(func) if how else func, args, scaling)  # noqa: E731
    return functools.update_wrapper(make, func)


def planted(kinds, *args, path="", backward=False, how=None, scaling=None):
    """Adds a fault to the table: a loss of arguments, or a function that makes a case.

    Without a path the function at fault is the one with the name of the fault.
    """

    def add(func):
        make, name = made(func, args, how, scaling), func.__name__
        assert name not in PLANTED
        PLANTED[name] = Planted(
            name, make, path or name, tuple(kinds.split()), backward
        )
        return make

    return add


backward = functools.partial(planted, backward=True)


def healthy(*args, how=None, scaling=None):
    """Adds a healthy model to the table, in the same way."""

    def add(func):
        HEALTHY[func.__name__] = made(func, args, how, scaling)
        return func

    return add


def in_low(loss, dtype):
    """Returns a loss that casts all its arguments first, as a policy does."""

    def wrapped(*args):
        return loss(*cast(args, dtype)).astype(jnp.float32)

    return wrapped


F16 = functools.partial(in_low, dtype=jnp.float16)
BF16 = functools.partial(in_low, dtype=jnp.bfloat16)


def normal(seed, *shape, scale=1.0):
    """Returns normal random numbers."""
    numbers = np.random.default_rng(seed).normal(size=shape)
    return placed(np.asarray(scale * numbers, np.float32))


def weight(seed, *shape, scale=1.0):
    """Returns a random matrix that keeps the size of what it is multiplied with."""
    return normal(seed, *shape, scale=scale * shape[-2] ** -0.5)


def weights(width, *names, **options):
    """Returns some square matrices by name."""
    return {
        x: weight(i, width, width, **options) for i, x in enumerate(names or ("w",))
    }


def mlp(seed, *sizes):
    """Returns the parameters of linear layers."""
    return {
        f"layer{i}": {"w": weight(seed + i, a, b), "b": jnp.zeros(b)}
        for i, (a, b) in enumerate(itertools.pairwise(sizes))
    }


def linear(params, x):
    """Applies a linear layer."""
    return x @ params["w"] + params["b"]


def cross_entropy(logits, labels):
    """Returns the mean cross entropy in f32."""
    logp = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(logp, labels[..., None], -1))
