"""Casting trees and functions: what changes dtype, what stays, and by how much."""

import dataclasses
import functools
import inspect
import re
from typing import Any, NamedTuple

import equinox as eqx
import hypothesis
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from mpx._jax._formats import FORMATS, is_float_dtype
from mpx.testing import assert_trees_equal
from numerics import ulp_distance

F16, BF16, F32, F64 = (np.dtype(jnp.dtype(n)) for n in ("f2", "bfloat16", "f4", "f8"))
KEY = jax.random.key(0)


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Batch:
    inputs: Any
    label: Any


class Layer(eqx.Module):
    weight: Any
    bias: Any = None
    activation: Any = jnp.tanh
    name: str = eqx.field(default="layer", static=True)


def is_floating(leaf):
    dtype = getattr(leaf, "dtype", None)
    arrays = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct
    return (
        isinstance(leaf, arrays)
        and isinstance(dtype, np.dtype)
        and is_float_dtype(dtype)
    )


def assert_only_floats_were_cast(before, after, dtype):
    """Structure and other leaves are the same; floating ones have the dtype."""
    assert jax.tree.structure(after) == jax.tree.structure(before)
    leaves = jax.tree.leaves(before)
    assert any(map(is_floating, leaves)), "nothing is tested"
    for old, new in zip(leaves, jax.tree.leaves(after), strict=True):
        if is_floating(old):
            assert new.dtype == dtype
            assert new.shape == old.shape
            with np.errstate(over="ignore"):
                expected = np.asarray(old).astype(dtype)
            assert np.all(ulp_distance(new, expected) == 0)
        else:
            assert new is old


# --- which leaves ----------------------------------------------------------------------

CASTS = {
    "float16": (mpx.cast_to_float16, F16),
    "bfloat16": (mpx.cast_to_bfloat16, BF16),
    "float32": (mpx.cast_to_float32, F32),
    "full": (mpx.cast_to_full_precision, F32),
    "half": (mpx.cast_to_half_precision, F16),
    "tree_name": (functools.partial(mpx.cast_tree, dtype="bf16"), BF16),
    "tree_dtype": (functools.partial(mpx.cast_tree, dtype=jnp.float16), F16),
}

ones = functools.partial(np.ones, (2,))
FLOATING = {
    "f16": jnp.ones(2, jnp.float16),
    "bf16": jnp.ones(2, jnp.bfloat16),
    "f32": jnp.ones(2),
    "scalar": jnp.float32(1),
    "zero_size": jnp.ones((0, 2)),
    "numpy_f16": ones(np.float16),
    "numpy_bf16": ones(ml_dtypes.bfloat16),
    "numpy_f32": ones(np.float32),
    "numpy_f64": ones(np.float64),
    "numpy_big_endian": ones(">f4"),
    "numpy_zero_size": np.ones((2, 0)),
    "numpy_scalar_f32": np.float32(1),
    "numpy_scalar_f64": np.float64(1),
}
UNTOUCHED = {
    "int32": jnp.arange(2),
    "int8": jnp.arange(2, dtype=jnp.int8),
    "uint16": jnp.arange(2, dtype=jnp.uint16),
    "int4": jnp.ones(2, jnp.int4),
    "bool": jnp.array([True]),
    "complex64": jnp.array([1j]),
    "e4m3": jnp.ones(2, jnp.float8_e4m3fn),
    "e5m2": jnp.ones(2, jnp.float8_e5m2),
    "key": KEY,
    "keys": jax.random.split(KEY),
    "raw_key": jax.random.PRNGKey(0),
    "float0": np.zeros(2, jax.dtypes.float0),
    "numpy_int64": np.arange(2),
    "numpy_bool": np.array(True),
    "numpy_complex128": np.array([1j]),
    "numpy_e4m3": ones(ml_dtypes.float8_e4m3fn),
    "numpy_string": np.array("x"),
    "numpy_object": np.array([None, 1.0], dtype=object),
    "numpy_scalar_int": np.int32(1),
    "python_int": 3,
    "python_float": 2.5,
    "python_complex": 1j,
    "python_bool": True,
    "string": "half",
    "bytes": b"x",
    "function": jnp.sin,
    "lambda": lambda x: x,
    "class": dict,
    "dtype": jnp.dtype("float32"),
    "object": object(),
    "int_struct": jax.ShapeDtypeStruct((2,), jnp.int32),
    "float8_struct": jax.ShapeDtypeStruct((2,), jnp.float8_e5m2),
    "key_struct": jax.eval_shape(lambda: jax.random.key(0)),
}


@pytest.mark.parametrize(("cast", "dtype"), CASTS.values(), ids=CASTS)
@pytest.mark.parametrize("leaf", FLOATING.values(), ids=FLOATING)
def test_floating_leaf_is_cast(leaf, cast, dtype):
    after = cast({"x": [leaf]})["x"][0]
    assert after.dtype == dtype
    assert after.shape == leaf.shape
    assert isinstance(after, jax.Array) == isinstance(leaf, jax.Array)
    assert np.all(np.asarray(after, np.float32) == 1)
    assert_trees_equal(cast(leaf), after)  # a bare leaf is a tree too


@pytest.mark.parametrize("leaf", UNTOUCHED.values(), ids=UNTOUCHED)
def test_other_leaf_comes_back_as_the_same_object(leaf):
    for cast, dtype in CASTS.values():
        after = cast({"x": [leaf], "w": jnp.ones(2, BF16)})
        assert after["x"][0] is leaf
        assert after["w"].dtype == dtype
        assert cast(leaf) is leaf


@pytest.mark.parametrize("leaf", FLOATING.values(), ids=FLOATING)
def test_leaf_that_has_the_dtype_is_not_copied(leaf):
    assert mpx.cast_tree(leaf, leaf.dtype.newbyteorder("=")) is leaf or (
        not leaf.dtype.isnative
    )


@pytest.mark.parametrize("tree", [None, {}, [], (), {"a": [None, ()]}, Pair(None, [])])
def test_tree_without_leaves_comes_back_equal(tree):
    after = mpx.cast_to_float16(tree)
    assert after == tree
    assert type(after) is type(tree)


def test_f64_arrays_are_cast_like_the_others():
    with jax.enable_x64():
        tree = {"w": jnp.ones(2, jnp.float64), "i": jnp.arange(2), "c": jnp.array([1j])}
        assert tree["w"].dtype == F64  # the premise
        for cast, dtype in CASTS.values():
            assert_only_floats_were_cast(tree, cast(tree), dtype)
            assert_only_floats_were_cast(tree, mpx.cast_tree(tree, "f64"), F64)
        low = mpx.cast_tree(tree, "f16")
        assert_only_floats_were_cast(low, mpx.cast_tree(low, "f64"), F64)
        assert jax.jit(mpx.cast_to_float16)(tree)["w"].dtype == F16


def test_f64_without_x64_is_only_for_numpy():
    assert mpx.cast_tree(np.ones(2, np.float32), "f64").dtype == F64
    with pytest.warns(UserWarning, match="requested dtype float64"):
        assert mpx.cast_tree(jnp.ones(2), "f64").dtype == F32


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
def test_struct_is_cast_like_the_array_it_describes(dtype):
    tree = {"w": jnp.ones((2, 3)), "n": jnp.arange(2), "k": KEY, "s": jnp.asarray(1.0)}
    with jax.enable_x64(dtype == F64):
        structs = jax.eval_shape(lambda: tree)
        assert structs["s"].weak_type  # the premise: casting must end that
        after = mpx.cast_tree(structs, dtype)
        assert after == jax.eval_shape(lambda: mpx.cast_tree(tree, dtype))
    assert after["w"].dtype == dtype
    assert after["n"] is structs["n"]
    assert after["k"] is structs["k"]


@pytest.mark.parametrize(
    "dtype", [int, "int32", jnp.float8_e4m3fn, "e5m2", "f8", "half", {"w": 1}]
)
def test_casting_to_anything_but_a_float_is_refused(dtype):
    message = (
        "`dtype` must be a floating dtype of at least 16 bits (f16, bf16, f32 or f64), "
        f"but {dtype!r} was given."
    )
    for function in (mpx.cast_tree, mpx.cast_function):
        with pytest.raises(ValueError, match=re.escape(message)):
            function(jnp.sin, dtype)
    for function in (mpx.force_full_precision, functools.partial(mpx.cast_function)):
        with pytest.raises(ValueError, match=re.escape(message)):
            function(jnp.sin, return_dtype=dtype)


def test_casting_to_no_dtype_is_refused():
    # NumPy would take `None` for f64. Without the type checks of the test run.
    with pytest.raises((ValueError, TypeError)):
        mpx.cast_tree(np.ones(2), None)


# --- transformations -------------------------------------------------------------------


def test_cast_works_under_jit_vmap_grad_and_scan():
    x = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    low = jax.jit(jax.vmap(mpx.cast_to_bfloat16))(x)
    assert_trees_equal(low, x.astype(BF16))

    grad = jax.grad(lambda x: mpx.cast_to_float16(x).sum().astype(F32))(x)
    assert_trees_equal(grad, jnp.ones((2, 2)))

    def step(carry, row):
        return mpx.cast_like(
            mpx.cast_to_float16(carry) + mpx.cast_to_float16(row), carry
        ), row

    total, _ = jax.lax.scan(step, jnp.zeros(2), x)
    assert_trees_equal(total, jnp.array([4.0, 6.0]))


@pytest.mark.parametrize(
    ("axis_type", "jit", "spec"),
    [
        (AxisType.Auto, False, P("a", "b")),
        (AxisType.Auto, True, P(None, "b")),
        (AxisType.Explicit, False, P()),
        (AxisType.Explicit, True, P("a", "b")),
    ],
    ids=str,
)
def test_cast_keeps_the_sharding(axis_type, jit, spec):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(axis_type, axis_type))
    sharding = NamedSharding(mesh, spec)
    x = jax.device_put(jnp.ones((8, 4)), sharding)
    cast = jax.jit(mpx.cast_to_bfloat16) if jit else mpx.cast_to_bfloat16
    after = cast({"w": x})["w"]
    assert after.dtype == BF16
    assert after.sharding.is_equivalent_to(sharding, 2)
    assert len(after.sharding.device_set) == 8
    if axis_type == AxisType.Explicit:
        assert jax.typeof(after).sharding.spec == jax.typeof(x).sharding.spec

    struct = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    low = mpx.cast_to_bfloat16(struct)
    assert (low.dtype, low.sharding) == (BF16, sharding)


# --- where= and cast_like --------------------------------------------------------------


def test_where_chooses_by_name_and_leaf():
    tree = {"layers": [Layer(jnp.ones(2), jnp.zeros(2)), Layer(jnp.ones(3))], "n": 3}
    seen = []

    def where(name, leaf):
        seen.append(name)
        return name.endswith("weight") and leaf.shape == (2,)

    after = mpx.cast_tree(tree, "bf16", where=where)
    assert seen == ["layers/0/weight", "layers/0/bias", "layers/1/weight"]
    assert after["layers"][0].weight.dtype == BF16
    assert after["layers"][0].bias is tree["layers"][0].bias
    assert after["layers"][1].weight is tree["layers"][1].weight


def test_cast_like_restores_the_dtypes_of_a_reference():
    reference = {
        "a": jnp.ones(2),
        "b": np.ones(2, F16),
        "c": jax.ShapeDtypeStruct((2,), BF16),
        "n": jnp.arange(2),
        "s": "x",
        "k": KEY,
    }
    tree = {
        "a": jnp.full(2, 3.0, F16),
        "b": jnp.full(2, 3.0),
        "c": np.full(2, 3.0),
        "n": jnp.full(2, 3.0),  # the reference has no floating dtype to give
        "s": "y",
        "k": jax.random.key(1),
    }
    after = mpx.cast_like(tree, reference)
    assert [after[name].dtype for name in "abcn"] == [F32, F16, BF16, F32]
    assert all(np.asarray(after[name], F32).tolist() == [3, 3] for name in "abcn")
    assert all(after[name] is tree[name] for name in "nsk")


def test_cast_like_names_the_leaves_that_are_missing():
    message = (
        "`cast_like` needs two trees of the same structure, but they differ: only in "
        "the first: ['a/0'], only in the second: ['b']."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        mpx.cast_like({"a": [1]}, {"b": 1})


def test_cast_like_undoes_a_cast_of_a_training_state():
    state = {"w": jnp.ones(2), "m": jnp.ones(2, BF16), "step": 3, "none": None}
    low = mpx.cast_to_float16(state)
    assert low["m"].dtype == F16
    assert_trees_equal(mpx.cast_like(low, state), state)


# --- values ----------------------------------------------------------------------------


def rounded(x, name):
    """Rounds f64 numbers to a format, to nearest and even, by arithmetic on exponents."""
    form = FORMATS[name]
    x = np.asarray(x, np.float64)
    with np.errstate(invalid="ignore"):
        _, exponent = np.frexp(np.where(np.isfinite(x), x, 1))
    lowest = np.frexp(form.tiny)[1]
    quantum = np.ldexp(1.0, np.maximum(exponent, lowest) - 1 - form.mantissa)
    result = np.rint(x / quantum) * quantum  # both operations are exact
    result = np.where(np.abs(result) > form.max, np.copysign(np.inf, x), result)
    return np.where(np.isfinite(x), result, x)


def special_f32(form):
    """Zeros, infinities, NaN, and the f32 numbers at and next to each tie."""
    top = form.max / (2 - form.eps)  # the largest power of two
    ties = [
        1 + form.eps / 2,
        1 + 1.5 * form.eps,
        form.smallest / 2,
        form.smallest * 1.5,
    ]
    ties += [form.tiny * (1 - form.eps / 2), top * (2 - 1.5 * form.eps)]
    ties += [top * (2 - form.eps / 2)]  # goes to infinity
    ties = np.array(ties, np.float32)
    near = [
        np.nextafter(ties, np.float32(0)),
        ties,
        np.nextafter(ties, np.float32(3.4e38)),
    ]
    plain = np.array([0, 1, 1e-45, 1e-38, 1e-8, 65504, form.max, 3e38, np.inf])
    positive = np.concatenate([plain.astype(np.float32), *near])
    return np.concatenate([positive, -positive, np.float32([np.nan])])


@pytest.mark.parametrize("name", ["f16", "bf16"])
@pytest.mark.parametrize("where", ["jax", "jit", "numpy"])
def test_special_f32_numbers_are_rounded_to_nearest_even(name, where):
    x = special_f32(FORMATS[name])
    cast = functools.partial(mpx.cast_tree, dtype=name)
    low = {"jax": lambda: cast(jnp.asarray(x)), "jit": lambda: jax.jit(cast)(x)}.get(
        where, lambda: cast(x)
    )()
    expected = rounded(x, name)
    assert np.isinf(expected).sum() > np.isinf(x).sum()  # some overflow
    got = np.asarray(low).astype(np.float64)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.signbit(got[:-1]), np.signbit(expected[:-1]))


@hypothesis.settings(max_examples=60)
@hypothesis.given(hnp.arrays(np.float32, 64, elements={"allow_subnormal": True}))
@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_any_f32_number_is_rounded_to_nearest_even(name, x):
    expected = rounded(x, name)
    for leaf in (x, jnp.asarray(x)):
        low = np.asarray(mpx.cast_tree(leaf, name)).astype(np.float64)
        np.testing.assert_array_equal(low, expected)


@hypothesis.settings(max_examples=60)
@hypothesis.given(hnp.arrays(np.float64, 64, elements={"allow_nan": False}))
@pytest.mark.parametrize("name", ["f16", "bf16", "f32"])
def test_any_f64_number_is_rounded_within_half_an_ulp(name, x):
    form, f32 = FORMATS[name], FORMATS["f32"]
    # bf16 is reached through f32: half an ulp of f32 more.
    relative = form.eps / 2 + (f32.eps / 2 if name == "bf16" else 0)
    # XLA on a CPU flushes f32 numbers below the normal ones to zero.
    absolute = max(form.smallest / 2, f32.tiny)
    with jax.enable_x64():
        for leaf in (x, jnp.asarray(x)):
            low = np.asarray(mpx.cast_tree(leaf, name)).astype(np.float64)
            normal = np.abs(x) <= form.max
            bound = np.maximum(relative * np.abs(x[normal]), absolute)
            assert np.all(np.abs(low[normal] - x[normal]) <= bound)
            beyond = np.abs(x) > form.max * (1 + form.eps)
            np.testing.assert_array_equal(low[beyond], np.copysign(np.inf, x[beyond]))


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_half_an_ulp_is_reached(name):
    # The bound in the docstring is not loose: a tie at 1 + eps/2 goes to the even 1.
    eps = FORMATS[name].eps
    low = mpx.cast_tree(np.float32(1 + eps / 2), name)
    assert float(low) == 1.0


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_widening_is_exact_for_every_16_bit_pattern(name):
    dtype = jnp.dtype({"f16": "float16", "bf16": "bfloat16"}[name])
    low = np.arange(2**16, dtype=np.uint16).view(dtype)
    # On aarch64 NumPy warns of signalling nans, and warnings are errors; mpx must not.
    with np.errstate(invalid="ignore"):
        expected = low.astype(np.float32)
    for leaf in (low, jnp.asarray(low)):
        wide = mpx.cast_to_float32(leaf)
        assert np.all(ulp_distance(wide, expected) == 0)
        # And back again.
        assert np.all(ulp_distance(mpx.cast_tree(wide, name), low) == 0)


def test_overflow_of_a_numpy_array_is_as_silent_as_in_jax():
    # Warnings are errors in these tests.
    assert np.isinf(mpx.cast_to_float16(np.array([1e300, -1e6]))).all()
    assert np.isinf(mpx.cast_to_bfloat16(np.float64(1e300)))


# --- whole models and training states --------------------------------------------------


def equinox_model():
    class Model(eqx.Module):
        mlp: eqx.nn.MLP
        norm: eqx.nn.BatchNorm
        dropout: eqx.nn.Dropout
        key: jax.Array
        table: np.ndarray

    def make():
        mlp = eqx.nn.MLP(2, 2, 2, 1, key=KEY)
        norm = eqx.nn.BatchNorm(2, "batch", mode="ema")
        return Model(mlp, norm, eqx.nn.Dropout(0.5), KEY, np.arange(3))

    return eqx.nn.make_with_state(make)()


def linen_variables():
    from flax import linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.BatchNorm(use_running_average=False)(nn.Dense(2)(x))

    structs = jax.eval_shape(Net().init, KEY, jnp.ones((1, 2)))
    return jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), structs)


def linen_train_state():
    from flax.training.train_state import TrainState

    params = {"w": jnp.ones(2), "b": jnp.ones(2, BF16)}
    return TrainState.create(apply_fn=jnp.dot, params=params, tx=optax.adam(0.1))


def nnx_module():
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.linear = nnx.Linear(2, 2, rngs=rngs)
            self.norm = nnx.BatchNorm(2, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.name = "net"

    return Net()


def nnx_state():
    from flax import nnx

    return nnx.state(nnx_module())


def optax_state():
    schedule = optax.linear_schedule(0.1, 0.0, 10)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, mu_dtype=BF16),
        optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2).gradient_transformation(),
    )
    return tx.init({"w": jnp.ones(2), "frozen": None})


TREES = [equinox_model, linen_variables, linen_train_state, optax_state]


@pytest.mark.standard_promotion
@pytest.mark.parametrize("make", TREES, ids=lambda make: make.__name__)
def test_whole_model_or_state_can_be_cast(make):
    tree = make()
    low = mpx.cast_to_bfloat16(tree)
    assert_only_floats_were_cast(tree, low, BF16)
    assert_only_floats_were_cast(low, mpx.cast_to_float32(low), F32)
    structs = eqx.filter_eval_shape(lambda: tree)
    low = mpx.cast_to_float16(structs)
    assert jax.tree.structure(low) == jax.tree.structure(structs)
    for struct in filter(is_floating, jax.tree.leaves(low)):
        assert struct.dtype == F16


@pytest.mark.standard_promotion
@pytest.mark.parametrize("make", [nnx_module, nnx_state])
def test_statistics_of_nnx_are_widened_but_never_narrowed(make):
    def dtypes(tree):
        return {
            jax.tree_util.keystr(path, simple=True, separator="/"): leaf.dtype
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
            if is_floating(leaf)
        }

    module = make()
    low = mpx.cast_to_bfloat16(module)
    assert jax.tree.structure(low) == jax.tree.structure(module)
    state = {"norm/mean", "norm/var"}
    assert dtypes(low) == {
        name: F32 if name.removesuffix("/value") in state else BF16
        for name in dtypes(module)
    }
    everything_low = jax.tree.map(
        lambda x: x.astype(BF16) if is_floating(x) else x, module
    )
    assert set(dtypes(mpx.cast_to_float32(everything_low)).values()) == {F32}


@pytest.mark.standard_promotion
def test_cast_nnx_module_still_runs_and_the_original_is_unchanged():
    module = nnx_module()
    low = mpx.cast_to_bfloat16(module)
    assert low.linear.kernel[...].dtype == BF16
    assert module.linear.kernel[...].dtype == F32
    assert low.linear(jnp.ones((1, 2), BF16)).dtype == BF16


SCALINGS = {
    "dynamic": mpx.DynamicLossScaling(2.0**15),
    "pow2": mpx.DynamicLossScaling.pow2(),
    "static": mpx.StaticLossScaling(1000.5),
    "none": mpx.NoLossScaling(),
}


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_loss_scaling_inside_a_cast_state_keeps_f32(scaling):
    state = {"params": jnp.ones(2), "scaling": scaling, "more": [scaling]}
    low = mpx.cast_to_float16(state)
    assert low["params"].dtype == F16
    assert low["scaling"] is scaling
    assert low["more"][0] is scaling
    assert mpx.cast_to_float16(scaling) is scaling
    inside = jax.jit(mpx.cast_to_float16)(state)
    assert_trees_equal(inside["scaling"], scaling)
    everything = mpx.cast_tree(state, "f16", where=lambda *_: True)
    assert everything["scaling"] is scaling


# --- cast_function ---------------------------------------------------------------------

RESULTS = {
    "array": lambda x: x,
    "tuple": lambda x: (x, x),
    "list": lambda x: [x, {"y": x}],
    "dict": lambda x: {"y": x, "none": None},
    "namedtuple": lambda x: Pair(x, [x]),
    "dataclass": lambda x: Batch(x, 3),
    "module": lambda x: Layer(x, x),
    "nested": lambda x: {"a": (Pair(x, "s"), [x, jnp.arange(2), KEY])},
    "static": lambda x: ("s", 3, x),
}


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
@pytest.mark.parametrize("jit", [lambda f: f, eqx.filter_jit], ids=["eager", "jit"])
def test_every_result_tree_is_cast(result, jit):
    def function(x):
        assert x.dtype == BF16
        return result(x)

    x = jnp.array([1.0, 2.0])
    low = jit(mpx.cast_function(function, "bf16"))(x)
    expected = mpx.cast_to_bfloat16(result(x))
    assert_trees_equal(
        eqx.filter(low, eqx.is_array), eqx.filter(expected, eqx.is_array)
    )
    wide = jit(mpx.cast_function(function, "bf16", "f32"))(x)
    assert_trees_equal(
        eqx.filter(wide, eqx.is_array), eqx.filter(result(x), eqx.is_array)
    )
    assert jax.tree.structure(low) == jax.tree.structure(result(x))


def test_function_that_returns_nothing_returns_nothing():
    assert mpx.cast_function(lambda x: None, "bf16")(jnp.ones(2)) is None


def test_positional_and_keyword_trees_are_cast_and_the_rest_passed_on():
    batch, key = Batch(np.ones(2), jnp.arange(2)), jax.random.key(3)

    def function(tree, flag, *more, scale, **options):
        assert tree.inputs.dtype == F16
        assert tree.label is batch.label
        assert (flag, options["mode"]) == (True, "train")
        assert more[0].dtype == scale.dtype == options["extra"]["x"].dtype == F16
        assert options["key"] is key
        return scale * more[0]

    out = mpx.cast_function(function, jnp.float16)(
        batch,
        True,
        jnp.ones(2),
        scale=jnp.float32(3),
        mode="train",
        key=key,
        extra={"x": jnp.ones(2, BF16)},
    )
    assert_trees_equal(out, jnp.full(2, 3.0, F16))


@mpx.cast_function
def plain_decorated(x):
    """Doubles."""
    return 2 * x


@mpx.cast_function(dtype="bf16", return_dtype="f32")
def decorated(x: jax.Array, power: int = 2) -> jax.Array:
    """Raises to a power."""
    assert x.dtype == BF16
    return x**power


def test_decorator_without_arguments_uses_half_precision():
    assert plain_decorated(jnp.ones(2)).dtype == F16
    with mpx.half_precision("bf16"):
        assert plain_decorated(jnp.ones(2)).dtype == BF16


def test_decorator_with_arguments_uses_them():
    assert_trees_equal(decorated(jnp.full(2, 3.0), power=3), jnp.full(2, 27.0))


def test_result_dtype_alone_can_be_given():
    function = mpx.cast_function(lambda x: (x, str(x.dtype)), return_dtype="f32")
    result, inside = function(jnp.ones(2))
    assert (result.dtype, inside) == (F32, "float16")


@pytest.mark.parametrize(
    "wrap",
    [
        functools.partial(mpx.cast_function, dtype="bf16"),
        mpx.cast_function(dtype="bf16"),
        mpx.force_full_precision,
        mpx.force_full_precision(return_dtype="f16"),
    ],
)
def test_wrapper_keeps_the_metadata(wrap):
    def function(x: jax.Array, *, power: int = 2) -> jax.Array:
        """Raises to a power."""
        return x**power

    function.__dict__["tag"] = "kept"
    wrapped = wrap(function)
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "tag"):
        assert getattr(wrapped, name) == getattr(function, name)
    assert wrapped.__wrapped__ is function
    assert inspect.signature(wrapped) == inspect.signature(function)


def test_anything_callable_can_be_wrapped():
    layer = eqx.nn.Linear(2, 2, key=KEY)
    low: eqx.nn.Linear = mpx.cast_tree(layer, "bf16")
    assert mpx.cast_function(low, "bf16")(jnp.ones(2)).dtype == BF16
    assert mpx.cast_function(jnp.sum, "bf16")(jnp.ones(2)).dtype == BF16
    half = mpx.cast_function(functools.partial(jnp.multiply, 2.0), "f16")
    assert_trees_equal(half(jnp.ones(2)), jnp.full(2, 2.0, F16))

    class Model:
        @mpx.cast_function(dtype="bf16")
        def forward(self, x):
            return x

    assert Model().forward(jnp.ones(2)).dtype == BF16


def test_gradient_goes_through_a_cast_function():
    square = mpx.cast_function(lambda x: jnp.sum(x * x), "bf16", "f32")
    grad = jax.jit(jax.grad(square))(jnp.array([1.0, 2.0]))
    assert_trees_equal(grad, jnp.array([2.0, 4.0]))


# --- force_full_precision --------------------------------------------------------------

# inputs, what the function sees, what comes back
DTYPE_RULES = [
    ([F16], [F32], F16),
    ([BF16], [F32], BF16),
    ([F32], [F32], F32),
    ([F16, F16], [F32, F32], F16),
    ([F16, BF16], [F32, F32], F32),
    ([BF16, F32], [F32, F32], F32),
]


@pytest.mark.parametrize(("given", "inside", "result"), DTYPE_RULES, ids=str)
def test_full_precision_inside_and_the_input_dtype_outside(given, inside, result):
    seen = []

    @mpx.force_full_precision
    def function(*args, last):
        seen.extend(arg.dtype for arg in (*args, last))
        return {"sum": sum(arg.sum() for arg in (*args, last)), "n": jnp.arange(2)}

    arrays = [jnp.ones(2, dtype) for dtype in given]
    out = function(*arrays[:-1], last=arrays[-1])
    assert seen == inside
    assert (out["sum"].dtype, out["n"].dtype) == (result, jnp.int32)
    assert float(out["sum"]) == 2 * len(given)


def test_f64_inputs_stay_f64():
    identity = mpx.force_full_precision(lambda x: x)
    x = np.array([1 + 2.0**-40])
    assert identity(x) is x
    with jax.enable_x64():
        both = mpx.force_full_precision(lambda x, y: (x, y))
        out = both(jnp.asarray(x), jnp.ones(1, F16))
        assert [leaf.dtype for leaf in out] == [F64, F64]
        assert_trees_equal(out[0], x)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_result_dtype_can_be_chosen(dtype):
    for function in (
        mpx.force_full_precision(lambda x: [x], dtype),
        mpx.force_full_precision(return_dtype=dtype)(lambda x: [x]),
    ):
        assert (
            function(jnp.ones(2, F16))[0].dtype
            == mpx.cast_tree(np.ones(1), dtype).dtype
        )


def test_without_floating_inputs_the_results_stay_as_they_are():
    function = mpx.force_full_precision(lambda n: (n, jnp.ones(2, F16), np.ones(2)))
    assert [leaf.dtype for leaf in function(jnp.arange(2))] == [jnp.int32, F16, F64]


def test_loss_scaling_among_the_inputs_does_not_count():
    scaling = mpx.StaticLossScaling(2.0)
    function = mpx.force_full_precision(lambda x, s: (s.scale(x), s))
    out, same = function(jnp.ones(2, F16), scaling)
    assert out.dtype == F16
    assert same is scaling


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_reduction_that_fails_in_half_precision_works(dtype):
    # 300 * 300 is beyond f16; 512 ones stop growing at 256 in bf16.
    x = jnp.full(512, 300.0 if dtype == F16 else 1.0, dtype)

    def naive(x):
        total, _ = jax.lax.scan(lambda c, v: (c + v * v, None), x[0] * 0, x)
        return total / x.size

    assert float(naive(x)) != float(x[0]) ** 2
    out = mpx.force_full_precision(naive, return_dtype="f32")(x)
    assert float(out) == float(x[0]) ** 2
    assert jax.jit(mpx.force_full_precision(jnp.mean))(x).dtype == dtype


def test_sum_beyond_the_range_is_infinite_only_if_f16_is_asked_for():
    # The result of an f32 input must not be squeezed into f16.
    x = jnp.ones(70000)
    assert float(mpx.force_full_precision(jnp.sum)(x)) == 70000
    assert np.isinf(mpx.force_full_precision(jnp.sum, "f16")(x))
