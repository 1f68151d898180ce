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
        "check_processes",
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
        "Report",
        "RunSummary",
        "Skip",
        "Watch",
        "advise",
        "collectives",
        "doctor",
        "explain",
        "exponent_stats",
        "fp8_check",
        "memory",
        "observe",
        "plot_exponents",
        "report",
        "residual_errors",
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
        "flash_muon",
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
        "Int8",
        "MXFP8",
        "NVFP4",
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
    "Released",
    "Report",
    "RunSummary",
    "Skip",
    "SkipNonfiniteState",
    "Watch",
]
# Thin names for users of other libraries, documented there: one example for each module.
COMPAT = ["mpx.compat.flashoptim", "mpx.compat.jaxamp", "mpx.compat.jmp"]


def public_names(module):
    """Reads the file, since `vars(module)` grows when a submodule is imported."""
    path, names = pathlib.Path(module.__file__), []
    reexports = path.name == "__init__.py"
    body = ast.parse(path.read_text()).body
    # What is imported when it is first used is listed for type checkers.
    lazy = [child for node in body if isinstance(node, ast.If) for child in node.body]
    for node in [*body, *lazy]:
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
    # Relatives share their arguments, which one of them describes.
    for name in re.findall(r"arguments see `(\w+)`", doc):
        doc += "\n" + documentation(getattr(inspect.getmodule(function), name))
    return doc


def test_public_names_are_pinned():
    found = {name: public_names(importlib.import_module(name)) for name in PUBLIC}
    assert found == PUBLIC


def test_live_constants_can_be_read():
    assert all(getattr(mpx, name) is not None for name in LIVE)


def test_unknown_attribute_is_an_error():
    with pytest.raises(AttributeError, match="nonsense"):
        _ = mpx.nonsense  # pyright: ignore[reportAttributeAccessIssue]


# One test each, not one for every name: to collect and report 400 takes seconds.
def test_public_callables_are_typed_and_documented():
    functions = CALLABLES | METHODS
    assert len(functions) > 100
    untyped = [name for name, function in functions.items() if not is_typed(function)]
    assert not untyped
    summaries = {k: documentation(f).partition("\n")[0] for k, f in functions.items()}
    assert not [name for name, text in summaries.items() if not text.endswith(".")]


def test_every_parameter_is_documented():
    missing = [
        f"{name}({parameter})"
        for name, function in OWN.items()
        for parameter in inspect.signature(function).parameters
        if not re.search(
            rf"^ *\**{parameter}( \(.*\))?: ", documentation(function), re.M
        )
    ]
    assert not missing


def test_public_callables_show_an_example():
    docs = {name: documentation(f).partition("Examples:\n") for name, f in MADE.items()}
    docs |= {name: ("", "", importlib.import_module(name).__doc__) for name in COMPAT}
    assert not [name for name, (*_, text) in docs.items() if ">>> " not in (text or "")]
