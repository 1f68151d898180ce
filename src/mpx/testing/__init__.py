"""Comparison of numbers and trees, and injection of faults, for tests."""
# pyright: reportUnknownVariableType=false

from mpx.testing._compare import assert_trees_equal as assert_trees_equal
from mpx.testing._compare import inject_nonfinite as inject_nonfinite
from mpx.testing._compare import ulp_distance as ulp_distance
from mpx.testing._faults import Fault as Fault
from mpx.testing._faults import inject as inject
