"""Finding the calls of `jax.nn.dot_product_attention` while a function is traced."""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from jax import lax

from mpx._compat import (
    attention_functions,
    make_jit_context,
    set_attention_functions,
)

_is_caught = make_jit_context(False)
_thread = threading.local()
_lock = threading.Lock()
_running: list[None] = []
_originals = list(attention_functions())


@contextlib.contextmanager
def caught_attention(catch: Callable[..., Any]) -> Iterator[None]:
    """Hands the calls of `jax.nn.dot_product_attention` in this thread to `catch`.

    Calls with `implementation="xla"` are not handed over. What is replaced meanwhile are
    the two functions that the public one looks up when it is called, so that no import
    of it escapes. That calls are caught is part of the cache key of `jax.jit`: what was
    traced without is traced anew, and what was traced here is not found elsewhere.

    Args:
        catch: Called as `catch(arrays, options)`. The arrays are query, key, value,
            bias, mask, query lengths and key lengths, of which the last four may be
            `None`; the options are `scale`, `is_causal`, `window` and `required`, which
            tells that `implementation="cudnn"` was given. It returns the output and the
            logsumexp of shape (batch, heads, queries), or `None` to let the call be.
    """
    with _lock:
        if not _running:
            _originals[:] = attention_functions()
            set_attention_functions(_on_plain, _on_cudnn)
        _running.append(None)
    before, _thread.catch = getattr(_thread, "catch", None), catch
    try:
        with _is_caught(True):
            yield
    finally:
        _thread.catch = before
        with _lock:
            _running.pop()
            if not _running:
                set_attention_functions(*_originals)


def plain_attention(*args: Any, **kwargs: Any) -> Any:
    """Runs the operations behind `jax.nn.dot_product_attention` by default.

    Args:
        *args: Query, key, value, bias and mask with four axes each.
        **kwargs: `is_causal`, `scale`, `q_seqlen`, `kv_seqlen`, `local_window_size` and
            `return_residual`.
    """
    return _originals[0](*args, **kwargs)


def _on_plain(
    query: Any, key: Any, value: Any, bias: Any, mask: Any, **options: Any
) -> Any:
    plain = functools.partial(plain_attention, query, key, value, bias, mask, **options)
    catch = getattr(_thread, "catch", None)
    if catch is None or _asked_for() is not None:
        return plain()
    found = catch(
        (query, key, value, bias, mask, options["q_seqlen"], options["kv_seqlen"]),
        {
            "scale": options["scale"],
            "is_causal": options["is_causal"],
            "window": options["local_window_size"],
            "required": False,
        },
    )
    if found is None:
        return plain()
    out, logsumexp = found
    if not options["return_residual"]:
        return out
    return out, lax.stop_gradient(logsumexp.swapaxes(1, 2))


def _asked_for() -> str | None:
    """Returns the `implementation` of the call.

    The public function calls the same one for "xla" and for `None`, and does not tell
    which; its frame does.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "dot_product_attention":
            return frame.f_locals.get("implementation", "xla")
        frame = frame.f_back
    return "xla"


def _on_cudnn(*arrays: Any, **options: Any) -> Any:
    plain = functools.partial(_originals[1], *arrays, **options)
    catch = getattr(_thread, "catch", None)
    known = {"scale", "mask_type", "sliding_window_length", "return_residual"}
    if catch is None or len(arrays) != 7 or {*options} != known:
        return plain()
    length = options["sliding_window_length"]
    found = catch(
        arrays,
        {
            "scale": options["scale"],
            "is_causal": "CAUSAL" in options["mask_type"].name,
            "window": None if length is None else (length - 1, 0),
            "required": True,
        },
    )
    if found is None:
        return plain()
    out, logsumexp = found
    return (out, lax.stop_gradient(logsumexp)) if options["return_residual"] else out
