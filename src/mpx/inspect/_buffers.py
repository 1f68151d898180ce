"""Buffers that a compiled program needs, predicted from its jaxpr.

XLA computes element-wise operations in one kernel with what reads their results, so that most
values of a jaxpr never exist in memory. The rules here say which ones do.
"""

import collections
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

from mpx._jax._compat import Literal, open_jaxpr, primitive_name
from mpx._program._flow import Walk
from mpx._program._interpreter import Aval, Jaxpr, Scopes
from mpx._program._queries import (
    ATTENTION,
    CALLS,
    CROSS_ENTROPY,
    GROUPED,
    MATMULS,
    MOVES,
    SHAPE_ONLY,
    Equation,
    Position,
    fold,
    has_body,
    makers,
    names,
    repetitions,
)
from mpx.inspect._dtypes import HALF

K = TypeVar("K")

INLINED = (*CALLS, *names("custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr"))
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
    """A value in memory.

    Attributes:
        bytes: Its size.
        dtype: Its dtype.
        eqn: The equation that makes it.
        callers: The equations that hold this one, from the outside in.
        is_saved: Whether the forward pass makes it and the backward pass reads it.
            What a scan makes counts as made inside it.
        is_result: Whether it is a result of the program.
    """

    bytes: int
    dtype: str
    eqn: Equation
    callers: tuple[Equation, ...]
    is_saved: bool
    is_result: bool


class Peak(NamedTuple):
    """The moment at which a program needs most memory, its arguments not counted.

    Attributes:
        bytes: What it needs then.
        live: The buffers that exist then.
        saved: What the forward pass leaves for the backward pass.
    """

    bytes: int
    live: list[Buffer]
    saved: list[Buffer]


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


Inner = Callable[[Equation], Sequence[Peak]]
"""Returns the peaks of the jaxprs inside an equation."""


class _Graph(Walk[int]):
    """A jaxpr without calls: each value has a number; a literal has -1."""

    unknown = -1

    def __init__(self, jaxpr: Jaxpr, inner: Inner) -> None:
        self.nodes: list[_Node] = []
        self.size: list[int] = []
        self.dtype: list[str] = []
        self.maker: list[_Node | None] = []
        self.known: dict[Hashable, list[int]] = {}
        self._inner = inner
        inputs = [self.constant(var) for var in open_jaxpr(jaxpr)[0].invars]
        self.outs = self.run(jaxpr, inputs)

    def constant(self, var: Any) -> int:
        return self._new(var.aval, None)

    def _new(self, aval: Aval, maker: _Node | None) -> int:
        self.size.append(nbytes(aval))
        self.dtype.append(str(getattr(aval, "dtype", "")))
        self.maker.append(maker)
        return len(self.size) - 1

    def bodies(self, eqn: Equation, labels: list[int]) -> list[tuple[Jaxpr, list[int]]]:
        return super().bodies(eqn, labels)[:1] if _is_inlined(eqn) else []

    def equation(self, here: Position, labels: list[int]) -> list[int]:
        eqn = here.eqn
        if _is_inlined(eqn):
            return []
        # XLA computes equal operations once, but what remat repeats stays apart.
        key = None if has_body(eqn) or eqn.effects else _key(here, labels)
        if key in self.known:
            return self.known[key]
        inner = max((x.bytes for x in self._inner(eqn)), default=0)
        reads = [x for x in labels if x >= 0]
        node = _Node(here, primitive_name(eqn), reads, [], inner)
        node.outs.extend(self._new(var.aval, node) for var in eqn.outvars)
        self.nodes.append(node)
        if key is not None:
            self.known[key] = node.outs
        return node.outs


def _is_inlined(eqn: Equation) -> bool:
    return primitive_name(eqn) in INLINED and has_body(eqn)


def _key(here: Position, reads: list[int]) -> Hashable:
    eqn = here.eqn
    literals = [x.val for x in eqn.invars if isinstance(x, Literal)]
    return primitive_name(eqn), *reads, str(literals), str(eqn.params), here.backward


def peak(jaxpr: Jaxpr, released: Sequence[int] = ()) -> Peak:
    """Predicts the most memory that a program needs besides its arguments.

    Args:
        jaxpr: The program. The order of its equations is taken for that of the kernels.
        released: Positions of results that are needed no longer as soon as they are made.
            Those that a scan stacks are needed layer by layer, inside the scan.
    """
    outermost = open_jaxpr(jaxpr)[0]

    def at(body: Jaxpr, inner: Inner) -> Peak:
        return _peak(_Graph(body, inner), released if body is outermost else ())

    return fold(jaxpr, at)


def _peak(graph: _Graph, released: Sequence[int]) -> Peak:
    same = _same_buffers(graph)
    stored, roots = _stored(graph, same)
    born, dies, read_back = _lifetimes(graph, same, stored, roots)
    results = {same[x] for x in graph.outs if x >= 0}
    dies |= dict.fromkeys(results & stored, len(graph.nodes))
    gone = {same[graph.outs[i]] for i in released if graph.outs[i] >= 0}
    for value in gone & stored:
        maker = graph.maker[value]
        dies[value] = born[value] - (maker is not None and maker.name == "scan")
    change: collections.Counter[int] = collections.Counter()
    for value in stored:
        change[born[value]] += graph.size[value]
        change[dies[value] + 1] -= graph.size[value]
    now, most, at = 0, 0, 0
    for time, node in enumerate(graph.nodes):
        now += change[time]
        if now + node.inner > most:
            most, at = now + node.inner, time

    def buffer(value: int) -> Buffer:
        maker = graph.maker[value]
        assert maker is not None  # arguments are not stored
        here, number = maker.here, maker.outs.index(value)
        *callers, eqn = makers(here.eqn, number, (*INLINED, "scan"))
        return Buffer(
            graph.size[value],
            graph.dtype[value],
            eqn,
            (*here.callers, *callers),
            is_saved=not here.backward and value in read_back,
            is_result=value in results,
        )

    found = {value: buffer(value) for value in sorted(stored)}
    live = [x for value, x in found.items() if born[value] <= at <= dies[value]]
    return Peak(most, live, [x for x in found.values() if x.is_saved])


def _same_buffers(graph: _Graph) -> list[int]:
    """Returns for each value the one whose buffer it shares.

    Only its shape differs, or it is written over an array that nobody else reads.
    """
    same = list(range(len(graph.size)))
    readers = collections.Counter(x for node in graph.nodes for x in node.reads)
    for node in graph.nodes:
        if node.name in _IN_PLACE and readers[node.reads[0]] == 1:
            source, out = node.reads[0], node.outs[0]
            if graph.size[source] == graph.size[out]:
                same[out] = same[source]
        if node.name in SHAPE_ONLY or node.name in ("name", "optimization_barrier"):
            for source, out in zip(node.reads, node.outs, strict=False):
                if graph.size[source] == graph.size[out]:
                    same[out] = same[source]
    return same


def _stored(
    graph: _Graph, same: list[int]
) -> tuple[set[int], dict[int, frozenset[int]]]:
    """Returns the values that are in memory, and for the others what they are made from."""
    readers: dict[int, set[int]] = collections.defaultdict(set)
    crosses, wanted = _needed(graph, same), set[int]()
    for index, node in enumerate(graph.nodes):
        for value in node.reads:
            if same[value] == same[node.outs[0]] if node.outs else False:
                continue
            readers[same[value]].add(index)
            if node.name in _READS_MEMORY:
                wanted.add(same[value])
    wanted.update(same[value] for value in graph.outs if value >= 0)
    stored, roots = set[int](), dict[int, frozenset[int]]()
    for node in graph.nodes:
        sources = frozenset().union(
            *(
                roots.get(same[x], frozenset({same[x]} if same[x] in stored else ()))
                for x in node.reads
            )
        )
        for out in node.outs:
            if same[out] != out:
                continue
            large = [x for x in sources if graph.size[x] >= _LARGE * graph.size[out]]
            total = sum(graph.size[x] for x in sources)
            is_stored = (
                out in wanted
                or node.name in _WRITES_MEMORY
                or (len(large) > 1 and len(readers[out]) > 1)
                or (out in crosses and node.name in _EXPENSIVE)
                or (
                    out in crosses
                    and (len(large) > 1 or node.name == "convert_element_type")
                    and graph.size[out] < _SMALLER * total
                )
            )
            if is_stored:
                stored.add(out)
            else:
                roots[out] = sources
    return stored, roots


def _needed(graph: _Graph, same: list[int]) -> set[int]:
    """Returns the values of the forward pass from which the backward pass computes."""
    needed: set[int] = set()
    for node in reversed(graph.nodes):
        if node.here.backward:
            needed.update(same[value] for value in node.reads)
        elif node.name in _WRITES_MEMORY or node.name in _EXPENSIVE:
            continue
        elif any(same[out] in needed for out in node.outs):
            needed.update(same[value] for value in node.reads)
    makers = ((value, graph.maker[value]) for value in needed)
    return {value for value, maker in makers if maker and not maker.here.backward}


def _lifetimes(
    graph: _Graph, same: list[int], stored: set[int], roots: dict[int, frozenset[int]]
) -> tuple[dict[int, int], dict[int, int], set[int]]:
    """Returns when values are made and read last, and which the backward pass reads."""
    born: dict[int, int] = {}
    dies: dict[int, int] = {}
    read_back: set[int] = set()
    for index, node in enumerate(graph.nodes):
        for out in node.outs:
            if same[out] == out and out in stored:
                born[out] = dies[out] = index
        if node.outs and not any(same[out] in stored for out in node.outs):
            continue  # computed where it is read
        for value in (same[x] for x in node.reads):
            for root in (value,) if value in stored else roots.get(value, ()):
                dies[root] = index
                if node.here.backward:
                    read_back.add(root)
    return born, dies, read_back


def traffic(jaxpr: Jaxpr, group_of: Callable[[Scopes], K]) -> collections.Counter[K]:
    """Returns how many 16-bit numbers the kernels of a program read and write, by group.

    What a kernel makes from its operands without storing it costs nothing. `group_of`
    returns the group of an operation, from the scopes around it.
    """

    def at(
        body: Jaxpr, inner: Callable[[Equation], Sequence[collections.Counter[K]]]
    ) -> collections.Counter[K]:
        graph, total = _Graph(body, lambda _: ()), collections.Counter[K]()
        same = _same_buffers(graph)
        stored, roots = _stored(graph, same)
        for node in graph.nodes:
            made = {x for x in node.outs if same[x] == x and x in stored}
            if has_body(node.here.eqn):
                # Of the branches of a conditional, the one with the most work counts.
                most = max(inner(node.here.eqn), key=lambda x: x.total(), default={})
                for group, numbers in most.items():
                    total[group] += numbers * repetitions(node.here.eqn)
            elif made and node.name not in MOVES:
                read = {
                    root for x in node.reads for root in roots.get(same[x], {same[x]})
                }
                for value in read | made:
                    if graph.dtype[value] in HALF:
                        total[group_of(node.here.scopes)] += graph.size[value] // 2
        return total

    return fold(jaxpr, at)
