"""Reports of the precision in which a function computes, made before it runs."""

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import PyTree

from mpx._amp._facts import is_eligible as is_f32
from mpx._amp._rules import UNKNOWN, Rule
from mpx._casting._keep import FP8_SCOPE
from mpx._fp8._decide import Matmul as Fp8Matmul
from mpx._jax._compat import Literal, open_jaxpr, primitive_name, source_frames
from mpx._jax._formats import short_name
from mpx._ops._experts._ragged import IN_KERNEL, RAGGED
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
    equations,
    flops,
    walk,
)
from mpx._program._recording import Decision, Residual
from mpx.inspect._buffers import by_dtype, nbytes, peak
from mpx.inspect._dtypes import is_low, short_dtypes
from mpx.inspect._program import Place, Program, gradient, program, sites
from mpx.inspect._result import (
    Result,
    Table,
    amount,
    and_more,
    percent,
    short_source,
    source_of,
    total,
)

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
    runs = collections.Counter[Matmul]()
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
            found = _matmul(eqn, place, forward.get(line, reason))
            if found.reason and not place.backward:
                forward[line] = found.reason
                forward.setdefault(place.source, found.reason)
            runs[found] += here.times
        if id(eqn) in promoting and not (place.backward or is_own):
            promoted.append(_row(place, f"{_PROMOTED}{promoting[id(eqn)]}"))
        if _is_opaque(eqn):
            opaque.append(_row(place, REASONS["pallas_call"]))
    rows = tuple(
        x._replace(times=n, flops=n * x.flops, bytes=n * x.bytes)
        for x, n in runs.items()
    )
    wide = [_row(x.place, x.reason) for x in rows if x.reason and not x.place.backward]
    return rows, tuple(dict.fromkeys([*wide, *promoted])), tuple(dict.fromkeys(opaque))


def _row(place: Place, reason: str) -> Kept:
    return Kept(place.primitive, reason, place.param, place.scope, place.source)


def _is_opaque(eqn: Equation) -> bool:
    """Returns whether nothing is known of an operation; kernels of mpx are known."""
    name = primitive_name(eqn)
    if REASONS.get(name) != REASONS["pallas_call"] or name in _REFERENCES:
        return False
    inside = (eqn, *equations(eqn))
    return not any("mpx_" in str(x.params.get("name")) for x in inside)


def _matmul(eqn: Equation, place: Place, reason: str) -> Matmul:
    """Returns one run of a matmul."""
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
        times=1,
        flops=flops(eqn),
        bytes=size,
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
            is_weak = getattr(x.aval, "weak_type", False)  # as Python's numbers
            if isinstance(x, Literal) and is_f32(x.aval) and not is_weak:
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


# --- What amp and fp8 decided ---------------------------------------------------------


class Recognised(NamedTuple):
    """Attention or experts in a program."""

    what: str  # `attention` or `experts`
    found: bool  # whether it runs in its kernel
    reason: str  # how it runs, or why not so
    source: str  # file and line


@dataclasses.dataclass(frozen=True)
class AmpView:
    """What `amp` decided about the operations of a function.

    A decision stands for one operation and has the fields `primitive`, `rule`, `reason`,
    `scope`, `source` (file and line), `params` (the arguments that it reads), `before`
    (dtypes of the operands as written), `after` (dtypes of the results), `shapes` of the
    operands and `flops` (of a matmul, else 0). Equal ones are listed once.

    Attributes:
        dtype: The compute dtype: `bf16` or `f16`.
        rules: The name of the rules, such as `safe`.
        decisions: One for each operation that autocast had to decide about.
        guessed: The arguments that were taken for the parameters, as the first container,
            where others may hold them and are not named by `params=`. What is
            differentiated decides otherwise.
    """

    dtype: str
    rules: str
    decisions: tuple[Decision, ...]
    guessed: tuple[str, ...] = ()

    @property
    def matmuls(self) -> tuple[Decision, ...]:
        """The matmuls and convolutions, and attention that cuDNN runs as a whole."""

        def multiplies(x: Decision) -> bool:
            is_fused = x.rule == Rule.LOW and x.primitive in ATTENTION
            return is_fused or x.primitive in (*MATMULS, *CROSS_ENTROPY)

        return tuple(filter(multiplies, self.decisions))


def _from_decisions(
    decisions: Iterable[Decision], dtype: str
) -> tuple[tuple[Kept, ...], tuple[Kept, ...]]:
    """Returns what is in f32 or as written for a reason, and what `amp` does not know."""
    kept, opaque = list[Kept](), list[Kept]()
    for x in decisions:
        row = Kept(x.primitive, x.reason, " ".join(x.params), x.scope, x.source)
        if x.rule == Rule.ORIGINAL and x.reason in (UNKNOWN, REASONS["pallas_call"]):
            opaque.append(row)
        elif x.rule == Rule.LOW:  # the sums of a cross entropy, its results, are f32
            is_known = x.primitive in (*RAGGED, *CROSS_ENTROPY)
            kept += [row] * (short_dtypes(x.after[:1]) != dtype and not is_known)
        elif x.rule in (Rule.F32, Rule.ORIGINAL) and FP8_SCOPE not in x.scope:
            kept.append(row)
    return tuple(kept), tuple(opaque)


@dataclasses.dataclass(frozen=True)
class Fp8View(Result):
    """What `fp8` decided about the matmuls of the forward pass.

    Attributes:
        recipe: The recipe.
        matmuls: All that multiplies in the forward pass: matmuls, ragged ones,
            convolutions and fused attention. The fields are `param` (the parameter that it
            reads, such as `params/layers/w1`; "" without one), `scope` (joined by `/`),
            `source` (file and line), `shape` (rows, summed length, columns), `times` (how
            often it runs, in scans and over batch dimensions), `dtype` (of the operands),
            `reason` (why it stays as it is; "" if it is changed), `flops`, `primitive` and
            `format` (what the recipe makes of matmuls: `fp8`, `int8`, `nvfp4`).
    """

    recipe: str
    matmuls: tuple[Fp8Matmul, ...]

    @property
    def changed(self) -> tuple[Fp8Matmul, ...]:
        """The matmuls that run in the format of the recipe."""
        return tuple(x for x in self.matmuls if not x.reason)

    @property
    def kept(self) -> tuple[Fp8Matmul, ...]:
        """The matmuls that stay as they are."""
        return tuple(x for x in self.matmuls if x.reason)

    @property
    def share(self) -> float:
        """The share of all these operations that are changed, from 0 to 1."""
        total = sum(x.flops for x in self.matmuls)
        return sum(x.flops for x in self.changed) / total if total else 0.0

    def tables(self) -> Sequence[Table]:
        """Returns the share, and the matmuls with the reason against a change."""
        total = sum(x.flops for x in self.matmuls) or 1
        low = "×".join(dict.fromkeys(x.format for x in self.matmuls))
        rows = []
        for x in self.matmuls:
            place = x.param or x.scope or short_source(x.source)
            sizes, share = "×".join(map(str, x.shape)), percent(x.flops / total)
            rows.append((place, sizes, str(x.times), share, x.reason or x.format))
        if not rows:
            return [Table.text("No matmuls that fp8 could change.")]
        head = "parameter, or place", "shape", "times", "FLOPs", f"{low}, or why not"
        share = f"{percent(self.share)} of the forward matmul operations run in {low}."
        return [Table(head, rows, share, frozenset({2, 3}))]


# --- The report -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Report(Result):
    """The precision of a program's operations; made by `mpx.inspect.report`.

    It prints as tables. In these, rows that differ only in the numbers of their paths, as
    the layers of a model do, are one.

    Attributes:
        matmuls: All matmuls, convolutions and calls of fused attention.
        kept: What is in f32, or as it is written, and why.
        residual_bytes: What the forward pass leaves in memory for the backward pass, by
            dtype. Values that XLA computes again from others are left out.
        opaque: Operations of which nothing is known, such as kernels and callbacks.
        passes: `forward`, `forward and backward`, or why there is no backward pass.
        residuals: The large arrays that functions under `amp(residuals=...)` keep. The fields
            are `shape`, `dtype`, `format` (in which it is kept: `int8`, `e4m3`, or a
            dtype), `reason` (why it is not in 8 bits; "" if it is) and `source`.
        amp: What `amp` decided; `None` if the function is not under it.
        fp8: What `fp8` decided; `None` if the function is not under it.
    """

    matmuls: tuple[Matmul, ...]
    kept: tuple[Kept, ...]
    residual_bytes: Mapping[str, int]
    opaque: tuple[Kept, ...]
    residuals: tuple[Residual, ...]
    passes: str
    amp: AmpView | None
    fp8: Fp8View | None

    @property
    def flops(self) -> dict[str, int]:
        """The operations of all matmuls by the dtype in which they multiply.

        Each is counted as often as it runs; a while loop counts as one step, a branch as
        the largest of its alternatives, `shard_map` as one device.
        """
        return total((x.dtype, x.flops) for x in self.matmuls)

    @property
    def shares(self) -> dict[str, float]:
        """The share of the matmuls' operations by dtype, the largest first."""
        flops = self.flops
        ordered, every = sorted(flops.items(), key=lambda x: -x[1]), sum(flops.values())
        return {dtype: count / max(every, 1) for dtype, count in ordered}

    @property
    def recognised(self) -> tuple[Recognised, ...]:
        """Attention and experts that `amp` found, in a kernel or not."""
        rows = dict[Recognised, None]()
        for x in () if self.amp is None else self.amp.decisions:
            is_low, source = x.rule == Rule.LOW, short_source(x.source)
            if x.primitive in RAGGED and is_low:
                is_found = x.reason == IN_KERNEL
                rows[Recognised("experts", is_found, x.reason, source)] = None
            if x.primitive in ("attention", *ATTENTION):
                is_found = x.primitive in ATTENTION and is_low
                how = "cuDNN's kernel" if is_found else x.reason
                rows[Recognised("attention", is_found, how, source)] = None
        return tuple(rows)

    def tables(self) -> Sequence[Table]:
        """Returns the summary, the matmuls, and what is f32 and why."""
        found = [Table.text(self._summary()), self._matmul_table()]
        if self.fp8 is not None:
            found += self.fp8.tables()
        words = {True: "found", False: "missed"}
        rows = [(x.what, words[x.found], *x[2:]) for x in self.recognised]
        if rows:
            found.append(Table(("recognised", "", "how, or why not", "source"), rows))
        what, empty = "in f32 or as written", "Nothing is kept in f32."
        if self.amp is None:
            what, empty = "in f32", "Nothing is promoted to f32."
        found.append(_grouped(what, self.kept, empty))
        if self.amp is not None or self.opaque:
            what, empty = "unknown, as written", "Nothing is unknown."
            found.append(_grouped(what, self.opaque, empty))
        parts = [f"{amount(n, 'B')} in {x}" for x, n in self.residual_bytes.items()]
        if parts:
            found.append(Table.text(f"Kept for the backward pass: {', '.join(parts)}."))
        rows = [
            (str(x.shape), *x[1:3], x.reason or "coded", short_source(x.source))
            for x in dict.fromkeys(self.residuals)
        ]
        if rows:
            head = "kept", "computed in", "kept in", "why", "source"
            found.append(Table(head, rows))
        return found

    def _summary(self) -> str:
        amp = self.amp and f"amp to {self.amp.dtype}, rules {self.amp.rules}"
        fp8 = self.fp8 and f"fp8 with {self.fp8.recipe}"
        shares = [f"{percent(x)} in {name}" for name, x in self.shares.items()]
        every = amount(sum(self.flops.values()), "FLOP")
        counted = f" of {every}, {self.passes}" if shares else f"; {self.passes}"
        what = ", ".join(filter(None, (amp, fp8))) or "Neither amp nor fp8"
        found = f"{what}. Matmul operations: {', '.join(shares) or 'none'}{counted}."
        for name in self.amp.guessed if self.amp is not None else ():
            found += f" `{name}`, the first container, is taken for the parameters."
        return found

    def _matmul_table(self) -> Table:
        groups: dict[tuple[str, ...], list[Matmul]] = {}
        for x in self.matmuls:
            name = x.place.primitive.removesuffix("_general")
            shapes = " @ ".join(f"({','.join(map(str, s))})" for s in x.shapes[:2])
            which = "backward" if x.place.backward else "forward"
            what = _starred(x.place.label), name, x.dtype, shapes, which, x.place.source
            groups.setdefault(what, []).append(x)
        rows = []
        for (label, *first, which, source), group in groups.items():
            labels = {x.place.label for x in group}
            cells = (
                str(sum(x.times for x in group)),
                amount(sum(x.flops for x in group)),
                amount(sum(x.bytes for x in group), "B"),
            )
            label = label if len(labels) > 1 else labels.pop()
            rows.append((label, *first, *cells, which, source))
        if not rows:
            return Table.text("No matmuls.")
        head = ("parameter, or place", "matmul", "dtype", "shapes", "times", "FLOPs")
        return Table((*head, "bytes", "pass", "source"), rows, "", frozenset({4, 5, 6}))


def _starred(path: str) -> str:
    """Returns a path with a star for each number between slashes."""
    return re.sub(r"(?<![^/_])\d+(?![^/])", "*", path)


def _grouped(what: str, kept: Iterable[Kept], empty: str) -> Table:
    """Returns one row for each primitive and reason, with the first of its sources."""
    groups: dict[tuple[str, str], dict[str, None]] = {}
    for x in kept:
        key = x.primitive, _starred(x.reason)
        groups.setdefault(key, {})[short_source(x.source)] = None
    rows = [(*key, and_more([*sources])) for key, sources in groups.items()]
    return Table((what, "why", "source"), rows) if rows else Table.text(empty)


def report(
    func: Callable[..., PyTree],
    /,
    *args: PyTree,
    backward: bool | None = None,
    **kwargs: PyTree,
) -> Report:
    """Returns which operations of a call run in which precision, and why.

    The call is traced and not run, so arrays may be given as `jax.ShapeDtypeStruct`. The
    function may be under `mpx.amp` or `mpx.fp8`, call functions that are, cast by a policy
    or by hand, or do nothing of the kind.

    Args:
        func: The function.
        *args: Its positional arguments, without the state of delayed scaling.
        backward: Whether the report covers the gradient with respect to the parameters,
            too: the floating arrays of the first argument, or of the function if it is a
            module. The first result must be a scalar loss. By default it does so where
            that is possible and the function computes no gradient itself. If false, the
            function is reported as it is, with the gradients that it takes itself.
        **kwargs: The keyword arguments of the function.

    Raises:
        TypeError: If `backward` is true and the first result is no scalar loss.

    Examples:
        >>> import jax.numpy as jnp
        >>> import mpx
        >>> def f(params, x):
        ...     return jnp.exp(x @ params["w"])
        >>> found = report(mpx.amp(f), {"w": jnp.ones((8, 4))}, jnp.ones((2, 8)))
        >>> found.shares
        {'bf16': 1.0}
        >>> [(x.place.param, x.dtype, x.flops) for x in found.matmuls]
        [('params/w', 'bf16', 128)]
        >>> [x.primitive for x in found.kept]
        ['exp']
    """
    full, passes = _with_backward(program(func, args, kwargs), backward)
    recording, (matmuls, kept, opaque) = full.recording, operations(full)
    amp = fp8 = None
    if recording.casts:
        amp = AmpView(
            dtype="×".join(dict.fromkeys(short_name(x) for x, _ in recording.casts)),
            rules=", ".join(dict.fromkeys(str(x.base) for _, x in recording.casts)),
            decisions=tuple(dict.fromkeys(recording.decisions)),
            guessed=tuple(dict.fromkeys(recording.guessed)),
        )
        kept, opaque = _from_decisions(amp.decisions, amp.dtype)
    if recording.recipes:
        names = dict.fromkeys(type(recipe).__name__ for recipe in recording.recipes)
        fp8 = Fp8View(", ".join(names), tuple(recording.matmuls))
    saved = by_dtype(peak(full.jaxpr).saved)
    rows = matmuls, kept, saved, opaque, tuple(recording.residuals)
    return Report(*rows, passes, amp, fp8)


def _with_backward(forward: Program, backward: bool | None) -> tuple[Program, str]:
    """Returns the program to report on, and the passes that it has."""
    if backward:
        return gradient(forward), "forward and backward"
    if any(here.backward for here in walk(forward.jaxpr)):
        return forward, "forward and backward"
    if backward is False or not forward.params or not forward.has_loss:
        return forward, "forward"
    try:
        return gradient(forward), "forward and backward"
    except (TypeError, ValueError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
        return forward, f"forward only, since it has no gradient: {reason}"
