"""Tests for `make gpu` without a GPU: order of checks, resuming, the report, and the checks themselves on a CPU."""

import json
import os
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
from pretrain.gpus import GPUS
from pretrain.model import attention as attention_module
from pretrain.model import loss as loss_module
from pretrain.processes import is_alive
from pretrain_tools.experiments.parity import Curve, StrategyOutcome
from support.project import run_script, start_script

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
    assert speeds[14:17] == ["124m plain_compiled", "124m bare_compiled", "124m trainer"]
    assert len(speeds) == len(set(speeds)) == 4 * 2 * 4 * 3 + 4 * 3 + 6


def test_what_cannot_run_here_says_why(monkeypatch, tmp_path):
    reasons = {check.name: check.why_not for check in strategy_checks(Runs(tmp_path, "cuda"), 0, None)}
    assert reasons["strategy ddp"] == "needs a GPU, but there is none"
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda name: None)
    checks = {check.name: check for check in strategy_checks(Runs(tmp_path, "cuda"), 6, "no triton")}
    assert checks["strategy fsdp2 with default kernels"].why_not == "no triton"
    assert checks["strategy zero2"].why_not == "deepspeed is not installed" and checks["strategy tp"].why_not is None
    assert checks["strategy tp"].measure.args == ("tp", 4), (
        "the number of processes must be a power of two, to divide heads and layers"
    )
    assert "triton" in gpu_check.missing_compiler()
    with pytest.raises(InputError, match=r"has no torch, transformers, accelerate, pydantic; install them"):
        gpu_check.require_packages()
    speeds = {check.name: check.why_not for check in speed_checks(SCALES["cuda"], "cpu", None)}
    assert "flash_attention_2 does not run on cpu" in speeds["speed 124m documents flash_attention_2 logits"]
    assert "too large" in speeds["speed 7b trainer"]


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
    lines, good = verdict(checks[2:], results, GPU_SHAPES, 1e15, "h100")
    assert lines == ["incomplete: 2 missing"] and not good


def test_bars_name_gpus_and_shapes_that_are_known():
    for gpu_name, shape in gpu_check.BARS:
        assert gpu_name in GPUS and shape in GPU_SHAPES


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
    command = held["contestant"].command
    tokens = str(processes * GPU_SHAPES[shape].tokens_per_step)
    assert command[:2] == ["-m", "accelerate.commands.launch"] and f"accelerate_configs/{strategy}.yaml" in command
    assert command[command.index("--num_processes") + 1] == str(processes)
    assert command[command.index("--batch.tokens_per_step") + 1] == tokens
    assert ("--optim.name" in command) == adafactor
    assert outcome.word == PASSED and outcome.figures["row"]["gpus"] == processes
    lines = "\n".join(gpu_check.gpu.table(shape, GPU_SHAPES[shape], [Row(**outcome.figures["row"])], 1e15))
    mfu = gpu_check.flops_per_token(GPU_SHAPES[shape]) * 1000.0 / 1e15
    assert f"| {strategy}, {processes} GPUs | off |" in lines and f"| {mfu:.1%} |" in lines


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


@pytest.mark.parametrize("backend", ["chunked", "logits"])
def test_losses_are_right_on_a_cpu_and_a_wrong_one_is_detected(backend, monkeypatch):
    assert check_loss(backend, "cpu", SCALES["cpu"].loss_sizes).word == PASSED
    right = loss_module.LOSS_BACKENDS[backend]

    def wrong(hidden, *rest):
        loss, cross_entropy = right(hidden * 1.01, *rest)
        return loss, cross_entropy

    monkeypatch.setitem(loss_module.LOSS_BACKENDS, backend, wrong)
    if backend != "logits":  # the reference
        found = check_loss(backend, "cpu", SCALES["cpu"].loss_sizes)
        assert found.word == FAILED and "fp32: error" in found.said


def test_attention_is_right_on_a_cpu_and_a_wrong_document_end_is_detected(monkeypatch):
    found = check_attention("sdpa", "cpu")
    assert found.word == PASSED and len(found.figures["errors"]) == 4
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
