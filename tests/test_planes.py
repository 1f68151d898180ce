"""States in few arrays: planes of words, and how they are read."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization

import mpx
from flash_cases import KINDS, TINY, make_grads, make_params, optimizer, stepper
from mpx._optim._packing import CORRECTION, join, split, words_of
from mpx.testing import assert_trees_equal

I8, U8, I16, BF16, F16, F32 = (
    np.dtype(t)
    for t in (np.int8, np.uint8, np.int16, jnp.bfloat16, jnp.float16, np.float32)
)
# What is packed together, the words, and how many.
TOGETHER = {
    "codes": ((I8, U8), np.uint8, 2),
    "codes and 8 bits": ((I8, U8, I8), np.uint8, 3),
    "codes and 16 bits": ((I8, U8, I16), np.uint8, 4),
    "signed codes": ((I8, I8), np.int8, 2),
    "scales": ((BF16, F32), np.uint16, 3),
    "scales of FlashOptim": ((F16, F16), np.float16, 2),
    "f32 and 8 bits": ((F32, F32, I8), np.uint8, 9),
    "f32 and 16 bits": ((F32, F32, I16), np.uint16, 5),
    "one": ((I16,), np.int16, 1),
}


@pytest.mark.parametrize(("dtypes", "word", "count"), TOGETHER.values(), ids=TOGETHER)
def test_words_hold_all_bits(dtypes, word, count):
    rng = np.random.default_rng(0)
    # All bit patterns, nan and inf included.
    arrays = [
        rng.integers(0, 256, (999, dtype.itemsize), np.uint8).view(dtype)[:, 0]
        for dtype in dtypes
    ]
    assert words_of(dtypes) == (word, count)
    words = jax.jit(split)([jnp.asarray(x) for x in arrays])
    assert [x.dtype for x in words] == [word] * count
    size = np.dtype(word).itemsize
    high_first = [
        x.view(f"u{size}").reshape(999, -1)[:, ::-1].T for x in arrays
    ]  # on a machine whose words start with the low byte
    got = np.stack([np.asarray(x).view(f"u{size}") for x in words])
    np.testing.assert_array_equal(got, np.concatenate(high_first))
    again = jax.jit(join, static_argnums=1)(words, dtypes)
    for x, y in zip(again, arrays, strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == y.tobytes()


@pytest.mark.some(2)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_what_is_read_is_what_is_packed(name, dtype):
    params = make_params(dtype)
    tx = KINDS[name](compression=mpx.optim.Compression(min_size=64))
    _, state = stepper(tx)(params, tx.init(params), make_grads(0))
    views: Any = jax.device_get((state.correction, state.mu, state.nu))
    columns = [view for view in views[1:] if view is not None]
    for path in (lambda t: t["w"], lambda t: t["layers"][0]["b"]):
        moments = tuple(path(column) for column in columns)
        assert len(jax.tree.leaves(path(state.packed))) <= 2
        packed, correction = path(state.packed), path(views[0])
        numbers = dict(zip(packed.packing.moments, moments, strict=True))
        numbers |= {} if correction is None else {CORRECTION: correction}
        numbers = jax.tree.map(jnp.asarray, numbers)
        assert_trees_equal(packed.packing.pack(numbers), packed)
        numbers = jax.tree.leaves((path(views[0]), moments))
        assert all(np.any(x) for x in numbers) or dtype == F32


def test_views_of_shapes_are_shapes():
    params = {"w": jax.ShapeDtypeStruct((64, 128), BF16)}
    tx: Any = mpx.optim.flash_adamw(1e-3)
    template = tx.init(params)
    arrays = tx.init({"w": jnp.ones((64, 128), BF16)})
    for name in ("mu", "nu", "correction"):
        view, real = (jax.tree.leaves(getattr(x, name)) for x in (template, arrays))
        assert [(x.shape, x.dtype) for x in view] == [(x.shape, x.dtype) for x in real]


def test_states_that_vmap_made_can_be_read():
    tx: Any = mpx.optim.flash_adamw(0.1, compression=TINY)
    # As many as there are planes, which a wrong axis would not show.
    params = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 64)), BF16)
    state = jax.vmap(lambda p: tx.step(p, tx.init(p), p).state)(params)
    assert state.packed.codes.shape == (3, 3, 2, 64)
    for name in ("mu", "nu", "correction"):
        inside = jax.vmap(lambda state, name=name: getattr(state, name))(state)
        assert_trees_equal(getattr(state, name), inside)
    assert state.mu.codes.shape == (3, 2, 64)


def test_a_state_of_other_arrays_is_not_restored():
    params = make_params()
    state = optimizer().init(params)
    saved: Any = serialization.to_state_dict(state)
    old = {"count": saved["count"], "layout": {}, "mu": params, "nu": params}
    with pytest.raises(ValueError, match=r"keys do not match.*'packed'"):
        serialization.from_state_dict(state, old)
