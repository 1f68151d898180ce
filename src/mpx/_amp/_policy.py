"""AmpRules: what a user may change about the rule table, and where."""

import copy
import dataclasses
import difflib
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
from mpx._casting._half import chosen_half_precision
from mpx._casting._keep import KEPT_SCOPE, STOP_SCOPE
from mpx._casting._select import (
    Selector,
    check_pattern,
    check_selectors,
    matches,
    search,
    shown,
)
from mpx._jax._compat import lowered_primitives
from mpx._jax._formats import PRECISIONS, parse_float_dtype
from mpx._jax._warn import warn

Choice = Rule | str | Callable[..., Any]
"""A rule, its name, or a function with jaxamp's `precision_fn` signature."""

_BASES = ("safe", "fast", "original", "tf32", "bf16_f32", "true_f32")


@dataclasses.dataclass(frozen=True, eq=False)
class AmpRules:
    """Rules for which operations run in which precision.

    Rules are tried from the most to the least specific: a named scope (the outermost
    that matches wins), the Python function that wrote the operation, the parameter that
    a matmul reads, the primitive, and at last the base.

    Attributes:
        base: `"safe"`, the rule table; `"fast"`, the same with f32 arguments following
            low activations everywhere; `"original"`, everything as written; or `"tf32"`,
            `"bf16_f32"`, `"true_f32"`: f32 activations, and matmuls by that algorithm.
        primitives: From a primitive (object or name) to a rule.
        scopes: From a regular expression, searched in the path of `jax.named_scope`s
            such as `block/attn`, to a rule.
        functions: From a regular expression, searched in the qualified name of a Python
            function such as `Model.router`, to a rule, for all operations that it or its
            callees wrote.
        params: From a regular expression, searched in the path of a parameter such as
            `layers/0/weight`, to a rule, for the matmuls that read it.

    A rule is one of `"low"`, `"f32"`, `"widest"`, `"follow"`, `"original"`, for matmuls
    also `"tf32"`, `"bf16_f32"` and `"true_f32"`; or a function
    `(compute_dtype, original_dtypes, *operands, **params) -> operands, params`.

    A primitive that does not exist is an error, and so is, when the function is called, an
    expression that selects nothing. Rules are hashable, and equal if they are the same in
    the same order.

    Examples:
        >>> rules = AmpRules(scopes={"router$": "original"}, params={"^head": "f32"})
        >>> rules.base
        'safe'
    """

    base: str = "safe"
    primitives: Mapping[Any, Choice] = dataclasses.field(default_factory=dict)
    scopes: Mapping[str, Choice] = dataclasses.field(default_factory=dict)
    functions: Mapping[str, Choice] = dataclasses.field(default_factory=dict)
    params: Mapping[str, Choice] = dataclasses.field(default_factory=dict)
    keep: tuple[Selector, ...] = dataclasses.field(default=(), init=False, repr=False)
    _lenient: bool = dataclasses.field(default=False, init=False, repr=False)
    _optional: frozenset[str] = dataclasses.field(
        default=frozenset(), init=False, repr=False
    )
    _found: dict[Any, Any] = dataclasses.field(
        default_factory=dict, init=False, repr=False
    )

    def __post_init__(self) -> None:
        """Checks the rules and makes primitives names.

        Raises:
            ValueError: If the base, a rule, a primitive or an expression is unusable.
            TypeError: If an expression is no string.
        """
        if self.base not in _BASES:
            raise ValueError(
                f"`base` must be one of {', '.join(_BASES)}, but {self.base!r} was "
                "given."
            )
        primitives = {_name(key): value for key, value in self.primitives.items()}
        for field in ("primitives", "scopes", "functions", "params"):
            rules = primitives if field == "primitives" else getattr(self, field)
            for pattern in rules if field != "primitives" else ():
                check_pattern(pattern, field)
            parsed = {key: _parse(value, field, key) for key, value in rules.items()}
            object.__setattr__(self, field, parsed)

    def keeping(self, keep: tuple[Selector, ...]) -> "AmpRules":
        """Returns these rules, with what is selected running as it is written."""
        rules = copy.copy(self)
        object.__setattr__(rules, "keep", keep)
        object.__setattr__(rules, "_found", {})
        return rules

    def for_call(
        self,
        named: Iterable[tuple[str, Any]],
        places: Callable[[], tuple[Iterable[str], Iterable[str]]] | None,
    ) -> "AmpRules":
        """Returns these rules for one call, of which the arrays are known.

        Args:
            named: The names of the arrays, and the arrays.
            places: Returns the paths of named scopes and the names of the Python
                functions in it; `None` if it may lack what the rules select.

        Raises:
            ValueError: If an expression or a type selects nothing; near names are listed.
        """
        if not (self.keep or self.params or self.scopes or self.functions):
            return self
        rules, named = self.keeping(self.keep), list(named)
        for name, leaf in named:
            rules._found[name] = rules._param_rule(name, leaf)
        if places is None:
            return rules
        scopes, functions = ([(name, None) for name in names] for names in places())
        called = {name.rpartition("/")[2] for name, _ in scopes}
        was_called = lambda kind: KEPT_SCOPE + kind.__name__ in called  # noqa: E731
        try:
            check_selectors(self.keep, "keep", [*named, *scopes], was_called)
            check_selectors(set(self.scopes) - self._optional, "scopes", scopes)
            check_selectors(self.functions, "functions", functions)
            check_selectors(self.params, "params", named)
        except ValueError as error:
            if not self._lenient:
                raise
            warn(str(error))
        return rules

    def _key(self) -> tuple[Any, ...]:
        rules = (self.primitives, self.scopes, self.functions, self.params)
        return (self.base, self.keep, *(tuple(x.items()) for x in rules))

    def __eq__(self, other: object) -> bool:
        """Returns whether the other has the same rules in the same order."""
        return isinstance(other, AmpRules) and self._key() == other._key()

    def __hash__(self) -> int:
        """Returns a number that equal rules share."""
        return hash(self._key())

    @property
    def is_plain(self) -> bool:
        """Returns whether f32 operations without a matmul come back as they are."""
        changes = self.primitives or self.functions or self.scopes
        return self.base in ("safe", "fast") and not changes

    def scope_rule(self, scopes: tuple[str, ...]) -> tuple[Choice, str] | None:
        """Returns the rule of the outermost scope that has one, and the reason."""
        if scopes not in self._found:
            self._found[scopes] = self._scope_rule(scopes)
        return self._found[scopes]

    def _scope_rule(self, scopes: tuple[str, ...]) -> tuple[Choice, str] | None:
        given = [scope for scope in scopes if not scope.startswith(FUNCTION_SCOPE)]
        paths = ["/".join(given[:depth]) for depth in range(1, len(given) + 1)]
        for selector in self.keep:
            if isinstance(selector, str) and any(search(selector, x) for x in paths):
                return Rule.ORIGINAL, f"keep {selector}"
        for scope, path in zip(given, paths, strict=True):
            if scope == STOP_SCOPE:
                return Rule.ORIGINAL, "scope amp_stop"
            if scope.startswith(KEPT_SCOPE):
                return Rule.ORIGINAL, f"keep {scope.removeprefix(KEPT_SCOPE)}"
            for pattern, rule in self.scopes.items():
                if search(pattern, path):
                    return rule, f"scope {pattern}"
        for scope in scopes:
            if scope.startswith(FUNCTION_SCOPE):
                return self.function_rule(scope.removeprefix(FUNCTION_SCOPE))
        return None

    def function_of(self, functions: Iterable[str]) -> str | None:
        """Returns the expression that selects the innermost of some Python functions."""
        pairs = ((x, pattern) for x in functions for pattern in self.functions)
        return next((pattern for x, pattern in pairs if search(pattern, x)), None)

    def function_rule(self, pattern: str) -> tuple[Choice, str]:
        """Returns the rule of the functions that an expression selects, and the reason."""
        return self.functions[pattern], f"function {pattern}"

    def param_rule(self, name: str | None) -> tuple[Choice, str] | None:
        """Returns the rule of a parameter's name, and the reason."""
        if name is None:
            return None
        if name not in self._found:
            self._found[name] = self._param_rule(name, None)
        return self._found[name]

    def _param_rule(self, name: str, leaf: Any) -> tuple[Choice, str] | None:
        for selector in self.keep:
            known = leaf is not None or isinstance(selector, str | type)
            if known and matches(selector, name, leaf):
                return Rule.ORIGINAL, f"keep {shown(selector)}"
        for pattern, rule in self.params.items():
            if search(pattern, name):
                return rule, f"parameter {pattern}"
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
        """Returns why a primitive has the rule that `primitive_rule` returns."""
        table = self.base in ("safe", "fast")
        if name in self.primitives or (name in PRIMITIVES and not table):
            return f"policy {self.base}"
        if name == "integer_pow" and table:
            return REASONS["square"]
        return REASONS.get(name, UNKNOWN)


FUNCTION_SCOPE = "mpx.function:"
"""Before an expression of `functions`: around what a selected function calls."""


def _exact_scope(name: str) -> str:
    """Returns the expression that selects the scopes of exactly this name."""
    return rf"(^|/){re.escape(name)}$"


def rules_by_name(
    primitives: Mapping[Any, Choice], scopes: Mapping[str, Choice]
) -> AmpRules:
    """Returns rules with jaxamp's meaning: what is not listed runs as it is written.

    Args:
        primitives: From primitives, objects or names, to rules.
        scopes: From the exact names of scopes to rules. Those that a function does not
            have are a warning and no error: jaxamp ignores them.
    """
    by_path = {
        _exact_scope(name): _parse(rule, "scopes", name)
        for name, rule in scopes.items()
    }
    rules = AmpRules("original", primitives=primitives, scopes=by_path)
    object.__setattr__(rules, "_lenient", True)
    # jaxamp's own policies list these, whether a function has such scopes or not.
    optional = frozenset(map(_exact_scope, ("amp_default", "amp_step", "amp_stop")))
    object.__setattr__(rules, "_optional", optional)
    return rules


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


def as_amp_rules(rules: AmpRules | str | Mapping[Any, Any] | None) -> AmpRules:
    """Returns rules from what a user may pass for one.

    A dictionary has jaxamp's meaning: its keys are primitives (objects or names) and
    names of scopes, and what it does not list runs at its original precision.
    """
    if rules is None:
        return AmpRules()
    if isinstance(rules, AmpRules):
        return rules
    if isinstance(rules, str):
        if rules not in _BASES:
            raise ValueError(
                f"`rules` must be one of {', '.join(_BASES)}, an `mpx.AmpRules` or a "
                f"dictionary, but {rules!r} was given."
            )
        return AmpRules(rules)
    if not isinstance(rules, Mapping):
        raise TypeError(
            '`rules` must be an `mpx.AmpRules`, a name such as "safe" or a '
            f"dictionary, but {type(rules).__name__} was given."
        )
    is_primitive = lambda key: not isinstance(key, str) or key in PRIMITIVES  # noqa: E731
    return rules_by_name(
        {key: rule for key, rule in rules.items() if is_primitive(key)},
        {key: rule for key, rule in rules.items() if not is_primitive(key)},
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
        asks_for_fp8 = re.search("fp8|f8|float8|e4m3|e5m2", str(dtype), re.IGNORECASE)
        raise ValueError(
            f"`dtype` must be f16 or bf16, but {dtype!r} was given. "
            + (
                "For 8 bits use `mpx.fp8(func)`, or `mpx.fp8(mpx.amp(func))`."
                if asks_for_fp8
                else 'Pass a dtype such as `jnp.bfloat16` or a name such as "bf16". To '
                'run everything as written, pass `rules="original"`.'
            )
        )
    return parsed
