"""The tables of the guide say what the code does, and figures how they were made."""

import importlib
import inspect
import json
import pathlib
import re
import statistics
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import mpx
from mpx._program._primitives import TABLE

ROOT = pathlib.Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "guide"
PAGES = [
    ROOT / "README.md",
    *(page for page in (ROOT / "docs").rglob("*.md") if page.stem != "changelog"),
]


def rule_table():
    """Returns the lines that the page of the rules should have."""
    lines = ["| rule | where | primitives | why |", "|---|---|---|---|"]
    for rule, place, reason, names, _ in TABLE:
        listed = ", ".join(f"`{name}`" for name in names)
        lines.append(f"| {rule} | {place} | {listed} | {reason} |")
    return lines


def table_after(text, heading):
    """Returns the lines of the first table after a heading."""
    lines = iter(text.partition(f"\n{heading}\n")[2].splitlines())
    table = []
    for line in lines:
        if line.startswith("|"):
            table.append(line)
        elif table:
            break
    return table


def test_rule_table_of_the_docs_is_the_one_of_the_code():
    page = (ROOT / "docs" / "guide" / "autocast.md").read_text()
    expected = rule_table()
    # When this fails, put the following in the place of the table in the page.
    assert table_after(page, "### Primitives") == expected, "\n".join(expected)


def cells(lines):
    """Returns the cells of a table, without its head."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [[cell.strip() for cell in row] for row in rows[2:]]


# --- the demo -------------------------------------------------------------------------


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    names = {path.stem for path in (ROOT / "examples").glob("*.py")}
    for name in names & set(sys.modules):
        monkeypatch.delitem(sys.modules, name)
    return importlib.import_module("digits"), importlib.import_module("_report")


def test_table_of_the_demo_is_what_the_demo_writes(demo):
    digits, report = demo
    page = (GUIDE / "numerics.md").read_text()
    start, end = report.MARKERS
    block = page.partition(start)[2].partition(end)[0]
    intro, _, *lines = block.strip().splitlines()
    # When this fails: python examples/digits.py --page docs/guide/numerics.md
    settings = f"lr {digits.LR:g}, 800 steps of {digits.BATCH} images. Python 3."
    assert settings in intro
    table = [line for line in lines if line.startswith("|")]
    assert table[0].split() == f"| {' | '.join(report.COLUMNS)} |".split()
    rows = cells(table)
    assert [row[0] for row in rows] == list(digits.MODES)
    optimizer = optax.adam(digits.LR)
    for mode, accuracy, loss, scale, skipped, size, stuck in rows:
        assert re.fullmatch(r"[01]\.\d{3}", accuracy)
        assert re.fullmatch(r"\d+\.\d{3}|nan", loss)
        assert re.fullmatch(r"1|2\^\d+", scale)
        assert skipped.isdecimal()
        assert re.fullmatch(r"\d+%|-", stuck)

        def state(mode=mode):
            key = jax.random.key(0)
            model = digits.ViT(key, **digits.SIZE)
            weights = eqx.filter(model, eqx.is_inexact_array)
            weights = mpx.cast_tree(weights, digits.MODES[mode][0])
            return weights, optimizer.init(weights)

        leaves = jax.tree.leaves(jax.eval_shape(state))
        nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        assert size == f"{nbytes:,}", mode
    noise = lines[len(table) + 1]
    assert noise.startswith("- Noise of a test accuracy: ±")


def test_a_page_without_markers_is_left_alone(demo, tmp_path):
    _, report = demo
    page = tmp_path / "page.md"
    page.write_text("# Nothing here")
    with pytest.raises(
        ValueError, match=r"page.md has no lines '<!-- demo: written by"
    ):
        report.write_page(page, "")
    assert page.read_text() == "# Nothing here"


# --- what was measured ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["README.md", "docs/performance.md"])
def test_tables_of_figures_are_those_of_the_runs(name, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    tables = importlib.import_module("tables")
    page = (ROOT / name).read_text("utf-8")
    # When this fails: python benchmarks/tables.py
    assert tables.fill(page, tables.PAGES[name]) == page
    with pytest.raises(ValueError, match="The page has no lines <!-- "):
        tables.fill("# Nothing here", tables.PAGES[name])


def test_models_of_other_people_train_as_in_f32(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    tables = importlib.import_module("tables")
    claim = "the mean of every mode of mpx is within the spread of the seeds of f32"
    assert claim in (ROOT / "docs" / "performance.md").read_text("utf-8")
    compared = 0
    for model in tables.UNTOUCHED:
        modes, _ = tables.of_model(model)
        losses = [
            list(record["losses"].values())
            for mode, record in modes.items()
            if mode != "own" and record["losses"]
        ]
        for found in losses[1:]:  # beside those of f32
            apart = abs(statistics.mean(found) - statistics.mean(losses[0]))
            assert apart <= max(losses[0]) - min(losses[0]), model
            compared += 1
    assert compared > 30


def test_every_result_names_its_command_and_machine():
    results = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    assert len(results) > 5
    for path in results:
        found = json.loads(path.read_text("utf-8"))
        script = found["command"].partition("python ")[2].split()[0]
        assert (ROOT / script).is_file()
        assert "/" not in found["command"].replace(script, "")
        # Compiled for a GPU, on any machine.
        is_planned = "--largest" in found["command"] or "wire.py" in script
        assert is_planned or found["machine"]["backend"] == "gpu"
        for record in found["cases"].values():
            if is_planned:
                assert record.get("reduce") or 0 < min(record["bytes"])
                continue
            batches = [x for name, x in record.items() if name.isdigit()]
            for each in batches or [record]:
                assert each.get("ms", 0) > 0 or each.get("rows") or each["curves"]


# --- facts ----------------------------------------------------------------------------


def test_formats_of_the_guide_are_those_of_jax():
    rows = cells(table_after((GUIDE / "numerics.md").read_text(), "## The formats"))
    dtypes = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}
    assert [row[0] for row in rows] == list(dtypes)
    for name, *numbers in rows:
        info = jnp.finfo(dtypes[name])
        exact = [info.bits, info.nexp, info.nmant]
        assert list(map(int, numbers[:3])) == exact
        rounded = [info.max, info.smallest_normal, info.smallest_subnormal, info.eps]
        for text, number in zip(numbers[3:], rounded, strict=True):
            assert float(text) == pytest.approx(float(number), rel=0.05)


def test_options_of_dynamic_scaling_have_the_defaults_of_the_guide():
    page = (GUIDE / "loss-scaling.md").read_text()
    rows = cells(table_after(page, "Options, as keywords of both:"))
    constructor = inspect.signature(mpx.DynamicLossScaling).parameters
    pow2 = inspect.signature(mpx.DynamicLossScaling.pow2).parameters
    shown = {"1/`factor`": None, "`False`": False, "65504 (2²⁴)": 65504}
    for names, default, _ in rows:
        name = re.findall(r"`(\w+)`", names)[0]
        expected = shown[default] if default in shown else float(default)
        assert constructor[name].default == expected, name
    limits = [
        "`min_loss_scaling` (`min` in `pow2`)",
        "`max_loss_scaling` (`max` in `pow2`)",
    ]
    assert [names for names, *_ in rows[-2:]] == limits
    assert (pow2["min"].default, pow2["max"].default) == (1.0, 2.0**24)


# --- figures --------------------------------------------------------------------------

TIMING = re.compile(r"\d ?(?:ms|µs|TB/s)\b|\| ms \|")
COMMAND = re.compile(
    r"python (?:benchmarks|examples|tests)/\w+\.py(?:(?! python )[^`\n])*"
)


def sections(page):
    """Yields the sections of a page, one for each heading, without code."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    yield from re.split(r"^(?=#+ )", text, flags=re.M)


def test_measured_times_stand_beside_their_command():
    silent = [
        f"{page.relative_to(ROOT)}: {section.splitlines()[0]}"
        for page in PAGES
        for section in sections(page)
        if TIMING.search(section) and "benchmarks/" not in section
    ]
    assert silent == []


def test_commands_name_scripts_and_options_that_exist():
    texts = [" ".join(page.read_text().split("\n")) for page in PAGES]
    commands = {command for text in texts for command in COMMAND.findall(text)}
    assert commands
    for command in sorted(commands):
        script = ROOT / command.split()[1]
        assert script.is_file(), command
        source = script.read_text()
        for option in re.findall(r" --([a-z][a-z-]*)", command.partition(" #")[0]):
            name = option.replace("-", "_")
            known = re.search(
                rf'"(--)?{option}"|read_options\((?s:.{{0,400}}?)[" ]{name}\b', source
            )
            assert known, f"{script.name} has no option --{option}"
