"""Functions with planted faults, and healthy ones, for `benchmarks/explain.py`."""

from _faults import formulas, frameworks, healthy, loops  # noqa: F401
from _faults.table import HEALTHY as HEALTHY
from _faults.table import PLANTED as PLANTED
from _faults.table import Case as Case
