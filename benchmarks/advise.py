"""How well `mpx.inspect.advise` emulates policies, what it costs, and what it finds.

    python benchmarks/advise.py                       # small models, on a CPU
    python benchmarks/advise.py --part emulate --models mlp lstm
    python benchmarks/advise.py --part measure --sizes tiny tiny-gpt
    python benchmarks/advise.py --part measure --sizes vit-base --batch 64   # a GPU
    python benchmarks/advise.py --part measure --sizes gpt2 --length 512 --max-grad-error 0.25

emulate: the real over the emulated error of amp's default and of policies that keep one group,
and the time to judge all groups.
search: the keep-lists against all policies of a small model, at equal length.
measure: the policy that `measure=True` returns, against the default of `amp`.
"""

import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import mpx.inspect
from _measure import format_table, number, read_options
from _models import make_task
from mpx.inspect._advice import Bench
from mpx.inspect._emulation import Rounded
from mpx.inspect._policies import PrecisionPolicy, Study, policies


class Case(NamedTuple):
    loss: Callable[..., Any]
    params: Any
    batches: list[tuple[Any, ...]]


def draw(seed, *shape, scale=1.0):
    fan = shape[-2] if len(shape) > 1 else 1
    return scale * jax.random.normal(jax.random.key(seed), shape) * fan**-0.5


def layer_norm(x, gain):
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * gain


def mlp():
    """Layers of very different sizes of numbers, so that their errors differ."""
    widths = (32, 64, 64, 64, 64, 8)

    def loss(params, x, y):
        for i in range(len(widths) - 1):
            x = x @ params[f"w{i}"] + params[f"b{i}"]
            if i < len(widths) - 2:
                x = jnp.tanh(x) if i % 2 else jax.nn.gelu(x)
        return jnp.mean(jnp.square(x - y))

    pairs = list(itertools.pairwise(widths))
    gains = (0.5, 2.0, 0.3, 1.5, 1.0)
    params = {f"w{i}": draw(i, m, n, scale=gains[i]) for i, (m, n) in enumerate(pairs)}
    params |= {f"b{i}": draw(20 + i, n, scale=0.1) for i, (_, n) in enumerate(pairs)}
    batches = [
        (draw(40 + i, 64, 32, scale=8.0), draw(60 + i, 64, 8, scale=8.0))
        for i in range(4)
    ]
    return Case(loss, params, batches)


def vit():
    task = make_task("tiny", 8, batches=4)
    return Case(task.loss, task.params, [(batch,) for batch in task.batches])


def language_model():
    """Characters, layers in a scan with remat, a tied head."""
    vocabulary, width, length, depth = 48, 32, 24, 3

    def loss(params, tokens):
        x = params["embed"][tokens[:, :-1]] + params["position"]
        mask = jnp.tril(jnp.ones((length, length), bool))

        @jax.checkpoint
        def layer(x, p):
            with jax.named_scope("attention"):
                h = layer_norm(x, p["gain"][0])
                q, k, v = h @ p["q"], h @ p["k"], h @ p["v"]
                scores = jnp.einsum("btd,bsd->bts", q, k) * width**-0.5
                weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
                x = x + jnp.einsum("bts,bsd->btd", weights, v) @ p["o"]
            with jax.named_scope("mlp"):
                h = jax.nn.gelu(layer_norm(x, p["gain"][1]) @ p["up"])
                return x + h @ p["down"], None

        x, _ = lax.scan(layer, x, params["layers"])
        logits = layer_norm(x, params["gain"]) @ params["embed"].T
        wanted = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - wanted)

    def stack(seed, m, n, scale):
        return draw(seed, depth, m, n, scale=scale)

    params = {
        "embed": draw(0, vocabulary, width, scale=6.0),
        "position": draw(1, length, width, scale=1.0),
        "gain": jnp.ones(width),
        "layers": {
            "q": stack(2, width, width, 2.0),
            "k": stack(3, width, width, 2.0),
            "v": stack(4, width, width, 0.5),
            "o": stack(5, width, width, 0.5),
            "up": stack(6, width, 4 * width, 1.0),
            "down": stack(7, 4 * width, width, 0.3),
            "gain": jnp.ones((depth, 2, width)),
        },
    }
    batches = [
        (jax.random.randint(jax.random.key(9 + i), (8, length + 1), 0, vocabulary),)
        for i in range(4)
    ]
    return Case(loss, params, batches)


def lstm():
    width, length = 32, 12

    def loss(params, x, y):
        def step(state, x):
            h, c = state
            with jax.named_scope("cell"):
                gates = x @ params["input"] + h @ params["hidden"] + params["bias"]
                i, f, g, o = jnp.split(gates, 4, -1)
                c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
                h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        with jax.named_scope("embed"):
            x = jnp.tanh(x @ params["embed"])
        start = (jnp.zeros((x.shape[1], width)), jnp.zeros((x.shape[1], width)))
        _, hidden = lax.scan(step, start, x)
        with jax.named_scope("head"):
            hidden = jnp.tanh(hidden @ params["mix"])
        return jnp.mean(jnp.square(hidden @ params["out"] - y))

    params = {
        "embed": draw(0, 16, width, scale=2.0),
        "input": draw(1, width, 4 * width, scale=1.0),
        "hidden": draw(2, width, 4 * width, scale=0.5),
        "bias": draw(3, 4 * width, scale=0.1),
        "mix": draw(4, width, width, scale=1.0),
        "out": draw(5, width, 4, scale=0.2),
    }
    batches = [
        (draw(20 + i, length, 16, 16, scale=4.0), draw(30 + i, length, 16, 4))
        for i in range(4)
    ]
    return Case(loss, params, batches)


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
        "first": draw(0, 16, 64, scale=2.0),
        "centres": 0.3 * draw(1, 12, 64, scale=3.0),
        "second": draw(2, 12, 4),
        "tiny": draw(3, 64, 64),
    }
    batches = [(draw(20 + i, 64, 16, scale=8.0), draw(30 + i, 64, 4)) for i in range(4)]
    return Case(loss, params, batches)


MODELS = {"mlp": mlp, "vit": vit, "lm": language_model, "lstm": lstm, "faults": faults}


def emulate_part(names, half):
    """Compares emulated with real errors: of the default, and with one group kept."""
    rows = []
    for name in names:
        case = MODELS[name]()
        start = time.perf_counter()
        args = (case.params, *case.batches[0])
        known = Study(case.loss, args, {}, formats=[half])
        for label in known.labels:
            known.alone(half, label)
        seconds = time.perf_counter() - start
        bench = Bench(known)
        chosen = [PrecisionPolicy(half)]
        for kind, pattern in map(known.selector, known.labels):
            fields: dict[str, Any] = {kind: (pattern,)}
            chosen.append(PrecisionPolicy(half, **fields))
        ratios = []
        for policy in chosen[:8]:
            real, emulated = bench.error(policy), known.error(policy)
            print(f"  {name} {policy}: {emulated:.2e} {real:.2e}", flush=True)
            if emulated > 0:
                ratios.append(real / emulated)
        rows.append(
            [
                name,
                str(len(known.labels)),
                f"{ratios[0]:.2f}",
                f"{min(ratios[1:]):.2f} {max(ratios[1:]):.2f}",
                number(seconds, 1, " s"),
            ]
        )
    return rows


def search_part(half):
    """Compares the keep-lists with all 2^n sets of groups."""
    case = MODELS["mlp"]()
    args = (case.params, *case.batches[0])
    known = Study(case.loss, args, {}, formats=[half])
    groups = [i for i in sorted(known.active) if known.groups[i].param]
    others = known.active - set(groups)
    gaps = []
    for policy in policies(known, half):
        low, _ = known.parts(policy)
        sets = itertools.combinations(groups, max(len(low) - len(others), 0))
        rounds = (Rounded(half, others.union(x), scale=known.scale) for x in sets)
        best = min(known.change(x).error for x in rounds)
        if others <= low and best > 0:
            gaps.append(known.error(policy) / best - 1)
    return [
        [
            str(2 ** len(groups)),
            str(len(gaps)),
            f"{100 * np.median(gaps):.0f} %",
            f"{100 * max(gaps):.0f} %",
        ]
    ]


def measure_part(
    sizes: list[str], batch: int, length: int | None, limit: float
) -> None:
    for size in sizes:
        task = make_task(size, batch, length=length)
        jax.block_until_ready((task.params, task.batches))
        for chosen in ({}, {"measure": True, "max_grad_error": limit}):
            print(f"\n{size}, batch {batch}, {chosen}", flush=True)
            start = time.perf_counter()
            found = mpx.inspect.advise(
                task.loss, task.params, task.batches[0], **chosen
            )
            print(found, flush=True)
            print(f"{time.perf_counter() - start:.1f} s", flush=True)


def main() -> None:
    options = read_options(
        __doc__,
        f"part=, models={','.join(MODELS)} half=bf16 sizes=tiny,tiny-gpt batch=8 "
        "length=int max_grad_error=0.05",
    )
    parts = options.part or ["emulate", "search", "measure"]
    if "emulate" in parts:
        rows = emulate_part(options.models, options.half)
        head = ("model", "groups", "default", "one group kept", "advise")
        print(format_table(head, rows), flush=True)
    if "search" in parts:
        head = ("policies", "keep-lists", "median gap", "largest gap")
        print(format_table(head, search_part(options.half)), flush=True)
    if "measure" in parts:
        measure_part(
            options.sizes, options.batch, options.length, options.max_grad_error
        )


if __name__ == "__main__":
    main()
