"""Whole programs, drawn from a seed: losses of layers, wrapped in each other.

A program is a list of nodes, so that a failing one can be shrunk: a node is a kind, a number that
its choices are made with, and for wrappers the nodes inside. It maps (rows, width) arrays to such
arrays, and a head makes a loss of the last one.
"""

import functools
import random
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.tree_util import tree_leaves_with_path

ROWS, WIDTH = 16, 16


class Node(NamedTuple):
    kind: str
    seed: int
    inside: tuple["Node", ...] = ()


class Program(NamedTuple):
    nodes: tuple[Node, ...]
    head: str
    holder: str  # what holds the parameters
    shards: int  # devices that share the rows
    is_low: bool  # whether parameters are of 16 bits
    kept: int | None  # a parameter that `keep=` names
    seed: int


class Batch(NamedTuple):
    x: Any
    y: Any
    ids: Any
    mask: Any


class Held(eqx.Module):
    params: Any


# --- Layers: (parameter, h, batch, rng) -> h --------------------------------------------

LAYERS = {}


def layer(function):
    LAYERS[function.__name__] = function
    return function


def norm(h):
    h = h - jnp.mean(h, -1, keepdims=True)
    return h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 0.1)


def guarded(s, rng):
    """Keeps s below 0.999, in one of the ways that programs do."""
    return rng.choice(
        [
            lambda s: jnp.where(s > 0.999, 0.999, s),
            lambda s: jnp.clip(s, 0.001, 0.999),
            lambda s: jnp.minimum(s, 0.999),
            lambda s: lax.select(s > 0.999, jnp.full_like(s, 0.999), s),
            lambda s: lax.pad(s[:, 1:], np.float32(0.999), ((0, 0, 0), (1, 0, 0))),
            lambda s: jnp.concatenate([s[:, 1:], jnp.full_like(s[:, :1], 0.999)], 1),
            jax.jit(lambda s: jnp.where(s > 0.999, 0.999, s)),
        ]
    )(s)


def window(h):
    return lax.reduce_window(h, np.float32(0), lax.add, (1, 4), (1, 1), "same") / 4


def segments(h):
    ids = jnp.arange(len(h)) // 4
    return jax.ops.segment_sum(h, ids, num_segments=len(h) // 4)[ids] / 4


AVERAGES = [
    window,
    segments,
    lambda h: jnp.cumsum(h, 1) / WIDTH,
    lambda h: jnp.mean(h.T, 0)[:, None] + 0 * h,
    lambda h: jnp.mean(h, 1, keepdims=True) + 0 * h,
]


@layer
def dense(p, h, batch, rng):
    h = h @ p("w", WIDTH, WIDTH)
    return h + p("b", 1, WIDTH) if rng.random() < 0.7 else h


@layer
def mlp(p, h, batch, rng):
    act = rng.choice([jax.nn.gelu, jax.nn.relu, jax.nn.silu, jnp.tanh, jax.nn.softplus])
    return h + act(norm(h) @ p("up", WIDTH, 32)) @ p("down", 32, WIDTH)


@layer
def chain(p, h, batch, rng):
    for _ in range(rng.randint(1, 4)):
        h = rng.choice(
            [
                jnp.tanh,
                jnp.sin,
                jax.nn.silu,
                lambda h: h * 0.7 + 0.3,
                lambda h: 1.1 - h,
                lambda h: jnp.maximum(h, 0.1),
                lambda h: h * p("g", 1, WIDTH),
                abs,
            ]
        )(h)
    return h


@layer
def guard(p, h, batch, rng):
    s = jax.nn.sigmoid(3 * jnp.tanh(h) + 3)  # at most 0.9975, which bf16 makes 1
    return -jnp.log(1 - guarded(s, rng)) / 4


@layer
def offset(p, h, batch, rng):
    h = norm(h) @ p("w", WIDTH, WIDTH)
    far = p("b", 1, WIDTH) + 300.3 if rng.random() < 0.5 else 300.3
    h = h * 0.5 + far
    return rng.choice(
        [lambda h: h - 300, lambda h: h - jnp.mean(h, -1, keepdims=True)]
    )(h)


@layer
def moments(p, h, batch, rng):
    mean = rng.choice(AVERAGES)
    h = norm(h) @ p("w", WIDTH, WIDTH) + 2
    return jnp.sqrt(jnp.maximum(mean(h * h) - mean(h) ** 2, 0) + 0.1) + h


@layer
def gate(p, h, batch, rng):
    h = norm(h)
    return (h @ p("a", WIDTH, WIDTH)) * jax.nn.sigmoid(h @ p("b", WIDTH, WIDTH))


@layer
def attention(p, h, batch, rng):
    q, k, v = jnp.split(norm(h) @ p("qkv", WIDTH, 3 * WIDTH), 3, 1)
    scores = q @ k.T / WIDTH**0.5
    if rng.random() < 0.5:
        scores = jnp.where(jnp.tril(jnp.ones_like(scores)) > 0, scores, -1e9)
    weights = jax.nn.softmax(scores)
    if rng.random() < 0.3:
        weights = weights * batch.mask
    return h + weights @ v


@layer
def counts(p, h, batch, rng):
    position = jnp.arange(WIDTH, dtype=jnp.float32)[None] + 301
    total = jnp.tril(jnp.ones((len(h), len(h)))) @ jax.nn.one_hot(batch.ids, WIDTH)
    if rng.random() < 0.5:
        return h * total / ROWS
    return (h * position - 301 * h) / 8


@layer
def long_sum(p, h, batch, rng):
    h = jnp.tanh(h @ p("w", WIDTH, WIDTH))
    total, step = (
        jnp.zeros_like(h),
        rng.choice([lambda t: t + h, lambda t: 0.9 * t + 0.1 * h]),
    )
    if rng.random() < 0.5:
        total = lax.fori_loop(0, 100, lambda _, t: step(t), total)
    else:
        for _ in range(12):
            total = step(total)
    return total / 12


@layer
def table(p, h, batch, rng):
    rows = jnp.asarray(p("t", ROWS, WIDTH))
    rows = rng.choice(
        [
            lambda t: t.at[0].set(0),
            lambda t: t * 0.5,
            lambda t: t,
            jax.jit(lambda t: t + 1),
        ]
    )(rows)
    return h + rows[batch.ids]


@layer
def small(p, h, batch, rng):
    n = rng.choice([2, 4])
    h = h.reshape(-1, WIDTH // n, n) @ (p("r", n, n) + 300.3 * jnp.eye(n))
    return norm(h.reshape(-1, WIDTH) / 300)


@layer
def gauss(p, h, batch, rng):
    z = norm(h @ p("w", WIDTH, WIDTH))
    kernel = z.T @ z / ROWS + 0.01 * jnp.eye(WIDTH)
    if rng.random() < 0.5:
        factor = jnp.linalg.cholesky(kernel)
        return h + 0.1 * lax.linalg.triangular_solve(factor, h, lower=True)
    return h + jnp.log(jnp.diag(jnp.linalg.cholesky(kernel)))[None]


@layer
def shapes(p, h, batch, rng):
    return rng.choice(
        [
            lambda h: jnp.roll(h, 1, 0),
            lambda h: jnp.concatenate([h[:, ::2], h[:, 1::2]], 1),
            lambda h: jnp.cumsum(h, 0) / len(h),
            lambda h: jnp.sort(h, 1),
            lambda h: jnp.pad(h[:, :-2], ((0, 0), (1, 1)), constant_values=0.3),
            lambda h: h.at[0].add(h[1]),
            lambda h: jnp.repeat(h[:, ::2], 2, 1),
            lambda h: h + lax.stop_gradient(h),
        ]
    )(h)


@layer
def convolution(p, h, batch, rng):
    out = lax.conv(h.T[None], p("w", WIDTH, WIDTH, 3), (1,), "SAME")[0].T
    return h + jax.nn.relu(out)


@layer
def heads(p, h, batch, rng):
    h = norm(h).reshape(-1, 2, WIDTH // 2)
    return jnp.einsum("nhd,hde->nhe", h, p("w", 2, WIDTH // 2, WIDTH // 2)).reshape(
        -1, WIDTH
    )


@layer
def experts(p, h, batch, rng):
    out = jnp.einsum("nd,edf->nef", norm(h), p("w", 3, WIDTH, WIDTH))
    weights = jax.nn.softmax(h @ p("router", WIDTH, 3))
    return jnp.einsum("nef,ne->nf", out, weights)


@layer
def prints(p, h, batch, rng):
    if rng.random() < 0.5:
        jax.debug.callback(lambda x: None, h)
        return h
    like = jax.ShapeDtypeStruct(h.shape, h.dtype)
    sign = jax.pure_callback(
        np.sign, like, lax.stop_gradient(h), vmap_method="sequential"
    )
    return h * sign


@layer
def written(p, h, batch, rng):
    low = rng.choice([jnp.bfloat16, jnp.float16])
    return (h.astype(low) @ p("w", WIDTH, WIDTH).astype(low)).astype(jnp.float32)


@layer
def recurrent(p, h, batch, rng):
    w, u = p("w", WIDTH, WIDTH), p("u", WIDTH, WIDTH)

    def step(state, x):
        state = jnp.tanh(state @ w + x @ u)
        return state, state * 0.5 if rng.random() < 0.5 else state

    return lax.scan(step, jnp.zeros((1, WIDTH)), h[:, None])[1][:, 0]


# --- Wrappers: (apply, p, h, batch, rng) -> h; `apply(p, h)` runs what is inside --------

WRAPPERS = {}


def wrapper(function):
    WRAPPERS[function.__name__] = function
    return function


@wrapper
def jit(apply, p, h, batch, rng):
    return jax.jit(lambda p, h: apply(p, h))(p, h)


@wrapper
def remat(apply, p, h, batch, rng):
    return jax.checkpoint(apply)(p, h)


@wrapper
def scan(apply, p, h, batch, rng):
    """Three layers, whose parameters are slices of stacks; the carry changes."""
    body = jax.checkpoint(apply) if rng.random() < 0.3 else apply
    return lax.scan(lambda h, p: (norm(body(p, h)), None), h, p, 3)[0]


setattr(scan, "stacks", 3)  # noqa: B010


@wrapper
def loop(apply, p, h, batch, rng):
    return lax.fori_loop(0, 3, lambda i, h: norm(apply(p, h)), h)


@wrapper
def derived(apply, p, h, batch, rng):
    """A loop that changes its parameters, too."""

    def step(carry, _):
        h, p = carry
        return (norm(apply(p, h)), jax.tree.map(lambda x: x * 0.9, p)), None

    return lax.scan(step, (h, p), None, length=3)[0][0]


@wrapper
def cond(apply, p, h, batch, rng):
    return lax.cond(
        jnp.sum(h[0]) * 0 < rng.choice([-1, 1]), apply, lambda p, h: h * 0.5, p, h
    )


@wrapper
def vmap(apply, p, h, batch, rng):
    parts = h.reshape(2, -1, WIDTH)
    return jax.vmap(lambda h: apply(p, h))(parts).reshape(-1, WIDTH)


@wrapper
def custom(apply, p, h, batch, rng):
    """A rule that scales the gradient; the function closes over the batch, or is given it."""
    if rng.random() < 0.9:
        func = jax.custom_vjp(lambda p, h, batch: apply(p, h, batch))
        func.defvjp(
            lambda p, h, batch: jax.vjp(lambda p, h: apply(p, h, batch), p, h),
            lambda back, g: (*back(g * 1.5), None),
        )
        return func(p, h, batch)
    func = jax.custom_vjp(lambda p, h: apply(p, h))
    func.defvjp(lambda p, h: jax.vjp(apply, p, h), lambda back, g: back(g * 1.5))
    return func(p, h)


@jax.custom_vjp
def _larger(x):
    return x


_larger.defvjp(lambda x: (x, None), lambda _, g: (g * 1.5,))


def _custom(apply, p, h, batch, rng):
    def own_rule(p, h):
        return apply(p, h)

    return jax.jit(own_rule)(*jax.tree.map(_larger, (p, h)))


setattr(custom, "plain", _custom)  # noqa: B010


@wrapper
def custom_jvp(apply, p, h, batch, rng):
    func = jax.custom_jvp(lambda p, h, batch: apply(p, h, batch))
    func.defjvp(lambda at, along: jax.jvp(apply, at, along))
    return func(p, h, batch)


def _custom_jvp(apply, p, h, batch, rng):
    return jax.jit(lambda p, h: apply(p, h))(p, h)


setattr(custom_jvp, "plain", _custom_jvp)  # noqa: B010


@wrapper
def while_(apply, p, h, batch, rng):
    """A loop that has no gradient."""
    p, first, batch = jax.tree.map(lax.stop_gradient, (p, h, batch))

    def step(carry):
        return carry[0] + 1, norm(apply(p, carry[1], batch))

    return h + lax.while_loop(lambda carry: carry[0] < 2, step, (0, first))[1]


# --- Heads: (p, h, batch) -> loss -------------------------------------------------------

HEADS = {
    "squares": lambda p, h, batch: jnp.mean((h @ p("w", WIDTH, WIDTH) - batch.y) ** 2),
    "far squares": lambda p, h, batch: jnp.mean(
        (norm(h) @ p("w", WIDTH, WIDTH) + p("b", 1, WIDTH) + 299.7 - batch.y - 300) ** 2
    ),
    "words": lambda p, h, batch: (
        -jnp.mean(
            jnp.take_along_axis(
                jax.nn.log_softmax(norm(h) @ p("w", WIDTH, ROWS)), batch.ids[:, None], 1
            )
        )
    ),
    "jitted": lambda p, h, batch: jnp.mean(
        jax.nn.logsumexp(
            jax.jit(lambda h, w: jnp.clip(h @ w, -20, 20))(
                norm(h), p("w", WIDTH, ROWS)
            ),
            1,
        )
    ),
    "plain": lambda p, h, batch: jnp.mean(h * batch.y),
}


# --- Drawing ----------------------------------------------------------------------------


def draw(seed):
    rng = random.Random(seed)
    nodes = tuple(_node(rng, 0) for _ in range(rng.randint(1, 3)))
    return Program(
        nodes,
        rng.choice([*HEADS]),
        rng.choice(["dict", "module", "partial", "leaves"]),
        rng.choice([0] * 9 + [2]),
        rng.random() < 0.1,
        rng.choice([None] * 7 + [rng.randrange(100)]),
        seed,
    )


def _node(rng, depth):
    if depth < 2 and rng.random() < 0.35:
        inside = tuple(_node(rng, depth + 1) for _ in range(rng.randint(1, 2)))
        return Node(rng.choice([*WRAPPERS]), rng.randrange(1 << 20), inside)
    return Node(rng.choice([*LAYERS]), rng.randrange(1 << 20))


def count(nodes):
    return sum(1 + count(node.inside) for node in nodes)


def smaller(program):
    """Yields programs with one node less, or without a wrapper."""
    for nodes in _smaller(program.nodes):
        yield program._replace(nodes=nodes)
    for change in (
        {"shards": 0},
        {"holder": "dict"},
        {"head": "plain"},
        {"is_low": False},
        {"kept": None},
    ):
        if program._replace(**change) != program:
            yield program._replace(**change)


def _smaller(nodes):
    for i, node in enumerate(nodes):
        yield nodes[:i] + nodes[i + 1 :]
        if node.inside:
            yield nodes[:i] + node.inside + nodes[i + 1 :]
            for inside in _smaller(node.inside):
                if inside:
                    yield (*nodes[:i], node._replace(inside=inside), *nodes[i + 1 :])


class Params:
    """Hands out parameters by name: draws what is not there if it has a generator."""

    def __init__(self, held, rng=None):
        self.held, self.rng = held, rng

    def __call__(self, name, *shape):
        if name not in self.held and self.rng is not None:
            size = shape[-2] ** -0.5 if shape[0] > 1 else 0.3
            numbers = self.rng.standard_normal(shape) * size
            self.held[name] = numbers.astype(np.float32)
        return self.held[name]


def first(batch, rows):
    """Returns the batch of the first rows: inside a `vmap` there are less."""
    batch = jax.tree.map(lambda x: x[:rows], batch)
    return batch._replace(mask=batch.mask[:, :rows])


def apply(nodes, held, h, batch, rng=None, is_plain=False):
    for i, node in enumerate(nodes):
        name = f"{node.kind}{i}"
        choose = random.Random(node.seed)
        if node.kind in LAYERS:
            if rng is not None:
                held[name] = {}
            h = LAYERS[node.kind](
                Params(held[name], rng), h, first(batch, len(h)), choose
            )
            continue

        def run(p, h, batch=batch, node=node):
            return apply(node.inside, p, h, batch, None, is_plain)

        if rng is not None:
            stacks = getattr(WRAPPERS[node.kind], "stacks", 1)
            drawn = [{} for _ in range(stacks)]
            after = h
            for one in drawn:
                after = apply(node.inside, one, h, batch, rng)
            held[name] = (
                jax.tree.map(lambda *x: np.stack(x), *drawn) if stacks > 1 else drawn[0]
            )
            h = after
            continue
        wrap = WRAPPERS[node.kind]
        wrap = getattr(wrap, "plain", wrap) if is_plain else wrap
        h = wrap(run, held[name], h, batch, choose)
    return h


class Case(NamedTuple):
    func: Any  # of `args`: the loss and the last activations
    args: tuple[Any, Any]  # what is differentiated, and the batch
    plain: Any  # the same without devices and derivatives of its own, for the specification
    kept: str | None  # the end of the name of a parameter that stays in f32


def build(program):
    """Returns a function and its arguments."""
    rng = np.random.default_rng(program.seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    ids = rng.integers(0, WIDTH, ROWS).astype(np.int32)
    mask = (rng.random((ROWS, ROWS)) < 0.9).astype(np.float32)
    batch = Batch(normal(ROWS, WIDTH), normal(ROWS, WIDTH), ids, mask)
    params: dict[str, Any] = {"head": {}}

    def drawn(x):
        h = apply(program.nodes, params, x, batch, rng)
        return HEADS[program.head](Params(params["head"], rng), h, batch)

    jax.eval_shape(drawn, batch.x)  # for the shapes of what is drawn

    def loss(params, batch, is_plain=False):
        h = apply(program.nodes, params, batch.x, batch, None, is_plain)
        return HEADS[program.head](Params(params["head"]), h, batch), h

    def plain(params, batch):
        leaves, tree = jax.tree.flatten(batch)
        split = [jnp.split(x, program.shards or 1) for x in leaves]
        parts = [tree.unflatten(part) for part in zip(*split, strict=True)]
        one = jax.jit(lambda part: loss(params, part, True))
        if not program.shards:
            return loss(params, batch, True)
        pairs = [one(part) for part in parts]
        losses, hs = zip(*pairs, strict=True)
        return sum(losses) / np.float32(len(losses)), jnp.concatenate(hs)

    def on_devices(params, batch):
        mesh = Mesh(np.array(jax.devices()[: program.shards]), ("x",))

        def part(params, batch):
            value, h = loss(params, batch)
            return lax.pmean(value, "x"), h

        specs: Any = {"in_specs": (P(), P("x")), "out_specs": (P(), P("x"))}
        return jax.shard_map(part, mesh=mesh, check_vma=False, **specs)(params, batch)

    names = [
        "/".join(key.key for key in path) for path, _ in tree_leaves_with_path(params)
    ]
    has_names = program.holder in ("dict", "module") and names
    if program.is_low and program.holder != "partial":
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    leaves, tree = jax.tree.flatten(params)
    wrap, first = {
        "dict": (lambda func: func, params),
        "module": (
            lambda func: lambda module, batch: func(module.params, batch),
            Held(params),
        ),
        "leaves": (
            lambda func: lambda leaves, batch: func(tree.unflatten(leaves), batch),
            leaves,
        ),
        "partial": (
            lambda func: functools.partial(
                lambda params, x, batch: func(params, batch._replace(x=x)), params
            ),
            batch.x,
        ),
    }[program.holder]
    return Case(
        wrap(on_devices if program.shards else loss),
        (first, batch),
        wrap(plain),
        None
        if program.kept is None or not has_names
        else names[program.kept % len(names)],
    )
