"""Random pytrees through casts, scaling, selection and updates.

Every result is compared with NumPy. Leaves that an operation has no business with must
come back as the same object, in the same place, and arrays with the same sharding.
"""

import collections
import dataclasses
import functools
import random
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx

BF16 = np.dtype(ml_dtypes.bfloat16)
F16, F32, F64 = map(np.dtype, ("float16", "float32", "float64"))
TREES, EXHAUSTIVE, FOREST = 1000, 10_000, 50


@pytest.fixture(autouse=True, scope="module")
def _without_type_checks():
    # They take four times as long as what they check. Every other test has them.
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


# --- leaves ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Kind:
    """A kind of leaf: two values of one dtype and shape. Itself a leaf of a plan."""

    name: str
    values: tuple[Any, Any]

    @property
    def is_floating(self):
        return self.name.startswith("float")

    @property
    def is_inexact(self):
        return self.is_floating or self.name.startswith("complex")

    @property
    def is_array(self):
        return isinstance(self.values[0], jax.Array | np.ndarray | np.generic)

    @property
    def is_struct(self):
        return isinstance(self.values[0], jax.ShapeDtypeStruct)


# Numbers that are normal in f32, also after scaling: XLA on a CPU flushes the others.
NUMBERS = [
    [1.0, -0.0, 2.0**-24, 65504.0, 3e-5, np.inf, -1.0009765625, 1e-6],
    [-3.25, 0.0, 70000.0, 1 / 3, -1e30, np.nan, 1e-20, 2049.0],
]


def floats(dtype, shape):
    with np.errstate(over="ignore"):
        return tuple(
            np.resize(np.array(numbers), shape).astype(dtype) for numbers in NUMBERS
        )


def on_jax(pair):
    return tuple(map(jnp.asarray, pair))


@functools.cache
def kinds(x64):
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=devices)
    sharded, replicated = (NamedSharding(mesh, spec) for spec in (P("x"), P()))
    shapes = [(), (8,), (0, 2)]
    found = []
    for dtype in (F64,) if x64 else (F16, BF16, F32):
        for shape in shapes:
            found.append(Kind("float", on_jax(floats(dtype, shape))))
        for sharding in (sharded, replicated):
            put = functools.partial(jax.device_put, device=sharding)
            found.append(Kind("float_sharded", tuple(map(put, floats(dtype, (8,))))))
        struct = jax.ShapeDtypeStruct((8,), dtype, sharding=sharded)
        found.append(Kind("float_struct", (struct, struct)))
    for dtype in (F16, BF16, F32, F64):
        found.append(Kind("float_numpy", floats(dtype, (8,))))
    found.append(Kind("float_numpy_scalar", (np.float32(1.5), np.float32(-2))))
    found.append(Kind("float_numpy_scalar", (np.float64(1 / 3), np.float64(1e30))))

    complexes = ([1 + 2j, -3j, 1e5], [0.25, 1e-5 + 7j, -2 - 2j])
    found.append(Kind("complex", on_jax(np.array(complexes, np.complex64))))
    found.append(Kind("complex_numpy", tuple(np.array(complexes))))
    integers = ([1, 0, 7], [0, 1, 3])
    for dtype in ("int32", "uint8", "int4", "bool", "float8_e4m3fn", "float8_e5m2"):
        pair = tuple(jnp.array(value).astype(dtype) for value in integers)
        found.append(Kind("other", pair))
    found += [
        Kind(
            "other_sharded",
            tuple(jax.device_put(np.arange(8) + i, sharded) for i in (0, 1)),
        ),
        Kind("other_key", (jax.random.key(0), jax.random.key(1))),
        Kind("other_keys", tuple(jax.random.split(jax.random.key(i)) for i in (0, 1))),
        Kind("other_raw_key", (jax.random.PRNGKey(0), jax.random.PRNGKey(1))),
        Kind("other_numpy", (np.arange(3), np.arange(3) + 1)),
        Kind("other_numpy_bool", (np.array(True), np.array(False))),
        Kind("other_numpy_scalar", (np.int32(3), np.int32(4))),
        Kind("other_float0", (np.zeros(2, jax.dtypes.float0),) * 2),
        Kind("other_struct", (jax.ShapeDtypeStruct((3,), np.int32),) * 2),
        Kind("python_float", (2.5, -1e5)),
        Kind("python_complex", (1.5 - 2j, 3j)),
        Kind("static_int", (3, 4)),
        Kind("static_bool", (True, False)),
        Kind("static_string", ("a", "b")),
        Kind("static_bytes", (b"a", b"b")),
        Kind("static_function", (jnp.sin, lambda x: x)),
        Kind("static_class", (dict, list)),
        Kind("static_object", (object(), object())),
    ]
    return found


NUMBER = Kind("float", on_jax(floats(F32, (8,))))


def bits(leaf):
    """Returns what two equal arrays have in common: dtype, shape and bytes."""
    dtype = leaf.dtype
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return dtype, leaf.shape, leaf.sharding
    if not isinstance(dtype, np.dtype):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return dtype, array.shape, array.tobytes()


def in_jax(value):
    """What NumPy and Python values become in JAX: 32 bits unless x64 is on."""
    if isinstance(value, jax.Array) or jax.config.read("jax_enable_x64"):
        return value
    array = np.asarray(value)
    narrow = {"float64": F32, "int64": np.int32, "complex128": np.complex64}
    with np.errstate(over="ignore"):
        return array.astype(narrow.get(array.dtype.name, array.dtype))


# --- trees -----------------------------------------------------------------------------


class Pair(NamedTuple):
    first: Any
    second: Any


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["inputs", "label"],
    meta_fields=["name"],
)
@dataclasses.dataclass
class Batch:
    inputs: Any
    label: Any
    name: str = "batch"


class Layer(eqx.Module):
    weight: Any
    rest: Any = None
    name: str = eqx.field(default="layer", static=True)


def plan(seed, leaves):
    """Returns a random tree whose leaves are kinds."""
    if seed % 10:  # an operation on two devices takes ten times as long
        leaves = [kind for kind in leaves if "sharded" not in kind.name]
    return grow(random.Random(seed), leaves)


def forest(first, count, *, x64=False, instead=None):
    """Returns many trees as one: the work that each call costs is done once for all.

    Kinds with a word of `instead` in their names are replaced.
    """
    instead = instead or {}
    leaves = [
        next((other for word, other in instead.items() if word in kind.name), kind)
        for kind in kinds(x64)
    ]
    return [plan(seed, leaves) for seed in range(first, first + count)]


def grow(rng, leaves, depth=0):
    choice = rng.random()
    if depth == 3 or choice < 0.02 + 0.2 * depth:
        return rng.choice(leaves)
    if choice > 0.95:
        return rng.choice([None, {}, [], ()])
    children = [grow(rng, leaves, depth + 1) for _ in range(rng.choice([1, 2, 2, 3]))]
    match rng.randrange(7):
        case 0:
            return {f"k{i}": child for i, child in enumerate(children)}
        case 1:
            return children
        case 2:
            return tuple(children)
        case 3:
            return Pair(children[0], children[1:])
        case 4:
            return Batch(children[0], tuple(children[1:]), name=rng.choice("ab"))
        case 5:
            return Layer(children[0], children[1:], name=rng.choice("ab"))
        case _:
            return collections.OrderedDict(
                (i, child) for i, child in enumerate(children)
            )


def build(planned, variant):
    return jax.tree.map(lambda kind: kind.values[variant], planned)


def aligned(*trees):
    """Returns the leaves of trees of one structure side by side."""
    return zip(*map(jax.tree.leaves, trees), strict=True)


def compare(seed, planned, before, after, expected, option):
    """Compares a result with what `expected(kind, leaf, option)` returns.

    `None` expects the very same object; else bits are expected, and for an array that
    was sharded the same sharding.
    """
    assert jax.tree.structure(after) == jax.tree.structure(before), seed
    for kind, old, new in aligned(planned, before, after):
        wanted = expected(kind, old, option)
        if wanted is None:
            assert new is old, (seed, kind)
            continue
        assert bits(new) == wanted, (seed, kind, old, new)
        if "sharded" in kind.name:
            assert new.sharding.is_equivalent_to(old.sharding, new.ndim), (seed, kind)


def once(function):
    """Remembers results by kind, variant and option: there are few, and many trees."""
    memory = {}

    def remembered(kind, old, option):
        key = kind, kind.values[1] is old, option
        if key not in memory:
            memory[key] = function(kind, old, option)
        return memory[key]

    return remembered


# --- expectations, computed by NumPy ---------------------------------------------------


@once
def cast(kind, old, dtype):
    if not kind.is_floating or old.dtype == dtype:
        return None
    if kind.is_struct:
        return dtype, old.shape, old.sharding
    with np.errstate(over="ignore"):
        return bits(np.asarray(old).astype(dtype))


def wide(old) -> Any:
    array = np.asarray(in_jax(old))
    return array.astype(F32) if array.dtype.itemsize == 2 else array


@once
def scaled(kind, old, scale):
    if not kind.is_inexact and not kind.name.startswith("python"):
        return None
    if kind.is_struct:
        return max(F32, old.dtype), old.shape, old.sharding
    array = wide(old)
    with np.errstate(over="ignore"):
        return bits(array * array.real.dtype.type(scale))


@once
def unscaled(kind, old, scale):
    if not kind.is_inexact and not kind.name.startswith("python"):
        return None
    if kind.is_struct:
        return max(F32, old.dtype), old.shape, old.sharding
    array = wide(old)
    return bits(array / array.real.dtype.type(scale))


@once
def selected(kind, old, flag):
    if kind.is_struct or "float0" in kind.name or not kind.is_array:
        return None
    return bits(in_jax(kind.values[0 if flag else 1]))


@once
def stepped(kind, old, rate):
    """One step of gradient descent with a gradient of ones."""
    if not kind.is_inexact:
        return None
    array = wide(old)
    with np.errstate(over="ignore"):
        return bits((array - array.dtype.type(rate)).astype(in_jax(old).dtype))


@once
def skipped(kind, old, skip):
    return bits(in_jax(old)) if kind.is_inexact else None


# --- tests -----------------------------------------------------------------------------


def test_premise_the_trees_are_varied():
    seen, counts, roots = set(), [], set()
    trees = forest(0, 2000)
    for planned in trees:
        leaves = jax.tree.leaves(planned)
        seen.update(leaves)
        counts.append(len(leaves))
        roots.add(type(planned))
    assert seen == set(kinds(False))
    assert len({jax.tree.structure(planned) for planned in trees}) > 1000
    assert min(counts) == 0
    assert 4 < np.mean(counts) < 8
    assert max(counts) > 12
    assert roots >= {dict, list, tuple, Pair, Batch, Layer, collections.OrderedDict}


SCALE = 2.0**15


def check_cast_scale_and_select(seed, planned, scaling):
    rng = random.Random(-seed)
    a, b = build(planned, 0), build(planned, 1)
    dtype = rng.choice([F16, BF16, F32])
    compare(seed, planned, a, mpx.cast_tree(a, dtype), cast, dtype)
    compare(seed, planned, a, scaling.scale(a), scaled, SCALE)
    compare(seed, planned, b, scaling.unscale(b), unscaled, SCALE)
    flag = rng.random() < 0.5
    pred = rng.choice([bool, np.bool_, jnp.asarray])(flag)
    compare(seed, planned, a, mpx.select_tree(pred, a, b), selected, flag)


def test_cast_scale_and_select_change_only_what_they_should(pytestconfig):
    scaling = mpx.DynamicLossScaling.pow2(SCALE)
    trees = EXHAUSTIVE if pytestconfig.getoption("exhaustive") else TREES
    for seed in range(0, trees, FOREST):
        check_cast_scale_and_select(seed, forest(seed, FOREST), scaling)


def test_f64_arrays_are_treated_like_the_others():
    with jax.enable_x64():
        assert {kind.values[0].dtype for kind in kinds(True)[:6]} == {F64}
        # All else is compiled anew under x64: numbers of f64 and what is no array.
        planned = forest(1, 300, x64=True, instead={"other": kinds(True)[0]})
        check_cast_scale_and_select(0, planned, mpx.DynamicLossScaling.pow2(SCALE))


def training(planned, variant, optimizer):
    """Returns a model, gradients of ones for its inexact arrays, and a state."""
    model = build(planned, variant)
    grads, params = (
        jax.tree.map(
            lambda kind, x, make=make: make(x) if kind.is_inexact else None,
            planned,
            model,
        )
        for make in (lambda x: np.ones_like(wide(x)), lambda x: x)
    )
    return model, grads, optimizer.init(params)


def all_bits(tree):
    return [bits(leaf) for leaf in jax.tree.leaves(tree)]


# For tests that round parameters to 16 bits on purpose.
rounds_updates = pytest.mark.filterwarnings("ignore:.*keeps no master weights")


@pytest.mark.some(1)
@rounds_updates
@pytest.mark.parametrize(
    ("skip", "finite"), [("select", True), ("select", False), ("never", True)]
)
def test_step_changes_only_floating_leaves_and_a_skipped_one_nothing(skip, finite):
    # 0.3 is no half number: an update rounded before it is added would show.
    optimizer = optax.sgd(0.3)
    for seed in range(0, 600, FOREST):
        planned = forest(seed, FOREST, instead={"struct": NUMBER})
        model, grads, state = training(planned, seed // FOREST % 2, optimizer)
        after, _ = mpx.optimizer_update(
            model, optimizer, state, grads, finite, skip=skip
        )
        compare(seed, planned, model, after, stepped if finite else skipped, 0.3)


@pytest.mark.some(1)
@rounds_updates
@pytest.mark.standard_promotion
def test_skipped_step_of_a_stateful_optimizer_changes_no_bit():
    optimizer = optax.adam(0.5)
    planned = forest(0, 15, instead={"struct": NUMBER})
    model, grads, state = training(planned, 0, optimizer)
    update = functools.partial(mpx.optimizer_update, model, optimizer, state)

    broken = jax.tree.map(lambda grad: grad * np.float32(np.nan), grads)
    after, state_after = update(broken, False)
    compare(0, planned, model, after, skipped, None)
    assert all_bits(state_after) == all_bits(state)

    after, state_after = update(grads, True)
    for kind, old, new in aligned(planned, model, after):
        if kind.is_inexact:
            check_first_adam_step(old, new, 0.5)
        else:
            assert new is old or bits(new) == bits(old), kind
    assert all(
        a != b
        for a, b in zip(all_bits(state_after), all_bits(state), strict=True)
        if 0 not in b[1]
    )


def check_first_adam_step(old, new, rate):
    """It has the length of the learning rate, whatever the gradient."""
    expected = np.asarray(wide(old) - rate, in_jax(old).dtype)
    assert (new.dtype, new.shape) == (expected.dtype, expected.shape)
    pair = [np.asarray(x).astype(np.complex128) for x in (new, expected)]
    # Adam divides by 1 - 0.999, which f32 knows to 2⁻²⁵ of 0.001.
    eps = float(jnp.finfo(new.dtype).eps)
    np.testing.assert_allclose(*pair, rtol=eps, atol=rate * 2.0**-15)
