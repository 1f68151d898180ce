"""Steps of flashoptim-jax's optimizers: its options and state, mpx's steps."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr
from jaxtyping import PyTree

from mpx._optim import Compression, FlashOptimizer, FlashState
from mpx._optim._params import check_grad
from mpx._quant import Quantized
from mpx._sharding import zeros_alike
from mpx._tree import dtype_of, path_name
from mpx.compat._flashoptim_codecs import (
    MasterBits,
    QuantizedArray,
    View,
    correction_dtype,
    has_correction,
    init_correction,
    is_quantized,
    is_state,
    no_state,
)

Path = tuple[Any, ...]
_MOMENTS = ("mu", "nu")
_DTYPES = tuple(map(np.dtype, (np.float32, jnp.bfloat16, np.float16)))
_CODES = {"mu": np.dtype(np.int8), "nu": np.dtype(np.uint8)}
BLOCK_SIZE = 1024
_DEFAULT_BITS = 24


class Flat(NamedTuple):
    """A tree of parameters, flattened; `None` is no leaf."""

    paths: list[Path]
    names: list[str]
    leaves: list[Any]
    treedef: Any

    def like(self, tree: PyTree, what: str) -> list[Any]:
        """Returns what another tree holds in the place of each parameter."""
        try:
            return self.treedef.flatten_up_to(tree)
        except ValueError as error:
            raise ValueError(
                f"{what} must have the structure of the parameters. {error}"
            ) from error


def flatten(params: PyTree) -> Flat:
    """Flattens parameters, with the path of each as a tuple and as a unique name."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(params)
    keys = [path for path, _ in pairs]
    names = [path_name(path) for path in keys]
    if len(set(names)) < len(names):  # a key may hold a slash
        names = [keystr(path) for path in keys]
    paths = [tuple(map(_entry, path)) for path in keys]
    return Flat(paths, names, [leaf for _, leaf in pairs], treedef)


def _entry(key: Any) -> Any:
    attributes = ("key", "idx", "name")
    return next((getattr(key, a) for a in attributes if hasattr(key, a)), str(key))


class _Group(NamedTuple):
    """Parameters with the same options."""

    options: Mapping[str, Any]
    optimizer: FlashOptimizer


@dataclasses.dataclass(frozen=True, eq=False)
class Steps:
    """An optimizer with the state of flashoptim-jax.

    Attributes:
        name: The optimizer's name, for messages.
        state_type: The class of the state.
        specs: The user's groups.
        groups: The options and optimizer of each group, the rest last.
    """

    name: str
    state_type: Any
    specs: tuple[Mapping[str, Any], ...]
    groups: tuple[_Group, ...]

    @classmethod
    def build(
        cls,
        name: str,
        make: Callable[..., FlashOptimizer],
        state_type: type,
        options: Mapping[str, Any],
        specs: Sequence[Mapping[str, Any]],
    ) -> "Steps":
        """Makes an optimizer for each group of parameters."""
        groups = []
        for index, spec in enumerate(specs):
            if "params" not in spec:
                raise ValueError(
                    "Each param group must define a 'params' matcher, but "
                    f"param_groups[{index}] has only {sorted(spec)}."
                )
            if unknown := sorted(set(spec) - {*options, "params"}):
                raise ValueError(
                    f"param_groups[{index}] sets {unknown}, but {name} has only "
                    f"{sorted(options)}."
                )
            own = {key: value for key, value in spec.items() if key != "params"}
            groups.append(_group(make, {**options, **own}))
        groups.append(_group(make, options))
        return cls(name, state_type, tuple(specs), tuple(groups))

    def init(self, params: PyTree) -> Any:
        """Returns the state of parameters."""
        flat = flatten(params)
        indices = self._indices(flat)
        self._check(flat, indices)
        rows = [
            self._init_leaf(self.groups[index].options, jnp.asarray(param))
            for index, param in zip(indices, flat.leaves, strict=True)
        ]
        return self._state(jnp.zeros((), jnp.int32), flat, rows)

    def _init_leaf(self, options: Mapping[str, Any], param: Any) -> dict[str, Any]:
        row: dict[str, Any] = {name: no_state() for name in self.state_type._fields}
        if param.dtype not in _DTYPES:
            return row
        row["ecc"] = init_correction(param, options["master_weight_bits"])
        for name in self._kept(options):
            if options["quantize"]:
                groups = View(param.shape, options["group_size"]).groups
                codes = zeros_alike(param, _CODES[name])
                row[name] = QuantizedArray(codes, jnp.zeros(groups, jnp.float16))
            else:
                row[name] = zeros_alike(param, np.dtype(np.float32))
        return row

    @property
    def _moments(self) -> list[str]:
        return [name for name in _MOMENTS if name in self.state_type._fields]

    def _kept(self, options: Mapping[str, Any]) -> list[str]:
        return [] if options.get("momentum", 1.0) == 0.0 else self._moments

    def _state(self, count: Any, flat: Flat, rows: Sequence[Mapping[str, Any]]) -> Any:
        names = [name for name in self.state_type._fields if name != "count"]
        trees = {n: flat.treedef.unflatten([row[n] for row in rows]) for n in names}
        return self.state_type(count=count, **trees)

    def step(self, params: PyTree, state: Any, grads: PyTree) -> tuple[PyTree, Any]:
        """Takes one step."""
        flat = flatten(params)
        names = [name for name in self.state_type._fields if name != "count"]
        columns = [flat.like(getattr(state, n), f"`state.{n}`") for n in names]
        values = zip(*columns, strict=True) if flat.leaves else []
        rows = [dict(zip(names, row, strict=True)) for row in values]
        indices = self._indices(flat)
        new_params = list(flat.leaves)
        all_grads = flat.like(grads, "The gradients")
        for index, group in enumerate(self.groups):
            leaves = {
                flat.names[i]: _Leaf(
                    jnp.asarray(flat.leaves[i]), all_grads[i], rows[i], flat.names[i]
                )
                for i, owner in enumerate(indices)
                if owner == index and _is_stepped(flat.leaves[i])
            }
            stepped = self._step_group(group, state.count, leaves)
            for i, name in enumerate(flat.names):
                if name in stepped:
                    new_params[i], rows[i] = stepped[name]
        new_state = self._state(jnp.asarray(state.count) + 1, flat, rows)
        return flat.treedef.unflatten(new_params), new_state

    def _step_group(
        self, group: _Group, count: Any, leaves: Mapping[str, "_Leaf"]
    ) -> dict[str, tuple[Any, dict[str, Any]]]:
        def tree(read: Callable[["_Leaf"], Any]) -> dict[str, Any]:
            return {name: read(leaf) for name, leaf in leaves.items()}

        size, bits = group.options["group_size"], group.options["master_weight_bits"]
        moments: dict[str, Any] = dict.fromkeys(_MOMENTS)
        for name in self._kept(group.options):
            moments[name] = tree(lambda x, n=name: x.moment(n, size))
        state = FlashState(
            count=jnp.asarray(count, jnp.int32),
            correction=tree(lambda x: x.correction(size, bits)),
            layout=None,
            format="flashoptim",
            **moments,
        )
        params, state = group.optimizer.step(
            tree(lambda x: x.view(size).of(x.param)),
            state,
            tree(lambda x: x.seen(size)),
        )
        return {
            name: leaf.after(size, params[name], state, self._moments)
            for name, leaf in leaves.items()
        }

    # --- which options a parameter has ------------------------------------------------

    def _indices(self, flat: Flat) -> list[int]:
        def index(path: Path, leaf: Any) -> int:
            return next(
                (
                    i
                    for i, spec in enumerate(self.specs)
                    if _matches(path, leaf, spec["params"])
                ),
                len(self.specs),
            )

        return [index(*pair) for pair in zip(flat.paths, flat.leaves, strict=True)]

    def _check(self, flat: Flat, indices: Sequence[int]) -> None:
        for i, group in enumerate(self.groups):
            members = [j for j, owner in enumerate(indices) if owner == i]
            is_rest = i == len(self.specs)
            if not members and not is_rest:
                raise ValueError(
                    f"No parameter belongs to param_groups[{i}], whose 'params' is "
                    f"{self.specs[i]['params']!r}. The paths are {flat.names[:8]}."
                )
            for j in members:
                dtype = dtype_of(jnp.asarray(flat.leaves[j]))
                if group.options["fused"] and dtype not in _DTYPES:
                    raise ValueError(
                        f"{self.name} with fused=True only supports parameter dtypes "
                        f"(float32, bfloat16, float16), but `{flat.names[j]}` is {dtype}. "
                        "With fused=False it is left as it is."
                    )
            bits = group.options["master_weight_bits"]
            leaves = [jnp.asarray(flat.leaves[j]) for j in members]
            if not leaves or any(correction_dtype(x.dtype, bits) for x in leaves):
                continue
            # 24 is the default: nobody need have asked for it.
            asked = bits not in (None, _DEFAULT_BITS) if is_rest else bits is not None
            if asked and (is_rest or "master_weight_bits" in self.specs[i]):
                where = "" if is_rest else f"param_groups[{i}]['master_weight_bits']="
                where = where or "master_weight_bits="
                raise ValueError(
                    f"{where}{bits} has no effect: none of its parameters is bf16 or f16. "
                    "Set it to None."
                )


class _Leaf(NamedTuple):
    """A parameter, its gradient and its state in the layout of flashoptim-jax."""

    param: Any
    grad: Any
    row: Mapping[str, Any]
    name: str

    def view(self, group_size: int) -> View:
        """Returns the view in which the step sees the parameter."""
        quantized = any(is_quantized(self.row.get(name)) for name in _MOMENTS)
        return View(self.param.shape, group_size if quantized else 0)

    def seen(self, group_size: int) -> Any:
        """Returns the gradient in this view."""
        if self.grad is None:
            return None
        # Here, because the step knows the shape of the view only.
        check_grad(self.name, self.param, self.grad)
        return self.view(group_size).of(self.grad)

    def moment(self, name: str, group_size: int) -> Any:
        """Returns a moment in this view; `None` if there is none."""
        stored = self.row.get(name)
        if stored is None or not is_state(stored):
            return None
        view = self.view(group_size)
        if is_quantized(stored):
            return view.quantized(stored, self.name)
        return view.of(jnp.asarray(stored, jnp.float32))

    def correction(self, group_size: int, bits: MasterBits) -> Any:
        """Returns the correction in this view; `None` if there is none.

        A state that lacks one, because it was made before the model was cast, gets one.
        """
        ecc = self.row["ecc"]
        if not has_correction(self.param, ecc):
            ecc = init_correction(self.param, bits)
        if not has_correction(self.param, ecc):
            return None
        return self.view(group_size).of(jnp.asarray(ecc))

    def after(
        self, group_size: int, param: Any, state: FlashState, moments: Iterable[str]
    ) -> tuple[Any, dict[str, Any]]:
        """Returns the parameter and its state after a step."""
        view = self.view(group_size)
        row = dict(self.row)
        correction = state.correction[self.name]
        if correction is not None:
            row["ecc"] = view.undo(correction)
        for name in moments:
            tree = getattr(state, name)
            stored = None if tree is None else tree[self.name]
            if isinstance(stored, Quantized):
                row[name] = view.undo_quantized(stored)
            elif stored is not None:
                row[name] = view.undo(stored)
        return view.undo(param), row


def _is_stepped(param: Any) -> bool:
    param = jnp.asarray(param)
    return param.dtype in _DTYPES and param.size > 0


def _group(make: Callable[..., FlashOptimizer], options: Mapping[str, Any]) -> _Group:
    hyper = dict(options)
    quantize, bits = hyper.pop("quantize"), hyper.pop("master_weight_bits")
    size, fused = hyper.pop("group_size"), hyper.pop("fused")
    if quantize and (size < 2 or (fused and BLOCK_SIZE % size)):
        raise ValueError(
            f"group_size must divide BLOCK_SIZE ({BLOCK_SIZE}): a power of two such as 32, "
            f"but {size} was given. With fused=False any number from 2 on will do."
        )
    if bits not in (None, 24, 32):
        raise ValueError(
            f"master_weight_bits must be one of (None, 24, 32), but {bits!r} was given."
        )
    if "momentum" in hyper:
        if hyper["nesterov"] and (hyper["momentum"] <= 0 or hyper["dampening"] != 0):
            raise ValueError(
                "Nesterov momentum requires positive momentum and zero dampening, but "
                f"they are {hyper['momentum']} and {hyper['dampening']}."
            )
        hyper["momentum"] = hyper["momentum"] or None
    if "eps" in hyper and isinstance(hyper["eps"], int | float) and hyper["eps"] == 0:
        hyper["eps"] = lambda count: 0.0  # mpx refuses a zero, but not from a schedule
    # How many elements share a scale is read off the state.
    compression = Compression(
        quantize=quantize, master_bits=bits, min_size=0, format="flashoptim"
    )
    backend = "auto" if fused else "jax"
    return _Group(options, make(**hyper, compression=compression, backend=backend))


def _matches(path: Path, leaf: Any, selector: Any) -> bool:
    """Whether a parameter belongs to a group: see `flash_adamw` for the selectors."""
    if isinstance(selector, Iterable) and not isinstance(selector, str | bytes | tuple):
        return any(_matches(path, leaf, one) for one in selector)
    if callable(selector):
        return bool(selector(path, leaf))
    if isinstance(selector, tuple):
        return path == selector
    parts = [str(entry) for entry in path]
    return "/".join(parts) == selector if "/" in str(selector) else selector in parts
