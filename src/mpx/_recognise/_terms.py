"""The values of a jaxpr as terms, for recognising what a function computes.

A term is a value together with the equation that makes it. Calls of jitted functions are
looked through: the result of a call is the term of the value inside that becomes it. Nothing
is run, and nothing is changed by looking.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from mpx._jax._compat import Literal, has_shardings, is_tracer, open_jaxpr
from mpx._program._interpreter import Aval, Jaxpr
from mpx._program._queries import Equation, names, readers

SAME = names("stop_gradient copy copy_p pvary pcast")
"""Operations that return their operand."""
_LARGEST = 2**28
"""The most bytes that a computed constant may have: a mask of 16384 × 16384."""


def value_of(term: "Term") -> np.ndarray | None:
    """Returns the value of a term, if it is a constant and easy to compute."""
    dtype = getattr(term.aval, "dtype", None)
    if dtype is None or not (jnp.issubdtype(dtype, np.number) or dtype == np.bool_):
        return None
    if term.eqn is None:
        return _given(term, dtype)
    if len(term.eqn.outvars) != 1 or (term.name == "iota" and term.operands):
        return None
    rule = RULES.get(term.name)
    operands = [x.constant for x in term.operands] if rule is not None else [None]
    if rule is None or any(x is None for x in operands):
        return None
    try:
        with np.errstate(all="ignore"):
            return rule(term, *operands)
    except (ValueError, TypeError):  # a negative power of an integer
        return None


def _given(term: "Term", dtype: Any) -> np.ndarray | None:
    if isinstance(term.atom, Literal):
        return np.asarray(term.atom.val, dtype)
    value = term.level.consts.get(term.atom)
    is_here = getattr(value, "is_fully_addressable", True)
    if value is None or term.atom not in term.level.fixed or not is_here:
        return None
    return np.asarray(value, dtype) if value.nbytes <= _LARGEST else None


def compact(x: np.ndarray) -> np.ndarray:
    """Returns an array with size 1 along the axes where its stride is 0."""
    return x[tuple(slice(1) if s == 0 else slice(None) for s in x.strides)]


def _divide(x: PyTree, y: PyTree) -> PyTree:
    if not np.issubdtype(x.dtype, np.integer):
        return np.divide(x, y)
    return None if np.any(y == 0) else np.trunc(x / y).astype(x.dtype)


def _choose(which: PyTree, *cases: PyTree) -> PyTree:
    return np.where(which, cases[1], cases[0]) if which.dtype == bool else None


NUMPY: dict[str, Callable[..., PyTree]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _divide,
    "neg": np.negative,
    "abs": np.abs,
    "max": np.maximum,
    "min": np.minimum,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "exp": np.exp,
    "log": np.log,
    "exp2": np.exp2,
    "pow": np.power,
    "integer_pow": np.power,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.bitwise_not,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    **dict.fromkeys((*SAME, "convert_element_type"), lambda x: x),
    "select_n": _choose,
}


def _elementwise(term: "Term", *operands: np.ndarray) -> np.ndarray | None:
    small = [compact(x) for x in operands]
    sizes = np.broadcast_shapes(*(x.shape for x in small))
    if np.prod(sizes, dtype=float) * term.aval.dtype.itemsize > _LARGEST:
        return None
    if term.name == "integer_pow":
        small.append(np.asarray(term.params["y"], np.int32))
    out = NUMPY[term.name](*small)
    if out is None:
        return None
    return np.broadcast_to(np.asarray(out).astype(term.aval.dtype), term.shape)


def _iota(term: "Term") -> np.ndarray:
    shape, axis = term.shape, term.params["dimension"]
    line = np.arange(shape[axis]).astype(term.aval.dtype)
    line = line.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return np.broadcast_to(line, shape)


def _broadcast(term: "Term", x: np.ndarray) -> np.ndarray | None:
    sizes = [1] * len(term.shape)
    for dim, size in zip(term.params["broadcast_dimensions"], x.shape, strict=True):
        sizes[dim] = size
    return np.broadcast_to(_with_shape(x, tuple(sizes)), term.shape)


def _reshaped(term: "Term", x: np.ndarray) -> np.ndarray | None:
    if term.params.get("dimensions") is not None and term.name == "reshape":
        return None
    is_small = x.nbytes <= _LARGEST or _same_axes(x.shape, term.shape)
    return _with_shape(x, term.shape) if is_small else None


def _same_axes(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Returns whether two shapes differ by axes of size 1 only."""
    return [n for n in one if n != 1] == [n for n in other if n != 1]


def _with_shape(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a reshaped array; if only axes of size 1 differ, without a copy."""
    if not _same_axes(x.shape, shape):
        return x.reshape(shape)
    small = compact(x)
    rest = (m for m, n in zip(small.shape, x.shape, strict=True) if n != 1)
    sizes = [next(rest) if n != 1 else 1 for n in shape]
    return np.broadcast_to(small.reshape(sizes), shape)


def _sliced(term: "Term", x: np.ndarray) -> np.ndarray:
    params = term.params
    steps = params["strides"] or (1,) * x.ndim
    parts = zip(params["start_indices"], params["limit_indices"], steps, strict=True)
    return x[tuple(slice(*part) for part in parts)]


RULES: dict[str, Callable[..., np.ndarray | None]] = {
    **dict.fromkeys(NUMPY, _elementwise),
    "iota": _iota,
    "broadcast_in_dim": _broadcast,
    "transpose": lambda term, x: x.transpose(term.params["permutation"]),
    "reshape": _reshaped,
    "squeeze": _reshaped,
    "slice": _sliced,
}
_JITS = ("jit", "pjit")
_CALLS = (*_JITS, "closed_call", "core_call")


class Term:
    """A value of a jaxpr or of one that it calls.

    Attributes:
        level: The evaluation of a jaxpr that makes it.
        atom: Its variable or literal there.
        eqn: The equation that makes it, `None` for inputs, constants and literals.
    """

    def __init__(self, level: "Level", atom: Any, eqn: Equation | None) -> None:
        self.level, self.atom = level, atom
        self.eqn: Any = eqn

    @property
    def aval(self) -> Aval:
        """The type of the value."""
        return self.atom.aval

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return tuple(self.atom.aval.shape)

    @property
    def params(self) -> dict[str, PyTree]:
        """The parameters of the equation."""
        return {} if self.eqn is None else self.eqn.params

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
        if self.name in (*SAME, "convert_element_type", "not"):
            return self.operands[0].varying
        if self.name == "broadcast_in_dim":
            dims = self.params["broadcast_dimensions"]
            given = dict(zip(dims, self.operands[0].varying, strict=True))
            return tuple(given.get(i, False) for i in range(len(self.shape)))
        return tuple(size != 1 for size in self.shape)

    @functools.cached_property
    def constant(self) -> np.ndarray | None:
        """Its value if it depends on no input and is easy to compute.

        Axes along which it was only broadcast take no memory: their stride is 0.
        """
        if self.eqn is not None and self.atom not in self.level.fixed:
            return None
        root, key = self.level.root, self._key
        if key not in root.constants:
            root.constants[key] = value_of(self)
        return root.constants[key]

    @functools.cached_property
    def _key(self) -> int:
        """A number that is the same for constants that are computed in the same way."""
        described: Any
        if isinstance(self.atom, Literal):
            described = str(self.atom.val), str(self.aval)
        elif self.eqn is None:
            described = id(self.level.consts.get(self.atom, self.atom))
        else:
            operands = tuple(operand._key for operand in self.operands)
            described = self.name, str(self.aval), str(self.params), operands
        keys = self.level.root.keys
        return keys.setdefault(described, len(keys))

    @property
    def scalar(self) -> float | None:
        """The number that all elements of a constant are, if there is one."""
        is_array = self.eqn is None and math.prod(self.shape) > 1
        # An array that the function closes over is not fetched for this.
        value = None if is_array else self.constant
        if value is None or value.dtype.kind in "bc" or not value.size:
            return None
        small = compact(value)
        first = small.reshape(-1)[0]
        return float(first) if np.all(small == first) else None


class Level:
    """One jaxpr of a program: that which is run, or the body of a call in it.

    Attributes:
        jaxpr: The jaxpr.
        caller: The level that holds the call, and the call. `None` for the outermost.
        root: The outermost level.
        keys: Numbers of constants, by how they are computed.
        constants: Their values.
        memo: For what is made of them: layers have masks in common.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[PyTree],
        caller: "tuple[Level, Equation] | None" = None,
    ) -> None:
        self.jaxpr, self.caller = jaxpr, caller
        self.root: Level = self if caller is None else caller[0].root
        self.keys: dict[Any, int] = {}
        self.constants: dict[int, np.ndarray | None] = {}
        self.memo: dict[Any, Any] = {}
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

    @functools.cached_property
    def fixed(self) -> set[Any]:
        """The variables of this level that depend on no input of the outermost one."""
        found = {var for var, value in self.consts.items() if not is_tracer(value)}
        if self.caller is not None:
            outer, call = self.caller
            pairs = zip(self.jaxpr.invars, call.invars, strict=True)
            found |= {
                var
                for var, atom in pairs
                if isinstance(atom, Literal) or atom in outer.fixed
            }
        for eqn in self.jaxpr.eqns:
            atoms = (x for x in eqn.invars if not isinstance(x, Literal))
            if not eqn.effects and all(atom in found for atom in atoms):
                found.update(eqn.outvars)
        return found

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
            self._readers = readers(live_equations(self.jaxpr))
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


def _position(variables: Sequence[PyTree], var: Any) -> int:
    return next(i for i, other in enumerate(variables) if other is var)


def live_equations(
    jaxpr: Jaxpr, replaced: Callable[[int], Sequence[PyTree] | None] = lambda i: None
) -> list[Equation]:
    """Returns the equations whose results are read or that have effects, in order.

    `replaced` returns what the equation of an index reads, if not its operands.
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
