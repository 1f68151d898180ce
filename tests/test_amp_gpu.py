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


def deep_loss(params, x):
    for w in params:
        x = x + jax.nn.gelu(x @ w["up"] + w["bias"]) @ w["down"]
    return jnp.mean(x**2)


def compile_deep(count, spec, **options):
    """Compiles the gradient of eight layers for some H200s."""
    mesh = Mesh(h200.devices()[:count], "x")
    shape = lambda spec, *sizes: jax.ShapeDtypeStruct(  # noqa: E731
        sizes, jnp.float32, sharding=NamedSharding(mesh, spec)
    )
    layer = {
        "up": shape(P(), WIDTH, HIDDEN),
        "bias": shape(P(), HIDDEN),
        "down": shape(P(), HIDDEN, WIDTH),
    }
    grad = jax.jit(jax.grad(mpx.amp(deep_loss, **options)))
    with h200.described(), jax.set_mesh(mesh):
        lowered = grad.lower([layer] * 8, shape(spec, count * TOKENS, WIDTH))
        return lowered.compile(h200.compiler_options())


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
def test_residuals_in_8_bits_halve_the_memory_of_one_gpu():
    plain, coded = (
        compile_deep(1, P(), residuals=kept).memory_analysis().temp_size_in_bytes
        for kept in (None, "int8")
    )
    # 4.5 KB a token and layer become 2.4; gradients and two activations remain.
    assert coded < 0.65 * plain


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
def test_codes_are_made_and_read_by_kernels_that_run_anyway():
    text = compile_deep(1, P(), residuals="int8").as_text() or ""
    entry = text[text.index("\nENTRY") :]
    low, codes = (rf"{name}\[{TOKENS},{HIDDEN}\]" for name in ("bf16", "s8"))
    fusions = re.findall(r"= (.*?) fusion\((.*?)\), kind=k(?:Loop|Input)", entry)
    made = [out for out, _ in fusions if re.search(codes, out)]
    assert len(made) == 8
    assert all(re.search(low, out) for out in made)  # beside gelu
    holders = re.findall(rf"%(\S+) = {codes}", entry)
    read = [
        out
        for out, given in fusions
        if {*re.findall(r"%([\w.-]+)", given)} & {*holders}
    ]
    # Gelu again and its derivative in one.
    assert len(read) == 8
    assert all(len(re.findall(low, out)) == 2 for out in read)


def test_residuals_in_8_bits_wait_for_nothing_on_several_gpus():
    plain, coded = (
        compile_deep(8, P("x"), residuals=kept).as_text() or ""
        for kept in (None, "int8")
    )
    sent = r" (all-\w+|reduce-scatter|collective-\w+)(?:-start)?\("
    assert sorted(re.findall(sent, coded)) == sorted(re.findall(sent, plain))
    assert "mpx_after" not in coded


def vit_loss(params, patches):
    def encode(patches):
        x = (
            jax.vmap(lambda patch: params["embed"] @ patch)(patches)
            + params["position"]
        )
        for w in params["blocks"]:
            norm = x - jnp.mean(x, -1, keepdims=True)
            norm = norm * jax.lax.rsqrt(jnp.mean(norm**2, -1, keepdims=True) + 1e-5)
            x = x + jax.nn.gelu(norm @ w["up"]) @ w["down"]
        return jnp.mean(x**2)

    return jnp.mean(jax.vmap(encode)(patches))


IMAGES, LENGTH, PATCH, NARROW = 128, 65, 48, 256


def compile_vit(count):
    """Compiles the gradient of two blocks for some H200s; returns the program's text."""
    mesh = Mesh(h200.devices()[:count], "x")
    shape = lambda *sizes, spec=None: jax.ShapeDtypeStruct(  # noqa: E731
        sizes, jnp.float32, sharding=NamedSharding(mesh, spec or P())
    )
    block = {"up": shape(NARROW, 4 * NARROW), "down": shape(4 * NARROW, NARROW)}
    params = {
        "embed": shape(NARROW, PATCH),
        "position": shape(LENGTH, NARROW),
        "blocks": [block] * 2,
    }
    patches = shape(count * IMAGES, LENGTH, PATCH, spec=P("x"))
    with h200.described(), jax.set_mesh(mesh):
        lowered = jax.jit(jax.grad(mpx.amp(vit_loss))).lower(params, patches)
        return lowered.compile(h200.compiler_options()).as_text() or ""


@pytest.mark.parametrize("count", [1, 4])
def test_gradient_of_positions_transposes_no_activation(count):
    text = compile_vit(count)
    assert f"bf16[{IMAGES},{LENGTH},{NARROW}]{{2,1,0}}" in text
    sizes = {IMAGES, LENGTH, NARROW}
    orders = {tuple(map(int, x)) for x in re.findall(r"\[(\d+),(\d+),(\d+)\]", text)}
    assert {x for x in orders if {*x} == sizes} == {(IMAGES, LENGTH, NARROW)}
    assert len(re.findall(r" all-reduce(?:-start)?\(", text)) == int(count > 1)
    assert "all-gather" not in text


def test_means_of_a_norm_are_not_joined_with_what_reads_them():
    kinds = re.findall(r'"fusion_backend_config":{"kind":"(\w+)"', compile_vit(1))
    assert "__triton" not in kinds  # `__triton_gemm` is a matmul


ODD, WIDE = 197, 3072


def compile_mapped(wrap):
    """Compiles the gradient of two layers of `W @ x`; returns the program's text."""

    def loss(params, x):
        layer = lambda x: params["down"] @ jax.nn.gelu(params["up"] @ x)  # noqa: E731
        return jnp.mean(jax.vmap(jax.vmap(layer))(x) ** 2)

    mesh = Mesh(h200.devices()[:1], "x")
    shape = lambda *sizes: jax.ShapeDtypeStruct(  # noqa: E731
        sizes, jnp.float32, sharding=NamedSharding(mesh, P())
    )
    params = {"up": shape(WIDE, 768), "down": shape(768, WIDE)}
    with h200.described(), jax.set_mesh(mesh):
        lowered = jax.jit(jax.grad(wrap(loss))).lower(params, shape(128, ODD, 768))
        return lowered.compile(h200.compiler_options()).as_text() or ""


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.parametrize(
    "wrap",
    [
        mpx.amp,
        lambda f: mpx.amp(f, residuals="int8"),
        lambda f: mpx.fp8(mpx.amp(f)),
    ],
    ids=["amp", "residuals", "fp8"],
)
def test_activations_of_mapped_layers_have_no_rows_of_an_odd_length(wrap):
    text = compile_mapped(wrap)
    entry = text[text.index("\nENTRY") :]
    assert f"bf16[128,{ODD},{WIDE}]{{2,1,0}}" in entry
    kinds = r"(?:bf16|s8|f32)"
    assert not re.search(rf"= \(?{kinds}\[{WIDE},128,{ODD}\]\S* fusion", entry)
    moved = re.findall(r"%\w*transpose\w*[.\d]* = (\S+)", entry)
    assert not [x for x in moved if str(WIDE) in x and "768" not in x]
