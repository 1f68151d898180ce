"""How the state of one parameter is packed into arrays, and a step of what is packed."""

import dataclasses
import functools
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import PyTree

from mpx._jax._sharding import sharded_as, unstacked, whole_groups, zeros_alike
from mpx._jax._tree import dtype_of, shape_of
from mpx._optim._options import Compression, StateFormat, master_codec, moment_codec
from mpx._optim._params import F32, PARAM_DTYPES
from mpx._optim._update_rules import Given, Moments, Rule, Scalars
from mpx._quant import (
    Block,
    MasterCodec,
    MomentCodec,
    Packed,
    Quantized,
    count_words,
    is_finite,
    join,
    random_bits,
    split,
    word_of,
    words_of,
)

INT8, INT16 = np.dtype(np.int8), np.dtype(np.int16)
_LARGEST_MOMENT = np.float32(2.0**125)  # the largest that every codec can store


class PackedLeaf(NamedTuple):
    """A parameter and its state, as kernels get them; see `Packed`."""

    param: PyTree
    codes: PyTree
    scales: PyTree

    @property
    def packed(self) -> Packed:
        """The state."""
        return Packed(self.codes, self.scales)


class Unpacked(NamedTuple):
    """The state of one parameter.

    Attributes:
        moments: A `Quantized` or an f32 array for each moment of the rule.
        correction: The remainder of rounding the master weight, or `None`.
    """

    moments: tuple[PyTree, ...]
    correction: PyTree

    @property
    def words(self) -> tuple[tuple[Array, ...], tuple[Array, ...] | None]:
        """The words of codes and of scales, one for each plane."""
        quantized = [x for x in self.moments if isinstance(x, Quantized)]
        codes = [x.codes for x in quantized] if quantized else [*self.moments]
        if self.correction is not None:
            codes.append(self.correction)
        return split(codes), split([x.scale for x in quantized]) if quantized else None

    def pack(self) -> Packed:
        """Returns the state in at most two arrays."""
        codes, scales = self.words
        is_f32 = all(word.dtype == F32 for word in codes)
        return Packed(
            codes if is_f32 else jnp.stack(codes),
            None if scales is None else jnp.stack(scales),
        )


@dataclasses.dataclass(frozen=True)
class Packing:
    """How the state of one parameter is stored.

    Attributes:
        moments: The names of the moments.
        format: The format of scales and corrections.
        quantized: Whether the moments have 8 bits.
        correction: The dtype of the correction, or `None`.
    """

    moments: tuple[str, ...]
    format: StateFormat
    quantized: bool
    correction: np.dtype | None

    @classmethod
    def read(
        cls, packed: Packed, moments: tuple[str, ...], format: StateFormat
    ) -> "Packing":
        """Reads the packing off a state; whether the state fits it is checked elsewhere."""
        quantized = packed.scales is not None
        correction = None
        if not isinstance(packed.codes, tuple | None):
            size = getattr(dtype_of(packed.codes), "itemsize", 0)
            if quantized:
                planes, *_ = shape_of(packed.codes) or (0,)
                size = planes - len(moments)
            correction = {1: INT8, 2: INT16}.get(size)
        return cls(moments, format, quantized, correction)

    @property
    def codecs(self) -> tuple[MomentCodec, ...]:
        """The codec of each moment."""
        return tuple(
            moment_codec(name, self.quantized, self.format) for name in self.moments
        )

    def master(self, dtype: DTypeLike) -> MasterCodec:
        """Returns the codec of the weights of parameters of `dtype`."""
        return master_codec(dtype, self.correction, self.format)

    @property
    def elements(self) -> tuple[np.dtype, ...]:
        """The dtypes of the numbers per element: of each moment, then the correction."""
        codes = tuple(codec.code_dtype for codec in self.codecs)
        return codes if self.correction is None else (*codes, self.correction)

    @property
    def scales(self) -> tuple[np.dtype, ...]:
        """The dtypes of the numbers per group."""
        return tuple(c.scale_dtype for c in self.codecs if c.scale_dtype is not None)

    def zeros(self, param: PyTree, group_size: int) -> Packed:
        """Returns a state of zeros, sharded like the parameter."""

        def planes(dtypes: tuple[np.dtype, ...], group: int | None = None) -> PyTree:
            word, count = word_of(dtypes), count_words(dtypes)
            return zeros_alike(param, word, group=group, planes=count)

        if all(dtype == F32 for dtype in self.elements):
            # Arrays of their own: plain JAX would need a second pass to write planes.
            return Packed(tuple(zeros_alike(param, F32) for _ in self.elements), None)
        scales = planes(self.scales, group_size) if self.scales else None
        return Packed(planes(self.elements), scales)

    def unpack(self, codes: Sequence[Array], scales: Sequence[Array]) -> Unpacked:
        """Returns moments and correction, given the words of each plane."""
        return self._named(join(codes, self.elements), join(scales, self.scales))

    def _named(self, numbers: Sequence[PyTree], scales: Sequence[PyTree]) -> Unpacked:
        moments = numbers[: len(self.moments)]
        if scales:
            moments = [Quantized(*pair) for pair in zip(moments, scales, strict=True)]
        return Unpacked(
            tuple(moments), None if self.correction is None else numbers[-1]
        )

    def view(self, packed: Packed) -> Unpacked:
        """Returns moments and correction of a state, of arrays or `ShapeDtypeStruct`s."""
        codes, scales = _planes(packed.codes), _planes(packed.scales)
        expected = [
            count_words(dtypes) if dtypes else 0
            for dtypes in (self.elements, self.scales)
        ]
        if [len(codes), len(scales)] != expected:
            raise ValueError(
                f"Expected {expected[0]} planes of codes and {expected[1]} of scales along "
                f"the first axis, but there are {len(codes)} and {len(scales)}. In a "
                "function that `jax.vmap` maps over states, read them inside."
            )
        if not any(isinstance(x, jax.ShapeDtypeStruct) for x in (*codes, *scales)):
            return self.unpack(codes, scales)

        def struct(like: jax.ShapeDtypeStruct, dtype: np.dtype) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(like.shape, dtype, sharding=like.sharding)

        return self._named(
            [struct(codes[0], dtype) for dtype in self.elements],
            [struct(scales[0], dtype) for dtype in self.scales],
        )

    def with_correction(self, packed: Packed, correction: Array | None) -> Packed:
        """Returns a state with another correction of the same dtype."""
        assert correction is not None
        codes = jnp.asarray(packed.codes)
        words = words_of(correction, codes.dtype)
        for index, word in enumerate(words, start=len(codes) - len(words)):
            word = sharded_as(word, codes[index])
            codes = lax.dynamic_update_index_in_dim(codes, word, index, 0)
        return packed._replace(codes=codes)


def _planes(x: PyTree) -> tuple[PyTree, ...]:
    """Returns the planes of an array, or of what is a tuple already."""
    if x is None or isinstance(x, tuple):
        return x or ()
    if isinstance(x, jax.ShapeDtypeStruct):
        sharding = unstacked(x.sharding)
        plane = jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=sharding)
        return (plane,) * x.shape[0]
    x = jnp.asarray(x)
    return tuple(lax.index_in_dim(x, i, keepdims=False) for i in range(len(x)))


def is_missing(codes: object) -> bool:
    """Returns whether a parameter has no state: if it is frozen, or `optax.masked`."""
    return codes is None or isinstance(codes, optax.MaskedNode)


# --- the step -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LeafStep:
    """The step of a leaf: unpack, decode, update in f32, encode, pack.

    Static; equal ones compile once.

    Attributes:
        rule: The update rule.
        packing: How the state is stored.
        group_size: Elements that share a scale; 0 if no moment is quantised.
        dithers: Whether moments and weights are rounded with a `Dither`.
    """

    rule: Rule
    packing: Packing
    group_size: int
    dithers: bool = False

    def __call__(
        self, scalars: Scalars, grad: Array, leaf: PackedLeaf, block: Block
    ) -> PackedLeaf:
        """Steps a block, in which each array is a tuple of planes.

        `scalars` are the factor of the gradient, the two numbers of a `Dither`, and the
        coefficients of the rule.
        """
        grad_scale, for_moments, for_masters, *coefficients = scalars
        dtype, codecs = leaf.param.dtype, self.packing.codecs
        master = self.packing.master(dtype)
        old = self.packing.unpack(leaf.codes, leaf.scales or ())
        weight = master.decode(leaf.param, old.correction, block)
        moments = tuple(
            codec.decode(stored, block)
            for codec, stored in zip(codecs, old.moments, strict=True)
        )
        grad = grad if grad.dtype.itemsize > 4 else grad.astype(weight.dtype)
        scaled = grad.astype(weight.dtype) * grad_scale
        given = Given(tuple(coefficients), scaled, weight, block)
        weight, moments = self._update(given, moments, dtype)
        # For `finite` to skip; it must be seen if nobody looks.
        weight = jnp.where(is_finite(grad), weight, np.float32(np.nan))
        param, correction = master.encode(
            weight, dtype, block, for_masters if self.dithers else None
        )
        dither = for_moments if self.dithers else None
        stored = tuple(
            codec.encode(moment, block, dither, is_safe=True)
            for codec, moment in zip(codecs, moments, strict=True)
        )
        return PackedLeaf(param, *Unpacked(stored, correction).words)

    def _update(
        self, given: Given, moments: Moments, dtype: np.dtype
    ) -> tuple[Array, Moments]:
        """Returns weights and moments after a step, the old ones where it would overflow.

        The square of a gradient of 1e20 is infinite. Such a second moment would stay, and
        its weight would never move again. Each element is decided by itself, in registers:
        to skip the whole step, a kernel would have to read all gradients twice.
        """
        weight = given.weight
        new = self.rule.average(given, moments)
        # If any moment is too large, the last one is.
        fits = [jnp.abs(last) < _LARGEST_MOMENT for last in new[-1:]]
        for fit in fits:
            new = tuple(map(functools.partial(jnp.where, fit), new, moments))
        moved = self.rule.move(given, moments, new)
        # A weight that is beyond its dtype already may shrink.
        largest = jnp.maximum(jnp.abs(weight), np.float32(jnp.finfo(dtype).max))
        for fit in (*fits, jnp.abs(moved) <= largest):
            moved = jnp.where(fit, moved, weight)
        return moved, new


# --- moments --------------------------------------------------------------------------


def decode_moment(name: str, moment: PyTree, format: StateFormat) -> Array:
    """Returns a moment of a state, quantised or not, in f32."""
    if not isinstance(moment, Quantized):
        return moment
    shape, groups = moment.codes.shape, moment.scale.shape
    size = shape[-1] // groups[-1]
    codes = whole_groups(moment.codes, size).reshape(*groups, size)
    codec = moment_codec(name, quantized=True, format=format)
    return codec.decode(Quantized(codes, moment.scale), Block()).reshape(shape)


def encode_moment(
    name: str, moment: Array, format: StateFormat, group_size: int
) -> Quantized:
    """Quantises a moment, to nearest, in groups that divide its last axis."""
    shape = moment.shape
    grouped = whole_groups(moment, group_size).reshape(*shape[:-1], -1, group_size)
    codec = moment_codec(name, quantized=True, format=format)
    new = codec.encode(grouped, Block())
    return Quantized(new[0].reshape(shape), new[1])


# --- master weights -------------------------------------------------------------------


def first_state(
    name: str, param: PyTree, moments: tuple[str, ...], compression: Compression
) -> tuple[Packed, np.dtype | None]:
    """Returns the state of a parameter before the first step, and its correction's dtype.

    With `Compression.jitter`, each master weight lies at a pseudo-random place in its
    rounding interval, which depends on the path of the parameter.
    """
    correction = compression.correction_dtype(param)
    quantized = compression.quantizes(param)
    packing = Packing(moments, compression.format, quantized, correction)
    packed = packing.zeros(param, compression.group_size)
    is_struct = isinstance(param, jax.ShapeDtypeStruct)
    if correction is not None and compression.jitter and not is_struct:
        seed = np.uint32(zlib.crc32(name.encode()))
        packed = _place(jnp.asarray(param), packed, seed, packing=packing)
    return packed, correction


# Under jit, so that nothing but the state is written to memory.
@functools.partial(jax.jit, static_argnames="packing", donate_argnums=1)
def _place(param: Array, packed: Packed, seed: Array, *, packing: Packing) -> Packed:
    codec: PyTree = packing.master(param.dtype)
    correction = codec.place(param, random_bits(param.shape, seed))
    return packing.with_correction(packed, correction)


def put_master(weight: PyTree, leaf: PackedLeaf, packing: Packing) -> PackedLeaf:
    """Returns a leaf with another weight; the parameter keeps its dtype."""
    dtype = dtype_of(leaf.param)
    if isinstance(weight, jax.ShapeDtypeStruct):
        return leaf
    if packing.correction is None:
        is_param = dtype in PARAM_DTYPES
        return leaf._replace(param=weight.astype(dtype) if is_param else weight)
    return _put(weight, leaf.packed, packing=packing, dtype=np.dtype(dtype))


@functools.partial(jax.jit, static_argnames=("packing", "dtype"))
def _put(
    weight: Array, packed: Packed, *, packing: Packing, dtype: np.dtype
) -> PackedLeaf:
    param, correction = packing.master(dtype).encode(weight.astype(F32), dtype, Block())
    return PackedLeaf(param, *packing.with_correction(packed, correction))
