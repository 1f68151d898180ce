"""Finite checks and selection over pytrees."""

import functools
import re
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from mpx._jax._tree import named_leaves
from mpx.testing import assert_trees_equal

BAD = [np.nan, np.inf, -np.inf]


class Pair(NamedTuple):
    first: object
    second: object


class Layer(eqx.Module):
    weight: object
    bias: object = None
    activation: object = jnp.tanh
    name: str = eqx.field(default="layer", static=True)


def sharding(axis_type):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(axis_type, axis_type))
    return NamedSharding(mesh, P("a", "b"))


# --- all_finite ------------------------------------------------------------------------


@pytest.fixture(params=[1, 8], ids=["one device", "several"])
def devices(request, monkeypatch):
    """JAX says that it has so many devices: one checks rows of equal length together."""
    monkeypatch.setattr(jax, "device_count", lambda: request.param)


# What holds no number that could be infinite, and numbers near the end of their range.
FINITE = {
    "empty_dict": {},
    "empty_list": [],
    "none": None,
    "zero_size": jnp.zeros((0, 3)),
    "f32": jnp.array([0.0, -0.0, 3.4e38, 1e-45]),
    "f16": jnp.array([65504.0, -65504.0], jnp.float16),
    "bf16": jnp.array([3.38e38], jnp.bfloat16),
    "complex": jnp.array([1 + 2j]),
    "int": jnp.array([2**31 - 1], jnp.int32),
    "bool": jnp.array([True]),
    "int4": jnp.ones(2, jnp.int4),
    "float8": jnp.ones(2, jnp.float8_e4m3fn),
    "key": jax.random.key(0),
    "raw_key": jax.random.PRNGKey(0),
    "float0": np.zeros(2, jax.dtypes.float0),
    "numpy_f64": np.array([1e300]),  # infinite in f32
    "numpy_scalar": np.float64(1e300),
    "numpy_bf16": np.ones(2, ml_dtypes.bfloat16),
    "python_float": 1e300,
    "python_complex": 1e300 + 1e300j,
    "python_int": 10**400,
    "string": "nan",
    "function": jnp.sin,
    "object_array": np.array([None, "x"], dtype=object),
}


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("leaf", FINITE.values(), ids=FINITE)
def test_finite_numbers_and_everything_else_are_finite(leaf):
    for tree in (leaf, {"w": jnp.ones(2), "x": [leaf]}):
        finite = mpx.all_finite(tree)
        assert finite is not None
        assert (finite.dtype, finite.shape) == (jnp.bool_, ())
        assert bool(finite) is True


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(
    "make",
    [
        lambda bad: jnp.array([1.0, bad]),
        lambda bad: jnp.array(bad, jnp.float16),
        lambda bad: jnp.array([[bad]], jnp.bfloat16),
        lambda bad: jnp.ones((3, 2)).at[2, 0].set(bad),
        lambda bad: jnp.array([1j * bad], jnp.complex64),
        lambda bad: np.array([1.0, bad]),
        lambda bad: np.array([bad], ml_dtypes.bfloat16),
        np.float32,
        float,
        lambda bad: complex(0, bad),
    ],
)
def test_one_bad_number_anywhere_is_found(make, bad):
    assert not mpx.all_finite(make(bad))
    tree = {"a": jnp.ones((3, 2)), "b": (Pair(make(bad), "x"), 3), "c": jnp.ones(3)}
    assert not mpx.all_finite(tree)
    assert not mpx.all_finite(tree | {"b": jnp.ones((3, 0)), "d": make(bad)})


@pytest.mark.parametrize("spoilt", [0, 7, 23, 24, 49])
def test_arrays_of_one_type_are_checked_together_on_one_device(monkeypatch, spoilt):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    shapes = [(4, 3)] * 49 + [(3, 4)]
    tree = [jnp.ones(shape) for shape in shapes]
    # 24 of the 49 in one kernel; the 50th alone.
    assert str(jax.make_jaxpr(mpx.all_finite)(tree)).count("reduce_and[") == 4
    assert mpx.all_finite(tree)
    tree[spoilt] = tree[spoilt].at[1, 2].set(jnp.nan)
    assert not mpx.all_finite(tree)


@pytest.mark.parametrize(
    ("rows", "kernels"), [(0, 1), (512, 1), (1024, 2), (2048, 3), (8192, 5)]
)
def test_large_arrays_are_checked_alone(monkeypatch, rows, kernels):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    tree = [jax.ShapeDtypeStruct((rows, 1024), jnp.float32)] * 5
    found = str(jax.make_jaxpr(mpx.all_finite)(tree)).count("reduce_and[")
    assert found == kernels


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz"]
)
def test_nan_of_eight_bits_is_found(dtype):
    for x in (jnp.array([1.0, jnp.nan], dtype), np.array([1.0, np.nan], dtype)):
        assert not mpx.all_finite({"x": x})
        assert mpx.all_finite({"x": x[:1]})


def test_whole_model_with_functions_can_be_checked():
    assert mpx.all_finite([Layer(jnp.ones(2)), Layer(jnp.ones(2), jnp.zeros(2))])
    assert not mpx.all_finite([Layer(jnp.ones(2), jnp.array([0.0, jnp.nan]))])


def test_finite_check_works_under_jit_and_vmap():
    x = jnp.array([[1.0, 2.0], [1.0, jnp.inf]])
    check = jax.jit(jax.vmap(lambda row: mpx.all_finite({"row": row, "key": 3})))
    assert check(x).tolist() == [True, False]


def test_axis_name_gives_every_vmap_lane_the_same_answer():
    check = functools.partial(mpx.all_finite, axis_name="lane")
    lanes = jax.vmap(check, axis_name="lane")
    assert lanes(jnp.array([[1.0], [jnp.nan], [1.0]])).tolist() == [False] * 3
    assert lanes(jnp.ones((3, 1))).tolist() == [True] * 3


def test_axis_name_gives_every_device_the_same_answer():
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    def check(x, axis_name):
        inside = functools.partial(mpx.all_finite, axis_name=axis_name)
        return jax.jit(
            jax.shard_map(
                lambda x: inside(x)[None, None],
                mesh=mesh,
                in_specs=P("a", "b"),
                out_specs=P("a", "b"),
                check_vma=False,
            )
        )(x)

    x = jnp.ones((4, 2)).at[2, 1].set(jnp.inf)
    assert int(check(x, None).sum()) == 7
    assert check(x, ("a", "b")).tolist() == [[False, False]] * 4
    over_a = check(x, "a")
    assert over_a[:, 0].tolist() == [True] * 4
    assert over_a[:, 1].tolist() == [False] * 4


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded_and_unsharded_leaves_are_checked_together(axis_type):
    x = jax.device_put(jnp.ones((8, 4)), sharding(axis_type))
    assert mpx.all_finite({"x": x, "y": jnp.ones(2)})
    assert not mpx.all_finite({"x": x / 0, "y": jnp.ones(2)})


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_axes_of_a_mesh_may_differ_on_one_device(axis_type, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    one = jax.make_mesh(
        (1, 1), ("a", "b"), axis_types=(axis_type,) * 2, devices=jax.devices()[:1]
    )
    x, y = (jax.device_put(jnp.ones((8, 4)), NamedSharding(one, P(a))) for a in "ab")
    assert jax.jit(mpx.all_finite)([x, y])
    assert not jax.jit(mpx.all_finite)([x, y / 0])


# --- select_tree -----------------------------------------------------------------------

# (first, second): every kind of array leaf. NaN payloads, signed zeros and subnormal
# numbers must come through bit for bit.
ARRAYS = {
    "f32": (jnp.array([1.0, jnp.nan, -0.0]), jnp.array([1e-40, jnp.inf, 0.0])),
    "f16": (jnp.array([6e-8], jnp.float16), jnp.array([65504.0], jnp.float16)),
    "bf16": (jnp.array([1e-40], jnp.bfloat16), jnp.array([3e38], jnp.bfloat16)),
    "complex": (jnp.array([1 + 2j]), jnp.array([jnp.nan * 1j])),
    "int": (jnp.array([2**31 - 1]), jnp.array([-1])),
    "uint8": (jnp.array([255], jnp.uint8), jnp.array([0], jnp.uint8)),
    "int4": (jnp.array([7], jnp.int4), jnp.array([-8], jnp.int4)),
    "bool": (jnp.array([True]), jnp.array([False])),
    "float8": (jnp.ones(2, jnp.float8_e5m2), jnp.zeros(2, jnp.float8_e5m2)),
    "key": (jax.random.key(1), jax.random.key(2)),
    "keys": (jax.random.split(jax.random.key(1)), jax.random.split(jax.random.key(2))),
    "raw_key": (jax.random.PRNGKey(1), jax.random.PRNGKey(2)),
    "zero_size": (jnp.zeros((0, 2)), jnp.ones((0, 2))),
    "scalar": (jnp.float32(1), jnp.float32(2)),
    "numpy": (np.ones(2, np.float32), np.zeros(2, np.float32)),
    "numpy_scalar": (np.int32(1), np.int32(2)),
    "mixed": (np.ones(2, np.float32), jnp.zeros(2)),
}
PREDS = {
    "python": bool,
    "numpy": np.bool_,
    "numpy_array": np.array,
    "jax": jnp.array,
}


@pytest.mark.parametrize("pred", PREDS.values(), ids=PREDS)
@pytest.mark.parametrize(("a", "b"), ARRAYS.values(), ids=ARRAYS)
def test_predicate_chooses_every_bit_of_an_array(a, b, pred):
    first, second = {"x": (a, None)}, {"x": (b, None)}
    assert_trees_equal(mpx.select_tree(pred(True), first, second), first)
    assert_trees_equal(mpx.select_tree(pred(False), first, second), second)


def test_selection_works_under_jit_and_vmap():
    first, second = Pair(jnp.ones(3), jnp.arange(3)), Pair(jnp.zeros(3), -jnp.arange(3))
    select = jax.jit(mpx.select_tree)
    assert_trees_equal(select(True, first, second), first)
    assert_trees_equal(select(False, first, second), second)
    flags = jnp.array([True, False, True])
    chosen = jax.vmap(mpx.select_tree)(flags, first, second)
    assert chosen.first.tolist() == [1, 0, 1]
    assert chosen.second.tolist() == [0, -1, 2]


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize(
    ("new", "old"),
    [("float32", "bfloat16"), ("bfloat16", "float32"), ("int32", "float16")],
)
def test_result_has_the_dtype_of_the_second_tree(flag, new, old):
    chosen = mpx.select_tree(flag, jnp.ones(2, new), jnp.zeros(2, old))
    assert chosen.dtype == jnp.dtype(old)
    assert chosen.tolist() == [float(flag)] * 2


@pytest.mark.parametrize(
    "leaf", ["a", 3, 2.5, jnp.sin, None, True], ids=lambda leaf: type(leaf).__name__
)
def test_leaves_that_are_no_arrays_come_from_the_first_tree(leaf):
    for flag in (True, False):
        chosen = mpx.select_tree(flag, [leaf, jnp.ones(2)], [leaf, jnp.zeros(2)])
        assert chosen[0] is leaf


def test_different_static_leaves_come_from_the_first_tree():
    assert mpx.select_tree(False, ["new", 1], ["old", 2]) == ["new", 1]


def test_the_same_leaf_comes_back_as_the_same_object():
    # Also NumPy's f64, which JAX would round to f32.
    x, y = np.array([1e300]), jnp.ones(2)
    chosen = mpx.select_tree(jnp.array(True), [x, y], [x, y])
    assert chosen[0] is x
    assert chosen[1] is y


def test_python_number_can_replace_an_array():
    chosen = mpx.select_tree(True, 1.5, jnp.float16(0))
    assert (chosen.dtype, float(chosen)) == (jnp.float16, 1.5)


def test_float0_leaves_pass():
    nothing = np.zeros(2, jax.dtypes.float0)
    assert mpx.select_tree(True, [nothing.copy()], [nothing])[0] is nothing


def test_shapes_without_data_are_selected_too():
    old = jax.ShapeDtypeStruct((2,), jnp.bfloat16)
    chosen = mpx.select_tree(True, jax.ShapeDtypeStruct((2,), jnp.float32), old)
    assert chosen == old


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("jit", [False, True])
def test_selection_keeps_the_sharding(axis_type, jit):
    wanted = sharding(axis_type)
    x = jax.device_put(jnp.ones((8, 4)), wanted)
    select = jax.jit(mpx.select_tree) if jit else mpx.select_tree
    for flag in (True, False):
        chosen = select(flag, [x + 1], [x])[0]
        assert chosen.sharding.is_equivalent_to(wanted, 2)
        # Where the dtypes differ it is still the sharding of the second tree.
        chosen = select(flag, [x.astype(jnp.float16)], [x])[0]
        assert (chosen.dtype, chosen.sharding.spec) == (jnp.float32, wanted.spec)


def test_whole_model_with_functions_can_be_selected():
    first, second = (Layer(jnp.ones(2) * x, Layer(jnp.arange(2) * x)) for x in (1, 2))
    assert_trees_equal(mpx.select_tree(True, first, second), first)
    assert_trees_equal(mpx.select_tree(False, first, second), second)


@pytest.mark.parametrize(
    ("pred", "described"),
    [
        (1, "<class 'int'> of shape ()"),
        (1.0, "<class 'float'> of shape ()"),
        (None, "<class 'NoneType'> of shape ()"),
        ("x", "<class 'str'> of shape ()"),
        (np.int32(1), "int32 of shape ()"),
        (jnp.float32(1), "float32 of shape ()"),
        (jnp.array([True]), "bool of shape (1,)"),
        (np.array([True, False]), "bool of shape (2,)"),
    ],
)
def test_error_describes_a_predicate_that_is_no_boolean_scalar(pred, described):
    message = (
        f"`pred` must be a boolean scalar, but {described} was given. Reduce it first, "
        "for example with `mpx.all_finite`."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        mpx.select_tree(pred, jnp.ones(1), jnp.zeros(1))


def test_error_names_the_leaves_that_one_tree_lacks():
    message = (
        "`select_tree` needs two trees of the same structure, but they differ: only in "
        "the first: ['a/w'], only in the second: ['a/v', 'b']. Pass trees made by the "
        "same constructor or filter."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        mpx.select_tree(True, {"a": {"w": 1}}, {"a": {"v": 1}, "b": 2})


def test_error_shows_structures_whose_leaves_have_the_same_names():
    with pytest.raises(ValueError, match=re.escape("differ: PyTreeDef((*,)) against")):
        mpx.select_tree(True, (1,), [1])


def test_error_names_the_leaf_whose_shape_differs():
    message = (
        "`select_tree` needs equal shapes, but `a/1` is (2,) in the first tree and () in "
        "the second."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        mpx.select_tree(True, {"a": [1, jnp.ones(2)]}, {"a": [1, jnp.ones(())]})


# --- names -----------------------------------------------------------------------------


def test_names_are_paths_without_brackets():
    tree = {"model": [Layer(1, 2), None], "p": Pair(1, {"x": 2})}
    names = [name for name, _ in named_leaves(tree)]
    assert names[:2] == ["model/0/weight", "model/0/bias"]
    assert names[-2:] == ["p/first", "p/second/x"]
    assert named_leaves(3) == [("", 3)]
