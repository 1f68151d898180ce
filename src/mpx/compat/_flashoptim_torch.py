"""The state dictionaries of flashoptim for PyTorch, in and out."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from mpx._tree import shape_of
from mpx.compat._flashoptim_codecs import (
    F16,
    F32,
    MasterBits,
    QuantizedArray,
    has_correction,
    init_correction,
    is_quantized,
    is_state,
    no_state,
    quantize_momentum,
    quantize_variance,
)
from mpx.compat._flashoptim_convert import (
    FlashAdamState,
    FlashLionState,
    FlashSGDState,
    State,
)
from mpx.compat._flashoptim_steps import flatten

_QUANTIZE = {"mu": quantize_momentum, "nu": quantize_variance}
_BF16 = np.dtype(jnp.bfloat16)
_BITS: dict[int, MasterBits] = {2: None, 3: 24, 4: 32}
_TORCH = {"exp_avg": "mu", "momentum_buffer": "mu", "exp_avg_sq": "nu"}


def from_torch(
    state_dict: Mapping[str, Any],
    params: PyTree,
    index: PyTree | None = None,
    *,
    count: int | None = None,
) -> State:
    """Reads the `state_dict()` of an optimizer of flashoptim for PyTorch.

    Args:
        state_dict: What `optimizer.state_dict()` returned, with NumPy arrays for tensors;
            `tensor.view(torch.int16).numpy()` does for those of bf16.
        params: The parameters, in the shapes that they have in PyTorch.
        index: The number that each parameter has in `state_dict`, a tree like `params`;
            by default they count as `params` is flattened.
        count: The number of steps taken, where the state does not hold it (Lion, SGD).

    Raises:
        ValueError: If a parameter has another shape or number of steps than the others.
    """
    flat = flatten(params)
    numbers = (
        list(range(len(flat.leaves))) if index is None else flat.like(index, "`index`")
    )
    widths = {
        number: group.get("master_bytewidth")
        for group in state_dict["param_groups"]
        for number in group["params"]
    }
    entries = [dict(state_dict["state"].get(number, {})) for number in numbers]
    keys = {key.partition("::")[0] for entry in entries for key in entry}
    adam, sgd = "exp_avg_sq" in keys, "momentum_buffer" in keys or "exp_avg" not in keys
    cls: Any = FlashAdamState if adam else FlashSGDState if sgd else FlashLionState
    names = [key for key in _TORCH if key in keys]
    new: dict[str, list[Any]] = {n: [] for n in cls._fields if n != "count"}
    for name, param, number, entry in zip(
        flat.names, flat.leaves, numbers, entries, strict=True
    ):
        new["ecc"].append(_torch_correction(param, entry, widths.get(number), name))
        for key in names:
            new[_TORCH[key]].append(_torch_moment(param, entry, key, name))
        if not names:
            new["mu"].append(no_state())
    trees = {name: flat.treedef.unflatten(column) for name, column in new.items()}
    steps = {int(np.asarray(entry["step"])) for entry in entries if "step" in entry}
    if len(steps | ({count} - {None})) > 1:
        raise ValueError(
            f"All parameters must have taken the same number of steps, but there are "
            f"{sorted(steps)}{'' if count is None else f' and count={count}'}."
        )
    taken = steps.pop() if steps else count or 0
    return cls(count=jnp.asarray(taken, jnp.int32), **trees)


def _torch_moment(param: Any, entry: Mapping[str, Any], key: str, name: str) -> Any:
    moment = _TORCH[key]
    if f"{key}::quantized" in entry:
        values = _shaped(param, entry[f"{key}::quantized"], name)
        scales = np.asarray(entry[f"{key}::scales"])
        # For bf16 parameters the bytes of f16 scales are labelled bf16.
        scales = scales if scales.dtype == F16 else scales.view(F16)
        codes = values.astype(np.int8 if moment == "mu" else np.uint8)
        return QuantizedArray(jnp.asarray(codes), jnp.asarray(scales))
    if key in entry:
        return jnp.asarray(_shaped(param, _floats(param, entry[key]), name).astype(F32))
    return _QUANTIZE[moment](jnp.zeros(shape_of(param), F32))


def _torch_correction(
    param: Any, entry: Mapping[str, Any], width: int | None, name: str
) -> Array:
    if "error_bits" not in entry:
        return init_correction(param, None if width is None else _BITS[width])
    errors = _shaped(param, entry["error_bits"], name)
    if width == 4:  # the bits of int16, labelled with the parameter's dtype
        return jnp.asarray(errors.view(np.int16))
    return jnp.asarray(_floats(param, errors).astype(np.int8))


def _floats(param: Any, x: Any) -> np.ndarray:
    """Reads the bits of bf16 numbers that came as int16."""
    x = np.asarray(x)
    return x.view(_BF16) if x.dtype == np.int16 and param.dtype == _BF16 else x


def _shaped(param: Any, x: Any, name: str) -> np.ndarray:
    x = np.asarray(x)
    if x.shape != shape_of(param):
        raise ValueError(
            f"The state of `{name}` has shape {x.shape}, but the parameter has shape "
            f"{shape_of(param)}. Transpose after the conversion, not before."
        )
    return x


def to_torch(
    params: PyTree, state: Any, index: PyTree | None = None
) -> dict[int, dict[str, Any]]:
    """Returns what belongs under `"state"` of a `state_dict()` in PyTorch.

    The arrays are NumPy's; `torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)`
    takes those of bf16.

    Args:
        params: The parameters.
        state: A state in the layout of flashoptim-jax, in groups of 32.
        index: As for `from_torch`.
    """
    flat = flatten(params)
    count = len(flat.leaves)
    numbers = list(range(count)) if index is None else flat.like(index, "`index`")
    keys = {"mu": "exp_avg", "nu": "exp_avg_sq"}
    if isinstance(state, FlashSGDState):
        keys["mu"] = "momentum_buffer"
    entries: dict[int, dict[str, Any]] = {number: {} for number in numbers}
    if hasattr(state, "nu"):
        for entry in entries.values():
            entry["step"] = np.asarray(state.count, np.int64)
    for name in (name for name in keys if hasattr(state, name)):
        stored = flat.like(getattr(state, name), f"`state.{name}`")
        for number, param, x in zip(numbers, flat.leaves, stored, strict=True):
            if is_quantized(x):
                values, scales = jax.device_get(tuple(x))
                label = _BF16 if param.dtype == _BF16 else F16
                entries[number][f"{keys[name]}::quantized"] = values
                entries[number][f"{keys[name]}::scales"] = scales.view(label)
            elif is_state(x):
                entries[number][keys[name]] = np.asarray(x)
    corrections = flat.like(state.ecc, "`state.ecc`")
    for number, param, ecc in zip(numbers, flat.leaves, corrections, strict=True):
        if has_correction(param, ecc):
            errors, dtype = np.asarray(ecc), np.dtype(param.dtype)
            short = errors.dtype == np.int8
            entries[number]["error_bits"] = (
                errors.astype(dtype) if short else errors.view(dtype)
            )
    return entries
