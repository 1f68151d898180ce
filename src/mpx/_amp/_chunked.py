"""Running a recognised cross entropy in chunks, in the place of its equations."""

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from mpx._amp._facts import Decision, Origin, Settings
from mpx._amp._recognition import dtype_of_operand
from mpx._amp._rules import Rule
from mpx._compat import (
    Literal,
    as_varying,
    eval_jaxpr,
    open_jaxpr,
    scopes_of,
    varying_axes,
)
from mpx._jaxpr._interpreter import (
    Frame,
    Op,
    Outcome,
    Replacement,
    Scopes,
    as_array,
)
from mpx._jaxpr._replace import Value, scopes_inside, value_of
from mpx._jaxpr._terms import Level, Term

if TYPE_CHECKING:
    from mpx._logits import Chunks, Operands, Site

_HIGH = Origin(touched=True)
IN_CHUNKS = "cross entropy in chunks"
"""The reason of a decision to compute logits in chunks."""


@dataclasses.dataclass(eq=False, kw_only=True)
class Run:
    """How one site runs.

    Attributes:
        amp: The settings.
        level: The outermost level.
        site: The logits.
        scopes: The named scopes around the level.
    """

    amp: Settings
    level: Level
    site: "Site"
    scopes: Scopes

    def __post_init__(self) -> None:
        from mpx import _logits

        site = self.site
        self.weight, self.vocab_first = site.weight
        self.biases = _logits.bias_terms(site) or []
        labels = [] if site.labels is None else [site.labels.term]
        biases = [x for x, _ in self.biases]
        self.operands = [site.hidden, self.weight, *biases, *labels]
        self.inside = {*site.inside, *(id(x.term) for x in site.exits)}
        eqns = enumerate(self.level.jaxpr.eqns)
        self.makers = {var: i for i, eqn in eqns for var in eqn.outvars}

    def replacements(self, others: Collection[int]) -> dict[int, Replacement] | str:
        """Returns what replaces equations, by position, or the reason against it.

        Args:
            others: The `id`s of terms that depend on other logits.
        """
        from mpx import _logits

        exits = [x.term for x in self.site.exits]
        found = None
        if self.spec(self.weight.aval).kept and not self.amp.in_loop:
            # Gradients that the forward pass of a loop computes add up to as many copies
            # of the weights as it has steps.
            found = _logits.scalar_after(exits, others)
        if found is not None:
            scalar, later = found
            return self._replaced([scalar], self._through(scalar, later))
        return self._replaced(exits, self._statistics)

    def spec(self, weight: Any) -> "Chunks":
        """Returns the chunks for weights, which may be held in the compute dtype."""
        from mpx import _logits

        return _logits.chunks_for(
            np.dtype(dtype_of_operand(self.amp, self.site.hidden)),
            tokens=math.prod(self.site.sizes),
            weight=weight,
            vocab_first=self.vocab_first,
        )

    def _replaced(
        self, given: list[Term], compute: "Callable[..., list[Value]] | _Scalar"
    ) -> dict[int, Replacement] | str:
        """Returns replacements of the outermost equations that make these terms."""
        more = compute.rest if isinstance(compute, _Scalar) else []
        known = {id(x) for x in given}
        places = {x.level.place(x.eqn)[0] for x in given}
        needed = self._atoms([*self.operands, *more], min(places))
        if needed is None:
            return "their operands come out of a jitted function"
        replaced = {}
        for place in places:
            outs = [
                None if id(term) in self.inside and id(term) not in known else term
                for term in map(self.level.term, self.level.jaxpr.eqns[place].outvars)
            ]
            wanted = [x for x in outs if x is not None]
            atoms = self._atoms(wanted, place, known)
            if atoms is None:
                return "they go into a jitted function"
            atoms = list({**needed, **atoms})
            call = self._call(atoms, given, compute, outs)
            replaced[place] = Replacement(atoms, call)
        return replaced

    def _atoms(
        self, terms: Sequence[Term], place: int, known: Collection[int] = ()
    ) -> dict[Any, None] | None:
        """Returns variables of the outermost level from which terms can be computed.

        It is `None` if too much would be computed again, or the logits.

        Args:
            terms: The terms.
            place: The position of the equation before which they are computed.
            known: The `id`s of terms that are known.
        """
        from mpx import _logits

        atoms: dict[Any, None] = {}
        waiting, seen = list(terms), set()
        while waiting:
            term = waiting.pop()
            if id(term) in known or id(term) in seen or isinstance(term.atom, Literal):
                continue
            seen.add(id(term))
            if len(seen) > _logits.MOST or id(term) in self.inside:
                return None
            is_here = term.level is self.level
            if is_here and self.makers.get(term.atom, -1) < place:
                atoms[term.atom] = None
            else:
                waiting.extend(term.operands)
        return atoms

    def _call(
        self, atoms: list[Any], given: list[Term], compute: Any, outs: list[Term | None]
    ) -> Callable[[Any, Op], Outcome]:
        def call(amp: Any, op: Op) -> Outcome:
            pairs = zip(op.values, op.facts, strict=True)
            known: dict[Any, Value] = dict(zip(atoms, pairs, strict=True))
            scopes = op.scopes[: len(op.scopes) - len(scopes_of(op.eqn))]
            made = amp.frame.made
            if ("logits", id(self)) not in made:
                read = lambda term: value_of(amp, scopes, term, known)  # noqa: E731
                made["logits", id(self)] = self, compute(amp, scopes, read)
            for term, value in zip(given, made["logits", id(self)][1], strict=True):
                known[_key(term)] = value
            found = [
                (None, _HIGH) if x is None else value_of(amp, scopes, x, known)
                for x in outs
            ]
            return [x for x, _ in found], [x for _, x in found]

        return call

    def arrays(
        self, amp: Any, scopes: Scopes, read: Callable[[Term], Value]
    ) -> "Operands":
        """Returns the operands of the operation; records the decision."""
        from mpx import _logits

        values = [read(x) for x in self.operands]
        hidden = _logits.hidden_states(self.site, as_array(values[0][0]))
        bias, labels = None, jnp.zeros(hidden.shape[0], jnp.int32)
        for (_, factor), (x, _) in zip(self.biases, values[2:], strict=False):
            x = as_array(x).astype(np.float32).reshape(-1) * factor
            bias = x if bias is None else bias + x
        if self.site.labels is not None:
            labels = _logits.token_labels(self.site, as_array(values[-1][0]))
        names = tuple(fact.name for _, fact in values if fact.name)
        record(amp, self.site.scores.dot, scopes, IN_CHUNKS, names)
        given = _logits.Operands(hidden, as_array(values[1][0]), bias, labels)
        axes: frozenset[str] = frozenset().union(
            *(varying_axes(jax.typeof(x)) for x in jax.tree.leaves(given))
        )
        # Marked here, so that the transpose of the mark sums gradients over devices.
        return jax.tree.map(lambda x: as_varying(x, sorted(axes)), given)

    def total(self, operands: "Operands") -> Any:
        """Returns the sum of all logits of each token, if it is read."""
        from mpx import _logits

        if not _logits.needs_total(self.site):
            return None
        hidden, weight, bias, _ = operands
        axis = 0 if self.vocab_first else 1
        summed = jnp.sum(weight.astype(np.float32), axis=axis)
        total = jnp.sum(hidden.astype(np.float32) * summed[None], axis=1)
        return total if bias is None else total + jnp.sum(bias)

    def exits(self, statistics: Any, total: Any, labels: Any) -> list[Value]:
        """Returns the values of the exits."""
        from mpx import _logits

        values = [
            _logits.value_of_exit(self.site, x, statistics, total, labels)
            for x in self.site.exits
        ]
        return [
            (x.astype(leaving.term.aval.dtype), _HIGH)
            for x, leaving in zip(values, self.site.exits, strict=True)
        ]

    def _statistics(
        self, amp: Any, scopes: Scopes, read: Callable[[Term], Value]
    ) -> list[Value]:
        from mpx import _logits

        operands = self.arrays(amp, scopes, read)
        spec = dataclasses.replace(self.spec(operands.weight), kept=0)
        statistics = _logits.scores(spec, operands)
        return self.exits(statistics, self.total(operands), operands.labels)

    def _through(self, scalar: Term, later: dict[int, Term]) -> "_Scalar":
        stops = {id(x.term) for x in self.site.exits}
        rest, waiting, seen = [], [scalar], set()
        while waiting:
            term = waiting.pop()
            if id(term) in seen or id(term) in stops or isinstance(term.atom, Literal):
                continue
            seen.add(id(term))
            if id(term) in later:
                waiting.extend(term.operands)
            else:
                rest.append(term)
        return _Scalar(self, scalar, rest)


class _Scalar:
    """Computes the scalar that all that is read of the logits becomes.

    Attributes:
        rest: The other terms that it depends on.
    """

    def __init__(self, run: Run, scalar: Term, rest: list[Term]) -> None:
        self.run, self.scalar, self.rest = run, scalar, rest

    def __call__(
        self, amp: Any, scopes: Scopes, read: Callable[[Term], Value]
    ) -> list[Value]:
        from mpx import _logits

        operands = self.run.arrays(amp, scopes, read)
        total, labels = self.run.total(operands), operands.labels
        pairs = [read(x) for x in self.rest]
        facts = [fact for _, fact in pairs]

        def traced(statistics: Any, total: Any, labels: Any, *rest: Any) -> Any:
            pairs = zip(rest, facts, strict=True)
            known = dict(zip(map(_key, self.rest), pairs, strict=True))
            values = self.run.exits(_logits.Statistics(*statistics), total, labels)
            for leaving, value in zip(self.run.site.exits, values, strict=True):
                known[_key(leaving.term)] = value
            return value_of(amp, scopes, self.scalar, known)[0]

        like = operands.hidden[:, 0].astype(np.float32)
        rest = (total, labels, *(as_array(x) for x, _ in pairs))
        outer, amp.frame = amp.frame, Frame()
        try:
            jaxpr = jax.make_jaxpr(traced)([like] * 3, *rest)
        finally:
            amp.frame = outer
        body, consts = open_jaxpr(jaxpr)
        # The constants are arguments: they may be differentiated, too.
        count = len(consts)

        def func(statistics: Any, *rest: Any) -> Any:
            return eval_jaxpr(body, rest[:count], *statistics, *rest[count:])[0]

        others = [*consts, *jax.tree.leaves(rest)]
        spec = self.run.spec(operands.weight)
        return [(_logits.loss(spec, func, operands, others), _HIGH)]


def _key(term: Term) -> Any:
    return term.atom if term.level.caller is None else id(term)


def record(
    amp: Settings,
    dot: Term,
    scopes: Scopes,
    reason: str,
    params: tuple[str, ...] | None = None,
) -> None:
    """Records that logits were recognised: computed in chunks, or kept if no `params`."""
    if amp.decisions is None:
        return
    fields: dict[str, Any]
    if params is None:
        fields = {"primitive": "logits", "rule": str(Rule.ORIGINAL), "flops": 0}
    else:
        fields = {"rule": str(Rule.LOW), "params": params, "after": (str(amp.dtype),)}
    scopes = scopes_inside(dot, scopes)
    amp.decisions.append(Decision.about(dot.eqn, scopes, reason=reason, **fields))
