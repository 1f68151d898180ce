"""Gradients of a large batch from several small ones."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, Unpack, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Int, PyTree

from mpx._casting._cast import is_state_node
from mpx._casting._context import (
    Reduce,
    Shards,
    argument_names,
    original,
    over_shards,
    shards_of,
)
from mpx._casting._keep import is_statistic
from mpx._casting._policy import Policy
from mpx._gradients._call import State
from mpx._gradients._grad import Params, transformed
from mpx._gradients._options import (
    GradKeywords,
    GradOptions,
    WindowKeywords,
    grad_options,
    refuse_positional,
)
from mpx._gradients._step import Evaluation, GradResult, Scaling, Step
from mpx._jax._arguments import as_count, as_counts, check_bool
from mpx._jax._compat import varying_like, zeros_of
from mpx._jax._tree import (
    AxisName,
    LeafName,
    dtype_of,
    flatten_with_names,
    is_array,
    shape_of,
)
from mpx._scaling._loss_scaling import LossScaling, NoLossScaling
from mpx._wire._sums import (
    largest_of_shards,
    pin_shards,
    sharded_alike,
    sum_of_shards,
)

P = ParamSpec("P")


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
) -> Callable[Concatenate[Scaling, P], GradResult[Any, Scaling]]: ...
@overload
def accumulate(
    func: None = None, steps: int = 1, **options: Unpack[WindowKeywords]
) -> Callable[
    [Callable[P, object]],
    Callable[Concatenate[Scaling, P], GradResult[Any, Scaling]],
]: ...
def accumulate(
    func: Callable[..., PyTree] | None = None,
    steps: int = 1,
    *misplaced: object,
    batch_argnums: int | Sequence[int] = 1,
    mean: bool = True,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    policy: Policy | str | None = None,
    grad_dtype: DTypeLike | None = None,
    axis_name: AxisName | None = None,
    retry: int = 0,
) -> Callable[..., PyTree]:
    """Like `value_and_grad`, with the batch worked off in several smaller parts.

    The result is that of the large batch, at the memory of a small one: gradients are
    summed in f32, one scale is used for the whole window, and there is one decision
    whether it is finite and one adjustment of the scale. State (`eqx.nn.State`,
    `batch_stats` of Linen, NNX BatchNorm statistics and dropout counters) is handed on
    from part to part. Part `i` gets `jax.random.fold_in(key, i)` for each PRNG key among
    the arguments, so that dropout masks differ.

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
        argnums: Which positional arguments to differentiate.
        has_aux: Whether `func` returns a pair `(loss, aux)`. The arrays in `aux` come
            back stacked along a new leading axis of length `steps`; an `eqx.nn.State`
            and `batch_stats` come back as the last part left them.
        policy: As in `value_and_grad`, and so is the next option.
        grad_dtype: The dtype of the gradients; f32 by default.
        axis_name: An axis, or several, over which to reduce, once, after the last part:
            a mapped axis inside `shard_map`, or the axis of the mesh over which the batch
            is sharded. In that case each shard of the batch is computed by itself, its
            gradients are summed in f32 on its own devices, and sent once in the
            `reduce_dtype` of the policy, however the parameters are sharded; without it
            XLA reduces the gradients of every part. Every device holds the whole f32
            gradient until then, and `aux` has a further axis, after that of the parts,
            with one entry for each shard. It needs automatic axes, and a function without
            state.
        retry: How often to try the window again with the adjusted scale on overflow.

    Raises:
        ValueError: If `steps` is below 1 or does not divide a leading axis, or if another
            argument has the leading size of the batch; the leaf is named. If `axis_name`
            names no axis, or the function has state that the shards would change.

    Examples:
        >>> from mpx import NoLossScaling
        >>> loss = lambda w, x: jnp.mean(x * w)
        >>> step = jax.jit(accumulate(loss, steps=4, policy="c=bf16"))
        >>> step(NoLossScaling(), jnp.float32(1.0), jnp.arange(8.0)).grads
        Array(3.5, dtype=float32)
    """
    refuse_positional(misplaced, "accumulate")
    steps = as_count(steps, "steps", at_least=1)
    check_bool(mean, "`mean`")
    options = grad_options(
        argnums=argnums,
        has_aux=has_aux,
        policy=policy,
        grad_dtype=grad_dtype,
        axis_name=axis_name,
        retry=retry,
    )
    batches = as_counts(batch_argnums, "batch_argnums")
    batches = (batches,) if isinstance(batches, int) else batches
    if min(batches, default=0) < 0:
        raise ValueError(
            f"`batch_argnums` must be 0 or more, but {batch_argnums} was given. Count "
            "from the first argument of `func`."
        )
    _check_disjoint(batches, options.argnum_tuple())
    make_step = functools.partial(_Window, batches=batches, steps=steps, mean=mean)
    return transformed(func, options, make_step)


def _check_disjoint(batches: tuple[int, ...], argnums: tuple[int, ...]) -> None:
    if set(batches) & set(argnums):
        raise ValueError(
            f"Argument {batches} is both a batch and differentiated. Set `argnums` and "
            "`batch_argnums` to different arguments."
        )


class _Window(Step):
    """One accumulation window: a call for each part, summed."""

    def __init__(
        self,
        func: Callable[..., PyTree],
        options: GradOptions,
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
        *,
        batches: tuple[int, ...],
        steps: int,
        mean: bool,
    ) -> None:
        self._batches, self._steps, self.mean = batches, steps, mean
        super().__init__(func, options, args, kwargs)

    def prepare(self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> None:
        """Splits the batches into microbatches, and each microbatch into shards."""
        for argnum in self._batches:
            if argnum >= len(args):
                raise TypeError(
                    f"Argument {argnum} is the batch, but only {len(args)} arguments "
                    "were passed by position. Pass the batch by position."
                )
        argnums = self.options.argnum_tuple()
        params = tuple(i + len(args) if i < 0 else i for i in argnums)
        _check_disjoint(self._batches, params)
        self.shards = shards_of(self.axis_name, args)
        if self.shards is not None:
            self.axis_name = None  # nothing is mapped over it
        self.parts = _split_arguments(
            argument_names(original(self.func), len(args)),
            args,
            kwargs,
            batches=self._batches,
            params=params,
            steps=self._steps,
            shards=1 if self.shards is None else self.shards.size,
        )

    def run(self, scaling: LossScaling) -> Evaluation:
        """Evaluates all parts under one scale."""
        self._check_state(self.call.state)
        parts, shards = self.parts, self.shards

        def part(
            state: State, rows: PyTree, index: Int[Array, "..."]
        ) -> tuple[State, Evaluation]:
            def one(rows: PyTree, index: Int[Array, ""]) -> Evaluation:
                call = self.call_with(*parts.arguments(rows, index))
                result = self.evaluate(call, state, scaling)
                # f32 before the sum: 16-bit sums stand still when they have grown large.
                return result._replace(grads=NoLossScaling().unscale(result.grads))

            result = (one if shards is None else _over_shards(one, shards))(rows, index)
            return result.state, result

        def body(carry: PyTree, xs: tuple[PyTree, Array]) -> tuple[PyTree, PyTree]:
            state, value, grads, spoilt, observed = carry
            state, result = part(state, *xs)
            total = jax.tree.map(jnp.add, grads, result.grads)
            if shards is not None:
                total = pin_shards(total, shards)
            # All parts are scaled alike, by what the window before has seen.
            largest = jax.tree.map(jnp.maximum, observed, result.observed)
            spoilt |= result.spoilt
            return (state, value + result.value, total, spoilt, largest), result.aux

        xs = (parts.rows, parts.numbers)
        first = jax.tree.map(lambda x: x[0], xs)
        after, result = jax.eval_shape(part, self.call.state, *first)
        self._check_state(after)
        before = self.call.comparable(self.call.state, after)
        # A loop carry has one type: shared between devices or not, from the start.
        summed = (result.value, result.grads, result.spoilt, result.observed)
        sums = jax.tree.map(zeros_of, summed)
        if shards is not None:
            sums = (sums[0], pin_shards(sums[1], shards), *sums[2:])
        carry = (jax.tree.map(varying_like, before, after), *sums)
        (state, value, grads, spoilt, observed), aux = lax.scan(body, carry, xs)
        result = Evaluation(value, aux, grads, state, spoilt, observed)
        count = self._steps
        if shards is not None:
            result = self._sum_of_shards(result)
            count *= shards.size
        if not self.mean:
            return result
        grads = jax.tree.map(lambda g: g / count, result.grads)
        return result._replace(value=result.value / count, grads=grads)

    def _sum_of_shards(self, result: Evaluation) -> Evaluation:
        """Sums what the shards have stacked; gradients are sent in the `reduce_dtype`."""
        dtype = self.wire_dtype()
        grads = jax.tree.map(lambda x: sum_of_shards(x, dtype), result.grads)
        return result._replace(
            value=jnp.sum(result.value, axis=0),
            grads=jax.tree.map(sharded_alike, grads, self.call.diff),
            spoilt=jnp.any(result.spoilt, axis=0),
            observed=largest_of_shards(result.observed),
        )

    def matmul_reduce(self) -> Reduce:
        """Returns the dtype in which weight gradients leave their matmuls."""
        return None if self.shards is not None else super().matmul_reduce()

    def _check_state(self, state: State) -> None:
        """Raises a `ValueError` if the shards would each change the state in their way."""
        if self.shards is not None and jax.tree.leaves(state):
            raise ValueError(
                "With an axis of the mesh as `axis_name` each shard of the batch is "
                "computed by itself, and the state that the function changes (statistics "
                "of BatchNorm, counters of dropout) would differ between them. Leave "
                "`axis_name` out: the gradients are then reduced in every part."
            )


def _over_shards(
    one: Callable[[PyTree, Array], Evaluation], shards: Shards
) -> Callable[[PyTree, Array], Evaluation]:
    """Maps over the shards of a part, each on its own devices; results are stacked."""

    def mapped(rows: PyTree, index: Array) -> Evaluation:
        with over_shards():
            result = jax.vmap(one, spmd_axis_name=shards.axes)(rows, index)
        return result._replace(grads=pin_shards(result.grads, shards))

    return mapped


# --- Arguments: rows that are split, keys that are folded, and the rest ---------------


class _Parts(NamedTuple):
    """The arguments of a call, split.

    Attributes:
        rows: The arrays that are split, [steps, …] or [steps, shards, …].
        keys: The PRNG keys.
        rest: What is the same for each part.
        numbers: The number of each part, i32[steps] or i32[steps, shards].
    """

    rows: PyTree
    keys: PyTree
    rest: PyTree
    numbers: Int[Array, "..."]

    def arguments(
        self, rows: PyTree, index: int | Array
    ) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
        """Returns the positional and the keyword arguments of one part."""
        keys = self.keys
        if self.numbers.size > 1:
            keys = jax.tree.map(lambda key: _fold_in(key, index), keys)
        return eqx.combine(rows, keys, self.rest, is_leaf=is_state_node)


class _Leaf(NamedTuple):
    """A leaf of the arguments; `position` is `None` for a keyword argument."""

    name: LeafName
    position: int | None
    value: PyTree
    kind: Literal["row", "key", "shared", "state"]

    @property
    def place(self) -> str:
        """How messages call it."""
        path = f", leaf `{self.name.path}`" if self.name.path else ""
        return f"argument {self.position}{path}"


def _kind(
    name: LeafName, value: PyTree, in_batch: bool
) -> Literal["row", "key", "shared", "state"]:
    """Returns what happens to a leaf; state is handed on as it is."""
    shape = shape_of(value)
    if not is_array(value) or is_statistic(name):
        return "state"
    is_typed_key = _is_typed_key(value) and not (in_batch and shape)
    if is_typed_key or (_may_be_raw_key(value) and len(shape) == 1):
        return "key"
    return "row" if in_batch else "shared"


def _split_arguments(
    names: Sequence[str],
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    *,
    batches: tuple[int, ...],
    params: tuple[int, ...],
    steps: int,
    shards: int,
) -> _Parts:
    """Splits the batches of a call into microbatches, and each of them into shards."""
    arguments = (tuple(args), dict(kwargs))
    structure = jax.tree.structure(arguments, is_leaf=is_state_node)
    # Keywords in the order in which JAX flattens a dictionary.
    trees: list[tuple[str, int | None, PyTree]] = [
        *zip(names, range(len(args)), args, strict=True),
        *((name, None, kwargs[name]) for name in sorted(kwargs)),
    ]
    leaves = [
        _Leaf(leaf_name, position, leaf, _kind(leaf_name, leaf, position in batches))
        for name, position, tree in trees
        for leaf_name, leaf in flatten_with_names(tree, name, is_state_node)[0]
    ]
    rows = [leaf for leaf in leaves if leaf.kind == "row"]
    for leaf in rows:
        _check_rows(leaf, rows[0], steps, shards)
    if not rows:
        listed = ", ".join(map(str, batches)) or "none"
        raise ValueError(
            f"The batch (argument {listed}) holds no array that could be split. Set "
            "`batch_argnums` to the arguments of the function that are batches."
        )
    for leaf in leaves if steps * shards > 1 else ():
        if leaf.kind in ("key", "shared"):
            _check_shared(leaf, shape_of(rows[0].value)[0], batches, params)

    def of(*kinds: str) -> PyTree:
        return structure.unflatten(
            [x.value if x.kind in kinds else None for x in leaves]
        )

    def split(x: Array | np.ndarray) -> Array:
        shape = shape_of(x)
        x = jnp.reshape(x, (shape[0] // steps, steps, *shape[1:]))
        x = jnp.swapaxes(x, 0, 1)
        return x if shards == 1 else jnp.reshape(x, (steps, shards, -1, *shape[1:]))

    index = jnp.arange(steps * shards)
    index = index if shards == 1 else jnp.reshape(index, (steps, shards))
    parts = jax.tree.map(split, of("row"))
    return _Parts(parts, of("key"), of("shared", "state"), index)


def _is_typed_key(x: object) -> bool:
    return jnp.issubdtype(dtype_of(x), jax.dtypes.prng_key)


def _may_be_raw_key(x: object) -> bool:
    data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    return dtype_of(x) == np.uint32 and shape_of(x)[-1:] == data.shape


def _fold_in(key: Array | np.ndarray, index: int | Array) -> Array:
    def fold(key: Array | np.ndarray) -> Array:
        return jax.random.fold_in(key, index)

    for _ in range(key.ndim if _is_typed_key(key) else 0):
        fold = jax.vmap(fold)
    return fold(key)


def _check_rows(leaf: _Leaf, first: _Leaf, steps: int, shards: int) -> None:
    shape, parts = shape_of(leaf.value), f"{steps} equal parts"
    if shards > 1:
        parts += f" for each of {shards} shards"
    if not shape or shape[0] % (steps * shards):
        raise ValueError(
            f"The batch ({leaf.place}) has shape {shape}, whose leading axis cannot be "
            f"split into {parts}. Choose a batch size that is a multiple of "
            f"{'`steps`' if shards == 1 else steps * shards}, and pass what has no rows "
            "as another argument."
        )
    size = shape_of(first.value)[0]
    if shape[0] != size and steps * shards > 1:
        raise ValueError(
            f"The batch has {size} rows in one array ({first.place}) and {shape[0]} in "
            f"another ({leaf.place}), so that microbatches of different sizes would "
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
