"""In which precision an equation runs: the step "decide".

A decision depends on the equation, the dtypes and facts of its operands, the scopes around it
and the rules, and on nothing else.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax import lax

from mpx._amp._facts import Settings, Source, is_eligible
from mpx._amp._rules import (
    LOW_NAME,
    PRIMITIVES,
    Rule,
    RuleLike,
    rule_for,
)
from mpx._jax._compat import (
    asked_precisions,
    default_matmul_precision,
    has_explicit_axes,
)
from mpx._jax._devices import cuda_capability
from mpx._jax._formats import F32, LOW_DTYPES
from mpx._jax._private import private
from mpx._jax._warn import warn
from mpx._ops._experts._ragged import RAGGED, describe_ragged, is_low_ragged
from mpx._program import HANDLERS
from mpx._program._interpreter import Op, Scopes
from mpx._program._primitives import REASONS, ROWS
from mpx._program._queries import (
    ATTENTION,
    CALLS,
    CROSS_ENTROPY,
    CUSTOM,
    MATMULS,
    Equation,
    Position,
    holds,
    matmul_sizes,
    walk_inside,
)

_MAY_BE_LOW = (Rule.LOW, Rule.WIDEST, Rule.FOLLOW)
Place = Literal["inside", "stored", "alone", "matmul"]
"""How an equation takes part in regions; see the table of rules."""
_RULED = (*CALLS, *CUSTOM)
_MULTIPLIES = frozenset((*MATMULS, *ATTENTION, *CROSS_ENTROPY))
_OPAQUE = (
    "`amp` does not know the operation `{name}`, which holds matmuls: they run as they are "
    "written. Call what is inside without it, or report this."
)


class Choice(NamedTuple):
    """How an equation runs."""

    how: str  # The emitter, by its name in `mpx._amp._emit`
    rule: RuleLike | None = None  # The rule; `None` if there was nothing to decide
    reason: str = ""  # Why


Region = tuple[RuleLike, str] | None
"""The rule of a scope or function around an equation, and the reason."""


def place_of(amp: Settings, eqn: Equation, scopes: Scopes) -> Place:
    """Returns how an equation takes part in regions."""
    name = eqn.primitive.name
    if name in MATMULS:
        return "matmul"
    if name in _MULTIPLIES or (name in HANDLERS and has_work(amp, eqn, scopes)):
        return "stored"
    if name in HANDLERS:
        inner = [x.eqn for x in walk_inside(Position(eqn)) if name in _RULED]
        is_inside = name in _RULED and not eqn.effects
        return "inside" if is_inside and all(map(_may_be_inside, inner)) else "alone"
    rule = user_rule(amp, eqn, scopes)
    if rule is not None:
        return "alone" if rule in (Rule.F32, Rule.ORIGINAL) else "stored"
    if _may_be_inside(eqn) and not eqn.effects:
        return "inside"
    is_stored = _place_in_table(eqn) == "stored" and not eqn.effects
    return "stored" if is_stored and table_rule(amp, eqn) != Rule.F32 else "alone"


def _place_in_table(eqn: Equation) -> Place | None:
    """Returns the place of a primitive; a sum over an axis of `jax.vmap` is sent nowhere."""
    row, axes = ROWS.get(eqn.primitive.name), eqn.params.get("axes", ())
    is_sent = row is not None and row.place == "stored"
    if is_sent and axes and all(isinstance(axis, int) for axis in axes):
        return "alone"
    return None if row is None else row.place


def _may_be_inside(eqn: Equation) -> bool:
    name = eqn.primitive.name
    is_known = name == "convert_element_type" or name in _RULED
    return is_known or (name in ROWS and ROWS[name].place == "inside")


def user_rule(amp: Settings, eqn: Equation, scopes: Scopes) -> Any:
    """Returns the rule that a user gave to an equation that is no matmul, if any."""
    if amp.rules.scopes or amp.rules.functions or scopes:
        region = amp.region_rule(eqn, scopes)
        if region is not None:
            return region[0]
    name = eqn.primitive.name
    if amp.rules.base == "original" or name in amp.rules.primitives:
        return amp.rule(name, eqn.params, [])[0]
    return None


def has_work(amp: Settings, eqn: Equation, scopes: Scopes) -> bool:
    """Returns whether a body holds a matmul, a mark, or what a user gave a rule to."""
    key = id(eqn), scopes
    if key not in amp.works:
        around = Position(eqn, scopes)
        if eqn.primitive.name in CUSTOM and eqn.params.get("num_consts"):
            found = True  # A rule may close over an array: the visit says so.
        elif amp.rules.is_plain and not (amp.rules.keep or scopes):
            found = any(_is_work(x.eqn) for x in walk_inside(around))
        else:
            inner = amp.scopes_inside(eqn, scopes)
            found = amp.region_rule(eqn, scopes) is not None or any(
                _is_work(x.eqn) or user_rule(amp, x.eqn, x.scopes) is not None
                for x in walk_inside(around._replace(scopes=inner))
            )
        amp.works[key] = eqn, found
    return amp.works[key][1]


def _is_work(eqn: Equation) -> bool:
    name = eqn.primitive.name
    return name in _MULTIPLIES or eqn.params.get("name") == LOW_NAME


def table_rule(amp: Settings, eqn: Equation) -> Rule:
    """Returns the rule of an equation's primitive under the default policy."""
    is_f16 = amp.dtype == np.float16
    return rule_for(_ruled(amp, eqn), eqn.params, compute_is_f16=is_f16)


def _ruled(amp: Settings, eqn: Equation) -> str:
    """Returns the primitive by whose rule an equation runs."""
    return "square" if _is_square(amp, eqn) else eqn.primitive.name


def decide(amp: Settings, op: Op) -> Choice:
    """Returns how an equation runs: by its region, its parameter or its primitive."""
    name, region = op.eqn.primitive.name, None
    if amp.rules.functions:
        region = amp.region_rule(op.eqn, op.scopes)
    elif op.scopes:
        region = amp.rules.scope_rule(op.scopes)
    if region is not None and region[0] == Rule.ORIGINAL:
        return Choice("original", *region)
    special = _SPECIAL.get(name)
    return (_by_rule if special is None else special)(amp, op, region)


def _by_rule(amp: Settings, op: Op, region: Region) -> Choice:
    name = op.eqn.primitive.name
    if name not in PRIMITIVES and holds(op.eqn, MATMULS):
        warn(_OPAQUE.format(name=name))
    if F32 not in [getattr(var.aval, "dtype", None) for var in op.eqn.invars]:
        if is_low_ragged(op.eqn):
            return Choice("ragged as written", Rule.LOW, describe_ragged(op.eqn))
        return Choice("as written")
    rule, reason = region or amp.rule(_ruled(amp, op.eqn), op.eqn.params, op.facts)
    if region and rule in _MAY_BE_LOW and PRIMITIVES.get(name) == Rule.ORIGINAL:
        # A scatter or a solver has no version in the compute dtype.
        rule, reason = Rule.ORIGINAL, REASONS[name]
    if callable(rule) and not isinstance(rule, str):
        return Choice("user", rule, getattr(rule, "__name__", "custom"))
    rule = Rule(rule)
    is_free = region is None and name not in amp.rules.primitives
    if name in MATMULS:
        return _matmul(amp, op, rule, reason, is_free)
    is_alone = is_free and _place_in_table(op.eqn) == "alone"
    return Choice(Rule.ORIGINAL if is_alone else rule, rule, reason)


def _matmul(amp: Settings, op: Op, rule: Rule, reason: str, is_free: bool) -> Choice:
    """Decides about a matmul; `is_free` says that no rule of the user's is about it."""
    if rule != Rule.LOW:
        return Choice("original" if rule == Rule.F32 else rule, rule, reason)
    kept = _reason_as_asked(op.eqn) or (is_free and _reason_for_f32(amp, op))
    if kept:
        return Choice("original", rule, kept)
    is_ragged = op.eqn.primitive.name in RAGGED
    return Choice("matmul", rule, describe_ragged(op.eqn) if is_ragged else reason)


def stays_f32(amp: Settings, op: Op, choice: Choice) -> bool:
    """Returns whether results are f32 because that was asked for, or decided."""
    if op.eqn.primitive.name in MATMULS:
        return choice.how != "matmul"
    return user_rule(amp, op.eqn, op.scopes) in (Rule.F32, Rule.ORIGINAL)


def _is_square(amp: Settings, eqn: Equation) -> bool:
    """Returns whether a product is a square, as in norms, which f16 may not hold."""
    is_product = eqn.primitive.name == "mul" and amp.dtype == np.float16
    return is_product and eqn.invars[0] is eqn.invars[1]


def _decide_name(amp: Settings, op: Op, region: Region) -> Choice:
    if op.eqn.params["name"] != LOW_NAME or not is_eligible(op.eqn.invars[0].aval):
        return _by_rule(amp, op, region)
    _, reason = region or amp.rule("name", op.eqn.params, op.facts)
    return Choice("mark", Rule.FOLLOW, reason)


def can_fuse(amp: Settings) -> bool:
    """Returns whether attention that is recognised can run in one kernel here."""
    return (
        amp.attention == "fuse"
        and cuda_capability() is not None
        and private("attention") is not None
        and not has_explicit_axes(jax.sharding.get_abstract_mesh())
    )


def _decide_cross_entropy(amp: Settings, op: Op, region: Region) -> Choice:
    head = op.eqn.params["head"]
    if head.dtype != F32:
        return Choice("as written")
    rule, reason = region or amp.rule("dot_general", {}, op.facts[:2])
    if rule != Rule.LOW:
        rule = rule if isinstance(rule, str) else Rule.ORIGINAL
        return Choice("original", rule, reason)
    is_default = (
        head.precision == default_matmul_precision() or highest_is_the_default()
    )
    if head.precision in (*_HIGHEST, "high", "tensorfloat32") and not is_default:
        reason = f"{PRECISION}{head.precision.upper()} was asked for"
        return Choice("original", rule, reason)
    return Choice("cross entropy", rule, reason)


_SPECIAL: dict[str, Callable[[Settings, Op, Region], Choice]] = {
    # An inner `amp` already handled these.
    **dict.fromkeys(ATTENTION, lambda *_: Choice("original")),
    **dict.fromkeys(CROSS_ENTROPY, _decide_cross_entropy),
    **dict.fromkeys(
        HANDLERS,
        lambda amp, op, _: Choice(
            "body" if has_work(amp, op.eqn, op.scopes) else "original"
        ),
    ),
    "convert_element_type": lambda *_: Choice("convert"),
    "name": _decide_name,
}


def reason_against(eqn: Equation, facts: Sequence[Source] = ()) -> str | None:
    """Returns why a matmul runs as written though its rule is `low`, if it does."""
    return _reason_as_asked(eqn) or _reason_by_size(eqn, facts)


def _reason_as_asked(eqn: Equation) -> str | None:
    """Returns what was asked for that forbids to change a matmul, if anything was."""
    dtypes = [np.dtype(getattr(x.aval, "dtype", np.void)) for x in eqn.invars[:2]]
    # f32 activations times 16-bit numbers or a mask are an f32 matmul, to be run low, too.
    known = [x in (F32, *LOW_DTYPES) or x.kind in "biu" for x in dtypes]
    if F32 not in dtypes or not all(known):
        return "an operand is not f32"
    wanted = eqn.params.get("preferred_element_type")
    if wanted is not None and np.dtype(wanted) != F32:
        return f"its result was asked for in {np.dtype(wanted).name}"
    for item in asked_precisions(eqn):
        if item in (lax.Precision.HIGHEST, lax.Precision.HIGH):
            return f"{PRECISION}{item.name} was asked for"
        if isinstance(item, lax.DotAlgorithm | lax.DotAlgorithmPreset):
            return f"the algorithm {item} was asked for"
    return None


_FEW = 4
PRECISION = "precision="
_HIGHEST = ("highest", "float32")


def highest_is_the_default() -> bool:
    """Returns whether every matmul has the highest precision, also one that asks for none."""
    return default_matmul_precision() in _HIGHEST


ALGEBRA = "its result reaches {name}, which 16 bits may make singular"


def _reason_for_f32(amp: Settings, op: Op) -> str | None:
    """Returns why a matmul is better left in f32, if it is."""
    reached = amp.frame.layout.reached.get(op.eqn.outvars[0])
    if reached is not None:
        return ALGEBRA.format(name=reached.name)
    return _reason_by_size(op.eqn, op.facts)


def _reason_by_size(eqn: Equation, facts: Sequence[Source]) -> str | None:
    """Returns why 16 bits cost a matmul accuracy and gain it no time, if they do.

    Without a sum, as in the angles of rotary embeddings, no matrix unit has anything to add
    up. A product with a vector is an inner product, as in a norm, whose result may leave the
    range of f16; with one weight it is a layer of one example or one output.
    """
    if facts and all([x.is_count for x in facts[:2]]):
        return "a product of masks counts, and 16 bits round numbers above 256"
    rows, summed, columns, _ = matmul_sizes(eqn)
    # A size that is a symbol counts as large.
    if isinstance(summed, int) and summed <= _FEW:
        return "a sum of at most 4 products gains nothing in 16 bits"
    has_vector = any([isinstance(size, int) and size <= 1 for size in (rows, columns)])
    if eqn.primitive.name != "dot_general" or not has_vector:
        return None
    sources = facts[:2]
    # If no operand is made of parameters, the function may close over its weights.
    closed_over = [x.leaf is not None and not x.names for x in sources]
    if (sum([x.is_param for x in sources]) or sum(closed_over)) == 1:
        return None
    return "a product with a vector is a sum, which 16 bits make neither fast nor exact"
