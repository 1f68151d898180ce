"""AmpPolicy: what a user may change about the rule table, and where."""

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from mpx._amp._rules import MATMULS, PRIMITIVES, REASONS, UNKNOWN, Rule, rule_for
from mpx._formats import PRECISIONS, parse_float_dtype

Choice = Rule | str | Callable[..., Any]
"""A rule, its name, or a function with jaxamp's `precision_fn` signature."""

_BASES = ("safe", "fast", "original", "tf32", "bf16_f32", "true_f32")


@dataclasses.dataclass(frozen=True)
class AmpPolicy:
    """Which operations run in which precision.

    Rules are tried from the most to the least specific: a named scope (the outermost
    that matches wins), the Python function that wrote the operation, the parameter that
    a matmul reads, the primitive, and at last the base.

    Attributes:
        base: `"safe"`, the rule table; `"fast"`, the same with f32 arguments following
            low activations everywhere; `"original"`, everything as written; or `"tf32"`,
            `"bf16_f32"`, `"true_f32"`: f32 activations, and matmuls by that algorithm.
        primitives: From a primitive (object or name) to a rule.
        scopes: From a `jax.named_scope` to a rule. A plain name matches one scope, a
            name with `*` or `?` matches by glob, and one with `/` the path of scopes, as
            in `"*/attn/*"`.
        functions: From the name of a Python function to a rule, for all operations that
            it or its callees wrote.
        params: From a regular expression, searched in a parameter's name such as
            `model/head/weight`, to a rule, for the matmuls that read it.

    A rule is one of `"low"`, `"f32"`, `"widest"`, `"follow"`, `"original"`, for matmuls
    also `"tf32"`, `"bf16_f32"` and `"true_f32"`; or a function
    `(compute_dtype, original_dtypes, *operands, **params) -> operands, params`.

    Examples:
        >>> policy = AmpPolicy(scopes={"*/router/*": "original"}, params={"head": "f32"})
        >>> policy.base
        'safe'
    """

    base: str = "safe"
    primitives: Mapping[Any, Choice] = dataclasses.field(default_factory=dict)
    scopes: Mapping[str, Choice] = dataclasses.field(default_factory=dict)
    functions: Mapping[str, Choice] = dataclasses.field(default_factory=dict)
    params: Mapping[str, Choice] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks the rules and makes primitives names.

        Raises:
            ValueError: If the base or a rule is unknown.
        """
        if self.base not in _BASES:
            raise ValueError(
                f"`base` must be one of {', '.join(_BASES)}, but {self.base!r} was "
                "given."
            )
        scopes = {**_STOP_SCOPES, **self.scopes}
        primitives = {_name(key): value for key, value in self.primitives.items()}
        for field, rules in {
            "primitives": primitives,
            "scopes": scopes,
            "functions": self.functions,
            "params": self.params,
        }.items():
            parsed = {key: _parse(value, field, key) for key, value in rules.items()}
            object.__setattr__(self, field, parsed)

    @property
    def is_plain(self) -> bool:
        """Whether f32 operations without a matmul come back as they are."""
        changes = self.primitives or self.functions or self.scopes != _STOP_SCOPES
        return self.base in ("safe", "fast") and not changes

    def scope_rule(self, scopes: tuple[str, ...]) -> tuple[Choice, str] | None:
        """Returns the rule of the outermost scope that has one, and its name."""
        for depth, name in enumerate(scopes, start=1):
            path = "/" + "/".join(scopes[:depth]) + "/"
            for pattern, rule in self.scopes.items():
                text = path if "/" in pattern else name
                if fnmatch.fnmatchcase(text, pattern):
                    return rule, pattern
        return None

    def param_rule(self, name: str | None) -> tuple[Choice, str] | None:
        """Returns the rule of a parameter's name, and its pattern."""
        if name is not None:
            for pattern, rule in self.params.items():
                if re.search(pattern, name):
                    return rule, pattern
        return None

    def primitive_rule(
        self, name: str, params: Mapping[str, Any], *, compute_is_f16: bool
    ) -> Choice:
        """Returns the rule of a primitive."""
        if name in self.primitives:
            return self.primitives[name]
        if self.base in ("safe", "fast"):
            return rule_for(name, dict(params), compute_is_f16)
        if self.base != "original" and name in MATMULS:
            return Rule(self.base)
        return Rule.ORIGINAL

    def primitive_reason(self, name: str) -> str:
        """Says why a primitive has the rule that `primitive_rule` returns."""
        table = self.base in ("safe", "fast")
        if name in self.primitives or (name in PRIMITIVES and not table):
            return f"policy {self.base}"
        if name == "integer_pow" and table:
            return REASONS["square"]
        return REASONS.get(name, UNKNOWN)


_STOP_SCOPES: dict[str, Choice] = {
    "amp_stop": Rule.ORIGINAL,
    # The README of jaxamp calls it so in one place.
    "amp_step": Rule.ORIGINAL,
    "amp_default": Rule.ORIGINAL,
}


def _name(primitive: Any) -> str:
    return primitive if isinstance(primitive, str) else primitive.name


def _parse(value: Choice, field: str, key: str) -> Choice:
    if callable(value) and not isinstance(value, str):
        return value
    try:
        return Rule(value)
    except ValueError:
        raise ValueError(
            f"`{field}[{key!r}]` must be one of {', '.join(Rule)} or a function, but "
            f"{value!r} was given."
        ) from None


def as_amp_policy(policy: AmpPolicy | str | Mapping[Any, Any] | None) -> AmpPolicy:
    """Returns a policy from what a user may pass for one.

    A dictionary has jaxamp's meaning: its keys are primitives (objects or names) and
    scopes, and what it does not list runs at its original precision.
    """
    if policy is None:
        return AmpPolicy()
    if isinstance(policy, AmpPolicy):
        return policy
    if isinstance(policy, str):
        if policy not in _BASES:
            raise ValueError(
                f"`policy` must be one of {', '.join(_BASES)}, an `mpx.AmpPolicy` or a "
                f"dictionary, but {policy!r} was given."
            )
        return AmpPolicy(policy)
    if not isinstance(policy, Mapping):
        raise TypeError(
            '`policy` must be an `mpx.AmpPolicy`, a name such as "safe" or a '
            f"dictionary, but {type(policy).__name__} was given."
        )
    is_primitive = lambda key: not isinstance(key, str) or key in PRIMITIVES  # noqa: E731
    return AmpPolicy(
        "original",
        primitives={key: rule for key, rule in policy.items() if is_primitive(key)},
        scopes={key: rule for key, rule in policy.items() if not is_primitive(key)},
    )


def as_compute_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype that `low` stands for.

    Raises:
        ValueError: If it is not f16 or bf16.
    """
    if isinstance(dtype, str) and dtype in PRECISIONS:  # "bf16-mixed"
        dtype = PRECISIONS[dtype][1]
    try:
        parsed = parse_float_dtype(dtype)
    except ValueError:
        parsed = None
    if parsed is None or parsed.itemsize != 2:
        raise ValueError(
            f"`compute_dtype` must be f16 or bf16, but {dtype!r} was given. Pass a dtype "
            'such as `jnp.bfloat16` or a name such as "bf16". To run everything as '
            'written, pass `policy="original"`.'
        )
    return parsed
