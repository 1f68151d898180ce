"""Buffers that a compiled program needs, predicted from its jaxpr.

XLA computes element-wise operations in one kernel with what reads their results, so that most
values of a jaxpr never exist in memory. The rules here say which ones do.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from jaxtyping import PyTree

from mpx._jax._compat import Literal, open_jaxpr, primitive_name
from mpx._jax._formats import short_name
from mpx._program._flow import Walk
from mpx._program._interpreter import Aval, Jaxpr
from mpx._program._primitives import CASTS
from mpx._program._queries import (
    ATTENTION,
    CALLS,
    CROSS_ENTROPY,
    GROUPED,
    MATMULS,
    SHAPE_ONLY,
    Equation,
    Position,
    fold,
    has_body,
    names,
)
from mpx.inspect._result import total

_INLINED = (*CALLS, *names("custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr"))
KERNELS = frozenset({*ATTENTION, *CROSS_ENTROPY, GROUPED}).union(
    names(
        "dot_product_attention_fwd dot_product_attention_fwd_wrapper ffi_call "
        "dot_product_attention_bwd dot_product_attention_bwd_wrapper triton_kernel_call"
    )
)
"""Kernels that somebody has written."""
_READS_MEMORY = KERNELS.union(
    MATMULS,
    names(
        "scan while cond shard_map pallas_call pure_callback io_callback sort top_k fft "
        "custom_partitioning cholesky lu qr eigh svd eig triangular_solve scatter "
        "scatter-add scatter_add cumsum cumprod cummax cummin cumlogsumexp reduce_window "
        "reduce_window_sum reduce_window_max select_and_scatter_add select_and_gather_add"
    ),
)
"""Operations that run in a kernel of their own: operands and results are in memory."""
_WRITES_MEMORY = _READS_MEMORY.union(
    names(
        "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce argmax "
        "argmin gather random_bits rng_bit_generator threefry2x32 all_gather psum "
        "all_to_all ppermute psum_scatter reduce_scatter psum_invariant psum2"
    )
)
"""Operations that XLA may compute together with what makes their operands."""
_EXPENSIVE = frozenset(
    names(
        "exp exp2 expm1 log log1p log2 tanh logistic erf erfc erf_inv pow rsqrt sqrt cbrt "
        "sin cos tan asin acos atan atan2 sinh cosh asinh acosh atanh lgamma digamma"
    )
)
"""Functions that XLA does not compute a second time in the backward pass."""
_IN_PLACE = names("scatter scatter-add scatter_add dynamic_update_slice")
"""Operations that write into their first operand."""
_LARGE = 0.5  # An operand counts from this share of the bytes of the result.
_SMALLER = 0.6  # A result is kept instead of its operands below this share of theirs.


class Peak(NamedTuple):
    """The moment at which a program needs most memory, its arguments not counted."""

    bytes: int
    live: "list[Value]"  # those in memory then
    saved: "list[Value]"  # what the forward pass leaves for the backward pass


def nbytes(aval: Aval) -> int:
    """Returns the bytes of a value; a PRNG key has 8, a token or a reference none."""
    size = getattr(getattr(aval, "dtype", None), "itemsize", 0)
    return math.prod(getattr(aval, "shape", ())) * int(size)


def by_dtype(values: "Iterable[Value]") -> dict[str, int]:
    """Returns the bytes by dtype, the most first."""
    found = total((x.dtype, x.bytes) for x in values)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


Inner = Callable[[Equation], Sequence[Peak]]
"""Returns the peaks of the jaxprs inside an equation."""


@dataclasses.dataclass(eq=False)
class _Node:
    """An equation with the values that it reads and makes."""

    here: Position
    index: int
    name: str
    reads: "list[Value]"
    inner: int  # the bytes that the jaxprs in it need
    outs: "list[Value]" = dataclasses.field(default_factory=list)


class Value:
    """A value, the equation that makes it, and the value whose buffer it shares."""

    def __init__(self, aval: Aval, node: Any = None) -> None:
        self.bytes, self.node, self.same = nbytes(aval), node, self
        self.dtype = short_name(aval.dtype) if hasattr(aval, "dtype") else ""
        # Whether the forward pass leaves it for the backward pass, or the program returns it
        self.is_saved = self.is_result = False
        # What is in memory of what it is computed from: of a stored value, itself
        self.sources = frozenset[Value]()


class _Graph(Walk[Value | None]):
    """A jaxpr without calls; the label of a literal is `None`."""

    unknown = None

    def __init__(self, jaxpr: Jaxpr, inner: Inner) -> None:
        self.nodes: list[_Node] = []  # in the order of the kernels
        self._known: dict[Hashable, list[Value]] = {}
        self._inner = inner
        inputs = [self.constant(var) for var in open_jaxpr(jaxpr)[0].invars]
        self.outs = self.run(jaxpr, inputs)
        self._share_buffers()
        self.results = {x.same for x in self.outs if x is not None}
        self.stored: list[Value] = []
        self._store()

    def constant(self, var: PyTree) -> Value:
        return Value(var.aval)

    def bodies(self, eqn: Equation, labels: list[Any]) -> list[tuple[Jaxpr, list[Any]]]:
        return super().bodies(eqn, labels)[:1] if _is_inlined(eqn) else []

    def equation(self, here: Position, labels: list[Any]) -> list[Any]:
        eqn, name = here.eqn, primitive_name(here.eqn)
        if _is_inlined(eqn):
            return []
        key = None
        if not has_body(eqn) and not eqn.effects:
            # XLA computes equal operations once, but what remat repeats stays apart.
            literals = [x.val for x in eqn.invars if isinstance(x, Literal)]
            key = (name, *labels, str(literals), str(eqn.params), here.backward)
        if key in self._known:
            return self._known[key]
        inner = max((x.bytes for x in self._inner(eqn)), default=0)
        reads = [x for x in labels if x is not None]
        node = _Node(here, len(self.nodes), name, reads, inner)
        node.outs += [Value(var.aval, node) for var in eqn.outvars]
        self.nodes.append(node)
        if key is not None:
            self._known[key] = node.outs
        return node.outs

    def _share_buffers(self) -> None:
        """Finds values of another shape, or written over an array nobody else reads."""
        readers = collections.Counter(x for node in self.nodes for x in node.reads)
        for node in self.nodes:
            pairs = []
            if node.name in _IN_PLACE and readers[node.reads[0]] == 1:
                pairs = [(node.reads[0], node.outs[0])]
            if node.name in SHAPE_ONLY or node.name in ("name", "optimization_barrier"):
                pairs = list(zip(node.reads, node.outs, strict=False))
            for source, out in pairs:
                if source.bytes == out.bytes:
                    out.same = source.same

    def _store(self) -> None:
        """Finds the values in memory, and what the others are made from."""
        readers: dict[Value, set[_Node]] = collections.defaultdict(set)
        crosses, wanted = self._crossing(), {*self.results}
        for node in self.nodes:
            read = {x.same for x in node.reads} - {x.same for x in node.outs[:1]}
            for value in read:
                readers[value].add(node)
            wanted |= read if node.name in _READS_MEMORY else set()
        for node in self.nodes:
            sources = frozenset[Value]().union(*(x.same.sources for x in node.reads))
            total = sum(x.bytes for x in sources)
            for out in node.outs:
                if out.same is not out:
                    continue
                large = [x for x in sources if x.bytes >= _LARGE * out.bytes]
                is_joined = len(large) > 1
                is_made = is_joined or node.name in CASTS
                is_smaller = is_made and out.bytes < _SMALLER * total
                is_saved = is_smaller or node.name in _EXPENSIVE
                is_stored = (
                    out in wanted
                    or node.name in _WRITES_MEMORY
                    or (is_joined and len(readers[out]) > 1)
                    or (out in crosses and is_saved)
                )
                out.sources = frozenset({out}) if is_stored else sources
                self.stored += [out] * is_stored

    def _crossing(self) -> set[Value]:
        """Returns the values of the forward pass from which the backward pass computes."""
        needed: set[Value] = set()
        for node in reversed(self.nodes):
            is_end = node.name in _WRITES_MEMORY or node.name in _EXPENSIVE
            is_needed = any(out.same in needed for out in node.outs)
            if node.here.backward or (is_needed and not is_end):
                needed.update(x.same for x in node.reads)
        return {x for x in needed if x.node and not x.node.here.backward}

    def peak(self, released: Sequence[int]) -> Peak:
        """Returns the peak; `released` results are gone once they are made."""
        # When values are read last, and which the backward pass reads.
        dies, read_back = {x: x.node.index for x in self.stored}, set[Value]()
        for node in self.nodes:
            if node.outs and not any(x.same in dies for x in node.outs):
                continue  # computed where it is read
            roots = frozenset[Value]().union(*(x.same.sources for x in node.reads))
            dies |= dict.fromkeys(roots, node.index)
            read_back |= roots if node.here.backward else set()
        dies |= dict.fromkeys(self.results & dies.keys(), len(self.nodes))
        gone = {x.same for i in released if (x := self.outs[i]) is not None}
        for value in gone & dies.keys():
            # What a scan stacks is released layer by layer, inside the scan.
            dies[value] = value.node.index - (value.node.name == "scan")
        change: collections.Counter[int] = collections.Counter()
        for value in self.stored:
            change[value.node.index] += value.bytes
            change[dies[value] + 1] -= value.bytes
        now = itertools.accumulate(change[x.index] for x in self.nodes)
        sizes = [x + node.inner for x, node in zip(now, self.nodes, strict=True)]
        most = max(sizes, default=0)
        at = sizes.index(most) if most else 0
        for value in self.stored:
            value.is_saved = value in read_back and not value.node.here.backward
            value.is_result = value in self.results
        live = [x for x in self.stored if x.node.index <= at <= dies[x]]
        return Peak(most, live, [x for x in self.stored if x.is_saved])


def _is_inlined(eqn: Equation) -> bool:
    return primitive_name(eqn) in _INLINED and has_body(eqn)


def peak(jaxpr: Jaxpr, released: Sequence[int] = ()) -> Peak:
    """Predicts the most memory that a program needs besides its arguments.

    The order of its equations is taken for that of the kernels. `released` are the positions
    of results that are needed no longer as soon as they are made.
    """
    outermost = open_jaxpr(jaxpr)[0]

    def at(body: Jaxpr, inner: Inner) -> Peak:
        return _Graph(body, inner).peak(released if body is outermost else ())

    return fold(jaxpr, at)
