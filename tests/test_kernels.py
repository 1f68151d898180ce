"""The Triton kernel, in the interpreter, against plain JAX."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from kernel_cases import (
    BLOCK,
    DIVIDING,
    ODD,
    RULES,
    STORED,
    Unfused,
    assert_kernel_equals_plain,
    interpreted,
    kernel,
    make_case,
    make_plan,
    moments_of,
    plain,
)
from models import equations
from mpx._kernels import _dispatch, _triton
from mpx._kernels._dispatch import layer_of
from mpx._optim._packing import PackedLeaf
from mpx.testing import assert_trees_equal


@functools.partial(jax.jit, static_argnums=0)
def launch(plan, rows, grads, leaves, ahead=None):
    return _triton.launch(
        Unfused(plan), rows, grads, leaves, ahead=ahead, block=BLOCK, interpret=True
    )


def test_unfused_programs_round_after_each_operation():
    rng = np.random.default_rng(0)
    a, b, c = rng.standard_normal((3, 4096)).astype(np.float32)
    unfused = jax.jit(Unfused(lambda a, b, c: [a * b + c]))
    np.testing.assert_array_equal(unfused(a, b, c)[0], a * b + c)


# --- the kernel -----------------------------------------------------------------------


# Rules and codecs do not know of each other: one rule with all codecs, and all rules.
@pytest.mark.some(3)
@pytest.mark.parametrize(("dtype", "correction", "format"), STORED.values(), ids=STORED)
def test_the_kernel_equals_plain_jax_in_every_format(dtype, correction, format):
    plan = make_plan(RULES["adamw"], correction, format, dtype=dtype)
    assert_kernel_equals_plain(plan, make_case(plan, ODD, dtype))


@pytest.mark.some(1)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_kernel_equals_plain_jax_for_every_rule(rule):
    plan = make_plan(rule)
    assert_kernel_equals_plain(plan, make_case(plan, ODD))


def test_the_kernel_equals_plain_jax_without_dither():
    plan = make_plan(RULES["adamw"], dithers=False)
    assert_kernel_equals_plain(plan, make_case(plan, ODD))


def test_the_kernel_equals_plain_jax_if_blocks_are_full():
    assert np.prod(DIVIDING) % BLOCK == 0 != np.prod(ODD) % BLOCK
    plan = make_plan(RULES["adamw"])
    assert_kernel_equals_plain(plan, make_case(plan, DIVIDING))


@pytest.mark.parametrize(
    ("shape", "block"), [(DIVIDING, BLOCK), (ODD, 32)], ids=["full", "odd"]
)
def test_blocks_divide_the_size(shape, block):
    # The interpreter would not notice: it lets nobody write behind an array.
    plan = make_plan(RULES["adamw"])
    case = make_case(plan, shape)
    (call,) = (
        eqn
        for eqn in equations(
            jax.make_jaxpr(functools.partial(interpreted, plan))(*case)
        )
        if eqn.primitive.name == "pallas_call"
    )
    assert call.params["grid_mapping"].grid == (np.prod(shape) // block, 1)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("shape", "grad_dtype"),
    [((96,), jnp.float16), ((3, 5, 32), jnp.float32)],  # others have bf16 and two axes
    ids=str,
)
def test_any_gradient_dtype_and_rank(shape, grad_dtype):
    plan = make_plan(RULES["adamw"])
    assert_kernel_equals_plain(plan, make_case(plan, shape, grad_dtype=grad_dtype))


@pytest.mark.some(1)
@pytest.mark.parametrize("group", [2, 256])
def test_any_group_size(group):
    plan = make_plan(RULES["adamw"], group=group)
    assert_kernel_equals_plain(plan, make_case(plan, (3, 512)))


@pytest.mark.some(1)
@pytest.mark.parametrize("shape", [(), (7, 5), (300,)], ids=str)
def test_moments_in_f32_need_no_groups(shape):
    plan = make_plan(RULES["adamw"], group=0)
    assert_kernel_equals_plain(plan, make_case(plan, shape))


def test_the_kernel_equals_plain_jax_where_a_step_overflows():
    plan = make_plan(RULES["adamw"])
    scalars, grad, leaf = make_case(plan, DIVIDING)
    bad = jnp.array([3e20, -3e38, np.inf, np.nan], grad.dtype)
    grad = grad.at[0, :4].set(bad)
    assert_kernel_equals_plain(plan, (scalars, grad, leaf))
    new = kernel(plan, scalars, grad, leaf)
    assert_trees_equal(new.param[0, :2], leaf.param[0, :2])
    assert np.isnan(np.asarray(new.param[0, 2:4], np.float32)).all()
    assert mpx.all_finite((new.param[1:], moments_of(plan, new)))


@pytest.mark.parametrize(
    ("shape", "bad"), [(DIVIDING, np.inf), (ODD, np.nan)], ids=["full", "odd"]
)
def test_a_skipped_step_changes_no_byte(shape, bad):
    plan = make_plan(RULES["adamw"])
    scalars, grad, leaf = make_case(plan, shape)
    same = kernel(plan, scalars, jnp.full_like(grad, bad), leaf, finite=0.0)
    for new, old in zip(jax.tree.leaves(same), jax.tree.leaves(leaf), strict=True):
        assert np.asarray(new).tobytes() == np.asarray(old).tobytes()


@pytest.mark.some(1)
@pytest.mark.parametrize("shape", [DIVIDING, ODD], ids=["full", "odd"])
def test_leaves_that_share_a_launch_have_scalars_and_flags_of_their_own(shape):
    plan = make_plan(RULES["adamw"])
    cases = [make_case(plan, shape, seed=seed) for seed in range(3)]
    factors = [1.0, 3.0, 0.0]

    rows = jnp.stack(
        [jnp.append(f, case[0] * f) for f, case in zip(factors, cases, strict=True)]
    )
    _, grads, leaves = zip(*cases, strict=True)
    new = launch(plan, rows, grads, leaves)
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
    rows = jnp.append(jnp.float32(1), scalars)[None]
    (new,) = launch(plan, rows, [grads[1]], [leaf], jnp.arange(3) - layer)
    for number in range(3):
        want = layer_of(leaf, jnp.int32(number))
        if number == layer:
            want = plain(Unfused(plan), scalars, grads[1], want)
        assert_trees_equal(layer_of(new, jnp.int32(number)), want)


# The three planes of codes are an array of three times as many bytes.
@pytest.mark.parametrize(
    ("size", "reachable"),
    [
        (2**31 // 3 // 32 * 32, True),
        (2**31 // 3 // 32 * 32 + 32, False),
        (2**32 // 3 // 512 * 512, False),
        (2**32 // 3 // 512 * 512 + 512, True),
        (2**32 // 3 // 512 * 512 + 544, True),
        (2**31, True),
        (2**32 + 32, True),
        (2**16 + 4, False),  # blocks of 4
    ],
)
def test_a_kernel_addresses_what_32_or_64_bits_can(size, reachable):
    assert (_dispatch._BLOCK, _dispatch._LEAST) == (512, 8)
    param = jax.ShapeDtypeStruct((size,), jnp.bfloat16)
    packed = make_plan(RULES["adamw"], group=4).packing.zeros(param)
    assert _dispatch.can_address(PackedLeaf(param, packed), size) == reachable


def test_what_is_not_read_again_leaves_the_cache_first():
    plan = make_plan(RULES["adamw"])
    scalars, grad, leaf = make_case(plan, DIVIDING)
    rows = jnp.append(jnp.float32(1), scalars)[None]
    step = functools.partial(_triton.launch, plan, block=512)
    policies = collections.defaultdict(collections.Counter)
    for eqn in equations(jax.make_jaxpr(step)(rows, [grad], [leaf]).jaxpr):
        if "eviction_policy" in eqn.params:
            policies[eqn.primitive.name][eqn.params["eviction_policy"]] += 1
    # The gradient; the parameter, three planes of codes and three of scales.
    assert policies == {
        "masked_load": {"evict_first": 1, None: 7},
        "masked_swap": {"evict_first": 7},
    }
