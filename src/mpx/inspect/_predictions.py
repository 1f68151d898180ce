"""Predictions: the gradient error of any policy, from the samples of two passes."""

import collections
import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from mpx._jax._formats import FORMATS
from mpx._jax._progress import Tell, silent
from mpx.inspect._groups import Group
from mpx.inspect._keys import Key, Site
from mpx.inspect._rounding import EIGHTS, HALVES, Samples
from mpx.inspect._sensitivity import Study

MOST_SCALE = 2.0**24
"""The ceiling of `mpx.DynamicLossScaling.pow2()`."""
_LOWEST = -60

K = TypeVar("K")


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


class _Sums:
    """Sums over sites, batches and passes."""

    def __init__(self) -> None:
        self.half: dict[tuple[str, Key], float] = collections.defaultdict(float)
        self.eight: dict[tuple[str, int], float] = collections.defaultdict(float)
        self.recipe: dict[int, float] = collections.defaultdict(float)
        self.doubt: dict[tuple[str, int], float] = collections.defaultdict(float)

    def add(self, found: Study, samples: Sequence[Samples], scale: float) -> None:
        for site, sample in zip(found.sites, samples, strict=True):
            self._add(site, sample, scale, site.number in found.found.quantised)

    def _add(self, site: Site, sample: Samples, scale: float, is_eight: bool) -> None:
        key, group = site.key, site.key.group
        for name in HALVES:
            if key.kind == "sum":
                self.doubt[name, group] += sample.cancellation(name)
            elif key.kind != "eight":
                factor = scale if key.is_cotangent else 1.0
                self.half[name, key] += sample.disturbance(name, factor)
        if is_eight:
            for name in EIGHTS:
                self.eight[name, group] += sample.disturbance(name)
            name = "e5m2" if key.is_cotangent else "e4m3"
            self.recipe[group] += sample.disturbance(name)


@dataclasses.dataclass(frozen=True, eq=False)
class Predictions:
    """What rounding does to the gradient, as squares relative to its norm.

    The square of a policy's error is the sum over the sites that round: see `Key.rounds`.

    Attributes:
        groups: The groups.
        half: By 16-bit format and key.
        eight: By 8-bit format and group: the operands of its matmuls.
        recipe: By group: the same with values in e4m3 and gradients in e5m2.
        doubt: By 16-bit format and group: the part that sums cancel.
        ranges: By group and whether it is the backward pass.
        scale: The loss scale for f16.
    """

    groups: Sequence[Group]
    half: Mapping[tuple[str, Key], float]
    eight: Mapping[tuple[str, int], float]
    recipe: Mapping[int, float]
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

        Args:
            half: The 16-bit format.
            low: The groups that run in it.
            fp8: Those of them whose matmuls run in fp8.
            alone: See `Key.rounds`.
        """
        total = sum(
            square
            for (name, key), square in self.half.items()
            if name == half and key.rounds(low, alone=alone)
        )
        return total + sum(self.recipe.get(group, 0.0) for group in fp8)

    def error(self, name: str, groups: Collection[int]) -> float:
        """Returns the relative gradient error if some groups alone are rounded."""
        if name in EIGHTS:
            return math.sqrt(sum(self.eight.get((name, x), 0.0) for x in groups))
        return math.sqrt(self.square(name, groups, alone=True))

    def share_of_doubt(self, name: str, group: int) -> float:
        """Returns the share of a prediction that passes through sums that cancel."""
        total = self.square(name, [group], alone=True)
        return min(1.0, self.doubt.get((name, group), 0.0) / total) if total else 0.0

    def overflows(self, group: int) -> bool:
        """Returns whether numbers of a group leave the range of f16.

        A loss scale takes care of the backward pass, unless both ends do not fit.
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
    found: Study,
    batches: Sequence[Sequence[Any]],
    passes: int = 2,
    tell: Tell = silent,
) -> Predictions:
    """Runs the passes over each batch and returns what they predict.

    Args:
        found: The program and its sites.
        batches: The arrays of each call.
        passes: How many random cotangents each batch is pulled back with.
        tell: Is told of each step.
    """
    found.prepare(batches[0], tell)
    every = []
    for i, arrays in enumerate(batches):
        for j in range(passes):
            tell(f"pass {len(every) + 1} of {passes * len(batches)}")
            every.append(found.samples(arrays, 17 * i + j))
    ranges = _ranges(found.sites, every)
    backward = [x.largest for (_, is_back), x in ranges.items() if is_back]
    scale, sums = _loss_scale(max(backward, default=0.0)), _Sums()
    for samples in every:
        sums.add(found, samples, scale)
    return Predictions(
        groups=found.groups,
        half=_means(sums.half, len(every)),
        eight=_means(sums.eight, len(every)),
        recipe=_means(sums.recipe, len(every)),
        doubt=_means(sums.doubt, len(every)),
        ranges=ranges,
        scale=scale,
    )


def _means(sums: Mapping[K, float], count: int) -> dict[K, float]:
    return {key: total / count for key, total in sums.items()}


def _loss_scale(largest: float) -> float:
    """Returns the scale at which dynamic scaling comes to rest, a power of two."""
    if largest <= 0 or not np.isfinite(largest):
        return 1.0
    fits = 2.0 ** np.floor(np.log2(FORMATS["f16"].max / largest))
    return float(min(fits, MOST_SCALE))


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
