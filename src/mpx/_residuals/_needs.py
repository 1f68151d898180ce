"""Which residuals bear 8 bits: an allow-list of what the backward pass may read from codes.

A *root* is a value that is kept. What else the backward pass needs, such as the gelu of a sum,
is computed again from roots. Three sentences:

1. A value is coded if all its readers are known to bear codes: they are operands of matmuls,
   factors of gradients, or made from it by moves, products and smooth activations (`BEARS`).
2. A sum or difference is a root itself, so the error is relative to what is read. Only sums
   inside an activation, which do not cancel, are computed from codes.
3. Everything else is computed exactly, from the arrays that `amp` stores.

The readers are the equations of the backward pass.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpx._jax._compat import scopes_of, source_frames
from mpx._jax._formats import LOW_DTYPES
from mpx._program import _queries as queries
from mpx._program._interpreter import Jaxpr, Scopes
from mpx._program._primitives import CASTS
from mpx._program._queries import Equation, names
from mpx._program._recording import Residual, current_recording
from mpx._residuals._codes import LEAST, axis_of, can_code
from mpx._residuals._facts import (
    AGAIN,
    ALIKE,
    BEARS,
    BOUNDED,
    BY_ROW,
    NEGATIVE,
    PICKS,
    POSITIVE,
    PRODUCTS,
    ROUGH,
    SMALL,
    STEPS,
    ZERO,
    Fact,
    Need,
    adds_bias,
    flipped,
    is_power,
    is_row_number,
    is_row_sum,
    is_thin,
    is_var,
    keeps_rows,
    name_of,
    sign_of,
    signed_by,
    size_of,
)

EXACT_NAME = "mpx.exact"
"""The scope of operations, and the name of values, that stay as they are."""
IsExact = Callable[[Equation, Scopes], bool]
_BOUNDED = STEPS.union(names("tanh logistic erf erfc sin cos"))
# What may be coded, if it is large and no product, sum or other cheap result.
_CODED = PICKS.union(PRODUCTS, queries.REMAT)
# So many large values may join in a result that is computed again from codes; else 1.
_JOINED = dict.fromkeys(names("mul div select_n"), 4)
_MIXES = frozenset(names("select_n concatenate pad max min clamp"))
_LARGE = 64  # Numbers of the program that are larger outgrow activations.
_DEEPEST = 100  # equations between a root and a value
_UNLIKE = "one block would mix very large and very small numbers"


class Roots:
    """The roots of an open jaxpr, whose inputs are "param", "alive", "constant" or "data".

    Constants may hold numbers of any size, such as a mask does. `wanted` are the values that
    `program`, its backward pass, reads. Calls are inlined.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        kinds: Sequence[str],
        wanted: Sequence[Any],
        program: Jaxpr,
        is_exact: IsExact,
    ) -> None:
        self._is_exact = is_exact
        self.maker: dict[Any, Equation] = {}
        self.needs: dict[Any, Need] = {}
        self.roots: dict[Any, None] = {}
        # Of x, from which its mean is subtracted: the first difference, and the mean.
        self.centred: dict[Any, tuple[Any, Any]] = {}
        self._ends: set[Any] = set()  # computed again in no case
        self._joins: set[Any] = set()  # computed again from exact values only
        inputs, kinds = [*jaxpr.constvars, *jaxpr.invars], [*kinds]
        kinds = ["param"] * len(jaxpr.constvars) + kinds
        self.facts: dict[Any, Fact] = {
            var: Fact(
                frozenset({var}),
                ROUGH if x == "constant" and size_of(var) > 1 else ALIKE,
                var,
                is_thin(var),
                x == "param",
                False,
            )
            for var, x in zip(inputs, kinds, strict=True)
        }
        self._data = {
            x for x, kind in zip(inputs, kinds, strict=True) if kind == "data"
        }
        self._alive = {*inputs} - self._data
        self._eqns = jaxpr.eqns
        for eqn in jaxpr.eqns:
            self._follow(eqn)
        self._known = {*self.facts}
        self._read_by(program, wanted)
        for eqn in reversed(jaxpr.eqns):
            self._ask(eqn)
        found = (x for x in self._data if x in self.needs and not self.is_derived(x))
        self.roots.update(dict.fromkeys(found))
        self._drop()
        self._sources: dict[Any, tuple[Any, ...]] = {}

    def fact(self, atom: Any) -> Fact:
        """Returns what is known of a value."""
        if is_var(atom):
            return self.facts[atom]
        is_number = atom.aval.dtype != jax.dtypes.float0
        value = np.asarray(atom.val if is_number else 0)
        parts = [np.real(value), np.imag(value)][: 1 + np.iscomplexobj(value)]
        numbers = np.ravel(np.asarray(parts, np.float32))
        sizes = BOUNDED if np.all(np.abs(numbers) <= _LARGE) else ROUGH
        signs = {*np.sign(numbers).tolist()}
        found = {0: ZERO, 1: POSITIVE, -1: NEGATIVE}.get(min(signs, default=2))
        sign = found if len(signs) == 1 else None
        return Fact(frozenset(), sizes, sign, True, True, False)

    # --- From operands to results ---

    def _follow(self, eqn: Equation) -> None:
        name, reads = eqn.primitive.name, [*map(self.fact, eqn.invars)]
        origins = frozenset[Any]().union(*(x.origins for x in reads))
        is_linear = any(x.is_linear for x in reads)
        depth = 1 + max([x.depth for x in reads], default=0)
        for var in eqn.outvars:
            self.maker[var] = eqn
            is_row, sizes = is_row_number(eqn, reads, var), self._sizes(eqn, reads)
            most = max(
                [
                    _JOINED.get(name, 1),
                    *(len(self._large(var, x.origins)) for x in reads),
                ]
            )
            is_sum = BEARS.get(name) == "sums" and not self._is_safe(eqn, reads)
            if not is_linear and (name not in AGAIN or depth > _DEEPEST):
                self._ends.add(var)
            elif is_sum or len(self._large(var, origins)) > most:
                self._joins.add(var)
            is_end = var in self._joins and not origins <= self._alive
            self.facts[var] = Fact(
                frozenset({var}) if is_end or var in self._ends else origins,
                min(sizes, BY_ROW) if is_row else sizes,
                sign_of(eqn, reads) or var,
                is_row,
                all(x.is_param for x in reads),
                is_linear,
                0 if var in self._ends else depth,
                is_row_sum(eqn, reads, var),
                not is_end
                and var not in self._ends
                and (adds_bias(eqn, reads) or any(x.has_bias for x in reads)),
            )
        if name == "sub" and self._is_mean(*eqn.invars[::-1]):
            self.centred.setdefault(eqn.invars[0], (eqn.outvars[0], eqn.invars[1]))

    def _large(self, var: Any, *origins: frozenset[Any]) -> list[Any]:
        """Returns what a value is made of that is neither a mask nor much smaller."""
        found = frozenset[Any]().union(*origins) - self._alive
        found = (x for x in found if size_of(x) * SMALL > size_of(var))
        return [x for x in found if x.aval.dtype != np.bool_]

    def _sizes(self, eqn: Equation, reads: Sequence[Fact]) -> int:
        """Returns how the sizes of a result differ."""
        name = name_of(eqn)
        if name in _MIXES:  # Neither masks nor zeros are numbers of other sizes.
            reads = [x for x in reads[name == "select_n" :] if x.sign is not ZERO]
        most = max([x.sizes for x in reads], default=BOUNDED)
        if name in _BOUNDED or self._is_bump(eqn, reads):
            return BOUNDED
        if name in PRODUCTS or name in queries.ATTENTION:
            return ALIKE
        is_mixed = most >= BY_ROW and len(reads) > 1
        is_mixed &= not all(x.is_row for x in reads)
        if (name in _MIXES and is_mixed) or (
            name == "mul" and any(map(self._is_given, reads))
        ):
            return ROUGH
        if name == "div" and reads[1].is_row:
            is_number = size_of(eqn.invars[1]) == 1
            return reads[0].sizes if is_number else max(reads[0].sizes, BY_ROW)
        is_moved = name in PICKS or any(x.is_linear for x in reads)
        if name == "div" or not (is_moved or name in BEARS or is_power(eqn)):
            return ROUGH
        return max(most, ALIKE) if is_moved else most

    def _is_safe(self, eqn: Equation, reads: Sequence[Fact]) -> bool:
        """Returns whether terms do not cancel, or are functions of one value as in an activation.

        Nor is a bias of a product or of a distance to a mean: what it cancels was about as far
        off in 16 bits. A second one may cancel the first, which is in the codes.
        """
        if adds_bias(eqn, reads):
            others = [x for x in reads if not x.is_param]
            origins = self._large(eqn.outvars[0], *(x.origins for x in others))
            return not any(x.has_bias for x in others) and all(
                map(self._is_plain, origins)
            )
        signs, terms = [x.sign for x in reads], [x for x in reads if x.origins]
        if eqn.primitive.name == "sub":
            signs[1] = flipped(signs[1])
        origins = frozenset[Any]().union(*(x.origins for x in terms))
        is_smooth = any(x.sizes == BOUNDED for x in terms) or signs[0] == signs[1]
        return ZERO in signs or (len(origins - self._alive) <= 1 and is_smooth)

    def _is_plain(self, root: Any) -> bool:
        """Returns whether a root is a product, or the distance to a mean."""
        made = self.maker.get(root)
        is_product = made is not None and made.primitive.name in PRODUCTS
        return is_product or any(root is x for x, _ in self.centred.values())

    def _is_bump(self, eqn: Equation, reads: Sequence[Fact]) -> bool:
        """Returns whether a result is that of exp(-x²) or 1 / (1 + x²), or alike."""
        if eqn.primitive.name != "div":
            return eqn.primitive.name == "exp" and reads[0].sign is NEGATIVE
        made = self.maker.get(eqn.invars[1]) if is_var(eqn.invars[1]) else None
        if made is None or made.primitive.name != "add" or is_var(eqn.invars[0]):
            return False
        is_apart = not all(map(is_var, made.invars))
        return is_apart and {self.fact(x).sign for x in made.invars} == {POSITIVE}

    def _is_mean(self, mean: Any, x: Any) -> bool:
        """Returns whether a value is the mean of another one along some axes."""
        if not (is_var(mean) and is_var(x)):
            return False
        made = self.maker.get(mean)
        while made is not None and made.invars and is_var(made.invars[0]):
            name, (first, *numbers) = made.primitive.name, made.invars
            if name == "reduce_sum":
                return self._before_casts(first) is self._before_casts(x)
            is_scaled = name in ("mul", "div") and not any(map(is_var, numbers))
            is_moved = is_scaled or name in queries.MOVES
            made = self.maker.get(first) if is_moved else None
        return False

    def _before_casts(self, var: Any) -> Any:
        while (made := self.maker.get(var)) is not None:
            if made.primitive.name not in CASTS or not is_var(made.invars[0]):
                break
            var = made.invars[0]
        return var

    def _asks_sign(self, eqn: Equation) -> bool:
        """Returns whether an equation compares with 0: x with 0, or with max(x, 0)."""
        found = [x for x in eqn.invars if self.fact(x).sign is not ZERO]
        first, rest = found[0] if found else None, found[1:]
        made = [self.maker.get(x) for x in rest if is_var(x)]
        return len(made) == len(rest) and all(
            x is not None
            and x.primitive.name in ("max", "min")
            and first in x.invars
            and ZERO in [self.fact(y).sign for y in x.invars]
            for x in made
        )

    # --- From results to operands ---

    def _require(self, atom: Any, need: Need | None) -> None:
        if is_var(atom) and need is not None:
            self.needs[atom] = self.needs.get(atom, Need()).join(need)

    def _read_by(self, program: Jaxpr, wanted: Sequence[Any]) -> None:
        """Finds what the backward pass needs."""
        facts = [*map(self.fact, wanted)]
        facts += [Fact()] * (len(program.invars) - len(wanted))
        self.facts.update(zip(program.invars, facts, strict=True))
        number = Fact(sizes=ROUGH, is_linear=False)
        self.facts.update(dict.fromkeys(program.constvars, number))
        forward = dict(self.maker)
        pairs = zip(program.invars, wanted, strict=False)
        self.maker.update(
            (x, self.maker[y]) for x, y in pairs if is_var(y) and y in forward
        )
        for eqn in program.eqns:
            self._follow(eqn)
        self.needs.update(dict.fromkeys(filter(is_var, program.outvars), Need()))
        for eqn in reversed(program.eqns):
            reads = [*map(self.fact, eqn.invars)]
            if any(x.is_linear for x in reads):
                self._ask_linear(eqn, reads)
            else:
                self._ask(eqn)
        self.maker = forward
        for atom, var in zip(wanted, program.invars, strict=False):
            self._require(atom, self.needs.get(var))

    def _ask_linear(self, eqn: Equation, reads: Sequence[Fact]) -> None:
        """Finds the needs for operands; that for a gradient is what its factors need."""
        need = Need()
        for var in eqn.outvars:
            need = need.join(self.needs.get(var, Need()))
        pairs = zip(reads, self._factors(eqn, reads), strict=True)
        is_product = eqn.primitive.name == "mul"
        asked = [x if is_product or not fact.is_linear else Need() for fact, x in pairs]
        if name_of(eqn) not in PRODUCTS:
            asked = [x.join(need) for x in asked]
        self._require_all(eqn, asked)

    def _require_all(self, eqn: Equation, asked: Sequence[Need]) -> None:
        for i, (atom, need) in enumerate(zip(eqn.invars, asked, strict=True)):
            # A gradient with one number for each row is a sum over rows, or spread over them.
            out = eqn.outvars[0]
            is_sum = self.fact(atom).is_linear and (
                is_thin(atom) or is_thin(out) or self.fact(out).is_sum
            )
            is_moved = need.by_row and not (need.why or is_sum or keeps_rows(eqn, i))
            self._require(atom, Need(_UNLIKE) if is_moved else need)

    def _factors(self, eqn: Equation, reads: Sequence[Fact]) -> list[Need]:
        """Returns the needs for the operands of a product, or of a linear equation."""
        name = name_of(eqn)
        exact = Need(f"`{name}` reads it")
        if self._is_exact(eqn, scopes_of(eqn)):
            return [Need("it is kept exact")] * len(reads)
        if name in PRODUCTS:
            return [Need()] * len(reads)
        if name != "mul":
            return [exact] * len(reads)
        # A sum over each row is a number for each row.
        is_rough = lambda x: (  # noqa: E731
            (x.sizes == ROUGH or self._is_given(x)) and not all(y.is_sum for y in reads)
        )
        return [
            Need(_UNLIKE) if is_rough(x) else Need("", x.sizes >= BY_ROW)
            for x in reads[::-1]
        ]

    def _is_given(self, x: Fact) -> bool:
        """Returns whether a factor is made of arguments, which hold numbers of any size."""
        is_other = x.is_linear or x.is_param or x.is_row or not x.origins
        return not is_other and x.origins <= self._alive

    def _ask(self, eqn: Equation) -> None:
        """Makes results that are needed roots, or finds the needs for the operands."""
        outs = [x for x in eqn.outvars if x in self.needs]
        if not outs or self.is_derived(outs[0]):
            return
        need = Need()
        for var in outs:
            need = need.join(self.needs[var])
        if eqn.params.get("name") == EXACT_NAME or self._is_exact(eqn, scopes_of(eqn)):
            need = need._replace(why=need.why or "it is kept exact")
        is_forward = outs[0] in self._known
        has_data = any(not self.facts[x].origins <= self._alive for x in outs)
        is_kept = is_forward and has_data and self._is_stored(eqn, outs[0], need)
        reads = [*map(self.fact, eqn.invars)]
        asked = None if is_kept else self._operands(eqn, outs[0], reads, need)
        can_keep = is_forward and has_data and all(self._fits(x, need) for x in outs)
        if asked is None and (is_kept or can_keep):
            self.roots.update(dict.fromkeys(outs))
            self.needs.update(dict.fromkeys(outs, need))
            for x in (x for x in eqn.invars if is_var(x) and x in self.centred):
                if self.centred[x][0] is outs[0]:
                    self._require(self.centred[x][1], Need("a difference reads it"))
            return
        exact = Need(need.why or f"`{eqn.primitive.name}` reads it")
        self._require_all(eqn, asked or [exact] * len(reads))

    def _is_stored(self, eqn: Equation, out: Any, need: Need) -> bool:
        """Returns whether a result is not computed again."""
        if out in self._ends:
            return True
        dtype = getattr(out.aval, "dtype", None)
        is_low = eqn.primitive.name in CASTS and dtype in LOW_DTYPES
        is_mask = dtype == np.bool_ and not (
            eqn.primitive.name in STEPS and self._asks_sign(eqn)
        )
        return bool(need.why) and (is_low or is_mask)

    def _operands(
        self, eqn: Equation, out: Any, reads: Sequence[Fact], need: Need
    ) -> list[Need] | None:
        """Returns the needs for operands; `None` if no result can be made of codes."""
        name, how = eqn.primitive.name, BEARS.get(eqn.primitive.name)
        sign = signed_by(self.facts[out].sign)
        if name in STEPS and self._asks_sign(eqn):
            return [Need(is_signed=True)] * len(reads)
        if name == "sub" and not need.why and (x := self._first(eqn)) is not None:
            # Another mean of x, which is the first difference and its mean.
            self._require(self.centred[x][0], need)
            return [need, Need("a difference reads it")]
        if need.why or out in self._joins or (need.is_signed and sign is out):
            return None
        like = [
            need._replace(is_signed=need.is_signed and signed_by(x.sign) is sign)
            for x in reads
        ]
        if name == "mul":
            pairs = zip(like, self._factors(eqn, reads), strict=True)
            return [x.join(y) for x, y in pairs]
        if name == "select_n":
            like[0] = Need("`select_n` reads it")
        elif name in PRODUCTS:  # in the body of a remat
            like = [Need()] * len(reads)
        elif self._is_bump(eqn, reads) or is_power(eqn):
            pass
        elif name == "div" and self._sizes(eqn, reads) < ROUGH:
            by_row = need.by_row or size_of(eqn.invars[1]) > 1
            like = [like[0]._replace(by_row=by_row), Need("`div` reads it")]
        elif how not in ("moves", "smooth", "sums"):
            like = [Need(f"`{name}` reads it")] * len(reads)
        return like

    def _first(self, eqn: Equation) -> Any:
        """Returns the x of x - mean(x), if there is such a difference before it."""
        x, mean = eqn.invars
        is_other = is_var(x) and x in self.centred and self._is_mean(mean, x)
        return x if is_other and self.centred[x][0] is not eqn.outvars[0] else None

    def is_derived(self, var: Any) -> bool:
        """Returns whether a value is computed again from its mean and its distance to it."""
        is_coded = var in self.needs and not self.needs[var].why
        return is_coded and self.centred.get(var, (None, None))[0] in self.roots

    # --- The roots ---

    def _drop(self) -> None:
        """Drops roots that can be computed exactly from others that are kept as they are."""
        is_known = lambda x: x in self.roots and not self.is_coded(x)  # noqa: E731
        known = {x: 0 for x in {*self._alive, *filter(is_known, self._data)}}
        for eqn in self._eqns:
            depths = [known.get(x, _DEEPEST) for x in eqn.invars if is_var(x)]
            depth = 1 + max(depths, default=0)
            if depth <= _DEEPEST and eqn.primitive.name in AGAIN:
                known.update(dict.fromkeys(eqn.outvars, depth))
                for var in eqn.outvars:
                    self.roots.pop(var, None)
            known.update((x, 0) for x in eqn.outvars if is_known(x))

    def operands(self, var: Any) -> Sequence[Any]:
        """Returns what a value that is no root is computed again from."""
        if self.is_derived(var):
            return self.centred[var]
        return self.maker[var].invars if var in self.maker else ()

    def sources(self, atom: Any) -> tuple[Any, ...]:
        """Returns the roots that a value is computed again from."""
        if not is_var(atom) or atom in self.roots:
            return (atom,) if is_var(atom) else ()
        if atom not in self._sources:
            found = [y for x in self.operands(atom) for y in self.sources(x)]
            self._sources[atom] = (*dict.fromkeys(found),)
        return self._sources[atom]

    def is_coded(self, root: Any) -> bool:
        """Returns whether a root is kept in 8 bits."""
        name = self.maker[root].primitive.name if root in self.maker else ""
        is_listed = not name or name in _CODED or name in AGAIN
        is_listed &= not self.facts[root].is_param
        return is_listed and self._fits(root, self.needs[root])

    def _fits(self, var: Any, need: Need) -> bool:
        """Returns whether codes of a value save memory and have its blocks where needed."""
        is_right = not need.why and jnp.issubdtype(var.aval.dtype, jnp.floating)
        is_right = is_right and can_code(var.aval)
        name = self.maker[var].primitive.name if var in self.maker else ""
        # As a sum with a mask of large numbers.
        is_right = is_right and (name not in BEARS or self.facts[var].sizes < ROUGH)
        return is_right and (not need.by_row or axis_of(var.aval) == var.aval.ndim - 1)

    def of(self, wanted: Sequence[Any], form: str) -> list[Any]:
        """Returns the roots of values, and tells the report how large ones are kept."""
        roots = [*dict.fromkeys(x for atom in wanted for x in self.sources(atom))]
        self._tell(roots, form)
        return roots

    def _tell(self, roots: Iterable[Any], form: str) -> None:
        if (recording := current_recording()) is None:
            return
        for root in roots:
            dtype, is_coded = root.aval.dtype.name, self.is_coded(root)
            frames = source_frames(self.maker[root]) if root in self.maker else ()
            why = self.needs[root].why or "codes save too little"
            if size_of(root) >= LEAST:
                told = Residual(
                    tuple(root.aval.shape),
                    dtype,
                    form if is_coded else dtype,
                    "" if is_coded else why,
                    f"{frames[0][1]}:{frames[0][2]}" if frames else "an input",
                )
                recording.residuals.append(told)
