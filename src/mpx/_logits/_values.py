"""From the arrays of a program to the operands of the operation, and back."""

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

from mpx._jaxpr._meanings import Label
from mpx._jaxpr._meanings import Labels as Axes
from mpx._jaxpr._terms import Term
from mpx._logits._chunks import Statistics
from mpx._logits._match import Exit, Site

F32 = jnp.float32


def hidden_states(site: Site, x: Array) -> Array:
    """Returns the hidden states as (tokens, width), with the scale of the logits."""
    for (_, axis), (start, limit, stride) in site.scores.slices:
        x = lax.slice_in_dim(x, start, limit, stride, axis)
    if site.scores.scale != 1.0:
        x = x.astype(F32) * site.scores.scale
    return jnp.moveaxis(x, site.summed, -1).reshape(-1, x.shape[site.summed])


def bias_terms(site: Site) -> list[tuple[Term, float]] | None:
    """Returns biases with one number for each entry of the vocabulary, and their factors.

    It is `None` if there is another bias or a mask.
    """
    found = []
    for side in site.scores.sides:
        term = side.term
        pairs = zip(side.labels, term.varying, strict=True)
        if side.kind != "bias" or any(v and x != (site.vocab,) for x, v in pairs):
            return None
        while (
            term.name == "broadcast_in_dim" and math.prod(term.shape) > site.vocabulary
        ):
            term = term.operands[0]
        if math.prod(term.shape) != site.vocabulary:
            return None
        found.append((term, side.factor))
    return found


def token_labels(site: Site, x: Array) -> Array:
    """Returns one label for each token, as i32; those outside the vocabulary stay so."""
    labels = site.labels
    assert labels is not None
    shape = []
    for axis, (here, size) in enumerate(zip(labels.axes, x.shape, strict=True)):
        tokens = [label for label in here if label != site.vocab]
        if size != 1 and not tokens:
            x = jnp.take(x, jnp.array([0]), axis)  # it is the same for all entries
        shape.append(math.prod(site.scores.sizes[label] for label in tokens))
    x = jnp.broadcast_to(x, shape)
    order = [label for here in labels.axes for label in here if label != site.vocab]
    x = x.reshape([site.scores.sizes[label] for label in order])
    x = jnp.transpose(x, [order.index(label) for label in site.tokens]).reshape(-1)
    last = site.vocabulary - 1
    limits = jnp.iinfo(x.dtype)
    if labels.mode == "clip":
        return jnp.clip(x, max(0, limits.min), min(last, limits.max)).astype(jnp.int32)
    return jnp.clip(x, max(-1, limits.min), min(last + 1, limits.max)).astype(jnp.int32)


def needs_total(site: Site) -> bool:
    """Returns whether the sum of all logits of a token is read: of smoothed labels it is."""
    return any(x.off for x in site.exits)


def value_of_exit(
    site: Site,
    leaving: Exit,
    statistics: Statistics,
    total: Array | None,
    labels: Array,
) -> Array:
    """Returns the value of an exit.

    Args:
        site: The logits.
        leaving: The exit.
        statistics: The statistics of the tokens.
        total: The sum of the logits of each token, if it is read.
        labels: The labels of the tokens.
    """
    logsumexp, chosen, highest = statistics
    if leaving.is_shifted:
        logsumexp, chosen = logsumexp - highest, chosen - highest
    if leaving.kind == "logsumexp":
        return _arranged(site, logsumexp, leaving.axes, leaving.term.shape)
    assert leaving.labels is not None
    value = chosen - logsumexp if leaving.is_log_prob else chosen
    is_entry = (labels >= 0) & (labels < site.vocabulary)
    if leaving.labels.mode == "fill":
        value = jnp.where(is_entry, value, leaving.labels.fill)
    if leaving.kind == "gather":
        return _arranged(site, value, leaving.axes, leaving.term.shape)
    value = jnp.where(is_entry, value, 0.0) * (leaving.on - leaving.off)
    if leaving.off:
        assert total is not None
        if leaving.is_shifted:
            total = total - site.vocabulary * highest
        all_of = total - site.vocabulary * logsumexp if leaving.is_log_prob else total
        value += leaving.off * all_of
    axes = [x for x in leaving.axes if x != (site.vocab,)]
    shape = [math.prod(site.scores.sizes[label] for label in x) for x in axes]
    value = _arranged(site, value, axes, shape)
    place = leaving.axes.index((site.vocab,))
    rest = [x - (x > place) for x in leaving.summed if x != place]
    return jnp.sum(value, axis=tuple(rest)) if rest else value


def _arranged(
    site: Site, x: Array, axes: Sequence[tuple[Label, ...]] | Axes, shape: Sequence[int]
) -> Array:
    """Returns a number for each token with other axes; some may be broadcast."""
    order = [label for here in axes for label in here]
    x = x.reshape(site.sizes)
    x = jnp.transpose(x, [site.tokens.index(label) for label in order])
    sizes = [math.prod(site.scores.sizes[label] for label in here) for here in axes]
    return jnp.broadcast_to(x.reshape(sizes), shape)
