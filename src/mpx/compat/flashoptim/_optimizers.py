"""The optimizers of flashoptim-jax, with its signatures and state, and conversions of it."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from mpx._jax._sharding import zeros_alike
from mpx._jax._tree import dtype_of, is_floating, map_with_name, named_leaves
from mpx._optim import _optimizers as _flash
from mpx._optim._options import PARAM_DTYPES, Compression, ParamGroup, group_of
from mpx._optim._packing import (
    CORRECTION,
    PackedLeaf,
    Packing,
    decode_moment,
    is_packed,
)
from mpx._optim._state import FlashState, Stepped, make_state
from mpx._quant._codecs import Quantized
from mpx.compat.flashoptim import quantization
from mpx.compat.flashoptim.compression import correction_dtype, is_state, no_state
from mpx.compat.flashoptim.quantization import QuantizedArray, is_quantized

Rate = float | Array | Callable[[Array], PyTree]
Groups = Sequence[Mapping[str, PyTree]] | None


class FlashAdamState(NamedTuple):
    """The state of Adam and AdamW: steps taken, moments, corrections.

    Moments are `QuantizedArray` or f32, corrections int8 or int16; where there is none,
    `ecc` has a scalar of int32.
    """

    count: PyTree
    mu: PyTree
    nu: PyTree
    ecc: PyTree


class FlashLionState(NamedTuple):
    """The state of Lion: `FlashAdamState` without second moments."""

    count: PyTree
    mu: PyTree
    ecc: PyTree


class FlashSGDState(NamedTuple):
    """The state of gradient descent; without momentum, `mu` holds scalars of int32."""

    count: PyTree
    mu: PyTree
    ecc: PyTree


class FlashOptimizer(NamedTuple):
    """An optimizer: `init(params)` returns the state, `step` new parameters and state."""

    init: Callable[[PyTree], PyTree]
    step: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]


# The signatures below are those of flashoptim-jax, positions included.


def flash_adam(  # noqa: PLR0917
    learning_rate: Rate = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    quantize: bool = True,
    master_weight_bits: int | None = 24,
    group_size: int = 32,
    fused: bool = True,
    param_groups: Groups = None,
) -> FlashOptimizer:
    """Adam; weight decay is added to the gradient. See `flash_adamw`."""
    return _build(_flash.flash_adam, FlashAdamState, **locals())


def flash_adamw(  # noqa: PLR0917
    learning_rate: Rate = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    quantize: bool = True,
    master_weight_bits: int | None = 24,
    group_size: int = 32,
    fused: bool = True,
    param_groups: Groups = None,
) -> FlashOptimizer:
    """AdamW.

    Args:
        learning_rate: A number, or a schedule: a function of the step count.
        b1: Decay of the first moment.
        b2: Decay of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Multiplied by the learning rate.
        quantize: Whether moments are stored in 8 bits; else in f32.
        master_weight_bits: 24, 32 or `None`, the bits of the master weights of 16-bit
            parameters.
        group_size: How many elements share a scale: a power of two up to 1024.
        fused: `False` runs the step in plain JAX, `True` lets mpx choose.
        param_groups: Dictionaries with the key `params` and options that differ: any
            hyperparameter, `quantize` or `master_weight_bits`. `params` is a name that
            occurs in the path, a whole path (`"head/w"` or a tuple), a function of path
            and leaf, or a list of these. The first group that matches holds.

    Raises:
        ValueError: If an option is unknown or out of its range. From `init`: if
            `master_weight_bits` has no effect, or with `fused` if a leaf is not f32,
            bf16 or f16.
    """
    return _build(_flash.flash_adamw, FlashAdamState, **locals())


def flash_lion(  # noqa: PLR0917
    learning_rate: Rate = 1e-4,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 0.0,
    quantize: bool = True,
    master_weight_bits: int | None = 24,
    group_size: int = 32,
    fused: bool = True,
    param_groups: Groups = None,
) -> FlashOptimizer:
    """Lion. See `flash_adamw` for the options."""
    return _build(_flash.flash_lion, FlashLionState, **locals())


def flash_sgd(  # noqa: PLR0917
    learning_rate: Rate = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    quantize: bool = True,
    master_weight_bits: int | None = 24,
    group_size: int = 32,
    fused: bool = True,
    param_groups: Groups = None,
) -> FlashOptimizer:
    """Gradient descent; weight decay is added to the gradient. See `flash_adamw`."""
    return _build(_flash.flash_sgd, FlashSGDState, **locals())


def flash_sgdw(  # noqa: PLR0917
    learning_rate: Rate = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    quantize: bool = True,
    master_weight_bits: int | None = 24,
    group_size: int = 32,
    fused: bool = True,
    param_groups: Groups = None,
) -> FlashOptimizer:
    """Gradient descent with decoupled weight decay. See `flash_adamw`."""
    return _build(_flash.flash_sgdw, FlashSGDState, **locals())


def _matches(by: PyTree, name: str, leaf: object) -> bool:
    """Returns whether the `params` of a group choose a parameter; see `flash_adamw`."""
    parts = name.split("/")
    if callable(by):
        return bool(by(tuple(parts), leaf))
    if isinstance(by, tuple):
        return parts == [str(part) for part in by]
    if isinstance(by, Iterable) and not isinstance(by, str):
        return any(_matches(one, name, leaf) for one in by)
    return name == by or str(by) in parts


def _build(
    make: Callable[..., PyTree],
    state_type: type,
    *,
    quantize: bool,
    master_weight_bits: PyTree,
    group_size: int,
    fused: bool,
    param_groups: Groups,
    **hyper: PyTree,
) -> FlashOptimizer:
    if group_size < 2 or 1024 % group_size:
        raise ValueError(
            "group_size must divide BLOCK_SIZE (1024): a power of two such as 32, but "
            f"{group_size} was given."
        )
    if "momentum" in hyper:
        hyper["momentum"] = hyper["momentum"] or None
    base = Compression(
        quantize=quantize,
        master_bits=master_weight_bits,
        group_size=group_size,
        min_size=0,
        format="flashoptim",
        jitter=False,
    )
    groups = []
    for index, spec in enumerate(param_groups or ()):
        own = dict(spec)
        if "params" not in own:
            raise ValueError(
                "Each param group must define a 'params' matcher, but "
                f"param_groups[{index}] has only {sorted(spec)}."
            )
        where = functools.partial(_matches, own.pop("params"))
        storage = dataclasses.replace(
            base,
            quantize=own.pop("quantize", quantize),
            master_bits=own.pop("master_weight_bits", master_weight_bits),
        )
        groups.append(ParamGroup(where, own, compression=storage))
    backend = "auto" if fused else "jax"
    optimizer = make(**hyper, groups=groups, compression=base, backend=backend)

    def quantizes(name: str, param: PyTree) -> bool:
        return (group_of(groups, name, param).compression or base).quantize

    options: PyTree = dict(quantize=quantizes, group_size=group_size)
    convert: PyTree = functools.partial(from_mpx, state_type=state_type, **options)

    def init(params: PyTree) -> PyTree:
        _check_params(params, groups, param_groups or (), master_weight_bits, fused)
        return convert(params, optimizer.init(params)).state

    def step(params: PyTree, state: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
        new = optimizer.step(*to_mpx(params, state, group_size=group_size), grads)
        return tuple(convert(*new))

    return FlashOptimizer(init, step)


def _check_params(
    params: PyTree,
    groups: Sequence[ParamGroup],
    specs: Sequence[Mapping[str, PyTree]],
    bits: int | None,
    fused: bool,
) -> None:
    """Raises for parameters that flashoptim-jax refuses with these options."""
    option, own = "master_weight_bits", "param_groups[{}]['master_weight_bits']"
    # 24 is the default: nobody need have asked for it.
    asked = {option: None if bits == 24 else bits}
    asked |= {own.format(i): x[option] for i, x in enumerate(specs) if option in x}
    members: dict[str, list[np.dtype]] = {where: [] for where in asked}
    for name, leaf in named_leaves(params):
        dtype = dtype_of(leaf) or jnp.asarray(leaf).dtype
        if fused and dtype not in PARAM_DTYPES:
            raise ValueError(
                "fused=True only supports parameter dtypes (float32, bfloat16, float16), "
                f"but `{name}` is {dtype}. With fused=False it is left as it is."
            )
        found = (i for i, group in enumerate(groups) if group.matches(name, leaf))
        where = own.format(next(found, None))
        members[where if where in asked else option].append(dtype)
    for where, bits in asked.items():
        dtypes = members[where]
        if bits and dtypes and not any(correction_dtype(x, bits) for x in dtypes):
            raise ValueError(
                f"{where}={bits} has no effect: none of its parameters is bf16 or f16. "
                "Set it to None."
            )


# --- State dictionaries ---------------------------------------------------------------


def flash_adamw_state_dict(state: PyTree) -> dict[str, PyTree]:
    """Returns a state as a dictionary of arrays and tree structures.

    `load_flash_adamw_state_dict` and the others return it from that dictionary.
    """

    def leaf_dict(leaf: PyTree) -> dict[str, PyTree]:
        if is_quantized(leaf):
            values, scales = map(jnp.asarray, leaf)
            return {"kind": "quantized", "values": values, "scales": scales}
        return {"kind": "array", "value": jnp.asarray(leaf)}

    new: dict[str, PyTree] = {"count": jnp.asarray(state.count)}
    for name in state._fields[1:]:
        leaves, treedef = jax.tree.flatten(getattr(state, name), is_leaf=is_quantized)
        new[name] = {"treedef": treedef, "leaves": list(map(leaf_dict, leaves))}
    return new


flash_lion_state_dict = flash_sgd_state_dict = flash_adamw_state_dict


def _loader(state_type: PyTree) -> Callable[[Mapping[str, PyTree]], PyTree]:
    names = state_type._fields

    def load_leaf(leaf: Mapping[str, PyTree]) -> PyTree:
        if leaf["kind"] == "array":
            return jnp.asarray(leaf["value"])
        return QuantizedArray(jnp.asarray(leaf["values"]), jnp.asarray(leaf["scales"]))

    def load(state_dict: Mapping[str, PyTree]) -> PyTree:
        """Returns the state that a dictionary was made of."""
        if missing := [name for name in names if name not in state_dict]:
            raise ValueError(
                f"A state dictionary for {state_type.__name__} has the keys {list(names)}, "
                f"but {missing} are missing: it comes from another optimizer."
            )
        saved = [state_dict[name] for name in names[1:]]
        trees = [x["treedef"].unflatten(map(load_leaf, x["leaves"])) for x in saved]
        return state_type(jnp.asarray(state_dict["count"], jnp.int32), *trees)

    return load


load_flash_adamw_state_dict = _loader(FlashAdamState)
load_flash_lion_state_dict = _loader(FlashLionState)
load_flash_sgd_state_dict = _loader(FlashSGDState)


# --- Conversion -----------------------------------------------------------------------


def to_mpx(params: PyTree, state: PyTree, *, group_size: int = 32) -> Stepped:
    """Converts a state of flashoptim-jax for `mpx.optim.flash_adamw` and the others.

    Nothing is lost: codes and scales are taken over where the last axis of a parameter
    consists of whole groups, other moments become f32. The optimizer that continues needs
    `Compression(format="flashoptim")`. To go on in the default format, put the result of
    `mpx.checkpoint.to_f32` into `mpx.checkpoint.from_f32`.

    Args:
        params: The parameters.
        state: Their state, made here or by flashoptim-jax itself.
        group_size: The one that the state was made with.
    """
    leaves, treedef = jax.tree.flatten(params)
    kind = "lion" if "Lion" in type(state).__name__ else "sgd"
    kind = "adam" if "nu" in state._fields else kind
    moments = {}
    for name in state._fields[1:-1]:
        stored = treedef.flatten_up_to(getattr(state, name))
        moments[name] = [_moment_to_mpx(name, x, group_size) for x in stored]
    if kind == "sgd" and all(x is None for x in moments["mu"]):
        moments = {}  # without momentum
    eccs = treedef.flatten_up_to(state.ecc)
    packed = []
    for param, ecc, *stored in zip(leaves, eccs, *moments.values(), strict=True):
        numbers, dtypes = dict(zip(moments, stored, strict=True)), [None, None]
        if is_state(ecc):
            numbers[CORRECTION] = jnp.asarray(ecc)
            dtypes = [np.dtype(x.dtype) for x in (ecc, param)]
        size = group_size * any(isinstance(x, Quantized) for x in stored)
        packing = Packing(tuple(moments), "flashoptim", size, *dtypes)
        leaf = packing.pack(numbers) if is_floating(param) else None
        packed.append(PackedLeaf(param, leaf))
    new = make_state(kind, "flashoptim", tuple(moments), packed, treedef)
    count = jnp.asarray(state.count, jnp.int32)
    return Stepped(params, dataclasses.replace(new, count=count))


def _moment_to_mpx(name: str, x: PyTree, group_size: int) -> PyTree:
    if not is_quantized(x):
        return jnp.asarray(x, jnp.float32) if is_state(x) else None
    quantization.check_scales(x, group_size)
    shape = x.values.shape
    if shape == () or 0 in shape or shape[-1] % group_size:
        return quantization.dequantize(name, x, group_size)
    scales = jnp.asarray(x.scales, jnp.float16)
    return Quantized(jnp.asarray(x.values), scales.reshape(*shape[:-1], -1))


def from_mpx(
    params: PyTree,
    state: FlashState,
    state_type: type | None = None,
    *,
    quantize: bool | Callable[[str, PyTree], bool] = True,
    group_size: int = 32,
) -> Stepped:
    """Converts a state of mpx to the layout of flashoptim-jax.

    Corrections, and moments in groups of `group_size`, are taken over bit for bit; other
    moments are encoded anew.

    Args:
        params: The parameters.
        state: Their state, in the format `"flashoptim"`.
        state_type: `FlashAdamState`, `FlashLionState` or `FlashSGDState`; by default the
            first if there are second moments, else the second.
        quantize: The option of the optimizer that continues, or a function that returns
            it for the path of a parameter and the parameter.
        group_size: The option of the optimizer that continues.

    Raises:
        ValueError: If the state has another format.
    """
    if state.format != "flashoptim":
        raise ValueError(
            f"The state has the format {state.format!r}, but flashoptim-jax needs that of "
            '`Compression(format="flashoptim")`. Convert it with `mpx.checkpoint.to_f32` '
            "and `from_f32`."
        )
    for packed in jax.tree.leaves(state.packed, is_leaf=is_packed):
        if packed.packing.moments != state.moments:
            raise ValueError(
                "Parameters with moments of several kinds, as `flash_muon` and groups with "
                "an `optimizer` have them, have no state in flashoptim-jax."
            )
    default = FlashAdamState if "nu" in state.moments else FlashLionState
    cls: PyTree = state_type or default

    def convert(kind: str, name: str, param: PyTree, x: PyTree) -> PyTree:
        if not is_floating(param):
            return no_state()
        codes = quantize(name, param) if callable(quantize) else quantize
        if isinstance(x, Quantized):
            if codes and x.codes.shape[-1] // x.scale.shape[-1] == group_size:
                return QuantizedArray(x.codes, x.scale.reshape(-1))
            x = decode_moment(kind, x, "flashoptim")
        elif x is None:  # frozen in mpx
            x = zeros_alike(param, np.dtype(np.float32))
        return quantization.quantize(kind, x, group_size) if codes else x

    trees = [
        map_with_name(functools.partial(convert, kind), params, getattr(state, kind))
        if kind in state.moments
        else jax.tree.map(lambda _: no_state(), params)
        for kind in cls._fields[1:-1]
    ]
    ecc = jax.tree.map(
        lambda _, x: no_state() if x is None else x, params, state.correction
    )
    return Stepped(params, cls(state.count, *trees, ecc))
