"""How well `mpx.inspect.advise` emulates policies, what it costs, and what it finds.

    python benchmarks/advise.py                       # small models, on a CPU
    python benchmarks/advise.py --part emulate --models mlp,vit
    python benchmarks/advise.py --part measure --sizes tiny,tiny-gpt
    python benchmarks/advise.py --part measure --sizes vit-base --batch 64   # a GPU
    python benchmarks/advise.py --part measure --sizes gpt2 --length 512 --max-grad-error 0.25

emulate: the real over the emulated error of amp's default and of policies that keep one group,
and the time to judge all groups.
measure: the policy that `measure=True` returns, against the default of `amp`.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np

import mpx.inspect
from _measure import format_table, number, pick, read_options
from _models import make_task
from _zoo import REGISTRY
from mpx.inspect._advice import PrecisionPolicy, Study
from text import TINY


def normal(seed, *shape, scale=1.0):
    numbers = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(scale * numbers, jnp.float32)


def weight(seed, *shape, scale=1.0):
    """Returns a random matrix that keeps the size of what it is multiplied with."""
    return normal(seed, *shape, scale=scale * shape[-2] ** -0.5)


def mlp():
    made = REGISTRY["MLP (Equinox)"].make()
    return made.loss, made.params, *made.args


def vit():
    task = make_task("tiny", 8, batches=4)
    return task.loss, task.params, task.batches[0]


def decoder():
    """Layers in a scan with remat."""
    return TINY.loss, TINY.init(jax.random.key(0)), TINY.batch()


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
    return loss, params, normal(20, 64, 16), normal(30, 64, 4, scale=0.125)


# Each returns a loss, parameters and a batch.
MODELS = {"mlp": mlp, "vit": vit, "decoder": decoder, "faults": faults}


def emulate(make, half):
    """Compares emulated with real errors: of the default, and with one group kept."""
    loss, *args = make()
    start = time.perf_counter()
    known = Study(loss, tuple(args), {}, formats=[half])
    for label in known.labels:
        known.alone(half, label)
    seconds = time.perf_counter() - start
    kept = [known.keeping(half, label) for label in known.labels]
    chosen = [PrecisionPolicy(half), *kept]
    ratios = [known.measure(x) / e for x in chosen[:8] if (e := known.error(x)) > 0]
    kept = f"{min(ratios[1:]):.2f} {max(ratios[1:]):.2f}"
    return [str(len(known.labels)), number(ratios[0]), kept, number(seconds, 1, " s")]


def measure(size, options):
    """Prints the policy that is found by emulation, and by measuring."""
    task = make_task(size, options.batch, length=options.length)
    jax.block_until_ready((task.params, task.batches))
    for chosen in ({}, {"measure": True, "max_grad_error": options.max_grad_error}):
        print(f"\n{size}, batch {options.batch}, {chosen}", flush=True)
        start = time.perf_counter()
        print(mpx.inspect.advise(task.loss, task.params, task.batches[0], **chosen))
        print(f"{time.perf_counter() - start:.1f} s", flush=True)


def main():
    options = read_options(
        __doc__,
        f"part=emulate,measure models={','.join(MODELS)} half=bf16 sizes=tiny,tiny-gpt "
        "batch=8 length=int max_grad_error=0.05",
    )
    if "emulate" in options.part:
        models = pick(MODELS, options.models).items()
        rows = [[name, *emulate(make, options.half)] for name, make in models]
        head = ("model", "groups", "default", "one group kept", "advise")
        print(format_table(head, rows), flush=True)
    for size in options.sizes if "measure" in options.part else ():
        measure(size, options)


if __name__ == "__main__":
    main()
