"""Private names of JAX and Flax, with what mpx loses without each.

Any release may rename or remove such a name. It is reached only through `private`, so
that a missing one turns one feature off, with one warning. What is imported from
`jax.core` and `jax.extend` is needed for all that mpx does.
"""

import contextlib
import functools
import pkgutil
import sys
import types
from collections.abc import Iterator
from typing import Any

from jax.core import Tracer as Tracer
from jax.core import eval_jaxpr as eval_jaxpr
from jax.extend.core import ClosedJaxpr as ClosedJaxpr
from jax.extend.core import Jaxpr as Jaxpr
from jax.extend.core import Literal as Literal
from jax.extend.core import Primitive as Primitive
from jax.extend.core import Var as Var
from jax.extend.core import concrete_or_error as concrete_or_error
from jax.extend.source_info_util import current_name_stack as current_name_stack
from jax.extend.source_info_util import user_context as user_context

from mpx._jax._warn import warn

# What a primitive of our own needs: derivatives, batching, lowering.
_RULES = (
    "jax.interpreters.ad: Zero instantiate_zeros is_undefined_primal primitive_jvps "
    "primitive_transposes",
    "jax.interpreters.batching: primitive_batchers",
    "jax.interpreters.mlir: lower_fun register_lowering",
)
FEATURES = {
    "source": (
        "reports show no source lines, and rules for functions have no effect",
        "jax._src.source_info_util: user_frames",
    ),
    "primitive_names": (
        "rules can name the primitives of `jax.lax` only; pass others as objects",
        "jax._src.interpreters.mlir: _lowerings _platform_specific_lowerings",
    ),
    "stored": (
        "XLA may store activations in f32 beside 16 bits, and leave roundings out",
        *_RULES,
    ),
    "attention": (
        "attention under `amp` runs operation by operation instead of in cuDNN's kernel",
        "jax._src.dispatch: prim_requires_devices_during_lowering",
        *_RULES,
    ),
    "cudnn_checks": (
        "attention is not lowered to cuDNN's kernel for a GPU that is not there",
        "jax._src.cudnn.fused_attention_stablehlo: check_cudnn_version "
        "check_compute_capability",
    ),
    "kernels": (
        "optimizer steps, fp8 casts and exponent counts run without Triton kernels",
        "jax.experimental.custom_partitioning: custom_partitioning",
        "jax.experimental.pallas: ds no_block_spec pallas_call program_id",
        "jax.experimental.pallas.triton: CompilerParams elementwise_inline_asm load store",
    ),
    "layouts": (
        "matmuls of `recipes.Int8` are slower on a GPU than those of bf16",
        "jax.experimental.layout: Layout with_layout_constraint",
    ),
    "matmul_grads": (
        "gradients under automatic sharding are summed over devices in the compute dtype",
        *_RULES,
    ),
    "grouped": (
        "ragged matmuls compute every group for every row instead of in a grouped kernel",
        "jax.experimental.pallas: ds multiple_of run_scoped when",
        "jax.experimental.pallas.mosaic_gpu: ACC BlockSpec CompilerParams Layout "
        "LoweringSemantics SMEM commit_smem copy_smem_to_gmem emit_pipeline kernel "
        "layout_cast nd_loop planar_snake wait_smem_to_gmem wgmma",
        *_RULES,
    ),
    "cross_entropy": (
        "JAX differentiates `mpx.linear_cross_entropy`, which takes twice as long",
        *_RULES,
    ),
    "exchange": (
        "`python -m mpx doctor --cluster` cannot compare processes",
        "jax.experimental.multihost_utils: process_allgather",
    ),
    "linen_variables": (
        "`amp` does not see that a function changes variables of a Linen model around it",
        "flax.linen.module: _context",
    ),
    "linen": (
        "`amp` runs methods of a Linen model as written; wrap the loss instead",
        "flax.core.lift: pack",
        "flax.linen.transforms: lift_direct_transform",
    ),
}
"""Parts of mpx that need private names: what is lost without them, and the names."""


def names_of(feature: str) -> list[str]:
    """Returns the names that a feature needs, as `module:name`."""
    parts = [text.partition(":") for text in FEATURES[feature][1:]]
    return [f"{module}:{name}" for module, _, names in parts for name in names.split()]


@functools.cache
def private(feature: str) -> Any:
    """Returns the names of a feature; `None`, with a warning, if one is missing."""
    lost, found = FEATURES[feature][0], {}
    for name in names_of(feature):
        try:
            found[name.rpartition(":")[2]] = pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            package = name.partition(".")[0]
            warn(
                f"The installed {package} has no `{name.replace(':', '.')}`, which mpx "
                f"relies on. Without it {lost}. Upgrade mpx, or install an older {package}."
            )
            return None
    return types.SimpleNamespace(**found)


@contextlib.contextmanager
def assumed_cudnn(version: int) -> Iterator[None]:
    """Lets JAX lower cuDNN's attention without a GPU to ask, in all threads."""
    from unittest import mock

    names = private("cudnn_checks")
    if names is None:
        yield
        return
    module = sys.modules[names.check_cudnn_version.__module__]
    with mock.patch.multiple(
        module,
        check_cudnn_version=lambda: version,
        check_compute_capability=lambda *_: True,
    ):
        yield
