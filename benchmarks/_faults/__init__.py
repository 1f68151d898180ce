"""Functions with planted faults, and healthy ones, for `benchmarks/explain.py`."""

import importlib.util

from _faults import accuracy, backward, formulas, frameworks, healthy, loops, scales  # noqa: F401
from _faults.table import HEALTHY as HEALTHY
from _faults.table import PLANTED as PLANTED
from _faults.table import Case as Case
from _faults.table import Planted as Planted

if importlib.util.find_spec("haiku") is not None:
    from _faults import haiku_models  # noqa: F401
