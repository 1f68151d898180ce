"""What a user can choose: how states are compressed, and options by parameter path."""

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from mpx._quant import (
    BitDelta,
    Full,
    MasterCodec,
    MomentCodec,
    RoundedMaster,
    SoftsignInt8,
    SqrtUint8,
    UlpFraction,
)
from mpx._select import (
    Selector,
    Selectors,
    matches,
    parse_selectors,
    selects_nothing,
)
from mpx._tree import dtype_of, shape_of

StateFormat = Literal["mpx", "flashoptim"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compression:
    """How a compressed optimizer stores its state.

    The default takes 5.2 bytes a parameter for AdamW with bf16 weights: 2 for the weight,
    1 for the correction that makes it a 24-bit master weight, 1 for each moment, and a
    bf16 and an f32 scale for 32 elements.

    Attributes:
        quantize: Whether moments are stored in 8 bits; else in f32.
        master_bits: 24 or 32, the bits of the master weights of 16-bit parameters;
            `None` keeps no more than the parameters have. f32 parameters need none. 24
            bits follow f32 to some units of 2⁻¹⁵ of a weight.
        group_size: How many elements of the last axis share a scale. A power of two.
        min_size: Parameters with fewer elements keep f32 moments and 32-bit master
            weights: they take no memory worth saving. So do parameters whose last axis
            is not a multiple of `group_size`, for their moments.
        rounding: How moments and weights are rounded. `"dithered"` rounds up or down by
            turns, with a threshold that changes from step to step, so that what moves by
            less than half a code in a step moves at all. `"nearest"` loses such steps, and
            so does `format="flashoptim"`. `"stochastic"` rounds at random, such that the
            mean is right. The random numbers depend on `seed`, the step count and the place
            of an element in its array, which inside `shard_map` and `vmap` is the local
            one.
        format: `"mpx"` has scales with the range of f32; `"flashoptim"` stores the f16
            scales and corrections of FlashOptim, to exchange checkpoints with it.
        seed: For stochastic rounding.

    Examples:
        >>> Compression(master_bits=None, rounding="stochastic").quantize
        True
    """

    quantize: bool = True
    master_bits: Literal[24, 32] | None = 24
    group_size: int = 32
    min_size: int = 4096
    rounding: Literal["dithered", "nearest", "stochastic"] = "dithered"
    format: StateFormat = "mpx"
    seed: int = 0

    def __post_init__(self) -> None:
        self._check("master_bits", (24, 32, None))
        self._check("rounding", ("dithered", "nearest", "stochastic"))
        self._check("format", ("mpx", "flashoptim"))
        if not isinstance(self.quantize, bool | np.bool_):
            raise TypeError(
                f"`quantize` must be True or False, but {self.quantize!r} was given."
            )
        for name in ("group_size", "min_size", "seed"):
            object.__setattr__(self, name, _as_int(name, getattr(self, name)))
        size = self.group_size
        if size < 2 or size & (size - 1):
            raise ValueError(
                f"`group_size` must be a power of two such as 32, but {size!r} was given."
            )
        if self.min_size < 0:
            raise ValueError(
                f"`min_size` must not be negative, but {self.min_size!r} was given."
            )

    def _check(self, name: str, allowed: tuple[Any, ...]) -> None:
        if getattr(self, name) not in allowed:
            listed = ", ".join(map(repr, allowed))
            raise ValueError(
                f"`{name}` must be one of {listed}, but {getattr(self, name)!r} was given."
            )

    def quantizes(self, param: Any) -> bool:
        """Whether the moments of a parameter are stored in 8 bits."""
        shape = shape_of(param)
        large = int(np.prod(shape, dtype=np.int64)) >= max(self.min_size, 1)
        return (
            self.quantize and large and bool(shape) and shape[-1] % self.group_size == 0
        )

    def correction_dtype(self, param: Any) -> np.dtype | None:
        """Returns the dtype of the correction of a parameter, if it gets one."""
        if self.master_bits is None or param.dtype.itemsize != 2:
            return None
        small = int(np.prod(shape_of(param), dtype=np.int64)) < self.min_size
        return np.dtype(np.int16 if small or self.master_bits == 32 else np.int8)


def _as_int(name: str, value: Any) -> int:
    try:
        return operator.index(value)  # of NumPy's integers, too
    except TypeError as error:
        raise TypeError(
            f"`{name}` must be an integer that is known when the optimizer is made, but "
            f"{value!r} was given."
        ) from error


def moment_codec(name: str, *, quantized: bool, format: StateFormat) -> MomentCodec:
    """Returns how a moment is stored."""
    if not quantized:
        return Full()
    f16 = np.dtype(jnp.float16)
    if name == "mu":
        return SoftsignInt8(f16) if format == "flashoptim" else SoftsignInt8()
    return SqrtUint8(f16) if format == "flashoptim" else SqrtUint8()


def master_codec(
    dtype: Any, correction: np.dtype | None, format: StateFormat
) -> MasterCodec:
    """Returns how the weights of parameters of `dtype` are stored."""
    if correction is None:
        return RoundedMaster()
    if np.dtype(dtype) == np.dtype(jnp.bfloat16) and format == "mpx":
        return BitDelta(correction)
    return UlpFraction(correction)


@dataclasses.dataclass(frozen=True)
class ParamGroup:
    """Parameters with options of their own.

    Attributes:
        where: A regular expression for paths such as `"norm|bias"`, a module type, a
            predicate `(path, array) -> bool`, which is not called for leaves that are no
            arrays, or a list of these.
        hyper: Hyperparameters that differ, for example `{"weight_decay": 0.0}`.
        frozen: Whether these parameters are left as they are, without any state.
        compression: How their state is stored, if not as that of the others.

    Examples:
        >>> group = ParamGroup("bias|norm", {"weight_decay": 0.0})
        >>> group.matches("layers/0/norm/weight", None)
        True
    """

    where: Selectors
    hyper: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    _: dataclasses.KW_ONLY
    frozen: bool = False
    compression: Compression | None = None

    def __post_init__(self) -> None:
        selectors = parse_selectors(self.where, "where")
        if len(selectors) != 1 or self.where is not selectors[0]:
            object.__setattr__(self, "where", selectors)  # a list is not hashable
        if not isinstance(self.hyper, Mapping):
            raise TypeError(
                f"`hyper` of the group {self.where!r} must be a mapping such as "
                f'`{{"weight_decay": 0.0}}`, but {type(self.hyper).__name__} was given.'
            )
        if not isinstance(self.frozen, bool | np.bool_):
            raise TypeError(
                f"`frozen` of the group {self.where!r} must be True or False, but "
                f"{self.frozen!r} was given."
            )

    def matches(self, name: str, leaf: Any) -> bool:
        """Returns whether a parameter belongs to this group."""
        return any(
            _selects(x, name, leaf) for x in parse_selectors(self.where, "where")
        )

    def check(self, named: Mapping[str, Any]) -> None:
        """Raises unless each selector selects a parameter.

        Raises:
            ValueError: If one does not; near names are listed.
        """
        for selector in parse_selectors(self.where, "where"):
            if not any(_selects(selector, name, leaf) for name, leaf in named.items()):
                raise selects_nothing(selector, "where", named)

    def __hash__(self) -> int:
        # Of the hyperparameters only the names: a value may be an array.
        return hash((self.where, frozenset(self.hyper), self.frozen, self.compression))


def _selects(selector: Selector, name: str, leaf: Any) -> bool:
    named = isinstance(selector, str | type)
    return (named or dtype_of(leaf) is not None) and matches(selector, name, leaf)
