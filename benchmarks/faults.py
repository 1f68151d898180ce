"""Counts what faults do to a training run: skipped steps, corrupted bytes, the loss scale.

    python benchmarks/faults.py                    # 1,000 faults, and bursts of 10,000
    python benchmarks/faults.py --faults 40 --burst 500
    python benchmarks/faults.py --jaxamp ~/jaxamp/src --paper ~/mixed_precision_for_JAX

A fault is drawn at random: the step, one of six leaves, the number, one of eight devices,
forward or backward, and its kind (NaN, infinities, the largest number, a flipped bit of the
exponent). Whether a step must be skipped is decided on the host, with NumPy, from the
gradients: some large numbers and flipped bits leave them finite, and those must not be
skipped. The `mpx` rows share the 1,000 faults; each other library gets 200.
"""

import dataclasses
import functools
import importlib
import os
import sys
import time
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_FLAG = "--xla_force_host_platform_device_count=8"
if "device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import _measure as measure  # noqa: E402
import mpx  # noqa: E402
from mpx.testing import Fault, inject  # noqa: E402

ROWS, IN, HIDDEN, OUT = 64, 16, 32, 4
RATE = 2.0**-9
SCALE = 2.0**12  # gradients of each device, eight rows, do not overflow


class Training(NamedTuple):
    """What a step must not spoil, and the loss scaling and counters, which it may change."""

    params: Any
    optimizer: Any
    rest: Any


class Stepped(NamedTuple):
    """The new state, unscaled gradients and the loss scale; mpx checks the loss, too."""

    training: Training
    grads: Any
    scale: Any
    loss: Any = None


class Library(NamedTuple):
    """One way to train."""

    name: str
    init: Any  # from parameters to `Training`
    step: Any  # from `(training, x, y, fault, number)` to `Stepped`
    bounds: tuple[float, float]  # the least and the largest loss scale
    layout: str = "jit"


# --- the model ------------------------------------------------------------------------


def make_params(seed=0):
    """Small multiples of powers of two: the first gradient is exact at every scale."""
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = {"w1": (IN, HIDDEN), "w2": (HIDDEN, OUT), "b1": (HIDDEN,)}
    pairs = zip(keys, shapes.items(), strict=True)
    params = {k: jax.random.randint(key, x, -2, 3) / 4 for key, (k, x) in pairs}
    return params | {"b2": jnp.zeros(OUT)}


def make_batch(seed):
    x, y = jax.random.split(jax.random.key(1000 + seed))
    return (
        jax.random.randint(x, (ROWS, IN), -1, 2).astype(jnp.float32),
        jax.random.randint(y, (ROWS, OUT), -2, 3) / 2,
    )


def loss(params, x, y, fault, number, axis_name=None):
    def hit(**tree):
        return inject(tree, fault, number, axis_name=axis_name)

    params = hit(params=params)["params"]
    x = hit(x=x)["x"]
    hidden = jax.nn.relu(x @ params["w1"] + params["b1"])
    hidden = hit(hidden=hidden)["hidden"]
    out = hidden @ params["w2"] + params["b2"]
    return jnp.mean((out - y).astype(jnp.float32) ** 2)


def loss_f16(params, x, y, fault, number):
    """Casts by hand, for libraries that leave it to the user."""
    params, x, y = jax.tree.map(lambda a: a.astype(jnp.float16), (params, x, y))
    return loss(params, x, y, fault, number)


# --- layouts over all devices ---------------------------------------------------------


def shardings(layout):
    """Returns where parameters and activations lie: sharded weights, or copies of them."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    specs = {"w1": P("data"), "b1": P("data"), "w2": P("data"), "b2": P()}
    if layout == "shard_map":
        specs = dict.fromkeys(specs, P())
    specs |= {"x": P("data"), "y": P("data"), "hidden": P("data")}
    return {name: NamedSharding(mesh, spec) for name, spec in specs.items()}


def targets(layout):
    """Returns what faults can hit: shapes in f16, with their shardings."""
    where = shardings(layout)
    of = lambda k, x: jax.ShapeDtypeStruct(x, jnp.float16, sharding=where[k])  # noqa: E731
    params = {name: of(name, x.shape) for name, x in make_params().items()}
    others = {"hidden": (ROWS, HIDDEN), "x": (ROWS, IN)}
    return {"params": params} | {name: of(name, x) for name, x in others.items()}


def placed(tree, layout):
    where = shardings(layout)
    return {name: jax.device_put(x, where[name]) for name, x in tree.items()}


def start(library):
    """Returns the first state over eight devices, and a step that keeps its shardings."""
    training = library.init(placed(make_params(), library.layout))
    everywhere = shardings("shard_map")["b2"]

    def spread(x):
        x = jnp.asarray(x)
        return x if len(x.devices()) > 1 else jax.device_put(x, everywhere)

    training = jax.tree.map(spread, training)
    where = jax.tree.map(lambda x: x.sharding, training)
    return training, jax.jit(library.step, out_shardings=Stepped(where, None, None))


# --- mpx ------------------------------------------------------------------------------


def ours(name, optimizer, *, layout, dtype=jnp.float32, compute=jnp.float16):
    axis = "data" if layout == "shard_map" else None
    policy = mpx.Policy(dtype, compute, jnp.float32)
    take = mpx.value_and_grad(loss, policy=policy, axis_name=axis)

    def init(params):
        scaling = mpx.DynamicLossScaling.pow2(SCALE)
        if dtype == jnp.float32:
            return Training(params, optimizer.init(params), scaling)
        params, state = optimizer.init_from(params, dtype)
        return Training(params, state, scaling)

    def step(training, x, y, fault, number):
        params, state, scaling = training
        result = take(scaling, params, x, y, fault, number, axis)
        scaling, grads = result.scaling, result.grads
        update = mpx.optimizer_update
        params, state = update(params, optimizer, state, grads, result.finite)
        new = Training(params, state, scaling)
        return Stepped(new, grads, scaling.loss_scaling, result.value)

    if layout == "shard_map":
        where = {"mesh": shardings(layout)["x"].mesh, "check_vma": False}
        specs = (P(), P("data"), P("data"), P(), P())
        step = jax.shard_map(step, in_specs=specs, out_specs=P(), **where)
    return Library(name, init, step, (1.0, 2.0**24), layout)


SMALL = mpx.optim.Compression(min_size=0, group_size=4)  # compresses small weights too


def all_ours():
    adamw, bf16 = optax.adamw(RATE), jnp.bfloat16
    flash = mpx.optim.flash_adamw(RATE, compression=SMALL)
    lion = mpx.optim.flash_lion(RATE, compression=SMALL)
    return [
        ours("mpx, optax.adamw, sharded", adamw, layout="jit"),
        ours("mpx, optax.adamw, copies", adamw, layout="shard_map"),
        ours("mpx, flash_adamw, sharded", flash, layout="jit", dtype=bf16),
        ours("mpx, flash_lion, copies", lion, layout="shard_map", dtype=bf16),
    ]


# --- others ---------------------------------------------------------------------------


F32 = jnp.finfo(jnp.float32)
WIDE = float(F32.tiny), float(F32.max)


def with_adamw(name, bounds, scaling, take):
    """Returns a library that scales by `scaling`, and steps with `take` and AdamW.

    `take(scaling, params, *args)` returns the new scaling, its number, the gradients and
    a function that chooses between the new state and the old one.
    """
    optimizer = optax.adamw(RATE)

    def step(training, *args):
        params, state, scaling = training
        scaling, scale, grads, choose = take(scaling, params, *args)
        updates, new_state = optimizer.update(grads, state, params)
        new = optax.apply_updates(params, updates), new_state
        params, state = jax.tree.map(choose, new, (params, state))
        return Stepped(Training(params, state, scaling), grads, scale)

    init = lambda params: Training(params, optimizer.init(params), scaling())  # noqa: E731
    return Library(name, init, step, bounds)


def flax():
    from flax.training.dynamic_scale import DynamicScale

    def take(scale, *args):
        scale, finite, _, grads = scale.value_and_grad(loss_f16)(*args)
        # As the example of its documentation does.
        return scale, scale.scale, grads, functools.partial(jnp.where, finite)

    start = lambda: DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(SCALE))  # noqa: E731
    return with_adamw("Flax DynamicScale", WIDE, start, take)


def apply_if_finite():
    optimizer = optax.apply_if_finite(optax.adamw(RATE), max_consecutive_errors=5)

    def split(params, state):
        return Training(params, state.inner_state, state._replace(inner_state=None))

    def step(training, *args):
        params, inner, counters = training
        # It has no scaling: a fixed one.
        grads = jax.grad(lambda *args: SCALE * loss_f16(*args))(params, *args)
        grads = jax.tree.map(lambda g: g / SCALE, grads)
        state = counters._replace(inner_state=inner)
        updates, state = optimizer.update(grads, state, params)
        new = split(optax.apply_updates(params, updates), state)
        return Stepped(new, grads, jnp.float32(SCALE))

    init = lambda params: split(params, optimizer.init(params))  # noqa: E731
    return Library("optax.apply_if_finite", init, step, (SCALE, SCALE))


def paper(folder):
    """Returns mixed-precision-for-JAX, whose package has the name of ours."""
    if folder is None:
        return None
    is_mpx = lambda name: name == "mpx" or name.startswith("mpx.")  # noqa: E731
    ours = {name: sys.modules.pop(name) for name in filter(is_mpx, [*sys.modules])}
    sys.path.insert(0, folder)
    try:
        theirs = importlib.import_module("mpx")
        theirs_grad = importlib.import_module("mpx._grad_tools")
    except ImportError:
        return None
    finally:
        sys.path.remove(folder)
        for name in filter(is_mpx, [*sys.modules]):
            del sys.modules[name]
        sys.modules.update(ours)

    optimizer = optax.adamw(RATE)

    def init(params):
        scaling = theirs.DynamicLossScaling(jnp.float32(SCALE), jnp.float32(1.0))
        return Training(params, optimizer.init(params), scaling)

    def step(training, *args):
        params, state, scaling = training
        take = theirs_grad.filter_value_and_grad(loss, scaling)
        _, scaling, finite, grads = take(params, *args)
        update = theirs_grad.optimizer_update
        params, state = update(params, optimizer, state, grads, finite)
        new = Training(params, state, scaling)
        return Stepped(new, grads, scaling.loss_scaling)

    return Library("mixed-precision-for-JAX", init, step, (1.0, 65504.0))


def jaxamp(folder):
    sys.path += [folder] if folder else []
    try:
        package = importlib.import_module("jaxamp")
    except Exception:  # it reads private parts of JAX, which other versions lack
        return None

    def take(state, *args):
        found = package.dynamic_scale_value_and_grad(loss_f16)
        state, (_, grads) = found(*args, dynamic_scaler_state=state)
        # As its documentation does: gradients are taken again up to ten times, then used.
        return state, state.scaler, grads, lambda new, _: new

    start = lambda: package.DynamicScalerState(scaler=jnp.float32(SCALE))  # noqa: E731
    return with_adamw("jaxamp", WIDE, start, take)


# --- counting ---------------------------------------------------------------------------

KINDS = ("nan", "inf", "-inf", "huge", "flip")
BATCHES = 4


@dataclasses.dataclass
class Count:
    """What a library did with faults."""

    faults: int = 0  # with gradients that are not finite
    skipped: int = 0  # of them, with not one byte of parameters and optimizer changed
    corrupted: int = 0  # bytes that differ after the others
    healthy: int = 0  # steps without a fault
    lost: int = 0  # of them, those that changed nothing
    harmless: int = 0  # faults with finite gradients
    refused: int = 0  # of them, those that were skipped all the same
    same_end: bool = True  # bit for bit where the fault-free run ends

    @property
    def exact(self):
        wrong = self.corrupted or self.lost or self.refused
        return self.skipped == self.faults and not wrong and self.same_end


class Burst(NamedTuple):
    """The least and largest loss scale in a burst of faults, and what it left."""

    low: float
    high: float
    inside: bool  # the bounds of the library
    intact: bool  # parameters and optimizer
    same_grads: bool  # as without the burst

    @property
    def exact(self):
        return self.inside and self.intact and self.same_grads


def count_faults(library, count, seed):
    """Plants faults into a run, with a good step after each."""
    draw = np.random.default_rng(seed)
    things = targets(library.layout)
    batches = [placed(dict(zip("xy", make_batch(i), strict=True)), library.layout)
               for i in range(BATCHES)]  # fmt: skip
    training, step = start(library)
    calm, never = training, Fault(things, step=-1)
    result, good = Count(), 0
    while result.faults < count:
        batch = batches[good % BATCHES]
        number = int(draw.integers(1, 1_000_000))
        fault = draw_fault(draw, things, number)
        before = snapshot(training)
        hit = step(training, batch["x"], batch["y"], fault, number)
        changed = different_bytes(before, snapshot(hit.training))
        if all_finite(hit.grads):
            result.harmless += 1
            result.refused += not changed
            continue  # as if it had not happened
        result.faults += 1
        result.skipped += not changed
        result.corrupted += changed
        if changed:  # go on from the state that was good
            hit = hit._replace(training=training)
        # The same fault, at another step: nothing happens.
        healthy = step(hit.training, batch["x"], batch["y"], fault, number + 1)
        result.healthy += 1
        result.lost += not different_bytes(before, snapshot(healthy.training))
        # Each fault begins with the first loss scale: some need 2,000 steps to get back.
        training, good = healthy.training._replace(rest=training.rest), good + 1
        calm = step(calm, batch["x"], batch["y"], never, 0).training
    same = not different_bytes(snapshot(training), snapshot(calm))
    result.same_end = same and not result.corrupted
    return result


def draw_fault(draw, things, step):
    """Draws a fault; nothing goes back to the batch."""
    leaf = str(draw.choice([*(f"params/{k}" for k in things["params"]), "hidden", "x"]))
    struct = things["params"].get(leaf.removeprefix("params/")) or things[leaf]
    shard = struct.sharding.shard_shape(struct.shape)
    return Fault(
        things,
        draw.choice(KINDS).item(),
        leaf=leaf,
        index=int(draw.integers(np.prod(shard))),
        step=step,
        device=int(draw.integers(jax.device_count())),
        backward=leaf != "x" and bool(draw.integers(2)),
    )


def snapshot(training):
    """Returns the bytes of parameters and optimizer, of every copy on every device."""
    found = []
    for leaf in jax.tree.leaves(training[:2]):
        shards = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        found += [np.frombuffer(shard.tobytes(), np.uint8) for shard in shards]
    return found


def different_bytes(a, b):
    return sum(int(np.sum(x != y)) for x, y in zip(a, b, strict=True))


def all_finite(tree):
    return all(
        np.isfinite(np.asarray(x.data)).all()
        for leaf in jax.tree.leaves(tree)
        for x in leaf.addressable_shards
    )


def burst(library, steps):
    """Runs many bad steps in one `lax.scan` on one device, then a good one."""
    params = make_params()
    fault = Fault({"params": params}, "nan", leaf="params/w2", steps=steps)
    never = Fault({"params": params}, step=-1)
    first, (x, y) = jax.tree.map(jnp.asarray, library.init(params)), make_batch(0)
    step = jax.jit(library.step)

    @jax.jit
    def bad(training):
        def body(carry, number):
            stepped = library.step(carry, x, y, fault, number)
            new = jax.tree.map(lambda a, b: jnp.asarray(a).astype(b.dtype),
                               stepped.training, carry)  # fmt: skip
            return new, stepped.scale

        return lax.scan(body, training, jnp.arange(steps))

    end, scales = bad(first)
    after, fresh = step(end, x, y, never, 0), step(first, x, y, never, 0)
    low, high = float(scales.min()), float(scales.max())
    least, largest = library.bounds
    # A comparison with nan is false.
    inside = bool(np.all((scales >= least) & (scales <= largest)))
    intact = not different_bytes(snapshot(first), snapshot(end))
    pairs = zip(*map(jax.tree.leaves, (after.grads, fresh.grads)), strict=True)
    same = all(np.array_equal(a, b) for a, b in pairs)
    return Burst(low, high, inside, intact, same)


def main():
    options = measure.read_options(
        __doc__, "faults=1000 others=200 burst=10000 seed=0 jaxamp=str paper=str"
    )
    own, began, others, fine = all_ours(), time.perf_counter(), [], True
    if options.others:
        more = paper(options.paper), jaxamp(options.jaxamp)
        others = [flax(), apply_if_finite(), *filter(None, more)]
    print(f"{measure.environment()}, {jax.device_count()} devices; seed {options.seed}")
    measure.print_head(
        "library", "faults", "exact skips", "corrupted bytes", "healthy steps lost",
        "finite faults skipped", "same end",
    )  # fmt: skip
    for index, library in enumerate([*own, *others]):
        count = len(range(index, options.faults, len(own)))
        seed = options.seed + index
        if library in others:
            count, seed = min(options.others, options.faults), options.seed
        c = count_faults(library, count, seed)
        fine &= c.exact or library in others
        shares = f"{c.lost} of {c.healthy}", f"{c.refused} of {c.harmless}"
        counts = c.faults, c.skipped, c.corrupted
        measure.print_row(library.name, *counts, *shares, yes(c.same_end))
    measure.print_head(
        "library", "bad steps", "loss scale", "inside its bounds", "state unchanged",
        "next gradient equal",
    )  # fmt: skip
    for library in [*(x for x in own if x.layout == "jit"), *others]:
        b = burst(library, options.burst)
        fine &= b.exact or library in others
        scales = f"{b.low:.4g} to {b.high:.4g}"
        measure.print_row(library.name, options.burst, scales, *map(yes, b[2:]))
    return measure.print_end(fine, began)


def yes(value):
    return "yes" if value else "no"


if __name__ == "__main__":
    sys.exit(main())
