"""`fp8`: the public transformation."""

import functools
from collections.abc import Callable, Sequence
from typing import (
    Any,
    Generic,
    Literal,
    ParamSpec,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from mpx._amp._emit import Autocast
from mpx._amp._rules import AmpRules, as_compute_dtype
from mpx._casting._context import (
    amp_reduce,
    arguments_cast_to,
    autocast_of,
    gradient_function,
    in_shards,
    refuse_cast_arguments,
    signature_after,
)
from mpx._casting._select import Selectors, parse_selectors
from mpx._fp8._decide import Selection
from mpx._fp8._delayed import Fp8State, check_keys
from mpx._fp8._dot import check_supported
from mpx._fp8._recipes import DelayedScaling, Int8, Recipe, as_recipe
from mpx._fp8._visitor import Fp8Autocast
from mpx._jax import _nnx
from mpx._jax._arguments import as_real, check_value
from mpx._jax._compat import is_batched
from mpx._jax._devices import gpu_capability
from mpx._jax._tree import is_array, is_floating
from mpx._jax._warn import warn
from mpx._program._call import call_through, trace
from mpx._program._recording import current_recording
from mpx._program._roles import parse_params
from mpx._scaling._loss_scaling import LossScaling

P = ParamSpec("P")
R = TypeVar("R")


class Fp8Keywords(TypedDict, total=False):
    """The options of `fp8`."""

    params: int | str | Sequence[int | str] | None
    keep: Selectors
    include: Selectors
    min_gain: float


@overload
def fp8(
    func: Callable[..., R],
    recipe: DelayedScaling | Literal["delayed"],
    **options: Unpack[Fp8Keywords],
) -> "Fp8Function[..., R]": ...
@overload
def fp8(
    func: Callable[P, R],
    recipe: Recipe | Literal["current", "mxfp8", "int8", "nvfp4"] = "current",
    **options: Unpack[Fp8Keywords],
) -> "Fp8Function[P, R]": ...
@overload
def fp8(
    func: Callable[..., Any] | Recipe | str | None = None,
    recipe: Recipe | str = "current",
    **options: Unpack[Fp8Keywords],
) -> Any: ...
def fp8(
    func: Callable[..., PyTree] | Recipe | str | None = None,
    recipe: Recipe | str = "current",
    *,
    params: int | str | Sequence[int | str] | None = None,
    keep: Selectors = (),
    include: Selectors = (),
    min_gain: float = 1.1,
) -> PyTree:
    """Runs the linear layers of a function in 8-bit floating point.

    The function is not edited. It is traced and runs under `amp`, but its matmuls with a
    parameter run on 8-bit operands, forward and backward. A matmul is changed if exactly
    one operand comes from the parameters, `amp` runs it in 16 bits, all its dimensions are
    multiples of 16, and it is large enough to gain. The rest stays as under `amp`: attention
    products, embeddings, heads, routers, norms. `mpx.inspect.report` tells what is changed
    and `mpx.inspect.fp8_check` whether it was compiled to fp8 kernels.

    `fp8(loss)` is `fp8(amp(loss))`; write that to choose `amp`'s arguments.

    With `DelayedScaling` the returned function takes an `Fp8State` as its first
    argument, before those of `func`; its method `init(*args)` makes one.

    Take gradients of the result: `fp8(jax.grad(loss))` would only see half of the
    matmuls, and warns. Forward-mode and second derivatives do not exist and raise.

    Args:
        func: The function, usually a loss. As a decorator `fp8` takes the recipe in its
            place, `@fp8(DelayedScaling())`, or options alone.
        recipe: Formats and scales: `CurrentScaling`, `DelayedScaling`, `StaticScaling`,
            `MXFP8`, `Int8` or `NVFP4`; or the name of one with its defaults,
            `"current"`, `"delayed"`, `"mxfp8"`, `"int8"` or `"nvfp4"`.
        params: The position or the name of the argument that holds the parameters, or
            several. Arrays inside `func` itself are parameters, too. By default these, the
            `nnx.Param`s of NNX modules, the first argument that is a container with the
            other parts of `eqx.partition`, or the first argument.
        keep: What else stays as it is: a regular expression for paths of parameters such
            as `layers/0/w` and for paths of `jax.named_scope`s, a module type, a predicate
            of a matmul as `mpx.inspect.report` lists it, or a list of these.
        include: What is changed although it is an embedding table, a head or a router;
            selected as by `keep`.
        min_gain: The smallest speed-up, predicted from the matmul's size, for which it
            is changed; 0 changes all.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a name or a number is not usable; in a call, if a string or type in
            `keep` or `include` selects nothing.
        NotImplementedError: For `MXFP8` and `NVFP4` on hardware without units for it.

    Warns:
        RuntimeWarning: If nothing is changed, under `jax.vmap`, around a gradient, and on
            GPUs without units for the recipe.

    Examples:
        >>> loss = lambda params, x: jnp.sum(x @ params["w"])
        >>> params = {"w": jnp.full((32, 16), 1.0625, jnp.bfloat16)}
        >>> x = jnp.ones((16, 32), jnp.bfloat16)
        >>> float(loss(params, x)), float(fp8(loss, min_gain=0)(params, x))
        (8704.0, 8192.0)
    """
    if isinstance(func, Recipe | str):
        if recipe != "current":
            raise TypeError(
                f"`fp8` was given two recipes, {func!r} and {recipe!r}. Pass one."
            )
        func, recipe = None, func
    gain = as_real(min_gain, "min_gain")
    expected = "a speed-up such as 1.1, or 0 to change all matmuls"
    check_value(gain >= 0, "min_gain", expected, min_gain)  # which nan is not
    chosen = Selection(
        recipe=as_recipe(recipe),
        params=parse_params(params),
        keep=parse_selectors(keep, "keep", _PREDICATE),
        include=parse_selectors(include, "include", _PREDICATE),
        min_gain=gain,
    )
    if func is None:
        return functools.partial(Fp8Function, chosen=chosen)
    return Fp8Function(func, chosen)


_PREDICATE = "of a matmul, `(matmul) -> bool`"


class Fp8Function(Generic[P, R]):
    """A function under `fp8`."""

    def __init__(self, func: Callable[P, R], chosen: Selection) -> None:
        kind: object = func
        if not callable(func) or (isinstance(kind, type) and issubclass(kind, Recipe)):
            raise TypeError(
                "`fp8` takes a function, or a recipe such as `DelayedScaling()` to be a "
                f"decorator, but {func!s:.99} was given."
            )
        autocast = autocast_of(func)
        if autocast is not None and autocast().residuals is not None:
            raise ValueError(
                "`fp8` keeps its operands in 8 bits itself, so the function under it takes "
                "no `residuals`. Write `fp8(amp(func))`."
            )
        functools.update_wrapper(self, func)
        self.func, self.chosen = func, chosen
        # Whether the first argument is an `Fp8State`; the gradient functions ask for it.
        self.has_state = self.mpx_has_scales = chosen.recipe.has_state
        if self.has_state:
            # The state comes first: the signature is not that of `func`.
            del self.__dict__["__wrapped__"]
            self.__signature__ = signature_after("fp8_state", func)

    def __get__(self, instance: PyTree, owner: type | None = None) -> PyTree:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        recipe, first = self.chosen.recipe, (*args, None)[0]
        # A report needs no state, and is about hardware that may not be here.
        is_report = current_recording() is not None and not isinstance(first, Fp8State)
        if not is_report:
            check_supported(recipe)
            _warn_of_hardware(recipe)
            is_mapped = any(map(is_batched, jax.tree.leaves((args, kwargs))))
            if is_mapped and not in_shards.value:
                warn(_MAPPED)
        if is_report or not isinstance(recipe, DelayedScaling):
            return self._run(None, self.func, *args, **kwargs)
        if not isinstance(first, Fp8State):
            raise TypeError(
                "With `DelayedScaling` the first argument is an `Fp8State`, but "
                f"{type(first).__name__} was given. Make one with `.init(*args)`."
            )
        scales = first.largest(recipe.history)
        return self._run(scales, self.func, *args[1:], **kwargs)

    def _run(self, scales: Any, func: Any, /, *args: Any, **kwargs: Any) -> PyTree:
        visitor, inner = self.visitor(func)
        visitor.scales = scales
        out = call_through(visitor, inner, args, kwargs)
        if scales is not None:
            found = {path: probe.shape[:-1] for path, (_, probe) in scales.items()}
            check_keys(visitor.places, found)
        return out

    def visitor(
        self, func: Callable[..., PyTree] | None = None
    ) -> tuple[Fp8Autocast, Callable[..., PyTree]]:
        """Returns a visitor for one call, and what it visits: the function under `amp`."""
        func, recording = func or self.func, current_recording()
        wrapper, inner = getattr(func, "mpx_under_amp", (None, func))
        if wrapper is func:
            refuse_cast_arguments()
            autocast: Autocast = getattr(wrapper, "mpx_autocast")()  # noqa: B009
            names = "dtype", "rules", "reduce", "attention", "narrow_carry", "params"
            options = {name: getattr(autocast, name) for name in names}
        else:
            given = arguments_cast_to.value  # the dtype of a policy, if there is one
            dtype = as_compute_dtype(given if given.itemsize == 2 else None)
            options = {"dtype": dtype, "rules": AmpRules(), "reduce": amp_reduce(None)}
            inner = func
        if self.chosen.params is not None:
            options["params"] = self.chosen.params
        visitor = Fp8Autocast(chosen=self.chosen, **options)
        if recording is not None:
            visitor.decisions, visitor.matmuls = recording.decisions, recording.matmuls
            recording.casts.append((visitor.dtype, visitor.rules))
            recording.recipes.append(self.chosen.recipe)
        return visitor, inner

    def init(
        self, *args: object, scaling: LossScaling | float = 1.0, **kwargs: object
    ) -> Fp8State:
        """Makes the state of delayed scaling, for a call with these arguments.

        With arrays, one call and its gradient are computed to fill the state. With
        `jax.ShapeDtypeStruct`s it is empty: the first step then has scales of 1 and its
        gradients lose what e5m2 cannot hold.

        Args:
            *args: The arguments of the function, without the state.
            scaling: The loss scaling of the training run, or its factor.
            **kwargs: Its keyword arguments.

        Raises:
            TypeError: If the recipe has no state.

        Examples:
            >>> from mpx.recipes import DelayedScaling
            >>> loss = lambda w, x: jnp.sum(x @ w)
            >>> f8 = fp8(loss, DelayedScaling(history=2), min_gain=0)
            >>> w, x = (jnp.ones((16, 16), jnp.bfloat16) for _ in range(2))
            >>> f8.init(w, x).amaxes
            {'w:0': Array([[1., 1., 1.],
                   [0., 0., 0.]], dtype=float32)}
        """
        recipe = self.chosen.recipe
        if not isinstance(recipe, DelayedScaling):
            raise TypeError(
                f"`{type(recipe).__name__}` keeps no state: call the function itself. "
                "Only `DelayedScaling` has one."
            )
        (visitor, inner), last = self.visitor(), (recipe.history, 3)
        trace(visitor, inner, args, kwargs)
        keys = visitor.places.items()
        state = Fp8State({x: jnp.zeros((*n, *last), jnp.float32) for x, n in keys})
        leaves = jax.tree.leaves((args, kwargs))
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            return state

        # The function itself may be an NNX module, which the call would change.
        plain, objects = _nnx.take_out((self.func, args, kwargs))
        arrays, static = eqx.partition(plain, is_array)

        def scaled(state: Fp8State, arrays: PyTree) -> Array:
            plain = eqx.combine(arrays, static)
            func, args, kwargs = _nnx.put_back(plain, _nnx.copy(objects))
            scales = state.largest(recipe.history).items()
            probes = {path: (None, probe) for path, (_, probe) in scales}
            out = self._run(probes, func, *args, **kwargs)
            floats = [x for x in jax.tree.leaves(out) if is_floating(x)]
            if not floats:
                raise TypeError(
                    "`init` takes the gradient of the function, but it returned no floating "
                    "array. Pass `jax.ShapeDtypeStruct`s to get an empty state."
                )
            factor: PyTree = getattr(scaling, "loss_scaling", scaling)
            return jnp.sum(floats[0].astype(jnp.float32)) * factor

        with gradient_function():
            return state.update(jax.jit(jax.grad(scaled))(state, arrays))


def _warn_of_hardware(recipe: Recipe) -> None:
    found = gpu_capability()
    if found is None or (isinstance(found, tuple) and found >= recipe.since):
        return
    name = ".".join(map(str, found)) if isinstance(found, tuple) else found
    effect = "`fp8` runs as bf16 there, without the rounding of fp8."
    if isinstance(recipe, Int8):
        effect = "`Int8` rounds there as elsewhere, but may be slower than bf16."
    elif isinstance(found, tuple) and found >= Int8.since:
        effect += ' `fp8(func, "int8")` uses its int8 units.'
    warn(
        f"The default device (compute capability {name}) has no {recipe.kind} units that "
        f"mpx knows how to use: {effect}"
    )


_MAPPED = (
    "`fp8` inside `jax.vmap` computes a weight gradient for each example, which takes more "
    "time and memory than bf16. Put it outside: "
    "`fp8(lambda params, batch: jnp.mean(jax.vmap(...)(batch)))`."
)
