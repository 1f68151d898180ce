"""Policies: their grammar and their casts."""

import dataclasses
import inspect
import pickle
import re

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import mpx

F16, BF16, F32, F64 = (np.dtype(jnp.dtype(n)) for n in ("f2", "bfloat16", "f4", "f8"))
KEY = jax.random.key(0)


def fields(policy):
    return (
        policy.param_dtype,
        policy.compute_dtype,
        policy.output_dtype,
        policy.grad_dtype,
        policy.reduce_dtype,
    )


# --- construction and grammar ----------------------------------------------------------


def test_defaults_are_f32_around_half_precision():
    assert fields(mpx.Policy()) == (F32, None, F32, None, None)
    assert mpx.Policy().keep == ()
    assert mpx.Policy().resolved_compute_dtype() == F16
    with mpx.half_precision("bf16"):
        assert mpx.Policy().resolved_compute_dtype() == BF16


def test_dtypes_are_given_as_names_or_dtypes():
    policy = mpx.Policy(
        "f32", "bf16", jnp.float16, grad_dtype=np.float64, reduce_dtype=F16
    )
    assert fields(policy) == (F32, BF16, F16, F64, F16)
    assert all(isinstance(dtype, np.dtype) for dtype in fields(policy))
    assert mpx.Policy(compute_dtype="half") == mpx.Policy()


GRAMMAR = {
    "p=f32,c=bf16,o=f32": (F32, BF16, F32, None, None),
    "p=f32, c=bf16, o=f32": (F32, BF16, F32, None, None),
    "  p = f32 ,c= bf16 ": (F32, BF16, BF16, None, None),
    "params=float32,compute=float16,output=float64": (F32, F16, F64, None, None),
    "p=f32,c=f16,o=f32,g=f16,r=bf16": (F32, F16, F32, F16, BF16),
    "grad=f64,reduce=f32": (F32, F32, F32, F64, F32),
    "c=bf16": (F32, BF16, BF16, None, None),  # parameters are f32, output follows
    "p=bf16": (BF16, BF16, BF16, None, None),  # compute follows the parameters
    "o=f32,p=f16": (F16, F16, F32, None, None),
    "bf16": (BF16, BF16, BF16, None, None),
    " float32 ": (F32, F32, F32, None, None),
    "full": (F32, F32, F32, None, None),
    "p=full,c=half,o=full": (F32, None, F32, None, None),
    "half": (F16, None, F16, None, None),
    "c=half": (F32, None, F16, None, None),
    "p=half": (F16, None, F16, None, None),
    "c=bf16,g=half,r=half": (F32, BF16, BF16, F16, F16),
    # The names of other frameworks.
    "bf16-mixed": (F32, BF16, F32, None, None),
    "mixed_bfloat16": (F32, BF16, F32, None, None),
    "16-mixed": (F32, F16, F32, None, None),
    "fp16-mixed": (F32, F16, F32, None, None),
    "mixed_float16": (F32, F16, F32, None, None),
    "bf16-true": (BF16, BF16, BF16, None, None),
    "16-true": (F16, F16, F16, None, None),
    "fp16-true": (F16, F16, F16, None, None),
    "32-true": (F32, F32, F32, None, None),
    "64-true": (F64, F64, F64, None, None),
    "fp16": (F16, F16, F16, None, None),
    "p=fp32,c=fp16": (F32, F16, F16, None, None),
}


@pytest.mark.parametrize(("text", "expected"), GRAMMAR.items(), ids=GRAMMAR)
def test_string_gives_the_policy(text, expected):
    assert fields(mpx.get_policy(text)) == expected


def test_half_in_a_string_is_the_configured_one():
    with mpx.half_precision("bf16"):
        policy = mpx.get_policy("p=half,c=half,g=half,r=half")
        assert fields(policy) == (BF16, None, BF16, BF16, BF16)
        assert policy.resolved_compute_dtype() == BF16


dtypes = st.sampled_from([F16, BF16, F32, F64])
optional_dtypes = st.none() | dtypes


@hypothesis.given(
    dtypes, optional_dtypes, dtypes, optional_dtypes, optional_dtypes, st.booleans()
)
def test_string_of_a_policy_gives_it_back(param, compute, output, grad, reduce, bf16):
    keep = (eqx.nn.LayerNorm, "head")
    policy = mpx.Policy(
        param, compute, output, grad_dtype=grad, reduce_dtype=reduce, keep=keep
    )
    with mpx.half_precision("bf16" if bf16 else "f16"):
        again = mpx.get_policy(str(policy), keep=keep)
    assert again == policy
    assert hash(again) == hash(policy)
    assert str(again) == str(policy)


def test_string_uses_short_names_and_leaves_out_what_is_not_set():
    assert str(mpx.Policy()) == "p=f32,c=half,o=f32"
    policy = mpx.Policy("f64", "bf16", "f16", grad_dtype="f32", reduce_dtype="bf16")
    assert str(policy) == "p=f64,c=bf16,o=f16,g=f32,r=bf16"


BAD_PARTS = {
    "": "p=",
    "x=f32": "x=f32",
    "p=f32,q=bf16": "q=bf16",
    "p=": "p=",
    "=f32": "=f32",
    "P=f32": "P=f32",
    "p=f32,": "",
    "p=f32,bf16": "bf16",
    "p=f32,,c=f16": "",
}
BAD_DTYPES = {
    "nonsense": "nonsense",
    "f8": "f8",  # f64 for NumPy
    "p=int32": "int32",
    "c=e4m3": "e4m3",
    "p=f32;c=f16": "f32;c=f16",
    "p=f32=f16": "f32=f16",
}


@pytest.mark.parametrize(("text", "part"), BAD_PARTS.items(), ids=repr)
def test_error_quotes_the_part_that_is_not_understood(text, part):
    message = (
        f"{part!r} in the policy {text!r} is not understood. Write `key=dtype` with a key "
        "among p, c, o, g, r (or params, compute, output, grad, reduce), for example "
        '"p=f32,c=bf16,o=f32".'
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        mpx.get_policy(text)


@pytest.mark.parametrize(("text", "dtype"), BAD_DTYPES.items(), ids=repr)
def test_error_quotes_the_unknown_dtype(text, dtype):
    message = (
        f"Unknown dtype {dtype!r} in the policy {text!r}. Use f16, bf16, f32, f64, their "
        "long names, `half` or `full`; or a whole policy such as "
        '"bf16-mixed", which is "p=f32,c=bf16,o=f32".'
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        mpx.get_policy(text)


@pytest.mark.parametrize("text", ["p=f32,p=f16", "p=f32,c=f16,p=f32"])
def test_error_names_the_key_that_is_given_twice(text):
    message = f"The policy {text!r} gives `p` twice."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        mpx.get_policy(text)
    with pytest.raises(ValueError, match="gives `params` twice"):
        mpx.get_policy("p=f32,params=f32")


@pytest.mark.parametrize(
    "name",
    ["param_dtype", "compute_dtype", "output_dtype", "grad_dtype", "reduce_dtype"],
)
@pytest.mark.parametrize("wrong", ["int32", "f8", jnp.int8, jnp.float8_e4m3fn], ids=str)
def test_error_names_the_field_with_a_wrong_dtype(name, wrong):
    message = (
        f"`{name}` must be a floating dtype of at least 16 bits (f16, bf16, f32 or f64), "
        f"but {wrong!r} was given."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        mpx.Policy(**{name: wrong})


def test_storage_and_output_dtypes_cannot_be_left_open():
    # NumPy would take `None` for f64. Without the type checks of the test run.
    make = inspect.unwrap(mpx.Policy.__init__)
    for name in ("param_dtype", "output_dtype"):
        with pytest.raises((TypeError, ValueError)):
            make(object.__new__(mpx.Policy), **{name: None})


@pytest.mark.parametrize("policy", [None, 3, jnp.float16, ("p=f32",)])
@pytest.mark.usefixtures("untyped")
def test_error_tells_what_a_policy_can_be(policy):
    message = (
        '`policy` must be an `mpx.Policy` or a string such as "p=f32,c=bf16,o=f32", but '
        f"{policy!r} was given."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        inspect.unwrap(mpx.get_policy)(policy)


def test_get_policy_of_a_policy_is_that_policy():
    policy = mpx.Policy(keep="x")
    assert mpx.get_policy(policy) is policy
    with pytest.raises(TypeError, match="`keep` goes with a string"):
        mpx.get_policy(policy, keep="y")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("bf16-mixed", "bfloat16"), ("mixed_float16", "float16"), ("fp16", "float16")],
)
def test_amp_takes_the_names_of_other_frameworks(name, dtype):
    program = jax.make_jaxpr(mpx.amp(jnp.dot, dtype=name))(*[jnp.ones((8, 8))] * 2)
    assert f"{'bf16' if dtype == 'bfloat16' else 'f16'}[8,8]" in str(program)


# --- a static value --------------------------------------------------------------------


def test_policies_compare_and_hash_by_value():
    first = mpx.Policy("f32", "bf16", "f32", keep=[eqx.nn.LayerNorm, "norm"])
    same = mpx.Policy(F32, jnp.bfloat16, "float32", keep=(eqx.nn.LayerNorm, "norm"))
    assert first == same
    assert hash(first) == hash(same)
    others = [
        mpx.Policy("f32", "f16", "f32", keep=first.keep),
        mpx.Policy("f32", "bf16", "f32"),
        mpx.Policy("f32", "bf16", "f32", grad_dtype="f32", keep=first.keep),
        first.with_output_dtype("bf16"),
    ]
    assert len({first, same, *others}) == 5


def test_policy_cannot_be_changed_but_copied_and_pickled():
    policy = mpx.Policy(compute_dtype="bf16", keep=[eqx.nn.LayerNorm, "norm"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.param_dtype = F16  # pyright: ignore[reportAttributeAccessIssue]
    assert pickle.loads(pickle.dumps(policy)) == policy
    changed = dataclasses.replace(policy, compute_dtype="f16")
    assert fields(changed) == (F32, F16, F32, None, None)
    assert changed.keep == policy.keep


def test_with_output_dtype_changes_only_the_output():
    policy = mpx.Policy(
        "f64", "bf16", "f32", grad_dtype="f16", reduce_dtype="f32", keep="x"
    )
    changed = policy.with_output_dtype("bf16")
    assert fields(changed) == (F64, BF16, BF16, F16, F32)
    assert changed.keep == ("x",)
    with pytest.raises(ValueError, match="`output_dtype` must be a floating dtype"):
        policy.with_output_dtype("int8")


def test_policy_is_a_static_argument_of_jit():
    traces = []

    def forward(policy, x):
        traces.append(policy)
        return policy.cast_to_compute(x)

    compiled = jax.jit(forward, static_argnums=0)
    x = jnp.ones(2)
    assert compiled(mpx.Policy(compute_dtype="bf16"), x).dtype == BF16
    assert compiled(mpx.get_policy("p=f32,c=bf16,o=f32"), x).dtype == BF16
    assert len(traces) == 1  # equal policies share a program
    assert compiled(mpx.Policy(compute_dtype="f16"), x).dtype == F16
    assert len(traces) == 2


# --- casts -----------------------------------------------------------------------------


def test_policy_casts_floating_leaves_to_its_dtypes():
    policy = mpx.Policy("bf16", "f16", "f32")
    tree = {
        "w": jnp.ones(2),
        "h": jnp.ones(2, BF16),
        "np": np.ones(2),
        "n": 3,
        "k": KEY,
    }
    for cast, dtype in [
        (policy.cast_to_param, BF16),
        (policy.cast_to_compute, F16),
        (policy.cast_to_output, F32),
    ]:
        after = cast(tree)
        assert [after[name].dtype for name in ("w", "h", "np")] == [dtype] * 3
        assert after["n"] is tree["n"]
        assert after["k"] is tree["k"]
        assert cast({"none": None, "s": "x"}) == {"none": None, "s": "x"}


def test_shapes_without_data_can_be_cast():
    policy = mpx.Policy(compute_dtype="bf16", keep="norm")
    struct = jax.ShapeDtypeStruct((2,), F32)
    low = policy.cast_to_compute({"w": struct, "norm": struct})
    assert low == {"w": jax.ShapeDtypeStruct((2,), BF16), "norm": struct}


@pytest.mark.parametrize(
    "scaling", [mpx.DynamicLossScaling(2.0**15), mpx.StaticLossScaling(3.0)]
)
def test_loss_scaling_keeps_f32_under_every_cast(scaling):
    policy = mpx.Policy("bf16", "f16", "bf16")
    state = {"w": jnp.ones(2), "scaling": scaling}
    for cast in (policy.cast_to_param, policy.cast_to_compute, policy.cast_to_output):
        assert cast(state)["scaling"] is scaling
