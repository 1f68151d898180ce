"""Operations with rules, references or callbacks of their own run under `amp`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from models import equations, normal
from mpx import amp
from mpx._jax._compat import assumed_gpu
from mpx._program._queries import equations as walked

N, D = 6, 8
X, W = normal(0, N, D), normal(1, D, D)
SQUARE = X[:, :N] @ X[:, :N].T


def dot_dtypes(func, *args):
    traced = walked(jax.make_jaxpr(func)(*args))
    dots = [eqn for eqn in traced if eqn.primitive.name == "dot_general"]
    return {str(eqn.invars[0].aval.dtype) for eqn in dots}


# --- Derivatives ----------------------------------------------------------------------


@jax.custom_vjp
def noted(x, ref):
    return jnp.tanh(x @ W)


def _noted_forward(x, ref):
    y = jnp.tanh(x @ W)
    return y, (y, ref)


def _noted_backward(residuals, grad):
    y, ref = residuals
    grad = grad * (1 - y * y)
    ref[...] = grad
    return grad @ W.T, None


noted.defvjp(_noted_forward, _noted_backward)


def by_rule(x):
    return noted(x, jax.new_ref(jnp.zeros((N, D))))


def by_reference(x):
    ref = jax.new_ref(x)
    ref[...] = ref[...] @ W
    return ref[...]


@jax.custom_vjp
def optimized(x, w):
    return jnp.tanh(x @ w)


def _optimized_backward(residuals, grad):
    x, w, y = residuals
    grad = grad * (1 - y * y)
    return grad @ w.T, x.T @ grad


def _optimized_forward(x, w):
    y = jnp.tanh(x @ w)
    return y, (x, w, y)


optimized.defvjp(_optimized_forward, _optimized_backward, optimize_remat=True)


@jax.custom_batching.custom_vmap
def batched(x, w):
    return jnp.tanh(x @ w)


@batched.def_vmap
def _(size, are_batched, x, w):
    del size
    assert are_batched == [True, False]
    return jnp.tanh(jnp.einsum("bij,jk->bik", x, w)), True


def vjp_only(x, w):
    """A high-level operation of JAX 0.12 that has a vjp, but no tangents."""
    hijax: Any = pytest.importorskip("jax.experimental.hijax")
    if not hasattr(hijax, "HiPrim"):
        pytest.skip("JAX has no such operations")

    class Layer(hijax.HiPrim):
        def __init__(self):
            self.in_avals = jax.typeof(x), jax.typeof(w)
            self.out_aval, self.params = jax.typeof(x), {}
            super().__init__()

        def expand(self, x, w):
            return jnp.tanh(x @ w)

        def vjp_fwd(self, nzs_in, x, w):
            del nzs_in
            return _optimized_forward(x, w)

        def vjp_bwd_retval(self, residuals, grad):
            return _optimized_backward(residuals, grad)

    return Layer()(x, w)


FUNCS = {
    "ldexp": lambda x: jnp.ldexp(x @ W, jnp.full((N, D), -2)),
    "frexp": lambda x: jnp.frexp(3 + jnp.tanh(x @ W))[0],  # between two jumps
    "frexp and ldexp": lambda x: jnp.ldexp(*jnp.frexp(x @ W)),
    "a reference": by_reference,
    "a reference in a rule": by_rule,
    "a rule with optimize_remat": lambda x: optimized(x, W),
    "the same in remat": jax.checkpoint(lambda x: optimized(x, W)),
    "custom_vmap under vmap": lambda x: jax.vmap(batched, (0, None))(x[None], W),
    "an operation with a vjp only": lambda x: vjp_only(x, W),
}


@pytest.mark.some(5)
@pytest.mark.parametrize("name", FUNCS)
def test_gradient_runs_low_and_is_that_of_the_function(name):
    def loss(x):
        return jnp.mean(jnp.sin(FUNCS[name](x)))

    wanted, exact = jax.jit(jax.value_and_grad(loss))(X)
    value, grad = jax.jit(jax.value_and_grad(amp(loss)))(X)
    assert dot_dtypes(jax.grad(amp(loss)), X) == {"bfloat16"}
    # Two matmuls one behind the other, of three roundings each.
    bound = 2 * 3 * 2.0**-8
    np.testing.assert_allclose(value, wanted, atol=bound)
    assert np.linalg.norm(grad - exact) <= bound * np.linalg.norm(exact)


def test_rule_for_batches_is_kept_and_runs_low():
    func = amp(lambda x: batched(x, W))
    calls = [x.primitive.name for x in equations(jax.make_jaxpr(func)(X))]
    assert "custom_vmap_call" in calls
    mapped = jax.vmap(func)
    assert dot_dtypes(func, X) == dot_dtypes(mapped, X[None]) == {"bfloat16"}
    np.testing.assert_allclose(mapped(X[None])[0], batched(X, W), atol=D * 2.0**-8)


def closes_in_forward(w, x):
    call: Any = jax.custom_vjp(lambda x: x @ w)
    call.defvjp(lambda x: (x @ w, None), lambda _, grad: (grad @ W.T,))
    return call(x)


def closes_in_backward(w, x):
    call: Any = jax.custom_vjp(lambda x: x @ w)
    call.defvjp(lambda x: (call(x), None), lambda _, grad: (grad @ (w * 2).T,))
    return call(x)


def closes_without_a_matmul(w, x):
    call: Any = jax.custom_vjp(lambda x: jnp.sum(x[:, :, None] * w[None], 1))
    call.defvjp(
        lambda x: (jnp.sum(x[:, :, None] * w[None], 1), None),
        lambda _, grad: (jnp.sum(grad[:, None] * W[None], 2),),
    )
    return call(x)


def closes_in_tangents(w, x):
    call: Any = jax.custom_jvp(lambda x: x @ w)
    call.defjvp(lambda primals, tangents: (primals[0] @ w, tangents[0] @ w))
    return call(x)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
@pytest.mark.parametrize(
    "func",
    [
        closes_in_forward,
        closes_in_backward,
        closes_in_tangents,
        closes_without_a_matmul,
    ],
)
def test_rule_that_closes_over_an_argument_is_refused(func, wrap):
    grad = wrap(jax.grad(amp(lambda w, x: jnp.sum(func(w, x))), argnums=1))
    with pytest.raises(
        NotImplementedError, match="closes over an array that is an arg"
    ):
        grad(W, X)
    np.testing.assert_allclose(amp(func)(W, X), X @ W, atol=D * 2.0**-7)


def test_rule_inside_a_loop_may_not_close_over_what_is_around_the_loop():
    def func(w, x):
        call = jax.custom_vjp(lambda x: x @ w)
        call.defvjp(lambda x: (x @ w, None), lambda _, g: (g @ w.T,))
        return lax.scan(lambda x, _: (call(x), None), x, length=2)[0]

    grad = jax.jit(jax.grad(amp(lambda w, x: jnp.sum(func(w, x))), argnums=1))
    with pytest.raises(NotImplementedError, match="Pass the array as an argument"):
        grad(W, X)


@jax.custom_vjp
def product(w, x):
    return x @ w


product.defvjp(
    lambda w, x: (x @ w, (w, x)),
    lambda kept, grad: (kept[1].T @ grad, grad @ kept[0].T),
)


def in_a_loop(w, x):
    return lax.scan(lambda x, _: (jax.checkpoint(jnp.matmul)(x, w), None), x, length=1)[
        0
    ]


@pytest.mark.eight_devices
@pytest.mark.parametrize("func", [product, in_a_loop])
def test_rules_and_loops_run_inside_a_shard_map_that_is_not_compiled(func):
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    specs: Any = {"in_specs": (P(), P("x")), "out_specs": P("x")}
    mapped = jax.shard_map(func, mesh=mesh, check_vma=False, **specs)
    np.testing.assert_allclose(amp(mapped)(W, X), X @ W, atol=D * 2.0**-7)
    grad = jax.grad(amp(lambda w, x: jnp.sum(mapped(w, x) ** 2)))
    wanted = jax.grad(lambda w, x: jnp.sum((x @ w) ** 2))(W, X)
    np.testing.assert_allclose(grad(W, X), wanted, atol=0.02 * np.abs(wanted).max())


# --- Effects --------------------------------------------------------------------------


def steps(note):
    """A sum in a loop whose steps are noted, and sums over the last axis."""

    def func(x):
        def step(total, row):
            total = total + row
            note(total)
            return total, jnp.sum(row)

        total, sums = lax.scan(step, jnp.zeros(D), x)
        note(jnp.sum(x, axis=-1))
        unrolled = x[0]
        for row in x[1:]:
            unrolled = unrolled + row
            note(unrolled)
        return total + unrolled, sums

    return func


@pytest.mark.parametrize("how", ["print", "callback", "reference"])
@pytest.mark.parametrize("device", [None, "gpu"])
def test_step_of_a_sum_may_be_noted(how, device, capsys):
    seen = []

    def with_reference(x):
        ref = jax.new_ref(jnp.zeros(()))

        def note(value):
            ref[...] += jnp.sum(value)

        return *steps(note)(x), ref[...]

    funcs = {
        "print": steps(lambda x: jax.debug.print("{}", x)),
        "callback": steps(lambda x: jax.debug.callback(seen.append, x)),
        "reference": with_reference,
    }
    func = lambda x: funcs[how](x @ W)  # noqa: E731
    if device == "gpu":
        with assumed_gpu((9, 0)):
            jax.make_jaxpr(jax.grad(lambda x: jnp.sum(amp(func)(x)[0])))(X)
        return
    low, exact = amp(func)(X), func(X)
    jax.effects_barrier()
    for one, other in zip(low, exact, strict=True):
        np.testing.assert_allclose(one, other, rtol=0.1, atol=D * N * 2.0**-6)
    counts = {"print": capsys.readouterr().out.count("["), "callback": len(seen)}
    assert how == "reference" or counts[how] == 2 * (N + 1 + N - 1)


def test_exported_function_may_have_symbolic_sizes():
    (size,) = jax.export.symbolic_shape("b")
    params = {"w": jax.ShapeDtypeStruct((D, D), jnp.float32)}
    x = jax.ShapeDtypeStruct((size, D), jnp.float32)
    loss = lambda p, x: jnp.sum(jnp.tanh(x @ p["w"]) ** 2)  # noqa: E731
    exported = jax.export.export(jax.jit(jax.grad(amp(loss, residuals="int8"))))
    grad = exported(params, x).call({"w": W}, X)["w"]
    exact = jax.grad(loss)({"w": W}, X)["w"]
    assert np.linalg.norm(grad - exact) <= 2 * 3 * 2.0**-8 * np.linalg.norm(exact)


def test_report_of_symbolic_sizes_asks_for_numbers():
    import mpx

    (size,) = jax.export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((size, D), jnp.float32)
    with pytest.raises(ValueError, match=r"the symbolic shape \(b, 8\). Pass numbers"):
        mpx.inspect.report(amp(lambda x: jnp.sum(x @ W)), x)


@jax.custom_vjp
def gram(z):
    return z @ z.T


gram.defvjp(lambda z: (z @ z.T, z), lambda z, g: ((g + g.T) @ z,))


@pytest.mark.parametrize("within", ["nothing", "scan"])
def test_products_of_a_derivative_rule_that_reach_linear_algebra_stay_in_f32(within):
    def volume(z):
        return jnp.sum(jnp.log(jnp.diag(jnp.linalg.cholesky(gram(z) + jnp.eye(8)))))

    def loss(z):
        if within == "nothing":
            return volume(z)
        return lax.scan(lambda sum, z: (sum + volume(z), None), 0.0, z[None])[0]

    program = jax.make_jaxpr(jax.grad(amp(loss)))(jnp.ones((8, 16)))
    products = [
        x for x in equations(program.jaxpr) if x.primitive.name == "dot_general"
    ]
    assert len(products) >= 2
    assert {str(v.aval.dtype) for x in products for v in x.invars} == {"float32"}
