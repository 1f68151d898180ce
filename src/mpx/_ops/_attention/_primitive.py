"""Attention as a JAX primitive, with rules for derivatives and `vmap`.

On CUDA and for 16-bit operands it becomes cuDNN's kernel; otherwise the operations behind
`jax.nn.dot_product_attention`, in f32. Its results are the output and the logsumexp of
the scores, which the backward kernel needs.

    out = softmax(scale · q kᵀ + bias, where mask) v
    logsumexp = log Σ exp(scale · q kᵀ + bias)        (batch, heads, queries, 1), f32
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import PyTree

from mpx._jax._compat import Primitive, convert_dtype, has_explicit_axes
from mpx._jax._devices import cuda_capability
from mpx._jax._private import private
from mpx._ops._attention._capture import plain_attention
from mpx._ops._attention._cudnn import Attention, cudnn_backward, cudnn_forward
from mpx._ops._primitives import (
    define,
    differentiated,
    function_of,
    varying_alike,
    zero_tangent,
)
from mpx._program._queries import ATTENTION

F32 = jnp.dtype(jnp.float32)
Aval = Any
"""The type of a value: shape, dtype, sharding."""

_EXTRAS = ("bias", "mask", "q_seqlen", "kv_seqlen")
# With four axes, of which the first may be 1 for all of a batch.
_SHARED = ("bias", "mask")
_jax = private("attention")


def attend(
    arrays: Sequence[Array | None],
    *,
    scale: float | Array,
    is_causal: bool,
    window: Sequence[int] | None,
    required: bool,
) -> tuple[Array, Array] | None:
    """Makes a call of `jax.nn.dot_product_attention` one operation, if that can help.

    The arguments are those of `catch` in `captured`.

    It returns the output and the logsumexp, or `None` if the operands are not f32, if there
    is no CUDA GPU, or if the operation does not support the call.
    """
    given = [x for x in arrays if x is not None]
    extras = [
        name for name, x in zip(_EXTRAS, arrays[3:], strict=True) if x is not None
    ]
    checked = given[:4] if "bias" in extras else given[:3]
    if isinstance(scale, Array) or any(x.dtype != F32 for x in checked):
        return None
    if has_explicit_axes(jax.sharding.get_abstract_mesh()):
        return None
    if not required and cuda_capability() is None:
        return None
    spec = Attention(
        scale=float(scale),
        is_causal=bool(is_causal),
        window=None if window is None else (int(window[0]), int(window[1])),
        extras=tuple(extras),
        required=required,
    )
    return bind_attention(given, spec)


def bind_attention(operands: Sequence[Array], spec: Attention) -> tuple[Array, Array]:
    """Runs attention as one operation; returns the output and the logsumexp."""
    return attention_p.bind(*varying_alike(operands), spec=spec)


# --- The operation in plain JAX -------------------------------------------------------


def plain(*operands: Array, spec: Attention) -> tuple[Array, Array]:
    """Runs the operations behind `jax.nn.dot_product_attention`, in f32."""
    query, key, value = (convert_dtype(x, F32) for x in operands[:3])
    extras = dict(zip(spec.extras, operands[3:], strict=True))
    out, logsumexp = plain_attention(
        query,
        key,
        value,
        extras.get("bias"),
        extras.get("mask"),
        is_causal=spec.is_causal,
        scale=spec.scale,
        q_seqlen=extras.get("q_seqlen"),
        kv_seqlen=extras.get("kv_seqlen"),
        local_window_size=spec.window,
        return_residual=True,
    )
    return convert_dtype(out, operands[0].dtype), logsumexp.swapaxes(1, 2)[..., None]


def plain_backward(*operands: Array, spec: Attention) -> tuple[Array, ...]:
    """Returns the gradients of `plain` with respect to q, k, v and the bias."""
    call, chosen = _output(operands, spec, range(spec.free))
    return jax.vjp(call, *chosen)[1](operands[-1])


def plain_tangent(
    *operands: Array, spec: Attention, wrt: tuple[int, ...]
) -> list[Array]:
    """Returns the directional derivative of `plain`."""
    call, chosen = _output(operands, spec, wrt)
    return [jax.jvp(call, chosen, list(operands[-len(wrt) :]))[1]]


def _output(
    operands: Sequence[Array], spec: Attention, wrt: Sequence[int]
) -> tuple[Callable[..., Array], list[Array]]:
    given = operands[: spec.operands]
    return function_of(lambda *x: plain(*x, spec=spec)[0], given, wrt)


# --- The operation in cuDNN -----------------------------------------------------------


def _cudnn(*operands: Array, spec: Attention) -> tuple[Array, Array]:
    if operands[0].dtype == F32:
        return _without_cudnn(plain)(*operands, spec=spec)
    out, saved = cudnn_forward(operands, spec)
    return out, saved[..., None]


def _cudnn_backward(*operands: Array, spec: Attention) -> Sequence[Array]:
    if operands[0].dtype == F32:
        return _without_cudnn(plain_backward)(*operands, spec=spec)
    *given, out, saved, cotangent = operands
    kept = out, saved[..., 0]
    if spec.free == 3 or given[3].shape[0] == 1:
        return cudnn_backward(given, kept, cotangent, spec)
    # cuDNN has the gradient of a bias for the whole batch only (jax-ml/jax#30593).
    others = spec._replace(bias_grad=False)
    grads = cudnn_backward(given, kept, cotangent, others)
    return [*grads, plain_backward(*operands, spec=spec)[3]]


def _without_cudnn(func: Callable[..., PyTree]) -> Callable[..., PyTree]:
    def call(*operands: Array, spec: Attention) -> PyTree:
        if spec.required:
            raise NotImplementedError(
                'implementation="cudnn" was asked for, but cuDNN attention needs a CUDA '
                f"GPU and 16-bit operands; they are {operands[0].dtype} here. Leave "
                "`implementation` out, or let `amp` run the attention low."
            )
        return func(*operands, spec=spec)

    return call


# --- Primitives -----------------------------------------------------------------------


def _attention_types(query: Aval, *rest: Aval, spec: Attention) -> tuple[Aval, Aval]:
    del rest, spec
    batch, length, heads, _ = query.shape
    # The result varies over devices as the query does; `attend` made all alike.
    return query, query.update(shape=(batch, heads, length, 1), dtype=F32)


def _attention_jvp(
    primals: Sequence[PyTree], tangents: Sequence[PyTree], *, spec: Attention
) -> tuple[list[PyTree], list[PyTree]]:
    out, logsumexp = attention_p.bind(*primals, spec=spec)
    wrt = tuple(i for i in range(spec.free) if type(tangents[i]) is not _jax.Zero)
    tangent = zero_tangent(_jax, out)
    if wrt:
        chosen = [tangents[i] for i in wrt]
        (tangent,) = attention_tangent_p.bind(
            *primals, out, logsumexp, *chosen, spec=spec, wrt=wrt
        )
    # JAX has no gradient of the logsumexp either.
    return [out, logsumexp], [tangent, zero_tangent(_jax, logsumexp)]


def _tangent_transpose(
    cotangents: Sequence[PyTree],
    *operands: PyTree,
    spec: Attention,
    wrt: tuple[int, ...],
) -> list[PyTree]:
    known, grads = operands[: -len(wrt)], [None] * len(wrt)
    if type(cotangents[0]) is not _jax.Zero:
        found = attention_backward_p.bind(
            *known, cotangents[0], spec=spec._replace(bias_grad=3 in wrt)
        )
        grads = [found[i] for i in wrt]
    return [*[None] * len(known), *grads]


def _batched(
    primitive: Primitive,
    operands: Sequence[PyTree],
    dims: Sequence[int | None],
    **params: PyTree,
) -> tuple[list[PyTree], list[int]]:
    """Maps an operation by making the new axis a part of the batch."""
    spec: Attention = params["spec"]
    size = next(
        x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None
    )
    full = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(operands, dims, strict=True)
    ]
    batch = full[0].shape[1]
    shared = [i for i, name in enumerate(spec.extras, start=3) if name in _SHARED]
    if 3 in params.get("wrt", ()):
        shared.append(len(operands) - 1)  # the tangent of the bias
    forward = primitive is attention_p

    def fold(i: int, x: Array) -> Array:
        if i in shared:
            if forward and dims[i] is None and x.shape[1] == 1:
                return x[0]  # still one for the whole batch
            x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
        return x.reshape(size * batch, *x.shape[2:])

    outs = primitive.bind(*(fold(i, x) for i, x in enumerate(full)), **params)
    outs = [x.reshape(size, batch, *x.shape[1:]) for x in outs]
    if primitive is attention_backward_p and len(outs) == 4 and full[3].shape[1] == 1:
        outs[3] = jnp.sum(outs[3], axis=1, keepdims=True)
    return outs, [0] * len(outs)


_FORWARD, _BACKWARD, _TANGENT = ATTENTION
PLAIN: dict[str, Callable[..., PyTree]] = {
    _FORWARD: plain,
    _BACKWARD: plain_backward,
    _TANGENT: plain_tangent,
}
attention_p = define(_jax, _FORWARD, _attention_types, _without_cudnn(plain))
attention_backward_p = define(
    _jax,
    _BACKWARD,
    lambda *operands, spec: operands[: spec.free],
    _without_cudnn(plain_backward),
)
attention_tangent_p = define(
    _jax, _TANGENT, lambda query, *rest, **params: [query], plain_tangent
)
for _primitive in (attention_p, attention_backward_p, attention_tangent_p):
    _jax.primitive_batchers[_primitive] = functools.partial(_batched, _primitive)
    # As JAX's own cuDNN attention, which is inside.
    _jax.prim_requires_devices_during_lowering.add(_primitive)
for _primitive, _fast in (
    (attention_p, _cudnn),
    (attention_backward_p, _cudnn_backward),
):
    _lowering = _jax.lower_fun(_fast, multiple_results=True)
    _jax.register_lowering(_primitive, _lowering, platform="cuda")
_jax.primitive_jvps[attention_p] = _attention_jvp
_jax.primitive_jvps[attention_backward_p] = differentiated(_jax, plain_backward)
_jax.primitive_jvps[attention_tangent_p] = differentiated(_jax, plain_tangent)
_jax.primitive_transposes[attention_tangent_p] = _tangent_transpose


_MASKED = -1e30
Shape = tuple[int, ...]


class Fit(NamedTuple):
    """How operands are padded: the numbers of queries, keys and numbers of a head after it.

    With `lengths`, the kernel is told the number of keys before padding.
    """

    rows: int
    keys: int
    head: int
    lengths: bool

    @classmethod
    def of(cls, query: Shape, value: Shape, spec: Attention) -> "Fit":
        """Returns the padding of operands of these shapes."""
        rows, keys = query[1], value[1]
        odd = bool(keys % 2)
        # Causal queries see no later keys, and a bias or mask is padded itself.
        hidden = bool(spec.extras) or (spec.is_causal and rows <= keys)
        head = max(query[-1], value[-1])
        return cls(
            rows + rows % 2, keys + odd, -(-head // 8) * 8, lengths=odd and not hidden
        )

    def spec(self, spec: Attention) -> Attention:
        """Returns the call on padded operands."""
        if not self.lengths:
            return spec
        return spec._replace(extras=(*spec.extras, "kv_seqlen"))


def padded_call(
    shapes: list[Shape], spec: Attention, dtype: np.dtype
) -> tuple[Attention, tuple[jax.ShapeDtypeStruct, ...]]:
    """Returns the call on padded operands, and their types."""
    query, _, value = shapes
    fit = Fit.of(query, value, spec)
    spec = fit.spec(spec)
    lengths = fit.rows, fit.keys, fit.keys
    types = [
        jax.ShapeDtypeStruct((x[0], length, x[2], fit.head), dtype)
        for x, length in zip(shapes, lengths, strict=True)
    ]
    full = (1, 1, fit.rows, fit.keys)
    kinds = {
        "bias": jax.ShapeDtypeStruct(full, jnp.float32),
        "mask": jax.ShapeDtypeStruct(full, jnp.bool_),
        "kv_seqlen": jax.ShapeDtypeStruct(query[:1], jnp.int32),
    }
    return spec, (*types, *(kinds[name] for name in spec.extras))


def fitted_attention(
    query: Array, key: Array, value: Array, extras: Mapping[str, Array], spec: Attention
) -> Array:
    """Runs attention on operands that are padded where the kernel needs it."""
    rows, keys, size = query.shape[1], key.shape[1], value.shape[-1]
    fit = Fit.of(query.shape, value.shape, spec)
    query = _padded(query, {1: fit.rows, 3: fit.head})
    key, value = (_padded(x, {1: fit.keys, 3: fit.head}) for x in (key, value))
    more = []
    for name in spec.extras:
        x, fill = extras[name], _MASKED if name == "bias" else False
        if name == spec.extras[0] and fit.keys != keys and x.shape[3] == 1:
            x = jnp.broadcast_to(x, (*x.shape[:3], keys))  # it hides the new keys
        x = _padded(x, {3: fit.keys} if x.shape[3] == keys else {}, fill)
        more.append(_padded(x, {2: fit.rows} if x.shape[2] == rows else {}))
    if fit.lengths:
        more.append(jnp.full(query.shape[:1], keys, jnp.int32))
    out, _ = bind_attention([query, key, value, *more], fit.spec(spec))
    return out[:, :rows, :, :size]


def _padded(x: Array, sizes: dict[int, int], fill: float = 0.0) -> Array:
    """Returns an array that is filled up to some sizes."""
    missing = [(0, sizes.get(i, n) - n) for i, n in enumerate(x.shape)]
    if not any(n for _, n in missing):
        return x
    return jnp.pad(x, missing, constant_values=fill)
