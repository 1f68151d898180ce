"""Equinox and plain JAX: its own layers, and packages that are built on them."""

# pyright: reportMissingImports=false

import equinox as eqx
import jax
import jax.numpy as jnp

from _zoo.model import (
    Case,
    Lazy,
    at_least_f32,
    cross_entropy,
    each,
    key,
    model,
    normal,
    of_equinox,
    settings,
    squared_error,
    tokens,
)

equimo = Lazy("equimo.vision.models")
optimistix = Lazy("optimistix")
pdeqx = Lazy("pdequinox")


@model("MLP (Equinox)", "equinox")
def mlp():
    x, made = normal(0, 64, 16), eqx.nn.MLP(16, 1, 64, 2, key=key(1))
    return of_equinox(made, each, (x, jnp.sin(x.sum(1, keepdims=True))))


@model("attention (Equinox)", "equinox")
def attention():
    made = eqx.nn.MultiheadAttention(4, 64, key=key(0))
    call = lambda made, batch: each(lambda x: made(x, x, x), batch)  # noqa: E731
    return of_equinox(made, call, (normal(1, 4, 16, 64), normal(2, 4, 16, 64)))


@model("GRU (Equinox)", "equinox")
def gru():
    def call(made, batch):
        def last(x):
            start = jnp.zeros(64, x.dtype)
            return jax.lax.scan(lambda h, x: (made(x, h), None), start, x)[0]

        return each(last, batch)

    made = eqx.nn.GRUCell(16, 64, key=key(0))
    return of_equinox(made, call, (normal(1, 16, 12, 16), normal(2, 16, 64)))


def classification(made, batch):
    """Returns the cross entropy of a module of one image, without dropout."""
    images, labels = batch
    keys = jax.random.split(key(1), len(images))
    logits = jax.vmap(lambda x, k: made(x, key=k, inference=True))(images, keys)
    return cross_entropy(logits, labels)


@model("ViT (Equimo)", "equimo")
def vit():
    """With register tokens."""
    text = "img_size=16 in_channels=3 dim=64 patch_size=4 num_heads=4 num_classes=10"
    made = equimo.VisionTransformer(**settings(text), depths=[2], key=key(0))
    batch = (normal(2, 16, 3, 16, 16), tokens(3, 10, 16))
    return of_equinox(made, classification, batch)


FFT = "JAX's FFT takes no 16-bit numbers: use `amp`"
NO_FFT = {"own bf16": FFT, "policy": FFT}


@model("FNO (PDEquinox)", "pdequinox", NO_FFT)
def fno():
    """A Fourier neural operator: complex weights in the spectrum."""
    sizes = settings("hidden_channels=16 num_modes=8 num_blocks=2")
    made = pdeqx.arch.ClassicFNO(1, 1, 1, **sizes, key=key(0))
    return of_equinox(made, each, (normal(1, 4, 1, 32), normal(2, 4, 1, 32)))


@model("ConvNeXt (Equimo)", "equimo")
def convnext():
    """Depthwise convolutions, inverted bottlenecks, layer scales."""
    sizes = {"depths": [1, 1], "dims": [32, 64], "num_classes": 10}
    made = equimo.ConvNeXt(3, **sizes, key=key(0), layer_scale_init_value=0.1)
    batch = (normal(2, 8, 3, 16, 16), tokens(3, 10, 8))
    return of_equinox(made, classification, batch)


@model("equilibrium, custom_vjp (JAX)", "jax")
def deq():
    """An equilibrium model whose `custom_vjp` solves for the gradient."""

    @jax.custom_vjp
    def solve(params, x):
        return jax.lax.fori_loop(0, 24, lambda _, z: cell(params, x, z), 0 * x)

    def forward(params, x):
        z = solve(params, x)
        return z, (params, x, z)

    def backward(kept, g):
        params, x, z = kept
        turn = jax.vjp(lambda z: cell(params, x, z), z)[1]
        u = jax.lax.fori_loop(0, 24, lambda _, u: turn(u)[0] + g, g)
        return jax.vjp(lambda params, x: cell(params, x, z), params, x)[1](u)

    solve.defvjp(forward, backward)

    def cell(params, x, z):
        return jnp.tanh(z @ params["w"] + x + params["b"])

    def loss(params, batch):
        x, y = batch
        z = solve(params["cell"], x @ params["in"])
        return squared_error(z @ params["out"], y)

    params = {
        "in": normal(0, 32, 64) / 32**0.5,
        "cell": {"w": 0.5 * normal(1, 64, 64) / 64**0.5, "b": jnp.zeros(64)},
        "out": normal(2, 64, 8) / 64**0.5,
    }
    x = normal(3, 64, 32)
    return Case(loss, params, (x, jnp.sin(x[:, :8])))


FIXED_POINT = "Optimistix starts from an error in f32, whatever the numbers: use `amp`"
NO_FIXED_POINT = {"own bf16": FIXED_POINT, "policy": FIXED_POINT}


@model("equilibrium (Optimistix)", "optimistix", NO_FIXED_POINT)
def fixed_point():
    """A loop of unknown length, and Lineax for its gradient."""

    class Network(eqx.Module):
        cell: eqx.nn.Linear
        read: eqx.nn.Linear

        def __call__(self, x):
            solution = optimistix.fixed_point(
                lambda z, x: jnp.tanh(0.5 * self.cell(z) + x),
                optimistix.FixedPointIteration(rtol=1e-3, atol=1e-3),
                jnp.zeros_like(x),
                x,
                max_steps=32,
                throw=False,
            )
            return self.read(solution.value)

    made = Network(eqx.nn.Linear(32, 32, key=key(0)), eqx.nn.Linear(32, 8, key=key(1)))
    x = normal(2, 64, 32)
    return of_equinox(made, each, (x, jnp.sin(x[:, :8])))


@model("Hyena (Equinox)", "equinox", NO_FFT)
def hyena():
    """Gates, and convolutions as long as the text by FFT."""

    class Operator(eqx.Module):
        project: eqx.nn.Linear
        filters: eqx.nn.MLP
        out: eqx.nn.Linear

        def __call__(self, x):
            n = len(x)
            q, k, v = jnp.split(jax.vmap(self.project)(x), 3, -1)
            times = jnp.linspace(0, 1, n, dtype=x.dtype)[:, None]
            window = jnp.exp(-4 * times)
            taps = jax.vmap(self.filters)(jnp.sin(times * jnp.arange(1, 9))) * window
            spectrum = jnp.fft.rfft(taps, 2 * n, 0) * jnp.fft.rfft(k * v, 2 * n, 0)
            mixed = jnp.fft.irfft(spectrum, 2 * n, 0)[:n]
            return x + jax.vmap(self.out)(q * mixed)

    made = [
        Operator(
            eqx.nn.Linear(32, 96, key=key(i)),
            eqx.nn.MLP(8, 32, 32, 1, jnp.sin, key=key(i + 1)),
            eqx.nn.Linear(32, 32, key=key(i + 2)),
        )
        for i in (0, 3)
    ]

    def call(made, batch):
        return each(lambda x: made[1](made[0](x)), batch)

    return of_equinox(made, call, (x := normal(6, 8, 32, 32), jnp.roll(x, 1, 1)))


@model("complex recurrence (JAX)", "jax")
def lru():
    """A linear recurrent unit: a complex diagonal recurrence by `associative_scan`."""

    def unit(params, x):
        ring = jnp.exp(-jnp.exp(params["decay"]) + 1j * jnp.exp(params["phase"]))
        scale = jnp.sqrt(1 - jnp.square(jnp.abs(ring)))
        inputs = scale * (x @ params["b_re"] + 1j * (x @ params["b_im"]))
        rings = jnp.broadcast_to(ring, inputs.shape)
        join = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])  # noqa: E731
        _, states = jax.lax.associative_scan(join, (rings, inputs))
        out = states.real @ params["c_re"] - states.imag @ params["c_im"]
        return jax.nn.gelu(out + params["d"] * x)

    def loss(params, batch):
        x, y = batch
        for layer in params:
            x = x + jax.vmap(lambda x, layer=layer: unit(layer, x))(x)
        return squared_error(x, y)

    def layer(seed):
        names = ("b_re", "b_im", "c_re", "c_im")
        weights = {x: normal(seed + i, 32, 32) / 8 for i, x in enumerate(names)}
        decay = jnp.log(-jnp.log(jnp.linspace(0.6, 0.95, 32)))
        return {**weights, "decay": decay, "phase": decay, "d": jnp.ones(32)}

    x = normal(8, 8, 24, 32)
    return Case(loss, [layer(0), layer(4)], (x, jnp.roll(x, 2, 1)))


@model("SIREN (Equinox)", "equinox")
def siren():
    """Sines of the frequency 30 fit an image and its slopes."""
    sine = lambda x: jnp.sin(30 * x)  # noqa: E731
    made = eqx.nn.MLP(2, "scalar", 64, 3, sine, key=key(0), use_bias=True)
    # As SIREN's authors start: the first layer wide, the others such that sines stay sines.
    scales = [0.5 * 2**0.5, *[(6 / 64) ** 0.5 / 30 * 8] * 3]
    weights = lambda made: [layer.weight for layer in made.layers]  # noqa: E731
    scaled = [w * scale for w, scale in zip(weights(made), scales, strict=True)]
    made = eqx.tree_at(weights, made, scaled)

    def call(made, batch):
        places, values, slopes = batch
        found, found_slopes = jax.vmap(jax.value_and_grad(made))(places)
        return squared_error(found, values) + 0.1 * squared_error(found_slopes, slopes)

    picture = lambda p: jnp.sin(4 * p[0]) * jnp.cos(3 * p[1])  # noqa: E731
    places = jax.random.uniform(key(1), (128, 2), minval=-1)
    batch = (places, *jax.vmap(jax.value_and_grad(picture))(places))
    return of_equinox(made, call, batch, learning_rate=1e-4)


@model("NeRF (Equinox)", "equinox")
def nerf():
    """Encoded positions, densities and colours, summed along each ray."""

    def call(made, batch):
        def render(start, direction):
            depths = jnp.linspace(0.5, 3, 16, dtype=start.dtype)
            points = start + depths[:, None] * direction
            waves = (points[..., None] * 2.0 ** jnp.arange(6)).reshape(16, -1)
            seen = jnp.concatenate([points, jnp.sin(waves), jnp.cos(waves)], -1)
            found = at_least_f32(jax.vmap(made)(seen.astype(start.dtype)))
            thickness = jax.nn.softplus(found[:, 0]) * (2.5 / 15)
            through = jnp.exp(-jnp.cumsum(thickness) + thickness)
            weights = through * (1 - jnp.exp(-thickness))
            return weights @ jax.nn.sigmoid(found[:, 1:])

        return each(render, batch)

    directions = normal(1, 32, 3)
    directions /= jnp.linalg.norm(directions, axis=1, keepdims=True)
    batch = (0.1 * normal(2, 32, 3), directions, jax.nn.sigmoid(3 * directions))
    return of_equinox(eqx.nn.MLP(3 + 36, 4, 64, 3, key=key(0)), call, batch)
