"""Attention as one operation, which runs in cuDNN's flash kernel where that exists.

The operation is a JAX primitive with rules for derivatives and `vmap`. On CUDA and for
16-bit operands it becomes cuDNN's kernel; otherwise the very operations behind
`jax.nn.dot_product_attention`, in f32. Its results are the output and the logsumexp of
the scores, which the backward kernel needs.

    out = softmax(scale · q kᵀ + bias, where mask) v
    logsumexp = log Σ exp(scale · q kᵀ + bias)        (batch, heads, queries, 1), f32
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from mpx._amp._catch import plain_attention
from mpx._amp._cudnn import Attention, cudnn_backward, cudnn_forward
from mpx._amp._facts import F32, cast
from mpx._compat import (
    Primitive,
    as_varying,
    needs_devices,
    varying_axes,
)
from mpx._devices import cuda_capability

_EXTRAS = ("bias", "mask", "q_seqlen", "kv_seqlen")
# With four axes, of which the first may be 1 for all of a batch.
_SHARED = ("bias", "mask")


def attend(
    arrays: Sequence[Any], options: dict[str, Any]
) -> tuple[jax.Array, jax.Array] | None:
    """Makes a call of `jax.nn.dot_product_attention` one operation, if that can help.

    Args:
        arrays: As `caught_attention` passes them.
        options: As above.

    Returns:
        The output and the logsumexp (batch, heads, queries), or `None`: not in f32, no
        CUDA here, or something that the operation does not know.
    """
    operands, extras = list(arrays[:3]), []
    for name, value in zip(_EXTRAS, arrays[3:], strict=True):
        if value is not None:
            operands.append(value)
            extras.append(name)
    scale, window = options["scale"], options["window"]
    if isinstance(scale, jax.Array) or any(x.dtype != F32 for x in arrays[:3]):
        return None
    if "bias" in extras and operands[3].dtype != F32:
        return None
    if _is_explicitly_sharded():
        return None
    if not options["required"] and cuda_capability() is None:
        return None
    spec = Attention(
        scale=float(scale),
        is_causal=bool(options["is_causal"]),
        window=None if window is None else (int(window[0]), int(window[1])),
        extras=tuple(extras),
        required=options["required"],
    )
    names = sorted(frozenset().union(*(varying_axes(jax.typeof(x)) for x in operands)))
    # The sum over devices that this stands for in the backward pass is not ours to make.
    operands = [as_varying(x, names) for x in operands] if names else operands
    out, logsumexp = attention_p.bind(*operands, spec=spec)
    return out, logsumexp[..., 0]


def _is_explicitly_sharded() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    return any(kind == jax.sharding.AxisType.Explicit for kind in mesh.axis_types)


# --- The operation in plain JAX -------------------------------------------------------


def plain(*operands: Any, spec: Attention) -> tuple[Any, Any]:
    """Runs the operations behind `jax.nn.dot_product_attention`, in f32."""
    query, key, value = (cast(x, F32) for x in operands[:3])
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
    return cast(out, operands[0].dtype), logsumexp.swapaxes(1, 2)[..., None]


def plain_backward(*operands: Any, spec: Attention) -> tuple[Any, ...]:
    """Returns the gradients of `plain`: of q, k, v and the bias."""
    n, free = spec.operands, spec.free
    given, cotangent = operands[:n], operands[-1]

    def call(*chosen: Any) -> Any:
        return plain(*chosen, *given[free:], spec=spec)[0]

    return jax.vjp(call, *given[:free])[1](cotangent)


def plain_tangent(*operands: Any, spec: Attention, wrt: tuple[int, ...]) -> list[Any]:
    """Returns the directional derivative of `plain`."""
    given = list(operands[: spec.operands])

    def call(*chosen: Any) -> Any:
        full = list(given)
        for i, value in zip(wrt, chosen, strict=True):
            full[i] = value
        return plain(*full, spec=spec)[0]

    tangents = operands[len(operands) - len(wrt) :]
    return [jax.jvp(call, [given[i] for i in wrt], list(tangents))[1]]


# --- The operation in cuDNN -----------------------------------------------------------


def _cudnn(*operands: Any, spec: Attention) -> tuple[Any, Any]:
    if operands[0].dtype == F32:
        return _without_cudnn(plain)(*operands, spec=spec)
    out, saved = cudnn_forward(operands, spec)
    return out, saved[..., None]


def _cudnn_backward(*operands: Any, spec: Attention) -> list[Any]:
    if operands[0].dtype == F32:
        return _without_cudnn(plain_backward)(*operands, spec=spec)
    *given, out, saved, cotangent = operands
    return cudnn_backward(given, (out, saved[..., 0]), cotangent, spec)


def _without_cudnn(func: Callable[..., Any]) -> Callable[..., Any]:
    def call(*operands: Any, spec: Attention) -> Any:
        if spec.required:
            raise NotImplementedError(
                'implementation="cudnn" was asked for, but cuDNN attention needs a CUDA '
                f"GPU and 16-bit operands; they are {operands[0].dtype} here. Leave "
                "`implementation` out, or let `amp` run the attention low."
            )
        return func(*operands, spec=spec)

    return call


# --- Primitives -----------------------------------------------------------------------

attention_p = Primitive("cudnn_attention")
attention_backward_p = Primitive("cudnn_attention_backward")
attention_tangent_p = Primitive("cudnn_attention_tangent")
NAMES = (attention_p.name, attention_backward_p.name, attention_tangent_p.name)


def _attention_types(query: Any, *rest: Any, spec: Attention) -> tuple[Any, Any]:
    del rest, spec
    batch, length, heads, _ = query.shape
    # The result varies over devices as the query does; `attend` made all alike.
    return query, query.update(shape=(batch, heads, length, 1), dtype=F32)


def _backward_types(*operands: Any, spec: Attention) -> tuple[Any, ...]:
    return operands[: spec.free]


def _tangent_types(query: Any, *rest: Any, spec: Attention, wrt: Any) -> list[Any]:
    del rest, spec, wrt
    return [query]


def _attention_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, spec: Attention
) -> tuple[list[Any], list[Any]]:
    out, logsumexp = attention_p.bind(*primals, spec=spec)
    wrt = tuple(i for i in range(spec.free) if type(tangents[i]) is not ad.Zero)
    tangent = _zero(out)
    if wrt:
        chosen = [tangents[i] for i in wrt]
        (tangent,) = attention_tangent_p.bind(
            *primals, out, logsumexp, *chosen, spec=spec, wrt=wrt
        )
    # JAX has no gradient of the logsumexp either.
    return [out, logsumexp], [tangent, _zero(logsumexp)]


def _zero(x: Any) -> ad.Zero:
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def _tangent_transpose(
    cotangents: Sequence[Any], *operands: Any, spec: Attention, wrt: tuple[int, ...]
) -> list[Any]:
    (cotangent,) = cotangents
    nothing = [None] * (len(operands) - len(wrt))
    if type(cotangent) is ad.Zero:
        return [*nothing, *([None] * len(wrt))]
    known = operands[: len(operands) - len(wrt)]
    grads = attention_backward_p.bind(*known, cotangent, spec=spec)
    return [*nothing, *(grads[i] for i in wrt)]


def _differentiated(func: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the derivative of an operation that is itself a derivative."""

    def rule(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
        free = [
            i for i, x in enumerate(primals) if jnp.issubdtype(x.dtype, jnp.floating)
        ]

        def call(*chosen: Any) -> list[Any]:
            full = list(primals)
            for i, value in zip(free, chosen, strict=True):
                full[i] = value
            return list(func(*full, **params))

        return jax.jvp(
            call,
            [primals[i] for i in free],
            [ad.instantiate_zeros(tangents[i]) for i in free],
        )

    return rule


def _batched(
    primitive: Primitive, operands: Sequence[Any], dims: Sequence[Any], **params: Any
) -> tuple[list[Any], list[int]]:
    """`vmap` of an operation: the new axis becomes part of the batch."""
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

    def fold(i: int, x: Any) -> Any:
        if i in shared:
            if forward and dims[i] is None and x.shape[1] == 1:
                return x[0]  # one for all, as it was
            x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
        return x.reshape(size * batch, *x.shape[2:])

    outs = primitive.bind(*(fold(i, x) for i, x in enumerate(full)), **params)
    outs = [x.reshape(size, batch, *x.shape[1:]) for x in outs]
    if primitive is attention_backward_p and len(outs) == 4 and full[3].shape[1] == 1:
        outs[3] = jnp.sum(outs[3], axis=1, keepdims=True)
    return outs, [0] * len(outs)


def _define(
    primitive: Primitive,
    types: Callable[..., Any],
    slow: Callable[..., Any],
    fast: Callable[..., Any],
) -> None:
    @functools.lru_cache(maxsize=256)
    def compiled(**params: Any) -> Callable[..., Any]:
        return jax.jit(functools.partial(primitive.bind, **params))

    primitive.multiple_results = True
    primitive.def_impl(lambda *operands, **params: compiled(**params)(*operands))
    primitive.def_abstract_eval(types)
    batching.primitive_batchers[primitive] = functools.partial(_batched, primitive)
    mlir.register_lowering(primitive, mlir.lower_fun(slow, multiple_results=True))
    mlir.register_lowering(
        primitive, mlir.lower_fun(fast, multiple_results=True), platform="cuda"
    )
    needs_devices(primitive)


_define(attention_p, _attention_types, _without_cudnn(plain), _cudnn)
_define(
    attention_backward_p,
    _backward_types,
    _without_cudnn(plain_backward),
    _cudnn_backward,
)
_define(attention_tangent_p, _tangent_types, plain_tangent, plain_tangent)
ad.primitive_jvps[attention_p] = _attention_jvp
ad.primitive_jvps[attention_backward_p] = _differentiated(plain_backward)
ad.primitive_jvps[attention_tangent_p] = _differentiated(plain_tangent)
ad.primitive_transposes[attention_tangent_p] = _tangent_transpose
