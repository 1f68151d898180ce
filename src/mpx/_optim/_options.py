"""What users give to a compressed optimizer: parameters, storage, groups, hyperparameters."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, PyTree

from mpx._casting._keep import is_state
from mpx._casting._select import (
    Selector,
    Selectors,
    matches,
    parse_selectors,
    selects_nothing,
)
from mpx._jax._arguments import as_count, check_bool, check_choice, check_value
from mpx._jax._compat import is_tracer
from mpx._jax._nnx import without_variables
from mpx._jax._tree import (
    LeafName,
    dtype_of,
    flatten_with_names,
    is_none,
    path_name,
    shape_of,
)

StateFormat = Literal["mpx", "flashoptim"]
Hyper = float | Array | Callable[[Array], ArrayLike]
"""A number, an array, or a schedule: a function of the step count."""
Mask = PyTree | Callable[[PyTree], PyTree] | None
"""Which parameters decay: a tree of booleans, or a function of the parameters.

A boolean may stand for a part of the tree, and `None` for one that does not decay.
"""
TreeDef = Any  # `jax.tree_util.PyTreeDef`, which type checkers take for a variable
F32 = np.dtype(jnp.float32)
PARAM_DTYPES = (F32, np.dtype(jnp.bfloat16), np.dtype(jnp.float16))


class FlatParams(NamedTuple):
    """A tree of parameters, flattened; `None` counts as a leaf.

    `bare`, the structure of the state, has no NNX variables: NNX would separate codes and
    scales.
    """

    names: Sequence[LeafName]
    leaves: list[PyTree]
    treedef: TreeDef
    bare: TreeDef

    @classmethod
    def of(cls, params: PyTree) -> "FlatParams":
        """Flattens parameters."""
        named, bare = flatten_with_names(without_variables(params), is_leaf=is_none)
        # The types of variables of NNX tell parameters from running statistics.
        typed, treedef = flatten_with_names(params, is_leaf=is_none)
        pairs = zip(named, typed, strict=True)
        names = [LeafName(name, full.types) for (name, _), (full, _) in pairs]
        return cls(names, [leaf for _, leaf in named], treedef, bare)

    def check(self) -> None:
        """Raises if there are leaves, but none that could train."""
        leaves = [x for x in self.leaves if x is not None]
        if leaves and not any(map(_is_inexact, leaves)):
            pairs = zip(self.names, self.leaves, strict=True)
            came = [f"{name}: {dtype_of(x) or type(x).__name__}" for name, x in pairs]
            raise ValueError(
                "A compressed optimizer expected parameters, which are floating arrays, "
                f"but the tree has none: it holds {came[:8]}{' …' if came[8:] else ''}. "
                "Was the wrong part of the model passed?"
            )

    def check_groups(self, groups: Sequence["ParamGroup"]) -> None:
        """Raises if a group, or one of its selectors, holds for no parameter."""
        pairs = list(zip(self.names, self.leaves, strict=True))
        in_force = [id(group_of(groups, *pair)) for pair in pairs]
        for group in groups:
            for selector in parse_selectors(group.where, "where"):
                if not any(_selects(selector, *pair) for pair in pairs):
                    raise selects_nothing(selector, "where", self.names)
            if id(group) not in in_force:
                name = next(name for name, leaf in pairs if group.matches(name, leaf))
                raise ValueError(
                    f"The group {group.where!r} holds for no parameter: `{name}` and all "
                    "others belong to earlier groups, and the first group that matches "
                    "holds. Put it before."
                )

    def like(self, tree: PyTree, what: str) -> list[PyTree]:
        """Returns what another tree holds in the place of each parameter."""
        if tree is None:
            return [None] * len(self.leaves)
        tree = without_variables(tree)
        try:
            return self.bare.flatten_up_to(tree)
        except ValueError as error:
            # The state of a parameter is a `Packed`.
            flat, _ = jax.tree_util.tree_flatten_with_path(
                tree, is_leaf=lambda x: x is None or hasattr(x, "codes")
            )
            theirs = [path_name(path) for path, _ in flat]
            missing = [name for name in self.names if name not in theirs][:3]
            extra = [name for name in theirs if name not in self.names][:3]
            difference = f"{missing} are missing and {extra} are not expected"
            if not missing and not extra:
                difference = "some of its nodes are of another type or size"
            raise ValueError(
                f"{what} must have the structure of the parameters, but {difference}."
            ) from error

    def each(
        self, tree: PyTree, what: str, is_value: Callable[[object], bool]
    ) -> list[PyTree]:
        """Returns the value or `None` of each parameter, in a tree that may end early.

        Instead of a tree it may be a function that makes one from the parameters.
        """
        params = self.treedef.unflatten(self.leaves)
        values = jax.tree.leaves(tree, is_leaf=is_value)
        # A module that holds such values may be callable.
        if callable(tree) and not (values and all(map(is_value, values))):
            tree = tree(params)
        is_leaf = lambda x: x is None or is_value(x)  # noqa: E731
        try:
            full = jax.tree.broadcast(tree, params, is_leaf=is_leaf)
            return self.treedef.flatten_up_to(full)
        except ValueError as error:
            raise ValueError(
                f"{what} must have the structure of the parameters or be the beginning of "
                "it, but some of its nodes are of another type or size."
            ) from error

    def decays(self, mask: Mask) -> list[bool]:
        """Returns for each parameter whether it decays: all do if `mask` is `None`."""
        if mask is None:
            return [True] * len(self.leaves)
        flags = self.each(mask, "`mask`", _is_flag)
        wrong = [
            f"`{name}`: {dtype_of(x) or type(x).__name__}"
            for name, x in zip(self.names, flags, strict=True)
            if not (x is None or _is_flag(x))
        ]
        if wrong or (callable(mask) and flags and set(flags) == {None}):
            raise TypeError(
                "`mask` must be a tree of True and False, or a function of the parameters "
                f"that returns one, but it holds {', '.join(wrong[:3]) or None}. Use "
                "shapes, dtypes or paths, which are known when the step is traced."
            )
        return list(map(bool, flags))


def is_trainable(name: LeafName, param: PyTree) -> bool:
    """Returns whether a leaf is a parameter, not one of running statistics."""
    if is_state(name) or not _is_inexact(param):
        return False
    if dtype_of(param) not in PARAM_DTYPES:
        raise TypeError(
            f"`{name}` is {dtype_of(param)}, but compressed optimizers hold weights in f32, "
            "bf16 or f16. Hold it in one of these (a complex parameter as two, its real and "
            "its imaginary part), or freeze it with `ParamGroup(path, frozen=True)`."
        )
    return True


def _is_inexact(leaf: object) -> bool:
    dtype = dtype_of(leaf)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _is_flag(leaf: object) -> bool:
    is_bool = isinstance(leaf, bool) or dtype_of(leaf) == np.dtype(bool)
    return is_bool and shape_of(leaf) == () and not is_tracer(leaf)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compression:
    """Storage format of the state of a compressed optimizer.

    The default takes 5.2 bytes per parameter for AdamW with bf16 weights: 2 for the weight,
    1 for the correction that makes it a 24-bit master weight, 1 for each moment, and a
    bf16 and an f32 scale per 32 elements.

    Attributes:
        quantize: Whether moments are stored in 8 bits; else in f32.
        master_bits: Bits of the master weights of 16-bit parameters: 24, 32, or `None` for
            none. 24 bits follow f32 to a few units of 2⁻¹⁵ of a weight.
        group_size: How many elements of the last axis share a scale. A power of two.
        min_size: Parameters with fewer elements keep f32 moments and 32-bit master
            weights: compressing them would save little. Parameters whose last axis is not
            a multiple of `group_size` keep f32 moments too.
        rounding: `"dithered"` rounds moments and weights up or down with a threshold that
            changes from step to step, so that small updates add up. `"nearest"` loses
            updates below half a code, and so does `format="flashoptim"`.
        format: `"mpx"` has scales with the range of f32; `"flashoptim"` stores the f16
            scales and corrections of FlashOptim, to exchange checkpoints with it.
        jitter: Whether `init` puts each master weight of a 16-bit parameter at a
            pseudo-random place, which depends on its path and index, among the weights
            that round to it. In the middle, small steps would change no parameter for a
            long time. To start from f32 weights, use `init_from`.

    Examples:
        >>> Compression(master_bits=None, rounding="nearest").quantize
        True
    """

    quantize: bool = True
    master_bits: Literal[24, 32] | None = 24
    group_size: int = 32
    min_size: int = 4096
    rounding: Literal["dithered", "nearest"] = "dithered"
    format: StateFormat = "mpx"
    jitter: bool = True

    def __post_init__(self) -> None:
        check_choice(self.master_bits, "master_bits", (24, 32, None))
        check_choice(self.rounding, "rounding", ("dithered", "nearest"))
        check_choice(self.format, "format", ("mpx", "flashoptim"))
        check_bool(self.quantize, "`quantize`")
        check_bool(self.jitter, "`jitter`")
        for name, least in {"group_size": None, "min_size": 0}.items():
            value = as_count(getattr(self, name), name, least)
            object.__setattr__(self, name, value)
        size = self.group_size
        power = size >= 2 and not size & (size - 1)
        check_value(power, "group_size", "a power of two such as 32", size)

    def quantizes(self, param: PyTree) -> bool:
        """Returns whether the moments of a parameter are stored in 8 bits."""
        shape = shape_of(param)
        large = bool(shape) and math.prod(shape) >= max(self.min_size, 1)
        return bool(self.quantize) and large and shape[-1] % self.group_size == 0

    def correction_dtype(self, param: PyTree) -> np.dtype | None:
        """Returns the dtype of the correction of a parameter, if it gets one."""
        if self.master_bits is None or param.dtype.itemsize != 2:
            return None
        small = math.prod(shape_of(param)) < self.min_size
        return np.dtype(np.int16 if small or self.master_bits == 32 else np.int8)


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
        optimizer: A compressed optimizer whose rule and hyperparameters these parameters
            have instead, such as `flash_adamw(3e-4)` for embeddings under `flash_muon`.

    Examples:
        >>> group = ParamGroup("bias|norm", {"weight_decay": 0.0})
        >>> group.matches("layers/0/norm/weight", None)
        True
    """

    where: Selectors
    hyper: Mapping[str, PyTree] = dataclasses.field(default_factory=dict, hash=False)
    _: dataclasses.KW_ONLY
    frozen: bool = False
    compression: Compression | None = None
    optimizer: optax.GradientTransformation | None = None

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

    def matches(self, name: str, leaf: object) -> bool:
        """Returns whether a parameter belongs to this group."""
        selectors = parse_selectors(self.where, "where")
        return any(_selects(selector, name, leaf) for selector in selectors)


def _selects(selector: Selector, name: str, leaf: object) -> bool:
    named = isinstance(selector, str | type)
    return (named or dtype_of(leaf) is not None) and matches(selector, name, leaf)


_REST = ParamGroup(())


def group_of(groups: Sequence[ParamGroup], name: str, leaf: object) -> ParamGroup:
    """Returns the first group that matches; that of all others sets nothing."""
    return next((group for group in groups if group.matches(name, leaf)), _REST)


# --- hyperparameters ------------------------------------------------------------------

_Range = tuple[Callable[[float], bool], str]
_RATE: _Range = (lambda x: 0 <= x < np.inf), "lie in [0, ∞)"
_DECAY: _Range = (lambda x: 0 <= x < 1), "lie in [0, 1)"
_RANGES: dict[str, _Range] = {
    **dict.fromkeys(("b1", "b2", "beta", "momentum"), _DECAY),
    "dampening": ((lambda x: 0 <= x <= 1), "lie in [0, 1]"),
    "eps": ((lambda x: 0 < x < np.inf), "lie in (0, ∞)"),
    "grad_scale": (np.isfinite, "be finite"),
    "max_norm": ((lambda x: x > 0), "be positive"),
}


def check_hyper(values: Mapping[str, PyTree]) -> None:
    """Raises for hyperparameters, except schedules, that are out of range or too coarse."""
    for name, value in values.items():
        if callable(value):
            continue
        _check_number(name, value)
        dtype = getattr(value, "dtype", np.dtype(np.float32))
        if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
            raise ValueError(
                f"`{name}` is {dtype}, in which 0.999 would be 1; f32 is needed. "
                "`optax.inject_hyperparams` gives hyperparameters the dtype of the "
                "parameters unless it is called with `hyperparam_dtype=jnp.float32`."
            )
        _check_range(name, value)


def as_scalar(name: str, value: PyTree) -> Array:
    _check_number(name, value)
    # An array may still be being computed.
    if name == "grad_scale" and not isinstance(value, jax.Array):
        _check_range(name, value)
    return jnp.asarray(value, jnp.float32)


def _check_number(name: str, value: PyTree) -> None:
    """Raises if a value is not one number; starts no JAX backend."""
    dtype = getattr(value, "dtype", None)
    kinds = (jnp.floating, jnp.integer, np.bool_)
    is_real = dtype is not None and any(jnp.issubdtype(dtype, t) for t in kinds)
    if not (is_real or isinstance(value, int | float)) or shape_of(value) != ():
        came = str(dtype or type(value).__name__)
        came += f" of shape {shape_of(value)}" if shape_of(value) else ""
        raise TypeError(
            f"`{name}` must be a number or a scalar array, but {came} was given."
        )


def _check_range(name: str, value: PyTree) -> None:
    """Raises if a known number is out of its range in f32, in which it is used."""
    fits, range_ = _RANGES.get(name, _RATE)
    with np.errstate(over="ignore"):
        if not is_tracer(value) and not fits(used := float(np.float32(value))):
            note = f", which is {used} in f32" if fits(float(value)) else ""
            raise ValueError(f"`{name}` must {range_}, but {value!r} was given{note}.")


class Clip(NamedTuple):
    """The result of `clip_scale`.

    Attributes:
        grad_scale: For `step`: undoes the loss scale and clips.
        norm: The norm of the unscaled gradients before clipping.
        finite: Whether that norm is finite, for `step(finite=...)`.
    """

    grad_scale: Float[Array, ""]
    norm: Float[Array, ""]
    finite: Bool[Array, ""]


def clip_scale(
    grads: PyTree, max_norm: ArrayLike, *, grad_scale: ArrayLike = 1.0
) -> Clip:
    """Returns the factor that clips gradients to a global norm.

    The gradients are read once and not copied: pass the result to the `step` of a
    compressed optimizer. The rule is that of `optax.clip_by_global_norm`; squares are
    summed in f32.

    Args:
        grads: The gradients, possibly still scaled. Leaves that are neither floating nor
            complex are ignored.
        max_norm: The largest norm allowed, a positive scalar; inf only computes the norm.
        grad_scale: The factor that unscales the gradients: one over the loss scale.

    Examples:
        >>> clip = clip_scale({"w": jnp.full(4, 8.0)}, 1.0, grad_scale=0.5)
        >>> float(clip.norm), float(clip.grad_scale)
        (8.0, 0.0625)
    """
    limit, scale = as_scalar("max_norm", max_norm), as_scalar("grad_scale", grad_scale)
    _check_range("max_norm", max_norm)
    total = jnp.zeros((), jnp.float32)
    for grad in filter(_is_inexact, jax.tree.leaves(grads)):
        part = jnp.abs(grad) if jnp.iscomplexobj(grad) else jnp.asarray(grad)
        total += jnp.sum(jnp.square(part.astype(jnp.float32) * scale))
    norm = jnp.sqrt(total)
    # Not `limit / max(norm, limit)`, which is nan if there is no limit: inf.
    factor = jnp.where(norm > limit, limit / norm, 1.0)
    return Clip(scale * factor, norm, jnp.isfinite(norm))
