"""Loss scaling: the state machine, exact arithmetic, and life as a pytree."""

import dataclasses
import fractions
import functools
import io
import math
import operator
import pickle

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from mpx import DynamicLossScaling, NoLossScaling, StaticLossScaling
from mpx.testing import assert_trees_equal
from numerics import inject_nonfinite

# --- One table of scalings: a new row inherits every test that takes `scaling` --------

SCALINGS = {
    "none": NoLossScaling,
    "static": lambda: StaticLossScaling(2.0**10),
    "dynamic": lambda: DynamicLossScaling(3000.7, 0.1, 1.7, 2, backoff=0.3),
}


@pytest.fixture(params=SCALINGS.values(), ids=SCALINGS.keys())
def scaling(request):
    return request.param()


@pytest.fixture
def dynamic():
    """Returns a scaling that any overflow changes at once."""
    scaling = SCALINGS["dynamic"]()
    assert scaling.adjust(False).loss_scaling < scaling.loss_scaling
    return scaling


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=str)
def mesh(request):
    assert jax.device_count() == 8
    mesh = jax.make_mesh((8,), ("data",), axis_types=(request.param,))
    with jax.set_mesh(mesh):
        yield mesh


# --- The state machine against a simulation in plain Python ---------------------------

STEPS = 150
OPTIONS = {
    "paper": {"period": 3},
    "every step grows": {"period": 1, "max_loss_scaling": 2.0**40},
    "slow": {"period": 17},
    "odd factors": {"factor": 1.7, "backoff": 0.3, "period": 2},
    "backoff of its own": {"factor": 4, "backoff": 0.5, "period": 2},
    "hysteresis": {"hysteresis": 3, "period": 4},
    "narrow": {"max_loss_scaling": 1500.0, "period": 2, "hysteresis": 2},
}


class Simulation:
    """The rules as one would tell them, a number at a time; f32 products as NumPy's."""

    def __init__(
        self,
        scale,
        floor,
        counter=0,
        *,
        factor=2,
        period=2000,
        max_loss_scaling=65504.0,
        backoff=None,
        hysteresis=1,
    ):
        self.scale, self.floor = np.float32(scale), np.float32(floor)
        self.ceiling = np.float32(max_loss_scaling)
        self.up = np.float32(factor)
        self.down = np.float32(1 / factor if backoff is None else backoff)
        self.period, self.hysteresis = period, hysteresis
        self.good = counter
        self.bad = self.bad_in_a_row = 0
        self.lives = hysteresis

    def step(self, finite):
        if finite:
            self.bad_in_a_row = 0
            self.good += 1
            if self.good >= self.period:
                self.good = 0
                self.lives = self.hysteresis
                self.scale = self.scale * self.up
        else:
            self.bad += 1
            self.bad_in_a_row += 1
            self.good = 0
            if self.lives > 1:
                self.lives -= 1
            else:
                self.scale = self.scale * self.down
        self.scale = max(min(self.scale, self.ceiling), self.floor)
        return self.scale, self.good, self.bad, self.bad_in_a_row


@jax.jit
def history(scaling, flags):
    """Returns the metrics after each of many steps, and the scaling at the end."""

    def step(scaling, finite):
        scaling = scaling.adjust(finite)
        return scaling, scaling.metrics()

    return lax.scan(step, scaling, flags)


def expand(runs):
    """Turns `[(True, 3), (False, 1)]` into flags; the last one is repeated."""
    flags = [flag for flag, length in runs for _ in range(length)]
    return np.array((flags + flags[-1:] * STEPS)[:STEPS])


# Runs and not coin flips: a scale grows and falls over many steps.
flag_sequences = st.lists(
    st.tuples(st.booleans(), st.integers(1, 40)), min_size=1, max_size=30
).map(expand)


@pytest.mark.some(4)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@hypothesis.given(
    flags=flag_sequences,
    init=st.floats(2.0**-4, 2.0**20, width=32),
    floor=st.floats(2.0**-30, 1000.0, width=32),
    counter=st.integers(0, 20),
)
@hypothesis.settings(max_examples=25)
def test_adjust_follows_the_simulation(options, flags, init, floor, counter):
    # An array: a restored scale may be out of range, a number that is passed may not.
    scaling = DynamicLossScaling(jnp.float32(init), floor, counter=counter, **options)
    _, metrics = history(scaling, flags)
    simulation = Simulation(init, floor, counter, **options)
    expected = zip(*(simulation.step(flag) for flag in flags), strict=True)
    names = ("loss_scaling", "counter", "skipped", "consecutive_skipped")
    for name, column in zip(names, expected, strict=True):
        np.testing.assert_array_equal(metrics[name], np.array(column), err_msg=name)
    # What the simulation could get wrong in the same way:
    scale = np.asarray(metrics["loss_scaling"])
    assert scale.dtype == np.float32
    assert np.all(scale >= np.float32(floor))
    assert np.all(scale <= options.get("max_loss_scaling", 65504.0))


def test_growth_comes_after_exactly_period_steps():
    scaling = DynamicLossScaling(8.0, period=3)
    scales = history(scaling, np.ones(7, bool))[1]["loss_scaling"]
    np.testing.assert_array_equal(scales, [8, 8, 16, 16, 16, 32, 32])


def test_backoff_comes_at_once_and_restarts_the_count():
    flags = np.array([True, True, False, True, True, True])
    metrics = history(DynamicLossScaling(8.0, period=3), flags)[1]
    np.testing.assert_array_equal(metrics["loss_scaling"], [8, 8, 4, 4, 4, 8])
    np.testing.assert_array_equal(metrics["counter"], [1, 2, 0, 1, 2, 0])


def test_hysteresis_forgives_overflows():
    scaling = DynamicLossScaling(8.0, hysteresis=2, period=100)
    flags = np.array([False, True, False, False, False])
    scales = history(scaling, flags)[1]["loss_scaling"]
    # The finite step in between does not make up for the first overflow.
    np.testing.assert_array_equal(scales, [8, 8, 4, 2, 1])


def test_growth_restores_the_hysteresis():
    scaling = DynamicLossScaling(8.0, hysteresis=2, period=2)
    flags = np.array([False, True, True, False, False])
    scales = history(scaling, flags)[1]["loss_scaling"]
    np.testing.assert_array_equal(scales, [8, 8, 16, 16, 8])


def test_default_cap_is_exactly_65504():
    scaling, metrics = history(
        DynamicLossScaling(2.0**14, period=1), np.ones(300, bool)
    )
    assert float(scaling.loss_scaling) == 65504.0
    assert scaling.loss_scaling == mpx.FLOAT16_MAX
    np.testing.assert_array_equal(metrics["loss_scaling"][:3], [2**15, 65504, 65504])


@pytest.mark.parametrize("max_scale", [2.0**24, 2.0**126])
def test_scale_reaches_neither_infinity_nor_zero(max_scale):
    scaling = DynamicLossScaling.pow2(min=2.0**-126, max=max_scale, period=1)
    grown, _ = history(scaling, np.ones(300, bool))
    assert float(grown.loss_scaling) == max_scale
    fallen, metrics = history(scaling, np.zeros(300, bool))
    assert float(fallen.loss_scaling) == 2.0**-126
    assert int(fallen.skipped) == int(metrics["consecutive_skipped"][-1]) == 300
    recovered, _ = history(fallen, np.ones(300, bool))
    assert float(recovered.loss_scaling) == max_scale


def test_scale_falls_to_one_by_default_and_no_further():
    scaling, _ = history(DynamicLossScaling(), np.zeros(300, bool))
    assert float(scaling.loss_scaling) == 1.0


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("init", [np.inf, 2.0**100])
def test_scale_above_the_ceiling_comes_back_at_the_first_step(finite, init):
    scaling = DynamicLossScaling(jnp.float32(init))
    assert float(scaling.adjust(finite).loss_scaling) <= 65504.0
    assert float(scaling.adjust(finite).loss_scaling) >= 65504.0 / 2


# --- Exact arithmetic -----------------------------------------------------------------


def numbers(low, high, width):
    """Draws both signs and magnitudes in [low, high]: no underflow, no overflow."""
    magnitude = st.floats(low, high, width=width)
    return st.builds(
        lambda x, negative: -x if negative else x, magnitude, st.booleans()
    )


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@hypothesis.given(
    flags=flag_sequences,
    init=st.integers(-20, 24),
    values=st.lists(numbers(2.0**-60, 2.0**60, 32), min_size=16, max_size=16),
)
@hypothesis.settings(max_examples=25)
def test_powers_of_two_stay_so_and_scale_exactly(dtype, flags, init, values):
    limits = jnp.finfo(dtype)
    values = np.array(values, np.float32)
    x = np.where(abs(values) < limits.tiny, 0, values.clip(limits.min, limits.max))
    x = jnp.array(x.astype(dtype))
    scaling = DynamicLossScaling.pow2(2.0**init, min=2.0**-20, period=2)
    scaling, metrics = history(scaling, flags)
    mantissa, _ = np.frexp(metrics["loss_scaling"])
    np.testing.assert_array_equal(mantissa, 0.5)
    back = scaling.unscale(scaling.scale(x))
    assert_trees_equal(back, x.astype(jnp.float32))


def relative_errors(result, x, scale, operation):
    """Returns the exact relative error of each number, in units of its rounding."""
    unit = fractions.Fraction(float(np.finfo(result.dtype).eps)) / 2
    errors = []
    for got, number in zip(result.tolist(), x.tolist(), strict=True):
        true = operation(fractions.Fraction(number), fractions.Fraction(float(scale)))
        errors.append(float(abs(fractions.Fraction(got) - true) / abs(true) / unit))
    return np.array(errors)


# 2**16 is infinite in f16, 2**-30 zero, and 3000.7 not representable.
@pytest.mark.parametrize("scale", [2.0**16, 2.0**-30, 2.0**40, 3000.7])
@pytest.mark.parametrize("dtype", ["f2", "bfloat16", "f4", "f8", "c8", "c16"])
def test_scaling_happens_in_f32_or_wider(dtype, scale):
    random = np.random.default_rng(0)
    with jax.enable_x64(dtype in ("f8", "c16")):
        x = random.normal(size=(2, 64)) * 10.0 ** random.uniform(-2, 2, 64)
        x = jnp.asarray(x[0] + 1j * x[1] if dtype[0] == "c" else x[0]).astype(dtype)
        wide = x.dtype if x.dtype.itemsize > 2 else np.dtype(np.float32)
        scaling = StaticLossScaling(scale)
        results = {
            operator.mul: jax.jit(lambda s, x: s.scale(x))(scaling, x),
            # XLA may multiply by the rounded reciprocal: one rounding more.
            operator.truediv: jax.jit(lambda s, x: s.unscale(x))(scaling, x),
        }
    roundings = {operator.mul: 1, operator.truediv: 2}
    if math.frexp(scale)[0] == 0.5:
        roundings = {operator.mul: 0, operator.truediv: 0}
    for operation, result in results.items():
        assert result.dtype == wide
        for part in (np.real, np.imag) if dtype[0] == "c" else (np.asarray,):
            given = (part(np.asarray(result)), part(np.asarray(x)).astype(np.float64))
            errors = relative_errors(*given, np.float32(scale), operation)
            assert errors.max() <= roundings[operation] * (1 + 1e-6), operation


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**126])
def test_extreme_scales_are_exact_too(scale):
    # XLA divides by multiplying with the reciprocal: 1 / 2**127 would be flushed to 0.
    scaling = StaticLossScaling(scale)
    x = np.full(4, 1.5, np.float32)
    assert_trees_equal(scaling.unscale(x * np.float32(scale)), x)
    assert_trees_equal(scaling.scale(x / np.float32(scale)), x)


def test_python_and_numpy_numbers_are_scaled_too():
    tree = {"python": 0.5, "numpy": np.float32(0.5), "array": np.full(2, 0.5, "f2")}
    result = StaticLossScaling(2.0**17).scale(tree)
    for leaf in jax.tree.leaves(result):
        assert leaf.dtype == np.float32
        assert np.all(np.asarray(leaf) == 2.0**16)


def other_leaves():
    return {
        "int": 3,
        "bool": True,
        "ints": jnp.arange(3),
        "bools": np.array([True, False]),
        "bytes": np.arange(3, dtype=np.uint8),
        "float8": jnp.ones(2, jnp.float8_e4m3fn),
        "key": jax.random.key(0),
        "raw key": jax.random.PRNGKey(0),
        "str": "adam",
        "function": jnp.tanh,
        "none": None,
        "float0": np.zeros(2, jax.dtypes.float0),
    }


def test_everything_else_comes_back_as_it_is(scaling):
    tree = other_leaves()
    for result in (scaling.scale(tree), scaling.unscale(tree)):
        assert result.keys() == tree.keys()
        assert all(result[name] is tree[name] for name in tree)


def test_every_scaling_widens_to_f32(scaling):
    tree = {
        "f16": jnp.ones(2, "f2"),
        "bf16": jnp.ones(2, "bfloat16"),
        "f32": 1.0,
        "shape": jax.ShapeDtypeStruct((2,), "f2"),
    }
    for result in (scaling.scale(tree), scaling.unscale(tree)):
        assert {leaf.dtype for leaf in result.values()} == {np.dtype(np.float32)}


def test_scaled_function_returns_the_scaled_loss_and_the_plain_aux():
    def loss(x, *, offset):
        """Says hello."""
        return x + offset, {"x": x}

    wrapped = mpx.scaled(loss, StaticLossScaling(8.0), has_aux=True)
    value, aux = wrapped(jnp.float16(2.0), offset=jnp.float16(1.0))
    assert_trees_equal(value, jnp.float32(24.0))
    assert_trees_equal(aux, {"x": jnp.float16(2.0)})
    assert (wrapped.__name__, wrapped.__doc__) == ("loss", "Says hello.")


def test_scaled_function_scales_every_floating_result():
    wrapped = mpx.scaled(lambda x: {"a": x, "n": 3}, StaticLossScaling(8.0))
    assert_trees_equal(wrapped(jnp.float32(2.0)), {"a": jnp.float32(16.0), "n": 3})


# --- Life as a pytree -----------------------------------------------------------------


@jax.jit
def three_steps(scaling):
    for finite in (True, False, True):
        scaling = scaling.adjust(finite)
    return scaling


def test_leaves_are_f32_and_i32_scalars(scaling):
    for state in (scaling, three_steps(scaling)):
        for leaf in jax.tree.leaves(state):
            assert isinstance(leaf, jax.Array)
            assert leaf.shape == ()
            assert leaf.dtype in (np.float32, np.int32)
            assert not leaf.weak_type


def test_flatten_and_unflatten_give_the_same_scaling(scaling):
    leaves, structure = jax.tree.flatten(scaling)
    assert_trees_equal(jax.tree.unflatten(structure, leaves), scaling)
    hash(structure)  # part of the key of jit's cache
    # Transformations put anything into the leaves: nothing is validated again.
    jax.tree.map(lambda leaf: None, scaling)
    jax.tree.map(lambda leaf: -leaf, scaling)
    jax.tree.map(str, scaling)


def test_jit_gives_the_eager_result(scaling):
    eager = scaling.adjust(True).adjust(False).adjust(True)
    assert_trees_equal(three_steps(scaling), eager)


def test_scan_carries_it(scaling):
    flags = np.array([True, False, True])
    carried, _ = lax.scan(lambda s, f: (s.adjust(f), None), scaling, flags)
    assert_trees_equal(carried, three_steps(scaling))


def test_while_loop_and_cond_carry_it(scaling):
    looped = lax.fori_loop(0, 3, lambda i, s: s.adjust(i != 1), scaling)
    assert_trees_equal(looped, three_steps(scaling))
    adjusted = lax.cond(True, lambda s: s.adjust(False), lambda s: s, scaling)
    assert_trees_equal(adjusted, scaling.adjust(False))


def test_vmap_adjusts_each_on_its_own(dynamic):
    both = jax.tree.map(lambda x: jnp.stack([x, x]), dynamic)
    vmapped = jax.jit(jax.vmap(lambda s, f: s.adjust(f)))
    adjusted = vmapped(both, jnp.array([True, False]))
    for index, finite in enumerate([True, False]):
        one = jax.tree.map(lambda x, index=index: x[index], adjusted)
        assert_trees_equal(one, dynamic.adjust(finite))


def test_vmap_scales_each_by_its_own():
    scalings = eqx.filter_vmap(StaticLossScaling)(jnp.array([2.0, 4.0]))
    result = jax.vmap(lambda s, x: s.scale(x))(scalings, jnp.ones((2, 3)))
    np.testing.assert_array_equal(result, [[2.0] * 3, [4.0] * 3])


def test_eval_shape_gives_the_same_structure(scaling):
    shapes = jax.eval_shape(three_steps, scaling)
    assert jax.tree.structure(shapes) == jax.tree.structure(scaling)
    dtypes = lambda tree: [x.dtype for x in jax.tree.leaves(tree)]  # noqa: E731
    assert dtypes(shapes) == dtypes(scaling)


def test_scale_is_differentiated_as_a_constant_factor(scaling):
    grad = jax.grad(lambda x: scaling.scale(x * x))(jnp.float32(3.0))
    assert float(grad) == 6.0 * np.float32(scaling.loss_scaling)


def test_step_loop_compiles_once(scaling):
    traces = 0

    @jax.jit
    def step(scaling, x):
        nonlocal traces
        traces += 1
        loss = scaling.scale(x)
        return scaling.adjust(mpx.all_finite(scaling.unscale(loss)))

    for value in (1.0, np.inf, 2.0, np.nan, 3.0, 4.0, 5.0, 6.0):
        scaling = step(scaling, jnp.float32(value))
    assert traces == 1


def test_step_makes_no_transfer(scaling):
    # Under jit a read back to the host is an error by itself; what the guard adds is
    # that no constant is sent to the device at every step.
    @jax.jit
    def step(scaling, x):
        x = scaling.unscale(scaling.scale(x))
        return x, scaling.adjust(mpx.all_finite(x)), scaling.metrics()

    x, scaling, metrics = step(scaling, jnp.float32(np.nan))
    with jax.transfer_guard("disallow"):
        with pytest.raises(Exception, match="Disallowed host-to-device"):
            step(scaling, np.float32(1.0))  # the guard is awake
        for _ in range(3):
            x, scaling, metrics = step(scaling, x)
    assert metrics.keys() == scaling.metrics().keys()


@pytest.mark.parametrize(
    "jit",
    [
        functools.partial(jax.jit, donate_argnums=0),
        functools.partial(eqx.filter_jit, donate="all"),
    ],
    ids=["jax", "equinox"],
)
def test_state_made_from_one_array_can_be_donated(jit):
    one = jnp.ones(())
    scaling = DynamicLossScaling(one, one, counter=jnp.int32(0))
    step = jit(lambda s: s.adjust(False))
    for _ in range(3):
        before = scaling
        scaling = step(before)
        assert before.loss_scaling.is_deleted()
    assert int(scaling.skipped) == 3
    assert float(one) == 1.0  # the caller's array is not the state's


def test_counts_of_skipped_steps_end_at_the_largest_integer():
    most = 2**31 - 1
    scaling = DynamicLossScaling(skipped=most, consecutive_skipped=most).adjust(False)
    assert int(scaling.skipped) == int(scaling.consecutive_skipped) == most


def test_scaling_can_be_donated_in_a_loop(scaling):
    step = jax.jit(lambda s, f: s.adjust(f), donate_argnums=0)
    expected = jax.tree.map(lambda x: np.array(x, copy=True), three_steps(scaling))
    for finite in (True, False, True):
        scaling = step(scaling, jnp.array(finite))
    assert_trees_equal(scaling, expected)


def test_metrics_outlive_a_donated_state(dynamic):
    @functools.partial(jax.jit, donate_argnums=0)
    def step(scaling):
        scaling = scaling.adjust(False)
        return scaling, scaling.metrics()

    scaling, metrics = step(dynamic)
    step(scaling)
    assert int(metrics["skipped"]) == 1


@pytest.mark.some(2)
def test_replicated_scaling_stays_replicated(scaling, mesh):
    expected = scaling.adjust(False)
    replicated = NamedSharding(mesh, P())
    scaling = jax.device_put(scaling, replicated)
    x = jax.device_put(np.arange(16, dtype="f4"), NamedSharding(mesh, P("data")))

    @jax.jit
    def step(scaling, x):
        scaled = scaling.scale(x)
        finite = mpx.all_finite(scaled)
        return scaling.adjust(finite), scaled, finite

    # An infinity on one device is an infinity for all.
    after, scaled, finite = step(scaling, inject_nonfinite(x, np.inf, index=13))
    assert not finite
    assert scaled.sharding.is_equivalent_to(x.sharding, 1)
    assert_trees_equal(after, expected)
    for leaf in jax.tree.leaves(after):
        assert leaf.sharding.is_equivalent_to(replicated, 0)


def test_axis_name_makes_a_vmap_agree(dynamic):
    flags = jnp.array([True, True, False])
    scales = jax.vmap(
        lambda f: dynamic.adjust(f, axis_name="batch").loss_scaling, axis_name="batch"
    )
    scales = jax.jit(scales)
    agreed = np.asarray(scales(flags))
    assert np.all(agreed == np.float32(dynamic.adjust(False).loss_scaling))
    unanimous = np.asarray(scales(jnp.ones(3, bool)))
    assert np.all(unanimous == np.float32(dynamic.adjust(True).loss_scaling))


@pytest.mark.parametrize("bad_device", [5, None])
def test_axis_name_makes_the_devices_of_a_shard_map_agree(bad_device, mesh):
    scaling = DynamicLossScaling.pow2(2.0**10, period=1)

    def step(scaling, flags):
        # The result is the same everywhere: `P()` would be refused if it were not.
        return scaling.adjust(flags[0], axis_name="data")

    flags = np.ones(8, bool)
    if bad_device is not None:
        flags[bad_device] = False
    flags = jax.device_put(flags, NamedSharding(mesh, P("data")))
    sharded = jax.shard_map(step, in_specs=(P(), P("data")), out_specs=P())
    after = jax.jit(sharded)(scaling, flags)
    assert_trees_equal(after, scaling.adjust(bad_device is None))


def test_other_scalings_take_an_axis_name_too():
    for scaling in (NoLossScaling(), StaticLossScaling(2.0)):
        adjusted = jax.vmap(
            lambda f, s=scaling: s.adjust(f, axis_name="i").loss_scaling, axis_name="i"
        )(jnp.array([True, False]))
        assert np.all(np.asarray(adjusted) == np.float32(scaling.loss_scaling))


# --- Checkpoints ----------------------------------------------------------------------


def test_pickle_keeps_it(scaling):
    state = three_steps(scaling)
    assert_trees_equal(pickle.loads(pickle.dumps(state)), state)


def test_equinox_serialisation_keeps_it(scaling):
    state = three_steps(scaling)
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, state)
    file.seek(0)
    assert_trees_equal(eqx.tree_deserialise_leaves(file, scaling), state)


def test_orbax_keeps_it(tmp_path):
    # All of them in one checkpoint: Orbax needs a second for each.
    states = {name: three_steps(make()) for name, make in SCALINGS.items()}
    templates = {name: make() for name, make in SCALINGS.items()}
    templates["dynamic"] = jax.eval_shape(lambda: templates["dynamic"])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "scaling", states)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "scaling", templates)
    assert_trees_equal(restored, states)
    assert isinstance(restored["dynamic"], DynamicLossScaling)
    assert_trees_equal(restored["dynamic"].adjust(True), states["dynamic"].adjust(True))


# --- Casting --------------------------------------------------------------------------

CASTS = {
    "cast_tree": lambda tree: mpx.cast_tree(tree, "bf16"),
    "cast_to_half_precision": mpx.cast_to_half_precision,
    "cast_to_float16": mpx.cast_to_float16,
    "policy": mpx.get_policy("p=bf16,c=bf16,o=bf16").cast_to_compute,
    "policy param": mpx.get_policy("p=bf16,c=bf16,o=bf16").cast_to_param,
    "function": mpx.cast_function(lambda tree: tree, "bf16"),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS.keys())
def test_casting_a_training_state_leaves_the_scaling_alone(cast, scaling):
    state = cast({"scaling": scaling, "w": jnp.ones(2)})
    assert state["w"].dtype.itemsize == 2
    assert_trees_equal(state["scaling"], scaling)


# --- Metrics and the alarm ------------------------------------------------------------


def test_metrics_are_arrays_that_can_be_logged_from_jit(dynamic):
    def run(scaling):
        return three_steps(scaling).metrics()

    expected = {"counter": 1, "skipped": 1, "consecutive_skipped": 0}
    for metrics in (run(dynamic), jax.jit(run)(dynamic)):
        assert all(isinstance(value, jax.Array) for value in metrics.values())
        scale = three_steps(dynamic).loss_scaling
        assert_trees_equal(metrics.pop("loss_scaling"), scale)
        assert {name: int(value) for name, value in metrics.items()} == expected


def test_metrics_of_a_fixed_scaling_are_its_scale():
    for scaling, scale in ((NoLossScaling(), 1.0), (StaticLossScaling(8.0), 8.0)):
        assert_trees_equal(scaling.metrics(), {"loss_scaling": jnp.float32(scale)})


def test_raise_if_stuck_tells_where_to_look():
    scaling, _ = history(DynamicLossScaling(4.0, 2.0), np.zeros(5, bool))
    with pytest.raises(FloatingPointError, match=r"last 5 steps.*floor of 2\.0.*data"):
        scaling.raise_if_stuck(5)


@pytest.mark.parametrize(
    ("flags", "init"),
    [
        ([False] * 4, 4.0),  # one fewer than asked for
        ([False] * 5, 2.0**15),  # the scale can still fall
        ([False] * 20 + [True], 4.0),  # the last step was fine
        ([], 2.0),
    ],
    ids=["few", "above the floor", "recovered", "new"],
)
def test_raise_if_stuck_is_silent_otherwise(flags, init):
    scaling, _ = history(DynamicLossScaling(init, 2.0), np.array(flags, bool))
    scaling.raise_if_stuck(5)


def test_raise_if_stuck_waits_for_twenty_steps_by_default():
    scaling, _ = history(DynamicLossScaling(1.0), np.zeros(19, bool))
    scaling.raise_if_stuck()
    with pytest.raises(FloatingPointError, match="last 20 steps"):
        scaling.adjust(False).raise_if_stuck()


def test_raise_if_stuck_needs_a_positive_number():
    with pytest.raises(ValueError, match=r"`max_consecutive` must be at least 1.* 0 "):
        DynamicLossScaling().raise_if_stuck(0)


def test_raise_if_stuck_of_a_fixed_scaling_is_silent():
    for scaling in (NoLossScaling(), StaticLossScaling(8.0)):
        scaling.adjust(False).raise_if_stuck(1)


# --- What a long run, a broken restore or a look at it brings -------------------------


@pytest.mark.parametrize("finite", [True, False])
def test_scale_that_became_nan_raises_and_comes_back_at_the_floor(finite, dynamic):
    scaling = eqx.tree_at(lambda s: s.loss_scaling, dynamic, jnp.float32(jnp.nan))
    with pytest.raises(FloatingPointError, match="scale is nan.*restored"):
        scaling.raise_if_stuck()
    scaling = scaling.adjust(finite)
    assert_trees_equal(scaling.loss_scaling, dynamic.min_loss_scaling)


def test_replace_changes_one_field_and_keeps_the_rest(dynamic):
    before = dynamic.adjust(False).adjust(False).adjust(True)
    after = dataclasses.replace(before, period=7)
    assert after.period == 7
    assert_trees_equal(jax.tree.leaves(after), jax.tree.leaves(before))
    with pytest.raises(ValueError, match="`loss_scaling` must be positive"):
        dataclasses.replace(before, loss_scaling=0.0)


# --- Constructors ---------------------------------------------------------------------


def test_positional_order_is_the_papers():
    scaling = DynamicLossScaling(8.0, 0.5, 4, 10, jnp.int32(9))
    scales = [float(scaling.loss_scaling), float(scaling.min_loss_scaling)]
    assert scales == [8.0, 0.5]
    assert (scaling.factor, scaling.period, int(scaling.counter)) == (4, 10, 9)
    assert float(scaling.adjust(True).loss_scaling) == 32.0  # the tenth finite step


def test_largest_f16_scale_does_not_overflow_an_f16_loss():
    # How the paper's README starts; there the logged loss is infinite from then on.
    scaling = DynamicLossScaling(mpx.FLOAT16_MAX, jnp.ones(()), period=2000)
    loss = jnp.float16(2.0)
    assert_trees_equal(scaling.scale(loss), jnp.float32(2 * 65504.0))
    assert_trees_equal(scaling.unscale(scaling.scale(loss)), jnp.float32(2.0))


VALUES = {
    "python float": 8.0,
    "python int": 8,
    "numpy": np.float64(8),
    "numpy f16": np.float16(8),
    "jax": jnp.float32(8),
    "jax f16": jnp.float16(8),
    "jax int": jnp.int32(8),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_scale_may_be_any_number_and_is_stored_as_f32(value):
    static, dynamic = StaticLossScaling(value), DynamicLossScaling(value, value)
    for stored in (static.loss_scaling, dynamic.loss_scaling, dynamic.min_loss_scaling):
        assert_trees_equal(stored, jnp.float32(8))


@pytest.mark.parametrize("finite", [True, np.True_, jnp.array(True)], ids=type)
def test_flag_may_be_any_boolean(finite):
    assert int(DynamicLossScaling().adjust(finite).counter) == 1


@pytest.mark.parametrize(
    "flag", [1, 1.0, None, "yes", jnp.ones(2, bool), jnp.float32(1.0), [True]], ids=str
)
def test_flag_that_is_no_boolean_scalar_is_refused(flag):
    with pytest.raises(
        TypeError, match=r"`grads_finite` must be a boolean scalar.*all_"
    ):
        DynamicLossScaling().adjust(flag)


def test_values_may_be_traced():
    @jax.jit
    def make(scale, floor, counter):
        static = StaticLossScaling(scale)
        return DynamicLossScaling(scale, floor, 2, 5, counter), static

    dynamic, static = make(8.0, 2.0, 4)
    assert_trees_equal(dynamic, DynamicLossScaling(8.0, 2.0, 2, 5, 4))
    assert_trees_equal(static, StaticLossScaling(8.0))


def error(match, make, *args, exception=ValueError, **kwargs):
    return pytest.param(make, args, kwargs, exception, match, id=match[:40])


SCALE = "must be positive and finite, but {} was given.*2.0"
ERRORS = [
    *(
        error(f"`loss_scaling` {SCALE.format(text)}", make, value)
        for make in (DynamicLossScaling, StaticLossScaling)
        for value, text in (
            (0.0, r"0\.0"),
            (-1.0, r"-1\.0"),
            (math.nan, "nan"),
            (math.inf, "inf"),
            (jnp.float32(-np.inf), "-inf"),
            (jnp.float32(0), r"0\.0"),
        )
    ),
    *(
        # Processors flush a subnormal scale, or its reciprocal, to zero.
        error(r"`loss_scaling` must be in \[2\*\*-126, 2\*\*126\]", make, 2.0**power)
        for make in (DynamicLossScaling, StaticLossScaling)
        for power in (-127, 127, 200)
    ),
    *(
        error(r"`loss_scaling` must be a scalar.*\(2,\)", make, np.ones(2))
        for make in (DynamicLossScaling, StaticLossScaling)
    ),
    *(
        error(
            "`loss_scaling` must be a number, but None", make, None, exception=TypeError
        )
        for make in (DynamicLossScaling, StaticLossScaling)
    ),
    error("`min_loss_scaling` must be positive.*0", DynamicLossScaling, 8.0, 0.0),
    error(
        "`min_loss_scaling` must be positive.*nan", DynamicLossScaling, 8.0, math.nan
    ),
    *(
        error(f"`max_loss_scaling` {match}", DynamicLossScaling, max_loss_scaling=value)
        for value, match in (
            (math.inf, "must be positive.*inf"),
            (2.0**127, "must be in"),
        )
    ),
    error(
        r"`min_loss_scaling` must be at most `max_loss_scaling` \(4\.0\), but 8\.0",
        DynamicLossScaling,
        2.0,
        8.0,
        max_loss_scaling=4.0,
    ),
    error("`factor` must be more than 1, but 1", DynamicLossScaling, factor=1.0),
    error("`factor` must be more than 1, but 0.5", DynamicLossScaling, factor=0.5),
    error("`factor` must be more than 1, but nan", DynamicLossScaling, factor=math.nan),
    error("`factor` must be more than 1, but inf", DynamicLossScaling, factor=math.inf),
    error("`period` must be at least 1, but 0", DynamicLossScaling, period=0),
    error("`hysteresis` must be at least 1, but 0", DynamicLossScaling, hysteresis=0),
    error(
        "`backoff` must be between 0 and 1, but 1.0", DynamicLossScaling, backoff=1.0
    ),
    error(
        "`backoff` must be between 0 and 1, but 0.0", DynamicLossScaling, backoff=0.0
    ),
    *(
        error(
            f"`loss_scaling` must be a number, but {text}",
            make,
            value,
            exception=TypeError,
        )
        for make in (DynamicLossScaling, StaticLossScaling)
        for value, text in (("5", "'5' of type str"), (b"5", "b'5' of type bytes"))
    ),
    *(
        error(
            f"`{name}` must be a number, but '5' of type str",
            DynamicLossScaling,
            exception=TypeError,
            **{name: "5"},
        )
        for name in ("min_loss_scaling", "max_loss_scaling", "factor", "backoff")
    ),
    *(
        error(
            f"`{name}` must be an integer, but {value} of type {kind}",
            DynamicLossScaling,
            exception=TypeError,
            **{name: value},
        )
        for name in ("period", "hysteresis", "counter", "skipped", "tolerance")
        for value, kind in ((2.5, "float"), (math.inf, "float"))
    ),
    *(
        error(f"`{name}` must be 0 or more, but -1", DynamicLossScaling, **{name: -1})
        for name in ("counter", "skipped", "consecutive_skipped")
    ),
    error("`tolerance` must be at least 1, but 0", DynamicLossScaling, tolerance=0),
    error("`skipped` must be at most 2147483647", DynamicLossScaling, skipped=2**31),
    error("`init` must be a power of two, but 3000.0", DynamicLossScaling.pow2, 3000.0),
    error("`min` must be a power of two, but 3.0", DynamicLossScaling.pow2, min=3.0),
    error("`max` must be a power of two", DynamicLossScaling.pow2, max=65504.0),
    error("`factor` must be a power of two", DynamicLossScaling.pow2, factor=3.0),
    error("`backoff` must be a power of two", DynamicLossScaling.pow2, backoff=0.3),
]


@pytest.mark.parametrize(("make", "args", "kwargs", "exception", "match"), ERRORS)
def test_wrong_value_is_refused(make, args, kwargs, exception, match, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as for users
    with pytest.raises(exception, match=match):
        make(*args, **kwargs)


@pytest.mark.parametrize("dtype", ["f16", "float16", jnp.float16, np.dtype("f2")])
def test_default_for_f16_is_a_power_of_two_scaling(dtype):
    assert_trees_equal(mpx.default_loss_scaling(dtype), DynamicLossScaling.pow2())


@pytest.mark.parametrize("dtype", ["bf16", jnp.bfloat16, "f32", "float64"])
def test_default_for_wide_ranges_is_no_scaling(dtype):
    assert mpx.default_loss_scaling(dtype) == NoLossScaling()


def test_default_follows_the_configured_half_precision():
    assert isinstance(mpx.default_loss_scaling(), DynamicLossScaling)
    with mpx.half_precision("bf16"):
        assert isinstance(mpx.default_loss_scaling(), NoLossScaling)


def test_default_refuses_what_is_no_floating_dtype():
    with pytest.raises(ValueError, match="must be a floating dtype.*int32"):
        mpx.default_loss_scaling(jnp.int32)
