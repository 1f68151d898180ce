"""What looks like attention and is not, and attention that is kept, with the reason."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.nn import softmax

from attention_cases import TRIL, mix, nothing, scores, with_scores

# --- Kept -----------------------------------------------------------------------------


def weights_too(q, k, v):
    p = softmax(scores(q, k))
    return mix(p, v), p


def drop(p):
    keep = jax.random.bernoulli(jax.random.key(0), 0.9, p.shape)
    return jnp.where(keep, p / 0.9, 0.0)


KEPT = {
    "weights returned": (weights_too, "used elsewhere"),
    "scores returned": (
        lambda q, k, v: (mix(softmax(s := scores(q, k)), v), s.sum()),
        "used elsewhere",
    ),
    "dropout": (
        lambda q, k, v: mix(drop(softmax(scores(q, k))), v),
        "dropout between softmax and values",
    ),
    "soft cap": (
        with_scores(lambda s: 30.0 * jnp.tanh(s / 30.0)),
        "soft cap (tanh)",
    ),
    "precision": (
        lambda q, k, v: jnp.einsum(
            "bhts,bshd->bthd", softmax(scores(q, k)), v, precision="highest"
        ),
        "HIGHEST",
    ),
    "two masks, one of the weights": (
        lambda q, k, v: mix(
            jnp.where(
                first := jnp.broadcast_to(q[:, None, None, :, 0, 0] > 0, (2, 4, 8, 8)),
                softmax(jnp.where(TRIL, jnp.where(first, scores(q, k), -1e30), -1e30)),
                0.0,
            ),
            v,
        ),
        "select_n between softmax and values",
    ),
    "bias and a small fill": (
        lambda q, k, v: mix(
            softmax(jnp.where(TRIL, scores(q, k) + q[:, None, None, :, 0, 0], -1e4)), v
        ),
        "a bias may be as large as what masks make of the scores",
    ),
    "no shift": (
        with_scores(nothing, lambda s: (e := jnp.exp(s)) / e.sum(-1)[..., None]),
        "without the largest score",
    ),
    "largest of all": (
        with_scores(
            nothing, lambda s: (e := jnp.exp(s - s.max())) / e.sum(-1, keepdims=True)
        ),
        "without the largest score",
    ),
    "name of the weights": (
        lambda q, k, v: mix(checkpoint_name(softmax(scores(q, k)), "p"), v),
        "name between softmax and values",
    ),
    "different fills": (
        lambda q, k, v: (
            mix(
                softmax(
                    jnp.where(
                        TRIL, jnp.where(q[:, None, None, :, 0, 0] > 9, s, -1e9), -1e30
                    )
                ),
                v,
            )
            if (s := scores(q, k)) is not None
            else None
        ),
        "rows may be masked entirely, by masks of different kinds",
    ),
}


def wrong_sum(s):
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-2, keepdims=True)


def other_shift(s):
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return e / jnp.exp(s).sum(-1, keepdims=True)


def shift_of_rows(s):
    e = jnp.exp(s - s.max(-2, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def plus_one(s):
    e = jnp.exp(s)
    return e / (1 + e.sum(-1, keepdims=True))


def sum_of_others(s):
    return jnp.exp(s) / jnp.exp(2 * s).sum(-1, keepdims=True)


def sum_on_another_axis(s):
    e = jnp.exp(s)
    return e / e.sum(-1)[:, :, None, :]


LOOK_ALIKES = {
    "softmax over queries": with_scores(nothing, functools.partial(softmax, axis=2)),
    "softmax over heads": with_scores(nothing, functools.partial(softmax, axis=1)),
    "softmax over two axes": with_scores(
        nothing, functools.partial(softmax, axis=(2, 3))
    ),
    "sum over queries": with_scores(nothing, wrong_sum),
    "another shift": with_scores(nothing, other_shift),
    "largest of queries": with_scores(nothing, shift_of_rows),
    "softmax plus one": with_scores(nothing, plus_one),
    "sum of others": with_scores(nothing, sum_of_others),
    "sum on another axis": with_scores(nothing, sum_on_another_axis),
    "small fill": with_scores(lambda s: jnp.where(TRIL, s, -5.0)),
    "mask after softmax": with_scores(
        nothing, lambda s: jnp.where(TRIL, softmax(s), 0)
    ),
    "sigmoid": with_scores(nothing, jax.nn.sigmoid),
    "relu": with_scores(nothing, jax.nn.relu),
    "another axis of v": lambda q, k, v: jnp.einsum(
        "bhts,bthd->bshd", softmax(scores(q, k)), v
    ),
    "values of other heads": lambda q, k, v: jnp.einsum(
        "bhts,bsed->bthd", softmax(scores(q, k)), v
    ),
    "values of one batch": lambda q, k, v: jnp.einsum(
        "bhts,shd->bthd", softmax(scores(q, k)), v[0]
    ),
    "weights without gradient": with_scores(
        nothing, lambda s: lax.stop_gradient(softmax(s))
    ),
    "scores without gradient": with_scores(lax.stop_gradient),
    "sum without gradient": with_scores(
        nothing,
        lambda s: (e := jnp.exp(s)) / lax.stop_gradient(e.sum(-1, keepdims=True)),
    ),
    "one shift without gradient": with_scores(
        nothing,
        lambda s: (
            jnp.exp(s - lax.stop_gradient(m := s.max(-1, keepdims=True)))
            / jnp.exp(s - m).sum(-1, keepdims=True)
        ),
    ),
    "learnt mask": with_scores(lambda s: s * jnp.asarray(TRIL, jnp.float32)),
}
