"""Functions under `amp` and `fp8` inside others (jit, checkpoint, partial), and signatures."""

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence

import equinox as eqx
import numpy as np
from jaxtyping import PyTree

from mpx._jax._formats import short_name


def _layers(func: PyTree) -> Iterator[PyTree]:
    """Yields a function and what it wraps (jit, checkpoint, partial), inwards."""
    seen: set[int] = set()
    while func is not None and id(func) not in seen:
        seen.add(id(func))
        yield func
        is_partial = isinstance(func, functools.partial | eqx.Partial)
        func = func.func if is_partial else getattr(func, "__wrapped__", None)


def is_amp(func: Callable[..., PyTree]) -> bool:
    """Returns whether a function is under `amp`, and so casts by itself."""
    return autocast_of(func) is not None


def autocast_of(func: Callable[..., PyTree]) -> Callable[[], PyTree] | None:
    """Returns what makes the visitor of a function under `amp`, `None` of others."""
    found = (getattr(layer, "mpx_autocast", None) for layer in _layers(func))
    return next(filter(None, found), None)


def is_fp8(func: Callable[..., PyTree]) -> bool:
    """Returns whether a function is under `fp8`."""
    return any(hasattr(layer, "mpx_has_scales") for layer in _layers(func))


_cast_to: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "cast_to", default=None
)


@contextlib.contextmanager
def arguments_cast_to(dtype: np.dtype) -> Iterator[None]:
    """Marks the time in which a function runs on arguments that a policy has cast."""
    token = _cast_to.set(short_name(dtype) if dtype.itemsize == 2 else None)
    try:
        yield
    finally:
        _cast_to.reset(token)


def refuse_cast_arguments() -> None:
    """Raises if `amp` is called where a policy has cast the arguments to 16 bits.

    `amp` casts operation by operation and needs the parameters as they are.
    """
    if _cast_to.get() is not None:
        raise ValueError(
            "`amp` was called inside a function whose arguments a policy casts to "
            f"{_cast_to.get()}, so that both would round them. Put the whole loss under "
            "`amp`, `mpx.value_and_grad(mpx.amp(loss))`; or pass "
            '`policy="f32"`, so that only `amp` casts.'
        )


def has_scales(func: Callable[..., PyTree]) -> bool:
    """Returns whether a function is under `fp8` with delays: an `Fp8State` comes first."""
    return any(getattr(layer, "mpx_has_scales", False) for layer in _layers(func))


def take_scales(
    func: Callable[..., PyTree], args: Sequence[PyTree]
) -> tuple[PyTree, Sequence[PyTree]]:
    """Splits off the `Fp8State` that a function with delayed scaling takes first."""
    if not has_scales(func):
        return None, args
    if any(
        layer.args
        for layer in _layers(func)
        if isinstance(layer, functools.partial | eqx.Partial)
    ):
        raise TypeError(
            "A `partial` has bound the first arguments of a function under `fp8` with "
            "`DelayedScaling`, of which the first is its `Fp8State`. Pass that after the "
            "loss scaling at each call, and bind others by keyword."
        )
    if not args or not hasattr(args[0], "amaxes"):
        found = type(args[0]).__name__ if args else "nothing"
        raise TypeError(
            "A function under `fp8` with `DelayedScaling` takes an `Fp8State` after the "
            f"loss scaling, but {found} was given. Make one with `.init(*args)`."
        )
    return args[0], args[1:]


def original(func: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Returns the function whose arguments come after the `Fp8State`."""
    delayed = [x for x in _layers(func) if getattr(x, "mpx_has_scales", False)]
    return delayed[-1].func if delayed else func


def argument_names(func: Callable[..., PyTree], count: int) -> list[str]:
    """Returns the names of the positional parameters, for paths in rules and errors."""
    parameters = _parameters(func)
    positional = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    names = [item.name for item in parameters if item.kind in positional][:count]
    taken = {item.name for item in parameters}
    for number in range(len(names), count):
        names.append(_unused(f"arg{number}", taken))
    return names


def _parameters(func: Callable[..., PyTree]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(func).parameters.values())
    except (TypeError, ValueError):
        return []


def _unused(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name


def signature_after(first: str, func: Callable[..., PyTree]) -> inspect.Signature:
    """Returns the signature of `func` with one more argument before the others."""
    parameters = _parameters(func) or [
        inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
        inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
    ]
    name = _unused(first, {item.name for item in parameters})
    before = inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY)
    return inspect.Signature([before, *parameters])


def hide_signature(wrapper: Callable[..., PyTree]) -> None:
    """Undoes `functools.wraps` where the wrapper takes one argument more."""
    for name in ("__wrapped__", "__signature__"):
        vars(wrapper).pop(name, None)
