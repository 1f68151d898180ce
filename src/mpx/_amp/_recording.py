"""Recordings of what transformations find and decide while a function is traced."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from mpx._amp._facts import Decision
from mpx._amp._frameworks import Named
from mpx._amp._policy import AmpRules
from mpx._jax._compat import make_jit_context

# Part of the cache key of `jax.jit`: a function that was traced before is traced again.
_current = make_jit_context(None)


@dataclasses.dataclass(eq=False)
class Recording:
    """What happened while a function was traced.

    Attributes:
        names: The names and roles of arrays that were arguments, by their `id`.
        casts: The compute dtype and the rules of each call of a function under `amp`.
        decisions: The decisions of these.
        matmuls: The matmuls that functions under `fp8` met.
        recipes: The recipe of each call of a function under `fp8`.
    """

    names: dict[int, Named] = dataclasses.field(default_factory=dict)
    casts: list[tuple[Any, AmpRules]] = dataclasses.field(default_factory=list)
    decisions: list[Decision] = dataclasses.field(default_factory=list)
    matmuls: list[Any] = dataclasses.field(default_factory=list)
    recipes: list[Any] = dataclasses.field(default_factory=list)

    def name(self, named: Sequence[Named], arrays: Sequence[Any]) -> None:
        """Remembers the names of arrays; the first name of an array counts."""
        for name, array in zip(named, arrays, strict=True):
            self.names.setdefault(id(array), name)


def current_recording() -> Recording | None:
    """Returns the recording that is being made, if one is."""
    return _current.value


@contextlib.contextmanager
def recorded() -> Iterator[Recording]:
    """Records what happens inside."""
    recording = Recording()
    with _current(recording):
        yield recording
