"""Hyperparameters at one step, combined into the numbers that the steps read."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import optax
from jax import Array

from mpx._optim._checks import check_scalar
from mpx._optim._options import ParamGroup
from mpx._optim._rules import Rule
from mpx._quant import dither_of

Hyper = float | Array | Callable[[Array], Any]
"""A number, an array, or a schedule: a function of the step count."""


@dataclasses.dataclass(eq=False)
class Scalars:
    """Coefficients for each combination of group and decay, computed once."""

    rule: Rule
    hyper: Mapping[str, Hyper]
    count: Array
    scale: Array
    known: dict[Any, Array] = dataclasses.field(default_factory=dict)

    def of(self, group: ParamGroup | None, decays: bool) -> Array:
        """Returns what `Plan` reads, in one f32 array."""
        key = (id(group), decays)
        if key not in self.known:
            merged = {**self.hyper, **(group.hyper if group else {})}
            if not decays:
                merged["weight_decay"] = 0.0
            values = {name: self._value(name, merged[name]) for name in self.rule.hyper}
            # The state counts so, too: one more than the largest int32 is negative.
            step = jnp.asarray(optax.safe_increment(self.count))
            numbers = self.rule.coefficients(values, step.astype(jnp.float32))
            self.known[key] = jnp.stack([self.scale, *dither_of(step), *numbers])
        return self.known[key]

    def _value(self, name: str, value: Any) -> Array:
        return as_scalar(name, value(self.count) if callable(value) else value)


def as_scalar(name: str, value: Any) -> Array:
    """Returns a number as f32; raises if it is not one."""
    check_scalar(name, value)
    return jnp.asarray(value, jnp.float32)
