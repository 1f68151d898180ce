"""The demo: it reads real data formats and shows what it promises, in a few steps."""

import dataclasses
import gzip
import importlib
import io
import json
import pickle
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import jax
import numpy as np
import pytest

import mpx

EXAMPLES = Path(__file__).parents[1] / "examples"
RNG = np.random.default_rng(0)
CIFAR_NAMES = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
IMAGES = {name: RNG.integers(0, 256, (4, 32, 32, 3), np.uint8) for name in CIFAR_NAMES}
LABELS = {name: RNG.integers(0, 10, 4) for name in CIFAR_NAMES}


@pytest.fixture(scope="module")
def digits():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("digits")


@pytest.fixture(scope="module")
def data(digits):
    return importlib.import_module("_data")


def planes(name):
    return IMAGES[name].transpose(0, 3, 1, 2).reshape(4, 3072)


def cifar_pickle(name):
    labels = LABELS[name].tolist()
    blob = pickle.dumps({b"data": planes(name), b"labels": labels}, protocol=2)
    # The published files come from Python 2: another module, and 0 and 1 as flags.
    blob = blob.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    assert blob.count(b"\x89\x88\x87") == 1
    return blob.replace(b"\x89\x88\x87", b"K\x00K\x01\x87")


def cifar_binary(name):
    labels = LABELS[name].astype(np.uint8)[:, None]
    return np.concatenate([labels, planes(name)], axis=1).tobytes()


def cifar_tiles(name):
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.fromarray(IMAGES[name].reshape(4, 1024, 3)).save(file, "png")
    return file.getvalue()


def cifar_files(form):
    if form == "pickle":
        return {name: cifar_pickle(name) for name in CIFAR_NAMES}
    if form == "binary":
        return {f"{name}.bin": cifar_binary(name) for name in CIFAR_NAMES}
    train = np.concatenate([LABELS[name] for name in CIFAR_NAMES[:-1]])
    return {f"{name}.png": cifar_tiles(name) for name in CIFAR_NAMES} | {
        "train_lables.json": json.dumps(train.tolist()).encode(),
        "test_lables.json": json.dumps(LABELS["test_batch"].tolist()).encode(),
    }


def idx(array):
    sizes = np.asarray(array.shape, ">u4").tobytes()
    return bytes((0, 0, 8, array.ndim)) + sizes + array.astype(np.uint8).tobytes()


def mnist_files():
    images = {"train": (6, 28, 28), "t10k": (3, 28, 28)}
    return {
        f"{part}-images-idx3-ubyte": idx(np.arange(np.prod(shape)).reshape(shape) % 251)
        for part, shape in images.items()
    } | {
        f"{part}-labels-idx1-ubyte": idx(np.arange(shape[0]))
        for part, shape in images.items()
    }


def write(folder, files):
    folder.mkdir(exist_ok=True)
    for name, blob in files.items():
        (folder / name).write_bytes(blob)
    return folder


def write_tar(path, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, blob in files.items():
            member = tarfile.TarInfo(f"cifar-10/{name}")
            member.size = len(blob)
            archive.addfile(member, io.BytesIO(blob))
    return path


@pytest.mark.parametrize("form", ["pickle", "binary", "tiles"])
@pytest.mark.parametrize("packed", [False, True])
def test_every_form_of_cifar10_gives_the_same_images(data, tmp_path, form, packed):
    files = cifar_files(form)
    path = write_tar(tmp_path / "c.tar.gz", files) if packed else write(tmp_path, files)
    loaded = data.load(path)
    assert loaded.image_shape == (32, 32, 3)
    for (images, labels), names in (
        (loaded.train, CIFAR_NAMES[:-1]),
        (loaded.test, CIFAR_NAMES[-1:]),
    ):
        np.testing.assert_array_equal(
            images, np.concatenate([IMAGES[n] for n in names])
        )
        np.testing.assert_array_equal(
            labels, np.concatenate([LABELS[n] for n in names])
        )


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("part_stands_for_all", [False, True])
def test_mnist_files_load(data, tmp_path, zipped, part_stands_for_all):
    files = mnist_files()
    if zipped:
        files = {f"{name}.gz": gzip.compress(blob) for name, blob in files.items()}
    folder = write(tmp_path, files)
    loaded = data.load(folder / min(files) if part_stands_for_all else folder)
    images, labels = loaded.train
    assert images.shape == (6, 28, 28, 1)
    assert images.dtype == np.uint8
    assert labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert images.ravel()[:300].tolist() == (np.arange(300) % 251).tolist()
    assert loaded.test[0].shape == (3, 28, 28, 1)


def truncated(files, name, size=2_000):
    return files | {name: files[name][:size]}


@pytest.mark.parametrize(
    ("make_files", "message"),
    [
        (lambda: {"notes.txt": b""}, "it holds notes.txt. Expected a folder"),
        (lambda: {}, "it holds nothing"),
        (
            lambda: truncated(cifar_files("pickle"), "data_batch_2"),
            "data_batch_2 is not a complete pickle",
        ),
        (
            lambda: truncated(cifar_files("binary"), "test_batch.bin", 6_000),
            "test_batch.bin has 6,000 bytes, expected a multiple of 3,073",
        ),
        (
            lambda: truncated(cifar_files("tiles"), "data_batch_3.png"),
            "data_batch_3.png or its labels cannot be read",
        ),
        (
            lambda: truncated(mnist_files(), "train-images-idx3-ubyte"),
            r"promises 4,704 values \(6, 28, 28\) but holds 1,984",
        ),
        (
            lambda: mnist_files() | {"t10k-labels-idx1-ubyte": b""},
            "starts with the bytes of an empty file, expected 00 00 08 01",
        ),
        (
            lambda: mnist_files() | {"train-labels-idx1-ubyte": idx(np.arange(5))},
            "6 images but 5 labels",
        ),
        (
            lambda: mnist_files() | {"train-labels-idx1-ubyte": idx(np.arange(5, 11))},
            "labels from 5 to 10, expected 0 to 9",
        ),
        (
            lambda: {
                n: b
                for n, b in cifar_files("binary").items()
                if n != "data_batch_4.bin"
            },
            "data_batch_4.bin is missing",
        ),
        (
            lambda: {
                f"{n}.gz": gzip.compress(b)[:-9] for n, b in mnist_files().items()
            },
            "train-images-idx3-ubyte.gz is not a complete gzip file",
        ),
    ],
)
def test_damaged_data_are_reported(data, tmp_path, make_files, message):
    folder = write(tmp_path, make_files())
    with pytest.raises(data.DataError, match=message):
        data.load(folder)


def test_a_truncated_archive_is_reported(data, tmp_path):
    path = write_tar(tmp_path / "c.tar.gz", cifar_files("binary"))
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(data.DataError, match=r"is not a complete \.tar"):
        data.load(path)


def test_a_pickle_that_runs_code_is_refused(data, tmp_path):
    class Evil:
        def __reduce__(self):
            return print, ("run",)

    files = cifar_files("pickle") | {"data_batch_1": pickle.dumps({b"data": Evil()})}
    with pytest.raises(data.DataError, match=r"refused to load builtins\.print"):
        data.load(write(tmp_path, files))


def test_the_same_seed_gives_the_same_batches(data):
    digits_data = data.load_digits()
    first = list(digits_data.batches(5, 3, seed=1))
    again = list(digits_data.batches(5, 3, seed=1))
    other = list(digits_data.batches(5, 3, seed=2))
    assert len(first) == 3
    for (images, labels), (images2, labels2) in zip(first, again, strict=True):
        assert images.dtype == np.float32
        np.testing.assert_array_equal(images, images2)
        np.testing.assert_array_equal(labels, labels2)
    assert any((a[0] != b[0]).any() for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("preset", "image_shape", "dtype"),
    [
        ("digits", (8, 8, 1), "float16"),
        ("vit-desktop", (28, 28, 1), "bfloat16"),
        ("vit-base", (32, 32, 3), "bfloat16"),
    ],
)
def test_a_cast_model_stays_in_its_dtype(digits, preset, image_shape, dtype):
    def logits(image):
        size = digits.PRESETS[preset].size
        model = digits.ViT(size, image_shape, 10, key=jax.random.key(0))
        return mpx.cast_tree(model, dtype)(image)

    out = jax.eval_shape(logits, jax.ShapeDtypeStruct(image_shape, dtype))
    assert (out.shape, out.dtype) == ((10,), dtype)


def test_images_must_divide_into_patches(digits):
    size = digits.PRESETS["digits"].size
    with pytest.raises(ValueError, match="30×32 do not divide into patches of 4×4"):
        digits.ViT(size, (30, 32, 3), 10, key=jax.random.key(0))


@pytest.fixture
def tiny(digits, monkeypatch):
    """The demo without transformer blocks: they take most of the compile time."""
    size = dataclasses.replace(digits.PRESETS["digits"].size, layers=0)
    preset = dataclasses.replace(digits.PRESETS["digits"], size=size, seeds=1)
    monkeypatch.setitem(digits.PRESETS, "digits", preset)


@pytest.mark.slow
@pytest.mark.standard_promotion  # as a user runs it
def test_the_demo_shows_what_it_promises(digits, tiny, tmp_path, capsys):
    results = {}
    table = digits.show_table

    def keep(console, runs):
        results.update(runs)
        table(console, runs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits, "show_table", keep)
        status = digits.main(["--steps", "60", "--lr", "3e-3", "--out", str(tmp_path)])
    out = capsys.readouterr().out

    assert list(results) == list(digits.MODES)
    (f32,), (bf16,), (f16,), (plain_bf16,), (plain_f16,) = results.values()
    assert f32.losses.shape == (60,)
    assert f32.loss < 0.8 * f32.losses[:5].mean()
    # 8 bits of mantissa: the mixed losses follow f32 much closer than they fall.
    np.testing.assert_allclose(bf16.losses, f32.losses, atol=0.05)
    assert f16.skipped > 0
    assert (f16.scales[0], f16.scales[-1]) == (2.0**24, 2.0 ** (24 - f16.skipped))
    assert np.isfinite(f16.losses).all()
    assert not np.isfinite(plain_f16.losses).all()
    assert (f32.stuck, bf16.stuck) == (0, 0)
    assert plain_bf16.stuck > 0
    assert f32.state_bytes == bf16.state_bytes == f16.state_bytes
    assert plain_bf16.state_bytes < 0.51 * f32.state_bytes

    assert status == 0
    for mode in digits.MODES:
        assert f"{mode}: test accuracy" in out  # no terminal: a line per mode
    assert "plain-f16: broken, the loss is not finite from step" in out
    assert "mixed-bf16: as good as f32" in out
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")
    _, _, report = out.partition("Figure: ")
    assert "Matmul operations: 100.0 % in bf16" in report
    assert "model/embed/weight" in report
    table, _, places = report.partition("Exponents: ")
    assert re.search(r"embed/weight +f32 +[\d.]+ k? +▁", table)
    for name in ("exponents.png", "exponents_by_leaf.png"):
        assert str(tmp_path / name) in places
        assert (tmp_path / name).stat().st_size > 1000


def run_of(digits, accuracy, losses=(1.0, 0.5), stuck=0.0):
    return digits.Run(
        losses=np.asarray(losses, np.float32),
        scales=np.ones(1),
        skipped=0,
        accuracy=accuracy,
        state_bytes=4,
        stuck=stuck,
    )


@pytest.mark.parametrize(
    ("mode", "accuracy", "losses", "expected", "failed"),
    [
        ("mixed-bf16", 0.89, (1.0, 0.5), r"as good as f32 \(-0\.010\)", False),
        ("mixed-bf16", 0.80, (1.0, 0.5), "worse than f32 by 0.100", True),
        ("mixed-f16", 0.90, (1.0, np.nan), "not finite from step 2", True),
        ("plain-bf16", 0.80, (1.0, 0.5), "worse than f32 by 0.100", False),
        (
            "plain-f16",
            0.10,
            (np.inf, np.nan),
            "not finite from step 1.*in f16",
            False,
        ),
        ("plain-bf16", 0.95, (1.0, 0.5), r"better than f32 \(\+0\.050\)", False),
    ],
)
def test_the_verdict_follows_the_numbers(
    digits, mode, accuracy, losses, expected, failed
):
    runs = {
        "f32": [run_of(digits, 0.9), run_of(digits, 0.9)],
        mode: [run_of(digits, accuracy, losses)] * 2,
    }
    lines, is_failed = digits.verdict(runs, 1000, 1e-4)
    assert "±0.028" in lines[0]  # 3 sqrt(0.9 · 0.1 / 1000)
    assert re.search(f"^{mode}: .*{expected}", lines[1])
    assert is_failed is failed


def test_the_spread_over_seeds_is_noise(digits):
    runs = {
        "f32": [run_of(digits, 0.8), run_of(digits, 1.0)],
        "mixed-bf16": [run_of(digits, 0.75), run_of(digits, 0.75)],
    }
    assert digits.verdict(runs, 1000, 1e-4)[1] is False


def test_stuck_weights_are_named(digits):
    runs = {"f32": [run_of(digits, 0.9)]}
    runs["plain-bf16"] = [run_of(digits, 0.5, stuck=0.7)]
    lines, _ = digits.verdict(runs, 1000, 2e-4)
    assert "70% of its weights are stuck: a step of lr = 0.0002" in lines[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "vit-base"], "--preset vit-base needs --data PATH"),
        (["--data", "nowhere"], "No such file or folder: nowhere. Expected"),
        (["--steps", "0"], "invalid positive int value: '0'"),
        (["--lr", "nan"], "invalid positive float value: 'nan'"),
        (["--modes", "f8"], "invalid choice: 'f8'"),
    ],
)
def test_wrong_arguments_are_reported(digits, capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_info:
        digits.main(arguments)
    assert exit_info.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_script_starts_from_any_folder(tmp_path):
    command = [sys.executable, str(EXAMPLES / "digits.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--preset {digits,vit-desktop,vit-base}" in done.stdout


def load(name, **sizes):
    """Returns an example as a module, with smaller sizes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        module = importlib.import_module(name)
    for size, value in sizes.items():
        assert hasattr(module, size)
        setattr(module, size, value)
    return module


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_equinox_vit_learns_alike_in_f32_and_under_amp(capsys):
    results = load("equinox_vit", LAYERS=1, PATCH=4, PLACES=4).main(["--steps", "30"])
    (f32, _), (amp, _) = results["f32"], results["amp"]
    assert f32 < 2.2
    assert f32 != amp
    assert abs(f32 - amp) < 0.03
    assert "Matmul operations: 100.0 % in bf16" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_linen_resnet_skips_what_overflows_and_learns():
    losses, skipped, state = load("linen_resnet").main(["--steps", "12"])
    assert 0 < skipped < 6
    assert int(state.step) == 12 - skipped
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
