"""Tests for `make gpu` without a GPU: order of checks, resuming, the report, and the checks themselves on a CPU."""

import json
import os
import re
import signal
import subprocess
import time

import pytest
import torch

from bench import gpu_check, references
from bench.cpu import contestants_of
from bench.gpu import Row
from bench.gpu_check import SCALES, Check, Results, Worker, checks_of, speed_checks, strategy_checks, tables, verdict
from bench.references import FAILED, NOT_RUN, PASSED, Outcome, Runs, attention_error, check_attention, check_loss
from bench.shapes import GPU_SHAPES
from pretrain.errors import InputError
from pretrain.gpus import GPUS, gpu_called
from pretrain.model import attention as attention_module
from pretrain.model import loss as loss_module
from pretrain.processes import is_alive
from pretrain_tools.experiments.parity import Curve, StrategyOutcome
from support.project import ROOT, run_script, start_script

GOES_ON = """
import os, subprocess, sys
from pathlib import Path
from bench import gpu_check
from bench.gpu_check import Check, Outcome
from pretrain.errors import run_script
folder, number = Path(sys.argv[1]), int(sys.argv[2])

def row(name, word="passed"):
    def measure():
        with (folder / "calls").open("a") as file:
            file.write(name + "\\n")
        if name == "slow" and number == 1:
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            (folder / "child").write_text(str(child.pid) + "\\n")
            child.wait()
        return Outcome(word, f"said by {name}")
    return Check(name, measure)

wrong = row("wrong", "failed" if number == 2 else "passed")
other = Check("other", None, "needs two GPUs")
gpu_check.checks_of = lambda *_: [row("first"), row("slow"), wrong, other, row("last")]
gpu_check.state_of = lambda *_: {}
run_script(lambda: gpu_check.main(["--device", "cpu", "--output", str(folder / "out")]))
"""


def test_an_interrupted_call_prints_its_results_and_the_next_one_resumes(tmp_path):
    with start_script("-c", GOES_ON, tmp_path, 1, stdout=subprocess.PIPE) as process:
        while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text().endswith("\n"):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[0]
    assert process.returncode == 75 and "interrupted; run the same command again" in said
    assert "| first | passed | said by first |" in said and "| slow | missing |" in said
    assert "incomplete: 1 passed, 1 not run, 3 missing" in said
    assert not is_alive(int((tmp_path / "child").read_text())), "the child process must be killed"
    second, third = (run_script("-c", GOES_ON, tmp_path, number, check=False) for number in (2, 3))
    assert (second.returncode, third.returncode) == (1, 0)
    assert "failed: wrong: said by wrong" in second.stdout and "FAILED: 3 passed, 1 failed, 1 not run" in second.stdout
    assert "passed: 4 passed, 1 not run" in third.stdout and "not run: other: needs two GPUs" in third.stdout
    assert (tmp_path / "calls").read_text().split() == ["first", "slow", "slow", "wrong", "last", "wrong"]
    assert "| slow | passed | said by slow |" in (tmp_path / "out/table.md").read_text()


def test_results_of_other_code_or_gpus_and_truncated_lines_are_ignored(tmp_path):
    path = tmp_path / "results.jsonl"
    Results(path, {"device": "A100"}).add("kill", Outcome(PASSED, "well"), 1.0)
    with path.open("a") as file:
        file.write('{"name": "torn", "outc')
    other = Results(path, {"device": "H100"})
    assert other.word("kill") is None and other.of_others == 1
    other.add("kill", Outcome(FAILED, "badly", {"loss": 2.0}), 1.0)
    first = Results(path, {"device": "A100"})
    assert first.word("kill") == PASSED and first.word("torn") is None
    assert Results(path, {"device": "H100"}).of("kill")["loss"] == 2.0
    assert Results(path, {"device": "A100"}, again=True).word("kill") is None


def test_the_most_important_checks_come_first(tmp_path):
    names = [check.name for check in checks_of("cpu", 2, tmp_path, Worker())]
    kinds = list(dict.fromkeys(name.split()[0] for name in names))
    assert kinds == ["attention", "loss", "train", "kill", "export", "strategy", "speed"] and len(set(names)) == len(
        names
    )
    speeds = [check.name.removeprefix("speed ") for check in speed_checks(SCALES["cuda"], "cpu", None)]
    default = "auto chunked_compiled"
    assert speeds[:4] == [f"{shape} whole windows {default}" for shape in ("124m", "1.3b", "350m", "7b")]
    assert speeds[4:8] == [f"{shape} documents {default}" for shape in ("124m", "1.3b", "350m", "7b")]
    several = [f"{shape} {strategy} on all GPUs" for shape in ("1.3b", "7b") for strategy in ("ddp", "fsdp2", "hsdp")]
    assert speeds[8:14] == several
    assert speeds[14:16] == ["1.3b fsdp2 documents on all GPUs", "7b fsdp2 documents on all GPUs"]
    assert speeds[16:19] == ["124m plain_compiled", "124m bare_compiled", "124m trainer"]
    assert len(speeds) == len(set(speeds)) == 4 * 2 * 4 * 3 + 4 * 3 + 6 + 2 + 2 * 3


def test_what_cannot_run_here_says_why(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda name: None)
    checks = {check.name: check for check in strategy_checks(Runs(tmp_path, "cuda"), 6, "no triton")}
    assert checks["strategy fsdp2 with default kernels"].why_not == "no triton"
    assert checks["strategy zero2"].why_not == "deepspeed is not installed" and checks["strategy tp"].why_not is None
    assert checks["strategy tp"].measure.args == ("tp", 4), (
        "the number of processes must be a power of two, to divide heads and layers"
    )
    checks = {check.name: check for check in strategy_checks(Runs(tmp_path, "cuda"), 2, None, "no fp8")}
    assert checks["strategy tp in fp8"].why_not == "no fp8" and checks["strategy tp"].why_not is None
    assert checks["strategy tp in fp8"].measure.keywords == {"name": "tp-in-fp8"}
    with pytest.raises(InputError, match=r"has no torch, transformers, accelerate, pydantic; install them"):
        gpu_check.require_packages()
    speeds = {check.name: check.why_not for check in speed_checks(SCALES["cuda"], "cpu", None)}
    assert "flash_attention_2 does not run on cpu" in speeds["speed 124m documents flash_attention_2 logits"]
    assert "too large" in speeds["speed 7b trainer"]


def test_without_pythons_headers_compiled_checks_do_not_run(monkeypatch, tmp_path):
    """All other checks still run."""
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/nowhere")
    reasons = {check.name: check.why_not or "" for check in checks_of("cpu", 2, tmp_path, Worker())}
    compiled = ["loss chunked_compiled", "train with default kernels", "strategy ddp with default kernels"]
    compiled += ["kill -9 with deterministic kernels", "train with memory_budget 0.5", "speed small ddp on all GPUs"]
    for name in compiled:
        assert "Python.h is missing" in reasons[name] and "apt install build-essential python3-dev" in reasons[name]
    for name in ("loss chunked with capped logits", "train single", "kill -9 and resume", "strategy ddp"):
        assert reasons[name] == ""


@pytest.mark.parametrize(("gpus", "processes"), [(1, 4), (2, None), (3, None), (4, 4), (8, 8)])
def test_fsdp_tp_needs_four_processes(gpus, processes, tmp_path):
    """With two, it would be the same as tp."""
    checks = {check.name: check for check in strategy_checks(Runs(tmp_path, "cuda"), gpus, None)}
    check = checks["strategy fsdp_tp"]
    if processes is None:
        assert check.why_not == f"needs 4 GPUs, or one that 4 processes share, but there are {gpus}"
    else:
        assert check.why_not is None and check.measure.args == ("fsdp_tp", processes)
    assert checks["strategy tp"].why_not is None


def test_a_complete_name_selects_only_its_check():
    checks = [Check(name, None) for name in ("strategy ddp", "strategy ddp with default kernels", "export")]
    assert gpu_check.selected(checks, ["strategy ddp"]) == checks[:1]
    assert gpu_check.selected(checks, ["ddp"]) == checks[:2]
    assert gpu_check.selected(checks, ["strategy ddp", "exp"]) == [checks[0], checks[2]]
    assert gpu_check.selected(checks, [""]) == checks and gpu_check.selected(checks, ["none"]) == []


def test_the_whole_command_trains_on_a_cpu(tmp_path):
    """The command trains in two CPU processes instead of on two GPUs."""
    command = ["bench/gpu_check.py", "--device", "cpu", "--output", tmp_path, "--only"]
    first = ["train single", "strategy ddp", "strategy fsdp2"]
    done = run_script(*command, *first, check=False, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    ran = [*first, "kill -9 and resume", "export in plain transformers", "speed small ddp on all GPUs"]
    # A new interpreter, because the ranks to kill must be children of their launcher, and the export must be loaded
    # without the project's modules.
    done = run_script(*command, *ran, "strategy fsdp_tp", check=False, fresh=True, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 checks already have a result" in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    said = {line["name"]: line["said"] for line in lines if line.get("outcome") == PASSED}
    assert list(said) == ran
    assert said["train single"].startswith("loss started at 6.9")
    assert "of 12: losses, norms and weights bit-identical" in said["kill -9 and resume"]
    assert said["export in plain transformers"].startswith("logits differ by 0.0e+00")
    assert "loss within" in said["strategy ddp"] and "loss within" in said["strategy fsdp2"]
    row = Row(**next(line["row"] for line in lines if "row" in line))
    assert (row.name, row.documents, row.gpus) == ("ddp, 2 GPUs", "off", 2) and row.tokens_per_second > 0
    table = (tmp_path / "table.md").read_text()
    assert "| strategy fsdp_tp | not run | needs 4 GPUs" in table and "| ddp, 2 GPUs | off | auto |" in table
    assert "aren't measured yet" not in table
    assert done.stdout.splitlines()[-1] == "passed: 6 passed, 1 not run"


NOT_ON_A_CPU = (
    "does not run on cpu",
    "has no backward pass on cpu",
    "needs a GPU with fp8 tensor cores",
    "needs 4 GPUs",
    "needs libaio",
)


@pytest.mark.skipif(os.environ.get("STRATEGIES") != "all", reason="a quarter of an hour; in make test-strategies")
def test_all_checks_pass_on_a_cpu(tmp_path):
    """A check may only be left out for a reason in NOT_ON_A_CPU."""
    command = ["bench/gpu_check.py", "--device", "cpu", "--output", tmp_path]
    done = run_script(*command, check=False, fresh=True, timeout=7200, CUDA_VISIBLE_DEVICES="")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[-1].startswith("passed: "), done.stdout + done.stderr
    left_out = [line for line in lines if line.startswith("not run: ")]
    assert [line for line in left_out if not any(reason in line for reason in NOT_ON_A_CPU)] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is available")
def test_without_a_gpu_it_says_so():
    ended = run_script("bench/gpu_check.py", check=False)
    assert ended.returncode == 2 and "torch finds none here" in ended.stderr


def results_with(folder, mfu: dict[str, float]) -> tuple[list[Check], Results]:
    """Returns (checks, results) with these MFUs at a peak of 1 PFLOP/s."""
    results = Results(folder / "results.jsonl", {})
    checks = [
        check for check in speed_checks(SCALES["cuda"], "cpu", None) if "whole windows auto chunked_c" in check.name
    ]
    for shape, share in mfu.items():
        speed = share * 1e15 / gpu_check.flops_per_token(GPU_SHAPES[shape])
        row = Row("groundwork", "off", "auto", "chunked_compiled", speed, 2**30, 9.0)
        (name,) = (check.name for check in checks if f" {shape} " in check.name)
        results.add(name, gpu_check.speed(shape, lambda row=row: row), 60.0)
    return checks, results


def test_the_verdict_compares_the_mfu_with_published_figures_and_allows_slowness(tmp_path):
    checks, results = results_with(tmp_path, {"124m": 0.41, "1.3b": 0.40})
    lines, good = verdict(checks, results, GPU_SHAPES, 1e15, "h100")
    assert lines[:2] == [
        "MFU of 124m at T=1,024: 41.0%; llm.c published 40.7% for this GPU",
        "finding: MFU of 1.3b at T=2,048: 40.0%; llm-foundry published 41.8% for this GPU",
    ]
    assert lines[-1] == "incomplete: 2 passed, 2 missing, 1 slower than published" and good
    lines, good = verdict(checks, results, GPU_SHAPES, 1e15, "l40s")
    assert lines[1] == "MFU of 1.3b at T=2,048: 40.0%; none is published for this GPU" and good
    lines, good = verdict(checks, results, GPU_SHAPES, None, None)
    assert "peak is unknown" in lines[0] and good
    printed = "\n".join(tables(checks, results, GPU_SHAPES, 1e15))
    assert "| groundwork | off | auto | chunked_compiled |" in printed and "| 41.0% | 1.0 GiB | 9 s |" in printed
    assert "2 of 4 speeds aren't measured yet." in printed
    lines, good = verdict(checks[2:], results, GPU_SHAPES, 1e15, "h100")
    assert lines == ["incomplete: 2 missing"] and not good


def test_a_note_says_that_mfu_with_documents_overstates_the_work(tmp_path):
    checks, results = results_with(tmp_path, {"124m": 0.41})
    assert gpu_check.DOCUMENTS_NOTE not in tables(checks, results, GPU_SHAPES, 1e15)
    name = "speed 124m documents auto chunked_compiled"
    checks += [check for check in speed_checks(SCALES["cuda"], "cpu", None) if check.name == name]
    row = Row("groundwork", "on", "auto", "chunked_compiled", 900.0, 2**30, 9.0)
    results.add(name, gpu_check.speed("124m", lambda: row), 60.0)
    assert tables(checks, results, GPU_SHAPES, 1e15).count(gpu_check.DOCUMENTS_NOTE) == 1


def test_7b_is_compared_with_published_figures_on_all_gpus(tmp_path):
    name = "speed 7b fsdp2 on all GPUs"
    checks = [check for check in speed_checks(SCALES["cuda"], "cpu", None, 8) if check.name == name]
    results = Results(tmp_path / "results.jsonl", {})
    lines, _ = verdict(checks, results, GPU_SHAPES, 1e15, "h100")
    assert lines[0] == "MFU of 7b at T=2,048: not measured; llm-foundry published 46.4% for this GPU"
    speed = 8 * 0.45 * 1e15 / gpu_check.flops_per_token(GPU_SHAPES["7b"])
    row = Row("fsdp2, 8 GPUs", "off", "auto", "chunked_compiled", speed, 2**30, 9.0, gpus=8)
    results.add(name, gpu_check.speed("7b", lambda: row), 60.0)
    lines, good = verdict(checks, results, GPU_SHAPES, 1e15, "h100")
    below = "MFU of 7b at T=2,048 with fsdp2 on 8 GPUs: 45.0%; llm-foundry published 46.4% for this GPU"
    assert lines[0] == f"finding: {below}" and good


def test_settings_are_compared_with_the_defaults(tmp_path, monkeypatch):
    """A ratio is only shown if both speeds were measured."""
    seen = {}

    def measure(shape, settings, labels, *_):
        seen[tuple(settings)] = labels
        return Row("groundwork", *labels, 900.0 if settings else 1000.0, 2**30, 9.0)

    monkeypatch.setattr("bench.gpu.measure_own", measure)
    names = ["speed 124m deterministic", "speed 124m fp8", "speed 124m memory_budget 0.5"]
    every = speed_checks(SCALES["cuda"], "cpu", None, no_fp8="needs fp8 tensor cores")
    checks = [check for check in every if check.name in names]
    assert [check.why_not for check in checks] == [None, "needs fp8 tensor cores", None]
    results = Results(tmp_path / "results.jsonl", {})
    results.add(names[0], checks[0].measure(), 60.0)
    assert list(seen.items()) == [(("deterministic=true",), ("off", "auto", "chunked_compiled"))]
    assert results.of(names[0])["row"]["name"] == "groundwork, deterministic"
    lines, _ = verdict(checks, results, GPU_SHAPES, 1e15, "h100")
    assert (
        lines[0]
        == "124m deterministic: no ratios yet, because this check or the default settings haven't been measured"
    )
    results.add(checks[0].default, gpu_check.speed("124m", lambda: measure(None, [], ("off", "auto", "logits"))), 60.0)
    lines, _ = verdict(checks, results, GPU_SHAPES, 1e15, "h100")
    assert lines[0] == ("124m deterministic: 0.900 x the tokens/s and 1.000 x the peak memory of the default settings")
    assert (
        lines[1]
        == "124m memory_budget 0.5: no ratios yet, because this check or the default settings haven't been measured"
    )
    assert lines[2] == f"not run: {names[1]}: needs fp8 tensor cores"


def test_bars_name_gpus_and_shapes_that_are_known():
    for gpu_name, shape in gpu_check.BARS:
        assert gpu_name in GPUS and shape in GPU_SHAPES


def rows_of(page: str, first: str) -> list[list[str]]:
    """Returns the cells of the table whose first row starts with `first`, without its two header lines."""
    lines = (ROOT / page).read_text().partition(f"\n| {first} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def gpu_in(cell: str) -> str | None:
    """Returns the name in pretrain/gpus.py of, for example, `8 A100s (40 GB)`, as if torch had reported it."""
    name, memory = re.match(r"(?:\d+ )?(.*?)s?(?: \((\d+) GB\))?$", cell).groups()
    known = gpu_called(f"NVIDIA {name}-{memory}GB" if memory else name)
    return known and known.name


def test_bars_are_the_published_results_that_the_page_on_make_gpu_shows():
    shown = {}
    for name, *cells in rows_of("docs/measurements_gpu.md", "GPU"):
        for shape, cell in zip(("124m", "1.3b", "7b"), cells, strict=True):
            mfu, code = re.match(r"([\d.]+)% \(([\w.-]+)", cell).groups()
            shown[gpu_in(name), shape] = (round(float(mfu) / 100, 3), code)
    assert shown == gpu_check.BARS


def test_results_on_the_gpu_page_for_the_measured_shapes_are_bars():
    compared = 0
    for model, gpus, mfu, _, _ in rows_of("docs/gpu.md", "model"):
        size, length = re.match(r"([\d.]+[MB])(?:, T=([\d,]*\d))?", model).groups()
        shape = {"125m": "124m"}.get(size.lower(), size.lower())
        same_length = shape in GPU_SHAPES and length == f"{GPU_SHAPES[shape].sequence_length:,}"
        if same_length and "calculated by us" not in mfu:
            assert gpu_check.BARS[gpu_in(gpus), shape][0] == round(float(mfu.strip("%")) / 100, 3), (model, gpus)
            compared += 1
    assert compared >= 5


def test_out_of_memory_and_a_broken_baseline_are_not_failures():
    def outcome(name, problem):
        return gpu_check.speed("124m", lambda: Row(name, "off", "auto", "logits", problem=problem)).word

    assert outcome("groundwork", "torch.OutOfMemoryError: CUDA out of memory. Tried ...") == NOT_RUN
    assert outcome("trainer", "AttributeError: x") == NOT_RUN
    assert outcome("groundwork", "AttributeError: x") == FAILED


@pytest.mark.parametrize(
    ("gpus", "processes", "strategy", "shape", "adafactor"),
    [
        (2, 2, "ddp", "1.3b", False),
        (2, 2, "fsdp2 documents", "1.3b", False),
        (2, 2, "fsdp2", "7b", True),
        (4, 4, "hsdp", "7b", False),
        (8, 8, "fsdp2", "7b", False),
        (8, 8, "ddp", "7b", True),
        (9, 8, "hsdp", "1.3b", False),
    ],
)
def test_all_gpus_are_measured_under_each_strategy(monkeypatch, gpus, processes, strategy, shape, adafactor):
    """Each strategy is measured on all GPUs with the same batch size per GPU, and the MFU is relative to their
    combined peak."""
    held = {}

    def hold(contestants, *_, **__):
        (held["contestant"],) = contestants
        held["contestant"].turns = [[1000.0 * processes]]

    monkeypatch.setattr("bench.gpu.hold", hold)
    monkeypatch.setattr("bench.cpu.SHARD_TOKENS", 2000)
    name = f"speed {shape} {strategy} on all GPUs"
    (check,) = [check for check in speed_checks(SCALES["cuda"], "cpu", None, gpus) if check.name == name]
    assert check.why_not is None
    outcome = check.measure()
    strategy, _, documents = strategy.partition(" ")
    mask = "on" if documents else "off"
    command = held["contestant"].command
    assert ("--data.document_mask" in command) == bool(documents)
    tokens = str(processes * GPU_SHAPES[shape].tokens_per_step)
    assert command[:2] == ["-m", "accelerate.commands.launch"] and f"accelerate_configs/{strategy}.yaml" in command
    assert command[command.index("--num_processes") + 1] == str(processes)
    assert command[command.index("--batch.tokens_per_step") + 1] == tokens
    assert ("--optim.name" in command) == adafactor
    assert outcome.word == PASSED and outcome.figures["row"]["gpus"] == processes
    lines = "\n".join(gpu_check.gpu.table(shape, GPU_SHAPES[shape], [Row(**outcome.figures["row"])], 1e15))
    mfu = gpu_check.flops_per_token(GPU_SHAPES[shape]) * 1000.0 / 1e15
    assert f"| {strategy}, {processes} GPUs | {mask} |" in lines and f"| {mfu:.1%} |" in lines


def test_the_command_for_several_gpus_trains(tmp_path):
    """The multi-GPU command passes --check on a CPU, as rank 0 of two processes."""
    scale = SCALES["cpu"]
    given = {"strategy": "ddp", "processes": 2}
    (contestant,) = contestants_of(["groundwork"], scale.shapes["small"], tmp_path, ["compile=none"], 1, **given)
    words = contestant.command[contestant.command.index("train.py") :]
    checked = run_script(*words, "--check", check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_each_strategy_is_checked_with_the_default_kernels_on_as_many_gpus_as_there_are(monkeypatch, tmp_path, gpus):
    runs = Runs(tmp_path, "cpu")
    seen = []
    monkeypatch.setattr(Runs, "check_like_single", lambda runs, *given, **more: seen.append((given, more)))
    (check,) = [c for c in strategy_checks(runs, gpus, None) if c.name == "strategy fsdp2 with default kernels"]
    assert check.why_not is None
    check.measure()
    (strategy, processes, *settings), more = seen[0]
    assert (strategy, processes, more["name"]) == ("fsdp2", max(2, gpus), "fsdp2-with-default-kernels")
    pairs = dict(zip(settings[::2], settings[1::2], strict=True))
    wanted = {"--precision": "auto", "--attention": "auto", "--compile": "regional", "--loss.backend": "auto"}
    assert pairs == wanted and more["precision"] in ("bf16", "fp32")


def test_a_process_that_dies_is_a_failure_and_the_next_check_has_another():
    worker = Worker()
    try:
        assert worker.run(os._exit, 3) == Outcome(FAILED, "the process died")
        assert worker.run(json.loads, "no json").said.startswith("JSONDecodeError")
        assert worker.run(Outcome, PASSED) == Outcome(PASSED)
    finally:
        worker.end()


@pytest.mark.parametrize("cap", [None, references.LOGIT_CAP])
@pytest.mark.parametrize("backend", ["chunked", "logits"])
def test_losses_are_right_on_a_cpu_and_a_wrong_one_is_detected(backend, cap, monkeypatch):
    assert check_loss(backend, "cpu", SCALES["cpu"].loss_sizes, cap).word == PASSED
    right = loss_module.LOSS_BACKENDS[backend]

    def wrong(hidden, weight, bias, targets, z_loss, given_cap, *rest):
        if cap is None:
            return right(hidden * 1.01, weight, bias, targets, z_loss, given_cap, *rest)
        return right(hidden, weight, bias, targets, z_loss, None, *rest)  # ignores the cap

    monkeypatch.setitem(loss_module.LOSS_BACKENDS, backend, wrong)
    if backend != "logits":  # the reference
        found = check_loss(backend, "cpu", SCALES["cpu"].loss_sizes, cap)
        assert found.word == FAILED and "fp32: error" in found.said


def test_attention_is_right_on_a_cpu_and_a_wrong_document_end_is_detected(monkeypatch):
    found = check_attention("sdpa", "cpu")
    assert found.word == PASSED and len(found.figures["errors"]) == 4
    for width in references.HEAD_WIDTHS:
        found = check_attention("sdpa", "cpu", width)
        assert found.word == PASSED and f"heads of {width}, documents" in found.said
    layout = attention_module.document_layout

    def one_late(ids, end):
        made = layout(ids, end)
        made["cu_seq_lens_q"][1] += 1
        return made

    monkeypatch.setattr(attention_module, "document_layout", one_late)
    assert attention_error("groundwork_sdpa", "cpu", "bf16", 64, True) > references.MOST_ERROR["bf16"]


def test_non_finite_values_have_an_infinite_error():
    assert references.relative_error([torch.tensor([float("nan")])], [torch.ones(1)]) == float("inf")


REFERENCE = Curve({step: 7.0 - step / 10 for step in range(1, 13)}, dict.fromkeys(range(1, 13), 1.0))


@pytest.mark.parametrize(
    ("outcome", "word", "said"),
    [
        (StrategyOutcome(REFERENCE), PASSED, "loss within 0.0e+00"),
        (StrategyOutcome(Curve(REFERENCE.loss | {3: 6.8}, REFERENCE.grad_norm)), FAILED, "loss within 1.0e-01"),
        (StrategyOutcome(None, ("needs libaio",)), NOT_RUN, "needs libaio"),
    ],
)
def test_a_strategy_is_compared_with_one_process(outcome, word, said, monkeypatch, tmp_path):
    monkeypatch.setattr(Runs, "recipe", lambda runs: runs.folder / "recipe.yaml")
    trained = {"single": StrategyOutcome(REFERENCE), "ddp": outcome}
    monkeypatch.setattr(references, "train_under", lambda strategy, *_: trained[strategy])
    found = Runs(tmp_path, "cuda").check_like_single("ddp", 2, name="ddp", precision="fp32")
    assert found.word == word and said in found.said


def test_a_loss_that_does_not_fall_is_a_failure(monkeypatch, tmp_path):
    flat = Curve(dict.fromkeys(range(1, 13), 6.9), dict.fromkeys(range(1, 13), 1.0))
    monkeypatch.setattr(Runs, "recipe", lambda runs: runs.folder / "recipe.yaml")
    monkeypatch.setattr(references, "train_under", lambda *_: StrategyOutcome(flat))
    failed = Outcome(FAILED, "loss started at 6.9000 and ended at 6.9000")
    assert Runs(tmp_path, "cpu").check_single() == failed
    assert Runs(tmp_path, "cpu").check_learns("muon", "--optim.name", "muon") == failed


def write_run(folder, curve, weights=b"weights", resumed=True):
    """Writes the metrics and weights of a run."""
    (folder / "final").mkdir(parents=True)
    (folder / "final/model.safetensors").write_bytes(weights)
    lines = [
        {"event": "train", "step": step, "loss": loss, "grad_norm": curve.grad_norm[step]}
        for step, loss in curve.loss.items()
    ]
    lines += [{"event": "resume", "step": 4}] if resumed else []
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("before", "change", "word", "said"),
    [
        ({}, {}, PASSED, "killed after step 12 of 12: losses, norms and weights bit-identical"),
        ({}, {"curve": Curve(REFERENCE.loss | {8: 6.0}, REFERENCE.grad_norm)}, FAILED, "difference is in step 8"),
        ({3: 6.0}, {"curve": Curve(REFERENCE.loss | {3: 6.0}, REFERENCE.grad_norm)}, FAILED, "not deterministic"),
        ({}, {"weights": b"others"}, FAILED, "the weights differ"),
        ({}, {"resumed": False}, FAILED, "started over"),
        ("the run exited before it could be killed", {}, FAILED, "the run exited before it could be killed"),
    ],
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_resumed_run_that_differs_is_a_failure(before, change, word, said, deterministic, monkeypatch, tmp_path):
    """The same rules apply to the default kernels with deterministic: true, which have their own reference."""
    name = "deterministic" if deterministic else "single"
    commands = []

    def kill(runs, run, step, command):
        if isinstance(before, str):
            return before
        write_run(run, Curve(REFERENCE.loss | before, REFERENCE.grad_norm), resumed=False)
        return None

    def resume(runs, *command):
        commands.append(command)
        references.shutil.rmtree(tmp_path / f"{name}-killed")
        write_run(tmp_path / f"{name}-killed", **{"curve": REFERENCE, **change})

    def train(runs, strategy, processes, run, *settings):
        write_run(tmp_path / run, REFERENCE, resumed=False)
        return REFERENCE

    monkeypatch.setattr(Runs, "recipe", lambda runs: runs.folder / "recipe.yaml")
    monkeypatch.setattr(Runs, "train", train)
    monkeypatch.setattr(Runs, "_kill_after", kill)
    monkeypatch.setattr(Runs, "_python", resume)
    runs = Runs(tmp_path, "cpu")
    found = runs.check_deterministic() if deterministic else runs.check_kill()
    assert found.word == word and said in found.said
    for command in commands:
        assert ("--deterministic" in command) == deterministic and ("regional" in command) == deterministic


@pytest.mark.parametrize(
    ("status", "printed", "log", "word", "said"),
    [
        (0, "largest difference 0.0", "export verified: loss 6.1", PASSED, "logits differ by 0.0e+00"),
        (0, "largest difference 0.5", "export verified: loss 6.1", FAILED, "logits differ by 5.0e-01"),
        (0, "largest difference 0.0", "nothing", FAILED, "train.log doesn't say"),
        (1, "", "export verified: loss 6.1", FAILED, "ValueError: no such model"),
    ],
)
def test_an_export_that_differs_is_a_failure(status, printed, log, word, said, monkeypatch, tmp_path):
    ended = subprocess.CompletedProcess([], status, printed, "Traceback\nValueError: no such model\n")
    monkeypatch.setattr(Runs, "reference", lambda runs: REFERENCE)
    monkeypatch.setattr(references.subprocess, "run", lambda *_, **__: ended)
    (tmp_path / "single").mkdir()
    (tmp_path / "single/train.log").write_text(log + "\n")
    found = Runs(tmp_path, "cpu").check_export()
    assert found.word == word and said in found.said


@pytest.mark.parametrize(("check", "precision"), [("check_fp8", "fp8"), ("check_memory_budget", "bf16")])
def test_fp8_and_memory_budgets_are_compared_with_fp32(check, precision, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(references, "half_precision", lambda device: "bf16")
    monkeypatch.setattr(Runs, "check_like_single", lambda runs, *given, **more: seen.append((given, more)))
    getattr(Runs(tmp_path, "cuda"), check)()
    ((strategy, processes, *settings), more) = seen[0]
    pairs = dict(zip(settings[::2], settings[1::2], strict=True))
    assert (strategy, processes, more["precision"]) == ("single", 1, precision)
    assert pairs["--precision"] == ("fp8" if precision == "fp8" else "auto") and pairs["--compile"] == "regional"
    assert pairs.get("--activation_checkpointing.memory_budget") == (None if precision == "fp8" else "0.5")
