"""One call of a user's function, as a pure function of its arrays.

The arguments are one list of leaves. A step is evaluated on those that are differentiated
and those that the call replaces, its state, and never on Python side effects, so it can be
repeated, accumulated and undone.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import treedef_tuple
from jaxtyping import Array, PyTree

from mpx._casting._cast import cast_like
from mpx._casting._context import (
    F32,
    argument_names,
    autocast_of,
    chosen_half_precision,
    is_amp,
    take_scales,
)
from mpx._casting._keep import is_statistic
from mpx._casting._policy import Policy, dtype_under_amp
from mpx._jax import _nnx
from mpx._jax._formats import at_least_f32
from mpx._jax._tree import (
    AxisName,
    LeafName,
    cast_leaf,
    flatten_with_names,
    is_array,
    is_floating,
    is_inexact,
    map_with_name,
    named_leaves,
    shape_of,
)
from mpx._scaling._loss_scaling import LossScaling, NoLossScaling

State = dict[int, PyTree]
"""What a call replaces among its leaves, by place.

The arrays in each `eqx.nn.State` and in `batch_stats` of Linen, the NNX variables that are
not differentiated, and those others to which the function has assigned.
"""
Arrays = tuple[tuple[str, tuple[int, ...]], ...]
"""The names and shapes of the arrays in a node."""


@dataclasses.dataclass(frozen=True)
class InState:
    """Leaf that stands in `aux` for a part of the state, by its place."""

    place: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradOptions:
    """Options of a gradient function, checked. Unless `mixed`, all runs as written."""

    argnums: tuple[int, ...]
    filters: tuple[Any, ...]  # of variables of NNX, for each; `None`: parameters
    several: bool  # whether the gradients are a tuple
    has_aux: bool
    policy: Policy
    grad_dtype: np.dtype | None
    axis_name: AxisName | None
    retry: int
    mixed: bool
    # Of `accumulate`: the parts, the arguments that are split, and whether to average
    steps: int = 1
    batches: tuple[int, ...] = ()
    mean: bool = True

    def for_call(
        self, func: Callable[..., PyTree], scaling: LossScaling | None
    ) -> "GradOptions":
        """Returns the options of one call, in which the policy names a compute dtype."""
        policy, low = self.policy, dtype_under_amp(func, self.policy)
        if not self.mixed:
            if low is not None:
                raise ValueError(
                    "`use_mixed_precision=False` switches nothing off in a function "
                    "under `amp`, which computes in 16 bits by itself. Pass the function "
                    "without `amp`."
                )
            return self
        own = None if self.axis_name is not None else autocast_of(func)
        reduces = (policy.reduce_dtype, None if own is None else own().reduce)
        if None not in reduces and reduces[0] != reduces[1]:
            raise ValueError(
                f"`reduce_dtype` is {reduces[0]} in the policy and {reduces[1]} in `amp`. "
                "Leave one out."
            )
        has_none = isinstance(scaling, NoLossScaling)
        default = np.dtype(jnp.bfloat16 if has_none else np.float16)
        dtype = low or policy.compute_dtype or chosen_half_precision() or default
        if dtype == np.float16 and (scaling is None or has_none):
            raise ValueError(
                "f16 gradients need a loss scaling: without one, those below 6e-8 become "
                "0. Pass `mpx.DynamicLossScaling.pow2()` as the scaling; or compute in "
                'bf16, with `policy="p=f32,c=bf16,o=f32"` or `amp(func, "bf16")`. '
                "`mpx.StaticLossScaling(1.0)` is f16 with a scale of 1."
            )
        policy = dataclasses.replace(policy, compute_dtype=dtype)
        return dataclasses.replace(self, policy=policy)


class Call:
    """A user's function and one set of arguments for it.

    Attributes:
        policy: How its arguments are cast; `None` if they are not.
        scales: The `Fp8State` of a function under `fp8` with delayed scaling, or `None`.
        arguments: The names of the positional arguments.
        leaves: The leaves of all arguments. Those in NNX objects come after the first
            `plain`.
        names: The names of the leaves.
        diff: The differentiated arrays, by place.
        state: The state before the call.
    """

    def __init__(
        self,
        func: Callable[..., PyTree],
        options: GradOptions,
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
    ) -> None:
        self._func, self._options = func, options
        self.policy = options.policy if options.mixed and not is_amp(func) else None
        self.scales, args, self._original = take_scales(func, args)
        # A name that also comes by keyword is for the function to refuse or to accept.
        self.arguments = [
            f"{name}[{number}]" if name in kwargs else name
            for number, name in enumerate(argument_names(self._original, len(args)))
        ]
        positions = _positions(options.argnums, len(args))
        chosen = (self.arguments[i] for i in positions)
        wanted: dict[str, PyTree] = dict(zip(chosen, options.filters, strict=True))
        # Keywords as `jax.jit` hands them on.
        self._keywords, arguments = sorted(kwargs), {**kwargs}
        arguments.update(zip(self.arguments, args, strict=True))
        self.names, self.leaves, structures, objects = list[LeafName](), [], [], {}
        # Of nodes that a result may replace: the places of the leaves, by names inside.
        self._groups: dict[str, dict[str, int]] = {}
        for name in (*self.arguments, *self._keywords):
            tree, found = _nnx.take_out(arguments[name], name)
            if name in wanted and isinstance(tree, float | complex):
                tree = np.asarray(tree)
            for path, node in flatten_with_names(tree, name, _is_equinox_state)[0]:
                for inside, leaf in named_leaves(node):
                    self._note_state(path, node, inside)
                    self.names.append(path.inside([inside], inside.types))
                    self.leaves.append(leaf)
            structures.append(jax.tree.structure(tree))
            objects |= found
        self._structure, self.plain = treedef_tuple(structures), len(self.leaves)
        self._objects = _nnx.Objects(objects) if objects else None
        if self._objects is not None:
            self.names += self._objects.names
            self.leaves += self._objects.leaves
        trees = self._numbered(wanted, objects)
        self._diff = tuple(trees[i] for i in positions)
        for name, tree in zip(wanted, self._diff, strict=True):
            if not jax.tree.leaves(tree):
                raise ValueError(
                    f"`{name}` is to be differentiated, but it holds no floating array. "
                    "Pass the model or its parameters there, or set `argnums`."
                )
        places = sorted(jax.tree.leaves(self._diff))
        self.diff: State = {place: self.leaves[place] for place in places}
        places = {*range(self.plain, len(self.leaves))} - {*self.diff}
        places.update(*(group.values() for group in self._groups.values()))
        self.state: State = {place: self.leaves[place] for place in sorted(places)}

    def _numbered(
        self, wanted: Mapping[str, PyTree], objects: Mapping[LeafName, PyTree]
    ) -> Sequence[PyTree]:
        """Returns the arguments with, for each array to differentiate, its place."""
        filters = {x: wanted[x.argument] for x in objects if x.argument in wanted}
        for name, chosen in wanted.items():
            if chosen is not None and not any(x.argument == name for x in filters):
                raise TypeError(
                    f"`nnx.DiffState` chooses variables of an NNX module, but `{name}` "
                    "holds none. Pass its position alone."
                )
        numbers = {} if self._objects is None else self._objects.chosen(filters)

        def number(place: int) -> PyTree:
            name, leaf = self.names[place], self.leaves[place]
            if _nnx.is_slot(leaf) and leaf.name in numbers:
                return jax.tree.map(lambda i: self.plain + i, numbers[leaf.name])
            is_chosen = name.argument in wanted and is_array(leaf) and is_inexact(leaf)
            return place if is_chosen else None

        return self._structure.unflatten(map(number, range(self.plain)))

    def _note_state(self, name: str, node: PyTree, inside: str) -> None:
        """Notes the next leaf, which is inside a node, if a result may replace it."""
        if not _is_equinox_state(node):
            if not (is_statistic(name) and is_array(node)):
                return
            above, word, inside = f"/{name}/".partition("/batch_stats/")
            name, inside = f"{above}{word}".strip("/"), inside.strip("/")
        self._groups.setdefault(name, {})[inside] = len(self.leaves)

    @property
    def low(self) -> np.dtype | None:
        """The 16-bit dtype to which the policy casts, `None` if it casts to none."""
        dtype = None if self.policy is None else self.policy.resolved_compute_dtype()
        return dtype if dtype is not None and dtype.itemsize == 2 else None

    def trees(self, grads: State) -> tuple[PyTree, ...]:
        """Returns gradients as trees, one for each differentiated argument."""
        return jax.tree.map(grads.get, self._diff)

    def run(self, given: State, scales: PyTree) -> tuple[Array, PyTree, State]:
        """Returns the loss, `aux` with marks for what replaces state, and that.

        The leaves are those of the arguments, or those that are given by place.
        """
        before = [given.get(place, x) for place, x in enumerate(self.leaves)]
        keep = None if self.policy is None else self.policy.keeping()
        leaves = before
        if keep is not None:
            leaves = [*map(keep.cast_leaf, self.names, before)]
        plain, inside, objects = leaves[: self.plain], leaves[self.plain :], {}
        if self._objects is not None:
            objects = self._objects.merged(inside)
        plain = [objects[x.name] if _nnx.is_slot(x) else x for x in plain]
        # A new `eqx.nn.State`, too: one is of no use once a layer has written to it.
        values = self._structure.unflatten(plain)
        count, first = len(self.arguments), () if scales is None else (scales,)
        keywords = dict(zip(self._keywords, values[count:], strict=True))
        with contextlib.nullcontext() if keep is None else keep.running():
            out = self._func(*first, *values[:count], **keywords)
        if keep is not None:
            keep.check(self._original)
        loss, aux = loss_and_aux(out, self._options.has_aux)
        aux, after = self._without_state(aux)
        if self._objects is not None:
            new = self._objects.after(objects, inside, before[self.plain :])
            for place, leaf in enumerate(new, self.plain):
                old, found = before[place], leaves[place]
                if leaf is not old:
                    is_param = place in self.diff
                    after[place] = leaf if is_param else _unrounded(leaf, found, old)
        return loss, aux, after

    def _without_state(self, aux: PyTree) -> tuple[PyTree, State]:
        """Returns a result with marks for what replaces state, and that."""
        old: dict[str, Arrays] = {
            name: tuple((x, shape_of(self.leaves[place])) for x, place in group.items())
            for name, group in self._groups.items()
        }
        known, after = {*old.values()}, State()
        is_part = lambda node: bool(known) and _arrays_in(node) in known  # noqa: E731
        nodes, _ = flatten_with_names(aux, is_leaf=is_part)
        pairs = _pairs(old, {place: _arrays_in(node) for place, node in nodes})

        def mark(place: str, node: PyTree) -> PyTree:
            group = self._groups.get(pairs.get(place, ""), {})

            def put(name: str, x: PyTree) -> PyTree:
                if name not in group:
                    return x
                after[group[name]] = cast_like(x, self.leaves[group[name]])
                return InState(group[name])

            return map_with_name(put, node)

        return map_with_name(mark, aux, is_leaf=is_part), after

    def comparable(self, state: State, later: State) -> State:
        """Returns a state with the arrays that a later one has."""
        return {place: state.get(place, self.leaves[place]) for place in later}

    def widened(self, diff: State) -> State:
        """Returns copies of parameters stored in 16 bits, or f32 for f64 gradients."""
        # The derivative with respect to a stored one would be summed in its dtype.
        if self.policy is None:
            return diff
        keep, wide = self.policy.keeping(), {**diff}
        dtypes = self.policy.resolved_compute_dtype(), self._options.grad_dtype or F32
        dtype = min(map(at_least_f32, dtypes), key=lambda x: x.itemsize)
        for place, leaf in diff.items():
            is_narrow = is_floating(leaf) and leaf.dtype.itemsize < dtype.itemsize
            if is_narrow and not keep.keeps(self.names[place], leaf):
                wide[place] = cast_leaf(leaf, dtype)
        return wide

    def commit(self, state: State) -> None:
        """Puts a state into effect in the caller's NNX objects."""
        if self._objects is not None:
            pairs = [*enumerate(self.leaves)][self.plain :]
            self._objects.write([state.get(place, x) for place, x in pairs])


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


def _unrounded(new: PyTree, found: PyTree, old: PyTree) -> PyTree:
    """Returns a new value, or the old one where a call has left what it found."""
    if not is_floating(new) or found.dtype == old.dtype:
        return new
    # `nnx.jit` and `nnx.remat` assign what was there, rounded for the call.
    return jnp.where(new == found.astype(new.dtype), old, new)


def _arrays_in(node: PyTree) -> Arrays:
    return tuple((name, shape_of(x)) for name, x in named_leaves(node) if is_array(x))


def _pairs(old: Mapping[str, Arrays], new: Mapping[str, Arrays]) -> dict[str, str]:
    """Returns the names of the state that parts of a result replace, by their own names.

    It is what has the very name and arrays of the part, or else the only one with these.
    """
    pairs = {name: name for name in old if new.get(name) == old[name]}
    for arrays in {*old.values()}:
        names = [x for x in old if old[x] == arrays and x not in pairs.values()]
        places = [x for x in new if new[x] == arrays and x not in pairs]
        is_bare = arrays[0][0] == ""  # any array may have its shape
        if not names or not places or is_bare:
            continue
        if len(names) + len(places) > 2:
            raise ValueError(
                f"The function returned {_listed(places)} in `aux`, which may replace "
                f"{_listed(names)}: the arrays have the same names and shapes. Return "
                "what replaces an argument under its name and path, such as `{"
                '"student_state": new}` or `{"student": {"batch_stats": new}}`.'
            )
        pairs[places[0]] = names[0]
    return pairs


def _listed(names: Sequence[str]) -> str:
    return " or ".join(f"`{name}`" for name in names)
