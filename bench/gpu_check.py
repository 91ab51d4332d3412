"""Checks correctness and then speed on a GPU. You can interrupt it and continue later.

    python bench/gpu_check.py           # same as `make gpu`: all checks, the most important first; takes hours
    python bench/gpu_check.py --list    # list the checks with their results so far
    python bench/gpu_check.py --only "speed 124m" export   # only checks whose names contain one of these
    python bench/gpu_check.py --only "strategy ddp"        # only this check, because it is a complete name

Needs torch, transformers, accelerate and pydantic, but no network. If a check needs anything else that is missing, it
is skipped with a reason. Every result is written to results.jsonl immediately. If interrupted (Ctrl-C, SIGTERM), it
prints the tables and the verdict so far. Run it again to continue with the missing checks and then retry those that
failed. Results from other GPUs, versions or code stay in the file but are ignored.

Exit status: 0 if all checks passed, 1 if one failed, 2 without a GPU or with wrong arguments, 75 after SIGTERM, 130
after Ctrl-C. A speed below the best published one is a finding, not a failure.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import importlib
import importlib.util
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pretrain.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, InputError, one_line, or_exit, run_script, shortened  # noqa: E402

NEEDED = ("torch", "transformers", "accelerate", "pydantic")
"""Required packages. Everything else that training imports is one of their dependencies."""


def require_packages() -> None:
    """Raises InputError with the missing packages, before anything imports them."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise InputError(
            f"{sys.executable} has no {', '.join(missing)}; install them there (pip install {' '.join(missing)}), "
            "or use a Python that has them: make gpu PYTHON=python"
        )


# Must run before the imports below, which would fail with a traceback.
if __name__ == "__main__":
    or_exit(require_packages)

from bench import gpu  # noqa: E402
from bench.cpu import flops_per_token  # noqa: E402
from bench.references import (  # noqa: E402
    FAILED,
    HEAD_WIDTHS,
    LOGIT_CAP,
    MODEL,
    NOT_RUN,
    PASSED,
    SMALL_MODEL,
    Outcome,
    Runs,
    check_attention,
    check_loss,
    half_precision,
)
from bench.shapes import CPU_SHAPES, GPU_SHAPES, Shape  # noqa: E402

RESULTS = "results.jsonl"
TABLE = "table.md"
SOURCES = (
    "*.py",
    "pretrain/**/*.py",
    "pretrain_tools/**/*.py",
    "bench/*.py",
    "accelerate_configs/*.yaml",
    "ds_configs/*.json",
)
BARS = {
    ("h100", "124m"): (0.407, "llm.c"),
    ("h100", "1.3b"): (0.418, "llm-foundry"),
    ("h100", "7b"): (0.464, "llm-foundry"),
    ("a100", "124m"): (0.432, "llm-foundry"),
    ("a100", "1.3b"): (0.599, "llm-foundry"),
    ("a100", "7b"): (0.642, "llm-foundry"),
    ("a100_40gb", "124m"): (0.409, "llm-foundry"),
    ("a100_40gb", "1.3b"): (0.562, "llm-foundry"),
    ("a100_40gb", "7b"): (0.509, "llm-foundry"),
}
"""{(GPU in pretrain/gpus.py, shape): (best published MFU, codebase)}.

The MFU is computed as in train.py, without a document mask. llm-foundry's formula also counts the position embeddings,
which is a difference of at most 1%. Its results are for FSDP on eight GPUs and the shape's sequence length. A lower
MFU is a finding, not a failure, because clocks, power limits and drivers differ."""
MAIN_PEERS = ("plain_compiled", "bare_compiled", "trainer")
STRATEGIES = (
    "ddp",
    "fsdp2",
    "hsdp",
    "tp",
    "fsdp_tp",
    "pp",
    "cp",
    "ep",
    "zero1",
    "zero2",
    "zero3",
    "zero3_offload",
    "zero3_offload_nvme",
)
DEFAULT_KERNELS = " with default kernels"
IN_FP8 = " in fp8"
OPTIMIZERS = {
    "muon": ("--optim.name", "muon"),
    "adamw_8bit": ("--optim.name", "adamw_8bit"),
    "adafactor in bf16": ("--optim.name", "adafactor", "--optim.stochastic_rounding", "true"),
}
"""{optimizer: settings}. The other runs use AdamW."""
MOST_PROCESSES = 8
"""Maximum number of processes. MODEL has as many heads, and twice as many layers, because pp uses two stages each."""
FEWEST_PROCESSES = {"fsdp_tp": 4}
"""Minimum numbers of processes. The others need two, but with two, fsdp_tp would be the same as tp."""
FP8_STRATEGIES = ("fsdp2", "tp", "fsdp_tp", "zero3")
"""Strategies checked in fp8, one for each way to gather or split the weights."""
WINDOWS = {"off": "whole windows", "on": "documents"}
DOCUMENTS_NOTE = (
    "With the document mask, the MFU also counts attention between documents, so it overstates the work "
    '(docs/performance.md, section "How MFU is computed").'
)
WORKER_SECONDS = 600
REPORTS = 3


@dataclasses.dataclass(frozen=True)
class Scale:
    """Sizes for the checks."""

    model: Shape
    """Model of the runs that check correctness."""
    shapes: Mapping[str, Shape]
    loss_sizes: tuple[int, int, int]
    report_every: int
    loss: str = gpu.LOSSES[0]
    """Loss in the speed checks that don't compare losses."""
    settings: tuple[str, ...] = ()
    several: tuple[str, ...] = ("1.3b", "7b")
    """Shapes that are also measured on all GPUs."""
    varied: tuple[str, ...] = ("124m", "1.3b")
    """Shapes that are also measured with each of gpu.VARIANTS."""


SMALL = {"small": CPU_SHAPES["small"]}
SCALES = {
    "cuda": Scale(MODEL, GPU_SHAPES, (4096, 256, 50_304), gpu.REPORT_EVERY),
    "cpu": Scale(SMALL_MODEL, SMALL, (256, 64, 1000), 1, "chunked", ("compile=none",), tuple(SMALL), tuple(SMALL)),
}
"""Sizes by device type. The CPU sizes are for testing this script."""


@dataclasses.dataclass(frozen=True)
class Check:
    """Check to run."""

    name: str
    """Name of the check, which is its key in results.jsonl."""
    measure: Callable[[], Outcome]
    why_not: str | None = None
    """Reason why the check can't run here, or None."""
    default: str | None = None
    """Name of the speed check with the default settings, to compare this one with, or None."""


class Results:
    """Results file. Results from other GPUs, versions or code are ignored.

    Args:
        state: everything that affects a result, see `state_of`.
        again: whether to ignore earlier results.
    """

    def __init__(self, path: Path, state: Mapping[str, Any], again: bool = False):
        self.path = path
        self.key = hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()[:12]
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [line for line in map(_parsed, path.read_text().splitlines()) if line] if path.exists() else []
        found = [line for line in lines if "name" in line]
        self.of_others = sum(line["of"] != self.key for line in found)
        self._by_name = {line["name"]: line for line in found if line["of"] == self.key and not again}
        if not any(line["of"] == self.key for line in lines):
            self._write({"of": self.key, "state": state})

    def add(self, name: str, outcome: Outcome, seconds: float) -> None:
        """Appends a result and syncs it to disk before returning."""
        line = {"name": name, "outcome": outcome.word, "said": outcome.said, "seconds": round(seconds, 1)}
        self._by_name[name] = line | outcome.figures
        self._write({**self._by_name[name], "of": self.key, "time": time.time()})

    def of(self, name: str) -> dict[str, Any] | None:
        """Returns the newest result of a check, or None."""
        return self._by_name.get(name)

    def word(self, name: str) -> str | None:
        """Returns the outcome of a check in one word, or None."""
        return self._by_name[name]["outcome"] if name in self._by_name else None

    def _write(self, line: Mapping[str, Any]) -> None:
        cut = self.path.exists() and not self.path.read_bytes().endswith(b"\n")  # a kill truncated the last line
        with self.path.open("a") as file:
            file.write("\n" * cut + json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        return json.loads(line)
    except ValueError:
        return None


class Worker:
    """Process that runs the kernel checks one by one. It is replaced after a failure."""

    def __init__(self):
        self._pool: concurrent.futures.ProcessPoolExecutor | None = None

    def run(self, check: Callable[..., Outcome], *arguments: Any) -> Outcome:
        """Runs a check and returns its outcome, which is FAILED if the check raises, dies or hangs."""
        if self._pool is None:
            spawn = multiprocessing.get_context("spawn")  # CUDA can't be used in a forked process
            ignore = (signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the worker, but the parent ends it
            self._pool = concurrent.futures.ProcessPoolExecutor(1, spawn, signal.signal, ignore)
        try:
            return self._pool.submit(check, *arguments).result(WORKER_SECONDS)
        except concurrent.futures.process.BrokenProcessPool:
            outcome = Outcome(FAILED, "the process died")
        except TimeoutError:
            outcome = Outcome(FAILED, f"no result within {WORKER_SECONDS} s")
        except Exception as error:  # after a CUDA error the process is unusable
            outcome = Outcome(FAILED, one_line(error))
        self.end()
        return outcome

    def end(self) -> None:
        """Ends the process, which frees its GPU memory."""
        for process in multiprocessing.active_children():
            process.kill()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def checks_of(device: str, gpus: int, folder: Path, worker: Worker) -> list[Check]:
    """Returns all checks, most important first."""
    from pretrain.model.attention import ATTENTION_NAMES
    from pretrain.model.compile import compiler_problems
    from pretrain.model.fp8 import fp8_problem
    from pretrain.model.loss import LOSS_BACKENDS

    uncompiled = "; ".join(compiler_problems("regional", device)) or None
    no_fp8 = fp8_problem(device)
    scale = SCALES[device]
    runs = Runs(folder, device, scale.model)
    reasons = {name: refused_attention(name, True, device) for name in ATTENTION_NAMES}
    reasons["flex_attention"] = reasons["flex_attention"] or uncompiled
    checks = [
        Check(f"attention {name}", partial(worker.run, check_attention, name, device), reason)
        for name, reason in reasons.items()
    ]
    checks += [
        Check(
            f"attention {name} with heads of {width}",
            partial(worker.run, check_attention, name, device, width),
            reason,
        )
        for name, reason in reasons.items()
        for width in HEAD_WIDTHS
    ]
    checks += [
        Check(
            f"loss {name}{capped}",
            partial(worker.run, check_loss, name, device, scale.loss_sizes, cap),
            uncompiled if name == "chunked_compiled" else None,
        )
        for capped, cap in (("", None), (" with capped logits", LOGIT_CAP))
        for name in LOSS_BACKENDS
    ]
    checks += [
        Check("train single", runs.check_single),
        Check(f"train{DEFAULT_KERNELS}", runs.check_defaults, uncompiled),
        Check("kill -9 and resume", runs.check_kill),
        Check("export in plain transformers", runs.check_export),
        Check("train with memory_budget 0.5", runs.check_memory_budget, uncompiled),
        Check("train with fp8", runs.check_fp8, no_fp8 or uncompiled),
        *(
            Check(f"train with {name}", partial(runs.check_learns, name.replace(" ", "-"), *settings), uncompiled)
            for name, settings in OPTIMIZERS.items()
        ),
        Check("kill -9 with deterministic kernels", runs.check_deterministic, uncompiled),
        *strategy_checks(runs, gpus, uncompiled, no_fp8),
    ]
    return checks + speed_checks(scale, device, uncompiled, gpus, no_fp8)


def selected(checks: list[Check], texts: list[str]) -> list[Check]:
    """Returns the checks whose names contain one of the texts. A complete name selects only that check."""
    names = {check.name for check in checks}
    parts = [text for text in texts if text not in names]
    return [check for check in checks if check.name in texts or any(part in check.name for part in parts)]


def processes_on(gpus: int) -> int:
    """Returns the number of processes: a power of two, because it must divide the numbers of layers and heads."""
    return min(MOST_PROCESSES, 1 << (gpus.bit_length() - 1))


def strategy_checks(runs: Runs, gpus: int, uncompiled: str | None, no_fp8: str | None = None) -> list[Check]:
    """Returns checks that each strategy gives the same losses on all GPUs as a single process.

    They run in fp32 with eager attention, then with the default kernels (half precision and compiled layers), and some
    of them also in fp8. If there is only one GPU, the processes share it.
    """
    model = dataclasses.replace(runs.model, architecture="mixtral")
    experts = dataclasses.replace(runs, folder=runs.folder / "experts", model=model)
    no_deepspeed = None if importlib.util.find_spec("deepspeed") else "deepspeed is not installed"
    refused = {"": None, DEFAULT_KERNELS: uncompiled, IN_FP8: no_fp8 or uncompiled}
    checks = []
    for kernels, names in (("", STRATEGIES), (DEFAULT_KERNELS, STRATEGIES), (IN_FP8, FP8_STRATEGIES)):
        for name in names:
            chosen = experts if name == "ep" else runs
            fewest = FEWEST_PROCESSES.get(name, 2)
            processes = fewest if gpus == 1 else processes_on(gpus)
            few = None
            if processes < fewest:
                few = f"needs {fewest} GPUs, or one that {fewest} processes share, but there are {gpus}"
            check = {
                "": partial(chosen.check_like_single, precision="fp32"),
                DEFAULT_KERNELS: chosen.check_defaults,
                IN_FP8: chosen.check_fp8,
            }[kernels]
            reason = few or (no_deepspeed if name.startswith("zero") else None) or refused[kernels]
            run = f"{name}{kernels.replace(' ', '-')}"
            checks.append(Check(f"strategy {name}{kernels}", partial(check, name, processes, name=run), reason))
    return checks


def speed_checks(
    scale: Scale, device: str, uncompiled: str | None, gpus: int = 1, no_fp8: str | None = None
) -> list[Check]:
    """Returns the speed checks: defaults on one GPU and on all GPUs, baselines, variants, then every kernel."""
    defaults = (gpu.ATTENTIONS[0], scale.loss)
    # Shapes whose check is compared with a published MFU come first.
    published = {published_check(shape) for _, shape in BARS}
    by_bar = sorted(scale.shapes, key=lambda shape: main_speed(shape) not in published)
    labels = [(shape, (documents, *defaults)) for documents in WINDOWS for shape in by_bar]
    crossed = [
        (shape, (documents, attention, loss))
        for shape in scale.shapes
        for attention in gpu.ATTENTIONS
        for loss in gpu.LOSSES
        for documents in WINDOWS
        if (attention, loss) != defaults
    ]
    peers = [(shape, peer) for shape in scale.shapes for peer in MAIN_PEERS]

    def own(shape: str, label: tuple[str, str, str]) -> Check:
        given = (
            scale.shapes[shape],
            [*gpu.settings_of(shape), *scale.settings],
            label,
            REPORTS,
            scale.report_every,
        )
        reason = uncompiled or refused_attention(label[1], label[0] == "on", device)
        return Check(speed_name(shape, label), partial(speed, shape, gpu.measure_own, *given), reason)

    def baseline(shape: str, peer: str) -> Check:
        # If Groundwork needs special settings to fit, the baselines' fp32 AdamW doesn't fit either.
        large = "fp32 weights with AdamW are too large for this shape" if shape in gpu.SETTINGS else None
        given = (peer, scale.shapes[shape], REPORTS, scale.report_every)
        return Check(f"speed {shape} {peer}", partial(speed, shape, gpu.measure_peer, *given), uncompiled or large)

    def on_all(shape: str, strategy: str, documents: str = "off") -> Check:
        processes = processes_on(gpus)
        few = "needs two GPUs, but there is only one" if processes < 2 else None
        settings = [*gpu.settings_of(shape, strategy, processes), *scale.settings]
        label = (documents, *defaults)
        given = (strategy, processes, scale.shapes[shape], settings, label, REPORTS, scale.report_every)
        name = several_speed(shape, strategy, documents)
        return Check(name, partial(speed, shape, gpu.measure_several, *given), uncompiled or few)

    def varied(shape: str, variant: str) -> Check:
        settings = [*gpu.settings_of(shape), *scale.settings]
        given = (variant, scale.shapes[shape], settings, ("off", *defaults), REPORTS, scale.report_every)
        measure = partial(speed, shape, gpu.measure_variant, *given)
        reason = uncompiled or (no_fp8 if variant == "fp8" else None)
        return Check(f"speed {shape} {variant}", measure, reason, speed_name(shape, ("off", *defaults)))

    several = [on_all(shape, strategy) for shape in scale.several for strategy in gpu.STRATEGIES]
    several += [on_all(shape, "fsdp2", "on") for shape in scale.several]
    variants = [varied(shape, variant) for shape in scale.varied for variant in gpu.VARIANTS]
    first = [own(*one) for one in labels]
    return first + several + [baseline(*one) for one in peers] + variants + [own(*one) for one in crossed]


def speed_name(shape: str, label: tuple[str, str, str]) -> str:
    """Returns the name of Groundwork's speed check for (documents, attention, loss)."""
    documents, attention, loss = label
    return f"speed {shape} {WINDOWS[documents]} {attention} {loss}"


def speed(shape: str, measure: Callable[..., gpu.Row], *given: Any) -> Outcome:
    """Measures a speed. It isn't a failure if a baseline doesn't run or a shape doesn't fit."""
    row = measure(*given)
    figures = {"shape": shape, "row": dataclasses.asdict(row)}
    if row.tokens_per_second is None:
        lenient = row.name in gpu.PEERS or "out of memory" in row.problem.lower()
        return Outcome(NOT_RUN if lenient else FAILED, row.problem, figures)
    memory = f"{row.peak_memory_bytes / 2**30:.1f} GiB"
    return Outcome(PASSED, f"{row.tokens_per_second:,.0f} tokens/s, {memory}", figures)


def refused_attention(name: str, documents: bool, device: str) -> str | None:
    """Returns why an attention can't run in half precision, with or without a document mask, or None if it can."""
    from pretrain.config import WindowSpec
    from pretrain.hardware import DTYPES
    from pretrain.model.attention import why_not

    reason = why_not(
        name, device_type=device, dtype=DTYPES[half_precision(device)], window=WindowSpec(1024, documents)
    )
    return reason and f"{name} {reason}"


def run_checks(checks: list[Check], results: Results) -> None:
    """Runs the checks that have no result, then those that failed before."""
    able = [check for check in checks if not check.why_not]
    todo = [check for word in (None, FAILED) for check in able if results.word(check.name) == word]
    if known := len(able) - len(todo):
        print(f"{known} checks already have a result", flush=True)
    for number, check in enumerate(todo, start=1):
        print(f"[{number}/{len(todo)}] {check.name} ...", flush=True)
        began = time.monotonic()
        try:
            outcome = check.measure()
        except InputError as error:
            outcome = Outcome(FAILED, shortened("; ".join(error.problems)))
        seconds = time.monotonic() - began
        results.add(check.name, outcome, seconds)
        print(f"    {outcome.word}: {outcome.said} ({seconds:.0f} s)", flush=True)


def tables(checks: list[Check], results: Results, shapes: Mapping[str, Shape], peak: float | None) -> list[str]:
    """Formats Markdown tables for docs/performance.md: correctness, then one table of speeds per shape.

    Says how many speeds are missing.
    """
    lines = ["| check | | |", "|---|---|---|"]
    measured: dict[str, list[gpu.Row]] = {}
    for check in checks:
        result = results.of(check.name)
        if result and "row" in result:
            measured.setdefault(result["shape"], []).append(gpu.Row(**result["row"]))
        elif not check.name.startswith("speed "):
            word, said = outcome_in_words(check, results)
            lines.append(f"| {check.name} | {word} | {said} |")
    for shape, rows in measured.items():
        lines += ["", *gpu.table(shape, shapes[shape], rows, peak)]
    if any(row.documents == "on" and row.tokens_per_second for rows in measured.values() for row in rows):
        lines += ["", DOCUMENTS_NOTE]
    speeds = [check for check in checks if check.name.startswith("speed ") and not check.why_not]
    missing = [check.name for check in speeds if not results.of(check.name)]
    return lines + (["", f"{len(missing)} of {len(speeds)} speeds aren't measured yet."] if missing else [])


def outcome_in_words(check: Check, results: Results) -> tuple[str, str]:
    """Returns the outcome (passed, failed, not run or missing) and the reason or measurements."""
    if check.why_not:
        return NOT_RUN, check.why_not
    result = results.of(check.name)
    return (result["outcome"], result["said"]) if result else ("missing", "")


def verdict(
    checks: list[Check], results: Results, shapes: Mapping[str, Shape], peak: float | None, gpu_name: str | None
) -> tuple[list[str], bool]:
    """Formats the measured and published MFU, the cost of settings, failed checks, checks that didn't run, and the
    verdict.

    Returns (lines, True if some checks passed and none failed). A speed below the published one is a finding, not a
    failure.

    Args:
        peak: this GPU's FLOP/s in bf16, if known.
        gpu_name: this GPU's name in pretrain/gpus.py, if listed.
    """
    by_word: dict[str, list[tuple[str, str]]] = {word: [] for word in (PASSED, FAILED, NOT_RUN, "missing")}
    for check in checks:
        word, said = outcome_in_words(check, results)
        by_word[word].append((check.name, said))
    names = {check.name for check in checks}
    lines = [
        mfu_beside_published(shape, shapes[shape], results, peak, gpu_name)
        for shape in dict.fromkeys(shape for _, shape in BARS)
        if published_check(shape) in names
    ]
    below = sum(line.startswith("finding:") for line in lines)
    lines += [ratios_to_default(check, results) for check in checks if check.default and not check.why_not]
    lines += [f"failed: {name}: {said}" for name, said in by_word[FAILED]]
    reasons: dict[str, list[str]] = {}
    for name, said in by_word[NOT_RUN]:
        reasons.setdefault(said, []).append(name)
    lines += [
        f"not run: {found[0]}{f' and {len(found) - 1} more' if len(found) > 1 else ''}: {said}"
        for said, found in reasons.items()
    ]
    counts = ", ".join(f"{len(found)} {word}" for word, found in by_word.items() if found)
    good = not by_word[FAILED] and bool(by_word[PASSED])
    slow = f", {below} slower than published" if below else ""
    word = "FAILED" if by_word[FAILED] else "incomplete" if by_word["missing"] or not good else "passed"
    return [*lines, f"{word}: {counts or 'nothing'}{slow}"], good


def main_speed(shape: str) -> str:
    """Returns the name of the check that measures the default settings on one GPU."""
    return speed_name(shape, ("off", gpu.ATTENTIONS[0], gpu.LOSSES[0]))


def several_speed(shape: str, strategy: str, documents: str = "off") -> str:
    """Returns the name of the check that measures a strategy on all GPUs."""
    return f"speed {shape} {strategy}{' documents' if documents == 'on' else ''} on all GPUs"


def published_check(shape: str) -> str:
    """Returns the name of the check to compare with BARS.

    Shapes that need special settings to fit on one GPU are compared on all GPUs, as published.
    """
    return several_speed(shape, "fsdp2") if shape in gpu.SETTINGS else main_speed(shape)


def ratios_to_default(check: Check, results: Results) -> str:
    """Formats a check's speed and memory as ratios to those of `check.default`."""
    name = check.name.removeprefix("speed ")
    rows = [(results.of(each) or {}).get("row") or {} for each in (check.name, check.default)]
    if not all(row.get("tokens_per_second") and row.get("peak_memory_bytes") for row in rows):
        return f"{name}: no ratios yet, because this check or the default settings haven't been measured"
    speed, memory = (rows[0][key] / rows[1][key] for key in ("tokens_per_second", "peak_memory_bytes"))
    return f"{name}: {speed:.3f} x the tokens/s and {memory:.3f} x the peak memory of the default settings"


def mfu_beside_published(shape: str, sizes: Shape, results: Results, peak: float | None, gpu_name: str | None) -> str:
    """Formats a shape's MFU and the published MFU for this GPU. Takes the same arguments as `verdict`."""
    published, code = BARS.get((gpu_name, shape), (None, ""))
    reference = f"{code} published {published:.1%} for this GPU" if published else "none is published for this GPU"
    row = (results.of(published_check(shape)) or {}).get("row") or {}
    gpus = row.get("gpus", 1)
    strategy = f" with fsdp2 on {gpus} GPUs" if gpus > 1 else ""
    label = f"MFU of {shape} at T={sizes.sequence_length:,}{strategy}"
    if not row.get("tokens_per_second"):
        return f"{label}: not measured; {reference}"
    if not peak:
        return f"{label}: this GPU's peak is unknown"
    mfu = flops_per_token(sizes) * row["tokens_per_second"] / (peak * gpus)
    return f"{'finding: ' if published and mfu < published else ''}{label}: {mfu:.1%}; {reference}"


def state_of(device: str, gpus: int) -> dict[str, Any]:
    """Returns everything that affects a result: machine, versions and code."""
    import torch

    from pretrain.hardware import describe_machine, driver_version

    digest = hashlib.sha256()
    for path in sorted({path for pattern in SOURCES for path in ROOT.glob(pattern)}):
        digest.update(path.read_bytes())
    versions = {name: importlib.import_module(name).__version__ for name in NEEDED}
    machine = {"device": describe_machine(torch.device(device))["device"], "gpus": gpus, "driver": driver_version()}
    return {**machine, "cuda": torch.version.cuda, **versions, "code": digest.hexdigest()[:12]}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="TEXT",
        help="only run checks whose names contain one of these, or only one check if this is its complete name",
    )
    parser.add_argument("--list", action="store_true", help="list the checks without running them")
    parser.add_argument("--again", action="store_true", help="rerun checks that already have a result")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"), help="results folder (default: runs/gpu)")
    # For testing this script on a CPU, with processes in place of GPUs.
    parser.add_argument("--device", choices=SCALES, default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--processes", type=int, choices=(1, 2), default=2, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def require_gpu() -> None:
    """Raises InputError if torch finds no GPU."""
    import torch

    if not torch.cuda.is_available():
        from pretrain.hardware import unusable_gpu

        raise InputError(
            unusable_gpu() or "make gpu needs an NVIDIA GPU, but torch finds none here; on a CPU, run make test"
        )


def main(arguments: list[str] | None = None) -> int:
    """Runs the missing checks, then prints the tables and the verdict. Returns the exit status."""
    given = parse_arguments(arguments)
    if given.device == "cuda":
        require_gpu()
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    from pretrain.gpus import gpu_called
    from pretrain.hardware import device_in_words, peak_flops

    gpus = torch.cuda.device_count() if given.device == "cuda" else given.processes
    results = Results(given.output / RESULTS, state_of(given.device, gpus), given.again)
    worker = Worker()
    shapes = SCALES[given.device].shapes
    checks = checks_of(given.device, gpus, given.output.resolve() / results.key, worker)
    checks = selected(checks, given.only)
    if not checks:
        raise InputError(f"--only {' '.join(given.only)}: no check matches; see --list for their names")
    if given.list:
        print("\n".join(f"{check.name:<50} {': '.join(outcome_in_words(check, results))}" for check in checks))
        return 0
    device = torch.device(given.device)
    peak, source = peak_flops(device, "bf16")
    header = [device_in_words(device), f"peak {peak / 1e12:.3g} TFLOP/s, {source}" if peak else source]
    print("\n".join(header), flush=True)
    if results.of_others:
        print(f"{results.path}: ignoring {results.of_others} results from other code, versions or GPUs")
    status = finish_or_cut(lambda: run_checks(checks, results), worker)
    known = gpu_called(torch.cuda.get_device_name(device)) if given.device == "cuda" else None
    lines, good = verdict(checks, results, shapes, peak, known and known.name)
    text = "\n".join([*header, "", *tables(checks, results, shapes, peak)])
    (given.output / TABLE).write_text(text + "\n")
    print(f"\n{text}\n\n" + "\n".join(lines), flush=True)
    if status:
        print("interrupted; run the same command again to continue", flush=True)
    return status or (0 if good else 1)


def finish_or_cut(work: Callable[[], None], worker: Worker) -> int:
    """Runs `work` and leaves no process running. Returns 0, or the exit status after a signal."""

    def cut(number: int, _: Any) -> None:
        kill_children()  # before exiting, because orphans are no longer children of this process
        sys.exit(EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_PREEMPTED)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, cut)
    try:
        work()
    except SystemExit as ended:  # raised by `cut`, or by the SIGTERM handler of bench/contest.py
        return EXIT_INTERRUPTED if ended.code == EXIT_INTERRUPTED else EXIT_PREEMPTED
    finally:
        worker.end()
    return 0


def kill_children() -> None:
    """Kills all descendants of this process, including launched ranks and paused programs."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


if __name__ == "__main__":
    run_script(main)
