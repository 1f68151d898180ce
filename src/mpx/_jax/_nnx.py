"""Flax NNX objects inside pytrees, and as arrays with names.

Flax is not imported here: if no NNX object can exist, there is nothing to do.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
from jaxtyping import PyTree

from mpx._jax._tree import (
    LeafName,
    cast_leaf,
    flatten_with_names,
    is_floating,
    named_leaves,
)

Path = tuple[Any, ...]
Nodes = Mapping[LeafName, PyTree]  # NNX objects, or what stands for them, by name


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
    if nnx_module() is None:
        return tree, {}
    named, structure = flatten_with_names(tree, argument, is_nnx)
    objects = {name: node for name, node in named if is_nnx(node)}
    plain = [Slot(name) if is_nnx(node) else node for name, node in named]
    return (structure.unflatten(plain) if objects else tree), objects


def put_back(tree: PyTree, objects: Nodes) -> PyTree:
    """Puts NNX objects, or whatever has their names, into their slots."""
    return jax.tree.map(
        lambda node: objects[node.name] if is_slot(node) else node, tree
    )


def copy(objects: Nodes) -> dict[LeafName, PyTree]:
    """Returns fresh objects with the same arrays; what they share stays shared."""
    apart = Objects(objects)
    return apart.merged(apart.leaves)


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


# --- Objects as arrays with names -----------------------------------------------------


class Objects:
    """NNX objects, taken apart into arrays; what they share is there once.

    Attributes:
        leaves: The arrays: parameters, statistics of BatchNorm, counters of dropout.
        names: Their names, with the types of the modules around them.
    """

    def __init__(self, objects: Nodes) -> None:
        nnx, nodes = nnx_module(), tuple(objects.values())
        self._owners, self._nodes = tuple(objects), nodes
        self._graphdef, state = nnx.split(nodes)
        self.leaves, self._structure = jax.tree.flatten(state)
        self.names: list[LeafName] = []
        kinds = {
            path: type(node)
            for path, node in nnx.iter_graph(nodes)
            if isinstance(node, nnx.Pytree | nnx.Variable)
        }
        for path, variable, _ in self._variables(self.leaves):
            starts = (path[:length] for length in range(1, len(path) + 1))
            types = [kinds[start] for start in starts if start in kinds]
            name = self._owners[path[0]].inside(path[1:], types)
            inside = (x.split("/")[1:] for x, _ in named_leaves(variable))
            self.names += [name.inside(keys, ()) for keys in inside]  # after `value`

    def _variables(
        self, leaves: Sequence[PyTree]
    ) -> list[tuple[Path, PyTree, list[int]]]:
        """Returns paths, fresh variables with these arrays, and the places of those."""
        flat = nnx_module().to_flat_state(self._structure.unflatten(leaves))
        places = iter(range(len(leaves)))
        return [
            (path, x, [next(places) for _ in jax.tree.leaves(x)]) for path, x in flat
        ]

    def merged(self, leaves: Sequence[PyTree]) -> dict[LeafName, PyTree]:
        """Returns fresh objects with these arrays, which a trace may change."""
        state = self._structure.unflatten(leaves)
        merged = nnx_module().merge(self._graphdef, state)
        return dict(zip(self._owners, merged, strict=True))

    def chosen(self, filters: Mapping[LeafName, Any]) -> dict[LeafName, PyTree]:
        """Returns, for each object with a filter, a state of the places of its arrays.

        It holds what the filter selects; `None` selects parameters.
        """
        nnx, found = nnx_module(), {name: [] for name in filters}
        self._check_sharing(filters)
        predicates = {
            name: nnx.filterlib.to_predicate(nnx.Param if x is None else x)
            for name, x in filters.items()
        }
        for path, variable, places in self._variables(self.leaves):
            owner, inside = self._owners[path[0]], path[1:]
            if owner in filters and predicates[owner](inside, variable):
                numbered = jax.tree.structure(variable).unflatten(places)
                found[owner].append((inside, numbered))
        return {name: nnx.from_flat_state(flat) for name, flat in found.items()}

    def _check_sharing(self, chosen: Mapping[LeafName, Any]) -> None:
        nnx = nnx_module()
        owners: dict[int, str] = {}
        for name, node in zip(self._owners, self._nodes, strict=True):
            for path, leaf in nnx.iter_graph(node):
                if not isinstance(leaf, nnx.Param):
                    continue
                owner = owners.setdefault(id(leaf), name)
                if (owner in chosen) != (name in chosen):
                    raise ValueError(
                        f"`{name}/{'/'.join(map(str, path))}` is shared by `{owner}` and "
                        f"`{name}`, of which only one is differentiated. Pass one module "
                        "that holds both, or a copy made with `nnx.clone`."
                    )

    def after(
        self, objects: Nodes, found: Sequence[PyTree], before: Sequence[PyTree]
    ) -> list[PyTree]:
        """Returns the arrays that a call has left, in the dtypes of those before it.

        `found` are those that the call got, which may be cast: untouched they must not
        stay cast.
        """
        state = nnx_module().state(tuple(objects.values()))
        leaves, structure = jax.tree.flatten(state)
        if structure != self._structure:
            raise ValueError(
                "The function made or removed NNX variables, which must be the same after "
                "each call. Take new ones out before it returns, for example with "
                "`nnx.pop(model, nnx.Intermediate)`, and return them in `aux`."
            )
        return [
            old if x is given else cast_leaf(x, old.dtype) if is_floating(x) else x
            for x, given, old in zip(leaves, found, before, strict=True)
        ]

    def write(self, leaves: Sequence[PyTree]) -> None:
        """Writes arrays into the objects of the caller."""
        # Untouched variables are not written to: under a trace NNX may forbid it.
        flat = [
            (path, variable)
            for path, variable, places in self._variables(leaves)
            if any(leaves[i] is not self.leaves[i] for i in places)
        ]
        nnx_module().update(self._nodes, nnx_module().from_flat_state(flat))
