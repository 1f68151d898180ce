"""What goes over the wire: the collectives of a language model with the shapes of 7B.

    python benchmarks/wire.py                     # everything; about 10 minutes
    python benchmarks/wire.py --only fsdp         # one row of the table
    python benchmarks/wire.py --detail            # each collective, not only the sums
    python benchmarks/wire.py --tiny              # a small model

The gradient step is compiled for eight H200s, which need not be there, and its collectives
are read from what the compiler made. Needs Linux and the CUDA plugin of JAX: `make
gpu-compile` installs it, and then `.venv-gpu/bin/python benchmarks/wire.py` runs.

The model has the 32 layers, widths and vocabulary of Llama 2 7B, scanned and rematerialised,
f32 parameters and eight sequences a step. `gather` and `reduce` are the GiB that one device
sends in a step for weights and for their gradients. What else is sent is in `other`: sums
of activations between tensor-parallel devices, maxima of fp8, the loss.
"""

import argparse
import collections
import functools
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

# Nothing is run: the plugin must not look for a GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests"))

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import h200  # pyright: ignore[reportMissingImports]
import mpx
from mpx.inspect import Collective, collectives

# --- the model ------------------------------------------------------------------------


class Sizes(NamedTuple):
    """Sizes of a language model and of its batch."""

    layers: int = 32
    width: int = 4096
    hidden: int = 11008
    heads: int = 32
    vocabulary: int = 32000
    batch: int = 8
    length: int = 3072  # no width of a weight, nor a part of one: it tells activations
    microbatches: int = 4


TINY = Sizes(2, 512, 1536, 4, 4096, 8, 320, 4)
COLUMNS, ROWS = ("q", "k", "v", "gate", "up"), ("o", "down")


def shapes(sizes: Sizes) -> dict[str, Any]:
    """Returns the shapes of the parameters."""
    count, width, hidden = sizes.layers, sizes.width, sizes.hidden
    layers = {name: (count, width, width) for name in "qkvo"}
    layers |= {name: (count, width, hidden) for name in ("gate", "up")}
    layers |= {"down": (count, hidden, width), "norm1": (count, width)}
    layers |= {"norm2": (count, width)}
    table = (sizes.vocabulary, width)
    return {"embed": table, "layers": layers, "norm": (width,), "head": table[::-1]}


def spec_of(layout: str, name: str) -> P:
    """Returns how a parameter is sharded."""
    data = None if layout == "DP" else "data"
    model = "model" if layout == "FSDP×TP" else None
    if name in COLUMNS:
        return P(None, data, model)
    if name in ROWS:
        return P(None, model, data)
    return {"embed": P(None, data), "head": P(data, model)}.get(name, P())


def normalised(x: Array, weight: Array) -> Array:
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * weight


def loss_of(
    params: Any, tokens: Array, *, sizes: Sizes, place: Callable[..., Array]
) -> Any:
    """The cross entropy of the next token."""
    causal = jnp.tril(jnp.ones((sizes.length,) * 2, bool))

    @jax.checkpoint
    def block(h: Array, w: Any) -> Array:
        x = normalised(h, w["norm1"])
        q, k, v = ((x @ w[n]).reshape(*x.shape[:2], sizes.heads, -1) for n in "qkv")
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(q.shape[-1])
        scores = jax.nn.softmax(jnp.where(causal, scores, -1e9))
        mixed = jnp.einsum("bhts,bshd->bthd", scores, v).reshape(h.shape)
        h = place(h + mixed @ w["o"])
        x = normalised(h, w["norm2"])
        return place(h + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"])

    h = place(params["embed"][tokens[:, :-1]])
    h, _ = lax.scan(lambda h, w: (block(h, w), None), h, params["layers"])
    logits = normalised(h, params["norm"]) @ params["head"]
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)


# --- the cases ------------------------------------------------------------------------

LAYOUTS = ("DP", "FSDP", "FSDP×TP")
# By name: whether weights are multiplied in fp8, bf16 or f32, and the dtype of reductions.
PRECISIONS = {
    "f32": ("f32", "f32"),
    "bf16, sums in f32": ("bf16", "f32"),
    "bf16": ("bf16", "compute"),
    "fp8, sums in f32": ("fp8", "f32"),
    "fp8": ("fp8", "compute"),
}


class Case(NamedTuple):
    """One program: layout, precision, and how microbatches are reduced, if there are any."""

    layout: str
    precision: str
    window: str = ""

    def __str__(self) -> str:
        return f"{self.layout}{self.window}, {self.precision}"


EACH, ONCE = " ×4 each", " ×4 once"


def cases() -> Iterator[Case]:
    for layout in LAYOUTS:
        yield from (Case(layout, precision) for precision in PRECISIONS)
        if layout != "FSDP×TP":
            yield Case(layout, "bf16, 8-bit sums")
    for layout in ("DP", "FSDP"):
        yield Case(layout, "bf16, sums in f32", EACH)
        for precision in ("bf16, sums in f32", "bf16", "bf16, 8-bit sums"):
            yield Case(layout, precision, ONCE)
    yield Case("FSDP", "fp8, sums in f32", ONCE)


def compiled(case: Case, sizes: Sizes) -> Any:
    """Returns the gradient step of a case, compiled for eight H200s."""
    devices = np.array(h200.devices())
    mesh = Mesh(devices, "data")
    if case.layout == "FSDP×TP":
        mesh = Mesh(devices.reshape(4, 2), ("data", "model"))

    def struct(path: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec_of(case.layout, path[-1].key))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    params = jax.tree_util.tree_map_with_path(
        struct, shapes(sizes), is_leaf=lambda x: isinstance(x, tuple)
    )
    parts = sizes.microbatches if case.window else 1
    rows = NamedSharding(mesh, P("data"))
    tokens = jax.ShapeDtypeStruct(
        (sizes.batch * parts, sizes.length + 1), jnp.int32, sharding=rows
    )
    by_mpx = case.window == ONCE or "8-bit" in case.precision
    place = functools.partial(lax.with_sharding_constraint, shardings=rows)
    if by_mpx:  # the axis is then that of the shards
        place = functools.partial(
            lax.with_sharding_constraint, shardings=NamedSharding(mesh, P())
        )
    loss = functools.partial(loss_of, sizes=sizes, place=place)
    func = step_of(case, loss, parts, by_mpx)
    shardings = jax.tree.map(lambda x: x.sharding, params)
    with jax.set_mesh(mesh):
        lowered = jax.jit(func, out_shardings=shardings).lower(params, tokens)
        return lowered.compile(
            {**h200.compiler_options(), "xla_gpu_enable_triton_gemm": False}
        )


def step_of(case: Case, loss: Any, parts: int, by_mpx: bool) -> Callable[..., Any]:
    """Returns the function of parameters and tokens that returns the gradients."""
    multiply, reduce = PRECISIONS.get(case.precision, ("bf16", "e4m3"))
    policy = mpx.Policy(compute_dtype="bf16", reduce_dtype=reduce)
    if multiply != "f32":
        loss = mpx.amp(loss, attention="keep")
    else:
        policy = mpx.Policy(compute_dtype="f32")
    if multiply == "fp8":
        loss = mpx.fp8(loss, min_gain=0)
    options: dict[str, Any] = {"policy": policy}
    if by_mpx:
        options["axis_name"] = "data"
    if by_mpx or case.window:
        grad = mpx.accumulate(loss, parts, **options)
    else:
        grad = mpx.value_and_grad(loss, **options)
    return lambda params, tokens: grad(mpx.NoLossScaling(), params, tokens).grads


# --- the table ------------------------------------------------------------------------

REDUCTIONS = ("reduce-scatter", "all-reduce", "all-to-all")


def sums(found: list[Collective], sizes: Sizes) -> dict[str, str]:
    """Returns dtypes and GiB: of weights, of their gradients, and of the rest."""
    bytes_by: dict[str, collections.Counter[str]] = collections.defaultdict(
        collections.Counter
    )
    for item in found:
        is_activation = sizes.length in item.shape
        column = "gather" if item.kind == "all-gather" else "reduce"
        if is_activation or item.bytes < 2**16 * item.runs:
            column = "other"
        bytes_by[column][item.dtype] += item.bytes
    return {
        column: " + ".join(
            f"{dtype} {size / 2**30:.2f}"
            for dtype, size in sorted(bytes_by[column].items())
            if column != "other" or size > 2**20
        )
        for column in ("gather", "reduce", "other")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--detail", action="store_true", help="list each collective")
    parser.add_argument("--tiny", action="store_true", help="a small model")
    args = parser.parse_args()
    sizes = TINY if args.tiny else Sizes()
    print(f"8 × H200 (compiled, not run), jax {jax.__version__}, {sizes}\n")
    print("| layout | precision | gather, GiB | reduce, GiB | other, GiB | runs |")
    print("|---|---|---|---|---|---|")
    for case in cases():
        if args.only.lower() not in str(case).lower():
            continue
        start = time.perf_counter()
        found = collectives(compiled(case, sizes))
        row = sums(found, sizes)
        runs = max((x.runs for x in found if x.kind in REDUCTIONS[:2]), default=0)
        cells = [
            f"{case.layout}{case.window}",
            case.precision,
            *row.values(),
            str(runs),
        ]
        print(f"| {' | '.join(cells)} |", flush=True)
        if args.detail:
            for item in sorted(found, key=lambda x: -x.bytes):
                print("  ", item)
            print(f"   {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
