"""How a function uses its parameters, and warnings where it is not as the policy means.

All of it happens while tracing and costs nothing in the compiled step. It reads programs,
so it is imported when a gradient is first taken.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from mpx._gradients._call import Call, State
from mpx._jax._compat import open_jaxpr, primitive_name, scan_sizes
from mpx._jax._warn import warn
from mpx._program._flow import Flow
from mpx._program._queries import (
    ATTENTION,
    CROSS_ENTROPY,
    GROUPED,
    MATMULS,
    MOVES,
    Equation,
)

_MOVES = MOVES | {"gather", "concatenate"}
_KERNELS = {*ATTENTION, *CROSS_ENTROPY, GROUPED, "pallas_call"}


def changed_params(call: Call, given: State, diff: State) -> set[int]:
    """Returns the places of the NNX parameters that a call leaves with other numbers.

    `nnx.jit` and `nnx.remat` assign to all of them. The call is traced once more.
    """

    def assigned_after(diff: State) -> State:
        after = call.run({**given, **diff}, call.scales)[2]
        return {place: after[place] for place in after.keys() - call.state.keys()}

    def rule(
        name: str, eqn: Equation, ins: list[tuple[int, int] | None]
    ) -> tuple[int, int] | None:
        if name != "convert_element_type" or ins[0] is None:
            return None
        param, casts = ins[0]
        return param, casts + 1

    jaxpr, after = jax.make_jaxpr(assigned_after, return_shape=True)(diff)
    body, _ = open_jaxpr(jaxpr)
    labels = [(place, 0) for place in call.diff]
    flow = Flow(rule, join=lambda a, b: a if a == b else None)
    found = flow.run(jaxpr, dict(zip(body.invars, labels, strict=True)))
    # The policy casts to 16 bits and back.
    casts = (0,) if call.low is None else (0, 2)
    equations = {id(var): eqn for eqn in body.eqns for var in eqn.outvars}
    changed: set[int] = set()
    for place, label, var in zip(sorted(after), found, body.outvars, strict=True):
        if label in [(place, count) for count in casts]:
            continue
        changed.add(place)
        eqn = equations.get(id(var))
        if eqn is None or primitive_name(eqn) != "convert_element_type":
            continue
        if (dtype := eqn.invars[0].aval.dtype).itemsize == 2:
            warn(
                f"The function assigns to the parameter `{call.names[place]}` what it "
                f"computed in {dtype.name}, so that its f32 numbers are rounded in each "
                "step and small updates are lost. Keep its module in f32 with "
                "`mpx.Policy(keep=...)`, or use `mpx.amp(loss)`, which leaves parameters "
                "in f32."
            )
    return changed


def warn_of_uses(call: Call, program: PyTree) -> None:
    """Warns of parameters that a program does not use as the policy means it.

    Its first inputs are the differentiated arrays of the call.
    """
    assert call.low is not None
    names = [call.names[place] for place in call.diff]
    widened, low, loops = _uses(program, len(names))
    if loops:
        index, rounds = max(loops.items(), key=lambda item: item[1])
        more = f" (and {len(loops) - 1} others)" if len(loops) > 1 else ""
        warn(
            f"`{names[index]}`{more} is used in each of the {rounds} rounds of a "
            f"`lax.scan`, and its gradient is added up in {call.low.name}: a sum of so "
            "many parts may lose most of them. Use `mpx.amp`, which adds them up in f32: "
            "`mpx.value_and_grad(mpx.amp(loss))`; or keep the parameter in f32 with "
            "`mpx.Policy(keep=...)` and cast it inside the loop with `.astype(x.dtype)`."
        )
    if widened and not low:
        warn(
            f"The policy casts the parameters to {call.low.name}, but all their matmuls "
            f"run in f32, `{names[min(widened)]}` for one: the model casts them back "
            "itself, or an f32 array that is no argument, such as a batch that the "
            "function closes over, promotes them. Pass such arrays as arguments, give the "
            "model its own option, such as `dtype=jnp.bfloat16`, or use `mpx.amp(loss)`, "
            "which casts operation by operation."
        )


def _uses(program: PyTree, count: int) -> tuple[set[int], set[int], dict[int, int]]:
    """Returns how a program uses its first inputs, which are parameters.

    Those cast to 16 bits but multiplied in f32; those multiplied in 16 bits, or used by a
    custom derivative; and the rounds of long loops that use a 16-bit one in each round.
    """
    widened, low, loops = set[int](), set[int](), dict[int, int]()

    def rule(
        name: str, eqn: Equation, ins: list[tuple[int, bool] | None]
    ) -> tuple[int, bool] | None:
        found = [label for label in ins if label is not None]
        if name == "scan":
            consts, length = scan_sizes(eqn.params)[0], eqn.params["length"]
            for atom, label in zip(eqn.invars[:consts], ins[:consts], strict=True):
                # Each addition rounds by up to half an eps: so many may lose everything.
                if (
                    label is not None
                    and _float_bytes(atom.aval) == 2
                    and length * float(jnp.finfo(atom.aval.dtype).eps) / 2 >= 1
                ):
                    loops[label[0]] = max(length, loops.get(label[0], 0))
        elif name in MATMULS:
            is_wide = any(_float_bytes(atom.aval) >= 4 for atom in eqn.invars)
            for number, narrowed in found:
                if narrowed or not is_wide:
                    (widened if is_wide else low).add(number)
        elif name in _MOVES and found:
            return found[0][0], found[0][1] or _float_bytes(eqn.outvars[0].aval) == 2
        elif name.startswith("custom_vjp") or name in _KERNELS:
            low.update(number for number, _ in found)
        return None

    pairs = enumerate(open_jaxpr(program)[0].invars[:count])
    labels = {var: (i, _float_bytes(var.aval) == 2) for i, var in pairs}
    Flow(rule).run(program, labels)
    return widened, low, loops


def _float_bytes(aval: object) -> int:
    """Returns the bytes per number of a floating dtype, 0 for anything else."""
    dtype = getattr(aval, "dtype", np.dtype(bool))  # tokens have none
    return dtype.itemsize if jnp.issubdtype(dtype, jnp.floating) else 0
