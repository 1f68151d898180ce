"""Parts of scores: a slice of the result of a matmul is the result for a slice."""

import dataclasses

from mpx._jaxpr._meanings import NO_SHIFT, Meaning
from mpx._jaxpr._terms import Term


def sliced(term: Term, known: list[Meaning | None]) -> Meaning | None:
    """Returns the meaning of a part of scores, such as all but the last position."""
    (source,) = known
    if source is None or source.kind != "scores" or source.shift != NO_SHIFT:
        return None
    params, scores = term.eqn.params, source.scores
    strides = params["strides"] or (1,) * len(term.shape)
    limits = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    for labels, given, limit in zip(
        source.labels, term.operands[0].shape, limits, strict=True
    ):
        if limit == (0, given, 1):
            continue
        is_biased = any(
            varies and here == labels
            for side in scores.sides
            for here, varies in zip(side.labels, side.term.varying, strict=True)
        )
        size = len(range(*limit))
        taken = [label for label, _ in scores.slices]
        if is_biased or size < 2 or len(labels) != 1 or labels[0] in taken:
            return None
        scores = dataclasses.replace(
            scores,
            sizes={**scores.sizes, labels[0]: size},
            slices=(*scores.slices, (labels[0], limit)),
        )
    return source._replace(scores=scores, parents=(term.operands[0],))
