"""Policy: which dtype parameters, computation, outputs, gradients and sums have."""

import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PyTree

from mpx._cast import cast_leaf, cast_tree, keeps_its_dtypes, widen_tree
from mpx._formats import parse_float_dtype, short_name
from mpx._half import half_precision_datatype
from mpx._tree import dtype_of, is_floating, map_with_name

KeepRule = type | str | Callable[[str, Any], bool]
"""A node type, a regular expression searched in a leaf's name, or a predicate."""

# Running statistics must not be rounded to half precision between steps: an average
# that moves by less than half an ulp per step stands still.
_RUNNING_STATISTICS: tuple[KeepRule, ...] = (
    eqx.nn.State,
    eqx.nn.BatchNorm,
    eqx.nn.SpectralNorm,
    r"(^|/)batch_stats(/|$)",  # the collection of Flax Linen
)

_F32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True, init=False)
class Policy:
    """Which dtype each kind of value has in a training step.

    A policy is static: it is hashable, compares by value and can be an argument of
    `jax.jit(..., static_argnums=...)`. It holds no arrays.

    Attributes:
        param_dtype: The dtype in which parameters are stored.
        compute_dtype: The dtype of the forward and backward pass. `None` means the
            configured half precision, looked up whenever the policy is used.
        output_dtype: The dtype in which results leave the model.
        grad_dtype: The dtype of the gradients that are returned. `None` means f32 for
            parameters of 32 bits or fewer, and the parameter's dtype for wider ones.
        reduce_dtype: The dtype in which gradients are summed over devices, with the
            same meaning of `None`.
        keep: What stays in full precision although the rest is cast.

    A rule in `keep` is one of three:

    - a node type such as `eqx.nn.LayerNorm`: the parameters of every such node stay as
      they are, and if it is a callable Equinox or NNX module it *runs* in f32: its
      inputs are widened and its results come back in the dtype of its inputs;
    - a regular expression, searched in the leaf's name (`model/layers/0/norm/weight`);
    - a predicate `(name, leaf) -> bool`.

    Running statistics are always kept, with the layers that own them: `eqx.nn.State`,
    `eqx.nn.BatchNorm`, `eqx.nn.SpectralNorm`, `batch_stats` of Flax Linen and
    `nnx.BatchStat`.

    Examples:
        >>> import equinox as eqx
        >>> import jax.numpy as jnp
        >>> policy = Policy(compute_dtype="bf16", keep=[eqx.nn.LayerNorm, "head"])
        >>> model = {"norm": eqx.nn.LayerNorm(2), "w": jnp.ones(2), "head": jnp.ones(2)}
        >>> low = policy.cast_to_compute(model)
        >>> low["norm"].weight.dtype, low["w"].dtype, low["head"].dtype
        (dtype('float32'), dtype(bfloat16), dtype('float32'))
    """

    param_dtype: np.dtype
    compute_dtype: np.dtype | None
    output_dtype: np.dtype
    grad_dtype: np.dtype | None
    reduce_dtype: np.dtype | None
    keep: tuple[KeepRule, ...]

    def __init__(
        self,
        param_dtype: DTypeLike = _F32,
        compute_dtype: DTypeLike | None = None,
        output_dtype: DTypeLike = _F32,
        *,
        grad_dtype: DTypeLike | None = None,
        reduce_dtype: DTypeLike | None = None,
        keep: KeepRule | Iterable[KeepRule] = (),
    ) -> None:
        """Checks and stores the dtypes; see the class.

        Raises:
            ValueError: If a dtype is not floating with at least 16 bits.
            TypeError: If a `keep` rule is none of the three kinds.
        """
        parse = parse_float_dtype
        values = {
            "param_dtype": parse(param_dtype, "param_dtype"),
            "compute_dtype": _parse_compute(compute_dtype),
            "output_dtype": parse(output_dtype, "output_dtype"),
            "grad_dtype": _optional(grad_dtype, "grad_dtype"),
            "reduce_dtype": _optional(reduce_dtype, "reduce_dtype"),
            "keep": _parse_keep(keep),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        """Returns the string from which `get_policy` makes this policy.

        The `keep` rules, which are Python objects, are not part of it.
        """
        compute = "half" if self.compute_dtype is None else self.compute_dtype
        parts = {
            "p": self.param_dtype,
            "c": compute,
            "o": self.output_dtype,
            "g": self.grad_dtype,
            "r": self.reduce_dtype,
        }
        return ",".join(
            f"{key}={dtype if isinstance(dtype, str) else short_name(dtype)}"
            for key, dtype in parts.items()
            if dtype is not None
        )

    def resolved_compute_dtype(self) -> np.dtype:
        """Returns `compute_dtype`, or the configured half precision if it is `None`."""
        return self.compute_dtype or half_precision_datatype()

    def cast_to_param(self, tree: PyTree) -> PyTree:
        """Casts floating leaves to `param_dtype`; `keep` does not apply."""
        return cast_tree(tree, self.param_dtype)

    def cast_to_output(self, tree: PyTree) -> PyTree:
        """Casts floating leaves to `output_dtype`; `keep` does not apply."""
        return cast_tree(tree, self.output_dtype)

    def cast_to_compute(self, tree: PyTree) -> PyTree:
        """Casts floating leaves to `compute_dtype`, except what `keep` names."""
        target = self.resolved_compute_dtype()
        types = self.kept_types()

        def is_kept_node(node: Any) -> bool:
            return isinstance(node, types) or keeps_its_dtypes(node)

        def cast(name: str, node: Any) -> Any:
            if is_kept_node(node):
                return run_in_full_precision(node)
            if not is_floating(node) or self.keeps_leaf(name, node):
                return node
            return cast_leaf(node, target)

        return map_with_name(cast, tree, is_leaf=is_kept_node)

    def kept_types(self) -> tuple[type, ...]:
        """Returns the node types that stay in full precision."""
        return tuple(rule for rule in self._rules() if isinstance(rule, type))

    def keeps_leaf(self, name: str, leaf: Any) -> bool:
        """Whether an expression or a predicate keeps the leaf of this name."""
        for rule in self._rules():
            if isinstance(rule, type):
                continue
            if re.search(rule, name) if isinstance(rule, str) else rule(name, leaf):
                return True
        return False

    def _rules(self) -> tuple[KeepRule, ...]:
        nnx = sys.modules.get("flax.nnx")  # else there are no NNX statistics
        statistics = () if nnx is None else (nnx.BatchStat,)
        return self.keep + _RUNNING_STATISTICS + statistics

    def with_output_dtype(self, output_dtype: DTypeLike) -> "Policy":
        """Returns the same policy with another `output_dtype`."""
        options = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self)
        }
        return Policy(**{**options, "output_dtype": output_dtype})


def _optional(dtype: DTypeLike | None, what: str) -> np.dtype | None:
    return None if dtype is None else parse_float_dtype(dtype, what)


def _parse_compute(dtype: DTypeLike | None) -> np.dtype | None:
    is_half = isinstance(dtype, str) and dtype == "half"  # as in a policy's string
    return None if is_half else _optional(dtype, "compute_dtype")


def _parse_keep(keep: KeepRule | Iterable[KeepRule]) -> tuple[KeepRule, ...]:
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


_POLICY_KEYS = {
    "p": "param_dtype",
    "params": "param_dtype",
    "c": "compute_dtype",
    "compute": "compute_dtype",
    "o": "output_dtype",
    "output": "output_dtype",
    "g": "grad_dtype",
    "grad": "grad_dtype",
    "r": "reduce_dtype",
    "reduce": "reduce_dtype",
}


def get_policy(
    policy: Policy | str, *, keep: KeepRule | Iterable[KeepRule] = ()
) -> Policy:
    """Makes a policy from a string such as `"p=f32,c=bf16,o=f32"`.

    The keys are `p` (params), `c` (compute), `o` (output), `g` (grad) and `r` (reduce),
    short or long; spaces are allowed. As in jmp, parameters default to f32, compute
    follows the parameters and output follows compute; a single dtype sets all three.
    `half` is the configured half precision, `full` is f32.

    Args:
        policy: The description; `str` of a policy gives it back. A policy comes back
            as it is.
        keep: What stays in full precision, see `Policy`.

    Raises:
        ValueError: If a key or a dtype is unknown; the message names it.
        TypeError: If it is neither a string nor a policy, or a policy with `keep`.

    Examples:
        >>> policy = get_policy("p=f32, c=bf16, o=f32")
        >>> str(policy), get_policy(str(policy)) == policy
        ('p=f32,c=bf16,o=f32', True)
    """
    if isinstance(policy, Policy):
        if _parse_keep(keep):
            raise TypeError(
                "`keep` goes with a string, but a `Policy` was given, which has its own. "
                "Use `dataclasses.replace(policy, keep=...)`."
            )
        return policy
    if not isinstance(policy, str):
        raise TypeError(_not_a_policy(policy))
    text = policy.strip()
    if "=" not in text:
        dtype = _policy_dtype(text, policy)
        param = half_precision_datatype() if dtype is None else dtype
        return Policy(param, dtype, param, keep=keep)
    options: dict[str, Any] = {}
    for part in text.split(","):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key not in _POLICY_KEYS or not value:
            raise ValueError(
                f"{part.strip()!r} in the policy {policy!r} is not understood. Write "
                "`key=dtype` with a key among p, c, o, g, r (or params, compute, "
                'output, grad, reduce), for example "p=f32,c=bf16,o=f32".'
            )
        if _POLICY_KEYS[key] in options:
            raise ValueError(f"The policy {policy!r} gives `{key}` twice.")
        options[_POLICY_KEYS[key]] = _policy_dtype(value, policy)
    param = options.setdefault("param_dtype", _F32)
    compute = options.setdefault("compute_dtype", param)
    options.setdefault("output_dtype", compute)
    # Only the compute dtype can be left open until the policy is used.
    for name, dtype in options.items():
        if dtype is None and name != "compute_dtype":
            options[name] = half_precision_datatype()
    return Policy(**options, keep=keep)


def _policy_dtype(name: str, policy: str) -> np.dtype | None:
    """Returns the dtype, or `None` for "half", which a policy looks up when used."""
    if name == "half":
        return None
    try:
        return parse_float_dtype(name)
    except ValueError:
        raise ValueError(
            f"Unknown dtype {name!r} in the policy {policy!r}. Use f16, bf16, f32, f64, "
            "their long names, `half` or `full`."
        ) from None


def as_policy(policy: "Policy | str | None") -> Policy:
    """Returns a policy from what a user may pass for one; `None` is half compute."""
    if policy is None:
        return Policy()
    if isinstance(policy, str):
        return get_policy(policy)
    if not isinstance(policy, Policy):
        raise TypeError(_not_a_policy(policy))
    return policy


def _not_a_policy(policy: Any) -> str:
    return (
        '`policy` must be an `mpx.Policy` or a string such as "p=f32,c=bf16,o=f32", but '
        f"{policy!r} was given."
    )


_RUNS_IN_FULL_PRECISION = "mpx_runs_in_full_precision"  # marks the classes made below


def run_in_full_precision(node: Any) -> Any:
    """Returns a callable Equinox module that runs in f32 on inputs of any dtype.

    The result is an instance of a subclass of the module's class with the same fields:
    `isinstance`, attributes and methods work as before. Anything else comes back as is.
    """
    if not isinstance(node, eqx.Module) or not callable(node):
        return node
    if hasattr(type(node), _RUNS_IN_FULL_PRECISION):
        return node
    module = object.__new__(_full_precision_class(type(node)))
    for name, value in vars(node).items():
        object.__setattr__(module, name, value)
    return module


@functools.cache
def _full_precision_class(cls: type) -> type:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        floats = [leaf for leaf in jax.tree.leaves((args, kwargs), is_leaf=_is_state)]
        given = next((dtype_of(leaf) for leaf in floats if is_floating(leaf)), None)
        args, kwargs = widen_tree((args, kwargs))
        out = cls.__call__(self, *args, **kwargs)
        if given is None:
            return out
        return jax.tree.map(
            lambda leaf: cast_leaf(leaf, given) if is_floating(leaf) else leaf,
            out,
            is_leaf=_is_state,
        )

    namespace = {
        "__call__": functools.update_wrapper(call, cls.__call__),
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        _RUNS_IN_FULL_PRECISION: True,
    }
    return type(cls)(cls.__name__, (cls,), namespace)


def _is_state(node: Any) -> bool:
    return isinstance(node, eqx.nn.State)
