"""The tables of the guide say what the code does."""

import pathlib

from mpx._amp._rules import TABLE

GUIDE = pathlib.Path(__file__).parents[1] / "docs" / "guide"


def rule_table():
    """Returns the lines that the page on autocast should have."""
    lines = ["| rule | primitives | why |", "|---|---|---|"]
    for rule, reason, names in TABLE:
        listed = ", ".join(f"`{name}`" for name in names)
        lines.append(f"| {rule} | {listed} | {reason} |")
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


def test_rule_table_of_the_guide_is_the_one_of_the_code():
    page = (GUIDE / "autocast.md").read_text()
    expected = rule_table()
    # When this fails, put the following in the place of the table in the page.
    assert table_after(page, "## The rules") == expected, "\n".join(expected)
