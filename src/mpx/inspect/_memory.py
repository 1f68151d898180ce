"""The memory of a training step, predicted before anything runs."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike
from jaxtyping import PyTree

from mpx._amp._transform import amp
from mpx._jax._compat import assumed_gpu
from mpx._jax._devices import cuda_capability
from mpx._jax._formats import is_low as is_half
from mpx._jax._private import assumed_cudnn
from mpx._optim._engine import FlashOptimizer
from mpx._optim._optimizers import flash_adamw
from mpx._optim._state import FlashState
from mpx._program._queries import MATMULS, holds
from mpx.inspect._buffers import by_dtype, nbytes, peak
from mpx.inspect._dtypes import is_float
from mpx.inspect._program import Program, gradient, program, unwrapped
from mpx.inspect._result import Result, Table, amount

# cuBLAS computes in a buffer of this size on Hopper.
_WORKSPACE = 32 << 20


class Option(NamedTuple):
    """The memory of a training step in one precision, in bytes.

    Parameters, state, inputs, and what exists at the peak besides them add up to the peak.
    """

    name: str  # of the precision
    params: int
    grads: int
    state: int  # of the optimizer
    inputs: int  # the other arguments: the batch
    residuals: Mapping[str, int]  # what is left for the backward pass, by dtype
    peak: int  # the most at a time; parameters and state are updated in place
    grads_at_peak: int
    residuals_at_peak: Mapping[str, int]
    temporary: int  # what else exists then: intermediate results, workspace of matmuls


@dataclasses.dataclass(frozen=True)
class Memory(Result):
    """The memory of a training step; made by `mpx.inspect.memory`, printed as a table.

    Attributes:
        options: The memory in each precision.
    """

    options: tuple[Option, ...]

    def __getitem__(self, name: str) -> Option:
        """Returns the memory in one precision."""
        found = {option.name: option for option in self.options}
        if name not in found:
            raise KeyError(f"There is no {name!r}; there are {[*found]}.")
        return found[name]

    def tables(self) -> Sequence[Table]:
        """Returns one row for each precision."""
        rows = []
        for x in self.options:
            every = sum(x.residuals_at_peak.values())
            sizes = (x.peak, x.params, x.state, x.inputs, x.grads_at_peak, x.temporary)
            cells = (amount(size, "B") for size in (*sizes, every))
            main = [
                f"{amount(size, 'B')} {dtype}"
                for dtype, size in x.residuals_at_peak.items()
                if size > 0.01 * every
            ]
            rows.append((x.name, *cells, ", ".join(main)))
        head = ["precision", "predicted peak", "parameters", "optimizer", "inputs"]
        head += ["gradients", "temporary", "residuals", "of which"]
        title = "The peak of a training step, and what exists then"
        return [Table(head, rows, title, frozenset(range(1, 8)))]


def memory(
    func: Callable[..., PyTree],
    /,
    *args: PyTree,
    optimizer: optax.GradientTransformation | None = None,
    **kwargs: PyTree,
) -> Memory:
    """Predicts the memory of a training step in each precision, before anything runs.

    The step takes the gradient of the function and updates the parameters in place. The
    prediction is a model of what XLA fuses, for the GPU that is here, or else an H200. The
    rows in f32 and under `amp` have f32 parameters, the last two bf16 ones; what was given
    comes first if it is another. For ViT-Base at three batch sizes on an H200 it is within
    10 % of what the step needs, in f32 and in bf16.

    Args:
        func: A function that returns a scalar loss first. Its parameters are the floating
            arrays of the first argument, or of the function itself if it is a module. A
            step of `mpx.optim.release` is taken for its function and its optimizer.
        *args: Its positional arguments; arrays may be given as `jax.ShapeDtypeStruct`.
        optimizer: The optimizer, `optax.adamw` by default. It is initialised with a
            dictionary of the parameters by their names. With bf16 parameters it is
            `flash_adamw`, unless it is one of `mpx.optim`.
        **kwargs: The keyword arguments of the function.

    Raises:
        TypeError: If the first result is no scalar loss.

    Examples:
        >>> import jax
        >>> def loss(params, x):
        ...     return jnp.mean(jnp.tanh(x @ params["w"]) @ params["v"])
        >>> shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
        >>> params = {"w": shape(1024, 4096), "v": shape(4096, 1024)}
        >>> found = memory(loss, params, shape(8192, 1024))
        >>> {x.name: f"{x.peak / 1e9:.1f} GB" for x in found.options[:2]}
        {'f32': '0.6 GB', 'amp bf16': '0.5 GB'}
    """
    if cuda_capability() is None:
        with assumed_gpu((9, 0)), assumed_cudnn(91000):
            return memory(func, *args, optimizer=optimizer, **kwargs)
    return Memory(tuple(_options(func, args, kwargs, optimizer)))


def _options(
    func: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    optimizer: optax.GradientTransformation | None,
) -> Iterator[Option]:
    """Yields the memory of the training step in each precision."""
    released = getattr(func, "mpx_released", None)
    if released is not None:
        func, optimizer = released
        args = tuple(x for x in args if not isinstance(x, FlashState))
    chosen = optax.adamw(1e-3) if optimizer is None else optimizer
    flash = chosen if isinstance(chosen, FlashOptimizer) else flash_adamw(1e-3)
    inner, _ = unwrapped(func)
    given = program(func, args, kwargs)
    params = {i: given.arrays[i] for i in given.params}
    in_f32 = {i: jnp.float32 for i, x in enumerate(given.arrays) if is_half(x)}
    in_bf16 = {i: jnp.bfloat16 for i in params}

    def traced(func: Callable[..., PyTree], dtypes: Mapping[int, DTypeLike]) -> Program:
        shapes = list(given.arrays)
        for i, dtype in dtypes.items():
            place = getattr(shapes[i], "sharding", None)
            shapes[i] = jax.ShapeDtypeStruct(shapes[i].shape, dtype, sharding=place)
        with jax.numpy_dtype_promotion("standard"):
            return program(func, args, kwargs, shapes)

    if inner is not func or released or any(map(is_half, params.values())):
        yield _option("as given", given, chosen, released is not None)
    yield _option("f32", traced(inner, in_f32), chosen)
    yield _option("amp bf16", traced(amp(inner, "bf16"), in_f32), chosen)
    yield _option("amp f16", traced(amp(inner, "f16"), in_f32), chosen)
    coded = amp(inner, "bf16", residuals="int8")
    yield _option("amp, int8 residuals", traced(coded, in_f32), chosen)
    try:
        small = traced(amp(inner, "bf16"), in_bf16)
    except TypeError:
        # The carry of a loop, say, cannot be both: the batch is in bf16, too.
        every = {i: jnp.bfloat16 for i, x in enumerate(given.arrays) if is_float(x)}
        small = traced(amp(inner, "bf16"), every)
    yield _option("bf16 parameters, flash", small, flash)
    yield _option("the same with release", small, flash, is_released=True)


def _option(
    name: str,
    forward: Program,
    optimizer: optax.GradientTransformation,
    is_released: bool = False,
) -> Option:
    """Returns one row; with release each parameter steps once its gradient is known."""
    full = gradient(forward)
    given = {full.names[i]: full.arrays[i] for i in full.params}
    params = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in given.items()}
    state = jax.tree.leaves(jax.eval_shape(optimizer.init, params))
    sizes = (sum(map(nbytes, x)) for x in (full.arrays, params.values(), state))
    all_inputs, held, stored = sizes
    grads = range(1, len(full.jaxpr.out_avals))
    needed = peak(full.jaxpr, grads if is_released else ())
    workspace = _WORKSPACE if holds(full.jaxpr, MATMULS) else 0
    at_peak = [x for x in needed.live if x.is_saved and not x.is_result]
    made = sum(x.bytes for x in needed.live if x.is_result)
    kept = sum(x.bytes for x in at_peak)
    return Option(
        name=name,
        params=held,
        grads=sum(nbytes(full.jaxpr.out_avals[i]) for i in grads),
        state=stored,
        inputs=all_inputs - held,
        residuals=by_dtype(needed.saved),
        peak=all_inputs + stored + needed.bytes + workspace,
        grads_at_peak=made,
        residuals_at_peak=by_dtype(at_peak),
        temporary=needed.bytes - made - kept + workspace,
    )
