"""Gradients of a large batch from several small ones."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from mpx._casting._policy import Policy
from mpx._casting._reduction import COMPUTE, F32, Reduce, Shards, over_shards, shards_of
from mpx._gradients._evaluate import Evaluation
from mpx._gradients._grad import Step, transformed
from mpx._gradients._grad_options import GradOptions, refuse_positional
from mpx._gradients._microbatches import split_arguments
from mpx._gradients._state import State
from mpx._jax._arguments import as_count, as_counts, check_bool
from mpx._jax._compat import varying_like, zeros_of
from mpx._jax._tree import AxisName, is_floating
from mpx._scaling._loss_scaling import LossScaling, NoLossScaling
from mpx._wire._feedback import with_feedback
from mpx._wire._sums import (
    largest_of_shards,
    pin_shards,
    sharded_alike,
    sum_and_rest_of_shards,
    sum_of_shards,
)


def accumulate(
    func: Callable[..., Any] | None = None,
    steps: int = 1,
    *misplaced: Any,
    batch_argnums: int | Sequence[int] = 1,
    mean: bool = True,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    policy: Policy | str | None = None,
    grad_dtype: DTypeLike | None = None,
    axis_name: AxisName | None = None,
    retry: int = 0,
) -> Callable[..., Any]:
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
            gradient until then, and `aux` has a further axis, behind that of the parts,
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
    options = GradOptions(
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
        func: Callable[..., Any],
        options: GradOptions,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        batches: tuple[int, ...],
        steps: int,
        mean: bool,
    ) -> None:
        self._batches, self.steps, self.mean = batches, steps, mean
        super().__init__(func, options, args, kwargs)

    def check(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Splits the batches.

        Raises:
            TypeError: If a batch was not passed by position.
            ValueError: If a batch is differentiated or cannot be split, or if another
                argument would have to be.
        """
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
        self.parts = split_arguments(
            func,
            args,
            kwargs,
            batches=self._batches,
            params=params,
            steps=self.steps,
            shards=1 if self.shards is None else self.shards.size,
        )

    def run(self, scaling: LossScaling) -> Evaluation:
        """Evaluates all parts under one scale."""
        self._check_state(self.call.state)
        parts = self.parts

        def part(state: State, rows: PyTree, index: Any) -> tuple[State, Evaluation]:
            def one(rows: PyTree, index: Any) -> Evaluation:
                call = self.call_with(*parts.arguments(rows, index))
                result = self.evaluate(call, state, scaling)
                # f32 before the sum: 16-bit sums stand still when they have grown large.
                return result._replace(grads=NoLossScaling().unscale(result.grads))

            if self.shards is None:
                result = one(rows, index)
            else:
                result = _over_shards(self.shards, one, rows, index)
            return result.state, result

        def body(carry: Any, xs: tuple[PyTree, Any]) -> tuple[Any, PyTree]:
            state, value, grads, spoilt, observed = carry
            state, result = part(state, *xs)
            total = jax.tree.map(jnp.add, grads, result.grads)
            if self.shards is not None:
                total = pin_shards(total, self.shards)
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
        if self.shards is not None:
            sums = (sums[0], pin_shards(sums[1], self.shards), *sums[2:])
        carry = (jax.tree.map(varying_like, before, after), *sums)
        (state, value, grads, spoilt, observed), aux = lax.scan(body, carry, xs)
        result, count = (
            Evaluation(value, aux, grads, state, spoilt, observed),
            self.steps,
        )
        if self.shards is not None:
            result = self._sum_of_shards(self.shards, result, scaling)
            count *= self.shards.size
        if not self.mean:
            return result
        grads = jax.tree.map(lambda g: g / count, result.grads)
        return result._replace(value=result.value / count, grads=grads)

    def _sum_of_shards(
        self, shards: Shards, result: Evaluation, scaling: LossScaling
    ) -> Evaluation:
        """Sums what the shards have stacked; gradients are sent in the `reduce_dtype`."""
        policy = self.options.policy
        dtype = F32 if policy.reduce_dtype is None else policy.reduce_dtype
        if dtype == COMPUTE:
            dtype = policy.resolved_compute_dtype()
        # Residuals are those of the gradient of a window, whose parts are summed here.
        parts = self.steps if self.mean else 1

        def split(grad: Array, residual: Array) -> tuple[Array, Array]:
            total, rest = sum_and_rest_of_shards(grad + residual * parts, shards)
            return total, rest / parts

        def total(grad: Array) -> Array:
            return sum_of_shards(grad, shards, dtype)

        grads, feedback = result.grads, self.feedback
        if feedback is None:
            grads = jax.tree.map(total, grads)
        else:
            floats, others = eqx.partition(grads, is_floating)
            floats, feedback = with_feedback(
                floats, feedback, scaling, split, stacked=True
            )
            feedback = pin_shards(feedback, shards)
            grads = eqx.combine(floats, jax.tree.map(total, others))
        return result._replace(
            value=jnp.sum(result.value, axis=0),
            grads=jax.tree.map(sharded_alike, grads, self.call.diff),
            spoilt=jnp.any(result.spoilt, axis=0),
            observed=largest_of_shards(result.observed),
            feedback=feedback,
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


# --- shards of a batch under automatic sharding ---------------------------------------


def _over_shards(
    shards: Shards, one: Callable[..., Evaluation], rows: PyTree, index: Any
) -> Evaluation:
    """Evaluates the shards of a part, each on its devices; results are stacked."""
    with over_shards():
        result = jax.vmap(one, spmd_axis_name=shards.axes)(rows, index)
    return result._replace(grads=pin_shards(result.grads, shards))
