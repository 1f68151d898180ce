"""The public names: pinned, typed, documented and shown in an example."""

import ast
import importlib
import inspect
import pathlib
import re

import pytest

import mpx

# A change here is a change of the API: it needs a sentence in the changelog.
PUBLIC = {
    "mpx": [
        "AmpRules",
        "DynamicLossScaling",
        "ErrorFeedback",
        "GradResult",
        "LossScaling",
        "NoLossScaling",
        "Policy",
        "StaticLossScaling",
        "accumulate",
        "all_finite",
        "amp",
        "amp_low",
        "amp_stop",
        "calculate_scaled_grad",
        "cast_function",
        "cast_like",
        "cast_to_bfloat16",
        "cast_to_float16",
        "cast_to_float32",
        "cast_to_full_precision",
        "cast_to_half_precision",
        "cast_tree",
        "checkpoint",
        "compat",
        "cond_update",
        "default_loss_scaling",
        "filter_grad",
        "filter_value_and_grad",
        "force_full_precision",
        "fp8",
        "fsdp_shardings",
        "get_policy",
        "half_precision",
        "half_precision_datatype",
        "inspect",
        "linear_cross_entropy",
        "optim",
        "optimizer_update",
        "recipes",
        "scaled",
        "select_tree",
        "set_half_precision_datatype",
        "testing",
        "value_and_grad",
    ],
    "mpx.checkpoint": [
        "Checkpointer",
        "from_f32",
        "restore",
        "save",
        "to_f32",
    ],
    "mpx.inspect": [
        "Advice",
        "AmpView",
        "Candidate",
        "Collective",
        "Compiled",
        "Diagnosis",
        "Explanation",
        "ExponentStats",
        "Finding",
        "Fp8Check",
        "Fp8View",
        "GroupAdvice",
        "Memory",
        "Observation",
        "PrecisionPolicy",
        "Proposal",
        "Report",
        "RunSummary",
        "Skip",
        "StateBytes",
        "Tuning",
        "Watch",
        "advise",
        "check_processes",
        "collectives",
        "doctor",
        "explain",
        "exponent_stats",
        "fp8_check",
        "memory",
        "observe",
        "plot_exponents",
        "report",
        "tune",
        "watch",
    ],
    "mpx.optim": [
        "Clip",
        "Compression",
        "FlashOptimizer",
        "FlashState",
        "MasterWeights",
        "MasterWeightsState",
        "ParamGroup",
        "Released",
        "SkipNonfiniteState",
        "clip_scale",
        "flash_adam",
        "flash_adamw",
        "flash_lion",
        "flash_sgd",
        "flash_sgdw",
        "from_master",
        "master_params",
        "master_weights",
        "release",
        "skip_nonfinite",
    ],
    "mpx.recipes": [
        "CurrentScaling",
        "DelayedScaling",
        "Fp8State",
        "MXFP8",
        "StaticScaling",
    ],
}
# Computed when read, by the module's `__getattr__`.
LIVE = ["BFLOAT16_MAX", "FLOAT16_MAX", "HALF_PRECISION_DATATYPE"]
# What users receive but do not make themselves: no example is needed.
RECEIVED = [
    "Advice",
    "AmpView",
    "Candidate",
    "Clip",
    "Compiled",
    "Diagnosis",
    "Explanation",
    "ExponentStats",
    "Finding",
    "FlashOptimizer",
    "FlashState",
    "MasterWeights",
    "Fp8Check",
    "Fp8State",
    "Fp8View",
    "GroupAdvice",
    "LossScaling",
    "MasterWeightsState",
    "Memory",
    "Observation",
    "Proposal",
    "Released",
    "Report",
    "RunSummary",
    "Skip",
    "SkipNonfiniteState",
    "StateBytes",
    "Tuning",
    "Watch",
]
# Thin names for users of other libraries, documented there: one example for each module.
COMPAT = ["mpx.compat.flashoptim", "mpx.compat.jaxamp", "mpx.compat.jmp"]


def public_names(module):
    """Reads the file, since `vars(module)` grows when a submodule is imported."""
    path, names = pathlib.Path(module.__file__), []
    reexports = path.name == "__init__.py"
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            names += [a.name for a in node.names if reexports or a.asname == a.name]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
    return sorted({name for name in names if not name.startswith("_")})


def public_callables(*module_names):
    found = {}
    for module_name in module_names:
        module = importlib.import_module(module_name)
        for name in public_names(module):
            if callable(getattr(module, name)):
                found[f"{module_name}.{name}"] = getattr(module, name)
    return found


def public_methods(classes):
    return {
        f"{class_name}.{name}": getattr(cls, name)
        for class_name, cls in classes.items()
        if inspect.isclass(cls)
        for name in vars(cls)
        if not name.startswith("_") and inspect.isroutine(getattr(cls, name))
    }


OWN = public_callables(*PUBLIC, "mpx.testing")
MADE = {k: v for k, v in OWN.items() if k.rpartition(".")[2] not in RECEIVED}
CALLABLES = OWN | public_callables(*COMPAT)
METHODS = public_methods(CALLABLES)


def each(functions):
    return pytest.mark.parametrize("function", functions.values(), ids=functions)


def is_typed(function):
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.name != "self"]
    returns = inspect.isclass(function) or (
        signature.return_annotation is not signature.empty
    )
    return returns and all(p.annotation is not p.empty for p in parameters)


def documentation(function):
    doc = inspect.getdoc(function) or ""
    if inspect.isclass(function):
        doc += "\n" + (inspect.getdoc(function.__init__) or "")
    return doc


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_pinned(module):
    assert public_names(importlib.import_module(module)) == PUBLIC[module]


@pytest.mark.parametrize("name", LIVE)
def test_live_constant_can_be_read(name):
    assert getattr(mpx, name) is not None


def test_unknown_attribute_is_an_error():
    with pytest.raises(AttributeError, match="nonsense"):
        _ = mpx.nonsense  # pyright: ignore[reportAttributeAccessIssue]


@each(CALLABLES | METHODS)
def test_public_callable_is_typed_and_documented(function):
    assert is_typed(function), inspect.signature(function)
    summary = documentation(function).partition("\n")[0]
    assert summary.endswith("."), summary


@each(OWN)
def test_every_parameter_is_documented(function):
    doc = documentation(function)
    missing = [
        name
        for name in inspect.signature(function).parameters
        if not re.search(rf"^ *\**{name}( \(.*\))?: ", doc, re.M)
    ]
    assert not missing


@each(MADE)
def test_public_callable_shows_an_example(function):
    _, found, example = documentation(function).partition("Examples:\n")
    assert found
    assert ">>> " in example


@pytest.mark.parametrize("name", COMPAT)
def test_compat_module_shows_an_example(name):
    assert ">>> " in (importlib.import_module(name).__doc__ or "")
