"""The scripts are listed; the check of the kernel runs, passes, and sees what it is for."""

import dataclasses
import functools
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from mpx._optim._packing import CORRECTION
from scripts import script

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_the_table_lists_every_script_and_no_other():
    text = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    table = text.partition("| script | question |")[2].partition("\n\n")[0]
    listed = re.findall(r"^\| `(\w+\.py)` \| \S.*[?.] \|$", table, re.MULTILINE)
    assert len(listed) == len(table.strip().splitlines()) - 1
    found = [x.name for x in BENCHMARKS.glob("*.py") if not x.name.startswith("_")]
    assert sorted(listed) == sorted(found)


@pytest.mark.slow
def test_the_kernel_in_the_interpreter_passes_the_check():
    command = [sys.executable, str(BENCHMARKS / "kernel_check.py"), "--tiny", "--huge"]
    command += ["--only", "adamw, 24"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 of 5 lines passed" in done.stdout


@pytest.fixture(scope="module")
def judged():
    """Returns a function that compares a step with what a change makes of its result."""
    check = script("kernel_check")
    case = check.Case("adamw", "24 bits", (("bf16", "odd"),))
    optimizer = case.optimizer("jax")
    (params, grads) = (
        check.draw(case, seed, check.TINY_SHAPES, 1.0) for seed in (0, 1)
    )
    before, scale = (params, optimizer.init(params)), jnp.ones(())
    after = check.take_step(optimizer, *before, grads, jnp.array(True), scale)
    compare = jax.jit(functools.partial(check.differences, optimizer))

    def judge(change):
        with jax.enable_x64(True):
            (fields,) = compare(before, grads, scale, after, change(after))
        return check.found_of(1, fields)

    return judge


def bits_of(x):
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"int{8 * x.dtype.itemsize}"))


def moved(where, by, element=(1, 2)):
    """A change of one stored number by this many units in the last place."""

    def change(result):
        (param,), state = result
        (packed,) = state.packed
        numbers = packed.numbers()
        x = where(numbers)
        new = bits_of(x).at[element].add(by)
        new = jax.lax.bitcast_convert_type(new, x.dtype)
        numbers = jax.tree.map(lambda part: new if part is x else part, numbers)
        return [param], dataclasses.replace(
            state, packed=[packed.packing.pack(numbers)]
        )

    return change


STORED = {
    "code of mu": (lambda leaf: leaf["mu"].codes, 1),
    "code of nu": (lambda leaf: leaf["nu"].codes, 1),
    "bf16 scale": (lambda leaf: leaf["mu"].scale, 1),
    "f32 scale": (lambda leaf: leaf["nu"].scale, 16),
    "correction": (lambda leaf: leaf[CORRECTION], 2),
}


@pytest.mark.some(1)
@pytest.mark.standard_promotion  # as a user runs it
@pytest.mark.parametrize(("where", "allowed"), STORED.values(), ids=STORED)
def test_the_check_allows_one_code_and_no_more(judged, where, allowed):
    within = judged(moved(where, allowed))
    assert within.wrong == 0
    assert (within.codes + within.scales > 0) or within.used > 0.5
    assert judged(moved(where, allowed + 1)).wrong == 1


@pytest.mark.standard_promotion
def test_the_check_finds_equal_results_equal(judged):
    found = judged(lambda result: result)
    assert not any((found.codes, found.scales, found.params, found.used, found.wrong))


@pytest.mark.standard_promotion
@pytest.mark.parametrize("value", [jnp.inf, jnp.nan], ids=str)
def test_the_check_sees_what_is_finite_on_one_path_only(judged, value):
    def spoil(result):
        (param,), state = result
        return [param.at[3, 4].set(value)], state

    found = judged(spoil)
    assert (found.params, found.wrong) == (1, 2)  # the parameter and its weight


# --- the study of small updates -------------------------------------------------------


@pytest.fixture(scope="module")
def drift():
    return script("drift")


def rows_of_the_guide(drift):
    """By the name of each line: its cells."""
    _, rest = drift.GUIDE.read_text(encoding="utf-8").split(drift.START)
    block, _ = rest.split(drift.END)
    assert block.startswith(f"\n{drift.HEADER}\n")
    rows = block[len(drift.HEADER) + 2 :].splitlines()
    return {
        name: cells
        for name, *cells in ([x.strip() for x in row[1:-1].split("|")] for row in rows)
    }


def test_the_guide_has_a_row_for_each_line_of_the_study(drift):
    rows = rows_of_the_guide(drift)
    assert list(rows) == [line.name for line in drift.LINES]
    for line in drift.LINES:
        steps, moved, *apart = rows[line.name]
        assert int(steps) == line.steps
        assert float(moved) > 0
        assert len(apart) == len(drift.COLUMNS)
        assert all(float(x) >= 0 for x in apart)


def test_dithered_weights_follow_f32_in_the_guide(drift):
    column = list(drift.COLUMNS).index("dithered")
    apart = {k: float(v[2 + column]) for k, v in rows_of_the_guide(drift).items()}
    assert {name for name, x in apart.items() if x > 0.05} == {
        # What block scales cannot do; the guide says so.
        "one gradient of 1e5 among ones, rate 1e-03",
        "magnitudes a factor of 3000 apart, rate 1e-05",
    }


def test_weights_that_start_off_the_grid_follow_f32_in_the_guide(drift):
    text = drift.GUIDE.read_text(encoding="utf-8")
    block = text.split(drift.START_MARKS[0])[1].split(drift.START_MARKS[1])[0]
    assert block.startswith(f"\n{drift.START_HEADER}\n")
    rows = [row.strip("|").split("|") for row in block.strip().splitlines()[2:]]
    assert [int(row[0]) for row in rows] == list(drift.STEPS)
    for steps, *shares in (map(float, row) for row in rows):
        from_f32, spread, grid = shares
        assert from_f32 == pytest.approx(1, abs=0.1)
        assert spread == pytest.approx(1, abs=0.1)
        assert grid < 0.6 or steps > 100


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_the_study_gives_the_numbers_of_the_guide(drift):
    rows = rows_of_the_guide(drift)
    (line,) = (x for x in drift.LINES if x.name == "constant gradient, rate 1e-06")
    names = ["dithered", "nearest", "32 bits"]
    found_moved, found_apart = drift.measure(line, names)
    _, moved, *apart = rows[line.name]
    assert found_moved == pytest.approx(float(moved), rel=0.05)
    written = dict(zip(drift.COLUMNS, map(float, apart), strict=True))
    # Another processor rounds products differently: by a unit of some hundred.
    assert found_apart == pytest.approx({x: written[x] for x in names}, abs=0.01)
