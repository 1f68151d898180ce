"""Draws a transformer block under `mpx.amp`: in which dtype every value travels.

    python examples/draw_block.py docs/images/block.svg

The block is traced under `amp`. Each of its named scopes becomes a box, coloured by the
dtype in which it computes, and each value that goes from one to another an arrow.
"""

import html
import pathlib
import sys

import jax
import jax.numpy as jnp

import mpx

WIDTH, HEADS = 64, 4
LABELS = {
    "input": "residual stream",
    "norm1": "norm",
    "qkv": "matmul: queries, keys, values",
    "scores": "matmul: queries · keys",
    "softmax": "softmax",
    "mix": "matmul: weights · values",
    "out": "matmul: projection",
    "add1": "add",
    "norm2": "norm",
    "up": "matmul: up",
    "gelu": "gelu",
    "down": "matmul: down",
    "add2": "add",
}
COLOURS = {"f32": "#3b6fb6", "bf16": "#b35900"}
NAMES = {"float32": "f32", "bfloat16": "bf16"}
CASTS = ("convert_element_type", "load", "store", "custom_jvp_call")
# `amp` gives arrays derivatives by the last.
MOVES = ("reshape", "split", "transpose", "broadcast_in_dim")


def norm(x, weight):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * weight


def block(params, x):
    scope = jax.named_scope
    with scope("norm1"):
        y = norm(x, params["norm1"])
    with scope("qkv"):
        y = (y @ params["qkv"]).reshape(*x.shape[:2], HEADS, -1)
        q, k, v = jnp.split(y, 3, -1)
    with scope("scores"):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    with scope("softmax"):
        weights = jax.nn.softmax(scores / q.shape[-1] ** 0.5)
    with scope("mix"):
        y = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
    with scope("out"):
        y = y @ params["out"]
    with scope("add1"):
        x = x + y
    with scope("norm2"):
        y = norm(x, params["norm2"])
    with scope("up"):
        y = y @ params["up"]
    with scope("gelu"):
        y = jax.nn.gelu(y)
    with scope("down"):
        y = y @ params["down"]
    with scope("add2"):
        return x + y


def trace():
    """Returns the dtype of each scope, and that of each pair of scopes with a value."""
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    params = {
        "norm1": array(WIDTH),
        "norm2": array(WIDTH),
        "qkv": array(WIDTH, 3 * WIDTH),
        "out": array(WIDTH, WIDTH),
        "up": array(WIDTH, 4 * WIDTH),
        "down": array(4 * WIDTH, WIDTH),
    }
    jaxpr = jax.make_jaxpr(mpx.amp(block))(params, array(2, 16, WIDTH)).jaxpr
    # Where a value comes from, and the dtype in which it travels.
    made = {jaxpr.invars[-1]: ("input", "f32")}
    boxes, arrows = dict.fromkeys(LABELS, "bf16"), {}
    boxes["input"] = "f32"
    for name, eqn in flat(jaxpr, made):
        read = [made[var] for var in eqn.invars if is_variable(var) and var in made]
        dtype = NAMES[str(eqn.outvars[0].aval.dtype)]
        if eqn.primitive.name in CASTS:
            # XLA fuses a cast with what makes or reads the value.
            for source, travelling in read:
                made[eqn.outvars[0]] = source, min(travelling, dtype)
            continue
        arrows.update({(x, name): y for x, y in read if x != name})
        if dtype == "f32" and eqn.primitive.name not in MOVES:
            boxes[name] = "f32"
        # What only moves is no computation in f32.
        moved = read[0][1] if read and eqn.primitive.name in MOVES else dtype
        made.update(dict.fromkeys(eqn.outvars, (name, moved)))
    return boxes, arrows


def flat(jaxpr, made, around=""):
    """Yields equations and their scopes; of a region, which is one equation, those inside."""
    for eqn in jaxpr.eqns:
        inner, name = eqn.params.get("jaxpr"), around or str(eqn.source_info.name_stack)
        if inner is None:
            yield name.partition("/")[0], eqn
            continue
        pairs = zip(inner.invars, eqn.invars, strict=True)
        made.update({x: made[y] for x, y in pairs if is_variable(y) and y in made})
        yield from flat(inner, made, name)
        made.update(
            {x: made[y] for x, y in zip(eqn.outvars, inner.outvars, strict=True)}
        )


def is_variable(atom):
    """Returns whether an atom is no number that is written into the program."""
    return not hasattr(atom, "val")


def draw(boxes, arrows):
    """Returns the picture as SVG."""
    top = {name: 20 + 52 * i for i, name in enumerate(LABELS)}
    parts = []
    for (source, target), dtype in arrows.items():
        first, last, colour = top[source] + 30, top[target] - 2, COLOURS[dtype]
        path, x, y = f"M330 {first} V{last}", 342, (first + last) / 2 + 5
        if last - first > 30:  # around what lies between
            side = 180 if source in ("input", "add1") else 480
            bow = 100 if side == 180 else 560
            path = (
                f"M{side} {first - 15} C{bow} {first} {bow} {last} {side} {last + 17}"
            )
            x, y = (
                (side + 3 * bow) / 4 + (4 if side == 480 else -30),
                (first + last) / 2,
            )
        parts += [
            f'<path d="{path}" stroke="{colour}" stroke-width="3" fill="none" '
            f'marker-end="url(#{dtype})"/>',
            f'<text x="{x}" y="{y}" fill="{colour}">{dtype}</text>',
        ]
    for name, label in LABELS.items():
        parts += [
            f'<rect x="180" y="{top[name]}" width="300" height="30" rx="6" '
            f'fill="{COLOURS[boxes[name]]}"/>',
            f'<text x="330" y="{top[name] + 21}" fill="#fff" text-anchor="middle">'
            f"{html.escape(label)} ({boxes[name]})</text>",
        ]
    markers = [
        f'<marker id="{name}" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="4" '
        f'markerHeight="4" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{colour}"/>'
        "</marker>"
        for name, colour in COLOURS.items()
    ]
    height = max(top.values()) + 50
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="84 0 500 {height}" '
            'font-family="sans-serif" font-size="16">',
            f'<rect x="84" width="500" height="{height}" fill="#fff"/>',
            f"<defs>{''.join(markers)}</defs>",
            *parts,
            "</svg>\n",
        ]
    )


def main(argv=None):
    (path,) = argv or sys.argv[1:] or ["block.svg"]
    boxes, arrows = trace()
    pathlib.Path(path).write_text(draw(boxes, arrows))
    return boxes, arrows


if __name__ == "__main__":
    main()
