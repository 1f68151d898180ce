"""Capturing the calls of `jax.nn.dot_product_attention` while a function is traced."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from jax import Array, lax
from jaxtyping import PyTree

from mpx._jax._private import private
from mpx._jax._warn import warn

Catch = Callable[..., tuple[Array, Array] | None]

_thread = threading.local()
_lock = threading.Lock()
_running: list[None] = []
# The module in which `jax.nn.dot_product_attention` looks up the functions that it calls.
_module = private("attention").functions
_XLA, _CUDNN = "_dot_product_attention_xla", "cudnn_dot_product_attention"
_originals = {name: getattr(_module, name) for name in (_XLA, _CUDNN)}


@contextlib.contextmanager
def captured(catch: Catch) -> Iterator[None]:
    """Hands the calls of `jax.nn.dot_product_attention` in this thread to `catch`.

    Meanwhile two functions of JAX are replaced, which the public one looks up on each
    call, so that every import of it is captured.

    It is for what cannot be recognised in a traced function: attention that is
    differentiated inside `amp`, its logsumexp, and cuDNN that was asked for with f32
    operands. Anything else is found without it.

    `catch(arrays, scale=, is_causal=, window=, required=)` gets query, key, value, bias,
    mask, query lengths and key lengths, of which each of the last four may be `None`;
    `required` means `implementation="cudnn"`. It returns the output and the logsumexp of
    shape (batch, heads, queries, 1), or `None` to leave the call to JAX.
    """
    with _lock:
        if not _running:
            for name, func in ((_XLA, _on_xla), (_CUDNN, _on_cudnn)):
                _originals[name] = getattr(_module, name)
                setattr(_module, name, func)
        _running.append(None)
    before, _thread.catch = getattr(_thread, "catch", None), catch
    try:
        yield
    finally:
        _thread.catch = before
        with _lock:
            _running.pop()
            if not _running:
                for name, func in _originals.items():
                    setattr(_module, name, func)


def plain_attention(*arrays: Array | None, **options: PyTree) -> PyTree:
    """Runs the operations behind `jax.nn.dot_product_attention` by default."""
    return _originals[_XLA](*arrays, **options)


def _on_xla(*arrays: Array | None, return_residual: bool, **options: PyTree) -> PyTree:
    found = None
    known = {"is_causal", "scale", "q_seqlen", "kv_seqlen", "local_window_size"}
    if _is_known(len(arrays) == 5 and {*options} == known):
        found = _thread.catch(
            (*arrays, options["q_seqlen"], options["kv_seqlen"]),
            scale=options["scale"],
            is_causal=options["is_causal"],
            window=options["local_window_size"],
            required=False,
        )
    if found is None:
        return _originals[_XLA](*arrays, return_residual=return_residual, **options)
    out, logsumexp = found
    if not return_residual:
        return out
    return out, lax.stop_gradient(logsumexp[..., 0].swapaxes(1, 2))


def _on_cudnn(
    *arrays: Array | None, return_residual: bool, **options: PyTree
) -> PyTree:
    found = None
    known = {"scale", "mask_type", "sliding_window_length"}
    if _is_known(len(arrays) == 7 and {*options} == known):
        length = options["sliding_window_length"]
        found = _thread.catch(
            arrays,
            scale=options["scale"],
            is_causal="CAUSAL" in options["mask_type"].name,
            window=None if length is None else (length - 1, 0),
            required=True,
        )
    if found is None:
        return _originals[_CUDNN](*arrays, return_residual=return_residual, **options)
    out, logsumexp = found
    return (out, lax.stop_gradient(logsumexp[..., 0])) if return_residual else out


def _is_known(has_known_form: bool) -> bool:
    """Returns whether a call is to be captured; warns of one in an unknown form."""
    if getattr(_thread, "catch", None) is None:
        return False
    if not has_known_form:
        warn(
            "This version of JAX calls attention in a way that mpx does not know: under "
            "`amp` it runs operation by operation instead of in cuDNN's kernel."
        )
    return has_known_form
