"""How well `mpx.inspect.advise` emulates policies, what it costs, and what it finds.

    python benchmarks/advise.py                       # small models, on a CPU
    python benchmarks/advise.py --part emulate --models mlp lstm
    python benchmarks/advise.py --part measure --sizes tiny tiny-gpt
    python benchmarks/advise.py --part measure --sizes vit-base --batch 64   # a GPU

emulate: the real over the emulated error of amp's default and of policies that keep one group,
and the time to judge all groups.
measure: the policy that `measure=True` returns, against the default of `amp`.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import mpx.inspect
from _faults.table import normal, weight
from _measure import format_table, number, read_options
from _models import make_task
from _zoo import REGISTRY
from mpx.inspect._advice import PrecisionPolicy, Study
from text import TINY


class Case(NamedTuple):
    loss: Callable[..., Any]
    args: tuple[Any, ...]  # parameters and a batch


def mlp():
    made = REGISTRY["MLP (Equinox)"].make()
    return Case(made.loss, (made.params, *made.args))


def vit():
    task = make_task("tiny", 8, batches=4)
    return Case(task.loss, (task.params, task.batches[0]))


def decoder():
    """Layers in a scan with remat."""
    return Case(TINY.loss, (TINY.init(jax.random.key(0)), TINY.batch()))


def faults():
    """Distances by a matmul, which cancel; a matmul of large numbers; tiny gradients."""

    def loss(params, x, y):
        h = jnp.tanh(x @ params["first"])
        with jax.named_scope("distance"):
            centre = params["centres"]
            square = jnp.sum(h * h, -1)[:, None] + jnp.sum(centre * centre, -1)
            far = square - 2 * (h @ centre.T)
        near = jnp.exp(-0.05 * far) @ params["second"]
        tiny = 1e-6 * jnp.tanh(h @ params["tiny"])
        return jnp.mean(jnp.square(near - y)) + jnp.mean(jnp.square(tiny))

    params = {
        "first": weight(0, 16, 64, scale=2.0),
        "centres": weight(1, 12, 64, scale=0.9),
        "second": weight(2, 12, 4),
        "tiny": weight(3, 64, 64),
    }
    return Case(loss, (params, normal(20, 64, 16), normal(30, 64, 4, scale=0.125)))


MODELS = {"mlp": mlp, "vit": vit, "decoder": decoder, "faults": faults}


def emulate_part(names, half):
    """Compares emulated with real errors: of the default, and with one group kept."""
    rows = []
    for name in names:
        case = MODELS[name]()
        start = time.perf_counter()
        known = Study(case.loss, case.args, {}, formats=[half])
        for label in known.labels:
            known.alone(half, label)
        seconds = time.perf_counter() - start
        chosen = [PrecisionPolicy(half)]
        for kind, pattern in map(known.selector, known.labels):
            fields: dict[str, Any] = {kind: (pattern,)}
            chosen.append(PrecisionPolicy(half, **fields))
        ratios = []
        for policy in chosen[:8]:
            real, emulated = known.measure(policy), known.error(policy)
            print(f"  {name} {policy}: {emulated:.2e} {real:.2e}", flush=True)
            ratios += [real / emulated] if emulated > 0 else []
        default, *kept = ratios
        cells = f"{default:.2f}", f"{min(kept):.2f} {max(kept):.2f}"
        rows.append([name, str(len(known.labels)), *cells, number(seconds, 1, " s")])
    head = ("model", "groups", "default", "one group kept", "advise")
    print(format_table(head, rows), flush=True)


def measure_part(options):
    """Prints the policy that is found by emulation, and by measuring."""
    batch = options.batch
    for size in options.sizes:
        task = make_task(size, batch, length=options.length)
        jax.block_until_ready((task.params, task.batches))
        for chosen in ({}, {"measure": True, "max_grad_error": options.max_grad_error}):
            print(f"\n{size}, batch {batch}, {chosen}", flush=True)
            start = time.perf_counter()
            args = task.loss, task.params, task.batches[0]
            print(mpx.inspect.advise(*args, **chosen), flush=True)
            print(f"{time.perf_counter() - start:.1f} s", flush=True)


def main():
    options = read_options(
        __doc__,
        f"part=, models={','.join(MODELS)} half=bf16 sizes=tiny,tiny-gpt batch=8 "
        "length=int max_grad_error=0.05",
    )
    parts = options.part or ["emulate", "measure"]
    if "emulate" in parts:
        emulate_part(options.models, options.half)
    if "measure" in parts:
        measure_part(options)


if __name__ == "__main__":
    main()
