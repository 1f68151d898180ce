"""Arguments of microbatches: rows that are split, keys that are folded, and the rest."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from mpx._casting._wrapped import argument_names, original
from mpx._gradients._state import is_statistic
from mpx._jax._nnx import is_nnx
from mpx._jax._tree import LeafName, dtype_of, flatten_with_names, is_array, shape_of

Kind = Literal["row", "key", "rest"]


class Microbatches(NamedTuple):
    """The arguments of a call, taken apart.

    Attributes:
        rows: The arrays that are split: a leading axis is for the microbatches, a second
            one, if there are several shards, for these.
        keys: The PRNG keys.
        rest: What is the same for each microbatch.
        numbers: The number of each microbatch, i32[steps] or i32[steps, shards].
    """

    rows: PyTree
    keys: PyTree
    rest: PyTree
    numbers: Int[Array, "..."]

    def arguments(self, rows: PyTree, index: Any) -> tuple[Any, Any]:
        """Returns the positional and the keyword arguments of one microbatch."""
        keys = self.keys
        if self.numbers.size > 1:
            keys = jax.tree.map(lambda key: _fold_in(key, index), keys)
        return eqx.combine(rows, keys, self.rest, is_leaf=_is_whole)


class _Leaf(NamedTuple):
    """A leaf of the arguments.

    Attributes:
        name: Its name, `batch/x`.
        position: The argument that holds it, `None` for a keyword argument.
        value: The leaf.
    """

    name: LeafName
    position: int | None
    value: Any


def split_arguments(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    batches: tuple[int, ...],
    params: tuple[int, ...],
    steps: int,
    shards: int,
) -> Microbatches:
    """Splits the batches of a call into microbatches, and these into shards.

    Args:
        func: The user's function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        batches: Which arguments are batches.
        params: Which arguments are differentiated.
        steps: The number of microbatches.
        shards: The number of shards of each.

    Raises:
        ValueError: If a batch cannot be split, or another argument has its leading size.
    """
    arguments = (tuple(args), dict(kwargs))
    structure = jax.tree.structure(arguments, is_leaf=_is_whole)
    leaves = list(_leaves(func, *arguments))
    kinds = [_kind(leaf, batches) for leaf in leaves]
    rows = [leaf for leaf, kind in zip(leaves, kinds, strict=True) if kind == "row"]
    for leaf in rows:
        _check_rows(leaf, rows[0], steps, shards)
    if not rows:
        listed = ", ".join(map(str, batches)) or "none"
        raise ValueError(
            f"The batch (argument {listed}) holds no array that could be split. Set "
            "`batch_argnums` to the arguments of the function that are batches."
        )
    if steps * shards > 1:
        for leaf, kind in zip(leaves, kinds, strict=True):
            if kind != "row" and _is_plain_array(leaf):
                _check_shared(leaf, shape_of(rows[0].value)[0], batches, params)

    def of(kind: Kind, change: Callable[[Any], Any] = lambda x: x) -> PyTree:
        pairs = zip(leaves, kinds, strict=True)
        return structure.unflatten(
            [change(leaf.value) if found == kind else None for leaf, found in pairs]
        )

    def split(x: Any) -> Array:
        shape = shape_of(x)
        x = jnp.reshape(x, (shape[0] // steps, steps, *shape[1:]))
        x = jnp.swapaxes(x, 0, 1)
        return x if shards == 1 else jnp.reshape(x, (steps, shards, -1, *shape[1:]))

    index = jnp.arange(steps * shards)
    index = index if shards == 1 else jnp.reshape(index, (steps, shards))
    return Microbatches(of("row", split), of("key"), of("rest"), index)


def _leaves(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[_Leaf]:
    names = argument_names(original(func), len(args))
    trees = [*zip(names, range(len(args)), args, strict=True)]
    # In the order in which JAX flattens a dictionary.
    for name, position, tree in [
        *trees,
        *((x, None, kwargs[x]) for x in sorted(kwargs)),
    ]:
        for leaf_name, leaf in flatten_with_names(tree, name, _is_whole)[0]:
            yield _Leaf(leaf_name, position, leaf)


def _is_whole(node: Any) -> bool:
    """Returns whether a node of the arguments is state, which is handed on as it is."""
    return isinstance(node, eqx.nn.State) or is_nnx(node)


def _is_plain_array(leaf: _Leaf) -> bool:
    is_state = _is_whole(leaf.value) or is_statistic(leaf.name)
    return is_array(leaf.value) and not is_state


def _kind(leaf: _Leaf, batches: tuple[int, ...]) -> Kind:
    """Returns what happens to a leaf."""
    if not _is_plain_array(leaf):
        return "rest"
    is_in_batch, shape = leaf.position in batches, shape_of(leaf.value)
    if _is_typed_key(leaf.value) and not (is_in_batch and shape):
        return "key"
    if _may_be_raw_key(leaf.value) and len(shape) == 1:
        return "key"
    return "row" if is_in_batch else "rest"


def _is_typed_key(x: Any) -> bool:
    return jnp.issubdtype(dtype_of(x), jax.dtypes.prng_key)


def _may_be_raw_key(x: Any) -> bool:
    data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    return dtype_of(x) == np.uint32 and shape_of(x)[-1:] == data.shape


def _fold_in(key: Any, index: Any) -> Any:
    def fold(key: Any) -> Any:
        return jax.random.fold_in(key, index)

    axes = key.ndim if _is_typed_key(key) else 0
    for _ in range(axes):
        fold = jax.vmap(fold)
    return fold(key)


# --- Checks ---------------------------------------------------------------------------


def _check_rows(leaf: _Leaf, first: _Leaf, steps: int, shards: int) -> None:
    def where(leaf: _Leaf) -> str:
        path = f", leaf `{leaf.name.path}`" if leaf.name.path else ""
        return f"argument {leaf.position}{path}"

    shape, parts = shape_of(leaf.value), f"{steps} equal parts"
    if shards > 1:
        parts += f" for each of {shards} shards"
    if not shape or shape[0] % (steps * shards):
        raise ValueError(
            f"The batch ({where(leaf)}) has shape {shape}, whose leading axis cannot be "
            f"split into {parts}. Choose a batch size that is a multiple of "
            f"{'`steps`' if shards == 1 else steps * shards}, and pass what has no rows "
            "as another argument."
        )
    size = shape_of(first.value)[0]
    if shape[0] != size and steps * shards > 1:
        raise ValueError(
            f"The batch has {size} rows in one array ({where(first)}) and {shape[0]} in "
            f"another ({where(leaf)}), so that microbatches of different sizes would "
            "meet. Give all arrays of the batch one leading size, and pass others as "
            "further arguments."
        )


def _check_shared(
    leaf: _Leaf, size: int, batches: tuple[int, ...], params: tuple[int, ...]
) -> None:
    """Raises if a leaf that every microbatch gets may be a part of the batch, or keys."""
    name, shape, is_param = leaf.name, shape_of(leaf.value), leaf.position in params
    is_key = _may_be_raw_key(leaf.value)
    if is_key and (is_param or len(shape) > 1 or shape == (size,)):
        raise ValueError(
            f"`{name}` is a uint32 array of shape {shape}, which may hold raw PRNG keys. "
            "Pass typed keys, made by `jax.random.key` or `jax.random.wrap_key_data`, so "
            "that each microbatch gets its own; and other numbers as int32."
        )
    if is_key or is_param or shape[:1] != (size,):
        return
    remedy = "Pass it by position, and add that to `batch_argnums`"
    if leaf.position is not None:
        split = tuple(sorted({*batches, leaf.position}))
        remedy = f"Split it, too, with `batch_argnums={split}`"
    raise ValueError(
        f"`{name}` has {size} rows, as the batch has, but it is not split: each microbatch "
        f"would get all of them. {remedy}. If it is no part of the batch, let the "
        "function close over it."
    )
