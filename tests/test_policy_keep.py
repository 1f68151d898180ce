"""What a policy keeps: modules that run in full precision, and running statistics."""

import pickle
import re
import threading
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from models import normal
from mpx._jax._tree import is_floating
from mpx.testing import assert_trees_equal
from numerics import ulp_distance

F16, BF16, F32, F64 = (np.dtype(jnp.dtype(n)) for n in ("f2", "bfloat16", "f4", "f8"))
KEY = jax.random.key(0)


# --- keep: modules that run in full precision ------------------------------------------


class Spy(eqx.Module):
    """Multiplies by its weight and notes the dtypes it computes in."""

    weight: jax.Array
    seen: list = eqx.field(static=True, default_factory=list)

    def __call__(self, x, *, key=None):
        self.seen.append((x.dtype, self.weight.dtype))
        return x * self.weight


policy = mpx.Policy(compute_dtype="bf16", keep=[Spy, eqx.nn.LayerNorm])
# bf16 rounds the first weight to 1: only a product in f32 comes to 2.
W, X = np.float32([1 + 0.99 * 2**-8, 3.0]), jnp.array([2 - 2**-7, 3.0], BF16)
EXACT = (np.asarray(X, np.float64) * W).astype(np.float32)


def test_premise_half_precision_would_give_another_product():
    assert (X * W.astype(BF16)).tolist() == [2 - 2**-7, 9]
    assert EXACT.astype(BF16).tolist() == [2, 9]


def call_in(policy, model, *args, **kwargs):
    """Calls a model as a loss does under a policy; the inputs keep their dtypes."""
    results = []
    policy.cast_function(lambda low: results.append(low(*args, **kwargs)))(model)
    return results[0]


def test_kept_module_runs_in_f32_and_returns_the_dtype_of_its_input():
    spy = Spy(jnp.asarray(W))
    for dtype in (BF16, F16, F32):
        out = call_in(policy, spy, X.astype(dtype))
        assert spy.seen.pop() == (F32, F32)
        assert out.dtype == dtype
        assert np.all(ulp_distance(out, jnp.asarray(EXACT).astype(dtype)) == 0)


def test_casting_to_compute_keeps_the_structure_of_a_tree_with_kept_modules():
    model = {"spy": Spy(jnp.asarray(W)), "norm": eqx.nn.LayerNorm(2), "w": jnp.ones(2)}
    low = policy.cast_to_compute(model)
    assert jax.tree.structure(low) == jax.tree.structure(model)
    assert (low["norm"].weight.dtype, low["w"].dtype) == (F32, BF16)
    assert low["spy"].weight is model["spy"].weight
    difference = jax.tree.map(lambda a, b: a - b.astype(F32), model, low)
    assert not any(jnp.any(leaf) for leaf in jax.tree.leaves(difference))
    assert_trees_equal(mpx.cast_like(low, model), model)
    assert_trees_equal(pickle.loads(pickle.dumps(low)), low)
    assert_trees_equal(policy.cast_to_compute(low), low)


def test_classes_are_as_they_were_after_a_call():
    class Loud(Spy):
        pass

    spy, own = Loud(jnp.asarray(W)), vars(Spy)["__call__"]
    for keep in (Spy, Loud, [Loud, Spy]):
        seen = []

        def fails(model, seen=seen):
            seen.append(model(X).dtype)
            assert vars(Spy)["__call__"] is not own or "__call__" in vars(Loud)
            raise KeyError

        with pytest.raises(KeyError):
            mpx.Policy(compute_dtype="bf16", keep=keep).cast_function(fails)(spy)
        assert seen == [BF16]
        assert vars(Spy)["__call__"] is own
        assert "__call__" not in vars(Loud)
        assert not any("mpx" in name for cls in (Spy, Loud) for name in vars(cls))


def test_other_threads_and_compiled_functions_do_not_see_kept_modules():
    spy = Spy(jnp.asarray(W))
    apply = jax.jit(lambda model, x: model(x), static_argnums=())
    dtypes = {}

    def loss(model):
        dtypes["kept"] = apply(model, X).dtype
        thread = threading.Thread(
            target=lambda: dtypes.update(thread=spy(X.astype(F32)).dtype)
        )
        thread.start()
        thread.join()

    policy.cast_function(loss)(spy)
    with jax.numpy_dtype_promotion("standard"):
        dtypes["after"] = apply(spy, X).dtype
    assert dtypes == {"kept": BF16, "thread": F32, "after": F32}


def test_kept_module_works_under_jit_vmap_and_scan():
    spy = Spy(jnp.asarray(W))
    expected = jnp.asarray(EXACT).astype(BF16)

    def run(low):
        assert_trees_equal(eqx.filter_jit(low)(X), expected)
        assert_trees_equal(jax.jit(lambda m, x: m(x))(low, X), expected)
        batch = jax.vmap(low)(jnp.stack([X, X, X]))
        assert_trees_equal(batch, jnp.stack([expected] * 3))
        assert_trees_equal(jax.checkpoint(lambda m, x: m(x))(low, X), expected)
        last, seen = jax.lax.scan(lambda x, _: (low(x), x), X, length=2)
        assert last.dtype == seen.dtype == BF16
        assert_trees_equal(last, low(expected))

    policy.cast_function(run)(spy)
    assert set(spy.seen) == {(F32, F32)}


def test_kept_module_can_be_stacked_and_mapped():
    stack = eqx.filter_vmap(lambda w: Spy(w))(jnp.stack([W, 2 * W]))
    run = eqx.filter_vmap(lambda m, x: m(x), in_axes=(0, None))
    out = policy.with_output_dtype("bf16").cast_function(run)(stack, X)
    assert (out.dtype, out.shape) == (BF16, (2, 2))
    assert stack.seen[-1] == (F32, F32)


def test_gradient_of_a_kept_module_is_f32_and_of_its_input_in_the_input_dtype():
    def loss(model, x):
        return call_in(policy, model, x).astype(F32).sum()

    grads = eqx.filter_grad(loss)(Spy(jnp.asarray(W)), X)
    assert grads.weight.dtype == F32
    assert_trees_equal(grads.weight, X.astype(F32))
    grad_x = jax.grad(lambda x: loss(Spy(jnp.asarray(W)), x))(X)
    assert_trees_equal(grad_x, jnp.asarray(W).astype(BF16))


class Options(eqx.Module):
    """Takes and returns trees."""

    weight: jax.Array

    def __call__(self, tree, n, *, scale, key):
        assert tree["x"].dtype == scale.dtype == F32
        assert (n, key is KEY) == (3, True)
        return {"y": tree["x"] * scale, "n": jnp.arange(2), "none": None}, [self.weight]


@pytest.mark.parametrize(
    ("first", "second", "result"),
    [(F16, F16, F16), (F16, F32, F32), (F32, F16, F32), (BF16, F16, F32)],
)
def test_kept_module_takes_any_tree_and_returns_the_widest_dtype_of_its_inputs(
    first, second, result
):
    out, weights = call_in(
        mpx.Policy(compute_dtype="f16", keep=Options),
        Options(jnp.ones(2)),
        *({"x": jnp.ones(2, first)}, 3),
        scale=jnp.asarray(2, second),
        key=KEY,
    )
    assert out["y"].dtype == weights[0].dtype == result
    assert (out["n"].dtype, out["none"]) == (jnp.int32, None)


@pytest.mark.standard_promotion
def test_kept_modules_of_equinox_and_nnx_return_the_same_dtype():
    from flax import nnx

    class Add(eqx.Module):
        weight: jax.Array

        def __call__(self, x, y):
            return x + y * self.weight

    class NnxAdd(nnx.Module):
        def __init__(self, weight):
            self.weight = nnx.Param(weight)

        def __call__(self, x, y):
            return x + y * self.weight[...]

    keep = mpx.Policy(compute_dtype="bf16", keep=[Add, NnxAdd])
    for args in [(X, X), (X, X.astype(F32)), (X.astype(F32), X)]:
        outs = [call_in(keep, cls(jnp.ones(2)), *args) for cls in (Add, NnxAdd)]
        expected = jnp.result_type(*args)
        assert outs[0].dtype == outs[1].dtype == expected


def test_kept_module_without_floating_inputs_returns_what_it_computes():
    class Table(eqx.Module):
        weight: jax.Array

        def __call__(self, index):
            return self.weight[index]

    out = call_in(mpx.Policy(keep=Table), Table(jnp.ones(2)), jnp.int32(1))
    assert out.dtype == F32


def test_subclass_of_a_kept_type_is_kept():
    class Louder(Spy):
        def __call__(self, x, *, key=None):
            return 2 * super().__call__(x)

    louder = Louder(jnp.asarray(W))
    assert_trees_equal(call_in(policy, louder, X), jnp.asarray(2 * EXACT).astype(BF16))
    assert louder.seen == [(F32, F32)]


def test_module_inside_a_kept_module_runs_in_f32_too():
    class Outer(eqx.Module):
        inner: Spy
        weight: jax.Array

        def __call__(self, x):
            return self.inner(x) + self.weight

    spy = Spy(jnp.asarray(W))
    outer = mpx.Policy(compute_dtype="bf16", keep=Outer)
    assert call_in(outer, Outer(spy, jnp.ones(2)), X).dtype == BF16
    assert spy.seen == [(F32, F32)]


def test_kept_type_that_is_not_callable_keeps_its_leaves():
    class Statistics(eqx.Module):
        mean: jax.Array

    statistics = Statistics(jnp.ones(2))
    keep = mpx.Policy(compute_dtype="bf16", keep=Statistics)
    assert_trees_equal(keep.cast_to_compute([statistics]), [statistics])
    assert keep.cast_function(lambda x: x.mean)(statistics).dtype == F32


def test_layer_norm_inside_sequential_runs_in_f32_without_editing_the_model():
    x = jnp.linspace(100, 110, 8, dtype=BF16)
    # Weights that bf16 cannot hold.
    weight = 1 + jnp.arange(8, dtype=F32) * 2**-9
    norm = eqx.tree_at(lambda m: m.weight, eqx.nn.LayerNorm(8), weight)
    model = eqx.nn.Sequential([eqx.nn.Identity(), norm, eqx.nn.Lambda(lambda x: x)])
    expected = norm(x.astype(F32)).astype(BF16)

    def run(low, x):
        assert low[1].weight.dtype == F32
        for call in (low, eqx.filter_jit(low)):
            out = call(x)
            assert out.dtype == BF16
            # XLA may sum in another order under jit: one bf16 ulp.
            assert np.all(ulp_distance(out, expected) <= 1)

    policy.cast_function(run)(model, x)
    everything = mpx.Policy(compute_dtype="bf16").cast_to_compute(model)
    assert everything[1].weight.dtype == BF16


def test_partitioned_model_with_kept_layers_is_combined_in_the_loss():
    model = eqx.nn.Sequential([eqx.nn.Linear(2, 2, key=KEY), eqx.nn.LayerNorm(2)])
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, x):
        out = eqx.combine(params, static)(x)
        assert out.dtype == BF16
        return jnp.mean(out.astype(F32) ** 2)

    result = mpx.value_and_grad(loss, policy=policy_for(eqx.nn.LayerNorm))(
        mpx.NoLossScaling(), params, jnp.ones(2)
    )
    assert jax.tree.structure(result.grads) == jax.tree.structure(params)


def policy_for(*keep):
    return mpx.Policy(compute_dtype="bf16", keep=keep)


def test_mixed_model_computes_in_half_between_the_kept_norms():
    seen = []

    def note(x):
        seen.append(x.dtype)
        return x

    linear = [eqx.nn.Linear(2, 2, key=KEY) for _ in range(2)]
    model = eqx.nn.Sequential(
        [
            linear[0],
            eqx.nn.Lambda(note),
            eqx.nn.LayerNorm(2),
            eqx.nn.Lambda(note),
            linear[1],
        ]
    )

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(model, x):
        outs = []
        run = policy_for(eqx.nn.LayerNorm).cast_function(
            lambda model: outs.append(jax.vmap(model)(x))
        )
        run(model)
        assert outs[0].dtype == BF16
        return jnp.mean(outs[0].astype(F32) ** 2)

    value, grads = loss(model, jnp.ones((3, 2), BF16))
    assert seen == [BF16, BF16]
    assert value.dtype == F32
    arrays = jax.tree.leaves(eqx.filter(grads, eqx.is_array))
    assert len(arrays) == 6
    assert {leaf.dtype for leaf in arrays} == {F32}


# --- keep: arguments and frameworks ----------------------------------------------------


def test_keep_does_not_hold_for_storage_and_output():
    tree, keep = {"head": jnp.ones(2)}, "head"
    assert mpx.Policy("bf16", keep=keep).cast_to_param(tree)["head"].dtype == BF16
    low = mpx.Policy(output_dtype="bf16", keep=keep).cast_to_output(tree)
    assert low["head"].dtype == BF16
    both = mpx.Policy(compute_dtype="bf16", keep=dict).cast_to_compute([tree, W])
    assert (both[0]["head"].dtype, both[1].dtype) == (F32, BF16)


def test_predicate_sees_name_and_leaf_of_floating_leaves_only():
    seen = {}

    def rule(name, leaf):
        seen[name] = leaf
        return False

    tree = {"a": [jnp.ones(2), 3, KEY, "s"], "b": np.ones(3), "n": jnp.arange(2)}
    mpx.Policy(keep=rule).cast_to_compute(tree)
    assert list(seen) == ["a/0", "b"]
    assert seen["b"] is tree["b"]


def test_array_argument_is_kept_only_by_its_whole_name():
    def dtypes(keep):
        seen = []

        def loss(w, norm_x):
            seen.extend([w["norm"].dtype, norm_x.dtype])
            return jnp.sum(w["norm"].astype(F32))

        take = mpx.value_and_grad(loss, policy=policy_for(*keep))
        take(mpx.NoLossScaling(), {"norm": jnp.ones(2)}, jnp.ones(2))
        return seen

    assert dtypes(["norm"]) == [F32, BF16]
    assert dtypes(["^norm_x$"]) == [BF16, F32]
    assert dtypes(["norm.*"]) == [F32, F32]


def test_collection_of_statistics_may_be_an_argument():
    def loss(params, batch_stats):
        assert (params.dtype, batch_stats["mean"].dtype) == (BF16, F32)
        return jnp.sum(params.astype(F32))

    take = mpx.value_and_grad(loss, policy="p=f32,c=bf16,o=f32")
    take(mpx.NoLossScaling(), jnp.ones(2), {"mean": jnp.ones(2)})
    policy_for().cast_function(loss)(jnp.ones(2), {"mean": jnp.ones(2)})


# Inputs whose variance is zero in f16, so that the derivative of `rsqrt` is taken at the
# epsilon, 1e-5: it is 1.6e7, beyond the range of f16.
SMALL = 1e-4 * normal(0, 8, 4)


def haiku_model(dtypes):
    import haiku as hk

    def forward(x):
        x = hk.LayerNorm(-1, True, True)(hk.Linear(4)(x))
        dtypes.append(x.dtype)
        return x

    model = hk.without_apply_rng(hk.transform(forward))
    return model.init(KEY, SMALL), model.apply, None


def linen_model(dtypes):
    import flax.linen as nn

    class Norm(nn.Module):
        @nn.compact
        def __call__(self, x):
            scale = self.param("scale", nn.initializers.ones, x.shape[-1:], F32)
            x = x - jnp.mean(x, axis=-1, keepdims=True)
            variance = jnp.mean(x * x, axis=-1, keepdims=True)
            return scale * x * jax.lax.rsqrt(variance + jnp.asarray(1e-5, x.dtype))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = Norm()(nn.Dense(4)(x))
            dtypes.append(x.dtype)
            return x

    apply: Any = Net().apply
    return Net().init(KEY, SMALL), apply, Norm


@pytest.mark.some(1)
@pytest.mark.standard_promotion
@pytest.mark.parametrize("make", [haiku_model, linen_model])
def test_norms_of_haiku_and_linen_modules_kept_by_their_type_run_in_f32(make):
    dtypes: list[np.dtype] = []
    params, apply, norm = make(dtypes)

    def loss(params, x):
        return jnp.mean(jnp.abs(apply(params, x).astype(F32) - 1))

    def grads(keep):
        low = mpx.Policy(compute_dtype="f16", keep=keep)
        return mpx.value_and_grad(loss, policy=low)(
            mpx.StaticLossScaling(1.0), params, SMALL
        )

    low = mpx.cast_to_float16((params, SMALL))
    by_hand = jax.grad(loss)(*low)
    assert not mpx.all_finite(by_hand)  # the premise: nan in f16, at any scale
    result = grads(() if norm is None else norm)
    assert result.finite
    assert set(dtypes[-1:]) == {F16}
    exact = jax.grad(loss)(params, SMALL)
    for ours, theirs in zip(*map(jax.tree.leaves, (result.grads, exact)), strict=True):
        # A few operations in f16 on inputs that are subnormal there: 1e-4 has 11 bits.
        np.testing.assert_allclose(ours, theirs, atol=0.05 * np.abs(theirs).max())


# --- running statistics ----------------------------------------------------------------


@pytest.mark.some(1)
@pytest.mark.parametrize("mode", ["ema", "batch"])
@pytest.mark.parametrize("jit", [False, True])
def test_batch_norm_and_its_state_stay_f32(mode, jit):
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, "batch", mode=mode)
    x = (100 + jnp.arange(8.0).reshape(4, 2)).astype(BF16)

    def run(norm, state, x):
        mapped = jax.vmap(
            norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None)
        )
        return mapped(x, state)

    run = eqx.filter_jit(run) if jit else run
    expected, wide_state = run(norm, state, x.astype(F32))

    def check(norm, state):
        # BatchNorm and State need no rule.
        assert norm.weight.dtype == F32
        out, new_state = run(norm, state, x)
        assert out.dtype == BF16
        assert_trees_equal(out, expected.astype(BF16))
        assert_trees_equal(new_state, wide_state)
        # And with the new statistics, as in evaluation.
        out, same = run(eqx.nn.inference_mode(norm), new_state, x)
        assert out.dtype == BF16
        assert_trees_equal(same, wide_state)

    low = mpx.Policy(compute_dtype="bf16")
    assert_trees_equal(low.cast_to_compute((norm, state))[1], state)
    low.cast_function(check)(norm, state)


def test_linen_batch_statistics_stay_f32():
    variables = {
        "params": {"norm": {"scale": jnp.ones(2)}, "batch_stats_like": jnp.ones(2)},
        "batch_stats": {"norm": {"mean": jnp.ones(2)}},
    }
    low = mpx.Policy(compute_dtype="bf16").cast_to_compute({"variables": variables})
    low = low["variables"]
    assert low["batch_stats"]["norm"]["mean"].dtype == F32
    assert low["params"]["norm"]["scale"].dtype == BF16
    assert low["params"]["batch_stats_like"].dtype == BF16
    top = mpx.Policy(compute_dtype="bf16").cast_to_compute(variables)
    assert top["batch_stats"]["norm"]["mean"].dtype == F32


@pytest.mark.standard_promotion
def test_nnx_batch_statistics_stay_f32():
    from flax import nnx

    norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    for tree in (norm, nnx.state(norm)):
        low = mpx.Policy(compute_dtype="bf16").cast_to_compute(tree)
        dtypes = {
            jax.tree_util.keystr(path, simple=True, separator="/").split("/")[
                0
            ]: leaf.dtype
            for path, leaf in jax.tree_util.tree_leaves_with_path(low)
        }
        assert (dtypes["mean"], dtypes["var"]) == (F32, F32)
        # A module runs in f32 as a whole; of a state nothing but the variables is known.
        assert dtypes["scale"] == (F32 if tree is norm else BF16)


def stateful(library) -> Any:
    """Returns a model with running statistics."""
    if library == "equinox":
        norm = eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, "batch", mode="ema")
        return {"model": (norm[0], eqx.nn.Linear(2, 2, key=KEY)), "state": norm[1]}
    if library == "linen":
        import flax.linen as nn

        norm = nn.BatchNorm(use_running_average=False)
        return norm.init(KEY, jnp.ones((2, 2)))
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self):
            self.embed = nnx.Embed(3, 2, rngs=nnx.Rngs(0))
            self.norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
            self.tied = self.embed

    return Net()


@pytest.mark.standard_promotion
@pytest.mark.parametrize("library", ["equinox", "linen", "nnx"])
def test_casting_to_param_makes_a_model_bf16_and_leaves_its_statistics_f32(library):
    model = stateful(library)
    low = mpx.Policy("bf16").cast_to_param(model)
    assert jax.tree.structure(low) == jax.tree.structure(model)
    dtypes = {"state": set(), "params": set()}
    for path, leaf in jax.tree_util.tree_leaves_with_path(low):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        is_state = re.search("^state|batch_stats|norm/(mean|var)", name)
        if is_floating(leaf):
            dtypes["state" if is_state else "params"].add(leaf.dtype)
    assert dtypes == {"state": {F32}, "params": {BF16}}
    if library == "nnx":
        assert low.tied is low.embed  # as in the model
        assert low.embed.embedding is not model.embed.embedding
        assert model.embed.embedding[...].dtype == F32
    half = mpx.cast_to_float16(low)
    assert_trees_equal(mpx.Policy("f32").cast_to_param(half), mpx.cast_to_float32(half))


# --- keep: what ran before does not matter ----------------------------------------------


def test_types_that_another_model_called_are_unknown_to_this_one():
    def loss(model, x):
        return jnp.mean(jax.vmap(model)(x).astype(F32) ** 2)

    take = mpx.value_and_grad(loss, policy=policy_for(eqx.nn.LayerNorm))
    linear = eqx.nn.Linear(2, 2, key=KEY)
    with_norm = eqx.nn.Sequential([linear, eqx.nn.LayerNorm(2, use_weight=False)])
    take(mpx.NoLossScaling(), with_norm, jnp.ones((3, 2)))
    for _ in range(2):
        with pytest.raises(ValueError, match="LayerNorm.* in `keep` selects nothing"):
            take(mpx.NoLossScaling(), linear, jnp.ones((3, 2)))


def test_linen_type_inside_a_jitted_function_is_seen_in_each_call():
    import flax.linen as nn

    model = nn.Sequential([nn.Dense(2), nn.LayerNorm(use_bias=False, use_scale=False)])
    params = model.init(KEY, jnp.ones((3, 2)))
    apply = jax.jit(model.apply)

    def take(params):
        def loss(params, x):
            return jnp.mean(apply(params, x).astype(F32) ** 2)

        found = mpx.value_and_grad(loss, policy=policy_for(nn.LayerNorm))
        return found(mpx.NoLossScaling(), params, jnp.ones((3, 2)))

    first, second = take(params), take(params)
    assert_trees_equal(first.grads, second.grads)
