"""Programs that are compiled in pieces against the same programs in one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpx._jax import _progress
from mpx.inspect import _pieces
from mpx.inspect._pieces import Pieces, apart

X = jax.random.normal(jax.random.key(0), (5, 7))
W = jax.random.normal(jax.random.key(1), (7, 7)) / 3
TABLES = [np.arange(7.0, dtype=np.float32)[None] + i for i in range(3)]


def layers(step, count=3):
    def run(x, w):
        for i in range(count):
            x = step(i, x, w)
        return {"x": x, "total": x.sum(), "one": jnp.ones(())}

    return run


def factor(i, x, w):
    return jnp.tanh(x @ w) * (2.0 + i)


def signed_zero(i, x, w):
    return jnp.copysign(x @ w, (0.0, -0.0, 0.0)[i])


def recall(i, x, w):
    return jax.lax.approx_max_k(x @ w, 7, recall_target=0.9 - 0.1 * i)[0]


def closed_over(i, x, w):
    return jnp.tanh(x @ w + TABLES[i])


def closed_over_in_jit(i, x, w):
    return jax.jit(lambda x: jnp.sin(x) + TABLES[i])(x @ w)


def axis(i, x, w):
    return jnp.tanh(jnp.cumsum(x @ w, axis=(0, 1, 0)[i]))


def scanned(i, x, w):
    def step(x, row):
        return jnp.tanh(x @ w + i * row), x.sum()

    x, sums = jax.lax.scan(jax.checkpoint(step), x, jnp.asarray(TABLES))
    return x + sums.mean()


def branch(i, x, w):
    return jax.lax.cond(x[0, 0] > i, jnp.sin, lambda x: x * (i + 2), x @ w)


def nested(i, x, w):
    inner = jax.checkpoint(jax.jit(lambda x, w: jnp.sin(x @ w) * (i + 1)))
    return inner(x, w) + inner(2 * x, w)


def drawn(i, x, w):
    return x @ w + jax.random.normal(jax.random.key(i), x.shape)


@apart
def scaled(x, i):
    return x * (i + 2), x.max()


def with_parts_apart(i, x, w):
    y, largest = scaled(x @ w, i)
    return jnp.tanh(y) + scaled(x @ w, i)[1] - largest


PROGRAMS = [
    factor,
    signed_zero,
    closed_over,
    closed_over_in_jit,
    axis,
    scanned,
    branch,
    nested,
    drawn,
    with_parts_apart,
]


def close(a, b):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), a, b
    )


@pytest.mark.parametrize("step", PROGRAMS, ids=lambda x: x.__name__)
def test_pieces_compute_the_function_and_its_gradient(step):
    run = layers(step)

    def grads(x, w):
        return jax.grad(lambda x, w: run(x, w)["x"].mean(), (0, 1))(x, w)

    for func in (run, grads):
        pieces = Pieces(func, X, W)
        assert pieces.count > 3
        close(pieces(X, W), jax.jit(func)(X, W))
        close(pieces(X + 1, W), jax.jit(func)(X + 1, W))


def test_equal_layers_are_compiled_once():
    def step(i, x, w):
        return jnp.tanh(x @ w) + scaled(x, i)[1]

    small, large = (Pieces(layers(step, count), X, W) for count in (4, 12))
    assert large.count >= small.count + 16
    assert large.distinct == small.distinct


@pytest.mark.parametrize(
    "step", [factor, signed_zero, recall, closed_over_in_jit, axis]
)
def test_layers_that_differ_are_not_taken_for_equal(step):
    equal = Pieces(layers(functools.partial(lambda i, x, w: step(0, x, w))), X, W)
    assert Pieces(layers(step), X, W).distinct > equal.distinct


def test_sharded_arguments_stay_sharded():
    mesh = jax.make_mesh((5,), ("data",), devices=jax.devices()[:5])
    rows = jax.NamedSharding(mesh, jax.P("data"))
    x, w = jax.device_put(X, rows), jax.device_put(W, jax.NamedSharding(mesh, jax.P()))
    run = layers(factor)
    found = Pieces(run, x, w)(x, w)
    close(found, run(X, W))
    assert found["x"].sharding.is_equivalent_to(rows, 2)


def test_values_are_dropped_after_their_last_use():
    pieces = Pieces(layers(factor, 6), X, W)
    dropped = [x for dying in pieces._dying for x in dying]
    made = [x for piece in pieces._pieces for x in piece.outputs]
    kept = {x for x in pieces._outs if isinstance(x, int)}
    assert len(dropped) == len(set(dropped))
    assert {*made} - {*dropped} == kept & {*made}


def test_options_that_xla_does_not_know_are_left_out():
    assert not _pieces._is_known("cpu", "xla_no_such_option", 1)
    assert _pieces._is_known("cpu", "xla_backend_optimization_level", 1)


def test_progress_is_shown_on_terminals_only(capsys, monkeypatch):
    with _progress.progress(2, "work") as tell:
        tell("step")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setitem(__import__("sys").modules, "rich.progress", None)
    with _progress.progress(2, "work") as tell:
        tell("first")
        Pieces(layers(factor), X, W).prepare(X, W, tell=tell)
    found = capsys.readouterr()
    assert found.out == ""
    assert "work: first (1/2)" in found.err
    assert "work: compiled 1 of" in found.err
    assert found.err.endswith("\r\x1b[K")
