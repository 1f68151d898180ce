"""Types of the public functions, checked by pyright and never run.

A transformed function keeps the signature of the function, so that a wrong argument is an
error in the editor.
"""
# pyright: reportCallIssue=true, reportArgumentType=true

from collections.abc import Callable
from typing import assert_type

import jax

import mpx

Params = dict[str, jax.Array]


def loss(params: Params, x: jax.Array, *, rate: float = 0.0) -> jax.Array:
    return x @ params["w"] * rate


def update(params: Params, grads: Params) -> Params:
    return params


def signatures_are_kept(params: Params, x: jax.Array) -> None:
    for wrapped in (
        mpx.amp(loss),
        mpx.amp(dtype="bf16")(loss),
        mpx.fp8(loss),
        mpx.cast_function(loss, "bf16"),
        mpx.cast_function(dtype="bf16")(loss),
        mpx.force_full_precision(loss),
        mpx.Policy().cast_function(loss),
        mpx.scaled(loss, mpx.NoLossScaling()),
    ):
        assert_type(wrapped(params, x, rate=0.5), jax.Array)
        wrapped(params, x, speed=0.5)  # pyright: ignore[reportCallIssue]
        wrapped(params)  # pyright: ignore[reportCallIssue]


def gradients_have_the_type_of_the_parameters(params: Params, x: jax.Array) -> None:
    scaling = mpx.DynamicLossScaling.pow2()
    for step in (mpx.value_and_grad(loss), mpx.accumulate(mpx.amp(loss), steps=2)):
        result = step(scaling, params, x, rate=0.5)
        assert_type(result, mpx.GradResult[Params, mpx.DynamicLossScaling])
        assert_type(result.value, jax.Array)
        assert_type(result.grads, Params)
        assert_type(result.scaling, mpx.DynamicLossScaling)
        step(params, x)  # pyright: ignore[reportCallIssue, reportArgumentType]
        step(scaling, params, x, speed=0.5)  # pyright: ignore[reportCallIssue]
    decorated = mpx.value_and_grad(policy="c=bf16")(loss)
    assert_type(decorated(scaling, params, x).scaling, mpx.DynamicLossScaling)
    _, grads = mpx.calculate_scaled_grad(loss, scaling)(params, x)
    assert_type(grads, Params)
    for take in (
        mpx.filter_grad(loss, scaling),
        mpx.filter_value_and_grad(loss, scaling),
    ):
        take(params, x, rate=0.5)
        take(params, x, speed=0.5)  # pyright: ignore[reportCallIssue]


def delayed_scaling_has_a_state(params: Params, x: jax.Array) -> None:
    delayed = mpx.fp8(loss, mpx.recipes.DelayedScaling())
    scales = delayed.init(params, x)
    assert_type(scales, mpx.recipes.Fp8State)
    assert_type(delayed(scales, params, x), jax.Array)


def updates_take_the_flag_first(params: Params) -> None:
    step: Callable[..., Params] = mpx.cond_update(update)
    assert_type(mpx.cond_update(update)(True, params, params), Params)
    assert_type(mpx.cond_update()(update)(True, params, params), Params)
    mpx.cond_update(update)(params, params)  # pyright: ignore[reportCallIssue, reportArgumentType]
    del step
