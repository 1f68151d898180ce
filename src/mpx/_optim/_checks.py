"""What users pass that cannot be right: an error says what, where, and what to do."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpx import _kernels
from mpx._compat import is_tracer
from mpx._optim._chains import transforms_behind
from mpx._optim._layout import layout_name
from mpx._optim._options import Compression, ParamGroup
from mpx._optim._rules import Rule
from mpx._optim._state import APPLIED_BY_EQUINOX, PARAM_DTYPES, FlashState, Flat
from mpx._quant import MomentCodec, Quantized
from mpx._tree import dtype_of, shape_of

MOMENTS = ("mu", "nu")
_CORRECTIONS = (np.dtype(np.int8), np.dtype(np.int16))


def is_trainable(name: str, param: Any) -> bool:
    """Whether a leaf is a parameter; raises for floating leaves that cannot be one."""
    dtype = dtype_of(param)
    if dtype in PARAM_DTYPES:
        return True
    if dtype is not None and jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(
            f"`{name}` is {dtype}, but compressed optimizers hold weights in f32, bf16 or "
            "f16. Cast it, or freeze it with `ParamGroup(path, frozen=True)`."
        )
    return False


def check_has_params(flat: Flat) -> None:
    """Raises if a tree has leaves, but none that could train."""
    leaves = [x for x in flat.leaves if x is not None]
    if leaves and not any(_is_inexact(leaf) for leaf in leaves):
        came = [
            f"{name}: {dtype_of(leaf) or type(leaf).__name__}"
            for name, leaf in zip(flat.names, flat.leaves, strict=True)
        ]
        raise ValueError(
            "A compressed optimizer expected parameters, which are floating arrays, but "
            f"the tree has none: it holds {came[:8]}{' …' if len(came) > 8 else ''}. Was "
            "the wrong part of the model passed?"
        )


def _is_inexact(leaf: Any) -> bool:
    dtype = dtype_of(leaf)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def check_grad(name: str, param: Any, grad: Any) -> None:
    """Raises if a gradient does not fit its parameter."""
    if shape_of(grad) != shape_of(param):
        raise ValueError(
            f"The gradient of `{name}` has shape {shape_of(grad)}, but the parameter "
            f"has shape {shape_of(param)}."
        )
    dtype = dtype_of(grad)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"The gradient of `{name}` is {dtype or type(grad).__name__}, but a floating "
            "array was expected. Give `None` for parameters that are not to change."
        )


def check_is_last(params: Iterable[Any]) -> None:
    """Raises if a chain would change updates that 16-bit parameters must have as they are.

    f32 parameters have no correction, and their updates may be changed.
    """
    if not any(dtype_of(param) in PARAM_DTYPES[1:] for param in params):
        return
    if behind := transforms_behind():
        raise ValueError(
            "A compressed optimizer must be the last of a chain, but behind it are "
            f"{', '.join(behind)}. Its state holds what the rounding of the new 16-bit "
            "parameters leaves over; with other updates they would not become these, and "
            "may not move at all. Put what changes gradients before it, and the factor of "
            "a learning rate or schedule into `learning_rate`."
        )


# --- the state ------------------------------------------------------------------------

_INIT_AGAIN = "Make the state with `init(params)` of these parameters."


def check_state(state: Any, rule: Rule, compression: Compression) -> None:
    """Raises if a state is none, or that of another optimizer."""
    if not isinstance(state, FlashState):
        raise TypeError(
            "A compressed optimizer expected the FlashState from `init(params)` or from "
            f"its last step; got {type(state).__name__}. Inside of a larger optax state "
            "it is one of the members."
        )
    if state.format != compression.format:
        raise ValueError(
            f"`state.format` is {state.format!r}, but the optimizer has the format "
            f"{compression.format!r}. Give it `Compression(format={state.format!r})`, or "
            "make the state with its own `init(params)`."
        )
    name = layout_name(state.layout)
    if name is not None and not name.startswith(f"{rule.kind}-"):
        raise ValueError(
            f"The state was made as `{name}`, but this optimizer is of the kind "
            f"{rule.kind!r}, whose moments mean something else. Make the state with its "
            "own `init(params)`."
        )
    for moment in MOMENTS:
        if moment not in rule.moments and jax.tree.leaves(getattr(state, moment)):
            raise ValueError(
                f"`state.{moment}` was expected to be None, because this optimizer keeps "
                f"{' and '.join(rule.moments) or 'no moments'}, but it holds moments: "
                "the state is that of another optimizer. Make it with `init(params)` of "
                "this one."
            )


def check_moment(
    name: str, param: Any, moment: str, stored: Any, codec: MomentCodec
) -> None:
    """Raises if a moment of the state does not fit its parameter."""
    if stored is None:
        raise ValueError(
            f"The optimizer state has no {moment} for `{name}`. Make it with "
            "`init(params)` of the same optimizer."
        )
    codes = stored
    if isinstance(stored, Quantized):
        codes = stored.codes
        if dtype_of(stored.scale) != codec.scale_dtype:
            raise ValueError(
                f"The scales of `{name}` are {dtype_of(stored.scale)}, but the format of "
                f"the state has {codec.scale_dtype}: it was written in another format."
            )
        *rows, groups = shape_of(stored.scale) or (0,)
        *outer, last = shape_of(param) or (0,)
        # A scale for each element would look like the codes.
        if rows != outer or not 1 <= groups < last or last % groups:
            raise ValueError(
                f"The scales of `state.{moment}` for `{name}` have shape "
                f"{shape_of(stored.scale)}, but the parameter has shape "
                f"{shape_of(param)}, of which they divide the last axis into groups. {_INIT_AGAIN}"
            )
    if (shape_of(codes), dtype_of(codes)) != (shape_of(param), codec.code_dtype):
        raise ValueError(
            f"`state.{moment}` for `{name}` must be {codec.code_dtype} of the parameter's "
            f"shape {shape_of(param)}, but it is {dtype_of(codes) or type(codes).__name__}"
            f" of shape {shape_of(codes)}. {_INIT_AGAIN}"
        )


def check_correction(
    name: str, param: Any, correction: Any, compression: Compression
) -> None:
    """Raises if a correction does not fit its parameter, or is missing.

    How many bits it has is read off the state, as `group_size` is: restored states may
    have been made with other ones.
    """
    if correction is None:
        if compression.correction_dtype(param) is not None:
            raise ValueError(
                f"`{name}` is {param.dtype}, but `state.correction` has nothing for it, "
                f"while the optimizer has `master_bits={compression.master_bits}`: small "
                "updates would be lost. Call init after casting the model, or use "
                "`Compression(master_bits=None)`."
            )
        return
    if param.dtype.itemsize != 2:
        raise ValueError(
            f"`{name}` is {param.dtype}, but `state.correction` holds "
            f"{dtype_of(correction)} for it, which only bf16 and f16 parameters have. "
            f"{APPLIED_BY_EQUINOX}Give the parameters in the dtype that `init(params)` "
            "saw, or call it again."
        )
    fits = dtype_of(correction) in _CORRECTIONS
    if not fits or shape_of(correction) != shape_of(param):
        raise ValueError(
            f"`state.correction` for `{name}` must be int8 or int16 of the parameter's "
            f"shape {shape_of(param)}, but it is {dtype_of(correction)} of shape "
            f"{shape_of(correction)}. {_INIT_AGAIN}"
        )


# --- options --------------------------------------------------------------------------


def as_groups(groups: Any) -> tuple[ParamGroup, ...]:
    """Returns groups as a tuple; raises if they are something else."""
    if not isinstance(groups, Iterable):
        raise TypeError(
            "`groups` must be a sequence of `ParamGroup`s, such as "
            f"`[ParamGroup(...)]`, but {type(groups).__name__} was given."
        )
    groups = tuple(groups)
    for group in groups:
        if not isinstance(group, ParamGroup):
            raise TypeError(
                "`groups` must be a sequence of `ParamGroup`s, but it holds "
                f"{type(group).__name__}."
            )
        if group.compression is not None:
            check_compression(
                f"`compression` of the group {group.where!r}", group.compression
            )
    return groups


def check_compression(what: str, compression: Any) -> None:
    """Raises if a compression is something else."""
    if not isinstance(compression, Compression):
        raise TypeError(
            f"{what} must be an `mpx.optim.Compression`, but {type(compression).__name__} was "
            "given. `Compression(quantize=False, master_bits=None)` compresses nothing."
        )


def check_backend(backend: str) -> None:
    """Raises if there is no such backend."""
    if backend not in _kernels.BACKENDS:
        raise ValueError(
            f"`backend` must be one of {', '.join(map(repr, _kernels.BACKENDS))}, but "
            f"{backend!r} was given."
        )


def check_groups(
    groups: Sequence[ParamGroup], rule: Rule, compression: Compression
) -> None:
    """Raises if groups set what the optimizer does not have."""
    for group in groups:
        if unknown := sorted(set(group.hyper) - set(rule.hyper)):
            raise ValueError(
                f"The group {group.where!r} sets {unknown}, but this optimizer has only "
                f"{sorted(rule.hyper)}."
            )
        unused = sorted({"momentum", "dampening"} & set(group.hyper))
        if unused and not rule.moments:
            raise ValueError(
                f"The group {group.where!r} sets {unused}, but the optimizer keeps no "
                "momentum. Set `momentum` on the optimizer, where 0.0 keeps one, too."
            )
        if group.compression and group.compression.format != compression.format:
            raise ValueError(
                f"The group {group.where!r} has the format {group.compression.format!r}, "
                f"but the others have {compression.format!r}; there is one for all."
            )


def check_hyper(values: Mapping[str, Any]) -> None:
    """Raises for hyperparameters that are out of range or too coarse.

    What is traced or scheduled cannot be looked at.
    """
    for name, value in values.items():
        _check_value(name, value)


def check_scalar(name: str, value: Any) -> None:
    """Raises if a value is not one number."""
    dtype = getattr(value, "dtype", None)
    is_real = isinstance(value, int | float) or (
        dtype is not None
        and any(jnp.issubdtype(dtype, t) for t in (jnp.floating, jnp.integer, np.bool_))
    )
    if not is_real:
        raise TypeError(
            f"`{name}` must be a number or a scalar array, but "
            f"{dtype or type(value).__name__} was given."
        )
    if shape_of(value) != ():
        raise ValueError(
            f"`{name}` must be a scalar, but its shape is {shape_of(value)}. Take one of "
            "its elements."
        )


def _check_value(name: str, value: Any) -> None:
    if callable(value):  # a schedule; looked at when it has been called
        return
    check_scalar(name, value)
    dtype = getattr(value, "dtype", np.dtype(np.float32))
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
        raise ValueError(
            f"`{name}` is {dtype}, in which 0.999 would be 1; f32 is needed. "
            "`optax.inject_hyperparams` gives hyperparameters the dtype of the "
            "parameters unless it is called with `hyperparam_dtype=jnp.float32`."
        )
    check_range(name, value, *_RANGES.get(name, _ANY_RATE))


def check_factor(name: str, value: Any) -> None:
    """Raises if a factor is inf or nan.

    Only numbers of Python and NumPy are looked at: an array may still be computed.
    """
    if isinstance(value, int | float | np.ndarray | np.generic):
        check_range(name, value, np.isfinite, "be finite")


def check_range(
    name: str, value: Any, fits: Callable[[float], bool], range_: str
) -> None:
    """Raises if a number is out of its range in f32, in which it is used.

    What is traced is not known yet.
    """
    if is_tracer(value):
        return
    with np.errstate(over="ignore"):
        used = float(np.float32(value))
    if not fits(used):
        given = f"{value!r} was given"
        if fits(float(value)):
            given += f", which is {used} in f32"
        raise ValueError(f"`{name}` must {range_}, but {given}.")


_BELOW_ONE = (lambda x: 0 <= x < 1), "lie in [0, 1)"
_ANY_RATE = (lambda x: 0 <= x < np.inf), "lie in [0, ∞)"
_RANGES = {
    "b1": _BELOW_ONE,
    "b2": _BELOW_ONE,
    "momentum": _BELOW_ONE,
    "dampening": ((lambda x: 0 <= x <= 1), "lie in [0, 1]"),
    "eps": ((lambda x: 0 < x < np.inf), "lie in (0, ∞)"),
}
