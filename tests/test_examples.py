"""The examples, in a few steps: each shows what it promises."""

import importlib
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name, **sizes):
    """Returns an example as a module, with smaller sizes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        module = importlib.import_module(name)
    for size, value in sizes.items():
        assert hasattr(module, size)
        setattr(module, size, value)
    return module


@pytest.fixture(autouse=True)
def compile_quickly():
    """Turns optimizations of XLA off: most of the time here is compilation."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.slow
@pytest.mark.standard_promotion  # as a user runs it
def test_the_demo_shows_what_it_promises(tmp_path, capsys, monkeypatch):
    # Without transformer blocks: they take most of the compile time.
    size = {"patch": 4, "width": 32, "hidden": 0, "heads": 1, "layers": 0}
    demo = load("digits", SIZE=size, LR=3e-3)
    modes = {k: v for k, v in demo.MODES.items() if k != "mixed-bf16"}  # as equinox_vit
    monkeypatch.setattr(demo, "MODES", modes)
    figure, page = tmp_path / "out/digits.png", tmp_path / "page.md"
    page.write_text("Before.\n{}\nold\n{}\nAfter.".format(*load("_report").MARKERS))
    runs = demo.main(["--steps", "60", "--figure", str(figure), "--page", str(page)])
    out = capsys.readouterr().out

    f32, f16, plain_bf16, plain_f16 = runs.values()
    assert f32.losses.shape == (60,)
    assert f32.loss < 0.8 * f32.losses[:5].mean()
    assert f16.skipped > 0
    assert f16.scale == 2.0 ** (24 - f16.skipped)
    assert not f16.broken
    assert plain_f16.broken
    assert (f32.stuck, f16.stuck) == (0, 0)
    assert plain_bf16.stuck > 0
    assert f32.state_bytes == f16.state_bytes
    assert plain_bf16.state_bytes < 0.51 * f32.state_bytes

    for mode in demo.MODES:
        assert f"{mode}: test accuracy" in out
    assert (
        f"plain-f16: broken, the loss is not finite from step {plain_f16.broken}" in out
    )
    assert "mixed-f16: as good as f32" in out
    assert "Matmul operations: 100.0 % in bf16" in out
    assert "model/embed/weight" in out
    assert figure.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert text.startswith("Before.\n<!--")
    assert text.endswith("-->\nAfter.")
    assert "old" not in text
    for line in text.splitlines():
        assert line in out or line.startswith("<!--") or line in ("Before.", "After.")


@pytest.mark.parametrize(
    ("accuracy", "losses", "stuck", "expected"),
    [
        (0.89, (1.0, 0.5), 0.0, r"as good as f32 \(-0\.010\)\."),
        (0.80, (1.0, 0.5), 0.0, r"worse than f32 by 0\.100\."),
        (0.90, (1.0, np.nan), 0.7, "broken, the loss is not finite from step 2 on."),
        (0.90, (np.inf, 1.0), 0.0, "broken, the loss is not finite from step 1 on."),
        (0.50, (1.0, 0.5), 0.7, "worse .*; a step of lr = 0.0002 is lost on 70% of"),
    ],
)
def test_findings_of_the_demo_follow_the_numbers(accuracy, losses, stuck, expected):
    report = load("_report")
    f32 = report.Run(np.asarray((1.0, 0.5)), 1, 0, 0.9, 4, 0.0)
    run = f32._replace(losses=np.asarray(losses), accuracy=accuracy, stuck=stuck)
    lines = report.findings({"f32": f32, "other": run}, 1000, 2e-4)
    assert "±0.028" in lines[0]  # 3 sqrt(0.9 · 0.1 / 1000)
    assert re.match(f"- other: {expected}", lines[1])


def test_demo_without_matplotlib_says_what_to_install(monkeypatch):
    for name in ("digits", "_report"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match=r'needs: pip install "mpx-jax\[examples\]"'):
        load("digits")


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_equinox_vit_learns_alike_in_f32_and_under_amp(capsys):
    size = {"patch": 4, "width": 64, "hidden": 64, "heads": 4, "layers": 1}
    results = load("equinox_vit", SIZE=size).main(["--steps", "30"])
    (f32, _), (amp, _) = results["f32"], results["amp"]
    assert f32 < 2.2
    assert f32 != amp
    assert abs(f32 - amp) < 0.03
    text = capsys.readouterr().out
    # Sums over the 4 tokens of this size are f32.
    (share,) = re.findall(r"Matmul operations: (\S+) % in bf16", text)
    assert float(share) > 95
    assert "a sum of at most 4 products" in text


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_linen_resnet_skips_what_overflows_and_learns():
    example = load("linen_resnet", BLOCKS=((64, 2),))
    losses, skipped, state = example.main(["--steps", "24"])
    assert 0 < skipped < 6
    assert int(state.step) == 24 - skipped
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.8 * losses[0]
    assert all(x.dtype == "float32" for x in jax.tree.leaves(state.batch_stats))


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_nnx_gpt_is_sharded_and_learns():
    sizes = {"LAYERS": 1, "LENGTH": 16}
    losses, share = load("nnx_gpt_fsdp", **sizes).main(["--steps", "20"])
    assert jax.device_count() == 8
    assert share < 0.2  # an eighth, and what is replicated
    assert losses[-1] < 0.85 * losses[0]


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_fp8_language_model_learns_as_in_f32():
    sizes = {"LAYERS": 1, "LENGTH": 16}
    results, report = load("fp8_language_model", **sizes).main(["--steps", "20"])
    assert {x.param for x in report.fp8.changed} == {
        f"params/layers/0/{name}" for name in ("qkv", "out", "up", "down")
    }
    assert results["f32"] < 4.2
    assert len({*results.values()}) == 3
    assert abs(results["bf16"] - results["f32"]) < 0.03
    assert abs(results["fp8"] - results["f32"]) < 0.06


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_run_that_was_stopped_resumes_bit_for_bit(capsys):
    load("resume").main(["--steps", "12"])  # which compares them
    assert "stopped: from step 6 to 12" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_adapters_learn_beside_frozen_weights_of_16_bits():
    results, merged = load("lora").main(["--steps", "100"])
    assert results["before"] < 0.3
    assert results["with adapters"] > 0.5
    assert abs(results["merged"] - results["with adapters"]) < 0.03
    assert {x.dtype for x in merged} == {np.dtype("bfloat16")}


@pytest.mark.standard_promotion
def test_picture_of_a_block_is_what_amp_does(tmp_path):
    # When this fails: python examples/draw_block.py docs/images/block.svg
    picture = tmp_path / "block.svg"
    boxes, arrows = load("draw_block").main([str(picture)])
    assert {name for name in boxes if boxes[name] == "bf16"} == {
        *("qkv", "scores", "mix", "out", "up", "down")
    }
    assert arrows["gelu", "down"] == "bf16"
    assert arrows["add1", "add2"] == "f32"
    images = EXAMPLES.parent / "docs/images"
    assert picture.read_text() == (images / "block.svg").read_text()
