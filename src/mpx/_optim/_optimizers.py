"""The compressed optimizers by name."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PyTree

from mpx._casting._select import Selectors
from mpx._jax._arguments import check_choice
from mpx._jax._tree import dtype_of
from mpx._kernels import BACKENDS, Backend
from mpx._optim._core import Core
from mpx._optim._options import (
    Compression,
    Hyper,
    ParamGroup,
    as_groups,
    check_compression,
    check_hyper,
)
from mpx._optim._params import Mask, cast_params, flatten_params
from mpx._optim._state import FlashState, put_masters
from mpx._optim._update_rules import Adam, Lion, Rule, Sgd

_DEFAULT = Compression()


class Stepped(NamedTuple):
    """Parameters and state, at the start or after a step.

    Attributes:
        params: The parameters, in their own dtypes.
        state: Their state.
    """

    params: PyTree
    state: FlashState


class FlashOptimizer(optax.GradientTransformationExtraArgs):
    """A compressed optimizer: an optax transformation with a faster way to step.

    `step` updates parameters and state in one pass over memory, in place if they are
    donated. `update` is the optax interface. Its result must reach `optax.apply_updates`
    unchanged, because the state holds the remainder of rounding the new parameters: in a
    chain it must be the last member. What changes gradients goes before it, and the factor
    of a schedule into `learning_rate`.

    Start with `init_from`, which takes the f32 weights.

    Attributes:
        init: Makes the state of parameters as they are: `init(params)`. For masters of
            16-bit parameters see `Compression.jitter`. Given `ShapeDtypeStruct`s, every
            leaf of the state is one, sharded like the parameters.
        update: The optax interface: `update(grads, state, params, *, finite, grad_scale)`.
            Its updates are f32, also for 16-bit parameters: apply them with
            `optax.apply_updates` or `mpx.optimizer_update`, which keep the dtypes of
            parameters, not with `eqx.apply_updates`.
    """

    def init_from(
        self, params: PyTree, dtype: DTypeLike = jnp.bfloat16, *, keep: Selectors = ()
    ) -> Stepped:
        """Makes 16-bit parameters and their state from f32 weights.

        The masters hold the f32 weights, to the precision of their format. Weights that
        were rounded to 16 bits before have lost it: small steps, as in a warm-up or in
        fine-tuning, then start from wrong places.

        Args:
            params: The f32 weights, or a whole model: arrays, tracers or
                `ShapeDtypeStruct`s. Running statistics stay f32: `eqx.nn.State`,
                `batch_stats` of Flax Linen and NNX variables other than `nnx.Param`.
                Parameters that have 16 bits already start as with `init`. Frozen ones are
                rounded.
            dtype: The dtype of the parameters: bf16, f16, or f32 to leave them as they are.
            keep: Parameters that stay as they are: a regular expression for paths such as
                `"norm|bias"`, a module type, a predicate `(path, array) -> bool`, or a list
                of these.

        Returns:
            The parameters and their state, with the shardings of the weights.

        Raises:
            ValueError: If `dtype` is not a floating dtype of at least 16 bits, or if
                `keep` selects nothing.

        Examples:
            >>> import jax.numpy as jnp
            >>> from mpx.optim import flash_adamw, master_params
            >>> params, state = flash_adamw(1e-3).init_from({"w": jnp.full((64, 64), 0.1)})
            >>> params["w"].dtype, float(params["w"][0, 0])
            (dtype(bfloat16), 0.10009765625)
            >>> abs(float(master_params(params, state)["w"][0, 0]) - 0.1) < 1e-6
            True
        """
        low = cast_params(params, dtype, keep)
        flat, state = flatten_params(low), core_of(self).init(low)
        # Those that had 16 bits before keep the masters that `init` gave them.
        weights = [
            None if dtype_of(old) == dtype_of(new) else old
            for old, new in zip(flat.like(params, "`params`"), flat.leaves, strict=True)
        ]
        return Stepped(*put_masters(flat, state, weights))

    def step(
        self,
        params: PyTree,
        state: FlashState,
        grads: PyTree,
        *,
        finite: ArrayLike | None = None,
        grad_scale: ArrayLike = 1.0,
    ) -> Stepped:
        """Takes one step.

        Args:
            params: The parameters, or a whole model: leaves that are not floating come
                back as they are.
            state: The state, from `init(params)` or the last step.
            grads: The gradients, `None` where a parameter must not change.
            finite: A boolean scalar. If it is false, nothing changes, not even the step
                count. `None` means true.
            grad_scale: The factor of the gradients, a scalar: one over the loss scale,
                times the factor of a gradient clip.

        Returns:
            The parameters and the state after the step.

        Raises:
            ValueError: If gradients or state do not fit the parameters; the leaf is
                named.
        """
        flat = flatten_params(params)
        new, state = core_of(self).advance(
            flat, state, grads, finite=finite, grad_scale=grad_scale
        )
        return Stepped(flat.treedef.unflatten([leaf.param for leaf in new]), state)


def core_of(optimizer: FlashOptimizer) -> Core:
    """Returns the engine of an optimizer."""
    init: Any = optimizer.init  # a method of the core, which optax's tuple cannot hold
    return init.__self__


def _build(
    rule: Rule,
    *,
    mask: Mask,
    groups: Sequence[ParamGroup],
    compression: Compression,
    backend: Backend,
    **hyper: Hyper,
) -> FlashOptimizer:
    """Makes an optimizer from a rule and a user's options, which it checks."""
    check_compression("`compression`", compression)
    check_choice(backend, "backend", BACKENDS)
    groups = as_groups(groups, rule, compression)
    for values in (hyper, *(group.hyper for group in groups)):
        check_hyper(values)
    core = Core(rule, hyper, mask, groups, compression, backend)
    init: Any = core.init  # optax's types do not allow for other states
    update: Any = core.update
    return FlashOptimizer(init, update)


def flash_adamw(
    learning_rate: Hyper,
    b1: Hyper = 0.9,
    b2: Hyper = 0.999,
    eps: Hyper = 1e-8,
    *,
    weight_decay: Hyper = 1e-4,
    mask: Mask = None,
    groups: Sequence[ParamGroup] = (),
    compression: Compression = _DEFAULT,
    backend: Backend = "auto",
) -> FlashOptimizer:
    """AdamW with 8-bit moments and compressed master weights.

    The rule is that of `optax.adamw`, computed in f32.

    Args:
        learning_rate: A number, or a schedule: a function of the step count.
        b1: Decay of the first moment.
        b2: Decay of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: A number or a schedule; multiplied by the learning rate.
        mask: Which parameters decay: a tree of booleans, or a function that makes one
            from the parameters. `None` means all.
        groups: Options by parameter path; the first group that matches holds.
        compression: How the state is stored.
        backend: Where steps run: `"jax"`, or `"auto"`, which takes a Triton kernel on
            NVIDIA GPUs where it is faster.

    Returns:
        An optimizer with `init_from`, `init`, `step` and the `update` of optax.

    Examples:
        >>> import jax.numpy as jnp
        >>> optimizer = flash_adamw(0.5)
        >>> params, state = optimizer.init_from({"w": jnp.ones((64, 64))})
        >>> grads = {"w": jnp.ones((64, 64), jnp.bfloat16)}
        >>> params, state = optimizer.step(params, state, grads)
        >>> float(params["w"][0, 0]), int(state.count)
        (0.5, 1)
    """
    return _build(Adam(decoupled=True), **locals())


def flash_adam(
    learning_rate: Hyper,
    b1: Hyper = 0.9,
    b2: Hyper = 0.999,
    eps: Hyper = 1e-8,
    *,
    weight_decay: Hyper = 0.0,
    mask: Mask = None,
    groups: Sequence[ParamGroup] = (),
    compression: Compression = _DEFAULT,
    backend: Backend = "auto",
) -> FlashOptimizer:
    """Adam with 8-bit moments and compressed master weights.

    The rule is that of `optax.adam`. Weight decay, if any, is added to the gradient
    (L2 regularisation). For the arguments see `flash_adamw`.

    Examples:
        >>> import jax.numpy as jnp
        >>> optimizer = flash_adam(1e-3)
        >>> state = optimizer.init({"w": jnp.ones((64, 64))})
        >>> state.mu["w"].codes.dtype
        dtype('int8')
    """
    return _build(Adam(decoupled=False), **locals())


def flash_lion(
    learning_rate: Hyper,
    b1: Hyper = 0.9,
    b2: Hyper = 0.99,
    *,
    weight_decay: Hyper = 1e-3,
    mask: Mask = None,
    groups: Sequence[ParamGroup] = (),
    compression: Compression = _DEFAULT,
    backend: Backend = "auto",
) -> FlashOptimizer:
    """Lion with an 8-bit moment and compressed master weights.

    The rule is that of `optax.lion`: `b1` is the weight of the moment in the step, `b2` its
    decay. For the other arguments see `flash_adamw`.

    Examples:
        >>> import jax.numpy as jnp
        >>> optimizer = flash_lion(1e-3)
        >>> optimizer.init({"w": jnp.ones((64, 64))}).nu is None
        True
    """
    return _build(Lion(), **locals())


def flash_sgd(
    learning_rate: Hyper,
    momentum: Hyper | None = None,
    nesterov: bool = False,
    *,
    dampening: Hyper = 0.0,
    weight_decay: Hyper = 0.0,
    mask: Mask = None,
    groups: Sequence[ParamGroup] = (),
    compression: Compression = _DEFAULT,
    backend: Backend = "auto",
) -> FlashOptimizer:
    """Gradient descent with an 8-bit momentum and compressed master weights.

    The rule is that of `optax.sgd`. Weight decay, if any, is added to the gradient.

    Args:
        learning_rate: A number, or a schedule: a function of the step count.
        momentum: Decay of the momentum; `None` keeps none, and no memory for it.
        nesterov: Whether to look one step ahead.
        dampening: The share of each gradient that the momentum leaves out.
        weight_decay: A number or a schedule.
        mask: This and the other arguments are those of `flash_adamw`.
        groups: Options by parameter path.
        compression: How the state is stored.
        backend: Where steps run.

    Examples:
        >>> import jax.numpy as jnp
        >>> optimizer = flash_sgd(0.5)
        >>> params = {"w": jnp.ones(2)}
        >>> optimizer.step(params, optimizer.init(params), {"w": jnp.ones(2)}).params
        {'w': Array([0.5, 0.5], dtype=float32)}
    """
    return _sgd(False, **locals())


def flash_sgdw(
    learning_rate: Hyper,
    momentum: Hyper | None = None,
    nesterov: bool = False,
    *,
    dampening: Hyper = 0.0,
    weight_decay: Hyper = 1e-4,
    mask: Mask = None,
    groups: Sequence[ParamGroup] = (),
    compression: Compression = _DEFAULT,
    backend: Backend = "auto",
) -> FlashOptimizer:
    """Gradient descent as in `flash_sgd`, with weight decay decoupled from the gradient.

    Each step multiplies the weights by one minus `learning_rate` times `weight_decay`.

    Examples:
        >>> import jax.numpy as jnp
        >>> optimizer = flash_sgdw(0.5, weight_decay=1.0)
        >>> params = {"w": jnp.ones(2)}
        >>> optimizer.step(params, optimizer.init(params), {"w": jnp.zeros(2)}).params
        {'w': Array([0.5, 0.5], dtype=float32)}
    """
    return _sgd(True, **locals())


def _sgd(
    decoupled: bool, momentum: Hyper | None, nesterov: bool, **options: Any
) -> FlashOptimizer:
    if momentum is None and nesterov:
        raise ValueError(
            "`nesterov=True` needs a momentum, but `momentum` is None. Set it, for "
            "example to 0.9."
        )
    rule = Sgd(decoupled, nesterov, () if momentum is None else ("mu",))
    return _build(rule, momentum=0.0 if momentum is None else momentum, **options)
