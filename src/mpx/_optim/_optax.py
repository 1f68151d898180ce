"""Wrappers that give any optax optimizer skipping and master weights."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int, PyTree

from mpx._casting._cast import own_buffer
from mpx._casting._policy import cast_params
from mpx._casting._select import Selectors
from mpx._jax._formats import parse_float_dtype
from mpx._jax._tree import (
    AxisName,
    all_finite,
    cast_leaf,
    check_shape,
    is_floating,
    map_with_name,
    select_tree,
)
from mpx._scaling._update import (
    apply_updates,
    check_transformation,
    rebuilt,
    stays_finite,
    together,
)


class SkipNonfiniteState(NamedTuple):
    """The state of `skip_nonfinite`.

    Attributes:
        inner_state: The state of the wrapped optimizer.
        skipped: Skipped updates in total, i32[].
        consecutive_skipped: Skipped updates in a row, i32[].
        last_finite: Whether the last step was finite and therefore taken, bool[].
    """

    inner_state: PyTree
    skipped: Int[Array, ""]
    consecutive_skipped: Int[Array, ""]
    last_finite: Bool[Array, ""]


def skip_nonfinite(
    optimizer: optax.GradientTransformation, *, axis_name: AxisName | None = None
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that a step that is not finite changes nothing.

    If the gradients, the updates or the new state hold an inf or nan, the updates are zero
    and the inner state stays as it is; counters in the state tell how often that happened.
    Unlike `optax.apply_if_finite` it never lets a NaN through.

    Args:
        optimizer: Any optax transformation.
        axis_name: Axes of a `shard_map`, `pmap` or `vmap` whose devices decide together.
            With `check_vma` they do so where gradients differ and the state does not.

    Examples:
        >>> import optax
        >>> optimizer = skip_nonfinite(optax.adam(0.1))
        >>> params = jnp.ones(2)
        >>> state, grads = optimizer.init(params), jnp.full(2, jnp.nan)
        >>> updates, state = optimizer.update(grads, state, params)
        >>> updates, int(state.skipped)
        (Array([0., 0.], dtype=float32), 1)
    """
    check_transformation(optimizer, "`skip_nonfinite` needs an optax transformation")
    optimizer = optax.with_extra_args_support(optimizer)

    def init(params: PyTree) -> SkipNonfiniteState:
        zero, inner = jnp.zeros((), jnp.int32), optimizer.init(params)
        return SkipNonfiniteState(inner, zero, zero + 0, jnp.array(True))

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object
    ) -> tuple[PyTree, SkipNonfiniteState]:
        _check_state(state, SkipNonfiniteState, "skip_nonfinite")
        # Without parameters, or of another structure, the optimizer may refuse them.
        if jax.tree.structure(updates) == jax.tree.structure(params):
            map_with_name(
                lambda name, *pair: check_shape(f"The gradient of `{name}`", *pair),
                updates,
                params,
            )
        finite = all_finite(updates)
        updates, inner = optimizer.update(
            updates, rebuilt(state.inner_state), params, **extra_args
        )
        finite &= all_finite(updates)
        finite &= stays_finite(state.inner_state, inner, updates)
        finite = together(finite, state.skipped, axis_name)
        updates = select_tree(finite, updates, jax.tree.map(jnp.zeros_like, updates))
        more = optax.safe_increment
        return updates, SkipNonfiniteState(
            inner_state=select_tree(finite, inner, state.inner_state),
            skipped=jnp.where(finite, state.skipped, more(state.skipped)),
            consecutive_skipped=jnp.where(finite, 0, more(state.consecutive_skipped)),
            last_finite=finite,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _check_state(state: PyTree, kind: type, wrapper: str) -> None:
    if not isinstance(state, kind):
        raise TypeError(
            f"`{wrapper}` expected the {kind.__name__} from its own `init(params)` or its "
            f"last update; got {type(state).__name__}. The state of the optimizer inside "
            "is its `inner_state`."
        )


class MasterWeightsState(NamedTuple):
    """The state of `master_weights`.

    Attributes:
        inner_state: The state of the wrapped optimizer, made for the masters.
        master: The parameters in high precision.
    """

    inner_state: PyTree
    master: PyTree

    # Read by `optimizer_update`: updates of 16-bit parameters add up here.
    mpx_holds_masters = True


class MasterWeights(optax.GradientTransformationExtraArgs):
    """An optimizer with master weights: an optax transformation that starts from f32.

    Attributes:
        init: Makes the state of 16-bit parameters: `init(params)`.
        update: The optax interface: `update(grads, state, params)`.
    """

    def init_from(
        self, params: PyTree, dtype: DTypeLike = jnp.bfloat16, *, keep: Selectors = ()
    ) -> tuple[PyTree, MasterWeightsState]:
        """Makes 16-bit parameters, and a state whose masters are the f32 weights.

        For the arguments see `FlashOptimizer.init_from`, for an example `master_weights`.
        """
        state: PyTree = self.init(params)
        return cast_params(params, dtype, keep), state


def master_weights(
    optimizer: optax.GradientTransformation,
    dtype: DTypeLike = jnp.float32,
) -> MasterWeights:
    """Wraps an optimizer so that it updates high-precision copies of the parameters.

    Use it for parameters that are stored in 16 bits: an update below half an ulp would be
    lost in them (bf16: 0.2 % of the weight), but adds up in the copy, which lives in the
    optimizer state. Start with `init_from`, which takes the f32 weights. The updates take
    each parameter to its rounded master.

    Args:
        optimizer: Any optax transformation.
        dtype: The dtype of the copies. Parameters with more bits keep their dtype.

    Raises:
        ValueError: If `dtype` is not floating with at least 16 bits, or if `update` is
            called without parameters.

    Examples:
        >>> import optax
        >>> optimizer = master_weights(optax.sgd(1.0))
        >>> params, state = optimizer.init_from(jnp.ones(()))
        >>> for _ in range(8):
        ...     updates, state = optimizer.update(jnp.float32(1e-3), state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> float(params)
        0.9921875
    """
    check_transformation(optimizer, "`master_weights` needs an optax transformation")
    optimizer = optax.with_extra_args_support(optimizer)
    wide = parse_float_dtype(dtype)

    def widened(leaf: PyTree) -> PyTree:
        narrow = is_floating(leaf) and leaf.dtype.itemsize <= wide.itemsize
        return cast_leaf(leaf, wide) if narrow else leaf

    def init(params: PyTree) -> MasterWeightsState:
        master = jax.tree.map(lambda x: own_buffer(widened(x)), params)
        return MasterWeightsState(optimizer.init(master), master)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object
    ) -> tuple[PyTree, MasterWeightsState]:
        if params is None:
            raise ValueError(
                "`master_weights` needs the parameters: call "
                "`update(grads, state, params)`."
            )
        _check_state(state, MasterWeightsState, "master_weights")
        wide_grads = jax.tree.map(widened, updates)
        inner_updates, inner = optimizer.update(
            wide_grads, state.inner_state, state.master, **extra_args
        )
        master = apply_updates(state.master, inner_updates)

        def to_updates(new: Array, param: PyTree) -> Array:
            if not is_floating(param):
                return new - param
            # An infinite parameter could never come back: no update undoes it.
            top = jnp.asarray(jnp.finfo(param.dtype).max, new.dtype)
            held = jnp.where(jnp.isfinite(new), jnp.clip(new, -top, top), new)
            rounded = held.astype(param.dtype)
            return rounded.astype(new.dtype) - param.astype(new.dtype)

        updates = jax.tree.map(to_updates, master, params)
        return updates, MasterWeightsState(inner, master)

    return MasterWeights(init, update)
