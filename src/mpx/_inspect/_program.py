"""Traced programs for inspection: the forward pass of a call, and its gradient."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpx._amp._frameworks import Role, Traced, Transformation
from mpx._amp._functions import flat_call
from mpx._call import argument_names
from mpx._compat import as_function, eval_jaxpr
from mpx._jaxpr._interpreter import Fact, Jaxpr, Outcome, Scopes
from mpx._tree import LeafName, is_floating


class Program(NamedTuple):
    """A function of arrays that has been traced.

    Attributes:
        jaxpr: The jaxpr, closed; its inputs are `arrays`.
        arrays: The arguments, or their shapes.
        names: Their names, such as `model/layers/0/weight`.
        params: The positions of the arguments that are parameters: the floating arrays
            of the first argument, and of the function itself if it is a module.
    """

    jaxpr: Jaxpr
    arrays: list[Any]
    names: list[LeafName]
    params: list[int]

    @property
    def known(self) -> list[str | None]:
        """The name of each argument that is a parameter; `None` for the others."""
        return [name if i in self.params else None for i, name in enumerate(self.names)]

    def __call__(self, *arrays: Any) -> list[Any]:
        """Runs the program on other arrays of the same shapes."""
        return as_function(self.jaxpr)(*arrays)


class _Names(Transformation):
    """Runs a function as it is, and remembers the names of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, tuple[LeafName, Role | None]] = {}

    def start(self, traced: Traced) -> Traced:
        for named, array in zip(traced.named, traced.arrays, strict=True):
            self.names.setdefault(id(array), named)
        return traced

    def run(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        args: Sequence[Any],
        facts: Sequence[Fact],
        scopes: Scopes,
    ) -> Outcome:
        outs = eval_jaxpr(jaxpr, consts, *args)
        return outs, [None] * len(outs)


def program(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Program:
    """Traces a call of a function, of any framework, under any transformation of mpx.

    Arrays may be given as `jax.ShapeDtypeStruct`.
    """
    arrays, call = flat_call(func, args, kwargs)
    visitor, held = _Names(), list[Any]()

    def run(arrays: Sequence[Any]) -> list[Any]:
        held.extend(arrays)  # an `id` belongs to an array as long as it is kept
        return call(visitor, arrays)

    jaxpr = jax.make_jaxpr(run)(arrays)
    found = [visitor.names.get(id(x), (LeafName(""), None)) for x in held]
    names = [name for name, _ in found]
    first = argument_names(func, len(args))[0] if args else None
    params = [
        i
        for i, (name, role) in enumerate(found)
        if is_floating(arrays[i]) and (role == "own" or name.argument == first)
    ]
    return Program(jaxpr, arrays, names, params)


def gradient(forward: Program, scale: float = 1.0) -> Program:
    """Returns the program that computes the first result and its gradient.

    The results are the loss, which must be a scalar, and one array for each of
    `Program.params`.

    Args:
        forward: The program.
        scale: A loss scale; the gradients are divided by it again.

    Raises:
        TypeError: If the first result is no floating scalar.
    """
    loss = forward.jaxpr.out_avals[0] if forward.jaxpr.out_avals else None
    if loss is None or loss.shape != () or not jnp.issubdtype(loss.dtype, np.floating):
        raise TypeError(
            f"The function must return a scalar loss first, but it returned {loss}. "
            "Pass a function such as `lambda model, batch: jnp.mean(...)`."
        )

    def run(arrays: Sequence[Any]) -> list[Any]:
        def value(params: Sequence[Any]) -> Any:
            full = list(arrays)
            for position, param in zip(forward.params, params, strict=True):
                full[position] = param
            return forward(*full)[0] * scale if scale != 1 else forward(*full)[0]

        params = [arrays[i] for i in forward.params]
        found, grads = jax.value_and_grad(value)(params)
        return (
            [found / scale, *(x / scale for x in grads)]
            if scale != 1
            else [found, *grads]
        )

    return forward._replace(jaxpr=jax.make_jaxpr(run)(forward.arrays))
