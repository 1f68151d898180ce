"""The compressed optimizers by name."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from mpx._jax._arguments import as_count, check_choice, check_value
from mpx._kernels import _dispatch as _kernels
from mpx._optim._engine import Core, FlashOptimizer, core_of
from mpx._optim._muon import Matrices
from mpx._optim._options import Compression, Hyper, Mask, ParamGroup, check_hyper
from mpx._optim._update_rules import Adam, Lion, Muon, Rule, Sgd

_DEFAULT = Compression()


def _build(
    rule: Rule,
    *,
    mask: Mask,
    groups: Sequence[ParamGroup],
    compression: Compression,
    backend: _kernels.Backend,
    matrices: Matrices = None,
    others: Core | None = None,
    **hyper: Hyper,
) -> FlashOptimizer:
    _check_compression("`compression`", compression)
    check_choice(backend, "backend", _kernels.BACKENDS)
    check_hyper(hyper)
    members = tuple(groups) if isinstance(groups, Iterable) else (groups,)
    for group in members:
        if not isinstance(groups, Iterable) or not isinstance(group, ParamGroup):
            raise TypeError(
                "`groups` must be a sequence of `ParamGroup`s, such as "
                f"`[ParamGroup(...)]`, but {type(group).__name__} was given."
            )
    core = Core(rule, hyper, mask, members, compression, backend, matrices, others)
    for group in members:
        _check_group(group, core)
    return core.optimizer


def _check_group(group: ParamGroup, core: Core) -> None:
    """Raises if an optimizer does not have the options of a group."""
    where = f"of the group {group.where!r}"
    if group.optimizer is not None:
        _check_optimizer(group, where)
    names = {name for one in (core, core.others) if one for name in one.hyper}
    if not core.rule.moments:  # `momentum=0.0` on the optimizer keeps one
        names -= {"momentum", "dampening"}
    if unknown := sorted(set(group.hyper) - names):
        raise ValueError(
            f"The group {group.where!r} sets {unknown}, but this optimizer has only "
            f"{sorted(names)}."
        )
    check_hyper(group.hyper)
    own = core.compression if group.compression is None else group.compression
    _check_compression(f"`compression` {where}", own)
    if own.format != core.compression.format:
        raise ValueError(
            f"The group {group.where!r} has the format {own.format!r}, but the others "
            f"have {core.compression.format!r}; there is one for all."
        )


def _check_optimizer(group: ParamGroup, where: str) -> None:
    """Raises if the optimizer of a group has more than a rule and hyperparameters."""
    if group.hyper or group.frozen:
        raise ValueError(
            f"The group {group.where!r} has an `optimizer`, and `hyper` or `frozen` "
            "beside it. Give the hyperparameters to that optimizer."
        )
    if not isinstance(group.optimizer, FlashOptimizer):
        raise TypeError(
            f"The `optimizer` {where} must be a compressed one, such as "
            f"`mpx.optim.flash_adamw(3e-4)`, but {type(group.optimizer).__name__} was given."
        )
    core = core_of(group.optimizer)
    given = core.mask, core.groups, core.compression, core.others
    if given != (None, (), _DEFAULT, None):
        raise ValueError(
            f"The `optimizer` {where} must have no `mask`, `groups` or `compression` and "
            "not be `flash_muon`: those of the whole optimizer, and the `compression` of "
            "the group, hold."
        )


def _check_compression(what: str, compression: object) -> None:
    if not isinstance(compression, Compression):
        raise TypeError(
            f"{what} must be an `mpx.optim.Compression`, but {type(compression).__name__} was "
            "given. `Compression(quantize=False, master_bits=None)` compresses nothing."
        )


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
    backend: _kernels.Backend = "auto",
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
    backend: _kernels.Backend = "auto",
) -> FlashOptimizer:
    """Adam with 8-bit moments and compressed master weights.

    The rule is that of `optax.adam`. Weight decay, if any, is added to the gradient
    (L2 regularisation). For the arguments see `flash_adamw`.

    Examples:
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
    backend: _kernels.Backend = "auto",
) -> FlashOptimizer:
    """Lion with an 8-bit moment and compressed master weights.

    The rule is that of `optax.lion`: `b1` is the weight of the moment in the step, `b2` its
    decay. For the other arguments see `flash_adamw`.

    Examples:
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
    backend: _kernels.Backend = "auto",
) -> FlashOptimizer:
    """Gradient descent with an 8-bit momentum and compressed master weights.

    The rule is that of `optax.sgd`. Weight decay, if any, is added to the gradient.

    Args:
        learning_rate: A number, or a schedule: a function of the step count.
        momentum: Decay of the momentum; `None` keeps none, and no memory for it.
        nesterov: Whether to look one step ahead.
        dampening: The share of each gradient that the momentum leaves out.
        weight_decay: A number or a schedule.
        mask: For this and the next arguments see `flash_adamw`.
        groups: Options by parameter path.
        compression: How the state is stored.
        backend: Where steps run.

    Examples:
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
    backend: _kernels.Backend = "auto",
) -> FlashOptimizer:
    """Gradient descent as in `flash_sgd`, with weight decay decoupled from the gradient.

    Each step multiplies the weights by one minus `learning_rate` times `weight_decay`. For
    the arguments see `flash_sgd`.

    Examples:
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


_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # of the reference, and of optax


def flash_muon(  # noqa: PLR0913 (options are keywords)
    learning_rate: Hyper,
    beta: Hyper = 0.95,
    *,
    nesterov: bool = True,
    weight_decay: Hyper = 0.0,
    ns_coeffs: Sequence[Any] = _NEWTON_SCHULZ,
    ns_steps: int = 5,
    ns_dtype: DTypeLike = jnp.bfloat16,
    eps: float = 1e-8,
    consistent_rms: float | None = None,
    matrices: Matrices = None,
    mask: Mask = None,
    groups: Sequence[ParamGroup] = (),
    compression: Compression = _DEFAULT,
    backend: _kernels.Backend = "auto",
) -> FlashOptimizer:
    """Muon with an 8-bit momentum and compressed master weights.

    The rule is that of `optax.contrib.muon`: the momentum of each matrix, orthogonalised
    by Newton-Schulz steps, is the direction. Matrices of one shape are orthogonalised
    together, each on one device, however they are sharded. AdamW, with the learning rate
    and without decay, steps what is no matrix. Embeddings and the head, which are, should
    be in a group with an optimizer of their own.

    Args:
        learning_rate: A number, or a schedule: a function of the step count.
        beta: Decay of the momentum.
        nesterov: Whether to look one step ahead.
        weight_decay: A number or a schedule; multiplied by the learning rate.
        ns_coeffs: Coefficients of the Newton-Schulz steps: three numbers, or three for
            each step.
        ns_steps: The number of steps, if there are three coefficients.
        ns_dtype: The dtype of their matmuls: bf16, f32 or `float8_e4m3fn`.
        eps: Added to the norm of each matrix, by which it is divided first.
        consistent_rms: If given, a step is this times the root of the longer side, so
            that its elements are as large as those of AdamW (with 0.2). Else it is the
            root of outputs / inputs, at least 1.
        matrices: The axes of inputs and outputs of each parameter: a tree of
            `optax.contrib.MuonDimensionNumbers`, or a function that makes one from the
            parameters. Other axes count matrices, such as layers; parameters with `None`
            are no matrices. By default arrays of two axes are.
        mask: For this and the next arguments see `flash_adamw`.
        groups: Options by parameter path; the first group that matches holds.
        compression: How the state is stored.
        backend: Where steps run, apart from matmuls.

    Examples:
        >>> groups = [ParamGroup("embed|head", optimizer=flash_adamw(3e-4))]
        >>> optimizer = flash_muon(0.02, groups=groups)
        >>> weights = {"embed": jnp.ones((64, 64)), "w": jnp.eye(64), "bias": jnp.ones(64)}
        >>> params, state = optimizer.init_from(weights)
        >>> state.nu["w"] is None, state.nu["embed"].codes.dtype
        (True, dtype('uint8'))
    """
    rms, dtype = consistent_rms, np.dtype(ns_dtype)
    check_choice(str(dtype), "ns_dtype", ("bfloat16", "float32", "float8_e4m3fn"))
    rows = np.asarray(ns_coeffs, np.float64)
    if rows.shape == (3,):
        rows = np.tile(rows, (as_count(ns_steps, "ns_steps", 1), 1))
    fits = rows.ndim == 2 and rows.shape[1] == 3 and bool(np.isfinite(rows).all())
    check_value(fits, "ns_coeffs", "three numbers, or three for each step", ns_coeffs)
    check_value(0 < eps < np.inf, "eps", "a positive number", eps)
    check_value(
        rms is None or 0 < rms < np.inf, "consistent_rms", "positive or None", rms
    )
    coefficients = tuple((float(a), float(b), float(c)) for a, b, c in rows)
    return _build(
        Muon(nesterov, coefficients, dtype, float(eps), rms),
        learning_rate=learning_rate,
        beta=beta,
        weight_decay=weight_decay,
        mask=mask,
        groups=groups,
        compression=compression,
        backend=backend,
        matrices=matrices,
        others=core_of(flash_adamw(learning_rate, weight_decay=0.0)),
    )
