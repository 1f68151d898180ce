"""Where recorded numbers go: TensorBoard, Weights & Biases, or any function."""

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

Write = Callable[[int, Mapping[str, float]], Any]


def as_writers(writer: Any) -> list[Write]:
    """Returns functions of a step and its numbers.

    Args:
        writer: `None`; a `SummaryWriter` of tensorboardX (or of PyTorch); a run of W&B, or
            the module itself; a function of the step and a dict of numbers; or a list.

    Raises:
        TypeError: If it is none of them.
    """
    if writer is None:
        return []
    if isinstance(writer, list | tuple):
        return [write for one in writer for write in as_writers(one)]
    if hasattr(writer, "add_scalar"):
        return [_tensorboard(writer)]
    if _is_run(writer):
        return [lambda step, numbers: writer.log(dict(numbers), step=step)]
    if callable(writer) and not isinstance(writer, type):
        return [writer]
    raise TypeError(
        "`writer` must be a `tensorboardX.SummaryWriter`, a run of W&B, or a function of "
        f"the step and a dict of numbers, but {type(writer).__name__} was given. For a "
        "logger pass `lambda step, numbers: logger.info(...)`."
    )


def _is_run(writer: Any) -> bool:
    """Returns whether it has W&B's `log(data, step=...)`; loggers have another one."""
    log = getattr(writer, "log", None)
    if isinstance(writer, type | logging.Logger | logging.LoggerAdapter) or log is None:
        return False
    parameters = inspect.signature(log).parameters
    return "step" in parameters or any(
        x.kind is x.VAR_KEYWORD for x in parameters.values()
    )


def _tensorboard(writer: Any) -> Write:
    def write(step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    return write
