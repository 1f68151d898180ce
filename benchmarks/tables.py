"""Writes the tables and figures of README.md and docs/ from what was measured.

    python benchmarks/tables.py

`results/` has the JSON of the runs, each with its command: run that on your machine with
`--json benchmarks/results/NAME.json`, then this script. A table stands between two comments
in its page. tests/test_docs_tables.py compares pages and JSON.
"""

import json
import pathlib
import re
import statistics

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent
IMAGES = ROOT / "docs" / "images"
RULES = {"adamw": "AdamW", "adam": "Adam", "lion": "Lion", "sgd": "SGD, momentum"}
IMPLEMENTATIONS = {
    "torch": "PyTorch, fused, f32",
    "optax": "optax, f32",
    "flashoptim-jax": "flashoptim-jax",
    "mpx": "`mpx.optim`",
}
MODES = {
    "f32": "f32 (matmuls in TF32)",
    "own": "the model's own bf16 option",
    "amp": "`mpx.amp(loss)`",
    "fp8": "`mpx.fp8(mpx.amp(loss))`",
    "flash": "`mpx.amp`, bf16 weights, `mpx.optim.flash_adamw`",
    "all": "`mpx.fp8(mpx.amp)`, bf16 weights, `mpx.optim.flash_adamw`",
    "release": "the same with `mpx.optim.release`",
}
BY_HAND = "parameters and inputs cast to bf16"  # where a model has no option
UNTOUCHED = {
    "nanodo-43m": "tokens",
    "nanodo-405m": "tokens",
    "nanodo-2.5b": "tokens",
    "big_vision-vit-b": "images",
    "bonsai-qwen3": "tokens",
    "vmoe-b": "images",
    "bonsai-convnext": "images",
    "bonsai-unet": "images",
}


def load(*names):
    """Returns the cases of runs, and their commands and machines as sentences."""
    cases, sentences = {}, []
    for name in names:
        text = (HERE / "results" / f"{name}.json").read_text(encoding="utf-8")
        found = json.loads(text)
        machine = found["machine"]
        where = f"{machine['device']}, jax {machine['jax']}, Python {machine['python']}"
        cases |= found["cases"]
        sentences.append(f"`{found['command']}` on one {where}.")
    return cases, " ".join(sentences)


def table(head, rows, texts=1):
    """Returns a table of Markdown: columns of texts, then of numbers, which are at the right."""
    lines = [head, [*["---"] * texts, *["---:"] * (len(head) - texts)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def ms(record):
    return f"{record['ms']:.1f}"


def memory(record):
    """Returns the bytes of a step: to choose a convolution may take more than to run it."""
    peak = record["peak_bytes"]
    return min(peak, record.get("compiled_bytes", peak))


def giga(record):
    return f"{memory(record) / 1e9:.1f}"


def gains(labels, times, digits=1):
    """Returns a line for each time: how much faster it is than the first one."""
    pairs = zip(labels, times, strict=True)
    return [[label, f"{time:.{digits}f}", f"{times[0] / time:.2f}×"]
            for label, time in pairs]  # fmt: skip


def loss(record):
    values = record["losses"].values()
    return f"{statistics.mean(values):.4f}" if values else "–"


def seeds(record):
    """Returns a sentence about how far the seeds are apart."""
    values = record["losses"].values()
    apart = max(values, default=0) - min(values, default=0)
    return f"The seeds of f32 are {apart:.3f} apart. " if values else ""


def of_model(model):
    """Returns the modes of a model that were measured, in their order, and the commands.

    Each has the rate of a large matmul in its run: one H200 is 10 % faster than another.
    """
    found, sentences = {}, []
    for name in (model, f"{model}-more"):
        if not (HERE / "results" / f"{name}.json").exists():
            continue
        cases, sentence = load(name)
        rate = {"rate": cases["rate"]["rate"]}
        found |= {case: record | rate for case, record in cases.items()}
        sentences.append(sentence)
    names = {mode: f"{model}:{mode}" for mode in MODES}
    modes = {mode: found[name] for mode, name in names.items() if name in found}
    return modes, " ".join(sentences)


# --- the tables -------------------------------------------------------------------------


def readme():
    """The first table: two models that were not changed."""
    (language, command), vit = of_model("nanodo-405m"), load(*VIT_STEPS)[0]
    # Without the bf16 gradient.
    less, more = (optimizer_points()[x, "adamw"][1] - 2 for x in ("mpx", "optax"))
    saved = f"{less:.1f} bytes a parameter instead of {more:.0f}"
    labels = {
        "f32": (MODES["f32"], "f32"),
        "own": ("the model's own bf16 option; the ViT cast by hand", "bf16-hand"),
        "amp": ("**`mpx.amp(loss)`**", "amp-bf16"),
        "flash": (f"and `mpx.optim.flash_adamw`: {saved}", "flash"),
        "all": ("and `mpx.fp8`", "all"),
    }
    rows = []
    for mode, (label, other) in labels.items():
        records = language[mode], vit[other]
        cells = [cell(record) for record in records for cell in (ms, giga)]
        bold = [f"**{x}**" if mode == "amp" else x for x in cells]
        rows.append([label, *bold[:2], loss(language[mode]), *bold[2:]])
    head = ["", "nanodo: ms", "GB", "loss, mean of 3 seeds", "ViT: ms", "GB"]
    machine = command.rpartition(" on one ")[2]
    return f"{table(head, rows)}\n\n{seeds(language['f32'])}On one {machine}"


def untouched():
    """Every mode of the models of other people."""
    parts = []
    for model, items in UNTOUCHED.items():
        (modes, command), rows = of_model(model), []
        for mode, record in modes.items():
            speed = record["items"] / record["ms"]
            share = record["flops"] / record["ms"] * 1e3 / record["rate"]
            has_none = mode == "own" and model.startswith("bonsai")
            label = BY_HAND if has_none else MODES[mode]
            rows.append([label, ms(record), f"{speed:.1f}", giga(record),
                         f"{share:.0%}", loss(record)])  # fmt: skip
        head = [model, "ms", f"k {items}/s", "peak GB", "of the bf16 rate", "loss"]
        first = next(iter(modes.values()))
        if not first["losses"]:
            head, *rows = (row[:-1] for row in (head, *rows))
        rates = dict.fromkeys(f"{x['rate'] / 1e12:.0f}" for x in modes.values())
        text = f"A bf16 matmul of 8192³ reached {' and '.join(rates)} TFLOP/s. "
        parts += [table(head, rows), f"{text}{seeds(first)}{command}"]
    return "\n\n".join(parts)


def largest():
    """The largest batches of an H200, as the compiler plans memory."""
    names = [f"largest{x}" for x in ("-43m", "", "-2.5b", "-more", "-convnext")]
    cases, _ = load(*names)
    labels = MODES | {
        "own": "the model's own bf16 option, or cast by hand",
        "residuals": '`mpx.amp(loss, residuals="int8")`',
    }
    modes = dict.fromkeys(case.partition(":")[2] for case in cases)
    rows = [
        [labels[mode], *(cases[f"{model}:{mode}"]["largest"] for model in UNTOUCHED)]
        for mode in modes
    ]
    # Whichever machine compiled it.
    commands = [load(name)[1].partition(" on one ")[0] for name in names]
    return "\n\n".join([table(["", *UNTOUCHED], rows), *commands])


def profile():
    """What a step of nanodo 405M spends its time on."""
    cases, command = load("nanodo-405m-profile")
    record = cases["nanodo-405m:amp"]
    kinds = {
        "matmuls": "gemm|nvjet|cutlass",
        "attention, in cuDNN": "cudnn",
        "norms, gelu, AdamW, casts, copies": "",
    }
    times = dict.fromkeys(kinds, 0.0)
    for kernel, _, time in record["kernels"]:
        times[next(x for x, names in kinds.items() if re.search(names, kernel))] += time
    times["between kernels"] = record["ms"] - sum(times.values())
    rows = [[kind, f"{time:.1f}", f"{time / record['ms']:.0%}"]
            for kind, time in times.items()]  # fmt: skip
    flops = 6 * record["params"] * record["items"]
    rate = f"The matmuls run at {flops / times['matmuls'] / 1e9:.0f} TFLOP/s. "
    wide = of_model("nanodo-405m")[0]["amp"]["rate"]
    matmuls, attention, *rest = times.values()
    left = record["flops"] / (0.75 * wide) * 1e3 - matmuls - attention
    limit = (
        "With 75 % of the bf16 rate the last two lines would take "
        f"{left:.1f} ms, not {sum(rest):.1f}. "
    )
    head = ["`mpx.amp(loss)`, nanodo-405m", "ms", "share"]
    return f"{table(head, rows)}\n\n{rate}{limit}{command}"


def flags():
    """The same steps with two choices of XLA switched off."""
    (plain, command), (other, same) = map(
        load, ("nanodo-405m-plain", "nanodo-405m-flags")
    )
    rows = [
        [
            MODES[case.partition(":")[2]],
            ms(plain[case]),
            ms(other[case]),
            f"{other[case]['ms'] / plain[case]['ms']:.3f}",
        ]
        for case in other
        if case != "rate"
    ]
    head = ["nanodo-405m", "ms", "ms with the flags", "×"]
    return f"{table(head, rows)}\n\n{command}\n\n{same}"


VIT_STEPS = "step-vit-f32", "step-vit"  # the second is newer, without the slow lines


def steps():
    """A training step of ViT-Base beside the same by hand."""
    cases, _ = load(*VIT_STEPS)
    commands = [load(name)[1] for name in VIT_STEPS]
    labels = {
        "f32": "f32 (matmuls in TF32)",
        "bf16-hand": "by hand: cast to bf16",
        "cudnn-hand": "by hand: bf16, attention in cuDNN",
        "amp-bf16": "`mpx.amp(loss)`",
        "flash": "`mpx.amp(loss)`, bf16 parameters, `flash_adamw`",
        "all": "`mpx.fp8(mpx.amp(loss))`, bf16 parameters, `flash_adamw`",
    }
    hand = cases["cudnn-hand"]["ms"]
    rows = [
        [label, ms(cases[mode]), f"{cases[mode]['ms'] / hand:.3f}", giga(cases[mode])]
        for mode, label in labels.items()
    ]
    head = ["ViT-Base/16 at 224², Equinox, batch 128", "ms", "× cuDNN", "peak GB"]
    rest = f"The first two lines: {commands[0]} The others: {commands[1]}"
    return f"{table(head, rows)}\n\n{rest}"


PAPER = {
    "f32": "f32 (matmuls in TF32)",
    "hand": "cast to f16 by hand, no check",
    "paper": "the authors' package",
    "policy": "the same lines with `mpx`",
    "amp": "`mpx.amp`, `mpx.value_and_grad`",
    "torch": "PyTorch: autocast, `GradScaler`, `torch.compile`",
}
PAPER_MODELS = {
    "vit-desktop": ("the small ViT of the paper", ("512", "2048")),
    "vit-base": ("ViT-Base/16 at 224²", ("128", "256")),
}


def paper_runs(model):
    """Returns by mode what was measured for each batch size, and the commands."""
    cases, commands = load(*(f"paper-{model}{part}" for part in ("", "-amp", "-torch")))
    return {mode: cases[f"{model}:{mode}"] for mode in PAPER}, commands


def paper():
    """The two ViTs of the paper over batch sizes."""
    parts = []
    for model, (name, batches) in PAPER_MODELS.items():
        modes, commands = paper_runs(model)
        rows = []
        for mode, label in PAPER.items():
            found = [modes[mode][batch] for batch in batches]
            rows.append([label, *map(ms, found), *map(giga, found)])
        units = [
            f"{unit}, {batch} images" for unit in ("ms", "GB") for batch in batches
        ]
        parts += [table([name, *units], rows), commands]
    return "\n\n".join(parts)


def fp8():
    """A wide language model in fp8 beside bf16."""
    cases, command = load("fp8")
    names = {
        "lm": "language model, width 4096, 4 layers, 16384 tokens",
        "lm-accumulate": "the same in four microbatches, `mpx.accumulate`",
    }
    rows = []
    for name, label in names.items():
        low, high = cases[f"{name}:fp8"], cases[f"{name}:bf16"]
        rows.append([label, ms(high), ms(low), f"{high['ms'] / low['ms']:.2f}×"])
    return f"{table(['', 'bf16 ms', 'fp8 ms', 'gain'], rows)}\n\n{command}"


def fp8_layers():
    """One MLP block in fp8 with each recipe."""
    cases, command = load("fp8-layers")
    labels = {
        "mlp:bf16": "bf16",
        "mlp:fp8": "`CurrentScaling`",
        "mlp:fp8-delayed": "`DelayedScaling`",
        "mlp:fp8-static": "`StaticScaling`",
        "mlp:fp8-row": '`CurrentScaling(granularity="row")`',
    }
    rows = gains(labels.values(), [cases[case]["ms"] for case in labels])
    head = ["MLP 4096 → 16384 → 4096, 16384 tokens", "ms", "gain"]
    return f"{table(head, rows)}\n\n{command}"


def int8():
    """A matmul and an MLP block in int8."""
    cases, command = load("fp8-int8")
    times = [row[1] for row in cases["int8:all"]["rows"]]
    times += [cases[f"int8-mlp:{mode}"]["ms"] for mode in ("bf16", "int8")]
    labels = [
        "matmul of 8192³, bf16",
        "int8, from integers",
        "int8, with the rounding of both operands",
        "MLP block as above, forward and backward, bf16",
        "`Int8()`",
    ]
    parts = slice(3), slice(3, None)  # the matmul and the block
    rows = [row for part in parts for row in gains(labels[part], times[part], 2)]
    return f"{table(['', 'ms', 'gain'], rows)}\n\n{command}"


def text():
    """Losses on held-out text, over seeds."""
    parts = []
    labels = {
        "int8": "`Int8()`",
        "nvfp4": "`NVFP4(emulate=True)`",
        "no-hadamard": "the same with `hadamard=False`",
        "no-2d": 'the same with `weight_blocks="1d"`',
        "no-stochastic": "the same with `stochastic=False`",
        "flash-muon": "`flash_muon`",
    }
    head = ["", "seed 0", "seed 1", "seed 2", "mean", "beside the first line"]
    for name, bases in (
        ("text", {"bf16": "bf16, AdamW", "muon": "Muon of optax, f32"}),
        ("text-nvfp4", {"bf16": "bf16, AdamW"}),
    ):
        cases, command = load(name)
        rows, base = [], None
        for mode in cases:
            ends = [list(x.values())[-1] for x in cases[mode]["curves"].values()]
            mean = statistics.mean(ends)
            base = mean if mode in bases else base
            apart = "" if mode in bases else f"{mean - (base or 0):+.3f}"
            if mode in bases:
                apart = f"seeds {max(ends) - min(ends):.3f} apart"
            label = bases.get(mode) or labels[mode]
            rows.append([label, *(f"{x:.3f}" for x in (*ends, mean)), apart])
        parts += [table(head, rows), command]
    return "\n\n".join(parts)


def muon():
    """Muon on a layer of Qwen3-8B."""
    cases, command = load("optim-muon")
    labels = {
        "optax": "`optax.contrib.muon`, f32",
        "mpx": "`mpx.optim.flash_muon`",
        "muon-fp8": "the same, Newton-Schulz steps in fp8",
    }
    records = [cases[f"{mode}:qwen3-layer"] for mode in labels]
    rows = gains(labels.values(), [record["ms"] for record in records])
    for row, record in zip(rows, records, strict=True):
        sizes = (record[f"{x}_bytes"] / record["params"] for x in ("resident", "peak"))
        row += [f"{size:.1f}" for size in sizes]
    head = ["a layer of Qwen3-8B", "ms", "gain", "B a parameter", "at the peak"]
    return f"{table(head, rows)}\n\n{command}"


def residuals():
    """Activations in 8 bits beside those of amp."""
    rows, commands = [], []
    for name, label, modes in (
        ("step-vit", "ViT-Base as above", ("amp-bf16", "residuals")),
        ("nanodo-405m-residuals", "nanodo 405M",
         ("nanodo-405m:amp", "nanodo-405m:residuals")),
    ):  # fmt: skip
        cases, command = load(name)
        plain, coded = (cases[mode] for mode in modes)
        shares = coded["ms"] / plain["ms"], memory(coded) / memory(plain)
        rows.append([label, ms(plain), ms(coded), giga(plain), giga(coded),
                     *(f"{share:.2f}" for share in shares)])  # fmt: skip
        commands.append(command)
    head = ["", "ms, `amp`", 'ms, `residuals="int8"`', "peak GB, `amp`",
            'peak GB, `residuals="int8"`', "time ×", "peak ×"]  # fmt: skip
    return "\n\n".join([table(head, rows), *commands])


def logits():
    """Cross entropy of a large vocabulary."""
    cases, command = load("logits")
    labels = {"optax": "optax", "linear_cross_entropy": "`mpx.linear_cross_entropy`"}
    rows = []
    for name, label in labels.items():
        record = cases[f"llama3:{name}"]
        size, error = record["temp_bytes"] / 1e9, record["weight_error"]
        rows.append([label, ms(record), f"{size:.1f}", f"{error:.1e}"])
    head = ["8192 tokens, width 4096, vocabulary 128256", "ms", "GB",
            "error of the weight's gradient"]  # fmt: skip
    return f"{table(head, rows)}\n\n{command}"


def optimizer_points():
    """Returns by implementation and rule the time in µs and the bytes of a parameter."""
    points = {}
    for rule in RULES:
        for case, record in load(f"optim-{rule}")[0].items():
            implementation = case.partition(":")[0]
            each = record["resident_bytes"] / record["params"]
            points[implementation, rule] = record["ms"] * 1e3, each
    return points


def optimizers():
    """The optimizers on a layer of Qwen3-8B."""
    points = optimizer_points()
    rows = []
    for implementation, label in IMPLEMENTATIONS.items():
        found = [points.get((implementation, rule)) for rule in RULES]
        if any(found):
            rows.append([label, *("–" if x is None else f"{x[0]:.0f} µs, {x[1]:.1f} B"
                                  for x in found)])  # fmt: skip
    head = ["a layer of Qwen3-8B, 193M parameters", *RULES.values()]
    return f"{table(head, rows)}\n\n{load('optim-adamw')[1]}"


def arrays():
    """AdamW on one array and on many."""
    cases, command = load("optim-arrays")
    names = {"one": "one array, 4096 × 12288", "many": "64 arrays of 1024 × 1024"}
    rows = []
    for name, label in names.items():
        add, optax, own = (cases[f"{mode}:{name}"] for mode in ("add", "optax", "mpx"))
        times = [f"{record['ms'] * 1e3:.0f} µs" for record in (add, optax, own)]
        rate = f"{own['bytes'] / own['ms'] / 1e9:.2f} TB/s"
        rows.append([label, *times, rate, f"{own['ms'] / add['ms']:.2f}"])
    head = ["", "add", "optax, f32", "`flash_adamw`", "its rate", "× add"]
    return f"{table(head, rows)}\n\n{command}"


def release():
    """Gradient release of layers in a scan."""
    cases, command = load("release")
    rows = []
    for name in ("scan and remat", "scan"):
        pair = [cases[f"{name}: {way}"] for way in ("ordinary", "released")]
        cells = [f"{x[key]:.2f}" for key in ("bytes", "ms") for x in pair]
        rows.append([name, *cells])
    head = ["layers", "bytes a parameter", "`release`", "ms", "`release`"]
    return f"{table(head, rows)}\n\n{command}"


def experts():
    """Groups of tokens, each with its own matrix."""
    cases, command = load("experts", "experts-more")
    sizes = {
        "many experts": "32 experts, 2048 → 1024, 16384 tokens",
        "large experts": "8 experts, 4096 → 8192, 32768 tokens",
    }
    ways = {"ragged_dot, XLA": "`lax.ragged_dot` in bf16, by XLA", "amp": "under `amp`"}
    rows = []
    for case, record in cases.items():
        groups, _, way = case.partition(": ")
        size, kind = groups.split(", ")
        if way in ways:
            share = record["ms"] / cases[f"{groups}: dense, bf16"]["ms"]
            cells = [f"{sizes[size]}, {kind}", ways[way]]
            rows.append([*cells, f"{record['ms']:.2f}", f"{share:.2f}"])
    return f"{table(['', 'way', 'ms', '× dense'], rows, 2)}\n\n{command}"


def skipping():
    """What it costs to check a step and to skip it."""
    cases, command = load("step-select")
    labels = {
        "f16-hand": ("by hand, f16, static scale, no check", "f16-hand"),
        "f16-hand-check": ("by hand, f16, gradients checked", "f16-hand"),
        "mpx-f16": ('mpx, f16, `DynamicLossScaling`, `skip="select"`', "f16-hand"),
        "bf16-hand": ("by hand, bf16, no check", "bf16-hand"),
        "mpx-bf16": ('mpx, bf16, `skip="select"`', "bf16-hand"),
    }
    rows = []
    for mode, (label, hand) in labels.items():
        time = cases[mode]["ms"]
        rows.append([label, f"{time:.2f}", f"{time / cases[hand]['ms']:.3f}"])
    parts = [table(["a step of ViT-Base", "ms", "× by hand"], rows), command]
    cases, command = load("optim-select")
    plain, checked = (cases[f"{x}:gpt-1b"] for x in ("chain", "chain-select"))
    rows = [["optax, no check", f"{plain['ms']:.2f}", "1.000", "–"]]
    times = [f"{checked[x]:.2f}" for x in ("ms", "skipped_ms")]
    share = f"{checked['ms'] / plain['ms']:.3f}"
    rows.append(['`skip="select"`', times[0], share, times[1]])
    head = ["an update of 1.1 billion parameters", "ms", "× optax", "skipped, ms"]
    return "\n\n".join([*parts, table(head, rows), command])


def wire():
    """The bytes that one of eight devices sends in a gradient step."""
    cases, command = load("wire")
    layouts = {"DP": "data parallel", "FSDP×TP": "FSDP × TP (4 × 2)"}
    low = '`reduce_dtype="compute"`'
    precisions = {"bf16": f"bf16, {low}", "fp8": f"fp8, {low}"}
    once = {" ×4 each": "", " ×4 once": ', `axis_name="data"`'}
    whole, windows = [], []
    for case, record in cases.items():
        layout, precision = case.split(" | ")
        window = next((x for x in once if layout.endswith(x)), "")
        name = layout.removesuffix(window)
        label = f"{precisions.get(precision, precision)}{once.get(window, '')}"
        sent = [record[x] or "–" for x in ("gather", "reduce")]
        row = [layouts.get(name, name), label, *sent]
        (windows if window else whole).append(row)
    head = ["layout", "precision", "weights gathered", "gradients reduced"]
    tables = [table(head, rows, 2) for rows in (whole, windows)]
    text = "Four microbatches in a window:"
    return f"{tables[0]}\n\n{text}\n\n{tables[1]}\n\n{command.partition(' on one ')[0]}"


PAGES = {
    "README.md": {"first": readme},
    "docs/index.md": {"first": readme},
    "docs/performance.md": {
        "steps": steps,
        "paper": paper,
        "untouched": untouched,
        "largest": largest,
        "profile": profile,
        "flags": flags,
        "residuals": residuals,
        "fp8": fp8,
        "layers": fp8_layers,
        "int8": int8,
        "text": text,
        "wire": wire,
        "logits": logits,
        "optimizers": optimizers,
        "muon": muon,
        "arrays": arrays,
        "release": release,
        "experts": experts,
        "skipping": skipping,
    },
}


def fill(text, tables):
    """Returns a page with its tables written anew."""
    for name, make in tables.items():
        marks = f"<!-- {name}: by benchmarks/tables.py -->", f"<!-- end of {name} -->"
        if not all(mark in text for mark in marks):
            raise ValueError(f"The page has no lines {' and '.join(marks)}.")
        pattern = re.escape(marks[0]) + ".*?" + re.escape(marks[1])
        # Several commands in a row name their machine once.
        found = re.sub(r" on one ([^`\n]+)\. (?=`[^`]+` on one \1\.)", ", ", make())
        block = f"{marks[0]}\n\n{found}\n\n{marks[1]}"
        text = re.sub(pattern, lambda _, block=block: block, text, flags=re.DOTALL)
    return text


def draw_optimizers(plt, path):
    """Draws the time of a step against the memory of a parameter."""
    figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    markers = dict(zip(RULES, "osD^", strict=True))
    colours = {"torch": "tab:red", "optax": "tab:blue", "flashoptim-jax": "tab:orange",
               "mpx": "tab:green"}  # fmt: skip
    for (implementation, rule), (time, size) in optimizer_points().items():
        axes.scatter(size, time, marker=markers[rule], s=60,
                     color=colours[implementation])  # fmt: skip
    for implementation, colour in colours.items():
        label = IMPLEMENTATIONS[implementation].strip("`")
        if any(x == implementation for x, _ in optimizer_points()):
            axes.scatter([], [], color=colour, label=label)
    for rule, marker in markers.items():
        axes.scatter([], [], color="grey", marker=marker, label=RULES[rule])
    axes.set(xlim=(0, None), ylim=(0, None))
    axes.set_xlabel("bytes a parameter: weights, state and gradient")
    axes.set_ylabel("µs a step, 193M parameters")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8, ncols=2)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def draw_paper(plt, path):
    """Draws time and memory of a step over batch sizes, as the figures of the paper do."""
    figure, axes = plt.subplots(2, 2, figsize=(7.2, 5.2), layout="constrained")
    for column, (model, (name, _)) in zip(axes.T, PAPER_MODELS.items(), strict=True):
        for mode, label in PAPER.items():
            record = paper_runs(model)[0][mode]
            batches = sorted(int(x) for x in record if x.isdigit())
            # With fewer images, the host that starts the kernels is the limit.
            batches = [x for x in batches if model == "vit-base" or x >= 512]
            found = [record[str(batch)] for batch in batches]
            style = {"marker": "o", "markersize": 4}
            if mode == "torch":
                style |= {"color": "black", "linestyle": "--"}
            label = label.replace("`", "")
            column[0].plot(batches, [x["ms"] for x in found], label=label, **style)
            column[1].plot(batches, [memory(x) / 1e9 for x in found], **style)
        column[0].set_title(name, fontsize=10)
        column[1].set_xlabel("images a step")
        for axis, unit in zip(column, ("ms a step", "peak GB"), strict=True):
            axis.set(xlim=(0, None), ylim=(0, None), ylabel=unit)
            axis.grid(alpha=0.3)
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(),
        loc="outside lower center", frameon=False, fontsize=8, ncols=2,
    )  # fmt: skip
    figure.savefig(path, dpi=120, metadata={"Software": None})


def draw():
    """Draws the figures."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    draw_optimizers(plt, IMAGES / "optimizers.png")
    draw_paper(plt, IMAGES / "paper.png")


def main():
    for name, tables in PAGES.items():
        page = ROOT / name
        page.write_text(fill(page.read_text("utf-8"), tables), encoding="utf-8")
    draw()


if __name__ == "__main__":
    main()
