"""Exporting steps for other platforms than the one that is here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import mpx
from mpx._jax._compat import version_tuple

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


@pytest.mark.some(1)
@pytest.mark.parametrize("wrap", ["amp", "fp8"])
def test_function_of_a_symbolic_batch_is_exported(wrap, untyped):
    def loss(params, x):
        hidden = jax.nn.gelu(x @ params["w"])
        hidden = jax.nn.softmax(hidden @ hidden.T) @ hidden
        rows = params["w"][jnp.zeros(x.shape[0], jnp.int32)]
        return jnp.mean((hidden + rows) ** 2)

    w, x = jnp.eye(16) + 0.125, jnp.linspace(-1.0, 1.0, 512).reshape(32, 16)
    (batch,) = export.symbolic_shape("16 * b")
    shapes = (
        {"w": jax.ShapeDtypeStruct(w.shape, w.dtype)},
        jax.ShapeDtypeStruct((batch, 16), x.dtype),
    )
    func = mpx.amp(loss) if wrap == "amp" else mpx.fp8(loss, min_gain=0)
    step = jax.jit(jax.value_and_grad(func))
    value, grads = export.export(step)(*shapes).call({"w": w}, x)
    wanted, exact = step({"w": w}, x)
    np.testing.assert_allclose(value, wanted, rtol=2.0**-8)
    np.testing.assert_allclose(grads["w"], exact["w"], atol=2.0**-8)
