"""What recognising attention gains: as written, fused by `amp`, and by hand with cuDNN.

    python benchmarks/attention.py                     # everything; about 8 minutes on an H200
    python benchmarks/attention.py --part ops          # single attentions, with their errors
    python benchmarks/attention.py --part ops --more   # of more sizes: about 6 minutes more
    python benchmarks/attention.py --part models       # training steps of whole models
    python benchmarks/attention.py --tiny              # try the script on a CPU

Each attention and each model is written in f32 without a fused kernel. `keep` is
`amp(attention="keep")`, `fuse` is `amp`, `small` is `amp` with bf16 parameters and
`flash_adamw`, and `hand` is written in bf16 around
`jax.nn.dot_product_attention(implementation="cudnn")`.
"""

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import _measure as measure
import mpx
from _measure import Record, number, ratio
from _models import Task, make_task
from mpx._ops._attention import _cudnn

BF16 = jnp.bfloat16
TARGET = 1.00


# --- by hand --------------------------------------------------------------------------


def cudnn(q: Array, k: Array, v: Array, *, causal: bool = False, **more: Any) -> Array:
    """Attention in bf16 in cuDNN; odd lengths, which it does not take, are padded."""
    length, keys = q.shape[1], k.shape[1]
    if length % 2 or keys % 2:
        q, k, v = (
            jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), *((0, 0),) * 2)) for x in (q, k, v)
        )
        if not causal and "key_value_seq_lengths" not in more:
            more["key_value_seq_lengths"] = jnp.full(len(q), keys, jnp.int32)
    out = jax.nn.dot_product_attention(
        *(x.astype(BF16) for x in (q, k, v)),
        is_causal=causal,
        implementation="cudnn" if jax.default_backend() == "gpu" else None,
        **more,
    )
    return out[:, :length]


# --- single attentions ----------------------------------------------------------------


def written(q: Array, k: Array, v: Array, *more: Array, kind: str) -> Array:
    """Attention as people write it."""
    s = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    if kind == "causal":
        s = jnp.where(jnp.tril(jnp.ones(s.shape[2:], bool)), s, -jnp.inf)
    elif kind == "padding":
        s = jnp.where(more[0][:, None, None], s, jnp.finfo(s.dtype).min)
    elif kind == "padding, causal":
        mask = more[0][:, None, None] & jnp.tril(jnp.ones(s.shape[2:], bool))
        s = jnp.where(mask, s, jnp.finfo(s.dtype).min)
    elif kind.startswith("bias"):
        s = s + more[0]
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s), v)


def by_hand(q: Array, k: Array, v: Array, *more: Array, kind: str) -> Array:
    """The same with cuDNN."""
    if kind.startswith("padding"):
        # What an expert knows: these masks are lengths.
        lengths = jnp.sum(more[0], axis=1, dtype=jnp.int32)
        return cudnn(q, k, v, causal="causal" in kind, key_value_seq_lengths=lengths)
    if kind.startswith("bias"):
        return cudnn(q, k, v, bias=more[0].astype(BF16))
    return cudnn(q, k, v, causal=kind == "causal")


def with_gradients(attend: Callable[..., Array], free: int) -> Callable[..., Any]:
    """Returns a function of the result and of the gradients with respect to arguments."""

    def call(weights: Array, *args: Array) -> Any:
        def loss(*chosen: Array) -> tuple[Array, Array]:
            out = attend(*chosen, *args[free:])
            return jnp.sum(out.astype(jnp.float32) * weights), out

        grads, out = jax.grad(loss, tuple(range(free)), has_aux=True)(*args[:free])
        return [out.astype(jnp.float32), *grads]

    return jax.jit(call)


def time_call(call: Callable[..., Any], *args: Any, runs: int = 20) -> float:
    """Returns the median time of a call in ms."""
    jax.block_until_ready([call(*args) for _ in range(3)])
    groups = []
    for _ in range(5):
        start = time.perf_counter()
        outs = [call(*args) for _ in range(runs)]
        jax.block_until_ready(outs)
        groups.append((time.perf_counter() - start) / runs * 1e3)
    return statistics.median(groups)


def error(outs: list[Array], exact: list[Array]) -> float:
    """Returns the largest relative error of results and gradients."""
    pairs = zip(outs, exact, strict=True)
    return max(float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in pairs)


def measure_operation(
    kind: str, batch: int, length: int, heads: int, size: int
) -> Record:
    """Times one attention in three ways, forward and backward, and checks it."""
    keys = jax.random.split(jax.random.key(0), 5)
    shape = (batch, length, heads, size)
    q, k, v, weights = (jax.random.normal(key, shape) for key in keys[:4])
    more: tuple[Array, ...] = ()
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
    record: Record = {}
    for name, func in modes.items():
        call = with_gradients(func, free)
        try:
            record[f"{name}_error"] = error(call(*args), exact)
            record[name] = time_call(call, *args)
        except Exception as failure:
            print(f"  {kind} {shape} {name}: {failure}"[:400], flush=True)
    fused = str(jax.make_jaxpr(modes["fuse"])(*args[1:]))
    record["is_fused"] = "cudnn_attention" in fused
    return record


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


def run_operations(tiny: bool, more: bool) -> bool:
    """Prints the table of single attentions; returns whether all numbers are right."""
    _cudnn.LEAST = dict.fromkeys(_cudnn.LEAST, 0)  # to see from which size on it pays
    cases = TINY if tiny else CASES + MORE * more
    rows, right = [], True
    for kind, length, size in cases:
        batch = max(1, min(64, 16384 // length)) if not tiny else 2
        heads = 12 if size == 64 else 8
        found = measure_operation(kind, batch, length, heads, size)
        errors = [found.get(f"{name}_error") for name in ("keep", "fuse", "hand")]
        limit = 2 * max(filter(None, (errors[0], 0.01)))
        ok = errors[1] is not None and errors[1] <= limit
        right = right and ok
        rows.append(
            [
                f"{kind}, {batch} × {length} × {heads} × {size}",
                *(number(found.get(name), 3) for name in ("keep", "fuse", "hand")),
                number(ratio(found.get("keep"), found.get("fuse"))),
                number(ratio(found.get("fuse"), found.get("hand"))),
                "fused" if found["is_fused"] else "kept",
                *(number(x, 4) for x in errors),
                "" if ok else "WRONG",
            ]
        )
        print(" | ".join(rows[-1]), flush=True)
    header = "attention,keep ms,fuse ms,hand ms,keep ÷ fuse,fuse ÷ hand,,error,,,"
    print(measure.format_table(header.split(","), rows))
    return right


# --- whole models ---------------------------------------------------------------------


class ByHand(eqx.Module):
    """Equinox' attention of one sequence, with the product in cuDNN."""

    inner: eqx.nn.MultiheadAttention

    def __call__(self, q: Array, k: Array, v: Array, mask: Any = None) -> Array:
        """Maps sequences of (tokens, features)."""
        heads = self.inner.num_heads
        projections = (
            self.inner.query_proj,
            self.inner.key_proj,
            self.inner.value_proj,
        )
        q, k, v = (
            jax.vmap(project)(x).reshape(1, len(x), heads, -1)
            for project, x in zip(projections, (q, k, v), strict=True)
        )
        out = cudnn(q, k, v, causal=mask is not None)
        return jax.vmap(self.inner.output_proj)(out[0].reshape(out.shape[1], -1))


def equinox_task(mode: str, name: str, batch: int) -> tuple[Any, Any, list[Any]]:
    """A model of Equinox, its loss and batches."""
    task: Task = make_task(name, batch)
    arrays, static = eqx.partition(task.model, eqx.is_inexact_array)
    if mode != "hand":
        return arrays, lambda a, x: task.loss(eqx.combine(a, static), x), task.batches

    def loss(arrays: Any, batch: Any) -> Array:
        low = jax.tree.map(lambda x: x.astype(BF16), arrays)
        model = eqx.combine(low, static)
        blocks = [
            eqx.tree_at(lambda b: b.attention, block, ByHand(block.attention))
            for block in model.blocks
        ]
        model = eqx.tree_at(lambda m: m.blocks, model, blocks)
        cast = lambda x: x.astype(BF16) if x.dtype == jnp.float32 else x  # noqa: E731
        return task.loss(model, jax.tree.map(cast, batch))

    return arrays, loss, task.batches


def _next_token_loss(logits: Any, tokens: Array) -> Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), tokens[:, 1:]
    )
    return losses.mean()


def _attend_by_hand(q: Array, k: Array, v: Array, **options: Any) -> Array:
    del options  # a causal mask
    return cudnn(q, k, v, causal=True)


def linen_task(mode: str, size: Any, batch: int) -> tuple[Any, Any, list[Any]]:
    """A GPT with the attention of Linen."""
    import flax.linen as nn

    by_hand: Any = {"dtype": BF16} if mode == "hand" else {}
    attend: Any = {"attention_fn": _attend_by_hand} if mode == "hand" else {}

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens: Array) -> Array:
            embed = nn.Embed(size.vocabulary, size.features, **by_hand)
            place = nn.Embed(size.context, size.features, **by_hand)
            x = embed(tokens) + place(jnp.arange(tokens.shape[1]))
            mask = nn.make_causal_mask(tokens)
            for _ in range(size.depth):
                layer = nn.MultiHeadDotProductAttention(
                    size.heads, deterministic=True, **by_hand, **attend
                )
                x = x + layer(nn.LayerNorm(**by_hand)(x), mask=mask)
                h = nn.Dense(4 * size.features, **by_hand)(nn.LayerNorm(**by_hand)(x))
                x = x + nn.Dense(size.features, **by_hand)(nn.gelu(h))
            return embed.attend(nn.LayerNorm(**by_hand)(x))

    model = Model()
    batches = [_tokens(size, batch, seed) for seed in range(2)]
    params = jax.jit(model.init)(jax.random.key(0), batches[0][:, :-1])
    return (
        params,
        lambda p, x: _next_token_loss(model.apply(p, x[:, :-1]), x),
        batches,
    )


def nnx_task(mode: str, size: Any, batch: int) -> tuple[Any, Any, list[Any]]:
    """A GPT with the attention of NNX."""
    from flax import nnx

    by_hand: Any = {"dtype": BF16} if mode == "hand" else {}
    attend: Any = {"attention_fn": _attend_by_hand} if mode == "hand" else {}

    class Block(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            width = size.features
            self.first = nnx.LayerNorm(width, rngs=rngs, **by_hand)
            self.second = nnx.LayerNorm(width, rngs=rngs, **by_hand)
            self.attention = nnx.MultiHeadAttention(
                size.heads, width, decode=False, rngs=rngs, **by_hand, **attend
            )
            self.up = nnx.Linear(width, 4 * width, rngs=rngs, **by_hand)
            self.down = nnx.Linear(4 * width, width, rngs=rngs, **by_hand)

        def __call__(self, x: Array, mask: Array) -> Array:
            x = x + self.attention(self.first(x), mask=mask)
            return x + self.down(nnx.gelu(self.up(self.second(x))))

    class Model(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.embed = nnx.Embed(size.vocabulary, size.features, rngs=rngs, **by_hand)
            self.place = nnx.Embed(size.context, size.features, rngs=rngs, **by_hand)
            blocks = [Block(rngs) for _ in range(size.depth)]
            self.blocks = nnx.List(blocks) if hasattr(nnx, "List") else blocks
            self.norm = nnx.LayerNorm(size.features, rngs=rngs, **by_hand)

        def __call__(self, tokens: Array) -> Array:
            x = self.embed(tokens) + self.place(jnp.arange(tokens.shape[1]))
            mask = nnx.make_causal_mask(tokens)
            for block in self.blocks:
                x = block(x, mask)
            return self.embed.attend(self.norm(x))

    graph, state = nnx.split(Model(nnx.Rngs(0)))
    return (
        state,
        lambda s, x: _next_token_loss(nnx.merge(graph, s)(x[:, :-1]), x),
        [_tokens(size, batch, seed) for seed in range(2)],
    )


def _tokens(size: Any, batch: int, seed: int) -> Array:
    from _models import gpt_batch

    return gpt_batch(size, batch, size.context, jax.random.key(seed))["tokens"]


def run_model(options: argparse.Namespace) -> Record:
    """Builds, compiles and times the training step of one model in one mode."""
    from _models import SIZES

    measure.start_child(options.cache)
    library, mode = options.child.split(":")
    tiny = options.tiny
    if library == "equinox":
        name = "tiny" if tiny else "vit-base"
        params, loss, batches = equinox_task(mode, name, 4 if tiny else 128)
    else:
        build = {"linen": linen_task, "nnx": nnx_task}[library]
        name = "tiny-gpt" if tiny else "gpt2"
        params, loss, batches = build(mode, SIZES[name], 2 if tiny else 8)
    if mode != "hand":
        loss = mpx.amp(loss, "bf16", attention="keep" if mode == "keep" else "fuse")
    optimizer: Any = optax.adamw(1e-4)
    if mode == "small":
        batches = mpx.cast_to_bfloat16(batches)
        optimizer = mpx.optim.flash_adamw(1e-4, weight_decay=1e-4)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, optimizer_state = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        if mode == "small":
            return tuple(optimizer.step(params, optimizer_state, grads)), value
        updates, optimizer_state = optimizer.update(grads, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), value

    if mode == "small":
        start = tuple(jax.jit(optimizer.init_from)(params))
    else:
        start = params, jax.jit(optimizer.init)(params)
    state = measure.own_small_buffers(start)
    compiled, record = measure.compile_step(step, state, batches[0])
    steps = 6 if tiny else 60
    state, _, _ = measure.time_steps(compiled, state, batches, steps=6, group=3)
    state, losses, timing = measure.time_steps(
        compiled, state, batches, steps=steps, group=3 if tiny else 10
    )
    kernels = str(jax.make_jaxpr(loss)(params if tiny else state[0], batches[0]))
    return (
        record
        | timing
        | {
            "peak_bytes": measure.peak_bytes(),
            "loss": float(np.mean(jax.device_get(losses[-4:]))),
            "kernels": kernels.count("cudnn_attention[") if mode != "hand" else None,
            "environment": measure.environment(),
        }
    )


def run_models(options: argparse.Namespace) -> None:
    """Prints the table of whole models."""
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for library in options.models.split(","):
            found: dict[str, Record] = {}
            for turn in range(options.repeat):
                for mode in options.modes.split(","):
                    arguments = ["--child", f"{library}:{mode}", "--cache", cache]
                    arguments += ["--tiny"] if options.tiny else []
                    record = measure.run_child(__file__, arguments, timeout=300)
                    if "error" in record:
                        print(f"{library} {mode}: {record['error']}", flush=True)
                        continue
                    if mode not in found or record["ms"] < found[mode]["ms"]:
                        found[mode] = record
                    print(f"{library} {mode} {turn}: {record['ms']:.2f} ms", flush=True)
            hand = found.get("hand", {})
            for mode, record in found.items():
                peak = record["peak_bytes"] or record.get("compiled_bytes")
                rows.append(
                    [
                        f"{library}, {mode}",
                        number(record["ms"]),
                        number(ratio(record["ms"], hand.get("ms")), 3),
                        number(None if peak is None else peak / 1e9),
                        str(record["kernels"]),
                        number(record["loss"], 4),
                        number(record["trace_s"]),
                    ]
                )
    header = ["model", "ms", "÷ hand", "GB", "kernels", "loss", "trace s"]
    print(measure.format_table(header, rows))


def main() -> None:
    """Runs the parts."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--part", choices=("ops", "models"))
    parser.add_argument("--models", default="equinox,linen,nnx")
    parser.add_argument("--modes", default="keep,fuse,small,hand")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--more", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--child")
    parser.add_argument("--cache")
    options = parser.parse_args()
    if options.child:
        import json

        print(json.dumps(run_model(options)))
        return
    parts = (options.part,) if options.part else ("models", "ops")
    right = True
    if "models" in parts:
        run_models(options)
    if "ops" in parts:
        right = run_operations(options.tiny, options.more)
    if not right:
        raise SystemExit("some numbers are wrong")


if __name__ == "__main__":
    main()
