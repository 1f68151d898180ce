"""f16 gradients that are taken without a loss scale warn; nothing else does."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import PartitionSpec as P

import mpx
from models import equations
from mpx import amp
from mpx.compat import jaxamp

W, X = jnp.full((3, 3), 1e-3), jnp.full((2, 3), 1e-3)
REMEDY = r"gradients below 6e-8 become 0.*mpx.value_and_grad.*bf16"


def loss(w, x):
    return 1e-3 * jnp.mean(jnp.tanh(x @ w))


def low():
    """A new function: JAX does not run the derivative rule of one that it knows."""
    return amp(lambda w, x: loss(w, x), dtype="f16")


def over_devices(func):
    count = min(2, jax.device_count())
    mesh = jax.make_mesh((count,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(
        lambda w, x: lax.pmean(func(w, x), "x"),
        mesh=mesh,
        in_specs=(P(), P("x")),
        out_specs=P(),
    )


UNSCALED = {
    "grad": lambda: jax.grad(low())(W, X),
    "grad of jit": lambda: jax.grad(jax.jit(low()))(W, X),
    "jit of grad": lambda: jax.jit(jax.grad(low()))(W, X),
    "value_and_grad": lambda: jax.value_and_grad(jax.jit(low()))(W, X),
    "equinox": lambda: eqx.filter_jit(eqx.filter_value_and_grad(low()))(W, X),
    "checkpoint": lambda: jax.grad(jax.checkpoint(low()))(W, X),
    "chosen": lambda: in_f16(lambda: jax.grad(amp(lambda w: loss(w, X)))(W)),
    "shard_map": lambda: jax.grad(over_devices(low()))(W, X),
    "vmap": lambda: jax.vmap(jax.grad(low()), in_axes=(None, 0))(W, X[:, None]),
}


def stored_in_f16(wrap=lambda f: f):
    func = wrap(amp(lambda p, x: loss(p["w"], x)))
    return func, {"w": W.astype("f2")}, X


def gradient_beside_f16():
    """The base is stored in f16, and only what is f32 is trained."""
    func = amp(lambda lora, base, x: loss(base["w"] + lora["w"], x), params=(0, 1))
    return jax.jit(jax.grad(func))({"w": W}, {"w": W.astype("f2")}, X)


STORED = {
    "grad": lambda: jax.grad(stored_in_f16()[0])(*stored_in_f16()[1:]),
    "grad of jit": lambda: jax.grad(stored_in_f16(jax.jit)[0])(*stored_in_f16()[1:]),
    "no scaling": lambda: mpx.value_and_grad(stored_in_f16()[0])(
        mpx.NoLossScaling(), *stored_in_f16()[1:]
    ),
}


@pytest.mark.parametrize("name", STORED)
def test_gradient_of_a_parameter_stored_in_f16_warns_although_amp_is_bf16(name):
    with pytest.warns(RuntimeWarning, match=REMEDY):
        STORED[name]()


def in_f16(func):
    with mpx.half_precision("f16"):
        return func()


@pytest.mark.some(2)
@pytest.mark.parametrize("name", UNSCALED)
def test_f16_gradient_outside_of_mpx_warns_with_the_remedy(name):
    with pytest.warns(RuntimeWarning, match=REMEDY) as caught:
        UNSCALED[name]()
    assert {warning.filename for warning in caught} == {__file__}


def accumulated():
    step = mpx.accumulate(low(), 2, batch_argnums=1)
    return step(mpx.DynamicLossScaling.pow2(), W, X)


def in_jaxamp():
    step = jaxamp.dynamic_scale_grad(jaxamp.amp(lambda w: loss(w, X)))
    return step(W, dynamic_scaler_state=jaxamp.DynamicScalerState())


def with_scaling(func):
    return mpx.value_and_grad(func)(mpx.StaticLossScaling(1024.0), W, X)


QUIET = {
    "call": lambda: low()(W, X),
    "jit": lambda: jax.jit(low())(W, X),
    "vmap": lambda: jax.vmap(low(), in_axes=(None, 0))(W, X[:, None]),
    "export": lambda: export.export(jax.jit(low()))(W, X).call(W, X),
    "report": lambda: mpx.inspect.report(mpx.amp(jax.grad(loss), "f16"), W, X),
    "inside": lambda: amp(jax.grad(loss), dtype="f16")(W, X),
    "value_and_grad": lambda: with_scaling(low()),
    "value_and_grad of jit": lambda: with_scaling(jax.jit(low())),
    "jit of value_and_grad": lambda: jax.jit(lambda: with_scaling(low()))(),
    "filter_grad": lambda: mpx.filter_grad(low(), mpx.DynamicLossScaling.pow2())(W, X),
    "accumulate": accumulated,
    "jaxamp": in_jaxamp,
    "bf16": lambda: jax.grad(amp(loss, dtype="bf16"))(W, X),
    "default": lambda: jax.grad(amp(loss))(W, X),
    "stored in f16": lambda: stored_in_f16()[0](*stored_in_f16()[1:]),
    "stored in f16, scaled": lambda: mpx.value_and_grad(stored_in_f16()[0])(
        mpx.StaticLossScaling(1024.0), *stored_in_f16()[1:]
    ),
    "beside f16": gradient_beside_f16,
}


@pytest.mark.some(5)
@pytest.mark.parametrize("name", QUIET)
def test_what_is_scaled_or_not_differentiated_does_not_warn(name):
    QUIET[name]()  # warnings are errors here


def test_jitted_function_warns_after_it_was_differentiated_by_mpx():
    func = jax.jit(low())
    with_scaling(func)
    with pytest.warns(RuntimeWarning, match=REMEDY):
        jax.grad(func)(W, X)


def test_warnings_of_a_loop_name_one_place_so_that_python_shows_one():
    with pytest.warns(RuntimeWarning, match=REMEDY) as caught:
        _ = [jax.grad(low())(W, X) for _ in range(3)]
    assert len({(warning.filename, warning.lineno) for warning in caught}) == 1


def test_derivatives_are_those_without_the_check():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out, tangent = jax.jvp(low(), (W, X), (W, X))
        hessian = jax.hessian(lambda w: low()(w, X))(W)
    wanted, slope = jax.jvp(loss, (W, X), (W, X))
    # Numbers of 1e-6 have four bits below the smallest normal f16.
    np.testing.assert_allclose([out, tangent], [wanted, slope], rtol=2.0**-5)
    assert hessian.shape == W.shape * 2


def test_check_is_not_part_of_the_report():
    report = mpx.inspect.report(mpx.amp(loss, "f16"), W, X)
    assert not report.opaque
    assert {op.primitive for op in report.amp.decisions} <= {
        *("dot_general", "tanh", "reduce_sum", "mul", "div", "broadcast_in_dim")
    }


def test_plain_amp_has_the_gradients_of_f32_where_f16_has_zeros():
    grads = jax.grad(amp(loss))(W, X)
    exact = jax.grad(loss)(W, X)
    np.testing.assert_allclose(grads, exact, rtol=0.02)
    assert float(jnp.max(exact)) > 0
    names = {e.primitive.name for e in equations(jax.make_jaxpr(amp(loss))(W, X))}
    assert "custom_jvp_call" not in names
