"""Ragged matmuls in a grouped kernel where there is one, and why others are not."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpx._jax._compat import HAS_MOSAIC, bind, has_explicit_axes
from mpx._jax._devices import gpu_capability
from mpx._jax._private import private
from mpx._ops._experts._plain import FORMS, Kind
from mpx._program._queries import GROUPED, Equation

RAGGED = frozenset({"ragged_dot", "ragged_dot_general"})
IN_KERNEL = "in a grouped kernel"
_HOPPER = (9, 0)
_KINDS: dict[Any, Kind] = {
    ((a,), (b,), groups): kind for kind, (a, b, groups) in FORMS.items()
}
# Blocks of the kernel: rows that it loads together, the least number of rows, and what
# divides the other sizes.
_TOGETHER, _LEAST, _MULTIPLE = 8, 128, 64


def kind_of(eqn: Equation) -> Kind | None:
    """Returns what a ragged matmul multiplies, if there is a kernel for that."""
    if eqn.primitive.name == GROUPED:
        return eqn.params["kind"]
    numbers = eqn.params.get("ragged_dot_dimension_numbers")
    if numbers is None or eqn.params.get("group_offset") is not None:
        return None
    summed, batch = numbers.dot_dimension_numbers
    form = (*map(tuple, summed), tuple(numbers.rhs_group_dimensions))
    if any(map(len, batch)) or tuple(numbers.lhs_ragged_dimensions) != (0,):
        return None
    kind = _KINDS.get(form)
    ranks = tuple(len(var.aval.shape) for var in eqn.invars[:2])
    return kind if ranks == ((2, 2) if kind == "sums" else (2, 3)) else None


def reason_against(eqn: Equation) -> str | None:
    """Returns why a ragged matmul of 16-bit numbers is in no grouped kernel, if so."""
    return reason_by_device() or reason_by_shape(eqn)


def reason_by_device() -> str | None:
    """Returns why there is no grouped kernel here, if there is none."""
    if gpu_capability() != _HOPPER:
        return "the kernel needs a Hopper GPU"
    if not HAS_MOSAIC:
        return f"the kernel needs jax 0.11 or later, and {jax.__version__} is installed"
    if private("grouped") is None:
        return "this version of JAX lacks a name that the kernel needs"
    mesh = jax.sharding.get_abstract_mesh()
    is_split = mesh.size > 1 and not mesh.are_all_axes_manual
    if is_split or has_explicit_axes(mesh):
        return "its operands may be sharded: call it under `jax.shard_map`"
    return None


def reason_by_shape(eqn: Equation, multiple: int = _MULTIPLE) -> str | None:
    """Returns why the grouped kernel cannot run a ragged matmul, if it cannot.

    Args:
        eqn: The matmul.
        multiple: What must divide the sizes that are not rows.
    """
    if kind_of(eqn) is None:
        return "it is not rows times a matrix for each group"
    rows, *sizes = eqn.invars[0].aval.shape
    sizes += eqn.invars[1].aval.shape[1:]
    if rows < _LEAST or rows % _TOGETHER:
        return f"it has {rows} rows, not a multiple of {_TOGETHER}, {_LEAST} or more"
    for size in sizes:
        if size == 0 or size % multiple:
            return f"{size} is not a multiple of {multiple}"
    return None


def description(eqn: Equation) -> str:
    """Returns how a ragged matmul of 16-bit numbers runs, for the report."""
    against = reason_against(eqn)
    return IN_KERNEL if against is None else f"every group for every row: {against}"


def multiply(eqn: Equation, args: Any, dtype: np.dtype) -> list[Any]:
    """Runs a matmul of 16-bit operands; a ragged one in a grouped kernel if there is one.

    Args:
        eqn: Any matmul.
        args: Its operands.
        dtype: The dtype of the result.
    """
    if eqn.primitive.name not in RAGGED or reason_against(eqn) is not None:
        return bind(eqn, args, preferred_element_type=dtype)
    from mpx._ops._experts._primitive import grouped_matmul

    kind = kind_of(eqn)
    assert kind is not None
    return [grouped_matmul(*args, kind=kind, dtype=dtype)]


def is_low(eqn: Equation) -> bool:
    """Returns whether an equation is a ragged matmul of operands written in 16 bits.

    The result may be asked for in f32.
    """
    if eqn.primitive.name not in RAGGED:
        return False
    first, second, out = (
        np.dtype(var.aval.dtype) for var in (*eqn.invars[:2], *eqn.outvars)
    )
    is_16_bit = first in (jnp.bfloat16, jnp.float16)
    return is_16_bit and first == second and out in (first, np.float32)
