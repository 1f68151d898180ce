"""How training scales: time and memory of 7B and 70B on 8 to 1,024 GPUs, predicted.

    python benchmarks/scale.py                      # the table; about 10 minutes
    python benchmarks/scale.py --layouts            # and other layouts than FSDP
    python benchmarks/scale.py --cache out/scale    # keeps what was read from the programs
    python benchmarks/scale.py --cache out/scale --set network=25e9   # another machine
    python benchmarks/scale.py --check              # on a GPU: predicted and measured

Whole training steps are compiled for H200s, which need not be there: `make gpu-compile`
installs what that takes, and then `.venv-gpu/bin/python benchmarks/scale.py` runs. `_cost.py`
reads kernels and collectives from the compiled programs and divides them by the rates of a
machine; `--set NAME=VALUE,...` changes some of them.
"""

import dataclasses
import functools
import itertools
import json
import pathlib
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import _cost as cost
import _h200 as h200
import _measure as measure
import mpx
from _cost import Machine, from_record
from _measure import giga, number, ratio
from _models import Decoder

# --- the training step ------------------------------------------------------------------

MODELS = {
    "7B": Decoder(32, 4096, 11008, 32, 32),
    "70B": Decoder(80, 8192, 28672, 64, 8),
    "tiny": Decoder(2, 256, 512, 4, 4, vocabulary=1024, length=128),
}


class Precision(NamedTuple):
    """How a model is trained."""

    params: str  # dtype of the parameters
    reduce: str  # dtype in which gradients are summed over devices
    is_fp8: bool  # matmuls where that pays
    is_compressed: bool  # with `flash_adamw`


PRECISIONS = {
    "bf16, AdamW in f32": Precision("float32", "f32", False, False),
    "bf16, flash_adamw": Precision("bfloat16", "compute", False, True),
    "fp8, flash_adamw": Precision("bfloat16", "compute", True, True),
}


def training_step(precision, sizes, place=lambda x, _: x):
    """Returns a step of `((params, state), tokens)` and the function that makes the state."""
    loss = functools.partial(sizes.loss, place=place)
    loss = mpx.amp(loss, reduce_dtype=precision.reduce)
    gradient = jax.value_and_grad(mpx.fp8(loss) if precision.is_fp8 else loss)
    flash, adamw = mpx.optim.flash_adamw(1e-4), optax.adamw(1e-4)

    def step(carry, tokens):
        params, state = carry
        value, grads = gradient(params, tokens)
        if precision.is_compressed:
            return tuple(flash.step(params, state, grads)), value
        updates, state = adamw.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    return step, flash.init if precision.is_compressed else adamw.init


# --- layouts ----------------------------------------------------------------------------

NODE = 8
PARTS = 128  # of a weight under FSDP at most: 4096 columns are 128 groups of 32
LAYOUTS = ("FSDP", "FSDP in a node", "FSDP × TP 8")
# By kind: the axes behind the batch. Between blocks a device has a part of each sequence.
BETWEEN, INSIDE = ("model",), (None, "model")
ACTIVATIONS = {"stream": BETWEEN, "whole": (), "heads": INSIDE, "hidden": INSIDE}


def mesh_of(layout, count):
    """Returns the mesh of a layout: replicas, parts of parameters, parts of matmuls."""
    known = {"FSDP": min(count, PARTS), "FSDP in a node": NODE}
    parts = known.get(layout, count // NODE)
    model = NODE if layout == "FSDP × TP 8" else 1
    sizes = (count // parts // model, parts, model)
    return h200.mesh_of(sizes, ("replica", "data", "model"))


def spec_of(rows, name):
    """Returns how a parameter is sharded; `rows` are those of matmuls that sum over parts."""
    if name in ("q", "k", "v", "gate", "up"):
        return P(None, "data", "model")
    if name in ("o", "down"):
        return rows
    return {"embed": P(None, "data"), "head": P("data", "model")}.get(name, P())


def compiled(sizes, precision, layout, count):
    """Returns a training step compiled for `count` H200s, which need not be there."""
    mesh = mesh_of(layout, count)
    batch = P(("replica", "data"))
    # Groups of 32 in a last axis must not be cut: rows, if they suffice.
    is_cut = mesh.shape["model"] > 1
    rows = P(None, "model", "data") if is_cut else P(None, "data")
    specs = functools.partial(spec_of, rows)

    def place(x, kind):
        sharding = NamedSharding(mesh, P(*batch, *ACTIVATIONS[kind]))
        return lax.with_sharding_constraint(x, sharding)

    def place_state(path, x):
        if isinstance(getattr(x, "sharding", None), NamedSharding):
            return x
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        sharding = NamedSharding(mesh, specs(names[-1]) if names else P())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    params = h200.sharded(sizes.shapes(), mesh, specs, precision.params)
    shape, where = (
        (sizes.sequences * count, sizes.length + 1),
        NamedSharding(mesh, batch),
    )
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=where)
    step, init = training_step(precision, sizes, place)
    if not precision.is_compressed:  # given shapes, that of mpx returns shapes
        init = functools.partial(jax.eval_shape, init)
    with h200.on_mesh(mesh):
        state = jax.tree_util.tree_map_with_path(place_state, init(params))
        where = jax.tree.map(lambda x: x.sharding, (params, state))
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(where, None))
        return h200.compiled(jitted.lower((params, state), tokens))


class Case(NamedTuple):
    """One training step."""

    model: str
    precision: str
    layout: str
    gpus: int


def cases(models, gpus, layouts):
    """Yields every case; in a single node all of FSDP is in a node."""
    for model, count, precision in itertools.product(models, gpus, PRECISIONS):
        for layout in layouts:
            if layout != "FSDP in a node" or int(count) > NODE:
                yield Case(model, precision, layout, int(count))


def program_of(case, cache):
    """Compiles a case and reads the program, or takes it from the cache."""
    name = "-".join(map(str, case)).replace(" ", "-")
    file = pathlib.Path(cache) / f"{name}.json" if cache else None
    if file is not None and file.exists():
        return from_record(json.loads(file.read_text()))
    sizes, precision = MODELS[case.model], PRECISIONS[case.precision]
    program = cost.read(compiled(sizes, precision, case.layout, case.gpus))
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(program._asdict()))
    return program


# --- the table --------------------------------------------------------------------------


def model_flops(sizes):
    """Returns the operations of a step on one GPU, without what is computed again.

    Six for each weight of a matmul and token, and those of causal attention.
    """
    weights = sizes.params - sizes.vocabulary * sizes.width
    attention = 6.0 * sizes.layers * sizes.width * sizes.length
    return (6.0 * weights + attention) * sizes.tokens


HEADER = (
    "model, GPUs", "precision", "layout", "ms a step", "tokens/s a GPU", "MFU, %",
    "GB a GPU", "state, GB", "communication, %",
)  # fmt: skip


def row(case, times, sizes, machine):
    """Returns the cells of a case: from full overlap of communication to none.

    `times` are seconds of kernels and of collectives; `sizes` the peak and the state.
    """
    model, names = MODELS[case.model], [f"{case.model}, {case.gpus}", *case[1:3]]
    gigabytes = [f"{size / 1e9:.1f}" for size in sizes]
    if sizes[0] > machine.capacity:
        return [*names, "does not fit", "–", "–", *gigabytes, "–"]
    fast, slow = max(times), sum(times)
    share = model_flops(model) / machine.peak
    return [
        *names,
        f"{fast * 1e3:.0f}–{slow * 1e3:.0f}",
        f"{model.tokens / slow:.0f}–{model.tokens / fast:.0f}",
        f"{100 * share / slow:.0f}–{100 * share / fast:.0f}",
        *gigabytes,
        f"{100 * times[1] / slow:.0f}",
    ]


def print_table(options, machine):
    """Predicts all cases."""
    jax.config.update("jax_platforms", "cpu")  # nothing is run
    rows, layouts = [], LAYOUTS if options.layouts else LAYOUTS[:1]
    for case in cases(options.models, options.gpus, layouts):
        start = time.perf_counter()
        program = program_of(case, options.cache)
        sizes = program.peak_bytes, program.argument_bytes
        rows.append(row(case, program.seconds(machine), sizes, machine))
        seconds = f"{time.perf_counter() - start:.0f} s"
        print(*case, seconds, file=sys.stderr, flush=True)
    print(f"\nH200s, compiled and not run, jax {jax.__version__}\n")
    print(measure.format_table(HEADER, rows))
    print(f"\nAssumed: {machine}; {MODELS['7B']}; no late GPU, no input pipeline")


# --- on the GPU that is here ------------------------------------------------------------

# With as many layers as fit on one GPU, parameters and states included.
CHECKED = [
    "rates",
    *(f"7B:4:{precision}" for precision in PRECISIONS),
    *(f"70B:1:{precision}" for precision in list(PRECISIONS)[1:]),
]


def run_step(model, layers, precision, options):
    """Compiles, reads and times a training step on the device that is here."""
    sizes, chosen = MODELS[model]._replace(layers=int(layers)), PRECISIONS[precision]
    step, init = training_step(chosen, sizes)
    low = lambda x: x.astype(chosen.params)  # noqa: E731
    make = jax.jit(lambda key: jax.tree.map(low, sizes.init(key)))
    params = make(jax.random.key(0))
    carry, tokens = measure.own_small_buffers((params, init(params))), sizes.batch()
    _, program, record = measure.compile_step(step, carry, tokens)
    del params
    timing = {}
    for steps, group in ((options.warmup, options.warmup), (options.steps, 5)):
        carry, _, timing = measure.time_steps(
            program, carry, [tokens], steps=steps, group=group
        )
    found = {"program": cost.read(program)._asdict()}
    return record | timing | found | {"peak_bytes": measure.peak_bytes()}


DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "fp8": jnp.float8_e4m3fn}


def run_rates(options):
    """Measures the rates of `Machine` that one GPU has."""
    size = 256 if options.tiny else 8192
    length, heads, width = (64, 2, 16) if options.tiny else (4096, 32, 128)
    on_gpu = jax.default_backend() == "gpu"
    # Its tuning of fp8 would take minutes.
    flags: Any = {"xla_gpu_enable_triton_gemm": False} if on_gpu else {}

    def seconds(func, *args):
        # Ten groups: the GPU is as warm as in training.
        program = jax.jit(func).lower(*args).compile(flags)
        return measure.time_call(program, *args, groups=10) / 1e3

    keys = jax.random.split(jax.random.key(0), 3)
    left, right = (jax.random.normal(key, (size, size)) for key in keys[:2])
    rates = {}
    # Both sum over their last axis, as the units of fp8 want it.
    axes = ((1,), (1,)), ((), ())
    for name, dtype in DTYPES.items():
        both, out = (left.astype(dtype), right.astype(dtype)), DTYPES["bf16"]
        out = out if name == "fp8" else None
        dot = functools.partial(lax.dot_general, preferred_element_type=out)
        rates[name] = 2 * size**3 / seconds(lambda a, b, f=dot: f(a, b, axes), *both)
    big = jnp.ones((4 * size, size), jnp.float32)
    rates["memory"] = 2 * big.nbytes / seconds(lambda x: x + 1, big)
    shape = (1, length, heads, width)
    q, k, v = (jax.random.normal(key, shape).astype(jnp.bfloat16) for key in keys)
    kernel = "cudnn" if on_gpu else "xla"
    attention = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, implementation=kernel
    )

    def both_ways(q, k, v):
        out, pull = jax.vjp(attention, q, k, v)
        return pull(out)

    forward = seconds(attention, q, k, v)
    backward = max(seconds(both_ways, q, k, v) - forward, 1e-9)
    flops = 2 * 2 * heads * length**2 * width / 2
    rates |= {"forward": flops / forward, "backward": 2.5 * flops / backward}
    return {"rates": rates}


def print_check(options, machine):
    """Runs everything in processes of their own; returns how many failed."""
    names = ["rates", *(f"tiny:2:{x}" for x in PRECISIONS)] if options.tiny else CHECKED
    runs = measure.run_cases(names, options, shared_cache=False)
    good = {name: run[0] for name, run in runs.items() if "error" not in run[0]}
    rates, rows = good.pop("rates", {}).get("rates", {}), []
    real = dataclasses.replace(machine, **rates)
    lines = [[k, f"{getattr(machine, k):.3g}", f"{v:.3g}"] for k, v in rates.items()]
    if lines:
        print(measure.format_table(["rate", "assumed", "measured"], lines))
    for name, record in good.items():
        program = cost.from_record(record["program"])
        guess, better = (1e3 * program.seconds(x)[0] for x in (machine, real))
        times = guess, better, record["ms"]
        rows.append([name, *(number(x, 1) for x in times)])
        rows[-1] += [number(ratio(x, record["ms"]), 3) for x in (guess, better)]
        rows[-1] += [giga(program.peak_bytes), giga(record["peak_bytes"])]
    header = [
        "step", "predicted, ms", "with measured rates", "measured, ms", "ratio", "ratio",
        "predicted, GB", "measured, GB",
    ]  # fmt: skip
    for record in list(good.values())[:1]:
        measure.print_machine(record)
        print(measure.format_table(header, rows))
    return len(names) - len(good) - bool(rates)


def main():
    options = measure.read_options(
        __doc__,
        "models=7B,70B gpus=8,64,256,1024 layouts cache=str set=, check tiny steps=30 "
        "warmup=20 timeout=120.0",
    )
    rates: dict[str, Any] = dict(pair.partition("=")[::2] for pair in options.set)
    kinds = {x.name: x.type for x in dataclasses.fields(Machine)}
    for name, kind in measure.pick(kinds, rates).items():
        rates[name] = float(rates[name]) if kind is float else int(rates[name])
    machine = Machine(**rates)
    if options.child == "rates":
        return measure.end_child(run_rates(options))
    if options.child is not None:
        model, layers, precision = options.child.split(":")
        return measure.end_child(run_step(model, layers, precision, options))
    if options.check:
        return int(print_check(options, machine) > 0)
    return print_table(options, machine)


if __name__ == "__main__":
    sys.exit(main())
