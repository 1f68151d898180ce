"""Flax NNX modules as pure functions: parameters and other state apart.

Flax is not imported here: if no NNX object can exist, there is nothing to do.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from mpx._cast import cast_leaf, force_full_precision
from mpx._policy import Policy
from mpx._tree import is_floating, path_name


def _nnx() -> Any:
    return sys.modules.get("flax.nnx")


def is_nnx(node: Any) -> bool:
    """Whether `node` is an NNX object: a module, `Rngs`, an optimizer."""
    nnx = _nnx()
    return nnx is not None and isinstance(node, nnx.Pytree)


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

    if _nnx() is None:
        return tree, objects
    tree = jax.tree_util.tree_map_with_path(take, tree, is_leaf=is_nnx)
    return tree, objects


def put_back(tree: PyTree, objects: Mapping[str, Any]) -> PyTree:
    """Puts NNX objects, or whatever has their names, into their slots."""
    return jax.tree.map(
        lambda node: objects[node.name] if is_slot(node) else node, tree
    )


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


def merge(source: Objects, policy: Policy | None) -> Merged:
    """Builds fresh NNX objects, with their parameters cast by the policy."""
    nnx = _nnx()
    params = []
    for name, state in source.params.items():
        flat = nnx.to_flat_state(state)
        position = source.names.index(name)
        params.append(nnx.from_flat_state([((position, *p), x) for p, x in flat]))
    # Fresh variables: NNX refuses to change, under a trace, those made outside of it.
    rest = jax.tree.map(lambda x: x, source.rest)
    merged = nnx.merge(source.graphdef, *params, rest)
    if policy is not None:
        _cast(source.names, merged, policy)
    objects = dict(zip(source.names, merged, strict=True))
    return Merged(objects, source, _rest(objects, source))


def _rest(objects: Mapping[str, Any], source: Objects) -> PyTree:
    filters = _filters(source.names, tuple(source.params))
    *_, rest = _nnx().split(tuple(objects.values()), *filters, ...)
    return jax.tree.map(lambda x: x, rest)  # a copy, which later calls do not change


def _cast(names: tuple[str, ...], merged: tuple[Any, ...], policy: Policy) -> None:
    """Casts parameters, except those of modules that stay in full precision."""
    nnx = _nnx()
    dtype = policy.resolved_compute_dtype()
    types = (*policy.kept_types(), nnx.BatchNorm)
    kept = []
    for path, node in nnx.iter_graph(merged):
        if isinstance(node, types) and isinstance(node, nnx.Module | nnx.Variable):
            kept.append(path)
            if isinstance(node, nnx.Module) and callable(node):
                # A fresh object, which the caller never sees.
                new = _full_precision_class(type(node))
                object.__setattr__(node, "__class__", new)

    def cast(leaf: Any) -> Any:
        return cast_leaf(leaf, dtype) if is_floating(leaf) else leaf

    flat = []
    for path, param in nnx.to_flat_state(nnx.state(merged, nnx.Param)):
        name = "/".join(map(str, (names[path[0]], *path[1:])))
        keep = any(path[: len(prefix)] == prefix for prefix in kept)
        if not keep and not policy.keeps_leaf(name, param[...]):
            flat.append((path, jax.tree.map(cast, param)))
    nnx.update(merged, nnx.from_flat_state(flat))


@functools.cache
def _full_precision_class(cls: type) -> type:
    """Returns a subclass that runs in f32 and returns the dtype of its inputs.

    Without it one norm in f32 would carry the rest of the model up to f32: a Flax layer
    returns the widest dtype among its inputs and weights.
    """

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        tree, objects = take_out((args, kwargs))

        @force_full_precision
        def run(tree: PyTree) -> Any:
            args, kwargs = put_back(tree, objects)
            return cls.__call__(self, *args, **kwargs)

        return run(tree)

    return type(cls)(cls.__name__, (cls,), {"__call__": call, "__doc__": cls.__doc__})


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
            if not _is_same(variable, old[path])
        ]
        rest = nnx.from_flat_state(changed)
    nnx.update(tuple(objects.values()), rest)


def _is_same(a: PyTree, b: PyTree) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x is y for x, y in pairs)


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
    return put_back(plain, merge(split(objects, ()), None).objects)


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
