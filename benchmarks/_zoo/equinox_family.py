"""Equinox: its own layers, and packages that are built on them."""

# pyright: reportMissingImports=false

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from _zoo.model import Case, Model, cross_entropy, key, normal, squared_error, tokens


def of(model: Any, call: Any, batch: Any, **options: Any) -> Case:
    """Makes a case of a module and a function of module and batch."""
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params: Any, batch: Any) -> Any:
        return call(eqx.combine(params, static), batch)

    return Case(loss, params, batch, **options)


def regression(model: Any, batch: Any) -> Any:
    """Returns the squared error of a module of one example."""
    x, y = batch
    return squared_error(jax.vmap(model)(x), y)


def mlp() -> Case:
    """`eqx.nn.MLP`."""
    x = normal(0, 64, 16)
    model = eqx.nn.MLP(16, 1, 64, 2, key=key(1))
    return of(model, regression, (x, jnp.sin(x.sum(1, keepdims=True))))


def attention() -> Case:
    """`eqx.nn.MultiheadAttention` over a batch."""
    model = eqx.nn.MultiheadAttention(4, 64, key=key(0))

    def call(model: Any, batch: Any) -> Any:
        x, y = batch
        return squared_error(jax.vmap(lambda x: model(x, x, x))(x), y)

    return of(model, call, (normal(1, 4, 16, 64), normal(2, 4, 16, 64)))


def gru() -> Case:
    """`eqx.nn.GRUCell` in a scan."""
    model = eqx.nn.GRUCell(16, 64, key=key(0))

    def call(model: Any, batch: Any) -> Any:
        x, y = batch

        def last(x: Any) -> Any:
            start = jnp.zeros(64, x.dtype)
            return jax.lax.scan(lambda h, x: (model(x, h), None), start, x)[0]

        return squared_error(jax.vmap(last)(x), y)

    return of(model, call, (normal(1, 16, 12, 16), normal(2, 16, 64)))


def vit() -> Case:
    """Equimo's vision transformer, with register tokens."""
    from equimo.vision.models import VisionTransformer

    model = VisionTransformer(
        img_size=16,
        in_channels=3,
        dim=64,
        patch_size=4,
        num_heads=4,
        depths=[2],
        num_classes=10,
        key=key(0),
    )

    def call(model: Any, batch: Any) -> Any:
        images, labels = batch
        keys = jax.random.split(key(1), len(images))
        logits = jax.vmap(lambda x, k: model(x, key=k, inference=True))(images, keys)
        return cross_entropy(logits, labels)

    return of(model, call, (normal(2, 16, 3, 16, 16), tokens(3, 10, 16)))


def fno() -> Case:
    """PDEquinox' Fourier neural operator: complex weights in the spectrum."""
    import pdequinox as pdeqx

    model = pdeqx.arch.ClassicFNO(
        1, 1, 1, hidden_channels=16, num_modes=8, num_blocks=2, key=key(0)
    )
    return of(model, regression, (normal(1, 4, 1, 32), normal(2, 4, 1, 32)))


FFT = "JAX's FFT takes no 16-bit numbers: use `amp` and f32 parameters"

MODELS = (
    Model("MLP (Equinox)", "equinox", mlp),
    Model("attention (Equinox)", "equinox", attention),
    Model("GRU (Equinox)", "equinox", gru),
    Model("ViT (Equimo)", "equimo", vit),
    Model(
        "FNO (PDEquinox)",
        "pdequinox",
        fno,
        dict.fromkeys(("own bf16", "policy", "flash bf16", "release"), FFT),
    ),
)
