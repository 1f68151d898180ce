"""Calls of cuDNN's flash attention, and the reasons against one."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import PyTree

from mpx._jax._compat import CUDNN_KERNEL, convert_dtype, eval_equation, open_jaxpr
from mpx._jax._devices import cuda_capability
from mpx._jax._warn import warn
from mpx._program._interpreter import Op, Outcome, Visitor
from mpx._program._queries import contains


class Attention(NamedTuple):
    """The static part of one call.

    Attributes:
        scale: The factor of the scores.
        is_causal: Whether a query sees the keys up to its own position only.
        window: The number of keys that it sees to the left and to the right.
        extras: The further operands: of `bias`, `mask`, `q_seqlen` and `kv_seqlen`, in
            this order, those that there are.
        required: Whether the user asked for cuDNN by name.
        bias_grad: Whether a bias gets a gradient.
    """

    scale: float
    is_causal: bool
    window: tuple[int, int] | None
    extras: tuple[str, ...]
    required: bool
    bias_grad: bool = True

    @property
    def operands(self) -> int:
        """The number of operands."""
        return 3 + len(self.extras)

    @property
    def free(self) -> int:
        """The number of leading operands that are differentiable."""
        return 4 if "bias" in self.extras and self.bias_grad else 3


def _vjp(
    operands: Sequence[Array], spec: Attention
) -> tuple[Array, Callable[..., PyTree]]:
    """Calls cuDNN; returns its result and the function for the backward pass."""
    query, key = operands[:2]
    length = query.shape[1]
    extras = dict(zip(spec.extras, operands[3:], strict=True))
    mask, fixed = extras.get("mask"), extras.get("bias")

    def whole(x: Array) -> Array:
        # cuDNN needs both lengths. Fewer heads are faster: on an H200, 0.47 ms with a mask
        # of (8, 1, 1024, 1024) and 0.62 ms with one of (8, 12, 1024, 1024).
        return jnp.broadcast_to(x, (*x.shape[:2], length, key.shape[1]))

    visible = _visible(spec, extras, length, key.shape[1])

    def call(query: Array, key: Array, value: Array, *free: Array) -> Array:
        bias = free[0] if free else fixed
        if bias is not None:
            query, bias = _fitting(query, bias, visible)
        out = jax.nn.dot_product_attention(
            query,
            key,
            value,
            None if bias is None else whole(bias),
            None if mask is None else whole(mask),
            scale=spec.scale,
            # A window that ends at the query itself is causal; cuDNN must be told so.
            is_causal=spec.is_causal or spec.window is not None,
            query_seq_lengths=extras.get("q_seqlen"),
            key_value_seq_lengths=extras.get("kv_seqlen"),
            local_window_size=spec.window,
            implementation="cudnn",
        )
        if mask is None or visible is None or visible is mask:
            return out
        # The kernel's mean would be that of the keys up to the position of the query.
        seen = jnp.any(visible, axis=-1).swapaxes(1, 2)[..., None]
        mean = jnp.mean(value, axis=1, keepdims=True, dtype=jnp.float32)
        mean = jnp.repeat(mean, out.shape[2] // value.shape[2], axis=2)
        return jnp.where(seen, out, convert_dtype(mean, out.dtype))

    return jax.vjp(call, *operands[: spec.free])


def _visible(
    spec: Attention, extras: dict[str, Array], rows: int, keys: int
) -> Array | None:
    """Returns which keys a query may see; `None` if all."""
    parts = [extras["mask"]] if "mask" in extras else []
    if "kv_seqlen" in extras:
        ends = extras["kv_seqlen"][:, None, None, None]
        parts.append(jnp.arange(keys)[None, None, None] < ends)
    if spec.is_causal or spec.window is not None:
        parts.append(causal(rows, keys, spec.window))
    return functools.reduce(jnp.logical_and, parts) if parts else None


def causal(rows: int, keys: int, window: tuple[int, int] | None) -> Array:
    """Returns the causal mask (1, 1, rows, keys), perhaps with a window to the left."""
    row, key = (lax.broadcasted_iota(jnp.int32, (1, 1, rows, keys), i) for i in (2, 3))
    before = key <= row
    return before if window is None else before & (row - key <= window[0])


def _fitting(query: Array, bias: Array, visible: Array | None) -> tuple[Array, Array]:
    """Returns queries and a bias of which 16 bits are enough.

    Softmax does not change if a number is added to all scores of a query. So the largest
    bias of a key that it sees becomes 0: lower ones have less weight, the less exact they
    are.
    """
    fixed = lax.stop_gradient(bias)
    highest = lowest = fixed
    if visible is not None:
        # One bias stays one for the whole batch: cuDNN has the gradient of no other.
        shared = [i for i in (0, 1) if bias.shape[i] == 1]
        visible = jnp.any(visible, axis=shared, keepdims=True)
        highest, lowest = (jnp.where(visible, fixed, x) for x in (-jnp.inf, jnp.inf))
    highest = jnp.max(highest, axis=-1, keepdims=True)
    lowest = jnp.min(lowest, axis=-1, keepdims=True)
    if visible is not None:
        highest = jnp.where(jnp.any(visible, axis=-1, keepdims=True), highest, 0.0)
    least = _LEAST[query.dtype.name]
    shifted = jnp.maximum(bias - highest, least)
    # Beside such numbers f32 keeps nothing of scores. A row of one of them stays one.
    is_lost = jnp.abs(highest) >= _ABSORBING
    is_one = is_lost & (highest == lowest) & jnp.isfinite(highest)
    shifted = jnp.where(is_one, shifted + least, shifted)
    is_lost = (is_lost & ~is_one).swapaxes(1, 2)
    query = jnp.where(is_lost, query - lax.stop_gradient(query), query)
    return query, convert_dtype(shifted, query.dtype)


_ABSORBING = 1e8
# As JAX's: cuDNN has a bug for differences of lower numbers.
_LEAST = {"bfloat16": -(2.0**41), "float16": -(2.0**15)}


def cudnn_forward(operands: Sequence[Array], spec: Attention) -> tuple[Array, Array]:
    """Runs cuDNN attention; returns its result and what its kernel saves."""
    jaxpr = jax.make_jaxpr(lambda *operands: _vjp(operands, spec)[0])
    outs, saved = _with_kernel(jaxpr(*_types(operands)), operands, None)
    return outs[0], saved[1]


def cudnn_backward(
    operands: Sequence[Array], kept: Sequence[Array], cotangent: Array, spec: Attention
) -> list[Array]:
    """Returns the gradients of cuDNN attention without running it again."""
    jaxpr = jax.make_jaxpr(lambda ct, *operands: _vjp(operands, spec)[1](ct))
    args = [cotangent, *operands]
    return _with_kernel(jaxpr(*_types(args)), args, kept)[0]


def _types(operands: Sequence[Array]) -> list[jax.ShapeDtypeStruct]:
    # Without the mesh axes along which they vary: JAX 0.10 loses these inside.
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]


def _with_kernel(
    jaxpr: Any, args: Sequence[Array], kept: Sequence[Array] | None
) -> tuple[list[PyTree], list[PyTree]]:
    """Evaluates a jaxpr; returns its results and those of the forward kernel.

    If the results of that are known, they are `kept`, and it is not run.
    """
    visitor = _Kernel(kept=kept)
    body, consts = open_jaxpr(jaxpr)
    outs, _ = visitor.run(body, consts, args, [None] * len(args), ())
    if len(visitor.saved) != 2:
        raise NotImplementedError(_OTHER_WAY)
    return outs, visitor.saved


@dataclasses.dataclass(eq=False, kw_only=True)
class _Kernel(Visitor):
    kept: Sequence[PyTree] | None
    saved: list[PyTree] = dataclasses.field(default_factory=list)

    def equation(self, op: Op) -> Outcome:
        is_kernel = op.eqn.primitive.name == CUDNN_KERNEL
        is_kept = is_kernel and self.kept is not None
        outs = list(self.kept or ()) if is_kept else eval_equation(op.eqn, op.values)
        self.saved = outs if is_kernel else self.saved
        return outs, [None] * len(outs)


_OTHER_WAY = "this version of JAX calls cuDNN in a way that mpx does not know"


def reason_against(
    spec: Attention, avals: tuple[jax.ShapeDtypeStruct, ...]
) -> str | None:
    """Returns why cuDNN cannot run a call on operands of these types, if it cannot."""
    capability = cuda_capability()
    if capability is None or capability < (8, 0):
        return "cuDNN attention needs a CUDA GPU of compute capability 8.0"
    if "bias" in spec.extras and avals[0].dtype == jnp.float16:
        return "a bias may exceed the range of f16"
    if "bias" in spec.extras and not spec.required:
        shapes = {name: x.shape for name, x in zip(spec.extras, avals[3:], strict=True)}
        against = reason_by_shapes(shapes)
        if against is not None:
            return against
    if spec.window is not None:
        if not spec.is_causal and spec.window[1] != 0:
            return "cuDNN has windows to the left only"
        if {"q_seqlen", "kv_seqlen"} & {*spec.extras}:
            return "a window together with sequence lengths"
    return _reason_by_jax(spec, avals, capability)


def reason_by_shapes(shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Returns why cuDNN cannot run a bias with masks of these shapes, if it cannot.

    It takes one array for both, which has more than 16 bits of precision only relative to
    the largest number that is not masked, and a gradient only if all examples share it.
    """
    bias, mask = shapes["bias"], shapes.get("mask", shapes.get("kv_seqlen"))
    if mask is None:
        return None
    pairs = zip(bias[:2], (*mask, 1)[:2], strict=True)
    if all(n >= m for n, m in pairs):
        return None
    return "a bias is shared by what a mask tells apart"


@functools.lru_cache(maxsize=256)
def _reason_by_jax(
    spec: Attention,
    avals: tuple[jax.ShapeDtypeStruct, ...],
    capability: tuple[int, ...],
) -> str | None:
    """Asks JAX, which knows the head sizes and lengths of each cuDNN and GPU."""
    del capability  # part of the cache key

    def forward_and_backward(*operands: Array) -> PyTree:
        out, backward = _vjp(operands, spec)
        return backward(out)

    try:
        jaxpr = jax.make_jaxpr(forward_and_backward)(*avals)
    except (NotImplementedError, ValueError, RuntimeError) as error:
        return f"cuDNN: {error}"
    if contains(jaxpr, (CUDNN_KERNEL,)):
        return None
    warn(f"Attention runs without cuDNN's kernel: {_OTHER_WAY}. Upgrade mpx.")
    return _OTHER_WAY


LEAST = {9: 128 * 128, 10: 128 * 128}
"""By the first number of the compute capability: from which number of scores per head on."""


def reason_not_paying(
    capability: tuple[int, ...] | None, rows: int, keys: int
) -> str | None:
    """Returns why attention of this size is run operation by operation, if it is."""
    if capability is None:
        return "cuDNN attention needs a CUDA GPU"
    least = LEAST.get(capability[0])
    if least is None:
        version = ".".join(map(str, capability))
        return f"not faster in cuDNN on a GPU of compute capability {version}"
    if rows * keys < least:
        return f"not faster in cuDNN: {rows} × {keys} scores are fewer than {least}"
    return None
