"""Recognising cross entropy in a function under `amp`: which is computed in chunks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from mpx._amp._chunked import Run, record
from mpx._amp._facts import Origin, Settings
from mpx._amp._recognition import reason_by_dtypes, reason_by_rule
from mpx._compat import has_explicit_axes
from mpx._jaxpr._interpreter import Jaxpr, Replacement, Scopes
from mpx._jaxpr._softmax import Softmaxes
from mpx._jaxpr._terms import Level, Term

if TYPE_CHECKING:
    from mpx._logits import Site


def replacements(
    amp: Settings,
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    facts: Sequence[Origin],
    scopes: Scopes,
) -> dict[int, Replacement]:
    """Returns what replaces equations that read logits, by their position."""
    from mpx import _logits

    level = Level(jaxpr, consts)
    known = dict(zip(jaxpr.invars, facts, strict=True))
    kept: list[tuple[Term, str]] = []
    runs: list[Run] = []
    for dot, found in _logits.find_sites(Softmaxes(level)):
        against = found if isinstance(found, str) else None
        if not isinstance(found, str):
            terms = [dot, *(x.term for x in found.exits)]
            places = {x.level.place(x.eqn)[0] for x in terms}
            if len(places) == 1 and dot.level is not level:
                continue  # all of it is inside one call: found there
            against = _reason(amp, found, known, scopes)
            if against is None:
                runs.append(Run(amp=amp, level=level, site=found, scopes=scopes))
        if against is not None:
            kept.append((dot, against))
    replaced: dict[int, Replacement] = {}
    for run in runs:
        others = [x.term for y in runs if y is not run for x in y.site.exits]
        new = run.replacements(_logits.dependents(others))
        if isinstance(new, str):
            kept.append((run.site.scores.dot, new))
        else:
            replaced.update(new)
    for dot, against in kept:
        if dot.level is level:
            record(amp, dot, scopes, f"the logits are kept: {against}")
    return replaced


def _reason(
    amp: Settings, site: "Site", known: dict[Any, Origin], scopes: Scopes
) -> str | None:
    """Returns why logits are kept of which only the cross entropy is read."""
    from mpx import _logits

    if has_explicit_axes(jax.sharding.get_abstract_mesh()):
        return "the mesh has explicit axes"
    dot = site.scores.dot
    reason = reason_by_rule(amp, dot, dot.operands, known, scopes)
    reason = reason or reason_by_dtypes(amp, dot.operands)
    if reason is not None:
        return reason
    if _logits.bias_terms(site) is None:
        return "a mask, or a bias that differs between tokens"
    return None
