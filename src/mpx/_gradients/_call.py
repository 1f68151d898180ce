"""One call of a user's function, as a pure function of parameters and state.

Its inputs are what is differentiated, what a call changes (see `State`), and the rest. A step
is evaluated on the first two and never on Python side effects, so it can be repeated,
accumulated and undone.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PyTree

from mpx._casting._cast import cast_like, cast_state_leaf
from mpx._casting._context import argument_names, arguments_cast_to, original
from mpx._casting._keep import is_statistic
from mpx._casting._policy import Policy
from mpx._jax import _nnx
from mpx._jax._formats import at_least_f32
from mpx._jax._tree import (
    LeafName,
    dtype_of,
    flatten_with_names,
    is_array,
    is_floating,
    is_inexact,
    is_none,
    map_with_name,
    named_leaves,
    shape_of,
)


class State(NamedTuple):
    """State that a call changes."""

    nnx: PyTree  # the NNX state that is not differentiated
    # What a call replaces among the arguments, by name: each `eqx.nn.State`, the arrays in
    # `batch_stats` of Linen, and NNX parameters once the function has assigned to them
    arrays: dict[str, PyTree]


class Call:
    """A user's function and one set of arguments for it.

    Attributes:
        policy: How its arguments are cast; `None` if they are not.
        diff: The differentiated arguments: arrays, `None` for what has no gradient.
        state: The state before the call.
        scales: The `Fp8State` of a function under `fp8` with delayed scaling, or `None`.
    """

    def __init__(
        self,
        func: Callable[..., PyTree],
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
        chosen: Sequence[tuple[int, PyTree]],
        policy: Policy | None,
        *,
        scales: PyTree = None,
    ) -> None:
        self._func, self.policy, self.scales = func, policy, scales
        # A name that also comes by keyword is for the function to refuse or to accept.
        self._names = [
            f"{name}[{number}]" if name in kwargs else name
            for number, name in enumerate(argument_names(original(func), len(args)))
        ]
        positions = _positions([argnum for argnum, _ in chosen], len(args))
        self._diff_names = [self._names[i] for i in positions]
        filters = dict(zip(self._diff_names, (x for _, x in chosen), strict=True))
        self._static, self._objects = {}, {}
        # Keywords as `jax.jit` hands them on.
        keywords = dict(sorted(kwargs.items()))
        arguments = {**dict(zip(self._names, args, strict=True)), **keywords}
        for name, value in arguments.items():
            self._static[name], objects = _nnx.take_out(value, name)
            self._objects.update(objects)
        arrays = {}
        for name in self._diff_names:
            tree = self._static[name]
            tree = np.asarray(tree) if isinstance(tree, float | complex) else tree
            arrays[name], self._static[name] = eqx.partition(
                tree, lambda leaf: is_array(leaf) and is_inexact(leaf)
            )
        static = {name: self._static[name] for name in self._diff_names}
        self._split, params, rest = None, {}, None
        if self._objects:
            slots = [leaf for leaf in jax.tree.leaves(static) if _nnx.is_slot(leaf)]
            wanted = {slot.name: filters[slot.name.argument] for slot in slots}
            self._split = _nnx.split(self._objects, wanted)
            params, rest = self._split.params, self._split.rest
        for name, found in filters.items():
            if found is not None and not any(x.argument == name for x in self._objects):
                raise TypeError(
                    f"`nnx.DiffState` chooses variables of an NNX module, but `{name}` "
                    "holds none. Pass its position alone."
                )
        diff = _fill_slots(arrays, static, params)
        for name, tree in diff.items():
            if not jax.tree.leaves(tree):
                raise ValueError(
                    f"`{name}` is to be differentiated, but it holds no floating array. "
                    "Pass the model or its parameters there, or set `argnums`."
                )
        self.diff: tuple[PyTree, ...] = tuple(diff[name] for name in self._diff_names)
        replaced: dict[str, PyTree] = {
            name: node
            for trees in (diff, self._static)
            for argument, tree in trees.items()
            for name, node in _nodes(tree, argument)
            if _is_equinox_state(node) or (is_statistic(name) and is_array(node))
        }
        self.state = State(rest, replaced)

    @property
    def low(self) -> np.dtype | None:
        """The 16-bit dtype to which the policy casts, `None` if it casts to none."""
        dtype = None if self.policy is None else self.policy.resolved_compute_dtype()
        return dtype if dtype is not None and dtype.itemsize == 2 else None

    def run(
        self, diff: tuple[PyTree, ...], state: State, scales: PyTree
    ) -> tuple[PyTree, State]:
        """Returns what the function returns, and the state after the call."""
        keep = None if self.policy is None else self.policy.keeping()
        # Copies: Equinox makes a `State` unusable once a layer has written to it.
        copies, arguments = jax.tree.map(lambda x: x, state.arrays), dict(self._static)
        for name, tree in arguments.items():  # also of lists and dicts, to be changed
            arguments[name] = map_with_name(
                copies.get, tree, argument=name, is_leaf=_is_equinox_state
            )
        arrays, params = self._without_nnx(diff)
        for name, tree in arrays.items():
            arguments[name] = eqx.combine(tree, arguments[name])
        if keep is not None:
            arguments = {name: keep.cast(x, name) for name, x in arguments.items()}
        merged = None
        if self._split is not None:
            split = self._split._replace(params=params, rest=state.nnx)
            merged = _nnx.merge(split, None if keep is None else keep.cast_leaf)
            arguments = _nnx.put_back(arguments, merged.objects)
        args = [arguments.pop(name) for name in self._names]
        first = () if scales is None else (scales,)
        with contextlib.ExitStack() as stack:
            if self.policy is not None and keep is not None:
                dtype = self.policy.resolved_compute_dtype()
                stack.enter_context(keep.running())
                stack.enter_context(arguments_cast_to(dtype))
            out = self._func(*first, *args, **arguments)
        if keep is not None:
            keep.check(original(self._func))
        changed, rest = ({}, None) if merged is None else _nnx.state_after(merged)
        nodes: dict[str, PyTree] = dict(_nodes(out))
        pairs = ((old, nodes[new]) for new, old in self.successors(out).items())
        new = {name: cast_like(x, self.state.arrays[name]) for name, x in pairs}
        return out, State(rest, {**state.arrays, **new, **changed})

    def successors(self, out: PyTree) -> dict[str, str]:
        """Returns, by name, what in a result replaces what in `state.arrays`.

        Equinox states are found by their names, or else by their order. A collection of
        Linen's is found anywhere if all its arrays are there, by names and shapes.
        """
        nodes, known = _nodes(out), self.state.arrays
        new, old = _state_structures(nodes), _state_structures(known.items())
        equinox: dict[str, str] = {}
        for pairs in (_by_name(new, old), dict(zip(new, old, strict=False))):
            fits = len(new) == len(old) == len(pairs)
            if fits and all(new[x] == old[y] for x, y in pairs.items()):
                equinox = pairs
                break
        shapes = {str(name): shape_of(x) for name, x in nodes if is_array(x)}
        collections: dict[str, dict[str, str]] = {}
        for name in [x for x in known if x not in old]:
            prefix, _, inside = f"/{name}".rpartition("/batch_stats/")
            collections.setdefault(prefix, {})[inside] = name
        places: dict[str, list[str]] = {}
        for prefix, names in collections.items():
            first = next(iter(names))
            wanted = [(x, shape_of(known[name])) for x, name in names.items()]
            for found in [x for x in shapes if f"/{x}".endswith(f"/{first}")]:
                place = found.removesuffix(first)
                if all(shapes.get(place + inside) == shape for inside, shape in wanted):
                    places.setdefault(place, []).append(prefix)
        return equinox | {
            place + inside: name
            for place, fitting in places.items()
            for inside, name in collections[_nearest(place, fitting)].items()
        }

    def diff_in(self, state: State) -> tuple[PyTree, ...]:
        """Returns the differentiated arguments as a call finds them in a state."""
        arrays, pairs = state.arrays, zip(self._diff_names, self.diff, strict=True)
        if not arrays:
            return self.diff
        return tuple(map_with_name(arrays.get, x, argument=name) for name, x in pairs)

    def assigned(self, state: State) -> set[str]:
        """Returns the names of the differentiated arrays that a state replaces."""
        return state.arrays.keys() - self.state.arrays.keys()

    def without(self, state: State, names: set[str]) -> State:
        """Returns a state without some arrays, and others in the dtypes of arguments."""
        arrays = {name: x for name, x in state.arrays.items() if name not in names}
        state = state._replace(arrays=arrays)
        like = self.comparable(self.state, state).arrays
        return state._replace(arrays=cast_like(arrays, like))

    def comparable(self, state: State, later: State) -> State:
        """Returns a state with the arrays that a later one has."""
        if later.arrays.keys() == state.arrays.keys():
            return state
        params = zip(self.diff_names(), jax.tree.leaves(self.diff), strict=True)
        known: dict[str, PyTree] = {**dict(params), **state.arrays}
        return state._replace(arrays={name: known.get(name) for name in later.arrays})

    def _without_nnx(
        self, diff: tuple[PyTree, ...]
    ) -> tuple[dict[str, PyTree], dict[LeafName, PyTree]]:
        """Returns the differentiated arguments without, and the parameters of, NNX."""
        params: dict[LeafName, PyTree] = {}

        def take(node: object, value: PyTree) -> PyTree:
            if not isinstance(node, _nnx.Slot):
                return value
            params[node.name] = value
            return None

        arrays = {
            name: jax.tree.map(take, self._static[name], tree, is_leaf=is_none)
            for name, tree in zip(self._diff_names, diff, strict=True)
        }
        return arrays, params

    def widened(self, diff: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
        """Returns copies, of at least f32, of parameters stored in 16 bits."""
        # The derivative with respect to a stored one would be summed in its dtype.
        if self.policy is None:
            return diff
        keep = self.policy.keeping()
        dtype = at_least_f32(self.policy.resolved_compute_dtype())
        floats = (dtype_of(x) for x in jax.tree.leaves(diff) if is_floating(x))
        if all(found.itemsize >= dtype.itemsize for found in floats):
            return diff

        def widen(name: LeafName, leaf: PyTree) -> PyTree:
            if not is_floating(leaf) or keep.keeps(name, leaf):
                return leaf
            return cast_state_leaf(leaf, dtype)  # never narrowed

        arrays, params = self._without_nnx(diff)
        for name, tree in arrays.items():
            arrays[name] = map_with_name(widen, tree, argument=name)
        if self._split is not None:
            params = _nnx.map_params(self._objects, params, widen)
        static = {name: self._static[name] for name in arrays}
        wide = _fill_slots(arrays, static, params)
        return tuple(wide[name] for name in self._diff_names)

    def diff_names(self) -> list[LeafName]:
        """Returns the names of the differentiated arrays, in the order of the leaves."""
        trees = zip(self._diff_names, self.diff, strict=True)
        return [path for name, tree in trees for path, _ in named_leaves(tree, name)]

    def commit(self, state: State) -> None:
        """Puts a state into effect in the caller's NNX objects."""
        if self._split is not None:
            _nnx.update(self._objects, state.nnx)
            if self.assigned(state):
                _nnx.assign(self._objects, self._split, state.arrays)


def _positions(argnums: Sequence[int], count: int) -> list[int]:
    """Returns the positions that `argnums` mean among `count` arguments."""
    for argnum in argnums:
        if not -count <= argnum < count:
            raise TypeError(
                f"Argument {argnum} is to be differentiated, but only {count} were "
                "passed by position. Pass it by position, not by keyword."
            )
    positions = [argnum % count for argnum in argnums]
    if len(set(positions)) < len(positions):
        raise ValueError(f"`argnums` {tuple(argnums)} names an argument twice.")
    return positions


def _fill_slots(
    arrays: PyTree, static: PyTree, params: Mapping[LeafName, PyTree]
) -> PyTree:
    """Puts the parameters of NNX objects where their slots are in the static part."""
    fill = lambda node, x: params[node.name] if _nnx.is_slot(node) else x  # noqa: E731
    return jax.tree.map(fill, static, arrays, is_leaf=is_none)


def loss_and_aux(out: PyTree, has_aux: bool) -> tuple[Array, PyTree]:
    """Returns the loss as a scalar of at least f32, and what came with it."""
    value, aux, hint = out, None, "Reduce it, for example with `jnp.mean`."
    if has_aux:
        if not isinstance(out, tuple | list) or len(out) != 2:
            raise TypeError(
                "With `has_aux=True` the function must return a pair `(loss, aux)`, but "
                f"it returned {type(out).__name__}."
            )
        value, aux = out
    elif isinstance(out, tuple):
        hint = "If it returns a pair `(loss, aux)`, pass `has_aux=True`."
    if isinstance(value, float):
        value = np.float32(value)
    if not is_floating(value) or shape_of(value) != ():
        dtype = getattr(value, "dtype", type(value).__name__)
        raise TypeError(
            "The function must return a real floating scalar as its loss, but it "
            f"returned {dtype} of shape {shape_of(value)}. {hint}"
        )
    loss = jnp.asarray(value)
    return loss.astype(at_least_f32(loss.dtype)), aux


def _is_equinox_state(node: object) -> bool:
    return isinstance(node, eqx.nn.State)


def _nodes(tree: PyTree, argument: str = "") -> list[tuple[LeafName, PyTree]]:
    """Returns the leaves of a tree by name; an `eqx.nn.State` is one of them."""
    return flatten_with_names(tree, argument, _is_equinox_state)[0]


def _state_structures(nodes: Iterable[tuple[str, PyTree]]) -> dict[str, PyTree]:
    return {name: jax.tree.structure(x) for name, x in nodes if _is_equinox_state(x)}


def _shared_words(place: str, names: Iterable[str]) -> list[int]:
    """Returns how many words a place has in common with each name."""
    words = {x for x in re.split("[/_]", place) if not x.isdigit()} - {""}
    return [len(words & {*re.split("[/_]", name)}) for name in names]


def _by_name(new: Iterable[str], old: Iterable[str]) -> dict[str, str]:
    """Pairs results with the arguments nearest in name, if that is clear."""
    found: dict[str, str] = {}
    for place in new:
        shared = dict(zip(old, _shared_words(place, old), strict=True))
        best = [name for name, n in shared.items() if n and n == max(shared.values())]
        if len(best) != 1 or best[0] in found.values():
            return {}
        found[place] = best[0]
    return found


def _nearest(place: str, collections: list[str]) -> str:
    """Returns the collection whose name has the most in common with a place."""
    shared = _shared_words(place, collections)
    best = [x for x, n in zip(collections, shared, strict=True) if n == max(shared)]
    if len(best) > 1:
        arguments = " or ".join(f"`{name[1:]}`" for name in best)
        raise ValueError(
            f"The function returned `batch_stats` that may replace those of {arguments}, "
            "whose arrays have the same names. Return them under the name of their "
            'argument, such as `{"student": updates}`.'
        )
    return best[0]


def is_spoilt(pairs: Iterable[tuple[PyTree, PyTree]]) -> Bool[Array, ""]:
    """Returns whether a number became infinite or nan that was finite.

    The pairs are arrays before and after; `None` for before counts as finite.
    """
    checks = []
    for before, after in pairs:
        if after is before or not is_inexact(after):
            continue  # an array that was not replaced costs nothing
        spoilt = ~jnp.isfinite(after)
        if before is not None and shape_of(before) == shape_of(after):
            spoilt &= jnp.isfinite(before)
        checks.append(jnp.any(spoilt))
    return jnp.stack(checks).any() if checks else jnp.array(False)
