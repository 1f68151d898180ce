"""Traced programs: looking through them, following values, and running them."""
