"""Ragged matmuls: which run in the grouped kernel, and why others do not."""

from typing import Any

import jax
import numpy as np

from mpx._jax._compat import HAS_MOSAIC, has_explicit_axes
from mpx._jax._devices import gpu_capability
from mpx._jax._formats import F32, LOW_DTYPES
from mpx._jax._private import private
from mpx._ops._experts._plain import FORMS, Kind
from mpx._program._queries import Equation

RAGGED = frozenset({"ragged_dot", "ragged_dot_general"})
IN_KERNEL = "in a grouped kernel"
# By summed, batch, ragged and group axes of the operands, and their ranks.
_KINDS: dict[Any, Kind] = {
    ((a,), (b,), (), (), (0,), groups, 2, 2 if kind == "sums" else 3): kind
    for kind, (a, b, groups) in FORMS.items()
}
# Blocks of the kernel: rows that it loads together, the least number of rows, and what
# divides the other sizes.
_TOGETHER, _LEAST, _MULTIPLE = 8, 128, 64


def kind_of(eqn: Equation) -> Kind | None:
    """Returns what a ragged matmul multiplies, if there is a kernel for that."""
    numbers = eqn.params.get("ragged_dot_dimension_numbers")
    if numbers is None or eqn.params.get("group_offset") is not None:
        return None
    ragged, groups = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    summed, batch = numbers.dot_dimension_numbers
    ranks = [len(var.aval.shape) for var in eqn.invars[:2]]
    return _KINDS.get((*map(tuple, (*summed, *batch, ragged, groups)), *ranks))


def no_grouped_kernel(eqn: Equation) -> str | None:
    """Returns why a ragged 16-bit matmul does not run in a grouped kernel, or `None`."""
    if gpu_capability() != (9, 0):
        return "the kernel needs a Hopper GPU"
    if not HAS_MOSAIC or private("grouped") is None:
        return f"the kernel needs jax 0.11 or later, and {jax.__version__} is installed"
    mesh = jax.sharding.get_abstract_mesh()
    is_split = mesh.size > 1 and not mesh.are_all_axes_manual
    if is_split or has_explicit_axes(mesh):
        return "its operands may be sharded: call it under `jax.shard_map`"
    if kind_of(eqn) is None:
        return "it is not rows times a matrix for each group"
    rows, *sizes = eqn.invars[0].aval.shape
    sizes += eqn.invars[1].aval.shape[1:]
    if rows < _LEAST or rows % _TOGETHER:
        return f"it has {rows} rows, not a multiple of {_TOGETHER}, {_LEAST} or more"
    odd = [size for size in sizes if size == 0 or size % _MULTIPLE]
    return f"{odd[0]} is not a multiple of {_MULTIPLE}" if odd else None


def describe_ragged(eqn: Equation) -> str:
    """Returns how a ragged matmul of 16-bit numbers runs, for the report."""
    against = no_grouped_kernel(eqn)
    return IN_KERNEL if against is None else f"every group for every row: {against}"


def is_low_ragged(eqn: Equation) -> bool:
    """Returns whether an equation is a ragged matmul of operands written in 16 bits."""
    if eqn.primitive.name not in RAGGED:
        return False
    atoms = (*eqn.invars[:2], *eqn.outvars)
    first, second, out = (np.dtype(var.aval.dtype) for var in atoms)
    return first in LOW_DTYPES and first == second and out in (first, F32)
