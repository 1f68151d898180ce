"""Predictions: the gradient error of any policy, from two passes.

The program is `value_and_grad` of the function as `amp` runs it, in f32. Each site (see
`_sites`) holds an identity whose derivative returns samples. With random signs v as the
cotangent of the gradients, the derivative at a site is h = d(v · grads)/dx, and

    E_v Σ (h e)² = |d grads|²      for the rounding errors e of that site,

for all groups and formats at once.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from mpx._jax._compat import Literal, open_jaxpr, primitive_name
from mpx._jax._formats import FORMATS, parse_float_dtype
from mpx._jax._progress import Tell
from mpx._jax._sharding import sharded_as, unsharded
from mpx._program._interpreter import Jaxpr
from mpx._program._queries import MOVES, Equation, equations, names, walk
from mpx.inspect._groups import Group, labelled
from mpx.inspect._pieces import Pieces, apart
from mpx.inspect._program import Program, gradient
from mpx.inspect._sites import Key, Known, Rule, Site, Sites

# Numbers of the host have the same operators.
if TYPE_CHECKING:
    from jax import Array
else:
    Array = jax.Array | np.ndarray | np.generic

HALVES = ("bf16", "f16")
EIGHTS = ("e4m3", "e5m2")
DOUBT = 0.1
"""The share of a prediction from sums that cancel above which it is doubtful."""
_PASSES = 2
_SAMPLE = 4096  # the most numbers that are looked at in one array
_LOST = 0.25  # a sum whose operands' errors exceed this share of it is no longer known
_MOST_SCALE = 2.0**24  # the ceiling of `mpx.DynamicLossScaling.pow2()`
_LOWEST = -60  # the exponent of the first bin of a histogram
_COMPARISONS = ("gt", "ge", "lt", "le")
_POSITIVE = MOVES.union(names("reduce_sum reduce_max convert_element_type"))
_FLOATS = ("float32", "bfloat16", "float16")
_DTYPES = {
    **{name: parse_float_dtype(name) for name in HALVES},
    "e4m3": np.dtype(jnp.float8_e4m3fn),
    "e5m2": np.dtype(jnp.float8_e5m2),
}

Seen = tuple[Array, ...]
"""What was looked at: a value, then operands, then the derivative for the value."""

# --- Samples, taken inside a program --------------------------------------------------


def _positions(size: int) -> np.ndarray:
    """Returns the positions of the sample: a random one in each of equal parts."""
    edges = np.linspace(0, size, _SAMPLE + 1)
    shift = np.random.default_rng(size).random(_SAMPLE)
    return np.minimum(edges[:-1] + shift * np.diff(edges), size - 1).astype(np.int32)


@apart
def look(x: Array) -> Array:
    """Returns the largest magnitude of an array, then a sample of its numbers."""
    x = unsharded(x)
    flat = x.reshape(-1)
    if x.size > _SAMPLE:
        places = flat.at[_positions(x.size)]
        flat = places.get(mode="promise_in_bounds", wrap_negative_indices=False)
    return jnp.concatenate([jnp.max(jnp.abs(x), initial=0.0).reshape(1), flat])


@jax.custom_vjp
def _tapped(x: Array, z: Seen, seen: Seen) -> Array:
    return x


def _backward(seen: Seen, cotangent: Array) -> tuple[Array, Seen, Seen]:
    zeros = jax.tree.map(jnp.zeros_like, seen)
    return cotangent, (*seen, look(cotangent)), zeros


_tapped.defvjp(lambda x, z, seen: (x, seen), _backward)


def tap(x: Array, z: Seen, operands: tuple[Array, ...] = ()) -> Array:
    """Returns `x`; the "derivatives" for `z` are samples, see `Samples`."""
    # Taken here: the backward pass need not hold on to the arrays.
    seen = tuple(look(lax.stop_gradient(y)) for y in (x, *operands))
    return _tapped(x, z, seen)


def nothing_seen(site: Site) -> Seen:
    """Returns the `z` of a site."""
    shape = (*site.lengths, 1 + min(site.size, _SAMPLE))
    return (jnp.zeros(shape),) * (2 + site.operands)


class Samples(NamedTuple):
    """The samples of a tap, on the host; arrays have one row for each run of a loop's body.

    Attributes:
        largest: The largest magnitude of the whole array.
        values: A sample of its numbers.
        cotangents: The derivatives there.
        operands: For a sum, what was added.
        weight: How many numbers each sample stands for.
    """

    largest: np.ndarray
    values: np.ndarray
    cotangents: np.ndarray
    operands: list[np.ndarray]
    weight: float

    @classmethod
    def read(cls, seen: Seen, size: int) -> "Samples":
        """Splits what is in place of derivatives."""
        count = min(size, _SAMPLE)
        rows = [np.asarray(x, np.float32).reshape(-1, 1 + count) for x in seen]
        values, *operands, cotangents = (x[:, 1:] for x in rows)
        return cls(rows[0][:, :1], values, cotangents, operands, size / count)

    def disturbance(self, name: str, scale: float = 1.0) -> float:
        """Returns the expected square of the change of the result if `values` are rounded.

        That is the sum of (cotangent * error)², if the errors of different numbers are
        independent. `scale` is the loss scale, for cotangents in f16.
        """
        error = self.error(name, self.values, scale)
        return self.weight * float(np.sum(np.square(self.cotangents * error)))

    def cancellation(self, name: str) -> float:
        """Returns the part of the disturbance by operands that a sum cancels.

        Where their errors exceed a quarter of the sum, the derivative at the exact value
        says little about the result.
        """
        errors = [np.square(self.error(name, x)) for x in self.operands]
        total = np.sum(errors, axis=0)
        lost = total > _LOST**2 * np.square(self.values)
        return self.weight * float(np.sum(np.square(self.cotangents) * total * lost))

    def error(self, name: str, x: np.ndarray, scale: float = 1.0) -> np.ndarray:
        """Returns the rounding errors of numbers; 0 beyond the range, judged apart.

        8-bit formats have one scale for the array, the smallest power of two with which
        all numbers fit, as in `mpx.recipes.CurrentScaling`.
        """
        form = FORMATS[name]
        with np.errstate(over="ignore", invalid="ignore"):
            if name in EIGHTS:
                least = np.where(self.largest > 0, self.largest, 1) / form.max
                part, exponent = np.frexp(least)
                factor = np.ldexp(np.float32(1), (part == 0.5) - exponent)
            else:
                factor = np.float32(scale if name == "f16" else 1.0)
            y = np.clip(x * factor, -form.max, form.max)
            error = y.astype(_DTYPES[name]).astype(np.float32) / factor - x
        return np.where(np.isfinite(error) & (np.abs(x * factor) < form.max), error, 0)


# --- The program and its sites --------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Study:
    """A gradient program and its sites.

    Attributes:
        groups: The groups of operations.
        program: The gradient of the function under `amp`, with labels.
        found: The visitor that collected the sites.
    """

    groups: list[Group]
    program: Program
    found: Sites
    _emulators: dict[str, Pieces] = dataclasses.field(default_factory=dict, init=False)

    @functools.cached_property
    def sites(self) -> list[Site]:
        """The sites, by number."""
        return sorted(self.found.sites.values(), key=lambda site: site.number)

    def _run(
        self, arrays: Sequence[Array], given: Mapping[int, object], rule: Rule
    ) -> list[Array]:
        """Returns loss and gradients, with a rule applied at each site."""
        visitor = dataclasses.replace(
            self.found, rule=rule, arrays=dict(given), carried=dict(self.found.carried)
        )
        return _run(self.program, visitor, arrays)

    @functools.cached_property
    def passes(self) -> Pieces:
        """The pass: samples of each site, by number, from arrays and a seed."""

        def rule(site: Site, x: Array, z: Seen, operands: tuple[Array, ...]) -> Array:
            return tap(x, z, operands)

        def run(arrays: Sequence[Array], seed: Array) -> dict[int, Seen]:
            given = {i: nothing_seen(site) for i, site in enumerate(self.sites)}
            outs, vjp = jax.vjp(lambda z: self._run(arrays, z, rule), given)
            scale = 1 / jnp.maximum(norm(outs[1:]), np.float32(1e-30))
            signs = [
                _signs(seed, np.int32(i), scale, x) for i, x in enumerate(outs[1:])
            ]
            (found,) = vjp([jnp.zeros_like(outs[0]), *signs])
            return found

        return Pieces(run, self.program.arrays, np.int32(0))

    def samples(self, arrays: Sequence[Array], seed: int) -> list[Samples]:
        """Returns the samples of each site, with random signs as cotangent."""
        read = jax.device_get(self.passes(arrays, np.int32(seed)))
        return [Samples.read(read[i], site.size) for i, site in enumerate(self.sites)]

    def emulate(
        self,
        arrays: Sequence[Array],
        half: str,
        low: Collection[int],
        *,
        alone: bool = False,
    ) -> list[Array]:
        """Returns loss and gradients with the groups `low` rounded; see `Key.rounds`.

        The 16-bit formats have the range of f32 here: range is judged apart.
        """
        given = {
            i: np.full(site.lengths, site.key.rounds(low, alone=alone))
            for i, site in enumerate(self.sites)
        }

        def rule(site: Site, x: Array, z: Array, operands: tuple[Array, ...]) -> Array:
            if site.key.kind not in ("out", "entry"):
                return x
            rounded = lax.reduce_precision(x, 8, FORMATS[half].mantissa)
            return jnp.where(z, rounded, x)

        if half not in self._emulators:
            self._emulators[half] = Pieces(
                lambda arrays, given: self._run(arrays, given, rule),
                self.program.arrays,
                given,
            )
        return self._emulators[half](arrays, given)


def _run(grad: Program, visitor: Sites, arrays: Sequence[Array]) -> list[Array]:
    body, consts = open_jaxpr(grad.jaxpr)
    outs, _ = visitor.run(body, consts, arrays, [Known()] * len(arrays), ())
    return [jnp.asarray(x, np.float32) for x in outs]


def study(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Study:
    """Traces a function and finds its sites."""
    forward, groups = labelled(func, args, kwargs)
    grad = gradient(forward)
    visitor, carried = Sites(groups=groups), None
    while visitor.carried != carried:
        # What is known of a loop's carry settles in one or two rounds.
        carried = dict(visitor.carried)
        visitor = Sites(groups=groups, carried=carried.copy())
        jax.make_jaxpr(functools.partial(_run, grad, visitor))(grad.arrays)
    return Study(groups, grad, visitor)


@apart
def _square(x: Array) -> Array:
    return jnp.sum(jnp.square(x.astype(np.float32)))


def norm(arrays: Sequence[Array]) -> Array:
    """Returns the norm of all numbers of some arrays."""
    return jnp.sqrt(sum(map(_square, arrays)))


def relative_change(grads: Sequence[Array], exact: Sequence[Array]) -> float:
    """Returns the norm of the difference from exact gradients, relative to their norm."""
    change = norm([x - y for x, y in zip(grads, exact, strict=True)])
    return float(change / norm(exact))


@apart
def _signs(
    seed: Array, i: Array | np.int32, scale: Array | np.floating, x: Array
) -> Array:
    """Returns an array like `x` of random signs times a scale.

    The signs are a hash of the position. They are the same however `x` is sharded, and
    compile in less time than those of `jax.random`.
    """
    strides = np.cumprod([1, *x.shape[:0:-1]], dtype=np.int64)[::-1] % 2**32
    place = sum(
        lax.broadcasted_iota(np.uint32, x.shape, axis) * np.uint32(stride)
        for axis, stride in enumerate(strides[: x.ndim])
    )
    start = _mixed(seed.astype(np.uint32) * np.uint32(0x9E3779B9) + _mixed(i + 1))
    odd = _mixed(_mixed(place + start) ^ start) >> np.uint32(31)
    signs = 1 - 2 * odd.astype(np.float32)
    return sharded_as((signs * scale).astype(x.dtype).reshape(x.shape), x)


def _mixed(x: ArrayLike) -> Array:
    """Returns a hash of numbers: the last step of MurmurHash3."""
    x = jnp.asarray(x, np.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x


def count_steps(jaxpr: Jaxpr) -> int:
    """Returns how many choices of a backward pass depend on a comparison of floats.

    In the body of a loop the comparison may be outside: there it is enough that there is one.
    """
    made = {var: eqn for eqn in equations(jaxpr) for var in eqn.outvars}
    compared = {
        eqn.outvars[0]
        for eqn in equations(jaxpr)
        if primitive_name(eqn) in _COMPARISONS
        and eqn.outvars[0].aval.ndim > 0  # one choice for a whole array is no step
        and any(str(x.aval.dtype) in _FLOATS for x in eqn.invars)
        and not _is_no_choice(eqn, made)
    }
    if not compared:
        return 0
    return sum(
        primitive_name(eqn) == "select_n"
        and eqn.invars[0].aval.ndim > 0
        and (eqn.invars[0] in compared or eqn.invars[0] not in made)
        for eqn in (here.eqn for here in walk(jaxpr) if here.backward)
    )


def _is_no_choice(eqn: Equation, made: Mapping[Hashable, Equation]) -> bool:
    """Returns whether a comparison has one outcome: logsumexp has some of that kind.

    It compares exponentials with zero, or anything with an infinity.
    """
    x, limit = eqn.invars
    if not isinstance(limit, Literal):
        return False
    if np.any(limit.val):
        return bool(np.all(np.isinf(limit.val)))
    while x in made:
        x, name = made[x].invars[0], primitive_name(made[x])
        if name == "exp":
            return True
        if name not in _POSITIVE or isinstance(x, Literal):
            return False
    return False


# --- Predictions ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Range:
    """The magnitudes that a group of operations holds in 16 bits.

    Attributes:
        largest: The largest one.
        lowest: The exponent of the first entry of `histogram`.
        histogram: How many numbers of a sample have which power of two; zeros are left out.
    """

    largest: float
    lowest: int
    histogram: tuple[int, ...]

    def below(self, limit: float) -> float:
        """Returns the share of the numbers, zeros left out, that are below a power of two."""
        total = sum(self.histogram)
        edge = int(np.floor(np.log2(limit))) - self.lowest
        return sum(self.histogram[: max(edge, 0)]) / total if total else 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class Predictions:
    """The change of the gradient by rounding, as squares relative to its norm.

    The square of a policy's error is the sum over the sites that round: see `Key.rounds`.

    Attributes:
        half: By 16-bit format and key.
        eight: By 8-bit format, group and whether it is the backward pass: the operands of
            its matmuls.
        doubt: By 16-bit format and group: the part that sums cancel.
        ranges: By group and whether it is the backward pass.
        scale: The loss scale for f16.
    """

    half: Mapping[tuple[str, Key], float]
    eight: Mapping[tuple[str, int, bool], float]
    doubt: Mapping[tuple[str, int], float]
    ranges: Mapping[tuple[int, bool], Range]
    scale: float

    def square(
        self,
        half: str,
        low: Collection[int],
        fp8: Collection[int] = (),
        *,
        alone: bool = False,
    ) -> float:
        """Returns the square of the relative gradient error of a policy.

        The groups `low` run in the format `half`, and the matmuls of those in `fp8` in fp8.
        """
        total = sum(
            square
            for (name, key), square in self.half.items()
            if name == half and key.rounds(low, alone=alone)
        )
        return total + sum(map(self.fp8, fp8))

    def fp8(self, group: int) -> float:
        """Returns the square for a group with values in e4m3 and gradients in e5m2."""
        values = self.eight.get(("e4m3", group, False), 0.0)
        return values + self.eight.get(("e5m2", group, True), 0.0)

    def error(self, name: str, groups: Collection[int]) -> float:
        """Returns the relative gradient error if some groups alone are rounded."""
        if name in EIGHTS:
            pairs = ((group, back) for group in groups for back in (False, True))
            return math.sqrt(sum(self.eight.get((name, *x), 0.0) for x in pairs))
        return math.sqrt(self.square(name, groups, alone=True))

    def share_of_doubt(self, name: str, group: int) -> float:
        """Returns the share of a prediction that passes through sums that cancel."""
        total = self.square(name, [group], alone=True)
        return min(1.0, self.doubt.get((name, group), 0.0) / total) if total else 0.0

    def overflows(self, group: int) -> bool:
        """Returns whether numbers of the forward pass leave the range of f16.

        A loss scale takes care of the backward pass.
        """
        found = self.ranges.get((group, False))
        return found is not None and found.largest > FORMATS["f16"].max

    def vanishing(self, group: int) -> float:
        """Returns the larger share of a group's numbers, by direction, that f16 makes 0."""
        limit = FORMATS["f16"].smallest / 2
        forward, backward = (self.ranges.get((group, x)) for x in (False, True))
        return max(
            forward.below(limit) if forward else 0.0,
            backward.below(limit / self.scale) if backward else 0.0,
        )

    def replaced(self, half: str, group: int, square: float) -> "Predictions":
        """Returns predictions with that of one group alone replaced, by a measurement."""
        before = self.square(half, [group], alone=True)
        factor = square / before if before else 1.0
        changed = {
            (name, key): x * factor if (name, key.group) == (half, group) else x
            for (name, key), x in self.half.items()
        }
        return dataclasses.replace(self, half=changed)


def predictions(
    found: Study, batches: Sequence[Sequence[Array]], tell: Tell
) -> Predictions:
    """Runs two passes over each batch and returns what they predict."""
    tell("tracing the passes")
    pieces = found.passes
    tell(f"compiling {pieces.distinct} pieces")
    pieces.prepare(batches[0], np.int32(0), tell=tell)
    every = []
    for i, arrays in enumerate(batches):
        for j in range(_PASSES):
            tell(f"pass {len(every) + 1} of {_PASSES * len(batches)}")
            every.append(found.samples(arrays, 17 * i + j))
    ranges = _ranges(found.sites, every)
    backward = [x.largest for (_, is_back), x in ranges.items() if is_back]
    scale = _loss_scale(max(backward, default=0.0))
    half: dict[tuple[str, Key], float] = collections.defaultdict(float)
    eight: dict[tuple[str, int, bool], float] = collections.defaultdict(float)
    doubt: dict[tuple[str, int], float] = collections.defaultdict(float)
    for samples in every:
        for site, sample in zip(found.sites, samples, strict=True):
            key, group, is_back = site.key, site.key.group, site.key.is_cotangent
            for name in HALVES:
                if key.kind == "sum":
                    doubt[name, group] += sample.cancellation(name) / len(every)
                elif key.kind != "eight":
                    square = sample.disturbance(name, scale if is_back else 1.0)
                    half[name, key] += square / len(every)
            if site.number in found.found.quantised:
                for name in EIGHTS:
                    square = sample.disturbance(name)
                    eight[name, group, is_back] += square / len(every)
    return Predictions(half, eight, doubt, ranges, scale)


def _loss_scale(largest: float) -> float:
    """Returns the scale at which dynamic scaling comes to rest, a power of two."""
    if largest <= 0 or not np.isfinite(largest):
        return 1.0
    fits = 2.0 ** np.floor(np.log2(FORMATS["f16"].max / largest))
    return float(min(fits, _MOST_SCALE))


def _ranges(
    sites: Sequence[Site], every: Sequence[Sequence[Samples]]
) -> dict[tuple[int, bool], Range]:
    largest: dict[tuple[int, bool], float] = collections.defaultdict(float)
    counts: dict[tuple[int, bool], np.ndarray] = {}
    for samples in every:
        for site, sample in zip(sites, samples, strict=True):
            if site.key.kind not in ("out", "entry"):
                continue
            key = site.key.group, site.key.is_cotangent
            largest[key] = max(largest[key], float(np.max(sample.largest)))
            _, exponent = np.frexp(sample.values[sample.values != 0])
            bins = np.clip(exponent - 1 - _LOWEST, 0, 127 - _LOWEST)
            new = np.bincount(bins, minlength=128 - _LOWEST)
            counts[key] = counts.get(key, 0) + new
    return {
        key: Range(largest[key], _LOWEST, tuple(map(int, count)))
        for key, count in counts.items()
    }
