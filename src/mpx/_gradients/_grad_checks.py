"""Warnings and errors about gradients: where mixed precision is not what it seems.

They are raised while tracing and cost nothing in the compiled step.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from mpx._jax._compat import is_tracer, linear_program, scan_sizes
from mpx._jax._warn import warn
from mpx._program._flow import Flow
from mpx._program._queries import MATMULS, MOVES, Equation
from mpx._scaling._loss_scaling import LossScaling
from mpx._wire._product import LINEAR


def undifferentiable(message: str) -> Callable[[PyTree], Any]:
    """Returns an identity function that raises when it is differentiated.

    It is for derivatives that JAX would compute wrongly without a warning. The error is a
    `NotImplementedError` with the given message, in forward and in reverse mode.
    """

    @jax.custom_jvp
    def same(tree: PyTree) -> Any:
        return tree

    @same.defjvp
    def _(primals: tuple[PyTree], tangents: tuple[PyTree]) -> NoReturn:
        raise NotImplementedError(message)

    return same


def warn_of_constant_scaling(scaling: object) -> None:
    """Warns of an adaptive scaling that is a constant of the function being compiled."""
    if not isinstance(scaling, LossScaling) or not scaling.adapts:
        return
    known = scaling.made_of_constants or not is_tracer(scaling.loss_scaling)
    # While JAX compiles, every computed value is a tracer.
    if known and is_tracer(jnp.zeros(())):
        warn(
            "The loss scaling is not an argument of the function that is being "
            "compiled, so its scale is compiled in as a constant: every step uses the "
            "first one, and once that overflows all steps are skipped. Make the "
            "scaling an argument and a result of the jitted function: "
            "`step(scaling, params, batch) -> (result.scaling, …)`."
        )


# --- Uses of parameters, as the derivative shows them -----------------------------------

_MOVES = MOVES | {"gather", "concatenate"}


class _Param(NamedTuple):
    """The label of a parameter in a program.

    Attributes:
        number: The position of the parameter.
        narrowed: Whether it has passed through 16 bits.
    """

    number: int
    narrowed: bool

    def after(self, eqn: Equation) -> "_Param":
        """Returns the label behind an operation that only moves or casts numbers."""
        narrowed = self.narrowed or _float_bytes(eqn.outvars[0].aval) == 2
        return self._replace(narrowed=narrowed)


@dataclasses.dataclass
class Uses:
    """How a function uses its parameters.

    Attributes:
        widened: Parameters that were cast to 16 bits but multiplied in f32.
        low: Parameters that are multiplied in 16 bits.
        hidden: Whether a custom derivative uses parameters in a way that is not visible.
        loops: For 16-bit parameters that are the same in each round of a loop, the
            number of rounds.
    """

    widened: set[int] = dataclasses.field(default_factory=set)
    low: set[int] = dataclasses.field(default_factory=set)
    hidden: bool = False
    loops: dict[int, int] = dataclasses.field(default_factory=dict)


def uses_of(vjp: Callable[..., Any], params: int, others: int = 0) -> Uses:
    """Returns how a function uses its parameters.

    Args:
        vjp: The function that `jax.vjp` returned for it.
        params: The number of arrays in its arguments that are parameters.
        others: The number of differentiated arrays after them.
    """
    uses = Uses()
    program = linear_program(vjp, params + others)
    if program is None:
        return uses
    jaxpr, arguments = program

    def rule(name: str, eqn: Equation, ins: list[_Param | None]) -> _Param | None:
        found = [label for label in ins if label is not None]
        if name == "scan":
            _note_loops(uses, eqn, ins)
        elif name in MATMULS:
            is_wide = any(_float_bytes(atom.aval) >= 4 for atom in eqn.invars)
            for label in found:
                if label.narrowed or not is_wide:
                    (uses.widened if is_wide else uses.low).add(label.number)
        elif name == LINEAR:
            uses.low.update(label.number for label in found)
        elif name in _MOVES and found:
            return found[0].after(eqn)
        elif name.startswith("custom_lin"):
            uses.hidden = uses.hidden or bool(found)
        return None

    labels = {
        var: _Param(i, _float_bytes(var.aval) == 2)
        for i, var in enumerate(arguments[:params])
    }
    Flow(rule).run(jaxpr, labels)
    return uses


def _note_loops(uses: Uses, eqn: Equation, ins: Sequence[_Param | None]) -> None:
    consts, _ = scan_sizes(eqn.params)
    for atom, label in zip(eqn.invars[:consts], ins[:consts], strict=True):
        if label is not None and _float_bytes(atom.aval) == 2:
            rounds = max(eqn.params["length"], uses.loops.get(label.number, 0))
            # Each addition rounds by up to half an eps: so many may lose everything.
            if rounds * float(jnp.finfo(atom.aval.dtype).eps) / 2 >= 1:
                uses.loops[label.number] = rounds


def _float_bytes(aval: Any) -> int:
    """Returns the bytes per number of a floating dtype, 0 for anything else."""
    dtype = getattr(aval, "dtype", np.dtype(bool))  # tokens have none
    return dtype.itemsize if jnp.issubdtype(dtype, jnp.floating) else 0


def warn_of_long_loops(uses: Uses, names: Sequence[str], dtype: np.dtype) -> None:
    """Warns of gradients that a loop adds up in 16 bits."""
    index, rounds = max(uses.loops.items(), key=lambda item: item[1])
    others = f" (and {len(uses.loops) - 1} others)" if len(uses.loops) > 1 else ""
    warn(
        f"`{names[index]}`{others} is used in each of the {rounds} rounds of a "
        f"`lax.scan`, and its gradient is added up in {dtype.name}: a sum of so many "
        "parts may lose most of them. Use `mpx.amp`, which adds them up in f32: "
        "`mpx.value_and_grad(mpx.amp(loss))`; or keep the parameter in f32 with "
        f"`mpx.Policy(keep=...)` and cast it inside the loop with `.astype(x.dtype)`."
    )


def warn_of_rounded_parameter(name: str, dtype: np.dtype) -> None:
    """Warns of a parameter to which the function assigns numbers of 16 bits."""
    warn(
        f"The function assigns to the parameter `{name}` what it computed in "
        f"{dtype.name}, so that its f32 numbers are rounded in each step and small "
        "updates are lost. Keep its module in f32 with `mpx.Policy(keep=...)`, or use "
        "`mpx.amp(loss)`, which leaves parameters in f32."
    )


def warn_of_useless_policy(name: str, dtype: np.dtype) -> None:
    """Warns of a model that multiplies all its cast parameters in f32."""
    warn(
        f"The policy casts the parameters to {dtype.name}, but all their matmuls run in "
        f"f32, `{name}` for one: the model casts them back itself, or an f32 array that "
        "is no argument, such as a batch that the function closes over, promotes them. "
        "Pass such arrays as arguments, give the model its own option, such as "
        "`dtype=jnp.bfloat16`, or use `mpx.amp(loss)`, which casts operation by operation."
    )
