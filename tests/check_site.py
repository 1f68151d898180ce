"""Checks the built documentation and the Markdown files of the repository.

    python tests/check_site.py site

Of the site: internal links and anchors lead somewhere, pictures exist and have a text
for those who do not see them, every page has one heading of the first level, titles are
unique, and no page loads anything from another server. Of the Markdown files: relative
links, anchors and pictures exist, and every code block has a language; Python is run by
`tests/test_docs.py` unless it is fenced with `python notest`. Prints the defects; the
exit status is 1 if there are any.
"""

import html.parser
import pathlib
import re
import sys
import urllib.parse
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]
# What `tests/test_docs.py` runs, what it knows not to run, and what is no Python.
LANGUAGES = {"python", "python notest", "bash", "text", "diff", "bibtex", "yaml"}
FENCE = re.compile(r"^ *(`{3,})(.*)$")
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^()\s]+)\)")


class Page(html.parser.HTMLParser):
    """The links, pictures, anchors and headings of an HTML page."""

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__()
        self.path = path
        self.links: list[str] = []
        self.images: list[tuple[str, str]] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.title = ""
        self.headings: list[str] = []
        self._open: str | None = None
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors.update(values[key] for key in ("id", "name") if key in values)
        if tag in ("script", "img") and "src" in values:
            self.loaded.append(values["src"])
        elif tag == "link" and values.get("rel") in ("stylesheet", "icon"):
            self.loaded.append(values.get("href", ""))
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "img":
            self.images.append((values.get("src", ""), values.get("alt", "")))
        elif tag == "h1":
            self._open = "h1"
            self.headings.append("")
        elif tag == "title" and not self.title:
            self._open = "title"

    def handle_endtag(self, tag: str) -> None:
        if tag == self._open:
            self._open = None

    def handle_data(self, data: str) -> None:
        if self._open == "title":
            self.title += data
        elif self._open == "h1":
            self.headings[-1] += data


def check_site(site: pathlib.Path) -> Iterator[str]:
    """Yields the defects of a built site."""
    files = [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]
    pages = {path.resolve(): Page(path) for path in files}
    if not pages:
        yield f"{site} holds no page; build it with `mkdocs build`."
    titles: dict[str, pathlib.Path] = {}
    for page in pages.values():
        where = page.path.relative_to(site)
        if len(page.headings) != 1:
            yield f"{where}: {len(page.headings)} headings of the first level"
        if (first := titles.setdefault(page.title, where)) != where:
            yield f"{where}: the title {page.title!r} is that of {first}"
        for source in page.loaded:
            if urllib.parse.urlsplit(source).netloc:
                yield f"{where}: loads {source} from another server"
        yield from (f"{where}: {defect}" for defect in check_images(page, site))
        yield from (f"{where}: {defect}" for defect in check_links(page, site, pages))


def check_images(page: Page, site: pathlib.Path) -> Iterator[str]:
    """Yields the defects of the pictures of a page."""
    for source, text in page.images:
        if not text and not source.endswith("logo.svg"):
            yield f"the picture {source} has no alternative text"
        if is_local(source) and not resolve(page.path, site, source).is_file():
            yield f"no picture {source}"


def check_links(
    page: Page, site: pathlib.Path, pages: dict[pathlib.Path, Page]
) -> Iterator[str]:
    """Yields the defects of the links of a page within the site."""
    for link in filter(is_local, page.links):
        target = resolve(page.path, site, link)
        anchor = urllib.parse.unquote(urllib.parse.urlsplit(link).fragment)
        if not target.is_file():
            yield f"the link {link} leads nowhere"
        elif anchor and target in pages and anchor not in pages[target].anchors:
            yield f"the link {link} has no anchor there"


def is_local(link: str) -> bool:
    """Returns whether a link stays within the site."""
    parts = urllib.parse.urlsplit(link)
    return not parts.scheme and not parts.netloc


def resolve(page: pathlib.Path, site: pathlib.Path, link: str) -> pathlib.Path:
    """Returns the file that a link on a page leads to."""
    path = urllib.parse.unquote(urllib.parse.urlsplit(link).path)
    if not path:
        return page.resolve()
    target = site / path.lstrip("/") if path.startswith("/") else page.parent / path
    target = target.resolve()
    return target / "index.html" if target.is_dir() else target


def check_blocks(path: pathlib.Path) -> Iterator[str]:
    """Yields the code blocks of a Markdown file whose language is not known."""
    fence = None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not (match := FENCE.match(line)):
            continue
        ticks, language = match[1], match[2].strip()
        if fence is None:
            fence = ticks
            if language not in LANGUAGES:
                yield (
                    f"{path}:{number}: a code block in {language or 'no language'!r}; "
                    f"use one of {', '.join(sorted(LANGUAGES))}"
                )
        elif ticks == fence and not language:
            fence = None


def check_markdown_links(path: pathlib.Path) -> Iterator[str]:
    """Yields the defects of links and pictures in a Markdown file, as GitHub shows it."""
    for match in LINK.finditer(without_code(path.read_text(encoding="utf-8"))):
        if match["image"] and not match["text"]:
            yield f"{path}: the picture {match['target']} has no alternative text"
        file, _, anchor = match["target"].partition("#")
        if not is_local(match["target"]):
            continue
        target = (path.parent / file).resolve() if file else path
        if not target.exists():
            yield f"{path}: the link {match['target']} leads nowhere"
        elif anchor and anchor not in anchors_of(target.read_text(encoding="utf-8")):
            yield f"{path}: the link {match['target']} has no anchor there"


def without_code(text: str) -> str:
    """Returns Markdown without its code blocks."""
    return re.sub(r"^ *(`{3,}).*?^ *\1$", "", text, flags=re.S | re.M)


def anchors_of(text: str) -> set[str]:
    """Returns the anchors that GitHub gives to the headings of a Markdown text."""
    headings = re.findall(r"^#+ (.*)$", without_code(text), flags=re.M)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    slugs = (re.sub(r"[^\w\- ]", "", heading.lower()).strip() for heading in plain)
    return {slug.replace(" ", "-") for slug in slugs}


def main(site: str = "site") -> int:
    """Prints all defects; returns the exit status."""
    found = list(check_site(pathlib.Path(site)))
    readmes = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    readmes += [ROOT / folder / "README.md" for folder in ("examples", "benchmarks")]
    for path in readmes:
        found += check_markdown_links(path)
    for path in [*readmes, *sorted((ROOT / "docs").rglob("*.md"))]:
        found += check_blocks(
            path
        )  # mkdocs checks the links in the sources of the site
    print("\n".join(found) or "The site and the Markdown files have no defects.")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
