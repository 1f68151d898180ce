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

from mpx._jax._processes import gather as gather


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
