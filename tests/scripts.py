"""Scripts of other folders as modules."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def script(name: str, folder: str = "benchmarks") -> ModuleType:
    """Imports a script, which finds those beside it while it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / folder))
        return importlib.import_module(name)
