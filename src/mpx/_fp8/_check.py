"""Checks of the matmuls of a compiled program: which of them are fp8 or int8."""

import collections
import dataclasses
import re
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Fp8Check:
    """The matmuls of a compiled program; made by `mpx.inspect.fp8_check`.

    Attributes:
        fp8: How many calls multiply in fp8 units, or in those for blocks of 8 or 4 bits.
        other: How many multiply in something else, by what they are: `cublas bf16`,
            `triton f8e4m3fn` and so on. A loop counts its body once.
        quantized: Whether such numbers occur at all. If not, XLA has removed them.
        int8: How many multiply int8 numbers, on any platform.
    """

    fp8: int
    other: Mapping[str, int]
    quantized: bool
    int8: int = 0

    def __str__(self) -> str:
        others = [f"{count} {name}" for name, count in self.other.items()]
        counts = [f"{self.fp8} fp8"] if self.fp8 or not self.int8 else []
        counts += [f"{self.int8} int8"] if self.int8 else []
        found = " and ".join(counts)
        return f"{found} matmuls; others: {', '.join(others) or 'none'}"


def fp8_check(compiled: Any) -> Fp8Check:
    """Counts the fp8 and int8 matmuls of a compiled program, and the others.

    Where hardware, version or shape do not fit, XLA computes in bf16 and says nothing.
    This reads what it made.

    Args:
        compiled: What `jax.jit(...).lower(...).compile()` returns, or the text of its
            HLO. fp8 is meaningful for NVIDIA GPUs: other platforms have no such calls.

    Raises:
        TypeError: If it has no HLO to read.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> step = jax.jit(lambda x: x @ x)
        >>> print(fp8_check(step.lower(jnp.ones((16, 16))).compile()))
        0 fp8 matmuls; others: 1 dot f32
    """
    read = getattr(compiled, "as_text", None)
    text = compiled if isinstance(compiled, str) else read and read()
    if not isinstance(text, str):
        raise TypeError(
            "`fp8_check` reads a compiled program, but "
            f"{type(compiled).__name__} was given. Pass "
            "`jax.jit(func).lower(*args).compile()`."
        )
    calls, other = 0, collections.Counter[str]()
    types = dict(reversed(_RESULT.findall(text)))
    for line in text.splitlines():
        cublas, grouped, operand = (
            x.search(line) for x in (_CUBLAS, _GROUPED, _OPERAND)
        )
        dtype = operand and (operand[1] or types.get(operand[2].removeprefix("%")))
        if _FP8.search(line):
            calls += 1
        elif grouped:
            other[f"grouped {grouped[1]}"] += 1
        elif cublas or _DOT.search(line):
            other[f"{'cublas' if cublas else 'dot'} {dtype or 'unknown'}"] += 1
    integers = sum(other.pop(f"{kind} s8", 0) for kind in ("cublas", "dot"))
    # Other parts of a program may hold int8 numbers, such as an optimizer's state.
    found = re.search(r"\bf(8e4m3fn|8e5m2|4e2m1fn)\[", text) is not None or integers > 0
    return Fp8Check(calls, dict(sorted(other.items())), found, integers)


# Also of blocks: what `jax.nn.scaled_matmul` lowers to, and what XLA makes of it.
_FP8 = re.compile(
    r'target="__(cublas\$lt\$matmul\$f8|op\$block_scaled_dot"|cudnn\$blockScaledDot")'
)
_CUBLAS = re.compile(r'custom_call_target="__cublas\$')
# A kernel of `mpx._ops._experts`: its first operands are integers.
_GROUPED = re.compile(
    r'custom_call_target="mosaic_gpu\w*", operand_layout_constraints=\{'
    r"(?:s32\[[^ ]* )+(b?f\w+)\[.*mpx_grouped_matmul"
)
_DOT = re.compile(r'custom_call_target="__onednn\$matmul"|= \S+ dot\(')
_OPERAND = re.compile(r"(?:dot|custom-call)\(\s*(?:(\w+)\[[^ ]* )?(%?[\w.\-]+)")
_RESULT = re.compile(r"%?([\w.\-]+)(?: =|:) \(?(\w+)\[")
