"""The arithmetic of `benchmarks/scale.py`: what a program does, and how long that takes."""

import math

import pytest

from scripts import script

# ruff: noqa: E501 (lines of HLO)


@pytest.fixture(scope="module")
def scale():
    return script("scale")


@pytest.fixture(scope="module")
def cost(scale):
    return scale.cost


# --- kernels --------------------------------------------------------------------------

# Three layers, as XLA writes them: a weight is taken out of a stack (1), multiplied by
# cuBLAS (2), in fp8 (3), and the result is put into a stack in place by a matmul (4).
PROGRAM = """HloModule jit_step, num_partitions=16

%fused_take (a: bf16[3,64,32], b: s32[]) -> bf16[64,32] {
  %a = bf16[3,64,32]{2,1,0} parameter(0)
  %b = s32[] parameter(1)
  %zero = s32[] constant(0)
  %cut = bf16[1,64,32]{2,1,0} dynamic-slice(%a, %b, %zero, %zero), dynamic_slice_sizes={1,64,32}
  ROOT %flat = bf16[64,32]{1,0} bitcast(%cut)
}

%dynamic-slice-fusion (c: bf16[16,64], d: bf16[64,32], e: bf16[3,16,32], f: s32[]) -> (bf16[3,16,32], s8[999]) {
  %c = bf16[16,64]{1,0} parameter(0)
  %d = bf16[64,32]{1,0} parameter(1)
  %e = bf16[3,16,32]{2,1,0} parameter(2)
  %f = s32[] parameter(3)
  %zero.1 = s32[] constant(0)
  %call = (bf16[16,32]{1,0}, s8[999]{0}) custom-call(%c, %d), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %out = bf16[16,32]{1,0} get-tuple-element(%call), index=0
  %one = bf16[1,16,32]{2,1,0} bitcast(%out)
  %put = bf16[3,16,32]{2,1,0} dynamic-update-slice(%e, %one, %f, %zero.1, %zero.1)
  %work = s8[999]{0} get-tuple-element(%call), index=1
  ROOT %both = (bf16[3,16,32]{2,1,0}, s8[999]{0}) tuple(%put, %work)
}

%body (p: (s32[], bf16[16,64], bf16[3,64,32], bf16[3,16,32])) -> (s32[], bf16[16,64], bf16[3,64,32], bf16[3,16,32]) {
  %p = (s32[], bf16[16,64]{1,0}, bf16[3,64,32]{2,1,0}, bf16[3,16,32]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = bf16[16,64]{1,0} get-tuple-element(%p), index=1
  %stack = bf16[3,64,32]{2,1,0} get-tuple-element(%p), index=2
  %sums = bf16[3,16,32]{2,1,0} get-tuple-element(%p), index=3
  %w = bf16[64,32]{1,0} fusion(%stack, %i), kind=kLoop, calls=%fused_take
  %gather = ((bf16[64,32]{1,0}), bf16[64,512]{1,0}) all-gather-start(%w), replica_groups=mesh['a'=2,'b'=8] {'a','b'}, dimensions={1}
  %all = bf16[64,512]{1,0} all-gather-done(%gather)
  %y = (f32[16,512]{1,0}, s8[999]{0}) custom-call(%x, %all), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %q = f8e4m3fn[16,64]{1,0} custom-call(%x), custom_call_target="__gpu$xla.gpu.triton"
  %z = (bf16[16,16]{1,0}, s8[999]{0}) custom-call(%q, %q), custom_call_target="__cublas$lt$matmul$f8", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]}}}
  %new = (bf16[3,16,32]{2,1,0}, s8[999]{0}) fusion(%x, %w, %sums, %i), kind=kCustom, calls=%dynamic-slice-fusion
  %more = bf16[3,16,32]{2,1,0} get-tuple-element(%new), index=0
  ROOT %next = (s32[], bf16[16,64]{1,0}, bf16[3,64,32]{2,1,0}, bf16[3,16,32]{2,1,0}) tuple(%i, %x, %stack, %more)
}

%condition (p.1: (s32[], bf16[16,64], bf16[3,64,32], bf16[3,16,32])) -> pred[] {
  %p.1 = (s32[], bf16[16,64]{1,0}, bf16[3,64,32]{2,1,0}, bf16[3,16,32]{2,1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (arg: (s32[], bf16[16,64], bf16[3,64,32], bf16[3,16,32])) -> (s32[], bf16[16,64], bf16[3,64,32], bf16[3,16,32]) {
  %arg = (s32[], bf16[16,64]{1,0}, bf16[3,64,32]{2,1,0}, bf16[3,16,32]{2,1,0}) parameter(0)
  %h = bf16[1,128,2,64]{3,2,1,0} constant({...})
  %att = (bf16[1,2,128,64]{3,1,2,0}, u8[0]{0}) custom-call(%h, %h, %h), custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["1", "2", "128", "128"]}, "mask_type": "CAUSAL"}}
  ROOT %loop = (s32[], bf16[16,64]{1,0}, bf16[3,64,32]{2,1,0}, bf16[3,16,32]{2,1,0}) while(%arg), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
}
"""


def test_kernels_of_a_program_are_those_counted_by_hand(cost):
    found = sorted(cost.kernels(PROGRAM))
    head = 128 * 2 * 64 * 2  # bytes of a query
    assert found == sorted(
        [
            # Two matmuls over half of the scores; three arrays are read and one written.
            cost.Kernel("forward", 1, 2 * 2 * 2 * 128**2 * 64 / 2, 4 * head),
            # The slice is read and written, and the index read.
            cost.Kernel("memory", 3, 0.0, 2 * 64 * 32 * 2 + 4),
            cost.Kernel(
                "bf16", 3, 2.0 * 16 * 64 * 512, 2 * (16 * 64 + 64 * 512) + 4 * 16 * 512
            ),
            cost.Kernel("memory", 3, 0.0, 16 * 64 * (2 + 1)),
            cost.Kernel("fp8", 3, 2.0 * 16 * 16 * 64, 2 * 16 * 64 + 2 * 16 * 16),
            # Of the stack only the slice is written.
            cost.Kernel(
                "bf16", 3, 2.0 * 16 * 64 * 32, 2 * (16 * 64 + 64 * 32 + 16 * 32) + 4
            ),
        ]
    )


def test_collectives_of_a_program_know_their_nodes(cost):
    (found,) = cost.transfers(PROGRAM)
    sent = 64 * 512 * 2 * 15 / 16
    assert found == cost.Transfer("all-gather", "bf16", 16, 2, 3, sent)


def test_a_kernel_takes_as_long_as_its_slowest_part(cost):
    machine = cost.Machine(bf16=100.0, memory=10.0, kernel=0.5)
    for flops, size, expected in ((300, 10, 3), (300, 50, 5), (1, 1, 0.5), (0, 40, 4)):
        kind = "bf16" if flops else "memory"
        assert cost.Kernel(kind, 2, flops, size).seconds(machine) == 2 * expected


# --- collectives ----------------------------------------------------------------------

GROUPS = {
    "replica_groups={{0,1,2,3},{4,5,6,7}}": [0, 1, 2, 3],
    "replica_groups=[2,4]<=[8]": [0, 1, 2, 3],
    "replica_groups=[8,4]<=[4,8]T(1,0)": [0, 8, 16, 24],
    "replica_groups=mesh['a'=4,'b'=8] {'a'}": [0, 8, 16, 24],
    "replica_groups=mesh['a'=4,'b'=2] {'b'}": [0, 1],
    "replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}": [0, 1, 4, 5],
    "replica_groups=mesh['a'=8] {'a':(1)2}": [0, 4],
    "replica_groups=mesh['a'=8] {'a':(4)2}": [0, 1],
    "channel_id=1": [],
}


@pytest.mark.parametrize("text", GROUPS)
def test_devices_of_the_first_group(cost, text):
    assert (
        cost.group_of(f"  %x = f32[8] all-reduce(%y), {text}, to_apply=%add")
        == (GROUPS[text])
    )


# By kind, devices and nodes: bytes per second of a ring, and its hops, near and far.
RINGS = [
    ("all-gather", 8, 1, 400, (7, 0)),
    ("reduce-scatter", 2, 1, 400, (1, 0)),
    ("all-gather", 64, 8, 320, (56, 7)),  # eight GPUs of a node share its eight links
    ("all-gather", 8, 8, 40, (0, 7)),  # one GPU of each node
    ("all-gather", 32, 16, 80, (16, 15)),
    ("all-reduce", 8, 1, 400, (14, 0)),
    ("all-reduce", 64, 8, 320, (14, 6)),  # a tree of eight nodes, up and down
    ("all-to-all", 16, 2, 40 * 15 / 8, (0, 1)),  # 8 of 15 parts leave the node
    ("collective-permute", 8, 1, 400, (1, 0)),
]


@pytest.mark.parametrize(("kind", "devices", "nodes", "rate", "hops"), RINGS)
def test_time_of_a_collective(cost, kind, devices, nodes, rate, hops):
    machine = cost.Machine(
        nvlink=500.0, network=50.0, efficiency=0.8, hop=0.25, far_hop=1.0
    )
    near, far = hops
    expected = 3 * (1000 / rate + near * 0.25 + far)
    transfer = cost.Transfer(kind, "bf16", devices, nodes, 3, 1000.0)
    assert transfer.seconds(machine) == pytest.approx(expected)


# --- predictions ----------------------------------------------------------------------


def test_a_row_goes_from_full_overlap_to_none(scale):
    machine = scale.Machine(capacity=100e9)
    case = scale.Case("7B", "bf16, flash_adamw", "FSDP", 8)
    cells = scale.row(case, (0.3, 0.1), (50e9, 25e9), machine)
    assert cells[3:5] == ["300–400", "10240–13653"]
    assert cells[6:] == ["50.0", "25.0", "25"]
    assert scale.row(case, (1, 1), (101e9, 50e9), machine)[3] == "does not fit"


def test_parameters_are_those_of_the_models(scale):
    assert scale.MODELS["7B"].params == 6738415616  # as published
    assert scale.MODELS["70B"].params == 68976648192


@pytest.mark.gpu_compile
@pytest.mark.standard_promotion
@pytest.mark.parametrize("layout", ["FSDP", "FSDP × TP 8"])
def test_operations_of_a_compiled_step_are_those_of_the_model(scale, layout):
    sizes = scale.MODELS["tiny"]
    precision = scale.PRECISIONS["bf16, AdamW in f32"]
    program = scale.cost.read(scale.compiled(sizes, precision, layout, 16))
    weights = {
        name: math.prod(shape)
        for name, shape in sizes.shapes()["layers"].items()
        if "norm" not in name
    }
    # Forward, again (the last matmul of a layer need not), and twice backward.
    expected = 8 * sum(weights.values()) - 2 * weights["down"]
    expected += 6 * sizes.vocabulary * sizes.width
    assert program.flops()["bf16"] == expected * sizes.tokens
