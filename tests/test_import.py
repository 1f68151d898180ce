"""`import mpx` is cheap: it starts no backend and loads no optional package."""

import os
import subprocess
import sys

# In one process: each takes seconds to start. No backend can start on a platform that does
# not exist, and a module that is `None` cannot be imported.
SCRIPT = """
import sys

optional = ["flax", "haiku", "matplotlib", "orbax", "rich", "sklearn"]
if "without" in sys.argv:
    sys.modules.update(dict.fromkeys(optional))
import mpx, mpx.compat.jaxamp, mpx.compat.jmp, mpx.testing
mpx.compat.jaxamp.DynamicScalerState()
lazy = [*optional, "mpx._recognise", "mpx._fp8", "mpx.inspect"]
print(*(name for name in lazy if sys.modules.get(name) is not None))
import jax
try:
    jax.numpy.ones(1)
except RuntimeError as error:
    assert "nowhere" in str(error), error
else:
    raise AssertionError("the premise: a backend would have failed to start")
"""


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, *arguments],
        env={**os.environ, "JAX_PLATFORMS": "nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_import_starts_no_backend_and_loads_no_optional_package():
    done = run()
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_import_works_without_the_optional_packages():
    done = run("without")
    assert done.returncode == 0, done.stderr
