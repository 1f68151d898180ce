"""Sums that are written as many additions: added in f32, with factors as they are written.

A sum in 16 bits stands still, and an average that is multiplied with 0.998 in each step does
not fade. What only the next additions read is held in f32 until then: they are linear, so
nothing more is kept for the backward pass. Short sums stay as they are, and so does a residual
stream, whose states are read by layers as well.
"""

from typing import Any, NamedTuple

from mpx._amp._facts import F32, Settings, cast, is_eligible, is_low
from mpx._jax._compat import Literal as Number
from mpx._jax._compat import bind
from mpx._program._interpreter import Frame, Op, Values, arrays_of
from mpx._program._queries import Equation, names

_MANY = 8  # Additions and factors, one after the other
_MOVES = frozenset(
    names("neg reshape squeeze expand_dims transpose slice rev concatenate pad copy")
)


class Sums(NamedTuple):
    """The sums in a jaxpr."""

    parts: frozenset[Any]  # The results that are not rounded
    wide: set[Any]  # Those that are held in f32 in the place of 16 bits


def run_sum(amp: Settings, op: Op) -> tuple[Op, Values | None]:
    """Runs an equation of a long sum, or with a factor that 16 bits would make another one.

    Where it cannot, it returns the equation with operands of 16 bits to run instead.
    """
    if Sums not in amp.frame.made:
        amp.frame.made[Sums] = Sums(_parts(amp.frame), set()), None
    parts, wide = amp.frame.made[Sums][0]
    read = [not isinstance(x, Number) and x in wide for x in op.eqn.invars]
    is_part = not parts.isdisjoint(op.eqn.outvars)
    if not (is_part or any(read) or _is_scaled(op)):
        return op, None
    # Numbers of the program outside of the range of 16 bits make a result that is f32.
    triples = zip(op.values, read, op.facts, strict=True)
    fits = [
        is_wide or is_low(x) or fact.literal not in (None, "outside")
        for x, is_wide, fact in triples
    ]
    if not all(fits):
        pairs = zip(op.values, read, strict=True)
        low = [cast(x, amp.dtype) if is_wide else x for x, is_wide in pairs]
        return op._replace(values=low), None
    values = [cast(x, F32) if is_low(x) else x for x in arrays_of(op.values)]
    outs = bind(op.eqn, values)
    if is_part:
        wide.update(op.eqn.outvars)
    if is_part or only_summed(amp.frame, op.eqn.outvars[0]):
        return op, outs
    return op, [cast(x, amp.dtype) for x in outs]


def _is_scaled(op: Op) -> bool:
    """Returns whether a 16-bit value is multiplied with a literal that 16 bits round.

    Or added to one. In f32 the literal is what is written, and nothing more is kept for the
    backward pass.
    """
    name = op.eqn.primitive.name
    literals = [fact.literal for fact in op.facts]
    if "rounded" not in literals or [*map(is_low, op.values)] != [
        not x for x in literals
    ]:
        return False
    return name in ("add", "sub", "mul") or (name == "div" and literals[0] is None)


def only_summed(frame: Frame, product: Any) -> bool:
    """Returns whether sums alone read a product, such as norms: it need not be rounded.

    They are one kernel, which stores no product, and keep the operands of 16 bits.
    """
    readers = [eqn.primitive.name for eqn, _ in frame.readers.get(product, ())]
    is_returned = any(x is product for x in frame.jaxpr.outvars)
    return {*readers} == {"reduce_sum"} and not is_returned


def _parts(frame: Frame) -> frozenset[Any]:
    found = ((eqn, _kind(eqn)) for eqn in frame.jaxpr.eqns)
    kinds = [(eqn, kind) for eqn, kind in found if kind is not None]
    if sum(kind != "move" for _, kind in kinds) < _MANY:
        return frozenset()
    replaced = frame.plan.replaced.values() if frame.plan is not None else ()
    kept = {x for x in frame.jaxpr.outvars if not isinstance(x, Number)}
    kept.update(atom for x in replaced for atom in x.atoms)
    # For results that only sums read: how many steps follow, and how many led there.
    ahead: dict[Any, int] = {}
    before: dict[Any, int] = {}

    def following(kind: str, reader: Equation) -> int | None:
        then, (out, *_) = _kind(reader), reader.outvars
        # A sum may be the last, and so may a factor behind a factor.
        if out in ahead or then == "sum" or kind == then == "scale":
            return (then != "move") + ahead.get(out, 0)
        return None

    for eqn, kind in reversed(kinds):
        (var,) = eqn.outvars
        counts = [following(kind, x) for x, _ in frame.readers.get(var, ())]
        known = [x for x in counts if x is not None]
        if known and len(known) == len(counts) and var not in kept:
            ahead[var] = max(known)
    for eqn, kind in kinds:
        (var,) = eqn.outvars
        if var in ahead:
            read = [x for x in eqn.invars if not isinstance(x, Number)]
            before[var] = (kind != "move") + max(before.get(x, 0) for x in read)
    return frozenset(x for x, n in before.items() if n and n + ahead[x] >= _MANY)


def _kind(eqn: Equation) -> str | None:
    """Returns what an equation does, if it is linear and keeps nothing."""
    name, read = eqn.primitive.name, eqn.invars
    numbers = [isinstance(x, Number) for x in read]
    if all(numbers) or not all(is_eligible(x.aval) for x in (*read, *eqn.outvars)):
        return None
    if name in _MOVES:
        return "move"
    if name in ("add", "sub") and not any(numbers):
        return "sum"
    is_scale = name in ("add", "sub", "mul") and any(numbers)
    return "scale" if is_scale or (name == "div" and numbers[1]) else None
