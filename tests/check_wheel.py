"""Uses an installed wheel: `python check_wheel.py dist`, outside of the sources."""

import importlib.metadata
import pathlib
import subprocess
import sys
import zipfile


def check_contents(wheel: pathlib.Path) -> None:
    """Raises if the wheel lacks its type marker, or holds more than the package."""
    names = zipfile.ZipFile(wheel).namelist()
    assert "mpx/py.typed" in names, "without py.typed no checker reads the annotations"
    folders = {name.partition("/")[0] for name in names}
    others = {x for x in folders if x != "mpx" and not x.endswith(".dist-info")}
    assert not others, f"the wheel holds {others}"


def check_step() -> None:
    """Trains a step in bf16 with a compressed optimizer, by the installed package."""
    import jax
    import jax.numpy as jnp

    import mpx

    assert pathlib.Path(sys.prefix) in pathlib.Path(mpx.__file__).parents, mpx.__file__
    assert importlib.metadata.version("mpx-jax")

    def loss(params, x):
        return jnp.mean((x @ params["w"]).astype(jnp.float32) ** 2)

    params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    optimizer = mpx.optim.flash_adamw(0.1)
    state = optimizer.init(params)
    value, grads = jax.value_and_grad(mpx.amp(loss))(params, jnp.ones((8, 64)))
    params, state = optimizer.step(params, state, grads)
    assert float(value) == 64.0**2
    assert int(state.count) == 1
    assert float(params["w"][0, 0]) < 1


if __name__ == "__main__":
    (built,) = pathlib.Path(sys.argv[1]).glob("*.whl")
    check_contents(built)
    check_step()
    subprocess.run([sys.executable, "-P", "-m", "mpx", "doctor"], check=True)
    print(f"{built.name} works outside of the sources")
