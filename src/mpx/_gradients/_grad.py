"""Gradients in mixed precision: cast, scale, differentiate, reduce, unscale, check.

`accumulate` runs the same step in parts; the functions of the paper are thin layers over it.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, PyTree

from mpx._casting._policy import Policy
from mpx._casting._reduction import COMPUTE, EIGHT_BITS, Reduce, shards_of
from mpx._casting._wrapped import hide_signature, is_amp, take_scales
from mpx._gradients._call import Call
from mpx._gradients._evaluate import Evaluation, Recorder, check_replicated, evaluate
from mpx._gradients._grad_checks import warn_of_constant_scaling
from mpx._gradients._grad_options import (
    GradOptions,
    check_function,
    check_scaling,
    refuse_positional,
)
from mpx._gradients._state import State
from mpx._jax._compat import unpacking_targets
from mpx._jax._formats import at_least_f32
from mpx._jax._tree import (
    AxisName,
    all_devices,
    all_finite,
    cast_floating,
    cast_leaf,
    is_floating,
    select_tree,
)
from mpx._scaling._loss_scaling import LossScaling
from mpx._wire._feedback import mean_with_feedback, take_feedback
from mpx._wire._sums import mean_8_bits


class GradResult(NamedTuple):
    """Result of `value_and_grad` and `accumulate`.

    Attributes:
        value: The loss that the function returned, unscaled and widened to f32. It has
            the precision in which the function computed it: a loss returned in 16 bits
            was rounded to 16 bits, to 3 significant digits in bf16. Cast the logits to
            f32 in the function, or use `amp`, for a loss in full precision.
        aux: What the function returned besides, `None` without `has_aux`.
        grads: The unscaled gradients; `None` for leaves without one.
        scaling: The loss scaling for the next step.
        finite: Whether the gradients and the loss are finite, and no state became
            infinite or nan that was finite before, bool[]. If not, skip the update.
        fp8: The `Fp8State` for the next step, for functions under `fp8` with
            `DelayedScaling`; else `None`.
        feedback: The `ErrorFeedback` for the next step, if one was passed; else `None`.

    Examples:
        >>> from mpx import NoLossScaling, value_and_grad
        >>> result = value_and_grad(lambda w: w * w)(NoLossScaling(), jnp.float32(3.0))
        >>> float(result.value), float(result.grads), bool(result.finite)
        (9.0, 6.0, True)
    """

    value: Array
    aux: Any
    grads: PyTree
    scaling: Any
    finite: Bool[Array, ""]
    fp8: Any = None
    feedback: Any = None

    def __iter__(self) -> Iterator[Any]:
        """Yields the fields.

        Raises:
            ValueError: If they are unpacked into another number of variables.
        """
        targets = unpacking_targets()
        if targets not in (None, len(self)):
            raise ValueError(
                f"A `GradResult` has {len(self)} fields, but it is unpacked into "
                f"{targets}. Use their names: `result.value`, `result.grads`, "
                "`result.scaling`, `result.finite`, `result.aux`."
            )
        return tuple.__iter__(self)


class Step:
    """One call of a gradient function.

    Attributes:
        options: The options.
        axis_name: The mapped axis over which to average.
        call: The call of the user's function.
        recorder: Holds the part of its results that is no array.
        mean: Whether devices are averaged, or added up.
    """

    mean: bool = True

    def __init__(
        self,
        func: Callable[..., Any],
        options: GradOptions,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Takes the arguments of a call apart."""
        self.feedback, args = take_feedback(args)
        if self.feedback is not None and options.policy.reduce_dtype != EIGHT_BITS:
            raise ValueError(
                "An `ErrorFeedback` is for gradients that are summed in 8 bits: pass "
                '`policy=Policy(reduce_dtype="e4m3")` and `axis_name=`, or leave it out.'
            )
        scales, args = take_scales(func, args)
        self.options, self.recorder = options, Recorder()
        self.axis_name = options.axis_name
        self._make_call = functools.partial(
            Call,
            func,
            argnums=options.argnum_tuple(),
            policy=options.policy if options.mixed and not is_amp(func) else None,
            scales=scales,
        )
        self.check(func, args, kwargs)
        self.call = self.call_with(args, kwargs)
        check_replicated(self.call.diff, self.axis_name)

    def check(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Raises a `ValueError` if the axis to average over is one of the mesh."""
        del func, kwargs
        if shards_of(self.axis_name, args) is not None:
            raise ValueError(
                f"`axis_name={self.axis_name!r}` is an axis of the mesh. Leave it out: XLA "
                "sums the gradients. Or use `mpx.accumulate(func, axis_name=...)`."
            )

    def call_with(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Returns a call with these arguments."""
        return self._make_call(args=args, kwargs=dict(kwargs))

    def evaluate(self, call: Call, state: State, scaling: LossScaling) -> Evaluation:
        """Runs a call forward and backward."""
        return evaluate(
            call,
            state,
            scaling,
            self.recorder,
            has_aux=self.options.has_aux,
            grad_dtype=self.options.grad_dtype,
            axis_name=self.axis_name,
            reduce=self.matmul_reduce(),
        )

    def matmul_reduce(self) -> Reduce:
        """Returns the dtype in which weight gradients leave their matmuls."""
        return self.options.policy.reduce_dtype

    def run(self, scaling: LossScaling) -> Evaluation:
        """Returns loss, gradients of the scaled loss, and state."""
        return self.evaluate(self.call, self.call.state, scaling)

    def result(self, scaling: LossScaling) -> GradResult:
        """Runs the step, puts the state into effect and returns the public result."""
        options, call = self.options, self.call
        result, scaling, finite = self._differentiate(scaling)
        aux = self.commit(result.aux, result.state)
        grads = result.grads[0] if isinstance(options.argnums, int) else result.grads
        fp8 = None
        if call.scales is not None:
            fp8 = select_tree(finite, call.scales.update(result.observed), call.scales)
        # What overflowed must not stay in the residuals.
        feedback = select_tree(finite, result.feedback, self.feedback)
        return GradResult(result.value, aux, grads, scaling, finite, fp8, feedback)

    def commit(self, aux: PyTree, state: State) -> Any:
        """Puts a state into effect, and returns `aux` as the function returned it."""
        return self.call.commit(self.recorder.merge(aux, state), state)

    def _differentiate(
        self, scaling: LossScaling
    ) -> tuple[Evaluation, LossScaling, Bool[Array, ""]]:
        """Evaluates, reduces over devices, unscales and checks; again if asked to.

        Returns:
            The evaluation with unscaled gradients and the state that is to be kept, the
            next scaling, and whether gradients, loss and state are finite.
        """

        def attempt(
            scaling: LossScaling,
        ) -> tuple[Evaluation, LossScaling, Bool[Array, ""]]:
            result = self._reduced(self.run(scaling), scaling)
            # Undo with the scale that scaled: after a growth step the new one is larger.
            grads = cast_floating(
                scaling.unscale(result.grads), self.options.grad_dtype
            )
            result = result._replace(grads=grads)
            if not self.options.mixed:
                return result, scaling, jnp.array(True)
            finite = all_finite((grads, result.value)) & ~result.spoilt
            return result, scaling.adjust(finite), finite

        result, scaling, finite = attempt(scaling)
        if not self.options.mixed:
            return result, scaling, finite
        if self.options.retry:
            (result, scaling, finite), _ = lax.while_loop(
                lambda carry: ~carry[0][2] & (carry[1] < self.options.retry),
                lambda carry: (attempt(carry[0][1]), carry[1] + 1),
                ((result, scaling, finite), 0),
            )
        # A skipped step leaves no trace: running statistics of an overflow are overflow.
        before = self.call.comparable(self.call.state, result.state)
        state = select_tree(finite, result.state, before)
        return result._replace(state=state), scaling, finite

    def _reduced(self, result: Evaluation, scaling: LossScaling) -> Evaluation:
        """Reduces loss and gradients over devices, in the policy's `reduce_dtype`."""
        axis_name, dtype = self.axis_name, self.options.policy.reduce_dtype
        if axis_name is None:
            return result
        if dtype == COMPUTE:
            dtype = self.options.policy.resolved_compute_dtype()

        # A sum of parts is a sum over devices, too.
        together = lax.pmean if self.mean else lax.psum
        parts = 1 if self.mean else lax.axis_size(axis_name)

        def total(x: Array) -> Array:
            if is_floating(x) and dtype == EIGHT_BITS:
                return mean_8_bits(x, axis_name) * parts
            if is_floating(x):
                x = cast_leaf(x, at_least_f32(x.dtype) if dtype is None else dtype)
            return together(x, axis_name)

        grads, feedback = result.grads, self.feedback
        if feedback is None:
            grads = jax.tree.map(total, grads)
        else:
            floats, others = eqx.partition(grads, is_floating)
            floats, feedback = mean_with_feedback(floats, feedback, scaling, axis_name)
            floats = jax.tree.map(lambda x: x * parts, floats)
            grads = eqx.combine(floats, jax.tree.map(total, others))
        # A parameter to which the function has assigned stays the same on all devices.
        arrays = dict(result.state.arrays)
        for name in self.call.assigned(result.state):
            arrays[name] = lax.pmean(arrays[name], axis_name)
        return result._replace(
            value=together(result.value, axis_name),
            state=result.state._replace(arrays=arrays),
            grads=grads,
            feedback=feedback,
            spoilt=~all_devices(~result.spoilt, axis_name),
            observed=jax.tree.map(lambda x: lax.pmax(x, axis_name), result.observed),
        )


def value_and_grad(
    func: Callable[..., Any] | None = None,
    *misplaced: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    policy: Policy | str | None = None,
    grad_dtype: DTypeLike | None = None,
    axis_name: AxisName | None = None,
    retry: int = 0,
) -> Callable[..., Any]:
    """Returns a function that computes loss and gradients in mixed precision.

    The returned function takes the loss scaling first and then the arguments of `func`;
    it returns a `GradResult`. Because the scaling is an argument, the transformed
    function can be made once and jitted. It casts the arguments to the compute dtype,
    multiplies the loss by the scale in f32, differentiates, averages over devices,
    divides by the scale that was used, and checks that the result is finite.

    Floating arrays inside the differentiated arguments get a gradient, everything else
    (integers, keys, functions, strings) `None`. NNX modules are updated in place as by
    `nnx.value_and_grad`: BatchNorm statistics and dropout counters advance. They, and
    an Equinox `State` or Linen's `batch_stats` returned in `aux`, stay f32. A step is
    skipped, and they are rolled back, if the gradients, the loss or they themselves
    become infinite or nan.

    A function under `amp` casts by itself and gets its arguments uncast; a policy beside
    it may set `grad_dtype` and `reduce_dtype`. An `ErrorFeedback` comes after the
    scaling, before the arguments of `func`.

    Args:
        func: The loss function, returning a scalar or `(scalar, aux)`. Leave it out to
            use `value_and_grad` as a decorator with arguments.
        *misplaced: Nothing: options are passed by keyword, the scaling at the call.
        argnums: Which positional arguments of `func` to differentiate: one number, or a
            sequence for a tuple of gradients.
        has_aux: Whether `func` returns a pair `(loss, aux)`.
        policy: Dtypes and exceptions; `None` computes in the configured half precision.
            If none was configured, that is f16, or bf16 with `NoLossScaling`.
        grad_dtype: The dtype of the gradients; overrides the policy. By default f32, or
            f64 for f64 parameters.
        axis_name: A `shard_map`, `pmap` or `vmap` axis (or several) over which loss and
            gradients are averaged before the check, so that all devices agree.
        retry: How often to try again at once with the adjusted scale when gradients are
            not finite, before giving up on the step. The function is compiled twice.

    Raises:
        TypeError: If the loss is no real floating scalar, or no scaling was passed.
        ValueError: If a differentiated argument holds no floating array, if the policy
            contradicts `amp`, or if f16 is used with `NoLossScaling`.

    Warns:
        RuntimeWarning: While tracing: of a policy under which all matmuls run in f32,
            because the function closes over an f32 batch, for example; of a parameter
            whose gradient a long loop adds up in 16 bits; and of a dynamic scaling that
            is a constant of the jitted function.

    Examples:
        >>> from mpx import DynamicLossScaling
        >>> @jax.jit
        ... @value_and_grad(policy="p=f32,c=f16,o=f32")
        ... def loss(w, x):
        ...     return jnp.mean((x @ w) ** 2)
        >>> scaling = DynamicLossScaling.pow2()
        >>> result = loss(scaling, jnp.ones(2), jnp.full((4, 2), 0.5))
        >>> result.value, result.grads
        (Array(1., dtype=float32), Array([1., 1.], dtype=float32))
    """
    refuse_positional(misplaced, "value_and_grad")
    options = GradOptions(
        argnums=argnums,
        has_aux=has_aux,
        policy=policy,
        grad_dtype=grad_dtype,
        axis_name=axis_name,
        retry=retry,
    )
    return transformed(func, options)


def transformed(
    func: Callable[..., Any] | None,
    options: GradOptions,
    make_step: Callable[..., Step] = Step,
) -> Callable[..., Any]:
    """Returns a function of scaling and arguments that runs a step of `func`.

    Args:
        func: The user's function; `None` returns a decorator.
        options: The options.
        make_step: Called as `make_step(func, options, args, kwargs)`.

    Raises:
        TypeError: If `func` is not a function.
    """
    if func is None:
        return functools.partial(transformed, options=options, make_step=make_step)

    check_function(func)

    @functools.wraps(func)
    def wrapper(scaling: Any, /, *args: Any, **kwargs: Any) -> GradResult:
        check_scaling(scaling)
        warn_of_constant_scaling(scaling)
        settled = options.settled(func, scaling)
        return make_step(func, settled, args, kwargs).result(scaling)

    hide_signature(wrapper)  # the scaling comes first
    return wrapper
