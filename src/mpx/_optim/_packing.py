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
from mpx._jax._tree import cast_leaf, dtype_of, shape_of
from mpx._optim._options import Compression, StateFormat, master_codec, moment_codec
from mpx._optim._params import F32, PARAM_DTYPES
from mpx._optim._update_rules import Leaf, LeafStep, Rule
from mpx._quant import (
    Block,
    MasterCodec,
    MomentCodec,
    Noise,
    Packed,
    Quantized,
    count_words,
    element_index,
    join,
    split,
    word_of,
    words_of,
)

INT8, INT16 = np.dtype(np.int8), np.dtype(np.int16)


class PackedLeaf(NamedTuple):
    """A parameter and its state, as kernels get them; see `Packed`."""

    param: PyTree
    codes: PyTree
    scales: PyTree

    @property
    def packed(self) -> Packed:
        """The state."""
        return Packed(self.codes, self.scales)


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

    @property
    def is_f32(self) -> bool:
        """Whether there are no integers.

        Then a step can be differentiated, and each moment is an array of its own: plain
        JAX would need a second pass to write planes.
        """
        return all(dtype == F32 for dtype in self.elements)

    def zeros(self, param: PyTree, group_size: int) -> Packed:
        """Returns a state of zeros, sharded like the parameter."""

        def planes(dtypes: tuple[np.dtype, ...], group: int | None = None) -> PyTree:
            word, count = word_of(dtypes), count_words(dtypes)
            return zeros_alike(param, word, group=group, planes=count)

        if self.is_f32:
            return Packed(tuple(zeros_alike(param, F32) for _ in self.elements), None)
        scales = planes(self.scales, group_size) if self.scales else None
        return Packed(planes(self.elements), scales)

    def unpack(self, codes: Sequence[Array], scales: Sequence[Array]) -> Leaf:
        """Returns moments and correction, given the words of each plane."""
        return self._leaf(join(codes, self.elements), join(scales, self.scales))

    def _leaf(self, numbers: Sequence[PyTree], scales: Sequence[PyTree]) -> Leaf:
        moments = numbers[: len(self.moments)]
        if scales:
            moments = [Quantized(*pair) for pair in zip(moments, scales, strict=True)]
        correction = None if self.correction is None else numbers[-1]
        return Leaf(None, correction, tuple(moments))

    def view(self, packed: Packed) -> Leaf:
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

        return self._leaf(
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


def _words(leaf: Leaf) -> tuple[tuple[Array, ...], tuple[Array, ...] | None]:
    """Returns the words of codes and of scales, one for each plane."""
    quantized = [x for x in leaf.moments if isinstance(x, Quantized)]
    codes = [x.codes for x in quantized] if quantized else [*leaf.moments]
    if leaf.correction is not None:
        codes.append(leaf.correction)
    return split(codes), split([x.scale for x in quantized]) if quantized else None


def pack(leaf: Leaf) -> Packed:
    """Packs moments and correction."""
    codes, scales = _words(leaf)
    is_f32 = all(word.dtype == F32 for word in codes)
    return Packed(
        codes if is_f32 else jnp.stack(codes),
        None if scales is None else jnp.stack(scales),
    )


def is_missing(codes: object) -> bool:
    """Returns whether a parameter has no state: if it is frozen, or `optax.masked`."""
    return codes is None or isinstance(codes, optax.MaskedNode)


@dataclasses.dataclass(frozen=True)
class PackedStep:
    """The step of a packed leaf: unpack, step, pack. Static; equal ones compile once."""

    step: LeafStep
    packing: Packing

    def __call__(
        self,
        scalars: tuple[Array, ...],
        grad: Array,
        leaf: PackedLeaf,
        block: Block,
        noise: Noise | None = None,
    ) -> PackedLeaf:
        """Steps a block, in which each array is a tuple of planes; see `LeafStep`."""
        old = self.packing.unpack(leaf.codes, leaf.scales or ())
        new = self.step(scalars, grad, old._replace(param=leaf.param), block, noise)
        return PackedLeaf(new.param, *_words(new))


def packed_step(
    rule: Rule, dtype: DTypeLike, packing: Packing, *, group_size: int, dithers: bool
) -> PackedStep:
    """Returns the step of parameters of `dtype` with this packing."""
    codecs = packing.master(dtype), packing.codecs
    return PackedStep(LeafStep(rule, *codecs, group_size, dithers), packing)


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
    rounding interval.
    """
    correction, quantized = (
        compression.correction_dtype(param),
        compression.quantizes(param),
    )
    packing = Packing(moments, compression.format, quantized, correction)
    packed = packing.zeros(param, compression.group_size)
    is_struct = isinstance(param, jax.ShapeDtypeStruct)
    if correction is not None and compression.jitter and not is_struct:
        seed = _start_seed(name, compression.seed)
        packed = _place(jnp.asarray(param), packed, seed, packing=packing)
    return packed, correction


# Under jit, so that nothing but the state is written to memory.
@functools.partial(jax.jit, static_argnames="packing", donate_argnums=1)
def _place(param: Array, packed: Packed, seed: Array, *, packing: Packing) -> Packed:
    noise = Noise(element_index(param.shape), seed)
    correction = packing.master(param.dtype).place(param, noise)
    return packing.with_correction(packed, correction)


def placed_weight(name: str, param: PyTree) -> PyTree:
    """Returns f32 weights at pseudo-random places in the rounding intervals of parameters."""
    if isinstance(param, jax.ShapeDtypeStruct):
        return cast_leaf(param, F32)
    codec = master_codec(param.dtype, INT16, "mpx")
    return _placed(jnp.asarray(param), _start_seed(name, 0), codec=codec)


@functools.partial(jax.jit, static_argnames="codec")
def _placed(param: Array, seed: Array, *, codec: MasterCodec) -> Array:
    correction = codec.place(param, Noise(element_index(param.shape), seed))
    return codec.decode(param, correction, Block())


def _start_seed(name: str, seed: int) -> np.uint32:
    """Returns the seed of a parameter, which depends on its path and on nothing else."""
    return np.uint32((seed * 0xC2B2AE3D + zlib.crc32(name.encode())) & 0xFFFFFFFF)


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
