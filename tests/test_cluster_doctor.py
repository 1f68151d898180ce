"""`doctor --cluster` says whether the processes and devices of a job agree."""

import json
import os
import types

import jax
import numpy as np
import pytest
from jax import lax

from mpx.__main__ import main
from mpx.checkpoint._checkpointer import Checkpointer
from mpx.inspect._cluster import _bandwidth, _checks, _command
from mpx.inspect._cluster._exchange import digests, gather, outliers
from mpx.inspect._cluster._restart import Restart
from mpx.inspect._cluster._training import STEPS, Training, make_mesh

pytestmark = pytest.mark.standard_promotion


@pytest.fixture(scope="module")
def trainings():
    """One of each layout: their programs are compiled once."""
    return {name: Training(make_mesh(), name) for name in ("sharded", "copies")}


@pytest.fixture
def sharded(trainings):
    return trainings["sharded"]


def verdicts(checks):
    return {check.name: check.passed for check in checks}


# --- One process with eight devices ----------------------------------------------------


def test_one_process_passes_and_prints_json(capsys, trainings, monkeypatch):
    monkeypatch.setattr(_command, "Training", lambda mesh, layout: trainings[layout])
    assert main(["doctor", "--cluster", "--json", "--no-measure"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["processes"], found["devices"]) == (1, 8)
    assert {x["name"]: x["passed"] for x in found["checks"]} == {
        "devices": True,
        "versions and settings": True,
        "skips, sharded": True,
        "hash of the state, sharded": True,
        "skips, copies": True,
        "hash of the state, copies": True,
        "wire of an FSDP step": True,
        "save and restore": True,
        "kill and restart": None,
    }
    figures = {x["name"]: x["figures"] for x in found["checks"]}
    assert "8 skipped, 0 divergent" in figures["skips, copies"]
    # Two weights of 64 × 256, of which a device gathers seven eighths and reduces twice
    # that.
    sent = figures["wire of an FSDP step"]
    assert "gathered in f16 (57.3 kB), gradients reduced in f32 (229 kB)" in sent


def test_drifted_copy_of_one_device_is_named(trainings, monkeypatch):
    training = trainings["copies"]
    state = training.start()
    bias = state["params"]["bias"]
    copies = [
        jax.device_put(np.full(bias.shape, 1e-3 * (i == 3), np.float32), device)
        for i, device in enumerate(jax.devices())
    ]
    state["params"]["bias"] = jax.make_array_from_single_device_arrays(
        bias.shape, bias.sharding, copies
    )
    monkeypatch.setattr(training, "start", lambda: state)
    skips, hashes = _checks.check_faults(training)
    assert skips.passed
    assert hashes.passed is False
    assert "on 7 of 8 devices" in hashes.figures
    assert "on device 3 of process 0" in hashes.figures


def test_device_that_decides_alone_is_named(monkeypatch):
    training = Training(make_mesh(), "copies")
    step = training._step

    def divergent(state, number, fault):
        new, finite = step(state, number, fault)
        return new, finite ^ ((lax.axis_index("data") == 5) & (number == 2))

    monkeypatch.setattr(training, "_step", divergent)
    skips, _ = _checks.check_faults(training)
    assert skips.passed is False
    assert "1 divergent decisions; device 5 of process 0: step 2" in skips.figures


def test_fault_that_no_device_skips_is_named(sharded, monkeypatch):
    calm = sharded.calm(1)[0]
    monkeypatch.setattr(sharded, "fault", lambda step, device: calm)
    assert _checks.check_faults(sharded)[0].figures.startswith("16 steps, 0 faults")
    run = sharded.run
    monkeypatch.undo()
    monkeypatch.setattr(
        sharded, "run", lambda state, first, faults: run(state, 0, [calm] * len(faults))
    )
    skips, _ = _checks.check_faults(sharded)
    assert skips.passed is False
    assert "device 0 of process 0: step 0 with a fault, not skipped" in skips.figures


# --- Verdicts ---------------------------------------------------------------------------


def test_skips_are_compared_between_processes_and_with_the_faults():
    wanted = [False, True, False]
    good = _checks.judge_skips("skips", wanted, [[wanted, wanted], [wanted, wanted]])
    assert good.passed
    assert (
        "3 steps, 1 faults on one device each: 1 skipped, 0 divergent" in good.figures
    )
    other = [True, True, False]
    bad = _checks.judge_skips("skips", wanted, [[wanted, wanted], [wanted, other]])
    assert not bad.passed
    assert "1 divergent decisions; device 1 of process 1: step 0 skipped" in bad.figures


def test_hashes_name_the_device_that_differs():
    assert _checks.judge_hashes("hash", [["a", "a"], ["a", "a"]]).passed
    found = _checks.judge_hashes("hash", [["a", "a"], ["a", "b"]])
    assert not found.passed
    assert found.figures == "a on 3 of 4 devices, but b on device 1 of process 1"


def test_versions_name_the_process_that_differs():
    here = _checks.describe()
    found = _checks.check_versions([here, here, here | {"jax": "0.1"}])
    assert not found.passed
    assert found.figures == f"jax: '{jax.__version__}', but '0.1' on process 2"


def test_folders_of_dumps_may_differ(monkeypatch):
    flags = os.environ["XLA_FLAGS"]
    here = _checks.describe()
    monkeypatch.setenv("XLA_FLAGS", f"{flags} --xla_dump_to=dumps")
    assert _checks.describe() == here
    monkeypatch.setenv("XLA_FLAGS", f"{flags} --xla_cpu_enable_fast_math=true")
    assert not _checks.check_versions([here, _checks.describe()]).passed


def test_missing_device_is_named_and_nothing_else_runs(monkeypatch, capsys):
    owners = [0] * 4 + [1] * 4 + [2] * 3
    devices = [types.SimpleNamespace(process_index=i) for i in owners]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    assert main(["doctor", "--cluster", "--json", "--processes", "3"]) == 1
    first, rest = json.loads(capsys.readouterr().out)["checks"]
    assert first["figures"] == "most processes have 4 devices, but process 2 has 3"
    assert rest["passed"] is None


GATHER = ["all-gather", "f16", [64, 256], 8, 1, False, 10]
REDUCE = ["all-reduce", "f32", [64, 256], 8, 1, False, 20]
SCATTER = ["reduce-scatter", "f32", [8, 256], 8, 1, False, 20]


@pytest.mark.parametrize(
    ("everywhere", "passed", "text"),
    [
        ([[GATHER, REDUCE]] * 2, True, "in f16 (10 B), gradients reduced in f32 (20 B)"),
        ([[GATHER, SCATTER]], True, "0 B else"),
        ([[["all-gather", "f32", *GATHER[2:]], REDUCE]], False, "in f32 (10 B), asked for f16"),
        ([[GATHER, ["all-reduce", "f16", *REDUCE[2:]]]], False, "asked for f32"),
        ([[GATHER]], False, "gradients reduced in no collective"),
        ([[GATHER, REDUCE], [GATHER]], False, "the processes [1] have other collectives"),
    ],
)  # fmt: skip
def test_wire_is_compared_with_what_was_asked_for(everywhere, passed, text):
    found = _checks.judge_wire(everywhere, {64 * 256}, 8)
    assert found.passed is passed
    assert text in found.figures


def test_one_device_has_no_wire():
    assert _checks.judge_wire([[]], {64 * 256}, 1).passed is None


# --- Restart ----------------------------------------------------------------------------


class KilledError(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def killed(sharded, tmp_path, monkeypatch):
    """A folder that a killed job has left."""

    def kill(*_):
        raise KilledError

    first = Restart(sharded, str(tmp_path))
    assert first.expected is None
    assert verdicts(first.check()) == {
        "save and restore": True,
        "kill and restart": None,
    }
    assert first.can_kill
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", kill)
        # The second checkpoint is never complete, but a thread of this process would
        # still write it.
        patch.setattr(Checkpointer, "save", lambda *_: None)
        with pytest.raises(KilledError):
            first.kill(0)
    return tmp_path


def test_killed_job_ends_as_the_undisturbed_one(sharded, killed):
    second = Restart(sharded, str(killed))
    (check,) = second.check()
    assert check.passed
    assert f"resumed after step {STEPS} of {2 * STEPS}" in check.figures
    assert "as the undisturbed run" in check.figures
    assert not second.can_kill
    second.end(keep=False)
    assert list(killed.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"end": "0", "saved": "0"}, "but 0 was saved"),
        ({"end": "0"}, "but the undisturbed run with 0 (and this start, undisturbed"),
        ({"devices": 4}, "had 4 devices, this one has 8"),
    ],
)
def test_job_that_resumes_elsewhere_fails(sharded, killed, change, text):
    path = killed / "mpx-doctor" / "expected.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    (check,) = Restart(sharded, str(killed)).check()
    assert check.passed is False
    assert text in check.figures


def test_restart_says_what_it_needs(sharded, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        "mpx.inspect._cluster._restart.gather", lambda value: [value] * 2
    )
    (check,) = Restart(sharded, None).check()
    assert check.passed is None
    assert "pass `--directory`" in check.figures


def test_restart_is_not_run_without_orbax(sharded, tmp_path, monkeypatch):
    def missing(path):
        raise ImportError("Orbax is not installed")

    monkeypatch.setattr("mpx.inspect._cluster._restart.Checkpointer", missing)
    restart = Restart(sharded, str(tmp_path))
    (check,) = restart.check()
    assert check.passed is None
    assert check.figures == "not run: Orbax is not installed"
    assert not restart.can_kill


def test_folder_that_a_process_does_not_see_is_refused(sharded, tmp_path, monkeypatch):
    def gather(value):  # the second process sees nothing
        return [value, False]

    monkeypatch.setattr("mpx.inspect._cluster._restart.gather", gather)
    (check,) = Restart(sharded, str(tmp_path)).check()
    assert check.passed is False
    assert "is not one folder: the processes [1] do not see it" in check.figures


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kill", "0"], "--kill needs --directory"),
        (["--kill", "1", "--directory", "x"], "there are the processes 0 to 0"),
    ],
)
def test_kill_is_refused_where_it_cannot_work(options, message):
    with pytest.raises(SystemExit, match=message):
        main(["doctor", "--cluster", *options])


# --- Figures and exchange ---------------------------------------------------------------


def test_collectives_are_timed_and_their_results_compared(monkeypatch):
    mesh = make_mesh()
    rates = _bandwidth.measure(mesh, (1000,))
    assert [x.kind for x in rates] == ["all-reduce", "all-gather", "reduce-scatter"]
    for rate, factor in zip(rates, (14 / 8, 7 / 8, 7 / 8), strict=True):
        assert rate.exact
        assert rate.bytes == 1024  # a multiple of eight numbers
        assert rate.algorithmic == rate.bytes / rate.seconds
        assert rate.bus == pytest.approx(factor * rate.algorithmic)
    _, *rest = _bandwidth._KINDS["all-reduce"]
    wrong = {"all-reduce": (lambda x: x, *rest)}
    monkeypatch.setattr(_bandwidth, "_KINDS", wrong)
    assert not _bandwidth.measure(mesh, (1000,))[0].exact


def test_tables_show_verdicts_and_rates():
    rate = _bandwidth.Rate("all-reduce", 2**20, 1e-3, 1.05e9, 1.8e9, True)
    checks = (_checks.Check("a", True, "x"), _checks.Check("b", None, "y"))
    found = _command.Conformance(2, 8, _checks.describe(), checks, (rate,))
    text = str(found)
    for part in (
        "2 processes, 8 devices",
        "pass",
        "1.05 GB/s",
        "1.8 GB/s",
        "1 not run.",
    ):
        assert part in text
    assert found.passed
    bad = _command.Conformance(
        2, 8, found.versions, (_checks.Check("a", False, ""),), ()
    )
    assert not bad.passed
    assert "A check FAILED." in str(bad)


def test_outliers_are_the_rare_values():
    assert outliers([{"a": 1, "b": 2}, {"b": 2, "a": 1}]) == []
    assert outliers(["x", "y", "y"]) == [0]
    assert gather({"a": [1]}) == [{"a": [1]}]


def test_digest_sees_every_bit_of_every_copy():
    mesh = make_mesh()
    zeros = digests({"x": np.zeros(3, np.float32)}, mesh)
    assert len(zeros) == 8
    assert len({*zeros}) == 1
    assert digests({"x": np.array([0, -0.0, 0], np.float32)}, mesh) != zeros
    assert digests({"x": np.zeros(3, np.int32)}, mesh) != zeros
