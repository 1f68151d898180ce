"""The shape of the source, and how the tests run."""

import ast
import pathlib
import re

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

import mpx
import rooms

ROOT = pathlib.Path(__file__).parents[1]
SRC = ROOT / "src" / "mpx"
MODULES = sorted(SRC.rglob("*.py"))
INITS = [path for path in MODULES if path.name == "__init__.py"]


def relative(path):
    return str(path.relative_to(ROOT))


def project_files():
    folders = [".ci", ".github", "benchmarks", "docs", "examples", "src", "tests"]
    paths = [*ROOT.iterdir(), *(p for f in folders for p in (ROOT / f).rglob("*"))]
    names = re.compile(r".*\.(md|py|toml|ya?ml)|Makefile|run")
    return [path for path in paths if path.is_file() and names.fullmatch(path.name)]


def test_modules_are_short_and_documented():
    sources = {relative(path): path.read_text() for path in MODULES}
    long = [name for name, source in sources.items() if source.count("\n") > 600]
    assert not long, "is there a second noun inside?"
    trees = {name: ast.parse(source) for name, source in sources.items()}
    silent = [name for name, tree in trees.items() if not ast.get_docstring(tree)]
    assert not silent, "say in one line what it is for"


def test_init_files_only_reexport():
    found = []
    for path in INITS:
        _docstring, *body = ast.parse(path.read_text()).body
        allowed = ast.Import | ast.ImportFrom
        if path.parent == SRC:  # what is imported when it is first used
            allowed |= ast.FunctionDef | ast.Assign | ast.If
        others = [node for node in body if not isinstance(node, allowed)]
        found += [f"{relative(path)}: {ast.unparse(node)}" for node in others]
    assert not found


def test_contributing_shows_the_rooms_of_now():
    assert rooms.PAGE.read_text() == rooms.page(), "run `make rooms`"
    assert len(rooms.rooms()) <= 22


def test_only_one_module_mentions_private_jax():
    private = re.compile(r"jax\.(_src|core|extend|interpreters|experimental|lib)\b")
    mentioning = {path.name for path in MODULES if private.search(path.read_text())}
    assert mentioning == {"_private.py"}


def test_only_the_program_room_goes_through_nested_jaxprs():
    # What lists the jaxprs of an equation stays in that package, and no function outside
    # goes through equations and calls itself for those inside.
    names = {"sub_jaxprs", "is_jaxpr", "jaxprs_in_params", "subjaxprs"}
    allowed = {
        SRC / "_jax" / "_compat.py",
        SRC / "_jax" / "_private.py",
    }
    found = []
    for path in MODULES:
        if path in allowed or path.is_relative_to(SRC / "_program"):
            continue
        tree = ast.parse(path.read_text())
        found += [f"{relative(path)}: {x}" for x in used_names(tree) & names]
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                calls = [x.func for x in ast.walk(node) if isinstance(x, ast.Call)]
                called = {name for call in calls for name in used_names(call)}
                if "eqns" in used_names(node) and node.name in called:
                    found.append(f"{relative(path)}: {node.name}")
    assert not found, "use `walk`, `Walk`, `fold`, `Flow`, `Run` or `Visitor`"


def used_names(tree):
    nodes = list(ast.walk(tree))
    imported = [x for x in nodes if isinstance(x, ast.ImportFrom | ast.Import)]
    return {
        *(x.id for x in nodes if isinstance(x, ast.Name)),
        *(x.attr for x in nodes if isinstance(x, ast.Attribute)),
        *(alias.name for node in imported for alias in node.names),
    }


def test_no_file_names_a_path_of_one_machine():
    local = re.compile(r"(?<![\w.~}/-])/(?:home|opt|root|tmp|work|Users)/")
    files = project_files()
    assert {ROOT / "Makefile", ROOT / ".ci" / "run", SRC / "__init__.py"} <= {*files}
    found = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if local.search(line)
    ]
    assert not found


def test_tests_run_on_eight_devices_with_strict_promotion():
    assert jax.device_count() == 8
    with pytest.raises(ValueError, match="promotion"):
        _ = jnp.ones(2, jnp.bfloat16) + jnp.ones(2)


@pytest.mark.standard_promotion
def test_marked_test_runs_with_standard_promotion():
    assert (jnp.ones(2, jnp.bfloat16) + jnp.ones(1)).dtype == jnp.float32


def test_annotations_of_mpx_are_checked_when_called(pytestconfig):
    if not pytestconfig.getoption("jaxtyping_packages"):
        pytest.skip("`make test TYPED=1` checks them, which takes twice as long")
    with pytest.raises(jaxtyping.TypeCheckError, match="period"):
        mpx.DynamicLossScaling(period="often")
