"""What a compressed optimizer does, parameter by parameter."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import PyTree

from mpx import _kernels
from mpx._grad_checks import undifferentiable
from mpx._optim._checks import (
    MOMENTS,
    check_correction,
    check_factor,
    check_grad,
    check_has_params,
    check_is_last,
    check_moment,
    check_state,
    is_trainable,
)
from mpx._optim._layout import check_layout, make_layout
from mpx._optim._leaf import Leaf, Plan
from mpx._optim._masks import decays
from mpx._optim._options import (
    Compression,
    ParamGroup,
    StateFormat,
    master_codec,
    moment_codec,
)
from mpx._optim._rules import Rule
from mpx._optim._scalars import Hyper, Scalars, as_scalar
from mpx._optim._state import (
    PARAM_DTYPES,
    FlashState,
    Flat,
    flatten,
    leaves_of,
    register_with_flax,
)
from mpx._quant import Quantized
from mpx._sharding import zero_beside, zeros_alike
from mpx._tree import as_flag, dtype_of


class Stepped(NamedTuple):
    """What a step returns.

    Attributes:
        params: The parameters after the step, in their own dtypes.
        state: The state after the step.
    """

    params: PyTree
    state: FlashState


class Ready(NamedTuple):
    """What the steps of all parameters share.

    Attributes:
        flat: The parameters.
        state: The state before the step.
        leaves: Each parameter with its state.
        decays: Which of them decay.
        scalars: The hyperparameters of this step.
    """

    flat: Flat
    state: FlashState
    leaves: list[Leaf]
    decays: list[bool]
    scalars: Scalars


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Core:
    """A rule, its hyperparameters, and how its state is stored; see `FlashOptimizer`.

    Attributes:
        rule: The update rule.
        hyper: Its hyperparameters: numbers, arrays, or schedules of the step count.
        mask: Which parameters decay: a tree of booleans, or what makes one of the
            parameters; `None` means all.
        groups: Options by parameter path; the first that matches holds.
        compression: How the state is stored.
        backend: Where steps run.
    """

    rule: Rule
    hyper: Mapping[str, Hyper]
    mask: Any
    groups: tuple[ParamGroup, ...]
    compression: Compression
    backend: _kernels.Backend

    def init(self, params: PyTree) -> FlashState:
        register_with_flax()
        flat = flatten(params)
        check_has_params(flat)
        self._check_groups(flat)
        columns: dict[str, list[Any]] = {name: [] for name in (*MOMENTS, "correction")}
        for name, param in zip(flat.names, flat.leaves, strict=True):
            stored = self._init_leaf(name, param)
            for column, values in columns.items():
                values.append(stored.get(column))
        return FlashState(
            count=zero_beside(flat.leaves, jnp.int32),
            mu=self._tree(flat, columns, "mu"),
            nu=self._tree(flat, columns, "nu"),
            correction=flat.bare.unflatten(columns["correction"]),
            layout=make_layout(
                self.rule.kind,
                self.compression.format,
                zip(flat.leaves, columns["correction"], strict=True),
            ),
            format=self.compression.format,
        )

    def _tree(self, flat: Flat, columns: Mapping[str, list[Any]], name: str) -> PyTree:
        if name not in self.rule.moments:
            return None
        return flat.bare.unflatten(columns[name])

    def _init_leaf(self, name: str, param: Any) -> dict[str, Any]:
        group = self._group(name, param)
        if _is_frozen(group) or not is_trainable(name, param):
            return {}
        compression = self._compression(group)
        stored: dict[str, Any] = {}
        for moment in self.rule.moments:
            codec = moment_codec(
                moment,
                quantized=compression.quantizes(param),
                format=compression.format,
            )
            stored[moment] = zeros_alike(param, codec.code_dtype)
            if codec.scale_dtype is not None:
                scale = zeros_alike(
                    param, codec.scale_dtype, group=compression.group_size
                )
                stored[moment] = Quantized(stored[moment], scale)
        dtype = compression.correction_dtype(param)
        if dtype is not None:
            stored["correction"] = zeros_alike(param, dtype)
        return stored

    def _group(self, name: str, param: Any) -> ParamGroup | None:
        return next((g for g in self.groups if g.matches(name, param)), None)

    def _compression(self, group: ParamGroup | None) -> Compression:
        if group is None or group.compression is None:
            return self.compression
        return group.compression

    def _check_groups(self, flat: Flat) -> None:
        in_force = [
            self._group(*pair) for pair in zip(flat.names, flat.leaves, strict=True)
        ]
        for group in self.groups:
            named = dict(zip(flat.names, flat.leaves, strict=True))
            group.check(named)
            if any(group is other for other in in_force):
                continue
            name, by = next(
                (name, by.where)
                for (name, leaf), by in zip(named.items(), in_force, strict=True)
                if by is not None and group.matches(name, leaf)
            )
            raise ValueError(
                f"The group {group.where!r}"
                f"{' with `frozen=True`' if group.frozen else ''} holds for no parameter: "
                f"`{name}` and all others belong to earlier ones, such as "
                f"{by!r}, and the first group that matches holds. Put it before."
            )

    # --- one step ---------------------------------------------------------------------

    def step(
        self,
        params: PyTree,
        state: FlashState,
        grads: PyTree,
        *,
        ok: Any = None,
        grad_scale: Any = 1.0,
    ) -> Stepped:
        flat = flatten(params)
        new, state = self._advance(flat, state, grads, ok=ok, grad_scale=grad_scale)
        return Stepped(flat.treedef.unflatten([leaf.param for leaf in new]), state)

    def update(
        self, updates: PyTree, state: FlashState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, FlashState]:
        """Returns f32 updates for `optax.apply_updates`; see `FlashOptimizer`.

        `eqx.apply_updates` would make f32 of 16-bit parameters.
        """
        if params is None:
            raise ValueError(
                "A compressed optimizer needs the parameters: call "
                "`update(grads, state, params)`."
            )
        flat = flatten(params)
        check_is_last(flat.leaves)
        grads = flat.like(updates, "The gradients")
        options = {key: extra[key] for key in ("ok", "grad_scale") if key in extra}
        new, state = self._advance(flat, state, updates, **options)
        deltas = [
            None if grad is None else _difference(leaf.param, param)
            for grad, leaf, param in zip(grads, new, flat.leaves, strict=True)
        ]
        return flat.treedef.unflatten(deltas), state

    def _advance(
        self,
        flat: Flat,
        state: FlashState,
        grads: PyTree,
        *,
        ok: Any = None,
        grad_scale: Any = 1.0,
    ) -> tuple[list[Leaf], FlashState]:
        flag = None if ok is None else as_flag(ok, "ok")
        ready = self.ready(flat, state, grad_scale)
        new: list[Leaf] = list(ready.leaves)
        jobs: dict[int, _kernels.Job] = {}
        for index, grad in enumerate(flat.like(grads, "The gradients")):
            if not _is_given(grad):
                continue
            job = self.job(ready, index)
            if job is not None:
                check_grad(job.name, job.leaf.param, grad)
                jobs[index] = job._replace(grad=grad)
        guarded = list(_guarded(jobs).values())
        done = _kernels.run(guarded, ok=flag, backend=self.backend)
        for index, leaf in zip(jobs, done, strict=True):
            new[index] = leaf
        return new, self.advanced(ready, new, flag)

    def ready(self, flat: Flat, state: FlashState, grad_scale: Any) -> "Ready":
        """Computes what the steps of all parameters share."""
        check_has_params(flat)
        check_state(state, self.rule, self.compression)
        scale = as_scalar("grad_scale", grad_scale)
        check_factor("grad_scale", grad_scale)
        leaves = leaves_of(flat, state, self.rule.moments)
        check_layout(state.layout, ((leaf.param, leaf.correction) for leaf in leaves))
        return Ready(
            flat,
            state,
            leaves,
            decays(self.mask, flat),
            Scalars(self.rule, self.hyper, state.count, scale),
        )

    def job(self, ready: "Ready", index: int) -> _kernels.Job | None:
        """Returns the step of one parameter, without its gradient.

        Returns `None` if it is frozen or no parameter.
        """
        name, leaf = ready.flat.names[index], ready.leaves[index]
        group = self._group(name, leaf.param)
        if _is_frozen(group) or not is_trainable(name, leaf.param):
            return None
        state = ready.state
        compression = self._compression(group)
        check_correction(name, leaf.param, leaf.correction, compression)
        plan = _plan(name, self.rule, leaf, state.format)
        # FlashOptim rounds to nearest.
        if state.format == "mpx" and compression.rounding == "dithered":
            plan = dataclasses.replace(plan, dithers=True)
        seed = None
        if compression.rounding == "stochastic":
            seed = _seed(compression.seed, index, state.count)
        return _kernels.Job(
            name=name,
            body=plan,
            scalars=ready.scalars.of(group, ready.decays[index]),
            grad=None,
            leaf=leaf,
            group_size=plan.group_size,
            seed=seed,
        )

    def advanced(
        self, ready: "Ready", leaves: list[Leaf], flag: Array | None
    ) -> FlashState:
        """Returns the state after a step, from the leaves after it."""
        flat, state = ready.flat, ready.state
        columns = {
            name: [leaf.moments[index] for leaf in leaves]
            for index, name in enumerate(self.rule.moments)
        }
        count = jnp.asarray(optax.safe_increment(state.count))
        return FlashState(
            count=count if flag is None else jnp.where(flag, count, state.count),
            mu=self._tree(flat, columns, "mu"),
            nu=self._tree(flat, columns, "nu"),
            correction=flat.bare.unflatten([leaf.correction for leaf in leaves]),
            layout=state.layout,
            format=state.format,
        )


_constant = undifferentiable(
    "The step of a compressed optimizer has no derivative: its state is stored in "
    "integers. If the step is a constant here, pass parameters, state and gradients "
    "through `lax.stop_gradient`. With f32 parameters and `Compression(quantize=False)` "
    "a step can be differentiated."
)


def _guarded(jobs: Mapping[int, _kernels.Job]) -> dict[int, _kernels.Job]:
    """Returns steps that raise if they are differentiated, unless all is in floats.

    To JAX the integers of codes and corrections are constants, so that derivatives would
    be zero, or those of a part of the formulas.
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


def _dithers(body: Any) -> bool:
    return isinstance(body, Plan) and body.dithers


def _plan(name: str, rule: Rule, leaf: Leaf, format: StateFormat) -> Plan:
    """Reads off the state how a leaf is stored."""
    codecs = []
    group_size = 0
    for moment, stored in zip(rule.moments, leaf.moments, strict=True):
        quantized = isinstance(stored, Quantized)
        codec = moment_codec(moment, quantized=quantized, format=format)
        codecs.append(codec)
        check_moment(name, leaf.param, moment, stored, codec)
        if quantized:
            size = leaf.param.shape[-1] // stored.scale.shape[-1]
            if group_size not in (0, size):
                raise ValueError(
                    f"The moments of `{name}` are in groups of {group_size} and of {size} "
                    "elements, but there must be one size. Make the state with "
                    "`init(params)` of one optimizer."
                )
            group_size = size
    dtype = None if leaf.correction is None else leaf.correction.dtype
    master = master_codec(leaf.param.dtype, dtype, format)
    return Plan(rule, master, tuple(codecs), group_size)


def _seed(seed: int, index: int, count: Array) -> Array:
    fixed = np.uint32((seed * 0xC2B2AE3D + index * 0x85EBCA77) & 0xFFFFFFFF)
    return count.astype(jnp.uint32) * np.uint32(0x9E3779B1) + fixed


def _difference(new: Any, old: Any) -> Any:
    """Returns what, added to the parameter in f32 and rounded, gives the new one.

    Exactly so for 16 bits, unless the new one is smaller by 2¹⁶ and more: then it is off
    by no more than an f32 rounding of the old one.
    """
    if dtype_of(old) in PARAM_DTYPES:
        new, old = (jnp.asarray(x).astype(jnp.float32) for x in (new, old))
        return jnp.where(new == old, 0.0, new - old)  # inf - inf is nan
    return jnp.zeros_like(old)


def _is_frozen(group: ParamGroup | None) -> bool:
    return group is not None and group.frozen


def _is_given(grad: Any) -> bool:
    return grad is not None and dtype_of(grad) != jax.dtypes.float0
