"""Compiles for H200s that need not be there; `make gpu-compile` installs what that takes."""

import contextlib

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from mpx.inspect._compiled import compiler_options, described, h200_devices


def mesh_of(sizes, names):
    """Returns a mesh of H200s."""
    devices = h200_devices(int(np.prod(sizes)))
    return Mesh(np.array(devices).reshape(sizes), names)


@contextlib.contextmanager
def on_mesh(mesh):
    """Traces for the GPUs of a mesh, with the kernels that they have."""
    with described("h200"), jax.set_mesh(mesh):
        yield


def compiled(lowered):
    # Without timing, XLA finds no tiles for some odd shapes of Triton's matmuls.
    options = compiler_options("h200") | {"xla_gpu_enable_triton_gemm": False}
    return lowered.compile(options)


def sharded(shapes, mesh, spec_of, dtype):
    """Returns shapes with the shardings that `spec_of` gives to their names."""

    def struct(path, shape):
        sharding = NamedSharding(mesh, spec_of(path[-1].key))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree_util.tree_map_with_path(struct, shapes, is_leaf=is_shape)
