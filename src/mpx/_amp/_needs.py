"""How exactly the backward pass has to know a value: which residuals bear 8 bits.

A *root* is a value that is kept: the result of a matmul, or a sum of several values. What
else is needed, as gelu of a matmul's result, is computed from roots again. Four sentences:

1. A root is coded if all that is computed from it ends in a matmul, or in a product with a
   gradient, by operations that bear errors: `_BEARS` lists them.
2. A sum or difference bears no error of its terms, so it is a root itself. Excepted are a
   bias before a matmul or activation, and the mean of the very row that it is taken from.
3. A product bears it if the other factor is a parameter, a gradient, or the result of a matmul
   or bounded activation, or else one number for each row.
4. Everything else reads 16 bits, or the value as it is: exp, log, divisors, comparisons, loops,
   rules of the user's, and what `keep` or `amp_stop` selects.

The readers are not guessed: they are the equations of the backward pass.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mpx._amp._codes import BLOCK, LEAST, axis_of, can_code
from mpx._amp._facts import F32, LOW_DTYPES, Residual, current_recording
from mpx._jax._compat import Literal, open_jaxpr, scopes_of, source_frames
from mpx._program import _queries as queries
from mpx._program._interpreter import Jaxpr, Scopes
from mpx._program._queries import Equation, names

EXACT_NAME = "mpx.exact"
"""The scope of operations, and the name of values, that stay as they are."""
# Cheap operations, which the backward pass runs again, and how they bear an error that is
# small beside the largest number of a block.
_BEARS: dict[str, str] = {
    **dict.fromkeys(
        # The same numbers, or none that is further off.
        names(
            "reshape transpose broadcast_in_dim squeeze expand_dims copy copy_p slice"
        )
        + names(
            "convert_element_type rev stop_gradient sharding_constraint reshard name"
        )
        + names("mesh_cast pvary pcast optimization_barrier pad concatenate split neg")
        + names("reduce_precision max min abs clamp select_n"),
        "moves",
    ),
    # The error grows by the exponent, beside the power of the largest number.
    **dict.fromkeys(names("square integer_pow"), "powers"),
    # Bounded, as their derivatives are: the error of an argument adds itself at most.
    **dict.fromkeys(names("tanh logistic erf erfc one_minus_square"), "smooth"),
    **dict.fromkeys(names("mul div"), "products"),
    **dict.fromkeys(names("add sub add_any"), "sums"),
    # A comparison with 0 reads a sign, which codes can keep.
    **dict.fromkeys(names("eq ne lt le gt ge sign is_finite"), "signs"),
    # They bear a relative error: that of 16 bits.
    **dict.fromkeys(names("log sqrt rsqrt cbrt pow"), "ratios"),
    # They bear none.
    **dict.fromkeys(
        names("exp exp2 expm1 log1p atanh sin cos and or not xor iota"), ""
    ),
}
_SIGNED = frozenset(x for x, how in _BEARS.items() if how == "moves") - {"abs"}
_STEPS = frozenset(names("eq ne lt le gt ge sign is_finite and or not xor"))
_BOUNDED = _STEPS.union(names("tanh logistic erf erfc sin cos"))
_REDUCTIONS = frozenset(names("reduce_sum reduce_max reduce_min reduce_prod"))
PRODUCTS = (*queries.MATMULS, queries.GROUPED)
# Results that are alike in size if their first operands are.
_ALIKE = frozenset(names("gather dynamic_slice reduce_window_sum"))
# So many large values may join in a result that is computed again; else it is a root.
_JOINED = {"mul": 4, "div": 4, "and": 4, "or": 4, "select_n": 4}
_SMALL = 8  # A value is small beside one that has so many times more numbers.
_DEEPEST = 100  # equations between a root and a value
_ZERO = "zero"
OPERAND, FACTOR, ROUNDED, EXACT = range(4)
"""How exactly a value has to be known: as an operand of a matmul or smooth activation, as a
factor of a gradient, to 16 bits, or as it is."""

IsExact = Callable[[Equation, Scopes], bool]


class Fact(NamedTuple):
    """What is known of a value; by default, of a number of the program."""

    origins: frozenset[Any] = frozenset()  # what it is computed from, besides arguments
    of: frozenset[Any] | None = None  # for a mean or another reduction: its operand's
    is_param: bool = True  # whether parameters and constants alone enter
    is_linear: bool = False  # whether it is a gradient
    base: Any = None  # the value whose sign it has
    # Sizes are bounded, as of activations (-1), alike (0), alike within rows (1), or any (2).
    rough: int = -1
    is_row: bool = True  # whether it is one number for each row, along the last axis


class Need(NamedTuple):
    """How exactly a value has to be known."""

    level: int
    by_row: bool = False  # whether blocks have to lie within rows; else 16 bits
    is_signed: bool = False  # whether its sign is read
    depth: int = 0  # equations between it and what reads it
    why: str = ""  # what reads it, if that bears no codes

    def join(self, other: "Need") -> "Need":
        """Returns what two readers need."""
        first = max(self, other, key=lambda x: x.level)
        return first._replace(
            by_row=self.by_row or other.by_row,
            is_signed=self.is_signed or other.is_signed,
            depth=max(self.depth, other.depth),
        )

    def at_least(self, level: int, why: str = "") -> "Need":
        """Returns the same need, or one that is more exact."""
        return self if self.level >= level else self._replace(level=level, why=why)


class Reading:
    """The needs for the values of an open jaxpr, given those for some of them.

    With `keeps`, values can be roots; else it is computed again as a whole.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        facts: Sequence[Fact],
        is_exact: IsExact,
        *,
        keeps: bool = False,
    ) -> None:
        self.jaxpr, self._keeps, self._is_exact = jaxpr, keeps, is_exact
        self.maker = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self.needs: dict[Any, Need] = {}
        self.roots: dict[Any, None] = {}
        self._inner: dict[int, Reading] = {}
        self.facts: dict[Any, Fact] = dict.fromkeys(jaxpr.constvars, Fact())
        self.facts.update(zip(jaxpr.invars, facts, strict=True))
        for eqn in jaxpr.eqns:
            self._follow(eqn)

    def fact(self, atom: Any) -> Fact:
        """Returns what is known of a value."""
        if is_var(atom):
            return self.facts[atom]
        return Fact(base=None if np.any(atom.val) else _ZERO)

    # --- From operands to results ---

    def _is_cheap(self, eqn: Equation) -> bool:
        inner = self._inner.get(id(eqn))
        if inner is not None:
            return all(map(inner._is_cheap, inner.jaxpr.eqns))
        return eqn.primitive.name in _BEARS

    def _follow(self, eqn: Equation) -> None:
        name, reads = eqn.primitive.name, [*map(self.fact, eqn.invars)]
        body = (
            queries.called(eqn) if name in (*queries.CALLS, "custom_jvp_call") else None
        )
        if body is not None:
            opened, _ = open_jaxpr(body)
            self._inner[id(eqn)] = Reading(opened, reads, self._is_exact)
        is_cheap, joined = self._is_cheap(eqn), self._joined(eqn, reads)
        for i, var in enumerate(eqn.outvars):
            fact = joined._replace(is_row=_is_row(eqn, reads, var))
            if (inner := self._inner.get(id(eqn))) is not None:
                fact = inner.fact(inner.jaxpr.outvars[i])._replace(
                    origins=joined.origins
                )
            limits = (len(_large(var, x)) for x in reads)
            is_joined = len(_large(var, fact)) > max([*limits, _JOINED.get(name, 1)])
            if is_joined or not (is_cheap or fact.is_linear):
                fact = fact._replace(origins=frozenset({var}), base=var)
            rough = min(fact.rough, 2 - fact.is_row)
            self.facts[var] = fact._replace(base=fact.base or var, rough=rough)

    def _joined(self, eqn: Equation, reads: Sequence[Fact]) -> Fact:
        """Returns what is known of a result from what is known of the operands."""
        name, how = eqn.primitive.name, _BEARS.get(eqn.primitive.name, "unknown")
        join = lambda sets: frozenset[Any]().union(*sets)  # noqa: E731
        origins, of = join(x.origins for x in reads), [x.of for x in reads if x.origins]
        if name in _REDUCTIONS:
            of = [origins.union(*(x for x in of if x))]
        signed = {x.base for x in reads} - {_ZERO}
        rough = max([x.rough for x in reads], default=0)
        if name in _BOUNDED or self._is_bump(eqn):
            rough = -1
        elif name in PRODUCTS or any(x.is_linear for x in reads):
            rough = max(0, rough if name not in PRODUCTS else 0)
        elif name == "div":
            rough = max(rough, 0 if _size(eqn.invars[1]) == 1 else 2 - reads[1].is_row)
        elif how in ("ratios", "") or _is_inverse(eqn):
            rough = 2
        elif how == "unknown":
            rough = max(0, rough) if name in _ALIKE else 2
        return Fact(
            origins,
            None if None in of or not of else join(x for x in of if x),
            is_param=all(x.is_param for x in reads),
            is_linear=any(x.is_linear for x in reads),
            base=(signed or {_ZERO}).pop()
            if name in _SIGNED and len(signed) < 2
            else None,
            rough=rough,
        )

    def _is_bump(self, eqn: Equation) -> bool:
        """Returns whether an equation computes exp(-y²), as the derivative of erf does."""
        negative = (
            self.maker.get(eqn.invars[0]) if eqn.primitive.name == "exp" else None
        )
        is_negative = negative is not None and negative.primitive.name == "neg"
        square = self.maker.get(negative.invars[0]) if is_negative else None
        if square is None or not square.invars:
            return False
        first, *rest = square.invars
        is_product = square.primitive.name == "mul" and rest[0] is first
        is_power = _BEARS.get(square.primitive.name) == "powers"
        return is_product or (is_power and square.params.get("y", 2) == 2)

    def _asks_sign(self, eqn: Equation) -> bool:
        """Returns whether an equation compares with 0: x with 0, or with max(x, 0)."""
        first, *rest = [x for x in eqn.invars if self.fact(x).base is not _ZERO]
        made = [self.maker.get(x) for x in rest if is_var(x)]
        return len(made) == len(rest) and all(
            x is not None
            and x.primitive.name in ("max", "min")
            and {self.fact(y).base for y in x.invars} == {self.fact(first).base, _ZERO}
            and first in x.invars
            for x in made
        )

    # --- From results to operands ---

    def require(self, atom: Any, need: Need) -> None:
        """Adds a need for a value."""
        if is_var(atom):
            before = self.needs.get(atom)
            self.needs[atom] = need if before is None else before.join(need)

    def run(self) -> None:
        """Finds the needs for all values, from those that are required so far."""
        for eqn in reversed(self.jaxpr.eqns):
            outs = [x for x in eqn.outvars if x in self.needs]
            if outs:
                self._ask(eqn, outs)

    def _ask(self, eqn: Equation, outs: list[Any]) -> None:
        need, *others = [self.needs[x] for x in outs]
        for other in others:
            need = need.join(other)
        is_exact = self._is_exact(eqn, scopes_of(eqn))
        if is_exact or eqn.params.get("name") == EXACT_NAME:
            need = need._replace(level=EXACT, why="it is kept exact")
        is_data = any(self.facts[x].origins for x in outs)
        can_keep = self._keeps and (is_data or not self._is_cheap(eqn))
        is_stored = (
            eqn.primitive.name == "convert_element_type" and need.level >= ROUNDED
        )
        is_stored &= outs[0].aval.dtype in LOW_DTYPES
        is_made = any(x in self.facts[x].origins for x in outs)
        is_moved = need.by_row and bool(eqn.invars) and not _keeps_rows(eqn, 0)
        is_moved &= need.level <= FACTOR and _size(eqn.invars[0]) == _size(outs[0])
        asked = None
        if not (
            can_keep and (is_made or is_stored or is_moved or need.depth > _DEEPEST)
        ):
            exact = Need(EXACT, why=need.why or f"`{eqn.primitive.name}` reads it")
            reads = [*map(self.fact, eqn.invars)]
            plain = [Need(FACTOR) if x.is_linear else exact for x in reads]
            asked = plain if is_exact else self._operands(eqn, reads, need, plain)
            asked = plain if asked is None and not can_keep else asked
        if asked is None:
            self.roots.update(dict.fromkeys(outs))
            self.needs.update(dict.fromkeys(outs, need))
            return
        for i, (atom, each) in enumerate(zip(eqn.invars, asked, strict=True)):
            each = each._replace(depth=need.depth + 1)
            if each.by_row and not _keeps_rows(eqn, i):
                each = each.at_least(
                    ROUNDED, "its rows meet numbers of very unlike sizes"
                )
            self.require(atom, each)

    def _operands(
        self, eqn: Equation, reads: list[Fact], need: Need, exact: list[Need]
    ) -> list[Need] | None:
        """Returns the needs for operands; `None` if the result has to be a root."""
        name, how = eqn.primitive.name, _BEARS.get(eqn.primitive.name, "")
        like, is_linear = [need] * len(reads), self.facts[eqn.outvars[0]].is_linear
        if (inner := self._inner.get(id(eqn))) is not None:
            for var in inner.jaxpr.outvars:
                inner.require(var, need)
            inner.run()
            return [inner.needs.get(x, Need(OPERAND)) for x in inner.jaxpr.invars]
        if is_linear and name in PRODUCTS:
            return [Need(OPERAND)] * len(reads)
        if how == "products" and (is_linear or need.level < EXACT):
            return _factors(name, reads, need.at_least(FACTOR) if is_linear else need)
        if name == "select_n":
            return [exact[0], *like[1:]]
        if is_linear:
            # Whatever it is, it is linear in gradients; a sum is a product with ones.
            found = need if how else Need(FACTOR)
            pairs = zip(reads, exact, strict=True)
            return [found if fact.is_linear else other for fact, other in pairs]
        if how == "signs":
            read = [Need(OPERAND, is_signed=True)] * len(reads)
            return read if self._asks_sign(eqn) else None
        if need.is_signed and name not in _SIGNED:
            return None
        if name in PRODUCTS:
            is_low = eqn.invars[0].aval.dtype in LOW_DTYPES
            level = min(need.level, ROUNDED) if is_low else need.level
            level = level if level >= ROUNDED else OPERAND
            return [Need(level, why=need.why)] * len(reads)
        if need.level == EXACT or how == "":
            is_borne = need.level < EXACT and (
                name in _REDUCTIONS or self._is_bump(eqn)
            )
            return like if is_borne else exact
        if how == "sums":
            return self._terms(name, eqn.outvars[0], reads, need, exact)
        if how == "ratios" or _is_inverse(eqn):
            return [need.at_least(ROUNDED, f"`{name}` reads it")] * len(reads)
        if how == "smooth" and need.level < ROUNDED:
            return [need._replace(level=OPERAND)] * len(reads)
        return like

    def _terms(
        self, name: str, out: Any, reads: list[Fact], need: Need, exact: list[Need]
    ) -> list[Need] | None:
        """Returns the needs for terms; `None` if their sum has to be a root."""
        like = [need] * 2
        if all(x.rough < 0 for x in reads) or _ZERO in (x.base for x in reads):
            return like
        for i, (term, other) in enumerate((reads, reads[::-1])):
            if other.of and other.of <= term.origins and term.of is None:
                # An error beside the largest number of the row, as of an operand.
                level = OPERAND if need.level == FACTOR else need.level
                row = need._replace(level=level, by_row=True)
                why = "a mean of other rows is subtracted"
                like[1 - i] = exact[1 - i]
                like[i] = row if other.is_row else need.at_least(ROUNDED, why)
                return like
        is_known = all(x.origins or x.is_param for x in reads)
        if (
            need.level == OPERAND
            and is_known
            and len(_large(out, self.facts[out])) == 1
        ):
            return like
        if not self._keeps and name != "sub":
            return [need.at_least(ROUNDED, "a sum of several values reads it")] * 2
        return exact if need.level == ROUNDED else None


def _factors(name: str, reads: list[Fact], need: Need) -> list[Need]:
    """Returns the needs for the factors of a product, or for a dividend and divisor."""
    found = []
    for other in reads[::-1]:
        rough = other.rough
        if name == "div":
            rough = (
                0 if other.origins == frozenset() and other.is_row else 2 - other.is_row
            )
        each = need._replace(by_row=need.by_row or rough == 1)
        why = "it meets numbers of very unlike sizes"
        found.append(each.at_least(ROUNDED, why) if rough == 2 else each)
    return (
        [found[0], need.at_least(ROUNDED, "`div` reads it")] if name == "div" else found
    )


class Roots(Reading):
    """The roots of an open jaxpr, whose inputs are "param", "alive" or "data".

    `wanted` are the values that `program`, its backward pass, reads.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        kinds: Sequence[str],
        wanted: Sequence[Any],
        program: Jaxpr,
        is_exact: IsExact,
    ) -> None:
        given = [*zip(jaxpr.invars, kinds, strict=True)]
        facts = [
            Fact(
                frozenset({var} if kind == "data" else ()),
                is_param=kind == "param",
                base=var,
                rough=0,
                is_row=_is_thin(var),
            )
            for var, kind in given
        ]
        super().__init__(jaxpr, facts, is_exact, keeps=True)
        body, _ = open_jaxpr(program)
        gradient = Fact(is_param=False, is_linear=True, rough=0, is_row=False)
        count = len(body.invars) - len(wanted)
        readers = Reading(
            body, [*map(self.fact, wanted), *[gradient] * count], is_exact
        )
        for var in body.outvars:
            readers.require(var, Need(FACTOR))
        readers.run()
        for atom, var in zip(wanted, body.invars, strict=False):
            if var in readers.needs:
                self.require(atom, readers.needs[var]._replace(depth=0))
        self.run()
        data = {var for var, kind in given if kind == "data"}
        self.roots.update((var, None) for var in data if var in self.needs)
        self._drop(data)
        self._sources: dict[Any, tuple[Any, ...]] = {}

    def _drop(self, data: set[Any]) -> None:
        """Drops roots that can be computed exactly from others that are kept as they are."""
        is_known = lambda x: x in self.roots and self.form_of(x) is None  # noqa: E731
        inputs = (*self.jaxpr.constvars, *self.jaxpr.invars)
        known = {x: 0 for x in inputs if x not in data or is_known(x)}
        for eqn in self.jaxpr.eqns:
            depths = [known.get(x, _DEEPEST) for x in eqn.invars if is_var(x)]
            depth = 1 + max(depths, default=0)
            if depth <= _DEEPEST and self._is_cheap(eqn):
                known.update(dict.fromkeys(eqn.outvars, depth))
                for var in eqn.outvars:
                    self.roots.pop(var, None)
            known.update((x, 0) for x in eqn.outvars if is_known(x))

    def sources(self, atom: Any) -> tuple[Any, ...]:
        """Returns the roots that a value is computed again from."""
        if not is_var(atom):
            return ()
        if atom not in self._sources:
            read = self.maker[atom].invars if atom in self.maker else ()
            found = (
                () if atom in self.roots else [y for x in read for y in self.sources(x)]
            )
            self._sources[atom] = (
                (atom,) if atom in self.roots else (*dict.fromkeys(found),)
            )
        return self._sources[atom]

    def form_of(self, root: Any) -> int | None:
        """Returns the bits in which a root is kept, 8 or 16; `None` as it is."""
        aval, need, fact = root.aval, self.needs[root], self.facts[root]
        name = self.maker[root].primitive.name if root in self.maker else ""
        if fact.is_param or name in _REDUCTIONS or need.level == EXACT:
            return None
        if not jnp.issubdtype(aval.dtype, jnp.floating) or _size(root) < LEAST:
            return None
        is_alike = fact.rough < 2 and need.level <= FACTOR and can_code(aval)
        by_row = need.by_row or fact.rough == 1
        if is_alike and (not by_row or axis_of(aval) == aval.ndim - 1):
            return 8
        return 16 if aval.dtype == F32 else None

    def tell(self, roots: Iterable[Any], form: str) -> None:
        """Tells the report how large roots are kept."""
        recording = current_recording()
        for root in roots if recording is not None else ():
            bits, dtype = self.form_of(root), root.aval.dtype.name
            frames = source_frames(self.maker[root]) if root in self.maker else ()
            told = Residual(
                tuple(root.aval.shape),
                dtype,
                {8: form, 16: "bfloat16", None: dtype}[bits],
                "" if bits == 8 else self.needs[root].why or "codes save too little",
                f"{frames[0][1]}:{frames[0][2]}" if frames else "an input",
            )
            if _size(root) >= LEAST:
                recording.residuals.append(told)


def is_var(atom: Any) -> bool:
    """Returns whether an atom of a jaxpr is a variable."""
    return not isinstance(atom, Literal)


def _large(var: Any, fact: Fact) -> list[Any]:
    """Returns the values not much smaller that a value is computed from, without masks."""
    found = [x for x in fact.origins if _size(x) * _SMALL > _size(var)]
    return [x for x in found if x.aval.dtype != np.bool_]


def _size(atom: Any) -> int:
    size = getattr(atom.aval, "size", 0)
    return size if isinstance(size, int) else 1 << 60  # a symbol: it is never coded


def _is_inverse(eqn: Equation) -> bool:
    return eqn.primitive.name == "integer_pow" and eqn.params["y"] < 0


def _is_thin(var: Any) -> bool:
    return getattr(var.aval, "shape", ())[-1:] in ((), (1,))


def _is_row(eqn: Equation, reads: Sequence[Fact], out: Any) -> bool:
    """Returns whether a result is one number for each row."""
    if eqn.primitive.name == "broadcast_in_dim":
        *_, last = (-1, *eqn.params["broadcast_dimensions"])
        return last < out.aval.ndim - 1 or reads[0].is_row
    is_alike = all(x.aval.ndim in (0, out.aval.ndim) for x in eqn.invars)
    is_moved = eqn.primitive.name in ("transpose", "reshape") or not is_alike
    is_alike = not is_moved and eqn.primitive.name in _BEARS and bool(reads)
    return _is_thin(out) or (is_alike and all(x.is_row for x in reads))


def _keeps_rows(eqn: Equation, position: int) -> bool:
    """Returns whether blocks of an operand's rows are within rows of the result."""
    name, shapes = (
        eqn.primitive.name,
        [
            getattr(x.aval, "shape", ())
            for x in (eqn.invars[position], *eqn.outvars[:1])
        ],
    )
    if name == "transpose":
        return eqn.params["permutation"][-1] == len(shapes[0]) - 1
    if name in ("reshape", "squeeze", "expand_dims"):
        return all(shape[-1:] and shape[-1] % BLOCK == 0 for shape in shapes)
    return name in _REDUCTIONS or len(shapes[0]) in (0, len(shapes[1]))
