"""The collectives of a compiled program."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax

from mpx.inspect._result import Result, Table, amount, total

_KINDS = (
    "all-gather|all-reduce|reduce-scatter|ragged-all-to-all|all-to-all|"
    "collective-permute|collective-broadcast"
)
# Its name after `ENTRY`, if it is that, and its lines, which are indented.
_COMPUTATION = re.compile(
    r"^(ENTRY )?%?([\w.\-$]+) (?:\(.*)?\{[ \t]*\n((?:[ \t].*\n?)*)", re.MULTILINE
)
_CALLED = re.compile(
    r"(?:body|calls|to_apply|condition|branch_computations|called_computations)="
    r"(%?[\w.\-$]+|\{[^}]*\})"
)
_COLLECTIVE = re.compile(rf" = (\(.*?\)|\S+) ({_KINDS})(-start)?\(")
_ARRAY = re.compile(r"\b(pred|bf16|[sufc]\d+\w*)\[([\d,]*)\]")
_SHORT = {"f8e4m3fn": "e4m3", "f8e5m2": "e5m2", "f4e2m1fn": "e2m1", "pred": "bool"}


class Collective(NamedTuple):
    """One collective operation of a compiled program.

    Attributes:
        kind: `all-reduce`, `all-gather`, `reduce-scatter`, `all-to-all` or another.
        dtype: The dtype that is sent, such as `f32` or `e4m3`.
        shape: The shape of its result on one device.
        devices: Over how many devices each of its groups extends.
        runs: How often it runs in one call of the program. A loop whose length the
            compiler does not know counts once.
        in_loop: Whether it is inside a loop.
        bytes: How many bytes one device sends in one call, in all these runs, by the
            usual ring algorithms.

    Examples:
        >>> text = '''
        ... ENTRY %main (x: f32[8]) -> f32[8] {
        ...   %y = f32[8]{0} all-reduce(%x), replica_groups={{0,1,2,3}}
        ... }'''
        >>> collectives(text)[0].bytes
        48
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    devices: int
    runs: int
    in_loop: bool
    bytes: int


class Collectives(Result, list[Collective]):
    """A list of collectives that prints as a table."""

    def tables(self) -> Sequence[Table]:
        """Returns the sums by kind and dtype."""
        if not self:
            return [Table.text("No collectives.")]
        runs = total(((x.kind, x.dtype), x.runs) for x in self)
        sent = total(((x.kind, x.dtype), x.bytes) for x in self)
        rows = [(*x, str(runs[x]), amount(sent[x], "B")) for x in sorted(runs)]
        head = ("collective", "dtype", "runs", "sent by each device")
        return [Table(head, rows, "", frozenset({2, 3}))]


def collectives(compiled: jax.stages.Compiled | str) -> Collectives:
    """Lists the collectives of a compiled program; the list prints as a table.

    With n devices in a group and a result of b bytes on each, a device sends b·(n-1)/n in
    an all-gather and an all-to-all, b·(n-1) in a reduce-scatter, 2·b·(n-1)/n in an
    all-reduce, and b in a permutation. CPUs promote 16-bit sums to f32: read the program
    that was compiled for the hardware that you mean.

    Args:
        compiled: What `jax.jit(func).lower(...).compile()` returns, or its text.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> collectives(jax.jit(jnp.sum).lower(jnp.ones(8)).compile())
        No collectives.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text() or ""
    return Collectives(_found(text))


def _found(text: str) -> Iterator[Collective]:
    found = _COMPUTATION.findall(text)
    bodies = {name: lines.splitlines() for _, name, lines in found}
    entry = next((name for is_entry, name, _ in found if is_entry), "")
    runs, devices = _runs(entry, bodies), _number(r"num_partitions=(\d+)", text)
    for name, lines in bodies.items():
        times, in_loop = runs.get(name, (0, False))
        for match in filter(None, map(_COLLECTIVE.search, lines if times else ())):
            types, kind, is_started = match.groups()
            group = _group(match.string, devices)
            arrays = [
                (dtype, tuple(int(size) for size in sizes.split(",") if size))
                for dtype, sizes in _ARRAY.findall(types)
            ]
            if is_started and (kind != "all-reduce" or types.startswith("((")):
                # ((operands), (results)), and for some a context, an integer scalar.
                arrays = [x for x in arrays if x != ("u32", ())]
                arrays = arrays[len(arrays) // 2 :]
            for dtype, shape in arrays:
                size = _number(r"[a-z]+(\d+)", dtype, 8) * math.prod(shape) / 8
                sent = round(times * _sent(kind, size, group))
                short = _SHORT.get(dtype) or dtype
                yield Collective(kind, short, shape, group, times, in_loop, sent)


def _runs(entry: str, bodies: dict[str, list[str]]) -> dict[str, tuple[int, bool]]:
    """Returns how often each computation runs, and whether in a loop."""
    runs, stack = dict[str, tuple[int, bool]](), [(entry, 1, False)]
    while stack:
        name, times, in_loop = stack.pop()
        before = runs.get(name, (0, False))
        runs[name] = before[0] + times, before[1] or in_loop
        for line in bodies.get(name, ()):  # a text may have no entry
            if "async-done(" in line or "async-update(" in line:
                continue  # they name the computation of their start again
            called = re.findall(r"[\w.\-$]+", " ".join(_CALLED.findall(line)))
            is_loop = " while(" in line
            count = _number(r"known_trip_count\D*(\d+)", line) if is_loop else 1
            inner = times * count, in_loop or is_loop
            stack += [(x, *inner) for x in called if x in bodies]
    return runs


def _number(pattern: str, text: str, default: int = 1) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else default


def _group(line: str, devices: int) -> int:
    """Returns the size of the groups in which a collective communicates."""
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", line)
    if mesh:
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh[1]))
        parts = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part or sizes[name]) for name, part in parts)
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if listed:
        return len(listed[1].split(","))
    return _number(r"replica_groups=\[\d+,(\d+)\]", line, devices)


def _sent(kind: str, size: float, group: int) -> float:
    """Returns how many bytes a device sends for a result of `size` bytes."""
    factors = {"reduce-scatter": group, "all-reduce": 2}
    factors |= {"all-gather": 1, "all-to-all": 1}
    return size * factors[kind] * (group - 1) / group if kind in factors else size
