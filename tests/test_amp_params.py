"""Under `amp` biases of parameters follow to 16 bits; masks, targets and positions do not."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import mpx
from models import normal, store, stored
from mpx import amp

T, D = 6, 8
X = normal(0, T, D)
W = normal(1, 3, D, D) / 2
LOWEST = {"finfo": float(jnp.finfo(jnp.float32).min), "-1e9": -1e9}


def dtypes_of(func, *args):
    """Returns the dtypes in which `store` holds what it is given."""
    return stored(jax.make_jaxpr(func)(*args))


# --- What is no parameter stays f32 ---------------------------------------------------


def attention(w, x, mask):
    q, k, v = (x @ w[i] for i in range(3))
    return jax.nn.softmax(q @ k.T * 2.0**-1 + mask) @ v


def mask_of(lowest):
    """Returns a causal mask whose second row, too, masks everything."""
    allowed = jnp.tril(jnp.ones((T, T), bool)).at[1].set(False)
    return jnp.where(allowed, 0.0, lowest)


def over_devices(func):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(func, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)


def as_argument(low, mask):
    return lambda w, x: low(attention)(w, x, mask)


def closed_over(low, mask):
    return lambda w, x: low(lambda w, x: attention(w, x, mask))(w, x)


def in_a_tree(low, mask):
    def func(params, batch):
        return attention(params["w"], batch["x"], batch["mask"])

    return lambda w, x: low(func)({"w": w}, {"x": x, "mask": mask})


def tree_first(low, mask):
    def func(batch, w):
        return attention(w, batch["x"], batch["mask"])

    return lambda w, x: low(func)({"x": x, "mask": mask}, w)


def in_scan(low, mask):
    def func(w, x, mask):
        return lax.scan(lambda h, w: (attention(w, h, mask), None), x, w[None])[0]

    return lambda w, x: low(func)(w, x, mask)


def mapped_inside(low, mask):
    func = jax.vmap(attention, in_axes=(None, 0, None))
    return lambda w, x: low(func)(w, x[None], mask)[0]


def mapped_outside(low, mask):
    def call(w, x):
        return jax.vmap(low(attention), in_axes=(None, 0, None))(w, x[None], mask)[0]

    return call


def of_keys(low, mask):
    """The mask has one axis, as a bias has; nothing but its values tells them apart."""
    return lambda w, x: low(attention)(w, x, jnp.full((1, T), jnp.min(mask)))


MASKED = {
    "argument": as_argument,
    "closed over": closed_over,
    "in a tree": in_a_tree,
    "in the first tree": tree_first,
    "in a scan": in_scan,
    "vmap inside": mapped_inside,
    "vmap outside": mapped_outside,
    "shard_map": lambda low, mask: over_devices(as_argument(low, mask)),
    "of keys": of_keys,
}


@pytest.mark.some(1)
@pytest.mark.parametrize(("dtype", "lowest"), [("f16", "-1e9"), ("bf16", "finfo")])
@pytest.mark.parametrize("name", MASKED)
def test_fully_masked_row_is_that_of_f32(name, dtype, lowest):
    mask = mask_of(LOWEST[lowest])
    func = MASKED[name](lambda f: amp(f, dtype=dtype), mask)
    if name == "of keys":
        mask = jnp.full((1, T), LOWEST[lowest])

    def loss(w):
        out = func(w, X)
        return jnp.sum(out**2), out

    grad = mpx.value_and_grad(loss, has_aux=True, policy="p=f32,c=f32,o=f32")
    result = jax.jit(grad)(mpx.StaticLossScaling(8.0), W)
    # Inputs of order 1 are rounded, and so are products of D terms, three after another.
    atol = 3 * D * 2.0**-8 * float(jnp.max(jnp.abs(X)))
    np.testing.assert_allclose(result.aux, attention(W, X, mask), atol=atol)
    assert bool(result.finite)


def test_target_above_the_range_of_f16_is_a_number():
    def loss(w, x, y):
        return jnp.mean((x @ w - y) ** 2)

    w, y = jnp.ones((D, 1)), jnp.full(T, 1e5)[:, None]
    for target in (y, jnp.full((1, 1), 1e5)):
        value = amp(loss, dtype="f16")(w, X, target)
        np.testing.assert_allclose(value, loss(w, X, target), rtol=2.0**-10)


POSITIONS = {
    "column": lambda x, w, p: x @ w + p[:, None],
    "stored as a column": lambda x, w, p: x @ w + p.reshape(-1, 1),
    "row": lambda x, w, p: (x @ w).T + p[None],
    "closed over": lambda x, w, p: x @ w + ALL_POSITIONS[:, None],
}
ALL_POSITIONS = jnp.arange(1000.0, 1000 + T)


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("grad", [False, True])
def test_positions_above_256_are_not_rounded(name, grad):
    def func(w, x, p):
        return jnp.moveaxis(POSITIONS[name](x, w, p), -1, 0)

    wanted = func(0 * W[0], X, ALL_POSITIONS)
    low = amp(func, dtype="bf16")
    if grad:
        low = lambda *args: jax.vjp(lambda w: amp(func)(w, *args[1:]), args[0])[0]  # noqa: E731
    np.testing.assert_array_equal(low(0 * W[0], X, ALL_POSITIONS), wanted)


def test_number_that_is_closed_over_may_be_data_and_stays_f32():
    target, lowest = jnp.float32(1000.7), jnp.float32(LOWEST["finfo"])
    off = amp(lambda x: store(x @ W[0] - target))
    for func in (off, jax.jit(off), lambda x: jax.vjp(off, x)[0]):
        assert dtypes_of(func, X) == ["float32"]
    keep = jnp.eye(T, D, dtype=bool)
    masked = amp(lambda x: store(jnp.where(keep, x @ W[0], lowest)))
    assert dtypes_of(masked, X) == ["float32"]
    assert bool(jnp.all(jnp.isfinite(masked(X))))


# --- What is a parameter follows ------------------------------------------------------


class Layer(eqx.Module):
    weight: jax.Array
    bias: jax.Array

    def __call__(self, x):
        return x @ self.weight + self.bias


LAYER = Layer(W[0], W[0, :1])  # (1, D): ranks must agree in these tests
TREE = {"weight": LAYER.weight, "bias": LAYER.bias}


def apply(tree, x):
    return x @ tree["weight"] + tree["bias"]


def test_an_equinox_module_under_amp_is_trained():
    model = eqx.nn.MLP(8, 4, 16, depth=1, key=jax.random.key(0))
    loss = lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)  # noqa: E731
    module, x = amp(model), normal(1, 32, 8)
    value, grads = eqx.filter_value_and_grad(loss)(module, x)
    wanted = eqx.filter_value_and_grad(amp(loss))(model, x)
    mpx.testing.assert_trees_equal((value, grads.func), wanted)
    stepped = eqx.filter_jit(eqx.apply_updates)(module, grads)
    mpx.testing.assert_trees_equal(
        stepped.func, eqx.filter_jit(eqx.apply_updates)(model, wanted[1])
    )
    called = jax.jit(amp(model.__call__))
    mpx.testing.assert_trees_equal(jax.jit(module)(x[0]), called(x[0]))


def test_a_batch_of_the_same_structure_is_no_part_of_the_model():
    def func(p, batch):
        return store(batch["bias"] @ p["weight"] + batch["weight"])

    batch = {"weight": W[0, :1], "bias": X}
    assert dtypes_of(amp(func), TREE, batch) == ["float32"]
    # Where one of them has a hole, the other is not all that is missing.
    assert dtypes_of(amp(func), TREE | {"bias": None}, batch) == ["float32"]


def test_report_of_a_partitioned_model_counts_the_gradients_of_the_trained_part():
    names = ("weight", "bias")
    trained, frozen = (
        {x: TREE[x] if x == kept else None for x in names} for kept in names
    )
    func = lambda p, q, x: jnp.sum(apply(eqx.combine(p, q), x) ** 2)  # noqa: E731
    reports = [
        mpx.inspect.report(amp(func), *parts, X)
        for parts in ((trained, frozen), (frozen, trained))
    ]
    passes = [[row.place.backward for row in report.matmuls] for report in reports]
    assert passes == [[False, True], [False]]
    places = [report.matmuls[0].place.param for report in reports]
    assert places == ["p/weight", "q/weight"]


def test_bias_that_may_be_an_input_does_not_follow():
    def func(x, w, b):
        return store(x @ w + b)

    assert dtypes_of(amp(func), X, *TREE.values()) == ["float32"]
    closed = amp(lambda x: store(x @ LAYER.weight + LAYER.bias))
    assert dtypes_of(closed, X) == ["float32"]


SHAPES = {
    "bias of a convolution": ((D, 1, 1), (D, 2, 3), "bfloat16"),
    "position embedding": ((1, 3, D), (2, 3, D), "bfloat16"),
    "attention bias": ((1, T, T), (2, T, T), "float32"),
    "same shape as the result": ((2, 3, D), (2, 3, D), "bfloat16"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_axes_of_a_parameter_tell_whether_it_follows(name):
    given, shape, dtype = SHAPES[name]

    def func(params, x):
        h = (x @ normal(2, D, shape[-1])).reshape(shape) + params["p"]
        # A matmul reads it, and what comes after that: it is stored.
        return h + 0.0 * (h @ jnp.ones((shape[-1], shape[-1])))

    x = normal(3, int(np.prod(shape)) // shape[-1], D)
    h = amp(func)({"p": normal(4, *given)}, x)
    is_rounded = np.array_equal(h, h.astype(jnp.bfloat16).astype(jnp.float32))
    assert is_rounded == (dtype == "bfloat16")


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_parameter_keeps_its_range(name):
    b = jnp.array([[1e30, LOWEST["finfo"], jnp.inf, -jnp.inf, jnp.nan, 0.1]])
    out = amp(Layer(jnp.zeros((D, 6)), b), dtype=name)(X)[0]
    np.testing.assert_array_equal(out, b[0])
