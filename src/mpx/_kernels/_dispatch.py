"""The choice of a backend."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_batching import custom_vmap

from mpx._compat import HAS_MOSAIC, refused
from mpx._devices import gpu_capability
from mpx._kernels._partition import step_shards
from mpx._kernels._plain import Body, run_plain
from mpx._kernels._tuning import MOSAIC, TRITON, Tuning
from mpx._private import private
from mpx._sharding import reason_against_shards

Backend = Literal["auto", "jax", "triton", "mosaic"]
BACKENDS: tuple[str, ...] = get_args(Backend)
_PLATFORM = "cuda"


class Job(NamedTuple):
    """One step of one parameter.

    Attributes:
        name: The path of the parameter, for errors.
        body: The step, `body(scalars, grad, leaf, block, noise) -> leaf`; hashable.
        scalars: The f32 numbers that `body` needs, in one array.
        grad: The gradient; `None` as long as it is not known.
        leaf: The parameter and its state: any pytree with an attribute `param`.
        group_size: Elements of the last axis that share a scale; 0 if there is none.
        seed: For rounding at random; `None` rounds to nearest.
        layer: If the gradient is that of one layer of the leaf, along its first axis, the
            number of this layer, int32; the others stay as they are. `None` means all.
    """

    name: str
    body: Body
    scalars: Array
    grad: Any
    leaf: Any
    group_size: int
    seed: Array | None = None
    layer: Array | None = None

    @property
    def size(self) -> int:
        """The number of elements that step."""
        param = self.leaf.param
        return param.size if self.layer is None else math.prod(param.shape[1:])


def run(
    jobs: Sequence[Job], *, ok: Array | None = None, backend: Backend = "auto"
) -> list[Any]:
    """Runs steps.

    Args:
        jobs: The steps.
        ok: If false, the leaves come back as they were. `None` means true.
        backend: Where to run. `"auto"` takes the kernel where that is faster.

    Returns:
        The new leaf of each job.

    Raises:
        ValueError: If a backend was asked for that cannot run a step.
    """
    new: list[Any] = [None] * len(jobs)
    for indices in _batches(jobs, backend):
        batch = [jobs[index] for index in indices]
        job = batch[0]
        if _backend(job, backend) == "jax":
            leaves = [
                _plain(
                    *(job.scalars, job.grad, job.leaf, ok, job.layer),
                    seed=job.seed,
                    body=job.body,
                    group_size=job.group_size,
                )
            ]
        else:
            leaves = _batch(
                [each.scalars for each in batch],
                [each.grad for each in batch],
                [each.leaf for each in batch],
                ok,
                job.layer,
                body=job.body,
                group_size=job.group_size,
                backend=backend,
            )
        for index, leaf in zip(indices, leaves, strict=True):
            new[index] = leaf
    return new


def _batches(jobs: Sequence[Job], backend: Backend) -> Iterator[list[int]]:
    """Yields the indices of jobs that share a launch: small ones of equal types."""
    alike: dict[Any, list[int]] = {}
    tuning = _tuning(backend)
    for index, job in enumerate(jobs):
        alone = (
            _backend(job, backend) == "jax"
            or job.size > tuning.batch_size
            or job.layer is not None
        )
        types = jax.tree.map(jax.typeof, (job.grad, job.leaf))
        leaves, treedef = jax.tree.flatten(types)
        key = index if alone else (job.body, job.group_size, treedef, *leaves)
        alike.setdefault(key, []).append(index)
    for indices in alike.values():
        for start in range(0, len(indices), tuning.batch):
            yield indices[start : start + tuning.batch]


def _backend(job: Job, backend: Backend) -> Backend:
    """Returns the backend of a job, `"auto"` for the kernel or, off GPUs, plain JAX."""
    if backend == "jax":
        return "jax"
    obstacle = _obstacle(job, _tuning(backend))
    if backend == "auto":
        worth = job.group_size > 0 and job.size >= TRITON.min_size
        # Without a GPU, here or in the mesh of a compilation for one, nothing is traced for
        # it: that takes longer than all else, and imports Pallas.
        here = gpu_capability() is not None and _has_kernel()
        if obstacle is None and worth and here and private("kernels") is not None:
            return "auto"
        return "jax"
    if backend == "mosaic":
        obstacle = _no_mosaic() or obstacle
    elif private("kernels") is None:
        obstacle = "this version of JAX lacks a name that the Triton kernel needs"
    if obstacle is not None:
        raise ValueError(
            f'`backend="{backend}"` cannot step `{job.name}`: {obstacle}. '
            '`backend="auto"` takes plain JAX for such parameters.'
        )
    return backend


def _tuning(backend: Backend) -> Tuning:
    return MOSAIC if backend == "mosaic" else TRITON


def _obstacle(job: Job, tuning: Tuning) -> str | None:
    """Says why a kernel cannot step a parameter, or returns `None`."""
    param, group_size = job.leaf.param, job.group_size
    if job.seed is not None:
        return "the kernel rounds to nearest, but stochastic rounding was asked for"
    if not job.size:
        return "it has no elements"
    largest = tuning.block // tuning.warps
    if group_size & (group_size - 1) or group_size > largest:
        return (
            f"its groups have {group_size} elements, and the kernel needs a power of two "
            f"up to {largest}"
        )
    return reason_against_shards(param, group_size)


def _has_kernel(oldest: tuple[int, int] = (8, 0)) -> bool:
    """Whether the GPUs here run a kernel; without any, one may compile for some."""
    capability = gpu_capability()
    return capability is None or (
        isinstance(capability, tuple) and capability >= oldest
    )


def _no_mosaic() -> str | None:
    """Says why Mosaic's kernel does not run here, or returns `None`."""
    if not HAS_MOSAIC:
        return f"Mosaic needs jax 0.11 or later, and {jax.__version__} is installed"
    if private("mosaic") is None or private("kernels") is None:
        return "this version of JAX lacks a name that the Mosaic kernel needs"
    if not _has_kernel((9, 0)):
        return (
            "Mosaic needs an NVIDIA GPU of compute capability 9.0, Hopper, or later, and "
            f"here is one of {gpu_capability()}"
        )
    return None


# Under jit, so that leaves of equal types are traced and lowered once.
@functools.partial(jax.jit, static_argnames=("body", "group_size"))
def _plain(
    scalars: Array,
    grad: Array,
    leaf: Any,
    ok: Array | None,
    layer: Array | None,
    *,
    seed: Array | None = None,
    body: Body,
    group_size: int,
) -> Any:
    step = functools.partial(
        run_plain, body, scalars, grad, group_size=group_size, ok=ok, seed=seed
    )
    if layer is None:
        return step(leaf)
    offset = layer.astype(jnp.uint32) * np.uint32(grad.size & 0xFFFFFFFF)
    return _with_layer(leaf, layer, step(_layer_of(leaf, layer), offset=offset))


def _layer_of(leaf: Any, layer: Array) -> Any:
    return jax.tree.map(
        lambda x: lax.dynamic_index_in_dim(x, layer, keepdims=False), leaf
    )


def _with_layer(leaf: Any, layer: Array, new: Any) -> Any:
    return jax.tree.map(
        lambda x, y: lax.dynamic_update_index_in_dim(x, y, layer, 0), leaf, new
    )


@functools.partial(jax.jit, static_argnames=("body", "group_size", "backend"))
def _batch(
    scalars: list[Array],
    grads: list[Array],
    leaves: list[Any],
    ok: Array | None,
    layer: Array | None,
    *,
    body: Body,
    group_size: int,
    backend: Backend,
) -> list[Any]:
    def plain(
        scalars: list[Array],
        grads: list[Array],
        leaves: list[Any],
        ok: Array | None,
        layer: Array | None,
    ) -> list[Any]:
        return [
            _plain(*args, ok, layer, body=body, group_size=group_size)
            for args in zip(scalars, grads, leaves, strict=True)
        ]

    def elsewhere(*args: Any) -> list[Any]:
        new = plain(*args)
        if backend == "auto":
            return new
        return refused(
            f'`backend="{backend}"` needs a CUDA GPU, but the step is compiled for '
            'another device. `backend="auto"` takes plain JAX there.',
            new,
        )

    kernel = functools.partial(
        _kernel, plain=plain, body=body, group_size=group_size, backend=backend
    )
    return lax.platform_dependent(
        scalars,
        grads,
        leaves,
        ok,
        layer,
        default=elsewhere,
        **{_PLATFORM: plain_under_vmap(kernel, plain)},
    )


def plain_under_vmap(
    kernel: Callable[..., Any], plain: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns a function that calls `kernel`, and `plain` instead where it is mapped."""
    mappable = custom_vmap(kernel)

    @mappable.def_vmap
    def _(axis_size: int, in_batched: Any, *args: Any) -> tuple[Any, Any]:
        axes = jax.tree.map(lambda batched: 0 if batched else None, tuple(in_batched))
        new = jax.vmap(plain, in_axes=axes, axis_size=axis_size)(*args)
        return new, jax.tree.map(lambda _: True, new)

    return mappable


def _kernel(
    scalars: list[Array],
    grads: list[Array],
    leaves: list[Any],
    ok: Array | None,
    layer: Array | None,
    *,
    plain: Callable[..., list[Any]],
    body: Body,
    group_size: int,
    backend: Backend,
) -> list[Any]:
    """Steps the shards of each device in one kernel."""
    launch, can_address, can_step_layer = _launcher(backend)
    like = jax.eval_shape(plain, scalars, grads, leaves, ok, layer)
    flag = jnp.ones((), bool) if ok is None else ok
    numbers = jnp.stack([jnp.append(flag.astype(row.dtype), row) for row in scalars])
    ahead = None
    if layer is not None:
        ahead = lax.iota(jnp.int32, len(leaves[0].param)) - layer

    def local(
        numbers: Array,
        ahead: Array | None,
        grads: Sequence[Array],
        leaves: Sequence[Any],
    ) -> list[Any]:
        if ahead is None:
            return whole(numbers, grads, leaves)
        (leaf,) = leaves
        if can_step_layer(leaf):
            options = {"group_size": group_size, "like": like, "ahead": ahead}
            return launch(body, numbers, grads, leaves, **options)
        # A device may have other layers only.
        layer, last = -ahead[0], len(ahead) - 1
        is_here = (layer >= 0) & (layer <= last)
        layer = jnp.clip(layer, 0, last)
        numbers = numbers.at[:, 0].multiply(is_here.astype(numbers.dtype))
        (new,) = whole(numbers, grads, [_layer_of(leaf, layer)])
        return [_with_layer(leaf, layer, new)]

    def whole(
        numbers: Array, grads: Sequence[Array], leaves: Sequence[Any]
    ) -> list[Any]:
        new: list[Any] = [None] * len(leaves)
        for indices in _equal_shapes(leaves):
            rows = numbers
            if len(indices) < len(leaves):
                rows = jnp.stack([numbers[index] for index in indices])
            some = [grads[index] for index in indices], [leaves[i] for i in indices]
            if can_address(some[1][0].param.size):
                results = launch(
                    body,
                    rows,
                    *some,
                    group_size=group_size,
                    like=[like[index] for index in indices],
                )
            else:
                flag = rows[0, 0] != 0
                results = plain([row[1:] for row in rows], *some, flag, None)
            for index, leaf in zip(indices, results, strict=True):
                new[index] = leaf
        return new

    return step_shards(local, numbers, ahead, grads, leaves, group_size=group_size)


class _Launcher(NamedTuple):
    """What launches a kernel, and tells what it can reach."""

    launch: Callable[..., list[Any]]
    can_address: Callable[[int], bool]
    can_step_layer: Callable[[Any], bool]


def _launcher(backend: Backend) -> _Launcher:
    # Not before it is needed: importing Pallas takes as long as importing mpx.
    if backend == "mosaic":
        from mpx._kernels import _mosaic

        return _Launcher(_mosaic.run_mosaic, _mosaic.can_address, lambda leaf: False)
    from mpx._kernels import _triton

    return _Launcher(_triton.run_triton, _triton.can_address, _triton.can_step_layer)


def _equal_shapes(leaves: Sequence[Any]) -> list[list[int]]:
    """Returns which leaves have equal shapes: shards of equal arrays may differ."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for index, leaf in enumerate(leaves):
        alike.setdefault(leaf.param.shape, []).append(index)
    return list(alike.values())
