"""What recognising attention gains: as written, fused by `amp`, and by hand with cuDNN.

    python benchmarks/attention.py            # single attentions, with their errors
    python benchmarks/attention.py --more     # of more sizes: about 6 minutes more
    python benchmarks/attention.py --tiny     # try the script on a CPU

Each attention is written in f32 without a fused kernel. `keep` is `amp(attention="keep")`,
`fuse` is `amp`, and `hand` is written in bf16 around
`jax.nn.dot_product_attention(implementation="cudnn")`. Whole models: step.py.
"""

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp

import _measure as measure
import mpx
from _measure import number, ratio
from _models import cudnn
from mpx._ops import _attention

MODES = ("keep", "fuse", "hand")
TINY = [("plain", 17, 64), ("padding, causal", 16, 64)]
CASES = [
    *(("plain", length, 64) for length in (128, 197, 1024)),
    ("causal", 1024, 128),
    ("padding", 512, 64),
    ("bias", 256, 64),
]
MORE = [
    *(("plain", length, 64) for length in (64, 256, 512, 2048, 4096)),
    *(("causal", length, 64) for length in (64, 128, 256, 1024, 4096)),
    ("plain", 2048, 128),
    *(("padding", length, 64) for length in (128, 197, 2048)),
    ("padding, causal", 1024, 64),
    ("bias", 1024, 64),
    ("bias of each", 512, 64),
]


def written(q, k, v, *more, kind):
    """Attention as people write it."""
    s = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones(s.shape[2:], bool))
    if kind == "causal":
        s = jnp.where(causal, s, -jnp.inf)
    elif kind == "padding":
        s = jnp.where(more[0][:, None, None], s, jnp.finfo(s.dtype).min)
    elif kind == "padding, causal":
        s = jnp.where(more[0][:, None, None] & causal, s, jnp.finfo(s.dtype).min)
    elif kind.startswith("bias"):
        s = s + more[0]
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s), v)


def by_hand(q, k, v, *more, kind):
    """The same with cuDNN."""
    if kind.startswith("padding"):
        # What an expert knows: these masks are lengths.
        lengths = jnp.sum(more[0], axis=1, dtype=jnp.int32)
        return cudnn(q, k, v, causal="causal" in kind, key_value_seq_lengths=lengths)
    if kind.startswith("bias"):
        return cudnn(q, k, v, bias=more[0].astype(jnp.bfloat16))
    return cudnn(q, k, v, causal=kind == "causal")


def with_gradients(attend, free):
    """Returns a function of the result and of the gradients with respect to arguments."""

    def call(weights, *args):
        def loss(*chosen):
            out = attend(*chosen, *args[free:])
            return jnp.sum(out.astype(jnp.float32) * weights), out

        grads, out = jax.grad(loss, tuple(range(free)), has_aux=True)(*args[:free])
        return [out.astype(jnp.float32), *grads]

    return jax.jit(call)


def measure_operation(kind, batch, length, heads, size) -> dict[str, Any]:
    """Times one attention in three ways, forward and backward, and checks it."""
    keys = jax.random.split(jax.random.key(0), 5)
    shape = (batch, length, heads, size)
    q, k, v, weights = (jax.random.normal(key, shape) for key in keys[:4])
    more = ()
    if kind.startswith("padding"):
        tokens = jnp.linspace(length // 2, length, batch).astype(jnp.int32)
        more = (jnp.arange(length)[None] < tokens[:, None],)
    elif kind.startswith("bias"):
        rows = batch if kind == "bias of each" else 1
        more = (jax.random.normal(keys[4], (rows, heads, length, length)),)
    free = 4 if kind.startswith("bias") else 3
    attend = functools.partial(written, kind=kind)
    modes = {
        "keep": mpx.amp(attend, "bf16", attention="keep"),
        "fuse": mpx.amp(attend, "bf16"),
        "hand": functools.partial(by_hand, kind=kind),
    }
    args = (weights, q, k, v, *more)
    with jax.default_matmul_precision("highest"):
        exact = with_gradients(attend, free)(*args)
    record = {}
    for name, func in modes.items():
        call = with_gradients(func, free)
        try:
            pairs = zip(call(*args), exact, strict=True)
            error = max(float(measure.relative_error(*pair)) for pair in pairs)
            record |= {f"{name}_error": error, name: measure.time_call(call, *args)}
        except Exception as failure:
            print(f"  {kind} {shape} {name}: {failure}"[:400], flush=True)
    fused = "cudnn_attention" in str(jax.make_jaxpr(modes["fuse"])(*args[1:]))
    return record | {"fused": "fused" if fused else "kept"}


def main():
    options = measure.read_options(__doc__, "more tiny")
    # To see from which size on it pays.
    _attention.LEAST = dict.fromkeys(_attention.LEAST, 0)
    rows, right = [], True
    for kind, length, size in TINY if options.tiny else CASES + MORE * options.more:
        batch = 2 if options.tiny else max(1, min(64, 16384 // length))
        heads = 12 if size == 64 else 8
        found = measure_operation(kind, batch, length, heads, size)
        errors = [found.get(f"{name}_error") for name in MODES]
        limit = 2 * max(filter(None, (errors[0], 0.01)))
        good = errors[1] is not None and errors[1] <= limit
        right = right and good
        row = [
            f"{kind}, {batch} × {length} × {heads} × {size}",
            *(number(found.get(name), 3) for name in MODES),
            number(ratio(found.get("keep"), found.get("fuse"))),
            number(ratio(found.get("fuse"), found.get("hand"))),
            found["fused"],
            *(number(x, 4) for x in errors),
            "" if good else "WRONG",
        ]
        print(" | ".join(row), flush=True)
        rows.append(row)
    header = "attention,keep ms,fuse ms,hand ms,keep ÷ fuse,fuse ÷ hand,,error,,,"
    print(measure.format_table(header.split(","), rows))
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
