"""Attention as a JAX primitive, with rules for derivatives and `vmap`.

On CUDA it becomes cuDNN's flash kernel; elsewhere the operations behind
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
from jax import Array, lax
from jaxtyping import PyTree

from mpx._jax._compat import (
    CUDNN_KERNEL,
    Primitive,
    convert_dtype,
    eval_equation,
    open_jaxpr,
)
from mpx._jax._devices import cuda_capability
from mpx._jax._private import private
from mpx._jax._warn import warn
from mpx._ops import _primitives as ops
from mpx._program._flow import propagate
from mpx._program._interpreter import function_of
from mpx._program._queries import ATTENTION, Equation

F32 = jnp.dtype(jnp.float32)
_jax = private("attention")


class Attention(NamedTuple):
    """The static part of one call."""

    scale: float  # The factor of the scores
    is_causal: bool  # Whether a query sees the keys up to its own position only
    # For causal attention, the number of keys that it sees to the left, and 0
    window: tuple[int, int] | None
    extras: tuple[str, ...]  # those of `bias` and `mask` that are operands
    may_hide: bool = False  # Whether the bias may be so low that it hides whole rows

    @property
    def free(self) -> tuple[int, ...]:
        """The operands that are differentiable."""
        return (0, 1, 2, 3) if "bias" in self.extras else (0, 1, 2)


# --- The operation in plain JAX -------------------------------------------------------


def plain(*operands: Array, spec: Attention) -> tuple[Array, Array]:
    """Runs the operations behind `jax.nn.dot_product_attention`, in f32."""
    arrays = [convert_dtype(x, F32) for x in operands[:3]]
    extras = dict(zip(spec.extras, operands[3:], strict=True))
    options = {"implementation": "xla", "return_residual": True}
    out, logsumexp = _by_jax(arrays, extras, spec, **options)
    return convert_dtype(out, operands[0].dtype), logsumexp.swapaxes(1, 2)[..., None]


def _by_jax(
    arrays: Sequence[Array], extras: Mapping[str, Array], spec: Attention, **more: Any
) -> PyTree:
    more |= {"scale": spec.scale, "is_causal": spec.is_causal, **extras}
    return jax.nn.dot_product_attention(*arrays, local_window_size=spec.window, **more)


# --- The operation in cuDNN -----------------------------------------------------------


def _vjp(
    operands: Sequence[Array], spec: Attention, wrt: Sequence[int]
) -> tuple[Array, Callable[..., PyTree]]:
    """Calls cuDNN; returns its result and the function for the backward pass.

    In a causal row in which everything is masked the result is another mean than `plain`'s:
    the caller replaces such rows.
    """

    def call(query: Array, key: Array, value: Array, *more: Array) -> Array:
        lengths = query.shape[1], key.shape[1]
        extras = dict(zip(spec.extras, more, strict=True))
        if "bias" in extras:
            # Softmax does not change if a number is added to all scores of a query. So the
            # largest bias that it sees becomes 0, and 16 bits are enough: lower ones have
            # less weight, the less exact they are.
            bias = extras["bias"] - _highest(extras, spec, lengths)
            extras["bias"] = convert_dtype(jnp.maximum(bias, _LEAST), query.dtype)
        # cuDNN needs both lengths. Fewer heads are faster: on an H200, 0.47 ms with a
        # mask of (8, 1, 1024, 1024) and 0.62 ms with one of (8, 12, 1024, 1024).
        full = {
            name: jnp.broadcast_to(x, (*x.shape[:2], *lengths))
            for name, x in extras.items()
        }
        return _by_jax((query, key, value), full, spec, implementation="cudnn")

    func, chosen = function_of(call, operands, wrt)
    return jax.vjp(func, *chosen)


def causal(rows: int, keys: int, window: tuple[int, int] | None) -> Array:
    """Returns the causal mask (1, 1, rows, keys), perhaps with a window to the left."""
    row, key = (lax.broadcasted_iota(jnp.int32, (1, 1, rows, keys), i) for i in (2, 3))
    before = key <= row
    return before if window is None else before & (row - key <= window[0])


def _highest(
    extras: Mapping[str, Array], spec: Attention, lengths: tuple[int, int]
) -> Array:
    """Returns the largest bias of the keys that a query sees."""
    bias = lax.stop_gradient(extras["bias"])
    seen = [extras["mask"]] if "mask" in extras else []
    seen += [causal(*lengths, spec.window)] if spec.is_causal else []
    if not seen:
        return jnp.max(bias, axis=-1, keepdims=True)
    visible = functools.reduce(jnp.logical_and, seen)
    # One bias stays one for the whole batch: cuDNN has the gradient of no other.
    shared = [i for i in (0, 1) if bias.shape[i] == 1]
    visible = jnp.any(visible, axis=shared, keepdims=True)
    highest = jnp.max(jnp.where(visible, bias, -jnp.inf), axis=-1, keepdims=True)
    return jnp.where(jnp.any(visible, axis=-1, keepdims=True), highest, 0.0)


def _without_hidden_scores(
    arrays: Sequence[Array], extras: Mapping[str, Array], spec: Attention
) -> Sequence[Array]:
    """Returns operands whose scores are 0 in the rows that a bias hides.

    Beside such a bias f32 keeps nothing of scores, but their derivatives stay. The kernel,
    which computes the weights again from the logsumexp, would not even keep their sum. So
    query and key are twice as long: in such a row `[q, 0] [k, 0]` becomes `[0, q] [k, 0]`,
    whose derivative with respect to both is the same.
    """
    query, key, value = arrays
    zero = lambda x: x - lax.stop_gradient(x)  # noqa: E731
    highest = _highest(extras, spec, (query.shape[1], key.shape[1]))
    is_lost = (jnp.abs(highest) >= _ABSORBING).swapaxes(1, 2)
    shown = jnp.where(is_lost, zero(query), query)
    hidden = jnp.where(is_lost, lax.stop_gradient(query), 0)
    pairs = (shown, hidden), (key, zero(key))
    return *(jnp.concatenate(x, -1) for x in pairs), value


_ABSORBING = 1e8
# As JAX's: cuDNN has a bug for differences of lower numbers.
_LEAST = -(2.0**41)


def _cudnn(*operands: Array, spec: Attention) -> tuple[Array, Array]:
    """Runs cuDNN attention; returns its result and what its kernel saves."""
    run = lambda *operands: _vjp(operands, spec, spec.free)[0]  # noqa: E731
    (out,), saved = _with_kernel(run, operands[:3], operands[3:], None)
    return out, saved[1][..., None]


def _cudnn_backward(
    *operands: Array, spec: Attention, wrt: tuple[int, ...]
) -> Sequence[Array]:
    """Returns the gradients of cuDNN attention without running it again."""
    *given, out, saved, cotangent = operands
    # cuDNN has the gradient of a bias for the whole batch only (jax-ml/jax#30593).
    by_kernel = 3 in wrt and given[3].shape[0] == 1
    inside = (0, 1, 2, 3) if by_kernel else (0, 1, 2)

    def backward(cotangent: Array, *given: Array) -> PyTree:
        return _vjp(given, spec, inside)[1](cotangent)

    arrays, kept = (cotangent, *given[:3]), (out, saved[..., 0])
    grads, _ = _with_kernel(backward, arrays, given[3:], kept)
    if 3 in wrt and not by_kernel:
        call, chosen = function_of(lambda *x: plain(*x, spec=spec)[0], given, (3,))
        grads += jax.vjp(call, *chosen)[1](cotangent)
    return [grads[i] for i in wrt]


def _with_kernel(
    func: Callable[..., PyTree],
    arrays: Sequence[Array],
    extras: Sequence[Array],
    kept: Sequence[Array] | None,
) -> tuple[list[PyTree], list[PyTree]]:
    """Calls a function; returns its results and those of the forward kernel inside.

    If the latter are `kept`, the kernel is not run.
    """
    saved: list[PyTree] = []

    def run(eqn: Equation, values: list[PyTree]) -> list[PyTree]:
        if eqn.primitive.name != CUDNN_KERNEL:
            return eval_equation(eqn, values)
        saved[:] = kept or eval_equation(eqn, values)
        return saved

    # Without the mesh axes along which they vary: JAX 0.10 loses these inside. cuDNN takes
    # odd lengths, JAX does not.
    even = [(batch, n + n % 2, *rest) for batch, n, *rest in (x.shape for x in arrays)]
    shapes, args = (*even, *(x.shape for x in extras)), (*arrays, *extras)
    types = [
        jax.ShapeDtypeStruct(x, y.dtype) for x, y in zip(shapes, args, strict=True)
    ]
    body, consts = open_jaxpr(jax.make_jaxpr(func)(*types))
    known = zip((*body.constvars, *body.invars), (*consts, *args), strict=True)
    outs = propagate(body, dict(known), run, lambda atom: atom.val)
    if len(saved) != 2:
        raise NotImplementedError(_OTHER_WAY)
    return outs, saved


_OTHER_WAY = "this version of JAX calls cuDNN in a way that mpx does not know"


def reason_against(
    spec: Attention, arrays: Sequence[jax.ShapeDtypeStruct], extras: PyTree
) -> str | None:
    """Returns why cuDNN cannot run a call on operands of these types, if it cannot.

    It takes one array for a bias and a mask, exact only near its largest number.
    """
    if len(extras) == 2:
        pairs = zip(extras["bias"].shape[:2], extras["mask"].shape[:2], strict=True)
        if any(bias < mask for bias, mask in pairs):
            return "a bias is shared by what a mask tells apart"
    if "bias" in extras and arrays[0].dtype == jnp.float16:
        return "a bias may exceed the range of f16"
    return _reason_by_jax(spec, tuple(arrays), cuda_capability())


@functools.lru_cache(maxsize=256)
def _reason_by_jax(
    spec: Attention,
    arrays: tuple[jax.ShapeDtypeStruct, ...],
    capability: tuple[int, ...] | None,
) -> str | None:
    """Asks JAX, which knows the head sizes and lengths of each cuDNN and GPU."""
    del capability  # part of the cache key
    full = (1, 1, arrays[0].shape[1], arrays[1].shape[1])
    dtypes = {"bias": F32, "mask": jnp.bool_}
    extras = {x: jax.ShapeDtypeStruct(full, dtypes[x]) for x in spec.extras}

    def forward_and_backward(arrays: Sequence[Array], extras: PyTree) -> PyTree:
        operands = _padded(arrays, extras, spec)
        out, saved = _cudnn(*operands, spec=spec)
        return _cudnn_backward(*operands, out, saved, out, spec=spec, wrt=spec.free)

    try:
        jax.make_jaxpr(forward_and_backward)(arrays, extras)
    except (NotImplementedError, TypeError, ValueError, RuntimeError) as error:
        if str(error) == _OTHER_WAY:
            warn(f"Attention runs without cuDNN's kernel: {error}. Upgrade mpx.")
        return f"cuDNN: {error}"
    return None


LEAST = {9: 128 * 128, 10: 128 * 128}
"""The least number of scores per head, by the first number of the compute capability.

Fewer pay from 32 queries and keys on. `benchmarks/attention.py` measures it; on an H200 two
layers took 3.1 ms, and 3.4 op by op, with 37 tokens in a sequence, 3.4 and 3.0 with 17.
"""
_SIDE = 32


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
    if rows * keys < least and min(rows, keys) < _SIDE:
        return f"not faster in cuDNN: {rows} queries and {keys} keys are few"
    return None


# --- Primitives -----------------------------------------------------------------------


def _attention_types(query: PyTree, *rest: PyTree, spec: Attention) -> PyTree:
    del rest, spec
    batch, length, heads, _ = query.shape
    # The result varies over devices as the query does; the caller made all alike.
    return query, query.update(shape=(batch, heads, length, 1), dtype=F32)


def _attention_jvp(
    primals: Sequence[PyTree], tangents: Sequence[PyTree], *, spec: Attention
) -> tuple[list[PyTree], list[PyTree]]:
    outs = attention_p.bind(*primals, spec=spec)
    wrt = tuple(i for i in spec.free if type(tangents[i]) is not _jax.Zero)
    # JAX has no gradient of the logsumexp either.
    moved = [ops.zero_tangent(_jax, x) for x in outs]
    if wrt:
        given = *primals, *outs, *(tangents[i] for i in wrt)
        moved[:1] = attention_tangent_p.bind(*given, spec=spec, wrt=wrt)
    return outs, moved


def _batched(
    primitive: Primitive, operands: Sequence[PyTree], dims: ops.Dims, **params: PyTree
) -> tuple[list[PyTree], list[int]]:
    """Maps an operation by making the new axis a part of the batch."""
    if 3 in params.get("wrt", ()):  # The gradient of a bias may be one for the batch.
        return ops.run_each(primitive, operands, dims, **params)
    full = ops.mapped_alike(operands, dims)
    extras = range(3, 3 + len(params["spec"].extras))
    size, batch = full[0].shape[:2]

    def fold(i: int, x: Array) -> Array:
        if i in extras and dims[i] is None and x.shape[1] == 1:
            return x[0]  # still one for the whole batch
        if i in extras:
            x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
        return x.reshape(size * batch, *x.shape[2:])

    outs = primitive.bind(*(fold(i, x) for i, x in enumerate(full)), **params)
    return [x.reshape(size, batch, *x.shape[1:]) for x in outs], [0] * len(outs)


_FORWARD, _BACKWARD, _TANGENT = ATTENTION
attention_p = ops.define(_jax, _FORWARD, _attention_types, plain, _batched)
attention_tangent_p, attention_backward_p = ops.define_derivatives(
    _jax,
    (_TANGENT, _BACKWARD),
    lambda *x, spec: [plain(*x, spec=spec)[0]],
    count=lambda spec: 3 + len(spec.extras),
    types=lambda query, *rest, spec, wrt: [query],
    batched=_batched,
)
for _primitive in (attention_p, attention_backward_p, attention_tangent_p):
    # As JAX's own cuDNN attention, which is inside.
    _jax.prim_requires_devices_during_lowering.add(_primitive)
for _primitive, _run in (
    (attention_p, _cudnn),
    (attention_backward_p, _cudnn_backward),
):
    _lowering = _jax.lower_fun(_run, multiple_results=True)
    _jax.register_lowering(_primitive, _lowering, platform="cuda")
_jax.primitive_jvps[attention_p] = _attention_jvp


_MASKED = -1e30


def attention(
    arrays: Sequence[Array], extras: Mapping[str, Array], spec: Attention
) -> Array:
    """Runs attention on queries, keys, values and the arrays that `spec.extras` names."""
    operands = ops.varying_alike(_padded(arrays, extras, spec))
    out, _ = attention_p.bind(*operands, spec=spec)
    return out[:, : arrays[0].shape[1], :, : arrays[2].shape[-1]]


def _padded(
    arrays: Sequence[Array], extras: Mapping[str, Array], spec: Attention
) -> list[Array]:
    """Returns operands that are padded where the kernel needs it."""
    if spec.may_hide:
        arrays = _without_hidden_scores(arrays, extras, spec)
    rows, keys = arrays[0].shape[1], arrays[1].shape[1]
    # JAX makes a bias of a mask, for which cuDNN takes even lengths only.
    more_rows, more_keys = (rows % 2, keys % 2) if spec.extras else (0, 0)
    size = max(x.shape[-1] for x in arrays)
    size += -size % 8
    more = zip(arrays, (more_rows, more_keys, more_keys), strict=True)
    operands = [_filled_up(x, {1: n, 3: size - x.shape[-1]}) for x, n in more]
    for name in spec.extras:
        x, fill = extras[name], _MASKED if name == "bias" else False
        if name == spec.extras[0] and more_keys and x.shape[3] == 1:
            x = jnp.broadcast_to(x, (*x.shape[:3], keys))  # it hides the new keys
        x = _filled_up(x, {3: more_keys * (x.shape[3] == keys)}, fill)
        operands.append(_filled_up(x, {2: more_rows * (x.shape[2] == rows)}))
    return operands


def _filled_up(x: Array, more: dict[int, int], fill: float = 0.0) -> Array:
    """Returns an array with more elements along some axes."""
    sizes = [(0, more.get(i, 0)) for i in range(x.ndim)]
    return jnp.pad(x, sizes, constant_values=fill) if any(more.values()) else x
