"""Rounding sensitivities: what each group would do to the gradient, from two passes.

The program is `value_and_grad` of the function as `amp` runs it, in f32. A site holds an
identity whose derivative returns statistics (see `_rounding`). With random signs v as the
cotangent of the gradients, the derivative at a site is h = d(v · grads)/dx, and

    E_v Σ (h e)² = |d grads|²      for the rounding errors e of that site,

for all groups and formats at once.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpx._jax._compat import Literal, open_jaxpr, primitive_name
from mpx._jax._progress import Tell, silent
from mpx._jax._sharding import sharded_as
from mpx._program._queries import MOVES, equations, names, walk
from mpx.inspect._groups import Group, labelled
from mpx.inspect._keys import Known, Site
from mpx.inspect._pieces import Pieces, apart
from mpx.inspect._program import Program, gradient
from mpx.inspect._rounding import Samples, nothing_seen, rounded, tap
from mpx.inspect._sites import Rule, Sites

_COMPARISONS = ("gt", "ge", "lt", "le")
_POSITIVE = MOVES.union(names("reduce_sum reduce_max convert_element_type"))
_FLOATS = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, eq=False)
class Study:
    """A gradient program and its sites.

    Attributes:
        groups: The groups of operations.
        program: The gradient of the function under `amp`, with labels.
        found: The visitor that collected the sites.
    """

    groups: list[Group]
    program: Program
    found: Sites
    _emulators: dict[str, Pieces] = dataclasses.field(default_factory=dict, init=False)

    @functools.cached_property
    def sites(self) -> list[Site]:
        """The sites, by number."""
        return sorted(self.found.sites.values(), key=lambda site: site.number)

    @functools.cached_property
    def steps(self) -> int:
        """The number of choices by a comparison in the backward pass, such as relu's."""
        return count_steps(self.program.jaxpr)

    def evaluate(
        self, arrays: Sequence[Any], given: dict[int, Any], rule: Rule
    ) -> list[Any]:
        """Returns loss and gradients, with a rule applied at each site."""
        visitor = dataclasses.replace(
            self.found, rule=rule, arrays=given, carried=dict(self.found.carried)
        )
        return _run(self.program, visitor, arrays)

    @functools.cached_property
    def _samples(self) -> Pieces:
        def rule(site: Site, x: Any, z: Any, operands: tuple[Any, ...]) -> Any:
            return tap(x, z, operands)

        def run(arrays: Sequence[Any], seed: Any) -> tuple[dict[int, Any], list[Any]]:
            given = {i: nothing_seen(site) for i, site in enumerate(self.sites)}
            outs, vjp = jax.vjp(lambda z: self.evaluate(arrays, z, rule), given)
            scale = 1 / jnp.maximum(norm(outs[1:]), np.float32(1e-30))
            signs = [
                _signs(seed, np.int32(i), scale, x) for i, x in enumerate(outs[1:])
            ]
            (found,) = vjp([jnp.zeros_like(outs[0]), *signs])
            return found, outs

        return Pieces(run, self.program.arrays, np.int32(0))

    def prepare(self, arrays: Sequence[Any], tell: Tell = silent) -> None:
        """Traces and compiles the passes."""
        tell("tracing the passes")
        pieces = self._samples
        tell(f"compiling {pieces.distinct} pieces")
        pieces.prepare(arrays, np.int32(0), tell=tell)

    def samples(self, arrays: Sequence[Any], seed: int) -> list[Samples]:
        """Returns what each site sees, with random signs as cotangent of the gradients."""
        found, _ = self._samples(arrays, np.int32(seed))
        read = jax.device_get(found)
        return [Samples.read(read[i], site.size) for i, site in enumerate(self.sites)]

    def _emulated(self, half: str, given: dict[int, Any]) -> Pieces:
        def rule(site: Site, x: Any, z: Any, operands: tuple[Any, ...]) -> Any:
            if site.key.kind in ("out", "entry"):
                x = jnp.where(z % 2 == 1, rounded(x, half), x)
            if site.number in self.found.quantised:
                eight = "e5m2" if site.key.is_cotangent else "e4m3"
                x = jnp.where(z >= 2, rounded(x, eight), x)
            return x

        def run(arrays: Sequence[Any], given: dict[int, Any]) -> list[Any]:
            return self.evaluate(arrays, given, rule)

        return Pieces(run, self.program.arrays, given)

    def emulate(
        self,
        arrays: Sequence[Any],
        half: str,
        low: Sequence[int],
        fp8: Sequence[int] = (),
        *,
        alone: bool = False,
    ) -> list[Any]:
        """Returns loss and gradients with some groups rounded, by emulation.

        Args:
            arrays: The arguments.
            half: The 16-bit format.
            low: The groups that are rounded to it.
            fp8: Those whose matmuls also quantise: values to e4m3, gradients to e5m2.
            alone: See `Key.rounds`.
        """
        given = {
            i: np.full(
                site.lengths,
                2 * (site.key.group in fp8) + site.key.rounds(low, alone=alone),
                np.int32,
            )
            for i, site in enumerate(self.sites)
        }
        if half not in self._emulators:
            self._emulators[half] = self._emulated(half, given)
        return self._emulators[half](arrays, given)


def count_steps(jaxpr: Any) -> int:
    """Returns how many choices of a backward pass depend on a comparison of floats.

    In the body of a loop the comparison may be outside: there it is enough that there is one.
    """
    made = {var: eqn for eqn in equations(jaxpr) for var in eqn.outvars}
    compared = {
        eqn.outvars[0]
        for eqn in equations(jaxpr)
        if primitive_name(eqn) in _COMPARISONS
        and eqn.outvars[0].aval.ndim > 0  # one choice for a whole array is no step
        and any(str(x.aval.dtype) in _FLOATS for x in eqn.invars)
        and not _is_always_positive(eqn, made)
    }
    if not compared:
        return 0
    return sum(
        primitive_name(eqn) == "select_n"
        and eqn.invars[0].aval.ndim > 0
        and (eqn.invars[0] in compared or eqn.invars[0] not in made)
        for eqn in (here.eqn for here in walk(jaxpr) if here.backward)
    )


def _is_always_positive(eqn: Any, made: Mapping[Any, Any]) -> bool:
    """Returns whether a comparison is one of exponentials with zero: logsumexp has it."""
    x, limit = eqn.invars
    if not isinstance(limit, Literal) or np.any(limit.val):
        return False
    while x in made:
        x, name = made[x].invars[0], primitive_name(made[x])
        if name == "exp":
            return True
        if name not in _POSITIVE or isinstance(x, Literal):
            return False
    return False


@apart
def _square(x: Any) -> Any:
    return jnp.sum(jnp.square(x.astype(np.float32)))


def norm(arrays: Sequence[Any]) -> Any:
    """Returns the norm of all numbers of some arrays."""
    return jnp.sqrt(sum(map(_square, arrays)))


@apart
def _signs(seed: Any, i: Any, scale: Any, x: Any) -> Any:
    """Returns an array like `x` of random signs times a scale.

    The signs are a hash of the position. They are the same however `x` is sharded, and
    compile in less time than those of `jax.random`.
    """
    strides = np.cumprod([1, *x.shape[:0:-1]], dtype=np.int64)[::-1] % 2**32
    place = sum(
        lax.broadcasted_iota(np.uint32, x.shape, axis) * np.uint32(stride)
        for axis, stride in enumerate(strides[: x.ndim])
    )
    start = _mixed(seed.astype(np.uint32) * np.uint32(0x9E3779B9) + _mixed(i + 1))
    odd = _mixed(_mixed(place + start) ^ start) >> np.uint32(31)
    signs = 1 - 2 * odd.astype(np.float32)
    return sharded_as((signs * scale).astype(x.dtype).reshape(x.shape), x)


def _mixed(x: Any) -> Any:
    """Returns a hash of numbers: the last step of MurmurHash3."""
    x = jnp.asarray(x, np.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x


def _run(grad: Program, visitor: Sites, arrays: Sequence[Any]) -> list[Any]:
    body, consts = open_jaxpr(grad.jaxpr)
    outs, _ = visitor.run(body, consts, arrays, [Known()] * len(arrays), ())
    return [jnp.asarray(x, np.float32) for x in outs]


def study(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Study:
    """Traces a function and finds its sites."""
    forward, groups = labelled(func, args, kwargs)
    grad = gradient(forward)
    visitor, carried = Sites(groups=groups), None
    while visitor.carried != carried:
        # What is known of a loop's carry settles in one or two rounds.
        carried = dict(visitor.carried)
        visitor = Sites(groups=groups, carried=carried.copy())
        jax.make_jaxpr(functools.partial(_run, grad, visitor))(grad.arrays)
    return Study(groups, grad, visitor)
