"""Traced programs for inspection: a call, its gradient, and where its operations are."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpx._amp._call import flat_call, under_amp
from mpx._amp._facts import Recording, recorded
from mpx._casting._context import argument_names, gradient_function
from mpx._fp8._delayed import Fp8State
from mpx._fp8._transform import Fp8Function
from mpx._jax._compat import (
    as_function,
    eval_jaxpr,
    primitive_name,
    source_frames,
)
from mpx._jax._tree import LeafName, is_floating
from mpx._program._flow import Walk, moved, pull
from mpx._program._interpreter import Fact, Jaxpr, Outcome, Scopes, Transformation
from mpx._program._queries import (
    MATMULS,
    MOVES,
    OUTERMOST,
    Equation,
    Position,
    matmul_flops,
    names,
)
from mpx._scaling._loss_scaling import LossScaling
from mpx.inspect._result import Frames, source_of

Name = str | None
"""The parameter that a value is, possibly moved or cast; `None` for any other value."""

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
        wanted = [tuple(self.arrays[i].shape) for i in self.params]
        shapes = [tuple(getattr(x, "shape", ())) for x in self.jaxpr.out_avals]
        found: list[str | None] = [None] * len(shapes)
        count = len(wanted)
        for start in range(len(shapes) - count + 1) if wanted else ():
            if shapes[start : start + count] == wanted:
                found[start : start + count] = [self.names[i] for i in self.params]
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
    named = argument_names(func if has_state else inner, len(args))
    pairs = list(zip(named, args, strict=True))
    states = {x for x, arg in pairs if isinstance(arg, (LossScaling, Fp8State))}
    first = next((x for x in named if x not in states), None)
    is_param = [x and name.argument not in states for name, x in found]
    if any(x and not name.argument for (name, x) in found):
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
    """Returns the program that computes the loss and the gradient of each parameter.

    `scaling` scales the loss; the gradients are divided by the scale, in f32.
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


# --- Places ---------------------------------------------------------------------------

# The gradient of a parameter passes through these unchanged, but for a sum.
_PASSES = MOVES.union(names("reduce_sum add_any neg psum psum_invariant mul div"))


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an operation stands in a program.

    Attributes:
        primitive: The name of the operation.
        param: The parameter that it reads, such as `model/layers/0/weight`, or whose
            gradient it computes; "" for none.
        scope: Its `jax.named_scope`s, joined by `/`.
        source: File and line of the code that wrote it.
        function: The name of the function that holds this line.
        backward: Whether it belongs to the backward pass. Its line is then that of the
            operation whose derivative it computes.
    """

    primitive: str
    param: str
    scope: str
    source: str
    function: str
    backward: bool

    @property
    def label(self) -> str:
        """The name by which readers know it: the parameter, else scope, else line."""
        return self.param or self.scope or f"{self.function} ({self.source})"


def place_of(
    eqn: Equation,
    names: Sequence[Name],
    scopes: Scopes,
    frames: Frames,
    *,
    backward: bool,
) -> Place:
    """Returns the place of an equation, given the parameters among its operands."""
    return Place(
        primitive_name(eqn),
        next(filter(None, names), ""),
        "/".join(scopes),
        source_of(frames),
        frames[0][0].rpartition(".")[2] if frames else "",
        backward,
    )


def frames_of(*eqns: Equation) -> Frames:
    """Returns the user's frames of the last equation that has some.

    Inside a jitted function of a library the equations have none: give those around them.
    """
    return next(filter(None, map(source_frames, reversed(eqns))), ())


class _Label(NamedTuple):
    """What is known of a value.

    Attributes:
        name: The parameter that it is.
        origin: The parameter from which it is computed number by number, with nothing
            else of its size, as the codes of a quantised weight are.
        is_spread: Whether it is a smaller array that was broadcast, as a scale is.
    """

    name: Name = None
    origin: Name = None
    is_spread: bool = False


class Site(NamedTuple):
    """An equation, its place, and how often it runs: see `repetitions`."""

    eqn: Equation
    place: Place
    times: int


def sites(jaxpr: Jaxpr, names: Sequence[Name], made: Sequence[Name]) -> list[Site]:
    """Returns the equations of a jaxpr and of all jaxprs inside it, with their places.

    `names` are the parameters among its inputs, and `made` those whose gradients its results
    are. An equation that holds jaxprs comes before what is inside it. Of a conditional, the
    branch with the most work counts.
    """
    found = _Sites(made)
    found.run(jaxpr, [_Label(name, name) for name in names])
    return found.sites


class _Sites(Walk[_Label]):
    unknown = _Label()

    def __init__(self, made: Sequence[Name]) -> None:
        self.sites: list[Site] = []
        self._made = made
        self._grads: dict[Any, str] = {}  # by variable of the jaxpr that is walked

    def run(
        self, jaxpr: Jaxpr, labels: Sequence[_Label], around: Position = OUTERMOST
    ) -> list[_Label]:
        before, made = self._grads, self._made
        if around.callers:
            eqn = around.callers[-1]
            made = [] if primitive_name(eqn) == "while" else self._feeds(eqn)
        self._grads = pull(jaxpr, made, _PASSES)
        outs = super().run(jaxpr, labels, around)
        self._grads = before
        return outs

    def _feeds(self, eqn: Equation) -> list[Name]:
        """Returns the parameters whose gradients are made from an equation's results."""
        return [self._grads.get(var) for var in eqn.outvars]

    def equation(self, here: Position, labels: list[_Label]) -> list[_Label]:
        eqn, backward = here.eqn, here.backward
        operands = [label.name for label in labels]
        if primitive_name(eqn) in MATMULS:
            operands += [label.origin for label in labels[:2]]
        if backward:
            operands += self._feeds(eqn)
        frames = frames_of(*here.callers, eqn)
        place = place_of(eqn, operands, here.scopes, frames, backward=backward)
        self.sites.append(Site(eqn, place, here.times))
        return _results(eqn, labels)

    def bodies(
        self, eqn: Equation, labels: list[_Label]
    ) -> list[tuple[Jaxpr, list[_Label]]]:
        found = super().bodies(eqn, labels)
        if primitive_name(eqn) == "cond":
            return [max(found, key=lambda x: matmul_flops(x[0], lambda _: "").total())]
        return found


def _results(eqn: Equation, labels: list[_Label]) -> list[_Label]:
    """Returns what is known of the results of an equation that holds no jaxpr."""
    name = moved(eqn, [label.name for label in labels])
    if primitive_name(eqn) in MATMULS:
        return [_Label(name)] * len(eqn.outvars)
    sizes = [getattr(atom.aval, "size", 0) for atom in eqn.invars]
    found = []
    for var in eqn.outvars:
        size = getattr(var.aval, "size", 0)
        whole = [
            label
            for label, each in zip(labels, sizes, strict=True)
            if each == size and not label.is_spread
        ]
        origins = {label.origin for label in whole}
        is_spread = size > 1 and not whole
        found.append(
            _Label(name, origins.pop() if len(origins) == 1 else None, is_spread)
        )
    return found
