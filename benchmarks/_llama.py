"""Language models with the shapes of Llama, their training steps, and how they are sharded."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from mpx.inspect._target import compiler_options, described, target_devices

# --- the model ------------------------------------------------------------------------


class Sizes(NamedTuple):
    """Sizes of a language model, and the sequences of one step on each device."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int = 32000
    sequences: int = 1
    length: int = 4096

    @property
    def tokens(self) -> int:
        """Tokens of one step on each device."""
        return self.sequences * self.length

    @property
    def params(self) -> int:
        """The number of parameters."""
        leaves = jax.tree.leaves(shapes(self), is_leaf=lambda x: isinstance(x, tuple))
        return sum(int(np.prod(x)) for x in leaves)


MODELS = {
    "7B": Sizes(32, 4096, 11008, 32, 32),
    "70B": Sizes(80, 8192, 28672, 64, 8),
    "tiny": Sizes(2, 256, 512, 4, 4, vocabulary=1024, length=128),
}
COLUMNS, ROWS = ("q", "k", "v", "gate", "up"), ("o", "down")


def shapes(sizes: Sizes) -> dict[str, Any]:
    """Returns the shapes of the parameters."""
    count, width, hidden = sizes.layers, sizes.width, sizes.hidden
    narrow = width // sizes.heads * sizes.kv_heads
    layers = {name: (count, width, width) for name in "qo"}
    layers |= {name: (count, width, narrow) for name in "kv"}
    layers |= {name: (count, width, hidden) for name in ("gate", "up")}
    layers |= {"down": (count, hidden, width), "norm1": (count, width)}
    layers |= {"norm2": (count, width)}
    table = (sizes.vocabulary, width)
    return {"embed": table, "layers": layers, "norm": (width,), "head": table[::-1]}


def random_params(sizes: Sizes, precision: "Precision", key: Array) -> dict[str, Any]:
    """Returns parameters to start with; norms are one."""

    def draw(path: Any, shape: tuple[int, ...]) -> Array:
        name = path[-1].key
        if "norm" in name:
            return jnp.ones(shape, precision.params)
        own = jax.random.fold_in(key, sum(map(ord, name)))
        return jax.random.normal(own, shape, precision.params) * 0.02

    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree_util.tree_map_with_path(draw, shapes(sizes), is_leaf=is_shape)


def _norm(x: Array, weight: Array) -> Array:
    wide = x.astype(jnp.float32)
    size = lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)
    return (wide * size).astype(x.dtype) * weight


def _rotate(x: Array) -> Array:
    """Rotary positions; x is (batch, length, heads, width)."""
    half = x.shape[-1] // 2
    rate = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * rate
    cos, sin = (f(angle)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def loss_of(
    params: Any, tokens: Array, *, sizes: Sizes, place: Callable[..., Array]
) -> Array:
    """Mean cross entropy of the next token; tokens are (batch, length + 1).

    `place` pins activations to the devices that have them: `stream`, `whole`, `heads` or
    `hidden`, as `ACTIVATIONS` says.
    """
    split = sizes.width // sizes.heads

    @jax.checkpoint
    def block(h: Array, w: Any) -> Array:
        x = place(_norm(h, w["norm1"]), "whole")
        q, k, v = ((x @ w[n]).reshape(*x.shape[:2], -1, split) for n in "qkv")
        q, k, v = (place(y, "heads") for y in (_rotate(q), _rotate(k), v))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        mixed = place(place(mixed, "heads").reshape(h.shape), "hidden")
        h = place(h + mixed @ w["o"], "stream")
        x = place(_norm(h, w["norm2"]), "whole")
        y = jax.nn.silu(x @ w["gate"]) * (x @ w["up"])
        return place(h + place(y, "hidden") @ w["down"], "stream")

    h = place(params["embed"][tokens[:, :-1]], "stream")
    h, _ = lax.scan(lambda h, w: (block(h, w), None), h, params["layers"])
    logits = (place(_norm(h, params["norm"]), "whole") @ params["head"]).astype(
        jnp.float32
    )
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)


# --- the step -------------------------------------------------------------------------


class Precision(NamedTuple):
    """How a model is trained.

    Attributes:
        params: The dtype of the parameters.
        reduce: The dtype in which gradients are summed over devices.
        is_fp8: Whether matmuls are fp8 where that pays.
        is_compressed: Whether the optimizer is `flash_adamw`.
    """

    params: str
    reduce: str
    is_fp8: bool
    is_compressed: bool


PRECISIONS = {
    "bf16, AdamW in f32": Precision("float32", "f32", False, False),
    "bf16, flash_adamw": Precision("bfloat16", "compute", False, True),
    "fp8, flash_adamw": Precision("bfloat16", "compute", True, True),
}


def training_step(
    precision: Precision, sizes: Sizes, place: Callable[..., Array] = lambda x, _: x
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns a step of `((params, state), tokens)` and the function that makes the state."""
    loss: Any = functools.partial(loss_of, sizes=sizes, place=place)
    loss = mpx.amp(loss, reduce_dtype=precision.reduce)
    if precision.is_fp8:
        loss = mpx.fp8(loss)
    gradient = jax.value_and_grad(loss)
    if precision.is_compressed:
        flash = mpx.optim.flash_adamw(1e-4)

        def compressed(carry: Any, tokens: Array) -> Any:
            params, state = carry
            value, grads = gradient(params, tokens)
            return tuple(flash.step(params, state, grads)), value

        return compressed, flash.init  # of shapes it makes shapes, with shardings
    adamw = optax.adamw(1e-4)

    def plain(carry: Any, tokens: Array) -> Any:
        params, state = carry
        value, grads = gradient(params, tokens)
        updates, state = adamw.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    return plain, functools.partial(_init, adamw)


def _init(optimizer: optax.GradientTransformation, params: Any) -> Any:
    """Returns the state of an optimizer; of shapes it makes shapes."""
    if isinstance(jax.tree.leaves(params)[0], jax.ShapeDtypeStruct):
        return jax.eval_shape(optimizer.init, params)
    return optimizer.init(params)


# --- sharding -------------------------------------------------------------------------

NODE = 8
PARTS = 128
"""Into how many parts FSDP cuts a weight at most: 4096 columns are 128 groups of 32."""
LAYOUTS = ("FSDP", "FSDP in a node", "FSDP × TP 8")


def mesh_of(layout: str, devices: Sequence[Any]) -> Mesh:
    """Returns the mesh of a layout: replicas, parts of parameters, parts of matmuls."""
    count = len(devices)
    parts = {"FSDP": min(count, PARTS), "FSDP in a node": NODE}.get(
        layout, count // NODE
    )
    model = NODE if layout == "FSDP × TP 8" else 1
    sizes = (count // parts // model, parts, model)
    return Mesh(np.array(devices).reshape(sizes), ("replica", "data", "model"))


ACTIVATIONS = {
    "stream": ("model",),
    "whole": (),
    "heads": (None, "model"),
    "hidden": (None, "model"),
}
"""By kind: the axes behind the batch. Between blocks a device has a part of each sequence."""


def spec_of(name: str, mesh: Mesh) -> P:
    """Returns how a parameter is sharded."""
    if name in COLUMNS:
        return P(None, "data", "model")
    if name in ROWS:
        # Groups of 32 in a last axis must not be cut: rows, if they suffice.
        is_cut = mesh.shape["model"] > 1
        return P(None, "model", "data") if is_cut else P(None, "data")
    return {"embed": P(None, "data"), "head": P("data", "model")}.get(name, P())


def compiled(sizes: Sizes, precision: Precision, layout: str, count: int) -> Any:
    """Returns a training step compiled for so many H200s, which need not be there."""
    mesh = mesh_of(layout, target_devices("h200", count))
    batch = P(("replica", "data"))
    rows = NamedSharding(mesh, batch)

    def place(x: Array, kind: str) -> Array:
        sharding = NamedSharding(mesh, P(*batch, *ACTIVATIONS[kind]))
        return lax.with_sharding_constraint(x, sharding)

    def struct(path: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec_of(path[-1].key, mesh))
        return jax.ShapeDtypeStruct(shape, precision.params, sharding=sharding)

    params = jax.tree_util.tree_map_with_path(
        struct, shapes(sizes), is_leaf=lambda x: isinstance(x, tuple)
    )
    total = sizes.sequences * count
    tokens = jax.ShapeDtypeStruct((total, sizes.length + 1), jnp.int32, sharding=rows)
    step, init = training_step(precision, sizes, place)
    with described("h200"), jax.set_mesh(mesh):
        carry = params, state_of(init, params, mesh)
        where = jax.tree.map(lambda x: x.sharding, carry)
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(where, None))
        lowered = jitted.lower(carry, tokens)
        return lowered.compile(compile_options())


def compile_options() -> dict[str, Any]:
    """Returns options of the compiler for H200s that are not there."""
    # Without timing, XLA finds no tiles for some odd shapes of Triton's matmuls.
    return compiler_options("h200") | {"xla_gpu_enable_triton_gemm": False}


@contextlib.contextmanager
def on_one_h200() -> Iterator[Callable[[Any], Any]]:
    """Traces and compiles for one H200; yields a function that puts shapes on it."""
    mesh = Mesh(np.array(target_devices("h200", 1)), "devices")
    sharding = NamedSharding(mesh, P())

    def place(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    with described("h200"), jax.set_mesh(mesh):
        yield place


def state_of(init: Callable[..., Any], params: Any, mesh: Mesh) -> Any:
    """Returns the shapes of an optimizer state, sharded as its parameters are."""

    def place(path: Any, x: Any) -> jax.ShapeDtypeStruct:
        if isinstance(getattr(x, "sharding", None), NamedSharding):
            return x
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        spec = spec_of(names[-1], mesh) if names else P()
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(place, init(params))
