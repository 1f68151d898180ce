"""The values of a jaxpr as terms, for recognising what a function computes.

A term is a value together with the equation that makes it. Calls of jitted functions are
looked through: the result of a call is the term of the value inside that becomes it. Nothing
is run, and nothing is changed by looking.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from mpx._jax._compat import Literal, has_shardings, is_tracer, open_jaxpr
from mpx._program._interpreter import Aval, Jaxpr
from mpx._program._queries import Equation, names

SAME = names("stop_gradient copy copy_p pvary pcast")
"""Operations that return their operand."""
_LARGEST = 2**28
"""The most bytes that a computed constant may have: a mask of 16384 × 16384."""
_JITS = ("jit", "pjit")
_CALLS = (*_JITS, "closed_call", "core_call")


class Term:
    """A value of a jaxpr or of one that it calls.

    Inputs, constants and literals have no equation.
    """

    def __init__(self, level: "Level", atom: Any, eqn: Equation | None) -> None:
        self.level, self.atom = level, atom
        self.eqn: Any = eqn
        self.aval: Aval = atom.aval
        self.shape: tuple[int, ...] = tuple(getattr(atom.aval, "shape", ()))
        self.params: dict[str, PyTree] = {} if eqn is None else eqn.params
        self.name: str = "" if eqn is None else eqn.primitive.name

    @functools.cached_property
    def operands(self) -> "list[Term]":
        """The terms that it is made from."""
        atoms = () if self.eqn is None else self.eqn.invars
        return [self.level.term(atom) for atom in atoms]

    @functools.cached_property
    def constant(self) -> np.ndarray | None:
        """Its value if it depends on no input and is easy to compute.

        Axes along which it was only broadcast have size 1.
        """
        if self.eqn is not None and self.atom not in self.level.fixed:
            return None
        root, key = self.level.root, self._key
        if key not in root.constants:
            root.constants[key] = _value_of(self)
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
        first = value.reshape(-1)[0]
        return float(first) if np.all(value == first) else None


class Level:
    """One jaxpr of a program: that which is run, or the body of a call in it."""

    def __init__(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[PyTree],
        caller: "tuple[Level, Equation] | None" = None,
    ) -> None:
        self.jaxpr, self.caller = jaxpr, caller
        self.root: Level = self if caller is None else caller[0].root
        self.keys: dict[Any, int] = {}  # of constants, by how they are computed
        self.constants: dict[int, np.ndarray | None] = {}
        self.memo: dict[Any, Any] = {}  # layers have masks in common
        self.consts = dict(zip(jaxpr.constvars, consts, strict=True))
        self.makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self._terms: dict[Any, Term] = {}
        self._bodies: dict[int, Level] = {}

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
            body = self._body(eqn)
            if body is None:
                return Term(self, var, eqn)
            return body.term(body.jaxpr.outvars[eqn.outvars.index(var)])
        if self.caller is not None and var not in self.consts:
            outer, call = self.caller
            return outer.term(call.invars[self.jaxpr.invars.index(var)])
        return Term(self, var, None)

    def _body(self, eqn: Equation) -> "Level | None":
        """Returns the level inside a call that can be looked through."""
        name, params = eqn.primitive.name, eqn.params
        if name not in _CALLS or (name in _JITS and has_shardings(params)):
            return None
        if id(eqn) not in self._bodies:
            jaxpr = open_jaxpr(params.get("call_jaxpr", params.get("jaxpr")))
            self._bodies[id(eqn)] = Level(*jaxpr, caller=(self, eqn))
        return self._bodies[id(eqn)]

    @functools.cached_property
    def fixed(self) -> set[Any]:
        """The variables of this level that depend on no input of the outermost one."""
        found = {var for var, value in self.consts.items() if not is_tracer(value)}
        if self.caller is not None:
            outer, call = self.caller
            for var, atom in zip(self.jaxpr.invars, call.invars, strict=True):
                if isinstance(atom, Literal) or atom in outer.fixed:
                    found.add(var)
        for eqn in self.jaxpr.eqns:
            atoms = (x for x in eqn.invars if not isinstance(x, Literal))
            if not eqn.effects and all(atom in found for atom in atoms):
                found.update(eqn.outvars)
        return found


def outermost(term: Term) -> Equation | None:
    """Returns the equation of the outermost level that computes a term."""
    eqn, caller = term.eqn, term.level.caller
    while caller is not None:
        level, eqn = caller
        caller = level.caller
    return eqn


def live_equations(jaxpr: Jaxpr, replaced: dict[int, Sequence[PyTree]]) -> set[int]:
    """Returns the `id`s of the equations whose results are read or that have effects.

    `replaced` has what some equations read instead of their operands, by index.
    """
    read = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    live = set()
    for index, eqn in reversed(list(enumerate(jaxpr.eqns))):
        if eqn.effects or any(var in read for var in eqn.outvars):
            atoms = replaced.get(index) or eqn.invars
            read.update(atom for atom in atoms if not isinstance(atom, Literal))
            live.add(id(eqn))
    return live


# --- Constants ------------------------------------------------------------------------


def _value_of(term: Term) -> np.ndarray | None:
    dtype = getattr(term.aval, "dtype", None)
    if dtype is None or not (jnp.issubdtype(dtype, np.number) or dtype == np.bool_):
        return None
    if term.eqn is None:
        is_literal = isinstance(term.atom, Literal)
        value = term.atom.val if is_literal else term.level.consts.get(term.atom)
        is_known = is_literal or (term.atom in term.level.fixed and value is not None)
        is_here = getattr(value, "is_fully_addressable", True)
        is_small = getattr(value, "nbytes", 0) <= _LARGEST
        return np.asarray(value, dtype) if is_known and is_here and is_small else None
    rule = RULES.get(term.name)
    operands = [x.constant for x in term.operands] if rule is not None else [None]
    if rule is None or 0 in term.shape or any(x is None for x in operands):
        return None
    try:
        with np.errstate(all="ignore"):
            return rule(term, *operands)
    except (ValueError, TypeError):  # a negative power of an integer
        return None


def _divide(x: PyTree, y: PyTree) -> PyTree:
    if not np.issubdtype(x.dtype, np.integer):
        return np.divide(x, y)
    return None if np.any(y == 0) else np.trunc(x / y).astype(x.dtype)


def _choose(which: PyTree, *cases: PyTree) -> PyTree:
    return np.where(which, cases[1], cases[0]) if which.dtype == bool else None


# The names of operations in JAX and in NumPy.
_PAIRS = names(
    "add:add sub:subtract mul:multiply neg:negative abs:abs max:maximum min:minimum "
    "sqrt:sqrt exp:exp log:log exp2:exp2 pow:power integer_pow:power and:bitwise_and "
    "or:bitwise_or xor:bitwise_xor not:bitwise_not eq:equal ne:not_equal lt:less "
    "le:less_equal gt:greater ge:greater_equal"
)
_NUMPY: dict[str, Callable[..., PyTree]] = {
    **{name: getattr(np, other) for name, other in (x.split(":") for x in _PAIRS)},
    **dict.fromkeys((*SAME, "convert_element_type"), lambda x: x),
    "div": _divide,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "select_n": _choose,
}


def _elementwise(term: Term, *operands: np.ndarray) -> np.ndarray | None:
    sizes = np.broadcast_shapes(*(x.shape for x in operands))
    if np.prod(sizes, dtype=float) * term.aval.dtype.itemsize > _LARGEST:
        return None
    more = [np.int32(term.params["y"])] if term.name == "integer_pow" else []
    out = _NUMPY[term.name](*operands, *more)
    return None if out is None else np.asarray(out).astype(term.aval.dtype)


def _iota(term: Term) -> np.ndarray:
    axis = term.params["dimension"]
    line = np.arange(term.shape[axis]).astype(term.aval.dtype)
    return line.reshape([-1 if i == axis else 1 for i in range(len(term.shape))])


def _broadcast(term: Term, x: np.ndarray) -> np.ndarray:
    sizes = dict(zip(term.params["broadcast_dimensions"], x.shape, strict=True))
    return x.reshape([sizes.get(i, 1) for i in range(len(term.shape))])


def _reshaped(term: Term, x: np.ndarray) -> np.ndarray | None:
    is_small = math.prod(term.shape) * x.dtype.itemsize <= _LARGEST
    if term.params.get("dimensions") is not None or not is_small:
        return None
    return np.broadcast_to(x, term.operands[0].shape).reshape(term.shape)


def _sliced(term: Term, x: np.ndarray) -> np.ndarray:
    params = term.params
    steps = params["strides"] or (1,) * x.ndim
    parts = zip(params["start_indices"], params["limit_indices"], steps, strict=True)
    some = zip(x.shape, parts, strict=True)
    return x[tuple(slice(None) if n == 1 else slice(*part) for n, part in some)]


RULES: dict[str, Callable[..., np.ndarray | None]] = {
    **dict.fromkeys(_NUMPY, _elementwise),
    "iota": _iota,
    "broadcast_in_dim": _broadcast,
    "transpose": lambda term, x: x.transpose(term.params["permutation"]),
    "reshape": _reshaped,
    "squeeze": lambda term, x: x.squeeze(tuple(term.params["dimensions"])),
    "slice": _sliced,
}
