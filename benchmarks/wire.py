"""What goes over the wire: the collectives of a language model with the shapes of 7B.

    python benchmarks/wire.py                     # everything; about 10 minutes
    python benchmarks/wire.py --only fsdp         # one row of the table
    python benchmarks/wire.py --tiny              # a small model
    python benchmarks/wire.py --json FILE         # writes what was found, too

The gradient step is compiled for eight H200s, which need not be there, and its collectives
are read from what the compiler made. Needs Linux and the CUDA plugin of JAX: `make
gpu-compile` installs it, and then `.venv-gpu/bin/python benchmarks/wire.py` runs.

The model has the 32 layers, widths and vocabulary of Llama 2 7B, scanned and rematerialised,
f32 parameters and eight sequences a step. `gather` and `reduce` are the GiB that one device
sends in a step for weights and for their gradients. What else is sent is in `other`: sums
of activations between tensor-parallel devices, maxima of fp8, the loss.
"""

import collections
import functools
import os
from typing import Any, NamedTuple

# Nothing is run: the plugin must not look for a GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import _h200 as h200
import _measure as measure
import mpx
from _models import Decoder
from mpx.inspect import collectives

# A length that is no width of a weight, nor a part of one, tells activations.
LLAMA = Decoder(32, 4096, 11008, 32, 32, 32000, sequences=8, length=3072)
TINY = Decoder(2, 512, 1536, 4, 4, 4096, sequences=8, length=320)
MICROBATCHES = 4
COLUMNS, ROWS = ("q", "k", "v", "gate", "up"), ("o", "down")


def spec_of(layout, name):
    """Returns how a parameter is sharded."""
    data = None if layout == "DP" else "data"
    model = "model" if layout == "FSDP×TP" else None
    if name in COLUMNS:
        return P(None, data, model)
    if name in ROWS:
        return P(None, model, data)
    return {"embed": P(None, data), "head": P(data, model)}.get(name, P())


# --- the cases ------------------------------------------------------------------------

LAYOUTS = ("DP", "FSDP", "FSDP×TP")
MESHES = {"FSDP×TP": ((4, 2), ("data", "model"))}
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

    def __str__(self):
        return f"{self.layout}{self.window}, {self.precision}"


EACH, ONCE = " ×4 each", " ×4 once"


def cases():
    for layout in LAYOUTS:
        yield from (Case(layout, precision) for precision in PRECISIONS)
    for layout in ("DP", "FSDP"):
        yield Case(layout, "bf16, sums in f32", EACH)
        for precision in ("bf16, sums in f32", "bf16"):
            yield Case(layout, precision, ONCE)
    yield Case("FSDP", "fp8, sums in f32", ONCE)


def compiled(case, sizes):
    """Returns the gradient step of a case, compiled for eight H200s."""
    shape, names = MESHES.get(case.layout, ((8,), "data"))
    mesh = Mesh(np.array(h200.devices(8)).reshape(shape), names)

    def sharded(path, shape):
        sharding = NamedSharding(mesh, spec_of(case.layout, path[-1].key))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    params = jax.tree_util.tree_map_with_path(sharded, sizes.shapes(), is_leaf=is_shape)
    parts = MICROBATCHES if case.window else 1
    rows = NamedSharding(mesh, P("data"))
    shape = (sizes.sequences * parts, sizes.length + 1)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows)
    by_mpx = case.window == ONCE
    # The axis is then that of the shards.
    stream = NamedSharding(mesh, P()) if by_mpx else rows

    place = lambda x: lax.with_sharding_constraint(x, stream)  # noqa: E731
    func = step_of(case, functools.partial(sizes.loss, place=place), parts, by_mpx)
    shardings = jax.tree.map(lambda x: x.sharding, params)
    # Without timing, XLA finds no tiles for some odd shapes of Triton's matmuls.
    options = h200.compiler_options() | {"xla_gpu_enable_triton_gemm": False}
    with h200.described(), jax.set_mesh(mesh):
        lowered = jax.jit(func, out_shardings=shardings).lower(params, tokens)
        return lowered.compile(options)


def step_of(case, loss, parts, by_mpx):
    """Returns the function of parameters and tokens that returns the gradients."""
    multiply, reduce = PRECISIONS[case.precision]
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

REDUCTIONS = ("reduce-scatter", "all-reduce")


def sums(found, sizes):
    """Returns dtypes and GiB: of weights, of their gradients, and of the rest."""
    bytes_by = collections.defaultdict(collections.Counter)
    for item in found:
        is_activation = sizes.length in item.shape
        column = "gather" if item.kind == "all-gather" else "reduce"
        if is_activation or item.bytes < 2**16 * item.runs:
            column = "other"
        bytes_by[column][item.dtype] += item.bytes
    return [
        " + ".join(
            f"{dtype} {size / 2**30:.2f}"
            for dtype, size in sorted(bytes_by[column].items())
            if column != "other" or size > 2**20
        )
        for column in ("gather", "reduce", "other")
    ]


def main():
    args = measure.read_options(__doc__, "only= tiny json=str")
    sizes = TINY if args.tiny else LLAMA
    print(f"8 × H200 (compiled, not run), jax {jax.__version__}, {sizes}")
    columns = ("gather, GiB", "reduce, GiB", "other, GiB")
    measure.print_head("layout", "precision", *columns, "runs")
    records = {}
    for case in cases():
        if args.only.lower() in str(case).lower():
            found = collectives(compiled(case, sizes))
            runs = max((x.runs for x in found if x.kind in REDUCTIONS), default=0)
            names = [f"{case.layout}{case.window}", case.precision]
            sent = sums(found, sizes)
            measure.print_row(*names, *sent, runs)
            record = dict(zip(("gather", "reduce", "other"), sent, strict=True))
            more = {"runs": runs, "environment": measure.environment()}
            records[" | ".join(names)] = [record | more]
            if args.json:
                measure.write_json(args.json, records)


if __name__ == "__main__":
    main()
