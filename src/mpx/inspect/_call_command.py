"""Calls that are named on the command line, as `module:function`."""

import argparse
import importlib
import sys
from collections.abc import Callable
from typing import Any

from mpx.inspect._result import Result


def add_call(parser: argparse.ArgumentParser) -> None:
    """Adds the argument that names a call."""
    parser.add_argument(
        "call",
        metavar="module:function",
        help="a function without arguments that returns (loss, *args): the function to "
        "look at and its arguments, of which arrays may be `jax.ShapeDtypeStruct`s",
    )


def load_call(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the function and the arguments that `module:function` gives.

    Raises:
        SystemExit: If there is no such function, or it does not return a call.
    """
    module_name, _, path = name.partition(":")
    if not path:
        raise SystemExit(f"Expected module:function, but got {name!r}.")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as with `python -m`
    try:
        found: Any = importlib.import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise SystemExit(f"Cannot load {name}: {error}.") from error
    call = found()
    if not isinstance(call, tuple) or not call or not callable(call[0]):
        raise SystemExit(
            f"{name} must return (loss, *args), a function and its arguments, but it "
            f"returned {type(call).__name__}. Write for instance "
            "`def call(): return mpx.amp(loss), params, batch`."
        )
    return call[0], call[1:]


def show(result: Result, *, as_json: bool) -> None:
    """Prints a result."""
    if as_json:
        print(result.to_json(indent=2))
    else:
        result.show()
