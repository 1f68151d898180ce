"""The engine of the compressed optimizers: makes states, and steps parameter by parameter."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PyTree

from mpx import _kernels
from mpx._jax._compat import undifferentiable
from mpx._jax._tree import as_flag, check_shape, dtype_of
from mpx._optim._options import (
    Compression,
    Hyper,
    ParamGroup,
    as_scalar,
    check_groups_match,
    group_of,
)
from mpx._optim._packing import LeafStep, PackedLeaf, first_state
from mpx._optim._params import (
    F32,
    PARAM_DTYPES,
    FlatParams,
    Mask,
    check_has_params,
    decays,
    flatten_params,
    is_trainable,
)
from mpx._optim._state import (
    FlashState,
    check_packed,
    check_state,
    leaves_of,
    make_state,
    register_with_flax,
)
from mpx._optim._update_rules import Rule
from mpx._quant import dither_of
from mpx._updates._optax_checks import transforms_after


@dataclasses.dataclass(frozen=True, eq=False)
class Core:
    """A rule, its hyperparameters, and the other options of a `FlashOptimizer`."""

    rule: Rule
    hyper: Mapping[str, Hyper]
    mask: Mask
    groups: tuple[ParamGroup, ...]
    compression: Compression
    backend: _kernels.Backend

    def init(self, params: PyTree) -> FlashState:
        register_with_flax()
        flat = flatten_params(params)
        check_has_params(flat)
        check_groups_match(self.groups, flat)
        kind, moments = self.rule.kind, self.rule.moments
        leaves = []
        for name, param in zip(flat.names, flat.leaves, strict=True):
            _, stored = self.options(name, param)
            packed = stored and first_state(name, param, moments, stored)
            leaves.append(PackedLeaf(param, packed))
        return make_state(kind, self.compression.format, moments, leaves, flat.bare)

    def options(
        self, name: str, param: PyTree
    ) -> tuple[ParamGroup | None, Compression | None]:
        """Returns the group of a leaf, and its storage: `None` if it does not train."""
        group = group_of(self.groups, name, param)
        if (group is not None and group.frozen) or not is_trainable(name, param):
            return group, None
        return group, (group and group.compression) or self.compression

    def update(
        self,
        updates: PyTree,
        state: FlashState,
        params: PyTree = None,
        **extra: ArrayLike,
    ) -> tuple[PyTree, FlashState]:
        """Returns f32 updates for `optax.apply_updates`; see `FlashOptimizer`."""
        if params is None:
            raise ValueError(
                "A compressed optimizer needs the parameters: call "
                "`update(grads, state, params)`."
            )
        flat = flatten_params(params)
        _check_is_last(flat.leaves)
        grads = flat.like(updates, "The gradients")
        options = {key: extra[key] for key in ("finite", "grad_scale") if key in extra}
        new, state = self.advance(flat, state, updates, **options)
        deltas = [
            None if grad is None else _difference(leaf.param, param)
            for grad, leaf, param in zip(grads, new, flat.leaves, strict=True)
        ]
        return flat.treedef.unflatten(deltas), state

    def advance(
        self,
        flat: FlatParams,
        state: FlashState,
        grads: PyTree,
        *,
        finite: ArrayLike | None = None,
        grad_scale: ArrayLike = 1.0,
    ) -> tuple[list[PackedLeaf], FlashState]:
        """Steps all parameters that have gradients."""
        flag = None if finite is None else as_flag(finite, "finite")
        step = Step(self, flat, state, grad_scale)
        jobs: dict[int, _kernels.Job] = {}
        for index, grad in enumerate(flat.like(grads, "The gradients")):
            if grad is None or dtype_of(grad) == jax.dtypes.float0:
                continue
            job = step.job(index)
            if job is not None:
                _check_grad(job, grad)
                jobs[index] = job._replace(grad=grad)
        if not jobs and any(step.job(i) for i in range(len(flat.leaves))):
            raise ValueError(
                "None of the parameters has a gradient, so the step would move nothing, "
                "but count. Pass the gradients as a tree like the parameters, with None "
                "only where a parameter must not change."
            )
        done = _kernels.run(_guarded(jobs), finite=flag, backend=self.backend)
        new = list(step.leaves)
        for index, leaf in zip(jobs, done, strict=True):
            new[index] = leaf
        return new, step.state_after(new, flag)


class Step:
    """One step of all parameters: what their steps share.

    Attributes:
        leaves: Each parameter with its state, before the step.
    """

    def __init__(
        self, core: Core, flat: FlatParams, state: FlashState, grad_scale: ArrayLike
    ) -> None:
        check_has_params(flat)
        check_state(state, core.rule, core.compression)
        self._core, self._flat, self._state = core, flat, state
        self._scale = as_scalar("grad_scale", grad_scale)
        self.leaves, self._packings = leaves_of(flat, state)
        self._decays = decays(core.mask, flat)
        self._known: dict[tuple[int, bool], Array] = {}

    def scalars(self, group: ParamGroup | None, decays: bool) -> Array:
        """Returns the scalars of a `LeafStep` in one f32 array, computed once."""
        key = (id(group), decays)
        if key not in self._known:
            rule, count = self._core.rule, self._state.count
            hyper = {**self._core.hyper, **(group.hyper if group else {})}
            if not decays:
                hyper["weight_decay"] = 0.0
            values = {
                name: as_scalar(name, x(count) if callable(x) else x)
                for name, x in ((name, hyper[name]) for name in rule.hyper)
            }
            # As in the state: the largest int32 plus one would be negative.
            step = jnp.asarray(optax.safe_increment(count))
            numbers = rule.coefficients(values, step.astype(jnp.float32))
            self._known[key] = jnp.stack([self._scale, *dither_of(step), *numbers])
        return self._known[key]

    def job(self, index: int) -> _kernels.Job | None:
        """Returns the step of one leaf without its gradient; `None` if it does not train."""
        name, leaf = self._flat.names[index], self.leaves[index]
        packing, param = self._packings[index], leaf.param
        group, compression = self._core.options(name, param)
        if compression is None:
            return None
        group_size = check_packed(name, leaf, packing)
        if packing.correction is None and compression.correction_dtype(param):
            raise ValueError(
                f"`{name}` is {param.dtype}, but `state.correction` has nothing for "
                f"it, while the optimizer has `master_bits={compression.master_bits}`: "
                "small updates would be lost. Call init after casting the model, or use "
                "`Compression(master_bits=None)`."
            )
        # FlashOptim rounds to nearest.
        dithers = self._state.format == "mpx" and compression.rounding == "dithered"
        body = LeafStep(self._core.rule, packing, group_size, dithers)
        scalars = self.scalars(group, self._decays[index])
        return _kernels.Job(name, body, scalars, None, leaf)

    def state_after(
        self, leaves: Sequence[PackedLeaf], finite: Array | None
    ) -> FlashState:
        """Returns the state after the step, from the leaves after it."""
        old = self._state
        count = jnp.asarray(optax.safe_increment(old.count))
        count = count if finite is None else jnp.where(finite, count, old.count)
        packed = self._flat.bare.unflatten(leaf.packed for leaf in leaves)
        return dataclasses.replace(old, count=count, packed=packed)


_constant = undifferentiable(
    "The step of a compressed optimizer has no derivative: its state is stored in "
    "integers. If the step is a constant here, pass parameters, state and gradients "
    "through `lax.stop_gradient`. With f32 parameters and `Compression(quantize=False)` "
    "a step can be differentiated."
)


def _guarded(jobs: Mapping[int, _kernels.Job]) -> list[_kernels.Job]:
    """Returns steps that raise if they are differentiated, unless all is in f32.

    JAX treats the integers of codes and corrections as constants: derivatives would be
    zero, or those of a part of the formulas.
    """
    coded = {
        index: {"scalars": job.scalars, "grad": job.grad, "leaf": job.leaf}
        for index, job in jobs.items()
        if any(x.dtype != F32 for x in jax.tree.leaves(job.leaf))
    }
    safe = _constant(coded)
    return [job._replace(**safe.get(index, {})) for index, job in jobs.items()]


def _check_grad(job: _kernels.Job, grad: PyTree) -> None:
    """Raises if a gradient does not fit its parameter."""
    check_shape(f"The gradient of `{job.name}`", grad, job.leaf.param)
    dtype = dtype_of(grad)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"The gradient of `{job.name}` is {dtype or type(grad).__name__}, but a "
            "floating array was expected. Pass `None` for parameters that must not change."
        )


def _difference(new: PyTree, old: PyTree) -> Array:
    """Returns what, added to the parameter in f32 and rounded, gives the new one.

    It is exact for 16 bits, unless the new one is smaller by a factor of 2¹⁶ or more: then
    it is off by at most an f32 rounding of the old one.
    """
    if dtype_of(old) in PARAM_DTYPES:
        new, old = (jnp.asarray(x).astype(jnp.float32) for x in (new, old))
        return jnp.where(new == old, 0.0, new - old)  # inf - inf is nan
    return jnp.zeros_like(old)


def _check_is_last(params: Sequence[PyTree]) -> None:
    """Raises if a chain would change the updates of 16-bit parameters.

    f32 parameters have no correction, and their updates may be changed.
    """
    if not any(dtype_of(param) in PARAM_DTYPES[1:] for param in params):
        return
    if later := transforms_after():
        raise ValueError(
            "A compressed optimizer must be the last of a chain, but after it come "
            f"{', '.join(later)}. Its state holds the remainder of rounding the new "
            "16-bit parameters; with other updates they would become different ones, and "
            "may not move at all. Put what changes gradients before it, and the factor of "
            "a learning rate or schedule into `learning_rate`."
        )
