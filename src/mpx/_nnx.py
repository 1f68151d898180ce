"""Flax NNX modules as pure functions: parameters and other state apart.

Flax is not imported here: if no NNX object can exist, there is nothing to do.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from mpx._cast import cast_leaf
from mpx._keep import KeepRules
from mpx._objects import clone, holds_same, put_back, take_out
from mpx._objects import is_nnx as is_nnx
from mpx._objects import is_slot as is_slot
from mpx._objects import nnx_module as _nnx
from mpx._tree import is_floating


class Objects(NamedTuple):
    """NNX objects taken apart.

    Attributes:
        names: Their names.
        graphdef: Their static structure, sharing between objects included.
        params: The differentiated parameters: one NNX `State` per object.
        rest: Everything else: BatchNorm statistics, dropout counters, frozen weights.
    """

    names: tuple[str, ...]
    graphdef: Any
    params: dict[str, PyTree]
    rest: PyTree


def split(objects: Mapping[str, Any], differentiated: tuple[str, ...]) -> Objects:
    """Takes NNX objects apart; only `nnx.Param`s of the named ones are parameters.

    Raises:
        ValueError: If a parameter is differentiated in one object and not in another.
    """
    nnx = _nnx()
    _check_sharing(objects, differentiated)
    names = tuple(objects)
    filters = _filters(names, differentiated)
    graphdef, *states = nnx.split(tuple(objects.values()), *filters, ...)
    params = {
        name: nnx.from_flat_state(
            [(path[1:], leaf) for path, leaf in nnx.to_flat_state(state)]
        )
        for name, state in zip(differentiated, states[:-1], strict=True)
    }
    return Objects(names, graphdef, params, states[-1])


def _filters(names: tuple[str, ...], differentiated: tuple[str, ...]) -> list[Any]:
    """Returns a filter for the parameters of each differentiated object."""

    def params_of(position: int) -> Any:
        param = _nnx().Param
        return lambda path, value: path[0] == position and isinstance(value, param)

    return [params_of(names.index(name)) for name in differentiated]


def _check_sharing(objects: Mapping[str, Any], differentiated: tuple[str, ...]) -> None:
    nnx = _nnx()
    owners: dict[int, str] = {}
    for name, node in objects.items():
        for path, leaf in nnx.iter_graph(node):
            if not isinstance(leaf, nnx.Param):
                continue
            owner = owners.setdefault(id(leaf), name)
            if (owner in differentiated) != (name in differentiated):
                raise ValueError(
                    f"`{name}/{'/'.join(map(str, path))}` is shared by `{owner}` and "
                    f"`{name}`, of which only one is differentiated. Pass one module "
                    "that holds both, or a copy made with `nnx.clone`."
                )


class Merged(NamedTuple):
    """NNX objects for one call.

    Attributes:
        objects: Fresh objects by their names, parameters cast.
        source: What they were made from.
        found: Their state besides the parameters, as the call finds it.
    """

    objects: dict[str, Any]
    source: Objects
    found: PyTree


def merge(source: Objects, keep: KeepRules | None) -> Merged:
    """Builds fresh NNX objects, with their parameters cast by a policy's rules."""
    nnx = _nnx()
    params = []
    for name, state in source.params.items():
        flat = nnx.to_flat_state(state)
        position = source.names.index(name)
        params.append(nnx.from_flat_state([((position, *p), x) for p, x in flat]))
    # Fresh variables: NNX refuses to change, under a trace, those made outside of it.
    rest = jax.tree.map(lambda x: x, source.rest)
    merged = nnx.merge(source.graphdef, *params, rest)
    objects = dict(zip(source.names, merged, strict=True))
    if keep is not None:
        keep.cast_objects(objects)
    return Merged(objects, source, _rest(objects, source))


def _rest(objects: Mapping[str, Any], source: Objects) -> PyTree:
    filters = _filters(source.names, tuple(source.params))
    *_, rest = _nnx().split(tuple(objects.values()), *filters, ...)
    return jax.tree.map(lambda x: x, rest)  # a copy, which later calls do not change


def rest_of(merged: Merged) -> PyTree:
    """Returns the state besides the parameters after a call, in the dtypes it had.

    Raises:
        ValueError: If the call made or removed variables.
    """
    rest, before = _rest(merged.objects, merged.source), merged.source.rest
    if jax.tree.structure(rest) != jax.tree.structure(before):
        raise ValueError(
            "The function made or removed NNX variables, which must be the same after "
            "each call. Take new ones out before it returns, for example with "
            "`nnx.pop(model, nnx.Intermediate)`, and return them in `aux`."
        )

    def restore(new: Any, found: Any, old: Any) -> Any:
        # Untouched, a frozen weight for one: cast for the call, it must not stay cast.
        if new is found:
            return old
        return cast_leaf(new, old.dtype) if is_floating(new) else new

    return jax.tree.map(restore, rest, merged.found, before)


def update(objects: Mapping[str, Any], rest: PyTree, before: PyTree = None) -> None:
    """Writes changed state back into the caller's objects.

    Args:
        objects: The objects by name.
        rest: Their state.
        before: The state as it was. A variable that still holds the very same arrays is
            not written to: inside of a `jit` NNX forbids it for objects made outside.
    """
    nnx = _nnx()
    if before is not None:
        old = dict(nnx.to_flat_state(before))
        changed = [
            (path, variable)
            for path, variable in nnx.to_flat_state(rest)
            if not holds_same(variable, old[path])
        ]
        rest = nnx.from_flat_state(changed)
    nnx.update(tuple(objects.values()), rest)


def params_of(node: Any) -> PyTree:
    """Returns the state of an object's parameters."""
    return _nnx().state(node, _nnx().Param)


def without_variables(tree: PyTree) -> PyTree:
    """Puts what an NNX variable holds in its place, in the whole of a pytree."""
    nnx = _nnx()
    if nnx is None:
        return tree

    def is_variable(node: Any) -> bool:
        return isinstance(node, nnx.Variable)

    return jax.tree.map(
        lambda node: node.get_raw_value() if is_variable(node) else node,
        tree,
        is_leaf=is_variable,
    )


def copy(tree: PyTree) -> PyTree:
    """Returns a tree with fresh NNX objects, whose state nobody else sees."""
    plain, objects = take_out(tree)
    if not objects:
        return tree
    return put_back(plain, clone(objects))


def as_pure(
    step: Callable[..., Any], args: Mapping[str, Any]
) -> tuple[Callable[[PyTree], tuple[PyTree]], PyTree]:
    """Makes a step that changes NNX objects in place a function from state to state.

    Returns:
        The function, and the state of the objects as they are.
    """
    nnx = _nnx()
    graphdef, before = nnx.split(tuple(args.values()))

    def pure(state: PyTree) -> tuple[PyTree]:
        # A copy: `merge` puts the very variables of the state into the objects.
        objects = nnx.merge(graphdef, jax.tree.map(lambda x: x, state))
        step(**dict(zip(args, objects, strict=True)))
        return (nnx.state(objects),)

    return pure, before
