"""What does `amp` cost before the first step: tracing and compiling?

    python benchmarks/trace.py                  # 24 unrolled layers, on any machine
    python benchmarks/trace.py --layers 4 --width 64

Each number comes from a process of its own. `trace` is `jax.jit(step).trace(...)` of the
gradient, cold: nothing is in JAX's caches. `again` is the same for another function with the
same layers, which JAX's own functions do not pay for any more. `compile` is the rest up to the
executable. The targets are 2.5 for tracing and 1.2 for compiling; `--strict` makes a miss an
error.
"""

import argparse
import json
import subprocess
import sys
import time

MODES = ("f32", "hand", "amp")


def main() -> int:
    """Runs the modes and prints the ratios."""
    parser = argparse.ArgumentParser(description="Times tracing and compiling.")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.mode:
        print(json.dumps(measure(args.mode, args.layers, args.width)))
        return 0
    best: dict[str, dict[str, float]] = {}
    for _ in range(args.repeat):
        for mode in MODES:
            command = [sys.executable, __file__, "--mode", mode]
            command += ["--layers", str(args.layers), "--width", str(args.width)]
            out = subprocess.run(command, check=True, capture_output=True, text=True)
            times = json.loads(out.stdout.splitlines()[-1])
            known = best.setdefault(mode, times)
            best[mode] = {name: min(known[name], times[name]) for name in times}
    print(
        f"{'mode':6}"
        + "".join(f"{name + ' s':>12}{'x f32':>8}" for name in best["f32"])
    )
    for mode, times in best.items():
        cells = [f"{t:12.2f}{t / best['f32'][name]:8.2f}" for name, t in times.items()]
        print(f"{mode:6}" + "".join(cells))
    trace = best["amp"]["trace"] / best["f32"]["trace"]
    compiled = best["amp"]["compile"] / best["f32"]["compile"]
    by_hand = best["amp"]["compile"] / best["hand"]["compile"]
    print(
        f"tracing amp / f32: {trace:.2f}; compiling amp / f32: {compiled:.2f}, "
        f"amp / by hand: {by_hand:.2f}"
    )
    return int(args.strict and (trace > 2.5 or compiled > 1.2))


def measure(mode: str, layers: int, width: int) -> dict[str, float]:
    """Traces and compiles one training gradient."""
    import jax
    import jax.numpy as jnp

    import mpx

    def norm(x):
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5)

    def block(p, x):
        y = norm(x) @ p["qkv"]
        q, k, v = jnp.split(y, 3, axis=-1)
        scores = jax.nn.softmax(q @ k.swapaxes(-1, -2) / width**0.5)
        x = x + (scores @ v) @ p["out"]
        return x + jax.nn.gelu(norm(x) @ p["up"] + p["b"]) @ p["down"]

    def loss(params, x):
        for p in params:
            x = block(p, x)
        return jnp.mean(x**2)

    def by_hand(params, x):
        half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (params, x))
        return loss(*half).astype(jnp.float32)

    one = {
        "qkv": jnp.zeros((width, 3 * width)),
        "out": jnp.zeros((width, width)),
        "up": jnp.zeros((width, 4 * width)),
        "b": jnp.zeros(4 * width),
        "down": jnp.zeros((4 * width, width)),
    }
    args = ([one] * layers, jnp.zeros((2, 16, width)))

    def build():
        plain = {"f32": loss, "hand": by_hand, "amp": loss}[mode]
        func = lambda params, x: plain(params, x)  # noqa: E731 - unknown to any cache
        return jax.value_and_grad(
            mpx.amp(func, compute_dtype="bf16") if mode == "amp" else func
        )

    def timed(func, clock):
        start = clock()
        out = func()
        return clock() - start, out

    # Tracing is Python in one thread: its processor time does not depend on the load.
    trace, traced = timed(lambda: jax.jit(build()).trace(*args), time.process_time)
    again, _ = timed(lambda: jax.jit(build()).trace(*args), time.process_time)
    compiled, _ = timed(lambda: traced.lower().compile(), time.perf_counter)
    return {"trace": trace, "again": again, "compile": compiled}


if __name__ == "__main__":
    sys.exit(main())
