"""Ways to train: adversaries, meta-learning, physics, reinforcement, named axes."""

# pyright: reportMissingImports=false

import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from _zoo import equinox_family
from _zoo.model import (
    Case,
    Lazy,
    Model,
    at_least_f32,
    key,
    normal,
    squared_error,
    tokens,
)

hk = Lazy("haiku")
nn = Lazy("flax.linen")
rlax = Lazy("rlax")


def dense(seed, *widths):
    """Returns the layers of a plain MLP."""
    return [
        {"w": normal(seed + i, m, n) / m**0.5, "b": jnp.zeros(n)}
        for i, (m, n) in enumerate(itertools.pairwise(widths))
    ]


def mlp(layers, x, activation=jax.nn.relu):
    """Applies them."""
    for layer in layers[:-1]:
        x = activation(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


def wgan():
    """A critic with a penalty on its gradient, and a generator: two optimizers."""
    critic, critic_static = eqx.partition(
        eqx.nn.MLP(8, "scalar", 64, 2, jax.nn.silu, key=key(0)), eqx.is_inexact_array
    )
    generator, generator_static = eqx.partition(
        eqx.nn.MLP(16, 8, 64, 2, key=key(1)), eqx.is_inexact_array
    )

    def critic_loss(critic, generator, batch):
        real, noise, mix = batch
        score = eqx.combine(critic, critic_static)
        fake = jax.vmap(eqx.combine(generator, generator_static))(noise)
        slopes = jax.vmap(jax.grad(score))(mix * real + (1 - mix) * fake)
        norms = jnp.sqrt(jnp.sum(jnp.square(at_least_f32(slopes)), 1) + 1e-6)
        gap = jnp.mean(at_least_f32(jax.vmap(score)(fake) - jax.vmap(score)(real)))
        return gap + 10 * jnp.mean(jnp.square(norms - 1))

    def generator_loss(generator, critic, batch):
        _, noise, _ = batch
        fake = jax.vmap(eqx.combine(generator, generator_static))(noise)
        scores = jax.vmap(eqx.combine(critic, critic_static))(fake)
        return -jnp.mean(at_least_f32(scores))

    data = (
        2 + normal(2, 64, 8),
        normal(3, 64, 16),
        jax.random.uniform(key(4), (64, 1)),
    )
    rival = Case(generator_loss, generator, data, learning_rate=3e-4, beside=critic)
    return Case(critic_loss, critic, data, beside=generator, rival=rival)


def maml():
    """MAML: the loss after a step of gradient descent on each task."""

    def task_loss(layers, x, y):
        return squared_error(mlp(layers, x, jnp.tanh), y)

    def loss(layers, batch):
        def adapted(x, y, new_x, new_y):
            slopes = jax.grad(task_loss)(layers, x, y)
            fast = jax.tree.map(lambda p, g: p - 0.1 * g, layers, slopes)
            return task_loss(fast, new_x, new_y)

        return jnp.mean(jax.vmap(adapted)(*batch))

    x, phase = normal(0, 8, 20, 1), normal(1, 8, 1, 1)
    y = jnp.sin(2 * x + phase)
    batch = (x[:, :10], y[:, :10], x[:, 10:], y[:, 10:])
    return Case(loss, dense(2, 1, 64, 64, 1), batch)


def pinn():
    """Burgers' equation: second derivatives of the network in its inputs."""
    model = eqx.nn.MLP(2, "scalar", 32, 3, jnp.tanh, key=key(0))

    def call(model, batch):
        points, starts = batch

        def residual(point):
            along = lambda p: jax.jvp(model, (p,), (jnp.array([0, 1], p.dtype),))[1]  # noqa: E731
            u, u_t = model(point), jax.grad(model)(point)[0]
            u_x, u_xx = along(point), jax.grad(along)(point)[1]
            return u_t + u * u_x - 0.05 * u_xx

        at_start = jax.vmap(model)(starts)
        wanted = -jnp.sin(jnp.pi * starts[:, 1])
        rest = at_least_f32(jax.vmap(residual)(points))
        return jnp.mean(jnp.square(rest)) + squared_error(at_start, wanted)

    points = jax.random.uniform(key(1), (64, 2), minval=-1)
    starts = points.at[:, 0].set(0.0)
    return equinox_family.of(model, call, (jnp.abs(points), starts), learning_rate=3e-3)


def ppo():
    """RLax: an old policy drives pendulums in a scan, and a new one learns from it."""
    network = hk.without_apply_rng(
        hk.transform(lambda x: (hk.nets.MLP([64, 3])(x), hk.nets.MLP([64, 1])(x)))
    )

    def pendulum(state, torque):
        angle, speed = state
        cost = jnp.square(angle) + 0.1 * jnp.square(speed)
        speed = speed + 0.05 * (15 * jnp.sin(angle) + 3 * torque)
        return (angle + 0.05 * speed, speed), -0.01 * cost

    def seen(state):
        return jnp.stack([jnp.sin(state[0]), jnp.cos(state[0]), state[1]], -1)

    def play(params, state, seeds):
        def step(state, seed):
            logits, value = network.apply(params, x := seen(state))
            logits = at_least_f32(logits)
            action = jax.random.categorical(seed, logits)
            logp = rlax.batched_index(jax.nn.log_softmax(logits), action)
            state, reward = pendulum(state, 2.0 * (action - 1))
            return state, (x, action, logp, reward, at_least_f32(value[..., 0]))

        last, path = jax.lax.scan(step, state, seeds)
        return path, at_least_f32(network.apply(params, seen(last))[1][..., 0])

    def loss(params, old, batch):
        start, seeds = batch
        (x, action, logp, reward, value), last = play(old, start, seeds)
        advantage = jax.vmap(
            lambda r, v: rlax.truncated_generalized_advantage_estimation(
                r, jnp.full_like(r, 0.95), 0.9, v
            ),
            in_axes=1,
            out_axes=1,
        )(reward, jnp.concatenate([value, last[None]]))
        target = advantage + value
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        logits, new_value = network.apply(params, x)
        new = rlax.batched_index(jax.nn.log_softmax(at_least_f32(logits)), action)
        policy = jax.vmap(rlax.clipped_surrogate_pg_loss, (1, 1, None))(
            jnp.exp(new - logp), advantage, 0.2
        )
        error = squared_error(new_value[..., 0], target)
        return jnp.mean(policy) + error

    start = (normal(1, 16), normal(2, 16))
    seeds = jax.random.split(jax.random.key(3), 24)
    old = jax.jit(network.init)(key(0), seen(start))
    return Case(loss, old, (start, seeds), learning_rate=3e-3, beside=old)


def contrastive():
    """`eqx.nn.BatchNorm` and an `all_gather` over a mapped axis."""

    class Encoder(eqx.Module):
        layers: list[Any]

        def __init__(self):
            self.layers = [
                eqx.nn.Linear(32, 64, key=key(0)),
                eqx.nn.BatchNorm(64, "examples", mode="batch"),
                eqx.nn.Linear(64, 16, key=key(1)),
            ]

        def __call__(self, x, state):
            x, state = self.layers[1](self.layers[0](x), state)
            z = at_least_f32(self.layers[2](jax.nn.relu(x)))
            return z / jnp.linalg.norm(z), state

    model, state = eqx.nn.make_with_state(Encoder)()

    def call(model, batch):
        def one(left, right):
            left, used = model(left, jax.tree.map(jnp.asarray, state))
            right, _ = model(right, used)
            others = jax.lax.all_gather(right, "examples")
            logits = 10 * others @ left
            label = jax.lax.axis_index("examples")
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, label)
            return jax.lax.pmean(loss, "examples")

        return jax.vmap(one, axis_name="examples")(*batch)[0]

    x = normal(2, 32, 32)
    return equinox_family.of(model, call, (x, x + 0.5 * normal(3, 32, 32)))


def data_parallel():
    """Linen's `BatchNorm` with statistics of all devices, in `shard_map`."""
    from jax.sharding import PartitionSpec as P

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            for width in (64, 64):
                x = nn.Dense(width)(x)
                x = nn.BatchNorm(use_running_average=False, axis_name="data")(x)
                x = nn.relu(x)
            return nn.Dense(10)(x)

    network, mesh = Network(), jax.sharding.Mesh(jax.devices(), ("data",))

    def mapped(func, out):
        specs = (P(), P("data"), P("data"))
        return jax.shard_map(func, mesh=mesh, in_specs=specs, out_specs=out)

    def loss(params, batch):
        def local(params, x, y):
            logits, _ = network.apply(params, x, mutable=["batch_stats"])
            losses = optax.softmax_cross_entropy_with_integer_labels(
                at_least_f32(logits), y
            )
            return jax.lax.pmean(jnp.mean(losses), "data")

        return mapped(local, P())(params, *batch)

    x, y = normal(0, 32, 32), tokens(1, 10, 32)
    start = lambda _, x, __: network.init(key(2), x)  # noqa: E731
    variables = jax.jit(mapped(start, P()))((), x, y)
    return Case(loss, {"params": variables["params"]}, (x, y))


def dispatched():
    """A mixture of experts by one-hot dispatch, with a capacity and a balance loss."""

    def loss(params, batch):
        x, y = batch
        gates = jax.nn.softmax(at_least_f32(x @ params["router"]))
        chosen = jax.nn.one_hot(jnp.argmax(gates, -1), 4)
        place = jnp.cumsum(chosen, 0) * chosen - 1
        dispatch = jax.nn.one_hot(place, 32)  # tokens, experts, capacity
        inputs = jnp.einsum("tec,td->ecd", dispatch.astype(x.dtype), x)
        hidden = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", inputs, params["up"]))
        outputs = jnp.einsum("ecf,efd->ecd", hidden, params["down"])
        combine = dispatch * jnp.max(gates, -1)[:, None, None]
        mixed = jnp.einsum("tec,ecd->td", combine.astype(x.dtype), outputs)
        balance = 4 * jnp.sum(chosen.mean(0) * gates.mean(0))
        return squared_error(x + mixed, y) + 0.01 * balance

    return Case(loss, experts(32), (normal(5, 64, 32), normal(6, 64, 32)))


def sorted_experts():
    """A mixture of experts by sorting and `lax.ragged_dot`, two experts a token."""

    def loss(params, batch):
        x, y = batch
        gates = jax.nn.softmax(at_least_f32(x @ params["router"]))
        weights, chosen = jax.lax.top_k(gates, 2)
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=4)
        rows = x[order // 2]
        hidden = jax.nn.gelu(jax.lax.ragged_dot(rows, params["up"], sizes))
        outputs = jax.lax.ragged_dot(hidden, params["down"], sizes)
        weighted = outputs * weights.reshape(-1)[order][:, None].astype(x.dtype)
        mixed = jnp.zeros_like(x).at[order // 2].add(weighted)
        return squared_error(x + mixed, y)

    width = 128  # what `fp8` needs
    return Case(loss, experts(width), (normal(5, 64, width), normal(6, 64, width)))


def experts(width):
    """Returns a router and four experts."""
    return {
        "router": normal(0, width, 4) / width**0.5,
        "up": normal(1, 4, width, 2 * width) / width**0.5,
        "down": normal(2, 4, 2 * width, width) / (2 * width) ** 0.5,
    }


def ternary():
    """Quantisation-aware training: ternary weights, 8-bit activations, straight through."""

    @jax.custom_vjp
    def round_through(x):
        return jnp.round(x)

    round_through.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))

    def linear(layer, x):
        w, x = at_least_f32(layer["w"]), at_least_f32(x)
        mean = jnp.mean(jnp.abs(w)) + 1e-6
        peak = jnp.max(jnp.abs(x), -1, keepdims=True) / 127 + 1e-6
        w = mean * jnp.clip(round_through(w / mean), -1, 1)
        return (peak * round_through(x / peak)) @ w + layer["b"]

    def loss(layers, batch):
        x, y = batch
        for layer in layers[:-1]:
            x = jax.nn.gelu(linear(layer, x))
        return squared_error(linear(layers[-1], x), y)

    x = normal(0, 64, 32)
    batch = (x, jnp.sin(x[:, :8]))
    return Case(loss, dense(1, 32, 64, 64, 8), batch, learning_rate=3e-3)


MODELS = (
    Model("WGAN-GP (Equinox)", "equinox", wgan),
    Model("MAML (JAX)", "jax", maml),
    Model("PINN (Equinox)", "equinox", pinn),
    Model("PPO (RLax)", "rlax", ppo),
    Model("contrastive, all_gather (Equinox)", "equinox", contrastive),
    Model("batch norm in shard_map (Linen)", "flax", data_parallel),
    Model("experts, one-hot (JAX)", "jax", dispatched),
    Model("experts, ragged_dot (JAX)", "jax", sorted_experts),
    Model("ternary weights (JAX)", "jax", ternary),
)
