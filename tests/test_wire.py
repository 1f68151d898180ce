"""What goes over the wire: the dtype of sums over devices, how often, and with what error."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from mpx.inspect import collectives

pytestmark = pytest.mark.standard_promotion

LAYERS, WIDTH, HIDDEN, ROWS = 3, 32, 48, 64
UNIT = 2.0**-11  # half an ulp of f16 at 1; CPUs sum f16 as it is, but bf16 in f32


def normal(seed, *shape):
    scale = shape[-2] ** -0.5 if len(shape) > 1 else 1.0
    return np.random.default_rng(seed).standard_normal(shape) * scale


PARAMS = {
    "table": normal(0, 16, WIDTH) * 4,
    "layers": {
        "up": normal(1, LAYERS, WIDTH, HIDDEN),
        "down": normal(2, LAYERS, HIDDEN, WIDTH),
        "bias": normal(3, LAYERS, HIDDEN),
    },
    "kernel": normal(4, 3, WIDTH, WIDTH),
    "head": normal(5, WIDTH, 16),
}
TOKENS = (np.arange(ROWS * 4).reshape(ROWS, 4) * 7 % 16).astype(np.int32)


def loss(params, tokens, pin=lambda x: x):
    """Embedding, convolution, scanned and rematerialised layers, head."""
    x = pin(params["table"][tokens])
    numbers = ("NWC", "WIO", "NWC")
    x = x + lax.conv_general_dilated(
        x, params["kernel"], (1,), "SAME", dimension_numbers=numbers
    )

    @jax.checkpoint
    def block(x, w):
        return pin(x + jnp.tanh(x @ w["up"] + w["bias"]) @ w["down"])

    x, _ = lax.scan(lambda x, w: (block(x, w), None), x, params["layers"])
    return jnp.mean((x @ params["head"]) ** 2)


@functools.cache
def exact():
    """The gradient in f64."""
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.jit(jax.grad(loss))(PARAMS, TOKENS))


def error(grads):
    """The largest relative error of a leaf."""
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(exact()), strict=True)
    return max(
        np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y)
        for x, y in pairs
    )


LAYOUTS = {
    "data": ((8,), ("data",), {}),
    "fsdp": (
        (8,),
        ("data",),
        {"up": P(None, "data"), "down": P(None, None, "data"), "head": P("data")},
    ),
    "both": (
        (4, 2),
        ("data", "model"),
        {
            "up": P(None, "data", "model"),
            "down": P(None, "model", "data"),
            "head": P("data"),
            "kernel": P(None, None, "model"),
        },
    ),
}


def placed(layout, kind=AxisType.Auto):
    """Returns the mesh, and parameters and tokens on it."""
    sizes, names, specs = LAYOUTS[layout]
    mesh = jax.make_mesh(sizes, names, axis_types=(kind,) * len(names))

    def put(path, leaf):
        spec = specs.get(path[-1].key, P())
        return jax.device_put(jnp.asarray(leaf, jnp.float32), NamedSharding(mesh, spec))

    params = jax.tree_util.tree_map_with_path(put, PARAMS)
    return mesh, params, jax.device_put(TOKENS, NamedSharding(mesh, P("data")))


def sums(compiled, least=2**10):
    """The dtypes of the larger sums over devices in a compiled program."""
    kinds = ("all-reduce", "reduce-scatter")
    return {
        x.dtype
        for x in collectives(compiled)
        if x.kind in kinds and x.bytes >= least and x.devices != 2
    }


# --- The list of collectives ----------------------------------------------------------

TEXT = """
HloModule jit_f, num_partitions=8

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %g = bf16[64,32]{1,0} all-gather(%x), replica_groups={{0,1},{2,3}}, dimensions={0}
  %c = (f8e4m3fn[8,4]{1,0}, f32[8]{0}) all-to-all(%q, %s), replica_groups=[1,8]<=[8]
}

%wrapped (p: f32[16]) -> f32[2] {
  ROOT %r = f32[2]{0} reduce-scatter(%p), replica_groups=mesh['a'=4,'b'=2] {'a','b'}
}

ENTRY %main (p: f32[16]) -> f32[16] {
  %w = (s32[], f32[8]) while(%t), body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %s = ((f32[16]), f32[2], s32[]) async-start(%p), calls=%wrapped
  %d = f32[2]{0} async-done(%s), calls=%wrapped
  %a = ((f32[6]{0}), f32[6]{0}) all-reduce-start(%p), replica_groups={{0,1,2,3}}
  %b = (f16[4]{0}, f32[]) all-reduce(%p, %q), replica_groups=mesh['a'=4,'b'=2] {'a'}
  %z = c64[4]{0} all-reduce(%p), replica_groups={{0,1},{2,3}}
}
"""


def test_collectives_are_read_with_dtypes_groups_loops_and_bytes():
    assert collectives("") == []
    found = [tuple(x) for x in collectives(TEXT)]
    assert found == [
        ("all-gather", "bf16", (64, 32), 2, 5, True, 5 * 64 * 32 * 2 // 2),
        ("all-to-all", "e4m3", (8, 4), 8, 5, True, 5 * 32 * 7 // 8),
        ("all-to-all", "f32", (8,), 8, 5, True, 5 * 32 * 7 // 8),
        ("reduce-scatter", "f32", (2,), 8, 1, False, 8 * 7),
        ("all-reduce", "f32", (6,), 4, 1, False, 2 * 24 * 3 // 4),
        ("all-reduce", "f16", (4,), 4, 1, False, 2 * 8 * 3 // 4),
        ("all-reduce", "f32", (), 4, 1, False, 2 * 4 * 3 // 4),
        ("all-reduce", "c64", (4,), 2, 1, False, 2 * 32 // 2),
    ]


# --- Sums by XLA ----------------------------------------------------------------------


def gradient(by, choice, mesh, params):
    """The jitted gradient of the loss, by `amp` alone, by a policy, or both."""
    options = {} if choice is None else {"reduce_dtype": choice}
    rows = NamedSharding(mesh, P("data"))
    pinned = functools.partial(
        loss, pin=functools.partial(lax.with_sharding_constraint, shardings=rows)
    )
    shardings = jax.tree.map(lambda x: x.sharding, params)
    if by == "amp":
        scaled = mpx.amp(lambda p, x: pinned(p, x) * 64.0, "f16", **options)
        return jax.jit(jax.grad(scaled), out_shardings=shardings)
    func = mpx.amp(pinned, "f16") if by == "policy of amp" else pinned
    policy = mpx.Policy(compute_dtype="f16", **options)
    take = mpx.value_and_grad(func, policy=policy)
    scaling = mpx.StaticLossScaling(64.0)
    return jax.jit(lambda *args: take(scaling, *args).grads, out_shardings=shardings)


@pytest.mark.some(1)
@pytest.mark.filterwarnings("ignore:A function under `amp` in f16")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("by", ["amp", "policy", "policy of amp"])
def test_reduce_dtype_is_the_dtype_of_sums_over_devices(by, layout):
    mesh, *args = placed(layout)
    found = {}
    for choice in (None, "compute"):
        compiled = gradient(by, choice, mesh, args[0]).lower(*args).compile()
        found[choice] = sums(compiled), compiled(*args)
    (default, grads), (compute, _) = found.values()
    assert default == {"f32"}
    # Embeddings are summed in f32 under `amp`.
    assert "f16" in compute
    factor = 64.0 if by == "amp" else 1.0
    grads = jax.tree.map(lambda x: x / factor, grads)
    # Seven matmuls in a chain, forward and backward, of three roundings each.
    assert error(grads) <= 14 * 3 * UNIT


def test_one_device_computes_as_ever():
    args = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), PARAMS), TOKENS
    default, compute = (
        str(jax.make_jaxpr(jax.grad(mpx.amp(loss, "bf16", reduce_dtype=x)))(*args))
        for x in (None, "compute")
    )
    assert default == compute
    found = str(
        jax.make_jaxpr(jax.grad(mpx.amp(loss, "bf16", reduce_dtype="f32")))(*args)
    )
    assert found != default


def test_explicit_axes_sum_in_f32_too():
    mesh, params, tokens = placed("data", AxisType.Explicit)
    w = params["layers"]["up"][0]

    def linear(w, x):
        return jnp.mean((x @ w) ** 2) * 64.0

    x = jax.device_put(jnp.ones((ROWS, WIDTH)), NamedSharding(mesh, P("data")))
    found = {}
    with jax.set_mesh(mesh):
        for choice in (None, "compute"):
            take = mpx.value_and_grad(
                linear, policy=mpx.Policy(compute_dtype="f16", reduce_dtype=choice)
            )
            step = jax.jit(
                lambda w, x, take=take: take(mpx.StaticLossScaling(1.0), w, x).grads
            )
            found[choice] = sums(step.lower(w, x).compile())
    assert found == {None: {"f32"}, "compute": {"f16"}}


def test_words_are_part_of_a_policys_string():
    policy = mpx.get_policy("p=f32,c=bf16,o=f32,r=compute")
    assert policy.reduce_dtype == "compute"
    assert mpx.get_policy(str(policy)) == policy


ERRORS = {
    "amp in 8 bits": (lambda: mpx.amp(loss, reduce_dtype="e4m3"), "at least 16 bits"),
    "policy in 8 bits": (
        lambda: mpx.get_policy("p=f32,c=bf16,o=f32,r=e4m3"),
        "Unknown dtype 'e4m3'",
    ),
    "amp with a word": (lambda: mpx.amp(loss, reduce_dtype="fast"), "`reduce_dtype`"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_impossible_choices_are_refused(name):
    make, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        make()


# --- One sum per window ---------------------------------------------------------------


def window(choice=None, steps=2, func=None, **options):
    policy = mpx.Policy(compute_dtype="bf16", reduce_dtype=choice)
    func = mpx.amp(loss) if func is None else func
    options = {"policy": policy, "axis_name": "data", **options}
    return jax.jit(mpx.accumulate(func, steps, **options))


@pytest.mark.some(1)
@pytest.mark.parametrize("choice", [None, "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_window_is_summed_once_however_parameters_are_sharded(layout, choice):
    mesh, params, tokens = placed(layout)
    # The axis of the batch is that of the shards.
    whole = functools.partial(
        lax.with_sharding_constraint, shardings=NamedSharding(mesh, P())
    )
    step = window(choice, func=mpx.amp(functools.partial(loss, pin=whole)))
    compiled = step.lower(mpx.NoLossScaling(), params, tokens).compile()
    result = compiled(mpx.NoLossScaling(), params, tokens)
    for grad, param in zip(*map(jax.tree.leaves, (result.grads, params)), strict=True):
        is_same = grad.sharding.is_equivalent_to(param.sharding, param.ndim)
        assert is_same or param.sharding.is_fully_replicated
    over_data = [
        x
        for x in collectives(compiled)
        if x.kind != "all-gather" and x.devices != 2 and x.bytes >= 2**8
    ]
    assert over_data
    assert not any(x.in_loop for x in over_data)
    # Roundings of bf16 as above. (On GPUs, FSDP makes reduce-scatters: test_wire_gpu.py.)
    assert error(result.grads) <= 14 * 3 * 2.0**-9
    one = jax.jit(mpx.value_and_grad(mpx.amp(loss), policy="p=f32,c=bf16,o=f32"))
    local = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), (params, tokens))
    expected = one(mpx.NoLossScaling(), *local)
    np.testing.assert_allclose(result.value, expected.value, rtol=2.0**-7)
    assert bool(result.finite)


def test_window_without_a_mean_adds_up():
    _, params, tokens = placed("data")

    def total(params, tokens):
        return loss(params, tokens) * tokens.shape[0]

    step = window(func=mpx.amp(total), mean=False)
    result = step(mpx.NoLossScaling(), params, tokens)
    assert error(jax.tree.map(lambda x: x / ROWS, result.grads)) <= 14 * 3 * 2.0**-9


def test_overflow_in_one_shard_skips_the_window_everywhere():
    _, params, tokens = placed("fsdp")

    def spoilt(params, tokens):
        factor = jnp.where(jnp.any(tokens < 0), jnp.inf, 1.0)
        return loss(params, jnp.abs(tokens)) * factor

    step = window(func=mpx.amp(spoilt), has_aux=False)
    scaling = mpx.DynamicLossScaling.pow2(2.0**4)
    bad = tokens.at[ROWS - 1, 0].set(-1)
    bad = jax.device_put(bad, tokens.sharding)
    flags = [step(scaling, params, x) for x in (tokens, bad)]
    assert [bool(x.finite) for x in flags] == [True, False]
    assert float(flags[1].scaling.loss_scaling) == 2.0**3


def test_aux_has_an_axis_for_parts_and_one_for_shards():
    _, params, tokens = placed("data")
    step = window(func=lambda p, x: (loss(p, x), x[:, 0]), has_aux=True)
    aux = step(mpx.NoLossScaling(), params, tokens).aux
    assert aux.shape == (2, 8, ROWS // 16)
    rows = np.arange(ROWS).reshape(8, ROWS // 16, 2).transpose(2, 0, 1)
    np.testing.assert_array_equal(aux, TOKENS[rows, 0])


def stateful(model, state, tokens):
    out, state = jax.vmap(model, (0, None), (0, None), axis_name="b")(tokens, state)
    return jnp.mean(out**2), state


def test_wrong_uses_of_an_axis_are_refused():
    _, params, tokens = placed("data")
    scaling = mpx.NoLossScaling()
    with pytest.raises(ValueError, match="names no axis.*set_mesh"):
        window(axis_name="batch")(scaling, params, tokens)
    with pytest.raises(ValueError, match=r"2 equal parts for each of 8 shards.*of 16"):
        window()(scaling, params, tokens[:24])
    with pytest.raises(ValueError, match=r"mpx.accumulate\(func, axis_name="):
        jax.jit(mpx.value_and_grad(loss, axis_name="data"))(scaling, params, tokens)
    mesh, params, tokens = placed("data", AxisType.Explicit)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="explicit axis"):
        window()(scaling, params, tokens)


def test_state_that_shards_would_change_is_refused():
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, "b", mode="batch")
    mesh, *_ = placed("data")
    everywhere = NamedSharding(mesh, P())
    args = jax.tree.map(
        lambda x: jax.device_put(x, everywhere) if eqx.is_array(x) else x, (norm, state)
    )
    x = jax.device_put(jnp.ones((ROWS, 4)), NamedSharding(mesh, P("data")))
    step = mpx.accumulate(stateful, 2, batch_argnums=2, has_aux=True, axis_name="data")
    with pytest.raises(ValueError, match="state that the function changes"):
        eqx.filter_jit(step)(mpx.NoLossScaling(), *args, x)  # pyright: ignore[reportCallIssue]
