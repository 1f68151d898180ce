"""Gradients of a large batch from several small ones."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from mpx._arguments import as_count, as_counts
from mpx._compat import varying_like, zeros_of
from mpx._evaluate import Evaluation
from mpx._grad import GradOptions, Step, transformed
from mpx._loss_scaling import LossScaling, NoLossScaling
from mpx._policy import Policy
from mpx._state import State
from mpx._tree import AxisName, is_array, is_floating, map_with_name, shape_of
from mpx._wire._feedback import with_feedback
from mpx._wire._options import COMPUTE, F32, Reduce, Shards, over_shards, shards_of
from mpx._wire._sums import (
    largest_of_shards,
    pin_shards,
    sharded_alike,
    sum_and_rest_of_shards,
    sum_of_shards,
)
from mpx._wrapped import giving_codes


def accumulate(
    func: Callable[..., Any] | None = None,
    steps: int = 1,
    *,
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
    whether it is finite and one adjustment of the scale. State (`eqx.nn.State`, NNX
    BatchNorm statistics and dropout counters) is handed on from part to part.

    Args:
        func: The loss function. Leave it out to use `accumulate` as a decorator.
        steps: Into how many parts the batch is split.
        batch_argnums: The arguments that are batches: every array in them has a leading
            axis that `steps` divides. Part `i` takes the rows `i, i + steps, …`, so that
            a batch sharded along that axis stays where it is.
        mean: Whether the loss is a mean over the batch, so that parts are averaged; if
            false they are added up.
        argnums: Which positional arguments to differentiate.
        has_aux: Whether `func` returns a pair `(loss, aux)`. The arrays in `aux` come
            back stacked along a new leading axis of length `steps`; an `eqx.nn.State`
            comes back as the last part left it.
        policy: As in `value_and_grad`, and so is the next option.
        grad_dtype: The dtype of the gradients; f32 by default.
        axis_name: An axis, or several, over which to average, once, after the last part:
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
        ValueError: If `steps` is below 1 or does not divide a leading axis; the leaf is
            named. If `axis_name` names no axis, or the function has state that the shards
            would change.

    Examples:
        >>> from mpx import NoLossScaling
        >>> loss = lambda w, x: jnp.mean(x * w)
        >>> step = jax.jit(accumulate(loss, steps=4, policy="c=bf16"))
        >>> step(NoLossScaling(), jnp.float32(1.0), jnp.arange(8.0)).grads
        Array(3.5, dtype=float32)
    """
    steps = as_count(steps, "steps", at_least=1)
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
    return transformed(
        func,
        functools.partial(
            _Window, options=options, batches=batches, steps=steps, mean=mean
        ),
    )


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

    def check(self, args: Sequence[Any]) -> None:
        """Splits the batches.

        Raises:
            TypeError: If a batch was not passed by position.
            ValueError: If a batch is differentiated, or cannot be split.
        """
        batches = self._batches
        for argnum in batches:
            if argnum >= len(args):
                raise TypeError(
                    f"Argument {argnum} is the batch, but only {len(args)} arguments "
                    "were passed by position. Pass the batch by position."
                )
        counted = (i + len(args) if i < 0 else i for i in self.options.argnum_tuple())
        _check_disjoint(batches, tuple(counted))
        self.shards = shards_of(self.axis_name, args)
        count = 1
        if self.shards is not None:
            self.axis_name = None  # nothing is mapped over it
            count = self.shards.size
        self.parts = {
            i: _split(args[i], self.steps, count, f"argument {i}") for i in batches
        }
        if not any(jax.tree.leaves(arrays) for arrays, _ in self.parts.values()):
            raise ValueError(
                f"The batch (argument {', '.join(map(str, batches)) or 'none'}) holds no "
                "array that could be split. Set `batch_argnums` to the arguments of the "
                "function that are batches."
            )

    def run(self, scaling: LossScaling) -> Evaluation:
        """Evaluates all parts under one scale."""
        if self.shards is not None:
            self._check_state()
        parts, codes = self.parts, self._weight_codes()

        def part(state: State, arrays: dict[int, PyTree]) -> tuple[State, Evaluation]:
            def one(arrays: dict[int, PyTree]) -> Evaluation:
                full = {
                    i: eqx.combine(arrays[i], rest) for i, (_, rest) in parts.items()
                }
                with giving_codes(codes):
                    result = self.evaluate(self.call_with(full), state, scaling)
                # f32 before the sum: 16-bit sums stand still when they have grown large.
                return result._replace(grads=NoLossScaling().unscale(result.grads))

            if self.shards is None:
                result = one(arrays)
            else:
                result = _over_shards(self.shards, one, arrays)
            return result.state, result

        def body(carry: Any, arrays: dict[int, PyTree]) -> tuple[Any, PyTree]:
            state, value, grads, spoilt, observed = carry
            state, result = part(state, arrays)
            total = jax.tree.map(jnp.add, grads, result.grads)
            if self.shards is not None:
                total = pin_shards(total, self.shards)
            # All parts are scaled alike, by what the window before has seen.
            largest = jax.tree.map(jnp.maximum, observed, result.observed)
            spoilt |= result.spoilt
            return (state, value + result.value, total, spoilt, largest), result.aux

        arrays = {i: arrays for i, (arrays, _) in parts.items()}
        first = jax.tree.map(lambda x: x[0], arrays)
        state, result = jax.eval_shape(part, self.call.state, first)
        # A loop carry has one type: shared between devices or not, from the start.
        summed = (result.value, result.grads, result.spoilt, result.observed)
        sums = jax.tree.map(zeros_of, summed)
        if self.shards is not None:
            sums = (sums[0], pin_shards(sums[1], self.shards), *sums[2:])
        carry = (jax.tree.map(varying_like, self.call.state, state), *sums)
        (state, value, grads, spoilt, observed), aux = lax.scan(body, carry, arrays)
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

    def _weight_codes(self) -> Any:
        """Returns the weights of a function under `fp8` in 8 bits, made once."""
        shards = 0 if self.shards is None else 1

        def first(x: Array) -> Array:
            return x[(0,) * (1 + shards)]

        full = {
            i: eqx.combine(jax.tree.map(first, arrays), rest)
            for i, (arrays, rest) in self.parts.items()
        }
        return self.call_with(full).weight_codes()

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

    def _check_state(self) -> None:
        """Raises a `ValueError` if the shards would each change the state in their way."""
        if jax.tree.leaves(self.call.state) or self.call.linen_statistics():
            raise ValueError(
                "With an axis of the mesh as `axis_name` each shard of the batch is "
                "computed by itself, and the state that the function changes (statistics "
                "of BatchNorm, counters of dropout) would differ between them. Leave "
                "`axis_name` out: the gradients are then reduced in every part."
            )


# --- shards of a batch under automatic sharding ---------------------------------------


def _over_shards(
    shards: Shards, one: Callable[..., Evaluation], arrays: dict[int, PyTree]
) -> Evaluation:
    """Evaluates the shards of a part, each on its devices; results are stacked."""
    with over_shards():
        result = jax.vmap(one, spmd_axis_name=shards.axes)(arrays)
    return result._replace(grads=pin_shards(result.grads, shards))


def _split(batch: PyTree, steps: int, shards: int, what: str) -> tuple[PyTree, PyTree]:
    """Splits the arrays of a batch along a new leading axis; other leaves are static.

    With several shards a second one is for these.
    """

    def split(name: str, leaf: Any) -> Array:
        shape = shape_of(leaf)
        if not shape or shape[0] % (steps * shards):
            where = f"{what}, leaf `{name}`" if name else what
            parts = f"{steps} equal parts"
            if shards > 1:
                parts += f" for each of {shards} shards"
            raise ValueError(
                f"The batch ({where}) has shape {shape}, whose leading axis cannot be "
                f"split into {parts}. Choose a batch size that is a "
                f"multiple of {'`steps`' if shards == 1 else steps * shards}."
            )
        rows = jnp.reshape(leaf, (shape[0] // steps, steps, *shape[1:]))
        rows = jnp.swapaxes(rows, 0, 1)
        if shards == 1:
            return rows
        return jnp.reshape(rows, (steps, shards, -1, *shape[1:]))

    arrays, static = eqx.partition(batch, is_array)
    return map_with_name(split, arrays), static
