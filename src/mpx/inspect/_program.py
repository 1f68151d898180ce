"""Traced programs for inspection: a call, its gradient, and where its operations are."""

import dataclasses
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.stages import Wrapped
from jaxtyping import PyTree

from mpx._amp._transform import under_amp
from mpx._casting._context import argument_names, gradient_function
from mpx._casting._keep import FP8_SCOPE
from mpx._fp8._delayed import Fp8State
from mpx._fp8._transform import Fp8Function
from mpx._jax._arguments import check_function
from mpx._jax._compat import (
    amp_recording,
    as_function,
    eval_equation,
    primitive_name,
    source_frames,
)
from mpx._jax._tree import LeafName, is_floating
from mpx._program._call import flat_call
from mpx._program._flow import Walk, moved, pull
from mpx._program._interpreter import Jaxpr, Op, Outcome, Transformation
from mpx._program._queries import (
    MATMULS,
    MOVES,
    OUTERMOST,
    Equation,
    Position,
    matmul_flops,
    names,
)
from mpx._program._recording import Recording, recorded
from mpx._program._roles import completes
from mpx._scaling._loss_scaling import LossScaling
from mpx.inspect._dtypes import is_float
from mpx.inspect._result import source_of

Name = str | None
"""The parameter that a value is, possibly moved or cast; `None` for any other value."""

Wrap = Callable[[Callable[..., PyTree]], Callable[..., PyTree]]


class Program(NamedTuple):
    """A function of arrays that has been traced."""

    jaxpr: Jaxpr  # closed; its inputs are `arrays`
    arrays: list[PyTree]  # the arguments, or their shapes
    names: list[LeafName]  # of the arguments, such as `model/layers/0/weight`
    # The positions of the parameters: the floating arrays of the function itself if it is
    # a module, else of the first argument that is no loss scaling and no state of fp8
    params: list[int]
    frozen: list[int]  # those of the other parts of a partitioned model
    recording: Recording  # what `amp` and `fp8` decided

    @property
    def has_loss(self) -> bool:
        """Whether the first result is a floating scalar."""
        loss = next(iter(self.jaxpr.out_avals), None)
        return getattr(loss, "shape", None) == () and is_float(loss)

    @property
    def made(self) -> Sequence[Name]:
        """The parameter whose gradient each result is; `None` for other results.

        Consecutive results that have the shapes of all parameters are taken for their
        gradients, whoever computes these.
        """
        wanted = [tuple(self.arrays[i].shape) for i in self.params]
        shapes = [tuple(getattr(x, "shape", ())) for x in self.jaxpr.out_avals]
        names, count = [self.names[i] for i in self.params], len(wanted)
        for start in range(len(shapes) - count + 1) if wanted else ():
            if shapes[start : start + count] == wanted:
                return [None] * start + names + [None] * (len(shapes) - start - count)
        return [None] * len(shapes)

    def __call__(self, *arrays: PyTree) -> list[PyTree]:
        """Runs the program on other arrays of the same shapes."""
        return as_function(self.jaxpr)(*arrays)


class _AsWritten(Transformation):
    """Runs a function as it is."""

    def equation(self, op: Op) -> Outcome:
        return eval_equation(op.eqn, op.values), [None] * len(op.eqn.outvars)


def program(
    func: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    shapes: list[PyTree] | None = None,
) -> Program:
    """Traces a call of a function, of any framework, under any transformation of mpx.

    `shapes` are traced in place of the arrays, in the order of `Program.arrays`.
    """
    check_function(func)
    _check_names(func, kwargs)
    # A module under `amp` or `fp8` is an argument of the program, too.
    inner, wrap = unwrapped(func)
    arrays, call = flat_call(inner, args, kwargs, None if inner is func else wrap)
    arrays, held = arrays if shapes is None else shapes, list[PyTree]()
    is_symbolic = lambda x: any(not isinstance(n, int | np.integer) for n in x.shape)  # noqa: E731
    symbolic = next((x.shape for x in arrays if is_symbolic(x)), None)
    if symbolic is not None:
        raise ValueError(
            f"An inspection counts bytes and operations, but an argument has the symbolic "
            f"shape {symbolic}. Pass numbers, such as `jax.ShapeDtypeStruct((32, 8), ...)`."
        )

    def run(arrays: Sequence[PyTree]) -> list[PyTree]:
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
    given = dict(zip(named, args, strict=True))
    states = {x for x in named if isinstance(given[x], (LossScaling, Fp8State))}
    names, chosen = (
        [name for name, _ in found],
        {x.argument for x, held in found if held},
    )
    chosen = {""} if "" in chosen else chosen - states
    is_held = [is_param or not chosen for _, is_param in found]
    chosen = chosen or {*[x for x in named if x not in states][:1]}
    trained = [x for x in named if x in chosen][:1]
    parts = {x for x in chosen for y in trained if completes(given.get(x), given[y])}
    every = [i for i, x in enumerate(arrays) if is_held[i] and is_floating(x)]
    params = [i for i in every if names[i].argument in chosen - parts]
    frozen = [i for i in every if names[i].argument in parts]
    return Program(jaxpr, arrays, names, params, frozen, recording)


def _check_names(func: Callable[..., PyTree], kwargs: dict[str, PyTree]) -> None:
    """Raises if the function has no argument of a name that was given."""
    try:
        known = inspect.signature(func).parameters
    except (TypeError, ValueError):  # some builtins have none
        return
    unknown = next((name for name in kwargs if name not in known), None)
    if unknown and not any(x.kind is x.VAR_KEYWORD for x in known.values()):
        what = getattr(func, "__name__", type(func).__name__)
        raise TypeError(
            f"`{what}` takes no argument `{unknown}`; what an inspection does not know is "
            f"passed on to the function. It has {', '.join(known) or 'no arguments'}. "
            "Apply a policy first: `mpx.amp(fn, ...)`, `mpx.fp8(fn)`, or a cast by "
            "`mpx.Policy` inside the function."
        )


def unwrapped(func: Callable[..., PyTree]) -> tuple[Callable[..., PyTree], Wrap]:
    """Returns the function that `amp` or `fp8` was given, and what they do with it."""
    own, autocast = amp_layer(func)
    if autocast is not None:
        inner, wrap = unwrapped(own)
        return inner, lambda func: under_amp(wrap(func), autocast)
    if isinstance(own, Fp8Function):
        chosen, (inner, wrap) = own.chosen, unwrapped(own.func)
        return inner, lambda func: Fp8Function(wrap(func), chosen)
    return func, lambda func: func


def amp_layer(func: Callable[..., PyTree]) -> tuple[Callable[..., PyTree], Any]:
    """Returns what `amp` was given, and with which options; `None` without `amp`."""
    # `jit` changes nothing, so it is left out.
    own = getattr(func, "__wrapped__", func) if isinstance(func, Wrapped) else func
    # By `functools.wraps`, the gradient of such a function has its attributes, too.
    wrapper, given = getattr(own, "mpx_under_amp", (None, own))
    return (given, getattr(own, "mpx_autocast")) if wrapper is own else (own, None)  # noqa: B009


def gradient(forward: Program, scaling: LossScaling | None = None) -> Program:
    """Returns the program of the loss and the (unscaled) gradient of each parameter."""
    if not forward.has_loss:
        first = next(iter(forward.jaxpr.out_avals), "nothing")
        raise TypeError(
            f"The function must return a scalar loss first, but it returned {first}. "
            "Pass a function such as `lambda model, batch: jnp.mean(...)`."
        )

    def run(arrays: Sequence[PyTree]) -> list[PyTree]:
        def value(params: Sequence[PyTree]) -> tuple[PyTree, PyTree]:
            given = dict(zip(forward.params, params, strict=True))
            loss = forward(*(given.get(i, x) for i, x in enumerate(arrays)))[0]
            return loss if scaling is None else scaling.scale(loss), loss

        params = [arrays[i] for i in forward.params]
        (_, found), grads = jax.value_and_grad(value, has_aux=True)(params)
        return [found, *(grads if scaling is None else scaling.unscale(grads))]

    # With a loss scale or without, the program is the same. Residuals are chosen here.
    with gradient_function(), amp_recording(forward.recording):
        jaxpr = jax.make_jaxpr(run)(forward.arrays)
    return forward._replace(jaxpr=jaxpr)


# --- Places ---------------------------------------------------------------------------

# The gradient of a parameter passes through these unchanged, but for a sum.
_PASSES = MOVES.union(names("reduce_sum add_any neg psum psum_invariant mul div"))


def _passed(eqn: Equation, outs: list[Name]) -> list[Name]:
    """Returns whose gradients the operands of an equation are, given its results."""
    known = [name for name in outs if name]
    if not known or primitive_name(eqn) not in _PASSES:
        return []
    return [known[0] if x.aval.shape != () else None for x in eqn.invars]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an operation stands in a program."""

    primitive: str  # the name of the operation
    # The parameter that it reads, such as `model/layers/0/weight`, or whose gradient it
    # computes; "" for none
    param: str
    scope: str  # its `jax.named_scope`s, joined by `/`
    source: str  # file and line; in the backward pass, of what it is the derivative of
    function: str  # that holds this line
    backward: bool

    @property
    def label(self) -> str:
        """The name by which readers know it: the parameter, else scope, else line."""
        return self.param or self.scope or f"{self.function} ({self.source})"


class _Label(NamedTuple):
    """What is known of a value."""

    name: Name = None  # the parameter that it is
    # The parameter from which it is computed number by number, with nothing else of its
    # size, as the codes of a quantised weight are
    origin: Name = None
    is_spread: bool = False  # a smaller array that was broadcast, as a scale is


def path(eqn: Equation, callers: Sequence[Equation]) -> tuple[int, ...]:
    """Returns what tells an equation from itself in another call of one jaxpr."""
    return tuple(map(id, (*callers, eqn)))


def sites(
    full: Program, *, every: bool = False, with_grads: bool = True
) -> list[tuple[Position, Place]]:
    """Returns the equations of a program and of all jaxprs inside it, with their places.

    Of the branches of a `cond`, those of the one with the most work, or of `every` one.
    """
    found = _Sites(full.made if with_grads else (), every)
    held = {*full.params, *full.frozen}
    known = [name if i in held else None for i, name in enumerate(full.names)]
    found.run(full.jaxpr, [_Label(name, name) for name in known])
    return found.sites


class _Sites(Walk[_Label]):
    unknown = _Label()

    def __init__(self, made: Sequence[Name], every: bool) -> None:
        self.sites: list[tuple[Position, Place]] = []
        self._made, self._every = made, every
        self._grads: dict[Hashable, str] = {}  # by variable of the jaxpr that is walked

    def run(
        self, jaxpr: Jaxpr, labels: Sequence[_Label], around: Position = OUTERMOST
    ) -> list[_Label]:
        before, made = self._grads, self._made
        if around.callers:
            is_while = primitive_name(around.callers[-1]) == "while"
            made = [] if is_while else self._feeds(around.callers[-1])
        self._grads = pull(jaxpr, [name or None for name in made], _passed)
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
        # Inside a jitted function of a library the equations have no frames of the user.
        eqns = (eqn, *reversed(here.callers))
        frames = next(filter(None, map(source_frames, eqns)), ())
        place = Place(
            primitive=primitive_name(eqn),
            param=next(filter(None, operands), ""),
            scope="/".join(x for x in here.scopes if x != FP8_SCOPE),
            source=source_of(frames),
            function=frames[0][0].rpartition(".")[2] if frames else "",
            backward=backward,
        )
        self.sites.append((here, place))
        return _results(eqn, labels)

    def bodies(
        self, eqn: Equation, labels: list[_Label]
    ) -> list[tuple[Jaxpr, list[_Label]]]:
        found = super().bodies(eqn, labels)
        if primitive_name(eqn) == "cond" and not self._every:
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
        pairs = zip(labels, sizes, strict=True)
        whole = {x.origin for x, each in pairs if each == size and not x.is_spread}
        is_spread = size > 1 and not whole
        found.append(_Label(name, whole.pop() if len(whole) == 1 else None, is_spread))
    return found
