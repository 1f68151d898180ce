"""What the processes of a job tell each other, through JAX."""

import hashlib
import json
from collections import Counter, defaultdict
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from mpx._private import private

_BLOCK = 1024


def gather(value: Any) -> list[Any]:
    """Returns the values of all processes, in their order, on every process.

    Args:
        value: What JSON can hold. The processes must have equal numbers of devices.

    Raises:
        NotImplementedError: If the installed JAX has no such exchange.
    """
    if jax.process_count() == 1:
        return [value]
    names = private("exchange")
    if names is None:
        raise NotImplementedError(
            f"The {jax.process_count()} processes cannot be compared: the installed JAX "
            "has no `multihost_utils.process_allgather`. Upgrade mpx, or install an older "
            "JAX."
        )
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = names.process_allgather(np.int32(data.size)).ravel()
    # Rounded up, so that few programs are compiled.
    padded = np.zeros(-(-int(sizes.max()) // _BLOCK) * _BLOCK, np.uint8)
    padded[: data.size] = data
    rows = names.process_allgather(padded)
    return [
        json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)
    ]


def outliers(values: list[Any]) -> list[int]:
    """Returns the positions of the values that are not the most frequent one."""
    texts = [json.dumps(value, sort_keys=True) for value in values]
    usual, _ = Counter(texts).most_common(1)[0]
    return [number for number, text in enumerate(texts) if text != usual]


def digests(tree: PyTree, mesh: Mesh) -> list[str]:
    """Returns a hash of all bits of a tree for each local device.

    Sharded leaves are gathered first. Of a leaf that every device holds, the copy of each
    device is hashed, so that copies that have drifted apart are seen.
    """
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(tree)
    found = defaultdict(hashlib.sha256)
    for leaf in jax.tree.leaves(whole):
        for shard in leaf.addressable_shards:
            array = np.asarray(shard.data)
            found[shard.device.id].update(f"{array.dtype}{array.shape}".encode())
            found[shard.device.id].update(array.tobytes())
    return [found[number].hexdigest()[:16] for number in sorted(found)]
