"""Modules that run in f32 although the function around them runs in 16 bits.

A pytree cannot carry that: a module of another class is a tree of another structure,
which `jax.tree.map` and `eqx.combine` refuse beside the original. So the `__call__` of
the kept classes is replaced while a function runs, and put back afterwards. The types
are part of the cache key of `jax.jit`: what is traced here is not reused elsewhere.
"""

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from mpx._cast import call_in_full_precision
from mpx._compat import make_jit_context

# The types that run in f32 in this thread. In another one the replaced calls do nothing.
_types = make_jit_context(())

_lock = threading.Lock()
_users: dict[type, int] = {}  # how many running functions replaced the call of a class
_called: "weakref.WeakSet[type]" = weakref.WeakSet()


@contextlib.contextmanager
def run_in_full_precision(types: tuple[type, ...]) -> Iterator[None]:
    """Lets callables of these types run in f32, wherever they are called in the block.

    Their inputs are widened, and their results come back in the widest dtype among
    their floating inputs, as with `mpx.force_full_precision`.
    """
    classes = _with_own_calls(types)
    with _lock:
        for cls in classes:
            _users[cls] = _users.get(cls, 0) + 1
            if _users[cls] == 1:
                _replace_call(cls)
    try:
        with _types(types):
            yield
    finally:
        with _lock:
            for cls in classes:
                _users[cls] -= 1
                if _users[cls] == 0:
                    del _users[cls]
                    _restore_call(cls)


def ran_in_full_precision(kept: type) -> bool:
    """Whether an object of this type has ever been called in such a block."""
    return any(issubclass(cls, kept) for cls in _called)


def _with_own_calls(types: tuple[type, ...]) -> list[type]:
    """Returns the types that can be called, and their subclasses with other calls."""
    found: dict[type, None] = {}

    def add(cls: type) -> None:
        for subclass in cls.__subclasses__():
            if subclass not in found and "__call__" in vars(subclass):
                found[subclass] = None
            add(subclass)

    for cls in types:
        # Of a class whose objects cannot be called this is the call of its metaclass.
        if inspect.isfunction(getattr(cls, "__call__", None)):  # noqa: B004
            found[cls] = None
        if cls not in (object, type) and cls.__module__ != "builtins":
            add(cls)
    return [cls for cls in found if inspect.isfunction(getattr(cls, "__call__"))]  # noqa: B004, B009


_SAVED = "_mpx_saved_call"  # the class's own `__call__`, or `None` if it inherits one


def _replace_call(cls: type) -> None:
    call = getattr(cls, "__call__")  # noqa: B004, B009

    @functools.wraps(call)
    def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, _types.value):
            return call(self, *args, **kwargs)
        _called.add(type(self))
        bound = functools.partial(call, self)
        return call_in_full_precision(bound, args, kwargs)

    setattr(cls, _SAVED, vars(cls).get("__call__"))
    setattr(cls, "__call__", replacement)  # noqa: B010


def _restore_call(cls: type) -> None:
    own = vars(cls)[_SAVED]
    delattr(cls, _SAVED)
    if own is None:
        delattr(cls, "__call__")
    else:
        setattr(cls, "__call__", own)  # noqa: B010
