"""Gradients of a large batch from several small ones."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Concatenate, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int, PyTree

from mpx._casting._context import Reduce, over_shards
from mpx._casting._keep import is_state
from mpx._gradients._call import State
from mpx._gradients._grad import (
    ArgnumKeywords,
    GradKeywords,
    P,
    Params,
    Taking,
    grad_options,
    refuse_positional,
    transformed,
)
from mpx._gradients._step import Evaluation, GradResult, Scaling, Step
from mpx._jax._arguments import as_count, as_counts, check_bool, check_value
from mpx._jax._compat import varying_like
from mpx._jax._tree import (
    axis_names,
    dtype_of,
    is_array,
    is_floating,
    shape_of,
)
from mpx._scaling._loss_scaling import LossScaling, NoLossScaling


class WindowKeywords(ArgnumKeywords, total=False):
    """The options of `accumulate`."""

    batch_argnums: int | Sequence[int]
    mean: bool
    has_aux: bool


@overload
def accumulate(
    func: Callable[Concatenate[Params, P], object],
    steps: int = 1,
    *,
    batch_argnums: int | Sequence[int] = 1,
    mean: bool = True,
    has_aux: bool = False,
    **options: Unpack[GradKeywords],
) -> Callable[Concatenate[Scaling, Params, P], GradResult[Params, Scaling]]: ...
@overload
def accumulate(
    func: Callable[P, object], steps: int = 1, **options: Unpack[WindowKeywords]
) -> Taking[Scaling, P]: ...
@overload
def accumulate(
    func: None = None, steps: int = 1, **options: Unpack[WindowKeywords]
) -> Callable[[Callable[P, object]], Taking[Scaling, P]]: ...
def accumulate(
    func: Callable[..., PyTree] | None = None,
    steps: int = 1,
    *misplaced: object,
    batch_argnums: int | Sequence[int] = 1,
    mean: bool = True,
    has_aux: bool = False,
    **options: Unpack[ArgnumKeywords],
) -> Callable[..., PyTree]:
    """Like `value_and_grad`, with the batch worked off in several smaller parts.

    The result is that of the large batch, at the memory of a small one: gradients are
    summed in f32, and one scale, one check and one adjustment hold for the whole window.
    State (`eqx.nn.State`, `batch_stats` of Linen, NNX BatchNorm statistics and dropout
    counters) is handed on from part to part. Part `i` gets `jax.random.fold_in(key, i)`
    for each PRNG key among the arguments, so that dropout masks differ.

    `axis_name` may be a mapped axis, over which is reduced once, after the last part, or
    the axis of the mesh over which the batch is sharded. Then each shard sums its gradients
    in f32 on its own devices and sends them once, in the `reduce_dtype` of the policy;
    without it XLA reduces the gradients of every part. Every device holds the whole f32
    gradient until then, and `aux` has a further axis, after that of the parts, for the
    shards. It needs automatic axes, and a function without state.

    Args:
        func: The loss function. Leave it out to use `accumulate` as a decorator.
        steps: Into how many parts the batch is split.
        *misplaced: Nothing: options are passed by keyword, the scaling at the call.
        batch_argnums: The arguments that are batches: every array in them has one leading
            size, which `steps` divides. Part `i` takes the rows `i, i + steps, …`, so that
            a batch sharded along that axis stays where it is. Other arguments are the
            same for each part, and must not have arrays of that leading size.
        mean: Whether the loss is a mean over the batch, so that parts, and devices, are
            averaged; if false they are added up.
        has_aux: Whether `func` returns a pair `(loss, aux)`. The arrays in `aux` come
            back stacked along a new leading axis of length `steps`; an `eqx.nn.State`
            and `batch_stats` come back as the last part left them.
        **options: Options of `value_and_grad`.

    Raises:
        ValueError: If `steps` does not divide a leading axis, if another argument has the
            leading size of the batch, or if the function has state that shards would change.

    Examples:
        >>> from mpx import NoLossScaling
        >>> loss = lambda w, x: jnp.mean(x * w)
        >>> step = jax.jit(accumulate(loss, steps=4, policy="c=bf16"))
        >>> step(NoLossScaling(), jnp.float32(1.0), jnp.arange(8.0)).grads
        Array(3.5, dtype=float32)
    """
    refuse_positional(misplaced, "accumulate")
    check_bool(mean, "`mean`")
    batches = as_counts(batch_argnums, "batch_argnums")
    positive = min(batches, default=0) >= 0
    check_value(positive, "batch_argnums", "0 or more", batch_argnums)
    checked = dataclasses.replace(
        grad_options(has_aux, **options),
        steps=as_count(steps, "steps", at_least=1),
        batches=batches,
        mean=mean,
    )
    return transformed(func, checked, _Window)


class _Window(Step):
    """One accumulation window: a call for each part, summed."""

    def prepare(self) -> None:
        """Splits the batches into microbatches, and each microbatch into shards."""
        call, options, given = self.call, self.options, len(self.call.arguments)
        batches, last = options.batches, max(options.batches, default=-1)
        if last >= given:
            raise TypeError(
                f"Argument {last} is the batch, but only {given} arguments were "
                "passed by position. Pass the batch by position."
            )
        params = {i % given for i in options.argnums}
        if {*batches} & params:
            raise ValueError(
                f"Argument {batches} is both a batch and differentiated. Set `argnums` "
                "and `batch_argnums` to different arguments."
            )
        self._positions = {name: i for i, name in enumerate(call.arguments)}
        rows, keys, shared = list[int](), list[int](), list[int]()
        for place, x in enumerate(call.leaves[: call.plain]):
            position = self._positions.get(call.names[place].argument)
            shape, in_batch = shape_of(x), position in batches
            if not is_array(x) or is_state(call.names[place]):
                continue
            if (_is_typed_key(x) and not (in_batch and shape)) or (
                _may_be_raw_key(x) and len(shape) == 1
            ):
                keys.append(place)
            else:
                (rows if in_batch else shared).append(place)
        # The numbers of parts, and of shards of each
        numbers, shards = [options.steps], self.shards
        if shards is not None:
            axes = axis_names(options.axis_name)
            numbers.append(math.prod(shards.mesh.shape[name] for name in axes))
        count = math.prod(numbers)
        size = self._check_rows(rows, count)
        if count > 1:
            self._check_others([*keys, *shared], params, size)

        def split(x: Array | np.ndarray) -> Array:
            shape = shape_of(x)
            x = jnp.reshape(x, (shape[0] // options.steps, options.steps, *shape[1:]))
            x = jnp.swapaxes(x, 0, 1)
            return jnp.reshape(x, (*numbers, shape[0] // count, *shape[1:]))

        # The rows of each part, [steps, …] or [steps, shards, …], and its number.
        index = jnp.reshape(jnp.arange(count), numbers)
        self.parts = {place: split(call.leaves[place]) for place in rows}, index
        self._keys = keys if count > 1 else []

    def _check_rows(self, places: list[int], count: int) -> int:
        """Returns how many rows the batch has, which can be split into so many parts."""
        steps = self.options.steps
        if not places:
            listed = ", ".join(map(str, self.options.batches)) or "none"
            raise ValueError(
                f"The batch (argument {listed}) holds no array that could be split. Set "
                "`batch_argnums` to the arguments of the function that are batches."
            )
        first, size = places[0], shape_of(self.call.leaves[places[0]])[:1]
        for place in places:
            name, shape = self.call.names[place], shape_of(self.call.leaves[place])
            if not shape or shape[0] % count:
                each = f" for each of {count // steps} shards" * (count > steps)
                raise ValueError(
                    f"The batch (`{name}`) has shape {shape}, whose leading axis cannot be "
                    f"split into {steps} equal parts{each}. Choose a batch size that is a "
                    f"multiple of {count}, and pass what has no rows as another argument."
                )
            if shape[:1] != size and count > 1:
                raise ValueError(
                    f"The batch has {size[0]} rows in one array "
                    f"(`{self.call.names[first]}`) and {shape[0]} in another (`{name}`), "
                    "so that microbatches of different sizes would meet. Give all arrays "
                    "of the batch one leading size, and pass others as further arguments."
                )
        return size[0]

    def _check_others(self, places: list[int], params: set[int], size: int) -> None:
        """Raises a `ValueError` if what each part gets whole looks like rows, or keys."""
        for place in places:
            name, x = self.call.names[place], self.call.leaves[place]
            shape, position = shape_of(x), self._positions.get(name.argument)
            is_param, is_key = position in params, _may_be_raw_key(x)
            if is_key and (is_param or len(shape) > 1 or shape == (size,)):
                raise ValueError(
                    f"`{name}` is a uint32 array of shape {shape}, which may hold raw PRNG "
                    "keys. Pass typed keys, by `jax.random.key` or `wrap_key_data`, of which "
                    "each microbatch gets its own; and other numbers as int32."
                )
            if not is_key and not is_param and shape[:1] == (size,):
                remedy = "Pass it by position, and add that to `batch_argnums`"
                if position is not None:
                    split = tuple(sorted({*self.options.batches, position}))
                    remedy = f"Split it, too, with `batch_argnums={split}`"
                raise ValueError(
                    f"`{name}` has {size} rows, as the batch has, but it is not split: each "
                    f"microbatch would get all of them. {remedy}. If it is no part of the "
                    "batch, let the function close over it."
                )

    def run(self, scaling: LossScaling) -> Evaluation:
        """Evaluates all parts under one scale."""
        shards, count = self.shards, self.parts[1].size

        def part(state: State, rows: PyTree, index: Int[Array, "..."]) -> Evaluation:
            def one(rows: dict[int, Array], index: Int[Array, ""]) -> Evaluation:
                keys = {i: _fold_in(self.call.leaves[i], index) for i in self._keys}
                result = self.evaluate(state, scaling, rows | keys)
                # f32 before the sum: 16-bit sums stand still when they have grown large.
                return result._replace(grads=NoLossScaling().unscale(result.grads))

            if shards is None:
                return one(rows, index)
            with over_shards():  # each on its own devices; results are stacked
                result = jax.vmap(
                    one, spmd_axis_name=axis_names(self.options.axis_name)
                )(rows, index)
            return result._replace(grads=_pin_shards(result.grads, shards))

        def body(total: Evaluation, xs: tuple[PyTree, Array]) -> tuple[PyTree, PyTree]:
            new = part(total.state, *xs)
            grads = jax.tree.map(jnp.add, total.grads, new.grads)
            total = Evaluation(
                state=new.state,
                value=total.value + new.value,
                grads=_pin_shards(grads, shards),
                intact=total.intact & new.intact,
                # All parts are scaled alike, by what the window before has seen.
                observed=jax.tree.map(jnp.maximum, total.observed, new.observed),
            )
            return total, new.aux

        first = jax.tree.map(lambda x: x[0], self.parts)
        like = jax.eval_shape(part, self.call.state, *first)
        if shards is not None and jax.tree.leaves(like.state):
            raise ValueError(
                "With an axis of the mesh as `axis_name` each shard of the batch is "
                "computed by itself, and the state that the function changes (statistics "
                "of BatchNorm, counters of dropout) would differ between them. Leave "
                "`axis_name` out: the gradients are then reduced in every part."
            )
        before = self.call.comparable(self.call.state, like.state)
        # A loop carry has one type: shared between devices or not, from the start.
        zeros = lambda x: varying_like(jnp.zeros(x.shape, x.dtype), x)  # noqa: E731
        total = jax.tree.map(zeros, like._replace(state={}, aux=None))
        total = total._replace(
            state=jax.tree.map(varying_like, before, like.state),
            intact=~total.intact,
            grads=_pin_shards(total.grads, shards),
        )
        result, aux = lax.scan(body, total, self.parts)
        result = result._replace(aux=aux)
        if shards is not None:
            summed = functools.partial(_sum_of_shards, dtype=self.wire_dtype())
            result = result._replace(
                value=jnp.sum(result.value, axis=0),
                grads=jax.tree.map(summed, result.grads, self.call.diff),
                intact=jnp.all(result.intact, axis=0),
                observed=_largest_of_shards(result.observed),
            )
        if not self.options.mean:
            return result
        grads = jax.tree.map(lambda g: g / count, result.grads)
        return result._replace(value=result.value / count, grads=grads)


# --- Keys -----------------------------------------------------------------------------


def _is_typed_key(x: object) -> bool:
    return jnp.issubdtype(dtype_of(x), jax.dtypes.prng_key)


def _may_be_raw_key(x: object) -> bool:
    data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    return dtype_of(x) == np.uint32 and shape_of(x)[-1:] == data.shape


def _fold_in(key: Array | np.ndarray, index: int | Array) -> Array:
    fold = lambda key: jax.random.fold_in(key, index)  # noqa: E731
    signature = None if _is_typed_key(key) else "(k)->(k)"
    return jnp.vectorize(fold, signature=signature)(key)


# --- Gradients of the shards, stacked along a first axis that is sharded as the batch -
# XLA makes a sum over it one all-reduce, or a reduce-scatter where the parameter is sharded.


def _sum_of_shards(x: Array, like: PyTree, dtype: Reduce) -> Array:
    """Returns the sum over the first axis, sharded like another array of its shape."""
    narrow = np.dtype(dtype or x.dtype)
    is_cast = is_floating(x) and narrow.itemsize < x.dtype.itemsize
    low = x.astype(narrow) if is_cast else x
    # `jnp.sum` would widen first, and XLA sends what it sums.
    total = lax.reduce(low, np.zeros((), low.dtype), lax.add, (0,)).astype(x.dtype)
    # Shardings spread through operations on elements. No number is above infinity.
    return lax.select(like > jnp.inf, jnp.zeros_like(total), total)


def _pin_shards(tree: PyTree, shards: NamedSharding | None) -> PyTree:
    """Returns stacked arrays with the first axis sharded, and the others as they are."""
    if shards is None:
        return tree

    def pin(x: Array) -> Array:
        rest = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
        sharding = NamedSharding(shards.mesh, PartitionSpec(*shards.spec, *rest))
        return lax.with_sharding_constraint(x, sharding)

    return jax.tree.map(pin, tree)


def _largest_of_shards(tree: PyTree) -> PyTree:
    """Returns the maxima over the first axis of all arrays, by one reduction."""
    if not jax.tree.leaves(tree):
        return tree
    flat = jax.vmap(lambda x: ravel_pytree(x)[0])(tree)
    unravel = ravel_pytree(jax.tree.map(lambda x: x[0], tree))[1]
    return unravel(jnp.max(flat, axis=0))
