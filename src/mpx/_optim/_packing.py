"""How the state of one parameter is packed into arrays, and a step of what is packed."""

import dataclasses
import functools
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import PyTree

from mpx._jax._sharding import sharded_as, unstacked, zeros_alike
from mpx._jax._tree import dtype_of
from mpx._kernels._dispatch import FlatBlock
from mpx._optim._options import F32, PARAM_DTYPES, Compression, StateFormat
from mpx._optim._update_rules import Given, Moments, Rule, Scalars
from mpx._quant._codecs import (
    BitDelta,
    Block,
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

_UNSIGNED = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16)}
_LARGEST_MOMENT = np.float32(2.0**125)  # the largest that every codec can store
CORRECTION = "correction"
Numbers = Mapping[str, PyTree]
"""By name: moments, `Quantized` or in f32, and the correction of a 16-bit parameter."""


def moment_codec(name: str, format: StateFormat) -> MomentCodec:
    codec = SoftsignInt8 if name == "mu" else SqrtUint8
    return codec(np.dtype(jnp.float16)) if format == "flashoptim" else codec()


class Packing(NamedTuple):
    """How the state of one parameter is stored.

    Attributes:
        moments: The names of its moments.
        format: The format of scales and corrections.
        group_size: How many elements share a scale; 0 for moments in f32.
        correction: The dtype of the correction, or `None`.
        param: The dtype of the parameter, if it has a correction.
    """

    moments: tuple[str, ...]
    format: StateFormat
    group_size: int
    correction: np.dtype | None
    param: np.dtype | None

    @property
    def codecs(self) -> dict[str, MomentCodec]:
        """The codecs of the moments, if they are quantised."""
        names = self.moments if self.group_size else ()
        return {name: moment_codec(name, self.format) for name in names}

    @property
    def master(self) -> MasterCodec:
        if self.correction is None:
            return RoundedMaster()
        is_bf16 = self.param == np.dtype(jnp.bfloat16)
        codec = BitDelta if is_bf16 and self.format == "mpx" else UlpFraction
        return codec(self.correction)

    @property
    def dtypes(self) -> tuple[list[np.dtype], list[np.dtype]]:
        """Those of the numbers per element, moments then correction, and per group."""
        codecs = self.codecs.values()
        scales = [x.scale_dtype for x in codecs]
        codes = [x.code_dtype for x in codecs] or [F32] * len(self.moments)
        return codes if self.correction is None else [*codes, self.correction], scales

    def zeros(self, param: PyTree) -> "Packed":
        """Returns a state of zeros, sharded like the parameter."""
        elements, scales = self.dtypes
        if all(dtype == F32 for dtype in elements):
            # Arrays of their own: plain JAX would need a second pass to write planes.
            return Packed(tuple(zeros_alike(param, F32) for _ in elements), None, self)

        def planes(dtypes: Sequence[np.dtype], group: int | None) -> PyTree:
            word, count = words_of(dtypes)
            return zeros_alike(param, word, group=group, planes=count)

        codes = planes(elements, None)
        return Packed(codes, planes(scales, self.group_size) if scales else None, self)

    def words(self, numbers: Numbers) -> "Packed":
        """Returns the words of codes and of scales, a tuple with one for each plane."""
        stored = [numbers[x] for x in (*self.moments, CORRECTION) if x in numbers]
        codes = [x.codes if isinstance(x, Quantized) else x for x in stored]
        scales = [x.scale for x in stored if isinstance(x, Quantized)]
        return Packed(split(codes), split(scales) if scales else None, self)

    def pack(self, numbers: Numbers) -> "Packed":
        """Returns the state in at most two arrays."""
        words = self.words(numbers)
        codes, scales = words.codes, words.scales
        is_f32 = all(word.dtype == F32 for word in codes)
        codes = codes if is_f32 else jnp.stack(codes)
        return Packed(codes, None if scales is None else jnp.stack(scales), self)


# A `NamedTuple` could not hold the packing, and that of Equinox is slow to flatten.
@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Packed:
    """The state of one parameter, in at most two arrays.

    Attributes:
        codes: The numbers per element: each moment or its code, then the correction. An
            array `(planes, *shape)`; if all are f32, a tuple of arrays like the parameter.
        scales: The numbers per group, `(planes, *shape[:-1], groups)`, if there are groups.
        packing: What they mean.
    """

    codes: PyTree
    scales: PyTree
    packing: Packing = dataclasses.field(repr=False, metadata={"static": True})

    def numbers(self) -> dict[str, PyTree]:
        """Returns moments and correction, of arrays, their planes or `ShapeDtypeStruct`s."""
        elements, scales = dtypes = self.packing.dtypes
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(self)):
            like = self.codes
            if not isinstance(like, tuple):
                sharding = unstacked(like.sharding)
                like = (jax.ShapeDtypeStruct(like.shape[1:], F32, sharding=sharding),)
            alike = functools.partial(zeros_alike, like[0])
            found = [alike(dtype) for dtype in elements]
            scales = [alike(x, group=self.packing.group_size) for x in scales]
        else:
            planes = _planes(self.codes), _planes(self.scales)
            given, expected = list(map(len, planes)), [words_of(x)[1] for x in dtypes]
            if given != expected:
                raise ValueError(
                    f"Expected {expected} planes of codes and of scales along the first "
                    f"axis, but there are {given}. In a function that `jax.vmap` maps over "
                    "states, read them inside."
                )
            found, scales = map(join, planes, dtypes)
        found = [*map(Quantized, found, scales), *found[len(scales) :]]
        return dict(zip((*self.packing.moments, CORRECTION), found, strict=False))


class PackedLeaf(NamedTuple):
    """A parameter and its state, as kernels get them: a `Packed`, or `None` if frozen."""

    param: PyTree
    packed: PyTree

    @property
    def has_correction(self) -> bool:
        packed = self.packed
        return is_packed(packed) and packed.packing.correction is not None

    def master(self) -> PyTree:
        """Returns the f32 weight behind a parameter with a correction, else the parameter."""
        if not self.has_correction:
            return self.param
        codec, numbers = self.packed.packing.master, self.packed.numbers()
        return codec.decode(jnp.asarray(self.param), numbers[CORRECTION], Block())

    def with_master(self, weight: PyTree) -> "PackedLeaf":
        """Returns a leaf with another weight; the parameter keeps its dtype."""
        if isinstance(weight, jax.ShapeDtypeStruct):
            return self
        if self.has_correction:
            return _put(weight, self.packed)
        is_param = dtype_of(self.param) in PARAM_DTYPES
        weight = weight.astype(self.param.dtype) if is_param else weight
        return self._replace(param=weight)


def is_packed(node: object) -> bool:
    return isinstance(node, Packed)


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
    dithers: bool = False

    @property
    def group_size(self) -> int:
        return self.packing.group_size

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
        codecs, master = self.packing.codecs, self.packing.master
        dtype, old = leaf.param.dtype, leaf.packed.numbers()
        weight = master.decode(leaf.param, old.get(CORRECTION), block)
        moments = tuple(
            codecs[x].decode(old[x], block) if codecs else old[x]
            for x in self.packing.moments
        )
        grad = grad if grad.dtype.itemsize > 4 else grad.astype(weight.dtype)
        scaled = grad.astype(weight.dtype) * grad_scale
        given = tuple(coefficients), scaled, weight, block
        weight, moments = self._update(given, moments, dtype, *towards)
        # For `finite` to skip; it must be seen if nobody looks.
        weight = jnp.where(is_finite(grad), weight, np.float32(np.nan))
        param, correction = master.encode(weight, dtype, block, for_masters)
        new: dict[str, PyTree] = dict(zip(self.packing.moments, moments, strict=True))
        for name, codec in codecs.items():
            new[name] = codec.encode(new[name], block, for_moments)
        if correction is not None:
            new[CORRECTION] = correction
        return PackedLeaf(param, self.packing.words(new))

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
    block = FlatBlock(moment.codes.shape[-1] // max(moment.scale.shape[-1], 1))
    return moment_codec(name, format).decode(moment, block)


def encode_moment(
    name: str, moment: Array, format: StateFormat, group_size: int
) -> Quantized:
    """Quantises a moment, to nearest, in groups that divide its last axis.

    Zero is stored for inf and nan, which would spread to their group.
    """
    moment = jnp.where(is_finite(moment), moment, 0.0)
    return moment_codec(name, format).encode(moment, FlatBlock(group_size))


def first_state(
    name: str, param: PyTree, moments: tuple[str, ...], compression: Compression
) -> Packed:
    """Returns the state of a parameter before the first step."""
    correction = compression.correction_dtype(param)
    quantizes = bool(moments) and compression.quantizes(param)
    dtype = None if correction is None else np.dtype(param.dtype)
    size = compression.group_size * quantizes
    packing = Packing(moments, compression.format, size, correction, dtype)
    is_struct = isinstance(param, jax.ShapeDtypeStruct)
    if correction is None or not compression.jitter or is_struct:
        return packing.zeros(param)
    return _placed(jnp.asarray(param), np.uint32(zlib.crc32(name.encode())), packing)


# Under jit, so that nothing but the state is written to memory, and once.
@functools.partial(jax.jit, static_argnums=2)
def _placed(param: Array, seed: Array, packing: Packing) -> Packed:
    codec: PyTree = packing.master
    random = sharded_as(random_bits(param.shape, seed), param)
    return _with_correction(packing.zeros(param), place(codec, param, random))


def _with_correction(packed: Packed, correction: PyTree) -> Packed:
    old = packed.numbers()
    new = {CORRECTION: sharded_as(correction, old[CORRECTION])}
    return packed.packing.pack(old | new)


@jax.jit
def _put(weight: Array, packed: Packed) -> PackedLeaf:
    packing: PyTree = packed.packing  # which has a correction, so the dtype is known
    weight = weight.astype(F32)
    param, correction = packing.master.encode(weight, packing.param, Block())
    return PackedLeaf(param, _with_correction(packed, correction))


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
        if x.dtype.itemsize == word.itemsize:
            words.append(_as(word, x))
            continue
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        pattern = bits_to_cut(x) if is_float else x.astype(jnp.int32)
        for shift in reversed(range(0, 8 * x.dtype.itemsize, width)):
            words.append(((pattern >> shift) & (2**width - 1)).astype(word))
    return tuple(words)


def join(words: Sequence[Array], dtypes: Sequence[np.dtype]) -> list[Array]:
    """Returns the arrays of these dtypes whose words `split` gave."""
    rest, size, found = iter(words), words_of(dtypes)[0].itemsize, []
    for dtype in dtypes:
        first, *others = (next(rest) for _ in range(dtype.itemsize // size))
        if not others:
            found.append(_as(dtype, first))
            continue
        total = first.astype(jnp.uint32)
        for word in others:
            total = (total << np.uint32(8 * size)) | word.astype(jnp.uint32)
        pattern = lax.bitcast_convert_type(total, jnp.int32)
        is_float = jnp.issubdtype(dtype, jnp.floating)
        found.append(from_bits(pattern) if is_float else pattern.astype(dtype))
    return found


def _as(dtype: np.dtype, x: Array) -> Array:
    """Returns numbers of another dtype of the same size: of floats, the bits."""
    if x.dtype == dtype:
        return x
    is_float = any(jnp.issubdtype(t, jnp.floating) for t in (x.dtype, dtype))
    cast = lax.bitcast_convert_type if is_float else lax.convert_element_type
    return cast(x, dtype)
