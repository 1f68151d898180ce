"""Loss scaling, and the optimizer step that is skipped if its results are not finite."""
