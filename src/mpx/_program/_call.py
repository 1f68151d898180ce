"""Calls of a user's function through a visitor, whatever framework holds its parameters.

The function is traced as a pure one of its arrays, which may be inside modules: those of
NNX and Linen have their variables taken out before and written back after. Neither
library is imported here: if it is not loaded, none of its models can be running.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import SequenceKey
from jaxtyping import PyTree

from mpx._casting._context import argument_names
from mpx._casting._keep import calls_marked, is_state
from mpx._casting._unscaled import warn_if_unscaled
from mpx._jax import _nnx
from mpx._jax._compat import (
    Literal,
    convert_dtype,
    open_jaxpr,
)
from mpx._jax._formats import F32, is_low
from mpx._jax._frameworks import (
    Named,
    call_linen,
    linen_call,
    linen_is_not_written,
    linen_name,
    refuse_haiku,
)
from mpx._jax._tree import LeafName, is_array
from mpx._jax._warn import warn
from mpx._program._interpreter import Traced, Transformation, dtypes_of
from mpx._program._recording import current_recording
from mpx._program._roles import (
    Call,
    Describe,
    Roles,
    as_positions,
    param_arguments,
    roles_of,
    unbound,
)

_FUNC = "the function"  # beside its arguments, whose names hold no spaces


def _take_arrays(
    tree: PyTree, is_taken: Callable[[Any], bool] = is_array
) -> tuple[list[PyTree], Callable[[Sequence[PyTree]], PyTree]]:
    """Returns the arrays of a tree, and a function that puts others in their place."""
    leaves, structure = jax.tree.flatten(tree)
    taken = [i for i, leaf in enumerate(leaves) if is_taken(leaf)]
    arrays = [leaves[i] for i in taken]
    for i in taken:
        leaves[i] = None

    def put_back(arrays: Sequence[PyTree]) -> PyTree:
        full = list(leaves)
        for i, array in zip(taken, arrays, strict=True):
            full[i] = array
        return structure.unflatten(full)

    return arrays, put_back


def call_through(
    visitor: Transformation,
    func: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    *,
    describe: Describe | None = None,
) -> PyTree:
    """Calls a function through a visitor."""
    held: frozenset[str] = frozenset()
    if describe is None:
        visitor.params = as_positions(visitor.params, func, args, kwargs)
        func, args, kwargs, held = unbound(visitor, Call(func, args, kwargs))
    if "flax.nnx" in sys.modules:
        names = argument_names(func, len(args))
        arguments = {_FUNC: func, **dict(zip(names, args, strict=True)), **kwargs}
        plain, objects = {}, {}
        for name, tree in arguments.items():
            plain[name], taken = _nnx.take_out(tree, name)
            objects.update(taken)
        if objects:
            return _call_with_nnx(visitor, names, plain, objects, held)

    def pure(func: Callable[..., PyTree], /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        call = Call(func, args, kwargs, held)
        return _call_pure(visitor, call, describe)

    if "haiku" in sys.modules:
        refuse_haiku()
    if "flax.linen" not in sys.modules:
        return pure(func, *args, **kwargs)
    found = linen_call(func, args)
    if found is not None:
        describe = linen_name
        return call_linen(found, kwargs, pure)
    with linen_is_not_written():
        return pure(func, *args, **kwargs)


def _call_pure(
    visitor: Transformation,
    call: Call,
    describe: Describe | None,
) -> PyTree:
    """Calls a function that changes nothing but its results; arguments as above."""
    arrays, put_back = _take_arrays(call[:3])
    # NumPy's f64 is JAX's f32, unless x64 is on.
    arrays = [
        jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x for x in arrays
    ]
    roles = roles_of(visitor, call, describe)
    made: list[tuple[Callable[[list[PyTree]], PyTree], list[bool]]] = []

    def flat(*arrays: PyTree) -> list[PyTree]:
        func, args, kwargs = put_back(arrays)
        result = func(*args, **kwargs)
        outs, merge = _take_arrays(result)
        made.append((merge, _are_losses(result)))
        return outs

    kept_types = visitor.kept_types
    kept = calls_marked(kept_types) if kept_types else contextlib.nullcontext()
    low = [i for i, x in enumerate(arrays) if is_low(x) and visitor.widens_params]
    with visitor.tracing(), kept:
        (body, consts), widened, dtypes = _trace(flat, arrays, low, roles, made)
    merge, losses = made[-1]
    if (recording := current_recording()) is not None:
        for name, array in zip(roles.named, arrays, strict=True):
            recording.names.setdefault(id(array), name)  # the first name counts
        containers = {name.argument for name, _ in roles.named if name.path}
        recording.guessed += [roles.guess] * (roles.guess != "" and len(containers) > 1)
    is_owner = any([is_param for _, is_param in roles.named])
    has_params = is_owner or describe is not linen_name
    wide = _widened(visitor, arrays, low, widened, roles)
    traced = visitor.start(Traced(body, consts, wide, roles.named, has_params))
    outs = visitor.finish(visitor.run_traced(traced))
    visitor.stored.clear()  # derivative rules, which JAX keeps, refer to the visitor
    # What is returned as it came is that very array.
    given = dict(zip(map(id, wide), arrays, strict=True))
    pairs = zip(outs, dtypes, losses, strict=True)
    return merge(
        [
            given.get(id(x), x)
            if dtype is None or is_loss or id(x) in given
            else convert_dtype(x, dtype)
            for x, dtype, is_loss in pairs
        ]
    )


def _widened(
    visitor: Transformation,
    arrays: Sequence[PyTree],
    low: Sequence[int],
    chosen: set[int],
    roles: Roles,
) -> list[PyTree]:
    """Returns arrays, of which those of 16 bits that are chosen are widened to f32."""
    wide, visitor.stored = list(arrays), {}
    is_reported = current_recording() is not None  # without what warns of derivatives
    for i in low:
        x, (name, is_param) = arrays[i], roles.named[i]
        if i in chosen:
            # The gradient of an f16 parameter is rounded to f16, whatever computes it.
            is_f16 = x.dtype == np.float16 and not is_reported
            stored = warn_if_unscaled(x) if is_f16 else x
            wide[i] = convert_dtype(stored, F32)
            visitor.stored[id(wide[i])] = wide[i], stored
        elif roles.guess and not (is_param or is_reported):
            wide[i] = _heard(x, str(name))
    return wide


def _trace(
    flat: Callable[..., PyTree],
    arrays: Sequence[PyTree],
    low: Sequence[int],
    roles: Roles,
    made: list[Any],
) -> tuple[tuple[Any, Sequence[PyTree]], set[int], list[PyTree]]:
    """Traces a function; 16-bit parameters as if they were f32.

    Returns the jaxpr, which arrays it takes in f32, and the dtypes of the results as the
    function is written. The last of what the function has `made` is that of the jaxpr.

    Such a parameter is storage, and so is what is differentiated: a gradient adds up in f32.
    A function that multiplies it with 16-bit inputs may insist on equal dtypes: then inputs
    are read as f32, too. If it casts by itself to what it takes for the dtype of its
    parameters, everything is left as it is written.
    """
    is_owner = any([is_param for _, is_param in roles.named])
    chosen = [i for i in low if roles.named[i][1] or roles.asked[i] or not is_owner]
    refused: Exception | None = None
    for positions in [chosen, low][: 1 + (chosen != low)] if chosen else ():
        types = [
            x.update(dtype=F32, weak_type=False) if i in positions else x
            for i, x in enumerate(map(jax.typeof, arrays))
        ]
        found, error = _attempt(flat, types)
        if found is None:
            refused = error
            continue
        outs, result = found[0].outvars, made[-1]
        if all(result[1]):  # Losses are f32, whatever the function would return.
            return found, {*positions}, [None] * len(outs)
        written, _ = _attempt(flat, arrays)
        made.append(result)
        if written is None:  # A convolution may need equal dtypes, which it has in f32.
            given = dict(zip(found[0].invars, dtypes_of(arrays), strict=True))
            dtypes = [None if isinstance(x, Literal) else given.get(x) for x in outs]
            return found, {*positions}, dtypes
        before = written[0].outvars
        if [x.aval.shape for x in outs] == [x.aval.shape for x in before]:
            return found, {*positions}, [*dtypes_of([x.aval for x in before])]
        refused = refused or ValueError("It returns arrays of other shapes.")
    body = open_jaxpr(jax.make_jaxpr(flat)(*arrays))
    if chosen:
        reason = (str(refused).strip() or type(refused).__name__).splitlines()[0]
        warn(
            "A function under `amp` has parameters of 16 bits, which `amp` reads as f32, "
            "but it needs 16 bits itself, as by casts of its own. It runs as it is "
            f"written, in 16 bits throughout: {reason} "
            "Remove the casts, or cast to the dtype of the parameters."
        )
    return body, set(), [None] * len(body[0].outvars)


def _attempt(
    flat: Callable[..., PyTree], types: Sequence[PyTree]
) -> tuple[Any, Exception | None]:
    """Traces a function; returns its open jaxpr, or `None` and what it raised."""
    try:
        # Mixed dtypes that were equal in the user's program must not be refused.
        with jax.numpy_dtype_promotion("standard"):
            return open_jaxpr(jax.make_jaxpr(flat)(*types)), None
    except Exception as error:
        return None, error


def _are_losses(result: PyTree) -> list[bool]:
    """Returns which arrays of a result are scalars by themselves or in a tuple.

    A loss stays f32 in a function of 16-bit parameters, which would return it in 16 bits.
    """
    return [
        leaf.shape == () and all(isinstance(x, SequenceKey) for x in path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(result)
        if is_array(leaf)
    ]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _heard(x: PyTree, name: str) -> PyTree:
    """Returns a 16-bit array that is taken for an input; warns if it is differentiated."""
    return x


@_heard.defjvp
def _(
    name: str, primals: tuple[PyTree], tangents: tuple[PyTree]
) -> tuple[PyTree, PyTree]:
    warn(
        f"`{name}`, of 16 bits, is differentiated, but `amp` could not see that, since "
        "`jax.jit` or another transformation lies between, and took other arguments for the "
        "parameters. Its gradient adds up in 16 bits. Name it: `amp(..., params=...)`; or "
        "put `jax.jit` around the gradient."
    )
    return _heard(*primals, name), tangents[0]


def _call_with_nnx(
    visitor: Transformation,
    names: list[str],
    plain: dict[str, PyTree],
    objects: dict[LeafName, Any],
    held: frozenset[str],
) -> PyTree:
    """Calls a function of NNX objects as a pure one and writes their state back.

    `plain` holds the function and all arguments, with slots for the objects.
    """
    apart = _nnx.Objects(objects)
    given = [*names, *(x for x in plain if x not in (_FUNC, *names))]
    chosen = {_FUNC, *held}
    if visitor.params is not None:
        chosen.update(param_arguments(names, given, visitor.params))

    def pure(state: list[PyTree], plain: dict[str, PyTree]) -> tuple[PyTree, PyTree]:
        merged = apart.merged(state)
        everything = _nnx.put_back(plain, merged)
        func = everything.pop(_FUNC)
        args = [everything.pop(name) for name in names]
        return func(*args, **everything), apart.after(merged, state, state)

    def describe(name: LeafName, is_asked: bool) -> Named:
        is_param = is_asked
        if name.argument == "state":
            name, is_param = apart.names[int(name.path)], True
        else:
            argument, _, path = name.path.partition("/")
            name = LeafName(path, name.types[1:], argument)
        is_held = name.argument in chosen
        if visitor.params is not None or is_held:
            is_param = is_held
        if name.argument == _FUNC:
            name = LeafName(name.path, name.types)
        return name, is_param and not is_state(name)

    out, state = call_through(
        visitor, pure, (apart.leaves, plain), {}, describe=describe
    )
    apart.write(state)
    return out


def flat_call(
    func: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    wrap: Callable[[Callable[..., PyTree]], Callable[..., PyTree]] | None = None,
) -> tuple[list[PyTree], Callable[[Transformation, Sequence[PyTree]], list[PyTree]]]:
    """Returns the arrays of a call, and what makes the call of a visitor and such arrays."""
    # NNX objects are copied, or they would hold tracers afterwards.
    plain, objects = _nnx.take_out((func, args, kwargs))
    apart = _nnx.Objects(objects) if objects else None
    state = apart.leaves if apart is not None else None
    arrays, put_back = _take_arrays(
        (plain, state), lambda x: is_array(x) or isinstance(x, jax.ShapeDtypeStruct)
    )

    def call(visitor: Transformation, arrays: Sequence[PyTree]) -> list[PyTree]:
        plain, state = put_back(arrays)
        if apart is not None:
            plain = _nnx.put_back(plain, apart.merged(state))
        func, args, kwargs = plain
        if wrap is None:
            return _take_arrays(call_through(visitor, func, args, kwargs))[0]
        return _take_arrays(wrap(func)(*args, **kwargs))[0]

    return arrays, call


def trace(
    visitor: Transformation,
    func: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> PyTree:
    """Returns the jaxpr of a call through a visitor."""
    arrays, call = flat_call(func, args, kwargs)
    return jax.make_jaxpr(functools.partial(call, visitor))(arrays)
