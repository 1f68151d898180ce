"""The check of the documentation finds what it promises to find."""

import pytest

import check_site

GOOD = '<title>A</title><h1 id="a">A</h1><a href="#a">x</a><img src="i.png" alt="i">'


@pytest.mark.parametrize(
    ("other", "defect"),
    [
        ('<title>B</title><h1>B</h1><a href="../#a">x</a>', None),
        ("<title>B</title><h1>B</h1><a href='https://x.org/#y'>x</a>", None),
        (
            '<title>B</title><h1>B</h1><a href="../c">x</a>',
            "the link ../c leads nowhere",
        ),
        ('<title>B</title><h1>B</h1><a href="../#b">x</a>', "../#b has no anchor"),
        ('<title>B</title><h1>B</h1><img src="../i.png">', "no alternative text"),
        ('<title>B</title><h1>B</h1><img src="i.png" alt="i">', "no picture i.png"),
        (
            '<title>B</title><h1>B</h1><link rel="stylesheet" href="https://x.org/a.css">',
            "loads https://x.org/a.css from another server",
        ),
        (
            '<title>B</title><h1>B</h1><script src="//x.org/a.js"></script>',
            "loads //x.org/a.js from another server",
        ),
        ("<title>B</title>", "0 headings of the first level"),
        ("<title>B</title><h1>B</h1><h1>C</h1>", "2 headings of the first level"),
        ("<title>A</title><h1>B</h1>", "the title 'A' is that of b/index.html"),
    ],
)
def test_defect_of_a_site_is_found(tmp_path, other, defect):
    (tmp_path / "b").mkdir()
    (tmp_path / "index.html").write_text(GOOD)
    (tmp_path / "i.png").touch()
    (tmp_path / "b" / "index.html").write_text(other)
    found = list(check_site.check_site(tmp_path))
    assert len(found) == (defect is not None)
    assert defect is None or defect in found[0]


def test_an_empty_site_is_a_defect(tmp_path):
    (found,) = check_site.check_site(tmp_path)
    assert "holds no page" in found


@pytest.mark.parametrize(
    ("text", "defect"),
    [
        ("# A b\n[x](#a-b) [y](https://x.org)\n```python\n[x](#no)\n```\n", None),
        ("```python notest\n```\n", None),
        ("````text\n```\n````\n", None),
        ("```\n```\n", "code block in 'no language'"),
        ("=== 'Tab'\n    ```py\n    ```\n", "code block in 'py'"),
        ("[x](no.md)", "the link no.md leads nowhere"),
        ("# A\n[x](#b)", "the link #b has no anchor"),
        ("![](page.md)", "no alternative text"),
    ],
)
def test_defect_of_a_markdown_file_is_found(tmp_path, text, defect):
    page = tmp_path / "page.md"
    page.write_text(text)
    found = [*check_site.check_blocks(page), *check_site.check_markdown_links(page)]
    assert len(found) == (defect is not None)
    assert defect is None or defect in found[0]
