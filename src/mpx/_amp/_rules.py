"""The rules: in which precision each primitive runs, why, and what a user may change.

The table is data. What is not listed runs unchanged at its own dtypes, and the report
says so.
"""

import copy
import dataclasses
import difflib
import enum
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PyTree

from mpx._casting._context import AMP_SCOPE, chosen_half_precision
from mpx._casting._keep import KEPT_SCOPE, STOP_SCOPE
from mpx._casting._select import (
    Selector,
    check_pattern,
    check_selectors,
    matches,
    search,
    shown,
)
from mpx._jax._compat import lowered_primitives, manual_axes
from mpx._jax._formats import PRECISIONS, parse_float_dtype
from mpx._jax._warn import warn
from mpx._program import HANDLERS
from mpx._program._primitives import REASONS, ROWS
from mpx._program._queries import ATTENTION, CROSS_ENTROPY


class Rule(enum.StrEnum):
    """In which precision an equation runs.

    Only values that the traced function holds in f32 are ever changed; f64, complex
    numbers, integers, PRNG keys and explicit 16-bit dtypes stay as written.
    """

    LOW = "low"  # Operands and the result are cast to the compute dtype
    F32 = "f32"  # Operands are cast to f32; the result is f32
    # Operands are cast to the widest among them. Literals, and biases and scales that are
    # broadcast from an argument, follow the others.
    WIDEST = "widest"
    FOLLOW = "follow"  # Runs in whatever dtype its operand has
    ORIGINAL = "original"  # Operands are cast back to the dtypes of the traced function


PRIMITIVES: dict[str, Rule] = {name: Rule(row.rule) for name, row in ROWS.items()}
UNKNOWN = "not in the rule table"
LOW_NAME = "mpx:low"
"""The name that `amp_low` gives to a value."""
# They hold operations that have rules of their own, or are casts, which are honoured.
WITHOUT_RULES = frozenset(
    {*HANDLERS, *ATTENTION, *CROSS_ENTROPY, "convert_element_type"}
)


def rule_for(name: str, params: Mapping[str, PyTree], compute_is_f16: bool) -> Rule:
    """Returns the rule of a primitive under the default policy."""
    if name == "integer_pow":
        # x² feeds the statistics of norms and 1/xⁿ has a wide range; x³ is gelu's.
        power = params["y"]
        return Rule.F32 if power == 2 or power < 0 or compute_is_f16 else Rule.FOLLOW
    if name == "psum" and not manual_axes().intersection(params["axes"]):
        return Rule.F32  # over the examples of a `jax.vmap`, not over devices
    return PRIMITIVES.get(name, Rule.ORIGINAL)


RuleLike = Rule | str | Callable[..., PyTree]
"""A rule, its name, or a function with jaxamp's `precision_fn` signature."""
_BASES = ("safe", "original")
_Found = tuple[RuleLike, str] | None
"""A rule and the reason, if there is one."""


@dataclasses.dataclass(frozen=True)
class AmpRules:
    """Rules for which operations run in which precision.

    Rules are tried from the most to the least specific: a named scope (the outermost
    that matches wins), the Python function that wrote the operation, the parameter that
    a matmul reads, the primitive, and at last the base.

    Attributes:
        base: `"safe"`, the rule table, or `"original"`, everything as written.
        primitives: From a primitive (object or name) to a rule.
        scopes: From a regular expression, searched in the path of `jax.named_scope`s
            such as `block/attn`, to a rule.
        functions: From a regular expression, searched in the qualified name of a Python
            function such as `Model.router`, to a rule, for all operations that it or its
            callees wrote.
        params: From a regular expression, searched in the path of a parameter such as
            `layers/0/weight`, to a rule, for the matmuls that read it.

    A rule is one of `"low"`, `"f32"`, `"widest"`, `"follow"`, `"original"`; or a function
    `(compute_dtype, original_dtypes, *operands, **params) -> operands, params`.

    A primitive that does not exist is an error, and so is, when the function is called, an
    expression that selects nothing.

    Examples:
        >>> rules = AmpRules(scopes={"router$": "original"}, params={"^head": "f32"})
        >>> rules.base
        'safe'
    """

    base: str = "safe"
    primitives: Mapping[Any, RuleLike] = dataclasses.field(default_factory=dict)
    scopes: Mapping[str, RuleLike] = dataclasses.field(default_factory=dict)
    functions: Mapping[str, RuleLike] = dataclasses.field(default_factory=dict)
    params: Mapping[str, RuleLike] = dataclasses.field(default_factory=dict)
    keep: tuple[Selector, ...] = dataclasses.field(default=(), init=False, repr=False)
    # With jaxamp's meaning: scopes that need not exist. If others select nothing, that
    # warns and is no error.
    _optional: frozenset[str] | None = dataclasses.field(
        default=None, init=False, repr=False
    )
    _found: dict[str | tuple[str, ...], _Found] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Checks the rules and makes primitives names."""
        if self.base not in _BASES:
            raise ValueError(
                f"`rules` must be one of {', '.join(_BASES)} or an `mpx.AmpRules`, but "
                f"{self.base!r} was given."
            )
        for field in ("primitives", "scopes", "functions", "params"):
            parsed = {}
            for key, rule in getattr(self, field).items():
                if field == "primitives":
                    key = _name(key)
                else:
                    check_pattern(key, field)
                parsed[key] = _parse(rule, field, key)
            object.__setattr__(self, field, parsed)

    def __hash__(self) -> int:
        """Returns the same for equal rules: two modules under `amp` are one pytree type."""
        tables = (self.primitives, self.scopes, self.functions, self.params)
        return hash((self.base, *(frozenset(x.items()) for x in tables), self.keep))

    def keeping(self, keep: tuple[Selector, ...]) -> "AmpRules":
        """Returns these rules, with what is selected running as it is written."""
        rules = copy.copy(self)
        object.__setattr__(rules, "keep", keep)
        object.__setattr__(rules, "_found", {})
        return rules

    def for_call(
        self,
        named: Sequence[tuple[str, PyTree]],
        places: Callable[[], tuple[Iterable[str], Iterable[str]]] | None,
    ) -> "AmpRules":
        """Returns these rules for one call with known arrays."""
        rules = self.keeping(self.keep)
        for name, leaf in named:
            rules._found[name] = rules._param_rule(name, leaf)
        if places is None:
            return rules
        scopes, functions = ([(name, None) for name in names] for names in places())
        called = {name.rpartition("/")[2] for name, _ in scopes}
        was_called = lambda kind: KEPT_SCOPE + kind.__name__ in called  # noqa: E731
        try:
            check_selectors(self.keep, "keep", [*named, *scopes], was_called)
            check_selectors(
                {*self.scopes} - (self._optional or set()), "scopes", scopes
            )
            check_selectors(self.functions, "functions", functions)
            check_selectors(self.params, "params", named)
        except ValueError as error:
            if self._optional is None:
                raise
            warn(str(error))
        return rules

    @property
    def is_plain(self) -> bool:
        """Returns whether f32 operations without a matmul come back as they are."""
        changes = self.primitives or self.functions or self.scopes
        return self.base == "safe" and not changes

    def scope_rule(self, scopes: tuple[str, ...]) -> _Found:
        """Returns the rule of the outermost scope that has one, and the reason."""
        if scopes not in self._found:
            self._found[scopes] = self._scope_rule(scopes)
        return self._found[scopes]

    def _scope_rule(self, scopes: tuple[str, ...]) -> _Found:
        given = [scope for scope in scopes if not scope.startswith(FUNCTION_SCOPE)]
        paths = ["/".join(given[:depth]) for depth in range(1, len(given) + 1)]
        for selector in self.keep:
            if isinstance(selector, str) and any(search(selector, x) for x in paths):
                return Rule.ORIGINAL, f"keep {selector}"
        for scope, path in zip(given, paths, strict=True):
            if scope in _DECIDED:
                return Rule.ORIGINAL, _DECIDED[scope]
            if scope.startswith(KEPT_SCOPE):
                return Rule.ORIGINAL, f"keep {scope.removeprefix(KEPT_SCOPE)}"
            for pattern, rule in self.scopes.items():
                if search(pattern, path):
                    return rule, f"scope {pattern}"
        for scope in scopes:
            if scope.startswith(FUNCTION_SCOPE):
                pattern = scope.removeprefix(FUNCTION_SCOPE)
                return self.functions[pattern], f"function {pattern}"
        return None

    def function_of(self, functions: Iterable[str]) -> str | None:
        """Returns the expression that selects the innermost of some Python functions."""
        pairs = ((x, pattern) for x in functions for pattern in self.functions)
        return next((pattern for x, pattern in pairs if search(pattern, x)), None)

    def param_rule(self, name: str) -> _Found:
        """Returns the rule of a parameter's name, and the reason."""
        return self._found.get(name)

    def _param_rule(self, name: str, leaf: PyTree) -> _Found:
        for selector in self.keep:
            if matches(selector, name, leaf):
                return Rule.ORIGINAL, f"keep {shown(selector)}"
        for pattern, rule in self.params.items():
            if search(pattern, name):
                return rule, f"parameter {pattern}"
        return None

    def primitive_rule(
        self, name: str, params: Mapping[str, PyTree], *, compute_is_f16: bool
    ) -> tuple[RuleLike, str]:
        """Returns the rule of a primitive, and the reason."""
        if name in self.primitives:
            return self.primitives[name], f"policy {self.base}"
        if self.base == "original":
            return Rule.ORIGINAL, "policy original" if name in PRIMITIVES else UNKNOWN
        rule = rule_for(name, params, compute_is_f16)
        return rule, REASONS.get("square" if name == "integer_pow" else name, UNKNOWN)


_DECIDED = {STOP_SCOPE: "scope amp_stop", AMP_SCOPE: "under an `amp` inside"}
FUNCTION_SCOPE = "mpx.function:"
"""Before an expression of `functions`: around what a selected function calls."""


def rules_by_name(
    primitives: Mapping[Any, RuleLike], scopes: Mapping[str, RuleLike]
) -> AmpRules:
    """Returns rules with jaxamp's meaning: what is not listed runs as it is written."""
    exact = lambda name: rf"(^|/){re.escape(name)}$"  # noqa: E731
    by_path = {exact(name): rule for name, rule in scopes.items()}
    rules = AmpRules("original", primitives=primitives, scopes=by_path)
    object.__setattr__(rules, "_optional", frozenset(map(exact, _JAXAMP)))
    return rules


# jaxamp's own policies list these, whether a function has such scopes or not.
_JAXAMP = ("amp_default", "amp_step", "amp_stop")


def _name(primitive: Any) -> str:
    """Returns the name of a primitive that may have a rule."""
    name = primitive if isinstance(primitive, str) else primitive.name
    if name in WITHOUT_RULES:
        raise ValueError(
            f"`primitives[{name!r}]` cannot have a rule: what it calls has its own rules, "
            "and a cast is honoured. For a region use `scopes` or `functions`."
        )
    if name == primitive and not (name in PRIMITIVES or name in lowered_primitives()):
        close = difflib.get_close_matches(name, PRIMITIVES)
        hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise ValueError(
            f"`primitives[{name!r}]` must be the name of a primitive, but JAX has none of "
            f"that name.{hint} Print `jax.make_jaxpr(func)(...)` to see those of a "
            "function, or pass the object, such as `jax.lax.dot_general_p`."
        )
    return name


def _parse(value: RuleLike, field: str, key: str) -> RuleLike:
    if callable(value) and not isinstance(value, str):
        return value
    try:
        return Rule(value)
    except ValueError:
        raise ValueError(
            f"`{field}[{key!r}]` must be one of {', '.join(Rule)} or a function, but "
            f"{value!r} was given."
        ) from None


def as_amp_rules(rules: AmpRules | str | None) -> AmpRules:
    """Returns rules from what a user may pass."""
    if isinstance(rules, AmpRules):
        return rules
    if rules is not None and not isinstance(rules, str):
        raise TypeError(
            '`rules` must be an `mpx.AmpRules` or a name such as "original", but '
            f"{type(rules).__name__} was given."
        )
    return AmpRules("safe" if rules is None else rules)


def as_compute_dtype(dtype: DTypeLike | None) -> np.dtype:
    """Returns the dtype that `low` stands for.

    `None` is the half precision that the user chose, else bf16: f16 needs a loss scale.
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
            f"`dtype` must be f16 or bf16, but {dtype!r} was given. Pass a dtype such as "
            '`jnp.bfloat16` or a name such as "bf16". To run everything as written, pass '
            '`rules="original"`. For 8 bits use `mpx.fp8(func)`.'
        )
    return parsed
