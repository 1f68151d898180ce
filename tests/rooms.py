"""Draws the rooms of mpx from their imports: `make rooms` writes CONTRIBUTING.md anew.

A room stands on the floor above the highest room that it imports. Its sentence is the first
one of its docstring.
"""

import ast
import functools
import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[1]
SRC = ROOT / "src" / "mpx"
PAGE = ROOT / "CONTRIBUTING.md"
START, END = "<!-- rooms -->\n", "<!-- end of rooms -->\n"


def rooms() -> dict[str, pathlib.Path]:
    """Returns the packages and modules at the top, by name."""
    found = {path.parent.name: path for path in SRC.glob("*/__init__.py")}
    modules = {path.stem: path for path in SRC.glob("*.py")}
    return dict(sorted({**found, **modules}.items()))


def imports() -> dict[str, set[str]]:
    """Returns for each room those that it imports."""
    known = rooms()
    found: dict[str, set[str]] = {name: set() for name in known}
    for name, path in known.items():
        inside = path.parent.rglob("*.py") if path.parent != SRC else [path]
        for module in inside:
            for node in ast.walk(ast.parse(module.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module:
                    first = [node.module] if node.module != "mpx" else []
                    whole = [f"{node.module}.{alias.name}" for alias in node.names]
                    parts = [x.split(".") for x in (first or whole)]
                    found[name] |= {x[1] for x in parts if x[0] == "mpx" and x[1:]}
    return {name: (others & known.keys()) - {name} for name, others in found.items()}


def picture() -> str:
    """Returns the floors as a block of text, and a table with a sentence for each room."""
    graph = imports()
    # It names the rooms that it loads when they are first used.
    graph["__init__"] = graph["__main__"] = set(graph) - {"__init__", "__main__"}

    @functools.cache
    def floor(name: str) -> int:
        return 1 + max((floor(other) for other in graph[name]), default=0)

    floors: dict[int, list[str]] = {}
    for name in graph:
        floors.setdefault(floor(name), []).append(name)
    lines = ["```text"]
    lines += [f"{n}  {'  '.join(floors[n])}" for n in sorted(floors, reverse=True)]
    lines += ["```", "", "| room | what belongs there | imports |", "|---|---|---|"]
    for name in sorted(graph, key=lambda x: (-floor(x), x)):
        doc = ast.get_docstring(ast.parse(rooms()[name].read_text())) or ""
        others = "all" if name.startswith("__") else " ".join(sorted(graph[name]))
        lines.append(f"| `{name}` | {doc.splitlines()[0]} | {others or '–'} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """Returns CONTRIBUTING.md with the picture of now."""
    before, _, rest = PAGE.read_text().partition(START)
    return before + START + picture() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.stdout.write(picture())
