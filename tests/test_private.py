"""A JAX that has renamed a private name costs a feature and one warning, not mpx."""

import json
import pkgutil
import subprocess
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import mpx
from mpx._fp8 import _operands
from mpx._jax import _private
from mpx._jax._compat import check_neighbour, check_version
from mpx._kernels import _dispatch
from mpx._optim._optimizers import flash_adamw

NAMES = [(key, name) for key in _private.FEATURES for name in _private.names_of(key)]

# One process imports mpx anew without each name in turn. JAX itself needs most of them,
# so they are hidden from the function that mpx looks names up with.
SCRIPT = """
import json, pkgutil, sys, warnings
import equinox, jax, jax.numpy as jnp, numpy as np, optax

resolve = pkgutil.resolve_name
params = {"w": jnp.full((32, 32), 0.0625), "b": jnp.zeros(32)}
x = jnp.ones((4, 32))

def loss(params, x):
    with jax.named_scope("layer"):
        y = jnp.tanh(x @ params["w"] + params["b"])
    return jnp.mean(y**2)

expected = jax.grad(loss)(params, x)

def attempt(feature, missing):
    def hide(name):
        if name == missing:
            raise AttributeError(name)
        return resolve(name)

    pkgutil.resolve_name = hide
    for name in [name for name in sys.modules if name.partition(".")[0] == "mpx"]:
        del sys.modules[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import mpx
        from mpx._optim._optimizers import flash_adamw
        from mpx._jax._private import private

        optimizer = flash_adamw(0.5, weight_decay=0.0)

        @jax.jit  # one program, not one for each operation
        def step(params, x):
            grads = jax.grad(mpx.amp(loss))(params, x)
            return grads, optimizer.step(params, optimizer.init(params), grads)[0]

        grads, new = step(params, x)
        assert private(feature) is private(feature) is None
    for name in params:
        error = np.abs(grads[name] - expected[name]).max()
        assert error <= 2.0**-5 * np.abs(expected[name]).max(), (missing, error)
        # The first step of Adam has the length of the learning rate.
        assert np.allclose(new[name], params[name] - 0.5, rtol=1e-3), missing
    return [str(item.message) for item in caught]

print(json.dumps([attempt(*pair) for pair in json.loads(sys.argv[1])]))
"""


@pytest.mark.slow
def test_missing_feature_leaves_import_gradients_and_steps_right():
    """All names of a feature are looked up at once: its first stands for the others."""
    pairs = [(key, _private.names_of(key)[0]) for key in _private.FEATURES]
    pairs = [pair for pair in pairs if pair[1].startswith("jax")]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(pairs)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for (feature, name), warned in zip(pairs, json.loads(done.stdout), strict=True):
        lost = _private.FEATURES[feature][0]
        assert sum(lost in x for x in warned) == 1, (name, warned)
        # Other features may need the same name.
        assert all(name.replace(":", ".") in x for x in warned), (name, warned)


@pytest.fixture
def hide(monkeypatch):
    """Hides one name at a time from mpx; warnings come once per process."""
    resolve, hidden = pkgutil.resolve_name, []

    def lookup(name):
        if name in hidden:
            raise AttributeError(name)
        return resolve(name)

    def hide_only(name):
        hidden[:] = [name]
        _private.private.cache_clear()

    monkeypatch.setattr(pkgutil, "resolve_name", lookup)
    yield hide_only
    _private.private.cache_clear()


def test_missing_name_turns_its_feature_off_with_one_warning(hide):
    renamed = [name for _, name in NAMES if pkgutil.resolve_name(name) is None]
    assert not renamed, "this JAX has renamed them"
    for feature, name in NAMES:
        lost = _private.FEATURES[feature][0]
        hide(name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert _private.private(feature) is None
            assert _private.private(feature) is None
        assert len(caught) == 1, name
        for item in caught:
            assert f"has no `{name.replace(':', '.')}`" in str(item.message)
            assert lost in str(item.message)


def test_methods_of_models_run_as_written_without_the_lifting_of_flax(hide):
    hide("flax.core.lift:pack")

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return mpx.amp(nn.Dense(4, use_bias=False))(x)

    x = jnp.linspace(-1, 1, 6).reshape(2, 3)
    with pytest.warns(RuntimeWarning, match="runs methods of a Linen model as written"):
        variables: Any = Model().init(jax.random.key(0), x)
    kernel = variables["params"]["Dense_0"]["kernel"]
    out: Any = Model().apply(variables, x)
    np.testing.assert_allclose(out, x @ kernel, rtol=1e-6)


def test_gpu_without_kernels_runs_plain_jax_with_one_warning(hide, monkeypatch):
    hide("jax.experimental.pallas:pallas_call")
    for module in (_dispatch, _operands):
        monkeypatch.setattr(module, "gpu_capability", lambda: (9, 0))
    params = {"w": jnp.ones((512, 512)), "v": jnp.ones((512, 512))}
    tx = flash_adamw(1e-2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jaxpr = jax.make_jaxpr(tx.step)(params, tx.init(params), params)
        assert not _operands.transposing_pays()
    assert "pallas_call" not in str(jaxpr)
    assert "platform_index" not in str(jaxpr)
    assert ["without Triton kernels" in str(item.message) for item in caught] == [True]


def test_package_with_the_same_folder_is_named():
    check_neighbour("no-such-package-anywhere")
    with pytest.warns(RuntimeWarning, match=r"equinox .* beside mpx-jax.*uninstall"):
        check_neighbour("equinox")


@pytest.mark.parametrize("version", ["0.9.2", "0.10.0", "0.10.2"])
def test_old_or_wrong_jax_is_an_error_and_a_new_one_is_not(version):
    with pytest.raises(ImportError, match=rf"needs jax>=.* but jax {version} is"):
        check_version(version)
    for accepted in ("0.10.1", "0.11.0", "1.2.3"):
        check_version(accepted)
