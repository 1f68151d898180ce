"""`advise(measure=True)`: what it proposes is measured, and the search is a good one."""

import dataclasses
import functools
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
import mpx.inspect
from models import normal
from mpx.inspect._advice import Study, policies
from mpx.inspect._emulation import Rounded
from test_advise import PARAMS, X, Y, plain, relative, sensitive

measured = functools.partial(mpx.inspect.advise, measure=True)


@pytest.fixture(scope="module")
def tuned():
    return measured(sensitive, PARAMS, X, Y, max_grad_error=0.01)


def test_policy_is_within_the_limit_as_users_run_it(tuned):
    assert tuned.policy.keep
    loss = eval(str(tuned.policy), {"mpx": mpx, "loss": sensitive})
    exact = jax.grad(sensitive)(PARAMS, X, Y)
    scaling = mpx.DynamicLossScaling.pow2()
    grads = mpx.value_and_grad(loss)(scaling, PARAMS, X, Y).grads
    assert relative(grads, exact) < 0.01
    again = mpx.value_and_grad(tuned.policy.apply(sensitive))(scaling, PARAMS, X, Y)
    assert relative(again.grads, grads) == 0


def test_errors_are_measured_and_shown(tuned):
    found = tuned.proposals["bf16"]
    exact = jax.grad(sensitive)(PARAMS, X, Y)
    for policy, error in (
        (found.policy, found.error),
        (mpx.inspect.PrecisionPolicy("bf16"), found.default),
    ):
        grads = jax.jit(jax.grad(policy.apply(sensitive)))(PARAMS, X, Y)
        assert error == pytest.approx(relative(grads, exact), rel=0.01)
    text = f"gradient error {found.error:.1e}, instead of {found.default:.1e}"
    assert text in str(tuned)
    json.loads(tuned.to_json())


def test_default_is_kept_where_it_is_good_enough():
    found = measured(plain, PARAMS, X, Y, formats=["bf16", "f16"])
    assert found.policy == mpx.inspect.PrecisionPolicy("bf16")


def test_policy_has_the_most_work_in_16_bits():
    half = mpx.inspect.PrecisionPolicy
    shares = {"bf16": 0.5, "f16": 0.9}
    proposals = {
        x: mpx.inspect.Candidate(half(x), 0.01, 0.01, y) for x, y in shares.items()
    }
    found = mpx.inspect.advise(plain, PARAMS, X, Y, formats="bf16")
    chosen = dataclasses.replace(found, proposals=proposals)
    assert chosen.policy == half("f16")


def test_limit_that_nothing_reaches_is_said(monkeypatch):
    monkeypatch.setattr(Study, "measure", lambda self, policy: 0.1)
    found = measured(plain, PARAMS, X, Y, formats="bf16").proposals["bf16"]
    assert found.remark.startswith("No keep-list reaches 0.05")
    assert found.share == 0


def test_longer_keep_lists_are_measured_until_one_reaches_the_limit(monkeypatch):
    error = Study.error
    monkeypatch.setattr(Study, "error", lambda *args: error(*args) / 100)
    found = measured(sensitive, PARAMS, X, Y, max_grad_error=0.1, formats="bf16")
    proposal = found.proposals["bf16"]
    assert proposal.policy.keep
    assert proposal.error < 0.1 < proposal.default


def test_keep_lists_are_close_to_an_exhaustive_search():
    widths = (9, 17, 17, 17, 5)
    sizes = (0.3, 3.0, 0.5, 2.0)
    params = {
        f"w{i}": 1.0 * sizes[i] * normal(i, *pair) / 4
        for i, pair in enumerate(itertools.pairwise(widths))
    }

    def loss(params, x):
        for i in range(4):
            with jax.named_scope("layer"):
                x = jnp.tanh(x @ params[f"w{i}"])
        return jnp.mean(jnp.square(x))

    known = Study(loss, (params, normal(9, 21, 9)), {}, formats=["bf16"])
    groups = [i for i in sorted(known.active) if known.groups[i].param]
    others = known.active - set(groups)
    gaps = []
    for policy in policies(known, "bf16"):
        low = known.low(policy)
        if others <= low:
            sets = itertools.combinations(groups, len(low) - len(others))
            rounds = (Rounded("bf16", others.union(x)) for x in sets)
            best = min(known.change(x).error for x in rounds)
            gaps.append(known.error(policy) / best if best else 1.0)
    assert len(gaps) >= 3
    assert np.median(gaps) < 1.2


def test_gradient_that_is_not_finite_is_an_infinite_error():
    def loss(params, x):
        return jnp.mean(jnp.square((500 * x) @ (500 * params["a"])))

    known = Study(loss, (PARAMS, X), {}, ["bf16"])
    assert known.measure(mpx.inspect.PrecisionPolicy("f16")) == math.inf


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_grad_error": 0}, "`max_grad_error` must be a positive number"),
        ({"max_grad_error": math.nan}, "`max_grad_error` must be a positive number"),
    ],
)
def test_wrong_options_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        measured(plain, PARAMS, X, Y, **options)
