"""Trains a Flax NNX GPT on all devices: FSDP, `mpx.amp` and a compressed AdamW.

    python examples/nnx_gpt_fsdp.py                  # on the devices that there are
    python examples/nnx_gpt_fsdp.py --cpu-devices 8  # on a laptop, with eight of them

Each device holds a part of every parameter, a bf16 array, and of the optimizer's state: 5.2
bytes a parameter together. Weights are gathered in bf16, gradients are summed in f32.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from _text import CHARACTERS, batches

LENGTH, WIDTH, HEADS, LAYERS = 64, 128, 4, 2


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm1 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, use_bias=False, decode=False, rngs=rngs
        )
        self.norm2 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(CHARACTERS, WIDTH, rngs=rngs)
        self.places = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, CHARACTERS, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.places(jnp.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main(argv=None):
    parser = argparse.ArgumentParser(description="Trains a GPT under FSDP.")
    parser.add_argument("--steps", type=int, default=200, metavar="N")
    parser.add_argument("--cpu-devices", type=int, metavar="N")
    args = parser.parse_args(argv)
    if args.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.cpu_devices)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))

    # Made in parts: a model too large for one device is never on one.
    def make():
        return nnx.state(GPT(nnx.Rngs(0)), nnx.Param)

    graph = nnx.graphdef(nnx.eval_shape(lambda: GPT(nnx.Rngs(0))))
    shardings = mpx.fsdp_shardings(jax.eval_shape(make), mesh)
    weights = jax.jit(make, out_shardings=shardings)()
    optimizer = mpx.optim.flash_adamw(optax.cosine_decay_schedule(2e-3, args.steps))
    params, state = jax.jit(optimizer.init_from)(weights)

    def loss_fn(params, tokens):
        logits = nnx.merge(graph, params)(tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, tokens):
        loss, grads = jax.value_and_grad(mpx.amp(loss_fn))(params, tokens)
        params, state = optimizer.step(params, state, grads)
        return params, state, loss

    by_device, losses = NamedSharding(mesh, P("data")), []
    for tokens in batches(args.steps, 4 * jax.device_count(), LENGTH):
        params, state, loss = step(params, state, jax.device_put(tokens, by_device))
        losses.append(float(loss))
        if len(losses) % 20 == 0:
            print(f"step {len(losses)}: loss {losses[-1]:.3f}", flush=True)

    leaves = jax.tree.leaves((params, state))
    count = sum(x.size for x in jax.tree.leaves(params))
    total = sum(x.nbytes for x in leaves)
    held = sum(x.addressable_shards[0].data.nbytes for x in leaves)
    print(f"{count:,} parameters, {total / count:.2f} bytes each with their state")
    print(f"one of {jax.device_count()} devices holds {held / total:.1%} of them")
    return losses, held / total


if __name__ == "__main__":
    main()
