"""How the state of one parameter is packed into arrays, and a step of what is packed."""

import dataclasses
import functools
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import PyTree

from mpx._jax._sharding import sharded_as, unstacked, whole_groups, zeros_alike
from mpx._jax._tree import dtype_of, shape_of
from mpx._optim._options import F32, PARAM_DTYPES, Compression, StateFormat
from mpx._optim._update_rules import Given, Moments, Rule, Scalars
from mpx._quant._codecs import (
    BitDelta,
    Block,
    Full,
    MasterCodec,
    MomentCodec,
    Quantized,
    RoundedMaster,
    SoftsignInt8,
    SqrtUint8,
    UlpFraction,
    bits_to_cut,
    from_bits,
    is_finite,
    place,
    random_bits,
)

INT8, INT16 = np.dtype(np.int8), np.dtype(np.int16)
_UNSIGNED = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16)}
_LARGEST_MOMENT = np.float32(2.0**125)  # the largest that every codec can store


class Packed(NamedTuple):
    """The state of one parameter, in at most two arrays.

    `codes` has the numbers per element: the code of each moment, or the moment itself if
    it is not quantised, then the correction. An array `(planes, *shape)`; if all of them
    are f32, a tuple with an array of the parameter's shape for each. `scales` has the
    numbers per group, `(planes, *shape[:-1], groups)`; `None` without quantised moments.
    """

    codes: PyTree
    scales: PyTree


class PackedLeaf(NamedTuple):
    """A parameter and its state, as kernels get them: a `Packed`, or `None` if frozen."""

    param: PyTree
    packed: PyTree


class Unpacked(NamedTuple):
    """The moments of one parameter, `Quantized` or in f32, and its correction, if any."""

    moments: tuple[PyTree, ...]
    correction: PyTree

    @property
    def words(self) -> Packed:
        """The words of codes and of scales, a tuple with one for each plane."""
        quantized = [x for x in self.moments if isinstance(x, Quantized)]
        codes = [x.codes for x in quantized] if quantized else [*self.moments]
        if self.correction is not None:
            codes.append(self.correction)
        scales = [x.scale for x in quantized]
        return Packed(split(codes), split(scales) if scales else None)

    def pack(self) -> Packed:
        """Returns the state in at most two arrays."""
        codes, scales = self.words
        is_f32 = all(word.dtype == F32 for word in codes)
        return Packed(
            codes if is_f32 else jnp.stack(codes),
            None if scales is None else jnp.stack(scales),
        )


def moment_codec(name: str, quantized: bool, format: StateFormat) -> MomentCodec:
    if not quantized:
        return Full()
    codec = SoftsignInt8 if name == "mu" else SqrtUint8
    return codec(np.dtype(jnp.float16)) if format == "flashoptim" else codec()


@dataclasses.dataclass(frozen=True)
class Packing:
    """How the state of one parameter is stored; `correction` is a dtype, or `None`."""

    moments: tuple[str, ...]
    format: StateFormat
    quantized: bool
    correction: np.dtype | None

    @classmethod
    def read(
        cls, packed: PyTree, moments: tuple[str, ...], format: StateFormat
    ) -> "Packing":
        """Reads the packing off a state; whether the state fits it is checked elsewhere.

        `moments` are those of the optimizer; a parameter may have only the first of them.
        """
        codes, scales = packed if isinstance(packed, Packed) else (None, None)
        size, planes = getattr(dtype_of(codes), "itemsize", 0), _count(codes)
        count = (planes - 1) * size // F32.itemsize if size else planes
        if scales is not None:
            count = min(_count(scales), len(moments))
            size = planes - count
        correction = {1: INT8, 2: INT16}.get(size)
        return cls(moments[:count], format, scales is not None, correction)

    @property
    def codecs(self) -> list[MomentCodec]:
        return [moment_codec(x, self.quantized, self.format) for x in self.moments]

    def master(self, dtype: DTypeLike) -> MasterCodec:
        if self.correction is None:
            return RoundedMaster()
        is_bf16 = np.dtype(dtype) == np.dtype(jnp.bfloat16)
        codec = BitDelta if is_bf16 and self.format == "mpx" else UlpFraction
        return codec(self.correction)

    @property
    def dtypes(self) -> tuple[tuple[np.dtype, ...], tuple[np.dtype, ...]]:
        """Those of the numbers per element, moments then correction, and per group."""
        codes = tuple(codec.code_dtype for codec in self.codecs)
        scales = tuple(c.scale_dtype for c in self.codecs if c.scale_dtype is not None)
        return codes if self.correction is None else (*codes, self.correction), scales

    def zeros(self, param: PyTree, group_size: int) -> Packed:
        """Returns a state of zeros, sharded like the parameter."""
        elements, scales = self.dtypes
        if all(dtype == F32 for dtype in elements):
            # Arrays of their own: plain JAX would need a second pass to write planes.
            return Packed(tuple(zeros_alike(param, F32) for _ in elements), None)

        def planes(dtypes: tuple[np.dtype, ...], group: int | None) -> PyTree:
            word, count = words_of(dtypes)
            return zeros_alike(param, word, group=group, planes=count)

        codes = planes(elements, None)
        return Packed(codes, planes(scales, group_size) if scales else None)

    def unpack(self, words: Packed) -> Unpacked:
        """Returns moments and correction, given a tuple with the words of each plane."""
        elements, scales = self.dtypes
        numbers = join(words.codes, elements)
        moments = numbers[: len(self.moments)]
        if words.scales:
            moments = tuple(map(Quantized, moments, join(words.scales, scales)))
        return Unpacked(moments, None if self.correction is None else numbers[-1])

    def view(self, packed: Packed) -> Unpacked:
        """Returns moments and correction of a state, of arrays or `ShapeDtypeStruct`s."""
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(packed)):
            return _sharded_like(packed, jax.eval_shape(self.view, packed))
        codes, scales = _planes(packed.codes), _planes(packed.scales)
        given = [len(codes), len(scales)]
        expected = [words_of(dtypes)[1] for dtypes in self.dtypes]
        if given != expected:
            raise ValueError(
                f"Expected {expected} planes of codes and of scales along the first axis, "
                f"but there are {given}. In a function that `jax.vmap` maps over states, "
                "read them inside."
            )
        return self.unpack(Packed(codes, scales))


def _sharded_like(packed: Packed, shapes: Unpacked) -> Unpacked:
    """Returns the shapes of moments and correction, sharded like what they are read from."""

    def place(x: PyTree, whole: PyTree = packed.codes) -> PyTree:
        if isinstance(x, Quantized):
            return Quantized(place(x.codes), place(x.scale, packed.scales))
        is_own = isinstance(whole, tuple)  # an array for each, else planes of one
        sharding = whole[0].sharding if is_own else unstacked(whole.sharding)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(place, shapes, is_leaf=lambda x: isinstance(x, Quantized))


def _count(x: PyTree) -> int:
    """Returns the number of planes of an array, or of arrays in a tuple."""
    return len(x) if isinstance(x, tuple) else (shape_of(x) or (0,))[0]


def _planes(x: PyTree) -> tuple[PyTree, ...]:
    """Returns the planes of an array; a tuple consists of them already."""
    if x is None or isinstance(x, tuple):
        return x or ()
    x = jnp.asarray(x)
    return tuple(lax.index_in_dim(x, i, keepdims=False) for i in range(len(x)))


@dataclasses.dataclass(frozen=True)
class LeafStep:
    """The step of a leaf: unpack, decode, update in f32, encode, pack."""

    rule: Rule
    packing: Packing
    group_size: int
    dithers: bool = False

    def __call__(
        self, scalars: Scalars, grad: PyTree, leaf: PackedLeaf, block: Block
    ) -> PackedLeaf:
        """Steps a block, in which each array is a tuple of planes.

        For Muon `grad` is a pair: the gradient, and the direction of the step.
        """
        grad, *towards = grad if isinstance(grad, tuple) else (grad,)
        grad_scale, for_moments, for_masters, *coefficients = scalars
        if not self.dithers:
            for_moments = for_masters = None
        dtype, codecs = leaf.param.dtype, self.packing.codecs
        master = self.packing.master(dtype)
        old = self.packing.unpack(leaf.packed)
        weight = master.decode(leaf.param, old.correction, block)
        pairs = zip(codecs, old.moments, strict=True)
        moments = tuple(codec.decode(stored, block) for codec, stored in pairs)
        grad = grad if grad.dtype.itemsize > 4 else grad.astype(weight.dtype)
        scaled = grad.astype(weight.dtype) * grad_scale
        given = tuple(coefficients), scaled, weight, block
        weight, moments = self._update(given, moments, dtype, *towards)
        # For `finite` to skip; it must be seen if nobody looks.
        weight = jnp.where(is_finite(grad), weight, np.float32(np.nan))
        param, correction = master.encode(weight, dtype, block, for_masters)
        stored = tuple(
            codec.encode(moment, block, for_moments)
            for codec, moment in zip(codecs, moments, strict=True)
        )
        return PackedLeaf(param, Unpacked(stored, correction).words)

    def _update(
        self,
        given: Given,
        moments: Moments,
        dtype: np.dtype,
        towards: Array | None = None,
    ) -> tuple[Array, Moments]:
        """Returns weights and moments after a step, the old ones where it would overflow.

        An infinite second moment would stay, and its weight would never move again. To skip
        the whole step, a kernel would have to read all gradients twice.
        """
        coefficients, _, weight, block = given
        new = self.rule.average(given, moments)
        if towards is not None:
            given = coefficients, towards.astype(weight.dtype), weight, block
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
    """Quantises a moment, to nearest, in groups that divide its last axis.

    Zero is stored for inf and nan, which would spread to their group.
    """
    shape, moment = moment.shape, jnp.where(is_finite(moment), moment, 0.0)
    grouped = whole_groups(moment, group_size).reshape(*shape[:-1], -1, group_size)
    codec = moment_codec(name, quantized=True, format=format)
    new = codec.encode(grouped, Block())
    return Quantized(new[0].reshape(shape), new[1])


def first_state(
    name: str, param: PyTree, moments: tuple[str, ...], compression: Compression
) -> Packed:
    """Returns the state of a parameter before the first step."""
    correction = compression.correction_dtype(param)
    quantized = compression.quantizes(param)
    packing = Packing(moments, compression.format, quantized, correction)
    is_struct = isinstance(param, jax.ShapeDtypeStruct)
    if correction is None or not compression.jitter or is_struct:
        return packing.zeros(param, compression.group_size)
    seed = np.uint32(zlib.crc32(name.encode()))
    return _placed(jnp.asarray(param), seed, packing, compression.group_size)


# Under jit, so that nothing but the state is written to memory, and once.
@functools.partial(jax.jit, static_argnums=(2, 3))
def _placed(param: Array, seed: Array, packing: Packing, group_size: int) -> Packed:
    codec: PyTree = packing.master(param.dtype)
    random = sharded_as(random_bits(param.shape, seed), param)
    packed = packing.zeros(param, group_size)
    return _with_correction(packed, packing, place(codec, param, random))


def _with_correction(packed: Packed, packing: Packing, correction: PyTree) -> Packed:
    old = packing.view(packed)
    return old._replace(correction=sharded_as(correction, old.correction)).pack()


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
    return PackedLeaf(param, _with_correction(packed, packing, correction))


# --- planes ---------------------------------------------------------------------------
# Several arrays of one shape in a single array, whose first axis counts words of equal
# size. The host pays for every array in every call of a jitted step, so a state in fewer
# arrays is dispatched faster. Planes keep each kind of number contiguous, and the other
# axes are sharded like those of a parameter.


def words_of(dtypes: Sequence[np.dtype]) -> tuple[np.dtype, int]:
    """Returns the dtype of the words, common or unsigned of the least width; their number."""
    sizes = [dtype.itemsize for dtype in dtypes]
    word = dtypes[0] if len(set(dtypes)) == 1 else _UNSIGNED[min(sizes, default=1)]
    return word, sum(sizes) // word.itemsize


def split(arrays: Sequence[Array]) -> tuple[Array, ...]:
    """Returns the words of arrays, one after the other, high words first."""
    word, _ = words_of([np.dtype(x.dtype) for x in arrays])
    width, words = 8 * word.itemsize, []
    for x in arrays:
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        if x.dtype.itemsize == word.itemsize:
            cast = lax.bitcast_convert_type if is_float else lax.convert_element_type
            words.append(x if x.dtype == word else cast(x, word))
            continue
        pattern = bits_to_cut(x) if is_float else x.astype(jnp.int32)
        for shift in reversed(range(0, 8 * x.dtype.itemsize, width)):
            words.append(((pattern >> shift) & (2**width - 1)).astype(word))
    return tuple(words)


def join(words: Sequence[Array], dtypes: Sequence[np.dtype]) -> tuple[Array, ...]:
    """Returns the arrays of these dtypes whose words `split` gave."""
    rest, size = iter(words), words_of(dtypes)[0].itemsize
    return tuple(
        _joined([next(rest) for _ in range(dtype.itemsize // size)], dtype)
        for dtype in dtypes
    )


def _joined(words: Sequence[Array], dtype: np.dtype) -> Array:
    first, *others = words
    is_float = jnp.issubdtype(dtype, jnp.floating)
    if not others:
        cast = lax.bitcast_convert_type if is_float else lax.convert_element_type
        return first if first.dtype == dtype else cast(first, dtype)
    total = first.astype(jnp.uint32)
    for word in others:
        total = (total << np.uint32(8 * word.dtype.itemsize)) | word.astype(jnp.uint32)
    pattern = lax.bitcast_convert_type(total, jnp.int32)
    return from_bits(pattern) if is_float else pattern.astype(dtype)
