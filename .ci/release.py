"""Prepares a clone for the build of a release: `python .ci/release.py v0.1.0 URL`.

The tag must be the version that the project states, with a date in the changelog. A package
index shows README.md without the files around it: its links become those of the repository
at `URL`, at this tag, and the URLs of the project are written into pyproject.toml.
"""

import pathlib
import re
import sys
import tomllib

ROOT = pathlib.Path(__file__).parents[1]
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<path>[^)\s]+)\)")


def check_version(root: pathlib.Path, tag: str) -> None:
    """Raises unless the project's files agree on the version and the changelog dates it."""
    version = tag.removeprefix("v")
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    cited = re.search(r"^version: (.+)$", (root / "CITATION.cff").read_text(), re.M)
    found = {"pyproject.toml": project["version"], "CITATION.cff": cited and cited[1]}
    wrong = [f"{name} has {x}" for name, x in found.items() if x != version]
    heading = rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$"
    if not re.search(heading, (root / "CHANGELOG.md").read_text(), re.M):
        wrong.append(f"CHANGELOG.md has no heading `## {version} (year-month-day)`")
    if wrong:
        sys.exit(f"The tag is {tag}, but {'; '.join(wrong)}.")


def absolute_links(text: str, url: str, tag: str) -> str:
    """Returns Markdown whose links to files of the repository are absolute."""

    def replace(link: re.Match[str]) -> str:
        path = link["path"]
        if path.startswith(("https:", "http:", "mailto:", "#")):
            return link[0]
        kind = "raw" if link["image"] else "blob"
        return f"{link['image']}[{link['text']}]({url}/{kind}/{tag}/{path})"

    return LINK.sub(replace, text)


def project_urls(url: str) -> str:
    """Returns the table of pyproject.toml that a package index shows beside the project."""
    urls = {
        "Repository": url,
        "Documentation": f"{url}/blob/main/docs/index.md",
        "Changelog": f"{url}/blob/main/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }
    lines = [f'{name} = "{target}"' for name, target in urls.items()]
    return "\n".join(["[project.urls]", *lines, "", ""])


def main() -> None:
    """Checks the version, then changes README.md and pyproject.toml in place."""
    tag, url = sys.argv[1:]
    check_version(ROOT, tag)
    readme, project = ROOT / "README.md", ROOT / "pyproject.toml"
    readme.write_text(absolute_links(readme.read_text(), url.rstrip("/"), tag))
    text, table = project.read_text(), "[project.optional-dependencies]"
    assert text.count(table) == 1
    project.write_text(text.replace(table, project_urls(url.rstrip("/")) + table))


if __name__ == "__main__":
    main()
