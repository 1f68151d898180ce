"""One call of a user's function, as a pure function of parameters and state.

A training step has three kinds of input: what is differentiated, what a call changes
(Equinox `State`, BatchNorm statistics and dropout counters of NNX modules), and the
rest. The step is evaluated on the first two and never on Python side effects, so it can
be repeated, accumulated and undone.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from mpx._casting._cast import cast_like, cast_state_leaf
from mpx._casting._keep import Keep
from mpx._casting._policy import Policy
from mpx._casting._wrapped import argument_names, arguments_cast_to, original
from mpx._gradients._state import (
    State,
    changed_states,
    equinox_states,
    holds_states,
    linen_statistics,
    successors,
    with_states,
)
from mpx._jax import _nnx
from mpx._jax._formats import at_least_f32
from mpx._jax._tree import (
    LeafName,
    dtype_of,
    is_array,
    is_floating,
    is_inexact,
    map_with_name,
    named_leaves,
    shape_of,
)


class Call:
    """A user's function and one set of arguments for it.

    Attributes:
        func: The function.
        policy: How its arguments are cast; `None` if they are not.
        diff: The differentiated arguments: arrays, `None` for what has no gradient.
        state: The state before the call.
        scales: The `Fp8State` of a function under `fp8` with delayed scaling, or `None`.
    """

    func: Callable[..., Any]
    policy: Policy | None
    diff: tuple[PyTree, ...]
    state: State
    scales: Any

    def __init__(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        argnums: tuple[int, ...],
        policy: Policy | None,
        *,
        scales: Any = None,
    ) -> None:
        """Takes the arguments apart.

        Raises:
            TypeError: If an argument to differentiate was not passed by position.
            ValueError: If it holds nothing to differentiate.
        """
        self.func, self.policy, self.scales = func, policy, scales
        # A name that also comes by keyword is for the function to refuse or to accept.
        self._names = [
            f"{name}[{number}]" if name in kwargs else name
            for number, name in enumerate(argument_names(original(func), len(args)))
        ]
        self._diff_names = [self._names[i] for i in _positions(argnums, len(args))]
        arguments = {**dict(zip(self._names, args, strict=True)), **kwargs}
        self._static, self._objects = {}, {}
        for name, value in arguments.items():
            self._static[name], objects = _nnx.take_out(value, name)
            self._objects.update(objects)
        arrays = {}
        for name in self._diff_names:
            tree = self._static[name]
            tree = np.asarray(tree) if isinstance(tree, float | complex) else tree
            arrays[name], self._static[name] = eqx.partition(tree, _is_trainable)
        static = {name: self._static[name] for name in self._diff_names}
        self._split = None
        if self._objects:
            slots = [leaf for leaf in jax.tree.leaves(static) if _nnx.is_slot(leaf)]
            self._split = _nnx.split(self._objects, tuple(slot.name for slot in slots))
        params = {} if self._split is None else self._split.params
        diff = _fill_slots(arrays, static, params)
        _check_trainable(diff)
        self.diff = tuple(diff[name] for name in self._diff_names)
        rest = None if self._split is None else self._split.rest
        arguments = [self._static, dict(zip(self._diff_names, self.diff, strict=True))]
        statistics = [linen_statistics(trees) for trees in arguments]
        self._statistics = statistics[0] | statistics[1]
        self.state = State(equinox_states(self._static), rest, self._statistics)

    @property
    def low(self) -> np.dtype | None:
        """The 16-bit dtype to which the policy casts, `None` if it casts to none."""
        dtype = None if self.policy is None else self.policy.resolved_compute_dtype()
        return dtype if dtype is not None and dtype.itemsize == 2 else None

    def run(
        self, diff: tuple[PyTree, ...], state: State, scales: Any
    ) -> tuple[Any, State]:
        """Returns what the function returns, and the state after the call.

        Args:
            diff: The differentiated arguments, as `diff_in` returns them for the state.
            state: The state before the call.
            scales: The `Fp8State`, if there is one.
        """
        keep = None if self.policy is None else self.policy.keeping()
        arguments, merged = self._cast_arguments(diff, state, keep)
        if merged is not None:
            arguments = _nnx.put_back(arguments, merged.objects)
        args = [arguments.pop(name) for name in self._names]
        first = () if scales is None else (scales,)
        with contextlib.ExitStack() as stack:
            if self.policy is not None and keep is not None:
                stack.enter_context(keep.running())
                stack.enter_context(
                    arguments_cast_to(self.policy.resolved_compute_dtype())
                )
            out = self.func(*first, *args, **arguments)
        if keep is not None:
            keep.check(original(self.func))
        changed, rest = ({}, None) if merged is None else _nnx.state_after(merged)
        leaves: dict[str, Any] = dict(named_leaves(out)) if self._statistics else {}
        new = {old: leaves[name] for name, old in self.successors(out).items()}
        new = {name: cast_like(x, self._statistics[name]) for name, x in new.items()}
        arrays = {**state.arrays, **new, **changed}
        return out, State(changed_states(out, state.equinox), rest, arrays)

    def successors(self, out: Any) -> dict[str, str]:
        """Returns, by name, which arrays of a result replace which in `state.arrays`."""
        return successors(out, self._statistics) if self._statistics else {}

    def diff_in(self, state: State) -> tuple[PyTree, ...]:
        """Returns the differentiated arguments as a call finds them in a state."""
        return tuple(
            self._in_state(name, tree, state)
            for name, tree in zip(self._diff_names, self.diff, strict=True)
        )

    def assigned(self, state: State) -> set[str]:
        """Returns the names of the differentiated arrays that a state replaces."""
        return state.arrays.keys() - self._statistics.keys()

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
        names, leaves = self.diff_names(), jax.tree.leaves(self.diff)
        params: dict[str, Any] = dict(zip(names, leaves, strict=True))
        arrays = {
            name: state.arrays.get(name, params.get(name)) for name in later.arrays
        }
        return state._replace(arrays=arrays)

    @staticmethod
    def _in_state(argument: str, tree: PyTree, state: State) -> PyTree:
        if not state.arrays:
            return tree
        return map_with_name(state.arrays.get, tree, argument=argument)

    def _cast_arguments(
        self, diff: tuple[PyTree, ...], state: State, keep: Keep | None
    ) -> tuple[dict[str, Any], _nnx.Merged | None]:
        """Returns the arguments in the compute dtype, and the NNX objects among them."""
        # Copies: Equinox makes a `State` unusable once a layer has written to it.
        states = [jax.tree.map(lambda x: x, node) for node in state.equinox]
        arguments = {
            name: self._in_state(name, tree, state)
            for name, tree in with_states(self._static, states).items()
        }
        arrays, params = self._take_params(diff)
        for name, tree in arrays.items():
            arguments[name] = eqx.combine(tree, arguments[name])
        if keep is not None:
            arguments = {name: keep.cast(x, name) for name, x in arguments.items()}
        if self._split is None:
            return arguments, None
        split = self._split._replace(params=params, rest=state.nnx)
        return arguments, _nnx.merge(split, None if keep is None else keep.cast_leaf)

    def _take_params(
        self, diff: tuple[PyTree, ...]
    ) -> tuple[dict[str, PyTree], dict[LeafName, PyTree]]:
        """Returns the differentiated arguments without, and the parameters of, NNX."""
        params: dict[LeafName, PyTree] = {}
        arrays = {
            name: _empty_slots(tree, self._static[name], params)
            for name, tree in zip(self._diff_names, diff, strict=True)
        }
        return arrays, params

    def widened(self, diff: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
        """Returns copies, of at least f32, of parameters stored in 16 bits.

        The derivative with respect to a stored one would be rounded to its dtype, and that
        of a table be summed in it. Everything else comes back as it is.
        """
        if self.policy is None:
            return diff
        keep, dtype = self.policy.keeping(), self.policy.resolved_compute_dtype()
        dtype = at_least_f32(dtype)
        floats = (dtype_of(x) for x in jax.tree.leaves(diff) if is_floating(x))
        if all(found.itemsize >= dtype.itemsize for found in floats):
            return diff

        def widen(name: LeafName, leaf: Any) -> Any:
            if not is_floating(leaf) or keep.keeps(name, leaf):
                return leaf
            return cast_state_leaf(leaf, dtype)  # never narrowed

        arrays, params = self._take_params(diff)
        arrays = {
            name: map_with_name(widen, tree, argument=name)
            for name, tree in arrays.items()
        }
        if self._split is not None:
            params = _nnx.map_params(self._objects, params, widen)
        static = {name: self._static[name] for name in arrays}
        wide = _fill_slots(arrays, static, params)
        return tuple(wide[name] for name in self._diff_names)

    def diff_names(self) -> list[LeafName]:
        """Returns the names of the differentiated arrays, in the order of the leaves."""
        trees = zip(self._diff_names, self.diff, strict=True)
        return [path for name, tree in trees for path, _ in named_leaves(tree, name)]

    def commit(self, out: Any, state: State) -> Any:
        """Puts a state into effect: into the result and into the caller's objects."""
        if self._split is not None:
            _nnx.update(self._objects, state.nnx)
            if self.assigned(state):
                _nnx.assign(self._objects, self._split, state.arrays)
        if state.equinox and holds_states(out, state.equinox):
            return with_states(out, state.equinox)
        return out


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


def _check_trainable(diff: dict[str, PyTree]) -> None:
    for name, tree in diff.items():
        if not jax.tree.leaves(tree):
            raise ValueError(
                f"`{name}` is to be differentiated, but it holds no floating array. "
                "Pass the model or its parameters there, or set `argnums`."
            )


def _fill_slots(arrays: PyTree, static: PyTree, params: dict[LeafName, PyTree]) -> Any:
    """Puts the parameters of NNX objects where their slots are in the static part."""
    return jax.tree.map(
        lambda node, array: params[node.name] if _nnx.is_slot(node) else array,
        static,
        arrays,
        is_leaf=lambda node: node is None,
    )


def _empty_slots(diff: PyTree, static: PyTree, params: dict[LeafName, PyTree]) -> Any:
    """Takes the parameters of NNX objects out again, into `params`."""

    def take(node: Any, value: PyTree) -> Any:
        if not _nnx.is_slot(node):
            return value
        params[node.name] = value
        return None

    return jax.tree.map(take, static, diff, is_leaf=lambda node: node is None)


def unpack(out: Any, has_aux: bool) -> tuple[Any, Any]:
    """Returns the loss and what came with it."""
    if not has_aux:
        return out, None
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise TypeError(
            "With `has_aux=True` the function must return a pair `(loss, aux)`, but it "
            f"returned {type(out).__name__}."
        )
    return out[0], out[1]


def as_loss(value: Any, has_aux: bool) -> Array:
    """Returns the loss as a scalar of at least f32; raises if it is none."""
    if isinstance(value, float):
        value = np.float32(value)
    if not is_floating(value) or shape_of(value) != ():
        shape, dtype = shape_of(value), getattr(value, "dtype", type(value).__name__)
        hint = "Reduce it, for example with `jnp.mean`."
        if isinstance(value, tuple) and not has_aux:
            hint = "If it returns a pair `(loss, aux)`, pass `has_aux=True`."
        raise TypeError(
            "The function must return a real floating scalar as its loss, but it "
            f"returned {dtype} of shape {shape}. {hint}"
        )
    loss = jnp.asarray(value)
    return loss.astype(at_least_f32(loss.dtype))


def _is_trainable(leaf: Any) -> bool:
    return is_array(leaf) and is_inexact(leaf)
