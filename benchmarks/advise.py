"""How well `mpx.inspect.advise` predicts, what it costs, and what it finds.

    python benchmarks/advise.py                       # four small models, on a CPU
    python benchmarks/advise.py --part rank --models mlp lstm
    python benchmarks/advise.py --part measure --sizes tiny tiny-gpt
    python benchmarks/advise.py --part measure --sizes vit-base --batch 64   # a GPU
    python benchmarks/advise.py --part measure --sizes gpt2 --length 512 --max-grad-error 0.25

rank: single groups in bf16, predicted against measured by emulating that group alone; rank
correlation, the ratio of measured to predicted, and the time of a pass in gradients.
search: the frontier against all policies of a small model, at equal cost.
measure: the policy that `measure=True` returns, against the default of `amp`.
"""

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from mpx.inspect._predictions import relative_change
from mpx.inspect._search import Judged, front, judge

import _measure as measure
import mpx.inspect
from _measure import format_table, number, read_options
from _models import make_task
from mpx.inspect import _advice


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


def ranks(values):
    return np.argsort(np.argsort(values)).astype(float)


def spearman(a, b):
    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def timed(call):
    return measure.time_call(call, runs=1, warmup=1)


def measured(
    known: Judged, calls: list[Any], half: str, low: Collection[int], *, alone: bool
) -> float:
    """Returns the root mean square of the relative gradient errors over batches."""
    squares = []
    for arrays in calls:
        exact = known.study.emulate(arrays, half, ())[1:]
        grads = known.study.emulate(arrays, half, low, alone=alone)[1:]
        squares.append(relative_change(grads, exact) ** 2)
    return math.sqrt(sum(squares) / len(squares))


def calls_of(case, known):
    first = known.arrays
    count = len(jax.tree.leaves(case.batches[0]))
    return [[*first[: len(first) - count], *jax.tree.leaves(b)] for b in case.batches]


def rank_part(names, half):
    rows = []
    for name in names:
        case = MODELS[name]()
        start = time.perf_counter()
        args = (case.params, *case.batches[0])
        known = judge(case.loss, args, {}, case.batches[1:])
        first = time.perf_counter() - start
        calls = calls_of(case, known)
        once = timed(functools.partial(known.study.passes, calls[0], np.int32(0)))
        plain = eqx.filter_jit(eqx.filter_value_and_grad(case.loss))
        gradient = timed(functools.partial(plain, *args))
        labels = {}
        for i in sorted(known.active):
            labels.setdefault(known.groups[i].label, []).append(i)
        predicted, real = [], []
        for label, members in labels.items():
            predicted.append(known.predicted.error(half, members))
            real.append(measured(known, calls, half, members, alone=True))
            print(f"  {name} {label}: {predicted[-1]:.2e} {real[-1]:.2e}", flush=True)
        ratios = np.array(real) / np.maximum(predicted, 1e-30)
        low, middle, high = np.quantile(ratios, (0.1, 0.5, 0.9))
        rows.append(
            [
                name,
                str(len(labels)),
                number(spearman(predicted, real), 3),
                f"{low:.2f} {middle:.2f} {high:.2f}",
                number(once / gradient, 1, "×"),
                number(first, 1, " s"),
            ]
        )
        print(" ".join(rows[-1]), flush=True)
    return rows


def search_part(half):
    """Compares the greedy frontier with all 2^n sets of groups, measured by emulation."""
    case = MODELS["mlp"]()
    known = judge(case.loss, (case.params, *case.batches[0]), {}, case.batches[1:])
    calls = calls_of(case, known)[:2]
    groups = [i for i in sorted(known.active) if known.groups[i].param]
    others = sorted(known.active - set(groups))

    def real(low: Collection[int]) -> float:
        return measured(known, calls, half, low, alone=False)

    table = []
    for count in range(len(groups) + 1):
        for chosen in itertools.combinations(groups, count):
            low = {*chosen, *others}
            table.append((known.seconds(half, low), real(low)))
    gaps = []
    for option in front(known, [half], with_fp8=False):
        low = option.low
        if not set(others) <= low:
            continue
        cost, error = known.seconds(half, low), real(low)
        best = min(e for c, e in table if c <= cost * 1.000001)
        if best > 0:
            gaps.append(error / best - 1)
    return [
        [
            str(len(table)),
            str(len(gaps)),
            f"{100 * np.median(gaps):.0f} %",
            f"{100 * max(gaps):.0f} %",
        ]
    ]


@contextlib.contextmanager
def stages(total: int, what: str) -> Iterator[Callable[..., None]]:
    """Prints each step of `advise` with the time of the one before."""
    start = last = time.perf_counter()
    name = ""

    def tell(step, *, part=False):
        nonlocal last, name
        if part and step.startswith("compiled "):
            return
        now = time.perf_counter()
        if name:
            print(f"  {now - last:6.1f} s  {name}", flush=True)
        last, name = now, step

    yield tell
    tell("")
    print(f"  {time.perf_counter() - start:6.1f} s  {what} in all", flush=True)


def measure_part(
    sizes: list[str], batch: int, length: int | None, limit: float
) -> None:
    _advice.progress = stages
    for size in sizes:
        task = make_task(size, batch, length=length)
        jax.block_until_ready((task.params, task.batches))
        for options in ({}, {"measure": True, "max_grad_error": limit}):
            print(f"\n{size}, batch {batch}, {options}", flush=True)
            found = mpx.inspect.advise(
                task.loss, task.params, task.batches[0], **options
            )
            print(found, flush=True)


def main() -> None:
    options = read_options(
        __doc__,
        f"part=, models={','.join(MODELS)} half=bf16 sizes=tiny,tiny-gpt batch=8 "
        "length=int max_grad_error=0.05",
    )
    parts = options.part or ["rank", "search", "measure"]
    if "rank" in parts:
        rows = rank_part(options.models, options.half)
        head = ("model", "groups", "rank", "measured/predicted", "a pass", "advise")
        print(format_table(head, rows), flush=True)
    if "search" in parts:
        head = ("policies", "on the frontier", "median gap", "largest gap")
        print(format_table(head, search_part(options.half)), flush=True)
    if "measure" in parts:
        measure_part(
            options.sizes, options.batch, options.length, options.max_grad_error
        )


if __name__ == "__main__":
    main()
