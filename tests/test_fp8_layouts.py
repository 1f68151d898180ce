"""Tensors in 8 bits in both orders of their axes, as GPUs before Blackwell want them."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from models import normal
from mpx import fp8
from mpx._fp8 import _operands
from mpx._fp8._dot import fp8_dot
from mpx._fp8._operands import MatmulSpec, cast_scaled
from mpx.recipes import CurrentScaling
from test_fp8_scales import LAYOUTS, exact, problem

BF16 = jnp.bfloat16
pytestmark = pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend:DeprecationWarning"
)


@pytest.fixture
def transposing(monkeypatch):
    """As on a Hopper GPU; here plain JAX takes the place of the kernel."""
    monkeypatch.setattr(_operands, "transposing_pays", lambda: True)


def as_f32(x):
    return np.asarray(x.astype(jnp.float32))


def as_bits(x):
    """The codes; there are several for nan."""
    bits = np.asarray(lax.bitcast_convert_type(x, jnp.uint8))
    return np.where(np.isnan(as_f32(x)), 0x7F, bits)


# --- the kernel -----------------------------------------------------------------------

TENSORS = {
    "normal": lambda shape: normal(0, *shape),
    "huge and tiny": lambda shape: (
        normal(1, *shape) * np.exp2(np.random.default_rng(2).integers(-15, 6, shape))
    ),
    "inf and nan": lambda shape: (
        jnp.ones(shape)
        .at[3, 5]
        .set(jnp.inf)
        .at[60, 7]
        .set(-jnp.inf)
        .at[9, 9]
        .set(jnp.nan)
    ),
}


@pytest.mark.some(2)
@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
def test_kernel_casts_and_transposes(tensor, clip, form):
    x = TENSORS[tensor]((128, 384)).astype(BF16)
    # Without a clip nothing may be out of range.
    factor = jnp.float32([4.0 if clip else 2.0**-8])
    codes, transposed = _operands.cast_and_transpose(
        x, factor, form, clip=clip, interpret=True
    )
    want = as_bits(cast_scaled(x, factor[0], form, clip=clip))
    np.testing.assert_array_equal(as_bits(codes), want)
    np.testing.assert_array_equal(as_bits(transposed), want.T)


@pytest.mark.parametrize(
    ("capability", "pays"),
    [(None, False), ((8, 0), False), ((8, 9), True), ((9, 0), True), ((10, 0), False)],
)
def test_tensors_are_transposed_for_gpus_that_cannot_sum_over_the_first_axis(
    monkeypatch, capability, pays
):
    monkeypatch.setattr(_operands, "gpu_capability", lambda: capability)
    assert _operands.transposing_pays() == pays


@pytest.mark.parametrize("leading", [1, 2])
def test_both_orders_of_three_axes(leading):
    x = normal(0, 4, 6, 10, dtype=BF16)
    codes, transposed = _operands.quantize_both(
        x, jnp.float32(0.5), "e4m3", leading=leading, clip=False
    )
    order = (*range(leading, 3), *range(leading))
    np.testing.assert_array_equal(as_bits(transposed), as_bits(codes).transpose(order))
    np.testing.assert_array_equal(
        as_bits(codes), as_bits(cast_scaled(x, jnp.float32(2), "e4m3", clip=False))
    )


# --- matmuls --------------------------------------------------------------------------


@pytest.mark.some(2)
@pytest.mark.usefixtures("transposing")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_of_transposed_codes_are_exact(layout):
    a, b, g, dimensions, side = problem(layout)
    # Small integers: nothing is rounded, in whatever order they are added.
    a, b, g = (jnp.round(x) for x in (a, b, g))
    plan = MatmulSpec(dimensions, a.dtype, side, CurrentScaling())
    program = jax.jit(
        lambda a, b, g: (
            fp8_dot(plan, a, b, None, None),
            jax.vjp(lambda a, b: fp8_dot(plan, a, b, None, None), a, b)[1](g),
        )
    )
    out, grads = program(a, b, g)
    for got, want in zip((out, *grads), exact(a, b, g, dimensions), strict=True):
        rounded = jnp.asarray(want, jnp.float32).astype(BF16)
        np.testing.assert_array_equal(as_f32(got), as_f32(rounded))


@pytest.mark.usefixtures("transposing")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_sum_is_over_last_axes(layout):
    a, b, g, dimensions, side = problem(layout)
    plan = MatmulSpec(dimensions, a.dtype, side, CurrentScaling())

    def step(a, b, g):
        return jax.vjp(lambda a, b: fp8_dot(plan, a, b, None, None), a, b)[1](g)

    found = [eqn for eqn in equations(jax.make_jaxpr(step)(a, b, g)) if is_dot(eqn)]
    assert found
    for eqn in found:
        axes, _ = eqn.params["dimension_numbers"]
        for operand, summed in zip(eqn.invars, axes, strict=True):
            rank = operand.aval.ndim
            assert sorted(summed) == list(range(rank - len(summed), rank))


def is_dot(eqn):
    return eqn.primitive.name == "dot_general"


def equations(jaxpr):
    """All equations of a jaxpr, those for CUDA GPUs left out."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        inner = eqn.params.get("branches", ())
        if eqn.primitive.name == "cond" and inner:
            inner = inner[-1:]
        for value in (*eqn.params.values(), *inner):
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                yield from equations(value)


# --- one input, several weights -------------------------------------------------------


def attention_inputs(params, x):
    """Three products of one input and one of another, weights used once."""
    q, k, v = (x @ params[name] for name in "qkv")
    return jnp.mean((jnp.tanh(q * k + v) @ params["o"]).astype(jnp.float32) ** 2)


def attention_problem():
    params = {name: normal(i, 64, 64, dtype=BF16) for i, name in enumerate("qkvo")}
    return params, normal(4, 32, 64, dtype=BF16)


def casts(func, *args):
    """How often tensors of a shape are cast to e4m3, by shape."""
    return collections.Counter(
        eqn.outvars[0].aval.shape
        for eqn in equations(jax.make_jaxpr(func)(*args))
        if eqn.primitive.name == "convert_element_type"
        and eqn.params["new_dtype"] == jnp.float8_e4m3fn
    )


def test_an_input_of_several_weights_is_quantised_once():
    params, x = attention_problem()
    found = casts(fp8(attention_inputs, min_gain=0), params, x)
    assert found == {(32, 64): 2, (64, 64): 4}


def test_sharing_changes_no_gradient():
    params, x = attention_problem()
    # Copies are other tensors: nothing is shared.
    apart = fp8(
        lambda params, xs: jnp.mean(
            (
                jnp.tanh(
                    (xs[0] @ params["q"]) * (xs[1] @ params["k"]) + xs[2] @ params["v"]
                )
                @ params["o"]
            ).astype(jnp.float32)
            ** 2
        ),
        min_gain=0,
        params=0,  # the copies are differentiated, too
    )
    together = fp8(attention_inputs, min_gain=0)
    one, dx = jax.jit(jax.grad(together, argnums=(0, 1)))(params, x)
    other, dxs = jax.jit(jax.grad(apart, argnums=(0, 1)))(params, (x, x, x))
    assert casts(apart, params, (x, x, x))[32, 64] == 4
    for name, got in one.items():
        np.testing.assert_array_equal(as_f32(got), as_f32(other[name]))
    # Three bf16 numbers are added in either order: two roundings of 2⁻⁹ of the sum of
    # their magnitudes.
    total = sum(map(as_f32, dxs))
    size = sum(abs(as_f32(d)) for d in dxs)
    assert np.all(abs(as_f32(dx) - total) <= 2 * 2.0**-8 * size)


def test_nothing_is_shared_between_traces():
    params, x = attention_problem()

    def loss(params, x):
        inner = jax.jit(lambda w: jnp.sum((x @ w).astype(jnp.float32)))
        looped, _ = lax.scan(lambda c, w: (c + inner(w), None), 0.0, params["q"][None])
        branch = lax.cond(looped > 0, inner, lambda w: inner(-w), params["k"])
        return looped + branch + jnp.sum((x @ params["v"]).astype(jnp.float32))

    # Small integers: nothing is rounded.
    params, x = jax.tree.map(lambda x: jnp.round(2 * x), (params, x))
    got = jax.jit(jax.value_and_grad(fp8(loss, min_gain=0)))(params, x)
    want = jax.jit(jax.value_and_grad(loss))(params, x)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(as_f32(a), as_f32(b)), got, want
    )


# --- sharded --------------------------------------------------------------------------


@pytest.mark.some(1)
@pytest.mark.usefixtures("transposing")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [("x",), (None, "x")])
def test_transposed_codes_on_eight_devices_are_those_on_one(kind, spec):
    params, x = attention_problem()
    params = jax.tree.map(lambda w: jnp.round(w * 2), params)
    x = jnp.round(x * 2)

    def loss(params, x):
        return jnp.sum((x @ params["q"]).astype(jnp.float32))

    step = jax.grad(fp8(loss, min_gain=0), argnums=(0, 1))
    want = jax.jit(step)(params, x)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    rows = NamedSharding(mesh, PartitionSpec("x"))
    weights = NamedSharding(mesh, PartitionSpec(*spec))
    if kind == AxisType.Explicit:
        weights = NamedSharding(mesh, PartitionSpec())  # a sum over shards is ambiguous
    with jax.set_mesh(mesh):
        got = jax.jit(step)(jax.device_put(params, weights), jax.device_put(x, rows))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(as_f32(jax.device_get(a)), as_f32(b))


@pytest.mark.usefixtures("transposing")
def test_gathered_weight_may_have_its_batch_axis_between_the_others():
    w, x = normal(0, 32, 2, 48, dtype=BF16), normal(1, 2, 64, 32, dtype=BF16)
    w, x = jnp.round(2 * w), jnp.round(2 * x)

    def loss(w, x):
        axes = (((2,), (0,)), ((0,), (1,)))
        return jnp.sum(lax.dot_general(x, w, axes).astype(jnp.float32))

    step = jax.jit(jax.grad(fp8(loss, min_gain=0, params=0), argnums=(0, 1)))
    want = step(w, x)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    last, rows = (
        NamedSharding(mesh, PartitionSpec(*x)) for x in ((None, None, "x"), (None, "x"))
    )
    got = step(jax.device_put(w, last), jax.device_put(x, rows))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(as_f32(jax.device_get(a)), as_f32(b))


# By name: the kind of the mesh's axis, how weights are sharded, and whether both orders of
# their codes are made.
BOTH_ORDERS = {
    "one device": (None, (), True),
    "automatic": (AxisType.Auto, (), False),
    "explicit": (AxisType.Explicit, (None, "x"), True),
    "manual": (AxisType.Manual, (), True),
}


@pytest.mark.usefixtures("transposing")
@pytest.mark.parametrize("name", BOTH_ORDERS)
def test_weights_that_may_be_gathered_have_one_order(name, monkeypatch):
    kind, spec, both = BOTH_ORDERS[name]
    found, quantize = set(), _operands.quantize_both

    def record(x, *args, **kwargs):
        found.add(x.shape)
        return quantize(x, *args, **kwargs)

    monkeypatch.setattr(_operands, "quantize_both", record)
    x, w = jnp.ones((48, 32), BF16), jnp.ones((32, 64), BF16)
    step = jax.grad(fp8(lambda w, x: jnp.sum(jnp.tanh(x @ w)), min_gain=0))
    if kind is not None:
        outside = AxisType.Auto if kind == AxisType.Manual else kind
        mesh = jax.make_mesh((8,), ("x",), axis_types=(outside,))
        whole, sharded = (NamedSharding(mesh, PartitionSpec(*x)) for x in ((), spec))
        x, w = jax.device_put(x, whole), jax.device_put(w, sharded)
        if kind == AxisType.Manual:
            specs = (PartitionSpec(),) * 2
            step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs[0])
    jax.jit(step).lower(w, x)
    assert ((32, 64) in found) == both
    assert (48, 32) in found  # the input has both wherever it is
