"""Error feedback: sums in 8 bits that lose nothing over many steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from mpx import ErrorFeedback

pytestmark = pytest.mark.standard_promotion

POLICY = mpx.Policy(compute_dtype="f32", reduce_dtype="e4m3")
SHAPES = {"w": (72, 130), "b": (7,)}  # no whole blocks
NONE = mpx.NoLossScaling()


def local_grads():
    """The gradients of eight devices, f32: a few large numbers among very small ones."""
    rng = np.random.default_rng(0)

    def draw(shape):
        size = np.exp(rng.standard_normal((8, *shape)) * 4 - 8)
        return (rng.standard_normal((8, *shape)) * size).astype(np.float32)

    return {name: draw(shape) for name, shape in SHAPES.items()}


GRADS = local_grads()


def loss(params, grads):
    """A function whose gradient is the mean of the given ones."""
    parts = jax.tree.map(lambda p, g: jnp.sum(p * jnp.mean(g, 0)), params, grads)
    return sum(jax.tree.leaves(parts))


def zeros_of(grads):
    return jax.tree.map(lambda g: jnp.zeros(g.shape[1:]), grads)


def check_total(grads, totals, feedback, steps):
    """What was sent in some steps and what is left add up to the gradients."""
    for name, grad in grads.items():
        left = np.asarray(feedback.residual[name], np.float64).mean(0)
        total = np.asarray(totals[name], np.float64)
        mean = grad.astype(np.float64).mean(0)
        # Each step rounds to f32 what is added, which the sum of all is larger than.
        bound = steps * 2.0**-23 * steps * abs(grad).max(0)
        assert np.all(abs(total + left - steps * mean) <= bound)
        # A device keeps at most half a step of e4m3, 1/16 of a number, and one of bf16.
        assert np.all(abs(left) <= abs(grad).max() / 8)


# --- many steps -----------------------------------------------------------------------


def many_steps(grads, steps, *, with_feedback):
    """Adds up the means of equal gradients. A `vmap` stands for the devices: it is fast."""
    step = mpx.value_and_grad(loss, axis_name="data", policy=POLICY)
    params = zeros_of(grads)

    def device(feedback, grads):
        given = (feedback,) if with_feedback else ()
        result = step(NONE, *given, params, jax.tree.map(lambda g: g[None], grads))
        return result.grads, result.feedback if with_feedback else feedback

    run = jax.vmap(device, (1, 0), (0, 1), axis_name="data")

    def body(carry, _):
        total, feedback = carry
        means, feedback = run(feedback, grads)
        return (jax.tree.map(lambda t, g: t + g[0], total, means), feedback), None

    empty = ErrorFeedback(jax.tree.map(lambda g: jnp.zeros((1, *g.shape)), grads))
    many = jax.jit(lambda carry: lax.scan(body, carry, None, length=steps)[0])
    total, feedback = many((params, empty))
    return total, jax.tree.map(lambda r: r[0], feedback)


def test_thousand_steps_of_one_gradient_add_up_to_it():
    steps = 1000
    grads = {"w": GRADS["w"][:, :5], "b": GRADS["b"]}
    wanted = grads["w"].astype(np.float64).mean(0)
    found = {}
    for with_feedback in (True, False):
        total, feedback = many_steps(grads, steps, with_feedback=with_feedback)
        found[with_feedback] = np.asarray(total["w"], np.float64) / steps
        if with_feedback:
            check_total(grads, total, feedback, steps)
    error = {key: abs(x - wanted) / abs(wanted) for key, x in found.items()}
    # Roundings without feedback are the same in all steps: 2⁻⁴ of a number at most, or all
    # of one that is small for its block.
    assert np.median(error[False]) > 2.0**-8
    assert np.max(error[False]) > 0.5
    assert np.median(error[True]) < 2.0**-4 / 100
    biased = abs(found[False] - wanted).sum()
    assert abs(found[True] - wanted).sum() < biased / 100


# --- eight devices --------------------------------------------------------------------


def manual(mesh, axes, steps=1, **options):
    """The gradient function inside `shard_map`; each device returns its own gradients."""
    func = mpx.accumulate(loss, steps, axis_name=axes, policy=POLICY, **options)

    def device(*args):
        result = func(*args)
        return result._replace(grads=jax.tree.map(lambda g: g[None], result.grads))

    rows = P(axes)
    return jax.shard_map(
        device,
        mesh=mesh,
        in_specs=(P(), rows, P(), rows),
        out_specs=mpx.GradResult(P(), P(), rows, P(), P(), P(), rows),
        check_vma=False,
    )


def automatic(mesh, axes, steps=1, **options):
    """The gradient function of automatic sharding."""
    return mpx.accumulate(loss, steps, axis_name=axes, policy=POLICY, **options)


# By name: the function, the mesh, the axes of the batch, how `w` is sharded, the options.
CASES = {
    "shard_map": (manual, {"data": 8}, "data", P(), {}),
    "shard_map, two axes": (manual, {"a": 4, "b": 2}, ("a", "b"), P(), {}),
    "shard_map, a window": (manual, {"data": 8}, "data", P(), {"steps": 2}),
    "automatic": (automatic, {"data": 8}, "data", P(), {}),
    "FSDP, a window": (automatic, {"data": 8}, "data", P("data"), {"steps": 2}),
    "FSDP, a sum": (
        automatic,
        {"data": 8},
        "data",
        P("data"),
        {"steps": 2, "mean": False},
    ),
    "FSDP×TP": (automatic, {"data": 4, "model": 2}, "data", P("data", "model"), {}),
}


def placed(name, dtype="f32"):
    """The gradient function and its arguments, and how many windows the batch has."""
    make, sizes, axes, spec, options = CASES[name]
    kinds = (AxisType.Auto,) * len(sizes)
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)
    specs = {"w": NamedSharding(mesh, spec), "b": NamedSharding(mesh, P())}
    params = jax.device_put(zeros_of(GRADS), specs)
    feedback = ErrorFeedback.init(params, mesh, axes, dtype=dtype)
    # Each device has the rows of one gradient, once for each part of the window.
    repeated = jax.tree.map(
        lambda g: np.repeat(g, options.get("steps", 1), axis=0), GRADS
    )
    grads = jax.device_put(repeated, NamedSharding(mesh, P(axes)))
    return jax.jit(make(mesh, axes, **options)), feedback, params, grads


@pytest.mark.parametrize("name", CASES)
def test_devices_send_all_of_their_gradients(name):
    run, feedback, params, grads = placed(name)
    _, sizes, axes, _, options = CASES[name]
    total = zeros_of(GRADS)
    for _ in range(3):
        result = run(NONE, feedback, params, grads)
        feedback, means = result.feedback, jax.device_get(result.grads)
        if CASES[name][0] is manual:
            for copies in means.values():
                assert np.all(copies == copies[:1])  # the same on all devices
            means = jax.tree.map(lambda g: g[0], means)
        if not options.get("mean", True):
            means = jax.tree.map(lambda g: g / 16, means)
        total = jax.tree.map(np.add, total, means)
    parts = 2 if not options.get("mean", True) else 1
    residual = jax.tree.map(lambda r: np.asarray(r) / parts, feedback.residual)
    # With four shards each has the mean of two gradients.
    shards = sizes["data"] if axes == "data" else 8
    shares = {
        key: g.reshape(shards, -1, *g.shape[1:]).mean(1) for key, g in GRADS.items()
    }
    check_total(shares, total, ErrorFeedback(residual), 3)
    sharding = jax.tree.leaves(feedback)[0].sharding
    assert sharding.spec[0] == axes
    before = jax.tree.leaves(placed(name)[1])[0].sharding
    assert sharding.is_equivalent_to(before, 3)  # the next step is not compiled again


@pytest.mark.parametrize("name", ["shard_map", "FSDP, a window"])
def test_skipped_step_leaves_the_feedback_alone(name):
    run, feedback, params, grads = placed(name, dtype="bf16")
    scaling = mpx.DynamicLossScaling.pow2(2.0**4)
    good = run(scaling, feedback, params, grads)
    bad = {**grads, "w": grads["w"].at[-1, 3, 5].set(jnp.inf)}
    bad = run(
        good.scaling, good.feedback, params, jax.device_put(bad, grads["w"].sharding)
    )
    assert bool(good.finite)
    assert not bool(bad.finite)
    mpx.testing.assert_trees_equal(good.feedback, bad.feedback)
    assert {x.dtype for x in jax.tree.leaves(bad.feedback)} == {jnp.bfloat16.dtype}
    # Residuals have no loss scale in them: the smaller one changes nothing.
    assert float(bad.scaling.loss_scaling) == 2.0**3
    once, again = (run(x, good.feedback, params, grads) for x in (scaling, bad.scaling))
    mpx.testing.assert_trees_equal(once.feedback, again.feedback)
    mpx.testing.assert_trees_equal(once.grads, again.grads)


def test_saved_feedback_goes_on_as_if_nothing_had_happened(tmp_path):
    run, feedback, params, grads = placed("shard_map")
    first = run(NONE, feedback, params, grads).feedback
    mpx.checkpoint.save(tmp_path / "state", first)
    restored = mpx.checkpoint.restore(tmp_path / "state", feedback)
    mpx.testing.assert_trees_equal(restored, first)
    results = [run(NONE, x, params, grads) for x in (first, restored)]
    mpx.testing.assert_trees_equal(results[0].grads, results[1].grads)


# --- mistakes -------------------------------------------------------------------------


def with_other(**changes):
    def call():
        run, feedback, params, grads = placed("shard_map")
        residual = {**feedback.residual, **changes}
        if changes.get("w", 0) is None:
            del residual["w"]
        run(NONE, ErrorFeedback(residual), params, grads)

    return call


def with_policy():
    step = mpx.value_and_grad(loss, axis_name="data", policy="p=f32,c=f32,o=f32")
    _, feedback, params, grads = placed("shard_map")
    step(NONE, feedback, params, grads)


def with_axis():
    mesh = jax.make_mesh((8,), ("data",))
    ErrorFeedback.init(zeros_of(GRADS), mesh, "batch")


ERRORS = {
    "another shape": (
        with_other(b=np.zeros((8, 9), np.float32)),
        r"`b` of the `ErrorFeedback` has the shape \(1, 9\).*needs \(1, 7\).*P\(axis_name\)",
    ),
    "a missing leaf": (
        with_other(w=None),
        r"has 1 residuals, but there are 2 gradients",
    ),
    "another dtype of sums": (with_policy, r'`policy=Policy\(reduce_dtype="e4m3"\)`'),
    "no such axis": (
        with_axis,
        r"names no axis of the mesh, whose axes are \('data',\)",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_mistakes_are_told(name):
    call, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_shapes_give_shapes():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, P("data", "model"))
    params = {
        "w": jax.ShapeDtypeStruct((8, 4), jnp.bfloat16, sharding=sharding),
        "n": 3,
    }
    found = ErrorFeedback.init(params, mesh, "data", dtype="bf16").residual
    assert found["n"] is None
    assert (found["w"].shape, found["w"].dtype) == ((4, 8, 4), jnp.bfloat16)
    assert found["w"].sharding.spec == P("data", None, "model")
