"""Why a value is f32: what made it so, where a 16-bit one was promoted, and by what."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from mpx._jax._compat import Literal, open_jaxpr, source_frames
from mpx._program._flow import Flow
from mpx._program._interpreter import Jaxpr
from mpx._program._queries import CALLS, MOVES, Equation
from mpx.inspect._dtypes import is_f32, is_low
from mpx.inspect._result import source_of


class Cause(NamedTuple):
    """Why a value is f32.

    Attributes:
        text: The reason, for readers.
        cast: Where it was cast from 16 bits, if that is the reason; else "".
    """

    text: str
    cast: str = ""


class Causes(NamedTuple):
    """Why values of a program are f32.

    Attributes:
        operands: By the `id` of an equation, why its operands are, if one is.
        promoted: The equations that make f32 from a 16-bit operand and one that is f32, by
            their `id`, and what that is.
    """

    operands: dict[int, str]
    promoted: dict[int, str]


def causes(jaxpr: Jaxpr, names: Sequence[str]) -> Causes:
    """Returns why values of a program are f32.

    Args:
        jaxpr: The program.
        names: The names of its arguments; "" for one without.
    """
    found = Causes({}, {})

    def rule(name: str, eqn: Equation, labels: list[Cause | None]) -> Cause | None:
        known = [
            _literal(atom) if isinstance(atom, Literal) else label
            for atom, label in zip(eqn.invars, labels, strict=True)
        ]
        wide = [cause for cause in known if cause is not None]
        if wide:
            found.operands[id(eqn)] = _why(wide, _source(eqn))
        if not eqn.outvars or not is_f32(eqn.outvars[0].aval):
            return None
        if name in MOVES:
            return _moved(eqn, wide)
        promoting = _promoting(name, eqn, wide)
        if promoting is None:
            return wide[0] if wide else _made(name, eqn)
        if promoting.startswith(_PROMOTED):
            return Cause(promoting)  # the first promotion is the one to undo
        found.promoted[id(eqn)] = promoting
        return Cause(f"{_PROMOTED}{promoting} at {_source(eqn)}")

    body, _ = open_jaxpr(jaxpr)
    labels = {
        var: Cause(f"argument `{name}`" if name else "an argument")
        for var, name in zip(body.invars, names, strict=True)
        if is_f32(var.aval)
    }
    Flow(rule, constant=_closed_over).run(jaxpr, labels)
    return found


_PROMOTED = "promoted by "


def _why(wide: list[Cause], source: str) -> str:
    """Returns why the operands of an operation are f32.

    What is cast on the line of the operation itself is promoted by the other operand.
    """
    found = [cause for cause in wide if cause.cast != source] or wide
    if any(cause.cast for cause in found):
        return " and ".join(dict.fromkeys(cause.text for cause in found))
    return found[0].text


def _closed_over(value: Any) -> Cause | None:
    if not is_f32(value):
        return None
    return Cause(f"a closed-over f32[{','.join(map(str, value.shape))}] array")


def _moved(eqn: Equation, wide: list[Cause]) -> Cause:
    """Returns why the result of a cast, a broadcast or another move is f32."""
    source, dtype = _source(eqn), eqn.invars[0].aval.dtype
    if all(isinstance(atom, Literal) for atom in eqn.invars):
        return Cause(f"an f32 array that is made at {source}")
    if wide:
        return wide[0]
    low = source if is_low(eqn.invars[0].aval) else ""
    return Cause(f"cast from {dtype} to f32 at {source}", low)


def _promoting(name: str, eqn: Equation, wide: list[Cause]) -> str | None:
    """Returns what makes f32 of a 16-bit operand, if an operation does that.

    JAX promotes where the operation is written: the cast is on the same line.
    """
    source = _source(eqn)
    is_cast = any(cause.cast and cause.cast == source for cause in wide)
    is_cast |= any(is_low(atom.aval) for atom in eqn.invars)
    others = [cause.text for cause in wide if not cause.cast]
    is_array = name not in CALLS and eqn.outvars[0].aval.size > 1
    return others[0] if is_cast and is_array and others else None


def _made(name: str, eqn: Equation) -> Cause:
    source = _source(eqn)
    if name == "bitcast_convert_type":
        return Cause("", source)  # a scale of fp8: nobody's choice
    if any(is_low(atom.aval) for atom in eqn.invars):
        return Cause(f"{name} was asked for an f32 result at {source}")
    return Cause(f"made in f32 by {name} at {source}")


def _literal(atom: Any) -> Cause | None:
    """Returns the cause that is a number; Python's own numbers promote nothing."""
    if not is_f32(atom.aval) or getattr(atom.aval, "weak_type", False):
        return None
    return Cause(f"the f32 constant {atom.val}")


def _source(eqn: Equation) -> str:
    return source_of(source_frames(eqn))
