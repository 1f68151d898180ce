"""`doctor --cluster` says whether the processes and devices of a job agree."""

import dataclasses
import json
import os
import types

import jax
import pytest

import mpx
from mpx.__main__ import main
from mpx.inspect import Collective, _doctor, doctor
from mpx.inspect._doctor import Check, Trial, make_mesh

pytestmark = [pytest.mark.standard_promotion, pytest.mark.eight_devices]


# --- One process with eight devices ----------------------------------------------------


def test_one_process_passes_and_prints_json(capsys):
    assert main(["doctor", "--cluster", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["processes"], [*found["devices"].values()]) == (1, [8])
    assert {x["name"]: x["passed"] for x in found["checks"]} == {
        "devices": True,
        "versions and settings": True,
        "skips": True,
        "wire of an FSDP step": True,
    }
    assert found["links"] > 1e6
    figures = {x["name"]: x["figures"] for x in found["checks"]}
    assert figures["skips"] == "skipped 0 2 5 7 8 10 13 15 on 8 of 8"
    # Two weights of 64 × 256, of which a device gathers seven eighths and reduces twice
    # that.
    sent = figures["wire of an FSDP step"]
    assert "gathered in f16 (57.3 kB), gradients reduced in f32 (229 kB)" in sent


def test_links_are_measured_by_an_all_reduce(monkeypatch):
    calls = []

    def fastest(call, x):
        compiled = call.lower(x).compile()
        calls.extend(mpx.inspect.collectives(compiled))
        return 0.5

    monkeypatch.setattr(_doctor, "_fastest", fastest)
    monkeypatch.setattr(_doctor, "_numbers", lambda: 1000)
    found = _doctor._link_bandwidth(make_mesh())
    assert [(x.kind, x.shape) for x in calls] == [("all-reduce", (1000,))]
    assert found == 2 * 7 / 8 * 4000 / 0.5
    one = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    assert _doctor._link_bandwidth(one) is None


def test_device_that_decides_alone_is_named(monkeypatch):
    trial = Trial(make_mesh())
    run = trial.run

    def divergent(devices):
        skipped = run(devices)
        skipped[5][2] = not skipped[5][2]
        return skipped

    monkeypatch.setattr(trial, "run", divergent)
    skips = _doctor.check_decisions(trial)
    assert skips.passed is False
    assert "on 7 of 8, but skipped 0 5 7 8 10 13 15 on device 5" in skips.figures


def test_fault_that_no_device_skips_is_named(monkeypatch):
    trial = Trial(make_mesh())
    run = trial.run
    monkeypatch.setattr(trial, "run", lambda devices: run([-1] * len(devices)))
    skips = _doctor.check_decisions(trial)
    assert skips.passed is False
    assert "on 0 of 8, but skipped  on device 0 of process 0" in skips.figures


# --- Verdicts ---------------------------------------------------------------------------


def test_values_are_compared_with_the_most_common_or_with_what_they_should_be():
    rows = [("one", "a"), ("two", "a"), ("three", "b")]
    found = _doctor.judge("hash", rows)
    assert not found.passed
    assert found.figures == "a on 2 of 3, but b on three"
    assert _doctor.judge("hash", rows[:2]).passed
    assert not _doctor.judge("hash", rows[:2], "b").passed


def test_versions_name_the_process_that_differs():
    here = _doctor.describe()
    found = _doctor.check_versions([here, here, here | {"jax": "0.1"}])
    assert not found.passed
    usual = f"jax {jax.__version__} on 2 of 3"
    assert found.figures == f"{usual}, but jax 0.1 on process 2"


def test_folders_of_dumps_may_differ(monkeypatch):
    flags = os.environ["XLA_FLAGS"]
    here = _doctor.describe()
    monkeypatch.setenv("XLA_FLAGS", f"{flags} --xla_dump_to=dumps")
    assert _doctor.describe() == here
    monkeypatch.setenv("XLA_FLAGS", f"{flags} --xla_cpu_enable_fast_math=true")
    assert not _doctor.check_versions([here, _doctor.describe()]).passed


def test_missing_device_is_named_and_nothing_else_runs(monkeypatch, capsys):
    owners = [0] * 4 + [1] * 4 + [2] * 3
    devices = [types.SimpleNamespace(process_index=i, device_kind="") for i in owners]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    assert main(["doctor", "--cluster", "--json", "--processes", "3"]) == 1
    first, rest = json.loads(capsys.readouterr().out)["checks"]
    assert first["figures"] == "devices: 4 on 2 of 3, but devices: 3 on process 2"
    assert rest["passed"] is None


GATHER = Collective("all-gather", "f16", (64, 256), 8, 1, False, 10)
REDUCE = Collective("all-reduce", "f32", (64, 256), 8, 1, False, 20)
SCATTER = Collective("reduce-scatter", "f32", (8, 256), 8, 1, False, 20)


@pytest.mark.parametrize(
    ("found", "passed", "text"),
    [
        ([GATHER, REDUCE], True, "in f16 (10 B), gradients reduced in f32 (20 B)"),
        ([GATHER, SCATTER], True, "reduced in f32 (20 B)"),
        ([GATHER._replace(dtype="f32"), REDUCE], False, "in f32 (10 B), gradients"),
        ([GATHER, REDUCE._replace(dtype="f16")], False, "asked for f16 and f32"),
        ([GATHER], False, "gradients reduced in no collective"),
    ],
)
def test_wire_is_compared_with_what_was_asked_for(monkeypatch, found, passed, text):
    trial = Trial(make_mesh())
    monkeypatch.setattr(trial, "collectives", lambda _: found)
    check = _doctor.check_wire(trial)
    assert check.passed is passed
    assert text in check.figures


def test_process_that_sends_other_dtypes_is_named(monkeypatch):
    trial = Trial(make_mesh())
    monkeypatch.setattr(trial, "collectives", lambda _: [GATHER, REDUCE])
    monkeypatch.setattr(_doctor, "gather", lambda text: [text, text, "nothing"])
    check = _doctor.check_wire(trial)
    assert check.passed is False
    assert check.figures.endswith("on 2 of 3, but nothing on process 2")


def test_one_device_has_no_wire():
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    assert _doctor.check_wire(Trial(mesh)).passed is None


def test_tables_show_verdicts():
    checks = (Check("a", True, "x"), Check("b", None, "y"))
    found = dataclasses.replace(doctor(), processes=2, checks=checks)
    text = str(found)
    for part in ("Processes: 2", "pass", "No check failed."):
        assert part in text
    assert found.passed
    bad = dataclasses.replace(doctor(), checks=(Check("a", False, ""),))
    assert not bad.passed
    assert "A check FAILED." in str(bad)
