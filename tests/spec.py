"""What `amp` may compute: a specification that can be run and shares no code with `mpx`.

1. Matmuls and convolutions multiply numbers of 16 bits, add in f32, and round their result
   once. Products that reach linear algebra, sums of at most 4 terms, and products of masks
   are f32.
2. Every other operation computes in f32, on the numbers and bounds that the program wrote.
3. Between operations a value is held in 16 bits only where an array is stored and everything
   that it is computed from was of 16 bits; it is rounded once, there.
4. Every sum, forward or backward, adds in f32.

`Marker` writes a rounding into a traced program wherever sentence 3 allows one. JAX
differentiates the result, and `reduce_precision` rounds its cotangent, too. `exact` computes
that program in f64, one operation after the other. In a draw matmuls and the marks round to
grids that are moved from draw to draw, and other operations lose what f32 may lose. A result of
`amp` may be as far from the exact one as a few times the farthest draw.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

import exact

FACTOR = 3.0  # How many times as far as the farthest draw a result may be
LOW = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16)}
ALGEBRA = frozenset(["cholesky", "triangular_solve", "lu", "qr", "eigh", "svd"])
LOOPS = frozenset(("scan", "while"))
CHOICES = frozenset(["select_n", "max", "min", "clamp", "pad", "concatenate"])
CALLS = frozenset(["jit", "pjit", "remat", "remat2", "checkpoint", "closed_call"])


def stored_in(jaxpr):
    """Returns what outlives its region: what work, results or later regions read.

    Work is matmuls, and what holds them. The level of an equation counts the borders and
    stored values behind it; a region has one level.
    """
    work = [e for e in jaxpr.eqns if exact.holds(e, exact.MATMULS)]
    stored = exact.variables([*jaxpr.outvars, *(v for e in work for v in e.invars)])
    while True:
        level, later = {}, set()
        for eqn in jaxpr.eqns:
            read = exact.variables(eqn.invars)
            at = max([level.get(v, 0) for v in read], default=0)
            later |= {v for v in read if level.get(v, 0) < at} - stored
            is_border = exact.holds(eqn, exact.MATMULS | LOOPS | ALGEBRA)
            level |= {v: at + (is_border or v in stored) for v in eqn.outvars}
        if not later:
            return stored
        stored |= later


def before_algebra(jaxpr):
    """Returns the results that reach linear algebra, without a matmul between."""
    wanted = set()
    for eqn in reversed(jaxpr.eqns):
        is_work = exact.holds(eqn, exact.MATMULS)
        reaches = not (is_work or wanted.isdisjoint(eqn.outvars))
        if reaches or eqn.primitive.name in ALGEBRA:
            wanted |= exact.variables(eqn.invars)
        for body in exact.bodies(eqn):
            inside = before_algebra(body)
            pairs = zip(reversed(eqn.invars), reversed(body.invars), strict=False)
            wanted |= exact.variables(v for v, inner in pairs if inner in inside)
    return wanted


def kind_after(eqn, kinds):
    """Returns the kind of the results of an equation that is no call."""
    name = eqn.primitive.name
    if name in LOOPS | ALGEBRA:
        return "data"
    if name in ("reduce_sum", "cumsum", "reduce_window_sum", "scatter-add", "iota"):
        return "odd"
    if name in CHOICES and {"odd", "low"} <= {*kinds}:
        return "data"  # since an odd number that is chosen must stay what it is
    return widest(kinds)


def widest(kinds):
    return next(
        x
        for x in ("data", "low", "kept", "param", "odd", "const")
        if x in {*kinds, "const"}
    )


class Marker:
    """Writes the roundings into a program.

    The kind of an array says what it is computed from: `low`, numbers of 16 bits; `data`,
    others that must stay what they are; or what follows the others: parameters, constants
    and sums, which are `odd` unless 16 bits hold them, and else `const`.
    """

    def __init__(self, dtype, has_rules=False):
        self.dtype, self.has_rules = dtype, has_rules

    def literal(self, v):
        number = np.asarray(v.val, np.float64)
        is_held = np.all(number.astype(self.dtype) == number)
        return jnp.asarray(v.val, v.aval.dtype), "const" if is_held else "odd"

    def run(self, jaxpr, args, kinds, consts=()):
        """Returns results and their kinds."""
        jaxpr, consts = exact.inlined(jaxpr, consts)
        stored, solved = stored_in(jaxpr), before_algebra(jaxpr)
        kinds = [*["data"] * len(consts), *kinds]
        values = zip([*consts, *args], kinds, strict=True)
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], values, strict=True))

        def look(v):
            return self.literal(v) if hasattr(v, "val") else known[v]

        for eqn in jaxpr.eqns:
            pairs = [look(v) for v in eqn.invars]
            read, kinds = [x for x, _ in pairs], [kind for _, kind in pairs]
            outs, kinds = self.equation(eqn, read, kinds, solved)
            for v, out, kind in zip(eqn.outvars, outs, kinds, strict=True):
                if v.aval.dtype != exact.F32:
                    kind = "low" if v.aval.dtype in LOW.values() else "const"
                elif kind == "low" and v in stored:
                    out = lax.reduce_precision(out, 8, 7)
                known[v] = out, kind
        outs = [look(v) for v in jaxpr.outvars]
        return [x for x, _ in outs], [kind for _, kind in outs]

    def equation(self, eqn, read, kinds, solved):
        name, params = eqn.primitive.name, eqn.params
        if name in exact.MATMULS:
            is_f32 = (
                exact.asks_f32(eqn) or exact.terms(eqn) <= 4 or eqn.outvars[0] in solved
            )
            is_f32 |= {"const", "odd"} >= {*kinds} or "kept" in kinds
            # Matmuls in a derivative rule are other equations, and decided about by themselves.
            if is_f32 and not self.has_rules:
                params = params | {"precision": (lax.Precision.HIGHEST,) * 2}
            return [eqn.primitive.bind(*read, **params)], ["data" if is_f32 else "low"]
        if name in CALLS:
            has_rules = self.has_rules or params.get("name") == "own_rule"
            return Marker(self.dtype, has_rules).run(params["jaxpr"], read, kinds)
        if name == "scan":
            return self.scan(params, read, kinds)
        if name == "cond":
            found = []

            def branch(body, *args):
                outs, after = self.run(body, args, kinds[1:])
                found.append(after)
                return outs

            branches = [functools.partial(branch, body) for body in params["branches"]]
            outs = lax.switch(read[0], branches, *read[1:])
            return outs, [*map(widest, zip(*found, strict=True))]
        outs = eqn.primitive.bind(*read, **eqn.primitive.get_bind_params(params))
        outs = outs if eqn.primitive.multiple_results else [outs]
        if {"low", "param"} <= {*kinds} and name in ("add", "sub"):
            outs = [exact.stored_back(x) for x in outs]
        kind = "low" if exact.holds(eqn, exact.MATMULS) else kind_after(eqn, kinds)
        return outs, [kind] * len(outs)

    def scan(self, params, read, kinds):
        """A carry is f32, as it may be a sum."""
        n, m = exact.scan_sizes(params)
        carried = [x if x == "kept" else "data" for x in kinds[n : n + m]]
        kinds = [*kinds[:n], *carried, *kinds[n + m :]]
        after = []

        def step(carry, xs):
            outs, after[:] = self.run(params["jaxpr"], [*read[:n], *carry, *xs], kinds)
            return outs[:m], outs[m:]

        options = {key: params[key] for key in ("length", "reverse")}
        carry, ys = lax.scan(step, [*read[n : n + m]], [*read[n + m :]], **options)
        return [*carry, *ys], [*carried, *after[m:]]


def bounds(func, args, kinds, dtype="bf16", draws=8, codes=None):
    """Returns what `jax.value_and_grad(func, has_aux=True)` may be under `amp`.

    `kinds` says of each leaf of `args` whether it is `data`, a `param`, or one that is `kept`.
    `codes` are the 8-bit numbers that matmuls multiply, if they do.
    """
    closed, shapes = jax.make_jaxpr(func, return_shape=True)(*args)
    tree = jax.tree.structure(shapes)

    def rounded(*args):
        outs, _ = Marker(LOW[dtype]).run(closed, jax.tree.leaves(args), kinds)
        return tree.unflatten(outs)

    grad = jax.value_and_grad(rounded, has_aux=True)
    program, shapes = jax.make_jaxpr(grad, return_shape=True)(*args)
    right, farthest = exact.evaluated(program, args, LOW[dtype], draws, codes)
    within = FACTOR * farthest + 1e-6 * np.array([*map(np.linalg.norm, right)]) + 1e-12
    unflatten = jax.tree.structure(shapes).unflatten
    return exact.Bound(unflatten(right), unflatten(within))
