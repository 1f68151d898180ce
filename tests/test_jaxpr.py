"""Ways through a jaxpr: visitors that change nothing, walks, labels and runs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from mpx._jax._compat import eval_equation, open_jaxpr, primitive_name
from mpx._program import HANDLERS
from mpx._program._flow import Walk
from mpx._program._interpreter import Visitor
from mpx._program._queries import last_uses, walk
from mpx.inspect._run import Run, Value
from mpx.testing import assert_trees_equal

X, W = jnp.linspace(-1.0, 1.0, 4), jnp.linspace(0.5, 1.5, 8).reshape(2, 4)


@dataclasses.dataclass(eq=False, kw_only=True)
class Same(Visitor):
    """Counts the equations of each primitive and changes none."""

    counts: dict[str, int] = dataclasses.field(default_factory=dict)

    def equation(self, op):
        name = op.eqn.primitive.name
        self.counts[name] = self.counts.get(name, 0) + 1
        if name in HANDLERS:
            return HANDLERS[name](self, op)
        return eval_equation(op.eqn, op.values), [None] * len(op.eqn.outvars)


@jax.custom_jvp
def by_jvp(x):
    return jnp.sin(x)


by_jvp.defjvps(lambda t, _, x: 2 * t * jnp.cos(x))


@jax.custom_vjp
def by_vjp(x):
    return jnp.sin(x)


by_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (3 * g * jnp.cos(x),))


def in_shard_map(x, w):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    run = jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    return run(x * w[0])


FUNCTIONS = {
    "jit": lambda x, w: jax.jit(jnp.sin)(x * w[0]),
    "checkpoint": lambda x, w: jax.checkpoint(jnp.sin)(x * w[0]),
    "cond": lambda x, w: lax.cond(x[0] < 0, jnp.sin, lambda x: 2 * x, x * w[0]),
    "scan": lambda x, w: lax.scan(lambda c, w: (jnp.sin(c * w), 1), x, w)[0],
    "while": lambda x, w: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x * w[0])
    )[1],
    "custom_jvp_call": lambda x, w: by_jvp(x * w[0]),
    "custom_vjp_call": lambda x, w: by_vjp(x * w[0]),
    "shard_map": in_shard_map,
}


@pytest.mark.some(4)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_visitor_that_changes_nothing(name):
    func, visitor = FUNCTIONS[name], Same()

    def visited(x, w):
        body, consts = open_jaxpr(jax.make_jaxpr(func)(x, w))
        (out,), _ = visitor.run(body, consts, [x, w], [None, None], ())
        return out

    assert_trees_equal(jax.jit(visited)(X, W), jax.jit(func)(X, W))
    assert "sin" in visitor.counts
    assert HANDLERS[name] in [HANDLERS.get(found) for found in visitor.counts]
    if name != "while":
        grads = (jax.jit(jax.jacrev(f, argnums=(0, 1))) for f in (visited, func))
        for got, want in zip(*(jax.tree.leaves(g(X, W)) for g in grads), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_walk_says_what_is_around_an_equation(name):
    def func(x, w):
        with jax.named_scope("outer"):
            return FUNCTIONS[name](x, w)

    (here,) = (
        x for x in walk(jax.make_jaxpr(func)(X, W)) if primitive_name(x.eqn) == "sin"
    )
    assert here.scopes == ("outer",)
    assert here.times == (len(W) if name == "scan" else 1)
    assert HANDLERS[name] in [HANDLERS.get(primitive_name(x)) for x in here.callers]
    assert not here.backward
    if name != "while":
        jaxpr = jax.make_jaxpr(jax.grad(lambda x: func(x, W).sum()))(X)
        assert any(x.backward for x in walk(jaxpr))


class Sources(Walk):
    """Labels each value with the arguments that it is computed from."""

    unknown = ""

    def equation(self, here, labels):
        label = "".join(sorted({*"".join(labels)}))
        if primitive_name(here.eqn) == "sin":
            self.seen = label
        return [label] * len(here.eqn.outvars)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_labels_reach_what_is_inside_but_for_a_carry(name):
    sources = Sources()
    outs = sources.run(jax.make_jaxpr(FUNCTIONS[name])(X, W), ["x", "w"])
    assert sources.seen == {"scan": "w", "while": ""}.get(name, "wx")
    assert outs == ["wx"]


class Counted(Run):
    """Counts the sines that it runs."""

    count = 0

    def leaf(self, eqn, operands, around):
        self.count += primitive_name(eqn) == "sin"
        return super().leaf(eqn, operands, around)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_run_goes_through_each_step(name):
    run = Counted()
    args = [Value((x,)) for x in (X, W)]
    (out,) = run(jax.make_jaxpr(FUNCTIONS[name])(X, W), args)
    np.testing.assert_allclose(out.lanes[0], FUNCTIONS[name](X, W), rtol=1e-6)
    assert run.count == {"scan": len(W), "while": 3}.get(name, 1)


def test_values_end_with_their_last_use():
    body, _ = open_jaxpr(jax.make_jaxpr(lambda x: (jnp.sin(x) * x, jnp.cos(x)))(X))
    named = {var: name for name, var in zip("xsmc", variables(body), strict=True)}
    ends = [sorted(named[var] for var in found) for found in last_uses(body)]
    assert ends == [[], ["s"], ["x"]]


def variables(body):
    return [*body.invars, *(var for eqn in body.eqns for var in eqn.outvars)]
