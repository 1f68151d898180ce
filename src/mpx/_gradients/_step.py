"""One step of a gradient function: cast, scale, differentiate, reduce, unscale, check."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, PyTree

from mpx._casting._cast import cast_like, cast_tree
from mpx._casting._context import (
    COMPUTE,
    gradient_function,
    reducing_in,
    shards_of,
)
from mpx._casting._keep import is_statistic
from mpx._gradients._call import Call, GradOptions, InState, State
from mpx._jax._compat import as_varying, unpacking_targets, varying_axes
from mpx._jax._formats import at_least_f32
from mpx._jax._tree import (
    AxisName,
    all_devices,
    all_finite,
    axis_names,
    cast_leaf,
    is_floating,
    named_leaves,
    select_tree,
)
from mpx._scaling._loss_scaling import LossScaling, NoLossScaling
from mpx._scaling._update import stays_finite

Grads = TypeVar("Grads")
Scaling = TypeVar("Scaling", bound=LossScaling)


class _Fields(NamedTuple):
    value: Array
    aux: PyTree
    grads: PyTree
    scaling: Any
    finite: Bool[Array, ""]
    fp8: PyTree = None


class GradResult(_Fields, Generic[Grads, Scaling]):
    """Result of `value_and_grad` and `accumulate`.

    Attributes:
        value: The loss that the function returned, unscaled and widened to f32. A loss
            returned in bf16 was rounded to 3 significant digits: cast the logits to f32
            in the function, or use `amp`, for one in full precision.
        aux: What the function returned besides, `None` without `has_aux`.
        grads: The unscaled gradients; `None` for leaves without one.
        scaling: The loss scaling for the next step.
        finite: Whether the gradients and the loss are finite, and no state became
            infinite or nan that was finite before, bool[]. If not, skip the update.
        fp8: The `Fp8State` for the next step, for functions under `fp8` with
            `DelayedScaling`; else `None`.

    Examples:
        >>> from mpx import NoLossScaling, value_and_grad
        >>> result = value_and_grad(lambda w: w * w)(NoLossScaling(), jnp.float32(3.0))
        >>> float(result.value), float(result.grads), bool(result.finite)
        (9.0, 6.0, True)
    """

    if TYPE_CHECKING:  # beartype takes no generic `NamedTuple` on Python 3.13
        grads: Grads  # pyright: ignore[reportIncompatibleVariableOverride]
        scaling: Scaling  # pyright: ignore[reportIncompatibleVariableOverride]

    def __iter__(self) -> Iterator[Any]:
        """Yields the fields; raises if they are unpacked into fewer variables."""
        targets = unpacking_targets()
        if targets not in (None, len(self)):
            raise ValueError(
                f"A `GradResult` has {len(self)} fields, but it is unpacked into "
                f"{targets}. Use their names: `result.value`, `result.grads`, "
                "`result.scaling`, `result.finite`, `result.aux`."
            )
        return tuple.__iter__(self)


class Evaluation(NamedTuple):
    """One forward and backward pass: everything in it is an array or a pytree of them."""

    state: State  # the state after the call
    value: Array  # the unscaled loss
    grads: State  # of the scaled loss, by place
    intact: Bool[Array, ""]  # whether no finite state has become infinite or nan
    observed: PyTree = None  # what delayed fp8 scales have seen
    aux: PyTree = None  # the arrays among what the function returned besides


class Step:
    """One call of a gradient function; `call` is that of the user's function."""

    # Kept while JAX traces the arrays: the rest of `aux`, and the places of the NNX
    # parameters that the function changes.
    _static: PyTree = None
    _changed: set[int] | None = None

    def __init__(
        self,
        func: Callable[..., PyTree],
        options: GradOptions,
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
    ) -> None:
        self.options, self.call = options, Call(func, options, args, kwargs)
        # An axis of the mesh over which the batch is sharded, or a mapped one
        self.shards = shards_of(options.axis_name, self.call.leaves)
        self.axis_name = options.axis_name if self.shards is None else None
        self.prepare()
        for place, x in self.call.diff.items() if self.axis_name else ():
            varying = varying_axes(jax.typeof(jnp.asarray(x)))
            if sharded := varying & {*axis_names(self.axis_name)}:
                raise ValueError(
                    f"The parameter `{self.call.names[place]}` differs between the devices of "
                    f"{sorted(sharded)}, so its gradients must not be averaged over "
                    "them. Pass it replicated (`in_specs=P()`), or use jit with a "
                    "NamedSharding, which needs no `axis_name`, for sharded parameters."
                )

    def prepare(self) -> None:
        """Raises a `ValueError` if the axis to average over is one of the mesh."""
        if self.shards is not None:
            raise ValueError(
                f"`axis_name={self.options.axis_name!r}` is an axis of the mesh. Leave it "
                "out: XLA sums the gradients. Or use `mpx.accumulate(func, axis_name=...)`."
            )

    def wire_dtype(self) -> np.dtype | str | None:
        """Returns the dtype in which mpx sums gradients over devices."""
        policy = self.options.policy
        is_compute = policy.reduce_dtype == COMPUTE
        return policy.resolved_compute_dtype() if is_compute else policy.reduce_dtype

    def run(self, scaling: LossScaling) -> Evaluation:
        """Returns loss, gradients of the scaled loss, and state."""
        return self.evaluate(self.call.state, scaling)

    def evaluate(
        self,
        state: State,
        scaling: LossScaling,
        changes: Mapping[int, PyTree] | None = None,
    ) -> Evaluation:
        """Runs the call, with other leaves at some places, forward and backward."""
        call, reduce = self.call, self.options.policy.reduce_dtype
        reduce = reduce if self.shards is None else None  # mpx sums over these

        given = {**state, **(changes or {})}

        def scaled_loss(diff: PyTree, scales: PyTree) -> tuple[Array, PyTree]:
            loss, aux, after = call.run({**given, **diff}, scales)
            aux, self._static = eqx.partition(aux, eqx.is_array)
            return scaling.scale(loss), (loss, aux, {**state, **after})

        from mpx._gradients import _uses  # it reads programs: `import mpx` does not

        diff, scales = call.comparable(state, call.diff), call.scales
        if names := axis_names(self.axis_name):
            # Each device's own: the derivative with respect to a value that the devices of
            # a `shard_map` share would be summed in the compute dtype before mpx sees it.
            local = lambda x: as_varying(jnp.asarray(x), names)  # noqa: E731
            diff, scales = jax.tree.map(local, (diff, scales))
        wide, run = call.widened(diff), scaled_loss
        if call.low is not None:
            from mpx._wire._product import with_masters

            run = functools.partial(
                with_masters,
                scaled_loss,
                choice=reduce,
                is_mapped=self.axis_name is not None,
                look=functools.partial(_uses.warn_of_uses, call),
            )
        # Without a scale, `amp` in f16 inside the function warns.
        has_none = isinstance(scaling, NoLossScaling)
        scope = contextlib.nullcontext() if has_none else gradient_function()
        with scope, reducing_in(reduce):
            total, vjp, (loss, aux, after) = jax.vjp(run, wide, scales, has_aux=True)
            # The gradient of fp8 scales is what they have observed: see `Fp8State`.
            grads, observed = vjp(lax.full_like(total, 1))
        if assigned := after.keys() - call.state.keys():  # parameters
            if self._changed is None:
                self._changed = _uses.changed_params(call, given, wide)
            after = {
                i: x for i, x in after.items() if i not in assigned - self._changed
            }
            after = cast_like(after, call.comparable({}, after))
        # `batch_stats` in a result may replace none among the arguments.
        others = all_finite([x for name, x in named_leaves(aux) if is_statistic(name)])
        intact = others & stays_finite(call.comparable(state, after), after, ())
        return Evaluation(after, loss, grads, intact, observed, aux)

    def commit(self, arrays: PyTree, state: State) -> PyTree:
        """Puts a state into effect, and returns `aux` as the function returned it."""
        self.call.commit(state)
        find = lambda x: state[x.place] if isinstance(x, InState) else x  # noqa: E731
        return jax.tree.map(find, eqx.combine(arrays, self._static))

    def result(self, scaling: LossScaling) -> PyTree:
        """Runs the step, puts the state into effect and returns the public result."""
        first = scaling.loss_scaling
        result, scaling, finite = self._attempt(scaling)
        state, scales, retry = self.call.state, self.call.scales, self.options.retry
        if retry:
            (result, scaling, finite), _ = lax.while_loop(
                lambda carry: ~carry[0][2] & (carry[1] < retry),
                lambda carry: (self._attempt(carry[0][1]), carry[1] + 1),
                ((result, scaling, finite), 0),
            )
        # A skipped step leaves no trace: running statistics of an overflow are overflow.
        before, fp8 = self.call.comparable(state, result.state), None
        after = select_tree(finite, result.state, before)
        if scales is not None:
            # Maxima of gradients grow with the scale. What was observed has the new one.
            scales = scales.rescaled(scaling.loss_scaling / first)
            fp8 = select_tree(finite, scales.update(result.observed), scales)
        grads = self.call.trees(result.grads)
        grads = grads if self.options.several else grads[0]
        aux = self.commit(result.aux, after)
        return GradResult(result.value, aux, grads, scaling, finite, fp8)

    def _attempt(self, scaling: LossScaling) -> tuple[Evaluation, LossScaling, Array]:
        """Evaluates, reduces over devices, unscales and checks."""
        result = self.run(scaling)
        if self.axis_name is not None:
            result = self._reduced(result, self.axis_name)
        # Undo with the scale that scaled: after a growth step the new one is larger.
        unscaled, dtype = scaling.unscale(result.grads), self.options.grad_dtype
        grads = unscaled if dtype is None else cast_tree(unscaled, dtype)
        result = result._replace(grads=grads)
        if not self.options.mixed:
            return result, scaling, jnp.array(True)
        finite = all_finite((grads, result.value)) & result.intact
        new = scaling.adjust(finite)
        if result.observed is not None:
            growth = new.loss_scaling / scaling.loss_scaling
            result = result._replace(observed=result.observed.rescaled(growth))
        return result, new, finite

    def _reduced(self, result: Evaluation, axis_name: AxisName) -> Evaluation:
        """Reduces loss and gradients over devices, in the policy's `reduce_dtype`."""
        dtype = self.wire_dtype()
        # A sum of parts is a sum over devices, too.
        together = lax.pmean if self.options.mean else lax.psum

        def total(x: Array) -> Array:
            if is_floating(x):
                x = cast_leaf(x, np.dtype(dtype or at_least_f32(x.dtype)))
            return together(x, axis_name)

        # A parameter to which the function has assigned stays the same on all devices.
        assigned = result.state.keys() - self.call.state.keys()
        same = {i: lax.pmean(result.state[i], axis_name) for i in assigned}
        return result._replace(
            value=together(result.value, axis_name),
            state=result.state | same,
            grads=jax.tree.map(total, result.grads),
            intact=all_devices(result.intact, axis_name),
            observed=jax.tree.map(lambda x: lax.pmax(x, axis_name), result.observed),
        )
