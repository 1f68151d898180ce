"""What XLA makes of `linear_cross_entropy` for an H200.

Needs no GPU but XLA's compiler for one: `make gpu-compile` installs it and runs this.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import h200
from mpx import amp, linear_cross_entropy

pytestmark = [pytest.mark.gpu_compile, pytest.mark.standard_promotion]


@pytest.mark.parametrize("tied", [False, True])
def test_a_large_vocabulary_needs_an_eighth_of_the_memory(tied):
    tokens, width, vocab = 8192, 4096, 128256
    mesh = Mesh(h200.devices()[:1], "x")
    everywhere = NamedSharding(mesh, PartitionSpec())
    args = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)
        for shape, dtype in [
            ((vocab, width) if tied else (width, vocab), jnp.float32),
            ((tokens, width), jnp.float32),
            ((tokens,), jnp.int32),
        ]
    ]

    def whole(weight, hidden, labels):
        logits = hidden @ (weight.T if tied else weight)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def chunked(weight, hidden, labels):
        axis = 0 if tied else 1
        return linear_cross_entropy(hidden, weight, labels, vocab_axis=axis)

    used = []
    for func in (whole, chunked):
        grad = jax.jit(jax.value_and_grad(amp(func), argnums=(0, 1)))
        with jax.set_mesh(mesh):
            program = grad.lower(*args).compile(h200.compiler_options())
        used.append(program.memory_analysis().temp_size_in_bytes)
        text = program.as_text() or ""
        has_logits = f"[{tokens},{vocab}]" in text or f"[{vocab},{tokens}]" in text
        assert has_logits == (func is whole)
    assert used[1] < used[0] / 8
