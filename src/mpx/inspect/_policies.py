"""Policies that can be pasted: `amp` and `fp8` with keep-lists, and what each costs."""

import collections
import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from mpx._amp import AmpRules, amp
from mpx._fp8 import fp8
from mpx._jax._compat import primitive_name
from mpx._jax._devices import H200
from mpx._program._queries import MATMULS, flops, walk
from mpx.inspect._buffers import traffic
from mpx.inspect._groups import Group, Keep, token_of
from mpx.inspect._program import Program


@dataclasses.dataclass(frozen=True)
class PrecisionPolicy:
    """A precision for a function, as a transformation and as code.

    Attributes:
        half: `"bf16"` or `"f16"`; `"f32"` changes nothing.
        keep: Expressions for what runs as it is written: see `mpx.amp`.
        functions: Expressions for functions whose operations run as they are written.
        fp8: Whether linear layers run in fp8.
        keep_fp8: Expressions for what does not run in fp8, but in 16 bits.

    Examples:
        >>> print(PrecisionPolicy("bf16", keep=("^head/weight$",)))
        mpx.amp(loss, "bf16", keep=['^head/weight$'])
    """

    half: str = "bf16"
    keep: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    fp8: bool = False
    keep_fp8: tuple[str, ...] = ()

    def apply(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function in this precision.

        Gradients of an f16 function need a loss scale: take them with
        `mpx.value_and_grad` and `mpx.DynamicLossScaling.pow2()`.
        """
        if self.half == "f32":
            return func
        rules = None
        if self.functions:
            rules = AmpRules(functions=dict.fromkeys(self.functions, "original"))
        func = amp(func, self.half, keep=list(self.keep), rules=rules)
        return fp8(func, keep=list(self.keep_fp8)) if self.fp8 else func

    def text(self, name: str = "loss") -> str:
        """Returns the code that makes the function `name` one in this precision."""
        if self.half == "f32":
            return name
        code = f'mpx.amp({name}, "{self.half}"'
        if self.keep:
            code += f", keep={list(self.keep)!r}"
        if self.functions:
            rules = dict.fromkeys(self.functions, "original")
            code += f", rules=mpx.AmpRules(functions={rules!r})"
        code += ")"
        if self.fp8:
            more = f", keep={list(self.keep_fp8)!r}" if self.keep_fp8 else ""
            code = f"mpx.fp8({code}{more})"
        return code

    def __str__(self) -> str:
        """Returns the code for a function that is called `loss`."""
        return self.text()


def policy_for(
    half: str,
    kept: Sequence[Keep] = (),
    *,
    is_fp8: bool = False,
    kept_fp8: Sequence[Keep] = (),
) -> PrecisionPolicy:
    """Returns the policy with these selectors."""
    return PrecisionPolicy(
        half,
        tuple(x.pattern for x in kept if x.kind == "keep"),
        tuple(x.pattern for x in kept if x.kind == "functions"),
        is_fp8,
        tuple(x.pattern for x in kept_fp8),
    )


def selected(groups: Sequence[Group], selectors: Sequence[Keep]) -> set[int]:
    """Returns the positions of the groups that run as they are written."""
    return {
        i for i, group in enumerate(groups) if any(x.selects(group) for x in selectors)
    }


class Cost(NamedTuple):
    """The work of a group, forward and backward.

    Attributes:
        flops: The operations of its matmuls.
        numbers: How many numbers its kernels read and write in 16 bits: see `traffic`.
    """

    flops: float = 0.0
    numbers: float = 0.0

    def seconds(self, precision: str) -> float:
        """Returns the time on the GPU of the table."""
        size = 4 if precision == "f32" else 2
        return self.flops / H200[precision] + self.numbers * size / H200["memory"]


def costs(grad: Program, count: int) -> list[Cost]:
    """Returns the work of each group of a labelled gradient program."""
    operations: collections.Counter[int | None] = collections.Counter()
    for eqn, scopes, times, _ in walk(grad.jaxpr):
        if primitive_name(eqn) in MATMULS:
            operations[token_of(scopes).group] += flops(eqn) * times
    numbers = traffic(grad.jaxpr, lambda scopes: token_of(scopes).group)
    return [Cost(operations[i], numbers[i]) for i in range(max(count, 1))]


def seconds(
    work: Sequence[Cost], half: str, low: Collection[int], fp8: Collection[int] = ()
) -> float:
    """Returns the predicted time of the operations that a policy can change."""
    total = 0.0
    for i, cost in enumerate(work):
        precision = "fp8" if i in fp8 else half if i in low else "f32"
        total += cost.seconds(precision)
    return total
