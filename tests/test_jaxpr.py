"""The interpreter: a visitor that changes nothing computes what the function computes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from mpx._compat import eval_equation, open_jaxpr
from mpx._jaxpr import HANDLERS
from mpx._jaxpr._interpreter import Visitor
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
