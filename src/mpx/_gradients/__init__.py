"""One call of the user's loss: evaluate, differentiate, accumulate, check."""
