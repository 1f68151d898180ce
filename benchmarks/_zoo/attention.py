"""Which attention of a model `amp` recognises, and what that does to its gradients.

There need not be a GPU: mpx is told that there is an H200, and the recognised attention
then runs in plain JAX.
"""

import collections
import importlib
import warnings

import jax

import mpx
from _zoo import REGISTRY
from _zoo.routes import distance


def pretend_h200():
    """Lets mpx and JAX believe in an H200 with cuDNN 9.10, for attention of any size."""
    from mpx._amp import _decide, _recognition
    from mpx._ops._attention import _cudnn, _primitive
    from mpx._recognise import _attention as found

    for module in (_decide, _recognition, _cudnn, _primitive, found):
        setattr(module, "cuda_capability", lambda: (9, 0))  # noqa: B010
    # A private module, which no public function lets one reach.
    name = "jax._src.cudnn.fused_attention_stablehlo"
    jax_cudnn = importlib.import_module(name)
    jax_cudnn.check_cudnn_version = lambda: 91000
    jax_cudnn.check_compute_capability = lambda _: True
    _cudnn.LEAST = {9: 0}


def measure(name):
    """Returns how often attention is recognised or kept, and the errors of gradients.

    A layer that is jitted, scanned or called several times counts once. Errors are the
    distances of the gradients under `amp` from those in f32, relative to their norm.
    """
    warnings.simplefilter("ignore")
    jax.config.update("jax_disable_most_optimizations", True)
    pretend_h200()
    case = REGISTRY[name].make()
    kept, fused = (
        mpx.amp(case.loss, params=case.holds, attention=x) for x in ("keep", "fuse")
    )
    rows = mpx.inspect.report(fused, case.params, *case.args).recognised
    found = [x for x in rows if x.what == "attention" and x.found]
    missed = collections.Counter(
        x.reason for x in rows if x.what == "attention" and not x.found
    )
    result = {"recognised": len(found), "missed": dict(missed)}
    if found:
        exact, *others = (
            jax.jit(jax.grad(func))(case.params, *case.args)
            for func in (case.loss, kept, fused)
        )
        errors = [distance(grads, exact) for grads in others]
        result |= dict(zip(("error_kept", "error_fused"), errors, strict=True))
    return result
