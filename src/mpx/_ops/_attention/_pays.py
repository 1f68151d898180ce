"""Where cuDNN's attention is faster than the operations one by one.

On an H200 forward and backward of 64 sequences with 12 heads of 64 take, operation by
operation and in cuDNN: 0.21 and 0.27 ms for a length of 64, 0.26 and 0.26 ms for 128, 0.73 and
0.44 ms for 197 (`python benchmarks/attention.py`, jax 0.11.2). On an A100 cuDNN is
slower: 0.82 times the speed, in training, of the same model without it
(huggingface/transformers#48163); so it is on other GPUs of compute capability 8.
"""

LEAST = {9: 128 * 128, 10: 128 * 128}
"""By the first number of the compute capability: from which number of scores per head on."""


def reason_not_paying(
    capability: tuple[int, ...] | None, rows: int, keys: int
) -> str | None:
    """Returns why attention of this size is run operation by operation, if it is."""
    if capability is None:
        return "cuDNN attention needs a CUDA GPU"
    least = LEAST.get(capability[0])
    if least is None:
        version = ".".join(map(str, capability))
        return f"not faster in cuDNN on a GPU of compute capability {version}"
    if rows * keys < least:
        return f"not faster in cuDNN: {rows} × {keys} scores are fewer than {least}"
    return None
