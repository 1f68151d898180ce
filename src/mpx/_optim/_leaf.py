"""One parameter with all that belongs to it, and one step of it."""

import dataclasses
from typing import Any, NamedTuple

from jax import Array

from mpx._optim._rules import Rule
from mpx._quant import Block, MasterCodec, MomentCodec, Noise, is_finite


class Leaf(NamedTuple):
    """A parameter and its state.

    Attributes:
        param: The parameter, in the dtype of the model.
        correction: What the rounding of the master weight left over, or `None`.
        moments: A `Quantized` or an f32 array for each moment of the rule.
    """

    param: Array
    correction: Array | None
    moments: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a leaf is stored and updated. Static, equal plans compile once.

    Attributes:
        rule: The update rule.
        master: How the weight is stored.
        moments: How each moment is stored, in the order of the rule.
        group_size: Elements that share a scale; 0 if no moment is quantised.
        dithers: Whether moments and weights are rounded up or down by turns, see `Dither`.
    """

    rule: Rule
    master: MasterCodec
    moments: tuple[MomentCodec, ...]
    group_size: int
    dithers: bool = False

    def __call__(
        self,
        scalars: tuple[Array, ...],
        grad: Array,
        leaf: Leaf,
        block: Block,
        noise: Noise | None = None,
    ) -> Leaf:
        """Decodes, updates in f32, encodes.

        Args:
            scalars: What the gradient is multiplied by, the two numbers of a `Dither`, then
                the coefficients.
            grad: The gradient of the block.
            leaf: The block of the parameter and of its state.
            block: What the codecs need to know of it.
            noise: For rounding at random.
        """
        grad_scale, for_moments, for_masters, *coefficients = scalars
        more = for_moments if self.dithers else None
        up = for_masters if self.dithers else None
        weight = self.master.decode(leaf.param, leaf.correction, block)
        moments = tuple(
            codec.decode(stored, block)
            for codec, stored in zip(self.moments, leaf.moments, strict=True)
        )
        grad = grad.astype(weight.dtype) * grad_scale
        weight, moments = self.rule.update(
            tuple(coefficients), grad, weight, moments, block
        )
        # What is not finite is stored as zero, lest it spread to its group, and so are
        # the other moments of the element: the square of a gradient of 1e20 is infinite
        # while its first moment is not, and that beside a second moment of zero would be
        # a step without bound. Where a moment is not finite the last one is not either;
        # outside of kernels that one looks for itself.
        keep = is_finite(moments[-1]) if self.group_size else None
        param, correction = self.master.encode(
            weight, leaf.param.dtype, block, noise, dither=up
        )
        stored = []
        pairs = zip(self.moments, moments, strict=True)
        for stream, (codec, moment) in enumerate(pairs, start=1):
            alone = stream == len(moments) and not block.in_registers
            kept = None if alone else keep
            stored.append(codec.encode(moment, block, noise, stream, kept, dither=more))
        return Leaf(param, correction, tuple(stored))
