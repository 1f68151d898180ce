"""How far `scale.py` is from a GPU: rates and steps, predicted and measured."""

import argparse
import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import _cost as cost
import _llama as llama
import _measure as measure
from _cost import Machine
from _measure import Record, number, ratio

# By model: so many layers that parameters, states and all else fit on one GPU.
CHECKED = [
    ("7B", 4, "bf16, AdamW in f32"),
    ("7B", 4, "bf16, flash_adamw"),
    ("7B", 4, "fp8, flash_adamw"),
    ("70B", 1, "bf16, flash_adamw"),
    ("70B", 1, "fp8, flash_adamw"),
]


def run_step(model: str, layers: int, precision: str, options: Any) -> Record:
    """Compiles, reads and times a training step on the device that is here."""
    sizes = llama.MODELS[model]._replace(layers=layers)
    chosen = llama.PRECISIONS[precision]
    step, init = llama.training_step(chosen, sizes)
    params = jax.jit(lambda key: llama.random_params(sizes, chosen, key))(
        jax.random.key(0)
    )
    carry = measure.own_small_buffers((params, init(params)))
    tokens = jax.random.randint(
        jax.random.key(1), (sizes.sequences, sizes.length + 1), 0, sizes.vocabulary
    )
    start = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=0).lower(carry, tokens).compile()
    compile_s = time.perf_counter() - start
    program = cost.read(compiled)
    del params
    carry, _, _ = measure.time_steps(
        compiled, carry, [tokens], steps=options.warmup, group=options.warmup
    )
    _, losses, timing = measure.time_steps(
        compiled, carry, [tokens], steps=options.steps, group=5
    )
    return timing | {
        "program": program._asdict(),
        "peak_bytes": measure.peak_bytes(),
        "compile_s": compile_s,
        "loss": float(losses[-1]),
        "environment": measure.environment(),
    }


def run_rates(options: Any) -> Record:
    """Measures the rates of `Machine` that one GPU has."""
    size = 256 if options.tiny else 8192
    length, heads, width = (64, 2, 16) if options.tiny else (4096, 32, 128)
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
        seconds = time_of(matmul, left.astype(dtype), right.astype(dtype))
        rates[name] = 2 * size**3 / seconds
    big = jnp.ones((4 * size, size), jnp.float32)
    rates["memory"] = 2 * big.nbytes / time_of(lambda x: x + 1, big)
    shape = (1, length, heads, width)
    q, k, v = (jax.random.normal(key, shape).astype(jnp.bfloat16) for key in keys)
    kernel = "cudnn" if jax.default_backend() == "gpu" else "xla"

    def attention(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation=kernel
        )

    def both(q: Any, k: Any, v: Any) -> Any:
        out, pull = jax.vjp(attention, q, k, v)
        return pull(out)

    forward = time_of(attention, q, k, v)
    backward = max(time_of(both, q, k, v) - forward, 1e-9)
    flops = 2 * 2 * heads * length**2 * width / 2
    rates |= {"forward": flops / forward, "backward": 2.5 * flops / backward}
    return {"rates": rates, "environment": measure.environment()}


def time_of(func: Any, *args: Any, least: float = 1.0) -> float:
    """Returns the seconds of a call, with the GPU as warm as in training."""
    options: Any = {}
    if jax.default_backend() == "gpu":
        # Its tuning of fp8 would take minutes.
        options = {"xla_gpu_enable_triton_gemm": False}
    compiled = jax.jit(func).lower(*args).compile(options)
    jax.block_until_ready(compiled(*args))
    turns, seconds, result = 20, 0.0, None
    end = time.perf_counter() + least
    while time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(turns):
            result = compiled(*args)
        jax.block_until_ready(result)
        seconds = (time.perf_counter() - start) / turns
    return seconds


def print_check(script: str, options: argparse.Namespace, machine: Machine) -> int:
    """Runs everything in processes of their own; returns how many failed."""
    passed = [f"--{name}={getattr(options, name)}" for name in ("steps", "warmup")]
    passed += ["--tiny"] if options.tiny else []

    def child(name: str) -> Record:
        arguments = [*passed, "--child", name]
        record = measure.run_child(script, arguments, timeout=options.timeout)
        told = record.get("error") or f"{record['wall_s']:.0f} s"
        print(f"{name}: {told}", flush=True)
        return record

    found = child("rates")
    rates = found.get("rates", {})
    real = dataclasses.replace(machine, **rates)
    if rates:
        lines = [
            [k, f"{getattr(machine, k):.3g}", f"{v:.3g}"] for k, v in rates.items()
        ]
        print(measure.format_table(["rate", "assumed", "measured"], lines), flush=True)
    rows, failed = [], int(not rates)
    checked = [("tiny", 2, x) for x in llama.PRECISIONS] if options.tiny else CHECKED
    for model, layers, precision in checked:
        record = child(f"{model}:{layers}:{precision}")
        if "error" in record:
            failed += 1
            continue
        program = cost.from_record(record["program"])
        guess, better = (1e3 * program.compute(x) for x in (machine, real))
        peak = record["peak_bytes"]
        rows.append(
            [
                f"{model}, layers: {layers}, {precision}",
                number(guess, 1),
                number(better, 1),
                number(record["ms"], 1),
                number(ratio(guess, record["ms"]), 3),
                number(ratio(better, record["ms"]), 3),
                number(program.peak_bytes / 1e9),
                number(peak / 1e9 if peak else None),
            ]
        )
        parts = program.time_by_kind(machine)
        told = ", ".join(f"{kind} {part * 1e3:.1f}" for kind, part in parts.items())
        print(f"  {record['ms']:.1f} ms; predicted {guess:.1f}: {told}", flush=True)
    header = [
        "step", "predicted, ms", "with measured rates", "measured, ms", "ratio", "ratio",
        "predicted, GB", "measured, GB",
    ]  # fmt: skip
    if rows:
        print(measure.format_table(header, rows), flush=True)
    machine_name = found.get("environment", {})
    print(machine_name.get("device"), "jax", machine_name.get("jax"))
    return failed
