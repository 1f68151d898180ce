"""Compiles for an H200 on a machine without a GPU. Run as a program it compiles fp8.

Needs the CUDA plugin of JAX and NVIDIA's compiler, but no GPU. The program prints one JSON
object: by the name of each function, its matmuls, or the error of the compiler.
"""

import json
import re
import sys
from typing import Any

from scripts import script

TOKENS, WIDTH, HIDDEN = 2048, 1024, 4096
# A matmul of integers that sums over the last axis of both.
ROWS = r"= s32\S* dot\(.*lhs_contracting_dims=\{1\}, rhs_contracting_dims=\{1\}"


def devices():
    """Eight H200s that one can compile for."""
    return script("_h200").devices(8)


def described():
    """Traces the code inside for an H200."""
    return script("_h200").described()


def compiler_options() -> dict[str, Any]:
    """Where NVIDIA's compiler is; nothing can be timed without a GPU."""
    return script("_h200").compiler_options()


def mlp(p, x):
    """Two matmuls."""
    import jax
    import jax.numpy as jnp

    return jnp.mean((jax.nn.gelu(x @ p["a"]) @ p["b"]).astype(jnp.float32) ** 2)


def tower(p, x):
    """Several such blocks, scanned and rematerialised."""
    import jax
    import jax.numpy as jnp

    @jax.checkpoint
    def block(h, w):
        return h + jax.nn.gelu(h @ w["a"]) @ w["b"]

    h, _ = jax.lax.scan(lambda h, w: (block(h, w), None), x, p)
    return jnp.mean(h.astype(jnp.float32) ** 2)


def programs(jax, shape) -> dict[str, Any]:
    """By name: a loss under fp8, and its parameters."""
    import jax.numpy as jnp
    from jax import lax

    from mpx import fp8
    from mpx.recipes import CurrentScaling, DelayedScaling, Int8, StaticScaling

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
        "static": StaticScaling(activation_max=8.0, weight_max=1.0, grad_max=1.0),
        "delayed": DelayedScaling(),
        "int8": Int8(),
        "int8 forward": Int8(backward=False),
    }
    found = {"bf16": (mlp, one)}
    for name, recipe in recipes.items():
        found[f"mlp {name}"] = (fp8(mlp, recipe, min_gain=0), one)
        found[f"tower {name}"] = (fp8(tower, recipe, min_gain=0), four)
    lm = {"layers": layers, "head": shape(WIDTH, 512)}
    found["transformer"] = (fp8(transformer, min_gain=0), lm)
    return found


LAYOUTS = {
    "data": (("x",), (), ()),
    "fsdp": (("x",), ("x",), ("x",)),
    "tensor": ((), (None, "x"), ("x",)),
}


def sharded(jax, loss) -> dict[str, Any]:
    """By name: `loss` over eight devices, its arguments and their mesh."""
    import jax.numpy as jnp
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    found = {}
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = Mesh(devices(), "x", axis_types=(kind,))
        for name, specs in LAYOUTS.items():
            if (kind, name) == (AxisType.Explicit, "tensor"):
                continue  # JAX refuses it: the function must say how the sum is sharded.
            sizes = (2 * TOKENS, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH)
            x, up, down = (
                jax.ShapeDtypeStruct(
                    size,
                    jnp.bfloat16,
                    sharding=NamedSharding(mesh, PartitionSpec(*spec)),
                )
                for size, spec in zip(sizes, specs, strict=True)
            )
            params = {"a": up, "b": down}
            found[f"{name} {kind.name.lower()}"] = loss, (params, x), mesh
            if (kind, name) == (AxisType.Auto, "data"):
                manual = jax.shard_map(
                    lambda p, x: jax.lax.pmean(loss(p, x), "x"),
                    mesh=mesh,
                    in_specs=(PartitionSpec(), PartitionSpec("x")),
                    out_specs=PartitionSpec(),
                )
                found["shard_map"] = manual, (params, x), mesh
    return found


def main():
    import jax
    import jax.numpy as jnp

    import mpx

    mesh = jax.sharding.Mesh(devices()[:1], "x")
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=everywhere)

    cases = {}
    for name, (func, params) in programs(jax, shape).items():
        args = (params, shape(TOKENS, WIDTH))
        if getattr(func, "has_state", False):
            state = func.init(*args)
            as_shape = lambda leaf: shape(*leaf.shape, dtype=leaf.dtype)  # noqa: E731
            args = (jax.tree.map(as_shape, state), *args)
        cases[name] = func, args, mesh
    cases |= sharded(jax, cases["mlp current"][0])
    results = {}
    for name, (func, args, mesh) in cases.items():
        gradient = jax.jit(jax.grad(func, argnums=tuple(range(len(args)))))
        try:
            # Pallas asks the mesh for the kind of its GPUs.
            with jax.set_mesh(mesh):
                program = gradient.lower(*args).compile(compiler_options())
        except Exception as error:
            results[name] = {"error": str(error)[:2000]}
            continue
        found, text = mpx.inspect.fp8_check(program), str(program.as_text())
        results[name] = {
            "fp8": found.fp8,
            "int8": found.int8,
            "other": dict(found.other),
            "casts": text.count('"__gpu$xla.gpu.triton"'),
            "rows": len(re.findall(ROWS, text)),
        }
    print(json.dumps(results))


if __name__ == "__main__":
    sys.exit(main())
