"""Delayed scaling: its state, how it is observed, and how it is carried along."""

import functools
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from models import normal
from mpx import fp8
from mpx.recipes import CurrentScaling, DelayedScaling, Fp8State
from mpx.testing import assert_trees_equal

BF16 = jnp.bfloat16
SCALING = mpx.NoLossScaling()
POLICY = "p=f32,c=bf16,o=f32"
delayed = functools.partial(fp8, recipe=DelayedScaling(history=3), min_gain=0)


def layers(p, x):
    def layer(h, w):
        @jax.checkpoint
        def block(h, w):
            return h + jax.jit(lambda h: jnp.tanh(h @ w["up"]) @ w["down"])(h)

        return block(h, w), None

    h, _ = lax.scan(layer, x, p)
    return jnp.mean(h.astype(jnp.float32) ** 2)


@functools.cache
def problem(rows=32):
    sizes = jnp.asarray([1.0, 2.0, 4.0]).reshape(3, 1, 1)
    p = {
        "up": (normal(0, 3, 32, 48) * 0.2 * sizes).astype(BF16),
        "down": (normal(1, 3, 48, 32) * 0.2).astype(BF16),
    }
    return p, normal(2, rows, 32, dtype=BF16)


F8 = delayed(layers)
observe = jax.jit(jax.grad(F8, argnums=(0, 1)))


@functools.cache
def initial():
    return F8.init(*problem())


def by_param(state):
    return {path.rpartition(":")[0]: x for path, x in state.amaxes.items()}


def test_state_is_stacked_along_the_scan():
    p, x = problem()
    state = initial()
    assert {name: a.shape for name, a in by_param(state).items()} == {
        "p/up": (3, 3, 3),
        "p/down": (3, 3, 3),
    }


def test_f32_model_runs_under_amp_by_itself():
    p, x = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), problem())
    by_hand = delayed(mpx.amp(layers, "bf16"))
    state = F8.init(p, x)
    assert_trees_equal(state, by_hand.init(p, x))
    found, want = (
        str(jax.make_jaxpr(jax.grad(func, argnums=(0, 1)))(state, p, x))
        for func in (F8, by_hand)
    )
    assert found == want


def test_state_holds_the_largest_magnitude_of_each_layer():
    p, x = problem()
    state = by_param(initial())
    for name in p:
        want = jnp.max(jnp.abs(p[name]), axis=(1, 2)).astype(jnp.float32)
        assert np.array_equal(state[f"p/{name}"][:, 0, 1], want)
    assert np.array_equal(
        state["p/up"][0, 0, 0], jnp.max(jnp.abs(x)).astype(jnp.float32)
    )
    assert np.all(np.asarray(state["p/up"][..., 0, 2]) > 0)


def test_init_from_shapes_is_empty():
    p, x = problem()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (p, x))
    state = delayed(layers).init(*shapes)
    assert jax.tree.structure(state) == jax.tree.structure(initial())
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state))


def test_init_takes_the_loss_scale():
    p, x = problem()
    one = by_param(initial())["p/up"]
    two = by_param(delayed(layers).init(p, x, scaling=2.0**10))["p/up"]
    assert_trees_equal(one[..., :2], two[..., :2])
    assert_trees_equal(one[..., 2] * 2.0**10, two[..., 2])


def test_first_step_is_that_of_current_scaling():
    # The state was filled by this very batch: the scales are the same.
    p, x = problem()
    _, grads = observe(initial(), p, x)
    current = fp8(layers, CurrentScaling(), min_gain=0)
    assert_trees_equal(grads, jax.jit(jax.grad(current))(p, x))


def test_gradient_of_the_state_is_what_was_seen_and_update_pushes_it():
    p, x = problem()
    state = initial()
    observed, _ = observe(state, jax.tree.map(lambda w: w * 2, p), x)
    new = by_param(state.update(observed))["p/up"]
    old = by_param(state)["p/up"]
    assert np.array_equal(new[:, 0, 1], old[:, 0, 1] * 2)
    assert np.array_equal(new[:, 1:], old[:, :-1])


def test_history_forgets_after_its_length():
    p, x = problem()
    state = F8.init(jax.tree.map(lambda w: w * 8, p), x)
    seen = []
    for _ in range(3):
        state = state.update(observe(state, p, x)[0])
        seen.append(float(jnp.max(by_param(state)["p/up"][0, :, 1])))
    assert seen[0] == seen[1] == 8 * seen[2]


def test_scales_come_from_the_history():
    # A weight that grows eightfold within a step is clipped, and not by current scaling.
    w, x = jnp.eye(32, dtype=BF16), jnp.eye(32, dtype=BF16)
    f8 = delayed(lambda w, x: x @ w)
    state = f8.init(w, x)
    # 1 has the scale 2**-8, whose largest number is 448 / 256.
    assert float(f8(state, w * 8, x)[0, 0]) == 448 / 256
    margin = fp8(f8.func, DelayedScaling(history=3, margin=3), min_gain=0)
    assert float(margin(state, w * 8, x)[0, 0]) == 8.0


def test_margin_of_huge_numbers_does_not_overflow():
    w, x = jnp.eye(32, dtype=BF16) * 2.0**120, jnp.eye(32, dtype=BF16)
    f8 = fp8(lambda w, x: x @ w, DelayedScaling(history=3, margin=8), min_gain=0)
    state = Fp8State({"w:0": jnp.ones((3, 3)).at[0, 1].set(2.0**120)})
    assert float(f8(state, w, x)[0, 0]) == 2.0**120


@pytest.mark.parametrize("step", [0, 1, 2])
def test_any_step_of_the_history_may_hold_the_largest(step):
    w, x = jnp.eye(32, dtype=BF16), jnp.eye(32, dtype=BF16)
    f8 = delayed(lambda w, x: x @ w)
    state = jax.tree.map(lambda a: a.at[step].set(8 * a[0]), f8.init(w, x))
    assert float(f8(state, w * 8, x)[0, 0]) == 8.0


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_overflow_does_not_enter_the_history(bad):
    p, x = problem()
    state = initial()
    new = state.update(observe(state, p, x.at[0, 0].set(bad))[0])
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(new))


def test_branch_not_taken_keeps_its_history():
    def loss(p, x, which):
        experts = [lambda p, x: x @ p["a"], lambda p, x: x @ p["b"]]
        return jnp.sum(lax.switch(which, experts, p, x).astype(jnp.float32))

    p = {"a": jnp.ones((32, 32), BF16), "b": jnp.full((32, 32), 2, BF16)}
    x = jnp.ones((16, 32), BF16)
    f8 = delayed(loss)
    state = f8.init(p, x, 0)
    found = by_param(state)
    assert np.all(found["p/a"][0] > 0)
    assert not np.any(found["p/b"])
    state = state.update(jax.jit(jax.grad(f8))(state, p, x, 1))
    found = by_param(state)
    assert np.array_equal(found["p/a"][0], found["p/a"][1])
    assert np.array_equal(found["p/b"][:, 1], [2.0, 0.0, 0.0])


def test_jitted_layer_called_twice_has_two_states():
    layer = jax.jit(lambda x, w: x @ w)
    loss = lambda p, x: jnp.sum(layer(layer(x, p), p).astype(jnp.float32))  # noqa: E731
    w, x = jnp.full((32, 32), 0.5, BF16), jnp.ones((16, 32), BF16)
    state = delayed(loss).init(w, x)
    assert len(state.amaxes) == 2
    inputs = sorted(float(a[0, 0]) for a in state.amaxes.values())
    assert inputs == [1.0, 16.0]


AROUND = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "jit of checkpoint": lambda f: jax.jit(jax.checkpoint(f)),
    "two jits": lambda f: jax.jit(lambda *args: jax.jit(f)(*args)),
    "a scope": jax.named_scope("block"),
    "amp": functools.partial(mpx.amp, dtype="bf16"),
}


def shared(around):
    """Three uses of two parameters; the numbers are small integers."""
    layer = around(lambda w, x: jnp.minimum(x @ w, 3))

    def loss(p, x):
        return jnp.sum(
            layer(p["b"], layer(p["a"], layer(p["a"], x))), dtype=jnp.float32
        )

    p = {"a": jnp.eye(32, dtype=BF16), "b": jnp.full((32, 32), 2, BF16)}
    return loss, p, jnp.full((16, 32), 2, BF16)


@pytest.mark.some(1)
@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_state_does_not_depend_on_what_is_around_a_layer(around):
    loss, p, x = shared(lambda f: f)
    state = delayed(loss).init(p, x)
    assert list(state.amaxes) == ["p/a:0", "p/a:1", "p/b:0"]
    f8 = delayed(shared(around)[0])
    assert_trees_equal(f8.init(p, x), state)
    # A saved state goes on.
    observe = jax.grad(f8, argnums=(0, 1))
    expected = jax.grad(delayed(loss), argnums=(0, 1))(state, p, x)
    assert_trees_equal(observe(state, p, x), expected)


def in_loops(p, x):
    def layer(h, _):
        return jnp.minimum(h @ p["a"], 3), None

    h, _ = lax.scan(layer, x, None, length=2)
    h, _ = lax.scan(jax.checkpoint(layer), h, None, length=2)
    h = lax.cond(h[0, 0] > 9, lambda h, w: h @ w, lambda h, w: h @ (-w), h, p["a"])
    return jnp.sum(h @ p["a"], dtype=jnp.float32)


def test_each_use_in_a_loop_or_branch_has_its_own_history():
    _, p, x = shared(lambda f: f)
    f8 = delayed(in_loops)
    state = f8.init(p, x)
    assert {key: a.shape[:-2] for key, a in state.amaxes.items()} == {
        "p/a:0": (2,),
        "p/a:1": (2,),
        "p/a:2": (),
        "p/a:3": (),
        "p/a:4": (),
    }
    seen = {key: np.ravel(a[..., 0, 0]).tolist() for key, a in state.amaxes.items()}
    # The condition is false, whose branch JAX puts first.
    assert seen == {
        "p/a:0": [2.0, 2.0],
        "p/a:1": [2.0, 2.0],
        "p/a:2": [2.0],
        "p/a:3": [0.0],
        "p/a:4": [2.0],
    }
    observed = jax.jit(jax.grad(f8))(state, p, x)
    assert_trees_equal(
        jax.tree.map(lambda a: a[..., 0, :], observed.amaxes),
        jax.tree.map(lambda a: a[..., 0, :], state.amaxes),
    )


def test_shard_map_scales_by_what_is_there():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def loss(w, x):
        f = jax.shard_map(
            lambda w, x: x @ w,
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=P("data"),
        )
        return jnp.sum(f(w, x).astype(jnp.float32))

    w, x = jnp.ones((32, 32), BF16), jnp.ones((128, 32), BF16)
    f8 = delayed(loss)
    state = f8.init(w, x)
    assert not state.amaxes
    assert_trees_equal(jax.grad(f8, argnums=1)(state, w, x), jax.grad(loss)(w, x))


# --- with the gradient functions ------------------------------------------------------


stepped = jax.jit(mpx.value_and_grad(F8, policy=POLICY))


def test_value_and_grad_returns_the_next_state():
    p, x = problem()
    state = initial()
    result = stepped(SCALING, state, p, x)
    observed, grads = observe(state, p, x)
    assert isinstance(result.fp8, Fp8State)
    assert_trees_equal(result.fp8, state.update(observed))
    assert_trees_equal(
        result.grads, jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    )


def test_other_functions_have_no_state():
    p, x = problem()
    result = jax.jit(mpx.value_and_grad(layers, policy=POLICY))(SCALING, p, x)
    assert result.fp8 is None


def test_overflow_leaves_the_state_alone():
    p, x = problem()
    state = initial()
    result = stepped(SCALING, state, p, x.at[0, 0].set(np.inf))
    assert not bool(result.finite)
    assert_trees_equal(result.fp8, state)


@pytest.mark.parametrize("kind", ["grows", "shrinks"])
def test_state_follows_the_loss_scale(kind):
    p, x = problem()
    if kind == "shrinks":
        x = x.at[0, 0].set(np.inf)
    scaling = mpx.DynamicLossScaling.pow2(2.0**4, period=1)
    state = F8.init(p, problem()[1], scaling=scaling)
    result = stepped(scaling, state, p, x)
    factor = 2.0 if kind == "grows" else 0.5
    assert float(result.scaling.loss_scaling) == factor * 2**4
    assert bool(result.finite) is (kind == "grows")
    # As if the scale had been another one all along.
    other = F8.init(p, problem()[1], scaling=factor * 2**4)
    if kind == "grows":
        other = stepped(SCALING, initial(), p, x).fp8.rescaled(factor * 2**4)
    assert_trees_equal(result.fp8, other)
    found = stepped(result.scaling, result.fp8, p, problem()[1])
    want = stepped(SCALING, other.rescaled(1 / (factor * 2**4)), p, problem()[1])
    assert_trees_equal(found.grads, want.grads)


def test_accumulation_takes_the_largest_of_all_parts():
    p, x = problem(rows=64)
    x = x.at[3].multiply(16)  # one part of four has much larger inputs
    state = initial()
    step = jax.jit(mpx.accumulate(F8, steps=4, policy=POLICY))
    new = step(SCALING, state, p, x).fp8
    want = jnp.max(jnp.abs(x)).astype(jnp.float32)
    assert float(by_param(new)["p/up"][0, 0, 0]) == float(want)
    # One push for the window, not one for each part.
    assert np.array_equal(by_param(new)["p/up"][:, 1:], by_param(state)["p/up"][:, :-1])


def test_devices_agree_on_the_largest():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    w, x = jnp.ones((32, 32), BF16), jnp.ones((128, 32), BF16).at[17].set(5)
    loss = lambda w, x: jnp.mean((x @ w).astype(jnp.float32))  # noqa: E731
    f8 = delayed(loss)
    state = f8.init(w, x[:16])

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P()
    )
    def step(state, w, x):
        grad = mpx.value_and_grad(f8, policy=POLICY, axis_name="data")
        return grad(SCALING, state, w, x).fp8

    (new,) = jax.jit(step)(state, w, x).amaxes.values()
    assert np.array_equal(new[0, :2], [5.0, 1.0])


def test_jax_grad_in_shard_map_agrees_on_the_largest():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    w, x = jnp.ones((32, 32)), jnp.ones((128, 32)).at[17].set(5)
    f8 = delayed(lambda w, x: jnp.sum(x @ w))
    state, step = f8.init(w, x[:32]), jax.grad(f8, argnums=(0, 1))
    specs = (P(), P(), P("data"))
    sharded = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P())
    observed, grads = jax.jit(sharded)(state, w, x)
    assert observed.amaxes["w:0"][0].tolist() == [5.0, 1.0, 1.0]
    assert np.array_equal(grads, jnp.broadcast_to(x.sum(0)[:, None], (32, 32)))


def test_state_on_eight_devices_is_that_on_one():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    p, x = problem()
    state = initial()
    step = jax.jit(jax.grad(F8))
    sharded = jax.device_put(x, NamedSharding(mesh, P("data")))
    replicated = jax.device_put((state, p), NamedSharding(mesh, P()))
    one, many = step(state, p, x), step(*replicated, sharded)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
        # Weights and the first input are the same numbers; later ones are sums in
        # another order, one ulp of bf16 apart at most.
        np.testing.assert_allclose(a, b, rtol=2.0**-7)
        assert np.array_equal(a[..., 1], b[..., 1])


def test_training_loop_is_a_scan():
    p, x = problem()

    def step(carry, _):
        p, state = carry
        result = mpx.value_and_grad(F8, policy=POLICY)(SCALING, state, p, x)
        p = jax.tree.map(lambda w, g: w - (0.05 * g).astype(w.dtype), p, result.grads)
        return (p, result.fp8), result.value

    _, losses = jax.jit(lambda c: lax.scan(step, c, None, length=5))((p, initial()))
    assert np.all(np.diff(losses) < 0)


# --- inside other wrappers ---------------------------------------------------------

WRAPPERS = {
    "jit": jax.jit,
    "filter_jit": eqx.filter_jit,
    "checkpoint": jax.checkpoint,
    "partial": functools.partial,
}


def linear(w, x):
    return jnp.sum((x @ w).astype(jnp.float32))


SMALL = jnp.ones((32, 32), BF16)


def test_signature_tells_of_the_state():
    assert str(inspect.signature(delayed(linear))) == "(fp8_state, /, w, x)"
    taken = delayed(lambda fp8_state, *rest: rest[0] @ fp8_state)
    assert str(inspect.signature(taken)) == "(fp8_state_, /, fp8_state, *rest)"


@pytest.mark.some(1)
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_state_is_found_through(wrap):
    f8 = delayed(linear)
    state = f8.init(SMALL, SMALL)
    step = mpx.value_and_grad(wrap(f8), policy=POLICY)
    result = step(SCALING, state, SMALL, SMALL * 2)
    expected = mpx.value_and_grad(f8, policy=POLICY)(SCALING, state, SMALL, SMALL * 2)
    assert_trees_equal(result, expected)
    assert_trees_equal(
        eqx.filter_jit(f8)(state, SMALL, SMALL), wrap(linear)(SMALL, SMALL)
    )
    with pytest.raises(TypeError, match="no place in the paper's tuples"):
        mpx.filter_grad(wrap(f8))


def test_donation_counts_scaling_and_state():
    f8 = delayed(linear)
    step = jax.jit(mpx.value_and_grad(f8, policy=POLICY), donate_argnums=(1, 3))
    result = step(SCALING, f8.init(SMALL, SMALL), SMALL, jnp.copy(SMALL))
    assert float(result.value) == 32.0**3


def test_bound_state_is_refused():
    f8 = delayed(linear)
    bound = functools.partial(f8, f8.init(SMALL, SMALL))
    for transform in (mpx.value_and_grad, functools.partial(mpx.accumulate, steps=2)):
        with pytest.raises(
            TypeError, match="takes an `Fp8State` after the loss scaling"
        ):
            transform(bound)(SCALING, SMALL, SMALL)


class Counting(nnx.Module):
    def __init__(self):
        kernel = {"dtype": BF16, "param_dtype": BF16, "use_bias": False}
        self.layer = nnx.Linear(32, 32, rngs=nnx.Rngs(0), **kernel)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return self.layer(x)


@pytest.mark.parametrize(
    "recipe", [CurrentScaling(), DelayedScaling(history=2)], ids=str
)
def test_nnx_module_under_fp8_counts_its_calls(recipe):
    model = Counting()
    f8 = fp8(model, recipe, min_gain=0)
    state = (f8.init(SMALL),) if f8.has_state else ()  # pyright: ignore[reportFunctionMemberAccess]
    assert model.calls[...] == 0
    for _ in range(2):
        f8(*state, SMALL)  # pyright: ignore[reportCallIssue]
    assert model.calls[...] == 2


# --- errors ---------------------------------------------------------------------------


def test_state_comes_first():
    p, x = problem()
    with pytest.raises(
        TypeError, match="the first argument is an `Fp8State`, but dict"
    ):
        delayed(layers)(p, x)
    with pytest.raises(TypeError, match="takes an `Fp8State` after the loss scaling"):
        mpx.value_and_grad(delayed(layers))(SCALING, p, x)


def test_state_of_another_function_is_refused():
    p, x = problem()
    state = delayed(lambda p, x: jnp.sum(x @ p["up"][0])).init(p, x)
    # One is used in the scan too, but outside of one it has no axis for its steps.
    with pytest.raises(
        ValueError,
        match=r"it has none for `p/down:0`; it has them for other lengths of scans "
        r"around `p/up:0`\. .* make it anew with `.init\(\*args\)`",
    ):
        delayed(layers)(state, p, x)


def test_state_of_more_layers_is_refused():
    loss, p, x = shared(lambda f: f)
    state = delayed(loss).init(p, x)
    one = delayed(lambda p, x: jnp.sum(x @ p["a"]))
    with pytest.raises(
        ValueError, match="needs: nothing uses `p/a:1`, `p/b:0`. It was"
    ):
        one(state, p, x)


def test_state_of_another_history_is_refused():
    loss, p, x = shared(lambda f: f)
    state = delayed(loss).init(p, x)
    other = fp8(loss, DelayedScaling(history=4), min_gain=0)
    message = r"`p/a:0` .* shape \(3, 3\), but `DelayedScaling\(history=4\)` keeps"
    with pytest.raises(ValueError, match=message):
        other(state, p, x)
    with pytest.raises(ValueError, match=message):
        mpx.value_and_grad(other, policy=POLICY)(SCALING, state, p, x)


def test_init_needs_something_to_differentiate():
    w, x = jnp.ones((32, 32), BF16), jnp.ones((16, 32), BF16)
    with pytest.raises(TypeError, match="returned no floating array"):
        delayed(lambda w, x: jnp.int32((x @ w)[0, 0])).init(w, x)
