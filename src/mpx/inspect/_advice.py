"""`advise`: which precision for which part of a function, emulated or measured."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from jaxtyping import PyTree

from mpx._jax._warn import tell
from mpx.inspect._policies import (
    EIGHTS,
    HALVES,
    MOST_LOST,
    Candidate,
    PrecisionPolicy,
    Study,
    propose,
)
from mpx.inspect._result import Result, Table, percent

_SHOWN = 30


@dataclasses.dataclass(frozen=True)
class GroupAdvice:
    """What rounding one group of operations does.

    Attributes:
        label: The path of a parameter, for its matmuls; else a scope or a function.
        selector: The expression that keeps it in f32.
        kind: `"keep"` if that is for `amp`'s `keep`, `"functions"` if for
            `AmpRules.functions`.
        flops: The operations of its matmuls, forward and backward.
        errors: By format: the norm of the change of the gradient over the norm of the
            gradient, if this group alone is rounded. Of 8-bit formats, only operands of
            matmuls with a parameter are rounded, with one scale for each.
        overflows: Whether f16 is excluded: a number of the forward pass is too large.
        vanishing: The largest share of a parameter's gradient that f16 makes zero.
    """

    label: str
    selector: str
    kind: str
    flops: float
    errors: Mapping[str, float]
    overflows: bool
    vanishing: float

    @property
    def note(self) -> str:
        """What to know besides the errors."""
        if self.overflows:
            return "f16 overflows"
        if self.vanishing > MOST_LOST:
            return f"f16 loses {percent(self.vanishing)} of a gradient"
        return ""


@dataclasses.dataclass(frozen=True)
class Advice(Result):
    """What rounding does to a function, and policies for it, made by `advise`.

    Attributes:
        groups: The groups of operations that `amp` runs in 16 bits, worst first.
        proposals: By bf16 and f16, as asked for: the policy with the shortest keep-list
            that is good enough.
        loss_scale: The loss scale that was assumed for f16.
        opaque: Operations that were run as written, and whose inside is not judged.
    """

    groups: tuple[GroupAdvice, ...]
    proposals: Mapping[str, Candidate]
    loss_scale: float
    opaque: tuple[str, ...]

    @property
    def policy(self) -> PrecisionPolicy:
        """The proposed policy with the most work in 16 bits; bf16 wins ties."""
        return max(self.proposals.values(), key=lambda x: x.share).policy

    def proposal(self, name: str) -> Candidate:
        """Returns the proposal for bf16 or f16."""
        if name not in self.proposals:
            known = ", ".join(self.proposals)
            raise ValueError(f"There is a proposal for {known}, but not for {name!r}.")
        return self.proposals[name]

    def tables(self) -> Sequence[Table]:
        """Returns the groups, then the proposals."""
        formats = list(self.groups[0].errors) if self.groups else []
        total = sum(x.flops for x in self.groups) or 1
        rows = [
            (
                x.label,
                percent(x.flops / total) if x.flops else "–",
                *(_number(x.errors[name]) for name in formats),
                x.note,
            )
            for x in self.groups[:_SHOWN]
        ]
        title = "Gradient error if one group alone is rounded"
        right = frozenset(range(1, 2 + len(formats)))
        tables = [Table(("group", "flops", *formats, ""), rows, title, right)]
        texts, rest = list[str](), len(self.groups) - _SHOWN
        if rest > 0:
            texts.append(f"{rest} more groups have smaller errors.")
        if self.opaque:
            texts.append(f"Not looked into: {', '.join(self.opaque)}.")
        tables += [_described(*item) for item in self.proposals.items()]
        return [*tables, *map(Table.text, texts)]


def _number(value: float) -> str:
    return "–" if value == 0 else f"{value:.1e}"


def _described(name: str, proposal: Candidate) -> Table:
    policy = proposal.policy
    error = f"gradient error {_number(proposal.error)}"
    if policy.keep or policy.functions:
        error += f", instead of {_number(proposal.default)} without keep"
    lines = filter(None, (str(policy), error, proposal.remark))
    return Table.text("\n".join(lines), f"{name}:")


def advise(
    func: Callable[..., PyTree],
    /,
    *args: PyTree,
    formats: Sequence[str] = ("bf16", "f16", "e4m3", "e5m2"),
    max_grad_error: float = 0.05,
    measure: bool = False,
    **kwargs: PyTree,
) -> Advice:
    """Finds out what each part of a function does to the gradient in each format.

    The gradient is computed in f32, along the program that `amp` would run, once as it is
    and once for each group of operations and each format, with that group alone rounded
    wherever `amp` or `fp8` would round. A group is the matmuls of one parameter, or the
    other operations of one `jax.named_scope`, or of one function where there are no scopes.

    For bf16 and f16 it proposes the shortest keep-list with which the gradient is close
    enough to that in f32: groups that add much error for their work are kept first. f16 has
    its real range, with the loss scale at which `mpx.DynamicLossScaling` comes to rest;
    groups that overflow are kept. A small gradient error on one batch promises nothing about
    the accuracy after training.

    Args:
        func: The loss function in f32, without `amp` or `fp8`. Its first result is the
            loss, and its first argument, or the function itself, holds the parameters.
        *args: Its arguments, with real numbers: those of a batch.
        formats: The formats to judge: of bf16, f16, e4m3 and e5m2.
        max_grad_error: The largest gradient error of the proposed policies, relative to the
            gradient. The default is about what one 16-bit rounding of every operand does to
            the gradient of a healthy model.
        measure: Whether to run the proposals as well, and longer keep-lists where one is not
            good enough. The errors are then those of the real gradients.
        **kwargs: Its keyword arguments.

    Raises:
        TypeError: If the function is under `amp` or `fp8`, returns no scalar loss first, or
            gets shapes instead of numbers.
        ValueError: If a format is unknown, `max_grad_error` is not positive, or the gradient
            in f32 is not finite.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> def loss(params, x):
        ...     return jnp.mean(jnp.tanh(x @ params["a"]) @ params["b"])
        >>> params = {"a": jnp.full((8, 16), 0.1), "b": jnp.full((16, 4), 0.3)}
        >>> x = jnp.linspace(0, 1, 32).reshape(4, 8)
        >>> print(advise(loss, params, x, formats=["bf16"]).proposal("bf16").policy)
        mpx.amp(loss, "bf16")
        >>> print(advise(loss, params, x, formats=["bf16"], measure=True).policy)
        mpx.amp(loss, "bf16")
    """
    known = (*HALVES, *EIGHTS)
    chosen = (formats,) if isinstance(formats, str) else formats
    if not chosen or not {*chosen} <= {*known}:
        raise ValueError(
            f"`formats` must be some of {', '.join(known)}, but {formats!r} was given."
        )
    formats = tuple(name for name in known if name in chosen)
    if not max_grad_error > 0:
        raise ValueError(
            "`max_grad_error` must be a positive number such as 0.02, but it is "
            f"{max_grad_error}."
        )
    wanted = [x for x in HALVES if x in formats] or ["bf16"]
    study = Study(func, args, kwargs, formats)
    proposals = {x: propose(study, x, max_grad_error, measure) for x in wanted}
    groups = [_advice(study, label, formats) for label in study.labels]
    tell("")
    return Advice(
        groups=tuple(sorted(groups, key=lambda row: -row.errors[formats[0]])),
        proposals=proposals,
        loss_scale=study.scale,
        opaque=tuple(sorted(study.emulation.opaque)),
    )


def _advice(study: Study, label: str, formats: Sequence[str]) -> GroupAdvice:
    changes = {name: study.alone(name, label) for name in formats}
    selector = study.selector(label)
    return GroupAdvice(
        label=label,
        selector=selector.pattern,
        kind=selector.kind,
        flops=sum(study.flops[i] for i in study.labels[label]),
        errors={name: found.error for name, found in changes.items()},
        overflows=label in study.overflowing,
        vanishing=changes["f16"].lost if "f16" in formats else 0.0,
    )
