"""Runs a traced function whose parameters are read only where they are needed.

A parameter that a scan consumes layer by layer is read inside the scan's body. So what
reading it entails in the backward pass happens layer by layer, too.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import PyTree

from mpx._jax._compat import eval_equation, has_shardings, open_jaxpr, scan_sizes
from mpx._program._bodies import remat_with, scan_with
from mpx._program._interpreter import Jaxpr, Op, Outcome, Scopes, Values, Visitor
from mpx._program._queries import REMAT, Equation, Verdict, contains, every_use


@dataclasses.dataclass(frozen=True, eq=False)
class Tap:
    """A parameter, or one layer of it, that has not been read yet.

    Attributes:
        get: Returns the value, given the index of the layer, or `None`. It is called once,
            or once for each layer.
        layer: The index of the layer along the first axis; `None` for all.
        casts: Dtypes to cast to, one after the other.
    """

    get: Callable[[Array | None], Array]
    layer: Array | None = None
    casts: tuple[DTypeLike, ...] = ()

    def read(self) -> Array:
        """Returns its value."""
        x = self.get(self.layer)
        return functools.reduce(lambda x, dtype: x.astype(dtype), self.casts, x)


def run(jaxpr: Jaxpr, consts: Sequence[PyTree], args: Sequence[PyTree]) -> Values:
    """Runs a jaxpr some of whose arguments are taps."""
    return _Taps().body(jaxpr, consts, args)


@dataclasses.dataclass(eq=False, kw_only=True)
class _Taps(Visitor):
    """Hands taps on to the equations that can read them themselves.

    Attributes:
        in_loop: Whether the equations belong to the body of a scan.
    """

    in_loop: bool = False

    def body(
        self, jaxpr: Jaxpr, consts: Sequence[PyTree], args: Sequence[PyTree]
    ) -> Values:
        """Runs a jaxpr; the taps that cannot wait are read first."""
        args = [
            x.read() if isinstance(x, Tap) and not self.can_wait(jaxpr, var) else x
            for var, x in zip(jaxpr.invars, args, strict=True)
        ]
        return self.run(jaxpr, consts, args, [None] * len(args), ())[0]

    def can_wait(self, jaxpr: Jaxpr, var: Any) -> bool:
        """Returns whether a parameter is used once, by an equation that can read it itself.

        One that is used more often is read before, once: its gradient is the sum over all
        uses, and known only after the last of them.
        """

        def judge(eqn: Equation, position: int, scopes: Scopes) -> Verdict:
            name = eqn.primitive.name
            if name == "scan":
                # A scan of length zero has no layer to read, not even in its traced body.
                has_layers = eqn.params["length"] > 0 and not self.in_loop
                return has_layers and position >= sum(scan_sizes(eqn.params))
            if name == "convert_element_type":
                return "result"
            if name in REMAT and self.in_loop:
                return True
            is_call = name == "jit" and not has_shardings(eqn.params)
            return "inside" if name in REMAT or is_call else False

        return every_use(jaxpr, var, judge, once=True)

    def equation(self, op: Op) -> Outcome:
        """Runs one equation."""
        eqn, values = op.eqn, op.values
        unknown = [None] * len(eqn.outvars)
        if not any(isinstance(x, Tap) for x in values):
            return eval_equation(eqn, values), unknown
        name = eqn.primitive.name
        if name == "convert_element_type":
            casts = (*values[0].casts, eqn.params["new_dtype"])
            return [dataclasses.replace(values[0], casts=casts)], unknown
        if name == "scan":
            return self._scan(eqn, values), unknown
        jaxpr, consts = open_jaxpr(eqn.params["jaxpr"])
        if name == "jit":
            return self.body(jaxpr, consts, values), unknown
        # Read inside, so that what was read is not kept for the backward pass.
        arrays, merge = _split(values)
        body = lambda *arrays: self.body(jaxpr, consts, merge(arrays))  # noqa: E731
        return remat_with(eqn, body, arrays), unknown

    def _scan(self, eqn: Equation, values: Values) -> Values:
        jaxpr, consts = open_jaxpr(eqn.params["jaxpr"])
        n_consts, n_carry = scan_sizes(eqn.params)
        shared, carry = values[:n_consts], values[n_consts : n_consts + n_carry]
        arrays, merge = _split(values[n_consts + n_carry :])
        inner = _Taps(in_loop=True)

        def step(carry: Values, x: PyTree) -> tuple[Values, Values]:
            index, arrays = x
            xs = [
                dataclasses.replace(x, layer=index) if isinstance(x, Tap) else x
                for x in merge(arrays)
            ]
            outs = inner.body(jaxpr, consts, [*shared, *carry, *xs])
            return outs[:n_carry], outs[n_carry:]

        if not jaxpr.effects and not contains(jaxpr, REMAT):
            # What is read from a reference cannot be kept, so the backward pass reads
            # again; all else is kept. Around a remat this would keep what that one does
            # not.
            policy = jax.checkpoint_policies.everything_saveable
            step = jax.checkpoint(step, policy=policy, prevent_cse=False)
        index = jnp.arange(eqn.params["length"], dtype=jnp.int32)
        return scan_with(eqn, step, carry, (index, arrays))


def _split(values: Values) -> tuple[Values, Callable[[Sequence[PyTree]], Values]]:
    """Returns the values that are not taps, and what puts the taps back among others."""
    arrays = [x for x in values if not isinstance(x, Tap)]

    def merge(arrays: Sequence[PyTree]) -> Values:
        rest = iter(arrays)
        return [x if isinstance(x, Tap) else next(rest) for x in values]

    return arrays, merge
