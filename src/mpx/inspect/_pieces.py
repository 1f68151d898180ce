"""Programs compiled in pieces: equal pieces once, and several at a time.

A program that runs a few times costs less to run than to compile. It is cut after each matmul
and each loop. The layers of a model then have the same pieces, however many there are, and
the time to compile does not grow with their number.
"""

import concurrent.futures
import functools
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from mpx._jax._compat import (
    Literal,
    as_function,
    eval_equation,
    is_jaxpr,
    open_jaxpr,
)
from mpx._jax._progress import Tell, silent
from mpx._program._queries import CALLS, MATMULS, Equation, called, holds

P = ParamSpec("P")
T = TypeVar("T")
Atom = Any
"""The number of a value of a program, or a literal."""
_APART = "mpx_apart_"


def apart(func: Callable[P, T]) -> Callable[P, T]:
    """Returns a function, jitted, whose calls are pieces of their own.

    Calls with the same shapes are compiled once. The function must depend on its arguments
    only.
    """

    @functools.wraps(func)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return func(*args, **kwargs)

    call.__name__ = f"{_APART}{func.__name__}"
    return jax.jit(call)


def _is_apart(eqn: Equation) -> bool:
    return str(eqn.params.get("name", "")).startswith(_APART)


# --- Which equations are equal --------------------------------------------------------


def _key(value: object) -> Hashable:
    """Returns something that is equal only for parameters that mean the same."""
    if is_jaxpr(value):
        return _jaxpr_key(value)
    if isinstance(value, tuple | list):
        return (type(value), *map(_key, value))
    if isinstance(value, float):
        return float, value.hex()
    try:
        hash(value)
    except TypeError:
        return "id", id(value)  # of an equation that the program holds
    return type(value), value


def _jaxpr_key(jaxpr: object) -> Hashable:
    body, consts = open_jaxpr(jaxpr)
    numbers: dict[Any, int] = {}
    for var in (*body.constvars, *body.invars):
        numbers[var] = len(numbers)
    types = [var.aval for var in numbers]
    eqns = []
    for eqn in body.eqns:
        operands = [_atom_key(atom, numbers) for atom in eqn.invars]
        for var in eqn.outvars:
            numbers[var] = len(numbers)
        eqns.append((_equation_key(eqn), *operands))
    outs = [_atom_key(atom, numbers) for atom in body.outvars]
    return "jaxpr", *types, *map(id, consts), *eqns, *outs


def _atom_key(atom: Any, numbers: dict[Any, int]) -> Hashable:
    return _literal_key(atom) if isinstance(atom, Literal) else numbers[atom]


def _literal_key(atom: Any) -> Hashable:
    """Returns what is equal for the same number of the same type, bit for bit."""
    value = np.asarray(atom.val)
    return atom.aval, value.dtype, value.tobytes()


def _equation_key(eqn: Equation) -> Hashable:
    """Returns what is equal only for equations that compute the same of their operands.

    It holds the `id` of what cannot be compared: keep the equation as long as the key.
    """
    params = ((key, _key(value)) for key, value in sorted(eqn.params.items()))
    return eqn.primitive, _key(getattr(eqn, "ctx", None)), *params


# --- Cutting --------------------------------------------------------------------------


class _Step(NamedTuple):
    """An equation; its operands and results are numbers of values, or literals."""

    eqn: Equation
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]


class _Flat:
    """A jaxpr as steps, with the calls that hold matmuls opened.

    Values are numbers: `types` has the type of each, and `consts` those that are known.
    """

    def __init__(self) -> None:
        self.types: list[Any] = []
        self.consts: dict[int, Any] = {}
        self.steps: list[_Step] = []
        self._seen: dict[Hashable, tuple[int, ...]] = {}

    def new(self, aval: Any) -> int:
        self.types.append(aval)
        return len(self.types) - 1

    def _constant(self, aval: Any, value: Any) -> int:
        number = self.new(aval)
        self.consts[number] = value
        return number

    def add(self, jaxpr: object, args: Sequence[Atom]) -> list[Atom]:
        """Adds the steps of a jaxpr; returns the numbers of its results, or literals."""
        body, consts = open_jaxpr(jaxpr)
        env: dict[Any, Atom] = dict(zip(body.invars, args, strict=True))
        for var, const in zip(body.constvars, consts, strict=True):
            env[var] = self._constant(var.aval, const)

        def read(atom: Any) -> Atom:
            return atom if isinstance(atom, Literal) else env[atom]

        for eqn in body.eqns:
            inputs = tuple(map(read, eqn.invars))
            inner = called(eqn) if eqn.primitive.name in CALLS else None
            if eqn.primitive.name == "stop_gradient":
                outs = inputs  # differentiation is over
            elif _is_apart(eqn):
                outs = self._apart(eqn, inputs)
            elif inner is not None and holds(eqn, MATMULS):
                outs = self.add(inner, inputs)
            else:
                outs = self._step(eqn, inputs)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in body.outvars]

    def _step(self, eqn: Equation, inputs: tuple[Atom, ...]) -> tuple[int, ...]:
        outputs = tuple(self.new(var.aval) for var in eqn.outvars)
        self.steps.append(_Step(eqn, inputs, outputs))
        return outputs

    def _apart(self, eqn: Equation, inputs: tuple[Atom, ...]) -> tuple[int, ...]:
        """Adds a step whose literals are operands, so that calls with others are equal."""
        known = tuple(
            self._constant(x.aval, np.asarray(x.val, x.aval.dtype))
            if isinstance(x, Literal)
            else x
            for x in inputs
        )
        key = (_equation_key(eqn), *known)
        if key not in self._seen:
            self._seen[key] = self._step(eqn, known)
        return self._seen[key]


def _numbers(atoms: Iterable[Atom]) -> list[int]:
    """Returns the atoms that are no literals."""
    return [x for x in atoms if isinstance(x, int)]


def _alive(steps: Sequence[_Step], outs: Iterable[Atom]) -> list[_Step]:
    """Returns the steps that the results need."""
    wanted, found = {*_numbers(outs)}, list[_Step]()
    for step in reversed(steps):
        if step.eqn.effects or not wanted.isdisjoint(step.outputs):
            wanted.update(_numbers(step.inputs))
            found.append(step)
    return found[::-1]


def _cut(steps: Sequence[_Step]) -> list[list[_Step]]:
    """Returns the steps in pieces. Steps apart come after the piece that they depend on."""
    pieces, current, waiting = list[list[_Step]](), list[_Step](), list[_Step]()

    def close() -> None:
        nonlocal current, waiting
        pieces.extend([current] if current else [])
        pieces.extend([step] for step in waiting)
        current, waiting = [], []

    for step in steps:
        held = {x for other in waiting for x in other.outputs}
        if not held.isdisjoint(_numbers(step.inputs)):
            close()
        if _is_apart(step.eqn):
            waiting.append(step)
            continue
        current.append(step)
        if step.eqn.primitive.name in MATMULS or holds(step.eqn, MATMULS):
            close()
    close()
    return pieces


class _Piece(NamedTuple):
    """Some steps: what they need, what others need of them, and what they are equal by."""

    steps: list[_Step]
    inputs: list[int]
    outputs: list[int]
    key: Hashable

    def __call__(self, *args: Any) -> list[Any]:
        env = dict(zip(self.inputs, args, strict=True))
        for eqn, inputs, outputs in self.steps:
            values = [env[x] if isinstance(x, int) else x.val for x in inputs]
            if _is_apart(eqn):  # its literals are operands
                outs = as_function(called(eqn))(*values)
            else:
                outs = eval_equation(eqn, values)
            env.update(zip(outputs, outs, strict=True))
        return [env[x] for x in self.outputs]


def _pieces(
    steps: Sequence[_Step], outs: Iterable[Atom], types: Sequence[Any]
) -> list[_Piece]:
    needed, found = {*_numbers(outs)}, list[_Piece]()
    for part in reversed(_cut(steps)):
        made = dict.fromkeys(x for step in part for x in step.outputs)
        inputs = dict.fromkeys(x for step in part for x in _numbers(step.inputs))
        inputs = [x for x in inputs if x not in made]
        outputs = [x for x in made if x in needed]
        numbers = {x: i for i, x in enumerate((*inputs, *made))}
        rows = [
            (_equation_key(eqn), *(_atom_key(x, numbers) for x in atoms))
            for eqn, atoms, _ in part
        ]
        ends = [numbers[x] for x in outputs]
        key = (tuple(types[x] for x in inputs), tuple(rows), tuple(ends))
        found.append(_Piece(part, inputs, outputs, key))
        needed |= {*inputs}
    return found[::-1]


# --- Running --------------------------------------------------------------------------


def _options() -> dict[str, Any] | None:
    """Returns options of the compiler for pieces, which run a few times.

    For a ViT of two blocks on a CPU, a pass takes 17 times the CPU time of a gradient. At
    level 0 it compiles in half the time, but takes 20 to 30 times; with the fusion
    emitters it compiles in twice the time.
    """
    backend = jax.default_backend()
    found: dict[str, Any] = {"xla_gpu_autotune_level": 0}
    if backend == "cpu":
        found = {
            "xla_backend_optimization_level": 1,
            "xla_cpu_use_fusion_emitters": False,
        }
    return {k: v for k, v in found.items() if _is_known(backend, k, v)} or None


def cheap_options() -> dict[str, Any] | None:
    """Returns options with which a program is compiled in less time, into the same kernels.

    There are some for CPUs only. The code of the kernels is slower.
    """
    if jax.default_backend() != "cpu":
        return None
    name, level = "xla_backend_optimization_level", 0
    return {name: level} if _is_known("cpu", name, level) else None


@functools.cache
def _is_known(backend: str, name: str, value: Any) -> bool:
    del backend
    try:
        jax.jit(lambda: jnp.zeros(())).lower().compile(compiler_options={name: value})
    except Exception:  # XLA has no type for it
        return False
    return True


class Pieces:
    """A function that is compiled in pieces when it is first called.

    Attributes:
        count: How many pieces it has.
        distinct: How many of them differ.
    """

    def __init__(self, func: Callable[..., Any], *examples: Any) -> None:
        """Traces a function, given its arguments or others of the same types."""
        jaxpr, shapes = jax.make_jaxpr(func, return_shape=True)(*examples)
        self._structure = jax.tree.structure(shapes)
        flat = _Flat()
        self._inputs = [flat.new(aval) for aval in jaxpr.in_avals]
        self._outs = flat.add(jaxpr, self._inputs)
        steps = _alive(flat.steps, self._outs)
        self._types, self._consts = flat.types, flat.consts
        self._pieces = _pieces(steps, self._outs, flat.types)
        self._calls: dict[Hashable, Callable[..., Any]] = {}
        self._dying = self._last_uses()
        self.count = len(self._pieces)
        self.distinct = len({piece.key for piece in self._pieces})

    def _last_uses(self) -> list[list[int]]:
        """Returns, for each piece, the values that nothing needs after it."""
        kept = {*_numbers(self._outs)}
        found: list[list[int]] = []
        for piece in reversed(self._pieces):
            used = {*piece.inputs, *piece.outputs} - kept
            kept |= used
            found.append(sorted(used))
        return found[::-1]

    def compile(self, tell: Tell = silent) -> None:
        """Compiles the pieces for the default device, several at a time."""
        todo = {piece.key: piece for piece in self._pieces}
        todo = {key: x for key, x in todo.items() if key not in self._calls}
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = {}
            for key, piece in todo.items():
                structs = [_struct(self._types[x]) for x in piece.inputs]
                # Settings of JAX hold for a thread: only XLA runs in another one.
                lowered = jax.jit(piece.__call__).lower(*structs)
                job = pool.submit(lowered.compile, compiler_options=_options())
                jobs[job] = key
            for i, job in enumerate(concurrent.futures.as_completed(jobs)):
                tell(f"compiled {i + 1} of {len(jobs)} pieces", part=True)
                self._calls[jobs[job]] = job.result()

    def prepare(self, *args: Any, tell: Tell = silent) -> None:
        """Compiles the pieces, unless the arguments are on other devices.

        For those they are compiled one by one when they run, and get the shardings of the
        values that arrive.
        """
        if not self._calls and _is_here(jax.tree.leaves(args)):
            self.compile(tell)

    def __call__(self, *args: Any) -> Any:
        """Runs the function."""
        self.prepare(*args)
        arrays = jax.tree.leaves(args)
        # Devices of a CPU are threads: with many programs in flight that wait for each
        # other they starve, and XLA ends the process.
        waits = jax.default_backend() == "cpu" and not _is_here(arrays)
        env: dict[int, Any] = {**self._consts}
        env.update(zip(self._inputs, arrays, strict=True))
        for piece, dying in zip(self._pieces, self._dying, strict=True):
            call = self._calls.get(piece.key)
            if call is None:
                call = jax.jit(piece.__call__, compiler_options=_options())
                self._calls[piece.key] = call
            outs = call(*(env[x] for x in piece.inputs))
            if waits:
                jax.block_until_ready(outs)
            env.update(zip(piece.outputs, outs, strict=True))
            for x in dying:
                env.pop(x, None)
        outs = [
            env[x] if isinstance(x, int) else jnp.asarray(x.val, x.aval.dtype)
            for x in self._outs
        ]
        return jax.tree.unflatten(self._structure, outs)


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _is_here(arrays: Sequence[Any]) -> bool:
    """Returns whether all arrays are on the one device where new ones are made."""
    here = jnp.zeros(()).devices()
    held = [x.devices() for x in arrays if isinstance(x, jax.Array)]
    return len(here) == 1 and all(devices == here for devices in held)
