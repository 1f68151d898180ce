"""The engine of the compressed optimizers: makes states, and steps parameter by parameter."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PyTree

from mpx import _kernels
from mpx._jax._compat import undifferentiable
from mpx._jax._sharding import zero_beside
from mpx._jax._tree import as_flag, dtype_of
from mpx._optim._options import (
    Compression,
    ParamGroup,
    check_groups_match,
    group_of,
)
from mpx._optim._packing import (
    PackedLeaf,
    PackedStep,
    Packing,
    packed_step,
    place_masters,
)
from mpx._optim._params import (
    PARAM_DTYPES,
    FlatParams,
    Mask,
    check_grad,
    check_has_params,
    decays,
    flatten_params,
    is_trainable,
)
from mpx._optim._scalars import Hyper, StepScalars, as_grad_scale
from mpx._optim._state import (
    FlashState,
    check_packed,
    check_state,
    leaves_of,
    make_layout,
    packed_tree,
    register_with_flax,
)
from mpx._optim._update_rules import Rule
from mpx._quant import Packed
from mpx._updates._optax_checks import transforms_behind


class Ready(NamedTuple):
    """Inputs that the steps of all parameters share.

    Attributes:
        flat: The parameters.
        state: The state before the step.
        leaves: Each parameter with its state.
        packings: How each state is packed.
        decays: Which of them decay.
        scalars: The hyperparameters of this step.
    """

    flat: FlatParams
    state: FlashState
    leaves: list[PackedLeaf]
    packings: list[Packing]
    decays: list[bool]
    scalars: StepScalars


@dataclasses.dataclass(frozen=True, eq=False)
class Core:
    """A rule, its hyperparameters, and how its state is stored; see `FlashOptimizer`.

    Attributes:
        rule: The update rule.
        hyper: Its hyperparameters: numbers, arrays, or schedules of the step count.
        mask: Which parameters decay.
        groups: Options by parameter path; the first group that matches holds.
        compression: How the state is stored.
        backend: Where steps run.
    """

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
        leaves, corrections = [], []
        for name, param in zip(flat.names, flat.leaves, strict=True):
            group = group_of(self.groups, name, param)
            compression = self._compression(group, name, param)
            packed, correction = Packed(None, None), None
            if compression is not None:
                correction = compression.correction_dtype(param)
                packed = self._first(name, param, compression, correction)
            leaves.append(PackedLeaf(param, *packed))
            corrections.append(correction)
        layout = make_layout(
            self.rule.kind,
            self.compression.format,
            zip(flat.leaves, corrections, strict=True),
        )
        return self._state(flat, leaves, zero_beside(flat.leaves, jnp.int32), layout)

    def _first(
        self,
        name: str,
        param: Any,
        compression: Compression,
        correction: np.dtype | None,
    ) -> Packed:
        """Returns the state of a parameter before the first step."""
        packing = Packing.make(
            self.rule.moments,
            compression.format,
            quantized=compression.quantizes(param),
            correction=correction,
        )
        packed = packing.zeros(param, compression.group_size)
        if correction is None or not compression.jitter:
            return packed
        return place_masters(name, param, packed, packing, compression)

    def _compression(
        self, group: ParamGroup | None, name: str, param: Any
    ) -> Compression | None:
        """Returns how a parameter is stored; `None` if it is frozen or not a parameter."""
        if (group is not None and group.frozen) or not is_trainable(name, param):
            return None
        return (group and group.compression) or self.compression

    def _state(
        self,
        flat: FlatParams,
        leaves: Sequence[PackedLeaf],
        count: Any,
        layout: PyTree,
    ) -> FlashState:
        return FlashState(
            count=count,
            packed=packed_tree(flat, leaves),
            layout=layout,
            format=self.compression.format,
            moments=self.rule.moments,
        )

    # --- one step ---------------------------------------------------------------------

    def update(
        self, updates: PyTree, state: FlashState, params: PyTree = None, **extra: Any
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
        ready = self.ready(flat, state, grad_scale)
        new: list[PackedLeaf] = list(ready.leaves)
        jobs: dict[int, _kernels.Job] = {}
        for index, grad in enumerate(flat.like(grads, "The gradients")):
            if grad is None or dtype_of(grad) == jax.dtypes.float0:
                continue
            job = self.job(ready, index)
            if job is not None:
                check_grad(job.name, job.leaf.param, grad)
                jobs[index] = job._replace(grad=grad)
        if not jobs and any(self.job(ready, i) for i in range(len(flat.leaves))):
            raise ValueError(
                "None of the parameters has a gradient, so the step would move nothing, "
                "but count. Pass the gradients as a tree like the parameters, with None "
                "only where a parameter must not change."
            )
        guarded = list(_guarded(jobs).values())
        done = _kernels.run(guarded, finite=flag, backend=self.backend)
        for index, leaf in zip(jobs, done, strict=True):
            new[index] = leaf
        return new, self.advanced(ready, new, flag)

    def ready(
        self, flat: FlatParams, state: FlashState, grad_scale: ArrayLike
    ) -> Ready:
        """Computes what the steps of all parameters share."""
        check_has_params(flat)
        check_state(state, self.rule, self.compression)
        scale = as_grad_scale(grad_scale)
        leaves, packings = leaves_of(flat, state)
        scalars = StepScalars(self.rule, self.hyper, state.count, scale)
        return Ready(flat, state, leaves, packings, decays(self.mask, flat), scalars)

    def job(self, ready: Ready, index: int) -> _kernels.Job | None:
        """Returns the step of one parameter, without its gradient.

        Returns `None` if it is frozen or not a parameter.
        """
        name, leaf = ready.flat.names[index], ready.leaves[index]
        packing, param = ready.packings[index], leaf.param
        group = group_of(self.groups, name, param)
        compression = self._compression(group, name, param)
        if compression is None:
            return None
        state = ready.state
        group_size = check_packed(name, leaf, packing)
        if packing.correction is None and compression.correction_dtype(param):
            raise ValueError(
                f"`{name}` is {param.dtype}, but `state.correction` has nothing for "
                f"it, while the optimizer has `master_bits={compression.master_bits}`: "
                "small updates would be lost. Call init after casting the model, or use "
                "`Compression(master_bits=None)`."
            )
        # FlashOptim rounds to nearest.
        dithers = state.format == "mpx" and compression.rounding == "dithered"
        seed = None
        if compression.rounding == "stochastic":
            seed = _seed(compression.seed, index, state.count)
        step = packed_step(
            self.rule,
            param.dtype,
            packing,
            state.format,
            group_size=group_size,
            dithers=dithers,
        )
        return _kernels.Job(
            name=name,
            body=step,
            scalars=ready.scalars.of(group, ready.decays[index]),
            grad=None,
            leaf=leaf,
            group_size=group_size,
            seed=seed,
        )

    def advanced(
        self, ready: Ready, leaves: Sequence[PackedLeaf], flag: Array | None
    ) -> FlashState:
        """Returns the state after a step, from the leaves after it."""
        old = ready.state
        count = jnp.asarray(optax.safe_increment(old.count))
        count = count if flag is None else jnp.where(flag, count, old.count)
        return self._state(ready.flat, leaves, count, old.layout)


_constant = undifferentiable(
    "The step of a compressed optimizer has no derivative: its state is stored in "
    "integers. If the step is a constant here, pass parameters, state and gradients "
    "through `lax.stop_gradient`. With f32 parameters and `Compression(quantize=False)` "
    "a step can be differentiated."
)


def _guarded(jobs: Mapping[int, _kernels.Job]) -> dict[int, _kernels.Job]:
    """Returns steps that raise if they are differentiated, unless all is in floats.

    JAX treats the integers of codes and corrections as constants: derivatives would be
    zero, or those of a part of the formulas.
    """
    coded = {
        index: {"scalars": job.scalars, "grad": job.grad, "leaf": job.leaf}
        for index, job in jobs.items()
        if job.seed is not None
        or (_dithers(job.body) and job.leaf.param.dtype.itemsize == 2)
        or any(x.dtype.kind in "iu" for x in jax.tree.leaves(job.leaf))
    }
    safe = _constant(coded)
    return {index: job._replace(**safe.get(index, {})) for index, job in jobs.items()}


def _dithers(body: _kernels.Body) -> bool:
    return isinstance(body, PackedStep) and body.step.dithers


def _seed(seed: int, index: int, count: Array) -> Array:
    fixed = np.uint32((seed * 0xC2B2AE3D + index * 0x85EBCA77) & 0xFFFFFFFF)
    return count.astype(jnp.uint32) * np.uint32(0x9E3779B1) + fixed


def _difference(new: Any, old: Any) -> Any:
    """Returns what, added to the parameter in f32 and rounded, gives the new one.

    It is exact for 16 bits, unless the new one is smaller by a factor of 2¹⁶ or more: then
    it is off by at most an f32 rounding of the old one.
    """
    if dtype_of(old) in PARAM_DTYPES:
        new, old = (jnp.asarray(x).astype(jnp.float32) for x in (new, old))
        return jnp.where(new == old, 0.0, new - old)  # inf - inf is nan
    return jnp.zeros_like(old)


def _check_is_last(params: Sequence[Any]) -> None:
    """Raises if a chain would change the updates of 16-bit parameters.

    f32 parameters have no correction, and their updates may be changed.
    """
    if not any(dtype_of(param) in PARAM_DTYPES[1:] for param in params):
        return
    if behind := transforms_behind():
        raise ValueError(
            "A compressed optimizer must be the last of a chain, but behind it are "
            f"{', '.join(behind)}. Its state holds the remainder of rounding the new "
            "16-bit parameters; with other updates they would become different ones, and "
            "may not move at all. Put what changes gradients before it, and the factor of "
            "a learning rate or schedule into `learning_rate`."
        )
