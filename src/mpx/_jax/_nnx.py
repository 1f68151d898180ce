"""Flax NNX objects inside pytrees, and as pure functions of parameters and other state.

Flax is not imported here: if no NNX object can exist, there is nothing to do.
"""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from mpx._jax._tree import LeafName, cast_leaf, is_floating, map_with_name, named_leaves

Path = tuple[object, ...]
Nodes = Mapping[LeafName, PyTree]  # NNX objects, or what stands for them, by name
Cast = Callable[[LeafName, PyTree], PyTree]


def nnx_module() -> Any:
    """Returns `flax.nnx` if it has been imported, else `None`."""
    return sys.modules.get("flax.nnx")


def is_nnx(node: PyTree) -> bool:
    """Returns whether `node` is an NNX object: a module, `Rngs`, an optimizer."""
    nnx = nnx_module()
    return nnx is not None and isinstance(node, nnx.Pytree)


def is_variable_of_state(kind: type) -> bool:
    """Returns whether a type is that of NNX variables other than parameters."""
    nnx = nnx_module()
    if nnx is None:
        return False
    return issubclass(kind, nnx.Variable) and not issubclass(kind, nnx.Param)


# --- Objects in pytrees ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Slot:
    """Leaf that stands for an NNX object with this name, taken out of a pytree."""

    name: LeafName


def is_slot(node: PyTree) -> bool:
    """Returns whether `node` stands for an NNX object."""
    return isinstance(node, Slot)


def take_out(tree: PyTree, argument: str = "") -> tuple[PyTree, dict[LeafName, PyTree]]:
    """Replaces the NNX objects of a pytree by slots; returns them by their names."""
    objects: dict[LeafName, PyTree] = {}

    def take(name: LeafName, node: PyTree) -> PyTree:
        if not is_nnx(node):
            return node
        objects[name] = node
        return Slot(name)

    if nnx_module() is None:
        return tree, objects
    plain = map_with_name(take, tree, argument=argument, is_leaf=is_nnx)
    return (plain if objects else tree), objects


def put_back(tree: PyTree, objects: Nodes) -> PyTree:
    """Puts NNX objects, or whatever has their names, into their slots."""
    return jax.tree.map(
        lambda node: objects[node.name] if is_slot(node) else node, tree
    )


def copy(objects: Nodes) -> dict[LeafName, PyTree]:
    """Returns fresh objects with the same arrays; what they share stays shared."""
    if not objects:
        return {}
    nnx = nnx_module()
    graphdef, state = nnx.split(tuple(objects.values()))
    # Copies of the variables, else `merge` would put the very same ones into both.
    fresh = nnx.merge(graphdef, jax.tree.map(lambda x: x, state))
    return dict(zip(objects, fresh, strict=True))


def map_variables(objects: Nodes, fn: Cast) -> None:
    """Maps the floating arrays of NNX objects, in place."""
    nnx, nodes = nnx_module(), tuple(objects.values())
    before = nnx.state(nodes)
    # Untouched variables are not written to: under a trace NNX may forbid it.
    update(objects, _map_state(before, variable_names(objects), fn), before)


def _map_state(
    state: PyTree, names: Mapping[Path, LeafName], fn: Cast, start: Path = ()
) -> PyTree:
    """Maps the floating arrays of an NNX state, whose paths begin with `start`."""

    def new(path: Path, variable: PyTree) -> PyTree:
        name = names[(*start, *path)]
        return jax.tree.map(lambda x: fn(name, x) if is_floating(x) else x, variable)

    nnx = nnx_module()
    flat = [(path, new(path, x)) for path, x in nnx.to_flat_state(state)]
    return nnx.from_flat_state(flat)


def map_params(objects: Nodes, params: Nodes, fn: Cast) -> dict[LeafName, PyTree]:
    """Maps the floating arrays of parameters that were split off NNX objects."""
    names, places = variable_names(objects), {x: i for i, x in enumerate(objects)}
    return {
        owner: _map_state(state, names, fn, (places[owner],))
        for owner, state in params.items()
    }


def variable_names(objects: Nodes) -> dict[Path, LeafName]:
    """Returns the names of the variables of NNX objects, by their paths in a tuple."""
    nnx = nnx_module()
    names, nodes = tuple(objects), tuple(objects.values())
    kinds = {
        path: type(node)
        for path, node in nnx.iter_graph(nodes)
        if isinstance(node, nnx.Pytree | nnx.Variable)
    }
    found = {}
    for path, _ in nnx.to_flat_state(nnx.state(nodes)):
        starts = (path[:length] for length in range(1, len(path) + 1))
        types = [kinds[start] for start in starts if start in kinds]
        found[path] = names[path[0]].inside(path[1:], types)
    return found


def params_of(node: PyTree, optimizer: PyTree) -> PyTree:
    """Returns the state of the parameters of an object that an optimizer updates."""
    return nnx_module().state(node, optimizer.wrt)


@runtime_checkable
class DiffState(Protocol):
    """An `nnx.DiffState`: the position of an argument, and a filter of its variables."""

    @property
    def argnum(self) -> int: ...
    @property
    def filter(self) -> Any: ...


def without_variables(tree: PyTree) -> PyTree:
    """Replaces each NNX variable in a pytree by the value that it holds."""
    nnx = nnx_module()
    if nnx is None:
        return tree
    is_variable = lambda node: isinstance(node, nnx.Variable)  # noqa: E731
    return jax.tree.map(
        lambda node: node.get_raw_value() if is_variable(node) else node,
        tree,
        is_leaf=is_variable,
    )


# --- Objects as pure functions --------------------------------------------------------


Chosen = Mapping[LeafName, Any]
"""The objects that are differentiated, each with a filter; `None` is for parameters."""


class Objects(NamedTuple):
    """NNX objects, split."""

    names: tuple[LeafName, ...]
    chosen: Chosen
    graphdef: PyTree  # the static structure, sharing between objects included
    params: dict[LeafName, PyTree]  # the differentiated ones: a `State` per object
    rest: PyTree  # BatchNorm statistics, dropout counters, frozen weights


def split(objects: Nodes, chosen: Chosen) -> Objects:
    """Takes NNX objects apart; only what is chosen are parameters."""
    _check_sharing(objects, chosen)
    nnx, names = nnx_module(), tuple(objects)
    predicates = {
        name: nnx.filterlib.to_predicate(nnx.Param if x is None else x)
        for name, x in chosen.items()
    }

    def is_param(path: PyTree, value: PyTree) -> bool:
        predicate = predicates.get(names[path[0]])
        return predicate is not None and predicate(path[1:], value)

    graphdef, state, rest = nnx.split(tuple(objects.values()), is_param, ...)
    flat = {name: [] for name in chosen}
    for (position, *path), variable in nnx.to_flat_state(state):
        flat[names[position]].append((tuple(path), variable))
    params = {name: nnx.from_flat_state(found) for name, found in flat.items()}
    return Objects(names, chosen, graphdef, params, rest)


def _check_sharing(objects: Nodes, differentiated: Chosen) -> None:
    nnx = nnx_module()
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
    """NNX objects for one call."""

    objects: dict[LeafName, PyTree]  # fresh ones by their names, parameters cast
    source: Objects  # what they were made from
    found: tuple[dict[LeafName, PyTree], PyTree]  # their state, as the call finds it


def merge(source: Objects, cast: Cast | None = None) -> Merged:
    """Builds fresh NNX objects, with each floating array mapped by `cast`."""
    nnx = nnx_module()
    # Fresh variables: NNX refuses to change, under a trace, those made outside of it.
    fresh, rest = jax.tree.map(lambda x: x, (source.params, source.rest))
    flat = [x for pair in fresh.items() for x in _positioned(source, *pair)]
    merged = nnx.merge(source.graphdef, nnx.from_flat_state(flat), rest)
    objects = dict(zip(source.names, merged, strict=True))
    if cast is not None:
        map_variables(objects, cast)
    return Merged(objects, source, _parts(objects, source))


def _positioned(
    source: Objects, name: LeafName, params: PyTree
) -> list[tuple[Path, PyTree]]:
    """Returns the variables of one object's parameters, by paths in the tuple of all."""
    position, flat = source.names.index(name), nnx_module().to_flat_state(params)
    return [((position, *path), variable) for path, variable in flat]


def _parts(objects: Nodes, source: Objects) -> tuple[dict[LeafName, PyTree], PyTree]:
    """Returns copies of parameters and rest, which later calls do not change."""
    now = split(objects, source.chosen)
    return jax.tree.map(lambda x: x, (now.params, now.rest))


def state_after(merged: Merged) -> tuple[dict[LeafName, PyTree], PyTree]:
    """Returns what a call has left in the objects, in the dtypes of before."""
    before, after = merged.source, _parts(merged.objects, merged.source)
    if jax.tree.structure(after) != jax.tree.structure((before.params, before.rest)):
        raise ValueError(
            "The function made or removed NNX variables, which must be the same after "
            "each call. Take new ones out before it returns, for example with "
            "`nnx.pop(model, nnx.Intermediate)`, and return them in `aux`."
        )

    def restore(new: PyTree, found: PyTree, old: PyTree) -> PyTree:
        # Untouched, a frozen weight for one: cast for the call, it must not stay cast.
        if new is found:
            return old
        return cast_leaf(new, old.dtype) if is_floating(new) else new

    def restore_rest(new: PyTree, found: PyTree, old: PyTree) -> PyTree:
        restored = restore(new, found, old)
        if new is found or not is_floating(new) or found.dtype == old.dtype:
            return restored
        # `nnx.jit` and `nnx.remat` assign what was there, rounded for the call.
        return jnp.where(new == found, old, restored)

    params = jax.tree.map(restore, after[0], merged.found[0], before.params)
    rest = jax.tree.map(restore_rest, after[1], merged.found[1], before.rest)
    named = [x for name, tree in params.items() for x in named_leaves(tree, name)]
    pairs = zip(named, jax.tree.leaves(before.params), strict=True)
    return {name: new for (name, new), old in pairs if new is not old}, rest


def assign(objects: Nodes, source: Objects, arrays: Mapping[str, PyTree]) -> None:
    """Writes parameters, by the names of `state_after`, into the caller's objects."""
    nnx, old, new = nnx_module(), [], []
    for owner, params in source.params.items():
        changed = map_with_name(arrays.get, params, argument=owner)
        old += _positioned(source, owner, params)
        new += _positioned(source, owner, changed)
    update(objects, nnx.from_flat_state(new), nnx.from_flat_state(old))


def update(
    objects: Mapping[PyTree, PyTree], rest: PyTree, before: PyTree = None
) -> None:
    """Writes changed state back into the caller's objects."""
    nnx = nnx_module()
    if before is not None:
        ids = lambda variable: [*map(id, jax.tree.leaves(variable))]  # noqa: E731
        old = {path: ids(x) for path, x in nnx.to_flat_state(before)}
        new = [(path, x) for path, x in nnx.to_flat_state(rest) if ids(x) != old[path]]
        rest = nnx.from_flat_state(new)
    nnx.update(tuple(objects.values()), rest)


def as_pure(
    step: Callable[..., PyTree], args: Mapping[str, PyTree]
) -> tuple[Callable[[PyTree], tuple[PyTree]], PyTree]:
    """Makes a step that changes NNX objects in place a function from state to state."""
    nnx = nnx_module()
    graphdef, before = nnx.split(tuple(args.values()))

    def pure(state: PyTree) -> tuple[PyTree]:
        # A copy: `merge` puts the very variables of the state into the objects.
        objects = nnx.merge(graphdef, jax.tree.map(lambda x: x, state))
        step(**dict(zip(args, objects, strict=True)))
        return (nnx.state(objects),)

    return pure, before
