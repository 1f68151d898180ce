"""The deliberate breaks of `breaks.py` still have a place in the source."""

import collections

from breaks import BREAKS, missing


def test_every_break_has_its_text_and_its_test():
    # When this fails, find the text that a change has moved, and run that break again.
    assert not missing(BREAKS)


def test_breaks_have_names_of_their_own():
    counts = collections.Counter(item.name for item in BREAKS)
    assert max(counts.values()) == 1
    assert all(item.old != item.new for item in BREAKS)
