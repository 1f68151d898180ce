"""Leaves of trees: selectors, casts, policies, the half-precision switch."""
