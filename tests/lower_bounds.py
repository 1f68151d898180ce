"""Prints the oldest versions that pyproject.toml allows, for `pip install`."""

import pathlib
import re
import tomllib

PYPROJECT = pathlib.Path(__file__).parents[1] / "pyproject.toml"
EXTRAS = ("checkpoint", "flax")


def lower_bounds() -> list[str]:
    """Returns `equinox==0.13.1` and the like, of the dependencies and of some extras."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    extras = project["optional-dependencies"]
    bounds = [*project["dependencies"], *(x for name in EXTRAS for x in extras[name])]
    found = [re.match(r"([\w-]+)>=([\d.]+)", bound) for bound in bounds]
    assert all(found), f"a dependency has no lower bound: {bounds}"
    return [f"{match[1]}=={match[2]}" for match in found if match]


if __name__ == "__main__":
    print(*lower_bounds())
