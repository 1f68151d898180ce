"""`amp`: the public transformation."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from mpx import _nnx
from mpx._amp._catch import caught_attention
from mpx._amp._flash import attend
from mpx._amp._interpreter import Autocast
from mpx._amp._policy import AmpRules, as_amp_rules, as_compute_dtype
from mpx._amp._scoped import (
    call_haiku,
    call_linen,
    haiku_name,
    in_haiku,
    linen_call,
    linen_is_not_written,
    linen_name,
)
from mpx._amp._unscaled import warn_if_unscaled
from mpx._amp._values import F32, Role, cast, is_eligible
from mpx._call import argument_names
from mpx._compat import (
    ambient_scopes,
    is_differentiated,
    nothing_is_traced,
    open_jaxpr,
    scopes_of,
    source_frames,
    sub_jaxprs,
)
from mpx._keep import run_in_scopes
from mpx._select import Selectors, parse_selectors
from mpx._tree import LeafName, is_array, named_leaves
from mpx._wrapped import refuse_cast_arguments


def amp(
    func: Callable[..., Any] | None = None,
    dtype: DTypeLike | None = None,
    *,
    keep: Selectors = (),
    rules: AmpRules | str | Mapping[Any, Any] | None = None,
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
    `amp`. So are the variables of a Linen module, if one of its methods is the function,
    and those of Haiku inside `hk.transform`.

    Args:
        func: The function. Leave it out to use `amp` as a decorator with arguments.
        dtype: The dtype of matmuls: bf16 or f16. `None` is bf16, unless you chose a half precision
            with `set_half_precision_datatype` or `half_precision`. Gradients in f16 need
            a loss scale: take them with `mpx.value_and_grad`. Others warn.
        keep: What runs as it is written: a regular expression for paths of parameters
            such as `layers/0/norm/weight` (their matmuls) and for paths of
            `jax.named_scope`s, a module type (what its `__call__` computes, and matmuls
            with parameters that it holds), a predicate `(path, leaf) -> bool` for
            parameters, or a list of these.
        rules: `"safe"` (the default), `"fast"`, an `AmpRules`, or a dictionary as in
            jaxamp.
        narrow_carry: Whether the carry of a loop may be held in the compute dtype. By
            default it stays f32, since it may be an accumulator.
        f32_weight_grads: Whether the gradients of the weights come out of their matmuls
            in f32. By default these give 16-bit results, which are then cast. It is for
            gradients taken outside of `amp`, and excludes forward-mode derivatives.

    Raises:
        ValueError: If the dtype or a rule is unknown; in a call, if a string or type in
            `keep`, or an expression in `rules`, selects nothing.

    Examples:
        >>> import jax.numpy as jnp
        >>> @amp
        ... def f(x, w):
        ...     return jnp.max(x @ w)
        >>> f(jnp.full((2, 3), 1.001), jnp.ones((3, 2)))
        Array(3., dtype=float32)
    """
    if dtype is not None:
        dtype = as_compute_dtype(dtype)
    chosen = as_amp_rules(rules).keeping(parse_selectors(keep, "keep"))
    if func is None:
        return functools.partial(
            amp,
            dtype=dtype,
            keep=chosen.keep,
            rules=chosen,
            narrow_carry=narrow_carry,
            f32_weight_grads=f32_weight_grads,
        )
    eager: dict[Any, Any] = {}

    def autocast() -> Autocast:
        return Autocast(
            dtype=as_compute_dtype(dtype),
            rules=chosen,
            narrow_carry=narrow_carry,
            f32_weight_grads=f32_weight_grads,
        )

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        refuse_cast_arguments()
        return autocast_call(autocast(), func, args, kwargs, eager=eager)

    # The gradient functions and reports ask for it.
    setattr(wrapper, "mpx_autocast", autocast)  # noqa: B010
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


Named = tuple[LeafName, Role | None]
"""The name of an array, and why it counts as a parameter."""

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
    describe: Callable[[LeafName, Role | None], Named] = lambda *x: x,
) -> Any:
    """Calls a function under autocast.

    Args:
        autocast: The settings.
        func: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        eager: Rewritten jaxprs of earlier calls outside of all transformations, by
            compute dtype.
        describe: From the name and role of a leaf to what they are for the user.
    """
    names = argument_names(func, len(args))
    arguments = {_FUNC: func, **dict(zip(names, args, strict=True)), **kwargs}
    plain, objects = {}, {}
    for name, tree in arguments.items():
        plain[name], found = _nnx.take_out(tree, name)
        objects.update(found)
    if objects:
        return _call_with_nnx(autocast, names, plain, objects)
    pure = functools.partial(_call_pure, autocast, eager=eager)
    linen = linen_call(func, args)
    if linen is not None:
        return call_linen(
            linen, kwargs, lambda f, *args: pure(f, args, {}, describe=linen_name)
        )
    if in_haiku():
        return call_haiku(
            func,
            args,
            kwargs,
            lambda f, *args: pure(f, args, {}, describe=haiku_name),
        )
    with linen_is_not_written():
        return pure(func, args, kwargs, describe=describe)


def _call_pure(
    autocast: Autocast,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    eager: dict[Any, Any] | None,
    describe: Callable[[LeafName, Role | None], Named],
) -> Any:
    """Calls a function that changes nothing but its results; arguments as above."""
    names = argument_names(func, len(args))
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

    # What a type selects is not part of the names by which programs are remembered.
    if eager is not None and nothing_is_traced() and not autocast.kept_types:
        # The function is traced anew, since what it closes over may have changed; but
        # the jitted functions inside of it, once rewritten, stay the same programs.
        autocast.cache = eager.setdefault(autocast.dtype, {})
        if len(autocast.cache) > _MOST_REMEMBERED:
            autocast.cache.clear()
    with caught_attention(attend), run_in_scopes(autocast.kept_types):
        jaxpr, (_, out_static) = jax.make_jaxpr(flat, return_shape=True)(*arrays)
    body, consts = open_jaxpr(jaxpr)
    known = _names_and_roles(func, names, args, kwargs, consts)
    known = [describe(*pair) for pair in known]
    metas = [
        autocast.argument_meta(*pair, leaf)
        for pair, leaf in zip(known, arrays, strict=True)
    ]
    # While Linen or Haiku initialise a model it has no parameters yet.
    in_model = describe in (linen_name, haiku_name)
    complete = not in_model or any(role == "own" for _, role in known)
    autocast.start(
        [(name, leaf) for (name, _), leaf in zip(known, arrays, strict=True)],
        functools.partial(_places, body) if complete else None,
    )
    outs, _ = autocast.run(body, consts, arrays, metas, ambient_scopes())
    outs = [
        # A constant result is a literal, which is no array.
        _result(out, var.aval)
        for var, out in zip(body.outvars, outs, strict=True)
    ]
    if autocast.dtype == np.float16:
        outs = [warn_if_unscaled(out) for out in outs]
    return out_static.merge(outs)


def _places(jaxpr: Any) -> tuple[set[str], set[str]]:
    """Returns the paths of scopes in a jaxpr, and the functions that wrote it."""
    scopes: set[str] = set()
    functions: set[str] = set()

    def visit(jaxpr: Any, outer: tuple[str, ...]) -> None:
        for eqn in jaxpr.eqns:
            inner = outer + scopes_of(eqn)
            scopes.update("/".join(inner[:n]) for n in range(1, len(inner) + 1))
            functions.update(name for name, _, _ in source_frames(eqn))
            for body in sub_jaxprs(eqn):
                visit(body, inner)

    visit(jaxpr, ambient_scopes())
    return scopes, functions


def _result(out: Any, aval: Any) -> Any:
    if not isinstance(out, jax.Array):
        return jnp.asarray(out, aval.dtype)
    return cast(out, F32) if is_eligible(aval) else out


def _is_numpy(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | np.generic)


def _names_and_roles(
    func: Callable[..., Any],
    names: list[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    consts: Sequence[Any],
) -> list[Named]:
    """Returns the names of the arrays of a call, and why each counts as a parameter."""
    own = [(name, leaf) for name, leaf in named_leaves(func) if is_array(leaf)]
    named = [
        (path, leaf, tree)
        for name, tree in (*zip(names, args, strict=True), *sorted(kwargs.items()))
        for path, leaf in named_leaves(tree, name)
        if is_array(leaf)
    ]
    leaves = [*(leaf for _, leaf in own), *(leaf for _, leaf, _ in named), *consts]
    # If JAX shows what is differentiated, nothing needs to be guessed. Through a `jit`
    # or a `checkpoint` it does not.
    may_guess = not own and not any(map(is_differentiated, leaves))

    def role(leaf: Any, tree: Any) -> Role | None:
        if isinstance(tree, eqx.Module):
            return "own"
        if is_differentiated(leaf):
            return "bare" if leaf is tree else "known"
        is_first = may_guess and bool(args) and tree is args[0] and leaf is not tree
        return "likely" if is_first else None

    return [
        *((name, "own") for name, _ in own),
        *((name, role(leaf, tree)) for name, leaf, tree in named),
    ]


def _call_with_nnx(
    autocast: Autocast,
    names: list[str],
    plain: dict[str, Any],
    objects: dict[LeafName, Any],
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
        merged = _nnx.merge(split._replace(rest=state))
        everything = _nnx.put_back(plain, merged.objects)
        func = everything.pop(_FUNC)
        args = [everything.pop(name) for name in names]
        return func(*args, **everything), _nnx.rest_of(merged)

    variables = {
        "/".join(map(str, path)): name
        for path, name in _nnx.variable_names(objects).items()
    }

    def describe(name: LeafName, role: Role | None) -> Named:
        if name.argument == "state":
            name, role = variables[name.path.removesuffix("/value")], "own"
        else:
            argument, _, path = name.path.partition("/")
            name = LeafName(path, name.types[1:], argument)
            role = "bare" if role == "known" and not path else role
        if name.argument == _FUNC:
            name = LeafName(name.path, name.types)
        return name, role

    out, state = autocast_call(
        autocast, pure, (split.rest, plain), {}, describe=describe
    )
    _nnx.update(objects, state, before=split.rest)
    return out
