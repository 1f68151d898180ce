"""Exporting steps for other platforms than the one that is here."""

import jax
import jax.numpy as jnp
import pytest
from jax import export

import mpx
from mpx._compat import version_tuple

CANNOT_SERIALISE = version_tuple(jax.__version__) >= (0, 12)
OTHERS = ("tpu", "rocm", "cpu")


def exported(step, platform, *args):
    return export.export(jax.jit(step), platforms=[platform])(*args)


@pytest.mark.parametrize(
    "platform",
    [
        *OTHERS,
        pytest.param(
            "cuda",
            # When this passes, docs/guide/fp8.md has to say so.
            marks=pytest.mark.xfail(
                CANNOT_SERIALISE,
                reason="JAX has no portable form of 8-bit algorithms",
                raises=jax.errors.JaxRuntimeError,
            ),
        ),
    ],
)
def test_fp8_step_can_be_exported(platform):
    loss = mpx.fp8(lambda w, x: jnp.sum((x @ w).astype(jnp.float32)), min_gain=0)
    array = jax.ShapeDtypeStruct((32, 32), jnp.bfloat16)
    done = exported(jax.value_and_grad(loss), platform, array, array)
    assert done.platforms == (platform,)


@pytest.mark.parametrize(
    ("backend", "platform"),
    [*(("auto", name) for name in (*OTHERS, "cuda")), ("jax", "cuda")],
)
def test_compressed_step_can_be_exported(backend, platform):
    optimizer = mpx.optim.flash_adamw(1e-3, backend=backend)
    params = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)}
    state = jax.eval_shape(optimizer.init, params)
    done = exported(optimizer.step, platform, params, state, params)
    assert done.platforms == (platform,)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
def test_kernel_of_a_compressed_step_cannot_be_exported():
    optimizer = mpx.optim.flash_adamw(1e-3, backend="triton")
    params = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)}
    state = jax.eval_shape(optimizer.init, params)
    with pytest.raises(
        (RuntimeError, ValueError),
        match="specify an abstract GPU device|Cannot serialize code with custom calls",
    ):
        exported(optimizer.step, "cuda", params, state, params)
