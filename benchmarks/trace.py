"""What do `amp` and `fp8` cost before the first step: tracing and compiling?

    python benchmarks/trace.py                  # tracing GPT-2 124M, on any machine
    python benchmarks/trace.py --model tiny-gpt --repeat 2
    python benchmarks/trace.py --cold           # cold tracing, and compiling, of 24 layers
    python benchmarks/trace.py --cold --layers 4 --width 64

By default the gradient of a GPT with unrolled layers is traced in one process, plain and
under each transformation in turn, and the shortest of several times is printed: processor
time of `jax.jit(jax.value_and_grad(loss)).trace(...)`. Each time the function is a new one,
so that JAX finds in its caches no more than its own jitted functions. `plain` is f32;
`fp8` gets bf16 parameters; `left alone` is what the size rule makes of a model of this size,
`all` has `min_gain=0`. The target is 2.0 for all.

With `--cold` each number comes from a process of its own. `trace` is the first trace in it:
nothing is in JAX's caches. `again` is the same for another function with the same layers,
which JAX's own functions do not pay for any more. `compile` is the rest up to the executable.
The targets are 2.5 for tracing and 1.2 for compiling. `--strict` makes a miss an error.
"""

import argparse
import gc
import json
import subprocess
import sys
import time

COLD_MODES = ("f32", "hand", "amp")


def main() -> int:
    """Runs the modes and prints the ratios."""
    parser = argparse.ArgumentParser(description="Times tracing and compiling.")
    parser.add_argument(
        "--model", choices=("gpt2", "gpt-1b", "tiny-gpt"), default="gpt2"
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--mode", choices=COLD_MODES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.mode:
        print(json.dumps(measure(args.mode, args.layers, args.width)))
        return 0
    if args.cold:
        return cold(args)
    times = trace_in_turn(args.model, args.repeat)
    print(f"{'':22}{'trace s':>9}{'x plain':>9}")
    ratios = {name: seconds / times["plain"] for name, seconds in times.items()}
    for name, seconds in times.items():
        print(f"{name:22}{seconds:9.2f}{ratios[name]:9.2f}")
    return int(args.strict and max(ratios.values()) > 2.0)


def trace_in_turn(name: str, repeat: int) -> dict[str, float]:
    """Returns the shortest time of tracing the gradient, by transformation."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    import mpx
    from _models import SIZES, Gpt, GptSize, gpt_loss

    size = SIZES[name]
    assert isinstance(size, GptSize)
    model = eqx.filter_eval_shape(Gpt, size, jax.random.key(0))
    f32, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    bf16 = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), f32)
    batch = {"tokens": jax.ShapeDtypeStruct((8, size.context + 1), jnp.int32)}

    def amp(func):
        return mpx.amp(func, dtype="bf16")

    def fp8(func):
        return mpx.fp8(func, min_gain=0)

    modes = {
        "plain": (lambda func: func, f32),
        "amp": (amp, f32),
        "fp8, left alone": (mpx.fp8, bf16),
        "fp8, all": (fp8, bf16),
        "fp8(amp), left alone": (lambda func: mpx.fp8(amp(func)), f32),
        "fp8(amp), all": (lambda func: fp8(amp(func)), f32),
    }
    best: dict[str, float] = {}
    for round_ in range(repeat + 1):
        for mode, (transform, params) in modes.items():

            def loss(params, batch):
                return gpt_loss(eqx.combine(params, static), batch)

            step = jax.jit(jax.value_and_grad(transform(loss)))
            gc.collect()
            start = time.process_time()
            step.trace(params, batch)
            seconds = time.process_time() - start
            if round_:  # the first fills JAX's caches
                best[mode] = min(seconds, best.get(mode, seconds))
    return best


def cold(args: argparse.Namespace) -> int:
    """Runs the modes in processes of their own."""
    best: dict[str, dict[str, float]] = {}
    for _ in range(args.repeat):
        for mode in COLD_MODES:
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
            mpx.amp(func, dtype="bf16") if mode == "amp" else func
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
