"""Programs under `amp` compiled for an H200: what is written to memory, and in which dtype.

Needs no GPU but XLA's compiler for one: `make gpu-compile` installs it and runs these.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import h200
import mpx

pytestmark = [pytest.mark.gpu_compile, pytest.mark.standard_promotion]
TOKENS, WIDTH, HIDDEN = 4096, 512, 2048


def test_cotangent_of_an_activation_is_written_in_16_bits_only():
    def loss(params, x):
        hidden = jax.nn.gelu(x @ params["up"] + params["bias"][None])
        return jnp.mean((hidden @ params["down"]) ** 2)

    everywhere = NamedSharding(Mesh(h200.devices()[:1], "x"), P())
    shape = lambda *sizes: jax.ShapeDtypeStruct(  # noqa: E731
        sizes, jnp.float32, sharding=everywhere
    )
    params = {
        "up": shape(WIDTH, HIDDEN),
        "bias": shape(HIDDEN),
        "down": shape(HIDDEN, WIDTH),
    }
    grad = jax.jit(jax.grad(mpx.amp(loss))).trace(params, shape(TOKENS, WIDTH))
    lowered = grad.lower(lowering_platforms=("cuda",))
    text = lowered.compile(h200.compiler_options()).as_text() or ""
    entry = text[text.index("\nENTRY") :]
    sizes = rf"\[(?:{TOKENS},{HIDDEN}|{HIDDEN},{TOKENS})\]"
    assert re.search(rf"= \(?[^=(]*bf16{sizes}", entry)
    assert not re.search(rf"f32{sizes}", entry)
