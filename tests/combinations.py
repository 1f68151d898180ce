"""Which precisions, ways to update and placements of devices go together.

Every combination is a cell, which `test_combinations.py` trains and this file writes down:
`python tests/combinations.py` makes the page `docs/combinations.md`.
"""

import functools
import itertools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training import train_state
from jax import lax

import mpx

ROWS, INPUTS, WIDTH, RATE, STEPS = 256, 32, 64, 0.5, 3
SCALE = 2.0**10


def loss(params, x, y):
    hidden = jnp.tanh(x @ params["up"] + params["bias"])
    error = (hidden @ params["down"]).astype(jnp.float32) - y.astype(jnp.float32)
    return jnp.mean(error**2)


@functools.cache
def problem():
    """Returns parameters, which are bf16 numbers held in f32, inputs and targets."""
    rng = np.random.default_rng(0)

    def draw(*shape, size=1.0):
        return jnp.asarray(rng.normal(size=shape) * size, jnp.float32)

    params = {
        "up": draw(INPUTS, WIDTH, size=INPUTS**-0.5),
        "bias": draw(WIDTH, size=0.1),
        "down": draw(WIDTH, INPUTS, size=WIDTH**-0.5),
    }
    params = mpx.cast_to_float32(mpx.cast_to_bfloat16(params))
    x = draw(ROWS, INPUTS)
    return params, x, jnp.sin(x)


def part():
    """Returns what one call sees at least: one of two microbatches on one device of eight.

    The gradient of its mean is 16 times that of all rows: delayed scales have to know.
    """
    return tuple(x[: ROWS // 16] for x in problem()[1:])


# --- how it computes --------------------------------------------------------------------


class Precision(NamedTuple):
    """One column of the table.

    Attributes:
        dtypes: What its matmuls multiply.
        roundings: The largest relative error of each rounding that a gradient passes.
        wrap: Makes the loss of it.
        policy: For the gradient functions.
        is_delayed: Whether the loss takes an `Fp8State` first.
        is_scaled: Whether the loss has to be scaled.
    """

    dtypes: frozenset[str]
    roundings: tuple[float, ...]
    wrap: Callable[[Any], Any] = lambda f: f
    policy: str | None = None
    is_delayed: bool = False
    is_scaled: bool = False

    def scaling(self) -> Any:
        if self.is_scaled:
            return mpx.DynamicLossScaling.pow2(SCALE)
        return mpx.NoLossScaling()


def fp8(recipe: Any) -> Callable[[Any], Any]:
    return lambda f: mpx.fp8(mpx.amp(f, dtype="bf16"), recipe, min_gain=0)


def under_amp(dtype: str, **options: Any) -> Callable[[Any], Any]:
    return lambda f: mpx.amp(f, dtype=dtype, **options)


# Inputs, weights, bias, sums and tanh on the way there, and as many on the way back, are
# rounded by half an ulp. In fp8 so are inputs and weights of both layers, the hidden
# numbers again for the gradient (e4m3), and what comes back to each layer (e5m2).
BF16 = frozenset({"bfloat16"}), (2.0**-8,) * 12
F16 = frozenset({"float16"}), (2.0**-11,) * 12
# The hidden numbers and the error are kept in int8.
CODED = BF16[0], BF16[1] + (1 / 127,) * 2
FP8 = (
    frozenset({"float8_e4m3fn", "float8_e5m2"}),
    (2.0**-8,) * 12 + (2.0**-4,) * 5 + (2.0**-3,) * 2,
)
# In int8 a number is off by half a code, 1/254 of the largest in its row, and what comes
# back to a layer by a code. The largest is at most four times the root mean square here.
INT8 = (
    frozenset({"int8"}),
    (2.0**-8,) * 12 + (4 / 254,) * 5 + (4 / 127,) * 2,
)
PRECISIONS = {
    "policy bf16": Precision(*BF16, policy="p=f32,c=bf16,o=f32"),
    "policy f16": Precision(*F16, policy="p=f32,c=f16,o=f32", is_scaled=True),
    "amp bf16": Precision(*BF16, under_amp("bf16")),
    "amp f16": Precision(*F16, under_amp("f16"), is_scaled=True),
    "amp, int8 residuals": Precision(*CODED, under_amp("bf16", residuals="int8")),
    "fp8 current": Precision(*FP8, fp8(mpx.recipes.CurrentScaling())),
    "fp8 delayed": Precision(
        *FP8, fp8(mpx.recipes.DelayedScaling(history=4)), is_delayed=True
    ),
    "int8": Precision(*INT8, fp8(mpx.recipes.Int8())),
}


# --- how it updates ---------------------------------------------------------------------


class Training(NamedTuple):
    """What a combination trains.

    Attributes:
        carry: Everything that a step changes: a pytree of arrays.
        step: `step(carry, x, y, axis_name)` returns the next carry and the loss.
        weights: Reads the f32 weights off a carry.
    """

    carry: Any
    step: Callable[..., Any]
    weights: Callable[[Any], Any]


def gradients(precision, func, params, take=mpx.value_and_grad):
    """Returns a function of state, parameters and a batch, and the first state.

    It returns a `GradResult`; its state is the loss scaling and, if there is one, the
    `Fp8State`.
    """
    wrapped = precision.wrap(func)
    fp8_state = wrapped.init(params, *part()) if precision.is_delayed else None

    def run(state, params, x, y, axis_name):
        scaling, fp8_state = state
        args = (params, x, y) if fp8_state is None else (fp8_state, params, x, y)
        of = take(wrapped, policy=precision.policy, axis_name=axis_name)
        result = of(scaling, *args)
        return result, (result.scaling, result.fp8)

    return run, (precision.scaling(), fp8_state)


def with_optimizer(precision, optimizer, dtype, weights, take=mpx.value_and_grad):
    params = mpx.cast_tree(problem()[0], dtype)
    grads_of, state = gradients(precision, loss, params, take)

    def step(carry, x, y, axis_name=None):
        params, optimizer_state, state = carry
        result, state = grads_of(state, params, x, y, axis_name)
        params, optimizer_state = mpx.optimizer_update(
            params, optimizer, optimizer_state, result.grads, result.finite
        )
        return (params, optimizer_state, state), result.value

    return Training((params, optimizer.init(params), state), step, weights)


SGD = optax.sgd(RATE, momentum=0.9)
COMPRESSED = mpx.optim.flash_sgd(
    RATE, momentum=0.9, compression=mpx.optim.Compression(min_size=1)
)


masters = jax.jit(mpx.optim.master_params)


def plain_optax(precision):
    return with_optimizer(precision, SGD, "f32", lambda carry: carry[0])


def master_weights(precision):
    optimizer = mpx.optim.master_weights(SGD)
    return with_optimizer(precision, optimizer, "bf16", lambda carry: carry[1].master)


def compressed(dtype):
    return lambda precision: with_optimizer(
        precision, COMPRESSED, dtype, lambda carry: masters(*carry[:2])
    )


def accumulate(precision):
    take = functools.partial(mpx.accumulate, steps=2, batch_argnums=(1, 2))
    return with_optimizer(precision, SGD, "f32", lambda carry: carry[0], take)


def release(precision):
    params = mpx.cast_to_bfloat16(problem()[0])

    def cast(params, x, y):
        if precision.policy is not None:
            policy = mpx.get_policy(precision.policy)
            params, x, y = policy.cast_to_compute((params, x, y))
        return loss(params, x, y)

    func = precision.wrap(cast)
    fp8_state = ()
    if precision.is_delayed:
        fp8_state = (func.init(params, *part()),)

    def step(carry, x, y, axis_name=None):
        params, optimizer_state, scaling, fp8_state = carry

        def scaled(params, *args):
            value = func(*args, params, x, y)
            value = value if axis_name is None else lax.pmean(value, axis_name)
            return scaling.scale(value)

        if precision.is_delayed:
            scaled = func
        stepped = mpx.optim.release(scaled, COMPRESSED, skip_nonfinite=True)
        scale = scaling.unscale(jnp.float32(1))
        args = (*fp8_state, x, y) if precision.is_delayed else fp8_state
        result = stepped(params, optimizer_state, *args, grad_scale=scale)
        scaling = scaling.adjust(result.finite)
        carry = (result.params, result.state, scaling, fp8_state)
        return carry, result.value * scale

    carry = (params, COMPRESSED.init(params), precision.scaling(), fp8_state)
    return Training(carry, step, lambda carry: masters(*carry[:2]))


class Model(nnx.Module):
    def __init__(self, params):
        for name, value in params.items():
            setattr(self, name, nnx.Param(value))


def nnx_optimizer(precision):
    names = tuple(problem()[0])

    def nnx_loss(model, x, y):
        return loss({name: getattr(model, name)[...] for name in names}, x, y)

    model = Model(problem()[0])
    optimizer = nnx.Optimizer(model, SGD, wrt=nnx.Param)
    grads_of, state = gradients(precision, nnx_loss, model)
    graphdef, objects = nnx.split((model, optimizer))

    def step(carry, x, y, axis_name=None):
        objects, state = carry
        model, optimizer = nnx.merge(graphdef, objects)
        result, state = grads_of(state, model, x, y, axis_name)
        mpx.optimizer_update(model, optimizer, None, result.grads, result.finite)
        return (nnx.state((model, optimizer)), state), result.value

    def weights(carry):
        model, _ = nnx.merge(graphdef, carry[0])
        return {name: getattr(model, name)[...] for name in names}

    return Training((objects, state), step, weights)


def flax_train_state(precision):
    params = problem()[0]
    grads_of, state = gradients(precision, loss, params)
    start = train_state.TrainState.create(apply_fn=None, params=params, tx=SGD)
    start = start.replace(step=jnp.int32(0))

    def step(carry, x, y, axis_name=None):
        train, state = carry
        result, state = grads_of(state, train.params, x, y, axis_name)
        train, _ = mpx.optimizer_update(train, None, None, result.grads, result.finite)
        return (train, state), result.value

    return Training((start, state), step, lambda carry: carry[0].params)


# 16-bit parameters are rounded once more, twice there and back; a first moment in 8 bits
# is off by at most 2/127 of the largest in its group.
STORED, MOMENT = (2.0**-8,) * 4, (2 / 127,)
ROUNDINGS = {
    "master_weights": STORED,
    "compressed, f32 parameters": MOMENT,
    "compressed, bf16 parameters": STORED + MOMENT,
    "gradient release": STORED + MOMENT,
}
UPDATES = {
    "optax": plain_optax,
    "master_weights": master_weights,
    "compressed, f32 parameters": compressed("f32"),
    "compressed, bf16 parameters": compressed("bf16"),
    "gradient release": release,
    "nnx.Optimizer": nnx_optimizer,
    "Flax TrainState": flax_train_state,
    "accumulate": accumulate,
}
PLACEMENTS = {
    "one device": "One device",
    "jit with shardings": "Several devices, jit with shardings",
    "shard_map": "Several devices, shard_map",
}
CELLS = list(itertools.product(PRECISIONS, UPDATES, PLACEMENTS))

# What does not work, and a part of the message that says what to use instead.
REFUSED = {
    ("fp8 delayed", "gradient release", placement): (
        "`release` steps inside the backward pass and returns no gradients, but the "
        "`Fp8State` of a function under `fp8` with `DelayedScaling` is updated by its "
        "gradient. Use `fp8(..., mpx.recipes.CurrentScaling())`, which keeps no state."
    )
    for placement in PLACEMENTS
}


# --- the page ---------------------------------------------------------------------------

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "combinations.md"
INTRO = """
Each cell is a test: `tests/test_combinations.py` trains a small model on CPU devices and compares
three steps with the same model in f32. ✓: the weights are right, up to the roundings of the
formats. A number: mpx raises an error that says what to use instead. A normal test run tries every
pair of choices, `pytest tests/test_combinations.py --exhaustive` every cell. This page is written
by `python tests/combinations.py`.
"""
NOTES = """
**Precisions.** *policy* is `mpx.value_and_grad(loss, policy="p=f32,c=bf16,o=f32")`, *amp*
`mpx.amp(loss)`, and *fp8* is `mpx.fp8(…, recipe)` around that, with
`CurrentScaling` or `DelayedScaling`, *int8* the same with `Int8`. f16 has a `DynamicLossScaling`.

**Updates.** All but gradient release go through [`optimizer_update`](guide/updates.md).
*compressed* is an optimizer such as [`flash_adamw`](guide/compressed-optimizers.md), and
*accumulate* is [`mpx.accumulate`](guide/updates.md#microbatches) with optax.
[Gradient release](guide/gradient-release.md) takes no policy: the function casts its
arguments with `policy.cast_to_compute`.

**Devices.** *jit with shardings*: parameters and state are sharded along their first axis, the
batch along its own. *shard_map*: parameters are replicated, each device has a part of the
batch, and the gradient functions get the `axis_name`; with gradient release the function
averages its loss with `jax.lax.pmean`.
"""


def table(placement: str, reasons: list[str]) -> list[str]:
    """Returns the lines of the table of one placement."""
    lines = [f"| | {' | '.join(PRECISIONS)} |", "|---" * (len(PRECISIONS) + 1) + "|"]
    for update in UPDATES:
        found = [REFUSED.get((name, update, placement)) for name in PRECISIONS]
        marks = ["✓" if x is None else str(reasons.index(x) + 1) for x in found]
        lines.append(f"| {update} | {' | '.join(marks)} |")
    return lines


def page() -> str:
    """Returns the page with all cells."""
    reasons = list(dict.fromkeys(REFUSED.values()))
    lines = ["# What works with what", *INTRO.splitlines()]
    for placement, title in PLACEMENTS.items():
        lines += ["", f"## {title}", "", *table(placement, reasons)]
    lines += ["", "## Errors", ""]
    lines += [f"{number}. “{reason}”" for number, reason in enumerate(reasons, 1)]
    return "\n".join([*lines, "", "## Details", *NOTES.splitlines(), ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
