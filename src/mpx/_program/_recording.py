"""What happens while a function is traced, for reports of it."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import PyTree

from mpx._jax._compat import amp_recording
from mpx._jax._frameworks import Named


class Decision(NamedTuple):
    """One equation and the precision in which it runs; `AmpView` describes the fields."""

    primitive: str
    rule: str
    reason: str
    scope: str
    source: str
    params: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    flops: int


class Residual(NamedTuple):
    """An array that `amp(residuals=...)` keeps for the backward pass."""

    shape: tuple[int, ...]
    dtype: str  # as the forward pass computes it
    format: str  # in which it is kept: `int8`, `e4m3`, or a dtype
    reason: str  # why it is not coded; "" if it is
    source: str  # file and line


@dataclasses.dataclass(eq=False)
class Recording:
    """What happened while a function was traced."""

    # The names and roles of arrays that were arguments, by their `id`
    names: dict[int, Named] = dataclasses.field(default_factory=dict)
    # The compute dtype and the rules of each call of a function under `amp`
    casts: list[tuple[np.dtype, PyTree]] = dataclasses.field(default_factory=list)
    # The decisions of these
    decisions: list[Decision] = dataclasses.field(default_factory=list)
    # The arguments that were taken for the parameters where others may hold them
    guessed: list[str] = dataclasses.field(default_factory=list)
    # The matmuls that functions under `fp8` met, and the recipe of each call of one
    matmuls: list[PyTree] = dataclasses.field(default_factory=list)
    # What functions under `amp(residuals=...)` keep for the backward pass
    residuals: list[Residual] = dataclasses.field(default_factory=list)
    recipes: list[PyTree] = dataclasses.field(default_factory=list)


def current_recording() -> Recording | None:
    """Returns the recording that is being made, if one is."""
    return amp_recording.value


@contextlib.contextmanager
def recorded() -> Iterator[Recording]:
    """Records what happens inside; functions that were traced before are traced again."""
    recording = Recording()
    with amp_recording(recording):
        yield recording
