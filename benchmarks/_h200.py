"""Compiles for H200s on a machine without a GPU; needs the CUDA plugin of JAX."""

import contextlib
import importlib
import importlib.util
import os
import pathlib
import pkgutil
from typing import Any

import jax
from jax.experimental import topologies

from mpx._jax._compat import assumed_gpu
from mpx._jax._private import assumed_cudnn


@contextlib.contextmanager
def described():
    """Traces the code inside for an H200, with the kernels that it has."""
    with assumed_gpu((9, 0)), assumed_cudnn(91000):
        yield


def devices(count):
    """Returns descriptions of H200s that one can compile for."""
    jax.local_devices()  # so that JAX has looked for devices as it does without the plugin
    # The plugin must not look for the libraries of a GPU that is not there.
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    try:
        return _describe(count)
    except NotImplementedError:
        # Where there is no GPU, JAX did not register the plugin.
        for _, name, _ in pkgutil.iter_modules(
            importlib.import_module("jax_plugins").__path__
        ):
            if name.startswith("xla_cuda"):
                importlib.import_module(f"jax_plugins.{name}").initialize()
        return _describe(count)


def _describe(count):
    config = pathlib.Path(__file__).with_name("_h200.txtpb").read_text()
    options = {"target_config": config, "topology": f"1x1x{count}"}
    found: Any = topologies.get_topology_desc(platform="cuda", **options)
    return list(found.devices)


def compiler_options() -> dict[str, Any]:
    """Returns where NVIDIA's compiler is; without a GPU it can time nothing."""
    spec = importlib.util.find_spec("nvidia")
    roots = map(pathlib.Path, spec.submodule_search_locations or () if spec else ())
    folders = [path.parent for root in roots for path in root.glob("cu*/bin")]
    return {"xla_gpu_cuda_data_dir": str(folders[0]), "xla_gpu_autotune_level": 0}
