"""What `amp` may compute: a specification that can be run, and shares no code with `mpx`.

    1. Matmuls and convolutions multiply numbers of 16 bits, add in f32, and round their result once.
    2. Every other operation computes in f32, on the numbers and bounds that the program wrote.
    3. Between operations a value is held in 16 bits only where an array is stored and everything
       that it is computed from was of 16 bits; it is rounded once, there.
    4. Every sum, forward or backward, adds in f32.

`marked` writes a rounding into a traced program wherever sentence 3 allows one; JAX differentiates
the result, roundings included, as `reduce_precision` rounds its cotangent, too. `Exact` computes
that program in f64, operation after operation. In a *draw* each rounding moves a number by a random part
of what 16 bits may lose, equal numbers equally, and each operation by what f32 may lose. A result
of `amp` may be as far from the exact one as a few times the farthest draw.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jax import lax
from jax.extend.core import Literal

from exact import F32, MATMULS, Draw, Exact, asks_f32, bodies, wide

FACTOR = 6.0
"""How many times as far as the farthest draw a result may be."""
LOW = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16)}
ALGEBRA = {
    "cholesky",
    "triangular_solve",
    "lu",
    "qr",
    "householder_product",
    "eigh",
    "svd",
}
LOOPS = {"scan", "while"}
ARITHMETIC = {"add", "sub", "mul", "div", "pow"}
CHOICES = {"select_n", "max", "min", "clamp", "pad", "concatenate"}


def holds(eqn, names):
    inner = (e for body in bodies(eqn) for e in body.eqns)
    return eqn.primitive.name in names or any(holds(e, names) for e in inner)


# --- Where 16 bits may round -----------------------------------------------------------


def stored_in(jaxpr):
    """Returns what outlives its region: what work, results or later regions read.

    The level of an equation counts the borders and stored values behind it.
    """
    work = [holds(e, MATMULS) for e in jaxpr.eqns]
    borders = [
        w or holds(e, LOOPS | ALGEBRA) for e, w in zip(jaxpr.eqns, work, strict=True)
    ]
    stored = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    stored |= {
        v for e, w in zip(jaxpr.eqns, work, strict=True) if w for v in variables(e)
    }
    while True:
        level, later = {}, set()
        for eqn, border in zip(jaxpr.eqns, borders, strict=True):
            at = max([level.get(v, 0) for v in variables(eqn)], default=0)
            later |= {v for v in variables(eqn) if level.get(v, 0) < at} - stored
            level |= {v: at + (border or v in stored) for v in eqn.outvars}
        if not later:
            return stored
        stored |= later


def variables(eqn):
    return [v for v in eqn.invars if not isinstance(v, Literal)]


def reaching(jaxpr, names):
    """Returns the equations whose results reach such operations, without a matmul between."""
    wanted, found = set(), set()
    for i, eqn in reversed(list(enumerate(jaxpr.eqns))):
        reaches = not wanted.isdisjoint(eqn.outvars)
        if reaches:
            found.add(i)
        if holds(eqn, names) or (reaches and not holds(eqn, MATMULS)):
            wanted |= set(variables(eqn))
    return found


def kind_of(name, kinds):
    """Returns what results are made of; `odd` numbers are none of 16 bits.

    A number that is chosen must stay what is written, so an odd one makes its result `data`.
    """
    if "odd" in kinds and name in CHOICES and "low" in kinds:
        return "data"
    order = "data", "low", "param", "odd", "const"
    return next(kind for kind in order if kind in (*kinds, "const"))


class Marker:
    """Writes the roundings into a program."""

    def __init__(self, dtype, has_rules=False):
        self.dtype, self.has_rules = dtype, has_rules

    def literal(self, value):
        array = np.asarray(value, np.float64)
        exact = np.all(array.astype(self.dtype).astype(np.float64) == array)
        return "const" if exact else "odd"

    def jaxpr(self, jaxpr, consts, args, kinds):
        """Returns results and their kinds: `data`, `low`, `param`, `odd` or `const`."""
        stored, algebra = stored_in(jaxpr), reaching(jaxpr, ALGEBRA)
        values = dict(
            zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True)
        )
        made = dict.fromkeys(jaxpr.constvars, "data") | dict(
            zip(jaxpr.invars, kinds, strict=True)
        )

        def look(v):
            literal = isinstance(v, Literal)
            return (v.val, self.literal(v.val)) if literal else (values[v], made[v])

        for i, eqn in enumerate(jaxpr.eqns):
            pairs = [look(v) for v in eqn.invars]
            read, kinds = [x for x, _ in pairs], [kind for _, kind in pairs]
            outs, kinds = self.equation(eqn, read, kinds, i in algebra)
            for v, out, kind in zip(eqn.outvars, outs, kinds, strict=True):
                is_float = getattr(v.aval, "dtype", None) == F32
                is_rounded = is_float and kind == "low" and v in stored
                values[v] = lax.reduce_precision(out, 8, 7) if is_rounded else out
                made[v] = kind if is_float else "const"
        pairs = [look(v) for v in jaxpr.outvars]
        return [x for x, _ in pairs], [kind for _, kind in pairs]

    def equation(self, eqn, read, kinds, is_algebra):
        name, params = eqn.primitive.name, eqn.params
        if name in MATMULS:
            # The products of a rule for derivatives are decided about one by one.
            is_low = self.has_rules or not (is_algebra or stays_f32(eqn))
            if not is_low and "precision" in params:
                params = params | {"precision": (lax.Precision.HIGHEST,) * 2}
            return [eqn.primitive.bind(*read, **params)], ["low" if is_low else "data"]
        if name in ("jit", "pjit", "remat2", "checkpoint", "closed_call", "remat"):
            inner = params["jaxpr"]
            has_rules = self.has_rules or params.get("name") == "own_rule"
            return Marker(self.dtype, has_rules).jaxpr(
                getattr(inner, "jaxpr", inner),
                getattr(inner, "consts", ()),
                read,
                kinds,
            )
        if name == "scan":
            return self.scan(params, read, kinds)
        if name == "cond":
            found = []

            def branch(body, *args):
                outs, made = self.jaxpr(body.jaxpr, body.consts, args, kinds[1:])
                found.append(made)
                return outs

            branches = [functools.partial(branch, body) for body in params["branches"]]
            outs = lax.switch(read[0], branches, *read[1:])
            return outs, [kind_of("", pair) for pair in zip(*found, strict=True)]
        outs = eqn.primitive.bind(*read, **eqn.primitive.get_bind_params(params))
        outs = outs if eqn.primitive.multiple_results else [outs]
        kind = "low" if holds(eqn, MATMULS) else kind_of(name, kinds)
        if name in LOOPS | ALGEBRA or name == "iota":
            kind = "odd" if name == "iota" else "data"
        return outs, [kind] * len(outs)

    def scan(self, params, read, kinds):
        body, (n, m) = params["jaxpr"], (params["num_consts"], params["num_carry"])
        kinds = [*kinds[:n], *["data"] * m, *kinds[n + m :]]
        found = []

        def step(carry, xs):
            outs, made = self.jaxpr(
                body.jaxpr, body.consts, [*read[:n], *carry, *xs], kinds
            )
            found[:] = [["data"] * m + made[m:]]
            return outs[:m], outs[m:]

        like = [v.aval.dtype for v in body.jaxpr.invars[n : n + m]]
        init = [
            jax.numpy.asarray(x, t) for x, t in zip(read[n : n + m], like, strict=True)
        ]
        options = {key: params[key] for key in ("length", "reverse")}
        carry, ys = lax.scan(step, init, read[n + m :], **options)
        return [*carry, *ys], found[0]


def stays_f32(eqn):
    """Returns whether a product is one of f32: as asked for, or with a sum of few terms."""
    if eqn.primitive.name != "dot_general":
        return asks_f32(eqn)
    (axes, _), _ = eqn.params["dimension_numbers"]
    return asks_f32(eqn) or math.prod(eqn.invars[0].aval.shape[i] for i in axes) <= 4


# --- Bounds ----------------------------------------------------------------------------


class Bound(NamedTuple):
    exact: Any  # results: a tree of arrays of f64
    within: Any  # how far each may be off, by the norm


def bounds(func, args, kinds, dtype="bf16", draws=8, codes=None):
    """Returns what `jax.value_and_grad(func, has_aux=True)` may be under `amp`.

    `kinds` says of each leaf of `args` whether it is a `param`, or `data`. `codes` are the
    8-bit numbers that matmuls multiply, if they do.
    """
    closed, shapes = jax.make_jaxpr(func, return_shape=True)(*args)
    tree = jax.tree.structure(shapes)

    def rounded(*args):
        marker, leaves = Marker(LOW[dtype]), jax.tree.leaves(args)
        found, _ = marker.jaxpr(closed.jaxpr, closed.consts, leaves, kinds)
        return tree.unflatten(found)

    grad = jax.value_and_grad(rounded, has_aux=True)
    program, shapes = jax.make_jaxpr(grad, return_shape=True)(*args)
    leaves = [wide(x) for x in jax.tree.leaves(args)]
    exact = Exact().jaxpr(program, leaves)
    farthest = np.zeros(len(exact))
    for i in range(draws):
        scale = 0.5 + (i + 0.5) / draws / 2
        drawn = Draw(LOW[dtype], scale, codes, i % 3 == 0).jaxpr(program, leaves)
        pairs = zip(drawn, exact, strict=True)
        farthest = np.maximum(farthest, [np.linalg.norm(x - y) for x, y in pairs])
    within = FACTOR * farthest + [1e-6 * np.linalg.norm(x) + 1e-12 for x in exact]
    unflatten = jax.tree.structure(shapes).unflatten
    return Bound(unflatten(exact), unflatten(within))
