"""The doctor says what a machine offers, in any state of it."""

import json
import subprocess
import sys
import types

import jax
import pytest

from mpx.__main__ import main
from mpx.inspect import Diagnosis, _doctor, doctor

NAMES = ("f32", "tf32", "bf16", "f16", "fp8", "mx")


@pytest.fixture(scope="module")
def found():
    return doctor()


def test_a_diagnosis_has_all_parts(found):
    assert isinstance(found, Diagnosis)
    assert found.versions["jax"] == jax.__version__
    assert (found.platform, [*found.devices.values()]) == ("cpu", [8])
    rates = {name: x.rate for name, x in found.formats.items()}
    assert list(rates) == ["f32", "tf32", "bf16", "f16", "fp8", "mx"]
    assert (rates["f32"] or 0) > 1e8
    assert rates["tf32"] is None
    assert (found.bandwidth or 0) > 1e7
    assert "On a CPU" in found.reason
    text = str(found)
    for part in ("Formats", "Recommended", "FLOP/s", "B/s"):
        assert part in text
    assert "<table>" in found._repr_html_()


@pytest.mark.parametrize(
    ("native", "rates", "code", "reason"),
    [
        (("bf16", "f16", "fp8"), {"f32": 1e12, "bf16": 9e12, "fp8": 2e13},
         "mpx.amp(loss)", "no loss scaling. Measured: 9.0× the rate of f32. Large matmuls"),
        (("bf16", "f16"), {}, "mpx.amp(loss)", "has the range of f32"),
        (("f16",), {"f32": 1e12, "f16": 4e12}, "DynamicLossScaling.pow2()", "4.0×"),
        (("f32",), {}, "mpx.amp(loss)", "does not know this device"),
    ],
)  # fmt: skip
def test_the_recommendation_follows_the_formats(
    monkeypatch, native, rates, code, reason
):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    given = {
        name: _doctor.FormatSupport(name in native, "", rates.get(name))
        for name in NAMES
    }
    found = _doctor.recommend(given)
    assert code in found[0]
    assert reason in found[1]


@pytest.mark.parametrize(
    ("capability", "native"),
    [
        ((7, 5), {"f16"}),
        ((8, 0), {"f16", "bf16", "tf32"}),
        ((9, 0), {"f16", "bf16", "tf32", "fp8"}),
        ((10, 0), {"f16", "bf16", "tf32", "fp8", "mx"}),
    ],
)
def test_formats_of_cuda_follow_the_capability(monkeypatch, capability, native):
    monkeypatch.setattr(_doctor, "cuda_capability", lambda: capability)
    found = {name for name, x in _doctor.formats().items() if x.native}
    assert found == native | {"f32"}


@pytest.mark.parametrize(
    ("kind", "native"),
    [
        ("TPU v4", False),
        ("TPU v5 lite", False),
        ("TPU v6 lite", False),
        ("TPU v7", True),
        ("TPU7x", True),
        ("Ironwood", True),
    ],
)
def test_tpus_with_fp8_are_known_by_the_names_of_jax(monkeypatch, kind, native):
    device = types.SimpleNamespace(device_kind=kind)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert _doctor.formats()["fp8"] == (native, kind, None)


def test_memory_is_that_of_a_device_of_this_process(monkeypatch):
    here, other = jax.devices()[:2]

    class Elsewhere:
        device_kind, platform = other.device_kind, other.platform

        def memory_stats(self):
            raise RuntimeError("only supported for addressable devices")

    monkeypatch.setattr(jax, "devices", lambda: [Elsewhere(), here])
    assert [*doctor(measure=False).devices.values()] == [2]


def test_the_wrong_build_of_jaxlib_is_named():
    assert _doctor.problems("0.11.2", "aarch64") == []
    (wrong,) = _doctor.problems("0.10.2", "aarch64")
    assert "computes wrong numbers on aarch64 CPUs, and this is one" in wrong
    (harmless,) = _doctor.problems("0.10.2", "x86_64")
    assert "this is one" not in harmless


def test_a_format_that_the_backend_lacks_has_no_rate(monkeypatch):
    def fail(func, x):
        raise NotImplementedError

    monkeypatch.setattr(_doctor, "_seconds", fail)
    assert _doctor._rate("bf16", _doctor.FormatSupport(True, "")) is None


def test_the_command_prints_tables_or_json(capsys):
    assert main(["doctor", "--no-measure"]) == 0
    assert "Recommended" in capsys.readouterr().out
    assert main(["doctor", "--no-measure", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["platform"] == "cpu"
    assert printed["bandwidth"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "required: command"), (["cure"], "invalid choice: 'cure'")],
)
def test_wrong_commands_are_reported(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_the_package_runs_as_a_program():
    command = [sys.executable, "-m", "mpx", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "doctor" in done.stdout
