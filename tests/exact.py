"""What a program says: an interpreter that computes in f64, with NumPy.

Operations that NumPy has no word for are those of JAX, in f64 as well.
"""

import math
import string
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jax import lax

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
MATMULS = {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"}
CALLS = {
    *(
        [
            "scan",
            "while",
            "cond",
            "jit",
            "pjit",
            "closed_call",
            "remat",
            "remat2",
            "checkpoint",
        ]
    ),
    *(["custom_jvp_call", "custom_vjp_call"]),
}
MOVES = {
    *(
        [
            "reshape",
            "transpose",
            "broadcast_in_dim",
            "slice",
            "squeeze",
            "expand_dims",
            "rev",
            "neg",
            "sign",
        ]
    ),
    *(
        [
            "select_n",
            "max",
            "min",
            "clamp",
            "pad",
            "concatenate",
            "copy",
            "iota",
            "eq",
            "name",
            "argmax",
            "argmin",
        ]
    ),
    *(
        [
            "dynamic_slice",
            "dynamic_update_slice",
            "gather",
            "sort",
            "reduce_max",
            "reduce_min",
        ]
    ),
    *(
        [
            "convert_element_type",
            "stop_gradient",
            "top_k",
            "reduce_window_max",
            "cummax",
            "split",
        ]
    ),
    *(["optimization_barrier", "is_finite", "abs", "floor", "round"]),
}


def bodies(eqn):
    """Returns the jaxprs that an equation calls."""
    leaves = jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns"))
    return [getattr(x, "jaxpr", x) for x in leaves if hasattr(x, "eqns")]


class Exact:
    """Computes a traced program, equation after equation."""

    def jaxpr(self, closed, args):
        jaxpr = getattr(closed, "jaxpr", closed)
        values = dict(
            zip(jaxpr.constvars, map(wide, getattr(closed, "consts", ())), strict=True)
        )
        values |= zip(jaxpr.invars, args, strict=True)

        def look(v):
            return wide(v.val) if hasattr(v, "val") else values[v]

        for eqn in jaxpr.eqns:
            outs = self.equation(eqn, [look(v) for v in eqn.invars])
            values |= zip(eqn.outvars, outs, strict=True)
        return [look(v) for v in jaxpr.outvars]

    def equation(self, eqn, read):
        name, params = eqn.primitive.name, eqn.params
        if name == "scan":
            n, m = scan_sizes(params)
            carry, stacks = read[n : n + m], []
            steps = range(params["length"])
            for i in reversed(steps) if params["reverse"] else steps:
                outs = self.jaxpr(
                    params["jaxpr"], [*read[:n], *carry, *(x[i] for x in read[n + m :])]
                )
                carry = outs[:m]
                stacks.append(outs[m:])
            stacks = stacks[::-1] if params["reverse"] else stacks
            return [*carry, *map(np.stack, zip(*stacks, strict=True))]
        if name == "while":
            n, m = params["cond_nconsts"], params["body_nconsts"]
            carry = read[n + m :]
            while self.jaxpr(params["cond_jaxpr"], [*read[:n], *carry])[0]:
                carry = self.jaxpr(params["body_jaxpr"], [*read[n : n + m], *carry])
            return carry
        if name == "cond":
            index = int(np.clip(read[0], 0, len(params["branches"]) - 1))
            return self.jaxpr(params["branches"][index], read[1:])
        inner = params.get("jaxpr", params.get("call_jaxpr"))
        if inner is not None:
            return self.jaxpr(inner, read)
        return self.plain(eqn, read)

    def plain(self, eqn, read):
        name, params = eqn.primitive.name, eqn.params
        if name.startswith("debug"):
            return []
        if name == "pure_callback":
            return [wide(x) for x in jax.tree.leaves(params["callback"](*read))]
        if name in NUMPY:
            return [NUMPY[name](params, *read)]
        if name in SCATTERS:  # `bind` would take the f32 sum of its parameters
            known = "dimension_numbers", "indices_are_sorted", "unique_indices", "mode"
            with jax.enable_x64(True):
                args = map(jax.numpy.asarray, read)
                return [
                    np.asarray(SCATTERS[name](*args, **{k: params[k] for k in known}))
                ]
        # What NumPy has no word for, by JAX in f64.
        with jax.enable_x64(True):
            is_f32 = {
                key: isinstance(x, np.dtype) and x == F32 for key, x in params.items()
            }
            params = {key: F64 if is_f32[key] else x for key, x in params.items()}
            params = eqn.primitive.get_bind_params(params)
            outs = eqn.primitive.bind(*map(jax.numpy.asarray, read), **params)
            return [
                np.asarray(x)
                for x in (outs if eqn.primitive.multiple_results else [outs])
            ]


class Draw(Exact):
    """Computes with roundings, to grids that `scale` moves, and with the noise of f32."""

    def __init__(self, dtype, scale, codes=None, is_noisy=True):
        self.low, self.scale, self.codes, self.is_noisy = dtype, scale, codes, is_noisy

    def rounded(self, x, dtype, factor=1):
        """Rounds to the nearest on a moved grid, except what needs no rounding.

        Equal numbers are rounded equally, as those of a broadcast are.
        """

        def near(x):
            return x.astype(dtype).astype(F64)

        x = np.asarray(x)
        if x.dtype != F64:
            return x
        off = near(x * self.scale) / self.scale - x
        return np.where(near(x) == x, x, x + factor * off)

    def coded(self, x):
        """Rounds to numbers of 8 bits, whose scale is the largest magnitude."""
        top = np.max(np.abs(x), initial=1e-30)
        if self.codes == "fp8":
            scale = self.scale * 2.0 ** np.floor(np.log2(57344 / top))
            return (x * scale).astype(ml_dtypes.float8_e5m2).astype(F64) / scale
        scale = self.scale * {"int8": 127, "fp4": 6}[self.codes] / top
        return np.round(x * scale) / scale

    def equation(self, eqn, read):
        name = eqn.primitive.name
        if name == "reduce_precision" or (name in MATMULS and not asks_f32(eqn)):
            read = [self.rounded(x, self.low) for x in read]
            if self.codes:
                read = [self.coded(x) for x in read]
            return [self.rounded(x, self.low) for x in super().equation(eqn, read)]
        outs = super().equation(eqn, read)
        if not self.is_noisy or name in MOVES or name in CALLS:
            return outs
        return [self.rounded(x, F32, 4) for x in outs]


def evaluated(program, args, dtype, draws, codes=None):
    """Returns the exact results of a program, and of each how far the farthest draw is."""
    leaves = [wide(x) for x in jax.tree.leaves(args)]
    exact = Exact().jaxpr(program, leaves)
    farthest = np.zeros(len(exact))
    for i in range(draws):
        scale = 1 - i / draws / 2  # the first grid is that of the format itself
        drawn = Draw(dtype, scale, codes, i % 3 == 0).jaxpr(program, leaves)
        pairs = zip(drawn, exact, strict=True)
        farthest = np.maximum(farthest, [np.linalg.norm(x - y) for x, y in pairs])
    return exact, farthest


def holds(eqn, names):
    """Returns whether an equation, or one inside it, is one of some operations."""
    inner = (e for body in bodies(eqn) for e in body.eqns)
    return eqn.primitive.name in names or any(holds(e, names) for e in inner)


class Bound(NamedTuple):
    exact: Any  # results: a tree of arrays of f64
    within: Any  # how far each may be off, by the norm


def variables(atoms):
    """Returns the variables among what an equation reads."""
    return {v for v in atoms if not hasattr(v, "val")}


def inlined(jaxpr, consts=()):
    """Returns an open jaxpr, of which jitted functions are a part, and its constants."""
    if hasattr(jaxpr, "jaxpr"):
        jaxpr, consts = jaxpr.jaxpr, jaxpr.consts
    if not any(_is_jitted(eqn) for eqn in jaxpr.eqns):
        return jaxpr, consts

    def run(jaxpr, consts, *args):
        variables = [*jaxpr.constvars, *jaxpr.invars]
        known = dict(zip(variables, [*consts, *args], strict=True))
        look = lambda v: v.val if hasattr(v, "val") else known[v]  # noqa: E731
        for eqn in jaxpr.eqns:
            read = [look(v) for v in eqn.invars]
            if _is_jitted(eqn):
                inner = eqn.params["jaxpr"]
                opened = (
                    (inner.jaxpr, inner.consts)
                    if hasattr(inner, "jaxpr")
                    else (inner, ())
                )
                outs = run(*opened, *read)
            else:
                outs = eqn.primitive.bind(
                    *read, **eqn.primitive.get_bind_params(eqn.params)
                )
                outs = outs if eqn.primitive.multiple_results else [outs]
            known |= dict(zip(eqn.outvars, outs, strict=True))
        return [look(v) for v in jaxpr.outvars]

    new = jax.make_jaxpr(lambda *args: run(jaxpr, consts, *args))(
        *[v.aval for v in jaxpr.invars]
    )
    return (new.jaxpr, new.consts) if hasattr(new, "jaxpr") else (new, ())


def _is_jitted(eqn):
    return eqn.primitive.name == "jit" and eqn.params["name"] != "own_rule"


@jax.custom_vjp
def stored_back(x):
    """Rounds the cotangent of a layer with a bias: it is stored, and read by two gradients."""
    return x


stored_back.defvjp(lambda x: (x, None), lambda _, g: (lax.reduce_precision(g, 8, 7),))


def asks_f32(eqn):
    """Returns whether f32 is asked for."""
    highest = lax.Precision.HIGHEST
    return eqn.params.get("precision") in (highest, (highest, highest))


def scan_sizes(params):
    """Returns how many constants and carries a scan has, in any version of JAX."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = (len(list(group)) for group in params["ft_in"].unpack())
    return consts, carry


def terms(eqn):
    """Returns how many terms a matmul sums."""
    if eqn.primitive.name != "dot_general":
        return math.inf
    (axes, _), _ = eqn.params["dimension_numbers"]
    return math.prod(eqn.invars[0].aval.shape[i] for i in axes)


def wide(x):
    """Returns a number as NumPy holds it, floats in f64; keys as they are."""
    if jax.dtypes.issubdtype(getattr(x, "dtype", None), jax.dtypes.extended):
        return x
    x = np.asarray(x)
    return x.astype(np.float64) if jax.numpy.issubdtype(x.dtype, np.floating) else x


def product(p, a, b):
    (left, right), (rows, columns) = p["dimension_numbers"]
    names = iter(string.ascii_letters)
    first = [next(names) for _ in range(a.ndim)]
    second = [next(names) for _ in range(b.ndim)]
    for i, j in (*zip(left, right, strict=True), *zip(rows, columns, strict=True)):
        second[j] = first[i]
    kept = [first[i] for i in rows]
    kept += [x for x in first if x not in second] + [
        x for x in second if x not in first
    ]
    return np.einsum(f"{''.join(first)},{''.join(second)}->{''.join(kept)}", a, b)


def spread(p, x, *_):
    shape = [1] * len(p["shape"])
    for i, n in zip(p["broadcast_dimensions"], np.shape(x), strict=True):
        shape[i] = n
    return np.broadcast_to(np.reshape(x, shape), p["shape"])


def over(function):
    return lambda p, x: function(x, axis=tuple(p["axes"]))


def plainly(function):
    return lambda p, *args: function(*args)


def converted(p, x):
    wanted = np.dtype(p["new_dtype"])
    floating = jax.numpy.issubdtype(wanted, np.floating)
    x = np.asarray(x)
    return (
        x.astype(wanted).astype(np.float64)
        if floating and wanted.itemsize < 4
        else x.astype(np.float64 if floating else wanted)
    )


def padded(p, x, value):
    for axis, (low, high, inner) in enumerate(p["padding_config"]):
        shape = list(x.shape)
        shape[axis] += max(shape[axis] - 1, 0) * inner
        wide = np.full(shape, value, x.dtype)
        at = [slice(None)] * x.ndim
        at[axis] = slice(None, None, inner + 1)
        wide[tuple(at)] = x
        ends = [(0, 0)] * x.ndim
        ends[axis] = max(low, 0), max(high, 0)
        wide = np.pad(wide, ends, constant_values=value)
        at[axis] = slice(max(-low, 0), wide.shape[axis] - max(-high, 0))
        x = wide[tuple(at)]
    return x


SCATTERS = {
    "scatter": lax.scatter,
    "scatter-add": lax.scatter_add,
    "scatter_add": lax.scatter_add,
    "scatter-mul": lax.scatter_mul,
}
NUMPY = {
    "reduce_precision": lambda p, x: x,
    **{
        k: plainly(v)
        for k, v in {
            "add": np.add,
            "add_any": np.add,
            "sub": np.subtract,
            "mul": np.multiply,
            "div": lambda a, b: a / b if np.asarray(a).dtype.kind == "f" else a // b,
            "neg": np.negative,
            "exp": np.exp,
            "log": np.log,
            "log1p": np.log1p,
            "expm1": np.expm1,
            "tanh": np.tanh,
            "sin": np.sin,
            "cos": np.cos,
            "sqrt": np.sqrt,
            "rsqrt": lambda x: 1 / np.sqrt(x),
            "abs": np.abs,
            "sign": np.sign,
            "max": np.maximum,
            "min": np.minimum,
            "square": np.square,
            "logistic": lambda x: 1 / (1 + np.exp(-x)),
            "eq": np.equal,
            "ne": np.not_equal,
            "lt": np.less,
            "le": np.less_equal,
            "gt": np.greater,
            "ge": np.greater_equal,
            "and": np.bitwise_and,
            "or": np.bitwise_or,
            "not": np.invert,
            "pow": np.power,
            "stop_gradient": np.asarray,
            "copy": np.asarray,
            "floor": np.floor,
            "round": np.round,
            "is_finite": np.isfinite,
            "name": np.asarray,
            "clamp": lambda lo, x, hi: np.clip(x, lo, hi),
            "select_n": lambda c, *xs: np.choose(np.asarray(c, np.int32), xs),
        }.items()
    },
    "integer_pow": lambda p, x: (
        np.power(x, p["y"]) if p["y"] >= 0 else 1 / np.power(x, -p["y"])
    ),
    "dot_general": product,
    "broadcast_in_dim": spread,
    "convert_element_type": converted,
    "pad": padded,
    # The transpose of a grouped convolution changes the order of axes as well.
    "reshape": lambda p, x: np.reshape(
        x if p["dimensions"] is None else np.transpose(x, p["dimensions"]),
        p["new_sizes"],
    ),
    "transpose": lambda p, x: np.transpose(x, p["permutation"]),
    "squeeze": lambda p, x: np.squeeze(x, tuple(p["dimensions"])),
    "expand_dims": lambda p, x: np.expand_dims(x, p["dimensions"]),
    "reduce_sum": over(np.sum),
    "reduce_max": over(np.max),
    "reduce_min": over(np.min),
    "reduce_prod": over(np.prod),
    "reduce_and": over(np.all),
    "reduce_or": over(np.any),
    "concatenate": lambda p, *xs: np.concatenate(xs, p["dimension"]),
    "rev": lambda p, x: np.flip(x, p["dimensions"]),
    "slice": lambda p, x: x[
        tuple(
            map(
                slice,
                p["start_indices"],
                p["limit_indices"],
                p["strides"] or [1] * x.ndim,
            )
        )
    ],
    "cumsum": lambda p, x: (
        np.flip(np.cumsum(np.flip(x, p["axis"]), p["axis"]), p["axis"])
        if p["reverse"]
        else np.cumsum(x, p["axis"])
    ),
}
