"""What a compiled program costs: its kernels and collectives, and the time they take.

A kernel takes as long as its operations or its bytes, whichever is slower; a collective as
long as a ring over the slowest link between its devices. Nothing is run.
"""

import collections
import dataclasses
import itertools
import math
import re
from typing import NamedTuple

from _measure import planned_memory
from mpx._jax._devices import H200
from mpx.inspect._compiled import arrays, bits, computations, located, runs_of

# --- the machine ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Machine:
    """Rates of GPUs and of their links. Operations and bytes are per second.

    The first six are measured on one H200 (`scale.py --check`), the links are assumed.
    """

    bf16: float = H200["bf16"]  # operations of a large matmul
    fp8: float = H200["fp8"]
    f32: float = H200["f32"]  # TF32
    forward: float = 433e12  # operations of cuDNN's attention; causal ones have half
    backward: float = 372e12
    memory: float = H200["memory"]  # bytes of large element-wise kernels, both ways
    kernel: float = 2e-6  # seconds of the shortest kernel
    peak: float = 989e12  # operations in bf16 that the vendor promises, for the MFU
    capacity: float = 136e9  # bytes of memory that a program may use
    node: int = 8  # GPUs in a node
    nvlink: float = 450e9  # bytes that a GPU sends to others of its node
    network: float = 50e9  # bytes that a GPU sends to other nodes
    efficiency: float = 0.8  # share of `nvlink` and `network` that collectives reach
    hop: float = 1.5e-6  # seconds from one GPU of a ring to the next one in its node
    far_hop: float = 5e-6  # the same to another node


# --- kernels --------------------------------------------------------------------------


class Kernel(NamedTuple):
    """One kernel or library call of a program."""

    kind: str  # the rate of `Machine` that bounds its operations, or `memory`
    runs: int  # in one call of the program
    flops: float  # of one run; a multiply-add has two
    bytes: float  # that one run reads and writes

    def seconds(self, machine):
        """Returns the time of all runs."""
        operations = self.flops / getattr(machine, self.kind) if self.flops else 0.0
        once = max(operations, self.bytes / machine.memory, machine.kernel)
        return self.runs * once


class _Instruction(NamedTuple):
    """A line of HLO."""

    name: str
    types: str
    opcode: str
    operands: tuple[str, ...]
    line: str
    is_root: bool

    @property
    def shapes(self):
        return arrays(self.types)


_NOT_KERNELS = re.compile(
    "parameter|constant|bitcast|get-tuple-element|tuple|while|conditional|call|after-all|"
    "partition-id|replica-id|iota|optimization-barrier|domain|add-dependency|.*-done"
)
_COMMUNICATION = re.compile(
    r"(all-gather|all-reduce|reduce-scatter|(ragged-)?all-to-all|collective-\w+|send|recv)"
)
_CALLERS = ("while", "conditional", "call", "async-start")
_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATES = ("dynamic-update-slice", "scatter")


def kernels(text):
    """Reads the kernels of a program compiled for GPUs, communication left out.

    A fusion reads its operands and writes its results, except for slices of them: what it
    takes out of a stack of layers, or puts into it in place, counts alone.
    """
    entry, bodies = computations(text)
    parsed = {name: _parse(lines) for name, lines in bodies.items()}
    inside = {
        name
        for body in parsed.values()
        for x in body.values()
        if x.opcode not in _CALLERS
        for name in re.findall(r"(?:calls|to_apply)=%?([\w.\-$]+)", x.line)
    }
    found = []
    for name, (runs, _) in runs_of(entry, bodies).items():
        body = parsed.get(name, {})
        if name in inside:
            continue
        for x in body.values():
            opcode = x.opcode.removesuffix("-start")
            if _NOT_KERNELS.fullmatch(opcode):
                continue
            inner = _called(x, parsed) if opcode == "fusion" else {x.name: x}
            if not any(_COMMUNICATION.match(y.opcode) for y in inner.values()):
                kind, flops, size = _cost(x, opcode, body, parsed)
                found.append(Kernel(kind, runs, flops, size))
    return found


def _parse(lines):
    """Returns the instructions of a computation by name."""
    found = {}
    for line in lines:
        match = re.match(r"\s+(ROOT )?%?([\w.\-$]+) = ", line)
        if match is None:
            continue
        rest = line[match.end() :]
        end = _closing(rest) if rest.startswith("(") else rest.find(" ")
        types, rest = rest[:end], rest[end:].lstrip()
        opcode, _, rest = rest.partition("(")
        operands = tuple(re.findall(r"%([\w.\-$]+)", rest[: _closing("(" + rest) - 1]))
        root, name = match.groups()
        found[name] = _Instruction(name, types, opcode, operands, line, bool(root))
    return found


def _closing(text):
    """Returns the place behind the parenthesis that closes the first one."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return i + 1
    return len(text)


def _size(shapes):
    return sum(bits(dtype) * math.prod(shape) / 8 for dtype, shape in shapes)


def _cost(x, opcode, body, parsed) -> tuple[str, float, float]:
    """Returns the kind of a kernel, its operations and its bytes."""
    if opcode == "fusion":
        return _fusion(_called(x, parsed))
    operands = [body[name].shapes for name in x.operands if name in body]
    read = sum(map(_size, operands))
    found = _operations(x, operands)
    if found is not None:
        return *found, read + _size(_results(x))
    if opcode in _UPDATES:
        size = 2 * _size(body[_update(x)].shapes)
    elif opcode in _SLICES:
        size = 2 * _size(x.shapes)
    else:  # what starts a copy names operands among its results
        size = read + (read if opcode != x.opcode else _size(x.shapes))
    return "memory", 0.0, size


def _operations(x, operands) -> tuple[str, float] | None:
    """Returns kind and operations of a matmul or of attention; otherwise nothing."""
    if x.opcode == "dot" or '"__cublas' in x.line:
        return _matmul(x, operands)
    return _attention(x, operands) if '"__cudnn$fmha' in x.line else None


def _results(x):
    """Returns what an instruction makes, without the workspace of a library."""
    return x.shapes[:1] if '"__cublas' in x.line else x.shapes


def _integers(pattern, line):
    """Returns the numbers in what a pattern finds."""
    found = re.search(pattern, line)
    return [int(i) for i in re.findall(r"\d+", found.group(1))] if found else []


def _matmul(x, operands):
    """Returns the dtype of a matmul and its operations."""
    (dtype, left), *_ = operands[0]
    axes = r'lhs_contracting_dim(?:ension)?s(?:"?:|=)[\[{]([\d," ]*)[\]}]'
    summed = math.prod(left[i] for i in _integers(axes, x.line))
    kind = "fp8" if dtype.startswith("f8") else "f32" if dtype == "f32" else "bf16"
    return kind, 2.0 * math.prod(x.shapes[0][1]) * summed


def _attention(x, operands):
    """Returns whether attention is forward or backward, and its operations."""
    scores = r'"intermediate_tensor_shape".*?"dimensions": ?\[([^\]]*)\]'
    sizes = _integers(scores, x.line) or [0]
    kind, matmuls = ("backward", 5) if "Backward" in x.line else ("forward", 2)
    half = 0.5 if "CAUSAL" in x.line else 1.0
    return kind, 2.0 * matmuls * half * math.prod(sizes) * operands[0][0][1][-1]


def _called(x, parsed):
    """Returns the computation of a fusion."""
    name = re.search(r"calls=%?([\w.\-$]+)", x.line)
    return parsed[name.group(1)] if name else {}


def _fusion(body) -> tuple[str, float, float]:
    """Returns kind, operations and bytes of a fusion, from its computation."""
    users, kind, flops, size = collections.defaultdict(list), "memory", 0.0, 0.0
    for x in body.values():
        for name in dict.fromkeys(x.operands):
            users[name].append(x)
    for x in body.values():
        found = _operations(x, [body[name].shapes for name in x.operands])
        if found is not None:
            kind, flops = found[0], flops + found[1]
        if x.opcode == "parameter":
            size += _read(x.name, users, _size(x.shapes))
        size += _written(x, body) if x.is_root else 0.0
    return kind, flops, size


def _read(name, users, whole):
    """Returns the bytes of a parameter of a fusion that are read."""
    total = 0.0
    for user in users.get(name, ()):
        if user.opcode == "bitcast":
            total += _read(user.name, users, whole)
        elif user.opcode in _SLICES and user.operands[0] == name:
            total += _size(user.shapes)
        elif user.opcode not in _UPDATES or name in user.operands[1:]:
            total += whole
    return min(total, whole)


def _written(x, body) -> float:
    """Returns the bytes of the result of a fusion that are written."""
    if x.opcode == "tuple":
        return sum(_written(body[name], body) for name in x.operands)
    if x.opcode == "get-tuple-element" and "index=0" not in x.line:
        is_workspace = '"__cublas' in body[x.operands[0]].line
        return 0.0 if is_workspace else _size(x.shapes)
    if x.opcode == "bitcast":
        return _written(body[x.operands[0]], body)
    if x.opcode in _UPDATES:
        return _size(body[_update(x)].shapes)
    return 0.0 if x.opcode == "parameter" else _size(_results(x))


def _update(x):
    """Returns the operand that is written into another one in place."""
    return x.operands[-1] if x.opcode == "scatter" else x.operands[1]


# --- collectives ----------------------------------------------------------------------


class Transfer(NamedTuple):
    """One collective of a program."""

    kind: str  # `all-gather` and so on
    dtype: str  # of the largest part that is sent
    devices: int  # of a group
    nodes: int  # among which a group is spread
    runs: int
    bytes: float  # that a device sends in one run

    def seconds(self, machine):
        """Returns the time of all runs.

        A ring enters and leaves each node once, so that the GPUs of a group that are in
        one node share the links to the next one. In an all-to-all they cannot: each part
        has another receiver. An all-reduce goes along a tree of nodes, which has fewer
        hops than a ring.
        """
        near, far = self.devices - self.nodes, self.nodes - 1
        here = self.devices // self.nodes
        rate = machine.nvlink if near else math.inf
        hops = near * machine.hop + far * machine.far_hop
        if far and self.kind == "all-to-all":
            share = (self.devices - here) / (self.devices - 1)
            rate = min(rate, machine.network / share)
        elif far:
            rate = min(rate, machine.network * here)
        if self.kind == "all-reduce":
            depth = math.ceil(math.log2(self.nodes))
            hops = 2 * ((here - 1) * machine.hop + depth * machine.far_hop)
        elif self.kind in ("all-to-all", "collective-permute"):
            hops = machine.far_hop if far else machine.hop
        return self.runs * (self.bytes / (rate * machine.efficiency) + hops)


def transfers(text, node=8):
    """Reads the collectives of a program; those that XLA combined are one."""
    found = {}
    for line, item in located(text):
        found.setdefault(line, []).append(item)
    result = []
    for line, items in found.items():
        first = max(items, key=lambda x: x.bytes)
        if first.devices == 1:
            continue
        sent = sum(x.bytes for x in items) / first.runs
        nodes = len({i // node for i in group_of(line) or range(first.devices)})
        what = first.kind, first.dtype, first.devices, nodes, first.runs
        result.append(Transfer(*what, sent))
    return result


def group_of(line):
    """Returns the devices of the first group of a collective; empty if it names none."""
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", line)
    if mesh:
        sizes = {k: int(v) for k, v in re.findall(r"'([^']+)'=(\d+)", mesh.group(1))}
        parts = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", mesh.group(2))
        axes = [_axis(sizes, name, before, size) for name, before, size in parts]
        return sorted(_places(axes))
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if listed:
        return [int(i) for i in listed.group(1).split(",")]
    counted = r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
    found = re.search(counted, line)
    if found is None:
        return []
    sizes = [int(i) for i in found.group(2).split(",")]
    order = [int(i) for i in (found.group(3) or "").split(",") if i]
    axes = [(sizes[i], math.prod(sizes[i + 1 :])) for i in order or range(len(sizes))]
    return list(_places(axes))[: int(found.group(1))]


def _axis(sizes, name, before, size):
    """Returns size and stride of an axis of a mesh, or of a part of it."""
    names = list(sizes)
    inner = math.prod(sizes[x] for x in names[names.index(name) + 1 :])
    if not size:
        return sizes[name], inner
    return int(size), inner * sizes[name] // (int(before) * int(size))


def _places(axes):
    """Returns the devices along axes of sizes and strides, the last one fastest."""
    along = [range(0, size * stride, stride) for size, stride in axes]
    return map(sum, itertools.product(*along))


# --- a whole program ------------------------------------------------------------------


class Program(NamedTuple):
    """What was read from a compiled program; bytes are those of one device."""

    kernels: list[Kernel]
    transfers: list[Transfer]
    argument_bytes: int
    peak_bytes: int

    def seconds(self, machine):
        """Returns the seconds of all kernels, and of all collectives."""
        both = self.kernels, self.transfers
        return tuple(sum(x.seconds(machine) for x in part) for part in both)

    def flops(self):
        """Returns the operations by kind."""
        found = collections.defaultdict[str, float](float)
        for x in self.kernels:
            found[x.kind] += x.runs * x.flops
        return found


def read(compiled):
    """Reads a compiled program."""
    text, memory = compiled.as_text(), planned_memory(compiled)
    sizes = memory["argument_bytes"], memory["compiled_bytes"]
    return Program(kernels(text), transfers(text), *sizes)


def from_record(record):
    """Returns the program of a JSON record."""
    kernels = [Kernel(*x) for x in record.pop("kernels")]
    transfers = [Transfer(*x) for x in record.pop("transfers")]
    return Program(kernels, transfers, **record)
