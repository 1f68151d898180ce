"""The routes of mpx through which each model is trained, by its public names alone."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpx
from _models import cast

STEPS = 20
RMS = 0.2  # steps of Muon are as large as those of AdamW
MATRICES = "^(?!.*(head|classifier)).*kernel"  # names of those of layers
MOST_SKIPPED = 30  # a scale that starts at 2¹⁵ has reached zero by then
ROUTES = (
    "f32", "own bf16", "policy bf16", "policy f16", "amp bf16", "amp f16", "fp8",
    "flash f32", "flash bf16", "release",
)  # fmt: skip

RECIPES = {
    "fp8": mpx.recipes.CurrentScaling(),
    "int8": mpx.recipes.Int8(),
    "nvfp4": mpx.recipes.NVFP4(emulate=True),
}

Step = Callable[..., tuple[Any, Any, Any, Any]]


class Run(NamedTuple):
    """The start, and a step to the next carry, loss, gradients and whether it was taken."""

    carry: Any
    step: Step


class Trained(NamedTuple):
    """The losses before each step that was taken, the first gradients, skipped steps."""

    losses: list[float]
    grads: Any
    skipped: int


def low_loss(route, case):
    """Returns the loss that runs in 16 bits, or by a recipe whatever the size of matmuls."""
    kind, dtype = route.split()[0], route.split()[-1]
    if kind == "own":
        return case.own or (lambda *args: case.loss(*cast(args, jnp.bfloat16)))
    if kind == "policy":  # as JAX sees it
        policy = mpx.get_policy(f"p=f32,c={dtype},o=f32")
        return lambda *args: case.loss(*policy.cast_to_compute(args))
    kept = dtype if kind == "residuals" else None
    dtype = "f16" if dtype == "f16" else "bf16"
    loss = mpx.amp(case.loss, dtype=dtype, params=case.holds, residuals=kept)
    if kind not in RECIPES:
        return loss
    return mpx.fp8(loss, RECIPES[kind], params=case.holds, min_gain=0)


def of_matrices(this, other=None):
    """Returns a function that labels parameters: `this` for the matrices that Muon steps."""

    def label(path, x):
        name = jax.tree_util.keystr(path)
        return this if x.ndim == 2 and re.search(MATRICES, name) else other

    return functools.partial(jax.tree_util.tree_map_with_path, label)


axes_of = of_matrices(optax.contrib.MuonDimensionNumbers(0, 1))


def optax_muon(rate):
    """Returns Muon with AdamW for the others: its own would be Nesterov's there, too."""
    muon = optax.contrib.muon(rate, consistent_rms=RMS)
    kinds: Any = {"muon": muon, "adamw": optax.adamw(rate, weight_decay=0.0)}
    return optax.partition(kinds, of_matrices("muon", "adamw"))


def plain(case, loss, make=optax.adamw):
    """JAX and optax alone."""
    optimizer = make(case.learning_rate)

    def step(carry, *args):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, *args)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value, grads, True

    return Run((case.params, optimizer.init(case.params)), step)


def scaled(case, loss, scaling, policy=None):
    """`mpx.value_and_grad` and `mpx.optimizer_update` with an optimizer of optax."""
    optimizer = optax.adamw(case.learning_rate)
    value_and_grad = mpx.value_and_grad(loss, policy=policy)

    def step(carry, *args):
        params, state, scaling = carry
        result = value_and_grad(scaling, params, *args)
        params, state = mpx.optimizer_update(
            params, optimizer, state, result.grads, result.finite
        )
        carry = (params, state, result.scaling)
        return carry, result.value, result.grads, result.finite

    return Run((case.params, optimizer.init(case.params), scaling), step)


def flash(case, loss, dtype, *, release=False, muon=False):
    """A compressed optimizer, for all sizes that can be, or `mpx.optim.release`."""
    rate, small = case.learning_rate, mpx.optim.Compression(min_size=0)
    # The rate of weight decay is that of `optax.adamw`.
    optimizer = mpx.optim.flash_adamw(rate, compression=small)
    if muon:
        optimizer = mpx.optim.flash_muon(
            rate, matrices=axes_of, consistent_rms=RMS, compression=small
        )
    released = mpx.optim.release(loss, optimizer) if release else None

    def step(carry, *args):
        params, state = carry
        if released is not None:
            result = released(params, state, *args)
            return (result.params, result.state), result.value, None, True
        value, grads = jax.value_and_grad(loss)(params, *args)
        params, state = optimizer.step(params, state, grads)
        return (params, state), value, grads, True

    return Run(tuple(optimizer.init_from(case.params, dtype)), step)


def with_rival(run, rival):
    """Returns both runs as one, which reports the first; each sees the other's old state."""

    def step(carry, _, batch):
        mine, theirs = carry
        mine, value, grads, taken = run.step(mine, carry[1][0], batch)
        theirs, _, _, also_taken = rival.step(theirs, carry[0][0], batch)
        return (mine, theirs), value, grads, jnp.logical_and(taken, also_taken)

    return Run((run.carry, rival.carry), step)


def run_of(route, made):
    """Returns the route of that name for a case, ready to run."""
    if made.rival is not None:
        alone = dataclasses.replace(made, rival=None)
        return with_rival(run_of(route, alone), run_of(route, made.rival))
    kind, dtype = route.split()[0], route.split()[-1]
    scaling = mpx.DynamicLossScaling.pow2() if dtype == "f16" else mpx.NoLossScaling()
    match kind:
        case "own":
            return plain(made, low_loss(route, made))
        case "f32" | "muon":
            return plain(made, made.loss, optax_muon if kind == "muon" else optax.adamw)
        case "policy":
            return scaled(made, made.loss, scaling, f"p=f32,c={dtype},o=f32")
        case "amp" | "residuals" | "fp8" | "int8" | "nvfp4":
            return scaled(made, low_loss(route, made), scaling)
        case _:
            dtype = "f32" if dtype == "f32" else "bf16"
            loss = made.loss if dtype == "f32" else low_loss("amp bf16", made)
            options = {"release": kind == "release", "muon": "muon" in route}
            return flash(made, loss, dtype, **options)


def from_rounded(run):
    """Returns the same f32 steps from parameters that were rounded to bf16 once."""
    rounded = cast(cast(run.carry, jnp.bfloat16), jnp.float32)  # states are zeros yet
    return Run(rounded, run.step)


def train(run, args, steps=STEPS):
    """Takes `steps` steps; skipped ones do not count."""
    step = jax.jit(run.step)  # compiled once for each function
    carry, losses, first, skipped = run.carry, [], None, 0
    while len(losses) < steps and skipped < MOST_SKIPPED:
        carry, value, grads, taken = step(carry, *args)
        if not bool(taken):
            skipped += 1
            continue
        if not losses:
            first = grads
        losses.append(float(value))
    return Trained(losses, first, skipped)


def share(route, case):
    """Returns the share of the matmul operations that run in 16 bits, or in fp8."""
    if route.split()[0] not in ("own", "policy", "amp", "fp8"):
        return None
    report = mpx.inspect.report(low_loss(route, case), case.params, *case.args)
    if route == "fp8":
        return report.fp8.share if report.fp8 else 0.0
    return report.shares.get(route.split()[-1], 0.0) if report.flops else None


def distance(grads, reference):
    """Returns the norm of the difference over the norm of the reference."""
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(reference), strict=True)
    both = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    off = sum(np.sum(np.square(a - b)) for a, b in both)
    return float(np.sqrt(off / sum(np.sum(np.square(b)) for _, b in both)))


def f64_grads(case):
    """Returns the gradients in f64, as far as the library does not ask for f32."""
    with jax.enable_x64(True):
        args = cast((case.params, *case.args), jnp.float64)
        return jax.device_get(jax.jit(jax.grad(case.loss))(*args))
