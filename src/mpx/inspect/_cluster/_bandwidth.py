"""How fast the devices of a job exchange data."""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mpx.inspect._cluster._exchange import gather

CALLS = 10  # the same on every process: a call waits for all of them


@dataclasses.dataclass(frozen=True)
class Rate:
    """The measured speed of a collective.

    Attributes:
        kind: `all-reduce`, `all-gather` or `reduce-scatter`.
        bytes: The size of the whole array: what an all-reduce and a reduce-scatter read
            and an all-gather returns on each device.
        seconds: The time of the fastest of some calls, on the slowest process.
        algorithmic: Bytes of the array per second.
        bus: Bytes per second that each device sends, by the usual ring algorithms. It
            does not depend on the number of devices, so compare it with the hardware.
        exact: Whether the result is right, on every process.
    """

    kind: str
    bytes: int
    seconds: float
    algorithmic: float
    bus: float
    exact: bool


def measure(mesh: Mesh, sizes: tuple[int, ...] | None = None) -> tuple[Rate, ...]:
    """Times the collectives over all devices.

    Args:
        mesh: The mesh of all devices, with one axis, `data`.
        sizes: The sizes in bytes; they are rounded up to what the devices can share.
    """
    if sizes is None:
        is_cpu = jax.default_backend() == "cpu"
        sizes = (2**16, 2**20, 2**23) if is_cpu else (2**20, 2**24, 2**28)
    return tuple(_measure(mesh, kind, size) for kind in _KINDS for size in sizes)


# For each kind the function, whether it reads a part of the array, and whether it returns
# one.
_KINDS: dict[str, tuple[Callable[[Array], Array], bool, bool]] = {
    "all-reduce": (lambda x: lax.psum(x, "data"), False, False),
    "all-gather": (lambda x: lax.all_gather(x, "data", tiled=True), True, False),
    "reduce-scatter": (
        lambda x: lax.psum_scatter(x, "data", tiled=True),
        False,
        True,
    ),
}


def _measure(mesh: Mesh, kind: str, size: int) -> Rate:
    func, reads_part, returns_part = _KINDS[kind]
    count = mesh.size
    part = -(-size // (4 * count))
    length = part if reads_part else part * count

    def numbers() -> Array:  # device i holds i + 1, a small integer: sums are exact
        mine = lax.axis_index("data") + 1
        return jnp.full(length, mine % 8, jnp.float32)

    def on_mesh(body: Any, arguments: Any, result: Any) -> Any:
        return jax.jit(
            jax.shard_map(
                body,
                mesh=mesh,
                in_specs=arguments,
                out_specs=result,
                check_vma=False,
            )
        )

    x = on_mesh(numbers, (), P("data"))()
    call = on_mesh(func, P("data"), P("data") if returns_part else P())
    found = jax.block_until_ready(call(x))
    best = math.inf
    for _ in range(CALLS):
        before = time.perf_counter()
        jax.block_until_ready(call(x))
        best = min(best, time.perf_counter() - before)
    values = (np.arange(count) + 1) % 8
    wanted = np.repeat(values, part) if kind == "all-gather" else values.sum()
    exact = all(np.all(np.asarray(y.data) == wanted) for y in found.addressable_shards)
    everywhere = gather([best, bool(exact)])
    seconds = max(row[0] for row in everywhere)
    total = 4 * part * count
    share = (count - 1) / count * (2 if kind == "all-reduce" else 1)
    return Rate(
        kind,
        total,
        seconds,
        total / seconds,
        share * total / seconds,
        all(row[1] for row in everywhere),
    )
