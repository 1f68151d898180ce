"""Selectors: strings, types, predicates and lists mean the same wherever they are taken."""

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import mpx
from mpx.testing import assert_trees_equal

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
W = jnp.full((16, 16), 1.001)
X = jnp.full((16, 16), 1.001)


class Layer(eqx.Module):
    weight: Any

    def __call__(self, x):
        return x @ self.weight


class Special(Layer):
    """A subclass, with the call of its parent."""


class Unused(Layer):
    """A type that no model here holds."""


def make_model(dtype=F32):
    layers = [Layer(W.astype(dtype)), Special(W.astype(dtype))]
    return {
        "layers": layers,
        "norm": Layer(W.astype(dtype)),
        "post_norm": {"w": W.astype(dtype)},
    }


PATHS = {"layers/0/weight", "layers/1/weight", "norm/weight", "post_norm/w"}


def loss(model, x):
    for layer in model["layers"]:
        x = layer(x)
    with jax.named_scope("block"), jax.named_scope("inner"):
        x = model["norm"](x)
    return jnp.sum(x @ model["post_norm"]["w"])


def by_policy(selector):
    seen = []

    def note(model, x):
        seen.extend(paths_in(model, F32))
        return jnp.float32(0)

    policy = mpx.Policy(compute_dtype="bf16", keep=selector)
    mpx.value_and_grad(note, policy=policy)(mpx.NoLossScaling(), make_model(), X)
    by_hand = policy.cast_to_compute(make_model())
    assert set(seen) == set(paths_in(by_hand, F32))
    return set(seen)


def paths_in(tree, dtype):
    return [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if leaf.dtype == dtype
    ]


def by_cast(selector):
    return set(paths_in(mpx.cast_tree(make_model(), BF16, where=selector), BF16))


def by_amp(selector):
    report: Any = mpx.inspect.report(mpx.amp(loss, keep=selector), make_model(), X)
    return {
        decision.params[-1].removeprefix("model/")
        for decision in report.amp.decisions
        if decision.primitive == "dot_general" and decision.rule == "original"
    }


def of_matmul(selector):
    """The predicates of `fp8` are asked about matmuls."""
    if isinstance(selector, list):
        return [of_matmul(x) for x in selector]
    if hasattr(selector, "__next__"):
        return selector
    if isinstance(selector, str | type | dict | eqx.Module):
        return selector
    return lambda matmul: selector(matmul.param.removeprefix("model/"), W)


def by_fp8(selector):
    func = mpx.fp8(loss, keep=of_matmul(selector), min_gain=0)  # pyright: ignore[reportCallIssue]
    report: Any = mpx.inspect.report(func, make_model(BF16), X.astype(BF16))
    assert all(x.reason.startswith("keep ") for x in report.fp8.kept)
    return {x.param.removeprefix("model/") for x in report.fp8.kept}


def by_group(selector):
    group = mpx.optim.ParamGroup(selector, frozen=True)
    state: Any = mpx.optim.flash_adamw(1.0, groups=[group]).init(make_model())
    return PATHS - set(paths_in(state.mu, F32))


PLACES = {
    "Policy": by_policy,
    "cast_tree": by_cast,
    "amp": by_amp,
    "fp8": by_fp8,
    "ParamGroup": by_group,
}

SELECTORS = {
    "word": ("norm", {"norm/weight", "post_norm/w"}),
    "anchored": ("^norm", {"norm/weight"}),
    "end": ("weight$", PATHS - {"post_norm/w"}),
    "whole path": (r"^layers/0/weight$", {"layers/0/weight"}),
    "alternatives": ("post|/1/", {"layers/1/weight", "post_norm/w"}),
    "everything": (".", PATHS),
    "type": (Special, {"layers/1/weight"}),
    "type with a subclass": (Layer, PATHS - {"post_norm/w"}),
    "predicate": (lambda path, _: path.startswith("layers/0"), {"layers/0/weight"}),
    "predicate on the leaf": (lambda _, leaf: leaf.shape == (16, 16), PATHS),
    "list": (["^norm", Special], {"norm/weight", "layers/1/weight"}),
    "list of one": ([Special], {"layers/1/weight"}),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("selector", "selected"), SELECTORS.values(), ids=SELECTORS)
def test_selector_selects_the_same_in_every_place(place, selector, selected):
    assert PLACES[place](selector) == selected


ERRORS = {
    "misspelt": ("^nrom", r"'\^nrom' in `\w+` selects nothing. Near names: .*'norm/w"),
    "with the argument": ("^model/norm/weight", "Near names: 'norm/weight'"),
    "far from all": ("zzzz", "Names: .*'layers/0/weight'.* Paths start inside the arg"),
    "in a list": (["norm", "haed"], "'haed' in `"),
    "type": (Unused, "Unused'> in `.* selects nothing"),
    "no expression": ("(", r"'\(' in `\w+` is not a regular expression: missing \)"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("selector", "message"), ERRORS.values(), ids=ERRORS)
def test_selector_that_cannot_be_meant_is_refused_in_every_place(
    place, selector, message
):
    with pytest.raises(ValueError, match=message):
        PLACES[place](selector)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("wrong", [3, None, b"x"])
def test_something_else_is_no_selector(place, wrong):
    # An iterator, of which the type checker of the tests does not see the items.
    wanted = rf"`\w+` takes a regular expression .* but {wrong!r} was given"
    with pytest.raises(TypeError, match=wanted):
        PLACES[place](iter(["norm", wrong]))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("wrong", [{"norm": "f32"}, eqx.nn.LayerNorm(2)], ids=type)
def test_a_dict_or_a_module_that_can_be_called_is_no_selector(place, wrong):
    wanted = r"`\w+` takes a regular expression .* a module type, a predicate"
    with pytest.raises(TypeError, match=wanted):
        PLACES[place](wrong)


@pytest.mark.parametrize("place", PLACES)
def test_predicate_may_be_false_everywhere_but_not_in_a_group(place):
    def never(*_):
        return False

    if place == "ParamGroup":
        with pytest.raises(ValueError, match="selects nothing.*false for all of them"):
            by_group(never)
    else:
        assert PLACES[place](never) == set()


@pytest.mark.parametrize("place", ["Policy", "cast_tree", "amp", "ParamGroup"])
def test_predicate_must_not_return_an_array(place):
    with pytest.raises(
        TypeError, match=r"must return True or False, but for `.*bool of"
    ):
        PLACES[place](lambda _, leaf: leaf > 0)


def test_bare_casts_with_a_policy_take_any_tree():
    policy = mpx.Policy(compute_dtype="bf16", keep=["head", Unused])
    assert policy.cast_to_compute({"x": X})["x"].dtype == BF16
    assert policy.cast_function(lambda x: x + 1)(X).dtype == F32


def test_an_array_argument_is_selected_by_its_whole_name():
    def func(w, norm_x):
        return norm_x @ w

    def kept(keep):
        report: Any = mpx.inspect.report(mpx.amp(func, keep=keep), W, X)
        return report.amp.decisions[0].rule == "original"

    assert kept("w")
    assert kept("^norm_x$")
    with pytest.raises(ValueError, match="Near names: 'norm_x'"):
        kept("norm")


# --- Operations -----------------------------------------------------------------------


def dots(func, *args):
    """Returns the dtypes of the matmuls of a function, outermost first."""
    found = []

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                found.append(eqn.invars[0].aval.dtype)
            for value in jax.tree.leaves(
                list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")
            ):
                if hasattr(value, "jaxpr"):
                    visit(value.jaxpr)
                elif hasattr(value, "eqns"):
                    visit(value)

    visit(jax.make_jaxpr(func)(*args).jaxpr)
    return found


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
@pytest.mark.parametrize("keep", ["^block/inner$", "^block", "inner", Layer, "^norm/"])
def test_amp_and_fp8_keep_operations_in_scopes_and_calls(keep, wrap):
    expected = [F32, F32, F32, BF16] if keep is Layer else [BF16, BF16, F32, BF16]
    assert dots(mpx.amp(wrap(loss), keep=keep), make_model(), X) == expected
    func = mpx.fp8(wrap(loss), keep=keep, min_gain=0)
    report: Any = mpx.inspect.report(func, make_model(BF16), X.astype(BF16))
    reasons = [bool(x.reason) for x in report.fp8.matmuls]
    assert reasons == [dtype == F32 for dtype in expected]


def test_kept_operations_run_as_they_are_written():
    kept = mpx.amp(loss, keep=[Layer, "post"])
    assert_trees_equal(kept(make_model(), X), loss(make_model(), X))
    assert mpx.amp(loss)(make_model(), X) != loss(make_model(), X)
    grads = jax.grad(kept)(make_model(), X)
    assert_trees_equal(grads, jax.grad(loss)(make_model(), X))


def test_type_is_kept_where_it_is_called_though_no_argument_holds_it():
    hidden = Layer(W)

    def closes_over(x):
        return jnp.tanh(hidden(x)) @ W

    assert dots(mpx.amp(closes_over, keep=Layer), X) == [F32, BF16]
    # What was compiled under `keep` is not used elsewhere.
    jitted = jax.jit(closes_over)
    assert dots(mpx.amp(jitted, keep=Layer), X) == [F32, BF16]
    assert dots(mpx.amp(jitted), X) == [BF16, BF16]
    assert "replacement" not in Layer.__call__.__qualname__


def test_type_is_kept_where_its_parameters_are_read_without_a_call():
    def reads(model, x):
        return x @ model.weight

    assert dots(mpx.amp(reads, keep=Special), Special(W), X) == [F32]


def test_model_as_the_function_has_paths_of_its_own():
    class Model(eqx.Module):
        body: Layer
        head: Layer

        def __call__(self, x):
            return self.head(self.body(x))

    model = Model(Layer(W), Layer(W))
    assert dots(mpx.amp(model, keep="^head"), X) == [BF16, F32]


def test_amp_selects_in_models_of_flax():
    import flax.linen as nn
    from flax import nnx

    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(16, name="head")(nn.Dense(16)(x))

    class Head(nnx.Linear):
        pass

    class Nnx(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.body, self.head = (
                nnx.Linear(16, 16, rngs=rngs),
                Head(16, 16, rngs=rngs),
            )

        def __call__(self, x):
            return self.head(self.body(x))

    linen: Any = Linen()
    params = linen.init(jax.random.key(0), X)
    apply = mpx.amp(linen.apply, keep="^params/head")
    assert dots(apply, params, X) == [BF16, F32]
    assert dots(mpx.amp(linen.apply, keep=nn.Dense), params, X) == [F32, F32]
    model = Nnx()
    call = lambda model, x: model(x)  # noqa: E731
    for keep in ("^head/kernel", Head, lambda path, _: "head" in path):
        assert dots(lambda x: mpx.amp(call, keep=keep)(model, x), X) == [BF16, F32]  # noqa: B023
    assert dots(lambda x: mpx.amp(model, keep="^head")(x), X) == [BF16, F32]


def test_reports_name_the_selector_and_the_argument():
    func = mpx.amp(loss, keep=["^norm", Special])
    report: Any = mpx.inspect.report(func, make_model(), X)
    found = {x.params[-1]: x.reason for x in report.amp.decisions if x.flops}
    assert found["model/norm/weight"] == "keep ^norm"
    assert found["model/layers/1/weight"] == "keep Special"


def test_fp8_includes_what_is_excluded_as_a_head():
    def head(params, x):
        with jax.named_scope("readout"):
            return jax.nn.softmax(x @ params["lm_head"]["w"])

    params, x = {"lm_head": {"w": W.astype(BF16)}}, X.astype(BF16)

    def changed(include: Any = ()):
        func = mpx.fp8(head, include=include, min_gain=0)
        report: Any = mpx.inspect.report(func, params, x)
        return bool(report.fp8.changed)

    assert not changed()
    for include in ("^lm_head", "readout", lambda matmul: matmul.shape[0] == 16, dict):
        assert changed(include)
    with pytest.raises(ValueError, match="in `include` selects nothing"):
        changed("lm_haed")


# --- AmpRules -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "pattern", "near"),
    [
        ("scopes", "blokc", "'block'"),
        ("functions", "los$", "'loss'"),
        ("params", "^post_nrom", "'post_norm/w'"),
    ],
)
def test_rule_that_selects_nothing_is_refused(kind, pattern, near):
    rules = mpx.AmpRules(**{kind: {pattern: "f32"}})
    message = rf"{re.escape(repr(pattern))} in `{kind}` selects nothing. Near.*{near}"
    for wrap in (lambda f: f, jax.jit):
        with pytest.raises(ValueError, match=message):
            mpx.amp(wrap(loss), rules=rules)(make_model(), X)


def test_policy_that_keeps_has_no_place_around_amp():
    policy = mpx.Policy(compute_dtype="bf16", keep="norm")
    take = mpx.value_and_grad(mpx.amp(loss), policy=policy)
    with pytest.raises(
        ValueError, match=r"no effect on a function under `amp`.*`keep="
    ):
        take(mpx.NoLossScaling(), make_model(), X)
