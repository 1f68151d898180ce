"""The ways to take a training step that the benchmarks compare."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp

from _models import Task

HALF = {"bf16": "bfloat16", "f16": "float16"}
# f16: the static scale by hand and the first one of mpx. They are equal so that both
# steps see the same numbers; whether the scale changes the time is not known.
SCALE = 2.0**10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mode:
    """One way to take a training step."""

    name: str
    dtype: str
    library: str = "hand"
    skip: Literal["select", "cond", "never"] = "never"
    default: bool = True

    @property
    def hand(self) -> str:
        """The mode this one is compared with."""
        return f"{self.dtype}-hand"


# In the order in which they run: what the target compares comes first, close together.
MODES = {
    mode.name: mode
    for mode in (
        Mode(name="bf16-hand", dtype="bf16"),
        Mode(name="mpx-bf16", dtype="bf16", library="mpx", skip="select"),
        Mode(name="bf16-hand-check", dtype="bf16", skip="select"),
        Mode(name="mpx-bf16-cond", dtype="bf16", library="mpx", skip="cond"),
        Mode(name="mpx-bf16-never", dtype="bf16", library="mpx"),
        Mode(name="f16-hand", dtype="f16"),
        Mode(name="mpx-f16", dtype="f16", library="mpx", skip="select"),
        Mode(name="f16-hand-check", dtype="f16", skip="select"),
        Mode(name="mpx-f16-cond", dtype="f16", library="mpx", skip="cond"),
        Mode(name="f32", dtype="f32"),
        Mode(name="peer-bf16", dtype="bf16", library="peer"),
        Mode(name="peer-f16", dtype="f16", library="peer"),
        # The model as it is, cast operation by operation.
        Mode(name="amp-bf16", dtype="bf16", library="amp", default=False),
        Mode(
            name="amp-bf16-check",
            dtype="bf16",
            library="amp",
            skip="select",
            default=False,
        ),
        Mode(name="amp-f16", dtype="f16", library="amp", default=False),
        Mode(
            name="amp-f16-check",
            dtype="f16",
            library="amp",
            skip="select",
            default=False,
        ),
        # The very code of the peer's modes, run by mpx.
        Mode(name="mpx-bf16-paper", dtype="bf16", library="paper", default=False),
        Mode(name="mpx-f16-paper", dtype="f16", library="paper", default=False),
    )
}


# A builder returns the initial state and `step(state, batch) -> state, (loss, finite)`.

Built = tuple[Any, Callable[[Any, Any], tuple[Any, Any]]]


def build_by_hand(mode: Mode, task: Task, optimizer: Any) -> Built:
    """Casts model and batch inside the loss; f32 master weights; plain optax."""

    def cast(tree: Any) -> Any:
        if mode.dtype == "f32":
            return tree
        dtype = jnp.dtype(HALF[mode.dtype])
        floating, rest = eqx.partition(tree, eqx.is_inexact_array)
        return eqx.combine(jax.tree.map(lambda x: x.astype(dtype), floating), rest)

    scale = SCALE if mode.dtype == "f16" else None

    @eqx.filter_value_and_grad
    def value_and_grad(model: Any, batch: Any) -> Any:
        loss = task.loss(cast(model), cast(batch))
        return loss if scale is None else loss * scale

    def step(state: Any, batch: Any) -> Any:
        model, opt_state = state
        loss, grads = value_and_grad(model, batch)
        if scale is not None:
            loss = loss / scale
            grads = jax.tree.map(lambda g: g / scale, grads)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, new_opt_state = optimizer.update(grads, opt_state, params)
        new_state = (eqx.apply_updates(model, updates), new_opt_state)
        if mode.skip == "never":
            return new_state, (loss, True)
        flags = [jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]
        finite = jnp.all(jnp.stack(flags))
        new, rest = eqx.partition(new_state, eqx.is_array)
        old = eqx.filter(state, eqx.is_array)
        new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
        return eqx.combine(new, rest), (loss, finite)

    return (task.model, _init(optimizer, task.model)), step


def build_with_mpx(mode: Mode, task: Task, optimizer: Any) -> Built:
    """`mpx.value_and_grad` and `mpx.optimizer_update`."""
    import mpx

    if not hasattr(mpx, "GradResult"):
        raise RuntimeError(f"`import mpx` found another package: {mpx.__file__}")
    if mode.library == "amp":
        loss = mpx.amp(task.loss, dtype=HALF[mode.dtype])
        value_and_grad = mpx.value_and_grad(loss)
    else:
        policy = mpx.Policy(compute_dtype=HALF[mode.dtype])
        value_and_grad = mpx.value_and_grad(task.loss, policy=policy)
    bf16 = mode.dtype == "bf16"
    scaling = mpx.NoLossScaling() if bf16 else mpx.DynamicLossScaling.pow2(SCALE)

    def step(state: Any, batch: Any) -> Any:
        model, opt_state, scaling = state
        result = value_and_grad(scaling, model, batch)
        model, opt_state = mpx.optimizer_update(
            model, optimizer, opt_state, result.grads, result.finite, skip=mode.skip
        )
        # A flag that nobody reads costs nothing, so "never" must not return it.
        finite = True if mode.skip == "never" else result.finite
        return (model, opt_state, result.scaling), (result.value, finite)

    return (task.model, _init(optimizer, task.model), scaling), step


def build_as_in_the_paper(mode: Mode, task: Task, optimizer: Any) -> Built:
    """The MPX paper's loop, which the peer and mpx both run."""
    import mpx

    is_mpx = hasattr(mpx, "GradResult")
    if is_mpx != (mode.library == "paper"):
        raise RuntimeError(f"`import mpx` found another package: {mpx.__file__}")
    mpx.set_half_precision_datatype(jnp.dtype(HALF[mode.dtype]).type)
    scaling = mpx.DynamicLossScaling(jnp.float32(SCALE), jnp.float32(1.0))

    def step(state: Any, batch: Any) -> Any:
        model, opt_state, scaling = state
        loss, scaling, finite, grads = mpx.filter_value_and_grad(task.loss, scaling)(
            model, batch
        )
        model, opt_state = mpx.optimizer_update(
            model, optimizer, opt_state, grads, finite
        )
        return (model, opt_state, scaling), (loss, finite)

    return (task.model, _init(optimizer, task.model), scaling), step


BUILDERS = {
    "hand": build_by_hand,
    "mpx": build_with_mpx,
    "amp": build_with_mpx,
    "paper": build_as_in_the_paper,
    "peer": build_as_in_the_paper,
}


def _init(optimizer: Any, model: Any) -> Any:
    return jax.jit(optimizer.init)(eqx.filter(model, eqx.is_inexact_array))
