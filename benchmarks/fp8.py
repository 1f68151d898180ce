"""What fp8 gains beside bf16: a block, four blocks, a language model, a small model.

    python benchmarks/fp8.py                       # an NVIDIA GPU with fp8 units
    python benchmarks/fp8.py --sections sizes      # single matmuls, for the size rule
    python benchmarks/fp8.py --sections int8,int8-mlp               # the same for int8
    python benchmarks/fp8.py --tiny                # try the script on a CPU

Every case runs in a process of its own; bf16 and fp8 of a section follow each other.
"""

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

import _measure as measure
import mpx
from _measure import giga, number, ratio
from _models import Decoder
from mpx._fp8._decide import predicted_gain
from mpx._jax._devices import H200, cuda_capability

BF16 = jnp.bfloat16
POLICY = "p=f32,c=bf16,o=f32"
RECIPES = {
    "fp8": mpx.recipes.CurrentScaling(),
    "fp8-delayed": mpx.recipes.DelayedScaling(),
    "fp8-static": mpx.recipes.StaticScaling(
        activation_max=8.0, weight_max=0.25, grad_max=1.0
    ),
    "fp8-row": mpx.recipes.CurrentScaling(granularity="row"),
    "int8": mpx.recipes.Int8(),
    "int8-forward": mpx.recipes.Int8(backward=False),
    "int8-nearest": mpx.recipes.Int8(rounding="nearest"),
}
SECTIONS = {
    "mlp": ("bf16", "fp8", "fp8-delayed", "fp8-static", "fp8-row"),
    "tower": ("bf16", "fp8", "fp8-delayed"),
    "lm": ("bf16", "fp8"),
    "lm-accumulate": ("bf16", "fp8"),
    "small": ("bf16", "fp8"),
    "sizes": ("all",),
    "rates": ("all",),
    "int8": ("all",),
    "int8-mlp": ("bf16", "int8", "int8-forward", "int8-nearest"),
}
LARGE = Decoder(4, 4096, 16384, 32, 32, 32768, 8, 2048, gated=False)
SIZES = dict.fromkeys(SECTIONS, LARGE)
SIZES["small"] = Decoder(12, 768, 3072, 12, 12, 32768, 8, 1024, gated=False)
TINY = Decoder(2, 64, 128, 2, 2, 256, 4, 32, gated=False)
TURNS = 20  # gradients of a single matmul in one call
WIDTHS = ((1024, 1024), (1024, 4096), (2048, 2048), (4096, 1024), (4096, 4096))
SINGLE = [(m, k, n) for m in (4096, 16384) for k, n in (*WIDTHS, (4096, 16384))]


def under(mode, loss, tiny):
    """The loss as a mode runs it. Where a CPU tries the script, nothing is too small."""
    if mode == "bf16":
        return loss
    # What is emulated gains nothing, and a forward pass alone may gain less than 1.1.
    every = tiny or not mode.startswith("fp8")
    return mpx.fp8(loss, RECIPES[mode], min_gain=0 if every else 1.1)


def mlp_loss(params, x):
    """One block: up, gelu, down."""
    out = jax.nn.gelu(x @ params["up"]) @ params["down"]
    return jnp.mean(jnp.square(out.astype(jnp.float32)))


def tower_loss(params, x):
    """Blocks one behind the other, each computed again in the backward pass."""

    @jax.checkpoint
    def block(h, w):
        return h + jax.nn.gelu(h @ w["up"]) @ w["down"]

    h, _ = lax.scan(lambda h, w: (block(h, w), None), x, params)
    return jnp.mean(jnp.square(h.astype(jnp.float32)))


def build_gradient(section, mode, size, tiny):
    """Forward and backward of blocks in bf16. The state holds the last gradients."""
    keys, stack = jax.random.split(jax.random.key(0)), (size.layers,)
    shapes = {"up": (size.width, size.hidden), "down": (size.hidden, size.width)}
    params = {
        name: (jax.random.normal(key, (*stack * (section == "tower"), *shape))
               / shape[0] ** 0.5).astype(BF16)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }  # fmt: skip
    x = jax.random.normal(jax.random.key(1), (size.tokens, size.width)).astype(BF16)
    func: Any = under(mode, tower_loss if section == "tower" else mlp_loss, tiny)
    scales = func.init(params, x) if getattr(func, "has_state", False) else None

    def step(state, x):
        params, scales, _ = state
        if scales is None:
            value, grads = jax.value_and_grad(func, argnums=(0, 1))(params, x)
            return (params, None, grads), value
        gradient = jax.value_and_grad(func, argnums=(0, 1, 2))
        value, (seen, *grads) = gradient(scales, params, x)
        return (params, scales.update(seen), tuple(grads)), value

    return step, (params, scales, jax.tree.map(jnp.zeros_like, (params, x))), x


def build_training(section, mode, size, tiny):
    """A whole training step of a language model: f32 weights, adamw."""
    kernel = "xla" if cuda_capability() is None else "cudnn"
    loss = functools.partial(size.loss, attention=kernel)
    func = under(mode, lambda params, tokens: loss(params, tokens), tiny)
    optimizer, params = optax.adamw(1e-4), size.init(jax.random.key(0))
    if section == "lm-accumulate":
        gradient = mpx.accumulate(func, steps=4, policy=POLICY)
    else:
        gradient = mpx.value_and_grad(func, policy=POLICY)

    def step(state, tokens):
        params, opt_state = state
        result = gradient(mpx.NoLossScaling(), params, tokens)
        updates, opt_state = optimizer.update(result.grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), result.value

    return step, (params, optimizer.init(params)), size.batch()


def build(section, mode, tiny=False):
    """Returns step, state and inputs of a case."""
    is_block = section in ("mlp", "tower", "int8-mlp")
    make = build_gradient if is_block else build_training
    return make(section, mode, TINY if tiny else SIZES[section], tiny)


def measure_step(step, state, inputs, options) -> Any:
    """Compiles a step, says what its matmuls became, and times it."""
    state = measure.own_small_buffers(state)
    program, record = measure.compile_step(step, state, inputs)
    found = mpx.inspect.fp8_check(program)
    run = functools.partial(measure.time_steps, program, inputs=[inputs])
    state, _, _ = run(state, steps=options.warmup, group=options.warmup)
    state, values, timing = run(state, steps=options.steps, group=options.group)
    seen = {"fp8": found.fp8, "int8": found.int8, "other": dict(found.other)}
    return record | timing | seen | {"values": [float(values[0]), float(values[-1])]}


def run_sizes(options):
    """Single linear layers of several sizes: predicted gain beside the measured one."""
    rows = []
    for m, k, n in [(64, 32, 48)] if options.tiny else SINGLE:
        x = jnp.ones((m, k), BF16)
        params = jax.random.normal(jax.random.key(0), (k, n)).astype(BF16)

        # A nonlinearity on both sides, as in a model: casts are fused into it.
        def loss(w, x):
            return jnp.sum(jnp.tanh(jnp.tanh(x) @ w).astype(jnp.float32))

        times = []
        for func in (loss, mpx.fp8(loss, min_gain=0)):
            step = functools.partial(repeated, jax.grad(func, argnums=(0, 1)))
            state = jax.tree.map(jnp.copy, (params, x))
            times.append(measure_step(step, state, None, options)["ms"] / TURNS)
        rows.append([m, k, n, *times, times[0] / times[1], predicted_gain(m, k, n)])
    return {"rows": rows}


def run_rates(options):
    """Large matmuls and an addition: operations and bytes per second, as `H200` lists them."""
    size, rates = 256 if options.tiny else 8192, {}
    # Tuning Triton's matmuls in fp8 would take minutes.
    is_gpu = jax.default_backend() == "gpu"
    flags: Any = {"xla_gpu_enable_triton_gemm": False} if is_gpu else {}

    def seconds(func, *args):
        # Ten groups: the GPU is as warm as in training.
        program = jax.jit(func).lower(*args).compile(flags)
        return measure.time_call(program, *args, groups=10) / 1e3

    dtypes = {"f32": jnp.float32, "bf16": BF16, "fp8": jnp.float8_e4m3fn}
    for name, dtype in dtypes.items():
        keys = jax.random.split(jax.random.key(0))
        both = (jax.random.normal(key, (size, size)).astype(dtype) for key in keys)
        out = BF16 if name == "fp8" else None
        dot = functools.partial(lax.dot_general, preferred_element_type=out)
        # Both sum over their last axis, as the units of fp8 want it.
        axes = ((1,), (1,)), ((), ())
        rates[name] = 2 * size**3 / seconds(lambda a, b, f=dot: f(a, b, axes), *both)  # noqa: B023
    big = jnp.ones((4 * size, size), jnp.float32)
    rates["memory"] = 2 * big.nbytes / seconds(lambda x: x + 1, big)
    return {"rows": [[k, f"{H200[k]:.3g}", f"{x:.3g}"] for k, x in rates.items()]}


def run_int8(options):
    """One matmul: in bf16, from int8 operands, and with the rounding to int8."""
    size = 256 if options.tiny else 8192
    keys, layer = jax.random.split(jax.random.key(0)), lambda w, x: x @ w
    w, x = (jax.random.normal(key, (size, size)).astype(BF16) for key in keys)
    scale = jnp.ones((size, 1), jnp.float32)
    codes = [jnp.round(jnp.clip(y * 32, -127, 127)).astype(jnp.int8) for y in (w, x)]

    def product(w, x):
        # The summed axis last in both, as the units of int8 want it.
        axes = ((1,), (1,)), ((), ())
        out = lax.dot_general(x, w, axes, preferred_element_type=jnp.int32)
        return (out.astype(jnp.float32) * scale * scale.T).astype(BF16)

    low = under("int8", layer, options.tiny)
    cases = {
        "bf16": (layer, w, x),
        "int8 product, scales": (product, *codes),
        "int8, with rounding": (low, w, x),
    }
    rows = []
    for name, (func, *args) in cases.items():
        program = jax.jit(func).lower(*args).compile()
        ms = measure.time_call(program, *args, groups=10)
        check = mpx.inspect.fp8_check(program)
        rows.append([f"{name}, {size}³", ms, 2 * size**3 / ms / 1e9, str(check)])
    return {"rows": rows}


def repeated(gradient, state, _):
    """Many gradients in one call; each needs the last one, so that none is left out."""
    move = lambda x, dx: x + dx * jnp.asarray(1e-6, x.dtype)  # noqa: E731
    turn = lambda _, state: jax.tree.map(move, state, gradient(*state))  # noqa: E731
    state = lax.fori_loop(0, TURNS, turn, state)
    return state, state[0][0, 0]


def print_tables(results):
    base = lambda r: results.get(f"{r['case'].split(':')[0]}:bf16", r)  # noqa: E731
    sizes, rates, matmuls = (
        results.pop(f"{x}:all", {}).get("rows") for x in ("sizes", "rates", "int8")
    )
    if results:
        measure.print_columns(
            results.values(),
            ("case", lambda r: r["case"]),
            ("ms", lambda r: number(r["ms"], 3)),
            ("spread", measure.spread),
            ("× bf16", lambda r: number(ratio(base(r)["ms"], r["ms"]), 3)),
            ("fp8 calls", lambda r: str(r["fp8"])),
            ("int8", lambda r: str(r["int8"])),
            ("others", lambda r: ", ".join(f"{n} {x}" for x, n in r["other"].items())),
            ("compile s", lambda r: number(r["compile_s"], 1)),
            ("temp GB", lambda r: giga(r.get("temp_bytes"))),
            ("value", lambda r: "{:.4f} → {:.4f}".format(*r["values"])),
        )
    if sizes:
        head = ["m×k×n", "bf16 ms", "fp8 ms", "measured", "predicted"]
        cells = [
            ["×".join(map(str, x[:3])), *(number(y, 3) for y in x[3:])] for x in sizes
        ]
        print(measure.format_table(head, cells))
    if rates:
        print(measure.format_table(["rate", "of an H200", "measured"], rates))
    if matmuls:
        cells = [[x[0], number(x[1], 3), number(x[2], 1), x[3]] for x in matmuls]
        print(measure.format_table(["matmul", "ms", "TFLOP/s", "compiled"], cells))


def main():
    options = measure.read_options(
        __doc__,
        "sections=mlp,tower,lm,small steps=40 warmup=5 group=5 timeout=240.0 json=str tiny",
    )
    if options.child is not None:
        measure.start_child()
        section, mode = options.child.split(":")
        if mode == "all":
            runs = {"sizes": run_sizes, "rates": run_rates, "int8": run_int8}
            return measure.end_child(runs[section](options))
        case = build(section, mode, options.tiny)
        return measure.end_child(measure_step(*case, options))
    cases = [
        f"{section}:{mode}"
        for section, modes in measure.pick(SECTIONS, options.sections).items()
        for mode in modes
    ]
    # No cache: compile time is among what is compared.
    runs = measure.run_cases(cases, options, shared_cache=False)
    good = {case: run[0] for case, run in runs.items() if "error" not in run[0]}
    if not good:
        return 1
    measure.print_machine(next(iter(good.values())))
    print_tables(good)
    return int(len(good) < len(runs))


if __name__ == "__main__":
    sys.exit(main())
