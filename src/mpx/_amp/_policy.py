"""AmpRules: what a user may change about the rule table, and where."""

import dataclasses
import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from mpx._amp._rules import (
    MATMULS,
    PRIMITIVES,
    REASONS,
    UNKNOWN,
    WITHOUT_RULES,
    Rule,
    rule_for,
)
from mpx._compat import lowered_primitives
from mpx._formats import PRECISIONS, parse_float_dtype
from mpx._half import chosen_half_precision

Choice = Rule | str | Callable[..., Any]
"""A rule, its name, or a function with jaxamp's `precision_fn` signature."""

_BASES = ("safe", "fast", "original", "tf32", "bf16_f32", "true_f32")


@dataclasses.dataclass(frozen=True, eq=False)
class AmpRules:
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

    A primitive that does not exist is an error. `amp` warns of a scope, function or
    parameter that the function does not have. Policies are hashable, and equal if they
    have the same rules in the same order.

    Examples:
        >>> policy = AmpRules(scopes={"*/router/*": "original"}, params={"head": "f32"})
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
            ValueError: If the base, a rule or a primitive is unknown.
        """
        if self.base not in _BASES:
            raise ValueError(
                f"`base` must be one of {', '.join(_BASES)}, but {self.base!r} was "
                "given."
            )
        scopes = {**_STOP_SCOPES, **self.scopes}
        primitives = {_name(key): value for key, value in self.primitives.items()}
        _check_patterns(self.params)
        for field, rules in {
            "primitives": primitives,
            "scopes": scopes,
            "functions": self.functions,
            "params": self.params,
        }.items():
            parsed = {key: _parse(value, field, key) for key, value in rules.items()}
            object.__setattr__(self, field, parsed)

    def _key(self) -> tuple[Any, ...]:
        rules = (self.primitives, self.scopes, self.functions, self.params)
        return (self.base, *(tuple(mapping.items()) for mapping in rules))

    def __eq__(self, other: object) -> bool:
        """Whether the other is a policy with the same rules in the same order."""
        return isinstance(other, AmpRules) and self._key() == other._key()

    def __hash__(self) -> int:
        """Returns a number that equal policies share."""
        return hash(self._key())

    @property
    def is_plain(self) -> bool:
        """Whether f32 operations without a matmul come back as they are."""
        changes = self.primitives or self.functions or self.scopes != _STOP_SCOPES
        return self.base in ("safe", "fast") and not changes

    def scope_rule(self, scopes: tuple[str, ...]) -> tuple[Choice, str] | None:
        """Returns the rule of the outermost scope that has one, and its name."""
        for depth in range(1, len(scopes) + 1):
            for pattern, rule in self.scopes.items():
                if _is_scope(pattern, scopes[:depth]):
                    return rule, pattern
        return None

    def useless(
        self,
        names: Iterable[str],
        paths: Iterable[tuple[str, ...]],
        functions: Iterable[str],
    ) -> list[str]:
        """Returns the rules of the user that hold for nothing in a function.

        Args:
            names: The names of its parameters.
            paths: The paths of its named scopes.
            functions: The names of the Python functions that wrote it.
        """
        names, functions = list(names), set(functions)
        prefixes = {path[:n] for path in paths for n in range(1, len(path) + 1)}
        found = {
            "scopes": [
                x
                for x in self.scopes.keys() - _STOP_SCOPES.keys()
                if not any(_is_scope(x, path) for path in prefixes)
            ],
            "functions": [x for x in self.functions if x not in functions],
            "params": [
                x for x in self.params if not any(re.search(x, name) for name in names)
            ],
        }
        return [f"{kind}[{x!r}]" for kind, keys in found.items() for x in sorted(keys)]

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


def _is_scope(pattern: str, scopes: tuple[str, ...]) -> bool:
    """Whether a pattern means the innermost of these scopes, or the path to it."""
    text = f"/{'/'.join(scopes)}/" if "/" in pattern else scopes[-1]
    return fnmatch.fnmatchcase(text, pattern)


def _check_patterns(patterns: Iterable[str]) -> None:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"`params[{pattern!r}]` must be a regular expression, but: {error}."
            ) from None


def _name(primitive: Any) -> str:
    """Returns the name of a primitive that may have a rule."""
    name = primitive if isinstance(primitive, str) else primitive.name
    if name in WITHOUT_RULES:
        raise ValueError(
            f"`primitives[{name!r}]` cannot have a rule: what it calls has its own rules, "
            "and a cast is honoured. For a region use `scopes` or `functions`."
        )
    if isinstance(primitive, str) and name not in PRIMITIVES:
        known = {*PRIMITIVES, *lowered_primitives()}
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
            raise ValueError(
                f"`primitives[{name!r}]` must be the name of a primitive, but JAX has "
                f"none of that name.{hint} Print `jax.make_jaxpr(func)(...)` to see those "
                "of a function, or pass the object, such as `jax.lax.dot_general_p`."
            )
    return name


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


def as_amp_policy(policy: AmpRules | str | Mapping[Any, Any] | None) -> AmpRules:
    """Returns a policy from what a user may pass for one.

    A dictionary has jaxamp's meaning: its keys are primitives (objects or names) and
    scopes, and what it does not list runs at its original precision.
    """
    if policy is None:
        return AmpRules()
    if isinstance(policy, AmpRules):
        return policy
    if isinstance(policy, str):
        if policy not in _BASES:
            raise ValueError(
                f"`policy` must be one of {', '.join(_BASES)}, an `mpx.AmpRules` or a "
                f"dictionary, but {policy!r} was given."
            )
        return AmpRules(policy)
    if not isinstance(policy, Mapping):
        raise TypeError(
            '`policy` must be an `mpx.AmpRules`, a name such as "safe" or a '
            f"dictionary, but {type(policy).__name__} was given."
        )
    is_primitive = lambda key: not isinstance(key, str) or key in PRIMITIVES  # noqa: E731
    return AmpRules(
        "original",
        primitives={key: rule for key, rule in policy.items() if is_primitive(key)},
        scopes={key: rule for key, rule in policy.items() if not is_primitive(key)},
    )


def as_compute_dtype(dtype: DTypeLike | None) -> np.dtype:
    """Returns the dtype that `low` stands for.

    `None` is the half precision that the user chose. Without a choice it is bf16 and not
    the f16 of the paper: `amp` has no loss scale, and f16 gradients need one.

    Raises:
        ValueError: If it is not f16 or bf16.
    """
    if dtype is None:
        return chosen_half_precision() or np.dtype(jnp.bfloat16)
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
