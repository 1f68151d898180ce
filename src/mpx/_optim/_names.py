"""Names of options in other libraries: an error says what they are called here."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_COMPRESSION = "`compression=mpx.optim.Compression({})`"
_F32_MOMENTS = f"{_COMPRESSION.format('quantize=False')}, which keeps moments in f32"
_NAMES = {
    # FlashOptim, and options of `Compression`
    "master_weight_bits": _COMPRESSION.format("master_bits=24"),
    "master_bits": _COMPRESSION.format("master_bits=24"),
    "quantize": _COMPRESSION.format("quantize=True"),
    "group_size": _COMPRESSION.format("group_size=32"),
    "rounding": _COMPRESSION.format("rounding='dithered'"),
    "fused": "`backend`",
    "param_groups": "`groups=[mpx.optim.ParamGroup(...)]`",
    # optax
    "mu_dtype": _F32_MOMENTS,
    "accumulator_dtype": _F32_MOMENTS,
    # PyTorch
    "lr": "`learning_rate`",
    "betas": "`b1` and `b2`",
}


def explains_names(make: Callable[P, T]) -> Callable[P, T]:
    """Wraps a function that makes an optimizer: options of other libraries are explained."""

    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs:
            if name in _NAMES:
                raise TypeError(
                    f"`{make.__name__}` has no option `{name}`; here it is "
                    f"{_NAMES[name]}."
                )
        return make(*args, **kwargs)

    return made
