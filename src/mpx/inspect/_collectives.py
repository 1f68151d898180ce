"""The communication between devices in a compiled program."""

import collections
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax

from mpx.inspect._result import Result, Table, amount

_KINDS = (
    "all-gather|all-reduce|reduce-scatter|ragged-all-to-all|all-to-all|"
    "collective-permute|collective-broadcast"
)
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-$]+) (?:\(.*)?\{$")
_CALLED = re.compile(r"(?:body|calls|to_apply|condition)=%?([\w.\-$]+)")
_CALLED_LISTS = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_COLLECTIVE = re.compile(rf" = (\(.*?\)|\S+) ({_KINDS})(-start)?\(")
_ARRAY = re.compile(r"\b(pred|bf16|[sufc]\d+\w*)\[([\d,]*)\]")
_SHORT = {"f8e4m3fn": "e4m3", "f8e5m2": "e5m2", "pred": "bool"}


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
        groups: dict[tuple[str, str], list[Collective]] = {}
        for x in self:
            groups.setdefault((x.kind, x.dtype), []).append(x)
        rows = [
            (
                *key,
                str(sum(x.runs for x in found)),
                amount(sum(x.bytes for x in found), "B"),
            )
            for key, found in sorted(groups.items())
        ]
        head = ("collective", "dtype", "runs", "sent by each device")
        if not rows:
            return [Table.text("No collectives.")]
        return [Table(head, rows, "", frozenset({2, 3}))]


def collectives(compiled: jax.stages.Compiled | str) -> Collectives:
    """Lists the collectives of a compiled program, with dtypes and bytes.

    With n devices in a group and a result of b bytes on each, a device sends b·(n-1)/n in
    an all-gather and an all-to-all, b·(n-1) in a reduce-scatter, 2·b·(n-1)/n in an
    all-reduce, and b in a permutation. CPUs promote 16-bit sums to f32: read the program
    that was compiled for the hardware that you mean.

    Args:
        compiled: What `jax.jit(func).lower(...).compile()` returns, or its text.

    Returns:
        A list of `Collective`, in the order of the program's text; it prints as a table.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> collectives(jax.jit(jnp.sum).lower(jnp.ones(8)).compile())
        No collectives.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text() or ""
    return Collectives(found for _, found in located(text))


def located(text: str) -> Iterator[tuple[str, Collective]]:
    """Yields the collectives of a program's text, each with its line."""
    entry, bodies = computations(text)
    runs = runs_of(entry, bodies)
    partitions = re.search(r"num_partitions=(\d+)", text)
    devices = int(partitions.group(1)) if partitions else 1
    for name, lines in bodies.items():
        times, in_loop = runs.get(name, (0, False))
        if not times:
            continue
        for line in lines:
            for kind, dtype, shape in _results(line):
                group = _group(line, devices)
                sent = times * _sent(kind, bits(dtype) * math.prod(shape) / 8, group)
                short = _SHORT.get(dtype, dtype)
                yield (
                    line,
                    Collective(kind, short, shape, group, times, in_loop, round(sent)),
                )


def computations(text: str) -> tuple[str, dict[str, list[str]]]:
    """Returns the name of the entry, and the lines of each computation by its name."""
    found: dict[str, list[str]] = {}
    entry, lines = "", None
    for line in text.splitlines():
        if not line.startswith((" ", "\t")):
            match = _COMPUTATION.match(line.strip())
            lines = None
            if match:
                lines = found.setdefault(match.group(2), [])
                entry = match.group(2) if match.group(1) else entry
        elif lines is not None:
            lines.append(line)
    return entry, found


def runs_of(entry: str, bodies: dict[str, list[str]]) -> dict[str, tuple[int, bool]]:
    """Returns how often each computation runs, and whether in a loop."""
    runs: dict[str, tuple[int, bool]] = collections.defaultdict(lambda: (0, False))
    stack = [(entry, 1, False)]
    while stack:
        name, times, in_loop = stack.pop()
        runs[name] = runs[name][0] + times, runs[name][1] or in_loop
        for line in bodies.get(name, ()):
            if "async-done(" in line or "async-update(" in line:
                continue  # they name the computation of their start again
            called = _CALLED.findall(line)
            for names in _CALLED_LISTS.findall(line):
                called += [x.strip(" %") for x in names.split(",")]
            is_loop, length = " while(" in line, 1
            if is_loop:
                known = re.search(r"known_trip_count\D*(\d+)", line)
                length = int(known.group(1)) if known else 1
            inner = in_loop or is_loop
            stack += [(x, times * length, inner) for x in called if x in bodies]
    return dict(runs)


def _results(line: str) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yields kind, dtype and shape of each array that a collective returns."""
    match = _COLLECTIVE.search(line)
    if match is None:
        return
    types, kind, is_started = match.groups()
    found = arrays(types)
    if is_started and (kind != "all-reduce" or types.startswith("((")):
        # ((operands), (results)), and for some a context, an integer scalar.
        found = [x for x in found if x != ("u32", ())]
        found = found[len(found) // 2 :]
    for dtype, shape in found:
        yield kind, dtype, shape


def arrays(types: str) -> list[tuple[str, tuple[int, ...]]]:
    """Returns dtype and shape of each array in the text of a type."""
    return [
        (dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in _ARRAY.findall(types)
    ]


def bits(dtype: str) -> int:
    """Returns the bits of one element."""
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return int(digits.group(1)) if digits else 8  # pred


def _group(line: str, devices: int) -> int:
    """Returns the size of the groups in which a collective communicates."""
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", line)
    if mesh:
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh.group(1)))
        parts = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", mesh.group(2))
        return math.prod(int(part or sizes[name]) for name, part in parts)
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if listed:
        return len(listed.group(1).split(","))
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", line)
    return int(counted.group(1)) if counted else devices


def _sent(kind: str, size: float, group: int) -> float:
    """Returns how many bytes a device sends for a result of `size` bytes."""
    others = group - 1
    if kind == "reduce-scatter":
        return size * others
    if kind in ("all-gather", "all-to-all"):
        return size * others / group
    return 2 * size * others / group if kind == "all-reduce" else size
