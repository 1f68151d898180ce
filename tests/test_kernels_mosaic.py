"""The Mosaic kernel: its layouts, loads and stores."""

import collections
import dataclasses
import functools
import operator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from kernel_cases import RULES, make_case, make_model, make_plan, needs_mosaic
from mpx._kernels import _step

# --- Mosaic's kernel ------------------------------------------------------------------


@needs_mosaic
def test_vmap_of_mosaic_takes_plain_jax():
    optimizer = mpx.optim.flash_adamw(0.01, backend="mosaic")
    params, grads = make_model((2, 64, 64))
    state = jax.vmap(optimizer.init)(params)
    one = jax.tree.map(lambda x: x[0], (params, state, grads))
    assert "mpx_step" in str(jax.make_jaxpr(optimizer.step)(*one))
    mapped = str(jax.make_jaxpr(jax.vmap(optimizer.step))(params, state, grads))
    assert "mpx_step" not in mapped


@needs_mosaic
def test_how_mosaic_is_launched(monkeypatch):
    from mpx._kernels import _mosaic

    launches = []
    kernel = _mosaic.plgpu.kernel

    def spy(*args, **kwargs):
        launches.append((kwargs["grid"], kwargs["compiler_params"].lowering_semantics))
        return kernel(*args, **kwargs)

    monkeypatch.setattr(_mosaic.plgpu, "kernel", spy)
    optimizer = mpx.optim.flash_adamw(0.01, backend="mosaic")
    params = {x: jax.ShapeDtypeStruct((2**8, 2**12), jnp.bfloat16) for x in "abc"}
    state = jax.eval_shape(optimizer.init, params)
    jax.eval_shape(optimizer.step, params, state, params)
    # CUDA lets one axis, which for Pallas is the last one, be longer than 65535. With
    # other semantics the kernel would compile, and compute something else.
    grid = 3, 2**20 // _step.MOSAIC.block
    assert set(launches) == {(grid, _mosaic.plgpu.LoweringSemantics.Warpgroup)}


@needs_mosaic
@pytest.mark.parametrize("shape", [(16, 64), (7, 96)], ids=["full", "odd"])
def test_mosaic_masks_blocks_that_are_not_full(monkeypatch, shape):
    from mpx._kernels import _mosaic

    calls = collections.Counter()
    for owner, name in (
        ("vector", "load"), ("vector", "store"), ("arith", "minui"), ("scf", "IfOp"),
    ):  # fmt: skip
        spied = Spied(getattr(_mosaic, owner), name, calls)
        monkeypatch.setattr(_mosaic, owner, spied)
    plan = make_plan(RULES["adamw"])
    scalars, grad, leaf = make_case(plan, shape)
    rows = jnp.append(jnp.float32(1), scalars)[None]
    step = functools.partial(_mosaic.launch, plan, group_size=32)
    jax.jit(step).trace(rows, [grad], [leaf]).lower(lowering_platforms=("cuda",))
    assert (np.prod(shape) % _step.MOSAIC.block != 0) == (shape == (7, 96))
    masks = {"minui": 8, "IfOp": 7} if shape == (7, 96) else {}
    assert calls == {"load": 8, "store": 7, **masks}


@dataclasses.dataclass
class Spied:
    """A module of which the calls of a function are counted."""

    module: Any
    name: str
    calls: collections.Counter

    def __getattr__(self, name):
        if name == self.name:
            self.calls[name] += 1
        return getattr(self.module, name)


@needs_mosaic
@pytest.mark.parametrize(
    ("size", "group"),
    [(96 * 257, group) for group in (2, 4, 8, 16, 32)]
    + [(2**12, group) for group in (32, 64, 128, 256, 512)]
    + [(size, 0) for size in (2**12, 15, 1, 2 * 1001, 4 * 1001)],
    ids=str,
)
def test_each_thread_of_mosaic_has_what_its_layout_says(monkeypatch, size, group):
    from mpx._kernels import _mosaic

    view = _mosaic._View(size, _step.MOSAIC.block, group)
    rows, width = view._shapes[False]
    held = threads_of(view._layouts[False], (rows, width))
    # Numbers in place of MLIR, those of all threads at once.
    numbers = SimpleNamespace(
        index_castui=lambda _, x: x, muli=operator.mul, addi=operator.add,
        divui=operator.floordiv,
    )  # fmt: skip
    threads = SimpleNamespace(thread_idx=lambda: np.arange(128), c=lambda x, _: x)
    types = SimpleNamespace(IndexType=SimpleNamespace(get=lambda: None))
    for name, stand_in in (("arith", numbers), ("utils", threads), ("ir", types)):
        monkeypatch.setattr(_mosaic, name, stand_in)

    seen = []
    for index in range(view.blocks):
        register = SimpleNamespace(registers=np.array(index))
        starts = list(view._places(register, grouped=False))
        places = np.stack(starts)[..., None] + np.arange(view._vector)
        np.testing.assert_array_equal(places, held + index * rows * width)
        seen.append(places.ravel())
        groups = np.stack(list(view._places(register, grouped=True)))
        np.testing.assert_array_equal(groups, places[..., 0] // width)
    every = np.arange(view.blocks * rows * width)
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), every)
    assert (view.blocks - 1) * rows * width < size <= every.size


def threads_of(layout, shape):
    """The numbers of the elements in each register of each thread, from a layout."""
    x = np.arange(np.prod(shape)).reshape(shape)
    for tile in layout.tiling.tiles:
        lead, rest = x.shape[: -len(tile)], x.shape[-len(tile) :]
        split = [n for d, t in zip(rest, tile, strict=True) for n in (d // t, t)]
        first, end = len(lead), len(lead) + len(split)
        x = x.reshape(*lead, *split).transpose(
            *range(first), *range(first, end, 2), *range(first + 1, end, 2)
        )
    inner = [*layout.warp_dims, *layout.lane_dims, layout.vector_dim]
    inner = [x.ndim + axis for axis in inner]
    outer = [axis for axis in range(x.ndim) if axis not in inner]
    return x.transpose(*outer, *inner).reshape(-1, 128, x.shape[layout.vector_dim])
