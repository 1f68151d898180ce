"""In which dtype each operation of a program computes, why, and what stays in memory."""

from typing import NamedTuple

import numpy as np
from jaxtyping import PyTree

from mpx._casting._keep import FP8_SCOPE
from mpx._jax._compat import Literal, open_jaxpr, primitive_name, source_frames
from mpx._program._flow import Flow
from mpx._program._primitives import REASONS
from mpx._program._queries import (
    ATTENTION,
    CALLS,
    CROSS_ENTROPY,
    GROUPED,
    MATMULS,
    MOVES,
    Equation,
    Position,
    equations,
    flops,
)
from mpx.inspect._buffers import nbytes
from mpx.inspect._dtypes import is_f32, is_low, short_dtypes
from mpx.inspect._program import Place, Program, sites
from mpx.inspect._result import short_source, source_of

_MULTIPLIES = frozenset({*MATMULS, *ATTENTION, *CROSS_ENTROPY, GROUPED})
_REFERENCES = ("get", "swap", "addupdate", "ref_new")
_PROMOTED = "promoted by "


class Matmul(NamedTuple):
    """A matmul, a convolution or fused attention of a program."""

    place: Place  # `param`, `scope`, `source`, `backward`
    dtype: str  # of its operands, or the preset in which it multiplies
    result: str  # the dtype of its result
    shapes: tuple[tuple[int, ...], ...]  # of its operands
    times: int  # how often it runs
    flops: int  # two operations for each multiplication, of all these times
    bytes: int  # of its operands and its result, of all these times
    # Why it is f32: the decision of `amp`, or what makes its operands f32; in the backward
    # pass, that of the forward pass. "" for no f32
    reason: str


class Kept(NamedTuple):
    """An operation in f32, or as it is written, and why."""

    primitive: str
    reason: str  # the rule, the scope, or what promoted its operands
    param: str  # the parameter that it reads; "" for none
    scope: str  # its named scopes, joined by `/`
    source: str  # file and line


def operations(
    full: Program,
) -> tuple[tuple[Matmul, ...], tuple[Kept, ...], tuple[Kept, ...]]:
    """Returns the matmuls of a program, what is promoted to f32, and what is opaque."""
    why, promoting = _causes(full)
    decided = {
        (x.primitive, short_source(x.source), x.shapes[:2]): x.reason
        for x in full.recording.decisions
        if x.primitive in _MULTIPLIES and {"float32", "complex64"} & {*x.after}
    }
    # The reasons of f32 in the forward pass, by line and parameter, and by line: a
    # matmul may read two parameters, and be known by one.
    forward: dict[tuple[str, str] | str, str] = {}
    matmuls: dict[Matmul, Matmul] = {}
    promoted, opaque = list[Kept](), list[Kept]()
    for here, place in sites(full):
        eqn, line = here.eqn, (place.source, place.param)
        is_own = FP8_SCOPE in here.scopes  # scales and roundings, which nobody wrote
        if place.primitive in _MULTIPLIES:
            shapes = tuple(tuple(x.aval.shape) for x in eqn.invars[:2])
            key = place.primitive, place.source, shapes
            reason = decided.get(key, "" if is_own else why.get(id(eqn), ""))
            if place.backward:
                reason = forward.get(place.source, reason)
            found = _matmul(here, place, forward.get(line, reason))
            if found.reason and not place.backward:
                forward[line] = found.reason
                forward.setdefault(place.source, found.reason)
            same = found._replace(times=0, flops=0, bytes=0)
            before = matmuls.get(same, same)
            matmuls[same] = found._replace(
                times=before.times + found.times,
                flops=before.flops + found.flops,
                bytes=before.bytes + found.bytes,
            )
        if id(eqn) in promoting and not (place.backward or is_own):
            promoted.append(_kept(place, f"{_PROMOTED}{promoting[id(eqn)]}"))
        if _is_opaque(eqn):
            opaque.append(_kept(place, REASONS["pallas_call"]))
    rows = tuple(matmuls.values())
    wide = [_kept(x.place, x.reason) for x in rows if x.reason and not x.place.backward]
    return rows, tuple(dict.fromkeys([*wide, *promoted])), tuple(dict.fromkeys(opaque))


def _kept(place: Place, reason: str) -> Kept:
    return Kept(place.primitive, reason, place.param, place.scope, place.source)


def _is_opaque(eqn: Equation) -> bool:
    """Returns whether nothing is known of an operation; kernels of mpx are known."""
    name = primitive_name(eqn)
    if REASONS.get(name) != REASONS["pallas_call"] or name in _REFERENCES:
        return False
    inside = (eqn, *equations(eqn))
    return not any("mpx_" in str(x.params.get("name")) for x in inside)


def _matmul(here: Position, place: Place, reason: str) -> Matmul:
    eqn, times = here.eqn, here.times
    operands = eqn.invars[: 3 if place.primitive in ATTENTION else 2]
    size = sum(nbytes(x.aval) for x in (*operands, eqn.outvars[0]))
    is_wide = any(is_f32(x.aval) for x in operands)
    dtype = short_dtypes(x.aval.dtype for x in eqn.invars[:2])
    if place.primitive in CROSS_ENTROPY:
        is_wide = eqn.params["head"].dtype == np.float32
        dtype = short_dtypes([eqn.params["head"].dtype])
    return Matmul(
        place=place,
        dtype=dtype,
        result=short_dtypes([eqn.outvars[0].aval.dtype]),
        shapes=tuple(tuple(x.aval.shape) for x in operands),
        times=times,
        flops=flops(eqn) * times,
        bytes=size * times,
        reason=reason if is_wide else "",
    )


# --- Why values are f32 ---------------------------------------------------------------


class _Cause(NamedTuple):
    """Why a value is f32."""

    text: str  # for readers
    cast: str = ""  # where it was cast from 16 bits, if that is the reason


def _causes(full: Program) -> tuple[dict[int, str], dict[int, str]]:
    """Returns why values of a program are f32, by the `id` of equations."""
    operands: dict[int, str] = {}  # why an operand is f32
    promoted: dict[int, str] = {}  # what makes f32 from a 16-bit operand

    def rule(name: str, eqn: Equation, labels: list[_Cause | None]) -> _Cause | None:
        labels = list(labels)
        for i, x in enumerate(eqn.invars):
            is_wide = isinstance(x, Literal) and is_f32(x.aval)
            if is_wide and not getattr(
                x.aval, "weak_type", False
            ):  # as Python's numbers
                labels[i] = _Cause(f"the f32 constant {x.val}")
        wide = [cause for cause in labels if cause is not None]
        source = source_of(source_frames(eqn))
        if wide:
            # What is cast on the line of the operation is promoted by the other operand.
            found = [cause for cause in wide if cause.cast != source] or wide
            is_cast = any(cause.cast for cause in found)
            texts = dict.fromkeys(cause.text for cause in found)
            operands[id(eqn)] = " and ".join(texts) if is_cast else found[0].text
        if not eqn.outvars or not is_f32(eqn.outvars[0].aval):
            return None
        # JAX promotes where the operation is written: the cast is on the same line.
        is_cast = any(is_low(atom.aval) for atom in eqn.invars)
        is_cast |= any(cause.cast == source for cause in wide)
        others = [cause.text for cause in wide if not cause.cast]
        is_array = name not in (*MOVES, *CALLS) and eqn.outvars[0].aval.size > 1
        if not (is_cast and is_array and others):
            return _made(name, eqn, wide, source)
        if others[0].startswith(_PROMOTED):
            return _Cause(others[0])  # the first promotion is the one to undo
        promoted[id(eqn)] = others[0]
        return _Cause(f"{_PROMOTED}{others[0]} at {source}")

    labels = {
        var: _Cause(f"argument `{name}`" if name else "an argument")
        for var, name in zip(open_jaxpr(full.jaxpr)[0].invars, full.names, strict=True)
        if is_f32(var.aval)
    }

    def closed_over(x: PyTree) -> _Cause | None:
        if not is_f32(x):
            return None
        return _Cause(f"a closed-over f32[{','.join(map(str, x.shape))}] array")

    Flow(rule, constant=closed_over).run(full.jaxpr, labels)
    return operands, promoted


def _made(name: str, eqn: Equation, wide: list[_Cause], source: str) -> _Cause:
    """Returns why the result of an operation that promotes nothing is f32."""
    first = eqn.invars[0].aval if eqn.invars else None
    if name in MOVES and all(isinstance(atom, Literal) for atom in eqn.invars):
        return _Cause(f"an f32 array that is made at {source}")
    if wide:
        return wide[0]
    if name in MOVES and first is not None:
        text = f"cast from {first.dtype} to f32 at {source}"
        return _Cause(text, source if is_low(first) else "")
    if any(is_low(atom.aval) for atom in eqn.invars):
        return _Cause(f"{name} was asked for an f32 result at {source}")
    return _Cause(f"made in f32 by {name} at {source}")
