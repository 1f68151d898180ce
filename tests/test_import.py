"""`import mpx` is cheap: it starts no backend, and neither loads nor needs optional packages."""

import os
import subprocess
import sys

# In one process: each takes seconds to start. No backend can start on a platform that does
# not exist.
SCRIPT = """
import sys

optional = ["flax", "haiku", "matplotlib", "orbax", "sklearn"]

def check_not_loaded(names):
    loaded = [name for name in names if sys.modules.get(name) is not None]
    assert not loaded, loaded

# Rooms and namespaces that load when they are first used, so that it takes 0.04 s beside
# its dependencies. The command that measures it:
# python -X importtime -c "import jax, equinox, optax, jaxtyping; import mpx"
import jax
contexts, make_user_context = [], jax.make_user_context
jax.make_user_context = lambda value: contexts.append(value) or make_user_context(value)
import mpx
made = len(contexts)
rooms = "_amp _fp8 _kernels _ops _optim _program _recognise checkpoint inspect".split()
check_not_loaded([*optional, *(f"mpx.{name}" for name in rooms)])

import mpx.compat.jaxamp, mpx.compat.jmp, mpx.testing
mpx.compat.jaxamp.DynamicScalerState()
check_not_loaded([*optional, "mpx._recognise", "mpx._fp8", "mpx.inspect"])

# Contexts are part of the cache key of `jax.jit`. If an import during a trace made one, the
# next call would trace and compile the step again.
import mpx._amp, mpx._fp8, mpx._kernels, mpx._ops, mpx._optim, mpx._recognise, mpx.inspect
assert 0 < made == len(contexts), (made, len(contexts))

try:
    jax.numpy.ones(1)
except RuntimeError as error:
    assert "nowhere" in str(error), error
else:
    raise AssertionError("the premise: a backend would have failed to start")
"""


def test_import_starts_no_backend_and_loads_nothing_that_is_used_later():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT],
        env={**os.environ, "JAX_PLATFORMS": "nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
