"""Leaves and calls of modules that stay in full precision while the rest is cast.

A pytree cannot say that a module runs in f32: a module of another class has another
structure. So the `__call__` of the kept classes is replaced while a function runs. The
types are part of the cache key of `jax.jit`: what is traced here is not reused elsewhere.
"""

import contextlib
import contextvars
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from mpx._casting._cast import (
    call_in_full_precision,
    keeps_its_dtypes,
    map_floating,
)
from mpx._casting._context import arguments_cast_to, layers
from mpx._casting._select import Matcher, Selector
from mpx._jax._compat import ambient_scopes, make_jit_context
from mpx._jax._nnx import is_variable_of_state, nnx_module
from mpx._jax._tree import LeafName, cast_leaf, is_floating

_HAIKU_NORMS = ("BatchNorm", "GroupNorm", "InstanceNorm", "LayerNorm", "RMSNorm")
_STATE_TYPES = (eqx.nn.State, eqx.nn.StateIndex)


def is_statistic(name: str) -> bool:
    """Returns whether a name is that of an array in `batch_stats` of Flax Linen."""
    return "/batch_stats/" in f"/{name}/"


def is_state(name: LeafName) -> bool:
    """Returns whether a leaf belongs to running statistics, which 16 bits would stop."""
    return is_statistic(name) or any(
        issubclass(x, _STATE_TYPES) or is_variable_of_state(x) or keeps_its_dtypes(x)
        for x in name.types
    )


def _always_kept() -> tuple[type, ...]:
    """Returns the layers that run in f32 without a selector."""
    types: list[type] = [eqx.nn.BatchNorm, eqx.nn.SpectralNorm]
    nnx = nnx_module()
    if nnx is not None:
        # The last two assign to their weights, which must not be rounded for that.
        types += [nnx.BatchNorm, nnx.SpectralNorm, nnx.WeightNorm]
    # Norms of Equinox and Flax take their statistics in f32 by themselves, those of
    # Haiku do not: where an f16 variance is zero, the derivative of `rsqrt` at the epsilon
    # of 1e-5 is 1.6e7, infinite in f16, and the gradient nan at any loss scale.
    haiku = sys.modules.get("haiku")
    types.extend(getattr(haiku, name) for name in _HAIKU_NORMS if hasattr(haiku, name))
    return tuple(types)


class Keep:
    """Leaves and calls that a policy keeps during one call."""

    def __init__(self, selectors: tuple[Selector, ...], dtype: np.dtype) -> None:
        """Prepares the selectors for a cast to `dtype`."""
        self._dtype, self._selected = dtype, Matcher(selectors, "keep")
        self._always, self._called = _always_kept(), set[type]()

    def cast(self, tree: PyTree, argument: str = "") -> PyTree:
        """Casts a tree to the compute dtype, except what is kept."""
        return map_floating(self.cast_leaf, tree, argument)

    def cast_leaf(self, name: LeafName, leaf: PyTree) -> PyTree:
        """Casts a leaf, unless it is kept or no floating one."""
        is_cast = is_floating(leaf) and not self.keeps(name, leaf)
        return cast_leaf(leaf, self._dtype) if is_cast else leaf

    def keeps(self, name: LeafName, leaf: PyTree) -> bool:
        """Returns whether a function gets a floating leaf as it is."""
        selected = self._selected.find(name, leaf) is not None
        always = any(issubclass(kind, self._always) for kind in name.types)
        return selected or always or is_state(name)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Marks cast arguments; modules of kept types run as by `force_full_precision`."""
        chosen = [x for x in self._selected.selectors if isinstance(x, type)]
        types = (*chosen, *self._always)
        token = _called.set((*_called.get(), self._called))
        try:
            with calls_marked(types, _in_f32), arguments_cast_to(self._dtype):
                yield
        finally:
            _called.reset(token)

    def check(self, func: Callable[..., PyTree]) -> None:
        """Raises for selectors that have selected nothing in the call of `func`."""
        called = self._called
        if not any(map(_has_call, self._selected.kinds)):
            # Modules of Linen and Haiku are no arguments. What a jitted function calls is
            # seen once, when it is traced, so calls of the same code count.
            *_, inner = layers(func)
            code = getattr(inner, "__code__", type(inner))
            called = _calls_of.setdefault(code, set())
            called |= self._called
        self._selected.check(lambda kept: any(issubclass(x, kept) for x in called))


# --- Calls of modules -----------------------------------------------------------------

# Scopes of mpx: their names are none that a user would give to a scope.
KEPT_SCOPE = "mpx.keep:"  # before the name of a type whose calls run as written
STOP_SCOPE = "mpx.amp_stop"
FP8_SCOPE = "mpx.fp8"  # around what `fp8` makes of a matmul

# The types that run in f32, or in a scope for `amp` and `fp8`, in this thread. In another
# one the replaced calls do nothing.
_in_f32, _in_scope = make_jit_context(()), make_jit_context(())
# Whether `amp_stop` is around: what `jax.jit` traces does not see the scopes around its call.
_stopped = make_jit_context(False)

_lock = threading.Lock()
_users: dict[type, int] = {}  # how many running functions replaced the call of a class
_own_calls: dict[type, PyTree] = {}  # what these classes define, `None` if they inherit
_calls_of: "weakref.WeakKeyDictionary[Any, set[type]]" = weakref.WeakKeyDictionary()


# For each block of this thread, the types of which an object was called there.
_called = contextvars.ContextVar[tuple[set[type], ...]]("called", default=())


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    """Keeps autocast out of what runs inside."""
    with jax.named_scope(STOP_SCOPE), _stopped(True):
        yield


def scopes_around() -> tuple[str, ...]:
    """Returns the scopes around the running code, also `amp_stop` outside of `jax.jit`."""
    return (STOP_SCOPE,) * _stopped.value + ambient_scopes()


@contextlib.contextmanager
def calls_marked(types: tuple[type, ...], mark: Any = _in_scope) -> Iterator[None]:
    """Lets callables of these types run in a scope for `amp` and `fp8`, or in f32."""
    classes = _with_own_calls(types)
    with _lock:
        for cls in classes:
            _users[cls] = _users.get(cls, 0) + 1
            if _users[cls] == 1:
                _own_calls[cls] = vars(cls).get("__call__")
                _replace_call(cls)
    try:
        with mark(types):
            yield
    finally:
        with _lock:
            for cls in classes:
                _users[cls] -= 1
                if _users[cls] == 0:
                    del _users[cls]
                    if (own := _own_calls.pop(cls)) is None:
                        delattr(cls, "__call__")
                    else:
                        setattr(cls, "__call__", own)  # noqa: B010


def _with_own_calls(types: tuple[type, ...]) -> list[type]:
    """Returns the types that can be called, and their subclasses with other calls."""
    found, waiting = dict.fromkeys(types), [*types]
    while waiting:
        cls = waiting.pop()
        if cls not in (object, type) and cls.__module__ != "builtins":
            waiting += cls.__subclasses__()
        if "__call__" in vars(cls):
            found[cls] = None
    return [cls for cls in found if _has_call(cls)]


def _has_call(cls: type) -> bool:
    """Returns whether objects of a class can be called, not only the class itself."""
    return inspect.isfunction(getattr(cls, "__call__", None))  # noqa: B004


def _replace_call(cls: type) -> None:
    call = getattr(cls, "__call__")  # noqa: B004, B009

    @functools.wraps(call)
    def replacement(self: object, *args: PyTree, **kwargs: PyTree) -> PyTree:
        bound = functools.partial(call, self)
        scope = next((x for x in _in_scope.value if isinstance(self, x)), None)
        in_f32 = isinstance(self, _in_f32.value)
        if scope is not None:
            bound = jax.named_scope(KEPT_SCOPE + scope.__name__)(bound)
        if in_f32:
            for called in _called.get():
                called.add(type(self))
            return call_in_full_precision(bound, args, kwargs)
        return bound(*args, **kwargs)

    setattr(cls, "__call__", replacement)  # noqa: B010
