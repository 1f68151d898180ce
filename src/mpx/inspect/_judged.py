"""A function that has been judged: its groups, their predictions and their costs."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mpx._amp._call import flat_call
from mpx._casting._wrapped import is_amp
from mpx._fp8 import Fp8Function, fp8
from mpx._jax._progress import Tell, silent
from mpx.inspect._groups import Group
from mpx.inspect._policies import Cost, costs
from mpx.inspect._predictions import Predictions, predictions
from mpx.inspect._program import program
from mpx.inspect._sensitivity import Study, study

_ROUNDING = ("out", "entry")


class Judged(NamedTuple):
    """A function, its predictions and its costs.

    Attributes:
        study: The program and its sites.
        predicted: The predictions.
        work: The cost of each group.
        fp8: The groups whose matmuls `fp8` would change.
        arrays: The arguments.
    """

    study: Study
    predicted: Predictions
    work: list[Cost]
    fp8: frozenset[int]
    arrays: list[Any]

    @property
    def groups(self) -> list[Group]:
        """The groups."""
        return self.study.groups

    @property
    def active(self) -> set[int]:
        """The groups that `amp` runs in 16 bits."""
        return {x.key.group for x in self.study.sites if x.key.kind in _ROUNDING}


def judge(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batches: Sequence[Any] = (),
    tell: Tell = silent,
) -> Judged:
    """Traces a function and runs the passes; there are `steps(batches)` steps to tell."""
    if is_amp(func) or isinstance(func, Fp8Function):
        raise TypeError(
            "The function is under `amp` or `fp8`, but what they would do is what is "
            "predicted. Pass the function that you gave to them."
        )
    tell("tracing the function")
    found = study(func, args, kwargs)
    calls = [found.program.arrays]
    names = [found.program.names[i] for i in found.program.params]
    first = args[:1] if any(name.argument for name in names) else ()
    for i, batch in enumerate(batches):
        rest = batch if isinstance(batch, tuple) else (batch,)
        if len(first) + len(rest) != len(args):
            after = " after the first, which holds the parameters" if first else ""
            raise ValueError(
                f"`batches[{i}]` must have {len(args) - len(first)} arguments{after}, but "
                f"it has {len(rest)}. Pass a tuple."
            )
        calls.append(flat_call(func, (*first, *rest), kwargs)[0])
    if any(not hasattr(x, "__array__") for call in calls for x in call):
        raise TypeError(
            "`advise` and `tune` run the function, but a `jax.ShapeDtypeStruct` was given. "
            "Pass arrays with real numbers."
        )
    _check_shapes(calls)
    predicted = predictions(found, calls, tell=tell)
    tell("tracing fp8")
    work = costs(found.program, len(found.groups))
    return Judged(found, predicted, work, _in_fp8(func, args, kwargs, found), calls[0])


def steps(batches: Sequence[Any]) -> int:
    """Returns how many steps `judge` tells of."""
    return 4 + 2 * (1 + len(batches))


def _check_shapes(calls: Sequence[Sequence[Any]]) -> None:
    first, *others = ([(x.shape, x.dtype) for x in call] for call in calls)
    for i, other in enumerate(others):
        if other != first:
            pairs = zip(first, other, strict=False)
            a, b = next((pair for pair in pairs if pair[0] != pair[1]), (None, None))
            raise ValueError(
                f"`batches[{i}]` must have the shapes and dtypes of the other arguments, "
                f"but one array is {b} instead of {a}. Pass batches of one size."
            )


def _in_fp8(
    func: Callable[..., Any], args: Any, kwargs: Any, found: Study
) -> frozenset[int]:
    matmuls = program(fp8(func), args, kwargs).recording.matmuls
    names = {matmul.param for matmul in matmuls if not matmul.reason}
    return frozenset(i for i, x in enumerate(found.groups) if x.param in names)
