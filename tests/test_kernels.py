"""The kernel does what plain JAX does, bit for bit, and backends are chosen as told.

Here it runs in Pallas's interpreter. What it becomes on a GPU: test_kernels_gpu.py.
Mosaic's kernel has loads in MLIR, which no interpreter knows: on a GPU it is compared by
`benchmarks/kernel_check.py --backend mosaic`.
"""

import collections
import dataclasses
import functools
import operator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from models import equations
from mpx._compat import HAS_MOSAIC, Literal, eval_equation, open_jaxpr
from mpx._kernels import _dispatch, _triton, _tuning
from mpx._kernels._plain import run_plain
from mpx._optim._options import master_codec, moment_codec
from mpx._optim._update_rules import Adam, Leaf, LeafStep, Lion, Sgd
from mpx._quant import Dither, Quantized
from mpx._quant._rounding import bits, from_bits
from mpx.testing import assert_trees_equal

pytestmark = pytest.mark.usefixtures("small_programs")

RULES = {
    "adamw": Adam(decoupled=True),
    "adam": Adam(decoupled=False),
    "lion": Lion(),
    "sgd": Sgd(decoupled=False, nesterov=True, moments=("mu",)),
    "sgdw": Sgd(decoupled=True, nesterov=False, moments=("mu",)),
}
HYPER = dict(
    learning_rate=0.01, weight_decay=0.1, b1=0.9, b2=0.99, eps=1e-8, momentum=0.9,
    dampening=0.1,
)  # fmt: skip
# Every codec of weights and of moments: f16 and f32 parameters have one in both formats.
STORED = {
    "bf16 of 24 bits": (jnp.bfloat16, np.int8, "mpx"),
    "bf16 of 32 bits": (jnp.bfloat16, np.int16, "mpx"),
    "bf16": (jnp.bfloat16, None, "mpx"),
    "bf16 of 24 bits, flashoptim": (jnp.bfloat16, np.int8, "flashoptim"),
    "bf16 of 32 bits, flashoptim": (jnp.bfloat16, np.int16, "flashoptim"),
    "f16 of 24 bits": (jnp.float16, np.int8, "mpx"),
    "f16 of 32 bits": (jnp.float16, np.int16, "flashoptim"),
    "f16": (jnp.float16, None, "mpx"),
    "f32": (jnp.float32, None, "mpx"),  # has no correction
}
TUNING = _tuning.Tuning(block=256, warps=1)
DIVIDING, ODD = (16, 64), (7, 96)

needs_mosaic = pytest.mark.skipif(not HAS_MOSAIC, reason="needs jax 0.11 or later")
each_kernel = pytest.mark.parametrize(
    "backend", ["triton", pytest.param("mosaic", marks=needs_mosaic)]
)


def make_plan(
    rule, dtype=jnp.bfloat16, correction=np.int8, format="mpx", group=32, dithers=True
):
    correction = None if correction is None else np.dtype(correction)
    moments = tuple(
        moment_codec(name, quantized=group > 0, format=format) for name in rule.moments
    )
    master = master_codec(dtype, correction, format)
    return LeafStep(rule, master, moments, group, dithers)


def make_case(plan, shape, dtype=jnp.bfloat16, grad_dtype=jnp.bfloat16, seed=0):
    """A leaf in the middle of training, a gradient and scalars."""
    rng = np.random.default_rng(seed)

    def normal(scale):
        spread = np.exp(2 * rng.standard_normal(shape))
        return jnp.asarray(rng.standard_normal(shape) * spread * scale, jnp.float32)

    hyper = {name: jnp.float32(value) for name, value in HYPER.items()}
    coefficients = plan.rule.coefficients(hyper, jnp.float32(3))
    dither = Dither(jnp.float32(0.2), jnp.float32(0.7))
    scalars = jnp.stack([jnp.float32(0.5), *dither, *coefficients])
    param = normal(0.05).astype(dtype)
    correction = getattr(plan.master, "dtype", None)
    if correction is not None:
        correction = jnp.zeros(shape, correction)
    scale = (*shape[:-1], shape[-1] // plan.group_size) if plan.group_size else None
    moments = tuple(
        jnp.zeros(shape, jnp.float32)
        if scale is None
        else Quantized(
            jnp.zeros(shape, codec.code_dtype), jnp.zeros(scale, codec.scale_dtype)
        )
        for codec in plan.moments
    )
    leaf = Leaf(param, correction, moments)
    leaf = plain(plan, scalars, normal(1.0).astype(grad_dtype), leaf)
    return scalars, normal(1.0).astype(grad_dtype), leaf


@dataclasses.dataclass(frozen=True)
class Unfused:
    """A function whose products are rounded before anything is added to them.

    CPUs multiply and add with one rounding where the compiler sees both together, which
    is not at the same places in two programs.
    """

    function: Any

    def __getattr__(self, name):
        return getattr(self.function, name)

    def __call__(self, *args, **kwargs):
        leaves, treedef = jax.tree.flatten((args, kwargs))
        arrays = [x for x in leaves if isinstance(x, jax.Array)]
        trees = []

        def flat(*arrays):
            rest = iter(arrays)
            mixed = [next(rest) if isinstance(x, jax.Array) else x for x in leaves]
            args, kwargs = treedef.unflatten(mixed)
            new, tree = jax.tree.flatten(self.function(*args, **kwargs))
            trees.append(tree)
            return new

        jaxpr, consts = open_jaxpr(jax.make_jaxpr(flat)(*arrays))
        first = bits(arrays[0][(0,) * arrays[0].ndim])
        # Which no compiler can know, as long as the first array is no constant.
        zero = (first == 0x7F123456).astype(jnp.int32)
        return trees[0].unflatten(_evaluate(jaxpr, consts, arrays, zero))


def _evaluate(jaxpr, consts, args, zero):
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def value(x):
        return x.val if isinstance(x, Literal) else known[x]

    for eqn in jaxpr.eqns:
        inputs = [value(x) for x in eqn.invars]
        if eqn.primitive.name in ("jit", "pjit"):
            outputs = _evaluate(*open_jaxpr(eqn.params["jaxpr"]), inputs, zero)
        else:
            outputs = eval_equation(eqn, inputs)
        if eqn.primitive.name == "mul" and outputs[0].dtype == jnp.float32:
            outputs = [from_bits(bits(outputs[0]) ^ zero)]
        known |= dict(zip(eqn.outvars, outputs, strict=True))
    return [value(x) for x in jaxpr.outvars]


def interpreted(plan, scalars, grad, leaf, finite=1.0):
    rows = jnp.append(jnp.asarray(finite, jnp.float32), scalars)[None]
    (new,) = _triton.launch(
        plan,
        rows,
        [grad],
        [leaf],
        group_size=plan.group_size,
        tuning=TUNING,
        interpret=True,
    )
    return new


kernel = jax.jit(interpreted, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def plain(plan, scalars, grad, leaf):
    return run_plain(
        plan, scalars, grad, leaf, group_size=plan.group_size, finite=None, seed=None
    )


def assert_kernel_equals_plain(plan, case):
    scalars, grad, leaf = case
    want = plain(Unfused(plan), scalars, grad, leaf)
    assert_trees_equal(kernel(Unfused(plan), scalars, grad, leaf), want)
    changed = [
        float(np.mean(np.asarray(x) != np.asarray(y)))
        for x, y in zip(
            jax.tree.leaves(want.moments), jax.tree.leaves(leaf.moments), strict=True
        )
    ]
    assert min(changed) > 0.3, "the step did nothing"


def test_unfused_programs_round_after_each_operation():
    rng = np.random.default_rng(0)
    a, b, c = rng.standard_normal((3, 4096)).astype(np.float32)
    unfused = jax.jit(Unfused(lambda a, b, c: [a * b + c]))
    np.testing.assert_array_equal(unfused(a, b, c)[0], a * b + c)


# --- the kernel -----------------------------------------------------------------------


# Rules and codecs do not know of each other: one rule with all codecs, and all rules.
@pytest.mark.long
@pytest.mark.parametrize(("dtype", "correction", "format"), STORED.values(), ids=STORED)
def test_the_kernel_equals_plain_jax_in_every_format(dtype, correction, format):
    plan = make_plan(RULES["adamw"], dtype, correction, format)
    assert_kernel_equals_plain(plan, make_case(plan, ODD, dtype))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_kernel_equals_plain_jax_for_every_rule(rule):
    plan = make_plan(rule)
    assert_kernel_equals_plain(plan, make_case(plan, ODD))


def test_the_kernel_equals_plain_jax_without_dither():
    plan = make_plan(RULES["adamw"], dithers=False)
    assert_kernel_equals_plain(plan, make_case(plan, ODD))


def test_the_kernel_equals_plain_jax_if_blocks_are_full():
    assert np.prod(DIVIDING) % TUNING.block == 0 != np.prod(ODD) % TUNING.block
    plan = make_plan(RULES["adamw"])
    assert_kernel_equals_plain(plan, make_case(plan, DIVIDING))


@pytest.mark.parametrize("shape", [DIVIDING, ODD], ids=["full", "odd"])
def test_blocks_are_masked_if_the_last_one_is_not_full(monkeypatch, shape):
    # The interpreter would not notice: it lets nobody write behind an array.
    masked = []

    def spy(function):
        def call(*args, mask, **kwargs):
            masked.append(mask is not None)
            return function(*args, mask=mask, **kwargs)

        return call

    for name in ("load", "store"):
        monkeypatch.setattr(_triton.plgpu, name, spy(getattr(_triton.plgpu, name)))
    plan = make_plan(RULES["adamw"])
    case = make_case(plan, shape)
    jax.eval_shape(functools.partial(interpreted, plan), *case)
    assert masked == [shape == ODD] * (7 + 6)


@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "grad_dtype"),
    [((96,), jnp.float16), ((3, 5, 32), jnp.float32)],  # others have bf16 and two axes
    ids=str,
)
def test_any_gradient_dtype_and_rank(shape, grad_dtype):
    plan = make_plan(RULES["adamw"])
    assert_kernel_equals_plain(plan, make_case(plan, shape, grad_dtype=grad_dtype))


@pytest.mark.long
@pytest.mark.parametrize("group", [2, 256])
def test_any_group_size(group):
    plan = make_plan(RULES["adamw"], group=group)
    assert_kernel_equals_plain(plan, make_case(plan, (3, 512)))


@pytest.mark.parametrize("shape", [(), (7, 5), (300,)], ids=str)
def test_moments_in_f32_need_no_groups(shape):
    plan = make_plan(RULES["adamw"], group=0)
    assert_kernel_equals_plain(plan, make_case(plan, shape))


@pytest.mark.parametrize(
    ("shape", "bad"), [(DIVIDING, np.inf), (ODD, np.nan)], ids=["full", "odd"]
)
def test_a_skipped_step_changes_no_byte(shape, bad):
    plan = make_plan(RULES["adamw"])
    scalars, grad, leaf = make_case(plan, shape)
    same = kernel(plan, scalars, jnp.full_like(grad, bad), leaf, finite=0.0)
    for new, old in zip(jax.tree.leaves(same), jax.tree.leaves(leaf), strict=True):
        assert np.asarray(new).tobytes() == np.asarray(old).tobytes()


@pytest.mark.parametrize("shape", [DIVIDING, ODD], ids=["full", "odd"])
def test_leaves_that_share_a_launch_have_scalars_and_flags_of_their_own(shape):
    plan = make_plan(RULES["adamw"])
    cases = [make_case(plan, shape, seed=seed) for seed in range(3)]
    factors = [1.0, 3.0, 0.0]

    rows = jnp.stack(
        [jnp.append(f, case[0] * f) for f, case in zip(factors, cases, strict=True)]
    )
    new = _triton.launch(
        Unfused(plan),
        rows,
        [case[1] for case in cases],
        [case[2] for case in cases],
        group_size=32,
        tuning=TUNING,
        interpret=True,
    )
    for factor, (scalars, grad, leaf), got in zip(factors, cases, new, strict=True):
        want = leaf
        if factor:
            want = plain(Unfused(plan), scalars * factor, grad, leaf)
        assert_trees_equal(got, want)


@pytest.mark.parametrize("layer", [0, 2, -1, 3])
def test_one_layer_steps_where_it_is(layer):
    """The layers -1 and 3 are those of other devices."""
    plan = make_plan(RULES["adamw"])
    scalars, grads, leaf = make_case(plan, (3, *DIVIDING))
    (new,) = _triton.launch(
        Unfused(plan),
        jnp.append(jnp.float32(1), scalars)[None],
        [grads[1]],
        [leaf],
        group_size=32,
        ahead=jnp.arange(3) - layer,
        tuning=TUNING,
        interpret=True,
    )
    for number in range(3):
        want = jax.tree.map(lambda x, number=number: x[number], leaf)
        if number == layer:
            want = plain(Unfused(plan), scalars, grads[1], want)
        assert_trees_equal(jax.tree.map(lambda x, i=number: x[i], new), want)


def test_a_kernel_addresses_what_32_or_64_bits_can():
    block = _tuning.TRITON.block
    reachable = [2**31, 2**32 + block]
    out_of_reach = [2**31 + 32, 2**32, 2**32 + 32]
    assert all(map(_triton.can_address, reachable))
    assert not any(map(_triton.can_address, out_of_reach))


def test_what_is_not_read_again_leaves_the_cache_first():
    plan = make_plan(RULES["adamw"])
    scalars, grad, leaf = make_case(plan, DIVIDING)
    rows = jnp.append(jnp.float32(1), scalars)[None]
    step = functools.partial(_triton.launch, plan, group_size=32)
    policies = collections.defaultdict(collections.Counter)
    for eqn in equations(jax.make_jaxpr(step)(rows, [grad], [leaf]).jaxpr):
        if "eviction_policy" in eqn.params:
            policies[eqn.primitive.name][eqn.params["eviction_policy"]] += 1
    # The gradient; parameter, correction, and two moments of codes and scales.
    assert policies == {
        "masked_load": {"evict_first": 1, None: 6},
        "masked_swap": {"evict_first": 6},
    }


# --- the choice -----------------------------------------------------------------------


@pytest.fixture
def kernel_on_cpus(monkeypatch):
    """Takes CPUs for GPUs, with the kernel in the interpreter."""
    calls = []
    launch = _triton.launch

    def interpreted(*args, **kwargs):
        calls.append(len(args[2]))
        return launch(*args, **kwargs, tuning=TUNING, interpret=True)

    monkeypatch.setattr(_dispatch, "_PLATFORM", "cpu")
    monkeypatch.setattr(_dispatch, "gpu_capability", lambda: (9, 0))
    monkeypatch.setattr(_triton, "launch", interpreted)
    small = dataclasses.replace(_tuning.TRITON, min_size=4096, batch=2)
    monkeypatch.setattr(_dispatch, "TRITON", small)
    update = LeafStep.__call__
    monkeypatch.setattr(LeafStep, "__call__", lambda *a, **k: Unfused(update)(*a, **k))
    monkeypatch.setattr(Adam, "coefficients", _without_arithmetic)
    jax.clear_caches()
    yield calls
    jax.clear_caches()


def _without_arithmetic(self, hyper, step):
    """Coefficients that are equal in all programs: those of Adam are computed in each."""
    numbers = [0.9, 0.1, 0.99, 0.01, hyper["learning_rate"], 0.999, 1e-8]
    return tuple(jnp.asarray(number, jnp.float32) for number in numbers)


def make_model(shape=(64, 64), leaves=1, dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    draw = lambda: {  # noqa: E731
        str(index): jnp.asarray(rng.standard_normal(shape), dtype)
        for index in range(leaves)
    }
    return draw(), draw()


def take_steps(optimizer, params, grads, count=2, **options):
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, grads, grad_scale):  # an input: `Unfused` needs an unknown
        return optimizer.step(params, state, grads, grad_scale=grad_scale, **options)

    for _ in range(count):
        params, state = step(params, state, grads, 0.5)
    return params, state


def test_the_kernel_is_taken_for_large_leaves_only(kernel_on_cpus):
    params, grads = make_model()
    params |= {"small": params["0"][:32], "odd": params["0"][:, :63]}
    grads |= {"small": grads["0"][:32], "odd": grads["0"][:, :63]}
    take_steps(mpx.flash_adamw(0.01), params, grads)
    assert kernel_on_cpus == [1]


def test_leaves_of_equal_types_share_launches(kernel_on_cpus):
    params, grads = make_model(leaves=3)
    grads["1"] = grads["1"].astype(jnp.float32)
    take_steps(mpx.flash_adamw(0.01), params, grads)
    assert sorted(kernel_on_cpus) == [1, 2]


def test_equal_batches_are_traced_once(kernel_on_cpus):
    params, grads = make_model(leaves=6)
    take_steps(mpx.flash_adamw(0.01), params, grads)
    assert kernel_on_cpus == [2]


@pytest.mark.parametrize("finite", [True, False])
def test_the_kernel_gives_the_steps_of_plain_jax(kernel_on_cpus, finite):
    params, grads = make_model(leaves=3)
    groups = [mpx.ParamGroup("1", {"learning_rate": 0.5})]
    flag = {"finite": jnp.array(finite)}
    auto = take_steps(mpx.flash_adamw(0.01, groups=groups), params, grads, **flag)
    assert kernel_on_cpus
    plain = mpx.flash_adamw(0.01, groups=groups, backend="jax")
    assert_trees_equal(auto, take_steps(plain, params, grads, **flag))


def test_stochastic_rounding_takes_plain_jax(kernel_on_cpus):
    params, grads = make_model()
    compression = mpx.Compression(rounding="stochastic")
    take_steps(mpx.flash_adamw(0.01, compression=compression), params, grads)
    assert not kernel_on_cpus


def test_vmap_takes_plain_jax(kernel_on_cpus):
    optimizer = mpx.flash_adamw(0.01)
    params, grads = make_model((2, 64, 64))
    state = jax.vmap(optimizer.init)(params)
    mapped = jax.jit(jax.vmap(optimizer.step))(params, state, grads)
    plain = mpx.flash_adamw(0.01, backend="jax")
    want = jax.jit(jax.vmap(plain.step))(params, state, grads)
    assert_trees_equal(mapped, want)
    text = str(jax.make_jaxpr(jax.vmap(optimizer.step))(params, state, grads))
    assert "pallas_call" not in text
    assert "pallas_call" in str(
        jax.make_jaxpr(optimizer.step)(
            *jax.tree.map(lambda x: x[0], (params, state, grads))
        )
    )


def test_vmap_over_gradients_alone(kernel_on_cpus):
    optimizer = mpx.flash_adamw(0.01)
    params, _ = make_model()
    _, grads = make_model((2, 64, 64))
    state = optimizer.init(params)
    step = functools.partial(optimizer.step, params, state)
    new = jax.jit(jax.vmap(step))(grads)
    assert new.params["0"].shape == (2, 64, 64)


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((4, 16, 128), P(None, "x", "y")),
        ((4, 16, 128), P("x", None, "y")),
        ((4, 3, 128), P("x")),  # layers that are no whole blocks
    ],
    ids=str,
)
def test_layers_step_on_the_devices_that_have_them(kernel_on_cpus, shape, spec):
    plan = make_plan(RULES["adamw"])
    scalars, grads, leaf = make_case(plan, shape)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, spec)

    @functools.partial(jax.jit, static_argnums=4)
    def step(leaf, grad, scalars, layer, backend):
        job = _dispatch.Job("w", plan, scalars, grad, leaf, 32, layer=layer)
        return _dispatch.run([job], backend=backend)[0]

    for layer in (0, 3):
        args = grads[1], scalars, jnp.int32(layer)
        want = step(leaf, *args, "jax")
        got = step(jax.device_put(leaf, sharding), *args, "triton")
        assert_trees_equal(got, want)
        for x in jax.tree.leaves(got):
            assert x.sharding.is_equivalent_to(sharding, x.ndim)
        pairs = zip(want.param, leaf.param, strict=True)
        same = [np.array_equal(new, old) for new, old in pairs]
        assert same == [number != layer for number in range(4)]
    assert set(kernel_on_cpus) == {1}


def test_without_a_gpu_auto_is_plain_jax():
    params, grads = make_model((256, 256))
    optimizer = mpx.flash_adamw(0.01)
    text = (
        jax.jit(optimizer.step).lower(params, optimizer.init(params), grads).as_text()
    )
    assert "triton" not in text
    plain = mpx.flash_adamw(0.01, backend="jax")
    assert_trees_equal(
        take_steps(optimizer, params, grads), take_steps(plain, params, grads)
    )


def test_without_a_gpu_nothing_is_traced_for_one():
    params, grads = make_model((256, 256))
    step = {
        backend: jax.make_jaxpr(mpx.flash_adamw(0.01, backend=backend).step)(
            params, mpx.flash_adamw(0.01).init(params), grads
        )
        for backend in ("auto", "jax", "triton")
    }
    has_kernel = {
        backend: any(eqn.primitive.name == "pallas_call" for eqn in equations(jaxpr))
        for backend, jaxpr in step.items()
    }
    assert has_kernel == {"auto": False, "jax": False, "triton": True}


def test_a_step_is_exported_for_gpus_that_are_not_here():
    params, grads = make_model((256, 256))
    optimizer = mpx.flash_adamw(0.01)
    step = jax.jit(lambda *args: jax.tree.leaves(optimizer.step(*args)))
    args = params, optimizer.init(params), grads
    export = jax.export.export(step, platforms=("cpu", "cuda"))(*args)
    assert [x.shape for x in export.call(*args)] == [x.shape for x in step(*args)]


@each_kernel
def test_a_kernel_needs_a_gpu(backend):
    params, grads = make_model()
    optimizer = mpx.flash_adamw(0.01, backend=backend)
    message = f'"{backend}"` needs a CUDA GPU.*"auto"'
    with pytest.raises(NotImplementedError, match=message):
        optimizer.step(params, optimizer.init(params), grads)


def test_triton_takes_small_leaves_too(kernel_on_cpus):
    params, grads = make_model((3, 5))
    got = take_steps(mpx.flash_adamw(0.01, backend="triton"), params, grads)
    assert kernel_on_cpus == [1]
    plain = mpx.flash_adamw(0.01, backend="jax")
    assert_trees_equal(got, take_steps(plain, params, grads))


@pytest.mark.parametrize(
    ("shape", "compression", "message"),
    [
        ((64, 64), mpx.Compression(rounding="stochastic"), "stochastic rounding"),
        ((0, 64), mpx.Compression(), "no elements"),
        ((2, 4096), mpx.Compression(group_size=2048), "2048 elements.*up to {largest}"),
    ],
    ids=["stochastic", "empty", "large groups"],
)
@pytest.mark.parametrize(("backend", "largest"), [("triton", 512), ("mosaic", 256)])
def test_a_kernel_says_what_it_cannot_do(
    monkeypatch, backend, largest, shape, compression, message
):
    monkeypatch.setattr(_dispatch, "HAS_MOSAIC", True)
    params, grads = make_model(shape)
    optimizer = mpx.flash_adamw(0.01, compression=compression, backend=backend)
    message = message.format(largest=largest)
    with pytest.raises(ValueError, match=f'"{backend}.*`0`: .*{message}.*auto'):
        optimizer.step(params, optimizer.init(params), grads)


def test_mosaic_needs_a_later_jax(monkeypatch):
    monkeypatch.setattr(_dispatch, "HAS_MOSAIC", False)
    params, grads = make_model()
    optimizer = mpx.flash_adamw(0.01, backend="mosaic")
    message = f"`0`: .*0.11 or later, and {jax.__version__} is installed.*auto"
    with pytest.raises(ValueError, match=message):
        optimizer.step(params, optimizer.init(params), grads)


@pytest.mark.parametrize(
    ("capability", "runs"),
    [((8, 0), 0), ((8, 9), 0), ((9, 0), 1), ((10, 0), 1), ("gfx942", 0), (None, 1)],
    ids=str,
)
def test_mosaic_needs_a_hopper_gpu(monkeypatch, capability, runs):
    monkeypatch.setattr(_dispatch, "HAS_MOSAIC", True)
    monkeypatch.setattr(_dispatch, "gpu_capability", lambda: capability)
    params, grads = make_model()
    step = functools.partial(mpx.flash_adamw(0.01, backend="mosaic").step, params)
    state = mpx.flash_adamw(0.01).init(params)
    # What runs gets as far as being compiled for this CPU.
    monkeypatch.setattr(_dispatch, "_launch", _launched)
    with pytest.raises(
        LookupError if runs else ValueError, match="launched" if runs else "9.0, Hopper"
    ):
        step(state, grads)


def _launched(*args, **kwargs):
    raise LookupError("launched")


# --- Mosaic's kernel ------------------------------------------------------------------


@needs_mosaic
def test_vmap_of_mosaic_takes_plain_jax():
    optimizer = mpx.flash_adamw(0.01, backend="mosaic")
    params, grads = make_model((2, 64, 64))
    state = jax.vmap(optimizer.init)(params)
    one = jax.tree.map(lambda x: x[0], (params, state, grads))
    assert "mpx_step" in str(jax.make_jaxpr(optimizer.step)(*one))
    mapped = str(jax.make_jaxpr(jax.vmap(optimizer.step))(params, state, grads))
    assert "mpx_step" not in mapped


@needs_mosaic
def test_how_mosaic_is_launched(monkeypatch):
    from mpx._kernels import _mosaic

    launches = []
    kernel = _mosaic.plgpu.kernel

    def spy(*args, **kwargs):
        launches.append((kwargs["grid"], kwargs["compiler_params"].lowering_semantics))
        return kernel(*args, **kwargs)

    monkeypatch.setattr(_mosaic.plgpu, "kernel", spy)
    optimizer = mpx.flash_adamw(0.01, backend="mosaic")
    params = {x: jax.ShapeDtypeStruct((2**8, 2**12), jnp.bfloat16) for x in "abc"}
    state = jax.eval_shape(optimizer.init, params)
    jax.eval_shape(optimizer.step, params, state, params)
    # CUDA lets one axis, which for Pallas is the last one, be longer than 65535. With
    # other semantics the kernel would compile, and compute something else.
    grid = 3, 2**20 // _tuning.MOSAIC.block
    assert set(launches) == {(grid, _mosaic.plgpu.LoweringSemantics.Warpgroup)}


@needs_mosaic
@pytest.mark.parametrize("shape", [(16, 64), (7, 96)], ids=["full", "odd"])
def test_mosaic_masks_blocks_that_are_not_full(monkeypatch, shape):
    from mpx._kernels import _mosaic

    calls = collections.Counter()
    for owner, name in (
        ("vector", "load"), ("vector", "store"), ("arith", "minui"), ("scf", "IfOp"),
    ):  # fmt: skip
        spied = Spied(getattr(_mosaic, owner), name, calls)
        monkeypatch.setattr(_mosaic, owner, spied)
    plan = make_plan(RULES["adamw"])
    scalars, grad, leaf = make_case(plan, shape)
    rows = jnp.append(jnp.float32(1), scalars)[None]
    step = functools.partial(_mosaic.launch, plan, group_size=32)
    jax.jit(step).trace(rows, [grad], [leaf]).lower(lowering_platforms=("cuda",))
    assert (np.prod(shape) % _tuning.MOSAIC.block != 0) == (shape == (7, 96))
    masks = {"minui": 7, "IfOp": 6} if shape == (7, 96) else {}
    assert calls == {"load": 7, "store": 6, **masks}


@dataclasses.dataclass
class Spied:
    """A module of which the calls of a function are counted."""

    module: Any
    name: str
    calls: collections.Counter

    def __getattr__(self, name):
        if name == self.name:
            self.calls[name] += 1
        return getattr(self.module, name)


@needs_mosaic
@pytest.mark.parametrize(
    ("size", "group"),
    [(96 * 257, group) for group in (2, 4, 8, 16, 32)]
    + [(2**12, group) for group in (32, 64, 128, 256, 512)]
    + [(size, 0) for size in (2**12, 15, 1, 2 * 1001, 4 * 1001)],
    ids=str,
)
def test_each_thread_of_mosaic_has_what_its_layout_says(monkeypatch, size, group):
    from mpx._kernels import _mosaic

    view = _mosaic._View(size, _tuning.MOSAIC.block, group)
    rows, width = view._shapes[False]
    held = threads_of(view._layouts[False], (rows, width))
    # Numbers in place of MLIR, those of all threads at once.
    numbers = SimpleNamespace(
        index_castui=lambda _, x: x, muli=operator.mul, addi=operator.add,
        divui=operator.floordiv,
    )  # fmt: skip
    threads = SimpleNamespace(thread_idx=lambda: np.arange(128), c=lambda x, _: x)
    types = SimpleNamespace(IndexType=SimpleNamespace(get=lambda: None))
    for name, stand_in in (("arith", numbers), ("utils", threads), ("ir", types)):
        monkeypatch.setattr(_mosaic, name, stand_in)

    seen = []
    for index in range(view.blocks):
        register = SimpleNamespace(registers=np.array(index))
        starts = list(view._places(register, grouped=False))
        places = np.stack(starts)[..., None] + np.arange(view._vector)
        np.testing.assert_array_equal(places, held + index * rows * width)
        seen.append(places.ravel())
        groups = np.stack(list(view._places(register, grouped=True)))
        np.testing.assert_array_equal(groups, places[..., 0] // width)
    every = np.arange(view.blocks * rows * width)
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), every)
    assert (view.blocks - 1) * rows * width < size <= every.size


def threads_of(layout, shape):
    """The numbers of the elements in each register of each thread, from a layout."""
    x = np.arange(np.prod(shape)).reshape(shape)
    for tile in layout.tiling.tiles:
        lead, rest = x.shape[: -len(tile)], x.shape[-len(tile) :]
        split = [n for d, t in zip(rest, tile, strict=True) for n in (d // t, t)]
        first, end = len(lead), len(lead) + len(split)
        x = x.reshape(*lead, *split).transpose(
            *range(first), *range(first, end, 2), *range(first + 1, end, 2)
        )
    inner = [*layout.warp_dims, *layout.lane_dims, layout.vector_dim]
    inner = [x.ndim + axis for axis in inner]
    outer = [axis for axis in range(x.ndim) if axis not in inner]
    return x.transpose(*outer, *inner).reshape(-1, 128, x.shape[layout.vector_dim])


# --- shards ---------------------------------------------------------------------------

LAYOUTS = {
    "auto, replicated": (AxisType.Auto, P()),
    "auto, column": (AxisType.Auto, P(None, "x")),
    "auto, 2-D": (AxisType.Auto, P("x", "y")),
    "explicit, row": (AxisType.Explicit, P("x", None)),
    "explicit, all in the last": (AxisType.Explicit, P(None, ("x", "y"))),
}


@pytest.mark.parametrize(("axis_type", "spec"), LAYOUTS.values(), ids=LAYOUTS)
def test_each_device_steps_its_shards(kernel_on_cpus, axis_type, spec):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    params, grads = make_model((16, 512), leaves=2)
    plain = mpx.flash_adamw(0.01, backend="jax")
    want = take_steps(plain, params, grads, finite=jnp.array(True))
    sharding = NamedSharding(mesh, spec)
    params, grads = jax.device_put((params, grads), sharding)
    got = take_steps(mpx.flash_adamw(0.01), params, grads, finite=jnp.array(True))
    assert kernel_on_cpus
    assert_trees_equal(jax.device_get(got), jax.device_get(want))
    sharded = [x for x in jax.tree.leaves(got) if x.ndim]
    assert len(sharded) == 2 * 6
    assert all(x.sharding.is_equivalent_to(sharding, 2) for x in sharded)


def test_leaves_of_one_launch_may_be_sharded_differently(kernel_on_cpus):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    params, grads = make_model((16, 512), leaves=2)
    plain = mpx.flash_adamw(0.01, backend="jax")
    want = take_steps(plain, params, grads)
    shardings = {
        "0": NamedSharding(mesh, P("x")),
        "1": NamedSharding(mesh, P(None, "y")),
    }
    params, grads = jax.device_put((params, grads), (shardings, shardings))
    got = take_steps(mpx.flash_adamw(0.01), params, grads)
    assert 2 in kernel_on_cpus
    assert_trees_equal(jax.device_get(got), jax.device_get(want))
    for name, x in got[0].items():
        assert x.sharding.is_equivalent_to(shardings[name], 2)


def test_shard_map_steps_what_each_device_has(kernel_on_cpus):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    params, grads = make_model((64, 512))
    optimizer = mpx.flash_adamw(0.01)
    state = optimizer.init(params)
    scale = jnp.float32(0.5)  # an input: `Unfused` needs an unknown

    def step(optimizer, params, state, grads, scale):
        return tuple(optimizer.step(params, state, grads, grad_scale=scale))

    plain = functools.partial(step, mpx.flash_adamw(0.01, backend="jax"))
    want = jax.jit(plain)(params, state, grads, scale)
    specs = jax.tree.map(lambda x: P("x") if x.ndim else P(), state)
    mapped = jax.shard_map(
        functools.partial(step, optimizer),
        mesh=mesh,
        in_specs=(P("x"), specs, P("x"), P()),
        out_specs=(P("x"), specs),
        check_vma=False,  # the interpreter does not know what varies
    )
    got = jax.jit(mapped)(params, state, grads, scale)
    assert kernel_on_cpus
    assert_trees_equal(got, want)


def test_groups_that_shards_cut_take_plain_jax(kernel_on_cpus):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    params, grads = make_model((64, 96))
    sharding = NamedSharding(mesh, P(None, "x"))
    params, grads = jax.device_put((params, grads), sharding)
    take_steps(mpx.flash_adamw(0.01), params, grads)
    assert not kernel_on_cpus
    optimizer = mpx.flash_adamw(0.01, backend="triton")
    with pytest.raises(ValueError, match="end within a group of 32"):
        optimizer.step(params, optimizer.init(params), grads)
