"""Healthy models: nothing is to be found in them."""

from _faults.table import Case as Case
