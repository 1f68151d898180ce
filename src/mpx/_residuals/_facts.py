"""What is known of values that a backward pass reads, and what it needs of them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from mpx._jax._compat import Literal
from mpx._program import _queries as queries
from mpx._program._primitives import ROWS
from mpx._program._queries import Equation, names
from mpx._residuals._codes import BLOCK

PRODUCTS = (*queries.MATMULS, queries.GROUPED)
PICKS = frozenset(names("gather dynamic_slice reduce_window_sum"))
MOVES = queries.MOVES.union(
    names("pad concatenate split unstack stop_gradient select_n max min abs neg clamp")
).difference(PICKS)
# How an operation bears an error that is small beside the largest number of a block.
BEARS: dict[str, str] = {
    **dict.fromkeys(MOVES, "moves"),
    **dict.fromkeys(names("tanh logistic erf erfc one_minus_square square"), "smooth"),
    **dict.fromkeys(names("mul div"), "products"),
    **dict.fromkeys(names("add sub add_any"), "sums"),
}
STEPS = frozenset(names("eq ne lt le gt ge sign is_finite"))
_EVEN = frozenset(names("abs exp exp2 logistic erfc square"))
_SIGNED = MOVES.union(names("tanh erf add add_any integer_pow")) - {"neg", "abs"}
REDUCTIONS = frozenset(names("reduce_sum reduce_max reduce_min reduce_prod"))
# Cheap operations, which the backward pass runs again: all of a region but its reductions.
AGAIN = MOVES.union(
    (x for x, row in ROWS.items() if row.place == "inside"),
    names("and or not xor iota"),
).difference(REDUCTIONS, PICKS, names("argmax argmin dynamic_update_slice"))
SMALL = 8  # A value is small beside one that has so many times more numbers.
ZERO, POSITIVE, NEGATIVE = "zero", "positive", "negative"
_FLIPPED: dict[Any, Any] = {POSITIVE: NEGATIVE, NEGATIVE: POSITIVE, ZERO: ZERO}
BOUNDED, ALIKE, BY_ROW, ROUGH = range(4)
"""How the sizes of a block's numbers differ: they are bounded as those of activations, alike,
alike within a row, or anything."""


class Fact(NamedTuple):
    """What is known of a value; by default, of a gradient."""

    origins: frozenset[Any] = frozenset()  # what it is computed from
    sizes: int = ALIKE
    sign: Any = None  # the variable that has its sign, that flipped, or a word above
    is_row: bool = False  # whether it is one number for each row, along the last axis
    is_param: bool = False  # whether parameters and numbers alone enter
    is_linear: bool = True  # whether it is a gradient
    depth: int = 0  # equations since its origins
    is_sum: bool = False  # whether it has the rows of another value, summed up
    has_bias: bool = False  # whether it is made of codes, and of a bias added to them


class Need(NamedTuple):
    """How exactly a value has to be known."""

    why: str = ""  # what reads it as it is; "" if codes are enough
    by_row: bool = False  # whether blocks have to lie within rows
    is_signed: bool = False  # whether its sign is read

    def join(self, other: "Need") -> "Need":
        """Returns what two readers need."""
        return Need(
            self.why or other.why,
            self.by_row or other.by_row,
            self.is_signed or other.is_signed,
        )


def is_var(atom: Any) -> bool:
    """Returns whether an atom of a jaxpr is a variable."""
    return not isinstance(atom, Literal)


def size_of(atom: Any) -> int:
    size = getattr(atom.aval, "size", 0)
    return size if isinstance(size, int) else 1 << 60  # a symbol: it is never coded


def adds_bias(eqn: Equation, reads: Sequence[Fact]) -> bool:
    """Returns whether an equation adds a small parameter."""
    small = lambda x: size_of(x) * SMALL <= size_of(eqn.outvars[0])  # noqa: E731
    return BEARS.get(eqn.primitive.name) == "sums" and any(
        x.is_param and x.origins and all(map(small, x.origins)) for x in reads
    )


def name_of(eqn: Equation) -> str:
    """Returns the name of a primitive; a product that depends on the platform is a product."""
    is_product = eqn.params.get("branches_platforms") and queries.holds(eqn, PRODUCTS)
    return PRODUCTS[0] if is_product else eqn.primitive.name


def is_power(eqn: Equation) -> bool:
    return eqn.primitive.name == "integer_pow" and eqn.params["y"] > 0


class Flipped(NamedTuple):
    """The other sign than that of a variable."""

    var: Any


def flipped(sign: Any) -> Any:
    """Returns the other sign; `None` if there is none."""
    if sign is None or isinstance(sign, Flipped):
        return sign and sign.var
    return _FLIPPED[sign] if sign in _FLIPPED else Flipped(sign)


def signed_by(sign: Any) -> Any:
    """Returns the variable whose sign, or the other one, a value has."""
    return sign.var if isinstance(sign, Flipped) else sign


def sign_of(eqn: Equation, reads: Sequence[Fact]) -> Any:
    """Returns what has the sign of a result, if something does."""
    name, signs = eqn.primitive.name, [x.sign for x in reads]
    if name in _EVEN or eqn.params.get("y", 1) in (2, 4):
        return POSITIVE
    if name == "neg":
        return flipped(signs[0])
    if name in ("mul", "div"):
        first, other = sorted(signs, key=lambda x: x not in (POSITIVE, NEGATIVE))
        if first in (POSITIVE, NEGATIVE):
            return other if first is POSITIVE else flipped(other)
        return POSITIVE if first is other else None
    known = {*signs[name == "select_n" :]} - {ZERO} or {ZERO}
    return known.pop() if name in _SIGNED and len(known) == 1 else None


def is_thin(var: Any) -> bool:
    return [*getattr(var.aval, "shape", ())][-1:] in ([], [1])


def is_row_number(eqn: Equation, reads: Sequence[Fact], out: Any) -> bool:
    """Returns whether a result is one number for each row."""
    name, rank = eqn.primitive.name, getattr(out.aval, "ndim", 0)
    if name == "broadcast_in_dim":
        places = eqn.params["broadcast_dimensions"]
        return rank - 1 not in places or reads[0].is_row
    is_alike = all(x.aval.ndim in (0, rank) for x in eqn.invars if name in AGAIN)
    is_alike &= name in AGAIN and name not in ("transpose", "reshape", "iota")
    return is_thin(out) or (is_alike and all(x.is_row for x in reads))


def is_row_sum(eqn: Equation, reads: Sequence[Fact], out: Any) -> bool:
    """Returns whether a result has a number for each row, and no axis along the rows."""
    name, rank = eqn.primitive.name, getattr(out.aval, "ndim", 0)
    if name in REDUCTIONS:
        return eqn.invars[0].aval.ndim - 1 in eqn.params["axes"]
    is_moved = name in queries.SHAPE_ONLY
    is_alike = all(x.is_sum or not (x.origins or x.is_linear) for x in reads)
    return name in AGAIN and not is_moved and rank > 0 and is_alike


def keeps_rows(eqn: Equation, position: int) -> bool:
    """Returns whether blocks of an operand's rows are within rows of the result."""
    name, atoms = eqn.primitive.name, (eqn.invars[position], eqn.outvars[0])
    old, new = (tuple[int, ...](getattr(x.aval, "shape", ())) for x in atoms)
    if name == "transpose":
        return eqn.params["permutation"][-1] == len(old) - 1
    if name in ("reshape", "squeeze", "expand_dims"):
        return all(x and x[-1] % BLOCK == 0 for x in (old, new))
    return name in REDUCTIONS or name == "broadcast_in_dim" or len(old) in (0, len(new))
