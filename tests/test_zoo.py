"""Models of other packages train under mpx, and their page is what the script writes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts import ROOT, script

zoo = script("_zoo")
page = script("_zoo.page")
routes = script("_zoo.routes")
seeds = script("_zoo.seeds")

PAGE = ROOT / "docs" / "zoo.md"
# Of the packages that the tests need anyway, one model each with its own kind of layer.
FAST = (
    "MLP (Equinox)",
    "attention (Equinox)",
    "LSTM (Linen)",
    "attention (NNX)",
    "transformer block (Haiku)",
)


@pytest.mark.some(1)
@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", FAST)
def test_model_of_another_package_has_the_gradients_of_bf16(name):
    case = zoo.REGISTRY[name].make()
    assert routes.share("amp bf16", case) > 0.99

    def grads(route):
        run = routes.run_of(route, case)
        return jax.jit(run.step)(run.carry, *case.args)[2]

    exact = jax.jit(jax.grad(case.loss))(case.params, *case.args)
    by_hand = routes.distance(grads("own bf16"), exact)
    assert 0 < routes.distance(grads("amp bf16"), exact) <= 1.5 * by_hand


def table_of(text, heading):
    """Returns the rows of the table under a heading, as lists of cells."""
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.mark.parametrize(
    ("heading", "columns", "models"),
    [
        ("Gradients", page.GRADIENTS, zoo.REGISTRY),
        ("Training", page.TRAINING, zoo.REGISTRY),
        ("Seeds", page.SEEDS, seeds.TASKS),
    ],
)
def test_page_has_a_line_for_every_model(heading, columns, models):
    head, _, *rows = table_of(PAGE.read_text(), heading)
    assert head == list(columns)
    assert [row[0] for row in rows] == list(models)
    assert {len(row) for row in rows} == {len(columns)}


def test_page_has_the_text_of_the_script():
    text = PAGE.read_text()
    for part in (page.HEAD, page.GRADIENT_TEXT, page.TRAINING_TEXT, page.SEEDS_TEXT):
        assert part in text, "write the page with: " + page.COMMAND


def test_page_says_why_a_model_does_not_train_as_f32():
    _, _, *rows = table_of(PAGE.read_text(), "Training")
    for row in rows:
        failed = any(cell == page.FAILED or "**" in cell for cell in row[:-1])
        assert not failed or row[-1], row[0]


def results(**losses):
    cells = {route: {"losses": values} for route, values in losses.items()}
    cells["f32"]["rounded"] = cells["f32"]["losses"]
    return page.Row("MLP (Equinox)", cells, 1.0)


def test_curve_that_leaves_f32_is_a_failure_without_a_note():
    f32 = [1 - 0.02 * step for step in range(routes.STEPS)]
    row = results(f32=f32, release=f32, fp8=[x + 0.1 for x in f32])
    row.cells["fp8"]["share"] = 1.0
    row.cells["amp bf16"] = {"error": "ValueError: no"}
    assert row.fails("release") == ""
    assert row.distance("release") == 0
    assert page.unexplained([row]) == [
        "MLP (Equinox), amp bf16: ValueError: no",
        "MLP (Equinox), fp8: trains differently from f32",
    ]
    assert list(page.training_cells(row))[-1] == (
        "amp bf16: ValueError: no; fp8: trains differently from f32"
    )


def over_seeds(**losses):
    cells = {route.replace("_", " "): {"losses": x} for route, x in losses.items()}
    return page.SeedsRow("GPT-2", cells, 1.0)


def test_route_is_outside_if_it_differs_by_more_than_the_seeds_of_its_base():
    row = over_seeds(
        before=[5.0],
        amp_bf16=[1.0, 1.5],
        int8=[1.4, 1.9],
        nvfp4=[1.6, 2.1],
        f32=[0.1, 0.1],
        fp8=[float("nan")] * 2,
    )
    row.cells["residuals int8"] = {"error": "ValueError: no"}
    assert [x for x in seeds.ROUTES if row.fails(x)] == [
        "fp8",
        "nvfp4",
        "residuals int8",
    ]
    assert list(page.seeds_cells(row)) == [
        *("GPT-2", "5.0000", "1.2500", "0.5000", "0.1000 (-1.1500)"),
        *("**nan (+nan)**", "1.6500 (+0.4000)", "**1.8500 (+0.6000)**", "✗", "–"),
        *("–", "–", "–"),  # Muon
    ]
    assert "int8 1 of 1, nvfp4 0 of 1, residuals int8 0 of 1" in page.seeds_table([row])


def test_each_part_of_the_page_is_written_without_the_other(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "versions", lambda names: "\n")
    written = tmp_path / "zoo.md"
    written.write_text(PAGE.read_text())
    of_seeds = page.SEEDS_HEADING + PAGE.read_text().partition(page.SEEDS_HEADING)[2]
    f32 = [1 - 0.02 * step for step in range(routes.STEPS)]
    page.write(written, [results(f32=f32)])
    first = written.read_text().removesuffix(of_seeds)
    assert "| MLP (Equinox) |" in first
    assert written.read_text() == first + of_seeds
    page.write_seeds(written, [over_seeds(before=[5.0], amp_bf16=[1.0])])
    assert written.read_text().startswith(first + page.SEEDS_TEXT)


def test_a_seed_permutes_each_array():
    params = {"w": jnp.arange(64.0).reshape(8, 8), "scale": jnp.ones(8)}
    one, other = (seeds.shuffled(params, seed)["w"] for seed in (0, 1))
    np.testing.assert_array_equal(jnp.sort(one, None), jnp.sort(other, None))
    assert not jnp.array_equal(one, other)
