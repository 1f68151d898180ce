"""Sites: the places of a gradient program where a value would be rounded.

The program is that of `amp`, run in f32: values of 16 bits are held in f32, and each place
where one arises is a site.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import PyTree

from mpx._jax._compat import (
    Literal,
    bind,
    eval_equation,
    is_transposed,
    open_jaxpr,
    primitive_name,
    scan_sizes,
    scopes_of,
    source_context,
)
from mpx._program import HANDLERS
from mpx._program._interpreter import (
    Facts,
    Jaxpr,
    Kind,
    Op,
    Outcome,
    Scopes,
    Visitor,
    as_array,
)
from mpx._program._queries import (
    MATMULS,
    MOVES,
    REMAT,
    Equation,
    equations_inside,
    has_body,
    names,
)
from mpx.inspect._dtypes import HALF, is_f32, is_half
from mpx.inspect._groups import Group, token_of

_NESTED = (*names("jit pjit closed_call core_call scan cond"), *REMAT)
_DERIVED = names("custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr")
# The results can be represented where the operands can.
_EXACT = MOVES.union(
    names(
        "gather max min neg abs sign select_n concatenate pad clamp reduce_max reduce_min "
        "stop_gradient sort dynamic_update_slice argmax argmin split iota rev eq ne lt le "
        "gt ge is_finite reduce_window_max select_and_gather_add cummax cummin unstack"
    )
)
_FOLLOWED = MOVES.union(names("gather split neg unstack"))
_COMMON = frozenset(
    (
        *_EXACT,
        *MATMULS,
        *names(
            "add sub mul div add_any exp log log1p expm1 tanh logistic erf sqrt rsqrt "
            "integer_pow pow reduce_sum square sin cos cumsum custom_jvp_call"
        ),
    )
)


class Known(NamedTuple):
    """What is known of a value.

    Attributes:
        owner: The group whose 16-bit result it is, or -1.
        sources: The groups of the matmuls because of which it is of 16 bits: without one of
            them, `amp` would hold it in f32.
        is_pending: Whether it has been cast to 16 bits for whoever reads it.
        is_cotangent: Whether it belongs to the backward pass.
    """

    owner: int = -1
    sources: tuple[int, ...] = ()
    is_pending: bool = False
    is_cotangent: bool = False


class Key(NamedTuple):
    """What decides whether a site rounds, and how.

    Attributes:
        kind: `out` for a result of 16 bits or a cast to them, `entry` for an operand of a
            matmul, `eight` for one that is its own result, `sum` for a sum of rounded values.
        group: The group that rounds.
        owner: The group in whose format the value is already, or -1.
        sources: See `Known`.
        is_cotangent: Whether the value belongs to the backward pass.
    """

    kind: str
    group: int
    owner: int
    sources: tuple[int, ...]
    is_cotangent: bool

    def rounds(self, low: Collection[int], *, alone: bool = False) -> bool:
        """Returns whether a value is rounded if the groups `low` run in 16 bits.

        `alone` judges a group by itself: what it needs to be in 16 bits is, but rounds
        nothing.
        """
        if self.group not in low or self.kind in ("eight", "sum"):
            return False
        is_low = all(x in low for x in self.sources)
        if self.kind == "out":
            return alone or is_low
        return not (self.owner in low and is_low)


class Site(NamedTuple):
    """One place where a value is rounded, or where rounded values are added.

    Attributes:
        number: Its number.
        key: What it has in common with others.
        size: The size of the array.
        operands: How many operands of a sum are looked at.
        lengths: The lengths of the scans around it, outermost first.
    """

    number: int
    key: Key
    size: int
    operands: int
    lengths: tuple[int, ...]


Rule = Callable[[Site, Array, PyTree, tuple[Array, ...]], Array]
"""Takes a site, a value, the arrays of the site, and operands; returns the new value."""


@dataclasses.dataclass(eq=False, kw_only=True)
class Sites(Visitor):
    """Runs a gradient program in f32 and applies a rule at each site.

    Attributes:
        groups: The groups; a label of an equation is a position among them.
        rule: What happens at a site.
        arrays: One array for each site, by its number; `None` to collect the sites.
        sites: The sites, by the equations that they are in.
        quantised: The numbers of sites whose values fp8 may quantise: operands of matmuls
            with a parameter.
        inner: The numbers of the sites inside an equation, by its `id`.
        carried: What is known of a loop's carry after a step.
        opaque: The names of operations that were run as they are written.
    """

    unknown: ClassVar[Known] = Known()
    narrow_carry: bool = True  # held in f32, whatever it was

    groups: Sequence[Group]
    rule: Rule | None = None
    arrays: dict[int, PyTree] | None = None
    sites: dict[tuple[int, ...], Site] = dataclasses.field(default_factory=dict)
    quantised: set[int] = dataclasses.field(default_factory=set)
    inner: dict[int, set[int]] = dataclasses.field(default_factory=dict)
    carried: dict[Hashable, Known] = dataclasses.field(default_factory=dict)
    opaque: set[str] = dataclasses.field(default_factory=set)
    _inside: tuple[int, ...] = ()
    _lengths: tuple[int, ...] = ()
    _count: int = 0
    _results: dict[int, Facts] = dataclasses.field(default_factory=dict)

    # --- equations --------------------------------------------------------------------

    def equation(self, op: Op) -> Outcome:
        eqn, name = op.eqn, primitive_name(op.eqn)
        self._count = 0
        if name in _NESTED:
            by_platform = eqn.params.get("branches_platforms")
            return self._in_place(op) if by_platform else self._nested(op, name)
        if name in _DERIVED and _touches_half(eqn):
            body, consts = open_jaxpr(eqn.params["call_jaxpr"])
            return self.run(body, consts, op.values, op.facts, op.scopes)
        if name in HANDLERS and name not in _DERIVED:
            return self._as_written(op)
        return self._convert(op) if name == "convert_element_type" else self._leaf(op)

    def _leaf(self, op: Op) -> Outcome:
        eqn, name = op.eqn, primitive_name(op.eqn)
        touched = any(is_half(x.aval) for x in (*eqn.invars, *eqn.outvars))
        if name in _FOLLOWED and len(_floats_of(op)) == 1:
            return self._move(op, touched)
        if not self._can_be_differentiated(op, name):
            return self._as_written(op)
        return self._half(op, name) if touched else self._wide(op, name)

    def read(self, atom: object) -> tuple[Array | np.generic | np.ndarray, Known]:
        """Returns a value, in f32 if it is of 16 bits."""
        value, fact = super().read(atom)
        if is_half(getattr(value, "aval", value)):
            value = jnp.asarray(value, np.float32)
        return value, fact

    def _group(self, op: Op) -> int:
        found = token_of(op.scopes).group
        if primitive_name(op.eqn) in MATMULS:
            found = self._of_matmul(op, found)
        owners = (fact.owner for fact in op.facts)
        return max(owners, default=0) if found is None else found

    def _of_matmul(self, op: Op, label: int | None) -> int | None:
        """Returns the group of a matmul: its label, or the one that read its operand.

        Where `amp` sums weight gradients in f32, the label in the backward pass is another
        one's. That pass comes to the matmuls of the forward pass in reverse order.
        """
        is_cotangent, made = _is_cotangent_of(op), self.frame.made
        for x, fact in zip(op.values, op.facts, strict=True):
            readers = made.setdefault(("read", id(x)), (x, []))[1]
            if not is_cotangent:
                readers.append(label)
            elif not fact.is_cotangent and readers and label not in readers:
                return readers.pop()
        return label

    def _convert(self, op: Op) -> Outcome:
        (var,), (out,), (x,), (fact,) = op.eqn.invars, op.eqn.outvars, *op[1:3]
        if is_half(out.aval) and is_f32(var.aval):
            token = token_of(op.scopes)
            if token.is_input or token.group is None or is_transposed(op.eqn):
                return [x], [fact._replace(is_pending=True)]
            return self._round(op, x, fact)
        if is_half(var.aval) and is_f32(out.aval):
            return self._round(op, x, fact) if fact.is_pending else ([x], [fact])
        if is_half(var.aval) and is_half(out.aval):
            return [x], [fact]
        return _bind_wide(op.eqn, [x]), [Known(is_cotangent=fact.is_cotangent)]

    def _round(self, op: Op, x: Array, fact: Known) -> Outcome:
        group = self._group(op)
        sources = fact.sources or (group,)
        key = Key("out", group, -1, sources, fact.is_cotangent)
        x, _ = self._entry(key, x)
        return [x], [Known(group, sources, is_cotangent=fact.is_cotangent)]

    def _move(self, op: Op, touched: bool) -> Outcome:
        (position,) = _floats_of(op)
        source, fact = op.values[position], op.facts[position]

        def again(x: Array) -> list[Array]:
            values = list(op.values)
            values[position] = x
            return (
                _bind_wide(op.eqn, values) if touched else eval_equation(op.eqn, values)
            )

        outs = again(source)
        earlier = self.frame.made.get(("moved", id(source)))
        spreads = op.eqn.primitive.name in ("gather", "broadcast_in_dim")
        if len(outs) == 1 and (earlier or spreads):
            first, before = earlier[1] if earlier else (source, None)
            call = lambda x: again(before(x))[0] if before else again(x)[0]  # noqa: E731
            self.frame.made["moved", id(outs[0])] = outs[0], (first, call)
        return outs, [fact] * len(outs)

    def _wide(self, op: Op, name: str) -> Outcome:
        outs = eval_equation(op.eqn, op.values)
        fact = Known(is_cotangent=_is_cotangent_of(op))
        if name in ("add", "sub"):
            outs = [self._sum(op, outs[0], op.values)]
        return outs, [fact] * len(outs)

    def _half(self, op: Op, name: str) -> Outcome:
        group, values = self._group(op), list(op.values)
        is_matmul, is_cotangent = name in MATMULS, _is_cotangent_of(op)
        sources = (group,) if is_matmul else _sources_of(op)
        is_eight = is_matmul and bool(self.groups[group].param)
        for i, (var, fact) in enumerate(zip(op.eqn.invars, op.facts, strict=True)):
            if not is_half(var.aval) or isinstance(var, Literal):
                continue
            if is_matmul and (fact.is_pending or fact.owner != group):
                key = Key("entry", group, fact.owner, fact.sources, fact.is_cotangent)
            elif fact.is_pending:
                key = Key("out", group, -1, sources, fact.is_cotangent)
            elif is_eight:
                key = Key("eight", group, -1, (), fact.is_cotangent)
            else:
                continue
            values[i], number = self._entry(key, values[i])
            if is_eight and i < 2:
                self.quantised.add(number)
        outs = _bind_wide(op.eqn, values)
        if name in ("add", "sub"):
            outs = [self._sum(op, outs[0], values)]
        if name not in _EXACT:
            key = Key("out", group, group, sources, is_cotangent)
            outs = [
                self._site(key, x)[0] if is_half(var.aval) else x
                for x, var in zip(outs, op.eqn.outvars, strict=True)
            ]
        low = Known(group, sources, is_cotangent=is_cotangent)
        wide = Known(is_cotangent=is_cotangent)
        return outs, [low if is_half(var.aval) else wide for var in op.eqn.outvars]

    def _sum(self, op: Op, out: Array, values: Sequence[Array]) -> Array:
        """Applies the rule to a sum or difference of values that were rounded before."""
        owners = [fact.owner for fact in op.facts if fact.owner >= 0]
        shapes = {jnp.shape(value) for value in values}
        if not owners or len(shapes) > 1 or not is_f32(out):
            return out
        pairs = zip(values, op.facts, strict=True)
        rough = tuple(x for x, fact in pairs if fact.owner >= 0 or fact.is_pending)
        is_cotangent = _is_cotangent_of(op)
        return self._site(Key("sum", owners[0], -1, (), is_cotangent), out, rough)[0]

    # --- sites ------------------------------------------------------------------------

    def _entry(self, key: Key, x: Array) -> tuple[Array, int]:
        """Rounds a value for a group that reads it, once for all its operations.

        What was spread over several places has the same error in all of them: it is
        rounded before. Returns the value and the number of the site.
        """
        made = self.frame.made
        if (key, id(x)) not in made:
            moved = made.get(("moved", id(x)))
            if moved is None:
                found = self._site(key, x)
            else:
                source, call = moved[1]
                value, number = self._entry(key, source)
                found = call(value), number
            made[key, id(x)] = x, found
        return made[key, id(x)][1]

    def _site(
        self, key: Key, x: Array, operands: tuple[Array, ...] = ()
    ) -> tuple[Array, int]:
        if not is_f32(x) or x.size == 0:
            return x, -1
        name = (*self._inside, id(self.frame.eqn), self._count)
        self._count += 1
        if self.arrays is None:
            new = Site(len(self.sites), key, x.size, len(operands), self._lengths)
            number = self.sites.setdefault(name, new).number
            for eqn in self._inside:
                self.inner.setdefault(eqn, set()).add(number)
            return x, number
        site = self.sites[name]
        if self.rule is None or site.number not in self.arrays:
            return x, site.number
        found = self.arrays[site.number]
        return self.rule(site, x, found, operands), site.number

    # --- running ----------------------------------------------------------------------

    def _as_written(self, op: Op) -> Outcome:
        """Runs an equation whose derivative is not known, or that is not looked into."""
        self.opaque.add(primitive_name(op.eqn))
        values = [lax.stop_gradient(x) if is_f32(x) else x for x in op.values]
        outs = _bind_as_written(op.eqn, values)
        return outs, [Known()] * len(outs)

    def _can_be_differentiated(self, op: Op, name: str) -> bool:
        if name in _COMMON or self.arrays is None:
            return True
        floats = [i for i, x in enumerate(op.values) if is_f32(x)]
        if not floats:
            return True

        def call(*chosen: Array) -> list[Array]:
            values = list(map(as_array, op.values))
            for i, x in zip(floats, chosen, strict=True):
                values[i] = x
            outs = _bind_wide(op.eqn, values)
            return [x for x in outs if is_f32(x)]

        def pull(*chosen: Array) -> tuple[Array, ...]:
            outs, vjp = jax.vjp(call, *chosen)
            return vjp(outs)

        try:
            jax.eval_shape(pull, *(as_array(op.values[i]) for i in floats))
        except Exception:  # each primitive says it in its own way
            return False
        return True

    # --- bodies -----------------------------------------------------------------------

    def _in_place(self, op: Op) -> Outcome:
        """Runs the code for platforms without code of their own, as if it stood here.

        A value that it rounds is then known to be the one that was rounded before.
        """
        body, consts = open_jaxpr(op.eqn.params["branches"][-1])
        facts = [*[self.unknown] * len(consts), *op.facts[1:]]
        known = zip((*consts, *op.values[1:]), facts, strict=True)
        before, self._inside = self._inside, (*self._inside, id(op.eqn))
        self.frame.env.update(zip((*body.constvars, *body.invars), known, strict=True))
        for eqn in body.eqns:
            pairs = [self.read(atom) for atom in eqn.invars]
            self.frame.eqn = eqn
            with source_context(eqn), eqn.ctx.manager:
                scopes = op.scopes + scopes_of(eqn)
                inner = Op(eqn, [x for x, _ in pairs], [x for _, x in pairs], scopes)
                outs = zip(*self.equation(inner), strict=True)
            self.frame.env.update(zip(eqn.outvars, outs, strict=True))
        self._inside = before
        found = [self.read(atom) for atom in body.outvars]
        return [x for x, _ in found], [x for _, x in found]

    def _nested(self, op: Op, name: str) -> Outcome:
        outs, facts = HANDLERS[name](self, op)
        if name not in ("scan", "cond"):
            return outs, facts
        branches = op.eqn.params.get("branches") or [op.eqn.params["jaxpr"]]
        bodies = [open_jaxpr(branch)[0] for branch in branches]
        results = [self._results.get(id(body)) for body in bodies]
        if any(found is None for found in results):
            return outs, facts
        first, *others = results
        assert first is not None
        facts = [
            fact if all(x is None or x[i] == fact for x in others) else Known()
            for i, fact in enumerate(first)
        ]
        if name == "scan":
            n_consts, n_carry = scan_sizes(op.eqn.params)
            carry = bodies[0].invars[n_consts : n_consts + n_carry]
            self.carried.update(zip(carry, facts, strict=False))
        return outs, facts

    def run(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Array],
        args: Sequence[Array],
        facts: Sequence[Known],
        scopes: Scopes,
    ) -> Outcome:
        outs, facts = super().run(jaxpr, consts, args, facts, scopes)
        self._results[id(jaxpr)] = facts
        return outs, facts

    def fact_inside(self, fact: Known, var: Hashable, kind: Kind) -> Known:
        if kind != "carry":
            return fact
        known = self.carried.get(var, Known())
        is_cotangent = fact.is_cotangent or is_transposed(self.frame.eqn)
        return known._replace(is_cotangent=is_cotangent)

    def result_facts(self, outs: Sequence[Array], known: Facts) -> Facts:
        return [Known()] * len(outs)

    def more_inputs(self, op: Op) -> dict[int, PyTree] | None:
        if self.arrays is None:
            return None
        wanted = sorted(self.inner.get(id(op.eqn), ()))
        return {i: self.arrays[i] for i in wanted if i in self.arrays}

    @contextlib.contextmanager
    def inside(self, eqn: Equation, more: dict[int, PyTree] | None) -> Iterator[None]:
        before = self.arrays, self._inside, self._lengths
        self._inside += (id(eqn),)
        if primitive_name(eqn) == "scan":
            self._lengths += (eqn.params["length"],)
        if self.arrays is not None:
            self.arrays = more or {}
        try:
            yield
        finally:
            self.arrays, self._inside, self._lengths = before

    def cache_key(self, more: PyTree) -> None:
        return None


# --- equations of 16 bits, run in f32 -------------------------------------------------


def _touches_half(eqn: Equation) -> bool:
    """Returns whether the bodies of an equation read or make values of 16 bits."""
    return any(
        is_half(x.aval)
        for inner in equations_inside(eqn)
        for x in (*inner.invars, *inner.outvars)
    )


def _bind_wide(eqn: Equation, values: Sequence[Array]) -> list[Array]:
    """Runs an equation with f32 in place of 16 bits."""
    if has_body(eqn):
        return _bind_as_written(eqn, values)
    changes: dict[str, object] = {
        key: np.dtype(np.float32)
        for key, value in eqn.params.items()
        if _is_half_dtype(value)
    }
    if "precision" in eqn.params:
        changes["precision"] = lax.Precision.HIGHEST  # or GPUs round to TF32
    return bind(eqn, [as_array(x) for x in values], **changes)


def _bind_as_written(eqn: Equation, values: Sequence[Array]) -> list[Array]:
    """Runs an equation at its own dtypes, on f32 values."""
    cast = [
        x.astype(var.aval.dtype) if is_half(var.aval) else x
        for x, var in zip(map(as_array, values), eqn.invars, strict=True)
    ]
    outs = eval_equation(eqn, cast)
    return [x.astype(np.float32) if is_half(jax.typeof(x)) else x for x in outs]


def _is_half_dtype(value: object) -> bool:
    if not isinstance(value, np.dtype | type):
        return False
    try:
        return str(np.dtype(value)) in HALF
    except TypeError:
        return False


def _is_cotangent_of(op: Op) -> bool:
    """Returns whether the results of an operation belong to the backward pass."""
    return is_transposed(op.eqn) or any(fact.is_cotangent for fact in op.facts)


def _sources_of(op: Op) -> tuple[int, ...]:
    """Returns the matmuls because of which an operation runs in 16 bits.

    In the backward pass it does if its forward operation did.
    """
    known = [fact for fact in op.facts if fact.owner >= 0]
    forward = [fact for fact in known if not fact.is_cotangent]
    return tuple(sorted({x for fact in forward or known for x in fact.sources}))


def _floats_of(op: Op) -> list[int]:
    """Returns the positions of the floating operands."""
    wanted = ("float32", "bfloat16", "float16")
    return [i for i, x in enumerate(op.eqn.invars) if str(x.aval.dtype) in wanted]
