"""`fp8`: which matmuls it changes, and that it changes nothing else."""

import contextlib
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from fp8_cases import (
    BF16,
    assert_scan_is_the_unrolled_loop,
    everywhere,
    layer_problem,
    layers,
    ones_and_signs,
)
from models import equations, normal, trace_together
from mpx import fp8
from mpx._fp8._decide import HEAD, ROUTER, TABLE
from mpx.recipes import CurrentScaling, DelayedScaling, StaticScaling
from mpx.testing import assert_trees_equal


def count_f8(func, *args):
    return eight_bit_products(jax.make_jaxpr(func)(*args))


def eight_bit_products(jaxpr):
    """How many `dot_general`s have 8-bit operands, in the branch for this platform."""
    dots = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "dot_general"]
    kinds = [eqn.invars[0].aval.dtype for eqn in dots]
    floats = [x for x in kinds if x.itemsize == 1 and x != jnp.int8]
    # Once for CUDA, once for the rest; integers once for all.
    return len(floats) // 2 + kinds.count(np.dtype(np.int8))


def reasons(func, *args, **options):
    report = mpx.inspect.report(everywhere(func, **options), *args)
    return [(matmul.param, matmul.reason) for matmul in report.fp8.matmuls]


W = ones_and_signs((32, 32), 1)
X = ones_and_signs((16, 32), 2)


# --- what is followed -----------------------------------------------------------------


def through_cond(p, x):
    return lax.cond(x[0, 0] > 0, lambda w: x @ w, lambda w: x @ w.T, p)


def through_scan(p, x):
    return lax.scan(lambda h, w: (h @ w, None), x, jnp.stack([p, p]))[0]


def through_stacked(p, x):
    stacked = p.reshape(2, 16, 32)
    out = [x[:, :16] @ stacked[i] for i in range(2)]
    return jnp.concatenate(out, axis=1)


def through_vmap(p, x):
    return jax.vmap(lambda row: p @ row)(x)


def through_shard_map(p, x):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
    return jax.shard_map(lambda w, x: x @ w, mesh=mesh, **specs)(p, x)


def through_all_gather(p, x):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P("data"), P("data")), "out_specs": P("data")}

    def local(w, x):
        return x @ lax.all_gather(w, "data", axis=0, tiled=True)

    return jax.shard_map(local, mesh=mesh, **specs)(p, x)


def through_fori(p, x):
    return lax.fori_loop(0, 2, lambda i, h: h @ p, x)


def through_carry(p, x):
    step = lambda carry, _: ((carry[0], carry[1] @ carry[0]), None)  # noqa: E731
    return lax.scan(step, (p, x), None, length=2)[0][1]


FOLLOWED = {
    "plain": (lambda p, x: x @ p, 1),
    "transpose": (lambda p, x: x @ p.T, 1),
    "reshape": (lambda p, x: x @ p.reshape(2, 512).reshape(32, 32), 1),
    "slice": (lambda p, x: x @ p[:, :16], 1),
    "dynamic slice": (lambda p, x: x[:, :16] @ p.reshape(2, 16, 32)[jnp.int32(1)], 1),
    "cast": (lambda p, x: x @ p.astype(jnp.float32).astype(BF16), 1),
    "times a number": (lambda p, x: x @ (p * 2), 1),
    "sum of parameters": (lambda p, x: x @ (p + p.T), 1),
    "low rank": (lambda p, x: x @ (p + p[:, :16] @ p[:16]), 1),
    "concatenate": (lambda p, x: x @ jnp.concatenate([p, p], axis=1), 1),
    "jit": (lambda p, x: jax.jit(lambda x, w: x @ w)(x, p), 1),
    "jit of a transpose": (lambda p, x: x @ jax.jit(jnp.transpose)(p), 1),
    "remat": (lambda p, x: jax.checkpoint(lambda x, w: x @ w)(x, p), 1),
    "cond": (through_cond, 2),
    "scan": (through_scan, 1),
    "fori_loop": (through_fori, 1),
    "carry": (through_carry, 1),
    "stacked": (through_stacked, 2),
    "vmap (Equinox)": (through_vmap, 1),
    "shard_map": (through_shard_map, 1),
    "all_gather": (through_all_gather, 1),
    "einsum": (lambda p, x: jnp.einsum("bi,io->bo", x, p), 1),
    "heads": (lambda p, x: jnp.einsum("bi,ihd->bhd", x, p.reshape(32, 2, 16)), 1),
    "experts": (
        lambda p, x: jnp.einsum(
            "bei,eio->ebo", x.reshape(16, 2, 16), p.reshape(2, 16, 32)
        ),
        1,
    ),
}


@pytest.mark.some(1)
@pytest.mark.parametrize("name", FOLLOWED)
def test_parameter_is_followed_through(name):
    func, matmuls = FOLLOWED[name]
    loss = lambda p, x: jnp.sum(func(p, x).astype(jnp.float32))  # noqa: E731
    changed = mpx.inspect.report(everywhere(loss), W, X).fp8.changed
    assert len(changed) == matmuls
    assert {matmul.param for matmul in changed} == {"p"}
    # Small whole numbers are exact in fp8: nothing but the matmul may differ.
    p = W * (jnp.arange(32) < 6)[:, None].astype(BF16)
    funcs = [jax.value_and_grad(everywhere(loss)), jax.value_and_grad(loss)]
    traced, (jaxpr, _) = trace_together(funcs, p, X)
    found, want = traced.lower().compile()(p, X)
    if name not in (
        "scan",
        "fori_loop",
        "carry",
    ):  # whose sums exceed what e5m2 holds exactly
        assert_trees_equal(found, want)
    assert eight_bit_products(jaxpr) >= 2 * matmuls


def in_custom_vjp(p, x):
    @jax.custom_vjp
    def linear(x, w):
        return x @ w

    linear.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))
    return linear(x, p)


def attention(p, x):
    q = x @ p
    return jax.nn.softmax((q @ q.T).astype(jnp.float32)).astype(BF16) @ q


KEPT = {
    "no parameter": (lambda p, x: x @ x.T, "no operand is a parameter"),
    "only parameters": (lambda p, x: p @ p, "both operands are parameters"),
    "a broadcast parameter": (
        lambda p, x: jnp.broadcast_to(p[0], (16, 32)) @ p,
        None,  # a learnt query is an activation
    ),
    "f32 by a rule": (
        mpx.amp(lambda p, x: x @ p, rules="original", params=0),
        "an operand is f32 (policy original)",
    ),
    "f32 result": (
        lambda p, x: lax.dot(
            x.astype(BF16), p.astype(BF16), preferred_element_type=jnp.float32
        ),
        "its result was asked for in f32",
    ),
    "precision": (
        lambda p, x: jnp.matmul(x, p, precision="highest"),
        "HIGHEST was asked for",
    ),
    "an algorithm": (
        lambda p, x: jnp.matmul(
            x.astype(BF16),
            p.astype(BF16),
            precision=lax.DotAlgorithmPreset.BF16_BF16_F32,
        ),
        "BF16_BF16_F32 was asked for",
    ),
    "odd size": (lambda p, x: x @ p[:, :17], "17 is not a multiple of 16"),
    "empty": (lambda p, x: x @ p[:, :0], "0 is not a multiple of 16"),
    "custom_vjp": (
        in_custom_vjp,
        "inside custom_vjp_call, which fp8 does not enter",
    ),
    "while": (
        lambda p, x: lax.while_loop(
            lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] @ p), (0, x)
        )[1],
        "inside while, which fp8 does not enter",
    ),
}


@pytest.mark.filterwarnings("ignore:`amp` changed no matmul")
@pytest.mark.parametrize("name", KEPT)
def test_matmul_is_kept(name):
    func, reason = KEPT[name]
    assert [found for _, found in reasons(func, W, X)] == [reason or ""]
    if not reason:
        return
    # Whatever it is, it is heard.
    with pytest.warns(
        RuntimeWarning, match=f"`fp8` changed nothing: .*{re.escape(reason)}"
    ):
        got = jax.jit(everywhere(func))(W, X)
    # Small whole numbers are exact in bf16.
    assert_trees_equal(got.astype(jnp.float32), func(W, X).astype(jnp.float32))


@pytest.mark.filterwarnings('ignore:The default precision of matmuls is "highest"')
@pytest.mark.parametrize("precision", ["high", "tensorfloat32", "highest", "bfloat16"])
def test_default_precision_does_not_keep_fp8_out(precision):
    func, p = (lambda p, x: x @ p["w"]), {"w": W.astype(jnp.float32)}
    by_hand = lambda p, x: x.astype(BF16) @ p["w"].astype(BF16)  # noqa: E731
    with jax.default_matmul_precision(precision):
        assert reasons(func, p, X.astype(jnp.float32)) == [("p/w", "")]
        assert reasons(by_hand, p, X) == [("p/w", "")]


@pytest.mark.parametrize("recipe", ["current", "int8", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("size", ["b", "32*b"])
def test_batch_may_be_a_symbol(size, recipe):
    chosen: Any = RECIPES[{"mxfp8": "mx"}.get(recipe, recipe)]
    loss = everywhere(lambda p, x: jnp.mean((x @ p["w"]) ** 2), chosen)
    (rows,) = jax.export.symbolic_shape(size)
    p, x = {"w": W.astype(jnp.float32)}, jnp.ones((64, 32))
    types = {"w": jax.ShapeDtypeStruct((32, 32), jnp.float32)}
    step = jax.jit(jax.grad(loss))
    heard = contextlib.nullcontext()
    if is_kept := size == "b" or chosen.form("grad") in ("int8", "e2m1"):
        heard = pytest.warns(RuntimeWarning, match="changed nothing: .*(symbol|exceed)")
    with heard:
        run: Any = jax.export.export(step)(
            types, jax.ShapeDtypeStruct((rows, 32), jnp.float32)
        )
    want = jax.jit(jax.grad(mpx.amp(loss.func))) if is_kept else step
    assert_trees_equal(run.call(p, x), want(p, x))


def test_attention_products_are_kept():
    assert [bool(reason) for _, reason in reasons(attention, W, X)] == [
        False,
        True,
        True,
    ]


def softmax_loss(logits):
    return jnp.sum(jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1))


def routed(p, x):
    gates = jax.nn.sigmoid(x @ p["w"])
    return lax.top_k(gates.astype(jnp.float32), 2)[0]


TOKENS = jnp.arange(16) % 3
# What a parameter is for, by what is done with it. The last item is how many matmuls with
# it become fp8, all if there is no reason against it.
PURPOSES = {
    "layer": (lambda p, x: x @ p["w"], ""),
    "layer, squared error": (lambda p, x: jnp.mean((x @ p["w"]) ** 2), ""),
    "layer before silu": (lambda p, x: jnp.mean(jax.nn.silu(x @ p["w"])), ""),
    "layer before softplus": (lambda p, x: jnp.mean(jax.nn.softplus(x @ p["w"])), ""),
    "layer before a norm": (lambda p, x: jax.nn.standardize(x @ p["w"]), ""),
    "head": (lambda p, x: softmax_loss(x @ p["w"]), HEAD),
    "head with soft cap": (lambda p, x: softmax_loss(30 * jnp.tanh(x @ p["w"])), HEAD),
    "head, softmax": (lambda p, x: jax.nn.softmax(x @ p["w"]), HEAD),
    "head in a jit": (
        lambda p, x: jax.jit(jax.nn.softmax)(jax.jit(jnp.matmul)(x, p["w"])),
        HEAD,
    ),
    "head in a checkpoint": (
        lambda p, x: jax.checkpoint(lambda x: softmax_loss(x @ p["w"]))(x),
        HEAD,
    ),
    "router": (routed, ROUTER),
    "prediction": (lambda p, x: jnp.argmax(x @ p["w"], axis=-1), ROUTER),
    "embedding": (lambda p, x: (x + p["w"][TOKENS]) @ p["w"], TABLE),
    "embedding after its head": (lambda p, x: x @ p["w"] + p["w"][TOKENS], TABLE),
    "one unused row": (lambda p, x: (jnp.take(p["w"], 0, axis=0), x @ p["w"])[1], ""),
    "rows in another order": (lambda p, x: x @ p["w"][jnp.arange(32)[::-1]], ""),
    "permuted rows": (lambda p, x: x @ p["w"][PERMUTATION], ""),
    "a layer of a stack": (
        lambda p, x: lax.fori_loop(
            0, 2, lambda i, x: x @ jnp.take(jnp.stack([p["w"]] * 2), i, axis=0), x
        ),
        "",
    ),
}
PERMUTATION = jnp.asarray([(5 * i) % 32 for i in range(32)])


@pytest.mark.some(5)
@pytest.mark.standard_promotion
@pytest.mark.parametrize("scope", ["", "head", "Classifier/embed", "router"])
@pytest.mark.parametrize("name", PURPOSES)
def test_what_a_parameter_does_decides_and_not_its_name(name, scope):
    func, reason = PURPOSES[name]

    def loss(p, x):
        with jax.named_scope(scope or "layers"):
            return func({"w": jax.tree.leaves(p)[0]}, x)

    tree = {scope or "w": {"kernel": W}}
    found = dict(reasons(loss, tree, X))
    assert found == {f"p/{scope or 'w'}/kernel": reason}
    if reason and not scope:
        assert {x for _, x in reasons(loss, tree, X, include="kernel")} == {""}


# Weights that are computed: the question is the same wherever it is asked.
DERIVED = {
    "clip": lambda w: jnp.clip(w, -1, 1),
    "where": lambda w: jnp.where(jnp.arange(32) < 20, w, 0),
    "pad": lambda w: jnp.pad(w, ((0, 0), (0, 16))),
    "std": lambda w: (w - w.mean(0)) / (jnp.std(w, axis=0) + 1e-3),
    "nan_to_num": jnp.nan_to_num,
    "softplus": jax.nn.softplus,
    "gelu": jax.nn.gelu,
    "norm": lambda w: w / jnp.linalg.norm(w, axis=0),
    "jit": jax.jit(lambda w: jnp.where(w > 0, w, 2.0 * w)),
    "branch": lambda w: lax.cond(w[0, 0] > 0, lambda w: w, lambda w: w * 2, w),
    "loop": lambda w: lax.fori_loop(0, 2, lambda _, w: w * 0.5, w),
    "concatenate": lambda w: jnp.concatenate([w[:16], w[16:] * 2]),
    "triangle": jnp.tril,
}
USES = {
    "layer": (lambda out: jnp.mean(jax.nn.relu(out) ** 2), ""),
    "head": (lambda out: -jnp.mean(jax.nn.log_softmax(out)[:, 0]), HEAD),
    "head, clipped": (lambda out: softmax_loss(jnp.clip(out, -30, 30)), HEAD),
    "head, masked": (
        lambda out: softmax_loss(jnp.where(jnp.arange(out.shape[1]) < 9, out, -1e9)),
        HEAD,
    ),
    "head, in a scan": (
        lambda out: lax.scan(lambda c, x: (c + softmax_loss(x[None]), None), 0.0, out)[
            0
        ],
        HEAD,
    ),
    "head, carried": (
        lambda out: softmax_loss(lax.fori_loop(0, 2, lambda _, x: x + 1, out)),
        HEAD,
    ),
    "router": (lambda out: jnp.sum(lax.top_k(jax.nn.softplus(out), 2)[0]), ROUTER),
}


@pytest.mark.some(5)
@pytest.mark.standard_promotion
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("weight", DERIVED)
def test_what_a_computed_parameter_does_decides(weight, use):
    make, (read, reason) = DERIVED[weight], USES[use]
    loss = lambda p, x: read(x @ make(p["w"]))  # noqa: E731
    p, x = {"w": W.astype(jnp.float32)}, X.astype(jnp.float32)
    assert reasons(loss, p, x) == [("p/w", reason)]
    jitted = lambda p, x: jax.jit(read)(jax.jit(lambda p, x: x @ make(p["w"]))(p, x))  # noqa: E731
    assert reasons(jitted, p, x) == [("p/w", reason)]


def test_table_may_be_computed():
    def loss(p, tokens):
        hidden = jnp.where(jnp.arange(32)[:, None] < 9, p["table"], 0.0)[tokens]
        return (hidden @ p["w"]) @ p["table"].T

    p = {"table": W.astype(jnp.float32), "w": W.astype(jnp.float32)}
    assert reasons(loss, p, TOKENS) == [("p/w", ""), ("p/table", TABLE)]


def test_jitted_layer_may_be_a_head_later():
    layer = jax.jit(lambda x, w: x @ w)

    def loss(p, x, is_head):
        out = layer(x, p["w"])
        return softmax_loss(out) if is_head else jnp.sum(out)

    func, p = everywhere(loss), {"w": W.astype(jnp.float32) * 1.0625}
    x = X.astype(jnp.float32)
    func(p, x, False)  # eagerly: the jitted function is remembered in fp8
    with pytest.warns(RuntimeWarning, match=HEAD):
        assert func(p, x, True) == mpx.amp(loss)(p, x, True)


def test_tied_embedding_is_kept():
    def loss(p, tokens):
        hidden = p["table"][tokens] @ p["w"]
        return hidden @ p["table"].T

    tokens = jnp.arange(16)
    found = reasons(loss, {"table": W, "w": W}, tokens)
    assert found == [("p/w", ""), ("p/table", "its parameter is an embedding table")]


def test_tied_embedding_is_kept_when_run_eagerly_again():
    # Both jitted functions hold a matmul, so their rewritten forms are remembered.
    first = jax.jit(lambda p, tokens: jnp.take(p["table"], tokens, axis=0) @ p["w"])
    head = jax.jit(lambda h, table: h @ table.T)
    loss = everywhere(lambda p, tokens: head(first(p, tokens), p["table"]))
    p, tokens = {"table": W * 1.0625, "w": W}, jnp.arange(16)
    hidden = everywhere(lambda p, tokens: first(p, tokens))(p, tokens).astype(BF16)
    for _ in range(2):
        got = loss(p, tokens).astype(BF16)
        assert_trees_equal(got, hidden @ p["table"].T)


def scoped(p, x):
    with jax.named_scope("first"):
        x = x @ p["a"]
    with jax.named_scope("last"):
        return x @ p["b"]


def is_b(matmul):
    return matmul.param.endswith("b")


@pytest.mark.parametrize(
    ("keep", "want"),
    [
        (["^a$", "last"], ["keep ^a$", "keep last"]),
        (is_b, ["", "keep is_b"]),
        (lambda matmul: matmul.shape == (16, 32, 32), ["keep <lambda>"] * 2),
    ],
)
def test_keep_rule(keep, want):
    found = reasons(scoped, {"a": W, "b": W}, X, keep=keep)
    assert [reason for _, reason in found] == want


@pytest.mark.parametrize("keep", ["^a$", "^b$"])
def test_each_parameter_of_which_a_weight_is_made_can_be_kept(keep):
    func = lambda p, x: x @ jnp.concatenate([p["a"], p["b"]], 1)  # noqa: E731
    parts = {"a": W, "b": W}
    assert [x for _, x in reasons(func, parts, X, keep=keep)] == [f"keep {keep}"]


def test_all_arrays_that_are_differentiated_are_parameters():
    func = lambda a, b, x: jnp.sum((x @ a) @ b)  # noqa: E731
    grad = jax.grad(everywhere(func), argnums=(0, 1))
    floats = [x for x in str(jax.make_jaxpr(grad)(W, W, X)).split() if "f8_e4m3" in x]
    alone = jax.grad(everywhere(func, params=(0, 1)), argnums=(0, 1))
    wanted = [x for x in str(jax.make_jaxpr(alone)(W, W, X)).split() if "f8_e4m3" in x]
    assert len(floats) == len(wanted) > 0


def test_amp_stop_keeps_fp8_out():
    def loss(p, x):
        with mpx.amp_stop():
            return x @ p

    assert reasons(loss, W, X) == [("p", "scope amp_stop")]


# --- which argument -------------------------------------------------------------------


@pytest.mark.parametrize("params", [1, "p", -1, [1], ("p",)])
def test_params_names_the_argument(params):
    func = lambda x, p: x @ p  # noqa: E731
    assert reasons(func, X, W, params=params) == [("p", "")]
    assert reasons(func, X, W) == [("x", "")]  # the other operand is taken for it


def test_params_may_come_by_keyword():
    report = mpx.inspect.report(everywhere(lambda x, p: x @ p, params="p"), X, p=W)
    assert [matmul.reason for matmul in report.fp8.matmuls] == [""]


def test_unknown_params_are_an_error():
    with pytest.raises(ValueError, match=r"`params` names `q`, but .*\['p', 'x'\]"):
        fp8(lambda p, x: x @ p, params="q")(W, X)


BAD_ARGUMENTS = {
    "recipe 3": ({"recipe": 3}, TypeError, "`recipe` must be a recipe such as"),
    "recipe class": (
        {"recipe": DelayedScaling},
        TypeError,
        r"Pass an instance: `DelayedScaling\(...\)`",
    ),
    "recipe name": (
        {"recipe": "static"},
        ValueError,
        "`recipe` must be one of current, delayed, mxfp8, int8, nvfp4, but 'static' was given",
    ),
    "min_gain x": (
        {"min_gain": "x"},
        TypeError,
        "`min_gain` must be a number, but 'x'",
    ),
    "min_gain nan": (
        {"min_gain": np.nan},
        ValueError,
        "change all matmuls, but nan was given",
    ),
    "min_gain -1": ({"min_gain": -1}, ValueError, "or 0 to change all matmuls, but -1"),
    "params 1.0": ({"params": 1.0}, TypeError, "`params` must be the position or the"),
    "params None": ({"params": [0, None]}, TypeError, r"but \[0, None\] was given"),
    "keep 3": (
        {"keep": 3},
        TypeError,
        r"a predicate of a matmul, `\(matmul\) -> bool`, or a list .* but 3 was given",
    ),
    "func 3": ({"func": 3}, TypeError, "`fp8` takes a function, .* but 3 was given"),
    "func class": (
        {"func": DelayedScaling},
        TypeError,
        r"or a recipe such as `DelayedScaling\(\)`",
    ),
    "two recipes": (
        {"func": DelayedScaling(), "recipe": "delayed"},
        TypeError,
        "was given two recipes",
    ),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_argument_must_be_usable(name, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as for users
    options, error, message = BAD_ARGUMENTS[name]
    with pytest.raises(error, match=message):
        fp8(**({"func": lambda p, x: x @ p} | options))


@pytest.mark.parametrize("recipe", ["current", CurrentScaling(), np.str_("current")])
def test_recipe_is_an_object_or_a_name(recipe):
    assert fp8(lambda p, x: x @ p, recipe).chosen.recipe == CurrentScaling()  # pyright: ignore[reportFunctionMemberAccess]


@pytest.mark.parametrize(
    "recipe", [DelayedScaling(), "delayed"], ids=["object", "name"]
)
def test_recipe_may_stand_alone_in_a_decorator(recipe):
    @fp8(recipe, min_gain=0)
    def loss(p, x):
        return x @ p

    assert loss.has_state  # pyright: ignore[reportFunctionMemberAccess]
    assert loss.__name__ == "loss"


def test_params_may_be_a_numpy_integer(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as for users
    report = mpx.inspect.report(
        everywhere(lambda x, p: x @ p, params=np.int64(1)),  # pyright: ignore[reportCallIssue]
        X,
        W,
    )
    assert [matmul.param for matmul in report.fp8.changed] == ["p"]


def test_decorator_takes_options():
    @fp8(min_gain=0)
    def loss(p, x):
        return x @ p

    assert loss.__name__ == "loss"
    assert count_f8(loss, W, X) == 1


def test_method_can_be_decorated():
    class Model:
        @fp8(min_gain=0, params="p")
        def __call__(self, p, x):
            return x @ p

    assert_trees_equal(Model()(W, X).astype(BF16), X @ W)


# --- size -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "changed"),
    [
        ((16384, 4096, 16384), True),
        ((16384, 4096, 4096), True),
        ((2048, 768, 3072), False),
        ((64, 4096, 4096), False),
        ((16384, 64, 4096), False),
    ],
)
def test_size_decides(shape, changed):
    m, k, n = shape
    args = (jax.ShapeDtypeStruct((k, n), BF16), jax.ShapeDtypeStruct((m, k), BF16))
    (matmul,) = mpx.inspect.report(fp8(lambda p, x: x @ p), *args).fp8.matmuls
    assert matmul.shape == shape
    assert (matmul.reason == "") == changed
    if not changed:
        assert matmul.reason.startswith("too small to gain")


def test_small_model_is_left_alone_and_that_is_heard():
    loss = lambda p, x: jnp.sum(jnp.tanh(x @ p).astype(jnp.float32))  # noqa: E731
    with pytest.warns(
        RuntimeWarning, match="that with `p` stay as they are .too small to gain"
    ):
        found = str(jax.make_jaxpr(fp8(loss))(W, X))
    assert found == str(jax.make_jaxpr(mpx.amp(loss, params=0))(W, X))


# --- the same everywhere --------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe", [CurrentScaling(), CurrentScaling(granularity="row")]
)
def test_scan_and_remat_are_the_unrolled_loop_eager_or_jitted(recipe):
    assert_scan_is_the_unrolled_loop(recipe)


def exact_linear(p, x):
    return jnp.sum((x @ p["w"]).astype(jnp.float32)) / 16


AXIS_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", AXIS_TYPES)
@pytest.mark.parametrize("spec", [P(), P("data"), P(None, "data")], ids=str)
def test_sharded_over_eight_devices_is_one_device(kind, spec):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AXIS_TYPES[kind],))
    p, x = {"w": W}, ones_and_signs((128, 32), 3)

    def loss(p, x):
        if kind == "explicit" and spec == P("data"):
            # A sum over a sharded axis asks for the sharding of its result.
            out = jnp.einsum("bi,io->bo", x, p["w"], out_sharding=P("data"))
        else:
            out = x @ p["w"]
        return jnp.sum(out.astype(jnp.float32)) / 16

    want = jax.jit(jax.value_and_grad(exact_linear))(p, x)
    with jax.set_mesh(mesh):
        sharded_x = jax.device_put(x, NamedSharding(mesh, P("data")))
        if spec == P(None, "data"):
            sharded_x = jax.device_put(x, NamedSharding(mesh, P()))
        sharded_p = jax.device_put(p, NamedSharding(mesh, spec))
        got = jax.jit(jax.value_and_grad(everywhere(loss)))(sharded_p, sharded_x)
    assert jax.tree.map(np.asarray, got[1])["w"].dtype == BF16
    assert float(got[0]) == float(want[0])
    assert np.array_equal(np.asarray(got[1]["w"]), np.asarray(want[1]["w"]))


@pytest.mark.some(4)
@pytest.mark.parametrize("name", ["current", "row", "int8", "mx", "nvfp4"])
@pytest.mark.parametrize("spec", [P(), P("data"), P(None, "data")], ids=str)
def test_scales_on_explicit_axes_are_those_on_one_device(spec, name):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    p, x = {"w": W.astype(jnp.float32)}, ones_and_signs((64, 32), 3).astype(jnp.float32)

    def loss(p, x):
        out = jnp.einsum("bi,io->bo", x, p["w"], out_sharding=rows)
        return jnp.sum(out) / 16

    rows = None
    step = jax.value_and_grad(everywhere(loss, RECIPES[name]))
    want = jax.jit(step)(p, x)
    with jax.set_mesh(mesh):
        rows = P("data")
        sharded = [
            jax.device_put(y, NamedSharding(mesh, z))
            for y, z in ((p, spec), (x, P("data")))
        ]
        got = jax.jit(lambda p, x: step(p, x))(*sharded)
    assert got[1]["w"].sharding.spec == P(*spec, *[None] * (2 - len(spec)))
    assert_trees_equal(jax.device_get(got), jax.device_get(want))


@pytest.mark.parametrize("name", ["current", "row", "int8", "mx"])
def test_shard_map_over_one_of_two_explicit_axes_is_one_device(name):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    p, x = {"w": W.astype(jnp.float32)}, ones_and_signs((64, 32), 3).astype(jnp.float32)
    loss = everywhere(lambda p, x: jnp.mean(x @ p["w"]), RECIPES[name])

    def local(p, x):
        return jax.lax.pmean(loss(p, x), "a")

    want = jax.jit(jax.value_and_grad(loss))(p, x)
    with jax.set_mesh(mesh):
        specs = {"in_specs": (P(), P("a")), "out_specs": P(), "axis_names": {"a"}}
        step = jax.jit(jax.value_and_grad(jax.shard_map(local, **specs)))
        placed = [
            jax.device_put(y, NamedSharding(mesh, z))
            for y, z in ((p, P()), (x, P("a")))
        ]
        got = step(*placed)
    assert_trees_equal(jax.device_get(got), jax.device_get(want))


def test_fp8_inside_shard_map_is_one_device():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    p, x = {"w": W}, ones_and_signs((128, 32), 3)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P())
    )
    def step(p, x):
        result = mpx.value_and_grad(
            everywhere(exact_linear), policy="bf16", axis_name="data"
        )(mpx.NoLossScaling(), p, x)
        return result.value, result.grads

    value, grads = jax.jit(step)(p, x)
    want = jax.value_and_grad(exact_linear)(p, x)
    assert float(value) * 8 == float(want[0])
    assert np.array_equal(
        np.asarray(grads["w"]) * 8, np.asarray(want[1]["w"], np.float32)
    )


def test_accumulated_microbatches_are_the_whole_batch():
    p, x = {"w": W}, ones_and_signs((64, 32), 3)
    loss = everywhere(lambda p, x: exact_linear(p, x) / len(x))
    policy = "p=f32,c=bf16,o=f32"
    whole, parts = (
        jax.jit(step)(mpx.NoLossScaling(), p, x)
        for step in (
            mpx.value_and_grad(loss, policy=policy),
            mpx.accumulate(loss, steps=4, policy=policy),
        )
    )
    assert_trees_equal(parts.value, whole.value)
    assert_trees_equal(parts.grads, whole.grads)


# --- together with the rest of mpx ----------------------------------------------------


def f32_loss(p, x):
    return jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"]) ** 2)


@functools.cache
def f32_problem():
    return {"a": normal(0, 32, 32), "b": normal(1, 32, 32)}, normal(2, 16, 32)


def test_amp_inside_makes_an_f32_model_eligible():
    p, x = f32_problem()
    loss = everywhere(mpx.amp(f32_loss, dtype="bf16"))
    assert [matmul.param for matmul in mpx.inspect.report(loss, p, x).fp8.changed] == [
        "p/a",
        "p/b",
    ]
    grads = jax.grad(loss)(p, x)
    assert all(grad.dtype == jnp.float32 for grad in jax.tree.leaves(grads))
    assert count_f8(jax.grad(loss), p, x) == 6


@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_f32_model_runs_under_amp_by_itself(around):
    p, x = f32_problem()
    step = around(jax.value_and_grad(everywhere(f32_loss)))
    by_hand = everywhere(mpx.amp(f32_loss, "bf16"))
    assert_trees_equal(step(p, x), around(jax.value_and_grad(by_hand))(p, x))
    assert count_f8(jax.grad(everywhere(f32_loss)), p, x) == 6
    report = mpx.inspect.report(everywhere(f32_loss), p, x)
    assert {matmul.dtype for matmul in report.fp8.changed} == {"bf16"}


def test_f32_model_may_print_a_parameter():
    def loss(p, x):
        jax.debug.callback(lambda w: None, p["a"])
        return f32_loss(p, x)

    assert count_f8(everywhere(loss), *f32_problem()) == 2


def test_f32_matmuls_that_were_asked_for_stay_and_warn():
    func, (p, x) = mpx.amp(f32_loss, rules="original"), f32_problem()
    message = "`fp8` changed nothing: .* `p/a` stay as they are .an operand is f32 .policy orig"
    with pytest.warns(RuntimeWarning, match=message):
        value = everywhere(func)(p, x)
    assert_trees_equal(value, func(p, x))


@pytest.mark.some(1)
@pytest.mark.parametrize("scale", [2.0**10, 2.0**-10])
def test_gradients_do_not_depend_on_the_loss_scale(scale):
    p, x = f32_problem()
    step = mpx.value_and_grad(everywhere(f32_loss), policy="p=f32,c=bf16,o=f32")
    base = step(mpx.NoLossScaling(), p, x)
    scaled = step(mpx.StaticLossScaling(scale), p, x)
    assert_trees_equal(scaled.grads, base.grads)


def test_filter_value_and_grad_takes_it():
    p, x = f32_problem()
    loss, _, finite, grads = mpx.filter_value_and_grad(
        everywhere(f32_loss), policy="p=f32,c=bf16,o=f32"
    )(p, x)
    want = mpx.value_and_grad(everywhere(f32_loss), policy="p=f32,c=bf16,o=f32")(
        mpx.NoLossScaling(), p, x
    )
    assert bool(finite)
    assert_trees_equal((loss, grads), (want.value, want.grads))


def test_overflow_is_seen_by_loss_scaling():
    p, x = f32_problem()
    step = mpx.value_and_grad(everywhere(f32_loss), policy="p=f32,c=f16,o=f32")
    result = step(mpx.StaticLossScaling(2.0**40), p, x)
    assert not bool(result.finite)


@pytest.mark.parametrize(
    "recipe",
    [CurrentScaling(), StaticScaling(activation_max=8.0, weight_max=8.0, grad_max=8.0)],
)
def test_optimizer_step_on_fp8_gradients_lowers_the_loss(recipe):
    p, x = f32_problem()
    loss = everywhere(f32_loss, recipe)
    step = jax.jit(mpx.value_and_grad(loss, policy="p=f32,c=bf16,o=f32"))
    first = step(mpx.NoLossScaling(), p, x)
    p = jax.tree.map(lambda w, g: w - 0.1 * g, p, first.grads)
    assert step(mpx.NoLossScaling(), p, x).value < first.value


# --- what it refuses ------------------------------------------------------------------


def test_vmap_over_it_warns():
    loss = everywhere(lambda p, x: jnp.sum((x @ p).astype(jnp.float32)))
    with pytest.warns(RuntimeWarning, match="`fp8` inside `jax.vmap`"):
        got = jax.vmap(jax.grad(loss), in_axes=(None, 0))(W, jnp.stack([X, X]))
    assert got.shape == (2, 32, 32)


@pytest.mark.parametrize(
    "wrap",
    {
        "grad": jax.grad,
        "amp": lambda loss: jax.grad(mpx.amp(loss)),
        "jit": lambda loss: jax.jit(jax.value_and_grad(loss)),
        "step": lambda loss: lambda p, x: p - jax.grad(loss)(p, x),
    }.values(),
)
def test_fp8_around_a_gradient_warns(wrap):
    loss = wrap(lambda p, x: jnp.sum((x @ p).astype(jnp.float32)))
    with pytest.warns(RuntimeWarning, match=r"Take the gradient of its result"):
        fp8(loss, min_gain=0)(W, X)


def test_gradient_of_the_data_inside_is_no_gradient_of_parameters():
    def loss(p, x):
        forces = jax.grad(lambda x: jnp.sum((x @ p).astype(jnp.float32)))(x)
        return jnp.sum(forces.astype(jnp.float32))

    everywhere(loss)(W, X)  # warnings are errors


def test_forward_mode_is_refused():
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda p: everywhere(lambda p: X @ p)(p), (W,), (W,))


RECIPES = {
    "current": CurrentScaling(),
    "row": CurrentScaling(granularity="row"),
    "static": StaticScaling(activation_max=8.0, weight_max=8.0, grad_max=1.0),
    "delayed": DelayedScaling(),
    "mx": mpx.recipes.MXFP8(emulate=True),
    "int8": mpx.recipes.Int8(),
    "nvfp4": mpx.recipes.NVFP4(emulate=True),
}
SQUARE = ones_and_signs((32, 32), 3)


@functools.cache
def twice_differentiable(name):
    """A loss of a weight, an input and a target, with the scales that it may need."""

    def loss(w, x, target):
        return jnp.mean((jnp.tanh(x @ w) - target).astype(jnp.float32) ** 2)

    func = everywhere(loss, RECIPES[name], params="w")
    if name == "delayed":
        func = functools.partial(func, func.init(W, SQUARE, SQUARE))  # pyright: ignore[reportFunctionMemberAccess]
    return func


@functools.cache
def penalty_of(name):
    loss = twice_differentiable(name)

    def penalty(*args):
        grads = jax.grad(loss, argnums=(0, 1))(*args)
        return sum(jnp.sum(grad.astype(jnp.float32) ** 2) for grad in grads)

    # The premise. Emulated blocks are multiplied in bf16.
    is_emulated = name in ("mx", "nvfp4")
    assert count_f8(penalty, W, SQUARE, SQUARE) == (0 if is_emulated else 3)
    return penalty


# In turn: with respect to the weight, the input, and what only cotangents depend on.
@pytest.mark.some(2)
@pytest.mark.parametrize("argnum", [0, 1, 2])
@pytest.mark.parametrize("name", RECIPES)
def test_second_derivatives_are_refused(name, argnum):
    penalty, args = penalty_of(name), (W, SQUARE, SQUARE)
    tangents = tuple(x if i == argnum else x * 0 for i, x in enumerate(args))
    with pytest.raises(NotImplementedError, match="fp8 has no second derivatives"):
        jax.jit(jax.grad(penalty, argnum))(*args)
    with pytest.raises(NotImplementedError, match="fp8 has no second derivatives"):
        jax.jvp(penalty, args, tangents)


def test_second_derivatives_through_remat_and_scan_are_refused():
    p, x = layer_problem()
    penalty = lambda p: sum(  # noqa: E731
        jnp.sum(g.astype(jnp.float32))
        for g in jax.grad(everywhere(layers))(p, x).values()
    )
    with pytest.raises(NotImplementedError, match="fp8 has no second derivatives"):
        jax.jit(jax.grad(penalty))(p)


def test_gradient_may_be_a_constant_of_what_is_differentiated():
    def loss(scale):
        return scale * jnp.sum(jax.grad(twice_differentiable("current"))(W, X, X))

    expected = jnp.sum(jax.grad(twice_differentiable("current"))(W, X, X))
    assert_trees_equal(jax.jit(jax.grad(loss))(jnp.ones((), BF16)), expected)


@pytest.mark.parametrize(
    ("capability", "warns"),
    [(None, False), ((9, 0), False), ((8, 9), False), ((8, 0), True), ("gfx942", True)],
)
def test_gpu_without_units_warns(monkeypatch, capability, warns):
    transform = mpx._fp8._transform
    monkeypatch.setattr(transform, "gpu_capability", lambda: capability)
    func = everywhere(lambda p, x: x @ p)
    if not warns:
        func(W, X)
        return
    with pytest.warns(RuntimeWarning, match="has no fp8 units"):
        func(W, X)


def test_mxfp8_is_refused_without_blackwell():
    with pytest.raises(NotImplementedError, match="Blackwell"):
        fp8(lambda p, x: x @ p, mpx.recipes.MXFP8())(W, X)


def test_mxfp8_can_be_emulated():
    x = ones_and_signs((32, 32), 5)
    func = everywhere(lambda p, x: x @ p, mpx.recipes.MXFP8(emulate=True))
    assert_trees_equal(func(W, x).astype(BF16), x @ W)


def test_init_needs_a_recipe_with_state():
    with pytest.raises(TypeError, match="`CurrentScaling` keeps no state"):
        fp8(lambda p, x: x @ p).init(W, X)  # pyright: ignore[reportFunctionMemberAccess]


def test_paper_functions_refuse_delayed_scaling():
    func = fp8(exact_linear, DelayedScaling())
    with pytest.raises(TypeError, match="no place in the paper's tuples"):
        mpx.filter_grad(func)
    with pytest.raises(TypeError, match="no place in the paper's tuples"):
        mpx.calculate_scaled_grad(func, mpx.NoLossScaling())
