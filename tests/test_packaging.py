"""What a package index gets: metadata, links that work there, one version everywhere."""

import importlib.util
import pathlib
import re
import shutil
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
URL = "https://example.org/mpx"
FILES = ("pyproject.toml", "CITATION.cff", "CHANGELOG.md", "README.md")
pytestmark = pytest.mark.skipif(
    not (ROOT / ".ci").exists(), reason="an sdist has no scripts for releases"
)


@pytest.fixture
def release(tmp_path, monkeypatch):
    """The script, on a copy of the files whose changelog has a date."""
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci/release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path)
    changelog = tmp_path / "CHANGELOG.md"
    dated = changelog.read_text().replace("(unreleased)", "(2026-01-31)", 1)
    changelog.write_text(dated)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def run(release, monkeypatch, tag):
    monkeypatch.setattr("sys.argv", ["release.py", tag, URL])
    release.main()


def version():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_every_link_of_the_readme_is_absolute_and_names_a_file(release, monkeypatch):
    run(release, monkeypatch, f"v{version()}")
    text = (release.ROOT / "README.md").read_text()
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", text)
    assert all(target.startswith("https://") for _, target in links)
    own = [(image, target) for image, target in links if target.startswith(URL)]
    assert len(own) > 10
    for image, target in own:
        kind, tag, path = target.removeprefix(f"{URL}/").split("/", 2)
        assert kind == ("raw" if image else "blob")
        assert tag == f"v{version()}"
        assert (ROOT / path.partition("#")[0]).exists(), target


def test_project_has_urls_for_an_index(release, monkeypatch):
    run(release, monkeypatch, f"v{version()}")
    project = tomllib.loads((release.ROOT / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Repository"] == URL
    assert project["optional-dependencies"]["flax"]  # the table after it is still there


@pytest.mark.parametrize(
    ("name", "before", "after", "message"),
    [
        ("pyproject.toml", f'"{version()}"', '"9.9.9"', "pyproject.toml has 9.9.9"),
        ("CITATION.cff", f"version: {version()}", "version: 9", "CITATION.cff has 9"),
        ("CHANGELOG.md", "(2026-01-31)", "(unreleased)", "CHANGELOG.md has no heading"),
    ],
)
def test_versions_that_disagree_stop_the_release(
    release, monkeypatch, name, before, after, message
):
    path = release.ROOT / name
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after, 1))
    readme = (release.ROOT / "README.md").read_text()
    with pytest.raises(SystemExit, match=message):
        run(release, monkeypatch, f"v{version()}")
    assert (release.ROOT / "README.md").read_text() == readme
