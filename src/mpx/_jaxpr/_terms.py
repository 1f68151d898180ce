"""The values of a jaxpr as terms, for recognising what a function computes.

A term is a value together with the equation that makes it. Calls of jitted functions are
looked through: the result of a call is the term of the value inside that becomes it. Nothing
is run, and nothing is changed by looking.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from mpx._compat import Literal, has_shardings, is_tracer, open_jaxpr
from mpx._jaxpr._interpreter import Aval, Jaxpr
from mpx._jaxpr._queries import Equation, names

_JITS = ("jit", "pjit")
_CALLS = (*_JITS, "closed_call", "core_call")
SAME = names("stop_gradient copy copy_p pvary pcast")
"""Operations that return their operand."""
MOST_CONSTANT = 2**24
"""The largest number of elements that a constant may have to be computed while tracing."""


class Term:
    """A value of a jaxpr or of one that it calls.

    Attributes:
        level: The evaluation of a jaxpr that makes it.
        atom: Its variable or literal there.
        eqn: The equation that makes it, `None` for inputs, constants and literals.
    """

    def __init__(self, level: "Level", atom: Any, eqn: Equation | None) -> None:
        self.level, self.atom, self.eqn = level, atom, eqn

    @property
    def aval(self) -> Aval:
        """The type of the value."""
        return self.atom.aval

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return tuple(self.atom.aval.shape)

    @property
    def name(self) -> str:
        """The name of the primitive that makes it; empty if none does."""
        return "" if self.eqn is None else self.eqn.primitive.name

    @functools.cached_property
    def operands(self) -> "list[Term]":
        """The terms that it is made from."""
        atoms = () if self.eqn is None else self.eqn.invars
        return [self.level.term(atom) for atom in atoms]

    @functools.cached_property
    def varying(self) -> tuple[bool, ...]:
        """For each axis, whether the value may differ along it.

        An axis along which it was only broadcast has `False`.
        """
        return _varying(self)

    @functools.cached_property
    def constant(self) -> np.ndarray | None:
        """Its value if it depends on no input and is easy to compute.

        Axes along which it was only broadcast take no memory: their stride is 0.
        """
        return _constant(self)

    @property
    def scalar(self) -> float | None:
        """The number that all elements of a constant are, if there is one."""
        value = self.constant
        if value is None or value.dtype == bool or not value.size:
            return None
        small = compact(value)
        if np.issubdtype(small.dtype, np.complexfloating):
            return None
        first = small.reshape(-1)[0]
        return float(first) if np.all(small == first) else None


class Level:
    """One jaxpr of a program: that which is run, or the body of a call in it.

    Attributes:
        jaxpr: The jaxpr.
        caller: The level that holds the call, and the call. `None` for the outermost.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        caller: "tuple[Level, Equation] | None" = None,
    ) -> None:
        self.jaxpr, self.caller = jaxpr, caller
        self.consts = dict(zip(jaxpr.constvars, consts, strict=True))
        self.makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self._terms: dict[Any, Term] = {}
        self._bodies: dict[int, Level] = {}
        self._readers: dict[Any, list[tuple[Equation, int]]] | None = None

    def term(self, atom: Any) -> Term:
        """Returns the term of a variable or literal of this level."""
        if isinstance(atom, Literal):
            return Term(self, atom, None)
        if atom not in self._terms:
            self._terms[atom] = self._find(atom)
        return self._terms[atom]

    def _find(self, var: Any) -> Term:
        eqn = self.makers.get(var)
        if eqn is not None:
            body = self.body(eqn)
            if body is None:
                return Term(self, var, eqn)
            return body.term(body.jaxpr.outvars[_position(eqn.outvars, var)])
        if self.caller is not None and var not in self.consts:
            outer, call = self.caller
            return outer.term(call.invars[_position(self.jaxpr.invars, var)])
        return Term(self, var, None)

    def body(self, eqn: Equation) -> "Level | None":
        """Returns the level inside a call that can be looked through."""
        if eqn.primitive.name not in _CALLS:
            return None
        if eqn.primitive.name in _JITS and has_shardings(eqn.params):
            return None
        if id(eqn) not in self._bodies:
            params = eqn.params
            jaxpr = open_jaxpr(params.get("call_jaxpr", params.get("jaxpr")))
            self._bodies[id(eqn)] = Level(*jaxpr, caller=(self, eqn))
        return self._bodies[id(eqn)]

    def readers(self, var: Any) -> "Iterator[tuple[Level, Equation] | None]":
        """Yields the equations that read a variable, with `None` if it is returned.

        Calls that can be looked through are: what reads the value inside counts.
        Equations whose results nobody reads do not.
        """
        if self._readers is None:
            self._readers = _readers(self.jaxpr)
        for eqn, position in self._readers.get(var, ()):
            body = self.body(eqn)
            if body is None:
                yield self, eqn
            else:
                yield from body.readers(body.jaxpr.invars[position])
        for position, atom in enumerate(self.jaxpr.outvars):
            if atom is not var:
                continue
            if self.caller is None:
                yield None
            else:
                outer, call = self.caller
                yield from outer.readers(call.outvars[position])


def _position(variables: Sequence[Any], var: Any) -> int:
    return next(i for i, other in enumerate(variables) if other is var)


def _readers(jaxpr: Jaxpr) -> dict[Any, list[tuple[Equation, int]]]:
    found: dict[Any, list[tuple[Equation, int]]] = {}
    for eqn in live_equations(jaxpr):
        for position, atom in enumerate(eqn.invars):
            if not isinstance(atom, Literal):
                found.setdefault(atom, []).append((eqn, position))
    return found


def live_equations(
    jaxpr: Jaxpr, replaced: Callable[[int], Sequence[Any] | None] = lambda i: None
) -> list[Equation]:
    """Returns the equations whose results are read or that have effects, in order.

    Args:
        jaxpr: The jaxpr.
        replaced: Returns what the equation of an index reads, if not its operands.
    """
    read = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    live = []
    for index, eqn in reversed(list(enumerate(jaxpr.eqns))):
        if eqn.effects or any(var in read for var in eqn.outvars):
            atoms = replaced(index)
            atoms = eqn.invars if atoms is None else atoms
            read.update(atom for atom in atoms if not isinstance(atom, Literal))
            live.append(eqn)
    return live[::-1]


# --- Along which axes a value varies --------------------------------------------------

_ELEMENTWISE = frozenset(
    names(
        "add sub mul div neg max min and or not xor eq ne lt le gt ge select_n abs exp log "
        "convert_element_type integer_pow pow sign floor rem tanh"
    )
).union(SAME)


def _varying(term: Term) -> tuple[bool, ...]:
    shape, eqn = term.shape, term.eqn
    every = tuple(size != 1 for size in shape)
    if eqn is None:
        return every
    if term.name == "iota":
        return tuple(i == eqn.params["dimension"] for i in range(len(shape)))
    if term.name == "broadcast_in_dim":
        found = [False] * len(shape)
        dims = eqn.params["broadcast_dimensions"]
        for dim, varies in zip(dims, term.operands[0].varying, strict=True):
            found[dim] = varies
        return tuple(found)
    if term.name == "transpose":
        inner = term.operands[0].varying
        return tuple(inner[i] for i in eqn.params["permutation"])
    if term.name in ("reshape", "squeeze", "expand_dims"):
        source = term.operands[0]
        kept = [x for x, n in zip(source.varying, source.shape, strict=True) if n != 1]
        if [n for n in source.shape if n != 1] != [n for n in shape if n != 1]:
            return every
        rest = iter(kept)
        return tuple(n != 1 and next(rest) for n in shape)
    if term.name in _ELEMENTWISE:
        # Scalars are broadcast, and so are axes of size 1.
        inner = [x.varying for x in term.operands if x.shape]
        return tuple(any(x) for x in zip(*inner, strict=True)) if inner else every
    return every


# --- Constants ------------------------------------------------------------------------


def _binary(func: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, *x: func(*x)


def _divide(params: Any, x: Any, y: Any) -> Any:
    if np.issubdtype(x.dtype, np.integer):
        return None if np.any(y == 0) else np.trunc(x / y).astype(x.dtype)
    return np.divide(x, y)


# On arrays of which the axes that were only broadcast have size 1.
_NUMPY: dict[str, Callable[..., Any]] = {
    "add": _binary(np.add),
    "sub": _binary(np.subtract),
    "mul": _binary(np.multiply),
    "div": _divide,
    "neg": _binary(np.negative),
    "abs": _binary(np.abs),
    "max": _binary(np.maximum),
    "min": _binary(np.minimum),
    "sqrt": _binary(np.sqrt),
    "rsqrt": _binary(lambda x: 1 / np.sqrt(x)),
    "exp": _binary(np.exp),
    "log": _binary(np.log),
    "exp2": _binary(np.exp2),
    "pow": _binary(np.power),
    "integer_pow": lambda params, x: x ** params["y"],
    "and": _binary(np.bitwise_and),
    "or": _binary(np.bitwise_or),
    "xor": _binary(np.bitwise_xor),
    "not": _binary(np.bitwise_not),
    "eq": _binary(np.equal),
    "ne": _binary(np.not_equal),
    "lt": _binary(np.less),
    "le": _binary(np.less_equal),
    "gt": _binary(np.greater),
    "ge": _binary(np.greater_equal),
    **dict.fromkeys(SAME, _binary(lambda x: x)),
    "convert_element_type": lambda params, x: x.astype(params["new_dtype"]),
    "select_n": lambda params, which, *x: (
        np.where(which, x[1], x[0]) if which.dtype == bool and len(x) == 2 else None
    ),
}


def _constant(term: Term) -> np.ndarray | None:
    aval = term.aval
    if not hasattr(aval, "dtype") or not _is_number(aval.dtype):
        return None
    if term.eqn is not None:
        with np.errstate(all="ignore"):
            return _computed(term)
    value = term.level.consts.get(term.atom) if not _is_literal(term) else term.atom.val
    if value is None or is_tracer(value):
        return None
    if not getattr(value, "is_fully_addressable", True):
        return None
    if np.size(value) > MOST_CONSTANT:
        return None
    return np.asarray(value, aval.dtype)


def _is_literal(term: Term) -> bool:
    return isinstance(term.atom, Literal)


def _is_number(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, np.number) or dtype == np.bool_


def _computed(term: Term) -> np.ndarray | None:
    params, shape, name = term.eqn.params, term.shape, term.name
    if name == "iota":
        if len(term.eqn.invars):
            return None
        axis = params["dimension"]
        line = np.arange(shape[axis]).astype(params["dtype"])
        line = line.reshape([-1 if i == axis else 1 for i in range(len(shape))])
        return np.broadcast_to(line, shape)
    layout = name in ("broadcast_in_dim", "transpose", "reshape", "squeeze")
    if not layout and name not in _NUMPY:
        return None
    if len(term.eqn.outvars) != 1:
        return None
    given = []
    for operand in term.operands:
        value = operand.constant
        if value is None:
            return None
        given.append(value)
    if layout:
        return _moved(name, params, shape, *given)
    small = [compact(x) for x in given]
    if np.prod(
        [max(n) for n in zip(*(x.shape for x in small if x.ndim), strict=True)]
    ) > (MOST_CONSTANT):
        return None
    out = _NUMPY[name](params, *small)
    if out is None:
        return None
    return np.broadcast_to(np.asarray(out).astype(term.aval.dtype), shape)


def _moved(
    name: str, params: Any, shape: tuple[int, ...], x: np.ndarray, *rest: Any
) -> np.ndarray | None:
    if rest:
        return None
    if name == "transpose":
        return x.transpose(params["permutation"])
    if name == "broadcast_in_dim":
        sizes = [1] * len(shape)
        for dim, size in zip(params["broadcast_dimensions"], x.shape, strict=True):
            sizes[dim] = size
        return np.broadcast_to(_reshaped(x, tuple(sizes)), shape)
    if name == "reshape" and params.get("dimensions") is not None:
        return None
    return _reshaped(x, shape)


def _reshaped(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
    """Returns a reshaped array; if only axes of size 1 differ, without a copy."""
    if [n for n in x.shape if n != 1] == [n for n in shape if n != 1]:
        small = compact(x)
        rest = (m for m, n in zip(small.shape, x.shape, strict=True) if n != 1)
        sizes = [next(rest) if n != 1 else 1 for n in shape]
        return np.broadcast_to(small.reshape(sizes), shape)
    return x.reshape(shape) if x.size <= MOST_CONSTANT else None


def compact(x: np.ndarray) -> np.ndarray:
    """Returns an array with size 1 along the axes where its stride is 0."""
    return x[tuple(slice(1) if s == 0 else slice(None) for s in x.strides)]
