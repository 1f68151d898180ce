"""What `amp` and `fp8` cost before the first step: calls of Python functions and tracing.

    python benchmarks/calls.py                     # GPT-2 124M, on any machine
    python benchmarks/calls.py --model tiny-gpt --repeat 2

First `x @ w` is traced under `mpx.amp`, once more after a first call with other shapes:
how many Python functions of mpx are called, and how many of its files they are in.
Comprehensions do not count: they are functions before Python 3.12 only.

Then the gradient of a GPT with unrolled layers is traced in one process, plain and under
each transformation in turn, and the shortest of several times is printed: processor time
of `jax.jit(jax.value_and_grad(loss)).trace(...)`. Each time the function is a new one, so
that JAX finds in its caches no more than its own jitted functions. Python's collector of
cycles is off, as in `timeit`: its pauses depend on all that is in memory. `f32` is the plain loss;
`fp8` gets bf16 parameters; `left alone` is what the size rule makes of a model of this
size, `all` has `min_gain=0`.
"""

import gc
import pathlib
import sys
import time

import jax
import jax.numpy as jnp

import _measure as measure
import mpx
from _models import make_task

PACKAGE = str(pathlib.Path(mpx.__file__).parent)


def count_calls():
    """Returns the calls of Python functions of mpx in one trace, and their files."""
    func = mpx.amp(lambda x, w: x @ w)
    jax.make_jaxpr(func)(jnp.ones((2, 3)), jnp.ones((3, 4)))
    x, w = jnp.ones((4, 8)), jnp.ones((8, 16))
    files = []

    def profile(frame, event, _):
        code = frame.f_code
        is_function = event == "call" and not code.co_name.endswith("comp>")
        if is_function and code.co_filename.startswith(PACKAGE):
            files.append(code.co_filename)

    sys.setprofile(profile)
    try:
        jax.make_jaxpr(func)(x, w)
    finally:
        sys.setprofile(None)
    return len(files), len({*files})


def trace_seconds(transform, loss, *args):
    """Returns the processor time of tracing a gradient: Python in one thread."""
    fresh = lambda params, batch: loss(params, batch)  # noqa: E731 (in no cache of JAX)
    step = jax.jit(jax.value_and_grad(transform(fresh)))
    gc.collect()
    gc.disable()
    try:
        start = time.process_time()
        step.trace(*args)
        return time.process_time() - start
    finally:
        gc.enable()


def trace_in_turn(model, repeat):
    """Returns the shortest time of tracing the gradient, by transformation."""
    task = make_task(model, 8, batches=1, shapes=True)
    low = lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)  # noqa: E731
    f32, bf16 = task.params, jax.tree.map(low, task.params)
    all_sizes = lambda loss: mpx.fp8(loss, min_gain=0)  # noqa: E731
    modes = {
        "f32": (lambda loss: loss, f32),
        "amp": (mpx.amp, f32),
        "fp8, left alone": (mpx.fp8, bf16),
        "fp8, all": (all_sizes, bf16),
        "fp8(amp), left alone": (lambda loss: mpx.fp8(mpx.amp(loss)), f32),
        "fp8(amp), all": (lambda loss: all_sizes(mpx.amp(loss)), f32),
    }
    best = {}
    for turn in range(repeat + 1):
        for mode, (transform, params) in modes.items():
            seconds = trace_seconds(transform, task.loss, params, task.batches[0])
            if turn:  # the first fills JAX's caches
                best[mode] = min(seconds, best.get(mode, seconds))
    return best


def main():
    options = measure.read_options(__doc__, "model=gpt2 repeat=5")
    calls, files = count_calls()
    print(f"x @ w under amp, traced again: {calls} calls in {files} files of mpx\n")
    times = trace_in_turn(options.model, options.repeat)
    rows = [[k, f"{x:.2f}", f"{x / times['f32']:.2f}"] for k, x in times.items()]
    print(measure.format_table([options.model, "trace s", "× f32"], rows))


if __name__ == "__main__":
    main()
