"""What cross entropy costs with a large vocabulary: optax and `linear_cross_entropy`.

    python benchmarks/logits.py                          # an NVIDIA GPU with 40 GB
    python benchmarks/logits.py --sizes llama3-32k,gemma
    python benchmarks/logits.py --sizes tiny             # try the script on a CPU

Loss and gradients with respect to hidden states and weights. Memory is what the compiled
program needs beside its arguments and results. Errors are those of the gradients, relative
to the f32 gradient in the Euclidean norm.
"""

from typing import NamedTuple

import jax
import numpy as np
import optax

import _measure as measure
import mpx
from _measure import giga, number


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


def chunked(weight, hidden, labels, tied):
    axis = 0 if tied else 1
    return mpx.linear_cross_entropy(hidden, weight, labels, vocab_axis=axis)


def gradient(loss, tied):
    """Returns the loss and its gradients with respect to weight and hidden states."""
    func = lambda weight, hidden, labels: loss(weight, hidden, labels, tied)  # noqa: E731
    return jax.value_and_grad(func, argnums=(0, 1))


MODES = {
    "optax": plain,
    "linear_cross_entropy": chunked,
    # The forward pass keeps no logits.
    "logits again": jax.checkpoint(chunked, static_argnums=3),
}


def operands(size):
    """Logits of about the size of a trained model's: a standard deviation of 2."""
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (size.vocab, size.width) if size.tied else (size.width, size.vocab)
    weight = 2 * jax.random.normal(keys[0], shape) / np.sqrt(size.width)
    hidden = jax.random.normal(keys[1], (size.tokens, size.width))
    return weight, hidden, jax.random.randint(keys[2], (size.tokens,), 0, size.vocab)


def run(name, size):
    """Prints the table of one size; returns what was measured, by mode."""
    args, rows, base, found = operands(size), [], None, {}
    with jax.default_matmul_precision("highest"):
        loss, exact = jax.jit(gradient(plain, size.tied))(*args)
    for mode, func in MODES.items():
        try:
            program = jax.jit(gradient(mpx.amp(func), size.tied)).lower(*args).compile()
            value, grads = jax.block_until_ready(program(*args))
        except Exception as problem:  # one mode that fails does not cost the others
            print(f"{name}, {mode}: {str(problem)[:300]}", flush=True)
            continue
        pairs = zip(grads, exact, strict=True)
        errors = [abs(value - loss), *(measure.relative_error(*x) for x in pairs)]
        del value, grads
        # Three are sent ahead, as in a training loop.
        ms = measure.time_call(program, *args, runs=3, groups=10, warmup=1)
        memory = measure.planned_memory(program)["temp_bytes"]
        base = base or (ms, memory)
        cells = number(ms), number(ms / base[0], 3), giga(memory)
        wrong = [f"{float(x):.1e}" for x in errors]
        names = "ms", "temp_bytes", "loss_error", "weight_error", "hidden_error"
        record = dict(zip(names, (ms, memory, *map(float, errors)), strict=True))
        found[f"{name}:{mode}"] = [record | {"environment": measure.environment()}]
        rows.append([mode, *cells, number(base[1] / memory, 1), *wrong])
    head = ["mode", "ms", "× optax", "GB", "optax / GB", "loss", "dW", "dh"]
    print(f"\n{name}: {size}\n\n{measure.format_table(head, rows)}", flush=True)
    return found


def main():
    given = measure.read_options(__doc__, "sizes=llama3,llama3-tied,gpt2 json=str")
    print(measure.environment())
    runs = {}
    for name, size in measure.pick(SIZES, given.sizes).items():
        runs |= run(name, size)
        if given.json:
            measure.write_json(given.json, runs)


if __name__ == "__main__":
    main()
