"""Compiles for an H200 on a machine without a GPU; run as a program by a test.

Needs the CUDA plugin of JAX and NVIDIA's compiler, but no GPU. Prints one JSON object: by
the name of each program, its matmuls, or the error of the compiler.
"""

import importlib.util
import json
import os
import pathlib
import sys
from typing import Any

TOKENS, WIDTH, HIDDEN = 2048, 1024, 4096
TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132
  fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 151397597184
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability 9.0a"
  device_address_bits: 64 pcie_bandwidth: 34359738368 ecc_enabled: true
  name: "NVIDIA H200" driver_version: "13.0.0" runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""


def cuda_toolkit():
    """The folder with NVIDIA's compiler, or None if the wheels are not installed."""
    plugins = [f"jax_plugins.xla_cuda{n}" for n in ("12", "13")] + ["jax_cuda13_plugin"]
    if not any(map(_is_installed, plugins)) or not _is_installed("nvidia"):
        return None
    found = importlib.util.find_spec("nvidia")
    for root in found.submodule_search_locations or () if found else ():
        for name in ("cu13", "cuda_nvcc"):
            if (pathlib.Path(root) / name / "bin").is_dir():
                return str(pathlib.Path(root) / name)
    return None


def _is_installed(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def environment():
    """The environment in which this program runs."""
    flags = f"--xla_gpu_cuda_data_dir={cuda_toolkit()} --xla_gpu_autotune_level=0"
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "XLA_FLAGS": flags,
    }


def programs(jax, shape) -> dict[str, Any]:
    """By name: a loss under fp8, and its parameters."""
    import jax.numpy as jnp
    from jax import lax

    from mpx import CurrentScaling, DelayedScaling, StaticScaling, fp8

    def mlp(p, x):
        return jnp.mean((jax.nn.gelu(x @ p["a"]) @ p["b"]).astype(jnp.float32) ** 2)

    def tower(p, x):
        @jax.checkpoint
        def block(h, w):
            return h + jax.nn.gelu(h @ w["a"]) @ w["b"]

        h, _ = lax.scan(lambda h, w: (block(h, w), None), x, p)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    def transformer(p, x):
        @jax.checkpoint
        def block(h, w):
            heads = [(h @ w[name]).reshape(-1, 8, WIDTH // 8) for name in "qkv"]
            q, k, v = (head.swapaxes(0, 1) for head in heads)
            scores = jnp.einsum("htd,hsd->hts", q, k).astype(jnp.float32)
            mixed = jax.nn.softmax(scores).astype(jnp.bfloat16) @ v
            h = h + mixed.swapaxes(0, 1).reshape(h.shape) @ w["o"]
            gated = jax.nn.silu(h @ w["gate"]) * (h @ w["up"])
            return h + gated @ w["down"]

        h, _ = lax.scan(lambda h, w: (block(h, w), None), x, p["layers"])
        return jnp.mean((h @ p["head"]).astype(jnp.float32) ** 2)

    one = {"a": shape(WIDTH, HIDDEN), "b": shape(HIDDEN, WIDTH)}
    four = {"a": shape(4, WIDTH, HIDDEN), "b": shape(4, HIDDEN, WIDTH)}
    square, wide = shape(2, WIDTH, WIDTH), shape(2, WIDTH, HIDDEN)
    layers = {name: square for name in "qkvo"}
    layers |= {"gate": wide, "up": wide, "down": shape(2, HIDDEN, WIDTH)}
    recipes = {
        "current": CurrentScaling(),
        "row": CurrentScaling(granularity="row"),
        "compute": CurrentScaling(weight_grad="compute"),
        "static": StaticScaling(activation_max=8.0, weight_max=1.0, grad_max=1.0),
        "delayed": DelayedScaling(),
    }
    found = {"bf16": (mlp, one)}
    for name, recipe in recipes.items():
        found[f"mlp {name}"] = (fp8(mlp, recipe, min_gain=0), one)
        found[f"tower {name}"] = (fp8(tower, recipe, min_gain=0), four)
    lm = {"layers": layers, "head": shape(WIDTH, 512)}
    found["transformer"] = (fp8(transformer, min_gain=0), lm)
    return found


def main():
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies

    from mpx import fp8_check

    topology = topologies.get_topology_desc(
        platform="cuda", target_config=TARGET, topology="1x1x1"
    )
    device = jax.sharding.SingleDeviceSharding(topology.devices[0])

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=device)

    results = {}
    for name, (func, params) in programs(jax, shape).items():
        args = (params, shape(TOKENS, WIDTH))
        if getattr(func, "has_state", False):
            state = func.init(*args)
            as_shape = lambda leaf: shape(*leaf.shape, dtype=leaf.dtype)  # noqa: E731
            args = (jax.tree.map(as_shape, state), *args)
        gradient = jax.jit(jax.grad(func, argnums=tuple(range(len(args)))))
        try:
            found = fp8_check(gradient.lower(*args).compile())
            results[name] = {"fp8": found.fp8, "other": dict(found.other)}
        except Exception as error:
            results[name] = {"error": str(error)[:2000]}
    print(json.dumps(results))


if __name__ == "__main__":
    sys.exit(main())
