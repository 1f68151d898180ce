"""`amp`, and the marks `amp_stop` and `amp_low`."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Literal, ParamSpec, TypedDict, TypeVar, Unpack, overload

import equinox as eqx
import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import PyTree

from mpx._amp._emit import Autocast
from mpx._amp._rules import LOW_NAME, AmpRules, as_amp_rules, as_compute_dtype
from mpx._casting._context import (
    Reduce,
    amp_reduce,
    is_amp,
    parse_reduce,
    refuse_cast_arguments,
    scope_of_amp,
)
from mpx._casting._keep import stopping
from mpx._casting._select import Selectors, parse_selectors
from mpx._jax._arguments import check_function
from mpx._jax._tree import is_array, is_floating
from mpx._jax._warn import warn
from mpx._program._call import call_through
from mpx._program._recording import current_recording
from mpx._program._roles import parse_params


def amp_stop(func: Callable[..., PyTree] | None = None) -> PyTree:
    """Keeps autocast out of a region: operations run as they are written.

    Args:
        func: A function to keep out of. Leave it out to get a context manager.

    Examples:
        >>> import jax.numpy as jnp
        >>> from mpx import amp
        >>> @amp
        ... def f(x):
        ...     with amp_stop():
        ...         return x @ x
        >>> float(f(jnp.full((1, 1), 1.001))[0, 0])
        1.0020010471343994
    """
    return stopping() if func is None else stopping()(func)


def amp_low(x: PyTree) -> PyTree:
    """Marks values as fit for the compute dtype, where `amp` would keep f32.

    Outside `amp` it changes nothing. It is meant for a residual stream that starts in
    f32, such as the sum of embeddings.

    Args:
        x: An array or a pytree of them.

    Examples:
        >>> import jax.numpy as jnp
        >>> from mpx import amp
        >>> f = lambda x: amp_low(x) + 0.0
        >>> float(f(jnp.float32(1.001))), float(amp(f)(jnp.float32(1.001)))
        (1.0010000467300415, 1.0)
    """
    return jax.tree.map(
        lambda leaf: (
            checkpoint_name(leaf, LOW_NAME)
            if is_array(leaf) and is_floating(leaf)
            else leaf
        ),
        x,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `amp`, checked; equal if all of them are."""

    dtype: np.dtype | None
    reduce: Reduce
    params: tuple[int | str, ...] | None
    rules: AmpRules
    narrow_carry: bool
    attention: Literal["fuse", "keep"]
    residuals: str | None

    def __call__(self) -> Autocast:
        """Returns the visitor for one call, by what is set around it."""
        return Autocast(
            dtype=as_compute_dtype(self.dtype),
            reduce=amp_reduce(self.reduce),
            params=self.params,
            rules=self.rules,
            narrow_carry=self.narrow_carry,
            attention=self.attention,
            residuals=self.residuals,
        )


def under_amp(
    func: Callable[..., PyTree], autocast: Callable[[], Autocast]
) -> Callable[..., PyTree]:
    """Returns a function that runs in mixed precision, given what makes its visitors."""

    @functools.wraps(func)
    def wrapper(*args: PyTree, **kwargs: PyTree) -> PyTree:
        refuse_cast_arguments()
        visitor = autocast()
        recording = current_recording()
        if recording is not None:
            visitor.decisions = recording.decisions
            recording.casts.append((visitor.dtype, visitor.rules))
        with scope_of_amp():
            return call_through(visitor, func, args, kwargs)

    # The gradient functions and inspection ask for it.
    setattr(wrapper, "mpx_autocast", autocast)  # noqa: B010
    # With itself: what wraps it in turn has its attributes, by `functools.wraps`.
    setattr(wrapper, "mpx_under_amp", (wrapper, func))  # noqa: B010
    return wrapper


@jax.tree_util.register_dataclass
@dataclasses.dataclass(eq=False, frozen=True)  # `jax.jit` takes it: it has a hash
class ModuleUnderAmp:
    """An Equinox module under `amp`: its parameters are still there to be trained."""

    func: Callable[..., PyTree]
    mpx_autocast: Options = dataclasses.field(metadata={"static": True}, repr=False)

    def __call__(self, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return under_amp(self.func, self.mpx_autocast)(*args, **kwargs)

    @property
    def mpx_under_amp(self) -> tuple[PyTree, PyTree]:
        return self, self.func

    @property
    def __wrapped__(self) -> PyTree:
        return self.func


P = ParamSpec("P")
R = TypeVar("R")


class AmpKeywords(TypedDict, total=False):
    """The options of `amp`."""

    params: int | str | Sequence[int | str] | None
    keep: Selectors
    rules: AmpRules | str | None
    narrow_carry: bool
    reduce_dtype: DTypeLike | None
    attention: Literal["fuse", "keep"]
    residuals: Literal["e4m3", "int8"] | None


@overload
def amp(
    func: Callable[P, R], dtype: DTypeLike | None = None, **options: Unpack[AmpKeywords]
) -> Callable[P, R]: ...
@overload
def amp(
    func: None = None, dtype: DTypeLike | None = None, **options: Unpack[AmpKeywords]
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def amp(
    func: Callable[..., PyTree] | None = None,
    dtype: DTypeLike | None = None,
    *,
    params: int | str | Sequence[int | str] | None = None,
    keep: Selectors = (),
    rules: AmpRules | str | None = None,
    narrow_carry: bool = False,
    reduce_dtype: DTypeLike | None = None,
    attention: Literal["fuse", "keep"] = "fuse",
    residuals: Literal["e4m3", "int8"] | None = None,
) -> Callable[..., PyTree]:
    """Runs a function in mixed precision, operation by operation.

    The function is traced at its own dtypes, and its operations are then run with casts.
    Matmuls and convolutions run in the compute dtype; reductions, exponentials, logarithms
    and norms in f32; the rest follows its operands. Inputs, outputs and gradients keep
    their dtypes. It works inside and outside jit, grad, vmap and shard_map, and recurses
    into jit, scan, while, cond, remat, custom derivatives and shard_map.

    NNX modules among the arguments, or as the function, are updated in place, as without
    `amp`. So are the variables of a Linen module, if one of its methods is the function.

    Args:
        func: The function. Leave it out to use `amp` as a decorator with arguments.
        dtype: The dtype of matmuls: bf16 or f16. `None` is bf16, unless you chose a half precision
            with `set_half_precision_datatype` or `half_precision`. Gradients in f16 need
            a loss scale: take them with `mpx.value_and_grad`. Others warn.
        params: The position or the name of the argument that holds the parameters, or
            several. By default what is differentiated, and the arrays that the function
            itself holds, as a module, a method of one or a partial; the `nnx.Param`s of
            NNX modules; and other parts of `eqx.partition`. If nothing is differentiated,
            or `jax.jit` hides it, the first argument that is a container. Biases and
            scales among them take the dtype of the activations that they meet; those of
            16 bits are storage and are read as f32.
        keep: What runs as it is written: a regular expression for paths of parameters
            such as `layers/0/norm/weight` (their matmuls) and for paths of
            `jax.named_scope`s, a module type (what its `__call__` computes, and matmuls
            with parameters that it holds), a predicate `(path, leaf) -> bool` for
            parameters, or a list of these.
        rules: `"safe"` (the default), `"original"` or an `AmpRules`.
        narrow_carry: Whether the carry of a loop may be held in the compute dtype. By
            default it stays f32, since it may be an accumulator.
        reduce_dtype: The dtype in which gradients of weights leave their matmuls, and so
            in which XLA sums them over devices: f32, another dtype, or `"compute"`. By
            default that of the gradient function's `Policy`, else f32 if the weight is on
            several devices and the compute dtype if it is on one. Gradients of biases,
            norms and embeddings are sums in f32 anyway. For gradients taken outside `amp`.
        attention: `"fuse"` runs attention in cuDNN's kernel where it is recognised and
            that pays: see `mpx.inspect.report`. `"keep"` runs it as it is written.
        residuals: `"int8"` or `"e4m3"` keeps activations for the backward pass in 8 bits,
            with a scale for each 32 numbers, and computes what follows from them again.
            Results do not change, gradients do: least with `"int8"`. By default
            activations are kept in their own dtypes.

    Raises:
        ValueError: If a dtype, a rule or another option is unknown; in a call, if a string
            or type in `keep`, or an expression in `rules`, selects nothing.
        TypeError: If a class is given: put an object or a method under `amp`.

    Examples:
        >>> import jax.numpy as jnp
        >>> @amp
        ... def f(x, w):
        ...     return jnp.max(x @ w)
        >>> f(jnp.full((2, 8), 1.001), jnp.ones((8, 2)))
        Array(8., dtype=float32)
    """
    if attention not in ("fuse", "keep"):
        raise ValueError(
            f'`attention` must be "fuse" or "keep", but it is {attention!r}.'
        )
    if residuals not in (None, "e4m3", "int8"):
        raise ValueError(
            f'`residuals` must be "e4m3", "int8" or `None`, but it is {residuals!r}.'
        )
    options = Options(
        dtype=None if dtype is None else as_compute_dtype(dtype),
        reduce=parse_reduce(reduce_dtype),
        params=parse_params(params),
        rules=as_amp_rules(rules).keeping(parse_selectors(keep, "keep")),
        narrow_carry=narrow_carry,
        attention=attention,
        residuals=residuals,
    )
    return _Decorator(_wrap, options) if func is None else _wrap(options, func)


def _wrap(options: Options, func: Callable[..., PyTree]) -> Callable[..., PyTree]:
    check_function(func)
    if isinstance(func, type):
        raise TypeError(
            f"`amp` takes a function or a module, but the class `{func.__name__}` was "
            "given, whose call makes an object. Wrap the object, `amp(Model(...))`; or a "
            "method, `__call__ = amp(...)` or `@amp` before it; or the loss."
        )
    if is_amp(func):
        warn(
            "The function is under `amp` already. What the inner one chose holds, and the "
            "outer one finds nothing to do. Call `amp` once."
        )
    is_module = isinstance(func, eqx.Module)
    return (ModuleUnderAmp if is_module else under_amp)(func, options)


class _Decorator(functools.partial):  # pyright: ignore[reportMissingTypeArgument]
    """`amp` with arguments, to be applied to a function."""

    def __enter__(self) -> None:
        """Refuses to be a context manager."""
        raise TypeError(
            "`amp` is no context manager, as `torch.autocast` is: it changes a function. "
            "Write `amp(loss_fn)(params, batch)` or decorate the function with `@amp`."
        )

    def __exit__(self, *_: object) -> None: ...  # or `__enter__` is not called
