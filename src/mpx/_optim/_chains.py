"""Which transformations of an optax chain come behind the one that is being called."""

import inspect
from typing import Any

import optax

# A compressed optimizer behind another one has other parameters, and what is set to zero
# does not move.
_HARMLESS = ("identity", "masked(Core.update)", "masked(set_to_zero)")


def transforms_behind() -> list[str]:
    """Returns the names of what will change the updates of the caller in a chain.

    Optax tells a transformation nothing about its place. But a chain runs its members in a
    loop, and that loop is on the stack while one of them is called or traced, at any depth:
    `chain(masked(tx), scale(0.5))`. Where optax writes its loops in another way, nothing is
    found, and nothing is refused.
    """
    names: list[str] = []
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "update_fn" and _is_of_optax(frame):
            names += _behind(frame.f_locals)
        frame = frame.f_back
    return [name for name in names if name not in _HARMLESS]


def _is_of_optax(frame: Any) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("optax.")


def _behind(loop: Any) -> list[str]:
    """Returns the names of those members that a loop has not called yet.

    Args:
        loop: The variables of the `update_fn` of `optax.chain` or `optax.named_chain`: the
            members, and the states of those that are done.
    """
    done = loop.get("new_state")
    if not isinstance(done, list | dict):
        return []
    if "update_fns" in loop:
        updates = loop["update_fns"]
    elif "transforms" in loop:
        updates = [transform.update for _, transform in loop["transforms"]]
    else:
        return []
    return [_name(update) for update in updates[len(done) + 1 :]]


def _name(update: Any) -> str:
    """Returns the name of what made a transformation, such as `scale`."""
    name = getattr(update, "__qualname__", repr(update)).split(".<locals>")[0]
    cells = getattr(update, "__closure__", None) or ()
    inner = [
        _name(cell.cell_contents.update)
        for cell in cells
        if isinstance(cell.cell_contents, optax.GradientTransformation)
    ]
    if not inner:
        return name
    return inner[0] if name == "with_extra_args_support" else f"{name}({inner[0]})"
