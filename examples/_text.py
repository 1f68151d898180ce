"""A text to train on: the manual behind Python's `help()`, which every Python has."""

from pydoc_data.topics import topics

import numpy as np

CHARACTERS = 128


def batches(steps, batch, length, seed=0):
    """Yields i32[batch, length + 1] for each step: characters, and the one after each."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
    codes = np.frombuffer(text, np.uint8).astype(np.int32)
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        starts = rng.integers(len(codes) - length, size=batch)
        yield codes[starts[:, None] + np.arange(length + 1)]
