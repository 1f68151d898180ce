"""Flax NNX modules as pure functions: parameters and other state apart.

Flax is not imported here: if no NNX object can exist, there is nothing to do.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from mpx._cast import cast_leaf, cast_like
from mpx._policy import Policy
from mpx._tree import is_floating, select_tree


def _nnx() -> Any:
    return sys.modules.get("flax.nnx")


def is_nnx(tree: PyTree) -> bool:
    """Whether a pytree is or holds an NNX module, `Rngs` or other NNX object."""
    nnx = _nnx()
    if nnx is None:
        return False
    is_object = lambda node: isinstance(node, nnx.Pytree)  # noqa: E731
    return any(is_object(leaf) for leaf in jax.tree.leaves(tree, is_leaf=is_object))


class Objects(NamedTuple):
    """NNX arguments taken apart.

    Attributes:
        graphdef: Their static structure, sharing between arguments included.
        params: The differentiated parameters: one NNX `State` per argument.
        rest: Everything else: BatchNorm statistics, dropout counters, frozen weights.
    """

    graphdef: Any
    params: dict[str, PyTree]
    rest: PyTree


def split(args: Mapping[str, Any], differentiated: tuple[str, ...]) -> Objects:
    """Takes NNX arguments apart; only `nnx.Param`s of the named ones are parameters."""
    nnx = _nnx()
    graphdef, *states = nnx.split(
        dict(args), *(_params_of(name) for name in differentiated), ...
    )
    params = {
        name: nnx.from_flat_state(
            [(path[1:], leaf) for path, leaf in nnx.to_flat_state(state)]
        )
        for name, state in zip(differentiated, states[:-1], strict=True)
    }
    return Objects(graphdef, params, states[-1])


def _params_of(name: str) -> Any:
    param = _nnx().Param
    return lambda path, value: path[0] == name and isinstance(value, param)


def merge(objects: Objects, policy: Policy | None) -> dict[str, Any]:
    """Builds fresh NNX objects, with their parameters cast by the policy."""
    nnx = _nnx()
    args = nnx.merge(objects.graphdef, *_with_names(objects.params), objects.rest)
    if policy is None:
        return args
    dtype = policy.resolved_compute_dtype()
    kept = _compute_in(args, (*policy.kept_types(), nnx.BatchNorm), dtype)
    for name, state in objects.params.items():
        flat = []
        for path, leaf in nnx.to_flat_state(state):
            full = (name, *path)
            keep = any(full[: len(prefix)] == prefix for prefix in kept)
            keep = keep or policy.keeps_leaf("/".join(map(str, full)), leaf[...])
            flat.append((full, leaf if keep else jax.tree.map(_cast_to(dtype), leaf)))
        nnx.update(args, nnx.from_flat_state(flat))
    return args


def _with_names(params: Mapping[str, PyTree]) -> list[PyTree]:
    nnx = _nnx()
    return [
        nnx.from_flat_state(
            [((name, *path), leaf) for path, leaf in nnx.to_flat_state(state)]
        )
        for name, state in params.items()
    ]


def _cast_to(dtype: Any) -> Any:
    return lambda leaf: cast_leaf(leaf, dtype) if is_floating(leaf) else leaf


def _compute_in(args: Any, types: tuple[type, ...], dtype: Any) -> list[tuple]:
    """Lets kept modules return the compute dtype; returns the paths of their weights.

    A Flax layer whose `dtype` is `None` returns the widest dtype among its inputs and
    weights: one norm in f32 would carry the rest of the model up to f32 with it.
    """
    nnx = _nnx()
    kept = []
    for path, node in nnx.iter_graph(args):
        if not isinstance(node, types) or isinstance(node, nnx.Variable):
            continue
        if getattr(node, "dtype", dtype) is None:
            node.dtype = dtype
        if not isinstance(node, nnx.BatchNorm):
            kept.append(path)
    return kept


def rest_of(args: Mapping[str, Any], like: Objects) -> PyTree:
    """Returns what the call has changed, in the dtypes it had before."""
    nnx = _nnx()
    filters = [_params_of(name) for name in like.params]
    *_, rest = nnx.split(dict(args), *filters, ...)
    return cast_like(rest, like.rest)


def update(args: Mapping[str, Any], rest: PyTree) -> None:
    """Writes changed state back into the caller's objects."""
    _nnx().update(dict(args), rest)


def run_if(flag: Any, step: Callable[[], Any], args: Mapping[str, Any]) -> None:
    """Runs a step that changes NNX objects in place, and undoes it unless `flag`."""
    nnx = _nnx()
    before = nnx.state(dict(args))
    step()
    nnx.update(dict(args), select_tree(flag, nnx.state(dict(args)), before))
