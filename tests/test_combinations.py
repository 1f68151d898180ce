"""Every precision with every way to update, each on a placement of devices in turn.

So every pair of the three is tried, and with `--exhaustive` every combination. A cell
trains to the numbers of f32, or raises an error that says what to use instead.
"""

import functools
import itertools
import math
import re

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from combinations import (
    CELLS,
    PAGE,
    PLACEMENTS,
    PRECISIONS,
    REFUSED,
    ROUNDINGS,
    SGD,
    STEPS,
    UPDATES,
    loss,
    page,
    problem,
)
from models import equations, multiplied

pytestmark = [
    # As users run it: f32 inputs times bf16 parameters, and optax.
    pytest.mark.standard_promotion,
]


def flat(params):
    return np.concatenate([np.ravel(np.float64(params[name])) for name in problem()[0]])


@functools.cache
def reference(steps=STEPS):
    """Returns the weights before and after some steps with JAX and optax alone."""
    params, x, y = problem()
    start, state = flat(params), SGD.init(params)
    for _ in range(steps):
        updates, state = SGD.update(jax.grad(loss)(params, x, y), state, params)
        params = optax.apply_updates(params, updates)
    return start, flat(params)


def bound(precision, update):
    """Returns the error that roundings may make, as a share of the distance moved."""
    # They are independent: their squares add up.
    return math.hypot(*PRECISIONS[precision].roundings, *ROUNDINGS.get(update, ()))


def placed(training, placement):
    """Returns the step, jitted, and its arguments where they belong."""
    _, *batch = problem()
    if placement == "one device":
        return jax.jit(training.step), training.carry, batch
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    along = NamedSharding(mesh, P("data"))
    if placement == "shard_map":
        step = jax.shard_map(
            functools.partial(training.step, axis_name="data"),
            mesh=mesh,
            in_specs=(P(), P("data"), P("data")),
            out_specs=P(),
        )
        everywhere = NamedSharding(mesh, P())
        carry = jax.device_put(training.carry, everywhere)
        return jax.jit(step), carry, jax.device_put(batch, along)
    shardings = jax.tree.map(
        lambda x: (
            along if x.ndim == 2 and x.shape[0] % 8 == 0 else NamedSharding(mesh, P())
        ),
        training.carry,
    )
    assert along in jax.tree.leaves(shardings)
    step = jax.jit(training.step, out_shardings=(shardings, NamedSharding(mesh, P())))
    carry = jax.device_put(training.carry, shardings)
    return step, carry, jax.device_put(batch, along)


def dtypes_of_matmuls(jaxpr):
    """Returns what the matmuls multiply; in fp8 what their operands are rounded to."""
    rounded = {
        str(eqn.params["new_dtype"])
        for eqn in equations(jaxpr)
        if eqn.primitive.name == "convert_element_type"
    }
    return multiplied(jaxpr), rounded


def train(precision, update, placement):
    """Trains three steps; returns the weights, the losses and the dtypes of matmuls."""
    training = UPDATES[update](PRECISIONS[precision])
    step, carry, batch = placed(training, placement)
    traced = step.trace(carry, *batch)
    compiled = traced.lower().compile()
    values = []
    for _ in range(STEPS):
        carry, value = jax.block_until_ready(compiled(carry, *batch))
        values.append(float(value))
    # From the host: what reads them is compiled for one device, not for each placement.
    weights = training.weights(jax.device_get(carry))
    return flat(weights), values, dtypes_of_matmuls(traced.jaxpr)


def pairs():
    """Returns one cell for each precision and update; their placements take turns."""
    placements = list(PLACEMENTS)
    return [
        (precision, update, placements[(i + j) % len(placements)])
        for i, precision in enumerate(PRECISIONS)
        for j, update in enumerate(UPDATES)
    ]


def pytest_generate_tests(metafunc):
    names = ("precision", "update", "placement")
    if set(names) <= set(metafunc.fixturenames):
        exhaustive = metafunc.config.getoption("exhaustive")
        metafunc.parametrize(names, CELLS if exhaustive else pairs(), ids=str)


def test_every_pair_of_choices_is_tried():
    for two in itertools.combinations(range(3), 2):
        found, all_pairs = (
            {tuple(cell[index] for index in two) for cell in cells}
            for cells in (pairs(), CELLS)
        )
        assert found == all_pairs


@pytest.mark.some(1)
def test_combination_trains_as_f32_does_or_says_what_to_use(
    precision, update, placement
):
    refusal = REFUSED.get((precision, update, placement))
    if refusal is not None:
        with pytest.raises(TypeError, match=re.escape(refusal)):
            train(precision, update, placement)
        return
    weights, values, (operands, rounded) = train(precision, update, placement)
    start, expected = reference()
    error = np.linalg.norm(weights - expected) / np.linalg.norm(expected - start)
    assert error < bound(precision, update)
    assert values[0] > values[1] > values[2]
    # It has happened, and is not f32 that looks right.
    dtypes = PRECISIONS[precision].dtypes
    if precision.startswith("fp8"):
        assert dtypes <= rounded
    else:
        assert operands == dtypes


def test_page_is_what_the_table_says():
    # When this fails, run `python tests/combinations.py`.
    assert PAGE.read_text(encoding="utf-8") == page()


def test_the_widest_bound_would_show_a_skipped_step():
    start, expected = reference()
    _, skipped = reference(STEPS - 1)
    error = np.linalg.norm(skipped - expected) / np.linalg.norm(expected - start)
    bounds = [bound(*cell[:2]) for cell in CELLS]
    assert max(bounds) < error / 1.5
    assert min(bounds) < 2e-3
