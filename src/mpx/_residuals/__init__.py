"""8-bit residuals: what the backward pass reads from codes, and what it computes again."""
