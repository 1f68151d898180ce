"""Policy: the dtypes of parameters, computation, outputs, gradients and sums."""

import dataclasses
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PyTree

from mpx._casting._cast import cast_state_leaf, map_floating
from mpx._casting._context import (
    COMPUTE,
    Reduce,
    argument_names,
    autocast_of,
    half_precision_datatype,
    is_fp8,
    parse_reduce,
)
from mpx._casting._keep import Keep, is_state
from mpx._casting._select import Matcher, Selector, Selectors, parse_selectors
from mpx._jax._formats import PRECISIONS, parse_float_dtype, short_name
from mpx._jax._tree import LeafName, cast_leaf

P = ParamSpec("P")
R = TypeVar("R")
_F32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True, init=False)
class Policy:
    """Dtypes of the values in a training step: hashable, and without arrays.

    Attributes:
        param_dtype: The dtype in which parameters are stored.
        compute_dtype: The dtype of the forward and backward pass. `None` means the
            configured half precision at the time of use; in a gradient function with
            `NoLossScaling` it means bf16 if none was configured.
        output_dtype: The dtype in which results leave the model.
        grad_dtype: The dtype of the gradients that are returned. `None` means f32 for
            parameters of 32 bits or fewer, and the parameter's dtype for wider ones.
        reduce_dtype: The dtype in which gradients are summed over devices, or `"compute"`
            for that of the computation. `None` means f32, or the parameter's dtype if it is
            wider.
        keep: What stays in full precision although the rest is cast: a regular expression
            for paths such as `layers/0/norm/weight`, a module type, a predicate
            `(path, leaf) -> bool`, or a list of these.

    Paths start inside the argument that holds a parameter. An argument that is an array is
    kept by an expression for its whole name. Modules of a kept type *run* in f32, in the
    gradient functions and in `cast_function`: inputs are widened, and results come back in
    the widest dtype among the floating inputs. Keep the parameters of Flax Linen and Haiku,
    which are in dictionaries, by their paths. In a gradient function a string or type that
    selects nothing is an error.

    Running statistics are always kept: `eqx.nn.State`, `batch_stats` of Flax Linen, NNX
    variables other than parameters, the layers `eqx.nn.BatchNorm`, `eqx.nn.SpectralNorm`,
    `nnx.BatchNorm`, `nnx.SpectralNorm` and `nnx.WeightNorm`, and the norms of Haiku.

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
    reduce_dtype: Reduce
    keep: tuple[Selector, ...]

    def __init__(
        self,
        param_dtype: DTypeLike = _F32,
        compute_dtype: DTypeLike | None = None,
        output_dtype: DTypeLike = _F32,
        *,
        grad_dtype: DTypeLike | None = None,
        reduce_dtype: DTypeLike | None = None,
        keep: Selectors = (),
    ) -> None:
        """Checks and stores the dtypes; see the class."""
        name = param_dtype if isinstance(param_dtype, str) else ""
        if "=" in name or name.strip() in PRECISIONS:
            raise ValueError(
                f"`param_dtype` must be a dtype, but {param_dtype!r} is a whole policy. "
                f"Use `mpx.get_policy({param_dtype!r})`."
            )
        if isinstance(compute_dtype, str) and compute_dtype == "half":
            compute_dtype = None
        values = {
            "param_dtype": parse_float_dtype(param_dtype, "param_dtype"),
            "compute_dtype": _optional(compute_dtype, "compute_dtype"),
            "output_dtype": parse_float_dtype(output_dtype, "output_dtype"),
            "grad_dtype": _optional(grad_dtype, "grad_dtype"),
            "reduce_dtype": parse_reduce(reduce_dtype),
            "keep": parse_selectors(keep, "keep"),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        """Returns the string from which `get_policy` makes this policy, without `keep`."""
        dtypes = [self.param_dtype, self.compute_dtype or "half", self.output_dtype]
        pairs = zip("pcogr", [*dtypes, self.grad_dtype, self.reduce_dtype], strict=True)
        return ",".join(
            f"{key}={dtype if isinstance(dtype, str) else short_name(dtype)}"
            for key, dtype in pairs
            if dtype is not None
        )

    def resolved_compute_dtype(self) -> np.dtype:
        """Returns `compute_dtype`, or the configured half precision if it is `None`."""
        return self.compute_dtype or half_precision_datatype()

    def cast_to_param(self, tree: PyTree) -> PyTree:
        """Casts floating leaves to `param_dtype`; `keep` does not apply.

        Running statistics are never narrowed, so a whole model can be made bf16.
        """
        return cast_params(tree, self.param_dtype)

    def cast_to_output(self, tree: PyTree) -> PyTree:
        """Casts floating leaves to `output_dtype`, as `cast_to_param` does."""
        return cast_params(tree, self.output_dtype)

    def cast_to_compute(self, tree: PyTree) -> PyTree:
        """Casts floating leaves to `compute_dtype`, except what `keep` names.

        A kept module that you call yourself has its parameters in f32, and type promotion
        decides; the gradient functions and `cast_function` run it in f32.
        """
        return self.keeping().cast(tree)

    def cast_function(self, func: Callable[P, R]) -> Callable[P, R]:
        """Runs a function as the gradient functions do, for example in evaluation.

        Its arguments are cast to `compute_dtype`, except what `keep` names; kept modules
        run in f32; its results are cast to `output_dtype`. NNX modules are given to it as
        copies, so that what it changes in them is lost. A function under `amp` gets its
        arguments as they are; the policy must compute in the same dtype.
        """

        @functools.wraps(func)
        def wrapper(*args: PyTree, **kwargs: PyTree) -> PyTree:
            if dtype_under_amp(func, self) is not None:
                return self.cast_to_output(func(*args, **kwargs))
            kept = self.keeping()
            args = tuple(map(kept.cast, args, argument_names(func, len(args))))
            kwargs = {name: kept.cast(arg, name) for name, arg in kwargs.items()}
            with kept.running():
                out = func(*args, **kwargs)
            return self.cast_to_output(out)

        return wrapper

    def keeping(self) -> Keep:
        """Returns what `keep` means during one call."""
        return Keep(self.keep, self.resolved_compute_dtype())

    def with_output_dtype(self, output_dtype: DTypeLike) -> "Policy":
        """Returns the same policy with another `output_dtype`."""
        return dataclasses.replace(self, output_dtype=output_dtype)


def dtype_under_amp(func: Callable[..., PyTree], policy: Policy) -> np.dtype | None:
    """Returns the dtype in which a function under `amp` computes, `None` for others."""
    dtype, autocast = policy.compute_dtype, autocast_of(func)
    if autocast is None:
        if is_fp8(func) and dtype is not None and dtype.itemsize > 2:
            raise ValueError(
                f"The policy computes in {short_name(dtype)}, but `fp8` around the "
                "function needs 16-bit operands and would cast to bf16 itself. Leave "
                "`fp8` or the policy out, or compute in bf16."
            )
        return None
    if policy.keep:
        raise ValueError(
            "`Policy(keep=...)` has no effect on a function under `amp`, which casts "
            "operation by operation. Pass `keep=` to `amp` instead."
        )
    low = autocast().dtype
    if dtype not in (None, low):
        raise ValueError(
            f"The policy computes in {short_name(dtype)}, but `amp` around the function "
            f"computes in {short_name(low)}. Choose the dtype there, `amp(func, dtype)`, "
            "or leave `amp` out. Beside `amp`, `policy` may set `grad_dtype` and "
            '`reduce_dtype`, as in `mpx.Policy(reduce_dtype="f32")`.'
        )
    return low


def cast_params(tree: PyTree, dtype: DTypeLike, keep: Selectors = ()) -> PyTree:
    """Casts floating leaves, except what `keep` selects and running statistics."""
    kept = Matcher(parse_selectors(keep, "keep"), "keep")
    target = parse_float_dtype(dtype)

    def cast(name: LeafName, leaf: PyTree) -> PyTree:
        if kept.find(name, leaf) is not None:
            return leaf
        return (cast_state_leaf if is_state(name) else cast_leaf)(leaf, target)

    low = map_floating(cast, tree)
    kept.check()
    return low


def _optional(dtype: DTypeLike | None, what: str) -> np.dtype | None:
    return None if dtype is None else parse_float_dtype(dtype, what)


_POLICY_KEYS = {
    key: f"{long.removesuffix('s')}_dtype"
    for long in ("params", "compute", "output", "grad", "reduce")
    for key in (long, long[0])
}


def get_policy(policy: Policy | str, *, keep: Selectors = ()) -> Policy:
    """Makes a policy from a string such as `"p=f32,c=bf16,o=f32"`.

    The keys are `p` (params), `c` (compute), `o` (output), `g` (grad) and `r` (reduce),
    short or long; spaces are allowed. As in jmp, parameters default to f32, compute
    follows the parameters and output follows compute; a single dtype sets all three.
    `half` is the configured half precision, `full` is f32.

    Other frameworks' `"bf16-mixed"`, `"mixed_bfloat16"`, `"16-mixed"` and `"mixed_float16"`
    store f32 and compute in 16 bits, `"bf16-true"` and `"16-true"` are 16 bits throughout.

    Args:
        policy: The description; `str` of a policy gives it back. A policy comes back
            as it is.
        keep: What stays in full precision, see `Policy`.

    Raises:
        ValueError: If a key or a dtype is unknown; the message names it.

    Examples:
        >>> policy = get_policy("p=f32, c=bf16, o=f32")
        >>> str(policy), get_policy(str(policy)) == policy
        ('p=f32,c=bf16,o=f32', True)
        >>> get_policy("bf16-mixed") == policy
        True
    """
    if isinstance(policy, Policy):
        if parse_selectors(keep, "keep"):
            raise TypeError(
                "`keep` goes with a string, but a `Policy` was given, which has its own. "
                "Use `dataclasses.replace(policy, keep=...)`."
            )
        return policy
    if not isinstance(policy, str):
        raise TypeError(
            '`policy` must be an `mpx.Policy` or a string such as "p=f32,c=bf16,o=f32", '
            f"but {policy!r} was given."
        )
    text = policy.strip()
    if "=" not in text:
        param, compute = PRECISIONS.get(text, (text, text))
        text = f"p={param},c={compute},o={param}"
    options: dict[str, PyTree] = {}
    for part in text.split(","):
        key, _, value = (piece.strip() for piece in part.partition("="))
        name = _POLICY_KEYS.get(key)
        if name is None or not value:
            raise ValueError(
                f"{part.strip()!r} in the policy {policy!r} is not understood. Write "
                "`key=dtype` with a key among p, c, o, g, r (or params, compute, "
                'output, grad, reduce), for example "p=f32,c=bf16,o=f32".'
            )
        if name in options:
            raise ValueError(f"The policy {policy!r} gives `{key}` twice.")
        is_word = name == "reduce_dtype" and value == COMPUTE
        options[name] = value if is_word else _policy_dtype(value, policy)
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
    try:
        return None if name == "half" else parse_float_dtype(name)
    except ValueError:
        raise ValueError(
            f"Unknown dtype {name!r} in the policy {policy!r}. Use f16, bf16, f32, f64, "
            "their long names, `half` or `full`; or a whole policy such as "
            '"bf16-mixed", which is "p=f32,c=bf16,o=f32".'
        ) from None
