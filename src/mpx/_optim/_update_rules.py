"""Update rules in f32.

A rule is static. Values that change from step to step enter as *coefficients*, f32 scalars
that are combined beforehand: neither a schedule nor a loss scale recompiles anything, and
the work per element is small. Rules run in plain JAX and in kernels.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array

from mpx._quant._codecs import Block

Scalars = tuple[Array, ...]
Moments = tuple[Array, ...]
Given = tuple[Scalars, Array, Array, Block]


# A rule has a `kind`, which tells the meaning of its moments, and the names of its `moments`,
# of `mu` and `nu`. `coefficients` combines hyperparameters for a step, 1 for the first one.
# `average` returns the new moments, and `move` the new weight, given the moments before and
# after the step; `given` has the coefficients, the gradient and the weight before the step,
# f32, and the block, which computes roots.


@dataclasses.dataclass(frozen=True)
class Adam:
    """Adam, with weight decay in the gradient or, decoupled, in the weight (AdamW).

    μ ← β₁μ + (1-β₁)g, ν ← β₂ν + (1-β₂)g², w ← (1-ηλ)w - η (μ/c₁) / (√(ν/c₂) + ε)
    with cᵢ = 1 - βᵢᵗ; coupled, g + λw takes the place of g and w does not shrink.
    """

    kind: ClassVar[str] = "adam"
    decoupled: bool
    moments: tuple[str, ...] = ("mu", "nu")

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

    def coefficients(self, hyper: Mapping[str, Array], step: Array) -> Scalars:
        b1, b2, rate = hyper["b1"], hyper["b2"], hyper["learning_rate"]
        return (b1, 1 - b1, b2, 1 - b2, rate, _decay(hyper))

    def average(self, given: Given, moments: Moments) -> Moments:
        (_, _, b2, keep2, _, _), grad, _, _ = given
        (mu,) = moments
        return (b2 * mu + keep2 * grad,)

    def move(self, given: Given, old: Moments, new: Moments) -> Array:
        (b1, keep1, _, _, rate, decay), grad, weight, _ = given
        (mu,) = old
        return weight * decay - rate * jnp.sign(b1 * mu + keep1 * grad)


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


@dataclasses.dataclass(frozen=True)
class Muon:
    """Muon: μ ← βμ + (1-β)g, then w ← (1-ηλ)w - ηs · orthogonalised(μ), for each matrix.

    With Nesterov's momentum it is βμ/(1-βᵗ⁺¹) + (1-β)g/(1-βᵗ) that is orthogonalised. The
    axes of a parameter that are neither `inputs` nor `outputs` count matrices; s is `scale`.
    A matrix is divided by its norm plus `eps`; then x ← ax + (bA + cA²)x with A = xxᵀ, by
    matmuls in `dtype`, once for each (a, b, c) of `newton_schulz`.
    """

    kind: ClassVar[str] = "muon"
    nesterov: bool
    newton_schulz: tuple[tuple[float, float, float], ...]
    dtype: np.dtype
    eps: float
    consistent_rms: float | None = None
    inputs: tuple[int, ...] = (0,)
    outputs: tuple[int, ...] = (1,)
    moments: tuple[str, ...] = ("mu",)

    @property
    def stored(self) -> np.dtype:
        """The dtype of matrices between the matmuls."""
        return np.dtype(jnp.bfloat16) if self.dtype.itemsize < 4 else self.dtype

    def coefficients(self, hyper: Mapping[str, Array], step: Array) -> Scalars:
        beta, rate = hyper["beta"], hyper["learning_rate"]
        ahead, now = jnp.ones(()), jnp.zeros(())
        if self.nesterov:
            ahead, now = beta / _bias(beta, step + 1), (1 - beta) / _bias(beta, step)
        return (beta, 1 - beta, ahead, now, rate, _decay(hyper))

    def average(self, given: Given, moments: Moments) -> Moments:
        (beta, keep, *_), grad, _, _ = given
        (mu,) = moments
        return (beta * mu + keep * grad,)

    def direction(self, coefficients: Scalars, grad: Array, mu: Array) -> Array:
        """Returns what is orthogonalised, given the momentum before the step."""
        beta, keep, ahead, now, *_ = coefficients
        return ahead * (beta * mu + keep * grad) + now * grad

    def move(self, given: Given, old: Moments, new: Moments) -> Array:
        # The gradient is the orthogonalised direction here.
        (*_, rate, decay), towards, weight, _ = given
        return weight * decay - rate * towards

    def scale(self, shape: tuple[int, ...]) -> float:
        """Returns the factor of the step of a parameter of this shape."""
        _, (_, rows, columns) = self._order(shape)
        if self.consistent_rms is not None:
            return math.sqrt(max(rows, columns)) * self.consistent_rms
        return math.sqrt(max(1, columns / max(rows, 1)))

    def as_stack(self, x: Array) -> Array:
        """Returns a parameter as matrices: (count, inputs, outputs)."""
        order, sizes = self._order(x.shape)
        return x.transpose(order).reshape(sizes)

    def from_stack(self, stack: Array, shape: tuple[int, ...]) -> Array:
        """Returns the parameter that `as_stack` made matrices of."""
        order, _ = self._order(shape)
        parts = stack.reshape([shape[axis] for axis in order])
        return parts.transpose(np.argsort(order))

    def _order(self, shape: tuple[int, ...]) -> tuple[list[int], list[int]]:
        ends = *self.inputs, *self.outputs
        counted = [axis for axis in range(len(shape)) if axis not in ends]
        groups = counted, self.inputs, self.outputs
        return [*counted, *ends], [math.prod(shape[i] for i in x) for x in groups]


Rule = Adam | Lion | Sgd | Muon
