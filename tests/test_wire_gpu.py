"""Programs compiled for eight H200s: the collectives of a language model, by dtype and bytes.

Needs no GPU but XLA's compiler for one: `make gpu-compile` installs it and runs these. The
same table with the shapes of 7B is printed by `benchmarks/wire.py`.
"""

import math

import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import h200
import mpx
from mpx.inspect import _doctor, collectives
from mpx.inspect._result import amount
from scripts import script

pytestmark = [
    pytest.mark.gpu_compile,
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend"),
]


@pytest.fixture(scope="module")
def wire():
    return script("wire")


def weights(wire):
    """The number of weights of the scanned layers, and of embedding and head each."""
    shapes = wire.TINY.shapes()
    layers = [shapes["layers"][name] for name in (*wire.COLUMNS, *wire.ROWS)]
    return sum(map(math.prod, layers)), math.prod(shapes["head"])


def sent(found, kinds, dtype, sizes):
    """The bytes that a device sends for weights or their gradients in a dtype."""
    # XLA flattens what it combines: sums of activations between tensor-parallel devices.
    return sum(
        x.bytes
        for x in found
        if x.kind in kinds
        and x.dtype == dtype
        and sizes.length not in x.shape
        and not (len(x.shape) == 1 and x.devices == 2)
        and x.bytes > 2**14 * x.runs
    )


SUMS = ("all-reduce", "reduce-scatter")
# By layout and precision: bytes by dtype that are gathered and reduced of each weight in
# the layers; whether reductions run once per window.
GOLDEN = {
    ("FSDP", "f32", ""): ({"f32": 8}, {"f32": 4}),
    ("FSDP", "bf16, sums in f32", ""): ({"bf16": 4}, {"f32": 4}),
    ("FSDP", "bf16", ""): ({"bf16": 4}, {"bf16": 2}),
    ("FSDP", "fp8, sums in f32", ""): ({"e4m3": 2}, {"f32": 4}),
    ("FSDP×TP", "bf16, sums in f32", ""): ({"bf16": 4}, {"f32": 4}),
    ("FSDP×TP", "fp8, sums in f32", ""): ({"e4m3": 2}, {"f32": 4}),
    ("DP", "bf16, sums in f32", ""): ({}, {"f32": 8}),
    ("DP", "bf16", ""): ({}, {"bf16": 4}),
    ("DP", "bf16, sums in f32", " ×4 each"): ({}, {"f32": 32}),
    ("DP", "bf16, sums in f32", " ×4 once"): ({}, {"f32": 8}),
    ("FSDP", "bf16, sums in f32", " ×4 once"): ({"bf16": 16}, {"f32": 4}),
    ("FSDP", "fp8, sums in f32", " ×4 once"): ({"e4m3": 8}, {"f32": 4}),
    ("FSDP", "bf16", " ×4 once"): ({"bf16": 16}, {"bf16": 2}),
}


@pytest.mark.parametrize(
    "key", GOLDEN, ids=lambda key: "".join((key[0], key[2], " ", key[1]))
)
def test_bytes_of_gathers_and_reductions(wire, key):
    layout, precision, window = key
    case = wire.Case(layout, precision, window)
    compiled = wire.compiled(case, wire.TINY)
    found = collectives(compiled)
    layers, table = weights(wire)
    gathered, reduced = GOLDEN[key]
    # Of what goes around a ring of eight, or around one of four with half of each weight.
    share = 3 / 8 if layout == "FSDP×TP" else 7 / 8
    for dtype, width in gathered.items():
        actual = sent(found, ("all-gather",), dtype, wire.TINY)
        assert layers * width * share <= actual * 1.001
        # The head may be gathered, too, once or twice and in each part; not in 8 bits.
        most = layers * 1.01 if dtype == "e4m3" else (layers + table) * 1.3
        assert actual <= most * width * share
    for dtype, width in reduced.items():
        actual = sent(found, SUMS, dtype, wire.TINY)
        assert layers * width * share <= actual * 1.001
        assert actual <= (layers + 2 * table) * width * share * 1.1
    narrow = {"bf16", "f16", "e4m3", "e5m2"} - reduced.keys()
    assert not any(sent(found, SUMS, dtype, wire.TINY) for dtype in narrow)
    if window == " ×4 once":
        assert not any(x.in_loop for x in found if x.kind in SUMS and x.bytes > 2**16)
    if precision.startswith("fp8"):
        assert mpx.inspect.fp8_check(compiled).fp8 > 0
        # Transposed codes are written once, and not by the matmul.
        assert "f8e4m3fn" not in "".join(mpx.inspect.fp8_check(compiled).other)


@pytest.mark.parametrize("count", [2, 8])
def test_doctor_of_a_cluster_finds_the_wire_it_asks_for(monkeypatch, count):
    monkeypatch.setattr(_doctor, "half", lambda: "bf16")
    devices = np.array(h200.devices())[:count]
    mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
    options = h200.compiler_options()
    found = _doctor.check_wire(_doctor.Trial(mesh), options)
    assert found.passed
    # Two weights of 64 × 256: two bytes each are gathered, four reduced, once.
    part = 2 * 64 * 256 * (count - 1) / count
    gathered, reduced = (amount(size * part, "B") for size in (2, 4))
    assert (
        f"in bf16 ({gathered}), gradients reduced in f32 ({reduced})" in found.figures
    )
