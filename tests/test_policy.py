"""Policies: their grammar, their casts, and what stays in full precision."""

import dataclasses
import inspect
import pickle
import re
import threading
from typing import Any

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import mpx
from mpx._policy import as_policy
from mpx._tree import is_floating
from mpx.testing import assert_trees_equal, ulp_distance

F16, BF16, F32, F64 = (np.dtype(jnp.dtype(n)) for n in ("f2", "bfloat16", "f4", "f8"))
KEY = jax.random.key(0)


def fields(policy):
    return (
        policy.param_dtype,
        policy.compute_dtype,
        policy.output_dtype,
        policy.grad_dtype,
        policy.reduce_dtype,
    )


# --- construction and grammar ----------------------------------------------------------


def test_defaults_are_f32_around_half_precision():
    assert fields(mpx.Policy()) == (F32, None, F32, None, None)
    assert mpx.Policy().keep == ()
    assert mpx.Policy().resolved_compute_dtype() == F16
    with mpx.half_precision("bf16"):
        assert mpx.Policy().resolved_compute_dtype() == BF16


def test_dtypes_are_given_as_names_or_dtypes():
    policy = mpx.Policy(
        "f32", "bf16", jnp.float16, grad_dtype=np.float64, reduce_dtype=F16
    )
    assert fields(policy) == (F32, BF16, F16, F64, F16)
    assert all(isinstance(dtype, np.dtype) for dtype in fields(policy))
    assert mpx.Policy(compute_dtype="half") == mpx.Policy()


GRAMMAR = {
    "p=f32,c=bf16,o=f32": (F32, BF16, F32, None, None),
    "p=f32, c=bf16, o=f32": (F32, BF16, F32, None, None),
    "  p = f32 ,c= bf16 ": (F32, BF16, BF16, None, None),
    "params=float32,compute=float16,output=float64": (F32, F16, F64, None, None),
    "p=f32,c=f16,o=f32,g=f16,r=bf16": (F32, F16, F32, F16, BF16),
    "grad=f64,reduce=f32": (F32, F32, F32, F64, F32),
    "c=bf16": (F32, BF16, BF16, None, None),  # parameters are f32, output follows
    "p=bf16": (BF16, BF16, BF16, None, None),  # compute follows the parameters
    "o=f32,p=f16": (F16, F16, F32, None, None),
    "bf16": (BF16, BF16, BF16, None, None),
    " float32 ": (F32, F32, F32, None, None),
    "full": (F32, F32, F32, None, None),
    "p=full,c=half,o=full": (F32, None, F32, None, None),
    "half": (F16, None, F16, None, None),
    "c=half": (F32, None, F16, None, None),
    "p=half": (F16, None, F16, None, None),
    "c=bf16,g=half,r=half": (F32, BF16, BF16, F16, F16),
    # The names of other frameworks.
    "bf16-mixed": (F32, BF16, F32, None, None),
    "mixed_bfloat16": (F32, BF16, F32, None, None),
    "16-mixed": (F32, F16, F32, None, None),
    "fp16-mixed": (F32, F16, F32, None, None),
    "mixed_float16": (F32, F16, F32, None, None),
    "bf16-true": (BF16, BF16, BF16, None, None),
    "16-true": (F16, F16, F16, None, None),
    "fp16-true": (F16, F16, F16, None, None),
    "32-true": (F32, F32, F32, None, None),
    "64-true": (F64, F64, F64, None, None),
    "fp16": (F16, F16, F16, None, None),
    "p=fp32,c=fp16": (F32, F16, F16, None, None),
}


@pytest.mark.parametrize(("text", "expected"), GRAMMAR.items(), ids=GRAMMAR)
def test_string_gives_the_policy(text, expected):
    assert fields(mpx.get_policy(text)) == expected


def test_half_in_a_string_is_the_configured_one():
    with mpx.half_precision("bf16"):
        policy = mpx.get_policy("p=half,c=half,g=half,r=half")
        assert fields(policy) == (BF16, None, BF16, BF16, BF16)
        assert policy.resolved_compute_dtype() == BF16


dtypes = st.sampled_from([F16, BF16, F32, F64])
optional_dtypes = st.none() | dtypes


@hypothesis.given(
    dtypes, optional_dtypes, dtypes, optional_dtypes, optional_dtypes, st.booleans()
)
def test_string_of_a_policy_gives_it_back(param, compute, output, grad, reduce, bf16):
    keep = (eqx.nn.LayerNorm, "head")
    policy = mpx.Policy(
        param, compute, output, grad_dtype=grad, reduce_dtype=reduce, keep=keep
    )
    with mpx.half_precision("bf16" if bf16 else "f16"):
        again = mpx.get_policy(str(policy), keep=keep)
    assert again == policy
    assert hash(again) == hash(policy)
    assert str(again) == str(policy)


def test_string_uses_short_names_and_leaves_out_what_is_not_set():
    assert str(mpx.Policy()) == "p=f32,c=half,o=f32"
    policy = mpx.Policy("f64", "bf16", "f16", grad_dtype="f32", reduce_dtype="bf16")
    assert str(policy) == "p=f64,c=bf16,o=f16,g=f32,r=bf16"


BAD_PARTS = {
    "x=f32": "x=f32",
    "p=f32,q=bf16": "q=bf16",
    "p=": "p=",
    "=f32": "=f32",
    "P=f32": "P=f32",
    "p=f32,": "",
    "p=f32,bf16": "bf16",
    "p=f32,,c=f16": "",
}
BAD_DTYPES = {
    "": "",
    "nonsense": "nonsense",
    "f8": "f8",  # f64 for NumPy
    "p=int32": "int32",
    "c=e4m3": "e4m3",
    "p=f32;c=f16": "f32;c=f16",
    "p=f32=f16": "f32=f16",
}


@pytest.mark.parametrize(("text", "part"), BAD_PARTS.items(), ids=repr)
def test_error_quotes_the_part_that_is_not_understood(text, part):
    message = (
        f"{part!r} in the policy {text!r} is not understood. Write `key=dtype` with a key "
        "among p, c, o, g, r (or params, compute, output, grad, reduce), for example "
        '"p=f32,c=bf16,o=f32".'
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        mpx.get_policy(text)


@pytest.mark.parametrize(("text", "dtype"), BAD_DTYPES.items(), ids=repr)
def test_error_quotes_the_unknown_dtype(text, dtype):
    message = (
        f"Unknown dtype {dtype!r} in the policy {text!r}. Use f16, bf16, f32, f64, their "
        "long names, `half` or `full`; or a whole policy such as "
        '"bf16-mixed", which is "p=f32,c=bf16,o=f32".'
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        mpx.get_policy(text)


@pytest.mark.parametrize("text", ["p=f32,p=f16", "p=f32,c=f16,p=f32"])
def test_error_names_the_key_that_is_given_twice(text):
    message = f"The policy {text!r} gives `p` twice."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        mpx.get_policy(text)
    with pytest.raises(ValueError, match="gives `params` twice"):
        mpx.get_policy("p=f32,params=f32")


@pytest.mark.parametrize(
    "name",
    ["param_dtype", "compute_dtype", "output_dtype", "grad_dtype", "reduce_dtype"],
)
@pytest.mark.parametrize("wrong", ["int32", "f8", jnp.int8, jnp.float8_e4m3fn], ids=str)
def test_error_names_the_field_with_a_wrong_dtype(name, wrong):
    message = (
        f"`{name}` must be a floating dtype of at least 16 bits (f16, bf16, f32 or f64), "
        f"but {wrong!r} was given."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        mpx.Policy(**{name: wrong})


def test_storage_and_output_dtypes_cannot_be_left_open():
    # NumPy would take `None` for f64. Without the type checks of the test run.
    make = inspect.unwrap(mpx.Policy.__init__)
    for name in ("param_dtype", "output_dtype"):
        with pytest.raises((TypeError, ValueError)):
            make(object.__new__(mpx.Policy), **{name: None})


@pytest.mark.parametrize("policy", [3, jnp.float16, ("p=f32",)])
def test_error_tells_what_a_policy_can_be(policy):
    message = (
        '`policy` must be an `mpx.Policy` or a string such as "p=f32,c=bf16,o=f32", but '
        f"{policy!r} was given."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        inspect.unwrap(as_policy)(policy)


@pytest.mark.parametrize("policy", [None, 3, jnp.float16])
def test_get_policy_tells_what_it_takes(policy):
    message = (
        f"`policy` must be an `mpx.Policy` or a string .* but {policy!r} was given"
    )
    with pytest.raises(TypeError, match=message):
        inspect.unwrap(mpx.get_policy)(policy)


def test_get_policy_of_a_policy_is_that_policy():
    policy = mpx.Policy(keep="x")
    assert mpx.get_policy(policy) is policy
    with pytest.raises(TypeError, match="`keep` goes with a string"):
        mpx.get_policy(policy, keep="y")


def test_string_or_nothing_can_stand_for_a_policy():
    assert as_policy(None) == mpx.Policy()
    assert as_policy("c=bf16") == mpx.get_policy("c=bf16")
    policy = mpx.Policy(keep="x")
    assert as_policy(policy) is policy


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("bf16-mixed", "bfloat16"), ("mixed_float16", "float16"), ("fp16", "float16")],
)
def test_amp_takes_the_names_of_other_frameworks(name, dtype):
    program = jax.make_jaxpr(mpx.amp(jnp.dot, dtype=name))(*[jnp.ones((2, 2))] * 2)
    assert f"{'bf16' if dtype == 'bfloat16' else 'f16'}[2,2]" in str(program)


# --- a static value --------------------------------------------------------------------


def test_policies_compare_and_hash_by_value():
    first = mpx.Policy("f32", "bf16", "f32", keep=[eqx.nn.LayerNorm, "norm"])
    same = mpx.Policy(F32, jnp.bfloat16, "float32", keep=(eqx.nn.LayerNorm, "norm"))
    assert first == same
    assert hash(first) == hash(same)
    others = [
        mpx.Policy("f32", "f16", "f32", keep=first.keep),
        mpx.Policy("f32", "bf16", "f32"),
        mpx.Policy("f32", "bf16", "f32", grad_dtype="f32", keep=first.keep),
        first.with_output_dtype("bf16"),
    ]
    assert len({first, same, *others}) == 5


def test_policy_cannot_be_changed_but_copied_and_pickled():
    policy = mpx.Policy(compute_dtype="bf16", keep=[eqx.nn.LayerNorm, "norm"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.param_dtype = F16  # pyright: ignore[reportAttributeAccessIssue]
    assert pickle.loads(pickle.dumps(policy)) == policy
    changed = dataclasses.replace(policy, compute_dtype="f16")
    assert fields(changed) == (F32, F16, F32, None, None)
    assert changed.keep == policy.keep


def test_with_output_dtype_changes_only_the_output():
    policy = mpx.Policy(
        "f64", "bf16", "f32", grad_dtype="f16", reduce_dtype="f32", keep="x"
    )
    changed = policy.with_output_dtype("bf16")
    assert fields(changed) == (F64, BF16, BF16, F16, F32)
    assert changed.keep == ("x",)
    with pytest.raises(ValueError, match="`output_dtype` must be a floating dtype"):
        policy.with_output_dtype("int8")


def test_policy_is_a_static_argument_of_jit():
    traces = []

    def forward(policy, x):
        traces.append(policy)
        return policy.cast_to_compute(x)

    compiled = jax.jit(forward, static_argnums=0)
    x = jnp.ones(2)
    assert compiled(mpx.Policy(compute_dtype="bf16"), x).dtype == BF16
    assert compiled(mpx.get_policy("p=f32,c=bf16,o=f32"), x).dtype == BF16
    assert len(traces) == 1  # equal policies share a program
    assert compiled(mpx.Policy(compute_dtype="f16"), x).dtype == F16
    assert len(traces) == 2


# --- casts -----------------------------------------------------------------------------


def test_policy_casts_floating_leaves_to_its_dtypes():
    policy = mpx.Policy("bf16", "f16", "f32")
    tree = {
        "w": jnp.ones(2),
        "h": jnp.ones(2, BF16),
        "np": np.ones(2),
        "n": 3,
        "k": KEY,
    }
    for cast, dtype in [
        (policy.cast_to_param, BF16),
        (policy.cast_to_compute, F16),
        (policy.cast_to_output, F32),
    ]:
        after = cast(tree)
        assert [after[name].dtype for name in ("w", "h", "np")] == [dtype] * 3
        assert after["n"] is tree["n"]
        assert after["k"] is tree["k"]
        assert cast({"none": None, "s": "x"}) == {"none": None, "s": "x"}


def test_shapes_without_data_can_be_cast():
    policy = mpx.Policy(compute_dtype="bf16", keep="norm")
    struct = jax.ShapeDtypeStruct((2,), F32)
    low = policy.cast_to_compute({"w": struct, "norm": struct})
    assert low == {"w": jax.ShapeDtypeStruct((2,), BF16), "norm": struct}


@pytest.mark.parametrize(
    "scaling", [mpx.DynamicLossScaling(2.0**15), mpx.StaticLossScaling(3.0)]
)
def test_loss_scaling_keeps_f32_under_every_cast(scaling):
    policy = mpx.Policy("bf16", "f16", "bf16")
    state = {"w": jnp.ones(2), "scaling": scaling}
    for cast in (policy.cast_to_param, policy.cast_to_compute, policy.cast_to_output):
        assert cast(state)["scaling"] is scaling


# --- keep: names and predicates --------------------------------------------------------


class Block(eqx.Module):
    norm: Any
    weight: Any
    activation: Any = jax.nn.relu
    name: str = eqx.field(default="block", static=True)

    def __call__(self, x):
        return self.norm(self.weight * x)


def model_tree():
    blocks = [Block({"weight": jnp.ones(2)}, jnp.ones(2)) for _ in range(2)]
    return {"model": {"layers": blocks, "head": jnp.ones(2), "steps": jnp.arange(2)}}


RULES = {
    "nothing": ((), set()),
    "word": ("norm", {"layers/0/norm/weight", "layers/1/norm/weight"}),
    "alternatives": (
        "norm|head",
        {"layers/0/norm/weight", "layers/1/norm/weight", "head"},
    ),
    "searched": (r"0/.*weight", {"layers/0/norm/weight", "layers/0/weight"}),
    "anchored": (r"^model/head$", {"head"}),
    "anchored_elsewhere": (r"^head$", set()),
    "several": ([r"head", r"layers/1/weight"], {"head", "layers/1/weight"}),
    "predicate": (
        lambda name, _leaf: "layers/1" in name,
        {"layers/1/norm/weight", "layers/1/weight"},
    ),
    "predicate_on_leaf": (lambda _name, leaf: leaf.ndim == 2, set()),
    "mixed": (
        [lambda name, _: name.endswith("head"), "0/norm"],
        {"head", "layers/0/norm/weight"},
    ),
    "type": (
        Block,
        {
            "layers/0/norm/weight",
            "layers/0/weight",
            "layers/1/norm/weight",
            "layers/1/weight",
        },
    ),
    "builtin_type": (
        dict,
        {
            "layers/0/norm/weight",
            "layers/0/weight",
            "layers/1/norm/weight",
            "layers/1/weight",
            "head",
        },
    ),
}


@pytest.mark.parametrize(("keep", "kept"), RULES.values(), ids=RULES)
def test_rule_keeps_the_leaves_it_names(keep, kept):
    tree = model_tree()
    low = mpx.Policy(compute_dtype="bf16", keep=keep).cast_to_compute(tree)
    names = {
        jax.tree_util.keystr(path, simple=True, separator="/").removeprefix(
            "model/"
        ): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(low)
        if getattr(leaf, "dtype", None) in (F32, BF16)
    }
    assert len(names) == 5
    assert {name for name, leaf in names.items() if leaf.dtype == F32} == kept
    assert low["model"]["steps"] is tree["model"]["steps"]
    # Storage and output are not computation.
    stored = mpx.Policy("bf16", keep=keep).cast_to_param(tree)
    assert stored["model"]["head"].dtype == BF16
    assert (
        mpx.Policy(output_dtype="bf16", keep=keep)
        .cast_to_output(tree)["model"]["head"]
        .dtype
        == BF16
    )


def test_predicate_sees_name_and_leaf_of_floating_leaves_only():
    seen = {}

    def rule(name, leaf):
        seen[name] = leaf
        return False

    tree = {"a": [jnp.ones(2), 3, KEY, "s"], "b": np.ones(3), "n": jnp.arange(2)}
    mpx.Policy(keep=rule).cast_to_compute(tree)
    assert list(seen) == ["a/0", "b"]
    assert seen["b"] is tree["b"]


@pytest.mark.parametrize("rule", [3, None, 2.5, b"x"], ids=repr)
def test_error_quotes_a_rule_of_another_kind(rule):
    message = (
        "A `keep` rule is a node type, a regular expression for leaf names or a "
        f"predicate `(name, leaf) -> bool`, but {rule!r} was given."
    )
    # An iterator: the type checks of the test run cannot look into it.
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        mpx.Policy(keep=iter(["norm", rule]))


def test_rule_that_is_no_rule_is_refused_alone_too():
    from mpx._keep import parse_keep

    with pytest.raises(
        TypeError, match="A `keep` rule is a node type.* but 3 was given"
    ):
        inspect.unwrap(parse_keep)(3)


def test_error_quotes_an_expression_that_does_not_compile():
    message = (
        r"The `keep` rule '(' is not a regular expression: missing ), unterminated"
    )
    for make in (mpx.Policy, lambda keep: mpx.get_policy("c=bf16", keep=keep)):
        with pytest.raises(ValueError, match=re.escape(message)):
            make(keep="(")


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


# --- keep: one meaning everywhere -------------------------------------------------------


def kept_names(keep, argument):
    """Returns what a rule keeps, cast by hand and as an argument of this name."""
    model = {"head": jnp.ones(2), "norm": {"scale": jnp.ones(2)}, "w": jnp.ones(2)}
    policy, seen = mpx.Policy(compute_dtype="bf16", keep=keep), []
    body = f"lambda {argument}, x: note({argument})"
    loss = eval(body, {"note": lambda low: seen.append(low) or jnp.float32(0)})
    mpx.value_and_grad(loss, policy=policy)(mpx.NoLossScaling(), model, jnp.ones(2))
    return [
        {
            jax.tree_util.keystr(path, simple=True, separator="/")
            for path, leaf in jax.tree_util.tree_leaves_with_path(low)
            if leaf.dtype == F32
        }
        for low in (policy.cast_to_compute(model), seen[0])
    ]


@pytest.mark.parametrize("argument", ["model", "norm_flow", "head", "w"])
@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ("^head", {"head"}),
        ("norm", {"norm/scale"}),
        ("^w$", {"w"}),
        (lambda name, _: name.startswith("norm/"), {"norm/scale"}),
    ],
    ids=["anchored", "word", "whole name", "predicate"],
)
def test_rule_means_the_same_by_hand_and_in_an_argument_of_any_name(
    keep, kept, argument
):
    assert kept_names(keep, argument) == [kept, kept]


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


@pytest.mark.parametrize(
    "rule",
    ["^model/head", eqx.nn.Linear, lambda name, leaf: False],
    ids=["path", "type", "predicate"],
)
def test_rule_that_matches_nothing_warns_at_the_line_of_the_caller(rule):
    class Unused(eqx.nn.GroupNorm):
        pass

    rule = Unused if isinstance(rule, type) else rule
    model = {"head": jnp.ones(2)}
    take = mpx.value_and_grad(
        lambda model: jnp.sum(model["head"].astype(F32)),
        policy=policy_for("head", rule),
    )
    with pytest.warns(RuntimeWarning, match="matches nothing: no argument") as caught:
        jax.jit(take)(mpx.NoLossScaling(), model)
    (warning,) = caught
    assert repr(rule) in str(warning.message)
    assert "Names are paths inside an argument" in str(warning.message)
    assert warning.filename == __file__


# Inputs whose variance is zero in f16, so that the derivative of `rsqrt` is taken at the
# epsilon, 1e-5: it is 1.6e7, beyond the range of f16.
SMALL = 1e-4 * jax.random.normal(KEY, (8, 4))


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
