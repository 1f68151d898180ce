"""`advise(measure=True)`: what it proposes is measured, and the search is a good one."""

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
from mpx.inspect import _advice
from mpx.inspect._emulation import Rounded
from mpx.inspect._policies import Study, policies
from test_advise import PARAMS, X, Y, plain, relative, sensitive

measured = functools.partial(mpx.inspect.advise, measure=True)


@pytest.fixture(scope="module")
def tuned():
    return measured(sensitive, PARAMS, X, Y, max_grad_error=0.02)


def test_policy_is_within_the_limit_as_users_run_it(tuned):
    assert tuned.policy.keep
    loss = eval(str(tuned.policy), {"mpx": mpx, "loss": sensitive})
    exact = jax.grad(sensitive)(PARAMS, X, Y)
    scaling = mpx.DynamicLossScaling.pow2()
    grads = mpx.value_and_grad(loss)(scaling, PARAMS, X, Y).grads
    assert relative(grads, exact) < 0.02
    again = mpx.value_and_grad(tuned.policy.apply(sensitive))(scaling, PARAMS, X, Y)
    assert relative(again.grads, grads) == 0


def test_proposals_are_measured_and_shown_beside_the_prediction(tuned):
    seen = [x for x in tuned.candidates if x.error is not None]
    assert tuned.policy in [x.policy for x in seen]
    assert mpx.inspect.PrecisionPolicy("bf16") in [x.policy for x in seen]
    text = str(tuned)
    assert all(f"{x.predicted_error:.1e}" in text for x in seen)
    assert "most work in 16 bits" in tuned.remark
    json.loads(tuned.to_json())


def test_candidates_with_most_work_in_16_bits_come_first(tuned):
    shares = [x.share for x in tuned.candidates]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > shares[-1]


def test_default_is_kept_where_it_is_best():
    found = measured(plain, PARAMS, X, Y, max_grad_error=0.05, formats="bf16")
    assert found.policy == mpx.inspect.PrecisionPolicy("bf16")
    assert found.remark == "The default of `amp` is within 0.05."


def test_limit_that_nothing_reaches_is_said():
    candidates = [
        mpx.inspect.Candidate(mpx.inspect.PrecisionPolicy(half), 1e-3, 1.0, 1e-3, error)
        for half, error in (("bf16", 0.1), ("f16", 0.05))
    ]
    chosen, remark = _advice.choose(candidates, 0.01)
    assert chosen.half == "f16"
    assert remark.startswith("No measured policy reaches 0.01")


@pytest.mark.parametrize(
    ("default", "share", "best"),
    [(0.02, 0.9, "bf16"), (0.2, 0.9, "f16"), (0.2, 0.4, "kept")],
)
def test_default_wins_and_then_the_most_work_in_16_bits(default, share, best):
    bf16, f16, kept = (
        mpx.inspect.PrecisionPolicy(half, keep=keep)
        for half, keep in (("bf16", ()), ("f16", ("^a$",)), ("bf16", ("^a$",)))
    )
    candidates = [
        mpx.inspect.Candidate(bf16, 1e-3, 1.0, 1e-3, default),
        mpx.inspect.Candidate(kept, 1e-3, 0.5, 1e-3, 0.01),
        mpx.inspect.Candidate(f16, 1e-3, share, 1e-3, 0.01),
    ]
    chosen, remark = _advice.choose(candidates, 0.05)
    assert chosen == {"bf16": bf16, "f16": f16, "kept": kept}[best]
    assert ("The default of `amp` has an error of 2.0e-01" in remark) == (
        best != "bf16"
    )


def test_longer_keep_lists_are_measured_until_one_reaches_the_limit(monkeypatch):
    error = Study.error
    monkeypatch.setattr(Study, "error", lambda *args: error(*args) / 100)
    found = measured(sensitive, PARAMS, X, Y, max_grad_error=0.1, formats="bf16")
    first = next(x for x in found.candidates if not x.policy.keep)
    assert first.predicted_error < 0.1 < first.error  # pyright: ignore[reportOperatorIssue]
    (best,) = [x for x in found.candidates if x.policy == found.policy]
    assert best.error < 0.1  # pyright: ignore[reportOptionalOperand]


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
