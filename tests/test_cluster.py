"""The example of a cluster job: processes find each other, die, resume, and agree."""

import contextlib
import importlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

import mpx
from mpx import check_processes
from numerics import inject_nonfinite

FOLDER = pathlib.Path(__file__).parents[1] / "examples" / "cluster"
STEPS, DIES_AT = 3, 2
# Two processes are forked twice from one that has imported what they need. First the second
# of them dies, and the first is killed, as every engine does with the others.
# Gloo waits 30 s for a process that comes late to the first collective, and the cache serves
# process 0 only: the processes connect before they compile.
LAUNCH = """
import json, os, signal, sys
import jax, mpx, train
import jax.numpy as jnp
from jax.experimental import multihost_utils

first, second, more, ports = json.loads(sys.argv[1])


def init():
    weights = {"embed": jnp.sin(jnp.arange(4096.0)).reshape(128, 32), "bias": jnp.ones(128)}
    params, state = train.optimizer.init_from(weights)
    return {"params": params, "optimizer": state, "skipped": jnp.int32(0)}


def loss(params, tokens):
    logits = params["embed"][tokens[:, :-1]] @ params["embed"].T + params["bias"]
    chosen = jax.nn.one_hot(tokens[:, 1:], 128)
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(mpx.cast_to_float32(logits)) * chosen, -1))


# A model that compiles quickly; that of the example runs below, in one process.
train.init, train.loss_fn = init, loss


def start(name, port, jobs, more, number):
    if pid := os.fork():
        return pid
    file = os.open(f"{name}-{number}", os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 1), os.dup2(file, 2)
    os.environ |= {
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "JAX_PROCESS_ID": str(number)
    }
    train.join(train.parse([]))
    multihost_utils.sync_global_devices("start")
    for options in jobs:
        train.main(options)
    exec(more, {"jax": jax})
    sys.exit()


def status(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


pair = [start("first", ports[0], first, "", number) for number in range(2)]
assert status(pair[1]) == -signal.SIGKILL
os.kill(pair[0], signal.SIGKILL)
status(pair[0])
pair = [start("second", ports[1], second, more, number) for number in range(2)]
sys.exit(any([status(pid) for pid in pair]))
"""
# What the processes run after their jobs: the doctor, and again with a process that differs.
DOCTOR = """
import jax
from mpx.__main__ import main
from mpx.inspect import _doctor

options = ["doctor", "--cluster", "--json"]
print("status", main(options))
describe = _doctor.describe
if jax.process_index() == 1:
    _doctor.describe = lambda: describe() | {"jax": "0.1"}
print("status", main(options))
"""
# Arrays of which each process holds a part.
INSPECT = """
import jax.numpy as jnp
import mpx
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

mesh = jax.make_mesh((2,), ("data",))


def part(x, *spec):
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])


def loss(w, x):
    return jnp.mean(jnp.square(x @ w))


w = part(np.ones((4, 4), np.float32))
x = part(np.linspace(0, 1, 16, dtype=np.float32).reshape(4, 4), "data")
found = mpx.inspect.explain(mpx.amp(loss), w, x)
print("explained", found.verdict, round(found.loss_in_f32, 4))
print("machine", *mpx.inspect.doctor().devices.values())
"""


@pytest.fixture(scope="module")
def train():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("train")


# --- Two processes ---------------------------------------------------------------------


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """What two processes print that first resume a killed run, and then run undisturbed."""
    folder = tmp_path_factory.mktemp("cluster")
    options = ["--steps", str(STEPS), "--every", "1", "--batch", "2"]
    first = [[*options, "--die-at", str(DIES_AT), "--out", "killed"]]
    second = [[*options, "--out", x] for x in ("killed", "calm")]
    flags = re.sub(r"(device_count)=\d+", r"\1=1", os.environ["XLA_FLAGS"])
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache")}  # for the second start
    environment = {
        "XLA_FLAGS": flags,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": os.pathsep.join([str(FOLDER), *sys.path]),
        "JAX_NUM_PROCESSES": "2",
    }
    given = json.dumps([first, second, DOCTOR + INSPECT, [free_port(), free_port()]])
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, given],
        env=cache | os.environ | environment,
        cwd=folder,
        start_new_session=True,
    )
    said = lambda name: (folder / name).read_text()  # noqa: E731
    try:
        assert launcher.wait(timeout=300) == 0, [
            x.read_text() for x in folder.glob("*-?")
        ]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
    assert f"step {DIES_AT}/{STEPS}" in said("first-0")
    assert "process 0: state" not in said("first-0")
    return [said(f"second-{number}") for number in range(2)]


@pytest.mark.slow
def test_resumed_job_ends_with_the_bits_of_the_undisturbed_one(outputs):
    for number, output in enumerate(outputs):
        states = re.findall(rf"process {number}: state (\w{{16}})", output)
        assert len(states) == 2
        assert states[0] == states[1]
    assert re.search(r"resumed after step [12]\n", outputs[0])


@pytest.mark.slow
def test_processes_hold_the_same_state_and_the_first_reports(outputs):
    first, second = outputs
    assert len({*re.findall(r"state (\w+)", first + second)}) == 1
    assert first.count("processes: 2, devices: 2") == 2
    assert f"step {STEPS}/{STEPS}  loss" in first
    assert not re.search(r"^step", second, re.MULTILINE)


@pytest.mark.slow
def test_doctor_passes_processes_that_agree(outputs):
    first, second = (x.split("status ") for x in outputs)
    assert first[1][0] == second[1][0] == "0"
    assert "checks" not in second[0]
    found = json.loads(first[0][first[0].index("\n{") :])
    assert (found["processes"], [*found["devices"].values()]) == (2, [2])
    assert all(x["passed"] for x in found["checks"])
    assert {x["name"] for x in found["checks"]} >= {"skips", "wire of an FSDP step"}


@pytest.mark.slow
def test_doctor_fails_on_all_processes_if_one_has_another_jax(outputs):
    first, second = (x.split("status ") for x in outputs)
    assert first[2][0] == second[2][0] == "1"
    checks = json.loads(first[1][2:])["checks"]
    assert [x["passed"] for x in checks] == [True, False, None]
    assert checks[1]["figures"].endswith("but jax 0.1 on process 1")


@pytest.mark.slow
def test_inspections_work_on_every_process(outputs):
    x = np.linspace(0, 1, 16, dtype=np.float32).reshape(4, 4)
    loss = round(float(np.mean((x @ np.ones((4, 4))) ** 2)), 4)
    for output in outputs:
        assert f"explained ok {loss}" in output
        assert "machine 2" in output


# --- One process -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_bad_step_changes_nothing_and_sharding_stays(train):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    template = train.fsdp(jax.eval_shape(train.init), mesh)
    where = jax.tree.map(lambda x: x.sharding, template)
    state = jax.jit(train.init, out_shardings=where)()
    state["params"] = inject_nonfinite(state["params"], leaf="embed")
    before = jax.device_get(state)
    step = jax.jit(train.train_step, out_shardings=(where, None))
    tokens = train.batch(train.load_text(), 0, 8, mesh)

    after, _ = step(state, tokens)

    assert int(after.pop("skipped")) == before.pop("skipped") + 1
    mpx.testing.assert_trees_equal(jax.device_get(after), before)
    for leaf in jax.tree.leaves(after):
        if leaf.ndim >= 2:
            assert leaf.addressable_shards[0].data.size == leaf.size // 8


def test_batches_depend_on_their_number_only(train):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    text = np.arange(1000, dtype=np.int32)
    first, again, other = (train.batch(text, n, 4, mesh) for n in (5, 5, 6))
    assert first.shape == (4, train.LENGTH + 1)
    assert (first == again).all()
    assert (first != other).any()
    assert (jnp.diff(first, axis=1) == 1).all()


# --- The check -------------------------------------------------------------------------


def test_check_processes_passes_the_expected_number():
    check_processes(1)


@pytest.mark.eight_devices
@pytest.mark.parametrize(
    ("found", "joined", "message"),
    [
        (
            1,
            False,
            r"Expected 2 processes, but JAX runs in 1 process with 8 devices\. "
            r"`jax\.distributed\.initialize` was not called.*CPUs",
        ),
        (1, True, r"Expected 2 processes.*were given different numbers.*`srun`"),
        (4, True, r"Expected 2 processes, but JAX runs in 4 processes with 8 devices"),
    ],
)
def test_check_processes_says_what_is_wrong(monkeypatch, found, joined, message):
    monkeypatch.setattr(jax, "process_count", lambda: found)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: joined)
    with pytest.raises(RuntimeError, match=message):
        check_processes(2)


@pytest.mark.parametrize("expected", [0, -1])
def test_check_processes_refuses_a_number_below_one(expected):
    with pytest.raises(ValueError, match="`expected` must be at least 1"):
        check_processes(expected)


def test_script_stops_if_its_processes_are_alone(train, monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(jax.distributed, "initialize", lambda: None)
    with pytest.raises(RuntimeError, match="Expected 2 processes"):
        train.main(["--processes", "2"])


# --- Engines ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (1, None, None)),
        ({"SLURM_NTASKS": "3"}, (3, None, None)),
        (
            {
                "JAX_NUM_PROCESSES": "2",
                "JAX_PROCESS_ID": "1",
                "JAX_COORDINATOR_ADDRESS": "a:1",
            },
            (2, 1, "a:1"),
        ),
    ],
)
def test_script_reads_the_environment_of_engines(
    train, monkeypatch, environment, expected
):
    for name in list(os.environ):
        if re.match("SLURM_NTASKS|JAX_(NUM_PROC|PROC|COORD)", name):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    args = train.parse([])
    assert (args.processes, args.process_id, args.coordinator) == expected


def manifest(name):
    return yaml.safe_load((FOLDER / name).read_text())


def test_jobset_starts_as_many_processes_as_it_announces(train):
    job = manifest("jobset.yaml")
    assert job["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert job["kind"] == "JobSet"
    assert job["spec"]["failurePolicy"]["maxRestarts"] >= 1
    (worker,) = job["spec"]["replicatedJobs"]
    assert worker["replicas"] == 1
    spec = worker["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    env = {entry["name"]: entry for entry in container["env"]}
    assert spec["completionMode"] == "Indexed"
    assert spec["backoffLimit"] == 0  # one failed pod: JobSet restarts all
    assert pod["restartPolicy"] == "Never"
    count = int(env["JAX_NUM_PROCESSES"]["value"])
    assert spec["completions"] == spec["parallelism"] == count == 2
    name, port = job["metadata"]["name"], container["ports"][0]["containerPort"]
    first = f"{name}-{worker['name']}-0-0.{name}:{port}"
    assert env["JAX_COORDINATOR_ADDRESS"]["value"] == first
    path = env["JAX_PROCESS_ID"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert "batch.kubernetes.io/job-completion-index" in path
    (mount,), (volume,) = container["volumeMounts"], pod["volumes"]
    assert mount["name"] == volume["name"]
    assert container["command"] == ["python", "train.py"]
    assert train.parse(container["args"]).out == mount["mountPath"]


def test_kubeflow_job_names_the_runtime_of_jax(train):
    job = manifest("kubeflow.yaml")
    assert job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert job["kind"] == "TrainJob"
    assert job["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "ClusterTrainingRuntime",
        "name": "jax-distributed",
    }
    trainer = job["spec"]["trainer"]
    assert trainer["numNodes"] == 2
    assert trainer["image"]
    assert trainer["command"] == ["python", "train.py"]
    assert train.parse(trainer["args"]).steps == 1000


@pytest.mark.parametrize(
    ("works", "restarts", "requeued", "status"),
    [(True, 0, False, 0), (False, 0, True, 0), (False, 3, False, 1)],
)
def test_slurm_job_is_requeued_three_times(tmp_path, works, restarts, requeued, status):
    for name, code in {"srun": 0 if works else 1, "scontrol": 0}.items():
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@"\nexit {code}\n')
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["bash", str(FOLDER / "slurm.sh"), "--steps", "7"],
        env={
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "SLURM_JOB_ID": "42",
            "SLURM_RESTART_COUNT": str(restarts),
        },
        capture_output=True,
        text=True,
    )
    assert "srun --kill-on-bad-exit=1 python train.py --steps 7" in done.stdout
    assert ("scontrol requeue 42" in done.stdout) == requeued
    assert done.returncode == status
