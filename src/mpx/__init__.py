"""mpx: mixed-precision training for JAX."""
# pyright: reportUnknownVariableType=false

import importlib as _importlib
import typing as _typing

from mpx._casting import _context as _context
from mpx._casting._cast import cast_function as cast_function
from mpx._casting._cast import cast_like as cast_like
from mpx._casting._cast import cast_to_bfloat16 as cast_to_bfloat16
from mpx._casting._cast import cast_to_float16 as cast_to_float16
from mpx._casting._cast import cast_to_float32 as cast_to_float32
from mpx._casting._cast import cast_to_full_precision as cast_to_full_precision
from mpx._casting._cast import cast_to_half_precision as cast_to_half_precision
from mpx._casting._cast import cast_tree as cast_tree
from mpx._casting._cast import force_full_precision as force_full_precision
from mpx._casting._context import half_precision as half_precision
from mpx._casting._context import half_precision_datatype as half_precision_datatype
from mpx._casting._context import (
    set_half_precision_datatype as set_half_precision_datatype,
)
from mpx._casting._policy import Policy as Policy
from mpx._casting._policy import get_policy as get_policy
from mpx._gradients._accumulate import accumulate as accumulate
from mpx._gradients._grad import GradResult as GradResult
from mpx._gradients._grad import calculate_scaled_grad as calculate_scaled_grad
from mpx._gradients._grad import filter_grad as filter_grad
from mpx._gradients._grad import filter_value_and_grad as filter_value_and_grad
from mpx._gradients._grad import value_and_grad as value_and_grad
from mpx._jax._compat import __version__ as __version__
from mpx._jax._sharding import fsdp_shardings as fsdp_shardings
from mpx._jax._tree import all_finite as all_finite
from mpx._jax._tree import select_tree as select_tree
from mpx._scaling._loss_scaling import DynamicLossScaling as DynamicLossScaling
from mpx._scaling._loss_scaling import LossScaling as LossScaling
from mpx._scaling._loss_scaling import NoLossScaling as NoLossScaling
from mpx._scaling._loss_scaling import StaticLossScaling as StaticLossScaling
from mpx._scaling._loss_scaling import default_loss_scaling as default_loss_scaling
from mpx._scaling._loss_scaling import scaled as scaled
from mpx._scaling._update import cond_update as cond_update
from mpx._scaling._update import optimizer_update as optimizer_update

# What is imported when it is first used: `import mpx` takes a third of the time.
if _typing.TYPE_CHECKING:
    from mpx import checkpoint as checkpoint
    from mpx import compat as compat
    from mpx import inspect as inspect
    from mpx import optim as optim
    from mpx import recipes as recipes
    from mpx import testing as testing
    from mpx._amp import AmpRules as AmpRules
    from mpx._amp import amp as amp
    from mpx._amp import amp_low as amp_low
    from mpx._amp import amp_stop as amp_stop
    from mpx._fp8 import fp8 as fp8
    from mpx._jax._processes import check_processes as check_processes
    from mpx._ops._cross_entropy import linear_cross_entropy as linear_cross_entropy

_NAMESPACES = ("checkpoint", "compat", "inspect", "optim", "recipes", "testing")
_FUNCTIONS = {
    "AmpRules": "mpx._amp",
    "amp": "mpx._amp",
    "amp_low": "mpx._amp",
    "amp_stop": "mpx._amp",
    "check_processes": "mpx._jax._processes",
    "fp8": "mpx._fp8",
    "linear_cross_entropy": "mpx._ops._cross_entropy",
}


def __getattr__(name: str) -> _typing.Any:
    if name in _NAMESPACES:
        return _importlib.import_module(f"mpx.{name}")
    if name in _FUNCTIONS:
        value = getattr(_importlib.import_module(_FUNCTIONS[name]), name)
        globals()[name] = value
        return value
    return _context.constant(name)


def __dir__() -> list[str]:
    names = [*globals(), *_NAMESPACES, *_FUNCTIONS, *_context.CONSTANTS]
    return sorted({name for name in names if not name.startswith("_")})
