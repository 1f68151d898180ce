"""Attention of every library compiled for an H200: cuDNN's kernels, forward and backward.

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
from attention_cases import BY_HAND, LIBRARIES, pretend_h200
from models import equations

pytestmark = [pytest.mark.gpu_compile, pytest.mark.standard_promotion]
MODELS = {
    "JAX by hand": lambda: BY_HAND["nanoGPT"],
    "padding": lambda: BY_HAND["padding, causal"],
    "odd lengths": lambda: BY_HAND["odd lengths"],
    "bias": lambda: BY_HAND["T5"],
    **{name: LIBRARIES[name] for name in ("Linen", "NNX", "Equinox", "Haiku")},
    "Linen, bf16": LIBRARIES["Linen, bf16"],
}


@pytest.mark.parametrize("name", MODELS)
def test_attention_of_a_model_is_compiled_to_the_kernels_of_cudnn(name, monkeypatch):
    pretend_h200(monkeypatch)
    func, args = MODELS[name]()
    everywhere = NamedSharding(Mesh(h200.devices()[:1], "x"), P())
    types = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), args
    )

    def loss(*args):
        return jnp.sum(mpx.amp(func, "bf16")(*args).astype(jnp.float32) ** 2)

    grad = jax.jit(jax.grad(loss)).trace(*types).lower(lowering_platforms=("cuda",))
    compiled = grad.compile(h200.compiler_options())
    calls = re.findall(
        r'custom_call_target="__cudnn\$fmha(\w+)"', compiled.as_text() or ""
    )
    assert sorted(x.removeprefix("ScaleBias") for x in calls) == [
        "Softmax",
        "SoftmaxBackward",
    ]


@pytest.mark.parametrize(("name", "length"), [("", 7), (", bias", 8)])
def test_only_a_bias_or_mask_needs_even_lengths(name, length, monkeypatch):
    pretend_h200(monkeypatch)
    func, args = BY_HAND[f"odd lengths{name}"]
    eqns = equations(jax.make_jaxpr(mpx.amp(func))(*args))
    (kernel,) = (eqn for eqn in eqns if eqn.primitive.name == "cudnn_attention")
    assert kernel.invars[0].aval.shape[1] == length
