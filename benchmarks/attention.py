"""From how many tokens on attention is faster in cuDNN: two layers, forward and backward.

    python benchmarks/attention.py                  # an H200, a minute
    python benchmarks/attention.py --sides 2 --tokens 64 --steps 2 --group 1   # a CPU

A ViT of two layers with 4 heads of 64 in bf16, on as many images as make `--tokens` tokens.
Images have `--sides`² patches and a class token. mpx decides by the number of queries and
keys; here both ways are forced.
"""

import sys

import jax

import _measure as measure
import _models
import mpx
import mpx._ops._attention as attention
from _measure import number, ratio


def time_gradient(task, steps, group, *, fused):
    """Returns the milliseconds of a gradient, and how many layers run in cuDNN."""
    attention.LEAST = {9: 0, 10: 0}
    loss = mpx.amp(task.loss, attention="fuse" if fused else "keep")

    def step(params, batch):
        return params, jax.grad(loss)(params, batch)

    traced = jax.jit(step).trace(task.params, task.batches[0])
    program = traced.lower().compile()
    found = {}
    for count in (group, steps):
        _, _, found = measure.time_steps(
            program, task.params, task.batches, steps=count, group=group, keep=False
        )
    return found["ms"], str(traced.jaxpr).count("cudnn_attention[")


def main():
    options = measure.read_options(
        __doc__, "sides=4,5,6,8 tokens=33000 steps=60 group=20"
    )
    measure.start_child()
    rows = []
    for side in options.sides:
        length, name = side**2 + 1, f"side {side}"
        _models.SIZES[name] = _models.Size(
            256, 4, 2, image=4 * side, patch=4, hidden=1024, classes=10
        )
        task = _models.make_task(name, max(options.tokens // length // 8 * 8, 8))
        pair = options.steps, options.group
        (low, fused), (plain, _) = (
            time_gradient(task, *pair, fused=fused) for fused in (True, False)
        )
        rows.append({"tokens": length, "fused": low, "plain": plain, "layers": fused})
    measure.print_machine({"environment": measure.environment()})
    measure.print_columns(
        rows,
        ("tokens", lambda r: str(r["tokens"])),
        ("in cuDNN", lambda r: str(r["layers"])),
        ("fused ms", lambda r: number(r["fused"])),
        ("op by op ms", lambda r: number(r["plain"])),
        ("gain", lambda r: number(ratio(r["plain"], r["fused"]))),
    )


if __name__ == "__main__":
    sys.exit(main())
