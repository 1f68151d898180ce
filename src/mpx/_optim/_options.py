"""Options of the compressed optimizers: how states are stored, and groups of parameters."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from mpx._casting._select import (
    Selector,
    Selectors,
    matches,
    parse_selectors,
    selects_nothing,
)
from mpx._jax._arguments import as_count, check_bool, check_choice, check_value
from mpx._jax._tree import dtype_of, shape_of
from mpx._optim._params import FlatParams
from mpx._optim._update_rules import Rule
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

StateFormat = Literal["mpx", "flashoptim"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compression:
    """Storage format of the state of a compressed optimizer.

    The default takes 5.2 bytes per parameter for AdamW with bf16 weights: 2 for the weight,
    1 for the correction that makes it a 24-bit master weight, 1 for each moment, and a
    bf16 and an f32 scale per 32 elements.

    Attributes:
        quantize: Whether moments are stored in 8 bits; else in f32.
        master_bits: Bits of the master weights of 16-bit parameters: 24, 32, or `None` for
            no master weights. f32 parameters need none. 24 bits follow f32 to a few units
            of 2⁻¹⁵ of a weight.
        group_size: How many elements of the last axis share a scale. A power of two.
        min_size: Parameters with fewer elements keep f32 moments and 32-bit master
            weights: compressing them would save little. Parameters whose last axis is not
            a multiple of `group_size` keep f32 moments too.
        rounding: How moments and weights are rounded. `"dithered"` rounds up or down with
            a threshold that changes from step to step, so that small updates add up.
            `"nearest"` loses updates below half a code, and so does
            `format="flashoptim"`. `"stochastic"` rounds at random, with the right mean.
            The random numbers depend on `seed`, the step count and the place of an
            element in its array, which inside `shard_map` and `vmap` is the local one.
        format: `"mpx"` has scales with the range of f32; `"flashoptim"` stores the f16
            scales and corrections of FlashOptim, to exchange checkpoints with it.
        seed: For stochastic rounding and `jitter`.
        jitter: Whether `init` puts each master weight of a 16-bit parameter at a
            pseudo-random place among the weights that round to this parameter. It changes
            no parameter. Without it, masters start in the middle of their rounding
            intervals, and small steps change no parameter for a long time. The place
            depends on `seed`, the path of the parameter and the place of the element in
            its array. To start from f32 weights, use `init_from`.

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
    jitter: bool = True

    def __post_init__(self) -> None:
        check_choice(self.master_bits, "master_bits", (24, 32, None))
        check_choice(self.rounding, "rounding", ("dithered", "nearest", "stochastic"))
        check_choice(self.format, "format", ("mpx", "flashoptim"))
        check_bool(self.quantize, "`quantize`")
        check_bool(self.jitter, "`jitter`")
        for name, least in {"group_size": None, "min_size": 0, "seed": None}.items():
            value = as_count(getattr(self, name), name, least)
            object.__setattr__(self, name, value)
        size = self.group_size
        power = size >= 2 and not size & (size - 1)
        check_value(power, "group_size", "a power of two such as 32", size)

    def quantizes(self, param: Any) -> bool:
        """Returns whether the moments of a parameter are stored in 8 bits."""
        shape = shape_of(param)
        large = bool(shape) and math.prod(shape) >= max(self.min_size, 1)
        return bool(self.quantize) and large and shape[-1] % self.group_size == 0

    def correction_dtype(self, param: Any) -> np.dtype | None:
        """Returns the dtype of the correction of a parameter, if it gets one."""
        if self.master_bits is None or param.dtype.itemsize != 2:
            return None
        small = math.prod(shape_of(param)) < self.min_size
        return np.dtype(np.int16 if small or self.master_bits == 32 else np.int8)


def moment_codec(name: str, quantized: bool, format: StateFormat) -> MomentCodec:
    """Returns the codec of a moment."""
    if not quantized:
        return Full()
    codec = SoftsignInt8 if name == "mu" else SqrtUint8
    return codec(np.dtype(jnp.float16)) if format == "flashoptim" else codec()


def master_codec(
    dtype: DTypeLike, correction: np.dtype | None, format: StateFormat
) -> MasterCodec:
    """Returns the codec of the weights of parameters of `dtype`."""
    if correction is None:
        return RoundedMaster()
    if np.dtype(dtype) == np.dtype(jnp.bfloat16) and format == "mpx":
        return BitDelta(correction)
    return UlpFraction(correction)


@dataclasses.dataclass(frozen=True)
class ParamGroup:
    """A group of parameters with its own options.

    Attributes:
        where: A regular expression for paths such as `"norm|bias"`, a module type, a
            predicate `(path, array) -> bool`, which is only called for arrays, or a list
            of these.
        hyper: Hyperparameters that differ, for example `{"weight_decay": 0.0}`.
        frozen: Whether these parameters stay as they are, without any state.
        compression: How their state is stored, if different from the others.

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
        check_bool(self.frozen, f"`frozen` of the group {self.where!r}")

    def matches(self, name: str, leaf: Any) -> bool:
        """Returns whether a parameter belongs to this group."""
        selectors = parse_selectors(self.where, "where")
        return any(_selects(selector, name, leaf) for selector in selectors)

    def __hash__(self) -> int:
        # Of the hyperparameters only the names: a value may be an array.
        return hash((self.where, frozenset(self.hyper), self.frozen, self.compression))


def _selects(selector: Selector, name: str, leaf: Any) -> bool:
    named = isinstance(selector, str | type)
    return (named or dtype_of(leaf) is not None) and matches(selector, name, leaf)


def group_of(groups: Sequence[ParamGroup], name: str, leaf: Any) -> ParamGroup | None:
    """Returns the first group that a parameter belongs to."""
    return next((group for group in groups if group.matches(name, leaf)), None)


def check_groups_match(groups: Sequence[ParamGroup], flat: FlatParams) -> None:
    """Raises if a group, or one of its selectors, holds for no parameter."""
    pairs = list(zip(flat.names, flat.leaves, strict=True))
    in_force = [group_of(groups, *pair) for pair in pairs]
    for group in groups:
        for selector in parse_selectors(group.where, "where"):
            if not any(_selects(selector, *pair) for pair in pairs):
                raise selects_nothing(selector, "where", flat.names)
        if any(group is other for other in in_force):
            continue
        name, by = next(
            (name, by.where)
            for (name, leaf), by in zip(pairs, in_force, strict=True)
            if by is not None and group.matches(name, leaf)
        )
        raise ValueError(
            f"The group {group.where!r}{' with `frozen=True`' if group.frozen else ''} "
            f"holds for no parameter: `{name}` and all others belong to earlier ones, "
            f"such as {by!r}, and the first group that matches holds. Put it before."
        )


def as_groups(
    groups: Iterable[ParamGroup], rule: Rule, compression: Compression
) -> tuple[ParamGroup, ...]:
    """Returns groups as a tuple.

    Raises:
        TypeError: If one of them is something else.
        ValueError: If one sets an option that the optimizer does not have.
    """
    is_sequence = isinstance(groups, Iterable)
    members = tuple(groups) if is_sequence else (groups,)
    for group in members:
        if not is_sequence or not isinstance(group, ParamGroup):
            raise TypeError(
                "`groups` must be a sequence of `ParamGroup`s, such as "
                f"`[ParamGroup(...)]`, but {type(group).__name__} was given."
            )
        where = f"The group {group.where!r}"
        if unknown := sorted(set(group.hyper) - set(rule.hyper)):
            raise ValueError(
                f"{where} sets {unknown}, but this optimizer has only "
                f"{sorted(rule.hyper)}."
            )
        unused = sorted({"momentum", "dampening"} & set(group.hyper))
        if unused and not rule.moments:
            raise ValueError(
                f"{where} sets {unused}, but the optimizer keeps no momentum. Set "
                "`momentum` on the optimizer, where 0.0 keeps one, too."
            )
        if group.compression is None:
            continue
        check_compression(
            f"`compression` of the group {group.where!r}", group.compression
        )
        if group.compression.format != compression.format:
            raise ValueError(
                f"{where} has the format {group.compression.format!r}, but the others "
                f"have {compression.format!r}; there is one for all."
            )
    return members


def check_compression(what: str, compression: Any) -> None:
    """Raises if a compression is something else."""
    if not isinstance(compression, Compression):
        raise TypeError(
            f"{what} must be an `mpx.optim.Compression`, but {type(compression).__name__} was "
            "given. `Compression(quantize=False, master_bits=None)` compresses nothing."
        )
