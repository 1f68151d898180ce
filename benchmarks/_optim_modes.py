"""The workloads and the optimizers that optim.py compares."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

from _models import SIZES, Gpt, Vit, VitSize

Shape = tuple[int, ...]
RATES = {"adamw": 1e-3, "lion": 1e-3, "sgd": 1e-2}
DECAY = 1e-2
MOMENTUM = 0.9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mode:
    """One way to step.

    Attributes:
        library: Who steps.
        options: Keywords of the optimizer.
        peer: Whether it is another project's, to be skipped where it is not installed.
        by_name: Whether it runs only if `--modes` names it.
    """

    library: str
    options: tuple[tuple[str, Any], ...] = ()
    peer: bool = False
    by_name: bool = False


# In the order in which they run and stand in the table.
MODES = {
    "copy": Mode(library="copy"),
    "add": Mode(library="add"),
    "optax": Mode(library="optax"),
    "mpx": Mode(library="mpx"),
    "mpx-plain": Mode(library="mpx", options=(("backend", "jax"),)),
    "mpx-mosaic": Mode(library="mpx", options=(("backend", "mosaic"),), by_name=True),
    "flashoptim-jax": Mode(library="flashoptim_jax", peer=True),
    "flashoptim-torch": Mode(library="torch", peer=True),
}


# --- workloads -----------------------------------------------------------------------


def shapes_of(name: str) -> list[Shape]:
    """Returns the shapes of a workload's parameters."""
    fixed = {
        "one": [(4096, 12288)],
        "many": [(1024, 1024)] * 64,
        "tiny-one": [(64, 96)],
        "tiny-many": [(64, 64)] * 4 + [(7,)],
    }
    if name in fixed:
        return fixed[name]
    size = SIZES[name]
    build = Vit if isinstance(size, VitSize) else Gpt
    model = eqx.filter_eval_shape(build, size, jax.random.key(0))
    leaves = jax.tree.leaves(model)
    return [leaf.shape for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]


WORKLOADS = (
    "one",
    "many",
    "vit-base",
    "gpt2",
    "gpt-1b",
    "tiny-one",
    "tiny-many",
    "tiny",
)
# `--models tiny` stands for one leaf, some leaves and a whole tree, too.
TINY = ("tiny-one", "tiny-many", "tiny")


def count_of(shapes: Sequence[Shape]) -> int:
    """Returns the number of parameters."""
    return sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes)


def host_arrays(shapes: Sequence[Shape], seed: int, dtype: Any) -> dict[str, Any]:
    """Normal numbers, made on the host: the device's peak is to hold the step alone.

    One block of numbers is repeated; it has no common divisor with the shapes.
    """
    rng = np.random.default_rng(seed)
    block = rng.standard_normal(2**20 - 3, np.float32).astype(ml_dtypes.bfloat16)
    block = block.astype(dtype)
    return {f"{i:04d}": np.resize(block, shape) for i, shape in enumerate(shapes)}


def to_device(arrays: dict[str, Any]) -> dict[str, Any]:
    """Moves arrays to the device."""
    return {name: jax.device_put(array) for name, array in arrays.items()}


# --- optimizers ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Built:
    """A workload under an optimizer.

    Attributes:
        carry: What a step changes: parameters and state.
        step: `step(carry, grads) -> carry`.
        grads: bf16 gradients.
        params: `params(carry)`, the parameters.
        weights: `weights(carry)`, the f32 weights.
    """

    carry: Any
    step: Callable[[Any, Any], Any]
    grads: dict[str, Any]
    params: Callable[[Any], dict[str, Any]]
    weights: Callable[[Any], dict[str, Any]]


def _half_inputs(shapes: Sequence[Shape]) -> tuple[dict[str, Any], dict[str, Any]]:
    params = to_device(host_arrays(shapes, 0, ml_dtypes.bfloat16))
    return params, to_device(host_arrays(shapes, 1, ml_dtypes.bfloat16))


def build_optax(shapes: Sequence[Shape], optimizer: str, options: Any) -> Built:
    """Parameters and state in f32; gradients in bf16, cast where they are used."""
    del options
    rate = RATES[optimizer]
    tx = {
        "adamw": lambda: optax.adamw(rate, weight_decay=DECAY),
        "lion": lambda: optax.lion(rate, weight_decay=DECAY),
        "sgd": lambda: optax.sgd(rate, momentum=MOMENTUM),
    }[optimizer]()
    params = to_device(host_arrays(shapes, 0, np.float32))
    grads = to_device(host_arrays(shapes, 1, ml_dtypes.bfloat16))

    def step(carry: Any, grads: Any) -> Any:
        params, state = carry
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    carry = (params, tx.init(params))
    return Built(carry, step, grads, lambda c: c[0], lambda c: c[0])


def build_mpx(shapes: Sequence[Shape], optimizer: str, options: Any) -> Built:
    """bf16 parameters, compressed state."""
    import mpx

    tx = mpx_optimizer(optimizer, **dict(options))
    params, grads = _half_inputs(shapes)

    def step(carry: Any, grads: Any) -> Any:
        return tuple(tx.step(*carry, grads))

    carry = (params, tx.init(params))
    return Built(
        carry, step, grads, lambda c: c[0], lambda c: mpx.optim.master_params(*c)
    )


def mpx_optimizer(optimizer: str, **options: Any) -> Any:
    """Returns the optimizer of mpx with the hyperparameters of the others."""
    import mpx

    rate = RATES[optimizer]
    if optimizer == "sgd":
        return mpx.optim.flash_sgd(rate, momentum=MOMENTUM, **options)
    make = {"adamw": mpx.optim.flash_adamw, "lion": mpx.optim.flash_lion}[optimizer]
    return make(rate, weight_decay=DECAY, **options)


def build_flashoptim_jax(
    shapes: Sequence[Shape], optimizer: str, options: Any
) -> Built:
    """flashoptim-jax with its kernels; without them where there is no GPU."""
    import flashoptim_jax as peer  # pyright: ignore[reportMissingImports]

    rate, fused = RATES[optimizer], jax.default_backend() == "gpu"
    tx = {
        "adamw": functools.partial(peer.flash_adamw, rate, weight_decay=DECAY),
        "lion": functools.partial(peer.flash_lion, rate, weight_decay=DECAY),
        "sgd": functools.partial(peer.flash_sgd, rate, momentum=MOMENTUM),
    }[optimizer](fused=fused, **dict(options))
    params, grads = _half_inputs(shapes)

    def step(carry: Any, grads: Any) -> Any:
        return tx.step(*carry, grads)

    def weights(carry: Any) -> Any:
        return peer.reconstruct_weights(carry[0], carry[1].ecc)

    return Built((params, tx.init(params)), step, grads, lambda c: c[0], weights)


def build_add(shapes: Sequence[Shape], optimizer: str, options: Any) -> Built:
    """`x + 1` in place over as many bytes as the step of mpx reads and writes.

    Half of them are read and half written. One array per parameter; it may be a little
    larger than a byte count that is no multiple of eight.
    """
    del options
    tx = mpx_optimizer(optimizer)
    arrays = {}
    for i, shape in enumerate(shapes):
        param = {"x": jax.ShapeDtypeStruct(shape, jnp.bfloat16)}
        stored = jax.tree.leaves((param, tx.init(param)))
        kept = sum(x.size * x.dtype.itemsize for x in stored if x.shape != ())
        grad = param["x"].size * 2
        arrays[f"{i:04d}"] = np.zeros(-(-(2 * kept + grad) // 8), np.float32)

    def step(carry: Any, grads: Any) -> Any:
        del grads
        return jax.tree.map(lambda x: x + 1, carry)

    return Built(to_device(arrays), step, {}, lambda c: c, lambda c: c)


BUILDERS = {
    "optax": build_optax,
    "mpx": build_mpx,
    "flashoptim_jax": build_flashoptim_jax,
    "add": build_add,
}


def retune(block: int, warps: int) -> None:
    """Changes how the kernel is launched, in this process."""
    from mpx._kernels import _step

    # The constant is frozen so that nobody else does this.
    object.__setattr__(_step.TRITON, "block", block)
    object.__setattr__(_step.TRITON, "warps", warps)
    jax.clear_caches()
