"""The evaluation of the MPX paper: time and memory of a ViT's step over batch sizes.

    python benchmarks/paper.py --peer FOLDER        # two models, seven ways; 12 minutes
    python benchmarks/paper.py --models tiny --batches 2,4 --modes f32,policy,amp   # a CPU

The models have the sizes of the paper: "vit-desktop" (256 features, 800 hidden, 32 × 32
pixels in patches of 4) and "vit-base". All train with AdamW on f32 weights, and in f16 with
dynamic loss scaling, except f32. `paper` is the authors' package, in a clone in FOLDER;
`policy` runs the same lines with this package; `amp` is `mpx.amp` with `mpx.value_and_grad`;
`hand` casts by hand, with a static scale and no check; `torch` is PyTorch with autocast,
`GradScaler`, fused attention and `torch.compile`, `torch-f32` without autocast.

One process per mode and model compiles the steps of all batch sizes and then takes them in
turn, from small to large: the allocator's peak is right for the last one, for the others
`compiled_bytes` is. `--json FILE` writes what was measured.
"""

import concurrent.futures
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

import _measure as measure
from _measure import giga, number, ratio
from _models import SIZES, cast, make_task

MODES = ("f32", "hand", "paper", "policy", "amp", "torch-f32", "torch")
BATCHES = {"vit-desktop": (512, 1024, 2048), "vit-base": (32, 128, 256)}
SCALE = 2.0**10
RATE = 1e-4


# --- the steps in JAX -------------------------------------------------------------------


def build_plain(mode, task, optimizer):
    """A step in f32, or cast by hand to f16 with a static scale."""
    scale = SCALE if mode == "hand" else 1.0

    def loss(params, batch):
        given = (params, batch) if mode == "f32" else cast((params, batch), jnp.float16)
        return task.loss(*given) * scale

    def step(state, batch):
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        if mode == "hand":
            value, grads = jax.tree.map(lambda x: x / scale, (value, grads))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return (task.params, optimizer.init(task.params)), step


def build_as_printed(mpx, task, optimizer):
    """The step of the paper: the same lines for the authors' package and for this one."""
    scaling = mpx.DynamicLossScaling(jnp.float32(SCALE), jnp.float32(1.0))
    scaling = jax.tree.map(jnp.asarray, scaling)  # the authors' one holds integers
    mpx.set_half_precision_datatype(jnp.float16)

    def step(state, batch):
        params, opt_state, scaling = state
        value, scaling, finite, grads = mpx.filter_value_and_grad(task.loss, scaling)(
            params, batch
        )
        params, opt_state = mpx.optimizer_update(
            params, optimizer, opt_state, grads, finite
        )
        return (params, opt_state, scaling), value

    return (task.params, optimizer.init(task.params), scaling), step


def build_amp(mpx, task, optimizer):
    """`mpx.amp` around the same loss."""
    gradient = mpx.value_and_grad(mpx.amp(task.loss, jnp.float16))

    def step(state, batch):
        params, opt_state, scaling = state
        result = gradient(scaling, params, batch)
        params, opt_state = mpx.optimizer_update(
            params, optimizer, opt_state, result.grads, result.finite
        )
        return (params, opt_state, result.scaling), result.value

    scaling = mpx.DynamicLossScaling.pow2(SCALE)
    return (task.params, optimizer.init(task.params), scaling), step


def run_jax(model, mode, options):
    measure.start_child(options.child_cache)
    if mode == "paper":
        sys.path.insert(0, options.peer)
    mpx: Any = None if mode in ("f32", "hand") else __import__("mpx")
    if mode == "paper" and hasattr(mpx, "amp"):
        sys.exit(f"{options.peer} has no clone of the paper's package: {mpx.__file__}")
    build = {"paper": build_as_printed, "policy": build_as_printed, "amp": build_amp}

    def prepare(batch):
        task = make_task(model, batch)
        make = build.get(mode, build_plain)
        state, step = make(mpx or mode, task, optax.adamw(RATE))
        state = measure.own_small_buffers(state)
        run, record = measure.compile_step(step, state, task.batches[0])
        return state, task.batches, run, record

    # XLA compiles in parallel, and lets one program at a time try its kernels.
    sizes = options.batches or BATCHES[model]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        prepared = list(pool.map(prepare, sizes))
    found = {}
    for batch in sizes:
        state, batches, run, record = prepared.pop(0)
        # The first seconds after a compilation the host sends steps more slowly.
        for steps in (options.group * (1 if found else 20), options.steps):
            state, losses, timing = measure.time_steps(
                run, state, batches, steps=steps, group=options.group
            )
        record |= timing | {"peak_bytes": measure.peak_bytes()}
        record["losses"] = [float(losses[0]), float(losses[-1])]
        found[batch] = record
        del state, batches, run
    return found


# --- the step in PyTorch ----------------------------------------------------------------


def run_torch(model, mode, options):
    """The same model, optimizer and numbers of steps in PyTorch."""
    import torch  # pyright: ignore[reportMissingImports]
    from torch import nn  # pyright: ignore[reportMissingImports]

    measure.TURN.take()
    size, is_low = SIZES[model], mode == "torch"
    torch.backends.cuda.matmul.allow_tf32 = True

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            width = size.features
            self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up = nn.Linear(width, size.hidden)
            self.down = nn.Linear(size.hidden, width)

        def forward(self, x):
            n, length, width = x.shape
            heads = self.qkv(self.norms[0](x)).view(n, length, 3, size.heads, -1)
            q, k, v = heads.permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
            x = x + self.out(mixed.transpose(1, 2).reshape(n, length, width))
            up = nn.functional.gelu(self.up(self.norms[1](x)), approximate="tanh")
            return x + self.down(up)

    class Vit(nn.Module):
        def __init__(self):
            super().__init__()
            p, width = size.patch, size.features
            self.embed = nn.Conv2d(3, width, p, p)
            self.token = nn.Parameter(0.02 * torch.randn(1, 1, width))
            tokens = (size.image // p) ** 2 + 1
            self.position = nn.Parameter(0.02 * torch.randn(1, tokens, width))
            self.blocks = nn.Sequential(*[Block() for _ in range(size.depth)])
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, size.classes)

        def forward(self, images):
            x = self.embed(images).flatten(2).transpose(1, 2)
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
            return self.head(self.norm(self.blocks(x)[:, 0]))

    found = {}
    for batch in options.batches or BATCHES[model]:
        torch.compiler.reset()  # else the next batch size gets a program for any size
        torch.manual_seed(0)
        torch.cuda.reset_peak_memory_stats()
        vit = Vit().cuda()
        run = torch.compile(vit)
        optimizer = torch.optim.AdamW(vit.parameters(), RATE, fused=True)
        scaler = torch.amp.GradScaler(init_scale=SCALE, enabled=is_low)
        patterns = torch.randn(size.classes, 3, size.image, size.image, device="cuda")
        labels = torch.randint(size.classes, (batch,), device="cuda")
        images = 0.5 * patterns[labels] + torch.randn_like(patterns[labels])
        del patterns

        def step(run=run, optimizer=optimizer, scaler=scaler, x=images, y=labels):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16, enabled=is_low):
                loss = nn.functional.cross_entropy(run(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss

        losses, groups = [], []
        for _ in range(1 + options.steps // options.group):
            torch.cuda.synchronize()
            start = time.perf_counter()
            losses += [step() for _ in range(options.group)]
            torch.cuda.synchronize()
            groups.append((time.perf_counter() - start) / options.group * 1e3)
        groups = groups[1:]  # the first one compiles
        found[batch] = {
            "ms": statistics.median(groups),
            "ms_low": min(groups),
            "ms_high": max(groups),
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "losses": [float(losses[0]), float(losses[-1])],
        }
        del vit, run, optimizer, images, step, losses
        torch.cuda.empty_cache()
    return found


# --- the table --------------------------------------------------------------------------


def print_model(model, runs):
    rows = [
        {"mode": case.partition(":")[2], "batch": batch, **record}
        for case, records in runs.items()
        if case.startswith(f"{model}:")
        for batch, record in records.items()
        if batch.isdigit()
    ]
    base = {row["batch"]: row["ms"] for row in rows if row["mode"] == "f32"}
    print(f"\n{model}\n")
    measure.print_columns(
        sorted(rows, key=lambda r: int(r["batch"])),
        ("batch", lambda r: r["batch"]),
        ("mode", lambda r: r["mode"]),
        ("ms", lambda r: number(r["ms"])),
        ("spread", measure.spread),
        ("vs f32", lambda r: number(ratio(base.get(r["batch"]), r["ms"]))),
        ("peak GB", lambda r: giga(measure.memory(r))),
        ("fused", lambda r: str(r.get("fused", "–"))),
        ("loss", lambda r: " → ".join(f"{x:.3f}" for x in r["losses"])),
    )


def main():
    options = measure.read_options(
        __doc__,
        f"models={','.join(BATCHES)} batches=, modes={','.join(MODES)} peer=str steps=40 "
        "group=10 repeat=1 budget=3000.0 timeout=300.0 json=str",
    )
    if options.child is not None:
        model, _, mode = options.child.partition(":")
        run = run_torch if mode.startswith("torch") else run_jax
        return measure.end_child(run(model, mode, options))
    measure.pick(SIZES, options.models)
    modes = [x for x in measure.pick(dict.fromkeys(MODES), options.modes)
             if x != "paper" or options.peer]  # fmt: skip
    cases = [f"{model}:{mode}" for model in options.models for mode in modes]
    runs = {
        case: records[0] for case, records in measure.run_cases(cases, options).items()
    }
    good = {case: record for case, record in runs.items() if "error" not in record}
    if not good:
        return 1
    measure.print_machine(next(iter(good.values())))
    for model in options.models:
        print_model(model, good)
    return int(len(good) < len(runs))


if __name__ == "__main__":
    sys.exit(main())
