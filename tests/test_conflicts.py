"""Options that contradict each other: an error that names both, never one that wins."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from models import multiplied, normal
from mpx import DynamicLossScaling, NoLossScaling, Policy, StaticLossScaling

W, X = normal(0, 8, 3), normal(1, 6, 8)
SCALED, UNSCALED = StaticLossScaling(2.0**8), NoLossScaling()


def loss(w, x):
    return jnp.mean(mpx.cast_to_float32(x @ w) ** 2)


def take(func, scaling=UNSCALED, **options):
    return lambda: mpx.value_and_grad(func, **options)(scaling, W, X)


def parts(func, scaling=UNSCALED, **options):
    return lambda: mpx.accumulate(func, 2, **options)(scaling, W, X)


def paper(func, scaling=None, **options):
    return lambda: mpx.filter_grad(func, scaling, **options)(W, X)


def paper_value(func, scaling=None, **options):
    return lambda: mpx.filter_value_and_grad(func, scaling, **options)(W, X)


def with_amp_inside(w, x):
    return mpx.amp(loss)(w, x)


def with_a_teacher(w, x):
    teacher = mpx.amp(lambda x: x @ W)
    return loss(w, x) + mpx.cast_to_float32(jnp.mean(teacher(x)))


BESIDE_AMP = (
    "computes in {}, but `amp` .* computes in {}.*amp\\(func, dtype\\).*`policy`"
)
NEEDS_SCALE = (
    "f16 gradients need a loss scaling.*pow2\\(\\).*bf16.*StaticLossScaling\\(1.0\\)"
)
INSIDE = "`amp` was called inside a function whose arguments.*{}.*mpx.amp\\(loss\\)"
CONFLICTS = {
    "policy f32, amp": (
        take(mpx.amp(loss), policy="f32"),
        BESIDE_AMP.format("f32", "bf16"),
    ),
    "policy f16, amp": (
        take(mpx.amp(loss), SCALED, policy="p=f32,c=f16,o=f32"),
        BESIDE_AMP.format("f16", "bf16"),
    ),
    "policy bf16, amp f16": (
        paper(mpx.amp(loss, "f16"), SCALED, policy="bf16-mixed"),
        BESIDE_AMP.format("bf16", "f16"),
    ),
    "policy f32, jit of amp": (
        parts(jax.jit(mpx.amp(loss)), policy="f32"),
        BESIDE_AMP.format("f32", "bf16"),
    ),
    "policy f32, fp8 of amp": (
        take(mpx.fp8(mpx.amp(loss)), policy="f32"),
        BESIDE_AMP.format("f32", "bf16"),
    ),
    "policy f32, fp8": (
        take(mpx.fp8(loss), policy="f32"),
        "computes in f32, but `fp8` .* 16-bit",
    ),
    "keep, amp": (
        take(mpx.amp(loss), policy=Policy(keep="w")),
        "`Policy\\(keep=...\\)` has no effect .*`amp`.*Pass `keep=` to `amp`",
    ),
    "reduce_dtype, reduce_dtype of amp": (
        take(mpx.amp(loss, reduce_dtype="compute"), policy=Policy(reduce_dtype="f32")),
        "`reduce_dtype` is float32 in the policy and compute in `amp`",
    ),
    "policy bf16, amp inside": (
        take(with_amp_inside, policy="bf16-mixed"),
        INSIDE.format("bf16"),
    ),
    "no policy, amp inside": (parts(with_amp_inside, SCALED), INSIDE.format("f16")),
    "policy bf16, teacher under amp": (
        take(with_a_teacher, policy="bf16-mixed"),
        INSIDE.format("bf16"),
    ),
    "cast_function f32, amp": (
        lambda: mpx.get_policy("f32").cast_function(mpx.amp(loss))(W, X),
        BESIDE_AMP.format("f32", "bf16"),
    ),
    "switched off, amp": (
        paper(mpx.amp(loss), SCALED, use_mixed_precision=False),
        "`use_mixed_precision=False` .* `amp`",
    ),
    "f16 policy, no scale": (take(loss, policy="p=f32,c=f16,o=f32"), NEEDS_SCALE),
    "f16 in parts, no scale": (parts(loss, policy="f16"), NEEDS_SCALE),
    "f16 amp, no scale": (take(mpx.amp(loss, "f16")), NEEDS_SCALE),
    "f16 amp of the paper, no scale": (paper(mpx.amp(loss, "f16")), NEEDS_SCALE),
    "f16 of the paper, NoLossScaling": (
        paper_value(loss, UNSCALED, policy="c=f16"),
        NEEDS_SCALE,
    ),
    "paper, nothing given": (paper(loss), NEEDS_SCALE),
    "first scale above the ceiling": (
        lambda: DynamicLossScaling(2.0**20),
        r"`loss_scaling` must be.*at most `max_loss_scaling` \(65504.0\).*1048576.*"
        r"pow2\(\)",
    ),
    "first scale below the floor": (
        lambda: DynamicLossScaling(0.5, 1.0),
        r"`loss_scaling` must be at least `min_loss_scaling` \(1.0\).*0.5",
    ),
    "first power of two above the ceiling": (
        lambda: DynamicLossScaling.pow2(2.0**20, max=2.0**16),
        "`loss_scaling` must be.*at most",
    ),
    "floor above the ceiling": (
        lambda: DynamicLossScaling(8.0, 16.0, max_loss_scaling=8.0),
        "`min_loss_scaling` must be at most `max_loss_scaling`",
    ),
    "two policies": (
        lambda: Policy("bf16-mixed", "f16"),
        "`param_dtype` .*whole policy.*mpx.get_policy\\('bf16-mixed'\\)",
    ),
    "keep beside a policy": (
        lambda: mpx.get_policy(Policy(), keep="w"),
        "`keep` goes with a string",
    ),
    "batch, differentiated": (
        parts(loss, argnums=1),
        "both a batch and differentiated",
    ),
}


@pytest.mark.parametrize(("call", "match"), CONFLICTS.values(), ids=CONFLICTS)
def test_options_that_contradict_each_other_are_refused(call, match):
    with pytest.raises((ValueError, TypeError), match=f"(?s){match}"):
        call()


# --- What may stand beside each other -------------------------------------------------


def dtypes_of(call):
    return multiplied(jax.make_jaxpr(call)())


AGREE = {
    "amp": (take(mpx.amp(loss)), "bfloat16"),
    "amp, the same in a policy": (take(mpx.amp(loss), policy="bf16-mixed"), "bfloat16"),
    "amp, the rest of a policy": (
        take(mpx.amp(loss), policy=Policy(grad_dtype="bf16", reduce_dtype="f32")),
        "bfloat16",
    ),
    "amp, paper without a scaling": (paper(mpx.amp(loss)), "bfloat16"),
    "amp f16, scaled": (take(mpx.amp(loss, "f16"), SCALED), "float16"),
    "amp inside, f32": (take(with_amp_inside, policy="f32"), "bfloat16"),
    "no policy, no scale": (take(loss), "bfloat16"),
    "no policy, no scale, in parts": (parts(loss), "bfloat16"),
    "no policy, scaled": (take(loss, SCALED), "float16"),
    "no policy, NoLossScaling of the paper": (paper(loss, UNSCALED), "bfloat16"),
    "f16, scale of one": (
        take(loss, StaticLossScaling(1.0), policy="c=f16"),
        "float16",
    ),
    "cast_function, amp": (
        lambda: Policy().cast_function(mpx.amp(loss))(W, X),
        "bfloat16",
    ),
}


@pytest.mark.parametrize(("call", "dtype"), AGREE.values(), ids=AGREE)
def test_options_that_agree_decide_the_dtype_of_matmuls(call, dtype):
    assert dtypes_of(call) == {dtype}


def test_policy_beside_amp_gives_the_dtype_of_gradients():
    policy = Policy(grad_dtype="bf16")
    result = mpx.value_and_grad(mpx.amp(loss), policy=policy)(UNSCALED, W, X)
    exact = np.asarray(jax.grad(loss)(W, X), np.float64)
    assert result.grads.dtype == jnp.bfloat16
    # Rounded twice, as operands and as gradients.
    error = np.abs(np.asarray(result.grads, np.float64) - exact)
    assert np.all(error <= 2.0**-7 * np.max(np.abs(exact)))


def test_amp_inside_an_f32_policy_is_that_of_jax():
    expected = jax.grad(with_amp_inside)(W, X)
    mpx.testing.assert_trees_equal(
        mpx.value_and_grad(with_amp_inside, policy="f32")(UNSCALED, W, X).grads,
        expected,
    )


def test_loss_that_calls_amp_is_traced_once():
    traces = []

    def counted(w, x):
        traces.append(w.dtype)
        return with_amp_inside(w, x)

    jax.jit(mpx.value_and_grad(counted, policy="f32")).lower(UNSCALED, W, X)
    assert traces == [jnp.float32]


def test_gradients_that_f16_would_lose_are_kept_without_a_scale():
    # 6e-9 each, a tenth of the smallest f16 number: f16 without a scale gives zeros.
    tiny = lambda w, x: jnp.mean(w * x) * 2.0**-24  # noqa: E731
    result = mpx.value_and_grad(tiny)(UNSCALED, jnp.ones(8), jnp.ones(8))
    np.testing.assert_array_equal(result.grads, np.full(8, 2.0**-27))


def test_half_precision_that_was_chosen_needs_a_scale():
    with mpx.half_precision("f16"), pytest.raises(ValueError, match=NEEDS_SCALE):
        take(loss)()
    with mpx.half_precision("bf16"):
        assert dtypes_of(take(loss, SCALED)) == {"bfloat16"}


def test_f16_under_amp_inside_a_loss_without_a_scale_warns():
    low = lambda w, x: mpx.amp(loss, "f16")(w, x)  # noqa: E731
    with pytest.warns(RuntimeWarning, match="without a loss scale"):
        take(low, policy="f32")()
    take(low, SCALED, policy="f32")()  # warnings are errors here


def test_scale_of_the_paper_that_is_an_array_is_clipped_as_there():
    scaling = DynamicLossScaling(jnp.float32(2.0**16))
    assert float(scaling.adjust(True).loss_scaling) == 65504.0


# --- Calls that look right ------------------------------------------------------------

BY_KEYWORD = "The loss scaling comes after: .*\\(loss\\)\\(scaling, "
CALLS = {
    "scaling in the wrong place": (
        lambda: mpx.value_and_grad(loss, SCALED),  # pyright: ignore[reportCallIssue]
        TypeError,
        "`value_and_grad` takes.*" + BY_KEYWORD,
    ),
    "scaling behind the steps": (
        lambda: mpx.accumulate(loss, 2, SCALED),  # pyright: ignore[reportCallIssue]
        TypeError,
        "`accumulate` takes.*" + BY_KEYWORD,
    ),
    "argnums by position": (
        lambda: mpx.value_and_grad(loss, 0),  # pyright: ignore[reportCallIssue]
        TypeError,
        "options by keyword, such as `argnums=`",
    ),
    "a loss instead of a function": (
        lambda: mpx.value_and_grad(loss(W, X)),  # pyright: ignore[reportCallIssue]
        TypeError,
        "Expected a function, such as a loss, but .*Array",
    ),
    "a scaling instead of a function": (
        lambda: mpx.filter_grad(SCALED),  # pyright: ignore[reportCallIssue]
        TypeError,
        "Expected a function, such as a loss, but StaticLossScaling",
    ),
    "arrays instead of a function to cast": (
        lambda: mpx.force_full_precision(X),  # pyright: ignore[reportCallIssue]
        TypeError,
        "Expected a function, such as a loss, but .*Array",
    ),
    "arrays instead of an update": (
        lambda: mpx.cond_update({"w": W}),  # pyright: ignore[reportCallIssue]
        TypeError,
        "Expected a function, such as a loss, but dict",
    ),
    "a dtype instead of a function": (
        lambda: mpx.cast_function("bf16"),  # pyright: ignore[reportCallIssue]
        TypeError,
        "but str was given.* or by name: `@mpx.amp",
    ),
    "mean as a word": (
        lambda: mpx.accumulate(loss, 2, mean="sum"),  # pyright: ignore[reportCallIssue]
        TypeError,
        "`mean` must be True or False, but 'sum'",
    ),
    "scaling in the place of has_aux": (
        lambda: mpx.filter_grad(loss, SCALED, SCALED),  # pyright: ignore[reportCallIssue]
        TypeError,
        "`has_aux` must be True or False, but StaticLossScaling",
    ),
    "policy as a string": (
        lambda: Policy("p=f32,c=f16,o=f32"),
        ValueError,
        "`param_dtype` .*whole policy.*mpx.get_policy\\('p=f32,c=f16,o=f32'\\)",
    ),
}


@pytest.mark.parametrize(("call", "error", "match"), CALLS.values(), ids=CALLS)
def test_call_that_looks_right_is_explained(call, error, match, untyped):
    with pytest.raises(error, match=f"(?s){match}"):
        call()


@pytest.mark.skipif(
    hasattr(mpx.GradResult.__iter__, "__wrapped__"),
    reason="a check of annotations stands between the result and who unpacks it",
)
def test_result_that_is_unpacked_as_a_pair_is_explained():
    result = take(loss)()
    with pytest.raises(
        ValueError, match=r"(?s)6 fields.*`result.value`.*`result.grads`"
    ):
        value, grads = result
    with pytest.raises(ValueError, match="6 fields"):
        (_, _), _ = result
    value, _, grads, *_ = result
    assert value is result.value
    assert grads is result.grads
    assert [*result][:3] == [result.value, None, result.grads]
    assert tuple(result._replace(aux=1))[1] == 1
