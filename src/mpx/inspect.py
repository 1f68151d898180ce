"""Reports on what mixed precision does with a function, and checks of what was compiled."""

from collections.abc import Callable
from typing import Any, overload

from mpx._amp import AmpReport as AmpReport
from mpx._amp import amp_report as _amp_report
from mpx._fp8 import Fp8Check as Fp8Check
from mpx._fp8 import Fp8Function as _Fp8Function
from mpx._fp8 import Fp8Report as Fp8Report
from mpx._fp8 import check as check
from mpx._fp8 import fp8_report as _fp8_report
from mpx._processes import check_processes as check_processes


@overload
def report(  # pyright: ignore[reportOverlappingOverload]
    func: _Fp8Function, /, *args: Any, **kwargs: Any
) -> Fp8Report: ...
@overload
def report(func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> AmpReport: ...
def report(
    func: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> AmpReport | Fp8Report:
    """Returns which operations of a call run in which precision, and why.

    The call is traced and not run, so arrays may be given as `jax.ShapeDtypeStruct`. The
    report covers the forward pass; `report(mpx.amp(jax.grad(loss)), ...)` covers both.

    Args:
        func: A function under `mpx.amp` or `mpx.fp8`.
        *args: Its positional arguments, without the state of delayed scaling.
        **kwargs: Its keyword arguments.

    Returns:
        An `AmpReport` for `amp`, an `Fp8Report` for `fp8`. Both print as tables.

    Raises:
        TypeError: If the function is under neither of them.

    Examples:
        >>> import jax.numpy as jnp
        >>> import mpx
        >>> def f(x, w):
        ...     return jnp.exp(x @ w)
        >>> found = report(mpx.amp(f), jnp.ones((2, 3)), jnp.ones((3, 4)))
        >>> found.shares
        {'bf16': 1.0}
        >>> [(op.primitive, op.params, op.before, op.after) for op in found.matmuls]
        [('dot_general', ('x', 'w'), ('float32', 'float32'), ('bfloat16',))]
        >>> [op.primitive for op in found.kept]
        ['exp']
    """
    if isinstance(func, _Fp8Function):
        return _fp8_report(func, *args, **kwargs)
    return _amp_report(func, *args, **kwargs)
