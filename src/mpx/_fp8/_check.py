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
    for line in text.splitlines():
        found, grouped = _CUBLAS.search(line), _GROUPED.search(line)
        kind = found.group(1) if found else ""
        dtype = grouped.group(1) if grouped else ""
        is_fp8 = kind.startswith("lt$matmul$f8") or dtype.startswith("f8")
        if is_fp8 or _BLOCK_SCALED.search(line):
            calls += 1
        elif dtype:
            other[f"grouped {dtype}"] += 1
        elif found is not None:
            other[f"cublas {_first_operand(line, text)}"] += 1
        elif _ONE_DNN.search(line) or _DOT.search(line):
            other[f"dot {_first_operand(line, text)}"] += 1
    integers = sum(other.pop(f"{kind} s8", 0) for kind in ("cublas", "dot"))
    # Other parts of a program may hold int8 numbers, such as an optimizer's state.
    found = re.search(r"\bf(8e4m3fn|8e5m2|4e2m1fn)\[", text) is not None or integers > 0
    return Fp8Check(calls, dict(sorted(other.items())), found, integers)


# What `jax.nn.scaled_matmul` lowers to, and what XLA makes of it.
_BLOCK_SCALED = re.compile(r'target="__(op\$block_scaled_dot|cudnn\$blockScaledDot)"')
_CUBLAS = re.compile(r'custom_call_target="__cublas\$([\w$]+)"')
# A kernel of `mpx._ops._experts`: its first operands are integers.
_GROUPED = re.compile(
    r'custom_call_target="mosaic_gpu\w*", operand_layout_constraints=\{'
    r"(?:s32\[[^ ]* )+(b?f\w+)\[.*mpx_grouped_matmul"
)
_ONE_DNN = re.compile(r'custom_call_target="__onednn\$matmul"')
_DOT = re.compile(r"= \S+ dot\(")
_OPERAND = re.compile(r"(?:dot|custom-call)\(\s*(?:(\w+)\[[^ ]* )?(%?[\w.\-]+)")


def _first_operand(line: str, text: str) -> str:
    """Returns the dtype of the first operand of an instruction."""
    found = _OPERAND.search(line)
    if found is None:
        return "unknown"
    if found.group(1):
        return found.group(1)
    name = re.escape(found.group(2).removeprefix("%"))
    made = re.search(rf"%?{name}(?: =|:) \(?(\w+)\[", text)
    return made.group(1) if made else "unknown"
