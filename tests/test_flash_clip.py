"""`clip_scale` gives `step` the factor that optax's clip would apply."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx

GRADS = {"a": jnp.arange(-3.0, 5.0), "b": {"c": jnp.full((3, 5), 0.25)}}


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e3, float("inf")])
@pytest.mark.parametrize("loss_scale", [1.0, 2.0**15, 2.0**-20])
def test_scaled_gradients_times_the_factor_are_what_optax_clips(max_norm, loss_scale):
    scaled = jax.tree.map(lambda g: g * loss_scale, GRADS)
    clip = mpx.optim.clip_scale(scaled, max_norm, grad_scale=1 / loss_scale)
    expected, _ = optax.clip_by_global_norm(max_norm).update(GRADS, optax.EmptyState())
    for ours, theirs in zip(
        jax.tree.leaves(scaled), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(ours * clip.grad_scale, theirs, rtol=2**-21)
    squares = sum(np.sum(np.float64(g) ** 2) for g in jax.tree.leaves(GRADS))
    np.testing.assert_allclose(clip.norm, np.sqrt(squares), rtol=2**-22)
    assert clip.finite


def test_half_precision_gradients_are_summed_in_f32():
    grads = jnp.full(100_000, 200.0, jnp.float16)  # the sum of squares is 4e9
    clip = mpx.optim.clip_scale(grads, 1.0)
    np.testing.assert_allclose(clip.norm, 200 * np.sqrt(1e5), rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.complex64])
def test_gradients_of_any_float_have_a_norm(dtype):
    # Of complex numbers the absolute value counts, as in optax: |3 + 4i| is 5.
    grads = {"w": jnp.full(4, 3 + 4j if dtype == jnp.complex64 else 5, dtype)}
    clip = mpx.optim.clip_scale(grads, 2.5, grad_scale=0.5)
    assert clip == (0.25, 5.0, True)
    assert not mpx.optim.clip_scale({"w": jnp.full(4, jnp.nan, dtype)}, 1.0).finite


def test_numbers_are_f32_where_f64_is_the_default():
    with jax.enable_x64(True):
        for grads in (GRADS, jax.tree.map(lambda g: g.astype(jnp.float64), GRADS)):
            clip = mpx.optim.clip_scale(
                grads, np.float64(1.0), grad_scale=np.float64(0.5)
            )
            assert clip.grad_scale.dtype == clip.norm.dtype == jnp.float32


def test_integers_none_and_functions_have_no_norm():
    grads = {"w": jnp.full(4, 2.0), "n": jnp.arange(5), "f": None, "g": jnp.tanh}
    assert mpx.optim.clip_scale(grads, 10.0) == (1.0, 4.0, True)


def test_zero_gradients_and_empty_trees_are_not_clipped():
    assert mpx.optim.clip_scale({}, 1.0) == (1.0, 0.0, True)
    assert mpx.optim.clip_scale({"w": jnp.zeros(3)}, 1.0, grad_scale=0.5) == (
        0.5,
        0.0,
        True,
    )


@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf, jnp.nan])
def test_non_finite_gradient_is_reported_and_the_step_can_be_left_out(bad):
    params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    optimizer = mpx.optim.flash_adamw(1e-2)
    state = optimizer.init(params)
    grads = {"w": jnp.ones((64, 64)).at[3, 5].set(bad)}
    clip = mpx.optim.clip_scale(grads, 1.0)
    assert not clip.finite
    stepped = optimizer.step(
        params, state, grads, finite=clip.finite, grad_scale=clip.grad_scale
    )
    mpx.testing.assert_trees_equal(tuple(stepped), (params, state))


@pytest.mark.parametrize(
    "max_norm", [0, -1.0, float("nan"), np.float32(-1.0), jnp.zeros(())], ids=repr
)
def test_norm_that_is_not_positive_is_refused(max_norm):
    with pytest.raises(ValueError, match="`max_norm` must be positive"):
        mpx.optim.clip_scale({}, max_norm)


def test_norm_may_be_traced():
    clip = jax.jit(lambda norm: mpx.optim.clip_scale({"w": jnp.full(4, 2.0)}, norm))(
        2.0
    )
    assert clip == (0.5, 4.0, True)


@pytest.mark.parametrize("name", ["max_norm", "grad_scale"])
@pytest.mark.parametrize(
    ("value", "error", "match"),
    [
        ("1", TypeError, "must be a number or a scalar array, but str was given"),
        (None, TypeError, "must be a number or a scalar array, but NoneType"),
        (jnp.ones((), jnp.complex64), TypeError, ".*, but complex64 was given"),
        (jnp.ones(2), TypeError, r"must be .*, but float32 of shape \(2,\)"),
    ],
    ids=["string", "None", "complex", "array"],
)
@pytest.mark.usefixtures("untyped")
def test_what_is_not_one_number_is_refused(name, value, error, match):
    with pytest.raises(error, match=f"`{name}` {match}"):
        mpx.optim.clip_scale({"w": jnp.ones(2)}, **{"max_norm": 1.0} | {name: value})
