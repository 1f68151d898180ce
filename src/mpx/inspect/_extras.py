"""Packages that only some results need, imported when they are used."""

import importlib
from typing import Any


def extra(module: str, purpose: str) -> Any:
    """Returns a module of the extra `inspect`.

    Raises:
        ImportError: If it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f'{purpose} needs {package}: `pip install "mpx-jax[inspect]"`.'
        ) from error
