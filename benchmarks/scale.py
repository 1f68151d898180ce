"""How training scales: time and memory of 7B and 70B on 8 to 1,024 GPUs, predicted.

    python benchmarks/scale.py                      # the table; about 10 minutes
    python benchmarks/scale.py --layouts --all      # and other layouts than FSDP
    python benchmarks/scale.py --cache out/scale    # keeps what was read from the programs
    python benchmarks/scale.py --cache out/scale --set network=25e9   # another machine
    python benchmarks/scale.py --models 7B --gpus 8 --detail          # where the time goes
    python benchmarks/scale.py --known              # beside times of other benchmarks
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
from typing import NamedTuple

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
    """How a model is trained.

    Attributes:
        params: The dtype of the parameters.
        reduce: The dtype in which gradients are summed over devices.
        is_fp8: Whether matmuls are fp8 where that pays.
        is_compressed: Whether the optimizer is `flash_adamw`.
    """

    params: str
    reduce: str
    is_fp8: bool
    is_compressed: bool


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
PARTS = 128
"""Into how many parts FSDP cuts a weight at most: 4096 columns are 128 groups of 32."""
LAYOUTS = ("FSDP", "FSDP in a node", "FSDP × TP 8")
ACTIVATIONS = {
    "stream": ("model",),
    "whole": (),
    "heads": (None, "model"),
    "hidden": (None, "model"),
}
"""By kind: the axes behind the batch. Between blocks a device has a part of each sequence."""


def mesh_of(layout, count):
    """Returns the mesh of a layout: replicas, parts of parameters, parts of matmuls."""
    parts = {"FSDP": min(count, PARTS), "FSDP in a node": NODE}.get(
        layout, count // NODE
    )
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
    """Returns a training step compiled for so many H200s, which need not be there."""
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
    tokens = jax.ShapeDtypeStruct(
        (sizes.sequences * count, sizes.length + 1),
        jnp.int32,
        sharding=NamedSharding(mesh, batch),
    )
    step, init = training_step(precision, sizes, place)
    if not precision.is_compressed:  # given shapes, that of mpx returns shapes
        init = functools.partial(jax.eval_shape, init)
    with h200.on_mesh(mesh):
        state = jax.tree_util.tree_map_with_path(place_state, init(params))
        where = jax.tree.map(lambda x: x.sharding, (params, state))
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(where, None))
        return h200.compiled(jitted.lower((params, state), tokens))


class Case(NamedTuple):
    """One training step: model, precision, layout and the number of GPUs."""

    model: str
    precision: str
    layout: str
    gpus: int

    def __str__(self):
        return f"{self.model}, {self.precision}, {self.layout}, {self.gpus} GPUs"


def cases(models, gpus, layouts):
    """Yields every case; in a single node all of FSDP is in a node."""
    for model, count, precision in itertools.product(models, gpus, PRECISIONS):
        for layout in layouts:
            if layout != "FSDP in a node" or count > NODE:
                yield Case(model, precision, layout, count)


def program_of(case, cache):
    """Compiles a case and reads the program, or takes it from the cache."""
    file = pathlib.Path(cache) / f"{case}.json".replace(" ", "-") if cache else None
    if file is not None and file.exists():
        return from_record(json.loads(file.read_text()))
    sizes, precision = MODELS[case.model], PRECISIONS[case.precision]
    program = cost.read(compiled(sizes, precision, case.layout, case.gpus))
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(program._asdict()))
    return program


# --- the table --------------------------------------------------------------------------


class Prediction(NamedTuple):
    """What a case costs on each GPU: seconds of kernels and of collectives, bytes."""

    case: Case
    compute: float
    communication: float
    peak_bytes: int
    argument_bytes: int

    @property
    def seconds(self):
        """The time of a step if communication is hidden as far as possible, or not at all."""
        both = self.compute, self.communication
        return max(both), sum(both)

    def fits(self, machine):
        return self.peak_bytes <= machine.capacity


def model_flops(sizes):
    """Returns the operations of a step on one GPU, without what is computed again.

    Six for each weight of a matmul and token, and those of causal attention.
    """
    weights = sizes.params - sizes.vocabulary * sizes.width
    attention = 6.0 * sizes.layers * sizes.width * sizes.length
    return (6.0 * weights + attention) * sizes.tokens


def best(found, machine):
    """Returns the layout that fits and is fastest without overlap, or the smallest one."""
    fitting = [x for x in found if x.fits(machine)]
    if fitting:
        return min(fitting, key=lambda x: x.seconds[1])
    return min(found, key=lambda x: x.peak_bytes)


HEADER = (
    "model, GPUs", "precision", "layout", "ms a step", "tokens/s a GPU", "MFU, %",
    "GB a GPU", "of which state", "communication, %",
)  # fmt: skip


def row(x, machine):
    """Returns the cells of a case: from full overlap to none."""
    sizes = MODELS[x.case.model]
    names = [f"{x.case.model}, {x.case.gpus}", x.case.precision, x.case.layout]
    gigabytes = [f"{size / 1e9:.1f}" for size in (x.peak_bytes, x.argument_bytes)]
    if not x.fits(machine):
        return [*names, "does not fit", "–", "–", *gigabytes, "–"]
    fast, slow = x.seconds
    share = model_flops(sizes) / machine.peak
    return [
        *names,
        f"{fast * 1e3:.0f}–{slow * 1e3:.0f}",
        f"{sizes.tokens / slow:.0f}–{sizes.tokens / fast:.0f}",
        f"{100 * share / slow:.0f}–{100 * share / fast:.0f}",
        *gigabytes,
        f"{100 * x.communication / slow:.0f}",
    ]


def print_detail(case, program, machine):
    """Says where time and memory go."""
    sizes, precision = MODELS[case.model], PRECISIONS[case.precision]
    print(f"\n{case}")
    for kind, flops in program.flops().items():
        print(f"  {flops / 1e12:8.1f} TFLOP {kind}")
    for kind, seconds in program.time_by_kind(machine).items():
        print(f"  {seconds * 1e3:8.1f} ms {kind}")
    groups = {}
    for x in program.transfers:
        groups.setdefault((x.kind, x.dtype, x.devices, x.nodes), []).append(x)
    for (kind, dtype, devices, nodes), found in sorted(groups.items()):
        seconds = sum(x.seconds(machine) for x in found)
        sent = sum(x.runs * x.bytes for x in found)
        if seconds > 1e-4:
            what = f"{kind} {dtype}, {devices} GPUs in {nodes} nodes"
            print(f"  {seconds * 1e3:8.1f} ms {what}: {sent / 1e9:.2f} GB")
    wide = 4 if precision.params == "float32" else 2
    stream = sizes.layers * sizes.tokens * sizes.width * wide
    parts = {
        "parameters and optimizer": program.argument_bytes,
        "inputs of the layers, kept for the backward pass": stream,
        "gradients, gathered weights, logits and others": program.peak_bytes
        - program.argument_bytes
        - stream,
    }
    for name, size in parts.items():
        print(f"  {size / 1e9:8.2f} GB {name}")


def print_table(options, machine):
    """Predicts all cases and prints the best layout of each, or all of them."""
    jax.config.update("jax_platforms", "cpu")  # nothing is run
    found = {}
    layouts = LAYOUTS if options.layouts else LAYOUTS[:1]
    for case in cases(options.models, options.gpus, layouts):
        start = time.perf_counter()
        program = program_of(case, options.cache)
        times = program.compute(machine), program.communication(machine)
        sizes = program.peak_bytes, program.argument_bytes
        key = case.model, case.gpus, case.precision
        found.setdefault(key, []).append(Prediction(case, *times, *sizes))
        if options.detail:
            print_detail(case, program, machine)
        told = f"{case}: {time.perf_counter() - start:.0f} s"
        print(told, file=sys.stderr, flush=True)
    rows = []
    for several in found.values():
        shown = several if options.all else [best(several, machine)]
        rows += [row(x, machine) for x in shown]
    print(f"\nH200s, compiled and not run, jax {jax.__version__}\n")
    print(measure.format_table(HEADER, rows))
    print("\nAssumptions:")
    for field in dataclasses.fields(machine):
        print(f"  {field.name} = {getattr(machine, field.name):g}")
    sizes = MODELS["7B"]
    print(
        f"  {sizes.sequences} × {sizes.length} tokens a GPU; layers scanned and "
        "rematerialised; no late GPU, no input pipeline\n"
        f"  FSDP cuts a weight into {PARTS} parts at most, and has copies beyond"
    )


# --- beside times that other benchmarks measured ----------------------------------------

# Of docs/performance.md, in ms: `benchmarks/fp8.py --sections mlp,tower,lm` on one H200.
KNOWN = {
    ("mlp", "bf16"): 20.1,
    ("mlp", "fp8"): 12.3,
    ("tower", "bf16"): 97.2,
    ("tower", "fp8"): 61.8,
    ("lm", "bf16"): 196.5,
    ("lm", "fp8"): 140.1,
}


def print_known(machine):
    """Predicts the programs of `fp8.py` and compares with what was measured there."""
    import fp8

    rows = []
    for (section, mode), measured in KNOWN.items():
        built = []

        def shapes(section=section, mode=mode, built=built):
            step, *arguments = fp8.build(section, mode)
            built.append(step)
            return arguments

        with h200.on_mesh(h200.mesh_of((1,), "devices")):
            arguments = jax.eval_shape(shapes)
        program = cost.read(h200.compile_for_one(built[0], *arguments))
        guess = 1e3 * program.compute(machine)
        parts = program.time_by_kind(machine).items()
        told = ", ".join(f"{kind} {part * 1e3:.1f}" for kind, part in parts)
        cells = number(guess, 1), number(measured, 1), number(guess / measured)
        rows.append([f"{section} {mode}", *cells, told])
        print(*rows[-1], file=sys.stderr, flush=True)
    header = ["program", "predicted, ms", "measured, ms", "ratio", "of which"]
    print(measure.format_table(header, rows))


# --- on the GPU that is here ------------------------------------------------------------

# By model: so many layers that parameters, states and all else fit on one GPU.
CHECKED = [
    ("7B", 4, "bf16, AdamW in f32"),
    ("7B", 4, "bf16, flash_adamw"),
    ("7B", 4, "fp8, flash_adamw"),
    ("70B", 1, "bf16, flash_adamw"),
    ("70B", 1, "fp8, flash_adamw"),
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
    for steps, group in ((options.warmup, options.warmup), (options.steps, 5)):
        carry, losses, timing = measure.time_steps(
            program, carry, [tokens], steps=steps, group=group
        )
    found = {"program": cost.read(program)._asdict(), "loss": float(losses[-1])}
    return record | timing | found | {"peak_bytes": measure.peak_bytes()}


def run_rates(options):
    """Measures the rates of `Machine` that one GPU has."""
    size = 256 if options.tiny else 8192
    length, heads, width = (64, 2, 16) if options.tiny else (4096, 32, 128)
    on_gpu = jax.default_backend() == "gpu"
    # Its tuning of fp8 would take minutes.
    options = {"xla_gpu_enable_triton_gemm": False} if on_gpu else {}

    def seconds(func, *args):
        # Ten groups: the GPU is as warm as in training.
        program = jax.jit(func).lower(*args).compile(options)
        return measure.time_call(program, *args, groups=10) / 1e3

    keys = jax.random.split(jax.random.key(0), 3)
    left, right = (jax.random.normal(key, (size, size)) for key in keys[:2])
    rates = {}
    for name, dtype, out in (
        ("f32", jnp.float32, None),
        ("bf16", jnp.bfloat16, None),
        ("fp8", jnp.float8_e4m3fn, jnp.bfloat16),
    ):
        # Both sum over their last axis, as the units of fp8 want it.
        axes = ((1,), (1,)), ((), ())
        matmul = functools.partial(
            lax.dot_general, dimension_numbers=axes, preferred_element_type=out
        )
        both = left.astype(dtype), right.astype(dtype)
        rates[name] = 2 * size**3 / seconds(matmul, *both)
    big = jnp.ones((4 * size, size), jnp.float32)
    rates["memory"] = 2 * big.nbytes / seconds(lambda x: x + 1, big)
    shape = (1, length, heads, width)
    q, k, v = (jax.random.normal(key, shape).astype(jnp.bfloat16) for key in keys)
    attention = functools.partial(
        jax.nn.dot_product_attention,
        is_causal=True,
        implementation="cudnn" if on_gpu else "xla",
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
    checked = [("tiny", 2, x) for x in PRECISIONS] if options.tiny else CHECKED
    names = ["rates", *(":".join(map(str, case)) for case in checked)]
    runs = measure.run_cases(names, options, shared_cache=False)
    good = {name: run[0] for name, run in runs.items() if "error" not in run[0]}
    rates, rows = good.pop("rates", {}).get("rates", {}), []
    real = dataclasses.replace(machine, **rates)
    lines = [[k, f"{getattr(machine, k):.3g}", f"{v:.3g}"] for k, v in rates.items()]
    if lines:
        print(measure.format_table(["rate", "assumed", "measured"], lines))
    for name, record in good.items():
        program = cost.from_record(record["program"])
        guess, better = (1e3 * program.compute(x) for x in (machine, real))
        times = guess, better, record["ms"]
        rows.append([name, *(number(x, 1) for x in times)])
        rows[-1] += [number(ratio(x, record["ms"]), 3) for x in (guess, better)]
        rows[-1] += [giga(program.peak_bytes), giga(record["peak_bytes"])]
        parts = program.time_by_kind(machine).items()
        told = ", ".join(f"{kind} {part * 1e3:.1f}" for kind, part in parts)
        print(f"  {name}: predicted {guess:.1f} ms: {told}")
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
        "models=7B,70B gpus=8,64,256,1024 layouts all detail cache=str set=, known "
        "check tiny steps=30 warmup=20 timeout=120.0 json=str",
    )
    fields = {x.name: type(x.default) for x in dataclasses.fields(Machine)}
    rates = dict(pair.partition("=")[::2] for pair in options.set)
    kinds = measure.pick(fields, rates)
    machine = Machine(**{name: kinds[name](float(x)) for name, x in rates.items()})
    if options.child == "rates":
        return measure.end_child(run_rates(options))
    if options.child is not None:
        return measure.end_child(run_step(*options.child.split(":"), options))
    if options.check:
        return int(print_check(options, machine) > 0)
    if options.known:
        print_known(machine)
    else:
        print_table(options, machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
