"""Counts what faults do to a training run: skipped steps, corrupted bytes, the loss scale.

    python benchmarks/faults.py                    # 1,000 faults, and bursts of 10,000
    python benchmarks/faults.py --faults 40 --burst 500
    python benchmarks/faults.py --jaxamp ~/jaxamp/src --paper ~/mixed_precision_for_JAX

A fault is drawn at random: the step, one of six leaves, the number, one of eight devices,
forward or backward, and its kind (NaN, infinities, the largest number, a flipped bit of the
exponent). Whether a step must be skipped is decided on the host, with NumPy, from the
gradients: some large numbers and flipped bits leave them finite, and those must not be
skipped. The `mpx` rows share the 1,000 faults; each other library gets 200.
"""

import argparse
import os
import platform
import sys
import time
from typing import NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_FLAG = "--xla_force_host_platform_device_count=8"
if "device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402

from _fault_steps import (  # noqa: E402
    all_ours,
    apply_if_finite,
    flax,
    jaxamp,
    make_batch,
    make_params,
    paper,
    placed,
    start,
    targets,
)
from mpx.testing import Fault  # noqa: E402

KINDS = ("nan", "inf", "-inf", "huge", "flip")
BATCHES = 4


class Count(NamedTuple):
    """What a library did with faults.

    Attributes:
        faults: Faults with gradients that are not finite.
        skipped: Those after which not one byte of parameters and optimizer differs.
        corrupted: Bytes that differ after the others.
        healthy: Steps without a fault.
        lost: Those that changed nothing.
        harmless: Faults with finite gradients.
        refused: Those that were skipped all the same.
        same_end: Whether the run ends where the fault-free run does, bit for bit.
    """

    faults: int = 0
    skipped: int = 0
    corrupted: int = 0
    healthy: int = 0
    lost: int = 0
    harmless: int = 0
    refused: int = 0
    same_end: bool = True

    @property
    def exact(self):
        """Whether nothing went wrong."""
        return (
            self.skipped == self.faults
            and not (self.corrupted or self.lost or self.refused)
            and self.same_end
        )


class Burst(NamedTuple):
    """What a library did with a burst of faults.

    Attributes:
        low: The least loss scale that occurred.
        high: The largest.
        inside: Whether it stayed inside the bounds of the library.
        intact: Whether parameters and optimizer are unchanged.
        same_grads: Whether the next gradient is that of a run without the burst.
    """

    low: float
    high: float
    inside: bool
    intact: bool
    same_grads: bool

    @property
    def exact(self):
        """Whether nothing went wrong."""
        return self.inside and self.intact and self.same_grads


def count_faults(library, count, seed):
    """Plants faults into a run, with a good step after each."""
    draw = np.random.default_rng(seed)
    things = targets(library.layout)
    batches = [placed(dict(zip("xy", make_batch(i), strict=True)), library.layout)
               for i in range(BATCHES)]  # fmt: skip
    training, step = start(library)
    calm, never = training, Fault(things, step=-1)
    result, good = Count(), 0
    while result.faults < count:
        batch = batches[good % BATCHES]
        number = int(draw.integers(1, 1_000_000))
        fault = draw_fault(draw, things, number)
        before = snapshot(training)
        hit = step(training, batch["x"], batch["y"], fault, number)
        changed = different_bytes(before, snapshot(hit.training))
        if all_finite(hit.grads):
            result = result._replace(
                harmless=result.harmless + 1, refused=result.refused + (not changed)
            )
            continue  # as if it had not happened
        result = result._replace(
            faults=result.faults + 1,
            skipped=result.skipped + (not changed),
            corrupted=result.corrupted + changed,
        )
        if changed:  # go on from the state that was good
            hit = hit._replace(training=training)
        # The same fault, at another step: nothing happens.
        healthy = step(hit.training, batch["x"], batch["y"], fault, number + 1)
        lost = not different_bytes(before, snapshot(healthy.training))
        result = result._replace(healthy=result.healthy + 1, lost=result.lost + lost)
        # Each fault begins with the first loss scale: some need 2,000 steps to get back.
        training, good = healthy.training._replace(rest=training.rest), good + 1
        calm = step(calm, batch["x"], batch["y"], never, 0).training
    same = not different_bytes(snapshot(training), snapshot(calm))
    return result._replace(same_end=same and not result.corrupted)


def draw_fault(draw, things, step):
    """Draws a fault; nothing goes back to the batch."""
    leaves = [f"params/{name}" for name in things["params"]] + ["hidden", "x"]
    leaf = str(draw.choice(leaves))
    struct = things["params"].get(leaf.removeprefix("params/")) or things[leaf]
    shard = struct.sharding.shard_shape(struct.shape)
    return Fault(
        things,
        draw.choice(KINDS).item(),
        leaf=leaf,
        index=int(draw.integers(np.prod(shard))),
        step=step,
        device=int(draw.integers(jax.device_count())),
        backward=leaf != "x" and bool(draw.integers(2)),
    )


def snapshot(training):
    """Returns the bytes of parameters and optimizer, of every copy on every device."""
    found = []
    for leaf in jax.tree.leaves(training[:2]):
        shards = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        found += [np.frombuffer(shard.tobytes(), np.uint8) for shard in shards]
    return found


def different_bytes(a, b):
    return sum(int(np.sum(x != y)) for x, y in zip(a, b, strict=True))


def all_finite(tree):
    return all(
        np.isfinite(np.asarray(x.data)).all()
        for leaf in jax.tree.leaves(tree)
        for x in leaf.addressable_shards
    )


def burst(library, steps):
    """Runs many bad steps in one `lax.scan` on one device, then a good one."""
    params = make_params()
    fault = Fault({"params": params}, "nan", leaf="params/w2", steps=steps)
    never = Fault({"params": params}, step=-1)
    first, (x, y) = jax.tree.map(jnp.asarray, library.init(params)), make_batch(0)
    step = jax.jit(library.step)

    @jax.jit
    def bad(training):
        def body(carry, number):
            stepped = library.step(carry, x, y, fault, number)
            new = jax.tree.map(lambda a, b: jnp.asarray(a).astype(b.dtype),
                               stepped.training, carry)  # fmt: skip
            return new, stepped.scale

        return lax.scan(body, training, jnp.arange(steps))

    end, scales = bad(first)
    after, fresh = step(end, x, y, never, 0), step(first, x, y, never, 0)
    low, high = float(scales.min()), float(scales.max())
    least, largest = library.bounds
    # A comparison with nan is false.
    inside = bool(np.all((scales >= least) & (scales <= largest)))
    intact = not different_bytes(snapshot(first), snapshot(end))
    pairs = zip(*map(jax.tree.leaves, (after.grads, fresh.grads)), strict=True)
    same = all(np.array_equal(a, b) for a, b in pairs)
    return Burst(low, high, inside, intact, same)


def main(argv=None):
    parser = argparse.ArgumentParser(description="Counts what faults do to a run.")
    parser.add_argument("--faults", type=int, default=1000, help="how many faults")
    parser.add_argument("--others", type=int, default=200, help="of each other library")
    parser.add_argument("--burst", type=int, default=10_000, help="bad steps in a row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jaxamp", help="folder with the package, if not installed")
    parser.add_argument("--paper", help="folder with mixed-precision-for-JAX's `mpx`")
    options = parser.parse_args(argv)

    own, began = all_ours(), time.perf_counter()
    others = []
    if options.others:
        others = [
            flax(),
            apply_if_finite(),
            paper(options.paper),
            jaxamp(options.jaxamp),
        ]
    print(
        f"jax {jax.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}, {jax.device_count()} CPU devices; seed {options.seed}"
    )
    print("\n| library | faults | exact skips | corrupted bytes | healthy steps lost "
          "| finite faults skipped | same end |\n|---|--:|--:|--:|--:|--:|---|")  # fmt: skip
    fine = True
    for index, library in enumerate(own):
        share = len(range(index, options.faults, len(own)))
        found = count_faults(library, share, options.seed + index)
        show_count(library, found)
        fine &= found.exact
    for library in filter(None, others):
        count = min(options.others, options.faults)
        show_count(library, count_faults(library, count, options.seed))
    print("\n| library | bad steps | loss scale | inside its bounds | state unchanged "
          "| next gradient equal |\n|---|--:|---|---|---|---|")  # fmt: skip
    for library in [x for x in own if x.layout == "jit"]:
        found = burst(library, options.burst)
        show_burst(library, found, options.burst)
        fine &= found.exact
    for library in filter(None, others):
        show_burst(library, burst(library, options.burst), options.burst)
    seconds = time.perf_counter() - began
    print(f"\n{'passed' if fine else 'FAILED'} in {seconds:.0f} s")
    return not fine


def show_count(library, c):
    print(
        f"| {library.name} | {c.faults} | {c.skipped} | {c.corrupted} "
        f"| {c.lost} of {c.healthy} | {c.refused} of {c.harmless} "
        f"| {_yes(c.same_end)} |",
        flush=True,
    )


def show_burst(library, b, steps):
    print(
        f"| {library.name} | {steps} | {b.low:.4g} to {b.high:.4g} | {_yes(b.inside)} "
        f"| {_yes(b.intact)} | {_yes(b.same_grads)} |",
        flush=True,
    )


def _yes(value):
    return "yes" if value else "no"


if __name__ == "__main__":
    sys.exit(main())
