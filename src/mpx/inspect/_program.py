"""Traced programs for inspection: the forward pass of a call, and its gradient."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpx._amp._call import Recording, flat_call, recorded
from mpx._amp._transform import under_amp
from mpx._casting._half import gradient_function
from mpx._fp8._state import Fp8State
from mpx._fp8._transform import Fp8Function
from mpx._gradients._call import argument_names
from mpx._jax._compat import as_function, eval_jaxpr
from mpx._jax._tree import LeafName, is_floating
from mpx._program._interpreter import Fact, Jaxpr, Outcome, Scopes, Transformation
from mpx._scaling._loss_scaling import LossScaling

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class Program(NamedTuple):
    """A function of arrays that has been traced.

    Attributes:
        jaxpr: The jaxpr, closed; its inputs are `arrays`.
        arrays: The arguments, or their shapes.
        names: Their names, such as `model/layers/0/weight`.
        params: The positions of the arguments that are parameters: the floating arrays
            of the function itself if it is a module, else those of the first argument
            that is no loss scaling and no state of fp8.
        recording: What `amp` and `fp8` decided.
    """

    jaxpr: Jaxpr
    arrays: list[Any]
    names: list[LeafName]
    params: list[int]
    recording: Recording

    @property
    def known(self) -> list[str | None]:
        """The name of each argument that is a parameter; `None` for the others."""
        return [name if i in self.params else None for i, name in enumerate(self.names)]

    @property
    def has_loss(self) -> bool:
        """Whether the first result is a floating scalar."""
        loss = self.jaxpr.out_avals[0] if self.jaxpr.out_avals else None
        return (
            loss is not None
            and loss.shape == ()
            and jnp.issubdtype(loss.dtype, np.floating)
        )

    @property
    def made(self) -> list[str | None]:
        """The parameter whose gradient each result is; `None` for other results.

        Consecutive results that have the shapes of all parameters are taken for their
        gradients, whoever computes these.
        """
        names: list[str | None] = [self.names[i] for i in self.params]
        wanted = [tuple(self.arrays[i].shape) for i in self.params]
        shapes = [tuple(getattr(x, "shape", ())) for x in self.jaxpr.out_avals]
        found: list[str | None] = [None] * len(shapes)
        for start in range(len(shapes) - len(wanted) + 1):
            if names and shapes[start : start + len(wanted)] == wanted:
                found[start : start + len(wanted)] = names
                break
        return found

    def __call__(self, *arrays: Any) -> list[Any]:
        """Runs the program on other arrays of the same shapes."""
        return as_function(self.jaxpr)(*arrays)


class _AsWritten(Transformation):
    """Runs a function as it is."""

    def run(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        args: Sequence[Any],
        facts: Sequence[Fact],
        scopes: Scopes,
    ) -> Outcome:
        outs = eval_jaxpr(jaxpr, consts, *args)
        return outs, [None] * len(outs)


def program(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shapes: list[Any] | None = None,
) -> Program:
    """Traces a call of a function, of any framework, under any transformation of mpx.

    Arrays may be given as `jax.ShapeDtypeStruct`. Others may be traced in their place:
    `shapes`, in the order of `Program.arrays`.
    """
    _check_names(func, kwargs)
    # A module under `amp` or `fp8` is an argument of the program, too.
    inner, wrap = unwrapped(func)
    arrays, call = flat_call(inner, args, kwargs, None if inner is func else wrap)
    arrays, held = arrays if shapes is None else shapes, list[Any]()

    def run(arrays: Sequence[Any]) -> list[Any]:
        held.extend(arrays)  # an `id` belongs to an array as long as it is kept
        return call(_AsWritten(), arrays)

    with recorded() as recording:
        jaxpr = jax.make_jaxpr(run)(arrays)
    found = [recording.names.get(id(x), (LeafName(""), False)) for x in held]
    recording.names.clear()
    # The function's own parameters, those of the arguments that a transformation found, or
    # the first argument that is no state of mpx.
    has_state = any(isinstance(x, Fp8State) for x in args)
    named = zip(
        argument_names(func if has_state else inner, len(args)), args, strict=True
    )
    is_state = {x: isinstance(arg, (LossScaling, Fp8State)) for x, arg in named}
    first = next((x for x in is_state if not is_state[x]), None)
    is_param = [x and not is_state.get(name.argument) for name, x in found]
    if any(
        x and not name.argument for (name, _), x in zip(found, is_param, strict=True)
    ):
        is_param = [x and not name.argument for name, x in found]
    elif not any(is_param):
        is_param = [name.argument == first for name, _ in found]
    params = [i for i, x in enumerate(arrays) if is_param[i] and is_floating(x)]
    return Program(jaxpr, arrays, [name for name, _ in found], params, recording)


def _check_names(func: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    """Raises if the function has no argument of a name that was given."""
    try:
        known = inspect.signature(func).parameters
    except (TypeError, ValueError):  # some builtins have none
        return
    if any(x.kind is x.VAR_KEYWORD for x in known.values()):
        return
    for name in kwargs:
        if name not in known:
            what = getattr(func, "__name__", type(func).__name__)
            raise TypeError(
                f"`{what}` takes no argument `{name}`; what an inspection does not know is "
                f"passed on to the function. It has {', '.join(known) or 'no arguments'}. "
                "Apply a policy first: `mpx.amp(fn, ...)`, `mpx.fp8(fn)`, or a cast by "
                "`mpx.Policy` inside the function."
            )


def unwrapped(func: Callable[..., Any]) -> tuple[Callable[..., Any], Wrap]:
    """Returns the function that `amp` or `fp8` was given, and what they do with it."""
    if isinstance(func, Fp8Function):
        chosen, (inner, wrap) = func.chosen, unwrapped(func.func)
        return inner, lambda func: Fp8Function(wrap(func), chosen)
    autocast = getattr(func, "mpx_autocast", None)
    if autocast is None:
        return func, lambda func: func
    inner, wrap = unwrapped(getattr(func, "__wrapped__"))  # noqa: B009
    return inner, lambda func: under_amp(wrap(func), autocast)


def gradient(forward: Program, scaling: LossScaling | None = None) -> Program:
    """Returns the program that computes the first result and its gradient.

    The results are the loss, which must be a scalar, and one array for each of
    `Program.params`.

    Args:
        forward: The program.
        scaling: Scales the loss before it is differentiated. The gradients are divided by
            the scale, in f32.

    Raises:
        TypeError: If the first result is no floating scalar.
    """
    if not forward.has_loss:
        first = next(iter(forward.jaxpr.out_avals), "nothing")
        raise TypeError(
            f"The function must return a scalar loss first, but it returned {first}. "
            "Pass a function such as `lambda model, batch: jnp.mean(...)`."
        )

    def run(arrays: Sequence[Any]) -> list[Any]:
        def value(params: Sequence[Any]) -> tuple[Any, Any]:
            full = list(arrays)
            for position, param in zip(forward.params, params, strict=True):
                full[position] = param
            loss = forward(*full)[0]
            return loss if scaling is None else scaling.scale(loss), loss

        params = [arrays[i] for i in forward.params]
        (_, found), grads = jax.value_and_grad(value, has_aux=True)(params)
        return [found, *(grads if scaling is None else scaling.unscale(grads))]

    with gradient_function():  # with a loss scale or without, the program is the same
        jaxpr = jax.make_jaxpr(run)(forward.arrays)
    return forward._replace(jaxpr=jaxpr)
