"""Rules for what stays in full precision while the rest of a model is cast."""

import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import PyTree

from mpx._floating import cast_leaf, keeps_its_dtypes, map_floating, map_variables
from mpx._kept import ran_in_full_precision, run_in_full_precision
from mpx._objects import is_nnx_state, nnx_module
from mpx._warn import warn

KeepRule = type | str | Callable[[str, Any], bool]
"""A node type, a regular expression searched in a leaf's name, or a predicate."""

# Running statistics must not be rounded to half precision between steps: an average
# that moves by less than half an ulp per step stands still.
_STATE_TYPES = (eqx.nn.State, eqx.nn.StateIndex)
STATE_NAME = re.compile(r"(^|/)batch_stats(/|$)")  # the collection of Flax Linen


def is_state(node: Any) -> bool:
    """Whether a pytree node holds running statistics or other state."""
    return isinstance(node, _STATE_TYPES) or is_nnx_state(node)


def parse_keep(keep: KeepRule | Iterable[KeepRule]) -> tuple[KeepRule, ...]:
    """Returns the rules that a user gave: one, or several.

    Raises:
        TypeError: If one is of another kind.
        ValueError: If an expression does not compile.
    """
    if isinstance(keep, str | type) or callable(keep) or not isinstance(keep, Iterable):
        keep = (keep,)
    rules = tuple(keep)
    for rule in rules:
        if not isinstance(rule, str | type) and not callable(rule):
            raise TypeError(
                "A `keep` rule is a node type, a regular expression for leaf names or "
                f"a predicate `(name, leaf) -> bool`, but {rule!r} was given."
            )
        if isinstance(rule, str):
            try:
                re.compile(rule)
            except re.error as error:
                raise ValueError(
                    f"The `keep` rule {rule!r} is not a regular expression: {error}."
                ) from error
    return rules


def _always_kept() -> tuple[type, ...]:
    """Returns the layers that run in f32 without a rule."""
    types: list[type] = [eqx.nn.BatchNorm, eqx.nn.SpectralNorm]
    nnx = nnx_module()
    if nnx is not None:
        types.append(nnx.BatchNorm)
    # Norms of Equinox and Flax take their statistics in f32 by themselves, those of
    # Haiku do not: where an f16 variance is zero, the derivative of `rsqrt` at the epsilon
    # of 1e-5 is 1.6e7, infinite in f16, and the gradient nan at any loss scale.
    haiku = sys.modules.get("haiku")
    types.extend(getattr(haiku, name) for name in _HAIKU_NORMS if hasattr(haiku, name))
    return tuple(types)


_HAIKU_NORMS = ("BatchNorm", "GroupNorm", "InstanceNorm", "LayerNorm", "RMSNorm")


class KeepRules:
    """The `keep` rules of a policy during one call, which note what they match.

    Names are relative to the argument that holds the leaf: the same rule holds for
    `policy.cast_to_compute(model)` and for a loss that takes the model as an argument
    of any name.
    """

    def __init__(self, rules: tuple[KeepRule, ...], dtype: np.dtype) -> None:
        """Prepares the rules for a cast to `dtype`."""
        self._dtype, self._rules = dtype, rules
        self._unused = set(range(len(rules)))
        self._always = _always_kept()

    def cast(self, tree: PyTree, argument: str = "") -> PyTree:
        """Casts a tree to the compute dtype, except what is kept.

        Args:
            tree: Any pytree.
            argument: The name of the argument. It counts where the argument is an array
                by itself, and for statistics: `batch_stats` may be an argument.
        """

        def cast(name: str, leaf: Any, in_state: bool) -> Any:
            return leaf if in_state else self._cast_leaf(argument, name, leaf)

        return map_floating(cast, tree, whole=self._keeps_node, state=is_state)

    def cast_objects(self, objects: Mapping[str, Any]) -> None:
        """Casts the parameters of NNX objects in place; see `cast`.

        Args:
            objects: The objects by names that begin with the name of the argument.
        """

        def cast(name: str, leaf: Any, in_state: bool) -> Any:
            argument, _, rest = name.partition("/")
            return leaf if in_state else self._cast_leaf(argument, rest, leaf)

        map_variables(cast, objects, whole=self._keeps_node)

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Lets modules of the kept types run in f32 inside a `with` block."""
        types = (rule for rule in self._rules if isinstance(rule, type))
        return run_in_full_precision((*types, *self._always))

    def warn_unused(self) -> None:
        """Warns of rules that matched nothing in the call."""
        unused = [self._rules[index] for index in sorted(self._unused)]
        for rule in unused:
            if isinstance(rule, type) and ran_in_full_precision(rule):
                continue
            warn(
                f"The `keep` rule {rule!r} matches nothing: no argument of the function "
                "holds such a leaf or node. Names are paths inside an argument, such as "
                "`layers/0/norm/weight`, without the name of the argument."
            )

    def _keeps_node(self, node: Any) -> bool:
        kept = False
        for index, rule in enumerate(self._rules):
            if isinstance(rule, type) and isinstance(node, rule):
                self._unused.discard(index)
                kept = True
        return kept or isinstance(node, self._always) or keeps_its_dtypes(node)

    def _cast_leaf(self, argument: str, name: str, leaf: Any) -> Any:
        kept = STATE_NAME.search(f"{argument}/{name}") is not None
        for index, rule in enumerate(self._rules):
            if not isinstance(rule, type) and _matches(rule, argument, name, leaf):
                self._unused.discard(index)
                kept = True
        return leaf if kept else cast_leaf(leaf, self._dtype)


def _matches(rule: Any, argument: str, name: str, leaf: Any) -> bool:
    if not isinstance(rule, str):
        return bool(rule(name, leaf))
    # An argument that is an array has no path. Its own name must match as a whole: an
    # input that happens to be called `norm_x` is not what "norm" means.
    return bool(re.search(rule, name) if name else re.fullmatch(rule, argument))
