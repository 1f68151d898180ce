"""Recipes: the narrow formats of a matmul, and where its scales come from."""

import dataclasses
import math
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from mpx._jax._arguments import as_count, as_real, check_bool, check_choice, check_value

ROLES = ("activation", "weight", "grad")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """The base of all recipes; a field of few values is checked by its annotation."""

    kind: ClassVar[str] = "fp8"  # What reports call a matmul that runs by it
    since: ClassVar[tuple[int, int]] = (8, 9)  # The first compute capability with units
    multiple: ClassVar[int] = 16  # What the sizes of a matmul must be multiples of
    in_blocks: ClassVar[bool] = False  # Whether blocks along the sum have scales
    has_state: ClassVar[bool] = False  # Whether scales come from an `Fp8State`
    longest: ClassVar[int] = 0  # How many products may be added up; 0 for any number

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            if kind is bool:
                check_bool(getattr(self, name), f"`{name}`")
            elif get_origin(kind) is Literal:
                check_choice(getattr(self, name), name, get_args(kind))

    @property
    def by_row(self) -> bool:
        """Whether each row of the left operand and column of the right one has a scale."""
        return False

    def form(self, role: str, *, backward: bool = False) -> str:
        """Returns the format of the activation, the weight or the gradient.

        It may differ in the products of the backward pass; "" is the compute dtype.
        """
        raise NotImplementedError

    def is_dithered(self, role: str) -> bool:
        """Returns whether a tensor is rounded stochastically."""
        return False

    def known_maximum(self, role: str, seen: Any) -> Any:
        """Returns the magnitude that fixes the scale of a tensor; `None` for its own.

        `seen` are the largest ones in earlier steps by `ROLES`, f32[3], if there are any.
        """
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8(Recipe):
    """The base of the fp8 recipes: activations and parameters are e4m3.

    Attributes:
        grad: The format of the gradients that come back to a matmul's result.
    """

    grad: str = "e5m2"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.grad, "grad", ("e4m3", "e5m2"))

    def form(self, role: str, *, backward: bool = False) -> str:
        return self.grad if role == "grad" else "e4m3"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CurrentScaling(Float8):
    """Scales every tensor by its own largest magnitude, at each use. Keeps no state.

    A tensor x becomes `codes · scale` with `scale = 2**ceil(log2(max |x| / max))`, where
    the last max is that of its format: nothing is clipped. The error of a number is half
    an ulp of the format, or half its smallest number times the scale.

    Attributes:
        grad: The format of the gradients; `"e4m3"` if scaled by rows, else `"e5m2"`:
            a scale for the whole tensor needs the wider range.
        granularity: `"tensor"`, or `"row"` for one scale per row of the left operand
            and per column of the right one. Then rows of very different size lose
            nothing, but each tensor is quantised twice, once for each direction in
            which it is summed.

    Examples:
        >>> CurrentScaling().grad, CurrentScaling(granularity="row").grad
        ('e5m2', 'e4m3')
    """

    granularity: Literal["tensor", "row"] = "tensor"
    grad: str = ""

    def __post_init__(self) -> None:
        grad = self.grad or ("e4m3" if self.by_row else "e5m2")
        object.__setattr__(self, "grad", grad)
        super().__post_init__()

    @property
    def by_row(self) -> bool:
        return self.granularity == "row"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DelayedScaling(Float8):
    """Scales every tensor by the largest magnitude of the last steps.

    Scales are known before a tensor is, so that no matmul waits for a reduction over
    devices. They live in a state: see `fp8`. A tensor that has not been seen has a scale
    of 1; inside `shard_map` it is scaled as by `CurrentScaling`.

    Attributes:
        grad: The format of the gradients.
        history: Over how many steps the largest magnitude is taken.
        margin: How many powers of two to leave free above it, from -8 to 8. What grows
            beyond that from one step to the next is clipped.

    Examples:
        >>> DelayedScaling(history=4).grad
        'e5m2'
    """

    has_state: ClassVar[bool] = True

    history: int = 16
    margin: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        # NumPy's integers become Python's.
        object.__setattr__(self, "history", as_count(self.history, "history", 1))
        object.__setattr__(self, "margin", as_count(self.margin, "margin"))
        words = "a number of powers of two, from -8 to 8"
        check_value(-8 <= self.margin <= 8, "margin", words, self.margin)

    def known_maximum(self, role: str, seen: Any) -> Any:
        return None if seen is None else seen[ROLES.index(role)] * 2.0**self.margin


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaticScaling(Float8):
    """Scales by fixed magnitudes, for models whose ranges are known.

    Attributes:
        grad: The format of the gradients.
        activation_max: The largest magnitude that activations may have; what is above
            is clipped.
        weight_max: The same for parameters.
        grad_max: The same for gradients. Loss scaling changes it.

    Examples:
        >>> StaticScaling(activation_max=16.0, weight_max=1.0, grad_max=2.0**-8).grad
        'e5m2'
    """

    activation_max: float
    weight_max: float
    grad_max: float

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("activation_max", "weight_max", "grad_max"):
            value = as_real(getattr(self, name), name)
            check_value(0 < value < math.inf, name, "positive and finite", value)
            object.__setattr__(self, name, value)

    def known_maximum(self, role: str, seen: Any) -> Any:
        return getattr(self, f"{role}_max")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP8(Float8):
    """Scales blocks of 32 numbers along the direction of the sum (the OCP MX format).

    Each block has a power-of-two scale in e8m0, rounded up so that nothing is clipped.
    NVIDIA GPUs have units for it from Blackwell on. On others `fp8` refuses it, because
    it would be slower than bf16.

    Attributes:
        grad: The format of the gradients.
        emulate: Whether to compute the same numbers in the compute dtype where there
            are no units for them: for studies, not for speed.

    Examples:
        >>> MXFP8(emulate=True).grad
        'e4m3'
    """

    multiple: ClassVar[int] = 32
    in_blocks: ClassVar[bool] = True

    grad: str = "e4m3"
    emulate: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8(Recipe):
    """Multiplies 8-bit integers, for GPUs and TPUs without fp8 units.

    A tensor x becomes `codes · scale` with integers from -127 to 127 and
    `scale = max |x| / 127`, one per row of the left operand and per column of the right
    one: nothing is clipped. Products are added exactly, in s32. To nearest, a number is
    off by at most `scale / 2`; stochastically by less than `scale`, and not on average.

    Attributes:
        backward: Whether both products of the backward pass run in int8 as well. If not,
            they run in the compute dtype, on the operands as they were.
        rounding: How gradients are rounded: `"stochastic"` or `"nearest"`. The random
            bits are a hash of each number and its index: the same step gives the same
            gradients. Activations and parameters are rounded to nearest.

    Examples:
        >>> import jax.numpy as jnp, mpx
        >>> layer = lambda w, x: x @ w
        >>> w = jnp.full((16, 16), 1.0, jnp.bfloat16).at[0].set(0.25)
        >>> low = mpx.fp8(layer, Int8(), min_gain=0)
        >>> x = jnp.eye(16, dtype=jnp.bfloat16)
        >>> float(low(w, x)[0, 0]), 32 / 127  # the nearest of 127 levels
        (0.251953125, 0.25196850393700787)
    """

    kind: ClassVar[str] = "int8"
    since: ClassVar[tuple[int, int]] = (7, 5)
    # The sum of this many products is below 2³¹.
    longest: ClassVar[int] = (2**31 - 1) // 127**2

    backward: bool = True
    rounding: Literal["stochastic", "nearest"] = "stochastic"

    @property
    def by_row(self) -> bool:
        return True

    def form(self, role: str, *, backward: bool = False) -> str:
        return "" if backward and not self.backward else "int8"

    def is_dithered(self, role: str) -> bool:
        return role == "grad" and self.backward and self.rounding == "stochastic"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NVFP4(Recipe):
    """Multiplies 4-bit numbers, e2m1, as in arXiv:2509.25149.

    A matrix becomes `codes · scale · whole`: an e4m3 scale for each 16 numbers along the
    sum, and one f32 scale for all, so that its largest magnitude is 6 · 448. Activations and
    parameters are rounded to nearest. NVIDIA GPUs have units for it from Blackwell on. On
    others `fp8` refuses it, because it would be slower than bf16.

    The paper keeps sensitive layers in bf16, such as the last blocks: name them in `keep`.

    Attributes:
        hadamard: Whether both operands of a weight's gradient are rotated before they are
            rounded, each 16 numbers along the sum by a Hadamard matrix with random signs.
            That spreads outliers, and cancels out in the product.
        stochastic: Whether gradients are rounded stochastically, by a hash of each number
            and its index. Their scales are then rounded up, so that none is clipped.
        weight_blocks: `"2d"` for one scale per 16 × 16 numbers of a parameter, so that both
            passes multiply with the same one, or `"1d"` for one per 16 along the sum.
        emulate: Whether to compute the same numbers in the compute dtype where there
            are no units for them: for studies, not for speed.

    Examples:
        >>> import jax.numpy as jnp, mpx
        >>> layer = lambda w, x: x @ w
        >>> low = mpx.fp8(layer, NVFP4(emulate=True), min_gain=0)
        >>> w = jnp.full((16, 16), 1.0, jnp.bfloat16).at[0].set(0.3)
        >>> float(low(w, jnp.eye(16, dtype=jnp.bfloat16))[0, 0])  # of 1/6 and 2/6
        0.333984375
    """

    kind: ClassVar[str] = "nvfp4"
    since: ClassVar[tuple[int, int]] = (0, 0)  # see `check_supported`
    in_blocks: ClassVar[bool] = True

    hadamard: bool = True
    stochastic: bool = True
    weight_blocks: Literal["2d", "1d"] = "2d"
    emulate: bool = False

    def form(self, role: str, *, backward: bool = False) -> str:
        return "e2m1"

    def is_dithered(self, role: str) -> bool:
        return role == "grad" and self.stochastic


_BY_NAME: dict[str, type[Recipe]] = {
    "current": CurrentScaling,
    "delayed": DelayedScaling,
    "mxfp8": MXFP8,
    "int8": Int8,
    "nvfp4": NVFP4,
}


def as_recipe(recipe: object) -> Recipe:
    """Returns the recipe that a user chose, by its name or as an object."""
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, type) and issubclass(recipe, Recipe):
        raise TypeError(
            f"`recipe` is the class `{recipe.__name__}`. Pass an instance: "
            f"`{recipe.__name__}(...)`."
        )
    if not isinstance(recipe, str):
        raise TypeError(
            "`recipe` must be a recipe such as `mpx.recipes.CurrentScaling()` or the name of "
            f"one, but {recipe!r} was given."
        )
    if recipe not in _BY_NAME:
        raise ValueError(
            f"`recipe` must be one of {', '.join(_BY_NAME)}, but {recipe!r} was given. "
            "Pass `mpx.recipes.StaticScaling(...)` as an object: its magnitudes have no default."
        )
    return _BY_NAME[recipe]()
