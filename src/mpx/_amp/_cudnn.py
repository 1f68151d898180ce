"""cuDNN's flash attention: how it is called, and when it cannot be."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mpx._amp._facts import cast
from mpx._compat import Literal, eval_equation, open_jaxpr
from mpx._devices import cuda_capability


class Attention(NamedTuple):
    """What is fixed about one call.

    Attributes:
        scale: The factor of the scores.
        is_causal: Whether a query sees the keys up to its own position only.
        window: How many keys it sees to the left and to the right.
        extras: Which further operands there are: `bias`, `mask`, `q_seqlen`,
            `kv_seqlen`, in this order.
        required: Whether the user asked for cuDNN by name.
    """

    scale: float
    is_causal: bool
    window: tuple[int, int] | None
    extras: tuple[str, ...]
    required: bool

    @property
    def operands(self) -> int:
        """How many operands there are."""
        return 3 + len(self.extras)

    @property
    def free(self) -> int:
        """How many of them are differentiable: the first ones."""
        return 4 if "bias" in self.extras else 3


def _vjp(operands: Sequence[Any], spec: Attention) -> tuple[Any, Callable[..., Any]]:
    """Calls cuDNN; returns its result and the function for the backward pass."""
    query, key = operands[:2]
    length, heads = query.shape[1:3]
    extras = dict(zip(spec.extras, operands[3:], strict=True))
    mask = extras.get("mask")

    def whole(x: Any) -> Any:
        # cuDNN wants all axes but the first.
        return jnp.broadcast_to(x, (x.shape[0], heads, length, key.shape[1]))

    def call(query: Any, key: Any, value: Any, *bias: Any) -> Any:
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            cast(whole(bias[0]), query.dtype) if bias else None,
            None if mask is None else whole(mask),
            scale=spec.scale,
            # A window that ends at the query itself is causal; cuDNN wants it said.
            is_causal=spec.is_causal or spec.window is not None,
            query_seq_lengths=extras.get("q_seqlen"),
            key_value_seq_lengths=extras.get("kv_seqlen"),
            local_window_size=spec.window,
            implementation="cudnn",
        )

    return jax.vjp(call, *operands[: spec.free])


def cudnn_forward(operands: Sequence[Any], spec: Attention) -> tuple[Any, Any]:
    """Runs cuDNN attention; returns its result and what its kernel saves.

    Raises:
        NotImplementedError: If this JAX calls cuDNN in another way.
    """
    jaxpr = jax.make_jaxpr(lambda *operands: _vjp(operands, spec)[0])
    outs, saved = _with_kernel(jaxpr(*_types(operands)), operands, None)
    return outs[0], saved[1]


def cudnn_backward(
    operands: Sequence[Any], kept: Sequence[Any], cotangent: Any, spec: Attention
) -> list[Any]:
    """Returns the gradients of cuDNN attention without running it again.

    Args:
        operands: Those of the forward pass.
        kept: The kernel's result and what it saved.
        cotangent: The derivative with respect to the result.
        spec: The call.
    """
    jaxpr = jax.make_jaxpr(lambda ct, *operands: _vjp(operands, spec)[1](ct))
    args = [cotangent, *operands]
    return _with_kernel(jaxpr(*_types(args)), args, kept)[0]


def _types(operands: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    # Without the mesh axes along which they vary: JAX 0.10 loses these inside.
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]


_KERNEL = "dot_product_attention_fwd_wrapper"


def _with_kernel(
    jaxpr: Any, args: Sequence[Any], kept: Sequence[Any] | None
) -> tuple[list[Any], list[Any]]:
    """Evaluates a jaxpr; the results of the forward kernel are `kept`, if given."""
    body, consts = open_jaxpr(jaxpr)
    env: dict[Any, Any] = dict(zip(body.constvars, consts, strict=True))
    env.update(zip(body.invars, args, strict=True))
    saved: list[Any] = []

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in body.eqns:
        is_kernel = eqn.primitive.name == _KERNEL
        if is_kernel and kept is not None:
            outs = list(kept)
        else:
            outs = eval_equation(eqn, [read(atom) for atom in eqn.invars])
        saved = outs if is_kernel else saved
        env.update(zip(eqn.outvars, outs, strict=True))
    if len(saved) != 2:
        raise NotImplementedError("This version of JAX calls cuDNN in another way.")
    return [read(atom) for atom in body.outvars], saved


def reason_against(spec: Attention, avals: tuple[Any, ...]) -> str | None:
    """Says why cuDNN cannot run a call on operands of these types, if it cannot.

    Args:
        spec: The call.
        avals: A `jax.ShapeDtypeStruct` for each operand; q, k and v in 16 bits.
    """
    return _reason_by_rule(spec, avals) or _reason_by_jax(spec, avals)


def _reason_by_rule(spec: Attention, avals: tuple[Any, ...]) -> str | None:
    capability = cuda_capability()
    if capability is None or capability < (8, 0):
        return "cuDNN attention needs a CUDA GPU of compute capability 8.0"
    if "bias" in spec.extras and avals[0].dtype == jnp.float16:
        return "a bias may exceed the range of f16"
    if spec.window is None:
        return None
    if not spec.is_causal and spec.window[1] != 0:
        return "cuDNN has windows to the left only"
    if {"q_seqlen", "kv_seqlen"} & {*spec.extras}:
        return "a window together with sequence lengths"
    return None


@functools.lru_cache(maxsize=256)
def _reason_by_jax(spec: Attention, avals: tuple[Any, ...]) -> str | None:
    """Asks JAX, which knows the head sizes and lengths of each cuDNN and GPU."""

    def forward_and_backward(*operands: Any) -> Any:
        out, backward = _vjp(operands, spec)
        return backward(out)

    try:
        jax.eval_shape(forward_and_backward, *avals)
    except (NotImplementedError, ValueError, RuntimeError) as error:
        return f"cuDNN: {error}"
    return None
