"""The state of a compressed optimizer, and the f32 weights that it holds."""

import dataclasses
import sys
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PyTree

from mpx._nnx import without_variables
from mpx._optim._layout import check_layout, is_missing
from mpx._optim._leaf import Leaf
from mpx._optim._options import StateFormat, master_codec
from mpx._quant import PlainBlock, Quantized
from mpx._tree import dtype_of, flatten_with_names, path_name, shape_of

F32 = np.dtype(jnp.float32)
PARAM_DTYPES = (F32, np.dtype(jnp.bfloat16), np.dtype(jnp.float16))


APPLIED_BY_EQUINOX = (
    "Did `eqx.apply_updates` make it f32? Updates are f32: apply them with "
    "`optax.apply_updates` or `mpx.optimizer_update`, which keep dtypes, or use `step`. "
)


class FlashState(eqx.Module):
    """The state of a compressed optimizer: a pytree that any checkpointer can save.

    `mu`, `nu` and `correction` have the structure of the parameters. Their arrays have
    the shape of the parameter, scales that of its groups, `shape[:-1] + (groups,)`: each
    can be sharded like the parameter. Of shapes, all are shapes.

    Attributes:
        count: The number of steps taken, int32; skipped ones do not count.
        mu: First moments: `Quantized` (int8 codes) or f32, `None` for frozen leaves.
        nu: Second moments: `Quantized` (uint8 codes) or f32; `None` if the rule has none.
        correction: int8 or int16, what the 16-bit parameters lack; `None` where nothing.
        layout: A zero under a name such as `adam-mpx-12x24-25x32-1f0c93aa`, which tells
            what the arrays are: of which kind of rule, in which format, and what
            parameters and corrections have which dtypes.
        format: How scales and corrections are to be read.
    """

    # What `optimizer_update` asks of a state.
    mpx_is_compressed: ClassVar[bool] = True
    mpx_holds_masters: ClassVar[bool] = True

    count: Int[Any, ""]
    mu: PyTree
    nu: PyTree
    correction: PyTree
    layout: PyTree
    format: StateFormat = eqx.field(static=True)


def register_with_flax() -> None:
    """Tells `flax.serialization`, if it is in use, how to save the state."""
    serialization = sys.modules.get("flax.serialization")
    if serialization is None:
        return
    names = ("count", "mu", "nu", "correction", "layout")

    def save(state: FlashState) -> dict[str, Any]:
        to_dict = serialization.to_state_dict
        return {name: to_dict(getattr(state, name)) for name in names}

    def restore(state: FlashState, saved: dict[str, Any]) -> FlashState:
        from_dict = serialization.from_state_dict
        fields = {n: from_dict(getattr(state, n), saved[n], name=n) for n in names}
        fields["count"] = jnp.asarray(fields["count"])
        return dataclasses.replace(state, **fields)

    serialization.register_serialization_state(FlashState, save, restore, override=True)


class Flat(NamedTuple):
    """A tree of parameters, flattened; `None` counts as a leaf.

    Attributes:
        names: The path of each leaf.
        leaves: The leaves.
        treedef: The structure of the parameters.
        bare: That structure without NNX variables, which is that of the state. One
            variable would otherwise hold both codes and scales, which NNX tears apart.
    """

    names: list[str]
    leaves: list[Any]
    treedef: Any
    bare: Any

    def like(self, tree: PyTree, what: str) -> list[Any]:
        """Returns what another tree holds in the place of each parameter.

        Raises:
            ValueError: If the tree does not have the structure of the parameters.
        """
        if tree is None:
            return [None] * len(self.leaves)
        try:
            return self.bare.flatten_up_to(without_variables(tree))
        except ValueError as error:
            flat, treedef = jax.tree_util.tree_flatten_with_path(
                without_variables(tree),
                is_leaf=lambda x: x is None or isinstance(x, Quantized),
            )
            theirs = [path_name(path) for path, _ in flat]
            missing = [name for name in self.names if name not in theirs][:3]
            extra = [name for name in theirs if name not in self.names][:3]
            difference = f"{missing} are missing and {extra} are not expected"
            if not missing and not extra:
                difference = describe_difference(treedef, self.bare, self.names)
            raise ValueError(
                f"{what} must have the structure of the parameters, but {difference}."
            ) from error


def flatten(params: PyTree) -> Flat:
    """Flattens parameters, with the path of each."""
    treedef = jax.tree.structure(params, is_leaf=_is_none)
    named, bare = flatten_with_names(without_variables(params), is_leaf=_is_none)
    return Flat([name for name, _ in named], [x for _, x in named], treedef, bare)


def _is_none(leaf: Any) -> bool:
    return leaf is None


def describe_difference(theirs: Any, params: Any, names: list[str]) -> str:
    """Says where a tree and the parameters part, without any array: those are long.

    Args:
        theirs: The structure of the tree. Its leaves may stand for parts of the other.
        params: The structure of the parameters.
        names: The path of each parameter.
    """
    found = _first_difference(theirs, params, 0)
    if found is None:
        return "they differ in what is static, such as a function or a size"
    index, came, expected = found
    where = f" around `{names[index]}`" if index < len(names) else ""
    return f"there is {came} where the parameters have {expected}{where}"


def _first_difference(theirs: Any, params: Any, index: int) -> Any:
    """Returns the number of a parameter and what two nodes around it are."""
    nodes = theirs.node_data(), params.node_data()
    if None in nodes:
        return None
    parts = theirs.children(), params.children()
    came, expected = (_node_name(*node) for node in nodes)
    if came != expected or len(parts[0]) != len(parts[1]):
        return index, came, expected
    for one, two in zip(*parts, strict=True):
        if found := _first_difference(one, two, index):
            return found
        index += two.num_leaves
    return None


def _node_name(type_: type, data: Any) -> str:
    name = type_.__name__
    return f"{name} of {str(data)[:80]}" if type_ is dict else name


def leaves_of(flat: Flat, state: FlashState, moments: tuple[str, ...]) -> list[Leaf]:
    """Returns each parameter with its state."""
    what = "The optimizer state"
    columns = [flat.like(getattr(state, name), what) for name in moments]
    corrections = flat.like(state.correction, what)
    rows = zip(*columns, strict=True) if columns else [()] * len(flat.leaves)
    return [
        Leaf(param, correction, tuple(row))
        for param, correction, row in zip(flat.leaves, corrections, rows, strict=True)
    ]


def find_state(tree: PyTree) -> FlashState:
    """Returns the state of a compressed optimizer, also from inside of an optax state.

    Raises:
        ValueError: If there is none, or more than one.
    """
    is_state = lambda x: isinstance(x, FlashState)  # noqa: E731
    found = [x for x in jax.tree.leaves(tree, is_leaf=is_state) if is_state(x)]
    if len(found) != 1:
        raise ValueError(
            "Expected the state of one compressed optimizer, by itself or inside of an "
            f"optax state, but {type(tree).__name__} holds {len(found)} of them."
        )
    return found[0]


def master_params(params: PyTree, state: PyTree) -> PyTree:
    """Returns the f32 weights behind 16-bit parameters.

    f32 parameters, integers, functions and other leaves come back as they are, and so
    do 16-bit parameters without master weights and frozen ones.

    Args:
        params: The parameters, or a whole model.
        state: The optimizer's state, or an optax state that holds it.

    Raises:
        ValueError: If `state` does not hold one state that fits the parameters.

    Examples:
        >>> from mpx.optim import flash_adamw
        >>> params = {"w": jnp.ones((8,), jnp.bfloat16)}
        >>> state = flash_adamw(1e-3).init(params)
        >>> master_params(params, state)["w"].dtype
        dtype('float32')
    """
    flat, state = flatten(params), find_state(state)
    corrections = flat.like(state.correction, "The optimizer state")
    check_layout(state.layout, zip(flat.leaves, corrections, strict=True))

    def decode(name: str, param: Any, correction: Any) -> Any:
        if is_missing(correction):
            return param
        check_correction(name, param, correction)
        codec = master_codec(param.dtype, correction.dtype, state.format)
        return codec.decode(jnp.asarray(param), jnp.asarray(correction), PlainBlock())

    rows = zip(flat.names, flat.leaves, corrections, strict=True)
    return flat.treedef.unflatten([decode(*row) for row in rows])


def check_correction(name: str, param: Any, correction: Any) -> None:
    """Raises if a correction does not fit its parameter."""
    if dtype_of(param) not in PARAM_DTYPES[1:] or shape_of(param) != correction.shape:
        raise ValueError(
            f"The state has a correction of shape {correction.shape} for `{name}`, which "
            f"belongs to a bf16 or f16 parameter of that shape, but the parameter is "
            f"{dtype_of(param)} of shape {shape_of(param)}. "
            f"{APPLIED_BY_EQUINOX if dtype_of(param) == F32 else ''}Make the state with "
            "`init(params)`."
        )


def from_master(master: PyTree, params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
    """Puts f32 weights into parameters and state, for example to start from f32 weights.

    Leaves that are no parameters, such as integers and functions, are those of `master`,
    in the dtype that they have in `params`, or those of `params` where `master` has
    `None`.

    Args:
        master: The weights: a tree like `params`.
        params: Parameters whose dtypes are kept.
        state: The state made by `init(params)`, or an optax state that holds it; its
            moments and count are kept.

    Returns:
        Parameters and state that hold `master`, as exactly as their format can.

    Raises:
        TypeError: If a weight is not a real array.
        ValueError: If the trees or shapes differ, or `state` does not hold one state that
            fits the parameters.

    Examples:
        >>> from mpx.optim import flash_adamw
        >>> weights = {"w": jnp.full((8,), 0.1)}
        >>> params = {"w": weights["w"].astype(jnp.bfloat16)}
        >>> state = flash_adamw(1e-3).init(params)
        >>> params, state = from_master(weights, params, state)
        >>> abs(float(master_params(params, state)["w"][0]) - 0.1) < 1e-8
        True
    """
    flat, found = flatten(params), find_state(state)
    weights = flat.like(master, "`master`")
    corrections = flat.like(found.correction, "The optimizer state")
    check_layout(found.layout, zip(flat.leaves, corrections, strict=True))
    new_params, new_corrections = [], []
    for name, weight, param, correction in zip(
        flat.names, weights, flat.leaves, corrections, strict=True
    ):
        weight = _as_weight(name, weight, param)
        if dtype_of(param) in PARAM_DTYPES:
            dtype = None
            if not is_missing(correction):
                check_correction(name, param, correction)
                dtype = correction.dtype
            codec = master_codec(param.dtype, dtype, found.format)
            encoded = codec.encode(weight.astype(F32), param.dtype, PlainBlock())
            weight, correction = encoded if dtype else (encoded[0], correction)
        new_params.append(weight)
        new_corrections.append(correction)
    new = dataclasses.replace(found, correction=flat.bare.unflatten(new_corrections))
    new_state = jax.tree.map(
        lambda x: new if x is found else x, state, is_leaf=lambda x: x is found
    )
    return flat.treedef.unflatten(new_params), new_state


def _as_weight(name: str, weight: Any, param: Any) -> Any:
    """Returns what is put in the place of a leaf; raises if it does not fit."""
    dtype = dtype_of(param)
    if dtype is None:
        return param if weight is None else weight
    if dtype not in PARAM_DTYPES:
        if weight is None:
            return param
        if dtype_of(weight) == dtype:
            return weight
    if isinstance(weight, int | float):
        weight = np.asarray(weight)
    came = dtype_of(weight)
    if came is None or jnp.issubdtype(came, jnp.complexfloating):
        raise TypeError(
            f"The weight of `{name}` must be a real array like the parameter, which is "
            f"{dtype}, but {came or type(weight).__name__} was given."
        )
    if shape_of(weight) != shape_of(param):
        raise ValueError(
            f"The weight of `{name}` has shape {shape_of(weight)}, but the "
            f"parameter has shape {shape_of(param)}."
        )
    return jnp.asarray(weight).astype(dtype if dtype not in PARAM_DTYPES else F32)
