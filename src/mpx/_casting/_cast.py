"""Casting pytrees and functions to another floating dtype."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PyTree

from mpx._casting._context import half_precision_datatype
from mpx._casting._select import Matcher, Selectors, parse_selectors
from mpx._jax import _nnx
from mpx._jax._arguments import check_function
from mpx._jax._formats import at_least_f32, parse_float_dtype
from mpx._jax._tree import (
    LeafName,
    cast_leaf,
    check_same_structure,
    dtype_of,
    is_array,
    is_floating,
    map_with_name,
)

P = ParamSpec("P")
R = TypeVar("R")


def keeps_its_dtypes(kind: type) -> bool:
    """Returns whether casts pass by nodes of a type, such as loss scalings."""
    return getattr(kind, "mpx_keeps_dtypes", False) is True


def cast_state_leaf(leaf: PyTree, dtype: np.dtype) -> PyTree:
    """Casts a leaf of running statistics, which is never narrowed."""
    return cast_leaf(leaf, dtype) if dtype.itemsize > leaf.dtype.itemsize else leaf


def map_floating(
    fn: Callable[[LeafName, PyTree], PyTree], tree: PyTree, argument: str = ""
) -> PyTree:
    """Maps the floating leaves of a pytree, and of the NNX objects in it."""

    def mapped(name: LeafName, leaf: PyTree) -> PyTree:
        return fn(name, leaf) if is_floating(leaf) else leaf

    plain, objects = _nnx.take_out(tree, argument)
    is_kept = lambda node: keeps_its_dtypes(type(node))  # noqa: E731
    plain = map_with_name(mapped, plain, argument=argument, is_leaf=is_kept)
    if objects:
        apart = _nnx.Objects(objects)
        leaves = [*map(mapped, apart.names, apart.leaves)]
        plain = _nnx.put_back(plain, apart.merged(leaves))
    return plain


def cast_tree(
    tree: PyTree, dtype: DTypeLike, *, where: Selectors | None = None
) -> PyTree:
    """Casts the floating arrays of a pytree and leaves everything else alone.

    Real floating arrays of at least 16 bits are cast: of JAX, of NumPy, or
    `ShapeDtypeStruct`s. Everything else, such as integers, complex numbers, PRNG keys, float8
    values and Python numbers, comes back as it is, so a whole training state can be passed.
    Loss scalings keep their f32. The parameters of an NNX module are cast in a copy; its
    other variables, such as the statistics of BatchNorm, are only widened.

    A value is rounded to the nearest representable one: the relative error is at most
    half an ulp (2⁻⁸ for bf16, 2⁻¹¹ for f16) in the normal range of `dtype`; from 65520
    f16 overflows to infinity. f64 reaches bf16 through f32, which can add 2⁻²⁴.

    Args:
        tree: Any pytree.
        dtype: The floating dtype to cast to, or its name.
        where: Casts only what this selects; see `keep` of `Policy`.

    Raises:
        ValueError: If `dtype` is not a floating dtype of at least 16 bits, or if a string
            or type in `where` selects nothing.

    Examples:
        >>> cast_tree({"w": jnp.ones(2), "step": 3}, "bfloat16")
        {'step': 3, 'w': Array([1, 1], dtype=bfloat16)}
    """
    target = parse_float_dtype(dtype)
    selectors = () if where is None else parse_selectors(where, "where")
    selected = Matcher(selectors, "where")

    def cast(name: LeafName, leaf: PyTree) -> PyTree:
        if where is not None and selected.find(name, leaf) is None:
            return leaf
        if any(map(_nnx.is_variable_of_state, name.types)):
            return cast_state_leaf(leaf, target)
        return cast_leaf(leaf, target)

    result = map_floating(cast, tree)
    selected.check()
    return result


def cast_to_float32(x: PyTree) -> PyTree:
    """Casts the floating arrays of a pytree to f32; see `cast_tree`.

    Args:
        x: Any pytree.

    Examples:
        >>> cast_to_float32(jnp.ones(2, jnp.float16)).dtype
        dtype('float32')
    """
    return cast_tree(x, jnp.float32)


cast_to_full_precision = cast_to_float32
"""The paper's name of `cast_to_float32`."""


def cast_to_float16(x: PyTree) -> PyTree:
    """Casts the floating arrays of a pytree to f16; for arguments see `cast_to_float32`.

    Examples:
        >>> cast_to_float16(jnp.ones(2)).dtype
        dtype('float16')
    """
    return cast_tree(x, jnp.float16)


def cast_to_bfloat16(x: PyTree) -> PyTree:
    """Casts the floating arrays of a pytree to bf16; for arguments see `cast_to_float32`.

    Examples:
        >>> cast_to_bfloat16(jnp.ones(2)).dtype
        dtype(bfloat16)
    """
    return cast_tree(x, jnp.bfloat16)


def cast_to_half_precision(x: PyTree) -> PyTree:
    """Casts to the configured half precision; for arguments see `cast_to_float32`.

    Examples:
        >>> cast_to_half_precision(jnp.ones(2)).dtype
        dtype('float16')
    """
    return cast_tree(x, half_precision_datatype())


def cast_like(tree: PyTree, reference: PyTree) -> PyTree:
    """Casts each floating array of a pytree to the dtype it has in a reference tree.

    Args:
        tree: The pytree to cast.
        reference: A pytree of the same structure. Where it holds no floating array the
            leaf of `tree` comes back as it is.

    Examples:
        >>> before = {"mean": jnp.zeros(2)}
        >>> cast_like({"mean": jnp.ones(2, jnp.float16)}, before)["mean"].dtype
        dtype('float32')
    """
    check_same_structure(tree, reference, "`cast_like`")

    def cast(leaf: PyTree, like: PyTree) -> PyTree:
        if is_floating(leaf) and is_floating(like):
            return cast_leaf(leaf, like.dtype)
        return leaf

    return jax.tree.map(cast, tree, reference)


@overload
def cast_function(
    func: Callable[P, R],
    dtype: DTypeLike | None = None,
    return_dtype: DTypeLike | None = None,
) -> Callable[P, R]: ...
@overload
def cast_function(
    func: None = None,
    dtype: DTypeLike | None = None,
    return_dtype: DTypeLike | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def cast_function(
    func: Callable[..., PyTree] | None = None,
    dtype: DTypeLike | None = None,
    return_dtype: DTypeLike | None = None,
) -> Callable[..., PyTree]:
    """Runs a function with its floating inputs cast, and casts what it returns.

    JAX's type promotion then carries the dtype through the function.

    Args:
        func: The function. Leave it out to use `cast_function` as a decorator.
        dtype: The dtype of the inputs; `None` is the configured half precision.
        return_dtype: The dtype of the results; `None` means `dtype`.

    Examples:
        >>> @cast_function(dtype="bf16", return_dtype="f32")
        ... def double(x):
        ...     print(x.dtype)
        ...     return {"y": 2 * x}
        >>> double(jnp.ones(2))
        bfloat16
        {'y': Array([2., 2.], dtype=float32)}
    """
    if func is None:
        return functools.partial(cast_function, dtype=dtype, return_dtype=return_dtype)
    check_function(func)
    # Names are checked now; "half" is looked up at each call, since it can be switched.
    inputs = None if dtype is None else parse_float_dtype(dtype)
    results = None if return_dtype is None else parse_float_dtype(return_dtype)

    @functools.wraps(func)
    def wrapper(*args: PyTree, **kwargs: PyTree) -> PyTree:
        low = inputs or half_precision_datatype()
        args, kwargs = cast_tree((args, kwargs), low)
        return cast_tree(func(*args, **kwargs), results or low)

    return wrapper


@overload
def force_full_precision(
    func: Callable[P, R], return_dtype: DTypeLike | None = None
) -> Callable[P, R]: ...
@overload
def force_full_precision(
    func: None = None, return_dtype: DTypeLike | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def force_full_precision(
    func: Callable[..., PyTree] | None = None, return_dtype: DTypeLike | None = None
) -> Callable[..., PyTree]:
    """Runs a function in full precision, whatever the dtype of its inputs.

    Use it for operations that overflow or lose too much in half precision: sums, means,
    softmax, norms. f64 inputs stay f64. Equinox `State`s and NNX objects pass as they are.

    Args:
        func: The function. Leave it out to use it as a decorator with arguments.
        return_dtype: The dtype of the floating results. `None` gives back the widest
            dtype among the floating inputs, if there are any.

    Examples:
        >>> x = jnp.full(100, 1000.0, jnp.float16)
        >>> float(jnp.sqrt(jnp.sum(x * x))), float(
        ...     force_full_precision(lambda x: jnp.sqrt(jnp.sum(x * x)))(x))
        (inf, 10000.0)
    """
    if func is None:
        return functools.partial(force_full_precision, return_dtype=return_dtype)
    check_function(func)
    results = None if return_dtype is None else parse_float_dtype(return_dtype)

    @functools.wraps(func)
    def wrapper(*args: PyTree, **kwargs: PyTree) -> PyTree:
        return call_in_full_precision(func, args, kwargs, results)

    return wrapper


def call_in_full_precision(
    func: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    return_dtype: np.dtype | None = None,
) -> PyTree:
    """Calls a function on widened inputs; see `force_full_precision`."""
    leaves = jax.tree.leaves((args, kwargs), is_leaf=is_state_node)
    dtypes = {dtype_of(leaf) for leaf in leaves if is_floating(leaf)}
    args, kwargs = widen_tree((args, kwargs))
    out = func(*args, **kwargs)
    if return_dtype is None and dtypes:
        with jax.numpy_dtype_promotion("standard"):
            return_dtype = np.dtype(functools.reduce(jnp.promote_types, dtypes))
    return out if return_dtype is None else _cast_floats(out, lambda _: return_dtype)


def is_state_node(node: object) -> bool:
    """Returns whether a node is state, or keeps its dtypes: it is handed on as it is."""
    is_kept = isinstance(node, eqx.nn.State) or keeps_its_dtypes(type(node))
    return is_kept or _nnx.is_nnx(node)


def widen_tree(tree: PyTree) -> PyTree:
    """Casts 16-bit floating leaves to f32 and leaves wider ones as they are."""
    return _cast_floats(tree, at_least_f32)


def _cast_floats(tree: PyTree, choose: Callable[[np.dtype], np.dtype]) -> PyTree:
    def cast(leaf: PyTree) -> PyTree:
        return cast_leaf(leaf, choose(leaf.dtype)) if is_floating(leaf) else leaf

    return jax.tree.map(cast, tree, is_leaf=is_state_node)


def own_buffer(leaf: PyTree) -> PyTree:
    """Returns an array that shares its buffer with no other, so it can be donated."""
    return jnp.array(leaf, copy=True) if is_array(leaf) else leaf
