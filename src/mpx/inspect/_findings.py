"""What a program multiplies, in which dtypes, and what it keeps in memory."""

from typing import NamedTuple

import numpy as np

from mpx._amp._decide import PRESETS
from mpx._amp._rules import REASONS
from mpx._jax._compat import primitive_name
from mpx._program._queries import (
    ATTENTION,
    CROSS_ENTROPY,
    GROUPED,
    MATMULS,
    Equation,
    equations_inside,
    flops,
)
from mpx.inspect._buffers import nbytes, peak
from mpx.inspect._causes import causes
from mpx.inspect._dtypes import is_f32
from mpx.inspect._places import Place, Site, frames_of, sites
from mpx.inspect._program import Program
from mpx.inspect._result import short_source, source_of
from mpx.inspect._views import short_dtypes


class Matmul(NamedTuple):
    """A matmul, a convolution or fused attention of a program.

    Attributes:
        place: Where it stands: `param`, `scope`, `source`, `backward`.
        dtype: The dtype of its operands, or the preset in which it multiplies.
        result: The dtype of its result.
        shapes: The shapes of its operands.
        times: How often it runs.
        flops: Two operations for each multiplication, of all these times.
        bytes: The size of its operands and its result, of all these times.
        reason: Why it is f32: the decision of `amp`, or what makes its operands f32. For
            the backward pass, that of the forward pass if it is f32, too. "" for no f32.
    """

    place: Place
    dtype: str
    result: str
    shapes: tuple[tuple[int, ...], ...]
    times: int
    flops: int
    bytes: int
    reason: str


class Kept(NamedTuple):
    """An operation in f32, or as it is written, and why.

    Attributes:
        primitive: The operation.
        reason: The rule, the scope, or what promoted its operands.
        param: The parameter that it reads; "" for none.
        scope: Its named scopes, joined by `/`.
        source: File and line.
    """

    primitive: str
    reason: str
    param: str
    scope: str
    source: str


class Residual(NamedTuple):
    """Numbers that the forward pass leaves in memory for the backward pass.

    Attributes:
        primitive: The operation that makes them.
        dtype: Their dtype.
        bytes: Their size.
        arrays: How many arrays they are.
        source: The file and line of that operation.
    """

    primitive: str
    dtype: str
    bytes: int
    arrays: int
    source: str


class Findings(NamedTuple):
    """What is found in a program; `Report` describes the fields."""

    matmuls: tuple[Matmul, ...]
    kept: tuple[Kept, ...]
    opaque: tuple[Kept, ...]
    residuals: tuple[Residual, ...]


def findings(full: Program) -> Findings:
    """Looks at each operation of a program."""
    why = causes(full.jaxpr, [str(name) for name in full.names])
    reasons = _Reasons(full, why.operands)
    matmuls: dict[Matmul, Matmul] = {}
    promoted: list[Kept] = []
    opaque: list[Kept] = []
    for site in sites(full.jaxpr, full.known, made=full.made, largest=True):
        eqn, place = site.eqn, site.place
        if place.primitive in _MULTIPLIES:
            found = _matmul(site, reasons)
            same = found._replace(times=0, flops=0, bytes=0)
            matmuls[same] = _sum(matmuls.get(same, same), found)
        if id(eqn) in why.promoted and not place.backward:
            promoted.append(_kept(place, f"promoted by {why.promoted[id(eqn)]}"))
        if _is_opaque(eqn):
            opaque.append(_kept(place, REASONS["pallas_call"]))
    rows = tuple(matmuls.values())
    wide = [_kept(x.place, x.reason) for x in rows if x.reason and not x.place.backward]
    return Findings(
        matmuls=rows,
        kept=tuple(dict.fromkeys([*wide, *promoted])),
        opaque=tuple(dict.fromkeys(opaque)),
        residuals=_residuals(full),
    )


_MULTIPLIES = frozenset({*MATMULS, *ATTENTION, *CROSS_ENTROPY, GROUPED})


def _is_opaque(eqn: Equation) -> bool:
    """Returns whether nothing is known of an operation; kernels of mpx are known."""
    name = primitive_name(eqn)
    if REASONS.get(name) != REASONS["pallas_call"] or name in _REFERENCES:
        return False
    equations = (eqn, *equations_inside(eqn))
    return not any("mpx_" in str(x.params.get("name")) for x in equations)


_REFERENCES = ("get", "swap", "addupdate", "ref_new")


def _kept(place: Place, reason: str) -> Kept:
    return Kept(place.primitive, reason, place.param, place.scope, place.source)


def _sum(a: Matmul, b: Matmul) -> Matmul:
    return a._replace(
        times=a.times + b.times, flops=a.flops + b.flops, bytes=a.bytes + b.bytes
    )


class _Reasons:
    """Why matmuls are f32."""

    def __init__(self, full: Program, operands: dict[int, str]) -> None:
        self._operands = operands
        self._decided = {
            (x.primitive, short_source(x.source), x.shapes[:2]): x.reason
            for x in full.recording.decisions
            if x.primitive in _MULTIPLIES and "float32" in x.after
        }
        self._forward: dict[tuple[str, str], str] = {}

    def of(self, site: Site) -> str:
        """Returns why a matmul is; the forward ones come first."""
        eqn, place = site.eqn, site.place
        own, line = self._operands.get(id(eqn), ""), (place.source, place.param)
        if place.backward:
            return self._forward.get(line, own)
        shapes = tuple(tuple(x.aval.shape) for x in eqn.invars[:2])
        reason = self._decided.get((place.primitive, place.source, shapes), own)
        return self._forward.setdefault(line, reason)


def _matmul(site: Site, reasons: _Reasons) -> Matmul:
    eqn = site.eqn
    operands = eqn.invars[: 3 if site.place.primitive in ATTENTION else 2]
    size = sum(nbytes(x.aval) for x in (*operands, eqn.outvars[0]))
    is_wide = any(is_f32(x.aval) for x in operands)
    if site.place.primitive in CROSS_ENTROPY:
        is_wide = eqn.params["head"].dtype == np.float32
    return Matmul(
        place=site.place,
        dtype=_multiplied_in(eqn),
        result=short_dtypes([eqn.outvars[0].aval.dtype]),
        shapes=tuple(tuple(x.aval.shape) for x in operands),
        times=site.times,
        flops=flops(eqn) * site.times,
        bytes=size * site.times,
        reason=reasons.of(site) if is_wide else "",
    )


def _multiplied_in(eqn: Equation) -> str:
    """Returns the preset in which a matmul multiplies, or the dtype of its operands."""
    for rule, preset in PRESETS.items():
        if eqn.params.get("precision") == preset:
            return rule
    if primitive_name(eqn) in CROSS_ENTROPY:
        return short_dtypes([eqn.params["head"].dtype])
    return short_dtypes(x.aval.dtype for x in eqn.invars[:2])


def _residuals(full: Program) -> tuple[Residual, ...]:
    groups: dict[tuple[str, str, str], list[int]] = {}
    for x in peak(full.jaxpr).saved:
        source = source_of(frames_of(*x.callers, x.eqn))
        key = primitive_name(x.eqn), short_dtypes([x.dtype]), source
        groups.setdefault(key, []).append(x.bytes)
    found = [
        Residual(primitive, dtype, sum(sizes), len(sizes), source)
        for (primitive, dtype, source), sizes in groups.items()
    ]
    return tuple(sorted(found, key=lambda x: -x.bytes))
