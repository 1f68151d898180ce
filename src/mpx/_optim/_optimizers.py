"""The optimizers by name."""

from collections.abc import Callable, Sequence
from typing import Any

from mpx._kernels import Backend
from mpx._optim._flash import FlashOptimizer, build
from mpx._optim._names import explains_names
from mpx._optim._options import Compression, ParamGroup
from mpx._optim._rules import Adam, Lion, Sgd
from mpx._optim._scalars import Hyper

Mask = Any | Callable[[Any], Any]
_DEFAULT = Compression()


@explains_names
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
            of the parameters. `None` means all.
        groups: Options by parameter path; the first group that matches holds.
        compression: How the state is stored.
        backend: Where steps run: `"jax"`, or in the kernel of `"triton"` or `"mosaic"`,
            which is an error where that cannot. `"auto"` chooses, but never Mosaic.

    Returns:
        An optimizer with `init`, `step` and the `update` of optax.

    Examples:
        >>> import jax.numpy as jnp
        >>> params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
        >>> optimizer = flash_adamw(0.5)
        >>> state = optimizer.init(params)
        >>> grads = {"w": jnp.ones((64, 64), jnp.bfloat16)}
        >>> params, state = optimizer.step(params, state, grads)
        >>> float(params["w"][0, 0]), int(state.count)
        (0.5, 1)
    """
    hyper = dict(
        learning_rate=learning_rate, weight_decay=weight_decay, b1=b1, b2=b2, eps=eps
    )
    return build(
        Adam(decoupled=True),
        hyper,
        mask=mask,
        groups=groups,
        compression=compression,
        backend=backend,
    )


@explains_names
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
    (L2 regularisation).

    Args:
        learning_rate: A number, or a schedule: a function of the step count.
        b1: Decay of the first moment.
        b2: Decay of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: A number or a schedule.
        mask: Which parameters decay; see `flash_adamw`.
        groups: Options by parameter path; the first group that matches holds.
        compression: How the state is stored.
        backend: Where steps run: `"jax"`, or in the kernel of `"triton"` or `"mosaic"`,
            which is an error where that cannot. `"auto"` chooses, but never Mosaic.

    Examples:
        >>> import jax.numpy as jnp
        >>> optimizer = flash_adam(1e-3)
        >>> state = optimizer.init({"w": jnp.ones((64, 64))})
        >>> state.mu["w"].codes.dtype
        dtype('int8')
    """
    hyper = dict(
        learning_rate=learning_rate, weight_decay=weight_decay, b1=b1, b2=b2, eps=eps
    )
    return build(
        Adam(decoupled=False),
        hyper,
        mask=mask,
        groups=groups,
        compression=compression,
        backend=backend,
    )


@explains_names
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

    The rule is that of `optax.lion`.

    Args:
        learning_rate: A number, or a schedule: a function of the step count.
        b1: Weight of the moment in the step.
        b2: Decay of the moment.
        weight_decay: A number or a schedule; multiplied by the learning rate.
        mask: Which parameters decay; see `flash_adamw`.
        groups: Options by parameter path; the first group that matches holds.
        compression: How the state is stored.
        backend: Where steps run: `"jax"`, or in the kernel of `"triton"` or `"mosaic"`,
            which is an error where that cannot. `"auto"` chooses, but never Mosaic.

    Examples:
        >>> import jax.numpy as jnp
        >>> optimizer = flash_lion(1e-3)
        >>> optimizer.init({"w": jnp.ones((64, 64))}).nu is None
        True
    """
    hyper = dict(learning_rate=learning_rate, weight_decay=weight_decay, b1=b1, b2=b2)
    return build(
        Lion(),
        hyper,
        mask=mask,
        groups=groups,
        compression=compression,
        backend=backend,
    )


@explains_names
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
        dampening: What share of each gradient the momentum leaves out.
        weight_decay: A number or a schedule.
        mask: Which parameters decay; see `flash_adamw`.
        groups: Options by parameter path; the first group that matches holds.
        compression: How the state is stored.
        backend: Where steps run: `"jax"`, or in the kernel of `"triton"` or `"mosaic"`,
            which is an error where that cannot. `"auto"` chooses, but never Mosaic.

    Examples:
        >>> import jax.numpy as jnp
        >>> optimizer = flash_sgd(0.5)
        >>> params = {"w": jnp.ones(2)}
        >>> optimizer.step(params, optimizer.init(params), {"w": jnp.ones(2)}).params
        {'w': Array([0.5, 0.5], dtype=float32)}
    """
    return _sgd(
        learning_rate,
        momentum,
        nesterov,
        dampening=dampening,
        weight_decay=weight_decay,
        decoupled=False,
        mask=mask,
        groups=groups,
        compression=compression,
        backend=backend,
    )


@explains_names
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
    """Gradient descent as `flash_sgd`, with weight decay decoupled from the gradient.

    Args:
        learning_rate: A number, or a schedule: a function of the step count.
        momentum: Decay of the momentum; `None` keeps none, and no memory for it.
        nesterov: Whether to look one step ahead.
        dampening: What share of each gradient the momentum leaves out.
        weight_decay: A number or a schedule; multiplied by the learning rate.
        mask: Which parameters decay; see `flash_adamw`.
        groups: Options by parameter path; the first group that matches holds.
        compression: How the state is stored.
        backend: Where steps run: `"jax"`, or in the kernel of `"triton"` or `"mosaic"`,
            which is an error where that cannot. `"auto"` chooses, but never Mosaic.

    Examples:
        >>> import jax.numpy as jnp
        >>> optimizer = flash_sgdw(0.5, weight_decay=1.0)
        >>> params = {"w": jnp.ones(2)}
        >>> optimizer.step(params, optimizer.init(params), {"w": jnp.zeros(2)}).params
        {'w': Array([0.5, 0.5], dtype=float32)}
    """
    return _sgd(
        learning_rate,
        momentum,
        nesterov,
        dampening=dampening,
        weight_decay=weight_decay,
        decoupled=True,
        mask=mask,
        groups=groups,
        compression=compression,
        backend=backend,
    )


def _sgd(
    learning_rate: Hyper,
    momentum: Hyper | None,
    nesterov: bool,
    *,
    dampening: Hyper,
    weight_decay: Hyper,
    decoupled: bool,
    mask: Mask,
    groups: Sequence[ParamGroup],
    compression: Compression,
    backend: Backend,
) -> FlashOptimizer:
    if nesterov and momentum is None:
        raise ValueError(
            "`nesterov=True` needs a momentum, but `momentum` is None. Set it, for "
            "example to 0.9."
        )
    hyper = dict(
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        momentum=0.0 if momentum is None else momentum,
        dampening=dampening,
    )
    moments = () if momentum is None else ("mu",)
    return build(
        Sgd(decoupled, nesterov, moments),
        hyper,
        mask=mask,
        groups=groups,
        compression=compression,
        backend=backend,
    )
