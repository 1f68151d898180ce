"""What XLA makes of cross entropy in chunks for an H200.

Needs no GPU but XLA's compiler for one: `make gpu-compile` installs it and runs this.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import h200
from mpx import amp

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

    def func(weight, hidden, labels):
        logits = hidden @ (weight.T if tied else weight)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    used = {}
    for mode in ("keep", "chunk"):
        grad = jax.jit(jax.value_and_grad(amp(func, logits=mode), argnums=(0, 1)))
        with jax.set_mesh(mesh):
            program = grad.lower(*args).compile(h200.compiler_options())
        used[mode] = program.memory_analysis().temp_size_in_bytes
        text = program.as_text() or ""
        has_logits = f"[{tokens},{vocab}]" in text or f"[{vocab},{tokens}]" in text
        assert has_logits == (mode == "keep")
    assert used["chunk"] < used["keep"] / 8
