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


def init():
    def normal(key, *shape):
        return jax.random.normal(key, shape) * shape[-2] ** -0.5

    keys = jax.random.split(jax.random.key(0), 6)
    weights = {
        "embed": normal(keys[0], 128, WIDTH),
        "position": normal(keys[1], LENGTH, WIDTH),
        "layers": {
            "qkv": normal(keys[2], LAYERS, WIDTH, 3 * WIDTH),
            "out": normal(keys[3], LAYERS, WIDTH, WIDTH),
            "up": normal(keys[4], LAYERS, WIDTH, 4 * WIDTH),
            "down": normal(keys[5], LAYERS, 4 * WIDTH, WIDTH),
        },
    }
    params, state = optimizer.init_from(weights)  # bf16, with 24-bit masters
    return {"params": params, "optimizer": state, "skipped": jnp.int32(0)}


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
    grad_fn = mpx.value_and_grad(mpx.amp(loss_fn))
    result = grad_fn(mpx.NoLossScaling(), state["params"], tokens)
    params, optimizer_state = optimizer.step(
        state["params"], state["optimizer"], result.grads, finite=result.finite
    )  # changes nothing, on any device, if a gradient of any device is not finite
    skipped = state["skipped"] + ~result.finite
    state = {"params": params, "optimizer": optimizer_state, "skipped": skipped}
    return state, result.value


# --- Where everything lies ------------------------------------------------------------


def fsdp(state, mesh):
    """Cuts the rows of each matrix over all devices; the rest is on every device."""

    def place(x):
        is_cut = x.ndim >= 2 and x.shape[-2] % mesh.size == 0
        spec = P(*[None] * (x.ndim - 2), "data") if is_cut else P()
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(place, state)


def load_text():
    manual = "\n".join(topics[name] for name in sorted(topics))
    return np.frombuffer(manual.encode("ascii", "replace"), np.uint8).astype(np.int32)


def batch(text, number, rows, mesh):
    """Returns batch `number`, the same at each start. A process reads its rows only."""
    starts = np.random.default_rng(number).integers(len(text) - LENGTH, size=rows)
    places = starts[:, None] + np.arange(LENGTH + 1)
    along = NamedSharding(mesh, P("data"))
    return jax.make_array_from_callback(places.shape, along, lambda i: text[places[i]])


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
            place = args.coordinator, args.processes, args.process_id
            jax.distributed.initialize(*place)
        else:
            jax.distributed.initialize()  # Slurm and others describe the job
    mpx.check_processes(args.processes)


def train(args):
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    template = fsdp(jax.eval_shape(init), mesh)
    where = jax.tree.map(lambda x: x.sharding, template)
    step = jax.jit(train_step, donate_argnums=0, out_shardings=(where, None))
    text = load_text()
    is_first = jax.process_index() == 0
    is_last = jax.process_index() == jax.process_count() - 1

    def say(line):
        if is_first:
            print(line, flush=True)

    say(f"processes: {jax.process_count()}, devices: {mesh.size}")
    with mpx.checkpoint.Checkpointer(args.out, keep=2) as checkpoints:
        done, clock = checkpoints.latest(), time.perf_counter()
        if done is None:
            state = jax.jit(init, out_shardings=where)()
        else:
            state = checkpoints.restore(template)
            say(f"resumed after step {done}")
        for number in range(done or 0, args.steps):
            if number == args.die_at and is_last and done is None:
                os.kill(os.getpid(), signal.SIGKILL)
            state, loss = step(state, batch(text, number, args.batch, mesh))
            if (number + 1) % args.every == 0 or number + 1 == args.steps:
                checkpoints.save(number + 1, state)  # returns before it is written
                say(
                    f"step {number + 1}/{args.steps}  loss {float(loss):.4f}  skipped "
                    f"{int(state['skipped'])}  {time.perf_counter() - clock:.0f} s"
                )
    print(f"process {jax.process_index()}: state {digest(state, mesh)}", flush=True)


def parse(argv=None):
    env = os.environ  # JAX_…: Kubeflow and jobset.yaml; SLURM_NTASKS: Slurm
    size = env.get("JAX_NUM_PROCESSES") or env.get("SLURM_NTASKS") or 1
    rank, host = env.get("JAX_PROCESS_ID"), env.get("JAX_COORDINATOR_ADDRESS")
    parser = argparse.ArgumentParser(description="Trains on all devices of a job.")
    add = parser.add_argument
    add("--coordinator", default=host, metavar="HOST:PORT", help="of process 0")
    add("--processes", type=int, default=size, metavar="N", help="that should run")
    add("--process-id", type=int, default=rank, metavar="I", help="of this process")
    add("--out", default="run", help="shared folder of the checkpoints")
    add("--steps", type=int, default=200, metavar="N")
    add("--every", type=int, default=20, metavar="N", help="steps between checkpoints")
    add("--batch", type=int, default=32, metavar="N", help="rows on all devices")
    add("--die-at", type=int, metavar="N", help="kill the last process, to try it")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    join(args)
    train(args)


if __name__ == "__main__":
    main()
