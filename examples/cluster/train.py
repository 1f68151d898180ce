"""Trains a language model on all devices of all processes of a job.

    python train.py                                  # the devices of this machine
    python train.py --coordinator HOST:PORT --processes 2 --process-id 0   # by hand, and 1
    srun -n 2 python train.py                        # Slurm; see slurm.sh
    python ray_train.py --workers 2                  # Ray
    kubectl apply -f jobset.yaml                     # Kubernetes; or kubeflow.yaml

FSDP through jit, bf16 through `mpx.amp`, AdamW in 5 bytes a parameter, steps with bad
gradients skipped everywhere, checkpoints written while training goes on. If the job is
killed, start it again: it goes on from the latest checkpoint and ends with the same bits.
The text is the manual behind Python's `help()`, so there is nothing to download.
"""

import argparse
import functools
import hashlib
import os
import signal
import time
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx

LENGTH, WIDTH, HEADS, LAYERS = 64, 64, 4, 2
optimizer = mpx.optim.flash_adamw(3e-3)


# --- The model: a decoder in plain JAX, its layers stacked and scanned ----------------


def init(seed):
    def normal(key, *shape):
        return jax.random.normal(key, shape, jnp.bfloat16) * shape[-2] ** -0.5

    keys = jax.random.split(jax.random.key(seed), 6)
    params = {
        "embed": normal(keys[0], 128, WIDTH),
        "position": normal(keys[1], LENGTH, WIDTH),
        "layers": {
            "qkv": normal(keys[2], LAYERS, WIDTH, 3 * WIDTH),
            "out": normal(keys[3], LAYERS, WIDTH, WIDTH),
            "up": normal(keys[4], LAYERS, WIDTH, 4 * WIDTH),
            "down": normal(keys[5], LAYERS, 4 * WIDTH, WIDTH),
        },
    }
    return {
        "params": params,
        "optimizer": optimizer.init(params),
        "skipped": jnp.int32(0),
    }


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def layer(x, weights):
    heads = (norm(x) @ weights["qkv"]).reshape(*x.shape[:2], 3, HEADS, -1)
    q, k, v = heads[:, :, 0], heads[:, :, 1], heads[:, :, 2]
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + mixed.reshape(x.shape) @ weights["out"]
    return x + jax.nn.gelu(norm(x) @ weights["up"]) @ weights["down"], None


def loss_fn(params, tokens):
    x = params["embed"][tokens[:, :-1]] + params["position"]
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    logits = mpx.cast_to_float32(norm(x) @ params["embed"].T)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train_step(state, tokens):
    grad_fn = mpx.value_and_grad(mpx.amp(loss_fn), policy="f32")
    result = grad_fn(mpx.NoLossScaling(), state["params"], tokens)
    params, optimizer_state = optimizer.step(  # changes nothing unless all is finite
        state["params"], state["optimizer"], result.grads, finite=result.finite
    )
    skipped = state["skipped"] + ~result.finite
    state = {"params": params, "optimizer": optimizer_state, "skipped": skipped}
    return state, result.value


# --- Where everything lies ------------------------------------------------------------


def fsdp(mesh, shapes):
    """Cuts the rows of each matrix over all devices; the rest is everywhere."""

    def place(x):
        is_cut = x.ndim >= 2 and x.shape[-2] % mesh.size == 0
        return NamedSharding(mesh, P(*[None] * (x.ndim - 2), "data") if is_cut else P())

    return jax.tree.map(place, shapes)


def batch(text, number, rows, sharding):
    """Returns batch `number`: the same for each start of the job. Reads local rows only."""
    starts = np.random.default_rng(number).integers(len(text) - LENGTH, size=rows)
    places = starts[:, None] + np.arange(LENGTH + 1)
    return jax.make_array_from_callback(
        places.shape, sharding, lambda i: text[places[i]]
    )


def digest(state, mesh):
    """Returns a hash of all bits of a state, from this process's own copy."""
    gather = jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))
    leaves = [np.asarray(x).tobytes() for x in jax.tree.leaves(gather(state))]
    return hashlib.sha256(b"".join(leaves)).hexdigest()[:16]


# --- The job --------------------------------------------------------------------------


def join(args):
    """Joins the other processes, unless the engine has done it, and counts them."""
    if args.processes > 1 and not jax.distributed.is_initialized():
        if args.coordinator:
            jax.distributed.initialize(
                args.coordinator, args.processes, args.process_id
            )
        else:
            jax.distributed.initialize()  # Slurm and others describe the job
    mpx.inspect.check_processes(args.processes)


def train(args):
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    along = NamedSharding(mesh, P("data"))
    start = functools.partial(init, args.seed)
    where = fsdp(mesh, jax.eval_shape(start))
    template = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(start),
        where,
    )
    step = jax.jit(train_step, donate_argnums=0, out_shardings=(where, None))
    manual = "\n".join(topics[name] for name in sorted(topics)).encode(
        "ascii", "replace"
    )
    text = np.frombuffer(manual, np.uint8).astype(np.int32)

    def say(*words):
        if jax.process_index() == 0:
            print(*words, flush=True)

    say(f"processes: {jax.process_count()}, devices: {mesh.size}")
    with mpx.checkpoint.Checkpointer(args.out, keep=2) as checkpoints:
        done = checkpoints.latest()
        if done is None:
            state, done = jax.jit(start, out_shardings=where)(), 0
        else:
            state = checkpoints.restore(template)
            say(f"resumed after step {done}")
        resumed, clock = done > 0, time.perf_counter()
        for number in range(done, args.steps):
            is_last = jax.process_index() == jax.process_count() - 1
            if number == args.die_at and is_last and not resumed:
                os.kill(os.getpid(), signal.SIGKILL)
            tokens = batch(text, number, args.batch, along)
            state, loss = step(state, tokens)
            if (number + 1) % args.every == 0 or number + 1 == args.steps:
                checkpoints.save(number + 1, state)  # returns before it is written
                speed = (number + 1 - done) / (time.perf_counter() - clock)
                say(
                    f"step {number + 1:>5}/{args.steps}  loss {float(loss):.4f}  "
                    f"skipped {int(state['skipped'])}  {speed:.2f} steps/s"
                )
    print(f"process {jax.process_index()}: state {digest(state, mesh)}", flush=True)


def main(argv=None):
    # Kubeflow sets the first three, as jobset.yaml does; Slurm sets the last.
    env = os.environ
    processes = env.get("JAX_NUM_PROCESSES") or env.get("SLURM_NTASKS") or 1
    parser = argparse.ArgumentParser(
        description="Trains a language model on a cluster."
    )
    add = parser.add_argument
    add(
        "--coordinator", default=env.get("JAX_COORDINATOR_ADDRESS"), metavar="HOST:PORT"
    )
    add("--process-id", type=int, default=env.get("JAX_PROCESS_ID"), metavar="I")
    add(
        "--processes",
        type=int,
        default=processes,
        metavar="N",
        help="that were asked for",
    )
    add(
        "--out",
        default="run",
        help="folder of the checkpoints, shared by all processes",
    )
    add("--steps", type=int, default=200, metavar="N")
    add("--every", type=int, default=20, metavar="N", help="steps between checkpoints")
    add(
        "--batch",
        type=int,
        default=32,
        metavar="N",
        help="rows of all devices together",
    )
    add("--seed", type=int, default=0, metavar="N")
    add("--die-at", type=int, metavar="N", help="kill the last process once, to try it")
    args = parser.parse_args(argv)
    join(args)
    train(args)


if __name__ == "__main__":
    main()
