"""One table of gradient functions: a new row inherits every test that takes `grad_of`."""

import functools

import jax.numpy as jnp
import numpy as np

import mpx
from mpx import GradResult
from mpx.testing import assert_trees_equal

HALVES = {"bf16": jnp.bfloat16, "f16": jnp.float16}


def of_value_and_grad(loss, scaling, **options):
    return functools.partial(mpx.value_and_grad(loss, **options), scaling)


def of_filter_grad(loss, scaling, **options):
    def run(*args, **kwargs):
        out = mpx.filter_grad(loss, scaling, **options)(*args, **kwargs)
        scaling_after, finite, grads = out[:3]
        aux = out[3] if options.get("has_aux") else None  # pyright: ignore[reportGeneralTypeIssues]
        return GradResult(None, aux, grads, scaling_after, finite)

    return run


def of_filter_value_and_grad(loss, scaling, **options):
    def run(*args, **kwargs):
        value, scaling_after, finite, grads = mpx.filter_value_and_grad(
            loss, scaling, **options
        )(*args, **kwargs)
        value, aux = value if options.get("has_aux") else (value, None)
        return GradResult(value, aux, grads, scaling_after, finite)

    return run


GRAD_FUNCTIONS = {
    "value_and_grad": of_value_and_grad,
    "filter_grad": of_filter_grad,
    "filter_value_and_grad": of_filter_value_and_grad,
}


def check_exact(result, problem, *, finite=True):
    if result.value is not None:
        assert_trees_equal(result.value, np.float32(problem.value))
    assert_trees_equal(result.grads, problem.grad)
    assert bool(result.finite) is finite
    assert result.finite.dtype == bool
