"""Inspection of training programs: what ran in which precision, what failed, what to change."""
