"""Normalising flows, Bayesian networks and a variational autoencoder."""

# pyright: reportMissingImports=false

import equinox as eqx
import jax
import jax.numpy as jnp

from _zoo.model import Case, Lazy, Model, at_least_f32, key, normal

autoguide = Lazy("numpyro.infer.autoguide")
bijections = Lazy("flowjax.bijections")
dist = Lazy("numpyro.distributions")
distrax = Lazy("distrax")
base = Lazy("flowjax.distributions")
flax_modules = Lazy("numpyro.contrib.module")
flows = Lazy("flowjax.flows")
hk = Lazy("haiku")
infer = Lazy("numpyro.infer")
nn = Lazy("flax.linen")
numpyro = Lazy("numpyro")
optim = Lazy("numpyro.optim")
paramax = Lazy("paramax")


def of_flow(flow):
    """Makes a case of a flow of flowjax: maximum likelihood."""
    params, static = eqx.partition(
        flow,
        eqx.is_inexact_array,
        is_leaf=lambda leaf: isinstance(leaf, paramax.NonTrainable),
    )

    def loss(params, x):
        model = paramax.unwrap(eqx.combine(params, static))
        return -jnp.mean(at_least_f32(model.log_prob(x)))

    return Case(loss, params, jnp.tanh(normal(1, 64, 4)) + 0.1 * normal(2, 64, 4))


def autoregressive():
    """A masked autoregressive flow."""
    start = base.Normal(jnp.zeros(4))
    return of_flow(
        flows.masked_autoregressive_flow(
            key(0), base_dist=start, flow_layers=2, nn_width=32
        )
    )


def spline_coupling():
    """A coupling flow of rational quadratic splines."""
    return of_flow(
        flows.coupling_flow(
            key(0),
            base_dist=base.Normal(jnp.zeros(4)),
            transformer=bijections.RationalQuadraticSpline(knots=4, interval=3),
            flow_layers=2,
            nn_width=32,
        )
    )


def real_nvp():
    """Distrax: masked coupling layers whose conditioners are Haiku MLPs."""

    def log_prob(x):
        layers = []
        mask = jnp.arange(4) % 2 == 0
        for _ in range(2):
            conditioner = hk.Sequential(
                [hk.nets.MLP([32, 8]), hk.Reshape((4, 2), preserve_dims=1)]
            )
            layers.append(
                distrax.MaskedCoupling(
                    mask=mask,
                    bijector=lambda p: distrax.ScalarAffine(p[..., 0], p[..., 1]),
                    conditioner=conditioner,
                )
            )
            mask = ~mask
        base = distrax.MultivariateNormalDiag(
            jnp.zeros(4, x.dtype), jnp.ones(4, x.dtype)
        )
        flow = distrax.Transformed(base, distrax.Inverse(distrax.Chain(layers)))
        return flow.log_prob(x)

    network = hk.without_apply_rng(hk.transform(log_prob))

    def loss(params, x):
        return -jnp.mean(at_least_f32(network.apply(params, x)))

    x = jnp.tanh(normal(1, 64, 4)) + 0.1 * normal(2, 64, 4)
    return Case(loss, jax.jit(network.init)(key(0), x), x)


def of_svi(model, guide, batch):
    """Makes a case of a numpyro model and guide: the negative ELBO with a fixed key."""
    svi = infer.SVI(model, guide, optim.Adam(1e-3), infer.Trace_ELBO())
    state = svi.init(jax.random.key(0), *batch)
    params = svi.optim.get_params(state.optim_state)  # without constraints

    def loss(params, batch):
        values = svi.constrain_fn(params)
        seed = jax.random.key(1)
        elbo = svi.loss.loss(seed, values, svi.model, svi.guide, *batch)
        return elbo / len(batch[0])

    return Case(loss, params, batch, learning_rate=3e-3)


def bayesian_network():
    """numpyro: a Flax MLP with priors on its weights, and a mean-field guide."""
    module = nn.Sequential([nn.Dense(32), nn.tanh, nn.Dense(1)])

    def model(x, y):
        network = flax_modules.random_flax_module(
            "mlp", module, prior=dist.Normal(0.0, 1.0), input_shape=(4,)
        )
        mean = network(x)[:, 0]
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(mean, 0.5), obs=y)

    x = normal(0, 64, 4)
    return of_svi(
        model, autoguide.AutoNormal(model, init_scale=0.01), (x, jnp.sin(x.sum(1)))
    )


def autoencoder():
    """numpyro: a variational autoencoder of two Flax networks."""
    encoder = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(16)])
    decoder = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(16)])

    def model(x):
        decode = flax_modules.flax_module("decoder", decoder, input_shape=(8,))
        with numpyro.plate("data", len(x)):
            z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([8]).to_event(1))
            numpyro.sample("x", dist.Bernoulli(logits=decode(z)).to_event(1), obs=x)

    def guide(x):
        encode = flax_modules.flax_module("encoder", encoder, input_shape=(16,))
        mean, scale = jnp.split(encode(x), 2, axis=-1)
        with numpyro.plate("data", len(x)):
            numpyro.sample("z", dist.Normal(mean, jnp.exp(scale / 2)).to_event(1))

    x = (normal(0, 64, 16) > 0).astype(jnp.float32)
    return of_svi(model, guide, (x,))


SENSITIVE = (
    "its scales are results of a matmul and pass near zero, where their logarithm "
    "amplifies any rounding: over ten starts the median distance is 6 % for amp in bf16, "
    "and 4 % for f32 from parameters that are 0.2 % off"
)

MODELS = (
    Model("autoregressive flow (flowjax)", "flowjax", autoregressive),
    Model("spline coupling flow (flowjax)", "flowjax", spline_coupling),
    Model(
        "RealNVP (distrax)",
        "distrax",
        real_nvp,
        dict.fromkeys(
            ("policy f16", "amp bf16", "amp f16", "flash bf16", "release"), SENSITIVE
        ),
    ),
    Model("Bayesian MLP (numpyro)", "numpyro", bayesian_network),
    Model("VAE (numpyro)", "numpyro", autoencoder),
)
