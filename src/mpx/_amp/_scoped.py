"""Linen and Haiku models that are running: their variables live in a scope.

What a traced function writes there is a tracer, which must not be found later. So the
variables go in as arguments and come out as results, as in `nn.remat` and `hk.remat`.
Where that is not possible, writing is refused. Neither library is imported here: if no
model of it can run, there is nothing to do.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from mpx._amp._values import Role
from mpx._compat import is_tracer
from mpx._tree import LeafName


class LinenCall(NamedTuple):
    """A call of a method of a Linen module that is running.

    Attributes:
        method: The method, as a function of the module and the other arguments.
        module: The module.
        args: The other positional arguments.
    """

    method: Callable[..., Any]
    module: Any
    args: tuple[Any, ...]


def linen_call(func: Callable[..., Any], args: tuple[Any, ...]) -> LinenCall | None:
    """Returns the call of a method of a Linen module, if it is one and has variables."""
    owner = getattr(func, "__self__", None)
    if _is_running(func):
        return LinenCall(type(func).__call__, func, args)
    if _is_running(owner):
        return LinenCall(getattr(func, "__func__", func), owner, args)
    if args and _is_running(args[0]):
        return LinenCall(func, args[0], args[1:])
    return None


def _is_running(module: Any) -> bool:
    linen = sys.modules.get("flax.linen")
    return (
        linen is not None
        and isinstance(module, linen.Module)
        and module.scope is not None
    )


def call_linen(
    call: LinenCall, kwargs: dict[str, Any], run: Callable[..., tuple[Any, Any]]
) -> Any:
    """Calls a method of a Linen module as a pure function of its variables.

    Args:
        call: The call.
        kwargs: Its keyword arguments.
        run: Called as `run(pure, variables, rngs, args, kwargs)`, with the function
            and its arguments; returns what it returns.
    """
    lift = sys.modules["flax.core.lift"]
    linen = sys.modules["flax.linen"]

    def lifted(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def inner(
            scope_fn: Any,
            repack: Any,
            variables: Any,
            rngs: Any,
            *args: Any,
            **kwargs: Any,
        ) -> tuple[Any, Any]:
            def pure(
                variables: Any, rngs: Any, args: Any, kwargs: Any
            ) -> tuple[Any, Any]:
                scope = scope_fn(variables, rngs)
                return method(scope, *args, **kwargs), repack(scope)

            return run(pure, variables, rngs, args, kwargs)

        packed = lift.pack(
            inner, (True,), (True,), (True,), name="amp", enable_kwargs=True
        )
        return packed(*args, **kwargs)

    return linen.transforms.lift_direct_transform(
        lifted, (call.method,), call.module, *call.args, **kwargs
    )


def linen_name(name: LeafName, role: Role | None) -> tuple[LeafName, Role | None]:
    """Returns what the user calls an argument of the pure function.

    Args:
        name: Such as `variables/0/0/params/Dense_0/kernel`.
        role: Not used: the pure function itself has no arrays.

    Returns:
        `params/Dense_0/kernel`, and its role: a module owns its parameters.
    """
    del role
    if name.argument != "variables":
        return LeafName(name.path or name), None
    path = name.path.split("/", 2)[-1]
    return LeafName(path), "own" if path.startswith("params/") else None


@contextlib.contextmanager
def linen_is_not_written() -> Iterator[None]:
    """Refuses to leave tracers in the scope of a Linen model that is running.

    Raises:
        TypeError: If its variables have changed in the meantime.
    """
    before = {id(leaf) for leaf in _linen_variables()}
    yield
    if any(is_tracer(x) and id(x) not in before for x in _linen_variables()):
        raise TypeError(
            "A function under `amp` creates or changes variables of a Linen module that "
            "it closes over, but `amp` can only return those of the module that it is "
            "given. Wrap the loss, or `model.apply`, instead; or decorate a method of "
            "the module with `amp`."
        )


def _linen_variables() -> list[Any]:
    """Returns the arrays in the scope of the Linen model that is running."""
    module = sys.modules.get("flax.linen.module")
    stack = getattr(getattr(module, "_context", None), "module_stack", [])
    if not stack or not _is_running(stack[-1]):
        return []
    return jax.tree.leaves(dict(getattr(stack[-1].scope.root, "_variables", {})))


# --- Haiku ----------------------------------------------------------------------------


def in_haiku() -> bool:
    """Whether a function under `hk.transform` is running."""
    base = sys.modules.get("haiku._src.base")
    return base is not None and base.inside_transform()


def call_haiku(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    run: Callable[..., tuple[Any, Any]],
) -> Any:
    """Calls a function inside `hk.transform` as a pure one of Haiku's variables.

    Args:
        func: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        run: Called as `run(pure, variables, func, args, kwargs)`, with the function and
            its arguments; returns what it returns.
    """
    base = sys.modules["haiku._src.base"]
    stateful = sys.modules["haiku._src.stateful"]

    def pure(variables: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        with (
            stateful.temporary_internal_state(variables, share_python_state=True),
            base.push_jax_trace_level(),
        ):
            out = func(*args, **kwargs)
            return out, stateful.difference(variables, stateful.internal_state())

    out, changed = run(pure, stateful.internal_state(), func, args, kwargs)
    stateful.update_internal_state(changed)
    return out


def haiku_name(name: LeafName, role: Role | None) -> tuple[LeafName, Role | None]:
    """Returns what the user calls an argument of the pure function.

    Args:
        name: Such as `variables/params/linear/w`.
        role: Not used: the pure function itself has no arrays.

    Returns:
        `linear/w`, and its role: a module owns its parameters.
    """
    del role
    if name.startswith("variables/params/"):
        return LeafName(name.path.removeprefix("params/")), "own"
    own = name.argument == "func"
    return LeafName(name.path or name, name.types), "own" if own else None
