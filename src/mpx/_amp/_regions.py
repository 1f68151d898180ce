"""Regions: what lies between matmuls computes in f32, as it is written.

The equations of a jaxpr that are *inside* form regions; all others are borders: matmuls, loops,
calls that hold matmuls, sorts, communication. A value is *stored* if it outlives its region: if
an equation behind a border reads it, or a border that takes what is stored. It is rounded there,
once, if the numbers that it is computed from were of 16 bits. Nothing else is rounded.

A region that reads stored numbers of 16 bits becomes one function. Its backward pass keeps what
the function reads, which is stored anyway, and computes the rest again. What reads no such number
runs as it is written.
"""

import functools
import math
from collections.abc import Callable, Container, Hashable, Sequence, Set
from typing import Any, NamedTuple

import jax
from jax import lax
from jaxtyping import PyTree

from mpx._amp._decide import table_rule
from mpx._amp._facts import DATA, Held, Settings, Source, is_bias, is_eligible
from mpx._amp._hints import (
    in_order_back,
    is_spread,
    run_region,
    sums_low,
)
from mpx._amp._layout import Layout, is_variable, nbytes
from mpx._jax._compat import (
    bind,
    eval_jaxpr,
    jaxpr_of,
    scopes_of,
    shared_scopes,
)
from mpx._jax._devices import cuda_capability
from mpx._jax._formats import F32, is_low
from mpx._ops._stored import add, load, store
from mpx._program import HANDLERS
from mpx._program._interpreter import Scopes, Values
from mpx._program._primitives import that
from mpx._program._queries import (
    CALLS,
    SHAPE_ONLY,
    Equation,
    Position,
    equations,
    leaves,
    names,
    walk_inside,
)

_LINEAR = that("linear").union(CALLS)
# Linear between steps; a relu is a call.
_PIECEWISE = _LINEAR | that("pieces", "steps") | {"custom_jvp_call"}
_STEPS = that("steps")
# Numbers in another order, each once.
_ONCE = that("same") - that("reused")
_REDUCTIONS = frozenset(names("reduce_sum reduce_max reduce_min argmax argmin"))
_MAXIMA = frozenset(names("reduce_max reduce_min"))
_COMPARED = frozenset(names("eq ne lt le gt ge"))
_SMALL = 8  # A reduction over so many numbers is kept for the backward pass.


# --- Running --------------------------------------------------------------------------


def again(
    amp: Settings,
    func: "Region",
    values: Sequence[PyTree],
    atoms: Sequence[Any],
    inside: Container[int],
) -> Values:
    """Runs a function of f32 numbers, of which the backward pass keeps those of 16 bits.

    The cotangents of arrays that equations outside read, too, are f32: they add up before
    they are rounded, so that a difference of two is exact.
    """
    low, wide = list[PyTree](), list[PyTree]()
    for x, var in zip(values, atoms, strict=True):
        is_held = is_low(x) and is_eligible(var.aval)
        is_shared = any(i not in inside for i in amp.frame.layout.reading(var))
        low.append(x if is_held else None)
        wide.append(
            None if is_held and not is_shared else amp.widen(x) if is_held else x
        )
    return (func.compiled if amp.is_abstract else func.call)(low, wide)


class Region:
    """What a region computes, of arrays as they are stored, and in f32 where others read them."""

    def __init__(
        self,
        run: Callable[..., Values],
        keeps: Callable[..., bool] | None,
    ) -> None:
        """Takes which results are kept for the backward pass; `None` if it is linear.

        `run` takes the arrays of 16 bits, `None` where there is none, and all in f32.
        """

        def held(low: Any, wide: Any) -> Any:
            if low is None:
                return wide
            return load(low) if wide is None else as_derived(load(low), wide)

        def region(low: Sequence[Any], wide: Sequence[Any]) -> Values:
            return run(low, [*map(held, low, wide)])

        # Otherwise XLA merges what is computed again with the forward pass, and keeps it in f32:
        # compiled for an H200, a ConvNeXt needs 11.7 GB then instead of 7.1.
        is_linear = keeps is None
        again = functools.partial(jax.checkpoint, prevent_cse=True, policy=keeps)
        self.call = region if is_linear else again(region)
        # One object for regions that are alike: JAX traces and differentiates it once.
        self.compiled = jax.jit(self.call)


@jax.custom_jvp
def as_derived(x: Any, like: Any) -> Any:
    """Returns an array, with the derivatives of another one of the same numbers."""
    return x


@as_derived.defjvp
def _(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> Any:
    return as_derived(*primals), tangents[1]


class Part(NamedTuple):
    """A region that runs as one function."""

    equations: list[Equation]
    ins: list[Any]
    outs: list[tuple[Any, bool]]  # Variables, and whether they are rounded


def run_part(amp: Settings, layout: Layout, members: Sequence[int]) -> None:
    """Runs the equations of a region as one function, and adds their results to the frame."""
    env, part = amp.frame.env, layout.with_free(members)
    eqns = [layout.jaxpr.eqns[i] for i in part]
    made = {v for eqn in eqns for v in eqn.outvars}
    ins = list(dict.fromkeys(v for i in part for v in layout.atoms(i) if v not in made))
    facts = {v: amp.read(v)[1] for v in ins}
    for eqn in eqns:
        known = [
            facts[x] if is_variable(x) else amp.flow.literal(x) for x in eqn.invars
        ]
        facts.update(zip(eqn.outvars, amp.flow.after(eqn, known), strict=True))
    outs: list[tuple[Any, bool]] = []
    inside = {*part}
    for v in (v for i in members for v in layout.jaxpr.eqns[i].outvars):
        others = [i for i in layout.readers.get(v, ()) if i not in inside]
        kinds = {layout.places[i] for i in others}
        if not others and v not in layout.returned:
            continue
        is_float, is_returned = is_eligible(v.aval), v in layout.returned
        if is_float and facts[v].held == Held.LOW and v in layout.stored:
            outs.append((v, True))
            continue
        # A matmul that is kept reads f32.
        outs.append((v, False))
        if is_float and "matmul" in kinds and not (is_returned and not others):
            outs.append((v, True))
    scopes, inner = shared_scopes(eqns)
    found = _function(amp, Part(inner, ins, outs), facts)
    with scopes:
        values = again(amp, found, [env[v][0] for v in ins], ins, inside)
    wide: dict[Any, Any] = {}
    for (v, is_rounded), value in zip(outs, values, strict=True):
        if is_rounded and v in wide:
            amp.frame.made[id(wide[v]), amp.dtype] = wide[v], value
        else:
            env[v] = wide[v] = value, facts[v]
            wide[v] = value
    if amp.decisions is not None:
        rounded = {v: amp.dtype.name for v, is_rounded in outs if is_rounded}
        for eqn in eqns:
            read = [facts[x] if is_variable(x) else DATA for x in eqn.invars]
            _tell(amp, eqn, layout.scopes + scopes_of(eqn), read, rounded)


def _tell(
    amp: Settings,
    eqn: Equation,
    scopes: Scopes,
    facts: Sequence[Source],
    rounded: dict[Any, str] | None = None,
) -> None:
    """Tells the report about an equation of a region, or about those inside it."""
    if amp.decisions is None:
        return
    name = eqn.primitive.name
    if name in HANDLERS:
        for here in walk_inside(Position(eqn, scopes)):
            if here.eqn.primitive.name not in HANDLERS:
                _tell(amp, here.eqn, here.scopes, [DATA] * len(here.eqn.invars))
        return
    dtypes = [getattr(var.aval, "dtype", None) for var in eqn.invars]
    if name == "convert_element_type" or F32 not in dtypes:
        return
    rule = table_rule(amp, eqn)
    dtype = lambda var: (rounded or {}).get(var, str(var.aval.dtype))  # noqa: E731
    amp.tell(
        eqn,
        scopes,
        rule=str(rule),
        reason=amp.rule(name, eqn.params, facts)[1],
        params=tuple(fact.name for fact in facts if fact.name),
        after=tuple(map(dtype, eqn.outvars)),
    )


# --- The function of a region ---------------------------------------------------------


def _function(amp: Settings, part: Part, facts: dict[Any, Source]) -> Region:
    """Returns a region as a function; regions that are alike share it."""
    widest = max(nbytes(v) for eqn in part.equations for v in eqn.outvars)
    lone = _lone(part, amp.frame.layout)
    marks = [
        tuple([_mark(eqn, facts, var, widest, lone) for var in eqn.outvars])
        for eqn in part.equations
    ]
    types = tuple(
        (str(jax.typeof(amp.frame.env[v][0])), facts[v].held) for v in part.ins
    )
    on_gpu = cuda_capability() is not None
    try:
        key = (_signature(part), types, *marks, on_gpu, amp.dtype)
        made = amp.parts.get(key)
    except TypeError:  # a parameter of an equation has no hash
        key = made = None
    if made is None:
        made = _make(amp, part, marks, on_gpu)
        if key is not None:
            amp.parts[key] = made
    return made


def _lone(part: Part, layout: Layout) -> Set[Any]:
    """Returns what a region reads once, and the same numbers in another order."""
    is_lone = lambda x: is_variable(x) and len(layout.reading(x)) == 1  # noqa: E731
    found = {*filter(is_lone, part.ins)}
    for eqn in part.equations:
        if eqn.primitive.name in SHAPE_ONLY and not found.isdisjoint(
            filter(is_variable, eqn.invars)
        ):
            same = (x for x in eqn.outvars if nbytes(x) == nbytes(eqn.invars[0]))
            found.update(filter(is_lone, same))
    return found


def _mark(
    eqn: Equation,
    facts: dict[Any, Source],
    out: Any,
    widest: int,
    lone: Set[Any],
) -> str:
    """Returns what is asked of the cotangent of a result: see `_make`."""
    read = [
        x
        for x in eqn.invars
        if is_variable(x) and is_eligible(x.aval) and facts[x].held != Held.LOW
    ]
    if not read or not is_eligible(out.aval):
        return ""
    # The cotangent of what is broadcast later is a sum already. That of a sum is stored in 16
    # bits if it is the whole one of what the region reads.
    is_sum = eqn.primitive.name in ("add", "sub") and nbytes(out) >= widest
    if (
        is_sum
        and any(x in lone for x in eqn.invars if is_variable(x) and x not in read)
        and any(is_bias(facts[x], x.aval) for x in read)
    ):
        return "rounded"
    on_gpu = cuda_capability() is not None
    is_ordered = on_gpu and any(is_spread(x.aval, out.aval.shape) for x in read)
    return "ordered" if is_ordered else ""


def _signature(part: Part) -> Hashable:
    """Returns something that is equal for regions that compute the same."""
    variables = [*part.ins, *(v for eqn in part.equations for v in eqn.outvars)]
    number = {var: i for i, var in enumerate(variables)}

    def wire(atom: Any) -> Hashable:
        if is_variable(atom):
            return number[atom]
        return repr(atom.val), str(atom.aval)

    steps = [
        (
            (eqn.primitive, scopes_of(eqn), len(eqn.outvars)),
            *eqn.params.items(),
            *map(wire, eqn.invars),
        )
        for eqn in part.equations
    ]
    outs = [(number[v], is_rounded) for v, is_rounded in part.outs]
    found = (*steps, *outs)
    hash(found)
    return found


def _make(
    amp: Settings, part: Part, marks: list[tuple[str, ...]], on_gpu: bool
) -> Region:
    dtype, eqns = amp.dtype, part.equations
    notes = {id(eqn): x for eqn, x in zip(eqns, marks, strict=True) if any(x)}
    variables = list(dict.fromkeys(v for v, _ in part.outs))
    jaxpr = jaxpr_of(part.ins, variables, eqns)

    def compute(low: Sequence[Any], values: Sequence[Any]) -> Values:
        views = _Views(part, low)

        def back(eqn: Equation, values: Values, outs: Values) -> Values:
            (note, *_) = notes.get(id(eqn), ("",))
            if note == "rounded":
                return [_biased(eqn, values, outs[0], views)]
            return [in_order_back(outs[0])] if note else outs

        if on_gpu or notes or any(map(sums_low, leaves(eqns))):
            outs = run_region(jaxpr, values, back)
        else:
            outs = eval_jaxpr(jaxpr, (), *values)
        found = dict(zip(variables, outs, strict=True))

        def stored(v: Any) -> Any:
            # Numbers in another order XLA would otherwise round again.
            rounded, same = store(found[v], dtype), views.of(v)
            return rounded if same is None else as_derived(same, rounded)

        return [stored(v) if is_rounded else found[v] for v, is_rounded in part.outs]

    # Codes choose themselves what is kept.
    steps = [x for eqn in eqns for x in (eqn, *equations(eqn))]
    if amp.residuals is not None or all(_is_linear(x, _LINEAR) for x in steps):
        return Region(compute, None)
    if _compares_maxima(part):
        return Region(compute, _keeps_sums)
    is_piecewise = all(_is_linear(x, _PIECEWISE) for x in steps)
    return Region(compute, _keeps_steps if is_piecewise else _keeps)


class _Views:
    """The arrays of 16 bits that a region reads, in the order of values inside it."""

    def __init__(self, part: Part, low: Sequence[Any]) -> None:
        self._maker = {v: eqn for eqn in part.equations for v in eqn.outvars}
        self._given = dict(zip(part.ins, low, strict=True))

    def of(self, var: Any) -> Any:
        """Returns a value in 16 bits, if it has the numbers of one that is read."""
        path = list[Equation]()
        while var in self._maker and self._maker[var].primitive.name in _ONCE:
            path.append(self._maker[var])
            (var,) = self._maker[var].invars
        if (found := self._given.get(var)) is not None:
            for eqn in reversed(path):
                (found,) = bind(eqn, [found])
        return found


def _biased(eqn: Equation, values: Values, out: Any, views: _Views) -> Any:
    """Returns the sum of a bias and of what a region alone reads, whose cotangent is stored.

    The bias adds the stored cotangent up. XLA would write it in f32 for that, read it, and
    write it once more in 16 bits for the matmuls: on ViT-Base 5.6 GB of traffic a step.
    """
    for x, bias in (eqn.invars[0], values[1]), (eqn.invars[1], values[0]):
        low = views.of(x) if is_variable(x) else None
        if low is not None and low.shape == out.shape:
            zeros = lax.full_like(out, 0)
            if eqn.primitive.name == "add":
                return as_derived(out, add(low, bias + zeros))
            found = add(low, zeros - bias)
            return as_derived(out, found if x is eqn.invars[0] else -found)
    return out


def _is_linear(eqn: Equation, known: frozenset[str]) -> bool:
    name = eqn.primitive.name
    if name in ("mul", "div"):
        numbers = [not is_variable(x) for x in eqn.invars]
        return numbers[1] or (name == "mul" and numbers[0])
    has_no_slope = not any(
        jax.numpy.issubdtype(getattr(v.aval, "dtype", bool), jax.numpy.inexact)
        for v in eqn.outvars
    )
    return name in known or has_no_slope


def keeps_nothing(*_: Any, **__: Any) -> bool:
    """Returns that no result is kept: only what a function reads."""
    return False


def _keeps(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Returns whether a result is kept for the backward pass: that of a reduction."""
    if primitive.name not in _REDUCTIONS:
        return False
    axes = params["axes"]
    sizes = [avals[0].shape[axis] for axis in axes]
    return all(isinstance(x, int) for x in sizes) and math.prod(sizes) >= _SMALL


def _keeps_sums(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Returns the same for a region that compares maxima with what they are those of."""
    return primitive.name not in _MAXIMA and _keeps(primitive, *avals, **params)


def _compares_maxima(part: Part) -> bool:
    """Returns whether a maximum is compared with what it is the maximum of.

    That is how its derivative finds where it is. If it were kept for the backward pass, and
    what it is compared with computed again, none might be equal to it.
    """
    found: set[Any] = set()  # what maxima enter
    moved = {v for v, _ in part.outs}  # what is differentiated
    names_in = {
        id(eqn): {eqn.primitive.name, *(x.primitive.name for x in equations(eqn))}
        for eqn in part.equations
    }
    for eqn in part.equations:
        reads = not found.isdisjoint(filter(is_variable, eqn.invars))
        if reads and not _COMPARED.isdisjoint(names_in[id(eqn)]):
            return True
        if reads or not _MAXIMA.isdisjoint(names_in[id(eqn)]):
            found.update(eqn.outvars)
    for eqn in reversed(part.equations):
        name, outs = eqn.primitive.name, eqn.outvars
        if moved.isdisjoint(outs) or name == "stop_gradient":
            continue
        if name != "custom_jvp_call" and not _MAXIMA.isdisjoint(names_in[id(eqn)]):
            return True
        if any(is_eligible(v.aval) for v in outs):
            moved.update(filter(is_variable, eqn.invars))
    return False


def _keeps_steps(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Returns the same for a region that needs only the signs of what it reads."""
    return primitive.name in _STEPS or _keeps(primitive, *avals, **params)
