"""Linen and Haiku models that are running.

The variables of such a model live in a scope. A traced function would leave tracers there,
so those of Linen go in as arguments and come out as results, as in `nn.remat`. Where that is
not possible, writing is refused. Neither library is imported here.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator

import jax
from jaxtyping import PyTree

from mpx._jax._compat import is_tracer
from mpx._jax._private import private
from mpx._jax._tree import LeafName

Func = Callable[..., PyTree]
Run = Callable[..., tuple[PyTree, PyTree]]
Named = tuple[LeafName, bool]
"""The name of an argument's array, and whether it is a parameter."""


LinenCall = tuple[Func, tuple[PyTree, ...]]
"""A method of a Linen module; the module and the other positional arguments."""


def linen_call(func: Func, args: tuple[PyTree, ...]) -> LinenCall | None:
    """Returns the call of a method of a Linen module, if it is one and has variables."""
    owner = getattr(func, "__self__", None)
    if _is_running(func):
        return type(func).__call__, (func, *args)
    if _is_running(owner):
        return getattr(func, "__func__", func), (owner, *args)
    return (func, args) if args and _is_running(args[0]) else None


def _is_running(module: PyTree) -> bool:
    linen = sys.modules.get("flax.linen")
    is_module = linen is not None and isinstance(module, linen.Module)
    return is_module and module.scope is not None


def call_linen(call: LinenCall, kwargs: dict[str, PyTree], run: Run) -> PyTree:
    """Calls a Linen method by `run(pure, variables, rngs, args, kwargs)`."""
    flax, (method, args) = private("linen"), call
    if flax is None:
        return method(*args, **kwargs)

    def lifted(method: Func, *args: PyTree, **kwargs: PyTree) -> PyTree:
        def inner(
            scope_fn: Func, repack: Func, *given: PyTree, **kwargs: PyTree
        ) -> PyTree:
            variables, rngs, *args = given

            def pure(
                variables: PyTree, rngs: PyTree, args: PyTree, kwargs: PyTree
            ) -> PyTree:
                scope = scope_fn(variables, rngs)
                return method(scope, *args, **kwargs), repack(scope)

            return run(pure, variables, rngs, tuple(args), kwargs)

        every = ((True,),) * 3
        packed = flax.pack(inner, *every, name="amp", enable_kwargs=True)
        return packed(*args, **kwargs)

    return flax.lift_direct_transform(lifted, (method,), *args, **kwargs)


def linen_name(name: LeafName, is_param: bool) -> Named:
    """Returns `params/Dense_0/kernel`, a parameter, for `variables/0/0/params/…`."""
    del is_param  # other arguments of a method are none
    if name.argument != "variables":
        return LeafName(name.path or name), False
    path = name.path.split("/", 2)[-1]
    return LeafName(path), path.startswith("params/")


@contextlib.contextmanager
def linen_is_not_written() -> Iterator[None]:
    """Refuses to leave tracers in the scope of a Linen model that is running."""
    before = {id(leaf) for leaf in _linen_variables()}
    yield
    if any(is_tracer(x) and id(x) not in before for x in _linen_variables()):
        raise TypeError(
            "A function under `amp` creates or changes variables of a Linen module that "
            "it closes over, but `amp` can only return those of the module that it is "
            "given. Wrap the loss, or `model.apply`, instead; or decorate a method of "
            "the module with `amp`."
        )


def _linen_variables() -> list[PyTree]:
    """Returns the arrays in the scope of the Linen model that is running."""
    if "flax.linen" not in sys.modules or (flax := private("linen_variables")) is None:
        return []
    stack = getattr(flax._context, "module_stack", [])
    if not stack or not _is_running(stack[-1]):
        return []
    return jax.tree.leaves(dict(getattr(stack[-1].scope.root, "_variables", {})))


def refuse_haiku() -> None:
    """Raises inside `hk.transform`, where a traced function would leave its tracers."""
    running = getattr(sys.modules.get("haiku"), "running_init", None)
    if running is None:
        return
    with contextlib.suppress(ValueError):  # outside
        running()
        raise TypeError(
            "`amp` and `fp8` cannot be used inside `hk.transform`. Wrap the loss, or the "
            "`apply` of the transformed function, instead."
        )
