"""Update rules in f32, and the step of one parameter that applies them.

A rule is static. Values that change from step to step enter as *coefficients*, f32 scalars
that are combined beforehand: neither a schedule nor a loss scale recompiles anything, and
the work per element is small. Rules run in plain JAX and in kernels.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import PyTree

from mpx._quant import (
    Block,
    MasterCodec,
    MomentCodec,
    Noise,
    Rounding,
    is_finite,
)

Scalars = tuple[Array, ...]
Moments = tuple[Array, ...]
_LARGEST_MOMENT = np.float32(2.0**125)  # the largest that every codec can store


class Given(NamedTuple):
    """What the equations of a rule read beside the moments, for one block.

    Attributes:
        c: The coefficients of the rule.
        grad: The gradient, f32.
        weight: The weight before the step, f32.
        block: The groups, and how roots and the like are computed.
    """

    c: Scalars
    grad: Array
    weight: Array
    block: Block


# A rule has a `kind`, which tells the meaning of its moments; the names of its `moments`, of
# `mu` and `nu`, and those of its hyperparameters. `coefficients` combines hyperparameters
# for a step, 1 for the first one. `average` returns the new moments, and `move` the new
# weight, given the moments before and after the step.


@dataclasses.dataclass(frozen=True)
class Adam:
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

    def coefficients(self, hyper: Mapping[str, Array], step: Array) -> Scalars:
        b1, b2, rate = hyper["b1"], hyper["b2"], hyper["learning_rate"]
        # √c₂ is taken out of the denominator: one product less for each element.
        root = jnp.sqrt(_bias(b2, step))
        keep1, keep2, rate = 1 - b1, 1 - b2, rate * root / _bias(b1, step)
        decay = _decay(hyper, self.decoupled)
        return (b1, keep1, b2, keep2, rate, decay, hyper["eps"] * root)

    def average(self, given: Given, moments: Moments) -> Moments:
        (b1, keep1, b2, keep2, _, decay, _), grad, weight, block = given
        mu, nu = moments
        if not self.decoupled:
            grad = grad + decay * weight
        mu = block.multiply_add(b1, mu, keep1 * grad)
        return mu, block.multiply_add(b2, nu, keep2 * (grad * grad))

    def move(self, given: Given, old: Moments, new: Moments) -> Array:
        (*_, rate, decay, eps), _, weight, block = given
        mu, nu = new
        if self.decoupled:
            weight = weight * decay
        step = mu * block.reciprocal(block.sqrt(nu) + eps)
        return block.multiply_add(-rate, step, weight)


def _bias(decay: Array, step: Array) -> Array:
    """Returns 1 - decayᵗ without cancellation."""
    return -jnp.expm1(step * jnp.log(decay))


def _decay(hyper: Mapping[str, Array], decoupled: bool = True) -> Array:
    """Returns the factor of the weight, or its share of the gradient if not decoupled."""
    decay = hyper["weight_decay"]
    return 1 - hyper["learning_rate"] * decay if decoupled else decay


@dataclasses.dataclass(frozen=True)
class Lion:
    """Lion: w ← (1-ηλ)w - η sign(β₁μ + (1-β₁)g), then μ ← β₂μ + (1-β₂)g."""

    kind: ClassVar[str] = "lion"
    moments: tuple[str, ...] = ("mu",)
    hyper: ClassVar[tuple[str, ...]] = ("learning_rate", "weight_decay", "b1", "b2")

    def coefficients(self, hyper: Mapping[str, Array], step: Array) -> Scalars:
        b1, b2, rate = hyper["b1"], hyper["b2"], hyper["learning_rate"]
        return (b1, 1 - b1, b2, 1 - b2, rate, _decay(hyper))

    def average(self, given: Given, moments: Moments) -> Moments:
        _, _, b2, keep2, _, _ = given.c
        (mu,) = moments
        return (b2 * mu + keep2 * given.grad,)

    def move(self, given: Given, old: Moments, new: Moments) -> Array:
        (b1, keep1, _, _, rate, decay), grad, weight, block = given
        (mu,) = old
        return weight * decay - rate * block.sign(b1 * mu + keep1 * grad)


@dataclasses.dataclass(frozen=True)
class Sgd:
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

    def coefficients(self, hyper: Mapping[str, Array], step: Array) -> Scalars:
        decay, rate = _decay(hyper, self.decoupled), hyper["learning_rate"]
        return (hyper["momentum"], 1 - hyper["dampening"], rate, decay)

    def average(self, given: Given, moments: Moments) -> Moments:
        (momentum, keep, _, decay), grad, weight, _ = given
        if not self.decoupled:
            grad = grad + decay * weight
        return tuple(momentum * mu + keep * grad for mu in moments)

    def move(self, given: Given, old: Moments, new: Moments) -> Array:
        (momentum, _, rate, decay), grad, weight, _ = given
        if self.decoupled:
            weight, step = weight * decay, grad
        else:
            step = grad + decay * weight
        for mu in new:
            step = step + momentum * mu if self.nesterov else mu
        return weight - rate * step


Rule = Adam | Lion | Sgd


class Leaf(NamedTuple):
    """A parameter and its state.

    Attributes:
        param: The parameter, in the dtype of the model; `None` in what a state alone holds.
        correction: The remainder of rounding the master weight, or `None`.
        moments: A `Quantized` or an f32 array for each moment of the rule.
    """

    param: PyTree
    correction: Array | None
    moments: tuple[PyTree, ...]


@dataclasses.dataclass(frozen=True)
class LeafStep:
    """The step of one leaf: decode, update in f32, encode. Static; equal ones compile once.

    Attributes:
        rule: The update rule.
        master: The codec of the weight.
        moments: The codec of each moment, in the order of the rule.
        group_size: Elements that share a scale; 0 if no moment is quantised.
        dithers: Whether moments and weights are rounded with a `Dither`.
    """

    rule: Rule
    master: MasterCodec
    moments: tuple[MomentCodec, ...]
    group_size: int
    dithers: bool = False

    def __call__(
        self,
        scalars: Scalars,
        grad: Array,
        leaf: Leaf,
        block: Block,
        noise: Noise | None = None,
    ) -> Leaf:
        """Steps a block.

        `scalars` are the factor of the gradient, the two numbers of a `Dither`, and the
        coefficients of the rule. `noise` rounds at random.
        """
        grad_scale, for_moments, for_masters, *coefficients = scalars

        def rounding(dither: Array, stream: int) -> Rounding:
            if noise is not None:
                return dataclasses.replace(noise, stream=stream)
            return dither if self.dithers else None

        weight = self.master.decode(leaf.param, leaf.correction, block)
        moments = tuple(
            codec.decode(stored, block)
            for codec, stored in zip(self.moments, leaf.moments, strict=True)
        )
        grad = grad if grad.dtype.itemsize > 4 else grad.astype(weight.dtype)
        scaled = grad.astype(weight.dtype) * grad_scale
        given = Given(tuple(coefficients), scaled, weight, block)
        weight, moments = self._update(given, moments, leaf.param.dtype)
        # For `finite` to skip; it must be seen if nobody looks.
        weight = jnp.where(is_finite(grad), weight, np.float32(np.nan))
        param, correction = self.master.encode(
            weight, leaf.param.dtype, block, rounding(for_masters, 0)
        )
        pairs = zip(self.moments, moments, strict=True)
        stored = tuple(
            codec.encode(moment, block, rounding(for_moments, stream), is_safe=True)
            for stream, (codec, moment) in enumerate(pairs, start=1)
        )
        return Leaf(param, correction, stored)

    def _update(
        self, given: Given, moments: Moments, dtype: np.dtype
    ) -> tuple[Array, Moments]:
        """Returns weights and moments after a step, the old ones where it would overflow.

        The square of a gradient of 1e20 is infinite. Such a second moment would stay, and
        its weight would never move again. Each element is decided by itself, in registers:
        to skip the whole step, a kernel would have to read all gradients twice.
        """
        weight = given.weight
        new = self.rule.average(given, moments)
        # If any moment is too large, the last one is.
        fits = [jnp.abs(last) < _LARGEST_MOMENT for last in new[-1:]]
        for fit in fits:
            new = tuple(map(functools.partial(jnp.where, fit), new, moments))
        moved = self.rule.move(given, moments, new)
        # A weight that is beyond its dtype already may shrink.
        largest = jnp.maximum(jnp.abs(weight), np.float32(jnp.finfo(dtype).max))
        for fit in (*fits, jnp.abs(moved) <= largest):
            moved = jnp.where(fit, moved, weight)
        return moved, new
