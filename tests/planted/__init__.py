"""Functions with planted faults, and healthy ones, for `tests/scoreboard.py`."""

from planted import formulas, frameworks, healthy, loops  # noqa: F401
from planted.table import HEALTHY as HEALTHY
from planted.table import PLANTED as PLANTED
from planted.table import Case as Case
