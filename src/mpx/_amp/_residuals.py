"""`amp(residuals=...)`: a forward pass that leaves 8-bit codes for the backward pass.

JAX keeps every value that a derivative reads. Many follow from others, as gelu of a matmul's
result does. Here their roots are kept, and the rest is computed again. A root is the result
of an operation that is expensive (a matmul), that joins several large values (the residual
stream), or that would turn the error of a code into a large one (exp, a comparison).

The function, and the body of each loop in it, becomes a `jax.custom_vjp`. Its forward pass
runs the equations that it ran before, and codes the roots. Its backward pass decodes a root
where it is read, and not before the gradient has arrived there: a barrier keeps XLA
from decoding all of them at once. XLA may postpone work that nothing waits for, so each pass
also waits for what it makes: the codes of a root, and the gradients of parameters.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jaxtyping import PyTree

from mpx._amp._codes import LEAST, Coded, axis_of, can_code, decode, encode, peaks
from mpx._amp._facts import F32
from mpx._jax import _compat as compat
from mpx._jax._compat import Literal, eval_equation, open_jaxpr
from mpx._kernels._order import after
from mpx._program import HANDLERS
from mpx._program import _interpreter as interpreter
from mpx._program import _queries as queries
from mpx._program._interpreter import Jaxpr, Op, Outcome, Values, types_of
from mpx._program._queries import Equation, names

# --- Which values are kept ------------------------------------------------------------

_once = compat.undifferentiable(
    "`amp(residuals=...)` has no second derivatives: codes are constants to JAX. Take them "
    "of `amp(func)` without `residuals`."
)
_EXACT = "mpx.exact"  # the scope of operations, and the name of values, that stay as they are
_SIGNED = frozenset(
    names(
        "reshape transpose broadcast_in_dim squeeze expand_dims convert_element_type copy "
        "copy_p slice rev stop_gradient sharding_constraint reshard mesh_cast pvary pcast "
        "optimization_barrier pad concatenate split reduce_precision neg max min"
    )
)
_STEPS = frozenset(names("eq ne lt le gt ge sign is_finite"))
# Cheap, with results about as exact as the operands.
_AGAIN = _SIGNED.union(
    names("add sub mul div abs select_n clamp tanh logistic erf sin cos square iota"),
    names("integer_pow and or not xor one_minus_square add_any"),
)
# Their results are relatively as exact as their operand.
_RATIOS = _SIGNED.union(names("mul div abs tanh erf square integer_pow"))
_CODED = _AGAIN.union(queries.MATMULS, names("sqrt gather dynamic_slice"))
# Small results matter beside large ones, as the weights of a softmax do.
_WEIGHTS = frozenset(names("exp exp2 expm1"))
# The position of an operand by which they, or their derivatives, divide.
_DIVISORS = {"div": 1, "log": 0, "sqrt": 0, "rsqrt": 0, "cbrt": 0}
_STEEP = frozenset(names("log1p atanh"))  # Theirs divide by a distance from 1.
# Their derivatives ask which number is the largest.
_ORDERED = frozenset(
    names(
        "reduce_window_max reduce_window_min select_and_gather_add cummax cummin sort"
    )
)
_REDUCTIONS = frozenset(names("reduce_sum reduce_max reduce_min reduce_prod"))
# Large values that a result is computed again from: the derivative of a product reads them.
_JOINED = {"mul": 4, "div": 4, "and": 4, "or": 4}
# Their results vary along the axes along which an operand does.
_POINTWISE = names(
    "add sub mul div neg abs max min sqrt rsqrt square integer_pow convert_element_type copy"
)
_SMALL = 8  # A value is small beside one that has so many times more numbers.
_DEEPEST = 100  # equations between a root and a value
_TOGETHER = 8  # So many arrays are waited for at once: that takes a kernel.


class Known(NamedTuple):
    """What is known of a value; by default, of a constant."""

    roots: tuple[Any, ...] = ()  # what it is computed from, besides arguments
    is_param: bool = True  # whether parameters and constants alone enter
    is_exact: bool = True  # whether it is the same if it is computed from decoded roots
    is_signed: bool = False  # whether its sign is that of its root
    is_reduced: bool = (
        True  # whether it comes from reductions alone, as a variance does
    )
    depth: int = 0


class Search:
    """The roots of values of an open jaxpr, whose inputs are "param", "alive" or "data"."""

    def __init__(self, jaxpr: Jaxpr, kinds: Sequence[str]) -> None:
        self.maker = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self._known: dict[Any, Known] = dict.fromkeys(jaxpr.constvars, Known())
        self._zeros: set[Any] = set()
        self._compared: set[Any] = set()  # Their signs are asked: they are roots.
        self._ordered: set[Any] = set()  # They are kept as they are.
        # Something divides by them, or by what is computed from them, so small numbers must
        # be as exact as large ones: they are kept as bf16.
        self._relative: set[Any] = set()
        # The axes along which a value varies, and those of a factor that is an inverse.
        self._axes: dict[Any, set[int]] = {}
        self._inverses: dict[Any, set[int]] = {}
        for eqn in filter(lambda eqn: len(eqn.outvars) == 1, jaxpr.eqns):
            self._spread(eqn)
        for eqn in reversed(jaxpr.eqns):
            self._mark(eqn)
        for eqn in jaxpr.eqns:
            name, is_zero = eqn.primitive.name, [*map(self._is_zero, eqn.invars)]
            if name in ("broadcast_in_dim", "convert_element_type") and is_zero[0]:
                self._zeros.update(eqn.outvars)
            is_asked = name in ("sign", "abs") or any(is_zero)
            if is_asked and (name in _STEPS or name in ("max", "min", "abs")):
                self._compared.update(x for x in eqn.invars if _is_var(x))
            if name in _ORDERED:
                self._ordered.update(x for x in eqn.invars if _is_var(x))
        for var, kind in zip(jaxpr.invars, kinds, strict=True):
            kept = Known((), kind == "param", is_reduced=False)
            self._known[var] = self._root(var) if kind == "data" else kept
        for var, eqn in self.maker.items():
            self._known[var] = self._follow(eqn, var)

    def _mark(self, eqn: Equation) -> None:
        """Finds divisors, from the last equation to the first."""
        name, read = eqn.primitive.name, {*filter(_is_var, eqn.invars)}
        for marked in (self._relative, self._ordered):
            if name in _AGAIN and not marked.isdisjoint(eqn.outvars):
                marked |= read
        if name in _DIVISORS:
            divisor = eqn.invars[_DIVISORS[name]]
            self._relative.update(x for x in read if x is divisor)
        # A small number over a small one weighs as much as a large one over a large one,
        # unless one number divides a whole block.
        if name in ("mul", "div") and len(read) == 2:
            x, y = eqn.invars
            by_y = self._axes_of(y) if name == "div" else self._inverses.get(y, set())
            divided = (x, by_y), (y, self._inverses.get(x, set()))
            self._relative.update(x for x, axes in divided if axis_of(x.aval) in axes)
        self._relative.update(eqn.outvars if name in _WEIGHTS else ())
        self._ordered.update(read if name in _STEEP else ())

    def _spread(self, eqn: Equation) -> None:
        """Notes along which axes a result varies, and the part of it that is an inverse."""
        name, (out,) = eqn.primitive.name, eqn.outvars
        read = [*filter(_is_var, eqn.invars)]
        inverse = set[int]()
        if name in ("div", "rsqrt", "pow") or _is_inverse(eqn):
            inverse = self._axes_of(eqn.invars[1 if name == "div" else 0])
        inverses = [self._inverses[x] for x in read if x in self._inverses]
        if name == "broadcast_in_dim" and read:
            places = eqn.params["broadcast_dimensions"]
            inverses = [{places[i] for i in axes} for axes in inverses]
            self._axes[out] = {places[i] for i in self._axes_of(read[0])}
        elif name in _POINTWISE and all(x.aval.ndim == out.aval.ndim for x in read):
            self._axes[out] = set().union(*map(self._axes_of, read))
        elif inverses:
            inverses = [self._axes_of(out)] if name in _SIGNED else []
        if inverse := inverse.union(*inverses):
            self._inverses[out] = inverse

    def _axes_of(self, atom: Any) -> set[int]:
        """Returns the axes along which a value varies, as far as is known."""
        if not _is_var(atom):
            return set()
        long = {i for i, size in enumerate(atom.aval.shape) if size != 1}
        return self._axes.get(atom, long) & long

    def roots(self, wanted: Sequence[Any]) -> list[Any]:
        """Returns what to keep so that values can be computed again."""
        return [*dict.fromkeys(x for atom in wanted for x in self._read(atom).roots)]

    def keep(self, root: Any, x: Array, form: str) -> tuple[Array, PyTree]:
        """Returns the value of a root, and the form in which it is kept."""
        if self._known[root].is_exact:
            return x, x
        if root in self._relative:
            low = _once(x).astype(jnp.bfloat16)
            return x, Coded(lax.bitcast_convert_type(low, jnp.uint16), None)
        peak = peaks(_once(x))
        if self._makes(root) in queries.MATMULS:
            # So XLA makes the codes in the kernel that reads the matmul for the model.
            x, peak = lax.optimization_barrier((x, peak))
        # Tiny numbers of which no sign is asked become 0: those of a softmax add up.
        signed = root in self._compared
        return x, encode(_once(x), form, keeps_signs=signed, peak=peak)

    def _is_zero(self, atom: Any) -> bool:
        return atom in self._zeros if _is_var(atom) else not np.any(atom.val)

    def _read(self, atom: Any) -> Known:
        return self._known[atom] if _is_var(atom) else Known()

    def _root(
        self, var: Any, is_param: bool = False, is_reduced: bool = False
    ) -> Known:
        """Returns what is known of a value that is kept if it is needed."""
        name = self._makes(var)
        is_coded = not (is_param or is_reduced) and can_code(var.aval)
        is_coded &= var not in self._ordered
        if is_coded and var in self._relative:
            is_coded = var.aval.dtype == F32
        elif is_coded and name:
            is_coded = name in _CODED
        if is_coded and name:
            is_coded = _EXACT not in compat.scopes_of(self.maker[var])
        return Known((var,), is_param, not is_coded, True, is_reduced)

    def _makes(self, var: Any) -> str:
        """Returns the primitive that makes a value; "" for an input."""
        return self.maker[var].primitive.name if var in self.maker else ""

    def _follow(self, eqn: Equation, var: Any) -> Known:
        name, read = eqn.primitive.name, [*map(self._read, eqn.invars)]
        is_param, is_exact, is_reduced = (
            all(getattr(x, f"is_{kind}") for x in read)
            for kind in ("param", "exact", "reduced")
        )
        inner = {x.primitive.name for x in queries.equations(eqn)} - {*queries.CALLS}
        roots = tuple(dict.fromkeys(root for x in read for root in x.roots))
        is_spread = roots and var.aval.size > max(x.aval.size for x in eqn.invars)
        is_reduced = name in _REDUCTIONS or (is_reduced and not is_spread)
        if name not in _AGAIN | _STEPS and not (inner and inner <= _AGAIN):
            return self._root(var, is_param, is_reduced)
        pairs = zip(eqn.invars, read, strict=True)
        is_signed = all(x.is_signed or self._is_zero(atom) for atom, x in pairs)
        is_signed &= len(roots) == 1
        depth, is_step = 1 + max((x.depth for x in read), default=0), name in _STEPS
        large = [x for x in roots if x.aval.size * _SMALL > var.aval.size]
        divides = not read[1].is_exact if name == "div" else _is_inverse(eqn)
        if divides and not is_exact:
            self._relative.add(var)
            return self._root(var, is_param, is_reduced)
        keeps = name in _RATIOS and is_signed and roots[0] in self._relative
        if (
            len(large) > _JOINED.get(name, 1)
            or depth > _DEEPEST
            # A comparison is one byte, also where it is made of random bits.
            or (is_step and (large if is_exact else not is_signed))
            or (var in self._relative and not (is_exact or keeps))
            or (var in self._compared and roots and not is_signed)
            or (var in self._ordered and not is_exact)
        ):
            return self._root(var, is_param, is_reduced)
        is_exact, is_signed = is_exact or is_step, is_signed and name in _SIGNED
        return Known(roots, is_param, is_exact, is_signed, is_reduced, depth)


def _is_var(atom: Any) -> bool:
    return not isinstance(atom, Literal)


def _is_inverse(eqn: Equation) -> bool:
    return eqn.primitive.name == "integer_pow" and eqn.params["y"] < 0


# --- The two passes -------------------------------------------------------------------


def _custom(jaxpr: Jaxpr, kinds: Sequence[str], form: str) -> Callable[..., Values]:
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

        new, consts = open_jaxpr(jax.make_jaxpr(linear)(*types_of(args)))
        search, wanted = Search(new, kinds), new.outvars[count:]
        roots, inputs = search.roots(wanted), [*new.constvars, *new.invars]
        env = dict(zip(inputs, [*consts, *args], strict=True))
        kept = _run_keeping(new, env, roots, search, form)
        outs = [_read(env, x) for x in new.outvars[:count]]
        # Data, such as the carry of a loop, is a root or not needed.
        pairs = zip(kinds, args, strict=True)
        given = [None if kind == "data" else x for kind, x in pairs]
        types = types_of([args[i] for i in free])

        def backward(kept: Values, cotangents: Values) -> tuple[PyTree, ...]:
            chosen = [i for i in smooth if not isinstance(cotangents[i], SymbolicZero)]
            arriving = [cotangents[i] for i in chosen]

            def transposed(residuals: Values, cotangents: Values) -> PyTree:
                push = jax.tree.unflatten(structure[0], residuals)
                places = [smooth.index(i) for i in chosen]
                outs = lambda *x: [push(*x)[i] for i in places]  # noqa: E731
                return jax.linear_transpose(outs, *types)(cotangents)

            residuals = [atom.aval for atom in wanted]
            program = jax.make_jaxpr(transposed)(residuals, arriving)
            known = dict(zip([*inputs, *roots], kept, strict=True))
            grads = _Again(search, known, form).run(program, wanted, arriving)
            found = dict(zip(free, grads, strict=True))
            return tuple([found.get(i) for i in range(len(args))])

        return outs, jax.tree_util.Partial(backward, [*consts, *given, *kept])

    call = jax.custom_vjp(lambda *args: run(*args))
    call.defvjp(forward, lambda kept, cotangents: kept(cotangents), symbolic_zeros=True)
    return call


def _run_keeping(
    jaxpr: Jaxpr,
    env: dict[Any, PyTree],
    roots: Sequence[Any],
    search: Search,
    form: str,
) -> Values:
    """Runs a jaxpr, adds its values to `env`, and returns the roots as they are kept."""
    kept: dict[Any, PyTree] = dict.fromkeys(roots)
    wanted, made = {*roots}, []

    def keep(variables: Sequence[Any]) -> None:
        for var in filter(wanted.__contains__, variables):
            env[var], kept[var] = search.keep(var, env[var], form)
            if isinstance(kept[var], Coded):
                made.append(kept[var].codes)

    keep([*env])
    for eqn in jaxpr.eqns:
        if len(made) >= _TOGETHER and eqn.primitive.name in queries.MATMULS:
            # Otherwise XLA may postpone the codes, which keeps their roots in memory.
            least = min(eqn.invars[:2], key=lambda x: x.aval.size)
            env[least], made = after(env[least], made), []
        with compat.source_context(eqn), eqn.ctx.manager:
            outs = eval_equation(eqn, [_read(env, x) for x in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))
        keep(eqn.outvars)
    return [*kept.values()]


def _read(env: Mapping[Any, PyTree], atom: Any) -> PyTree:
    return env[atom] if _is_var(atom) else atom.val


@dataclasses.dataclass
class _Again:
    """A backward pass: values of the forward pass are computed again where they are read."""

    search: Search
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
            if not _is_var(atom):
                return atom.val
            return self.value(source[atom], arrived) if atom in source else env[atom]

        def is_coded(atom: Any) -> bool:
            found = [source[atom]] if _is_var(atom) and atom in source else []
            return any(
                isinstance(self.known[root], Coded) for root in self.search.roots(found)
            )

        for eqn in body.eqns:
            found = (base[x] for x in eqn.invars if _is_var(x) and x in base)
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
        if not _is_var(atom):
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
        if found is None:
            eqn = self.search.maker[atom]
            outs = eval_equation(eqn, [self.value(x, arrived) for x in eqn.invars])
            self.known.update(zip(eqn.outvars, outs, strict=True))
        return self.known[atom]


def _before_casts(jaxpr: Jaxpr) -> set[Any]:
    """Returns the outputs of an open jaxpr, taken before their final casts."""
    found = {*filter(_is_var, jaxpr.outvars)}
    for eqn in reversed(jaxpr.eqns):
        if eqn.primitive.name == "convert_element_type" and eqn.outvars[0] in found:
            found = found - {*eqn.outvars} | {*filter(_is_var, eqn.invars)}
    return found


# --- The whole function ---------------------------------------------------------------

_BODIES = names("scan cond shard_map")
# Their derivatives are kernels or rules of the user's, of which nothing is known.
_OPAQUE = (*queries.ATTENTION, *queries.CROSS_ENTROPY, "custom_vjp_call")
_STORED = (*queries.MATMULS, *queries.ATTENTION, *queries.CROSS_ENTROPY, *_BODIES)
# They, or their derivatives, jump.
_JUMPS = frozenset(
    names("eq ne lt le gt ge sign max min abs floor ceil round sort top_k")
)


def run_coded(run: Callable[[], Values], params: Sequence[PyTree], form: str) -> Values:
    """Runs a function of no arguments, such that its backward pass reads 8-bit codes.

    It closes over its inputs, among which are parameters, which are alive anyway.
    """
    jaxpr, consts = open_jaxpr(jax.make_jaxpr(run)())
    known = set(map(id, params))
    kinds = ["param" if id(x) in known else "alive" for x in consts]
    body = compat.jaxpr_of([*jaxpr.constvars], [*jaxpr.outvars], [*jaxpr.eqns])
    return _Coder(form=form).run(body, (), consts, kinds, ())[0]


@dataclasses.dataclass(eq=False, kw_only=True)
class _Coder(interpreter.Visitor):
    """Makes functions of bodies; a fact is the kind of a value: see `Search`."""

    unknown: ClassVar[str] = "data"
    form: str

    def run(
        self, jaxpr: Jaxpr, consts: Any, args: Any, facts: Any, scopes: Any
    ) -> Outcome:
        count, inputs = len(consts), [*consts, *args]

        def inlined(*args: PyTree) -> Values:
            outs, _ = self.inline(jaxpr, args[:count], args[count:], facts, scopes)
            return interpreter.as_results(outs, jaxpr.outvars)

        traced = jax.make_jaxpr(inlined)(*types_of(inputs))
        outs = _custom(traced, (*["alive"] * count, *facts), self.form)(*inputs)
        return list(outs), [self.unknown] * len(outs)

    def inline(self, *given: Any) -> Outcome:
        """Evaluates a jaxpr as a part of the one around it."""
        return super().run(*given)

    def literal_fact(self, atom: Any) -> str:
        return "param"

    def fact_inside(self, fact: str, var: Any, kind: interpreter.Kind) -> str:
        return fact if kind in ("operand", "slice") else self.unknown

    def equation(self, op: Op) -> Outcome:
        (eqn, values, facts, scopes), name = op, op.eqn.primitive.name
        if name in ("jit", "pjit") and _is_plain(eqn):
            return self.inline(*open_jaxpr(eqn.params["jaxpr"]), values, facts, scopes)
        if name == "scan":
            # Its constants are kept once, by the function around it.
            count, _ = compat.scan_sizes(eqn.params)
            kept = ["alive" if x == "data" else x for x in facts[:count]]
            op = op._replace(facts=kept + facts[count:])
        if name in (*_BODIES, "jit", "pjit"):
            return HANDLERS[name](self, op)
        scope = contextlib.nullcontext()
        if name in _OPAQUE or (name in queries.REMAT and _jumps(eqn)):
            mark = lambda x: checkpoint_name(x, _EXACT) if _is_float(x) else x  # noqa: E731
            pairs = zip(interpreter.arrays_of(values), facts, strict=True)
            values = [mark(x) if fact == "data" else x for x, fact in pairs]
            scope = jax.named_scope(_EXACT)
        with scope:
            outs = eval_equation(eqn, values)
        is_param = all(fact == "param" for fact in facts)
        return outs, ["param" if is_param else self.unknown] * len(outs)


def _is_plain(eqn: Equation) -> bool:
    """Returns whether a jitted function can be inlined: it asks for no shardings."""
    asked = (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
    return all(x is compat.unspecified_sharding() for x in asked)


def _jumps(eqn: Equation) -> bool:
    """Returns whether a body compares large arrays, or divides by them.

    Softmax has a largest of -inf and them, and divides by sums.
    """
    is_inf = lambda x: not (_is_var(x) or np.all(np.isfinite(x.val)))  # noqa: E731
    is_large = lambda x: _is_float(x.aval) and x.aval.size >= LEAST  # noqa: E731
    spread: set[Any] = set()
    for x in queries.equations(eqn):
        name, read = x.primitive.name, x.invars
        if name == "broadcast_in_dim" and read[0].aval.size < x.outvars[0].aval.size:
            spread.update(x.outvars)
        if name in _DIVISORS or _is_inverse(x):
            read = [read[_DIVISORS.get(name, 0)]]
            read = [x for x in read if _is_var(x) and x not in spread]
        elif name not in _JUMPS or any(map(is_inf, read)):
            continue
        if any(map(is_large, read)):
            return True
    return False


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(getattr(x, "dtype", np.bool_), jnp.inexact)
