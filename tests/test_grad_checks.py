"""What the gradient functions see while tracing: wrong numbers that nobody would notice."""

import functools
import warnings

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax import lax

import mpx
from models import multiplied, normal
from mpx import DynamicLossScaling, NoLossScaling, StaticLossScaling
from mpx.testing import assert_trees_equal

pytestmark = [
    pytest.mark.standard_promotion,
]

BF16 = "p=f32,c=bf16,o=f32"


def take_value_and_grad(loss, *args, scaling=None, **options):
    scaling = NoLossScaling() if scaling is None else scaling
    return mpx.value_and_grad(loss, **options)(scaling, *args).grads


def take_accumulate(loss, *args, scaling=None, **options):
    """Accumulates over parts of a further argument, which the loss does not use."""
    scaling = NoLossScaling() if scaling is None else scaling

    def with_batch(params, batch, *args):
        return loss(params, *args)

    if args[1:]:
        batches = tuple(range(1, len(args)))
        return mpx.accumulate(loss, 2, batch_argnums=batches, **options)(
            scaling, *args
        ).grads
    with_batch.__name__ = getattr(loss, "__name__", "loss")
    batch = jnp.zeros(2, jnp.int32)
    return mpx.accumulate(with_batch, 2, **options)(scaling, *args, batch).grads


def take_filter_grad(loss, *args, scaling=None, **options):
    return mpx.filter_grad(loss, scaling, **options)(*args)[2]


def take_filter_value_and_grad(loss, *args, scaling=None, **options):
    return mpx.filter_value_and_grad(loss, scaling, **options)(*args)[3]


def take_calculate_scaled_grad(loss, *args, scaling=None, policy=BF16):
    assert policy == BF16
    scaling = NoLossScaling() if scaling is None else scaling
    with mpx.half_precision("bf16"):
        return mpx.calculate_scaled_grad(loss, scaling)(*args)[1]


TAKE = {
    "value_and_grad": take_value_and_grad,
    "accumulate": take_accumulate,
    "filter_grad": take_filter_grad,
    "filter_value_and_grad": take_filter_value_and_grad,
    "calculate_scaled_grad": take_calculate_scaled_grad,
}


@pytest.fixture(params=TAKE.values(), ids=TAKE.keys())
def take(request):
    return request.param


def run_jitted(func, *args):
    return jax.jit(func)(*args)


def run_eagerly(func, *args):
    return func(*args)


PARAMS = {"w": normal(0, 8, 8), "v": normal(1, 8, 4)}
X, Y = normal(2, 16, 8), normal(3, 16, 4)


def net(params, x):
    return jnp.tanh(x @ params["w"]) @ params["v"]


def mean_square(error):
    return jnp.mean(mpx.cast_to_float32(error) ** 2)


def loss_of_arguments(params, x, y):
    return mean_square(net(params, x) - y)


# --- A policy that changes no matmul --------------------------------------------------

ALL_IN_F32 = "all their matmuls run in f32, `.*params/.*closes over.*mpx\\.amp"


@pytest.mark.some(1)
@pytest.mark.parametrize("run", [run_jitted, run_eagerly])
def test_closed_over_batch_is_reported_by_every_function(take, run):
    def step(params, batch):
        def loss_fn(params):
            return mean_square(net(params, batch["x"]) - batch["y"])

        return take(loss_fn, params, policy=BF16)

    with pytest.warns(RuntimeWarning, match=ALL_IN_F32):
        run(step, PARAMS, {"x": X, "y": Y})


def reads_global(params):
    return mean_square(net(params, X))


def reads_in_a_loop(params):
    def body(carry, _):
        return jnp.tanh(carry @ params["w"]), None

    return mean_square(lax.scan(body, X, None, length=3)[0])


def casts_back(params):
    wide = mpx.cast_to_float32(params)  # as `nn.Dense(dtype=f32)`
    return loss_of_arguments(wide, X, Y)


HIDDEN = {
    "global": reads_global,
    "numpy f64": lambda params: mean_square(net(params, np.asarray(X, np.float64))),
    "checkpoint": jax.checkpoint(reads_in_a_loop),
    "jit": jax.jit(reads_global),
    "cast back": casts_back,
}


@pytest.mark.parametrize("loss", HIDDEN.values(), ids=HIDDEN)
def test_policy_that_changes_no_matmul_is_reported(loss):
    with pytest.warns(RuntimeWarning, match=ALL_IN_F32):
        jax.jit(mpx.value_and_grad(loss, policy=BF16)).lower(NoLossScaling(), PARAMS)


def test_matmul_with_a_closed_over_batch_runs_in_f32_indeed():
    # The premise of the warning, and its remedies.
    low = mpx.cast_to_bfloat16(PARAMS)
    assert multiplied(jax.make_jaxpr(reads_global)(low)) == {"float32", "bfloat16"}
    batch = mpx.cast_to_bfloat16((X, Y))
    assert multiplied(jax.make_jaxpr(loss_of_arguments)(low, *batch)) == {"bfloat16"}
    under_amp = jax.make_jaxpr(mpx.amp(reads_global))(PARAMS)
    assert multiplied(under_amp) == {"bfloat16"}


def uses_a_label(params, x):
    return mean_square(net(params, x) - Y)


def uses_a_mask(params, x):
    mask = MASK > 0
    return mean_square(jnp.where(mask, net(params, x), 0))


def uses_a_table_in_f32(params, x):
    hidden = mpx.cast_to_float32(x @ params["w"]) @ TABLE
    return mean_square(hidden.astype(x.dtype) @ params["v"])


def has_an_f32_head(params, x):
    hidden = mpx.cast_to_float32(jnp.tanh(x @ params["w"]))
    return mean_square(hidden @ mpx.cast_to_float32(params["v"]) - Y)


def uses_tokens(params, x):
    return mean_square(jnp.tanh(x @ params["w"])[TOKENS])


MASK, TABLE, TOKENS = normal(4, 16, 4), normal(5, 8, 8), jnp.arange(4)
HARMLESS = [
    uses_a_label,
    uses_a_mask,
    uses_a_table_in_f32,
    has_an_f32_head,
    uses_tokens,
]


@pytest.mark.parametrize("loss", HARMLESS)
def test_closed_over_arrays_that_do_no_harm_are_not_reported(loss):
    # Warnings are errors here.
    jax.jit(mpx.value_and_grad(loss, policy=BF16))(NoLossScaling(), PARAMS, X)


@pytest.mark.parametrize(
    "policy", ["f32", mpx.Policy("f32", "bf16", keep=".")], ids=["f32", "all kept"]
)
def test_closed_over_batch_of_an_f32_computation_is_not_reported(policy):
    mpx.value_and_grad(reads_global, policy=policy)(NoLossScaling(), PARAMS)


def test_closed_over_batch_of_a_function_under_amp_is_not_reported():
    loss = mpx.amp(reads_global, dtype="bf16")
    jax.jit(mpx.value_and_grad(loss))(NoLossScaling(), PARAMS)


def test_one_layer_in_f32_is_not_reported():
    def loss(params, x):
        hidden = jnp.tanh(x @ params["low"]).astype(jnp.float32)
        return jnp.mean((hidden @ params["head"].astype(jnp.float32)) ** 2)

    params = {"low": jnp.ones((X.shape[-1], 4)), "head": jnp.ones((4, 2))}
    take = jax.jit(mpx.value_and_grad(loss, policy=BF16))
    take(NoLossScaling(), params, X)  # warnings are errors here


def test_function_that_closes_over_nothing_is_traced_once():
    traces = []

    def loss(params, x, y):
        traces.append(1)
        return loss_of_arguments(params, x, y)

    jax.jit(mpx.value_and_grad(loss, policy=BF16))(NoLossScaling(), PARAMS, X, Y)
    assert len(traces) == 1


# --- A scaling that is compiled in ----------------------------------------------------

NEVER_MOVES = "compiled in as a constant.*Make the scaling an argument"
SCALING = DynamicLossScaling.pow2()


@pytest.mark.parametrize("make", [lambda: SCALING, DynamicLossScaling.pow2])
def test_dynamic_scaling_that_is_no_argument_is_reported(take, make):
    def step(params, x, y):
        return take(loss_of_arguments, params, x, y, scaling=make(), policy=BF16)

    with pytest.warns(RuntimeWarning, match=NEVER_MOVES):
        jax.jit(step).lower(PARAMS, X, Y)


def test_warning_points_at_the_line_of_the_user():
    with pytest.warns(RuntimeWarning, match=NEVER_MOVES) as caught:
        jax.jit(mpx.filter_grad(loss_of_arguments, SCALING)).lower(PARAMS, X, Y)
    assert [record.filename for record in caught] == [__file__]


QUIET = {
    "argument": lambda step: jax.jit(step)(SCALING, PARAMS, X, Y),
    "eager": lambda step: step(SCALING, PARAMS, X, Y),
    "vmap": lambda step: jax.vmap(lambda x, y: step(SCALING, PARAMS, x, y))(
        X[:, None], Y[:, None]
    ),
    "static": lambda step: jax.jit(functools.partial(step, StaticLossScaling(8.0)))(
        PARAMS, X, Y
    ),
    "none": lambda step: jax.jit(functools.partial(step, NoLossScaling()))(
        PARAMS, X, Y
    ),
    "scan": lambda step: jax.jit(
        lambda: lax.scan(
            lambda scaling, x: (step(scaling, PARAMS, X, Y).scaling, None),
            DynamicLossScaling.pow2(),
            None,
            length=2,
        )
    )(),
}


@pytest.mark.some(1)
@pytest.mark.parametrize("call", QUIET.values(), ids=QUIET)
def test_scaling_that_can_move_or_need_not_is_not_reported(call):
    call(mpx.value_and_grad(loss_of_arguments, policy=BF16))


# --- Weights of long loops ------------------------------------------------------------


def recurrent(params, xs):
    def body(carry, x):
        return carry, params["w"].astype(x.dtype) * x

    return jnp.sum(lax.scan(body, 0.0, xs)[1], dtype=jnp.float32)


def wide_inside(params, xs):
    def body(carry, x):
        return carry, params["w"].astype(x.dtype) * x

    return jnp.sum(lax.scan(jax.checkpoint(body), 0.0, xs)[1], dtype=jnp.float32)


ONE = StaticLossScaling(1.0)
LONG = {"bf16": 256, "f16": 2048}
ADDED_UP = r"`params/w` is used in each of the {} rounds.*{}.*mpx\.amp"


@pytest.mark.parametrize("loss", [recurrent, wide_inside])
@pytest.mark.parametrize(("name", "length"), LONG.items())
def test_sums_of_a_loop_that_lose_parts_are_reported(loss, name, length):
    params = {"w": jnp.float32(1.0)}
    step = jax.jit(mpx.value_and_grad(loss, policy=f"p=f32,c={name},o=f32"))
    long = {"bf16": "bfloat16", "f16": "float16"}[name]
    with pytest.warns(RuntimeWarning, match=ADDED_UP.format(length, long)):
        step.lower(ONE, params, jnp.ones(length))
    step.lower(ONE, params, jnp.ones(length - 1))  # no warning


def test_reported_sum_is_wrong_and_its_remedies_are_right():
    params, xs = {"w": jnp.float32(1.0)}, jnp.full(65536, 1e-3)
    exact = 65.536
    with pytest.warns(RuntimeWarning, match="65536 rounds"):
        once = take_value_and_grad(recurrent, params, xs, scaling=ONE, policy="c=f16")
    assert once["w"] < 0.1 * exact
    keep = mpx.Policy("f32", "f16", keep="^w$")
    low = mpx.amp(recurrent, dtype="f16")
    for loss, policy in ((recurrent, keep), (low, None)):
        grads = take_value_and_grad(loss, params, xs, scaling=ONE, policy=policy)
        # Each part is rounded to f16, and the sum of equal parts in f32 drifts.
        assert abs(grads["w"] - exact) < 2.0**-10 * exact


def test_layers_that_are_scanned_over_are_not_reported():
    def loss(params, x):
        return mean_square(lax.scan(lambda h, w: (jnp.tanh(h * w), None), x, params)[0])

    params = jnp.ones((300, 4))
    jax.jit(mpx.value_and_grad(loss, policy=BF16)).lower(
        NoLossScaling(), params, jnp.ones(4)
    )


# --- Loss and state belong into the decision ------------------------------------------


def with_nan_loss(w, x):
    # The gradient of the second term is zero, and so finite.
    return jnp.sum(w * x).astype(jnp.float32) + lax.stop_gradient(jnp.float32(jnp.nan))


@pytest.mark.parametrize("steps", [None, 2])
def test_loss_that_is_not_finite_skips_the_step(steps):
    x, w = jnp.ones(4), jnp.float32(1.0)
    transform = mpx.value_and_grad
    if steps is not None:
        transform = functools.partial(mpx.accumulate, steps=steps)
    result = transform(with_nan_loss)(DynamicLossScaling.pow2(8.0), w, x)
    assert mpx.all_finite(result.grads)
    assert not result.finite
    assert int(result.scaling.skipped) == 1


@pytest.mark.parametrize("name", ["filter_grad", "filter_value_and_grad"])
def test_paper_functions_look_at_the_loss_too(name):
    out = getattr(mpx, name)(with_nan_loss, DynamicLossScaling.pow2(8.0))(
        jnp.float32(1.0), jnp.ones(4)
    )
    *_, scaling, finite, grads = out
    assert mpx.all_finite(grads)
    assert not finite
    assert int(scaling.skipped) == 1


# --- The loss that is returned --------------------------------------------------------


def test_returned_loss_is_the_one_of_the_function_widened():
    def loss(w, x):
        return jnp.mean(x * w)  # in bf16

    x = jnp.linspace(1, 4.69, 7)
    result = mpx.value_and_grad(loss, policy=BF16)(NoLossScaling(), jnp.float32(1), x)
    low = jnp.mean(x.astype(jnp.bfloat16))
    assert_trees_equal(result.value, low.astype(jnp.float32))
    wide = mpx.value_and_grad(
        lambda w, x: jnp.mean(mpx.cast_to_float32(x * w)), policy=BF16
    )(NoLossScaling(), jnp.float32(1), x)
    assert abs(wide.value - low.astype(jnp.float32)) > 0  # not rounded at the end


# --- Arguments ------------------------------------------------------------------------


def call(take, **options):
    """Returns a call with options that a user may get wrong."""

    def run():
        with warnings.catch_warnings():
            return take(lambda w, x: jnp.sum(w * x), jnp.float32(1), X, **options)

    return run


INTEGER = "must be an integer, but {} of type {} was given"
MISUSES = {
    "steps": (
        lambda: mpx.accumulate(jnp.dot, steps=2.0),  # pyright: ignore[reportCallIssue]
        "`steps` " + INTEGER.format("2.0", "float"),
    ),
    "steps text": (
        lambda: mpx.accumulate(jnp.dot, steps="2"),  # pyright: ignore[reportCallIssue]
        "`steps` " + INTEGER.format("'2'", "str"),
    ),
    "batch_argnums": (
        lambda: mpx.accumulate(jnp.dot, 2, batch_argnums=1.0),  # pyright: ignore[reportCallIssue]
        "`batch_argnums` " + INTEGER.format("1.0", "float"),
    ),
    **{
        f"{option} {value} of {name}": (call(take, **{option: value}), match)
        for name, take in TAKE.items()
        if name != "calculate_scaled_grad"
        for option, value, match in (
            ("retry", "1", "`retry` " + INTEGER.format("'1'", "str")),
            ("retry", float("nan"), "`retry` " + INTEGER.format("nan", "float")),
            ("argnums", 0.0, "`argnums` " + INTEGER.format("0.0", "float")),
            ("argnums", "0", "`argnums` " + INTEGER.format("'0'", "str")),
            ("axis_name", 3, '`axis_name` must be the name.*such as "data".*but 3'),
            ("axis_name", ("a", 3), "`axis_name` must be the name.*a tuple of names"),
        )
    },
    **{
        f"class for {name}": (
            call(take, scaling=DynamicLossScaling, policy=BF16),
            "but the class `DynamicLossScaling` was given, not an instance",
        )
        for name, take in TAKE.items()
    },
}


@pytest.mark.parametrize(("mistake", "match"), MISUSES.values(), ids=MISUSES)
def test_misuse_is_explained(mistake, match, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as for users
    with pytest.raises(TypeError, match=f"(?s){match}"):
        mistake()


@pytest.mark.parametrize("number", [np.int64, np.int32, np.uint8, jnp.int32])
def test_integers_of_numpy_and_jax_are_integers(number, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as for users
    take = mpx.accumulate(
        lambda x, w: jnp.sum(x * w),
        number(2),
        argnums=number(1),
        batch_argnums=number(0),
        retry=number(0),
    )
    result = take(NoLossScaling(), jnp.ones(4), jnp.float32(2.0))
    assert_trees_equal(result.grads, jnp.float32(2.0))
    grads = mpx.value_and_grad(lambda x, w: jnp.sum(x * w), argnums=(number(1),))(
        NoLossScaling(), jnp.ones(4), jnp.float32(2.0)
    ).grads
    assert_trees_equal(grads, (jnp.float32(4.0),))


@pytest.mark.parametrize("batch", [(), "text", {"n": 3}])
def test_batch_without_arrays_is_refused(batch):
    with pytest.raises(
        ValueError, match=r"batch \(argument 1\) holds no array.*batch_a"
    ):
        mpx.accumulate(lambda w, b: w, 2)(NoLossScaling(), jnp.float32(1.0), batch)
