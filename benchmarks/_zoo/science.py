"""Differential equations, equivariant networks, optimal transport."""

# pyright: reportMissingImports=false

import equinox as eqx
import jax
import jax.numpy as jnp

from _zoo import equinox_family
from _zoo.model import Case, Lazy, Model, key, normal, squared_error

diffrax = Lazy("diffrax")
e3nn = Lazy("e3nn_jax")
icnn = Lazy("ott.neural.networks.icnn")
nn = Lazy("flax.linen")
pointcloud = Lazy("ott.geometry.pointcloud")
sinkhorn_divergence = Lazy("ott.tools.sinkhorn_divergence")


def neural_ode():
    """Diffrax: an adaptive solver, its default adjoint, and a field that is an MLP."""

    def call(model, batch):
        starts, ends = batch

        def solve(y):
            solution = diffrax.diffeqsolve(
                diffrax.ODETerm(lambda t, y, args: model(y)),
                diffrax.Tsit5(),
                t0=0.0,
                t1=1.0,
                dt0=0.1,
                y0=y,
                stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-3),
                max_steps=32,
            )
            return solution.ys[-1]

        return squared_error(jax.vmap(solve)(starts), ends)

    field = eqx.nn.MLP(4, 4, 32, 2, activation=jnp.tanh, key=key(0))
    starts = normal(1, 16, 4)
    ends = starts + jnp.sin(starts[:, ::-1])
    return equinox_family.of(field, call, (starts, ends), learning_rate=3e-3)


def neural_cde():
    """Diffrax: an equation driven by a path, with fixed steps."""

    def call(model, batch):
        times, paths, ends = batch

        def solve(path):
            control = diffrax.LinearInterpolation(times, path)
            field = lambda t, y, args: model(y).reshape(8, 3)  # noqa: E731
            solution = diffrax.diffeqsolve(
                diffrax.ControlTerm(field, control).to_ode(),
                diffrax.Heun(),
                t0=0.0,
                t1=1.0,
                dt0=0.125,
                y0=jnp.zeros(8, path.dtype),
                max_steps=16,
            )
            return solution.ys[-1]

        return squared_error(jax.vmap(solve)(paths), ends)

    field = eqx.nn.MLP(8, 24, 32, 1, final_activation=jnp.tanh, key=key(0))
    batch = (jnp.linspace(0, 1, 9), normal(1, 8, 9, 3), normal(2, 8, 8))
    return equinox_family.of(field, call, batch, learning_rate=3e-3)


def equivariant():
    """e3nn: spherical harmonics, tensor products and equivariant linear layers."""

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
            nodes = Convolution()(nodes, positions)
            return nodes.filter("0e").array

    network = Network()

    def loss(params, batch):
        x, positions, y = batch
        out = network.apply(params, x, positions)
        return squared_error(out, y)

    batch = (normal(0, 12, 8), normal(1, 12, 3), normal(2, 12, 16))
    params = jax.jit(network.init)(key(3), *batch[:2])
    return Case(loss, params, batch)


def convex():
    """OTT: an input-convex network whose gradient is the transport map."""
    network = icnn.ICNN(dim_data=4, dim_hidden=[32, 32])

    def loss(params, batch):
        x, y = batch
        transport = jax.vmap(jax.grad(lambda x: network.apply(params, x)))
        return squared_error(transport(x), y)

    x = normal(0, 32, 4)
    params = jax.jit(network.init)(key(1), x)
    return Case(loss, params, (x, 2 * x + 1))


def sinkhorn():
    """OTT: a network of Flax under the Sinkhorn divergence, which iterates in a loop."""
    network = nn.Sequential([nn.Dense(32), nn.tanh, nn.Dense(4)])

    def loss(params, batch):
        x, y = batch
        divergence, _ = sinkhorn_divergence.sinkhorn_divergence(
            pointcloud.PointCloud,
            network.apply(params, x),
            y,
            epsilon=1.0,
            solve_kwargs={"max_iterations": 20, "min_iterations": 20},
        )
        return divergence

    x = normal(0, 32, 4)
    params = jax.jit(network.init)(key(1), x)
    return Case(loss, params, (x, normal(2, 32, 4) + 1))


POSITIONS = "the positions of the batch are rounded to bf16 as well"
MIXES = (
    "OTT mixes dtypes in its loop if the points have 16 bits: use `amp`, f32 parameters"
)

MODELS = (
    Model("neural ODE (diffrax)", "diffrax", neural_ode),
    Model("neural CDE (diffrax)", "diffrax", neural_cde),
    Model(
        "equivariant network (e3nn)",
        "e3nn-jax",
        equivariant,
        dict.fromkeys(("flash bf16", "release"), POSITIONS),
    ),
    Model("convex network (OTT)", "ott-jax", convex),
    Model(
        "Sinkhorn loss (OTT)",
        "ott-jax",
        sinkhorn,
        dict.fromkeys(("own bf16", "policy", "flash bf16", "release"), MIXES),
    ),
)
