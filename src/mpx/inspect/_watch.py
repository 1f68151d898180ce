"""A recorder for training loops: what a step observes of itself, kept and shown."""

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, PyTree

from mpx._fp8 import Fp8State
from mpx._gradients._grad import GradResult
from mpx._jax._arguments import as_count
from mpx._jax._nnx import without_variables
from mpx._jax._tree import all_finite, check_same_structure, is_floating, named_leaves
from mpx._jax._warn import warn
from mpx.inspect._exponents import ExponentStats, exponent_stats
from mpx.inspect._result import Result, Table, percent

_AMAXES = ("activation", "weight", "gradient")
_FORMATS = ("f16", "e5m2", "e4m3")  # whose underflow is recorded
Write = Callable[[int, Mapping[str, float]], object]

# --- In the jitted step ---------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Observation:
    """The numbers of one step, as arrays on the device; made by `observe`.

    Attributes:
        loss: The loss, f32[], or `None`.
        finite: Whether the step was taken, bool[].
        scale: The loss scale of the step, f32[], or `None` if that is not known.
        next_scale: The loss scale of the next step, f32[], or `None` if there is none.
        grads: The exponents of the gradients, an `ExponentStats`, or `None`.
        stuck: By parameter, how many of its numbers have a gradient and were not changed
            by the step, and how many there are, f32[2].
        amaxes: By matmul in fp8, the newest magnitudes of activation, weight, gradient.
        extra: Other scalars.
    """

    # JAX puts other objects in their place when it rebuilds trees.
    loss: PyTree
    finite: PyTree
    scale: PyTree
    next_scale: PyTree
    grads: PyTree
    stuck: PyTree
    amaxes: PyTree
    extra: PyTree


def observe(
    result: GradResult | None = None,
    *,
    loss: ArrayLike | None = None,
    grads: PyTree = None,
    finite: ArrayLike | None = None,
    scaling: object = None,
    fp8: Fp8State | None = None,
    before: PyTree = None,
    after: PyTree = None,
    exponents: bool = True,
    **extra: ArrayLike,
) -> Observation:
    """Returns what there is to record about a step. Call it inside the jitted step.

    It adds one pass over the gradients, and one over the parameters if they are given.

    Args:
        result: What `mpx.value_and_grad` or `mpx.accumulate` returned.
        loss: The loss, if there is no `result`.
        grads: The gradients, if there is no `result`.
        finite: Whether the step was taken; by default, whether loss and gradients are.
        scaling: The loss scaling with which the step was taken.
        fp8: The state of delayed scaling, if there is no `result`.
        before: The parameters before the step, to find those that do not move. For a
            compressed optimizer these are `mpx.optim.master_params(params, state)`.
        after: The parameters after it.
        exponents: Whether to count the exponents of the gradients; a Python value. Without
            them there are no norms, and skipped steps come without the gradient's name.
        **extra: Further scalars to record, such as the learning rate.

    Raises:
        ValueError: If only one of `before` and `after` is given, or they differ in
            structure.

    Examples:
        >>> seen = observe(loss=0.5, grads={"w": jnp.array([1.0, jnp.inf])})
        >>> bool(seen.finite), seen.grads.infs
        (False, array([1]))
    """
    following = scaling
    if result is not None:
        loss, grads, following = result.value, result.grads, result.scaling
        finite, fp8 = result.finite, result.fp8
    if (before is None) != (after is None):
        raise ValueError(
            "`before` and `after` must be given together: the parameters before and after "
            "the step."
        )
    stats = exponent_stats(grads) if exponents and grads is not None else None
    if finite is None:
        counted = stats is not None
        rest = [x for x in jax.tree.leaves(grads) if not (counted and is_floating(x))]
        finite = all_finite((loss, rest))
        finite = finite & stats.all_finite() if counted else finite
    # The newest magnitudes of each matmul, the largest over the layers of a scan.
    newest = {k: x[..., 0, :] for k, x in fp8.amaxes.items()} if fp8 else {}
    return Observation(
        loss=None if loss is None else jnp.asarray(loss, jnp.float32),
        finite=jnp.asarray(finite),
        scale=getattr(scaling, "loss_scaling", None),
        next_scale=getattr(following, "loss_scaling", None),
        grads=stats,
        stuck={} if before is None else _stuck(before, after, grads),
        amaxes={k: jnp.max(x, tuple(range(x.ndim - 1))) for k, x in newest.items()},
        extra={name: jnp.asarray(x) for name, x in extra.items()},
    )


def _stuck(before: PyTree, after: PyTree, grads: PyTree) -> dict[str, Array]:
    before, after, grads = map(without_variables, (before, after, grads))
    check_same_structure(before, after, "`before` and `after`")
    slopes = {str(name): leaf for name, leaf in named_leaves(grads)}
    found: dict[str, Array] = {}
    pairs = zip(named_leaves(before), jax.tree.leaves(after), strict=True)
    for (name, old), new in pairs:
        if not is_floating(old) or not is_floating(new) or not jnp.size(old):
            continue
        still = jnp.asarray(old) == jnp.asarray(new)
        slope = slopes.get(str(name))
        if slope is not None and jnp.shape(slope) == jnp.shape(old):
            still = still & (jnp.asarray(slope) != 0)
        share = jnp.mean(still, dtype=jnp.float32)
        found[str(name)] = jnp.stack([share, jnp.ones_like(share)]) * still.size
    return found


# --- In the loop ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Skip:
    """A step that was not taken.

    Attributes:
        step: Its number.
        leaf: The gradient to look at first: of those with an infinity or a nan, the one
            with the smallest share of them. "" if all gradients are finite, or were not
            counted.
        leaves: How many gradients have one.
        infs: The infinities in `leaf`.
        nans: The nans in `leaf`.
        loss: The loss.
        loss_scale: The loss scale; nan if there is none.
    """

    step: int
    leaf: str
    leaves: int
    infs: int
    nans: int
    loss: float
    loss_scale: float


@dataclasses.dataclass(frozen=True)
class RunSummary(Result):
    """What a recorder has seen; made by `Watch.summary`.

    Attributes:
        steps: The number of recorded steps.
        skipped: How many of them were not taken.
        skips: The skipped steps, the latest 1000 of them.
        numbers: The last value of each recorded number.
        notes: What you should know.
    """

    steps: int
    skipped: int
    skips: tuple[Skip, ...]
    numbers: dict[str, float]
    notes: tuple[str, ...]

    def tables(self) -> Sequence[Table]:
        """Returns the numbers, the skipped steps and the notes."""
        if not self.steps:
            return [Table.text("No step has been recorded.")]
        share = percent(self.skipped / self.steps)
        text = f"{self.steps} steps, {self.skipped} of them skipped ({share})."
        numbers = [[name, f"{value:.4g}"] for name, value in self.numbers.items()]
        tables = [
            Table.text(" ".join([text, *self.notes])),
            Table(("number", "last"), numbers, right=frozenset({1})),
        ]
        if self.skips:
            head = ("step", "loss scale", "leaf", "inf", "nan", "leaves")
            unknown = "(not known, or the loss or a state)"
            rows = list[list[str]]()
            for x in self.skips[-10:]:
                place = f"{x.loss_scale:g}", x.leaf or unknown
                rows.append([*map(str, (x.step, *place, x.infs, x.nans, x.leaves))])
            right = frozenset({0, 1, 3, 4, 5})
            tables.append(Table(head, rows, "The last skipped steps", right))
        return tables


def _as_writers(writer: PyTree) -> list[Write]:
    """Returns functions of a step and its numbers; `Watch` says what a writer may be."""
    if writer is None:
        return []
    if isinstance(writer, list | tuple):
        return [write for one in writer for write in _as_writers(one)]
    if (add := getattr(writer, "add_scalar", None)) is not None:
        return [lambda step, numbers: [add(k, x, step) for k, x in numbers.items()]]
    # Loggers have a `log` of other arguments.
    is_other = isinstance(writer, type | logging.Logger | logging.LoggerAdapter)
    if hasattr(writer, "log") and not is_other:
        return [lambda step, numbers: writer.log(dict(numbers), step=step)]
    if callable(writer) and not is_other:
        return [writer]
    raise TypeError(
        "`writer` must be a `tensorboardX.SummaryWriter`, a run of W&B, or a function of "
        f"the step and a dict of numbers, but {type(writer).__name__} was given. For a "
        "logger pass `lambda step, numbers: logger.info(...)`."
    )


class Watch:
    """Records the steps of a training loop; `watch` is another name for it.

    `observe` belongs inside the jitted step and `record` into the loop. The guide "Watch a
    run" lists what is recorded.

    Args:
        writer: Gets the numbers of each step, when they are fetched: a
            `tensorboardX.SummaryWriter`, a run of W&B, a function of the step and a dict,
            or a list of them.
        every: How many steps are kept before they are fetched from the device.
        stalled_after: Warns if no step was taken for this many steps.

    Raises:
        TypeError: If `writer` is none of these.
        ValueError: If a number is not positive.

    Examples:
        >>> import mpx
        >>> recorder = watch()
        >>> @jax.jit
        ... def step(w, scaling, x):
        ...     result = mpx.value_and_grad(lambda w, x: (w * x).sum())(scaling, w, x)
        ...     new = w - 0.1 * result.grads
        ...     return new, recorder.observe(result, before=w, after=new)
        >>> w = np.ones(2, np.float32)
        >>> for _ in range(3):
        ...     w, seen = step(w, mpx.NoLossScaling(), np.float32(1))
        ...     recorder.record(seen)
        >>> recorder.summary().steps
        3
    """

    observe = staticmethod(observe)

    def __init__(
        self, writer: object = None, *, every: int = 50, stalled_after: int = 100
    ) -> None:
        self._writers = _as_writers(writer)
        self._every = as_count(every, "every", at_least=1)
        self._stalled_after = as_count(stalled_after, "stalled_after", at_least=1)
        self._pending: list[tuple[int, Observation]] = []
        self._steps = self._skipped = 0
        self.skips: list[Skip] = []
        self.notes: dict[str, str] = {}
        self._idle = self._next = 0
        self._scale = math.nan
        self._latest: dict[str, float] = {}
        self.exponents: ExponentStats | None = None

    def record(self, observation: Observation, step: int | None = None) -> None:
        """Records a step. Does not wait for it, except every `every` steps.

        Args:
            observation: What `observe` returned; or the observations of several steps,
                as `lax.scan` stacks them.
            step: The number of the step; by default, one more than the last. It may be
                smaller, as after a restart from a checkpoint.
        """
        step = self._next if step is None else int(step)
        if step < self._next:
            self.flush()
            self._idle, self._scale = 0, math.nan
        self._next = step + math.prod(observation.finite.shape)
        self._pending.append((step, observation))
        if len(self._pending) > self._every:
            # All but the newest, which the device may still be computing.
            pending, self._pending = self._pending[:-1], self._pending[-1:]
            self._fetch(pending)

    def flush(self) -> None:
        """Fetches what has been recorded, and waits for it.

        Raises what a writer raised first; everything has been recorded then.
        """
        pending, self._pending = self._pending, []
        self._fetch(pending)

    def _fetch(self, pending: Sequence[tuple[int, Observation]]) -> None:
        found = jax.device_get([observation for _, observation in pending])
        errors: list[Exception] = []
        for (start, _), stacked in zip(pending, found, strict=True):
            # A scan has stacked its steps.
            rows = [stacked]
            if np.ndim(stacked.finite):
                count = range(len(stacked.finite))
                rows = [jax.tree.map(lambda x, i=i: x[i], stacked) for i in count]
            for step, observation in enumerate(rows, start):
                numbers = self._take(step, observation)
                for write in self._writers:
                    try:
                        write(step, numbers)
                    except Exception as error:  # a full disk must not lose other steps
                        errors.append(error)
        if errors:
            raise errors[0]

    def _take(self, step: int, seen: Observation) -> dict[str, float]:
        """Records the numbers of a step, and returns them."""
        following = math.nan if seen.next_scale is None else float(seen.next_scale)
        scale = following if math.isnan(self._scale) else self._scale
        scale = scale if seen.scale is None else float(seen.scale)
        finite, self._scale = bool(seen.finite), following
        numbers: dict[str, float] = {"skipped": float(not finite)}
        if seen.loss is not None:
            numbers["loss"] = float(seen.loss)
        if not math.isnan(scale):
            numbers["loss_scaling"] = scale
        if seen.grads is not None:
            numbers |= _gradients(seen.grads, 1.0 if math.isnan(scale) else scale)
        if finite:
            numbers |= _stuck_shares(seen.stuck)
            self.exponents = seen.grads or self.exponents
        for key, amaxes in seen.amaxes.items():
            values = zip(_AMAXES, np.asarray(amaxes).tolist(), strict=True)
            numbers |= {f"amax/{key}/{kind}": value for kind, value in values}
        numbers |= {name: float(np.mean(x)) for name, x in seen.extra.items()}
        self._latest |= numbers
        self._steps += 1
        self._idle = 0 if finite else self._idle + 1
        if not finite:
            self._note_skip(_skip_of(step, seen, scale))
        self._note_stuck(step)
        return numbers

    def _note_skip(self, skip: Skip) -> None:
        """Notes a step that was not taken, and a run that stands still."""
        self._skipped += 1
        self.skips = [*self.skips[-999:], skip]
        if self._idle != self._stalled_after:
            return
        known = [x.leaf for x in self.skips[-self._idle :] if x.leaf]
        where = f"the gradient of `{known[-1]}`, " if known else ""
        self.notes["stalled"] = (
            f"No step was taken for {self._idle} steps, up to step {skip.step}, at a loss "
            f"scale of {skip.loss_scale:g}. Look for an inf or nan in {where}the data, the "
            "loss, the parameters or the state."
        )
        warn(self.notes["stalled"])

    def _note_stuck(self, step: int) -> None:
        """Notes that most weights do not move."""
        stuck = self._latest.get("stuck", 0.0)
        self.notes.pop("stuck", None)
        if stuck > 0.5:
            self.notes["stuck"] = (
                f"{percent(stuck)} of the weights that have a gradient did not move in "
                f"step {step}: their updates are below half an ulp. Keep f32 weights, or "
                "use `mpx.optim.master_weights` or a compressed optimizer."
            )

    def summary(self) -> RunSummary:
        """Returns what has been seen so far; waits for the steps that were recorded."""
        self.flush()
        skips, notes = tuple(self.skips), tuple(self.notes.values())
        return RunSummary(self._steps, self._skipped, skips, dict(self._latest), notes)


def _by_group(leaves: Iterable[tuple[str, ArrayLike]]) -> dict[str, Any]:
    """Returns sums by group: up to two parts of the path of a leaf, without the last."""
    sums = dict[str, Any]()
    for name, x in leaves:
        parts = name.split("/")
        group = "/".join(parts[: max(1, min(2, len(parts) - 1))])
        sums[group] = sums.get(group, 0) + np.asarray(x, np.float64)
    return sums


def _gradients(stats: ExponentStats, scale: float) -> dict[str, float]:
    """Returns norms, and the shares that are zero or would be."""
    groups = _by_group(zip(stats.names, stats.norms**2, strict=True))
    numbers = {"grad_norm": math.sqrt(sum(groups.values()))}
    numbers |= {f"grad_norm/{group}": math.sqrt(x) for group, x in groups.items()}
    sizes = stats.sizes - stats.zeros - stats.infs - stats.nans
    for name in _FORMATS:
        lost = stats.flushed(name, scale) @ sizes
        numbers[f"underflow/{name}"] = float(lost / max(sizes.sum(), 1))
    numbers["zeros"] = float(stats.zeros.sum() / max(stats.sizes.sum(), 1))
    return numbers


def _stuck_shares(stuck: Mapping[str, ArrayLike]) -> dict[str, float]:
    """Returns the shares of weights that did not move, by group and of all."""
    groups = _by_group(stuck.items())
    sums = {f"stuck/{group}": x for group, x in groups.items()}
    sums |= {"stuck": sum(groups.values())} if groups else {}
    return {key: float(still / size) for key, (still, size) in sums.items()}


def _skip_of(step: int, seen: Observation, scale: float) -> Skip:
    """Returns what is known about a step that was not taken."""
    loss = math.nan if seen.loss is None else float(seen.loss)
    stats = seen.grads
    if stats is None or stats.all_finite():
        return Skip(step, "", 0, 0, 0, loss, scale)
    share = (stats.infs + stats.nans) / np.maximum(stats.sizes, 1)
    i, bad = np.argmin(np.where(share > 0, share, np.inf)), np.count_nonzero(share)
    infs, nans = int(stats.infs[i]), int(stats.nans[i])
    return Skip(step, stats.names[i] or "(leaf)", int(bad), infs, nans, loss, scale)


watch = Watch
