"""Steps of parameters: the choice of a backend, kernels over shards, and plain JAX."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol, get_args, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from mpx._jax._devices import gpu_capability
from mpx._jax._private import private
from mpx._jax._sharding import (
    may_cut_groups,
    over_shards,
    reason_against_shards,
    replicated,
    sharded_as,
    stacked,
    uncut,
    whole_groups,
)
from mpx._quant._codecs import Block

Backend = Literal["auto", "jax"]
BACKENDS: tuple[str, ...] = get_args(Backend)
_PLATFORM = "cuda"
# Elements that a program of the kernel steps at most, which is the largest group, and at
# least: the largest power of two that divides the size of a leaf.
_BLOCK, _LEAST = 512, 8
_BATCH, _BATCH_SIZE = 8, 2**23  # leaves of a launch; larger ones have one of their own
# From this size on the maxima are found in a pass of their own: otherwise XLA computes most
# of the step inside the reduction, at a third of the speed
# (benchmarks/optim.py, jax 0.11.2, H200).
_TWO_PASSES = 2**20
_NEIGHBOURS = 8


@runtime_checkable
class Body(Protocol):
    """One step of a block, of which `group_size` elements share a scale, if it is not 0.

    It is hashable, and equal ones compile once.
    """

    @property
    def group_size(self) -> int: ...

    def __call__(
        self, scalars: tuple[Array, ...], grad: PyTree, leaf: PyTree, block: Block
    ) -> PyTree: ...


class Job(NamedTuple):
    """One step of one parameter."""

    name: str  # the path of the parameter
    body: Body  # the step
    scalars: Array  # the f32 numbers that `body` needs
    grad: PyTree  # an array or several, like the parameter; `None` if not known yet
    leaf: PyTree  # the parameter and its state: any pytree with an attribute `param`
    layer: Array | None = None  # int32, if only this one steps, along the first axis

    @property
    def size(self) -> int:
        param = self.leaf.param
        return param.size if self.layer is None else math.prod(param.shape[1:])


Row = tuple[Array, PyTree, PyTree]  # scalars, gradient and leaf of a job


def run(
    jobs: Sequence[Job], *, finite: Array | None = None, backend: Backend = "auto"
) -> list[PyTree]:
    """Runs steps; if `finite` is false, the leaves come back as they were."""
    # Small jobs of equal types share a launch of the kernel.
    alike: dict[object, list[int]] = {}
    in_kernel = [_takes_kernel(job, backend) for job in jobs]
    for index, job in enumerate(jobs):
        key: object = index
        if in_kernel[index] and job.size <= _BATCH_SIZE and job.layer is None:
            types = jax.tree.map(jax.typeof, (job.grad, job.leaf))
            key = (job.body, jax.tree.structure(types), *jax.tree.leaves(types))
        alike.setdefault(key, []).append(index)
    new: list[PyTree] = [None] * len(jobs)
    for all_indices in alike.values():
        for start in range(0, len(all_indices), _BATCH):
            indices = all_indices[start : start + _BATCH]
            rows = [(jobs[i].scalars, jobs[i].grad, jobs[i].leaf) for i in indices]
            job, step = jobs[indices[0]], _launch if in_kernel[indices[0]] else _plain
            results = step(rows, finite, job.layer, body=job.body)
            for index, leaf in zip(indices, results, strict=True):
                new[index] = leaf
    return new


def _takes_kernel(job: Job, backend: Backend) -> bool:
    # Without a GPU, here or in the mesh of a compilation for one, no kernel is traced: that
    # takes longer than all else, and imports Pallas.
    capability, size = gpu_capability(), job.body.group_size
    here = isinstance(capability, tuple) and capability >= (8, 0)
    if backend == "jax" or not here or private("kernels") is None:
        return False
    # XLA updates floats in one pass. To write planes it needs a second one, and copies.
    worth = any(x.dtype.kind in "iu" for x in jax.tree.leaves(job.leaf))
    fits = job.size > 0 and math.gcd(job.size, _BLOCK) >= _LEAST and size <= _BLOCK
    return worth and fits and reason_against_shards(job.leaf.param, size) is None


def can_address(leaf: PyTree, size: int) -> bool:
    """Returns whether a kernel reaches every element of a leaf that steps so many.

    Pallas indexes arrays of up to 2³² bytes with signed 32 bits: one of bytes has elements
    out of reach if it has more than 2³¹. Larger arrays use 64 bits, but not the start of a
    block, which is why the blocks are an axis of their own.
    """
    sizes = [(x.size, x.size * x.dtype.itemsize) for x in jax.tree.leaves(leaf)]
    in_reach = all(count <= 2**31 or nbytes > 2**32 for count, nbytes in sizes)
    return in_reach and math.gcd(size, _BLOCK) >= _LEAST


def _plain(
    rows: Sequence[Row], finite: Array | None, layer: Array | None, *, body: Body
) -> list[PyTree]:
    return [_plain_leaf(*row, finite, layer, body=body) for row in rows]


# Under jit, so that leaves of equal types are traced and lowered once.
@functools.partial(jax.jit, static_argnames="body")
def _plain_leaf(
    scalars: Array,
    grad: PyTree,
    leaf: PyTree,
    finite: Array | None,
    layer: Array | None,
    *,
    body: Body,
) -> PyTree:
    step = functools.partial(run_plain, body, scalars, grad, finite=finite)
    if layer is None:
        return step(leaf)
    rank, write = leaf.param.ndim, lax.dynamic_update_index_in_dim
    new = step(layer_of(leaf, layer))
    return jax.tree.map(lambda x, y: write(x, y, layer, x.ndim - rank), leaf, new)


# The axis of the layers is the first, or follows the planes.
def layer_of(leaf: PyTree, layer: Array) -> PyTree:
    rank, read = leaf.param.ndim, lax.dynamic_index_in_dim
    return jax.tree.map(lambda x: read(x, layer, x.ndim - rank, keepdims=False), leaf)


@functools.partial(jax.jit, static_argnames="body")
def _launch(
    rows: Sequence[Row], finite: Array | None, layer: Array | None, *, body: Body
) -> list[PyTree]:
    """Runs the kernel on CUDA devices and plain JAX elsewhere."""
    plain = functools.partial(_plain, body=body)
    kernel = plain_under_vmap(functools.partial(_kernel, body=body), plain)
    given = rows, finite, layer
    return lax.platform_dependent(*given, default=plain, **{_PLATFORM: kernel})


def plain_under_vmap(
    kernel: Callable[..., PyTree], plain: Callable[..., PyTree]
) -> Callable[..., PyTree]:
    """Returns a function that calls `kernel`, or `plain` under `vmap`."""
    mappable = custom_vmap(kernel)

    @mappable.def_vmap
    def _(axis_size: int, in_batched: PyTree, *args: object) -> tuple[PyTree, PyTree]:
        axes = jax.tree.map(lambda batched: 0 if batched else None, tuple(in_batched))
        new = jax.vmap(plain, in_axes=axes, axis_size=axis_size)(*args)
        return new, jax.tree.map(lambda _: True, new)

    return mappable


def _kernel(
    rows: Sequence[Row], finite: Array | None, layer: Array | None, *, body: Body
) -> list[PyTree]:
    """Steps the shards of each device in one kernel."""
    # Not before it is needed: importing Pallas takes as long as importing mpx.
    from mpx._kernels import _triton

    plain = functools.partial(_plain, body=body)
    like = jax.eval_shape(plain, rows, finite, layer)
    scalars, grads, leaves = map(list, zip(*rows, strict=True))
    flag = jnp.ones((), bool) if finite is None else finite
    numbers = jnp.stack([jnp.append(flag.astype(row.dtype), row) for row in scalars])
    # The distance of each layer from the one that is stepped, if only one is.
    param = leaves[0].param
    ahead = None if layer is None else lax.iota(jnp.int32, len(param)) - layer

    def local(
        numbers: Array,
        ahead: Array | None,
        grads: Sequence[PyTree],
        leaves: Sequence[PyTree],
    ) -> list[PyTree]:
        alike: dict[tuple[int, ...], list[int]] = {}
        for index, leaf in enumerate(leaves):  # shards of equal arrays may differ
            alike.setdefault(leaf.param.shape, []).append(index)
        new: list[PyTree] = [None] * len(leaves)
        for indices in alike.values():
            own = [numbers[i] for i in indices]
            some = [grads[i] for i in indices], [leaves[i] for i in indices]
            if can_address(some[1][0], jax.tree.leaves(some[0])[0].size):
                results = _triton.launch(
                    body,
                    jnp.stack(own),
                    *some,
                    block=_BLOCK,
                    ahead=ahead,
                    like=like[: len(indices)],
                )
            else:
                flag, layer = own[0][0] != 0, None
                if ahead is not None:  # a device may have other layers only
                    flag &= jnp.any(ahead == 0)
                    layer = jnp.clip(-ahead[0], 0, len(ahead) - 1)
                rows = zip([row[1:] for row in own], *some, strict=True)
                results = plain(list(rows), flag, layer)
            for index, leaf in zip(indices, results, strict=True):
                new[index] = leaf
        return new

    rule, planes = _rule(grads, leaves, body.group_size, by_layer=ahead is not None)
    return over_shards(
        local,
        (numbers, ahead, grads, leaves),
        like=param,
        layout=functools.partial(_layout, body.group_size),
        rule=rule,
        whole=("rows", "numbers", *planes),
        **({"group": body.group_size} if body.group_size else {}),
    )


def _layout(
    group_size: int, _: PyTree, ahead: PyTree, grads: PyTree, leaves: PyTree
) -> PyTree:
    """Returns the shardings of what `local` of `_kernel` takes and returns."""
    params = [uncut(x.param.sharding, x.param.shape, group_size) for x in leaves]
    results = [_shardings(*pair) for pair in zip(params, leaves, strict=True)]
    everywhere, layers = replicated(params[0]), None
    if ahead is not None:
        ((mesh, spec),) = [(sharding.mesh, sharding.spec) for sharding in params]
        layers = NamedSharding(mesh, PartitionSpec(*spec[:1]))
        params = [NamedSharding(mesh, PartitionSpec(*spec[1:]))]
    given = [
        jax.tree.map(lambda _, to=sharding: to, grad)
        for sharding, grad in zip(params, grads, strict=True)
    ]
    return (everywhere, layers, given, results), results


def _shardings(sharding: PyTree, leaf: PyTree) -> PyTree:
    """Returns the sharding of each array of a leaf, given that of the parameter."""
    rank = len(leaf.param.shape)
    return jax.tree.map(
        lambda x: sharding if len(x.shape) == rank else stacked(sharding), leaf
    )


def _rule(
    grads: Sequence[PyTree],
    leaves: Sequence[PyTree],
    group_size: int,
    *,
    by_layer: bool,
) -> tuple[str, set[str]]:
    """Returns which axes belong together, as Shardy writes it, and the axes of planes.

    A matrix with groups is `a0 (a1 group)`, its scales are `a0 a1`, and either may have
    planes before. By layer, the gradient lacks the first axis, which `ahead` has.
    """
    planes = set[str]()

    def axes_of(number: int, x: Array, first: int = 0) -> str:
        param = leaves[number].param
        axes = [f"leaf{number}axis{axis}" for axis in range(param.ndim)]
        if group_size and x.shape[x.ndim - param.ndim :] == param.shape:
            axes[-1] = f"({axes[-1]} group)"
        if x.ndim > param.ndim:
            axes.insert(0, f"planes{len(x)}")  # a size has one name
            planes.add(axes[0])
        return " ".join(axes[first:])

    operands, results = ["rows numbers", *["leaf0axis0"] * by_layer], list[str]()
    for i, (grad, leaf) in enumerate(zip(grads, leaves, strict=True)):
        axes = axes_of(i, leaf.param, int(by_layer))
        operands += [axes] * len(jax.tree.leaves(grad))
        results += [axes_of(i, x) for x in jax.tree.leaves(leaf)]
    operands += results
    return f"{', '.join(operands)} -> {', '.join(results)}", planes


# --- plain JAX: the specification, and the path on CPUs, TPUs and under `vmap` ----------


def run_plain(
    body: Body, scalars: Array, grad: PyTree, leaf: PyTree, *, finite: Array | None
) -> PyTree:
    """Runs a step on whole arrays, of which those with one more axis become planes."""
    shape, group_size = leaf.param.shape, body.group_size
    cut = bool(group_size) and may_cut_groups(leaf.param, group_size)

    def planes(x: Array) -> PyTree:
        if x.ndim == len(shape):
            return group(x)
        parts = (lax.index_in_dim(x, i, keepdims=False) for i in range(len(x)))
        return tuple(map(group, parts))

    def group(x: Array) -> Array:
        if cut or not group_size or x.shape != shape:
            return x
        return x.reshape(*shape[:-1], shape[-1] // group_size, group_size)

    step = functools.partial(body, tuple(scalars))
    old = jax.tree.map(planes, leaf)
    grad = jax.tree.map(lambda x: group(sharded_as(x, leaf.param)), grad)
    if cut:
        new = step(grad, old, block=FlatBlock(group_size))
    elif group_size and leaf.param.size >= _TWO_PASSES:
        maxima = _Maxima()
        step(grad, old, block=maxima)
        # Without the barrier XLA merges what it can of the second pass into the first.
        grad, known = lax.optimization_barrier((grad, maxima.found))
        new = step(grad, old, block=_Maxima(known))
    else:
        new = step(grad, old, block=Block())
    if finite is not None:
        # Before the reshape: after it XLA would write the f32 weights to memory first.
        new = jax.tree.map(lambda x, y: jnp.where(finite, x, y), new, old)
    return jax.tree.map(_like, leaf, new)


def _like(old: Array, new: PyTree) -> Array:
    """Returns an array, or one with new planes, in the shape and sharding of the old one."""
    if not isinstance(new, tuple):
        return sharded_as(new.reshape(old.shape), old)
    # Else XLA would compute the step once more for each plane.
    for index, plane in enumerate(lax.optimization_barrier(new)):
        plane = sharded_as(plane.reshape(old.shape[1:]), old[index])
        old = lax.dynamic_update_index_in_dim(old, plane, index, 0)
    return old


class _Maxima(Block):
    """Finds the maxima in a first pass and gives them, in their order, in a second one.

    Each thread of a GPU first takes the maximum of a few: there is less to exchange.
    """

    def __init__(self, known: Sequence[Array] = ()) -> None:
        self.found, self._known = list[Array](), list(known)

    def peak(self, x: Array) -> Array:
        if self._known:
            return self._known.pop(0)
        *rows, width = x.shape
        few = math.gcd(width, _NEIGHBOURS)
        x = x.reshape(*rows, width // few, few)
        x = functools.reduce(jnp.maximum, (x[..., index] for index in range(few)))
        self.found.append(super().peak(x))
        return self.found[-1]


class FlatBlock(Block):
    """A block that keeps its shape: groups are next to each other along its last axis.

    In plain JAX it is a whole array, whose shards may end within a group. Results are
    computed element by element and sharded like the inputs; only the moments are gathered,
    to take the maxima of the groups.
    """

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size

    def peak(self, x: Array) -> Array:
        x = whole_groups(x, self._group_size)
        return super().peak(x.reshape(*x.shape[:-1], -1, self._group_size))

    def spread(self, per_group: Array) -> Array:
        *rows, groups = per_group.shape
        each = jnp.broadcast_to(per_group[..., None], (*rows, groups, self._group_size))
        return each.reshape(*rows, groups * self._group_size)
