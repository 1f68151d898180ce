"""Models of Haiku, with faults and without."""

import haiku as hk
import jax
import jax.numpy as jnp

import mpx
from _faults.table import Case, cast, cross_entropy, is_healthy, normal, planted

X = (24, 12)


@planted("proj", "overflow")
def haiku_exp_of_logits():
    def forward(x):
        h = jax.nn.relu(hk.Linear(24, name="proj")(x))
        e = jnp.exp(h * 9)  # <- haiku_exp_of_logits
        return e / (e + 1)

    model = hk.without_apply_rng(hk.transform(forward))
    x = normal(1, *X)
    params = model.init(jax.random.key(0), x)

    def loss(params, x):
        out = model.apply(cast(params, jnp.float16), x.astype(jnp.float16))
        return jnp.mean(out).astype(jnp.float32)

    return Case(loss, (params, x))


@planted("head", "overflow")
def haiku_gain_under_amp():
    def forward(x):
        h = hk.Linear(24, name="proj")(x)
        with hk.name_scope("scale_layer"):
            h = h * 1e5  # in f32
        out = hk.Linear(2, name="head")(h)  # <- haiku_gain_under_amp
        return jax.nn.sigmoid(out * 1e-6)

    model = hk.without_apply_rng(hk.transform(forward))
    x = normal(1, *X)
    params = model.init(jax.random.key(0), x)

    def loss(params, x):
        return jnp.mean(model.apply(params, x))

    return Case(mpx.amp(loss, "f16"), (params, x), 1.0)


@is_healthy
def haiku_lstm_amp_bf16():
    def forward(x):
        core = hk.LSTM(16)
        out, _ = hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))
        return hk.Linear(4)(hk.LayerNorm(-1, True, True)(out[-1]))

    model = hk.without_apply_rng(hk.transform(forward))
    x = normal(1, 10, 6, 8)
    params = model.init(jax.random.key(0), x)
    loss = lambda p, x, y: cross_entropy(model.apply(p, x), y)  # noqa: E731
    return Case(mpx.amp(loss), (params, x, jnp.arange(6) % 4))
