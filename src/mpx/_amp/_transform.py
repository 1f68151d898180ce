"""`amp`: the public transformation."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from mpx import _nnx
from mpx._amp._catch import caught_attention
from mpx._amp._flash import attend
from mpx._amp._interpreter import Autocast
from mpx._amp._policy import AmpPolicy, as_amp_policy, as_compute_dtype
from mpx._amp._values import F32, cast, is_eligible
from mpx._call import argument_names
from mpx._compat import (
    ambient_scopes,
    nothing_is_traced,
    open_jaxpr,
)
from mpx._half import half_precision_datatype
from mpx._tree import is_array, named_leaves


def amp(
    func: Callable[..., Any] | None = None,
    *,
    compute_dtype: DTypeLike | None = None,
    policy: AmpPolicy | str | Mapping[Any, Any] | None = None,
    narrow_carry: bool = False,
    f32_weight_grads: bool = False,
) -> Callable[..., Any]:
    """Runs a function in mixed precision, operation by operation.

    The function is not edited and does not notice: it is traced at its own dtypes, and
    its operations are then run with casts. Matmuls and convolutions run in the compute
    dtype; reductions, exponentials, logarithms and norms in f32; the rest follows its
    operands. Inputs, outputs and gradients keep their dtypes. It works inside and
    outside of jit, grad, vmap and shard_map, and recurses into jit, scan, while, cond,
    remat, custom derivatives and shard_map.

    NNX modules among the arguments, or as the function, are updated in place, as without
    `amp`.

    Args:
        func: The function. Leave it out to use `amp` as a decorator with arguments.
        compute_dtype: f16 or bf16; `None` is the configured half precision.
        policy: `"safe"` (the default), `"fast"`, an `AmpPolicy`, or a dictionary as in
            jaxamp.
        narrow_carry: Whether the carry of a loop may be held in the compute dtype. By
            default it stays f32, since it may be an accumulator.
        f32_weight_grads: Whether the gradients of the weights come out of their matmuls
            in f32. By default these give 16-bit results, which are then cast. It is for
            gradients taken outside of `amp`, and excludes forward-mode derivatives.

    Raises:
        ValueError: If the dtype or the policy is unknown.

    Examples:
        >>> import jax.numpy as jnp
        >>> @amp(compute_dtype="bf16")
        ... def f(x, w):
        ...     return jnp.sum(x @ w)
        >>> f(jnp.full((1, 3), 1.001), jnp.ones((3, 1)))
        Array(3., dtype=float32)
    """
    if compute_dtype is not None:
        compute_dtype = as_compute_dtype(compute_dtype)
    chosen = as_amp_policy(policy)
    if func is None:
        return functools.partial(
            amp,
            compute_dtype=compute_dtype,
            policy=chosen,
            narrow_carry=narrow_carry,
            f32_weight_grads=f32_weight_grads,
        )
    eager: dict[Any, Any] = {}

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        cast = Autocast(
            dtype=compute_dtype or half_precision_datatype(),
            policy=chosen,
            narrow_carry=narrow_carry,
            f32_weight_grads=f32_weight_grads,
        )
        return autocast_call(cast, func, args, kwargs, eager=eager)

    setattr(wrapper, "mpx_is_amp", True)  # noqa: B010 - `value_and_grad` asks for it
    return wrapper


class _Static:
    """The part of a result that is no array, carried in the structure of the rest."""

    def __init__(self, structure: Any, leaves: list[Any]) -> None:
        self.structure, self.leaves = structure, leaves

    def merge(self, arrays: list[Any]) -> Any:
        """Returns the result as the function returned it."""
        remaining = iter(arrays)
        leaves = [next(remaining) if x is _ARRAY else x for x in self.leaves]
        return jax.tree.unflatten(self.structure, leaves)


_ARRAY = object()
_FUNC = "the function"  # beside its arguments, whose names hold no spaces
_MOST_REMEMBERED = 1000
jax.tree_util.register_static(_Static)


def autocast_call(
    autocast: Autocast,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    eager: dict[Any, Any] | None = None,
    describe: Callable[[str, bool], tuple[str, bool]] = lambda *known: known,
) -> Any:
    """Calls a function under autocast.

    Args:
        autocast: The settings.
        func: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        eager: Rewritten jaxprs of earlier calls outside of all transformations, by
            compute dtype.
        describe: From the name of a leaf, and whether `func` itself has it, to what the
            user calls it, and whether the user's function has it.
    """
    names = argument_names(func, len(args))
    arguments = {_FUNC: func, **dict(zip(names, args, strict=True)), **kwargs}
    plain, objects = _nnx.take_out(arguments)
    if objects:
        return _call_with_nnx(autocast, names, plain, objects)
    leaves, structure = jax.tree.flatten((func, args, kwargs))
    # NumPy's f64 is JAX's f32, unless x64 is on.
    leaves = [jnp.asarray(x) if _is_numpy(x) else x for x in leaves]
    arrays = [leaf for leaf in leaves if is_array(leaf)]
    static = [_ARRAY if is_array(leaf) else leaf for leaf in leaves]

    def flat(*arrays: Any) -> tuple[list[Any], _Static]:
        remaining = iter(arrays)
        full = [next(remaining) if leaf is _ARRAY else leaf for leaf in static]
        func, args, kwargs = jax.tree.unflatten(structure, full)
        outs, out_structure = jax.tree.flatten(func(*args, **kwargs))
        return [x for x in outs if is_array(x)], _Static(
            out_structure, [_ARRAY if is_array(x) else x for x in outs]
        )

    if eager is not None and nothing_is_traced():
        # The function is traced anew, since what it closes over may have changed; but
        # the jitted functions inside of it, once rewritten, stay the same programs.
        autocast.cache = eager.setdefault(autocast.dtype, {})
        if len(autocast.cache) > _MOST_REMEMBERED:
            autocast.cache.clear()
    with caught_attention(attend):
        jaxpr, (_, out_static) = jax.make_jaxpr(flat, return_shape=True)(*arrays)
    metas = [
        autocast.argument_meta(*describe(name, is_param), leaf)
        for (name, is_param), leaf in zip(
            _array_names(func, names, args, kwargs), arrays, strict=True
        )
    ]
    body, consts = open_jaxpr(jaxpr)
    outs, _ = autocast.run(body, consts, arrays, metas, ambient_scopes())
    outs = [
        # A constant result is a literal, which is no array.
        _result(out, var.aval)
        for var, out in zip(body.outvars, outs, strict=True)
    ]
    return out_static.merge(outs)


def _result(out: Any, aval: Any) -> Any:
    if not isinstance(out, jax.Array):
        return jnp.asarray(out, aval.dtype)
    return cast(out, F32) if is_eligible(aval) else out


def _is_numpy(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | np.generic)


def _array_names(
    func: Callable[..., Any],
    names: list[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[tuple[str, bool]]:
    """Returns the names of the arrays of a call, and whether `func` itself has them."""
    named = [(name, leaf, True) for name, leaf in named_leaves(func)]
    for name, tree in (*zip(names, args, strict=True), *sorted(kwargs.items())):
        for path, leaf in named_leaves(tree):
            named.append((f"{name}/{path}" if path else name, leaf, False))
    return [(name, is_param) for name, leaf, is_param in named if is_array(leaf)]


def _call_with_nnx(
    autocast: Autocast,
    names: list[str],
    plain: dict[str, Any],
    objects: dict[str, Any],
) -> Any:
    """Calls a function of NNX objects as a pure one and writes their state back.

    Args:
        autocast: The settings.
        names: The names of the positional arguments.
        plain: The function and all arguments, with slots for NNX objects.
        objects: These objects by name.
    """
    split = _nnx.split(objects, ())

    def pure(state: Any, plain: dict[str, Any]) -> tuple[Any, Any]:
        merged = _nnx.merge(split._replace(rest=state), None)
        everything = _nnx.put_back(plain, merged.objects)
        func = everything.pop(_FUNC)
        args = [everything.pop(name) for name in names]
        return func(*args, **everything), _nnx.rest_of(merged)

    def describe(name: str, is_param: bool) -> tuple[str, bool]:
        del is_param  # `pure` has no arrays
        place, _, name = name.partition("/")
        if place == "state":
            position, _, path = name.partition("/")
            name = f"{split.names[int(position)]}/{path.removesuffix('/value')}"
        return name.removeprefix(f"{_FUNC}/"), name.startswith(_FUNC)

    out, state = autocast_call(
        autocast, pure, (split.rest, plain), {}, describe=describe
    )
    _nnx.update(objects, state, before=split.rest)
    return out
