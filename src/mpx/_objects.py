"""Flax NNX objects inside pytrees: found, taken out, put back, parameters mapped.

Flax is not imported here: if no NNX object can exist, there is nothing to do.
"""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import PyTree

from mpx._tree import path_name


def nnx_module() -> Any:
    """Returns `flax.nnx` if it has been imported, else `None`."""
    return sys.modules.get("flax.nnx")


def is_nnx(node: Any) -> bool:
    """Whether `node` is an NNX object: a module, `Rngs`, an optimizer."""
    nnx = nnx_module()
    return nnx is not None and isinstance(node, nnx.Pytree)


def is_nnx_state(node: Any) -> bool:
    """Whether `node` is an NNX variable other than a parameter, such as a statistic."""
    nnx = nnx_module()
    if nnx is None or not isinstance(node, nnx.Variable):
        return False
    return not isinstance(node, nnx.Param)


@dataclasses.dataclass(frozen=True)
class Slot:
    """Stands, as a leaf, for an NNX object that was taken out of a pytree.

    Attributes:
        name: The object's name: `model`, or `models/encoder` inside a container.
    """

    name: str


def is_slot(node: Any) -> bool:
    """Whether `node` stands for an NNX object."""
    return isinstance(node, Slot)


def take_out(tree: PyTree, name: str = "") -> tuple[PyTree, dict[str, Any]]:
    """Replaces the NNX objects of a pytree by slots; returns them by their names.

    Args:
        tree: Any pytree.
        name: What the pytree is called; the objects' names begin with it.
    """
    objects: dict[str, Any] = {}

    def take(path: Any, node: Any) -> Any:
        if not is_nnx(node):
            return node
        slot = Slot("/".join(filter(None, (name, path_name(path)))))
        objects[slot.name] = node
        return slot

    if nnx_module() is None:
        return tree, objects
    plain = jax.tree_util.tree_map_with_path(take, tree, is_leaf=is_nnx)
    return (plain if objects else tree), objects


def put_back(tree: PyTree, objects: Mapping[str, Any]) -> PyTree:
    """Puts NNX objects, or whatever has their names, into their slots."""
    return jax.tree.map(
        lambda node: objects[node.name] if is_slot(node) else node, tree
    )


def clone(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fresh objects with the same arrays; what they share stays shared."""
    nnx = nnx_module()
    graphdef, state = nnx.split(tuple(objects.values()))
    # Copies of the variables, else `merge` would put the very same ones into both.
    fresh = nnx.merge(graphdef, jax.tree.map(lambda x: x, state))
    return dict(zip(objects, fresh, strict=True))


def update_variables(
    objects: Mapping[str, Any],
    fn: Callable[[str, Any], Any],
    *,
    whole: Callable[[Any], bool],
) -> None:
    """Replaces the variables of NNX objects, in place.

    Args:
        objects: The objects by name.
        fn: Maps a variable's name (`encoder/linear/kernel`) and the variable to its
            successor.
        whole: Whether a module or variable is passed by, with everything it holds.
    """
    nnx = nnx_module()
    names, nodes = tuple(objects), tuple(objects.values())
    kept = [
        path
        for path, node in nnx.iter_graph(nodes)
        if isinstance(node, nnx.Module | nnx.Variable) and whole(node)
    ]
    changed = []
    for path, variable in nnx.to_flat_state(nnx.state(nodes)):
        if any(path[: len(start)] == start for start in kept):
            continue
        name = "/".join(filter(None, map(str, (names[path[0]], *path[1:]))))
        new = fn(name, variable)
        # Untouched variables are not written to: under a trace NNX may forbid it.
        if not holds_same(new, variable):
            changed.append((path, new))
    nnx.update(nodes, nnx.from_flat_state(changed))


def holds_same(a: PyTree, b: PyTree) -> bool:
    """Whether two trees of one structure hold the very same leaves."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x is y for x, y in pairs)
