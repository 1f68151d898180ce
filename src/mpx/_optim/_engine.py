"""The compressed optimizers: interface and engine."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PyTree

from mpx._casting._policy import cast_params
from mpx._casting._select import Selectors
from mpx._jax._arguments import refuse_result
from mpx._jax._compat import undifferentiable
from mpx._jax._tree import as_flag, dtype_of
from mpx._kernels import _dispatch as _kernels
from mpx._optim._muon import Matrices, muon_rules, run
from mpx._optim._options import (
    F32,
    PARAM_DTYPES,
    Compression,
    FlatParams,
    Hyper,
    Mask,
    ParamGroup,
    as_scalar,
    group_of,
    is_trainable,
)
from mpx._optim._packing import LeafStep, PackedLeaf, first_state
from mpx._optim._state import (
    FlashState,
    Stepped,
    check_packed,
    leaves_of,
    make_state,
    put_masters,
    register_with_flax,
    with_leaves,
)
from mpx._optim._update_rules import Muon, Rule
from mpx._quant._codecs import dither_of
from mpx._scaling._update import check_grad, transforms_after

_NO_DECAY = {"weight_decay": 0.0}


class FlashOptimizer(optax.GradientTransformationExtraArgs):
    """A compressed optimizer: an optax transformation with a faster way to step.

    Start with `init_from`, which takes the f32 weights. `step` updates parameters and state
    in one pass over memory, in place if they are donated.

    Attributes:
        init: Makes the state of parameters as they are: `init(params)`. For masters of
            16-bit parameters see `Compression.jitter`. Given `ShapeDtypeStruct`s, every
            leaf of the state is one, sharded like the parameters.
        update: The optax interface: `update(grads, state, params, *, finite, grad_scale)`.
            Its f32 updates must reach `optax.apply_updates` or `mpx.optimizer_update`,
            which keep the dtypes of parameters, unchanged: the state holds the remainder of
            rounding the new parameters. In a chain it is the last member.
    """

    def init_from(
        self, params: PyTree, dtype: DTypeLike = jnp.bfloat16, *, keep: Selectors = ()
    ) -> Stepped:
        """Makes 16-bit parameters and their state from f32 weights.

        The masters hold the f32 weights, to the precision of their format.

        Args:
            params: The f32 weights, or a whole model: arrays or `ShapeDtypeStruct`s.
                Running statistics stay f32: `eqx.nn.State`, `batch_stats` of Flax Linen
                and NNX variables other than `nnx.Param`. Parameters that have 16 bits
                already start as with `init`. Frozen ones are rounded.
            dtype: The dtype of the parameters: bf16, f16, or f32 to leave them as they are.
            keep: Parameters that stay as they are: a selector as in `ParamGroup`.

        Returns:
            The parameters and their state, with the shardings of the weights.

        Raises:
            ValueError: If `dtype` is not a floating dtype of at least 16 bits, or if
                `keep` selects nothing.

        Examples:
            >>> from mpx.optim import flash_adamw, master_params
            >>> params, state = flash_adamw(1e-3).init_from({"w": jnp.full((64, 64), 0.1)})
            >>> params["w"].dtype, float(params["w"][0, 0])
            (dtype(bfloat16), 0.10009765625)
            >>> abs(float(master_params(params, state)["w"][0, 0]) - 0.1) < 1e-6
            True
        """
        low = cast_params(params, dtype, keep)
        flat, state = FlatParams.of(low), core_of(self).init(low)
        # Those that had 16 bits before keep the masters that `init` gave them.
        weights = [
            None if dtype_of(old) == dtype_of(new) else old
            for old, new in zip(flat.like(params, "`params`"), flat.leaves, strict=True)
        ]
        return put_masters(flat, state, weights)

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
            params: The parameters, or a whole model, of which other leaves do not change.
            state: The state, from `init(params)` or the last step.
            grads: The gradients, `None` where a parameter must not change.
            finite: A boolean scalar. If it is false, nothing changes, not even the step
                count. `None` means true.
            grad_scale: The factor of the gradients, a scalar: one over the loss scale,
                times the factor of a gradient clip.

        Raises:
            ValueError: If gradients or state do not fit the parameters.
        """
        core, flat = core_of(self), FlatParams.of(params)
        flag = None if finite is None else as_flag(finite, "finite")
        refuse_result(grads)
        step = Step(core, flat, state, grad_scale)
        jobs: dict[int, _kernels.Job] = {}
        for index, grad in enumerate(flat.like(grads, "The gradients")):
            has_grad = grad is not None and dtype_of(grad) != jax.dtypes.float0
            if has_grad and (job := step.job(index)) is not None:
                check_grad(job.name, job.leaf.param, grad)
                jobs[index] = job._replace(grad=jnp.asarray(grad))
        if not jobs and any(map(step.job, range(len(flat.leaves)))):
            raise ValueError(
                "None of the parameters has a gradient, so the step would move nothing, "
                "but count. Pass the gradients as a tree like the parameters, with None "
                "only where a parameter must not change."
            )
        done = run(_guarded(jobs), finite=flag, backend=core.backend)
        return step.result(dict(zip(jobs, done, strict=True)), flag)


# --- the engine -----------------------------------------------------------------------


class Method(NamedTuple):
    """How one parameter steps, and how its state is stored: `None` if it does not train."""

    rule: Rule
    hyper: Mapping[str, Hyper]
    compression: Compression | None


@dataclasses.dataclass(frozen=True, eq=False)
class Core:
    """A rule, its hyperparameters, and the other options of a `FlashOptimizer`.

    Attributes:
        matrices: For Muon: which axes of each parameter are those of a matrix.
        others: For Muon: the optimizer of parameters that are no matrices.
    """

    rule: Rule
    hyper: Mapping[str, Hyper]
    mask: Mask
    groups: tuple[ParamGroup, ...]
    compression: Compression
    backend: _kernels.Backend
    matrices: Matrices = None
    others: "Core | None" = None

    @property
    def optimizer(self) -> FlashOptimizer:
        methods: Any = self.init, self.update  # optax's types allow for no other states
        return FlashOptimizer(*methods)

    @property
    def moments(self) -> tuple[str, ...]:
        """The moments of the parameters that have most of them."""
        cores = [core_of(x.optimizer) for x in self.groups if x.optimizer is not None]
        cores += [self] if self.others is None else [self, self.others]
        return max((core.rule.moments for core in cores), key=len)

    def methods(self, flat: FlatParams, mask: Mask = None) -> list[Method]:
        """Returns how each parameter steps."""
        rules: Sequence[Rule | None] = [self.rule] * len(flat.leaves)
        if isinstance(self.rule, Muon):
            rules = muon_rules(self.rule, self.matrices, flat)
        found, decays = list[Method](), flat.decays(mask)
        for name, x, rule, decay in zip(*flat[:2], rules, decays, strict=True):
            group = group_of(self.groups, name, x)
            core: Any = self if rule is not None else self.others
            if group.optimizer is not None:
                core, rule = core_of(group.optimizer), None
            hyper = {**core.hyper, **group.hyper, **({} if decay else _NO_DECAY)}
            trains = not group.frozen and is_trainable(name, x)
            compression = (group.compression or self.compression) if trains else None
            found.append(Method(rule or core.rule, hyper, compression))
        return found

    def check(self, state: object) -> None:
        """Raises if a state is none, or that of another optimizer."""
        if not isinstance(state, FlashState):
            raise TypeError(
                "A compressed optimizer expected the FlashState from `init(params)` or "
                f"from its last step; got {type(state).__name__}. In a larger optax state "
                "it is one of the members."
            )
        made = state.kind, state.format, state.moments
        needed = self.rule.kind, self.compression.format, self.moments
        if made != needed:
            came, own = (
                f"of the kind {kind!r}, in the format {format!r}, with "
                f"{' and '.join(moments) or 'no moments'}"
                for kind, format, moments in (made, needed)
            )
            raise ValueError(
                f"The state is that of another optimizer: {came}, but this one is {own}. "
                "Make the state with its own `init(params)`; the format is an option of "
                "`Compression`."
            )

    def init(self, params: PyTree) -> FlashState:
        register_with_flax()
        flat = FlatParams.of(params)
        flat.check()
        flat.check_groups(self.groups)
        leaves = [
            PackedLeaf(x, stored and first_state(name, x, rule.moments, stored))
            for name, x, (rule, _, stored) in zip(
                flat.names, flat.leaves, self.methods(flat), strict=True
            )
        ]
        format, kind = self.compression.format, self.rule.kind
        return make_state(kind, format, self.moments, leaves, flat.bare)

    def update(
        self,
        updates: PyTree,
        state: FlashState,
        params: PyTree = None,
        *,
        finite: ArrayLike | None = None,
        grad_scale: ArrayLike = 1.0,
        **_: object,
    ) -> tuple[PyTree, FlashState]:
        if params is None:
            raise ValueError(
                "A compressed optimizer needs the parameters: call "
                "`update(grads, state, params)`."
            )
        flat = FlatParams.of(params)
        is_rounded = any(dtype_of(x) in PARAM_DTYPES[1:] for x in flat.leaves)
        if is_rounded and (later := transforms_after()):
            raise ValueError(
                "A compressed optimizer must be the last of a chain, but after it come "
                f"{', '.join(later)}. Its state holds the remainder of rounding the new "
                "16-bit parameters; with other updates they would become different ones, "
                "and may not move at all. Put what changes gradients before it, and the "
                "factor of a learning rate or schedule into `learning_rate`."
            )
        new, state = self.optimizer.step(
            params, state, updates, finite=finite, grad_scale=grad_scale
        )
        grads, after = flat.like(updates, "The gradients"), FlatParams.of(new).leaves
        deltas = [
            None if grad is None else _difference(*pair)
            for grad, *pair in zip(grads, after, flat.leaves, strict=True)
        ]
        return flat.treedef.unflatten(deltas), state


class Step:
    """One step of all parameters: what their steps share."""

    def __init__(
        self, core: Core, flat: FlatParams, state: FlashState, grad_scale: ArrayLike
    ) -> None:
        flat.check()
        core.check(state)
        self._flat, self._state = flat, state
        self._scale = as_scalar("grad_scale", grad_scale)
        self._leaves = leaves_of(flat, state)
        self._methods = core.methods(flat, core.mask)
        self._known: dict[PyTree, Array] = {}

    def scalars(self, rule: Rule, hyper: Mapping[str, Hyper]) -> Array:
        """Returns the scalars of a `LeafStep` in one f32 array, computed once."""
        count, key = self._state.count, (rule, *map(id, hyper.values()))
        if key not in self._known:
            given = {k: x(count) if callable(x) else x for k, x in hyper.items()}
            now = {k: as_scalar(k, x) for k, x in given.items()}
            # As in the state: the largest int32 plus one would be negative.
            step = jnp.asarray(optax.safe_increment(count))
            numbers = rule.coefficients(now, step.astype(jnp.float32))
            self._known[key] = jnp.stack([self._scale, *dither_of(step), *numbers])
        return self._known[key]

    def job(self, index: int) -> _kernels.Job | None:
        """Returns the step of one leaf without its gradient; `None` if it does not train."""
        name, leaf = self._flat.names[index], self._leaves[index]
        rule, hyper, compression = self._methods[index]
        if compression is None:
            return None
        format, param = self._state.format, leaf.param
        packing = check_packed(name, leaf, moments=rule.moments, format=format)
        if packing.correction is None and compression.correction_dtype(param):
            raise ValueError(
                f"`{name}` is {param.dtype}, but `state.correction` has nothing for "
                f"it, while the optimizer has `master_bits={compression.master_bits}`: "
                "small updates would be lost. Call init after casting the model, or use "
                "`Compression(master_bits=None)`."
            )
        # FlashOptim rounds to nearest.
        dithers = format == "mpx" and compression.rounding == "dithered"
        body = LeafStep(rule, packing, dithers)
        return _kernels.Job(name, body, self.scalars(rule, hyper), None, leaf)

    def result(
        self, stepped: Mapping[int, PackedLeaf], finite: Array | None
    ) -> Stepped:
        """Returns parameters and state, given the leaves that have stepped, by index."""
        old = self._state
        count = jnp.asarray(optax.safe_increment(old.count))
        count = count if finite is None else jnp.where(finite, count, old.count)
        new = (stepped.get(i, leaf) for i, leaf in enumerate(self._leaves))
        return with_leaves(self._flat, dataclasses.replace(old, count=count), new)


_constant = undifferentiable(
    "The step of a compressed optimizer has no derivative: its state is stored in "
    "integers. If the step is a constant here, pass parameters, state and gradients "
    "through `lax.stop_gradient`. With f32 parameters and `Compression(quantize=False)` "
    "a step can be differentiated."
)


def _guarded(jobs: Mapping[int, _kernels.Job]) -> list[_kernels.Job]:
    """Returns steps that raise if they are differentiated, unless all is in f32."""
    coded = {
        index: {"scalars": job.scalars, "grad": job.grad, "leaf": job.leaf}
        for index, job in jobs.items()
        if any(x.dtype != F32 for x in jax.tree.leaves(job.leaf))
    }
    safe = _constant(coded)
    return [job._replace(**safe.get(index, {})) for index, job in jobs.items()]


def _difference(new: PyTree, old: PyTree) -> Array:
    """Returns what, added to the parameter in f32 and rounded, gives the new one.

    For 16 bits it is exact unless the new one is smaller by a factor of 2¹⁶ or more.
    """
    if dtype_of(old) in PARAM_DTYPES:
        new, old = (jnp.asarray(x).astype(jnp.float32) for x in (new, old))
        return jnp.where(new == old, 0.0, new - old)  # inf - inf is nan
    return jnp.zeros_like(old)


def core_of(optimizer: optax.GradientTransformation) -> Core:
    init: Any = optimizer.init  # a method of the core, which optax's tuple cannot hold
    return init.__self__
