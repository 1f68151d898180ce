"""How far do compressed weights end from those of f32? Small steps, decay, odd gradients.

    python benchmarks/drift.py             # some minutes on a CPU
    python benchmarks/drift.py --only lion
    python benchmarks/drift.py --only start # how soon bf16 weights move, by how they start
    python benchmarks/drift.py --write     # puts the tables, or these lines, into the guide

Every line runs optax in f32 and the compressed optimizer of the same name with the same
gradients, which do not depend on the weights. A number is the distance between the two in
the end, as a share of the distance that f32 has moved: 0 is f32, 1 is a weight that stood
still. The second table has the mean of the bf16 parameters themselves, as a share of the
way that f32 has moved: 1 is f32, 0 a mean that stood still. Plain JAX; a kernel differs by
roundings, see kernel_check.py.
"""

import functools
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

import mpx
from _measure import read_options

GUIDE = pathlib.Path(__file__).parents[1] / "docs/guide/compressed-optimizers.md"
START, END = "<!-- drift: made by benchmarks/drift.py -->", "<!-- end of drift -->"
SHAPE = (16, 64)
OUTLIER = (0, 5)
DECAY, MOMENTUM = {"weight_decay": 1e-2}, {"momentum": 0.9}
COLUMNS: dict[str, dict[str, Any]] = {
    "dithered": {},
    "nearest": {"rounding": "nearest"},
    "32 bits": {"master_bits": 32},
    "bf16 alone": {"master_bits": None},
}
RULES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "AdamW": (mpx.optim.flash_adamw, optax.adamw),
    "Adam": (mpx.optim.flash_adam, optax.adam),
    "Lion": (mpx.optim.flash_lion, optax.lion),
    "SGD": (mpx.optim.flash_sgd, optax.sgd),
}


# --- gradients, by the number of the step --------------------------------------------


def _normal(step):
    return jax.random.normal(jax.random.key(step), SHAPE)


@functools.cache
def _fixed(seed):
    return np.random.default_rng(seed).normal(size=SHAPE).astype(np.float32)


def constant(step):
    return jnp.ones(SHAPE)


def noisy(step):
    """A mean of its own for each element, in noise that is three times as large."""
    return jnp.asarray(_fixed(0) / 3) + _normal(step)


def absent(step):
    return jnp.zeros(SHAPE)


def sparse(step):
    """Each row has a gradient in one of 97 steps, as those of an embedding."""
    here = (step + jnp.arange(SHAPE[0])) % 97 == 0
    return jnp.where(here[:, None], 1 + noisy(step) / 10, 0.0)


def outlier(step):
    """Ones, but for one gradient of 1e5 in the tenth step."""
    return constant(step).at[OUTLIER].set(jnp.where(step == 10, 1e5, 1.0))


def clipped(step):
    """The same, clipped to the norm of the ones."""
    grads = outlier(step)
    return grads * jnp.minimum(1.0, jnp.sqrt(grads.size) / jnp.linalg.norm(grads))


def uneven(step):
    """Magnitudes within a group that are far apart: e⁸, two deviations up and down."""
    return jnp.asarray(np.exp(2 * _fixed(1))) * noisy(step)


# --- the lines ------------------------------------------------------------------------


class Line(NamedTuple):
    """A run: optimizer, start, gradients, steps."""

    name: str
    rate: float
    grad: Callable[[Any], Array]
    rule: str = "AdamW"
    start: float = 1.0  # of all weights; 0 draws them
    size: float = 1.0  # of the gradients
    steps: int = 20_000
    options: Mapping[str, float] = {"weight_decay": 0.0}

    def weights(self):
        """Returns the f32 weights before the first step."""
        drawn = jnp.asarray(_fixed(2) * 0.02)
        return jnp.full(SHAPE, self.start) if self.start else drawn

    def grads(self, step):
        return self.grad(step) * self.size


LINES = (
    *(
        Line(f"constant gradient, rate {rate:.0e}", rate, constant, steps=1000)
        for rate in (1e-3, 1e-4, 1e-5, 1e-6, 1e-7)
    ),
    *(
        Line(f"noisy gradient, rate {rate:.0e}", rate, noisy, start=0.0)
        for rate in (1e-4, 1e-5, 1e-6, 1e-7)
    ),
    Line("the same, weights of 1, rate 1e-06", 1e-6, noisy),
    Line("decay alone, rate · decay 1e-05", 1e-3, absent, options=DECAY),
    Line("decay alone, rate · decay 1e-06", 1e-4, absent, options=DECAY),
    Line("sparse rows, rate 1e-05", 1e-5, sparse, options=DECAY),
    Line("gradients of 1e12, rate 1e-05", 1e-5, noisy, start=0.0, size=1e12),
    Line("gradients of 1e-12, rate 1e-03", 1e-3, noisy, start=0.0, size=1e-12),
    Line("one gradient of 1e5 among ones, rate 1e-03", 1e-3, outlier, steps=300),
    Line("the same, clipped to the norm of the ones", 1e-3, clipped, steps=300),
    Line("magnitudes a factor of 3000 apart, rate 1e-05", 1e-5, uneven, start=0.0),
    Line("Adam, noisy gradient, rate 1e-05", 1e-5, noisy, "Adam", 0.0, options={}),
    Line("Lion, noisy gradient, rate 1e-06", 1e-6, noisy, "Lion", 0.0),
    Line("Lion, decay alone, 1e-06", 1e-4, absent, "Lion", options=DECAY),
    Line("SGD, noisy gradient, rate 1e-06", 1e-6, noisy, "SGD", 0.0, options={}),
    Line("SGD with momentum, rate 1e-07", 1e-7, noisy, "SGD", 0.0, options=MOMENTUM),
)


def run(step, steps, carry):
    return jax.jit(functools.partial(lax.fori_loop, 0, steps, step))(carry)


def in_f32(line):
    """Returns the weights after optax's steps in f32."""
    tx = RULES[line.rule][1](line.rate, **line.options)

    def step(number, carry):
        params, state = carry
        updates, state = tx.update(line.grads(number), state, params)
        return optax.apply_updates(params, updates), state

    return run(step, line.steps, (line.weights(), tx.init(line.weights())))[0]


def compressed(line, options):
    """Returns the f32 weights behind the parameters after compressed steps."""
    compression = mpx.optim.Compression(min_size=1, **options)
    make = functools.partial(RULES[line.rule][0], line.rate, **line.options)
    tx = make(compression=compression, backend="jax")
    step = lambda number, carry: tuple(tx.step(*carry, line.grads(number)))  # noqa: E731
    end = run(step, line.steps, tuple(tx.init_from(line.weights())))
    return mpx.cast_to_float32(mpx.optim.master_params(*end))


def measure(line, columns=tuple(COLUMNS)):
    """Returns how far f32 moved, and by column the distance to it as a share of that."""
    seen = np.ones(SHAPE, bool)
    if line.grad in (outlier, clipped):  # the others of its group
        seen = np.indices(SHAPE)[1] < 32
        seen[1:], seen[OUTLIER] = False, False
    of = lambda weights: np.asarray(weights, np.float64)[seen]  # noqa: E731
    start, end = of(line.weights()), of(in_f32(line))
    distance = float(np.linalg.norm(end - start))
    apart = {
        x: float(np.linalg.norm(of(compressed(line, COLUMNS[x])) - end)) / distance
        for x in columns
    }
    return distance / math.sqrt(end.size), apart


def row(line):
    """Returns a row of the table."""
    moved, apart = measure(line)
    cells = [f"{x:.3f}" if x < 0.1 else f"{x:.2f}" for x in apart.values()]
    return f"| {line.name} | {line.steps} | {moved:.1e} | {' | '.join(cells)} |"


# --- how soon bf16 weights move ---------------------------------------------------------

STARTS = ("`init_from`", "`init`", "`jitter=False`")
STEPS = (1, 10, 50, 100, 500)
START_HEADER = (
    f"| steps at a rate of 1e-06 | {' | '.join(STARTS)} |\n|---|{'---|' * len(STARTS)}"
)
START_MARKS = "<!-- starts: made by benchmarks/drift.py -->", "<!-- end of starts -->"


def start_rows():
    """Returns a row for each number of steps with a constant gradient, by its name."""
    weights = 0.05 * jax.random.normal(jax.random.key(0), (512, 512))
    low, shares = weights.astype(jnp.bfloat16), {steps: [] for steps in STEPS}
    for name in STARTS:
        compression = mpx.optim.Compression(jitter="False" not in name)
        tx: Any = mpx.optim.flash_adamw(
            1e-6, weight_decay=0.0, compression=compression, backend="jax"
        )
        carry = tx.init_from(weights) if "from" in name else (low, tx.init(low))
        before = np.mean(np.asarray(carry[0], np.float64))

        def step(_, carry, tx=tx):
            return tuple(tx.step(*carry, jnp.ones(weights.shape)))

        for steps in STEPS:
            end = run(step, steps, tuple(carry))[0]
            moved = before - np.mean(np.asarray(end, np.float64))
            # Adam moves by its rate.
            shares[steps].append(f"{float(moved) / (1e-6 * steps):.2f}")
    return {str(n): f"| {n} | {' | '.join(row)} |" for n, row in shares.items()}


HEADER = (
    f"| | steps | f32 moved | {' | '.join(COLUMNS)} |\n"
    f"|---|---|---|{'---|' * len(COLUMNS)}"
)


def write(rows, header, marks, order):
    """Puts rows into a table of the guide, between its marks; others stay."""
    page = GUIDE.read_text(encoding="utf-8")
    before, rest = page.split(marks[0])
    old, after = rest.split(marks[1])
    known = {row.split("|")[1].strip(): row for row in old.strip().splitlines()[2:]}
    known |= rows
    table = [header, *(known[name] for name in order if name in known)]
    text = "\n".join([marks[0], *table, marks[1]])
    GUIDE.write_text(f"{before}{text}{after}", encoding="utf-8")


def main():
    args = read_options(__doc__, "only= write")
    print(HEADER, flush=True)
    rows = {}
    for line in LINES:
        if args.only.lower() in line.name.lower():
            rows[line.name] = row(line)
            print(rows[line.name], flush=True)
    starts = start_rows() if args.only in "start" else {}
    if starts:
        print("\n".join(["", START_HEADER, *starts.values()]))
    if args.write:
        write(rows, HEADER, (START, END), [line.name for line in LINES])
        write(starts, START_HEADER, START_MARKS, map(str, STEPS))


if __name__ == "__main__":
    main()
