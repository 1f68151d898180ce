"""`import mpx` is cheap: it starts no backend and loads no optional package."""

import os
import subprocess
import sys

EVERYTHING = "import mpx, mpx.compat.jaxamp, mpx.compat.jmp, mpx.testing"
# Rooms and namespaces that load when they are first used.
LAZY = [
    "_amp",
    "_fp8",
    "_kernels",
    "_ops",
    "_optim",
    "_program",
    "_recognise",
    "checkpoint",
    "inspect",
]
OPTIONAL = ["flax", "haiku", "matplotlib", "orbax", "rich", "sklearn"]


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_import_starts_no_backend():
    # No backend can start on a platform that does not exist.
    environment = {"JAX_PLATFORMS": "nowhere"}
    started = run("import jax; jax.numpy.ones(1)", **environment)
    assert started.returncode != 0
    assert "nowhere" in started.stderr

    imported = run(EVERYTHING, **environment)
    assert imported.returncode == 0, imported.stderr


def test_import_loads_nothing_that_is_used_later():
    # So it takes 0.04 s beside its dependencies. The command that measures it:
    # python -X importtime -c "import jax, equinox, optax, jaxtyping; import mpx"
    names = [*OPTIONAL, *(f"mpx.{name}" for name in LAZY)]
    imported = run(
        f"import sys, mpx\nprint(*(name for name in {names} if name in sys.modules))"
    )
    assert imported.returncode == 0, imported.stderr
    assert imported.stdout.split() == []


def test_everything_loads_no_optional_package():
    lazy = [*OPTIONAL, "mpx._recognise", "mpx._fp8", "mpx.inspect"]
    imported = run(
        f"import sys\n{EVERYTHING}\n"
        f"print(*(name for name in {lazy} if name in sys.modules))"
    )
    assert imported.returncode == 0, imported.stderr
    assert imported.stdout.split() == []


def test_import_works_without_the_optional_packages():
    hidden = "".join(f"sys.modules[{name!r}] = None\n" for name in OPTIONAL)
    imported = run(f"import sys\n{hidden}{EVERYTHING}")
    assert imported.returncode == 0, imported.stderr
