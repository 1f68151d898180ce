"""Buffers that a compiled program needs, predicted from its jaxpr.

XLA computes element-wise operations in one kernel with what reads their results, so that most
values of a jaxpr never exist in memory. The rules here say which ones do.
"""

import collections
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

from jaxtyping import PyTree

from mpx._jax._compat import Literal, open_jaxpr, primitive_name
from mpx._program._flow import Walk
from mpx._program._interpreter import Aval, Jaxpr
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
from mpx.inspect._dtypes import short_dtypes
from mpx.inspect._result import total

_INLINED = (*CALLS, *names("custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr"))
_READS_MEMORY = frozenset(
    (
        *MATMULS,
        *ATTENTION,
        *CROSS_ENTROPY,
        GROUPED,
        *names(
            "scan while cond shard_map pallas_call ffi_call pure_callback io_callback "
            "custom_partitioning sort top_k fft cholesky lu qr eigh svd eig "
            "triangular_solve scatter scatter-add scatter_add cumsum cumprod cummax "
            "cummin cumlogsumexp reduce_window reduce_window_sum reduce_window_max "
            "select_and_scatter_add select_and_gather_add dot_product_attention_fwd "
            "dot_product_attention_bwd dot_product_attention_fwd_wrapper "
            "dot_product_attention_bwd_wrapper triton_kernel_call"
        ),
    )
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


class Buffer(NamedTuple):
    """A value in memory."""

    bytes: int
    dtype: str
    is_saved: bool  # the forward pass makes it and the backward pass reads it
    is_result: bool  # of the program


class Peak(NamedTuple):
    """The moment at which a program needs most memory, its arguments not counted."""

    bytes: int
    live: list[Buffer]  # the buffers that exist then
    saved: list[Buffer]  # what the forward pass leaves for the backward pass


class _Node(NamedTuple):
    """An equation with the values that it reads and makes, by number."""

    here: Position
    name: str
    reads: list[int]
    outs: list[int]
    inner: int


def nbytes(aval: Aval) -> int:
    """Returns the bytes of a value; a PRNG key has 8, a token or a reference none."""
    shape, dtype = getattr(aval, "shape", ()), getattr(aval, "dtype", None)
    size = getattr(dtype, "itemsize", 0) if dtype is not None else 0
    return math.prod(shape) * int(size)


def by_dtype(buffers: Iterable[Buffer]) -> dict[str, int]:
    """Returns the bytes by dtype, the most first."""
    found = total((short_dtypes([x.dtype]), x.bytes) for x in buffers)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


Inner = Callable[[Equation], Sequence[Peak]]
"""Returns the peaks of the jaxprs inside an equation."""


class _Graph(Walk[int]):
    """A jaxpr without calls: each value has a number; a literal has -1."""

    unknown = -1

    def __init__(self, jaxpr: Jaxpr, inner: Inner) -> None:
        self.nodes: list[_Node] = []  # in the order of the kernels
        # Of each value the bytes, the dtype, and the equation that makes it, if one does.
        self.size: list[int] = []
        self.dtype: list[str] = []
        self.maker: list[_Node | None] = []
        self._known: dict[Hashable, list[int]] = {}
        self._inner = inner
        inputs = [self.constant(var) for var in open_jaxpr(jaxpr)[0].invars]
        self.outs = self.run(jaxpr, inputs)
        # For each value the one whose buffer it shares.
        self.same = list(range(len(self.size)))
        self._share_buffers()
        # The values in memory, and for the others those from which they are computed.
        self.stored: set[int] = set()
        self._roots: dict[int, frozenset[int]] = {}
        self._store()

    def constant(self, var: PyTree) -> int:
        return self._new(var.aval, None)

    def _new(self, aval: Aval, maker: _Node | None) -> int:
        self.size.append(nbytes(aval))
        self.dtype.append(str(getattr(aval, "dtype", "")))
        self.maker.append(maker)
        return len(self.size) - 1

    def bodies(self, eqn: Equation, labels: list[int]) -> list[tuple[Jaxpr, list[int]]]:
        return super().bodies(eqn, labels)[:1] if _is_inlined(eqn) else []

    def equation(self, here: Position, labels: list[int]) -> list[int]:
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
        node = _Node(here, name, [x for x in labels if x >= 0], [], inner)
        node.outs.extend(self._new(var.aval, node) for var in eqn.outvars)
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
                if self.size[source] == self.size[out]:
                    self.same[out] = self.same[source]

    def _store(self) -> None:
        """Finds the values in memory, and what the others are made from."""
        same, size = self.same, self.size
        readers: dict[int, set[int]] = collections.defaultdict(set)
        crosses = self._crossing()
        wanted = {same[value] for value in self.outs if value >= 0}
        for index, node in enumerate(self.nodes):
            for value in map(same.__getitem__, node.reads):
                if node.outs and value == same[node.outs[0]]:
                    continue
                readers[value].add(index)
                if node.name in _READS_MEMORY:
                    wanted.add(value)
        for node in self.nodes:
            sources = frozenset[int]().union(*map(self._sources, node.reads))
            total = sum(size[x] for x in sources)
            for out in node.outs:
                if same[out] != out:
                    continue
                is_joined = sum(size[x] >= _LARGE * size[out] for x in sources) > 1
                is_made = is_joined or node.name == "convert_element_type"
                is_smaller = is_made and size[out] < _SMALLER * total
                is_saved = is_smaller or node.name in _EXPENSIVE
                if (
                    out in wanted
                    or node.name in _WRITES_MEMORY
                    or (is_joined and len(readers[out]) > 1)
                    or (out in crosses and is_saved)
                ):
                    self.stored.add(out)
                else:
                    self._roots[out] = sources

    def _sources(self, value: int) -> frozenset[int]:
        """Returns the stored values from which a value is read or computed."""
        value = self.same[value]
        if value in self.stored:
            return frozenset({value})
        return self._roots.get(value, frozenset())

    def _crossing(self) -> set[int]:
        """Returns the values of the forward pass from which the backward pass computes."""
        needed: set[int] = set()
        for node in reversed(self.nodes):
            is_end = node.name in _WRITES_MEMORY or node.name in _EXPENSIVE
            is_needed = any(self.same[out] in needed for out in node.outs)
            if node.here.backward or (is_needed and not is_end):
                needed.update(self.same[value] for value in node.reads)
        made = ((value, self.maker[value]) for value in needed)
        return {value for value, maker in made if maker and not maker.here.backward}

    def peak(self, released: Sequence[int]) -> Peak:
        """Returns the peak; `released` results are gone once they are made."""
        # When values are made and read last, and which the backward pass reads.
        born, dies, read_back = dict[int, int](), dict[int, int](), set[int]()
        for index, node in enumerate(self.nodes):
            made = {self.same[out] for out in node.outs} & self.stored
            for out in made.intersection(node.outs):
                born[out] = dies[out] = index
            if node.outs and not made:
                continue  # computed where it is read
            roots = frozenset[int]().union(*map(self._sources, node.reads))
            dies |= dict.fromkeys(roots, index)
            read_back |= roots if node.here.backward else frozenset()
        results = {self.same[x] for x in self.outs if x >= 0}
        dies |= dict.fromkeys(results & self.stored, len(self.nodes))
        gone = {self.same[self.outs[i]] for i in released if self.outs[i] >= 0}
        for value in gone & self.stored:
            maker = self.maker[value]
            # What a scan stacks is released layer by layer, inside the scan.
            dies[value] = born[value] - (maker is not None and maker.name == "scan")
        change: collections.Counter[int] = collections.Counter()
        for value in self.stored:
            change[born[value]] += self.size[value]
            change[dies[value] + 1] -= self.size[value]
        now, most, at = 0, 0, 0
        for time, node in enumerate(self.nodes):
            now += change[time]
            if now + node.inner > most:
                most, at = now + node.inner, time
        live, saved = list[Buffer](), list[Buffer]()
        for value in sorted(self.stored):
            maker = self.maker[value]
            is_forward = maker is not None and not maker.here.backward
            is_saved, is_result = is_forward and value in read_back, value in results
            found = Buffer(self.size[value], self.dtype[value], is_saved, is_result)
            live += [found] if born[value] <= at <= dies[value] else []
            saved += [found] if is_saved else []
        return Peak(most, live, saved)


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
