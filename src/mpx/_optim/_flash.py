"""The compressed optimizers as optax knows them."""

from collections.abc import Mapping
from typing import Any

import optax
from jaxtyping import PyTree

from mpx import _kernels
from mpx._optim._checks import (
    as_groups,
    check_backend,
    check_compression,
    check_groups,
    check_hyper,
)
from mpx._optim._core import Core, Stepped
from mpx._optim._options import Compression
from mpx._optim._rules import Rule
from mpx._optim._scalars import Hyper
from mpx._optim._state import FlashState


class FlashOptimizer(optax.GradientTransformationExtraArgs):
    """A compressed optimizer: an optax transformation with a faster way to step.

    `step` updates parameters and state in one pass over memory, in place if they are
    donated. `update` is what optax calls: its result goes to `optax.apply_updates` and
    nothing else may change it on the way, because the state remembers what the rounding
    of the new parameters leaves over: with 16-bit parameters, a chain with anything
    behind it is an error.

    Attributes:
        init: Makes the state: `init(params)`. Of shapes it makes shapes, sharded like
            them.
        update: What optax calls: `update(grads, state, params, *, ok, grad_scale)`. Its
            updates are f32, also for 16-bit parameters. `optax.apply_updates` and
            `mpx.optimizer_update` keep the dtypes of parameters; `eqx.apply_updates`
            does not and makes f32 of them, which the next `update` refuses, unless
            there are no master weights by which it could tell.
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
        core = core_of(self)
        return core.step(params, state, grads, ok=ok, grad_scale=grad_scale)


def core_of(optimizer: FlashOptimizer) -> Core:
    """Returns what an optimizer was built of."""
    init: Any = optimizer.init  # a method of the core, which optax's tuple cannot hold
    return init.__self__


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
        TypeError: If an option is of another type.
        ValueError: If an option is unknown or out of its range.
    """
    check_compression("`compression`", compression)
    groups = as_groups(groups)
    check_backend(backend)
    check_groups(groups, rule, compression)
    for values in (hyper, *(group.hyper for group in groups)):
        check_hyper(values)
    core = Core(
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
