"""Update rules: f32 in, f32 out, nothing else. They run in plain JAX and in kernels.

A rule is static. What changes from step to step enters as *coefficients*, f32 scalars
that are combined beforehand, so that neither a schedule nor a loss scale recompiles
anything, and the work per element is small.
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array

from mpx._quant import Block

Hyper = Mapping[str, Array]
Moments = tuple[Array, ...]


class Rule(abc.ABC):
    """How a gradient changes a weight and the moments.

    Attributes:
        kind: Rules of one kind keep moments of the same meaning.
        moments: The names of the moments that the rule keeps: of `mu` and `nu`.
        hyper: The names of its hyperparameters.
    """

    kind: ClassVar[str]
    moments: tuple[str, ...]
    hyper: ClassVar[tuple[str, ...]]

    @abc.abstractmethod
    def coefficients(self, hyper: Hyper, step: Array) -> tuple[Array, ...]:
        """Combines hyperparameters; `step` is 1 for the first step."""

    @abc.abstractmethod
    def update(
        self,
        coefficients: tuple[Array, ...],
        grad: Array,
        weight: Array,
        moments: Moments,
        block: Block,
    ) -> tuple[Array, Moments]:
        """Returns the new weight and the new moments."""


class _AdamCoefficients(NamedTuple):
    b1: Array
    keep1: Array
    b2: Array
    keep2: Array
    rate: Array
    decay: Array
    eps: Array


@dataclasses.dataclass(frozen=True)
class Adam(Rule):
    """Adam, with weight decay in the gradient or, decoupled, in the weight (AdamW).

    μ ← β₁μ + (1-β₁)g, ν ← β₂ν + (1-β₂)g², w ← (1-ηλ)w - η (μ/c₁) / (√(ν/c₂) + ε)
    with cᵢ = 1 - βᵢᵗ; coupled, g + λw takes the place of g and w does not shrink.
    """

    kind: ClassVar[str] = "adam"
    decoupled: bool
    moments: tuple[str, ...] = ("mu", "nu")
    hyper: ClassVar[tuple[str, ...]] = (
        "learning_rate", "weight_decay", "b1", "b2", "eps",
    )  # fmt: skip

    def coefficients(self, hyper: Hyper, step: Array) -> tuple[Array, ...]:
        b1, b2, rate = hyper["b1"], hyper["b2"], hyper["learning_rate"]
        decay = hyper["weight_decay"]
        # √c₂ is taken out of the denominator: one product less for each element.
        root = jnp.sqrt(_bias(b2, step))
        return _AdamCoefficients(
            b1=b1,
            keep1=1 - b1,
            b2=b2,
            keep2=1 - b2,
            rate=rate * root / _bias(b1, step),
            decay=1 - rate * decay if self.decoupled else decay,
            eps=hyper["eps"] * root,
        )

    def update(
        self,
        coefficients: tuple[Array, ...],
        grad: Array,
        weight: Array,
        moments: Moments,
        block: Block,
    ) -> tuple[Array, Moments]:
        c = _AdamCoefficients(*coefficients)
        mu, nu = moments
        if not self.decoupled:
            grad = grad + c.decay * weight
        mu = block.multiply_add(c.b1, mu, c.keep1 * grad)
        nu = block.multiply_add(c.b2, nu, c.keep2 * (grad * grad))
        if self.decoupled:
            weight = weight * c.decay
        step = mu * block.reciprocal(block.sqrt(nu) + c.eps)
        return block.multiply_add(-c.rate, step, weight), (mu, nu)


def _bias(decay: Array, step: Array) -> Array:
    """Returns 1 - decayᵗ without cancellation."""
    return -jnp.expm1(step * jnp.log(decay))


@dataclasses.dataclass(frozen=True)
class Lion(Rule):
    """Lion: w ← (1-ηλ)w - η sign(β₁μ + (1-β₁)g), then μ ← β₂μ + (1-β₂)g."""

    kind: ClassVar[str] = "lion"
    moments: tuple[str, ...] = ("mu",)
    hyper: ClassVar[tuple[str, ...]] = ("learning_rate", "weight_decay", "b1", "b2")

    def coefficients(self, hyper: Hyper, step: Array) -> tuple[Array, ...]:
        b1, b2, rate = hyper["b1"], hyper["b2"], hyper["learning_rate"]
        return (b1, 1 - b1, b2, 1 - b2, rate, 1 - rate * hyper["weight_decay"])

    def update(
        self,
        coefficients: tuple[Array, ...],
        grad: Array,
        weight: Array,
        moments: Moments,
        block: Block,
    ) -> tuple[Array, Moments]:
        b1, keep1, b2, keep2, rate, decay = coefficients
        (mu,) = moments
        step = block.sign(b1 * mu + keep1 * grad)
        return weight * decay - rate * step, (b2 * mu + keep2 * grad,)


@dataclasses.dataclass(frozen=True)
class Sgd(Rule):
    """Gradient descent: μ ← mμ + (1-d)g, momentum m, dampening d; then w ← w - ημ.

    Without momentum the gradient is the step; with Nesterov's it is g + mμ.
    Weight decay is in the gradient or, decoupled, in the weight.
    """

    kind: ClassVar[str] = "sgd"
    decoupled: bool
    nesterov: bool
    moments: tuple[str, ...]
    hyper: ClassVar[tuple[str, ...]] = (
        "learning_rate", "weight_decay", "momentum", "dampening",
    )  # fmt: skip

    def coefficients(self, hyper: Hyper, step: Array) -> tuple[Array, ...]:
        rate, decay = hyper["learning_rate"], hyper["weight_decay"]
        decay = 1 - rate * decay if self.decoupled else decay
        return (hyper["momentum"], 1 - hyper["dampening"], rate, decay)

    def update(
        self,
        coefficients: tuple[Array, ...],
        grad: Array,
        weight: Array,
        moments: Moments,
        block: Block,
    ) -> tuple[Array, Moments]:
        momentum, keep, rate, decay = coefficients
        if self.decoupled:
            weight = weight * decay
        else:
            grad = grad + decay * weight
        if not self.moments:
            return weight - rate * grad, ()
        (mu,) = moments
        mu = momentum * mu + keep * grad
        step = grad + momentum * mu if self.nesterov else mu
        return weight - rate * step, (mu,)
