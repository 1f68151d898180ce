"""What cross entropy costs with a large vocabulary: optax and `linear_cross_entropy`.

    python benchmarks/logits.py                          # an NVIDIA GPU with 40 GB
    python benchmarks/logits.py --sizes llama3 --more    # with other chunks
    python benchmarks/logits.py --sizes tiny             # try the script on a CPU

Loss and gradients with respect to hidden states and weights. Memory is what the compiled
program needs beside its arguments and results. Errors are those of the gradients, relative
to the f32 gradient in the Euclidean norm. The modes of a size take turns.
"""

import argparse
import functools
import statistics
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import _measure as measure
import mpx
from _measure import number

BF16 = np.dtype(jnp.bfloat16)


class Size(NamedTuple):
    tokens: int
    width: int
    vocab: int
    tied: bool = False  # weights (vocabulary, width), as those of an embedding


SIZES = {
    "llama3": Size(8192, 4096, 128256),
    "llama3-tied": Size(8192, 4096, 128256, tied=True),
    "llama3-32k": Size(32768, 4096, 128256),
    "gpt2": Size(8192, 768, 50257, tied=True),
    "gemma": Size(8192, 2304, 256000, tied=True),
    "tiny": Size(64, 32, 1000),
}


def plain(weight, hidden, labels, tied):
    logits = hidden @ (weight.T if tied else weight)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def one_hot(weight, hidden, labels, tied):
    logits = hidden @ (weight.T if tied else weight)
    wanted = jax.nn.one_hot(labels, logits.shape[-1])
    return optax.softmax_cross_entropy(logits, wanted).mean()


def chunked(weight, hidden, labels, tied, **options):
    axis = 0 if tied else 1
    return mpx.linear_cross_entropy(hidden, weight, labels, vocab_axis=axis, **options)


def by_tokens(size, count):
    """Gradients in the forward pass, in blocks of tokens: what Liger does."""

    def run(weight, hidden, labels):
        low = weight.astype(BF16)
        blocks = hidden.reshape(count, -1, size.width), labels.reshape(count, -1)

        def step(carry, block):
            total, grad = carry
            h, y = block[0].astype(BF16), block[1]
            dims = (((1,), (1 if size.tied else 0,)), ((), ()))
            logits = lax.dot_general(h, low, dims, preferred_element_type=BF16)
            wide = logits.astype(jnp.float32)
            lse = jax.nn.logsumexp(wide, axis=1)
            is_label = y[:, None] == jnp.arange(size.vocab)
            total += jnp.sum(lse) - jnp.sum(jnp.where(is_label, wide, 0.0))
            d = (jnp.exp(wide - lse[:, None]) - is_label) / size.tokens
            d = d.astype(BF16)
            dims = (((1,), (0 if size.tied else 1,)), ((), ()))
            dh = lax.dot_general(d, low, dims, preferred_element_type=jnp.float32)
            pair = (d, h) if size.tied else (h, d)
            dims = (((0,), (0,)), ((), ()))
            grad += lax.dot_general(*pair, dims, preferred_element_type=jnp.float32)
            return (total, grad), dh

        start = jnp.zeros(()), jnp.zeros(weight.shape)
        (total, grad), dh = lax.scan(step, start, blocks)
        return total / size.tokens, (grad, dh.reshape(hidden.shape))

    return run


def modes_of(size, more):
    def grad(loss):
        return jax.value_and_grad(
            lambda w, h, y: loss(w, h, y, size.tied), argnums=(0, 1)
        )

    def in_parts(count):
        return functools.partial(chunked, chunks=count)

    modes = {
        "optax": grad(mpx.amp(plain)),
        "optax one-hot": grad(mpx.amp(one_hot)),
        "linear_cross_entropy": grad(mpx.amp(chunked)),
    }
    if not more:
        return modes
    for count in (8, 16, 32, 64):
        modes[f"{count} chunks"] = grad(mpx.amp(in_parts(count)))
    # The forward pass keeps no logits.
    again = jax.checkpoint(chunked, static_argnums=3)
    modes["logits again"] = grad(mpx.amp(again))
    modes["4 blocks of tokens"] = by_tokens(size, 4)
    return modes


def operands(size):
    """Logits of about the size of a trained model's: a standard deviation of 2."""
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (size.vocab, size.width) if size.tied else (size.width, size.vocab)
    weight = 2 * jax.random.normal(keys[0], shape) / np.sqrt(size.width)
    hidden = jax.random.normal(keys[1], (size.tokens, size.width))
    return weight, hidden, jax.random.randint(keys[2], (size.tokens,), 0, size.vocab)


@jax.jit
def error(found, wanted):
    return jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted)


def run(name, *, more, rounds):
    size, programs, lines = SIZES[name], {}, {}
    args = operands(size)
    with jax.default_matmul_precision("highest"):
        exact = jax.value_and_grad(
            lambda w, h, y: plain(w, h, y, size.tied), argnums=(0, 1)
        )
        wanted = jax.jit(exact)(*args)
    for mode, func in modes_of(size, more).items():
        start = time.perf_counter()
        try:
            programs[mode] = jax.jit(func).lower(*args).compile()
            value, grads = jax.block_until_ready(programs[mode](*args))
        except Exception as problem:  # one mode that fails does not cost the others
            print(f"{name}, {mode}: {str(problem)[:300]}", flush=True)
            programs.pop(mode, None)
            continue
        stats = programs[mode].memory_analysis()
        lines[mode] = [
            stats.temp_size_in_bytes / 1e9,
            abs(float(value - wanted[0])),
            *(float(error(x, y)) for x, y in zip(grads, wanted[1], strict=True)),
            time.perf_counter() - start,
        ]
        del value, grads
    times = {mode: [] for mode in programs}
    for _ in range(rounds):
        for mode, program in programs.items():
            jax.block_until_ready(program(*args))
            start = time.perf_counter()
            # Three are sent ahead, as in a training loop.
            jax.block_until_ready([program(*args) for _ in range(3)][-1])
            times[mode].append((time.perf_counter() - start) / 3 * 1e3)
    ms = {mode: statistics.median(x) for mode, x in times.items()}
    rows = [
        (
            mode,
            number(ms[mode]),
            number(ms[mode] / ms["optax"], 3),
            number(memory, 3),
            number(lines["optax"][0] / memory, 1),
            f"{loss:.1e}",
            f"{weight:.1e}",
            f"{hidden:.1e}",
            number(seconds, 0),
        )
        for mode, (memory, loss, weight, hidden, seconds) in lines.items()
    ]
    head = (
        "mode",
        "ms",
        "× optax",
        "GB",
        "optax / GB",
        "loss",
        "dW",
        "dh",
        "compile s",
    )
    print(f"\n{name}: {size}\n\n{measure.format_table(head, rows)}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="llama3,llama3-tied,gpt2")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--more", action="store_true")
    given = parser.parse_args()
    print(measure.environment())
    for name in given.sizes.split(","):
        run(name, more=given.more, rounds=given.rounds)


if __name__ == "__main__":
    main()
