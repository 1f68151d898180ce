"""The Python code in README.md and docs/ runs.

The blocks of one page share a namespace and run in order. Code of other libraries is
fenced with `python notest`.
"""

import pathlib
import re
import textwrap

import pytest

ROOT = pathlib.Path(__file__).parents[1]
# Indented too: inside tabs and admonitions.
BLOCK = re.compile(
    r"^(?P<indent> *)```python\n(?P<code>.*?)^(?P=indent)```$", re.S | re.M
)


def code_blocks(text):
    """Yields the code of each block, on the lines that it has in the page."""
    for match in BLOCK.finditer(text):
        lines_before = text.count("\n", 0, match.start("code"))
        yield "\n" * lines_before + textwrap.dedent(match["code"])


def pages_with_code():
    # The tutorial takes longest: first, so that no process waits for it in the end.
    first = [ROOT / "README.md", ROOT / "docs" / "tutorial.md"]
    pages = [*first, *sorted({*(ROOT / "docs").rglob("*.md")} - {*first})]
    return [page for page in pages if any(code_blocks(page.read_text()))]


def case(page):
    """Returns the case of a page; all but the first two run in `make check`."""
    is_first = page in (ROOT / "README.md", ROOT / "docs" / "index.md")
    name = str(page.relative_to(ROOT))
    return pytest.param(page, marks=() if is_first else pytest.mark.page, id=name)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("page", [case(page) for page in pages_with_code()])
def test_code_of_page_runs(page, tmp_path, monkeypatch, request):
    if page.name == "tutorial.md":  # trains for long: 41 s of CPU time instead of 54 s
        request.getfixturevalue("optimized_programs")
    monkeypatch.chdir(tmp_path)  # what a page writes, it writes there
    namespace = {"__name__": "__main__"}
    for block in code_blocks(page.read_text()):
        exec(compile(block, str(page), "exec"), namespace)


def test_readme_has_code_that_runs():
    assert ROOT / "README.md" in pages_with_code()


def test_code_blocks_are_found_where_they_are():
    text = textwrap.dedent(
        """\
        ```python
        a = 1
        ```
        ```python notest
        not run
        ```
        === "Tab"
            ```python
            if a:
                b = 2
            ```
        """
    )
    assert list(code_blocks(text)) == [
        "\na = 1\n",
        "\n" * 8 + "if a:\n    b = 2\n",
    ]
