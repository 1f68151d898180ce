"""The doctor says what a machine offers, in any state of it."""

import json
import subprocess
import sys
import types

import jax
import pytest

from mpx.__main__ import main
from mpx.inspect import Diagnosis, _doctor, doctor


@pytest.fixture(scope="module")
def found():
    return doctor()


@pytest.mark.eight_devices
def test_a_diagnosis_has_all_parts(found):
    assert isinstance(found, Diagnosis)
    assert found.versions["jax"] == jax.__version__
    assert (found.platform, [*found.devices.values()]) == ("cpu", [8])
    assert found.bandwidth > 1e7
    assert "Only f32 is native" in found.reason
    text = str(found)
    for part in ("Native matmuls: f32.", "Recommended", "B/s (measured)"):
        assert part in text
    assert "\nRecommended\n" in found._repr_html_()


@pytest.mark.parametrize(
    ("native", "code", "reason"),
    [
        (
            ("bf16", "f16", "fp8"),
            "mpx.amp(loss)",
            "no loss scaling. Large matmuls can run",
        ),
        (("bf16", "f16"), "mpx.amp(loss)", "has the range of f32"),
        (("bf16", "int8"), "mpx.amp(loss)", "Large matmuls can run in int8"),
        (("f32", "f16"), "DynamicLossScaling.pow2()", "Only f16 runs natively"),
        (("f32",), "f32", "Use bf16 to test"),
        (None, "mpx.amp(loss)", "does not know this device"),
    ],
)
def test_the_recommendation_follows_the_formats(native, code, reason):
    found = _doctor.recommend(native)
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
    assert {*(_doctor.formats() or ())} == native | {"f32", "int8"}


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
    assert ("fp8" in (_doctor.formats() or ())) == native


@pytest.mark.eight_devices
def test_memory_is_that_of_a_device_of_this_process(monkeypatch):
    here, other = jax.devices()[:2]

    class Elsewhere:
        device_kind, platform = other.device_kind, other.platform

        def memory_stats(self):
            raise RuntimeError("only supported for addressable devices")

    monkeypatch.setattr(jax, "devices", lambda: [Elsewhere(), here])
    assert [*doctor().devices.values()] == [2]


def test_the_command_prints_tables_or_json(capsys):
    assert main(["doctor"]) == 0
    assert "Recommended" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["platform"] == "cpu"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "required: command"), (["cure"], "invalid choice: 'cure'")],
)
def test_wrong_commands_are_reported(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_package_runs_as_a_program():
    command = [sys.executable, "-m", "mpx", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "doctor" in done.stdout
