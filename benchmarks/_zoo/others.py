"""Science, probability and ways to train, over several libraries."""

# pyright: reportMissingImports=false

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from _zoo.model import (
    Case,
    Lazy,
    at_least_f32,
    each,
    key,
    model,
    normal,
    of_equinox,
    regression,
    squared_error,
    tokens,
)

autoguide = Lazy("numpyro.infer.autoguide")
base = Lazy("flowjax.distributions")
bijections = Lazy("flowjax.bijections")
diffrax = Lazy("diffrax")
dist = Lazy("numpyro.distributions")
distrax = Lazy("distrax")
e3nn = Lazy("e3nn_jax")
flax_modules = Lazy("numpyro.contrib.module")
flows = Lazy("flowjax.flows")
hk = Lazy("haiku")
icnn = Lazy("ott.neural.networks.icnn")
infer = Lazy("numpyro.infer")
nn = Lazy("flax.linen")
numpyro = Lazy("numpyro")
optim = Lazy("numpyro.optim")
paramax = Lazy("paramax")
pointcloud = Lazy("ott.geometry.pointcloud")
rlax = Lazy("rlax")
sinkhorn_divergence = Lazy("ott.tools.sinkhorn_divergence")


# --- differential equations, equivariant networks, optimal transport --------------------


def solve(term, solver, start, dt, **options):
    """Returns the end of a solution of Diffrax from time 0 to 1."""
    times = {"t0": 0.0, "t1": 1.0, "dt0": dt}
    return diffrax.diffeqsolve(term, solver, **times, y0=start, **options).ys[-1]


@model("neural ODE (diffrax)", "diffrax")
def neural_ode():
    """An adaptive solver, its default adjoint, and a field that is an MLP."""

    def call(made, batch):
        def one(y):
            term = diffrax.ODETerm(lambda t, y, args: made(y))
            steps = diffrax.PIDController(rtol=1e-3, atol=1e-3)
            options = {"stepsize_controller": steps, "max_steps": 32}
            return solve(term, diffrax.Tsit5(), y, 0.1, **options)

        return each(one, batch)

    field = eqx.nn.MLP(4, 4, 32, 2, activation=jnp.tanh, key=key(0))
    starts = normal(1, 16, 4)
    batch = (starts, starts + jnp.sin(starts[:, ::-1]))
    return of_equinox(field, call, batch, learning_rate=3e-3)


@model("neural CDE (diffrax)", "diffrax")
def neural_cde():
    """An equation driven by a path, with fixed steps."""

    def call(made, batch):
        times, *batch = batch

        def one(path):
            control = diffrax.LinearInterpolation(times, path)
            field = lambda t, y, args: made(y).reshape(8, 3)  # noqa: E731
            term = diffrax.ControlTerm(field, control).to_ode()
            start = jnp.zeros(8, path.dtype)
            return solve(term, diffrax.Heun(), start, 0.125, max_steps=16)

        return each(one, batch)

    field = eqx.nn.MLP(8, 24, 32, 1, final_activation=jnp.tanh, key=key(0))
    batch = (jnp.linspace(0, 1, 9), normal(1, 8, 9, 3), normal(2, 8, 8))
    return of_equinox(field, call, batch, learning_rate=3e-3)


POSITIONS = "the positions of the batch are rounded to bf16 as well"


@model(
    "equivariant network (e3nn)",
    "e3nn-jax",
    dict.fromkeys(("flash bf16", "release"), POSITIONS),
)
def equivariant():
    """Spherical harmonics, tensor products and equivariant linear layers."""

    class Convolution(nn.Module):
        """One message passing step over all pairs of points."""

        @nn.compact
        def __call__(self, nodes, positions):
            arrows = positions[:, None] - positions[None]
            vectors = e3nn.IrrepsArray("1o", arrows)
            harmonics = e3nn.spherical_harmonics("0e + 1o + 2e", vectors, True)
            length = jnp.linalg.norm(arrows + 1e-6, axis=-1, keepdims=True)
            messages = e3nn.tensor_product(nodes[None, :], harmonics)
            radial = e3nn.flax.MultiLayerPerceptron([32, messages.irreps.num_irreps])
            messages = messages * radial(length)
            summed = e3nn.sum(messages, axis=1) / positions.shape[0]
            return e3nn.flax.Linear("16x0e + 8x1o")(summed)

    class Network(nn.Module):
        """Two convolutions with a gate between."""

        @nn.compact
        def __call__(self, x, positions):
            nodes = e3nn.IrrepsArray("8x0e", x)
            nodes = e3nn.gate(Convolution()(nodes, positions))
            return Convolution()(nodes, positions).filter("0e").array

    batch = (normal(0, 12, 8), normal(1, 12, 3), normal(2, 12, 16))
    return of_module(Network(), batch, batch[:2], seed=3)


def of_module(network, batch, inputs, seed=1):
    """Makes a case of a Linen module without an option for bf16."""
    loss = lambda p, batch: regression(lambda *x: network.apply(p, *x), batch)  # noqa: E731
    return Case(loss, jax.jit(network.init)(key(seed), *inputs), batch)


@model("convex network (OTT)", "ott-jax")
def convex():
    """An input-convex network whose gradient is the transport map."""
    network = icnn.ICNN(dim_data=4, dim_hidden=[32, 32])

    def loss(params, batch):
        return each(jax.grad(lambda x: network.apply(params, x)), batch)

    x = normal(0, 32, 4)
    return Case(loss, jax.jit(network.init)(key(1), x), (x, 2 * x + 1))


MIXES = (
    "OTT mixes dtypes in its loop if the points have 16 bits: use `amp`, f32 parameters"
)


@model(
    "Sinkhorn loss (OTT)",
    "ott-jax",
    dict.fromkeys(("own bf16", "policy", "flash bf16", "release"), MIXES),
)
def sinkhorn():
    """A network of Flax under the Sinkhorn divergence, which iterates in a loop."""
    network = nn.Sequential([nn.Dense(32), nn.tanh, nn.Dense(4)])

    def loss(params, batch):
        x, y = batch
        return sinkhorn_divergence.sinkhorn_divergence(
            pointcloud.PointCloud,
            network.apply(params, x),
            y,
            epsilon=1.0,
            solve_kwargs={"max_iterations": 20, "min_iterations": 20},
        )[0]

    x = normal(0, 32, 4)
    return Case(loss, jax.jit(network.init)(key(1), x), (x, normal(2, 32, 4) + 1))


# --- flows, Bayesian networks, a variational autoencoder --------------------------------


def points():
    """Returns what the flows learn."""
    return jnp.tanh(normal(1, 64, 4)) + 0.1 * normal(2, 64, 4)


def of_flow(flow):
    """Makes a case of a flow of flowjax: maximum likelihood."""
    is_fixed = lambda leaf: isinstance(leaf, paramax.NonTrainable)  # noqa: E731
    params, static = eqx.partition(flow, eqx.is_inexact_array, is_leaf=is_fixed)

    def loss(params, x):
        made = paramax.unwrap(eqx.combine(params, static))
        return -jnp.mean(at_least_f32(made.log_prob(x)))

    return Case(loss, params, points())


@model("autoregressive flow (flowjax)", "flowjax")
def autoregressive():
    start, sizes = base.Normal(jnp.zeros(4)), {"flow_layers": 2, "nn_width": 32}
    make = flows.masked_autoregressive_flow
    return of_flow(make(key(0), base_dist=start, **sizes))


@model("spline coupling flow (flowjax)", "flowjax")
def spline_coupling():
    start, sizes = base.Normal(jnp.zeros(4)), {"flow_layers": 2, "nn_width": 32}
    spline = bijections.RationalQuadraticSpline(knots=4, interval=3)
    make = flows.coupling_flow
    return of_flow(make(key(0), base_dist=start, transformer=spline, **sizes))


SENSITIVE = (
    "its scales are results of a matmul and pass near zero, where their logarithm "
    "amplifies any rounding: over ten starts the median distance is 6 % for amp in bf16, "
    "and 4 % for f32 from parameters that are 0.2 % off"
)
UNLIKE = ("policy f16", "amp bf16", "amp f16", "flash bf16", "release")


@model("RealNVP (distrax)", "distrax", dict.fromkeys(UNLIKE, SENSITIVE))
def real_nvp():
    """Masked coupling layers whose conditioners are Haiku MLPs."""

    def log_prob(x):
        layers, mask = [], jnp.arange(4) % 2 == 0
        affine = lambda p: distrax.ScalarAffine(p[..., 0], p[..., 1])  # noqa: E731
        for _ in range(2):
            shape = hk.Reshape((4, 2), preserve_dims=1)
            conditioner = hk.Sequential([hk.nets.MLP([32, 8]), shape])
            layers.append(distrax.MaskedCoupling(mask, conditioner, affine))
            mask = ~mask
        start = jnp.zeros(4, x.dtype), jnp.ones(4, x.dtype)
        start = distrax.MultivariateNormalDiag(*start)
        flow = distrax.Transformed(start, distrax.Inverse(distrax.Chain(layers)))
        return flow.log_prob(x)

    network = hk.without_apply_rng(hk.transform(log_prob))
    loss = lambda params, x: -jnp.mean(at_least_f32(network.apply(params, x)))  # noqa: E731
    return Case(loss, jax.jit(network.init)(key(0), points()), points())


def of_svi(model, guide, batch):
    """Makes a case of a numpyro model and guide: the negative ELBO with a fixed key."""
    svi = infer.SVI(model, guide, optim.Adam(1e-3), infer.Trace_ELBO())
    state = svi.init(jax.random.key(0), *batch)
    params = svi.optim.get_params(state.optim_state)  # without constraints

    def loss(params, batch):
        values, seed = svi.constrain_fn(params), jax.random.key(1)
        elbo = svi.loss.loss(seed, values, svi.model, svi.guide, *batch)
        return elbo / len(batch[0])

    return Case(loss, params, batch, learning_rate=3e-3)


@model("Bayesian MLP (numpyro)", "numpyro")
def bayesian_network():
    """A Flax MLP with priors on its weights, and a mean-field guide."""
    module = nn.Sequential([nn.Dense(32), nn.tanh, nn.Dense(1)])

    def made(x, y):
        network = flax_modules.random_flax_module(
            "mlp", module, prior=dist.Normal(0.0, 1.0), input_shape=(4,)
        )
        mean = network(x)[:, 0]
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(mean, 0.5), obs=y)

    x, guide = normal(0, 64, 4), autoguide.AutoNormal(made, init_scale=0.01)
    return of_svi(made, guide, (x, jnp.sin(x.sum(1))))


@model("VAE (numpyro)", "numpyro")
def autoencoder():
    encoder, decoder = (
        nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(16)]) for _ in range(2)
    )

    def made(x):
        decode = flax_modules.flax_module("decoder", decoder, input_shape=(8,))
        with numpyro.plate("data", len(x)):
            z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([8]).to_event(1))
            numpyro.sample("x", dist.Bernoulli(logits=decode(z)).to_event(1), obs=x)

    def guide(x):
        encode = flax_modules.flax_module("encoder", encoder, input_shape=(16,))
        mean, scale = jnp.split(encode(x), 2, axis=-1)
        with numpyro.plate("data", len(x)):
            numpyro.sample("z", dist.Normal(mean, jnp.exp(scale / 2)).to_event(1))

    return of_svi(made, guide, ((normal(0, 64, 16) > 0).astype(jnp.float32),))


# --- adversaries, meta-learning, physics, reinforcement, named axes ---------------------


def dense(seed, *widths):
    """Returns the layers of a plain MLP."""
    return [
        {"w": normal(seed + i, m, n) / m**0.5, "b": jnp.zeros(n)}
        for i, (m, n) in enumerate(itertools.pairwise(widths))
    ]


@model("WGAN-GP (Equinox)", "equinox")
def wgan():
    """A critic with a penalty on its gradient, and a generator: two optimizers."""
    networks = (
        eqx.nn.MLP(8, "scalar", 64, 2, jax.nn.silu, key=key(0)),
        eqx.nn.MLP(16, 8, 64, 2, key=key(1)),
    )
    parts = [eqx.partition(x, eqx.is_inexact_array) for x in networks]
    (critic, critic_static), (generator, generator_static) = parts

    def critic_loss(critic, generator, batch):
        real, noise, mix = batch
        score = eqx.combine(critic, critic_static)
        fake = jax.vmap(eqx.combine(generator, generator_static))(noise)
        slopes = jax.vmap(jax.grad(score))(mix * real + (1 - mix) * fake)
        norms = jnp.sqrt(jnp.sum(jnp.square(at_least_f32(slopes)), 1) + 1e-6)
        gap = jnp.mean(at_least_f32(jax.vmap(score)(fake) - jax.vmap(score)(real)))
        return gap + 10 * jnp.mean(jnp.square(norms - 1))

    def generator_loss(generator, critic, batch):
        fake = jax.vmap(eqx.combine(generator, generator_static))(batch[1])
        scores = jax.vmap(eqx.combine(critic, critic_static))(fake)
        return -jnp.mean(at_least_f32(scores))

    mix = jax.random.uniform(key(4), (64, 1))
    data = (2 + normal(2, 64, 8), normal(3, 64, 16), mix)
    rival = Case(generator_loss, generator, data, learning_rate=3e-4, beside=critic)
    return Case(critic_loss, critic, data, beside=generator, rival=rival)


@model("MAML (JAX)", "jax")
def maml():
    """The loss after a step of gradient descent on each task."""

    def task_loss(layers, x, y):
        for layer in layers[:-1]:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return squared_error(x @ layers[-1]["w"] + layers[-1]["b"], y)

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


@model("PINN (Equinox)", "equinox")
def pinn():
    """Burgers' equation: second derivatives of the network in its inputs."""

    def call(made, batch):
        points, starts = batch

        def residual(point):
            along = lambda p: jax.jvp(made, (p,), (jnp.array([0, 1], p.dtype),))[1]  # noqa: E731
            u, u_t = made(point), jax.grad(made)(point)[0]
            u_x, u_xx = along(point), jax.grad(along)(point)[1]
            return u_t + u * u_x - 0.05 * u_xx

        wanted = -jnp.sin(jnp.pi * starts[:, 1])
        rest = at_least_f32(jax.vmap(residual)(points))
        return jnp.mean(jnp.square(rest)) + each(made, (starts, wanted))

    points = jax.random.uniform(key(1), (64, 2), minval=-1)
    made = eqx.nn.MLP(2, "scalar", 32, 3, jnp.tanh, key=key(0))
    batch = (jnp.abs(points), points.at[:, 0].set(0.0))
    return of_equinox(made, call, batch, learning_rate=3e-3)


@model("PPO (RLax)", "rlax")
def ppo():
    """An old policy drives pendulums in a scan, and a new one learns from it."""
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

    def estimate(reward, value):
        discount = jnp.full_like(reward, 0.95)
        find = rlax.truncated_generalized_advantage_estimation
        return find(reward, discount, 0.9, value)

    def loss(params, old, batch):
        (x, action, logp, reward, value), last = play(old, *batch)
        values = jnp.concatenate([value, last[None]])
        advantage = jax.vmap(estimate, in_axes=1, out_axes=1)(reward, values)
        target = advantage + value
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        logits, new_value = network.apply(params, x)
        new = rlax.batched_index(jax.nn.log_softmax(at_least_f32(logits)), action)
        policy = jax.vmap(rlax.clipped_surrogate_pg_loss, (1, 1, None))(
            jnp.exp(new - logp), advantage, 0.2
        )
        return jnp.mean(policy) + squared_error(new_value[..., 0], target)

    start = (normal(1, 16), normal(2, 16))
    seeds = jax.random.split(jax.random.key(3), 24)
    old = jax.jit(network.init)(key(0), seen(start))
    return Case(loss, old, (start, seeds), learning_rate=3e-3, beside=old)


@model("contrastive, all_gather (Equinox)", "equinox")
def contrastive():
    """`eqx.nn.BatchNorm` and an `all_gather` over a mapped axis."""

    class Encoder(eqx.Module):
        up: eqx.nn.Linear
        norm: eqx.nn.BatchNorm
        down: eqx.nn.Linear

        def __init__(self):
            self.up = eqx.nn.Linear(32, 64, key=key(0))
            self.norm = eqx.nn.BatchNorm(64, "examples", mode="batch")
            self.down = eqx.nn.Linear(64, 16, key=key(1))

        def __call__(self, x, state):
            x, state = self.norm(self.up(x), state)
            z = at_least_f32(self.down(jax.nn.relu(x)))
            return z / jnp.linalg.norm(z), state

    made, state = eqx.nn.make_with_state(Encoder)()

    def call(made, batch):
        def one(left, right):
            left, used = made(left, jax.tree.map(jnp.asarray, state))
            right, _ = made(right, used)
            logits = 10 * jax.lax.all_gather(right, "examples") @ left
            label = jax.lax.axis_index("examples")
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, label)
            return jax.lax.pmean(loss, "examples")

        return jax.vmap(one, axis_name="examples")(*batch)[0]

    x = normal(2, 32, 32)
    return of_equinox(made, call, (x, x + 0.5 * normal(3, 32, 32)))


@model("batch norm in shard_map (Linen)", "flax")
def data_parallel():
    """`BatchNorm` with statistics of all devices."""
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

    def mapped(func):
        specs = (P(), P("data"), P("data"))
        return jax.shard_map(func, mesh=mesh, in_specs=specs, out_specs=P())

    def loss(params, batch):
        def local(params, x, y):
            logits, _ = network.apply(params, x, mutable=["batch_stats"])
            losses = optax.softmax_cross_entropy_with_integer_labels(
                at_least_f32(logits), y
            )
            return jax.lax.pmean(jnp.mean(losses), "data")

        return mapped(local)(params, *batch)

    x, y = normal(0, 32, 32), tokens(1, 10, 32)
    variables = jax.jit(mapped(lambda _, x, __: network.init(key(2), x)))((), x, y)
    return Case(loss, {"params": variables["params"]}, (x, y))


def experts(width):
    """Returns a router and four experts."""
    return {
        "router": normal(0, width, 4) / width**0.5,
        "up": normal(1, 4, width, 2 * width) / width**0.5,
        "down": normal(2, 4, 2 * width, width) / (2 * width) ** 0.5,
    }


@model("experts, one-hot (JAX)", "jax")
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


@model("experts, ragged_dot (JAX)", "jax")
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


@model("ternary weights (JAX)", "jax")
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
