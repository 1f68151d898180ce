"""`amp(residuals=...)`: a forward pass that leaves 8-bit codes for the backward pass.

JAX keeps every value that a derivative reads. Many follow from others, as gelu of a matmul's
result does. Here their roots are kept, and the rest is computed again: see `_needs`.

The function, and the body of each loop in it, becomes a `jax.custom_vjp`. Its forward pass
runs the equations that it ran before, and codes the roots. Its backward pass decodes a root
where it is read, and not before the gradient has arrived there: a barrier keeps XLA
from decoding all of them at once. XLA may postpone work that nothing waits for, so each pass
also waits for what it makes: the codes of a root, and the gradients of parameters.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jaxtyping import PyTree

from mpx._jax import _compat as compat
from mpx._jax._compat import eval_equation, open_jaxpr
from mpx._kernels._order import after
from mpx._program import HANDLERS
from mpx._program import _interpreter as interpreter
from mpx._program import _queries as queries
from mpx._program._interpreter import Jaxpr, Op, Outcome, Values, types_of
from mpx._program._primitives import CASTS
from mpx._program._queries import names
from mpx._residuals._codes import Coded, decode, encode, peaks
from mpx._residuals._facts import PRODUCTS, is_var
from mpx._residuals._needs import EXACT_NAME, IsExact, Roots

_once = compat.undifferentiable(
    "`amp(residuals=...)` has no second derivatives: codes are constants to JAX. Take them "
    "of `amp(func)` without `residuals`."
)
_NO_REFERENCES = (
    "A derivative passes through a reference, as `jax.new_ref` makes: with "
    "`amp(residuals=...)` JAX cannot transpose that. Return the value instead of writing it, "
    "or write `jax.lax.stop_gradient` of it."
)
_TOGETHER = 8  # So many arrays are waited for at once: that takes a kernel.

# --- The two passes -------------------------------------------------------------------


def _custom(
    jaxpr: Jaxpr, kinds: Sequence[str], form: str, is_exact: IsExact
) -> Callable[..., Values]:
    """Returns a closed jaxpr as a function whose backward pass reads codes."""
    run, count = compat.as_function(jaxpr), len(jaxpr.out_avals)
    smooth = [i for i, aval in enumerate(jaxpr.out_avals) if _is_float(aval)]

    def forward(*primals: Any) -> tuple[Values, Callable[..., PyTree]]:
        args, structure = [x.value for x in primals], []
        free = [i for i, x in enumerate(primals) if x.perturbed and _is_float(x.value)]

        def linear(*args: PyTree) -> tuple[Values, Values]:
            def call(*chosen: PyTree) -> tuple[Values, Values]:
                full = dict(enumerate(args)) | dict(zip(free, chosen, strict=True))
                outs = run(*full.values())
                return [outs[i] for i in smooth], outs

            given = [args[i] for i in free]
            _, pushforward, outs = jax.linearize(call, *given, has_aux=True)
            structure[:] = [jax.tree.structure(pushforward)]
            return outs, jax.tree.leaves(pushforward)

        new, consts = _flat(jax.make_jaxpr(linear)(*types_of(args)))
        wanted, types = new.outvars[count:], types_of([args[i] for i in free])

        def transpose(chosen: Sequence[int], arriving: Values) -> Jaxpr:
            """Returns the backward pass for the cotangents of some results."""

            def transposed(residuals: Values, cotangents: Values) -> PyTree:
                push = jax.tree.unflatten(structure[0], residuals)
                outs = lambda *x: [push(*x)[smooth.index(i)] for i in chosen]  # noqa: E731
                try:
                    return jax.linear_transpose(outs, *types)(cotangents)
                except AttributeError as error:
                    raise NotImplementedError(_NO_REFERENCES) from error

            return jax.make_jaxpr(transposed)([x.aval for x in wanted], arriving)

        complete = transpose(smooth, [new.outvars[i].aval for i in smooth])
        readers, _ = _flat(complete, queries.REMAT)
        search = Roots(new, kinds, wanted, readers, is_exact)
        roots = search.of(wanted, form)
        inputs = [*new.constvars, *new.invars]
        env = dict(zip(inputs, [*consts, *args], strict=True))
        kept = _run_keeping(new, env, roots, search, form)
        # Data, such as the carry of a loop, is a root or not needed.
        given = [x if y != "data" else None for x, y in zip(args, kinds, strict=True)]

        def backward(kept: Values, cotangents: Values) -> tuple[PyTree, ...]:
            chosen = [i for i in smooth if not isinstance(cotangents[i], SymbolicZero)]
            arriving = [cotangents[i] for i in chosen]
            program = complete if chosen == smooth else transpose(chosen, arriving)
            known = dict(zip([*inputs, *roots], kept, strict=True))
            grads = _Again(search, known, form).run(program, wanted, arriving)
            return tuple(map(dict(zip(free, grads, strict=True)).get, range(len(args))))

        outs = [_read(env, x) for x in new.outvars[:count]]
        return outs, jax.tree_util.Partial(backward, [*consts, *given, *kept])

    call = jax.custom_vjp(lambda *args: run(*args))
    call.defvjp(forward, lambda kept, cotangents: kept(cotangents), symbolic_zeros=True)
    return call


def _keep(search: Roots, root: Any, x: Array, form: str) -> tuple[Array, PyTree]:
    """Returns the value of a root, and the form in which it is kept."""
    if not search.is_coded(root):
        return x, x
    peak = peaks(_once(x))
    if root in search.maker and search.maker[root].primitive.name in PRODUCTS:
        # So XLA makes the codes in the kernel that reads the matmul for the model.
        x, peak = lax.optimization_barrier((x, peak))
    # Tiny numbers become 0 unless a derivative reads their sign: those of a softmax add up.
    signed = search.needs[root].is_signed
    return x, encode(_once(x), form, keeps_signs=signed, peak=peak)


def _run_keeping(
    jaxpr: Jaxpr,
    env: dict[Any, PyTree],
    roots: Sequence[Any],
    search: Roots,
    form: str,
) -> Values:
    """Runs a jaxpr, adds its values to `env`, and returns the roots as they are kept."""
    kept: dict[Any, PyTree] = dict.fromkeys(roots)
    wanted, made = {*roots}, []

    def keep(variables: Sequence[Any]) -> None:
        for var in filter(wanted.__contains__, variables):
            env[var], kept[var] = _keep(search, var, env[var], form)
            if isinstance(kept[var], Coded):
                made.append(kept[var].codes)

    keep([*env])
    for eqn in jaxpr.eqns:
        if len(made) >= _TOGETHER and eqn.primitive.name in PRODUCTS:
            # Otherwise XLA may postpone the codes, which keeps their roots in memory.
            least = min(eqn.invars[:2], key=lambda x: x.aval.size)
            env[least], made = after(env[least], made), []
        with compat.source_context(eqn), eqn.ctx.manager:
            outs = eval_equation(eqn, [_read(env, x) for x in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))
        keep(eqn.outvars)
    return [*kept.values()]


def _read(env: Mapping[Any, PyTree], atom: Any) -> PyTree:
    return env[atom] if is_var(atom) else atom.val


@dataclasses.dataclass
class _Again:
    """A backward pass: values of the forward pass are computed again where they are read."""

    search: Roots
    known: dict[Any, PyTree]  # what is kept or computed; `None` if nothing is
    form: str
    # Gradients that were computed since a root was decoded.
    done: Values = dataclasses.field(default_factory=list)
    # Codes that may be read now, and the 1 that their readers wait for.
    opened: dict[Any, tuple[Coded, Any]] = dataclasses.field(default_factory=dict)
    one: Any = 1.0  # what decoded numbers are multiplied by, so that they wait

    def run(self, program: Jaxpr, wanted: Sequence[Any], arriving: Values) -> Values:
        """Runs a jaxpr whose inputs are wanted values and the cotangents that arrive."""
        body, consts = open_jaxpr(program)
        source = dict(zip(body.invars, wanted, strict=False))
        leaving = _before_casts(body)
        # For a value of this pass, one in memory that it is computed from.
        base = dict(zip(body.invars[len(wanted) :], arriving, strict=True))
        env = base | dict(zip(body.constvars, consts, strict=True))

        def read(atom: Any, arrived: PyTree = None) -> PyTree:
            if not is_var(atom):
                return atom.val
            return self.value(source[atom], arrived) if atom in source else env[atom]

        def is_coded(atom: Any) -> bool:
            found = [source[atom]] if is_var(atom) and atom in source else []
            return any(
                isinstance(self.known[root], Coded)
                for atom in found
                for root in self.search.sources(atom)
            )

        for eqn in body.eqns:
            found = (base[x] for x in eqn.invars if is_var(x) and x in base)
            arrived = next(found, None)
            given = [read(x, arrived) for x in eqn.invars]
            if eqn.primitive.name in queries.REMAT and any(map(is_coded, eqn.invars)):
                # Inlined: XLA does not fuse the body of a remat with the decoding.
                outs = compat.eval_jaxpr(*open_jaxpr(eqn.params["jaxpr"]), *given)
            else:
                outs = eval_equation(eqn, given)
            env.update(zip(eqn.outvars, outs, strict=True))
            if eqn.primitive.name in _STORED:
                base.update(zip(eqn.outvars, outs, strict=True))
            elif arrived is not None:
                base.update(dict.fromkeys(eqn.outvars, arrived))
            self.done += [env[x] for x in eqn.outvars if x in leaving]
        return [*map(read, body.outvars)]

    def value(self, atom: Any, arrived: PyTree) -> PyTree:
        """Returns a value of the forward pass, once another one has arrived."""
        if not is_var(atom):
            return atom.val
        found = self.known.get(atom)
        if isinstance(found, Coded):
            if atom not in self.opened:
                if len(self.done) >= _TOGETHER:
                    self.one = after(jnp.ones((), jnp.float32), self.done)
                    self.done = []
                # Also where nothing has arrived: XLA removes a cast and its inverse.
                coded, _ = lax.optimization_barrier((found, arrived))
                self.opened[atom] = coded, self.one
            # All readers have the same operands, so that XLA fuses them into one kernel.
            coded, one = self.opened[atom]
            return decode(coded, self.form, atom.aval.dtype, one)
        if found is None and self.search.is_derived(atom):
            distance, mean = (self.value(x, arrived) for x in self.search.centred[atom])
            self.known[atom] = (distance + mean).astype(atom.aval.dtype)
        elif found is None:
            eqn = self.search.maker[atom]
            outs = eval_equation(eqn, [self.value(x, arrived) for x in eqn.invars])
            self.known.update(zip(eqn.outvars, outs, strict=True))
        return self.known[atom]


def _before_casts(jaxpr: Jaxpr) -> set[Any]:
    """Returns the outputs of an open jaxpr, taken before their final casts."""
    found = {*filter(is_var, jaxpr.outvars)}
    for eqn in reversed(jaxpr.eqns):
        if eqn.primitive.name in CASTS and eqn.outvars[0] in found:
            found = found - {*eqn.outvars} | {*filter(is_var, eqn.invars)}
    return found


# --- The whole function ---------------------------------------------------------------

_BODIES = names("scan cond shard_map")
_JITS = names("jit pjit")
# Their derivatives are kernels or rules of the user's, of which nothing is known.
_OPAQUE = (*queries.ATTENTION, *queries.CROSS_ENTROPY, "custom_vjp_call")
_STORED = (*PRODUCTS, *queries.ATTENTION, *queries.CROSS_ENTROPY, *_BODIES)


def run_coded(
    run: Callable[[], Values],
    params: Sequence[PyTree],
    inputs: Sequence[PyTree],
    form: str,
    is_kept: IsExact,
) -> Values:
    """Runs a function of no arguments, such that its backward pass reads 8-bit codes.

    It closes over its inputs, among which are parameters, which are alive anyway. What is
    made or read in scopes that are kept stays as it is.
    """
    jaxpr, consts = open_jaxpr(jax.make_jaxpr(run)())
    kind_of = dict.fromkeys(map(id, inputs), "alive")
    kind_of.update(dict.fromkeys(map(id, params), "param"))
    kinds = [kind_of.get(id(x), "constant") for x in consts]
    body = compat.jaxpr_of([*jaxpr.constvars], [*jaxpr.outvars], [*jaxpr.eqns])
    is_exact = lambda eqn, scopes: EXACT_NAME in scopes or is_kept(eqn, scopes)  # noqa: E731
    coder = _Coder(form=form, is_exact=is_exact)
    return coder.run(body, (), consts, kinds, ())[0]


def _flat(jaxpr: Jaxpr, also: Sequence[str] = ()) -> tuple[Jaxpr, Sequence[PyTree]]:
    """Returns a jaxpr with its calls inlined, open, and its constants."""
    body, consts = open_jaxpr(jaxpr)
    is_call = lambda eqn: compat.is_plain_call(eqn) or eqn.primitive.name in also  # noqa: E731
    return queries.inlined(body, is_call), consts


@dataclasses.dataclass(eq=False, kw_only=True)
class _Coder(interpreter.Visitor):
    """Makes functions of bodies; a fact is the kind of a value: see `Roots`."""

    unknown: ClassVar[str] = "data"
    form: str
    is_exact: IsExact

    def run(
        self, jaxpr: Jaxpr, consts: Any, args: Any, facts: Any, scopes: Any
    ) -> Outcome:
        count, inputs = len(consts), [*consts, *args]
        is_jit = lambda eqn: eqn.primitive.name in _JITS and compat.is_plain_call(eqn)  # noqa: E731
        plain = queries.inlined(jaxpr, is_jit)

        def inlined(*args: PyTree) -> Values:
            outs, _ = self.inline(plain, args[:count], args[count:], facts, scopes)
            return interpreter.as_results(outs, jaxpr.outvars)

        traced = jax.make_jaxpr(inlined)(*types_of(inputs))
        kinds = (*["alive"] * count, *facts)
        outs = _custom(traced, kinds, self.form, self.is_exact)(*inputs)
        return list(outs), [self.unknown] * len(outs)

    def inline(self, *given: Any) -> Outcome:
        """Evaluates a jaxpr as a part of the one around it."""
        return super().run(*given)

    def literal_fact(self, atom: Any) -> str:
        return "param"

    def fact_inside(self, fact: str, var: Any, kind: interpreter.Kind) -> str:
        return fact if kind in ("operand", "slice") else self.unknown

    def equation(self, op: Op) -> Outcome:
        (eqn, values, facts, _), name = op, op.eqn.primitive.name
        if name == "scan":
            # Its constants are kept once, by the function around it.
            count, _ = compat.scan_sizes(eqn.params)
            kept = ["alive" if x == "data" else x for x in facts[:count]]
            op = op._replace(facts=kept + facts[count:])
        if name in (*_BODIES, *_JITS):
            return HANDLERS[name](self, op)
        scope = contextlib.nullcontext()
        if name in _OPAQUE:
            mark = lambda x: checkpoint_name(x, EXACT_NAME) if _is_float(x) else x  # noqa: E731
            pairs = zip(interpreter.arrays_of(values), facts, strict=True)
            values = [mark(x) if fact == "data" else x for x, fact in pairs]
            scope = jax.named_scope(EXACT_NAME)
        with scope:
            outs = eval_equation(eqn, values)
        is_param = all(fact == "param" for fact in facts)
        return outs, ["param" if is_param else self.unknown] * len(outs)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(getattr(x, "dtype", np.bool_), jnp.inexact)
