"""Settings that may be unintended must be reported with numbers, both by --check and during the run."""

import json
import shutil

import pytest
import torch

from pretrain.data.shards import read_manifest
from pretrain.errors import EXIT_INTERRUPTED
from pretrain.model import bf16_cpu_attention
from pretrain.optim.optimizers import OPTIMIZERS
from pretrain.recipe import read_run_config
from pretrain.training import run_records
from pretrain.training.run_plan import derive
from pretrain.training.run_records import banner, start_warnings
from pretrain_tools.publishing.facts import read_facts
from support.project import events, run_in_turn, run_script

CPU = torch.device("cpu")
OLD_CPU = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


def said(recipe, *overrides):
    config = read_run_config(recipe, list(overrides))
    return start_warnings(config, derive(config, ranks=1), frozenset(name for name, _ in overrides), CPU)


AUTO, AUTO_MUON = (OPTIMIZERS[name].auto_learning_rate(0, 256) for name in ("adamw", "muon"))
"""Learning rates for the recipe's model and batch size."""


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"optim.learning_rate": f"{10 * AUTO}"}, "is 10 times auto's value for adamw at"),
        ({"optim.learning_rate": f"{AUTO / 10}"}, "is 1/10 of auto's value for adamw at"),
        ({"optim.learning_rate_per_sequence": f"{10 * AUTO}"}, "the peak of 0.0543 is 20 times auto's"),
        ({"optim.learning_rate": f"{4 * AUTO}"}, None),
        ({"optim.learning_rate": "auto"}, None),
        ({"optim.name": "muon", "optim.learning_rate": f"{AUTO_MUON}"}, None),
        ({"optim.name": "muon", "optim.learning_rate": f"{AUTO_MUON / 8}"}, "1/8 of auto's value for muon at"),
        # The recipe's 3e-3 is close to AdamW's value, but wasn't chosen for Muon.
        ({"optim.name": "muon"}, "recipe, although --optim.name muon is on the command line, and is 1/2.59 of"),
        ({"optim.name": "muon", "optim.learning_rate": "3e-3"}, None),
        ({"optim.name": "adafactor"}, None),
    ],
)  # fmt: skip
def test_a_learning_rate_far_from_auto_is_reported(recipe, overrides, message):
    found = said(recipe, *overrides.items())
    assert found == [] if message is None else len(found) == 1 and message in found[0]
    assert message is None or "parameters, 0.0" in found[0], "the warning must show auto's value"


def test_the_demo_with_adamw_reports_both_learning_rates(shards):
    name, rate = said("recipes/demo.yaml", ("data.train.0.shards", str(shards)), ("optim.name", "adamw"))[0].split(
        ": "
    )
    assert name == "optim.learning_rate"
    assert rate.startswith("the peak of 0.01 is from the recipe, although --optim.name adamw is on the command line")
    assert "line, and is 3." in rate
    assert "auto's value for adamw at 2.69M parameters, 0.00272;" in rate
    assert said("recipes/demo.yaml", ("data.train.0.shards", str(shards))) == []


@pytest.mark.parametrize(
    ("unsupported", "problem", "overrides", "warns"),
    [
        (None, "no g++", {"precision": "bf16"}, True),
        (None, "no g++", {"precision": "fp32"}, False),
        (None, "no g++", {"precision": "bf16", "attention": "eager"}, False),
        (None, None, {"precision": "bf16"}, False),
        ("an old CPU", "an old CPU", {"precision": "bf16"}, False),
    ],
)
def test_a_missing_attention_kernel_is_reported(monkeypatch, recipe, unsupported, problem, overrides, warns):
    monkeypatch.setattr(run_records, "environment_warnings", lambda device: [])
    monkeypatch.setattr(bf16_cpu_attention, "why_unsupported", lambda: unsupported)
    monkeypatch.setattr(bf16_cpu_attention, "why_not", lambda: problem)
    plan = derive(read_run_config(recipe, list(overrides.items())), ranks=1)
    found = run_records.machine_warnings(plan, CPU)
    assert bool(found) == warns and all("several times as long" in w and w.endswith(": no g++") for w in found)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (512, None),
        (520, None),  # eight unused rows are less than 1 % of the parameters
        (2048, "vocabulary: the model has 2,048 rows, but the data has only 512 token IDs, so 98.3k of "),
        ("auto", None),
    ],
)
def test_a_vocabulary_larger_than_the_datas_is_reported(recipe, rows, message):
    found = said(recipe, ("model.vocab_size", str(rows)))
    assert found == [] if message is None else len(found) == 1 and found[0].startswith(message)
    if message:
        total = derive(read_run_config(recipe, [("model.vocab_size", str(rows))]), ranks=1).parameters
        assert f"({1536 * 64 / total:.0%}) are unused; use --model.vocab_size auto to make it 512" in found[0]


def test_an_emulated_precision_is_reported_if_it_was_requested(recipe, monkeypatch):
    emulation = "bf16 is emulated here (12 against 240)"
    monkeypatch.setattr(run_records, "emulation_of_bf16", lambda device: emulation)
    assert said(recipe, ("precision", "bf16")) == [
        "precision: bf16 is emulated here (12 against 240); use precision: fp32 or auto"
    ]
    assert said(recipe, ("precision", "auto")) == said(recipe) == []


def test_the_banner_explains_why_auto_is_fp32(recipe, monkeypatch):
    monkeypatch.setattr(
        "pretrain.training.run_records.missing_bf16", lambda device_type: "this CPU has no bf16 instructions"
    )
    monkeypatch.setattr(
        "pretrain.parallel.strategy.missing_bf16", lambda device_type: "this CPU has no bf16 instructions"
    )

    def row(precision):
        config = read_run_config(recipe, [("precision", precision)])
        return next(
            line for line in banner(config, derive(config, 1), {}).splitlines() if line.startswith("precision")
        )

    assert "  fp32 (auto: this CPU has no bf16 instructions), weights and optimizer in fp32" in row("auto")
    assert "  fp32, weights" in row("fp32") and "  bf16, weights" in row("bf16")


def test_the_banner_shows_device_and_kernels(recipe, monkeypatch):
    config = read_run_config(recipe, [])
    run = derive(config, 1)
    assert "kernels" not in banner(config, run, {}) and banner(config, run, {}).startswith("device  ")
    answers = {
        "device_type": lambda: "cuda",
        "device_in_words": lambda device: "a GPU",
        "kernels_used": lambda requested, attention, **here: f"{attention} in {here['dtype']}",
    }
    for name, answer in answers.items():
        home = "pretrain.model.kernels" if name.startswith("kernels") else "pretrain.training.run_records"
        monkeypatch.setattr(f"{home}.{name}", answer)
    rows = dict(line.split("  ", 1) for line in banner(config, run, {}).splitlines())
    found = {name: rows[name].strip() for name in ("device", "kernels")}
    assert found == {
        "device": "a GPU",
        "kernels": "groundwork_sdpa in torch.float32",
    }


@pytest.mark.parametrize("masked", ["true", "false"])
def test_the_banner_explains_mfu_with_a_document_mask(recipe, masked):
    config = read_run_config(recipe, [("data.document_mask", masked)])
    (row,) = [
        line for line in banner(config, derive(config, 1), {}).splitlines() if line.startswith("FLOPs per token")
    ]
    assert ("MFU also counts attention between documents" in row) == (masked == "true")


def test_check_and_run_warn_on_an_old_cpu(recipe, tmp_path):
    """Runs the script with environment variables that disable the CPU's newer instructions."""
    asked = ("train.py", "--config", recipe, "--precision", "bf16", "--budget.steps", "2", "--optim.warmup_steps", "0")
    environment = OLD_CPU | {"CUDA_VISIBLE_DEVICES": ""}
    warning = "warning: precision: bf16 is emulated here"
    (checked, _), (told, _) = run_in_turn((*asked, "--check"), asked, **environment)
    assert warning in checked and "GFLOP/s); use precision: fp32 or auto" in checked
    assert "this run can start" in checked
    assert warning in told
    assert "bf16 is emulated here" in events(tmp_path / "run", "warning")[0]["message"]


def test_benchmarks_that_would_never_run_are_reported(recipe):
    (found,) = said(recipe, ("benchmarks.tasks", "[mine]"))
    assert found == "benchmarks: nothing is evaluated during training; set every_steps or every_tokens"


def test_the_sources_of_a_changed_mixture_are_recorded(recipe, tmp_path, shards):
    """The model card lists every source that the run read, including those added by a resume."""
    shutil.copytree(shards, tmp_path / "other")
    asked = ("train.py", "--config", recipe, "--validation.every_steps", "null")
    changed = ("--data.train", f"[{{shards: {tmp_path / 'other'}}}]")
    assert run_script(*asked, "--checkpoint.stop_at_step", "4", check=False).returncode == EXIT_INTERRUPTED
    run_script(*asked, *changed)
    run = tmp_path / "run"
    records = json.loads((run / "data.json").read_text())
    assert set(records) == {str(shards), str(tmp_path / "other")}
    assert records[str(shards)] == records[str(tmp_path / "other")]
    found = [(source.stage, source.name, source.tokens) for source in read_facts(run).sources]
    tokens = read_manifest(shards).totals("train")[0]
    assert found == [("steps 1 to 4", "source", tokens), ("from step 5 on", "other", tokens)]
