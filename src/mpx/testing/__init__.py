"""Comparison of numbers and trees, and non-finite numbers in a leaf, for tests."""
# pyright: reportUnknownVariableType=false

from mpx.testing._compare import assert_trees_equal as assert_trees_equal
from mpx.testing._compare import inject_nonfinite as inject_nonfinite
from mpx.testing._compare import ulp_distance as ulp_distance
