"""A compressed optimizer: a rule, its hyperparameters, and how its state is stored."""

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
from mpx._optim._checks import (
    check_backend,
    check_grad,
    check_groups,
    check_hyper,
    is_trainable,
)
from mpx._optim._leaf import Leaf, Plan
from mpx._optim._options import (
    Compression,
    ParamGroup,
    StateFormat,
    master_codec,
    moment_codec,
)
from mpx._optim._rules import Rule
from mpx._optim._scalars import Hyper, Scalars
from mpx._optim._state import PARAM_DTYPES, FlashState, Flat, flatten, leaves_of
from mpx._quant import Quantized
from mpx._sharding import zeros_alike
from mpx._tree import as_flag, dtype_of

_MOMENTS = ("mu", "nu")


class Stepped(NamedTuple):
    """What a step returns.

    Attributes:
        params: The parameters after the step, in their own dtypes.
        state: The state after the step.
    """

    params: PyTree
    state: FlashState


class FlashOptimizer(optax.GradientTransformationExtraArgs):
    """A compressed optimizer: an optax transformation with a faster way to step.

    `step` updates parameters and state in one pass over memory, in place if they are
    donated. `update` is what optax calls: its result goes to `optax.apply_updates` and
    nothing else may change it on the way, because the state remembers what the rounding
    of the new parameters leaves over.

    Attributes:
        init: Makes the state: `init(params)`.
        update: What optax calls: `update(grads, state, params, *, ok, grad_scale)`.
    """

    def step(
        self,
        params: PyTree,
        state: FlashState,
        grads: PyTree,
        *,
        ok: Any = None,
        grad_scale: Any = 1.0,
    ) -> Stepped:
        """Takes one step.

        Args:
            params: The parameters, or a whole model: leaves that are not floating come
                back as they are.
            state: The state, from `init(params)` or the last step.
            grads: The gradients, `None` where a parameter is not to change.
            ok: A boolean scalar. If it is false, nothing changes, the step count
                neither. `None` means true.
            grad_scale: What the gradients are multiplied by, a scalar: one over the
                loss scale, times the factor of a gradient clip.

        Returns:
            The parameters and the state after the step.

        Raises:
            ValueError: If gradients or state do not fit the parameters; the leaf is
                named.
        """
        init: Any = self.init  # a method of the core, which optax's tuple cannot hold
        core: _Core = init.__self__
        return core.step(params, state, grads, ok=ok, grad_scale=grad_scale)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _Core:
    """See `FlashOptimizer`.

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
        flat = flatten(params)
        self._check_groups(flat)
        columns: dict[str, list[Any]] = {name: [] for name in (*_MOMENTS, "correction")}
        for name, param in zip(flat.names, flat.leaves, strict=True):
            stored = self._init_leaf(name, param)
            for column, values in columns.items():
                values.append(stored.get(column))
        return FlashState(
            count=jnp.zeros((), jnp.int32),
            mu=self._tree(flat, columns, "mu"),
            nu=self._tree(flat, columns, "nu"),
            correction=flat.bare.unflatten(columns["correction"]),
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
        for group in self.groups:
            pairs = zip(flat.names, flat.leaves, strict=True)
            if not any(group.matches(*pair) for pair in pairs):
                raise ValueError(
                    f"No parameter belongs to the group {group.where!r}. The paths are "
                    f"{flat.names[:8]}{' …' if len(flat.names) > 8 else ''}."
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
        if params is None:
            raise ValueError(
                "A compressed optimizer needs the parameters: call "
                "`update(grads, state, params)`."
            )
        flat = flatten(params)
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
        scale = jnp.asarray(grad_scale, jnp.float32)
        leaves = leaves_of(flat, state, self.rule.moments)
        masked = self._decays(flat)
        scalars = Scalars(self.rule, self.hyper, state.count, scale)
        new: list[Leaf] = list(leaves)
        jobs: dict[int, _kernels.Job] = {}
        for index, (name, leaf, grad, decays) in enumerate(
            zip(
                flat.names,
                leaves,
                flat.like(grads, "The gradients"),
                masked,
                strict=True,
            )
        ):
            group = self._group(name, leaf.param)
            if (
                _is_frozen(group)
                or not is_trainable(name, leaf.param)
                or not _is_given(grad)
            ):
                continue
            check_grad(name, leaf.param, grad)
            plan = _plan(name, self.rule, leaf, state.format)
            compression = self._compression(group)
            seed = None
            if compression.rounding == "stochastic":
                seed = _seed(compression.seed, index, state.count)
            jobs[index] = _kernels.Job(
                name=name,
                body=plan,
                scalars=scalars.of(group, decays),
                grad=grad,
                leaf=leaf,
                group_size=plan.group_size,
                seed=seed,
            )
        done = _kernels.run(list(jobs.values()), ok=flag, backend=self.backend)
        for index, leaf in zip(jobs, done, strict=True):
            new[index] = leaf
        columns = {
            name: [leaf.moments[index] for leaf in new]
            for index, name in enumerate(self.rule.moments)
        }
        count = jnp.asarray(optax.safe_increment(state.count))
        return new, FlashState(
            count=count if flag is None else jnp.where(flag, count, state.count),
            mu=self._tree(flat, columns, "mu"),
            nu=self._tree(flat, columns, "nu"),
            correction=flat.bare.unflatten([leaf.correction for leaf in new]),
            format=state.format,
        )

    def _decays(self, flat: Flat) -> list[bool]:
        if self.mask is None:
            return [True] * len(flat.leaves)
        params = flat.treedef.unflatten(flat.leaves)
        mask = self.mask(params) if callable(self.mask) else self.mask
        try:
            # A boolean may stand for a whole part of the tree.
            full = jax.tree.map(
                lambda keep, part: jax.tree.map(
                    lambda _: bool(keep), part, is_leaf=_is_none
                ),
                mask,
                params,
            )
        except ValueError as error:
            raise ValueError(
                "`mask` must have the structure of the parameters or be the beginning "
                f"of it. {error}"
            ) from error
        return [bool(keep) for keep in flat.like(full, "`mask`")]


def _plan(name: str, rule: Rule, leaf: Leaf, format: StateFormat) -> Plan:
    """Reads off the state how a leaf is stored."""
    codecs = []
    group_size = 0
    for moment, stored in zip(rule.moments, leaf.moments, strict=True):
        quantized = isinstance(stored, Quantized)
        codec = moment_codec(moment, quantized=quantized, format=format)
        codecs.append(codec)
        if stored is None:
            raise ValueError(
                f"The optimizer state has no {moment} for `{name}`. Make it with "
                "`init(params)` of the same optimizer."
            )
        if quantized:
            if stored.scale.dtype != codec.scale_dtype:
                raise ValueError(
                    f"The scales of `{name}` are {stored.scale.dtype}, but the format "
                    f"{format!r} has {codec.scale_dtype}: the state was written in "
                    "another format."
                )
            group_size = leaf.param.shape[-1] // stored.scale.shape[-1]
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
        return new.astype(jnp.float32) - jnp.asarray(old).astype(jnp.float32)
    return jnp.zeros_like(old)


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _is_frozen(group: ParamGroup | None) -> bool:
    return group is not None and group.frozen


def _is_given(grad: Any) -> bool:
    return grad is not None and dtype_of(grad) != jax.dtypes.float0


def build(
    rule: Rule,
    hyper: Mapping[str, Hyper],
    *,
    mask: Any,
    groups: Any,
    compression: Compression,
    backend: _kernels.Backend,
) -> FlashOptimizer:
    """Makes an optimizer of a rule and a user's options.

    Raises:
        ValueError: If an option is unknown or out of its range.
    """
    groups = tuple(groups)
    check_backend(backend)
    check_groups(groups, rule, compression)
    for values in (hyper, *(group.hyper for group in groups)):
        check_hyper(values)
    core = _Core(
        rule=rule,
        hyper=dict(hyper),
        mask=mask,
        groups=groups,
        compression=compression,
        backend=backend,
    )
    init: Any = core.init  # optax's types know no states of one's own
    update: Any = core.update
    return FlashOptimizer(init, update)
