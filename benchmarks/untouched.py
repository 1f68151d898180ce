"""Trains models of other people, as they are, in every mode of mpx.

    python benchmarks/untouched.py --clones FOLDER               # every model, every mode
    python benchmarks/untouched.py --clones FOLDER --models nanodo-405m --seeds 0
    python benchmarks/untouched.py --clones FOLDER --models nanodo-tiny --steps 20  # a CPU

FOLDER has the clones of the models that are on no package index; the script prints the
commands for those that are missing. Every mode trains the same model on the same data, in
a process of its own: `f32` (matmuls in TF32), `own` (the model's bf16 option or, if it has
none, parameters and inputs that are cast by hand), `amp`, `residuals` (amp with residuals
in int8), `fp8` (around amp), `flash` (amp with bf16 parameters and compressed AdamW), `all`
(fp8 and flash), `release` (all, with gradient release). Without `--seeds` it only times;
with them it trains `--train` steps for each. `--profile` prints the kernels that take most
of the time. `--largest` measures nothing: it compiles for an H200, with JAX's plugin for CUDA
but without a GPU, and prints the largest batches that fit into 95 % of its memory. `--json
FILE` writes what was measured.
"""

import collections
import functools
import importlib
import itertools
import pathlib
import re
import statistics
import sys
import types
from pydoc_data import topics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import _h200
import _measure as measure
import mpx
from _measure import giga, number, percent, ratio

# The newest commits when this was written: clone, and check out.
CLONES = {
    "nanodo": ("google-deepmind/nanodo", "10aefde"),
    "bonsai": ("jax-ml/bonsai", "3628425"),
    "big_vision": ("google-research/big_vision", "0127fb6"),
    "vmoe": ("google-research/vmoe", "942a78b"),
    "vision_transformer": ("google-research/vision_transformer", "c6de1e5"),
}
MODES = ("f32", "own", "amp", "residuals", "fp8", "flash", "all", "release")
RATE = 3e-4
MEMORY = 0.95 * 141e9  # bytes that JAX may use, if it is asked to, on an H200
WIDE = 8192  # rows and columns of the matmul whose rate is the limit; 256 on a CPU


class Task(NamedTuple):
    """A model and what it is trained on.

    Attributes:
        init: Makes the parameters from a key.
        loss: A function of parameters and batch; `own` is the model's own bf16.
        batches: Makes batches from a seed, for ever.
        items: The tokens or images of a batch.
    """

    init: Any
    loss: Any
    batches: Any
    items: int
    own: Any = None


# --- data -------------------------------------------------------------------------------


def text_batches(sequences, length, seed):
    """Yields pieces of Python's language reference, as bytes."""
    text = "\n".join(text for _, text in sorted(topics.topics.items())).encode()
    codes = np.frombuffer(text, np.uint8).astype(np.int32)
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(len(codes) - length - 1, size=sequences)
        yield np.stack([codes[i : i + length + 1] for i in starts])


def image_batches(count, size, channels, classes, seed):
    """Yields images with labels: noise around a pattern for each class."""
    patterns = np.random.default_rng(0).normal(size=(classes, 8, 8, channels))

    @jax.jit
    def draw(key):
        label, noise = jax.random.split(key)
        labels = jax.random.randint(label, (count,), 0, classes)
        large = jnp.asarray(patterns, jnp.float32)[labels]
        large = large.repeat(size // 8, axis=1).repeat(size // 8, axis=2)
        return large + jax.random.normal(noise, large.shape), labels

    for index in itertools.count():
        yield draw(jax.random.fold_in(jax.random.key(seed), index))


def next_token_loss(logits, tokens):
    each = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.mean(each)


# --- the models -------------------------------------------------------------------------


def nanodo(width, layers, heads, sequences, length):
    """A decoder of Flax Linen, which writes attention as einsums and a mask."""
    model = importlib.import_module("nanodo.model")

    shape = (width, heads, length, layers, 256, 4 * width)

    def make(dtype):
        config = model.DoConfig(*shape, dtype=dtype, fsdp_enabled=False)
        return model.TransformerDo(config)

    def loss(module, params, tokens):
        return next_token_loss(module.apply(params, tokens[:, :-1]), tokens)

    f32, bf16 = make(jnp.float32), make(jnp.bfloat16)
    return Task(
        lambda key: f32.init(key, jnp.zeros((1, length), jnp.int32)),
        functools.partial(loss, f32),
        functools.partial(text_batches, sequences, length),
        sequences * length,
        functools.partial(loss, bf16),
    )


def of_nnx(make_model, call, batches, items):
    """Makes a task of an NNX model; its parameters are a state."""
    from flax import nnx

    graph, _, rest = nnx.split(
        nnx.eval_shape(lambda: make_model(nnx.Rngs(0))), nnx.Param, ...
    )
    if jax.tree.leaves(rest):
        raise ValueError(f"the model has more than parameters: {rest}")

    def init(key):
        return nnx.state(make_model(nnx.Rngs(key)), nnx.Param)

    def loss(params, batch):
        return call(nnx.merge(graph, params, rest), batch)

    return Task(init, loss, batches, items)


def qwen3(layers, width, sequences, length):
    """Bonsai's Qwen3, which reads keys and values from a cache in training, too."""
    model = importlib.import_module("bonsai.models.qwen3.modeling")
    config = model.ModelConfig(
        layers, 256, width, 3 * width, width // 64, 128, width // 128, 1_000_000, 8, 1e4,
        1e-6, True,
    )  # fmt: skip

    def call(module, tokens):
        shape = (sequences, length)
        dtype = module.embedder.embedding[...].dtype
        cache = model.init_cache(config, sequences, length, 0, dtype=dtype)
        logits = module(
            tokens[:, :-1], cache=cache, segment_ids=jnp.ones(shape, jnp.int32)
        )
        return next_token_loss(logits, tokens)

    batches = functools.partial(text_batches, sequences, length)
    make = lambda rngs: model.Qwen3(config, rngs=rngs)  # noqa: E731
    return of_nnx(make, call, batches, sequences * length)


def convnext(name, count, size=224):
    """Bonsai's ConvNeXt."""
    model = importlib.import_module("bonsai.models.convnext.modeling")
    config = getattr(model.ModelConfig, name)()

    def call(module, batch):
        logits = module(batch[0], rngs=jax.random.key(0), train=False)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    batches = functools.partial(image_batches, count, size, 3, 100)
    make = lambda rngs: model.ConvNeXt(config, rngs=rngs)  # noqa: E731
    return of_nnx(make, call, batches, count)


def unet(count, size, features=(64, 128, 256, 512, 1024)):
    """Bonsai's U-Net as a denoiser: it learns the noise that was added."""
    model = importlib.import_module("bonsai.models.unet.modeling")
    config = model.ModelConfig(3, 3, features)

    def call(module, batch):
        noise = jax.random.normal(jax.random.key(0), batch[0].shape, batch[0].dtype)
        return jnp.mean((module(batch[0] + noise) - noise) ** 2)

    batches = functools.partial(image_batches, count, size, 3, 100)
    make = lambda rngs: model.UNet(config, rngs=rngs)  # noqa: E731
    return of_nnx(make, call, batches, count)


def big_vision_vit(variant, count, size):
    """The ViT of big_vision, in Flax Linen."""
    # It reads files through TensorFlow, which a training step does not need. Flax looks
    # for the real one.
    importlib.import_module("flax.io")
    sys.modules.setdefault("tensorflow", types.ModuleType("tensorflow"))
    for name in ("tensorflow.io", "tensorflow.io.gfile"):
        sys.modules.setdefault(name, types.ModuleType(name))
    model = importlib.import_module("big_vision.models.vit")

    def loss(module, params, batch):
        logits, _ = module.apply(params, batch[0])
        logits = logits.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    f32, bf16 = (
        model.Model(num_classes=100, variant=variant, dtype_mm=dtype)
        for dtype in ("float32", "bfloat16")
    )
    return Task(
        lambda key: f32.init(key, jnp.zeros((1, size, size, 3))),
        functools.partial(loss, f32),
        functools.partial(image_batches, count, size, 3, 100),
        count,
        functools.partial(loss, bf16),
    )


def vmoe(width, layers, heads, experts, count, size, patch=16):
    """V-MoE: a ViT in Flax Linen whose every second MLP is one of experts, two a token."""
    model = importlib.import_module("vmoe.nn.vit_moe")
    # As its configurations have it, with the noise of the router.
    loads = {"importance_loss_weight": 0.005, "load_loss_weight": 0.005}
    router = {"num_selected_experts": 2, "noise_std": 1 / experts, **loads}
    router["dispatcher"] = {
        "name": "einsum", "capacity_factor": 1.05, "batch_priority": False,
    }  # fmt: skip
    experts = {
        "layers": range(1, layers, 2), "num_experts": experts, "split_rngs": True,
        "group_size": 4 * (size // patch) ** 2, "router": router,
    }  # fmt: skip

    def make(dtype):
        encoder = {"num_layers": layers, "mlp_dim": 4 * width, "num_heads": heads}
        encoder |= {"moe": {**experts, "dtype": dtype}, "dtype": dtype}
        return model.VisionTransformerMoe(
            100, (patch, patch), width, encoder, "gap", head_kernel_zero_init=False
        )

    def loss(module, params, batch):
        noise = {"gating": jax.random.key(0)}
        logits, metrics = module.apply(params, batch[0], rngs=noise)
        logits = logits.astype(jnp.float32)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])
        return each.mean() + metrics["auxiliary_loss"].mean()

    f32, bf16 = make(None), make(jnp.bfloat16)
    return Task(
        lambda key: f32.init(
            {"params": key, "gating": key}, jnp.zeros((4, size, size, 3))
        ),
        functools.partial(loss, f32),
        functools.partial(image_batches, count, size, 3, 100),
        count,
        functools.partial(loss, bf16),
    )


# Each makes a task with so many times its batch.
MODELS = {
    "nanodo-43m": lambda n=1: nanodo(768, 6, 12, 32 * n, 512),
    "nanodo-405m": lambda n=1: nanodo(1024, 32, 16, 8 * n, 1024),
    # It needs 104 of the 141 GB of an H200 in f32.
    "nanodo-2.5b": lambda n=1: nanodo(2560, 32, 20, 8 * n, 1024),
    "big_vision-vit-b": lambda n=1: big_vision_vit("B/16", 128 * n, 224),
    "bonsai-qwen3": lambda n=1: qwen3(12, 1024, 8 * n, 1024),
    "bonsai-convnext": lambda n=1: convnext("convnext_tiny_224", 128 * n),
    "bonsai-unet": lambda n=1: unet(16 * n, 256),
    "vmoe-b": lambda n=1: vmoe(768, 12, 12, 8, 64 * n, 224),
}
DEFAULT = ",".join(MODELS)
MODELS |= {
    "nanodo-tiny": lambda n=1: nanodo(64, 2, 4, 4 * n, 64),
    "bonsai-qwen3-tiny": lambda n=1: qwen3(2, 128, 2 * n, 32),
    "bonsai-unet-tiny": lambda n=1: unet(2 * n, 32, (8, 16, 32, 64, 128)),
    "big_vision-vit-tiny": lambda n=1: big_vision_vit("mu/16", 4 * n, 32),
    "vmoe-tiny": lambda n=1: vmoe(64, 4, 2, 4, 8 * n, 32, patch=8),
}


# --- the modes --------------------------------------------------------------------------


def by_hand(loss):
    """Casts parameters and batch, as one does by hand."""
    low = functools.partial(mpx.cast_tree, dtype=jnp.bfloat16)
    return lambda params, batch: loss(low(params), low(batch)).astype(jnp.float32)


def make_step(mode, task):
    """Returns what makes the state from parameters, and a step."""
    loss = task.loss
    if mode == "own":
        loss = task.own or by_hand(loss)
    elif mode != "f32":
        loss = mpx.amp(loss, residuals="int8" if mode == "residuals" else None)
    if mode in ("fp8", "all", "release"):
        loss = mpx.fp8(loss)
    flash: Any = mpx.optim.flash_adamw(RATE, weight_decay=1e-4)
    adamw = optax.adamw(RATE)

    def plain(state, batch):
        value, grads = jax.value_and_grad(loss)(state[0], batch)
        updates, opt_state = adamw.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt_state), value

    def compressed(state, batch):
        value, grads = jax.value_and_grad(loss)(state[0], batch)
        return tuple(flash.step(*state, grads)), value

    def released(state, batch):
        result = mpx.optim.release(loss, flash)(*state, batch)
        return (result.params, result.state), result.value

    if mode in ("flash", "all", "release"):
        step = released if mode == "release" else compressed
        return lambda params: tuple(flash.init_from(params)), step
    return lambda params: (params, adamw.init(params)), plain


def run_mode(case, options):
    """Times one mode of one model, and trains it from several seeds."""
    measure.start_child(options.child_cache)
    if case == "rate":
        measure.TURN.take()
        return matmul_rate()
    name, _, mode = case.partition(":")
    task = MODELS[name]()
    start, step = make_step(mode, task)
    # Not in one program: to compile that takes longer than the step.
    begin = lambda seed: start(task.init(jax.random.key(seed)))  # noqa: E731
    params, state, batch = jax.eval_shape(
        lambda: (task.init(jax.random.key(0)), begin(0), next(task.batches(0)))
    )
    flops = count_flops(task, params, batch)
    run, record = measure.compile_step(step, state, batch)
    count = sum(x.size for x in jax.tree.leaves(params))
    record |= {"flops": flops, "params": count, "items": task.items}
    state = measure.own_small_buffers(begin(0))
    source = task.batches(0)
    batches = [jax.device_put(next(source)) for _ in range(2)]
    for steps in (options.group, options.steps):
        state, _, timing = measure.time_steps(
            run, state, batches, steps=steps, group=options.group
        )
    record |= timing | {"peak_bytes": measure.peak_bytes()}
    if options.profile:
        state, record["kernels"] = measure.profile_steps(run, state, batches)
    record["losses"] = {}
    for seed in options.seeds:
        del state  # before the next one is made
        state = measure.own_small_buffers(begin(seed))
        source, losses = task.batches(seed), []
        for _ in range(options.train):
            state, value = run(state, next(source))
            losses.append(value)
        record["losses"][seed] = statistics.mean(map(float, losses[-10:]))
    return record


def plan_mode(case):
    """Compiles one mode for an H200 with two batches; returns the largest that would fit."""
    name, _, mode = case.partition(":")
    mesh = Mesh(np.array(_h200.devices(1)), ("x",))
    place = NamedSharding(mesh, PartitionSpec())
    types = lambda tree: jax.tree.map(  # noqa: E731
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree
    )
    sizes, rows = [], 0
    for times in (2, 1):
        task = MODELS[name](times)
        start, step = make_step(mode, task)
        state = jax.eval_shape(lambda key: start(task.init(key)), jax.random.key(0))  # noqa: B023
        batch = next(task.batches(0))
        rows = len(jax.tree.leaves(batch)[0])
        with _h200.described(), jax.set_mesh(mesh):
            lowered = jax.jit(step, donate_argnums=0).lower(types(state), types(batch))
            # Without timing, XLA finds no tiles for some of Triton's matmuls.
            options = {"xla_gpu_enable_triton_gemm": False}
            program = lowered.compile(_h200.compiler_options() | options)
        sizes.append(measure.planned_memory(program)["compiled_bytes"])
    each = (sizes[0] - sizes[1]) / rows
    return {"largest": int(rows + (MEMORY - sizes[1]) / each), "bytes": sizes}


def count_flops(task, params, batch):
    """Returns the operations of all matmuls and convolutions of a step in f32."""
    gradient = jax.make_jaxpr(jax.value_and_grad(task.loss))(params, batch)
    total = 0
    for equation, runs in measure.equations(gradient):
        numbers, each = equation.params.get("dimension_numbers"), 0
        if equation.primitive.name == "dot_general":
            (summed, _), _ = numbers
            left = equation.invars[0].aval.shape
            each = np.prod([left[i] for i in summed])
        elif equation.primitive.name == "conv_general_dilated":
            kernel = equation.invars[1].aval
            each = kernel.size / kernel.shape[numbers.rhs_spec[0]]
        total += 2 * runs * each * equation.outvars[0].aval.size if each else 0
    return float(total)


def matmul_rate():
    """Returns the rate of a large bf16 matmul, in operations a second."""
    wide = 256 if jax.default_backend() == "cpu" else WIDE
    x = jax.random.normal(jax.random.key(0), (wide, wide), jnp.bfloat16)
    ms = measure.time_call(jax.jit(jnp.dot), x, x)
    return {"ms": ms, "rate": 2 * wide**3 / ms * 1e3}


# --- the table --------------------------------------------------------------------------


def find_clones(folder):
    """Puts the clones on the path; prints the commands for those that are missing."""
    missing = []
    for name, (source, commit) in CLONES.items():
        if (pathlib.Path(folder) / name).is_dir():
            sys.path.insert(0, str(pathlib.Path(folder) / name))
        else:
            where = f"{folder}/{name}"
            missing.append(f"git clone https://github.com/{source} {where} && "
                           f"git -C {where} checkout {commit}")  # fmt: skip
    if missing:
        print("Missing models:", *missing, sep="\n  ")


def print_model(name, best, rate):
    """Prints the modes of one model."""
    rows = [record for case, record in best.items() if case.startswith(f"{name}:")]
    if not rows:
        return
    base = rows[0]
    count = base["params"] / 1e6
    print(f"\n{name}: {count:.0f}M parameters, {base['items']} items a step\n")
    measure.print_columns(
        rows,
        ("mode", lambda r: r["case"].partition(":")[2]),
        ("ms", lambda r: number(r["ms"])),
        ("spread", measure.spread),
        ("items/s", lambda r: f"{r['items'] / r['ms'] * 1e3:.0f}"),
        ("× " + base["case"].partition(":")[2],
         lambda r: number(ratio(base["ms"], r["ms"]))),
        ("peak GB", lambda r: giga(measure.memory(r))),
        ("of the bf16 rate",
         lambda r: percent(ratio(r["flops"] / r["ms"] * 1e3, rate))),
        ("fused", lambda r: str(r["fused"])),
        ("loss", lambda r: losses(r)),
    )  # fmt: skip


def print_kernels(record, count=30):
    """Prints what one mode spends its time on, the largest first."""
    found = collections.defaultdict(lambda: [0.0, 0.0])
    for name, runs, ms in record["kernels"]:
        row = found[re.sub(r"[\d._]+$", "", name)]
        row[0] += runs
        row[1] += ms
    rows = sorted(([name, *row] for name, row in found.items()), key=lambda x: -x[-1])
    total = sum(row[-1] for row in rows)
    print(f"\n{record['case']}: {total:.2f} ms in {len(rows)} kinds of kernels\n")
    measure.print_columns(
        rows[:count],
        ("kernel", lambda row: row[0][:60]),
        ("runs", lambda row: number(row[1], 1)),
        ("ms", lambda row: number(row[2], 3)),
    )


def losses(record):
    values = list(record["losses"].values())
    if not values:
        return "–"
    apart = max(values) - min(values)
    return f"{statistics.mean(values):.3f} ± {apart / 2:.3f}"


def main():
    options = measure.read_options(
        __doc__,
        f"clones=clones models={DEFAULT} modes={','.join(MODES)} seeds=, steps=60 "
        "group=10 train=300 profile largest repeat=1 budget=3000.0 timeout=600.0 json=str",
    )
    find_clones(options.clones)
    if options.child is not None:
        run = (
            plan_mode
            if options.largest
            else functools.partial(run_mode, options=options)
        )
        return measure.end_child(run(options.child))
    measure.pick(MODELS, options.models)
    measure.pick(dict.fromkeys(MODES), options.modes)
    cases = [f"{name}:{mode}" for name in options.models for mode in options.modes]
    runs = measure.run_cases([*cases] if options.largest else ["rate", *cases], options)
    best = {case: records[0] for case, records in runs.items()
            if "error" not in records[0]}  # fmt: skip
    if not best:
        return 1
    if options.largest:
        rows = [[case, str(record["largest"])] for case, record in best.items()]
        print("\n" + measure.format_table(["", "largest batch"], rows))
        return int(len(best) < len(runs))
    measure.print_machine(next(iter(best.values())))
    rate = best.pop("rate", {}).get("rate")
    print(f"A large bf16 matmul reaches {number(ratio(rate, 1e12), 0)} TFLOP/s.")
    for name in options.models:
        print_model(name, best, rate)
    for record in best.values():
        if record.get("kernels"):
            print_kernels(record)
    return int(len(best) + 1 < len(runs))


if __name__ == "__main__":
    sys.exit(main())
