"""What XLA makes of fp8 for an H200: every matmul one cuBLASLt call.

Needs no GPU but XLA's compiler for one: `make gpu-compile` installs it and runs these.
"""

import functools
import json
import os
import subprocess
import sys

import pytest

import h200

SHARDED = (
    *("data auto", "fsdp auto", "tensor auto"),
    *("data explicit", "fsdp explicit", "shard_map"),
)
# The matmuls of one forward and backward pass; a body that is run again under remat
# counts once more, except for its last product, which nobody needs.
MATMULS = {
    **{f"mlp {name}": 6 for name in ("current", "row", "static", "delayed")},
    # Under remat the gelu comes out of a matmul: where it was clipped before the cast,
    # XLA has failed with "A cycle is detected".
    **{f"tower {name}": 7 for name in ("current", "row", "static", "delayed")},
    # XLA makes one call of products that share an operand: q, k, v and gate, up, in the
    # forward pass and for their weight gradients. 4 forward, 3 again, 11 backward; the
    # head has no softmax, so that it is 3 more.
    "transformer": 21,
    # The products of each of eight devices.
    **dict.fromkeys(SHARDED, 6),
}
# One kernel for each tensor that is quantised: three a matmul.
CASTS = {
    **{f"mlp {name}": 6 for name in ("current", "static", "delayed")},
    "mlp row": 0,  # each direction has its own scales
    # Two tensors a matmul are quantised again under remat.
    **{f"tower {name}": 10 for name in ("current", "static", "delayed")},
    # Four inputs, shared by q, k, v and by gate, up; seven weights, seven gradients; and
    # the three tensors of the head.
    "transformer": 2 * (4 + 7) + 7 + 3,
    # Two weights that XLA may shard have one order, which no kernel makes.
    **{name: 4 if name.endswith("auto") else 6 for name in SHARDED},
}

pytestmark = [
    pytest.mark.gpu_compile,
    pytest.mark.timeout(700),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]


@functools.cache
def compiled():
    run = subprocess.run(
        [sys.executable, h200.__file__],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", MATMULS)
def test_every_eligible_matmul_is_one_fp8_call(name):
    found = compiled()[name]
    assert "error" not in found, found["error"]
    assert found["fp8"] == MATMULS[name]


# Attention: twice forward, and four products backward.
OTHERS = {"transformer": 2 * 2 + 4}


@pytest.mark.parametrize("name", MATMULS)
def test_no_matmul_falls_back(name):
    found = compiled()[name]
    assert "error" not in found, found["error"]
    assert sum(found["other"].values()) == OTHERS.get(name, 0)


@pytest.mark.parametrize("name", CASTS)
def test_each_tensor_is_quantised_once_in_both_layouts(name):
    found = compiled()[name]
    assert "error" not in found, found["error"]
    assert found["casts"] == CASTS[name]


# Those of `MATMULS`, and what is left in bf16.
INTEGERS = {
    "mlp int8": (6, 0),
    "mlp int8 forward": (2, 4),
    "tower int8": (7, 0),
    "tower int8 forward": (3, 4),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_matmuls_of_int8_multiply_integers(name):
    found = compiled()[name]
    assert "error" not in found, found["error"]
    assert (found["int8"], sum(found["other"].values())) == INTEGERS[name]
    # Or they are slower than those of bf16.
    assert found["rows"] == found["int8"]


def test_bf16_has_no_fp8_calls():
    assert compiled()["bf16"]["fp8"] == 0
    assert sum(compiled()["bf16"]["other"].values()) == 6
