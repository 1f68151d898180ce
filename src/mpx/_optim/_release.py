"""Gradient release: each parameter steps as soon as its gradient is known.

The traced function runs with parameters that are read only where they are needed. One that
a scan consumes layer by layer is read inside the scan's body, so it steps layer by layer.
"""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.typing import ArrayLike
from jaxtyping import PyTree

from mpx._casting._context import gradient_function, has_scales
from mpx._gradients._call import loss_and_aux
from mpx._jax._compat import (
    eval_equation,
    has_explicit_axes,
    has_shardings,
    open_jaxpr,
    scan_sizes,
    varying_axes,
)
from mpx._jax._tree import as_flag
from mpx._kernels import _dispatch as _kernels
from mpx._optim._engine import FlashOptimizer, Step, core_of
from mpx._optim._muon import run
from mpx._optim._options import FlatParams
from mpx._optim._packing import PackedLeaf
from mpx._optim._state import FlashState
from mpx._program._bodies import remat_with, scan_with
from mpx._program._interpreter import Jaxpr, Op, Outcome, Scopes, Values, Visitor
from mpx._program._queries import REMAT, Equation, Verdict, every_use, holds
from mpx._scaling._update import together

Ref = Any  # of `jax.new_ref`


class Released(NamedTuple):
    """The result of a step with gradient release.

    Attributes:
        value: The loss.
        aux: The auxiliary output of the function; `None` without `has_aux`.
        params: The parameters after the step.
        state: The state after the step.
        finite: Whether loss and gradients were finite; `None` without `skip_nonfinite`.
        grad_norm: The norm of all gradients before `grad_scale`; `None` without
            `with_norm`.
    """

    value: Array
    aux: PyTree
    params: PyTree
    state: FlashState
    finite: Array | None
    grad_norm: Array | None


def release(
    func: Callable[..., PyTree],
    optimizer: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    skip_nonfinite: bool = True,
    with_norm: bool = False,
) -> Callable[..., Released]:
    """Differentiates a function and steps, without ever holding all gradients.

    Parameters step inside the backward pass, those that a `jax.lax.scan` consumes layer by
    layer (if sharded over explicit axes of a mesh, after the scan). The result is that of
    `jax.value_and_grad` and `optimizer.step`.

    Args:
        func: The loss: `func(params, *args, **kwargs)`, a scalar.
        optimizer: A compressed optimizer, such as `mpx.optim.flash_adamw`.
        has_aux: Whether `func` returns a pair of the loss and anything else.
        skip_nonfinite: Whether to skip each parameter or layer, with its state, whose
            gradient is not finite, and the whole step if the loss is not. Others have
            stepped by the time it is known. The step counts if anything stepped. Without
            it, an inf or nan reaches the weights.
        with_norm: Whether to compute the norm of the gradients. It is known only after
            the step, so it can clip the next one.

    Returns:
        A function `step(params, state, *args, finite=None, grad_scale=1.0, **kwargs)`,
        which returns a `Released`; for `finite` and `grad_scale` see
        `FlashOptimizer.step`. Put it under `jax.jit` with `donate_argnums=(0, 1)`.

    Raises:
        TypeError: If `optimizer` is not a compressed one, `func` does not return a loss, or
            it is under `fp8` with `DelayedScaling`.

    Examples:
        >>> from mpx.optim import flash_adamw
        >>> params = {"w": jnp.ones((4, 8, 8), jnp.bfloat16)}  # four layers
        >>> def loss(params, x):
        ...     layer = lambda x, w: (jnp.tanh(x @ w), None)
        ...     return jnp.sum(jax.lax.scan(layer, x, params["w"])[0])
        >>> optimizer = flash_adamw(1e-3)
        >>> step = jax.jit(release(loss, optimizer), donate_argnums=(0, 1))
        >>> x = jnp.ones((2, 8), jnp.bfloat16)
        >>> result = step(params, optimizer.init(params), x)
        >>> int(result.state.count)
        1
    """
    if not isinstance(optimizer, FlashOptimizer):
        raise TypeError(
            "`release` steps each parameter on its own and needs one of mpx's compressed "
            f"optimizers, such as `mpx.optim.flash_adamw`, but {type(optimizer).__name__} was "
            "given. Give a chain's other members as `grad_scale`, schedules and groups."
        )
    if has_scales(func):
        raise TypeError(
            "`release` steps inside the backward pass and returns no gradients, but the "
            "`Fp8State` of a function under `fp8` with `DelayedScaling` is updated by "
            "its gradient. Use `fp8(..., mpx.recipes.CurrentScaling())`, which keeps no state."
        )
    core = core_of(optimizer)

    def step(
        params: PyTree,
        state: FlashState,
        *args: object,
        finite: ArrayLike | None = None,
        grad_scale: ArrayLike = 1.0,
        **kwargs: object,
    ) -> Released:
        flag = None if finite is None else as_flag(finite, "finite")
        flat = FlatParams.of(params)
        plan = Step(core, flat, state, grad_scale)
        found = ((index, plan.job(index)) for index in range(len(flat.leaves)))
        jobs = {index: job for index, job in found if job is not None}
        values = (True, True, False) if skip_nonfinite else ()
        watched = _Watched(
            tuple(jax.new_ref(jnp.array(x)) for x in values),
            jax.new_ref(jnp.zeros((), jnp.float32)) if with_norm else None,
        )

        def traced(weights: list[Array]) -> tuple[Array, PyTree]:
            leaves = list(flat.leaves)
            for index, weight in zip(jobs, weights, strict=True):
                leaves[index] = weight
            out = func(flat.treedef.unflatten(leaves), *args, **kwargs)
            return loss_and_aux(out, has_aux)

        weights = [jnp.asarray(job.leaf.param) for job in jobs.values()]
        closed, out = jax.make_jaxpr(traced, return_shape=True)(weights)
        ref = lambda x: jax.new_ref(jnp.asarray(x))  # noqa: E731
        sites = [
            _ParamRefs(
                x._replace(leaf=jax.tree.map(ref, x.leaf)), core.backend, flag, watched
            )
            for x in jobs.values()
        ]

        def loss(origin: Array) -> tuple[Array, list[Array]]:
            taps = [_Tap(functools.partial(site.read, origin)) for site in sites]
            # JAX cannot read a layer of a reference with an explicit sharding.
            meshes = (jax.typeof(weight).sharding.mesh for weight in weights)
            pairs = zip(meshes, taps, strict=True)
            given = [tap.read() if has_explicit_axes(x) else tap for x, tap in pairs]
            value, *aux = _Taps().body(*open_jaxpr(closed), given)
            return jnp.asarray(value), aux  # a constant is one of NumPy

        # With a `grad_scale`, the loss is scaled.
        is_scaled = not (isinstance(grad_scale, float) and grad_scale == 1.0)
        with gradient_function() if is_scaled else contextlib.nullcontext():
            value, backward, aux = jax.vjp(loss, jnp.zeros(()), has_aux=True)
            watched.see_loss(value)
            backward(jnp.ones_like(value))
        all_finite, norm, counts = watched.results()
        flag = _both(flag, counts)
        stepped = {i: x.finish(flag) for i, x in zip(jobs, sites, strict=True)}
        aux = jax.tree.unflatten(jax.tree.structure(out[1]), aux) if has_aux else None
        return Released(value, aux, *plan.result(stepped, flag), all_finite, norm)

    released: Any = step
    released.mpx_released = func, optimizer  # `mpx.inspect.memory` asks for it
    return released


class _Watched(NamedTuple):
    """Facts about loss and gradients, collected in references.

    `flags` are whether the loss is finite, whether everything seen so far is, and whether
    any gradient is that may step; empty if not asked for.
    """

    flags: tuple[Ref, ...] = ()
    squares: Ref | None = None

    def see_loss(self, value: Array) -> None:
        if self.flags:
            loss, every, _ = self.flags
            loss[...] = every[...] = together(jnp.isfinite(value), loss[...])

    def see(self, grad: Array) -> Array | None:
        """Records a gradient; returns whether it may step, if that was asked for."""
        grad = grad.astype(jnp.float32)
        if self.squares is not None:
            squares = jnp.sum(jnp.square(grad))
            # Devices may have shards of the parameter.
            axes = tuple(sorted(varying_axes(jax.typeof(squares))))
            self.squares[...] += lax.psum(squares, axes) if axes else squares
        if not self.flags:
            return None
        loss, every, some = self.flags
        finite = together(jnp.all(jnp.isfinite(grad)), loss[...]) & loss[...]
        every[...] &= finite
        if grad.size:
            some[...] |= finite
        return finite

    def results(self) -> tuple[Array | None, Array | None, Array | None]:
        norm = None if self.squares is None else jnp.sqrt(jax.freeze(self.squares))
        if not self.flags:
            return None, norm, None
        _, every, some = map(jax.freeze, self.flags)
        return every, norm, every | some


def _both(one: Array | None, two: Array | None) -> Array | None:
    """Returns whether two flags are true; `None` counts as true."""
    if one is None or two is None:
        return two if one is None else one
    return one & two


@dataclasses.dataclass(eq=False)
class _ParamRefs:
    """A parameter with its state, in references that the backward pass writes to."""

    job: _kernels.Job  # whose leaf consists of references
    backend: _kernels.Backend
    finite: Array | None
    watched: _Watched
    stepped: bool = False

    def read(self, origin: Array, layer: Array | None) -> Array:
        """Reads a parameter, or one layer of it. The cotangent of what was read steps it.

        `origin` is the number by which the loss is differentiated. Its gradient is zero.
        """
        refs, scalars = self.job.leaf, self.job.scalars
        x = refs.param[... if layer is None else layer]
        operands = refs, scalars, layer, self.finite, self.watched
        return _tapped(self, x, origin, operands)

    def step(self, grad: Array, operands: PyTree) -> None:
        """Steps the parameter, or one layer of it, given all that a step reads."""
        self.stepped = True
        refs, scalars, layer, finite, watched = operands
        finite = _both(finite, watched.see(grad))
        leaf = jax.tree.map(lambda ref: ref[...], refs)
        job = self.job._replace(leaf=leaf, grad=grad, scalars=scalars, layer=layer)
        (new,) = run([job], finite=finite, backend=self.backend)
        jax.tree.map(lambda ref, x: operator.setitem(ref, ..., x), refs, new)

    def finish(self, finite: Array | None) -> PackedLeaf:
        """Returns the leaf; if the loss does not depend on it, the gradient is zero."""
        refs = self.job.leaf
        if not self.stepped:
            zeros = jnp.zeros(refs.param.shape, refs.param.dtype)
            self.step(zeros, (refs, self.job.scalars, None, finite, _Watched()))
        return jax.tree.map(jax.freeze, refs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tapped(site: _ParamRefs, x: Array, origin: Array, operands: PyTree) -> Array:
    del site, origin, operands
    return x


def _backward(site: _ParamRefs, operands: PyTree, grad: Array) -> PyTree:
    site.step(grad, operands)
    return None, jnp.zeros(()), None


_tapped.defvjp(lambda site, x, origin, operands: (x, operands), _backward)


class _Tap(eqx.Module):
    """A parameter, or one layer of it, or a cast of it, that has not been read yet."""

    get: Callable[[Array | None], Array] = eqx.field(static=True)
    layer: Array | None = None

    def read(self) -> Array:
        return self.get(self.layer)


@dataclasses.dataclass(eq=False, kw_only=True)
class _Taps(Visitor):
    """Hands taps on to the equations that can read them; `in_loop` in a scan's body."""

    in_loop: bool = False

    def body(
        self, jaxpr: Jaxpr, consts: Sequence[PyTree], args: Sequence[PyTree]
    ) -> Values:
        """Runs a jaxpr; the taps that cannot wait are read first."""
        args = [
            x.read() if isinstance(x, _Tap) and not self.can_wait(jaxpr, var) else x
            for var, x in zip(jaxpr.invars, args, strict=True)
        ]
        return self.run(jaxpr, consts, args, [None] * len(args), ())[0]

    def can_wait(self, jaxpr: Jaxpr, var: Any) -> bool:
        """Returns whether a parameter is used once, by an equation that can read it itself."""

        def judge(eqn: Equation, position: int, scopes: Scopes) -> Verdict:
            name = eqn.primitive.name
            if name == "scan":
                # A scan of length zero has no layer to read, not even in its traced body.
                has_layers = eqn.params["length"] > 0 and not self.in_loop
                return has_layers and position >= sum(scan_sizes(eqn.params))
            if name == "convert_element_type":
                return "result"
            if name in REMAT and self.in_loop:
                return True
            is_call = name == "jit" and not has_shardings(eqn.params)
            return "inside" if name in REMAT or is_call else False

        return every_use(jaxpr, var, judge, once=True)

    def equation(self, op: Op) -> Outcome:
        eqn, values = op.eqn, op.values
        unknown = [None] * len(eqn.outvars)
        if not any(isinstance(x, _Tap) for x in values):
            return eval_equation(eqn, values), unknown
        name = eqn.primitive.name
        if name == "convert_element_type":
            (tap,), dtype = values, eqn.params["new_dtype"]
            cast = lambda layer: tap.get(layer).astype(dtype)  # noqa: E731
            return [_Tap(cast, tap.layer)], unknown
        if name == "scan":
            return self._scan(eqn, values), unknown
        jaxpr, consts = open_jaxpr(eqn.params["jaxpr"])
        if name == "jit":
            return self.body(jaxpr, consts, values), unknown
        # Read inside, so that what was read is not kept for the backward pass.
        body = lambda *values: self.body(jaxpr, consts, values)  # noqa: E731
        return remat_with(eqn, body, values), unknown

    def _scan(self, eqn: Equation, values: Values) -> Values:
        jaxpr, consts = open_jaxpr(eqn.params["jaxpr"])
        n_consts, n_carry = scan_sizes(eqn.params)
        shared, carry = values[:n_consts], values[n_consts : n_consts + n_carry]
        inner = _Taps(in_loop=True)

        def step(carry: Values, x: PyTree) -> tuple[Values, Values]:
            index, xs = x
            xs = [
                dataclasses.replace(x, layer=index) if isinstance(x, _Tap) else x
                for x in xs
            ]
            outs = inner.body(jaxpr, consts, [*shared, *carry, *xs])
            return outs[:n_carry], outs[n_carry:]

        if not jaxpr.effects and not holds(jaxpr, REMAT):
            # What is read from a reference cannot be kept, so the backward pass reads
            # again; all else is kept. Around a remat this would keep what that one does
            # not.
            policy = jax.checkpoint_policies.everything_saveable
            step = jax.checkpoint(step, policy=policy, prevent_cse=False)
        index = jnp.arange(eqn.params["length"], dtype=jnp.int32)
        return scan_with(eqn, step, carry, (index, values[n_consts + n_carry :]))
