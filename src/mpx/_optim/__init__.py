"""Compressed optimizers: update rules, options, states and gradient release."""
