"""What the zoo prints, and the page of the documentation that it writes."""

import importlib.metadata
import itertools
import platform
import statistics
from typing import Any, NamedTuple

from _zoo import REGISTRY, seeds
from _zoo.routes import ROUTES, STEPS

COMMAND = 'make zoo ARGS="--write"'
SEEDS_COMMAND = 'make zoo ARGS="--seeds 3 --write"'
# As for the curves of `step.py`: 2 % of what the loss falls by.
TOLERANCE = 0.02
# A number in e4m3 has 16 times the rounding error of one in bf16, but the matmuls alone
# have it, and their sums average over it.
FP8_TOLERANCE = 0.05
NOISE = 3
FAILED = "✗"

ERRORS = ("policy bf16", "amp bf16", "amp f16", "fp8")
GRADIENTS = (
    *("model", "package", "parameters", "low: policy", "low: amp", "low: fp8"),
    *("error: f32", "error: bf16 without mpx", *(f"error: {x}" for x in ERRORS)),
)
TRAINING = (
    "model", "f32 loss", "rounded once", "bf16 without mpx", *ROUTES[2:], "note"
)  # fmt: skip
BASED = ((name,) if base else (name, "spread") for name, base in seeds.ROUTES.items())
SEEDS = ("model", "before", *itertools.chain(*BASED))

HEAD = f"""\
# Models that were tried

Small models of other packages, with random weights, trained for {STEPS} steps with AdamW on
one random batch, through every route of mpx; [the last part](#seeds) trains some of them for
longer, over several seeds. No model was changed. This page is written by

```bash
{COMMAND}
```

which installs the packages into an environment of its own; `make zoo ARGS="--only GPT-2"`
runs one model.

"""
GRADIENT_TEXT = """\
## Gradients

*Low* is the share of the matmul operations of the forward pass that run in 16 bits, or in
fp8. An error is the norm of the difference to the f32 gradient at the start, divided by
the norm of that gradient. The error of f32 is relative to f64, where the package can
compute in f64. *bf16 without mpx* is the package's own option for mixed precision (own),
or parameters and batch cast by hand (cast), with its own share of 16 bits.

A low share on the policy route comes from the model: it casts to f32 itself, or holds f32
constants that promote what they meet. A cast by hand has the same problem, and a small
error where little is rounded. `amp` does not depend on that. On a CPU fp8 is emulated;
here it takes all sizes (`min_gain=0`) and leaves embeddings, heads and products of
activations alone.

"""
TRAINING_TEXT = f"""\
## Training

The table has the loss of f32 before the first and the last step, and the distance of
other curves from its curve: the mean over all steps, as a share of the decrease. *Rounded
once* is f32 from parameters that were rounded to bf16 before the first step: the effect
of such a small difference alone. A route trains as f32 if its distance is at most
{100 * TOLERANCE:.0f} % ({100 * FP8_TOLERANCE:.0f} % for fp8), or {NOISE} times that
of *rounded once*; larger ones are **bold**. {FAILED} did not run or did not train; – means
that there is nothing to run. f16
has a dynamic loss scale. *flash* is `mpx.optim.flash_adamw`, with f32 parameters, and with bf16
ones under `amp`; *release* is the latter with `mpx.optim.release`.

"""


SEEDS_HEADING = "## Seeds\n"
SEEDS_TEXT = f"""\
{SEEDS_HEADING}
Some of the models, trained for 200 steps (the U-Net for 60), each on a new batch of data
that can be learnt: text of Python's documentation, images with a pattern for each class and
noise, mixtures of tokens. Every seed has batches of its own, and other initial parameters:
those of the package, permuted within each array. This part of the page is written by

```bash
{SEEDS_COMMAND}
```

The table has the mean over seeds of the loss of {seeds.TESTS} unseen batches, in f32, before
and after training. In parentheses is the mean difference to the same seeds of *amp bf16*, and
of *flash muon* to those of *muon f32*. A route is within the spread if that is at most the
*spread*: the largest minus the smallest loss of these seeds. Larger differences are **bold**.

*fp8*, *int8* and *nvfp4* are the recipes `CurrentScaling`, `Int8` and `NVFP4(emulate=True)` of
`mpx.fp8`, for all sizes; *residuals* is the option of `amp`. These train with AdamW. *muon
f32* is `optax.contrib.muon`, and *flash muon* is `mpx.optim.flash_muon` with bf16 parameters
under `amp`. Both step the kernels of layers that have two axes; AdamW steps the others. –
means that there are none, or that they have no names.

NVFP4 has one scale per 16 × 16 numbers of a weight, which is much for weights of 64 × 64: with
`weight_blocks="1d"` GPT-2 ended within the spread.

"""


class Row(NamedTuple):
    """The results of a model."""

    name: str  # in the registry
    cells: dict[str, dict[str, Any]]  # by route; `error` if that failed
    seconds: float

    def losses(self, route):
        """Returns the losses of a route that took all of its steps."""
        losses = self.cells.get(route, {}).get("losses")
        return losses if losses and len(losses) == STEPS else None

    def distance(self, route):
        """Returns how far a curve is from that of f32, `None` without a curve."""
        return self.apart(self.losses(route))

    def noise(self):
        """Returns the distance that rounding the parameters once makes."""
        return self.apart(self.cells["f32"].get("rounded"))

    def apart(self, curve):
        """Returns the mean distance from the curve of f32, as a share of its decrease."""
        f32 = self.losses("f32")
        if not curve or not f32:
            return None
        apart = sum(abs(a - b) for a, b in zip(curve, f32, strict=True))
        return apart / len(curve) / (f32[0] - min(f32))

    def fails(self, route):
        """Returns why a route failed or does not train as f32, "" if it does."""
        cell = self.cells.get(route, {})
        if "error" in cell or not cell or (route == "fp8" and not cell.get("share")):
            return cell.get("error", "")
        losses = self.losses(route)
        if losses is None:
            return f"{cell['skipped']} steps were skipped"
        if route == "f32":
            falls = losses[0] - min(losses) > 0.01 * abs(losses[0])
            return "" if falls else "the loss does not fall"
        distance, noise = self.distance(route), self.noise() or 0.0
        limit = max(FP8_TOLERANCE if route == "fp8" else TOLERANCE, NOISE * noise)
        fine = distance is not None and distance <= limit
        return "" if fine else "trains differently from f32"

    def progress(self):
        """Returns one line."""
        failed = [route for route in ROUTES if self.fails(route)]
        return f"{self.name}: {self.seconds:.0f} s, {', '.join(failed) or 'all as f32'}"

    def notes(self):
        """Returns route, reason and whether the registry gives it, for each failure."""
        known = REGISTRY[self.name].notes
        found = []
        for route in ROUTES:
            if reason := self.fails(route):
                own = known.get(route) or known.get(route.split()[0])
                found.append((route, own or reason, own is not None))
        return found


class SeedsRow(Row):
    """The results of a model over seeds: `losses` are those at the end, by seed."""

    def losses(self, route):
        """Returns the last loss of each seed, none if the route did not run."""
        return self.cells.get(route, {}).get("losses", [])

    def spread(self, route):
        """Returns the largest minus the smallest loss of the seeds."""
        return max(self.losses(route)) - min(self.losses(route))

    def difference(self, route):
        """Returns the mean difference to the same seeds of the route's base."""
        both = self.losses(route), self.losses(seeds.ROUTES[route])
        return statistics.mean(x - y for x, y in zip(*both, strict=True))

    def fails(self, route):
        """Returns why a route failed, or ends above its base by more than the spread."""
        base = seeds.ROUTES[route]
        if not base or not self.losses(route) or not self.losses(base):
            return self.cells.get(route, {}).get("error", "")
        difference, spread = self.difference(route), self.spread(base)
        fine = difference <= spread  # not if it is nan
        return "" if fine else f"{difference:+.4f}, with a spread of {spread:.4f}"

    def progress(self):
        """Returns one line."""
        failed = [f"{x}: {why}" for x in seeds.ROUTES if (why := self.fails(x))]
        return f"{self.name}: {self.seconds:.0f} s, {failed or 'within the spread'}"


def percent(x):
    """Writes a share with two digits: `1.2 %`, `100 %`, `2e-05 %`."""
    if x is None:
        return "–"
    return f"{100 * x:.2g} %" if abs(x) < 0.995 else f"{100 * x:.0f} %"


def gradient_cells(row):
    """Yields the cells of the first table."""
    cells = {route: row.cells.get(route, {}) for route in ("make", "f64", *ROUTES)}

    def share(route, name):
        return FAILED if "error" in cells[route] else percent(cells[route].get(name))

    yield from (row.name, REGISTRY[row.name].package)
    yield f"{cells['make'].get('params', 0):,}"
    yield from (share(x, "share") for x in ("policy bf16", "amp bf16", "fp8"))
    yield percent(cells["f64"].get("of_f32"))
    own, low = share("own bf16", "grad_error"), cells["own bf16"].get("share")
    how = "own" if cells["make"].get("own") else "cast"
    how = how if low is None else f"{how}, {percent(low)} low"
    yield own if own in (FAILED, "–") else f"{own} ({how})"
    yield from (share(route, "grad_error") for route in ERRORS)


def training_cells(row):
    """Yields the cells of the second table."""
    f32 = row.losses("f32")
    yield row.name
    yield f"{f32[0]:.4g} → {f32[-1]:.4g}" if f32 else FAILED
    yield percent(row.noise())
    for route in ROUTES[1:]:
        distance = row.distance(route)
        if not row.fails(route):  # or not among those that were asked for
            yield percent(distance)
        else:
            yield FAILED if distance is None else f"**{percent(distance)}**"
    routes = {}  # by reason
    for route, reason, _ in row.notes():
        routes.setdefault(reason.replace("|", "\\|"), []).append(route)
    yield "; ".join(f"{', '.join(names)}: {reason}" for reason, names in routes.items())


def tables(rows):
    """Returns the tables of gradients and of training curves, in Markdown."""
    yield markdown(GRADIENTS, map(gradient_cells, rows))
    yield markdown(TRAINING, map(training_cells, rows))


def markdown(columns, rows):
    """Returns a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(x.strip() for x in line)} |\n" for line in lines)


def count(rows):
    """Says how many models train as f32 on each route."""
    parts = []
    for route in ROUTES[1:]:
        fails = [row.fails(route) for row in rows]
        ran = [x for row, x in zip(rows, fails, strict=True) if x or row.losses(route)]
        name = "bf16 without mpx" if route == "own bf16" else route
        parts.append(f"{name} {ran.count('')} of {len(ran)}")
    return f"Trained as f32: {', '.join(parts)}."


def unexplained(rows):
    """Lists failures that no note of the registry explains."""
    return [
        f"{row.name}, {route}: {reason}"
        for row in rows
        for route, reason, known in row.notes()
        if not known and route != "own bf16"  # not ours
    ]


def seeds_cells(row):
    """Yields the cells of the table over seeds."""
    yield row.name
    yield f"{row.losses('before')[0]:.4f}" if row.losses("before") else FAILED
    for route, base in seeds.ROUTES.items():
        losses, failed = row.losses(route), row.fails(route)
        mean = f"{statistics.mean(losses):.4f}" if losses else FAILED if failed else "–"
        if base is None:
            yield from (mean, f"{row.spread(route):.4f}" if losses else "–")
        elif losses and row.losses(base):
            mark = "**" if failed else ""
            yield f"{mark}{mean} ({row.difference(route):+.4f}){mark}"
        else:
            yield mean


def seeds_table(rows):
    """Returns the table over seeds, in Markdown, and how many are within the spread."""
    within = []
    for route in filter(seeds.ROUTES.get, seeds.ROUTES):
        ran = [row.fails(route) for row in rows if route in row.cells]
        within.append(f"{route} {ran.count('')} of {len(ran)}")
    table = markdown(SEEDS, map(seeds_cells, rows))
    return f"Within the spread: {', '.join(within)}.\n\n{table}"


def versions(names):
    """Returns the machine and the versions of what is installed."""
    packages = sorted({"jax", "optax"} | {REGISTRY[x].package for x in names})
    listed = [f"{name} {importlib.metadata.version(name)}" for name in packages]
    machine = f"Python {platform.python_version()} on a {platform.machine()} CPU"
    return f"{machine}; {', '.join(listed)}.\n\n"


def write(page, rows):
    """Writes the page, apart from the part over seeds."""
    _, heading, kept = page.read_text().partition(SEEDS_HEADING)
    gradients, training = tables(rows)
    page.write_text(
        f"{HEAD}{versions(REGISTRY)}{count(rows)}\n\n"
        f"{GRADIENT_TEXT}{gradients}\n{TRAINING_TEXT}{training}\n{heading}{kept}"
    )


def write_seeds(page, rows):
    """Writes the part of the page over seeds."""
    kept = page.read_text().partition(SEEDS_HEADING)[0].rstrip("\n")
    found = versions(seeds.TASKS) + seeds_table(rows)
    page.write_text(f"{kept}\n\n{SEEDS_TEXT}{found}")
