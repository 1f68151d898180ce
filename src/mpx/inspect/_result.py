"""Results of inspections: they print as tables, export to JSON and render in notebooks."""

import dataclasses
import html
import json
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from jaxtyping import PyTree

K = TypeVar("K")


class Table(NamedTuple):
    """A part of a result for readers.

    Attributes:
        head: The names of the columns; empty for a paragraph of text.
        rows: The cells, as text. A paragraph has one row of one cell.
        title: A line above the table; "" for none.
        right: The positions of columns that hold numbers and are aligned to the right.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    right: frozenset[int] = frozenset()

    @classmethod
    def text(cls, paragraph: str, title: str = "") -> "Table":
        """Returns a paragraph."""
        return cls((), ((paragraph,),), title)

    def __str__(self) -> str:
        """Returns the table in columns of equal width."""
        lines = [self.title] if self.title else []
        if not self.head:
            return "\n".join([*lines, *(cell for row in self.rows for cell in row)])
        every = [self.head, *self.rows]
        widths = [max(map(len, column)) for column in zip(*every, strict=True)]
        rule = ["-" * width for width in widths]
        for line in (self.head, rule, *self.rows):
            cells = [
                cell.rjust(width) if i in self.right else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)


class Result:
    """Base of the dataclasses that `mpx.inspect` returns.

    A subclass is a dataclass and defines `tables`.
    """

    def tables(self) -> Sequence[Table]:
        """Returns what readers see, in order."""
        raise NotImplementedError

    def __str__(self) -> str:
        """Returns the tables as text."""
        return "\n\n".join(str(table) for table in self.tables())

    __repr__ = __str__

    def __init_subclass__(cls) -> None:
        # At the prompt a result is its table: a dataclass keeps a `__repr__` that is there.
        cls.__repr__ = vars(cls).get("__repr__", Result.__repr__)

    def _repr_html_(self) -> str:
        # Without the class of text output, which breaks long lines.
        return f'<pre style="white-space: pre">{html.escape(str(self))}</pre>'

    def to_dict(self) -> dict[str, PyTree]:
        """Returns the fields as plain Python values: dicts, lists, numbers and strings."""
        return _plain(self)

    def to_json(self, indent: int | None = None) -> str:
        """Returns the fields as JSON, in lines if `indent` is given.

        JSON has no infinity and no nan: they become the strings "inf", "-inf" and "nan".
        """
        return json.dumps(_plain(self, is_json=True), indent=indent)


def _plain(value: PyTree, is_json: bool = False) -> PyTree:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {x.name: getattr(value, x.name) for x in dataclasses.fields(value)}
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = getattr(value, "_asdict")()  # noqa: B009
    elif hasattr(value, "__array__"):
        value = np.asarray(value).tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(x, is_json) for key, x in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(x, is_json) for x in value]
    if is_json and isinstance(value, float) and not math.isfinite(value):
        return str(value)
    is_plain = value is None or isinstance(value, bool | int | float | str)
    return value if is_plain else str(value)


def total(pairs: Iterable[tuple[K, int]]) -> dict[K, int]:
    """Returns the sum of the numbers of each key."""
    found: dict[K, int] = {}
    for name, number in pairs:
        found[name] = found.get(name, 0) + number
    return found


def amount(number: float, unit: str = "") -> str:
    """Returns a number of up to three digits with a prefix: 1.24 G, 305 M."""
    power = 0
    while abs(number) >= 999.5 and power < 5:
        number, power = number / 1000, power + 1
    return f"{number:.3g} {'kMGTP'[power - 1 : power]}{unit}".rstrip()


def percent(share: float) -> str:
    """Returns a share as a percentage with one decimal."""
    return f"{100 * share:.1f} %"


def and_more(names: Sequence[str]) -> str:
    """Returns the first of some names, and how many more there are."""
    return names[0] + (f" and {len(names) - 1} more" if names[1:] else "")


def rough(error: float) -> str:
    """Returns a relative error as a percentage with two digits."""
    if not math.isfinite(error):
        return "not finite"
    return "more than 1000 %" if error > 10 else f"{float(f'{100 * error:.2g}'):g} %"


def source_of(frames: Sequence[tuple[str, str, int]]) -> str:
    """Returns file and line of the first of an equation's frames: (function, file, line)."""
    return f"{short_source(frames[0][1])}:{frames[0][2]}" if frames else "unknown"


def short_source(source: str) -> str:
    """Returns a file's name as seen from here or from the installed packages."""
    path = pathlib.Path(source)
    if "site-packages" in path.parts:
        return "/".join(path.parts[path.parts.index("site-packages") + 1 :])
    if path.is_relative_to(pathlib.Path.cwd()):
        return str(path.relative_to(pathlib.Path.cwd()))
    return "/".join(path.parts[-2:])
