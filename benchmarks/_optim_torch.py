"""FlashOptim's original, in PyTorch, for optim.py: a process without JAX's allocator."""

import argparse
import platform
import statistics
import time
from typing import Any

import flashoptim  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]

import _optim_modes as modes
from _measure import Record

CHECKED = 20


def run(options: argparse.Namespace) -> list[Record]:
    """Measures all workloads, the smallest first."""
    records = []
    start = time.perf_counter()
    for model in sorted(
        options.models, key=lambda m: modes.count_of(modes.shapes_of(m))
    ):
        if records and time.perf_counter() - start > options.child_budget:
            records.append({"model": model, "error": "skipped: no time left"})
            continue
        records.append({"model": model} | run_workload(model, options))
    return records


def build(model: str, optimizer: str) -> tuple[list[Any], Any]:
    """Returns bf16 parameters with gradients, and the optimizer."""
    rate = modes.RATES[optimizer]
    half_on_gpu = {"dtype": torch.bfloat16, "device": "cuda"}
    shapes = modes.shapes_of(model)
    params = [torch.nn.Parameter(torch.randn(s, **half_on_gpu)) for s in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    make = {
        "adamw": lambda: flashoptim.FlashAdamW(params, rate, weight_decay=modes.DECAY),
        "lion": lambda: flashoptim.FlashLion(params, rate, weight_decay=modes.DECAY),
        "sgd": lambda: flashoptim.FlashSGD(params, rate, momentum=modes.MOMENTUM),
    }
    return params, make[optimizer]()


def run_workload(model: str, options: argparse.Namespace) -> Record:
    """Times and checks one workload. Every step is dispatched: there is no loop."""
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    params, optimizer = build(model, options.optimizer)
    start = time.perf_counter()
    optimizer.step()
    torch.cuda.synchronize()
    compile_s = time.perf_counter() - start
    resident = torch.cuda.memory_allocated() - before
    grads = sum(p.grad.nbytes for p in params)
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(options.repeat):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(options.steps):
            optimizer.step()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) / options.steps * 1e3)
    peak = torch.cuda.max_memory_allocated() - before
    count = sum(p.numel() for p in params)
    us = statistics.median(times)
    return {
        "params": count,
        "bytes": 2 * (resident - grads) + grads,
        "resident_bytes": resident,
        "peak_bytes": peak,
        "us": us,
        "us_low": min(times),
        "us_high": max(times),
        "dispatched_us": us,
        "compile_s": compile_s,
        "environment": {
            "device": torch.cuda.get_device_name(),
            "backend": "gpu",
            "jax": f"none, torch {torch.__version__}",
            "python": platform.python_version(),
        },
    } | check(model, options)


def check(model: str, options: argparse.Namespace) -> Record:
    """Steps down the quadratic |w|²/2, whose gradient is the parameter itself."""
    params, optimizer = build(model, options.optimizer)
    old = [p.detach().clone() for p in params]
    for _ in range(CHECKED):
        for param in params:
            param.grad = param.detach().clone()
        optimizer.step()
    unchanged = sum(bool((a == b).all()) for a, b in zip(old, params, strict=True))

    def loss(weights: list[Any]) -> float:
        return sum(float(w.detach().float().square().sum()) / 2 for w in weights)

    return {"unchanged": unchanged, "losses": [loss(old), loss(params)]}
