"""Comparison of trees, and faults that are planted into a computation, for tests."""
# jaxtyping's `PyTree` is unknown to pyright:
# pyright: reportUnknownVariableType=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownLambdaType=false

import functools
import zlib
from typing import Any, Literal, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Bool, Int32, PyTree, UInt32

from mpx._jax._arguments import as_count, check_bool, check_choice, check_value
from mpx._jax._sharding import sharded_as
from mpx._jax._tree import AxisName, dtype_of, is_floating, map_with_name, named_leaves

Kind = Literal["nan", "inf", "-inf", "huge", "flip"]
_KINDS: tuple[str, ...] = get_args(Kind)
_FLIP = _KINDS.index("flip")
_EVERY = -1


def assert_trees_equal(a: PyTree, b: PyTree) -> None:
    """Raises unless two pytrees agree in structure, dtypes, shapes and every bit.

    NaNs with the same bits are equal, 0 and -0 are not. Leaves that are no arrays are
    compared with `==`.

    Args:
        a: A pytree.
        b: Another.

    Raises:
        AssertionError: With the name of the first leaf that differs.

    Examples:
        >>> assert_trees_equal({"w": np.zeros(2)}, {"w": np.zeros(2)})
    """
    if jax.tree.structure(a) != jax.tree.structure(b):
        raise AssertionError(
            f"structures differ: {jax.tree.structure(a)} against {jax.tree.structure(b)}"
        )
    for (name, x), (_, y) in zip(named_leaves(a), named_leaves(b), strict=True):
        if x is not y and _bits(x) != _bits(y):
            raise AssertionError(f"`{name}` differs: {x!r} against {y!r}")


def _bits(leaf: Any) -> Any:
    """Returns what equal leaves have in common: a leaf that is no array itself."""
    dtype = dtype_of(leaf)
    if dtype is None or isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf if dtype is None else (dtype, leaf.shape)
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return dtype, array.shape, array.tobytes()


class Fault(eqx.Module):
    """One number that goes wrong: which, how, when, where, forward or backward.

    A fault is a pytree of integer scalars: pass it to a jitted step as an argument, and
    steps with other faults, or with a fault at another step, run the same program. Stacked
    with `jax.tree.map(lambda *x: jnp.stack(x), *faults)`, faults go through `lax.scan`.

    Examples:
        >>> tree = {"w": jnp.ones(3, jnp.float16)}
        >>> inject(tree, Fault(tree, "flip", leaf="w", index=2, step=5), 5)
        {'w': Array([ 1.,  1., inf], dtype=float16)}
    """

    kind: Int32[Array, "*batch"]  # its position in `Kind`
    leaf: UInt32[Array, "*batch"]  # a checksum of the name
    index: UInt32[Array, "*batch"]
    local: UInt32[Array, "*batch"]  # the index in the shard of the device
    step: Int32[Array, "*batch"]
    steps: Int32[Array, "*batch"]
    device: Int32[Array, "*batch"]  # -1 is every one
    backward: Bool[Array, "*batch"]

    def __init__(
        self,
        tree: PyTree,
        kind: Kind = "nan",
        *,
        leaf: str | None = None,
        index: int = 0,
        step: int = 0,
        steps: int = 1,
        device: int | None = None,
        backward: bool = False,
    ) -> None:
        """Checks that there is such a number.

        Args:
            tree: The tree that `inject` will be called with, or one of the same names and
                shapes: arrays or `ShapeDtypeStruct`s.
            kind: A NaN, an infinity, the largest finite number of the dtype, or a flipped
                bit: the highest of the exponent, or of an integer.
            leaf: The name of the leaf, such as `layers/0/weight`; `None` is the first
                one that can be hit.
            index: The position in the flattened leaf, or in the shard that `device` holds.
            step: The first step with the fault; a negative one never comes.
            steps: The number of steps with the fault.
            device: The position in the mesh of the device whose shard is hit; `None` hits
                the leaf wherever it is. See `inject` about copies of one leaf.
            backward: Whether to hit the cotangent of the leaf in place of its value.

        Raises:
            ValueError: If there is no such leaf, number or device.
        """
        check_choice(kind, "kind", _KINDS)
        check_bool(backward, "`backward`")
        name, found = _leaf(tree, kind, leaf, backward)
        device = _EVERY if device is None else as_count(device, "device", at_least=0)
        index, local = _places(name, found, as_count(index, "index", 0), device)
        self.kind, self.device = jnp.int32(_KINDS.index(kind)), jnp.int32(device)
        self.step = jnp.int32(as_count(step, "step"))
        self.steps = jnp.int32(as_count(steps, "steps", at_least=1))
        self.index, self.local = jnp.uint32(index), jnp.uint32(local)
        self.leaf, self.backward = _checksum(name), jnp.asarray(backward)


def inject(
    tree: PyTree, fault: Fault, step: Any, *, axis_name: AxisName | None = None
) -> PyTree:
    """Returns the tree, with one number wrong if it is the step of the fault.

    Call it inside the loss, on parameters, activations or the batch. At other steps the
    tree comes back bit for bit, and so do its gradients. A fault that goes backward leaves
    values alone and hits the cotangent that comes back to the tree.

    Under `jit` a leaf has one value, whichever devices hold it. To hit the copy of one
    device alone, as a broken device would, call it inside `shard_map` with `axis_name`.

    Args:
        tree: A pytree; the leaf with the name that the fault has is hit.
        fault: What goes wrong.
        step: The number of this step, an integer or an integer scalar.
        axis_name: The `shard_map` axis, or all of them, that count the devices.

    Examples:
        >>> params = {"w": jnp.ones(3)}
        >>> fault = Fault(params, "nan", leaf="w", index=1, step=5, backward=True)
        >>> @jax.jit
        ... def grads(params, fault, step):
        ...     return jax.grad(lambda p: inject(p, fault, step)["w"].sum())(params)
        >>> grads(params, fault, 4)["w"], grads(params, fault, 5)["w"]
        (Array([1., 1., 1.], dtype=float32), Array([ 1., nan,  1.], dtype=float32))
    """
    since = jnp.asarray(step, jnp.int32) - fault.step
    active = (fault.step >= 0) & (since >= 0) & (since < fault.steps)
    place = fault.index
    if axis_name is not None:
        place = jnp.where(fault.device == _EVERY, fault.index, fault.local)
        here = fault.device == lax.axis_index(axis_name)
        active &= here | (fault.device == _EVERY)

    def hit(name: str, leaf: Any) -> Any:
        if not _can_flip(leaf):
            return leaf
        on = active & (fault.leaf == _checksum(name))
        return _tap(jnp.asarray(leaf), fault, on, place)

    return map_with_name(hit, tree)


@jax.custom_vjp
def _tap(x: Array, fault: Fault, on: Array, place: Array) -> Array:
    return _planted(x, fault, on & ~fault.backward, place)


def _tap_backward(rest: Any, cotangent: Any) -> tuple[Any, ...]:
    fault, on, place = rest
    if dtype_of(cotangent) != jax.dtypes.float0:
        cotangent = _planted(cotangent, fault, on & fault.backward, place)
    return (cotangent, None, None, None)


_tap.defvjp(lambda x, *rest: (_tap(x, *rest), rest), _tap_backward)


@functools.partial(jax.jit, inline=True)  # one program, also outside of `jit`
def _planted(x: Array, fault: Fault, on: Array, place: Array) -> Array:
    """Replaces one number if `on`; everything is computed element by element."""
    word = np.dtype(f"u{x.dtype.itemsize}")
    flip = word.type(1 << 8 * word.itemsize - 1 - is_floating(x))
    new = lax.bitcast_convert_type(lax.bitcast_convert_type(x, word) ^ flip, x.dtype)
    if is_floating(x):
        largest = jnp.finfo(x.dtype).max
        values = [np.nan, np.inf, -np.inf, largest, 0]
        value = jnp.asarray(np.array(values).astype(x.dtype))[fault.kind]
        new = jnp.where(fault.kind == _FLIP, new, value)
    positions = lax.iota(jnp.uint32, x.size).reshape(x.shape)
    return jnp.where(on & (sharded_as(positions, x) == place), new, x)


def _can_flip(leaf: Any) -> bool:
    """Returns whether a leaf consists of integers or real numbers of whole bytes."""
    dtype = dtype_of(leaf)
    if not isinstance(dtype, np.dtype) or 0 in leaf.shape:
        return False
    return is_floating(leaf) or (dtype.kind in "iu" and dtype != jax.dtypes.float0)


def _leaf(tree: PyTree, kind: str, leaf: str | None, backward: bool) -> tuple[str, Any]:
    fits = _can_flip if kind == "flip" and not backward else is_floating
    found = {name: x for name, x in named_leaves(tree) if _can_flip(x) and fits(x)}
    if not found or (leaf is not None and leaf not in found):
        what = "" if leaf is None else f" `{leaf}`"
        raise ValueError(
            f"There is no leaf{what} that a fault of the kind {kind!r} can hit "
            f"{'back' if backward else 'for'}ward; the tree has {list(found)}."
        )
    name: Any = next(iter(found)) if leaf is None else leaf
    return name, found[name]


def _places(name: str, leaf: Any, index: int, device: int) -> tuple[int, int]:
    """Returns the positions of a number in its leaf, and in the shard of its device."""
    shape, sharding = leaf.shape, getattr(leaf, "sharding", None)
    ranges, held = [range(n) for n in shape], f"`{name}`"
    mesh = getattr(sharding, "mesh", None)
    if device != _EVERY and isinstance(mesh, Mesh):
        assert isinstance(sharding, NamedSharding)
        devices = mesh.devices.flatten()
        expected = f"less than {len(devices)}, the devices"
        check_value(device < len(devices), "device", expected, device)
        slices = sharding.devices_indices_map(shape)[devices[device]]
        ranges = [x[part] for x, part in zip(ranges, slices, strict=True)]
        held = "a shard"
    local = tuple(map(len, ranges))
    size = int(np.prod(local))
    check_value(index < size, "index", f"less than {size}, the size of {held}", index)
    inside = np.unravel_index(index, local)
    whole = tuple(part[i] for part, i in zip(ranges, inside, strict=True))
    return int(np.ravel_multi_index(whole, shape)) if shape else 0, index


def _checksum(name: str) -> Array:
    return jnp.uint32(zlib.crc32(name.encode()))
