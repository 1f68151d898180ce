"""Runs a traced function whose parameters are read only where they are needed.

A parameter that a scan consumes layer by layer is read inside of the scan's body. So what
reading it entails in the backward pass happens layer by layer, too.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from mpx._compat import (
    Literal,
    equation_context,
    eval_equation,
    has_shardings,
    open_jaxpr,
    scan_sizes,
    sub_jaxprs,
)
from mpx._jaxpr._queries import REMAT, contains


class Tap(abc.ABC):
    """A parameter, or one layer of it, that has not been read yet."""

    @abc.abstractmethod
    def read(self) -> Array:
        """Returns its value. It is called once, or once for each layer."""

    @abc.abstractmethod
    def layer(self, index: Array) -> "Tap":
        """Returns the layer of that number along the first axis."""

    @abc.abstractmethod
    def cast(self, dtype: Any) -> "Tap":
        """Returns the same in another dtype."""


def run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Runs a jaxpr some of whose arguments are taps."""
    return _run(jaxpr, consts, args, in_loop=False)


def _run(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], *, in_loop: bool
) -> list[Any]:
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    for var, arg in zip(jaxpr.invars, args, strict=True):
        here = isinstance(arg, Tap) and not _can_wait(jaxpr, var, in_loop=in_loop)
        env[var] = arg.read() if here else arg

    def value(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        values = [value(atom) for atom in eqn.invars]
        with equation_context(eqn):
            if any(isinstance(x, Tap) for x in values):
                handle = _HANDLERS[eqn.primitive.name]
                outs = handle(eqn, values, in_loop=in_loop)
            else:
                outs = eval_equation(eqn, values)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [value(atom) for atom in jaxpr.outvars]


def _can_wait(jaxpr: Any, var: Any, *, in_loop: bool) -> bool:
    """Whether a parameter is used once, by what can read it itself.

    One that is used more often is read before, once: its gradient is the sum over all
    uses, and known only after the last of them.
    """
    uses = [
        (eqn, position)
        for eqn in jaxpr.eqns
        for position, atom in enumerate(eqn.invars)
        if atom is var
    ]
    if len(uses) != 1 or any(atom is var for atom in jaxpr.outvars):
        return False
    ((eqn, position),) = uses
    name = eqn.primitive.name
    if name == "scan":
        # Of no layers none can be read, not even in a body that is never run.
        has_layers = eqn.params["length"] > 0
        return has_layers and not in_loop and position >= sum(scan_sizes(eqn.params))
    if name == "convert_element_type":
        return _can_wait(jaxpr, eqn.outvars[0], in_loop=in_loop)
    if name in REMAT and in_loop:
        return True
    if name in REMAT or (name == "jit" and not has_shardings(eqn.params)):
        inner = next(sub_jaxprs(eqn))
        return _can_wait(inner, inner.invars[position], in_loop=in_loop)
    return False


# --- equations that take taps ---------------------------------------------------------


def _cast(eqn: Any, values: list[Any], *, in_loop: bool) -> list[Any]:
    del in_loop
    return [values[0].cast(eqn.params["new_dtype"])]


def _call(eqn: Any, values: list[Any], *, in_loop: bool) -> list[Any]:
    return _run(*open_jaxpr(eqn.params["jaxpr"]), values, in_loop=in_loop)


def _remat(eqn: Any, values: list[Any], *, in_loop: bool) -> list[Any]:
    """Reads inside, lest what was read be kept for the backward pass."""
    jaxpr, consts = open_jaxpr(eqn.params["jaxpr"])
    arrays, merge = _split(values)

    def body(*arrays: Any) -> list[Any]:
        return _run(jaxpr, consts, merge(arrays), in_loop=in_loop)

    prevent_cse = eqn.params["prevent_cse"]
    if not isinstance(prevent_cse, bool):  # one for each operand
        prevent_cse = any(prevent_cse)
    policy = eqn.params["policy"]
    return jax.checkpoint(body, policy=policy, prevent_cse=prevent_cse)(*arrays)


def _scan(eqn: Any, values: list[Any], *, in_loop: bool) -> list[Any]:
    del in_loop
    params = eqn.params
    jaxpr, consts = open_jaxpr(params["jaxpr"])
    n_consts, n_carry = scan_sizes(params)
    shared, carry = values[:n_consts], values[n_consts : n_consts + n_carry]
    xs = values[n_consts + n_carry :]
    arrays, merge = _split(xs)

    def body(carry: Any, x: Any) -> tuple[Any, Any]:
        index, arrays = x
        layers = [x.layer(index) if isinstance(x, Tap) else x for x in merge(arrays)]
        outs = _run(jaxpr, consts, [*shared, *carry, *layers], in_loop=True)
        return outs[:n_carry], outs[n_carry:]

    if not jaxpr.effects and not contains(jaxpr, REMAT):
        # What is read from a reference cannot be kept, so the backward pass reads again;
        # all else is kept. Around a remat this would keep what that one does not.
        policy = jax.checkpoint_policies.everything_saveable
        body = jax.checkpoint(body, policy=policy, prevent_cse=False)
    carry, ys = lax.scan(
        body,
        carry,
        (jnp.arange(params["length"], dtype=jnp.int32), arrays),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]


_HANDLERS: dict[str, Callable[..., list[Any]]] = {
    "convert_element_type": _cast,
    "jit": _call,
    "scan": _scan,
    **dict.fromkeys(REMAT, _remat),
}


def _split(values: Sequence[Any]) -> tuple[list[Any], Callable[..., list[Any]]]:
    """Returns the values that are no taps, and what puts the taps back among others."""
    arrays = [x for x in values if not isinstance(x, Tap)]

    def merge(arrays: Sequence[Any]) -> list[Any]:
        rest = iter(arrays)
        return [x if isinstance(x, Tap) else next(rest) for x in values]

    return arrays, merge
