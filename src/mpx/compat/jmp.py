"""The API of jmp on top of mpx: `from mpx.compat import jmp`.

The page "Coming from another library" lists the differences.

Examples:
    >>> policy = get_policy("params=float32,compute=float16,output=float32")
    >>> policy.cast_to_compute({"w": jnp.ones(2)})["w"].dtype
    dtype('float16')
"""

import dataclasses
import math
import re
import warnings
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

import mpx._casting._policy as _policy
from mpx._casting._cast import cast_to_float32, cast_tree, widen_tree
from mpx._jax._compat import is_tracer
from mpx._jax._formats import FORMATS
from mpx._jax._tree import all_finite as all_finite
from mpx._jax._tree import is_array
from mpx._jax._tree import select_tree as _select_tree
from mpx._scaling._loss_scaling import LARGEST_SCALE, DynamicLossScaling
from mpx._scaling._loss_scaling import StaticLossScaling as _StaticLossScaling

T = TypeVar("T")

dtype_to_names = {
    jnp.bfloat16: ("bf16", "bfloat16"),
    jnp.float16: ("f16", "float16"),
    jnp.float32: ("full", "f32", "float32"),
    jnp.float64: ("f64", "float64"),
}


def half_dtype() -> type:
    """Returns jmp's half precision: bf16 on a TPU, f16 elsewhere."""
    return jnp.bfloat16 if jax.local_devices()[0].platform == "tpu" else jnp.float16


class Policy(_policy.Policy):
    """`mpx.Policy` with jmp's required arguments and its spelling of `str`."""

    def __init__(
        self,
        param_dtype: DTypeLike,
        compute_dtype: DTypeLike | None,
        output_dtype: DTypeLike,
        **more: PyTree,
    ) -> None:
        """Stores the three dtypes; `more` are the other fields of `mpx.Policy`."""
        super().__init__(param_dtype, compute_dtype, output_dtype, **more)

    def __str__(self) -> str:
        """Returns `p=full,c=f16,o=f16` and the like."""
        names = {np.dtype(dtype): names[0] for dtype, names in dtype_to_names.items()}
        return (
            f"p={names[self.param_dtype]},c={names[self.resolved_compute_dtype()]},"
            f"o={names[self.output_dtype]}"
        )


def get_policy(policy_name: str) -> Policy:
    """Returns the policy for jmp's grammar; `half` is `half_dtype()`."""
    half = dtype_to_names[half_dtype()][0]
    parsed = _policy.get_policy(re.sub(r"\bhalf\b", half, policy_name))
    return Policy(parsed.param_dtype, parsed.compute_dtype, parsed.output_dtype)


def cast_to_full(tree: T) -> T:
    """Casts floating leaves to f32."""
    return cast_to_float32(tree)


def cast_to_half(tree: T) -> T:
    """Casts floating leaves to `half_dtype()`."""
    return cast_tree(tree, half_dtype())


@dataclasses.dataclass(frozen=True)
class _Scaled:
    """The base of all loss scales."""

    loss_scale: PyTree

    def scale(self, tree: T) -> T:
        """Multiplies floating leaves by the scale, in f32."""
        return _StaticLossScaling(self.loss_scale).scale(tree)

    def unscale(self, tree: T) -> T:
        """Divides floating leaves by the scale, in f32."""
        return _StaticLossScaling(self.loss_scale).unscale(tree)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class StaticLossScale(_Scaled):
    """A fixed loss scale; as in jmp it is no array of the tree."""

    def adjust(self, grads_finite: PyTree) -> "StaticLossScale":
        """Returns itself."""
        del grads_finite
        return self


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class NoOpLossScale(StaticLossScale):
    """No loss scaling: everything comes back as it is."""

    loss_scale: PyTree = dataclasses.field(default=1, init=False)

    def scale(self, tree: T) -> T:
        """Returns the tree."""
        return tree

    unscale = scale


@jax.tree_util.register_static
class _Floor(float):
    """A number that is no leaf of a pytree."""


@dataclasses.dataclass(frozen=True)
class DynamicLossScale(_Scaled):
    """jmp's dynamic loss scale, with the arithmetic of `mpx.DynamicLossScaling`."""

    counter: PyTree = dataclasses.field(default_factory=lambda: np.zeros([], np.int32))
    period: int = 2000
    factor: float = 2
    min_loss_scale: PyTree = 1.0

    def __post_init__(self) -> None:
        """Warns of integers; makes a known floor a static number and the scale f32."""
        for name in ("loss_scale", "min_loss_scale"):
            value = getattr(self, name)
            given = np.dtype(int) if isinstance(value, int) else None
            dtype = getattr(value, "dtype", given)
            if isinstance(dtype, np.dtype) and not jnp.issubdtype(dtype, jnp.floating):
                message = f"Expected floating type for {name}, got {dtype}"
                warnings.warn(message, stacklevel=3)
        floor = self.min_loss_scale
        if isinstance(floor, int | float) or (is_array(floor) and not is_tracer(floor)):
            object.__setattr__(self, "min_loss_scale", _Floor(floor))
        if is_array(self.loss_scale):  # a 16-bit one would not come back from `adjust`
            object.__setattr__(self, "loss_scale", widen_tree(self.loss_scale))

    def adjust(self, grads_finite: Array) -> "DynamicLossScale":
        """Returns the scale for the next step."""
        floor, tiny = self.min_loss_scale, FORMATS["f32"].tiny
        new = DynamicLossScaling(
            self.loss_scale,
            # jmp accepts a floor of 0, from which no growth comes back.
            jnp.maximum(floor, tiny) if is_tracer(floor) else max(floor, tiny),
            self.factor,
            math.ceil(self.period),  # jmp takes a float
            self.counter,
            max_loss_scaling=LARGEST_SCALE,
        ).adjust(grads_finite)
        return dataclasses.replace(
            self, loss_scale=new.loss_scaling, counter=new.counter
        )


jax.tree_util.register_dataclass(
    DynamicLossScale,
    data_fields=["loss_scale", "counter", "min_loss_scale"],
    meta_fields=["period", "factor"],
)

LossScale = NoOpLossScale | StaticLossScale | DynamicLossScale


def select_tree(pred: PyTree, a: T, b: T) -> T:
    """Returns `a` or `b`; a predicate that is no boolean scalar is an assertion error."""
    try:
        return _select_tree(pred, a, b)
    except TypeError as error:
        raise AssertionError(f"expected boolean scalar: {error}") from error
