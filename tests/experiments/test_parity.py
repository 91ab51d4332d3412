"""Tests for runs.py parity: curves, rejected strategies, and two real runs."""

import json
import math
import os
import re
import sys
import time
from pathlib import Path
from typing import get_args

import pytest
import torch

from pretrain.config import Optim, RunConfig
from pretrain.errors import EXIT_PREEMPTED, InputError
from pretrain.mesh_sizes import Sizes
from pretrain.optim import muon
from pretrain.optim.optimizers import OPTIMIZERS, optimizer_builder
from pretrain.processes import is_alive
from pretrain.recipe import as_yaml, read_run_config
from pretrain.runs.run_folder import read_json
from pretrain.training.auto_settings import resolve_auto
from pretrain_tools.experiments import parity
from pretrain_tools.experiments.parity import (
    Curve,
    StrategyOutcome,
    largest_distance,
    mistaken_launch,
    parity_config,
    read_curve,
    refusals,
    report_parity,
    strategy_names,
)
from support.project import ROOT, run_script
from support.warm_python import WarmPopen

REFERENCE = Curve({1: 6.0, 2: 5.0}, {1: 2.0, 2: 1.0})
EQUAL = StrategyOutcome(REFERENCE)
BOUNDS = (1e-5, 1e-4)
LOG = """W1121 05:10:04.368000 28475 run.py:874] Setting OMP_NUM_THREADS environment variable for each process to be 1
Testing the architecture ...
[2026-11-21 04:10:12,178] [WARNING] [real_accelerator.py:213:get_accelerator] Setting accelerator to CPU.
/x/y.py:3: FutureWarning: is deprecated
optim.name: adamw_8bit is not supported with zero1; use adamw or muon, or a strategy that supports it, such as ddp
batch.sequences_per_micro_batch: 3 is not a multiple of 2
E1121 05:10:12.243000 28475 api.py:1002] failed (exitcode: 2) local_rank: 0 (pid: 28537) of binary: python
Traceback (most recent call last):
ChildFailedError: train.py FAILED
  exitcode  : 2 (pid: 28537)
"""


def test_distances_are_absolute_or_relative():
    assert largest_distance({1: 5.25}, {1: 5.0}, relative=False) == 0.25
    assert largest_distance({1: 1.5}, {1: 2.0}, relative=True) == 0.25
    assert largest_distance({1: 0.0}, {1: 0.0}, relative=True) == 0
    assert largest_distance({1: 0.1}, {1: 0.0}, relative=True) == math.inf
    skipped = {1: math.nan}
    assert largest_distance(skipped, skipped, relative=True) == 0, "a step skipped in both runs counts as equal"
    for curve, reference in ((skipped, {1: 1.0}), ({1: 1.0}, skipped)):
        assert largest_distance(curve, reference, relative=False) == math.inf


def test_every_precision_has_a_tolerance():
    literal = RunConfig.model_fields["precision"].annotation
    assert set(parity.TOLERANCES) == set(get_args(literal)) - {"auto"}
    refused = run_script("runs.py", "parity", "--config", "r.yaml", "--precision", "fp4", check=False).stderr
    assert all(precision in refused.rpartition("choose from")[2] for precision in parity.TOLERANCES)
    bound, norm = parity.TOLERANCES["fp8"]
    assert parity.TOLERANCES["bf16"][0] < bound < 0.1 and norm is None


def test_the_distance_is_the_maximum_over_steps_and_infinite_for_a_missing_step():
    assert largest_distance({1: 6.0, 2: 5.25}, REFERENCE.loss, relative=False) == 0.25
    assert largest_distance({1: 6.0}, REFERENCE.loss, relative=False) == math.inf


def test_refusals_are_read_from_the_log_of_the_launch():
    assert refusals(LOG, 1) == LOG.splitlines()[4:6]
    assert refusals(LOG.replace("exitcode  : 2", "exitcode  : 1").replace("exitcode: 2", "exitcode: 1"), 1) == []
    assert refusals("model: nothing of the kind\n", 2) == ["model: nothing of the kind"], (
        "a single process has no torchrun output"
    )


def test_only_strategies_that_ran_decide_the_exit_status(recipe, tmp_path, monkeypatch, capsys):
    near = StrategyOutcome(Curve({1: 6.000001, 2: 5.0}, REFERENCE.grad_norm))
    far = StrategyOutcome(Curve({1: 6.1, 2: 5.0}, REFERENCE.grad_norm))
    refused = StrategyOutcome(None, ("optim.name: adamw_8bit is not supported with tp", "model: too small"))

    def compare(**outcomes: StrategyOutcome) -> tuple[int, str]:
        outcomes = {"single": EQUAL, **outcomes}
        monkeypatch.setattr(parity, "train_under", lambda name, *_: outcomes[name])
        options = {"steps": 2, "strategies": ",".join(outcomes), "processes": 2, "precision": "fp32"}
        return parity.compare_strategies(recipe, tmp_path, **options), capsys.readouterr().out

    status, out = compare(ddp=near)
    assert status == 0 and "1 of the 1 strategies that can run this recipe here match single" in out
    status, out = compare(ddp=near, tp=refused)
    assert status == 0 and "1 can't run it." in out
    assert re.search(r"tp +- +- +refused: optim.name: adamw_8bit is not supported with tp; model: too small\n", out)
    assert json.loads((tmp_path / "parity.json").read_text())["tp"]["refused"][1] == "model: too small"
    status, out = compare(ddp=EQUAL, zero3=far)
    assert status == 1 and re.search(r"zero3 +1.0e-01 +0.0e\+00 +DIFFERENT", out)
    assert json.loads((tmp_path / "parity.json").read_text())["zero3"]["same"] is False
    status, out = compare(ddp=EQUAL, zero3=StrategyOutcome(None))
    assert (
        status == 1 and f"FAILED: see {tmp_path / 'zero3'}.log" in out and "1 of the 2 strategies that can run" in out
    )
    status, out = compare(tp=refused)
    assert status == 1 and "Nothing was compared." in out


def test_a_non_finite_norm_is_read_as_nan(tmp_path):
    lines = [{"event": "start"}, {"event": "train", "step": 1, "loss": 6.5, "grad_norm": None}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert math.isnan(read_curve(tmp_path).grad_norm[1])


def test_bad_requests_are_refused_at_once(tmp_path):
    (tmp_path / "ddp").mkdir()
    refused = run_script(
        "runs.py", "parity", "--config", "recipes/demo.yaml", "--strategies", "ddp,zero4", "--output", tmp_path,
        "--processes", "1", "--mesh", "tp=2", check=False,
    )  # fmt: skip
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert "zero4 is unknown; did you mean zero" in refused.stderr
    assert f"{tmp_path / 'ddp'} already exists" in refused.stderr
    assert "--processes: must be at least 2, got 1; with one process, all" in refused.stderr
    refused = run_script("runs.py", "parity", "--config", "recipes/demo.yaml", "--steps", "0", check=False)
    assert refused.returncode == 2 and "argument --steps: must be greater than 0, got 0" in refused.stderr
    alone = {"steps": 2, "strategies": "single", "processes": 2, "precision": "fp32"}
    with pytest.raises(InputError, match="single is the reference; name at least one other"):
        parity.compare_strategies(ROOT / "recipes/demo.yaml", tmp_path / "out", **alone)
    with pytest.raises(InputError, match="--output s3://b/x: must be a local path"):
        parity.compare_strategies(ROOT / "recipes/demo.yaml", Path("s3://b/x"), **alone)
    assert not (tmp_path / "out").exists()


def test_a_recipe_that_cannot_run_at_all_is_refused_with_the_reason(recipe, tmp_path):
    recipe.write_text(recipe.read_text().replace("tokens_per_step: 256", "tokens_per_step: 250"))
    refused = run_script(
        "runs.py", "parity", "--config", recipe, "--strategies", "ddp", "--output", tmp_path / "out", check=False
    )
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert "batch.tokens_per_step" in refused.stderr and "[2/2]" not in refused.stderr


def short_recipe(recipe, changes, folder):
    """Returns the recipe that parity writes, as train.py reads it."""
    config = resolve_auto(read_run_config(recipe, changes), 2)
    (folder / "parity.yaml").write_text(as_yaml(parity_config(config, 20, "fp32")))
    return read_run_config(folder / "parity.yaml")


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_can_be_shortened(recipe, tmp_path):
    short = short_recipe(recipe, [], tmp_path)
    assert (short.budget.steps, short.precision, short.checkpoint.every_steps) == (20, "fp32", 20)
    assert short.optim.warmup_steps <= 2


def test_settings_can_be_changed_on_the_command_line(tmp_path):
    """The budget in `changes` determines auto settings, but the runs are short."""
    for budget in ("tokens", "steps"):
        changes = [("optim.name", "adamw"), (f"budget.{budget}", "9000"), ("checkpoint.every_tokens", "9M")]
        short = short_recipe(ROOT / "recipes/demo.yaml", changes, tmp_path)
        assert (short.optim.name, short.budget.steps, short.checkpoint.every_steps) == ("adamw", 20, 20)


def test_nothing_is_uploaded(recipe, tmp_path):
    assert short_recipe(recipe, [("hub.repository", "me/tiny")], tmp_path).hub.repository is None


def test_the_script_refuses_a_setting_that_does_not_exist(recipe, tmp_path):
    refused = run_script(
        "runs.py", "parity", "--config", recipe, "--optim.nam", "adamw", "--output", tmp_path / "out", check=False
    )
    assert refused.returncode == 2 and "optim.nam: unknown key; did you mean name?" in refused.stderr


def test_every_accelerate_config_is_a_strategy():
    names = strategy_names()
    assert "single" in names and len(names) == len(set(names))
    assert set(names) == {path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")}


def test_an_optimizer_that_computes_in_bf16_is_compared_as_bf16(recipe, tmp_path, monkeypatch, capsys):
    curves = {"single": REFERENCE, "ddp": Curve({1: 6.001, 2: 5.0}, REFERENCE.grad_norm)}
    monkeypatch.setattr(parity, "train_under", lambda name, *arguments: StrategyOutcome(curves[name]))

    def compare(name: str, in_bf16: bool) -> int:
        monkeypatch.setattr(parity, "missing_bf16", lambda device_type: None if in_bf16 else "none")
        options = {"steps": 2, "strategies": "ddp", "processes": 2, "precision": "fp32"}
        folder = tmp_path / f"{name}_{in_bf16}"
        folder.mkdir()
        text = recipe.read_text().replace("optim:", f"optim:\n  name: {name}")
        (folder / "recipe.yaml").write_text(text)
        return parity.compare_strategies(folder / "recipe.yaml", folder, **options)

    assert compare("adamw", True) == 1 and "bf16" not in capsys.readouterr().out
    assert compare("muon", False) == 1 and "bf16" not in capsys.readouterr().out
    assert (
        compare("muon", True) == 0 and "muon computes its updates in bf16 on this machine" in capsys.readouterr().out
    )


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_the_list_of_optimizers_that_compute_in_bf16_is_right(name, monkeypatch):
    """An optimizer is listed as computing in bf16 if and only if its update depends on the device's bf16 support."""
    updated = []
    for missing in (None, "no bf16 instructions"):
        monkeypatch.setattr(muon, "missing_bf16", lambda device_type, missing=missing: missing)
        model = torch.nn.ModuleDict({"up": torch.nn.Linear(8, 6, bias=False), "norm": torch.nn.LayerNorm(6)})
        model.get_output_embeddings = lambda: None
        weight = model["up"].weight
        weight.data = torch.linspace(-1, 1, 48).view(6, 8)
        optimizer = optimizer_builder(Optim(name=name, learning_rate=0.1), model, 0.1, seed=0, device_type="cpu")(
            list(model.named_parameters())
        )
        weight.grad = torch.linspace(0, 3, 48).view(6, 8).sin()
        optimizer.step()
        updated.append(weight.detach())
    assert torch.equal(*updated) == (not OPTIMIZERS[name].updates_in_bf16)


MACHINE = """\
import os, subprocess, sys, time
from pathlib import Path
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
rank = options["--machine_rank"]
assert options["--num_machines"] == "2" and os.environ["NCCL_HOSTID"] == f"machine-{rank}"
(Path(sys.argv[1]) / rank).write_text(options["--main_process_port"])
if rank == "1":
    while not (Path(sys.argv[1]) / "child").exists():
        time.sleep(0.02)
    sys.exit(5)
child = subprocess.Popen(["sleep", "600"], start_new_session=True)  # as torch's launcher starts a rank
(Path(sys.argv[1]) / "writing").write_text(str(child.pid))
(Path(sys.argv[1]) / "writing").rename(Path(sys.argv[1]) / "child")
time.sleep(600)
"""


def wait_until_dead(rank: int) -> None:
    end = time.monotonic() + 60
    while is_alive(rank):
        assert time.monotonic() < end, "the rank must be killed"
        time.sleep(0.02)


def test_processes_that_share_a_gpu_are_machines_with_one_rendezvous_and_end_together(tmp_path):
    command = [sys.executable, "-c", MACHINE, str(tmp_path), "--main_process_port", "0", parity.SCRIPT, "recipe"]
    with (tmp_path / "log").open("w") as log:
        assert parity.run_on_one_gpu(command, 2, log) == 5, (tmp_path / "log").read_text()
    assert (tmp_path / "1").read_text() not in ("", "0")
    wait_until_dead(int((tmp_path / "child").read_text()))


INTERRUPTED = """\
import os, signal, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
open(sys.argv[1], "w").write(str(child.pid))
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(600)
"""


def test_a_signal_ends_the_training_processes(recipe, tmp_path, monkeypatch, capsys):
    child = tmp_path / "child"
    monkeypatch.setattr(parity, "launch_command", lambda *_: [sys.executable, "-c", INTERRUPTED, str(child)])
    options = {"steps": 2, "strategies": "ddp", "processes": 2, "precision": "fp32"}
    with pytest.raises(SystemExit) as end:
        parity.compare_strategies(recipe, tmp_path / "out", **options)
    assert end.value.code == EXIT_PREEMPTED and f"interrupted; remove {tmp_path / 'out'}" in capsys.readouterr().err
    wait_until_dead(int(child.read_text()))


def test_a_strategy_and_a_mesh_match_one_process(recipe, tmp_path, capsys, monkeypatch):
    """STRATEGIES=all tests all meshes of four processes. The strategy is launched as if its processes shared a single
    GPU. Relative paths in the recipe must refer to the current folder."""
    recipe.write_text(recipe.read_text().replace(f"{tmp_path}/", ""))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parity.subprocess, "Popen", WarmPopen)
    gpus = iter([1])
    monkeypatch.setattr("torch.cuda.device_count", lambda: next(gpus, 0))
    everything = os.environ.get("STRATEGIES") == "all"
    processes, mesh = (4, "all") if everything else (2, "cp=2")
    options = {"steps": 3, "strategies": "fsdp2", "mesh": mesh, "processes": processes, "precision": "fp32"}
    changes = [
        ("model.num_hidden_layers", "4"),
        ("batch.sequences_per_micro_batch", "1"),
        ("pipeline.schedule", "1F1B"),
    ]
    status = parity.compare_strategies(recipe, tmp_path / "out", changes=changes, **options)
    assert status == 0, capsys.readouterr()
    found = json.loads((tmp_path / "out/parity.json").read_text())
    assert list(found) == ["fsdp2", *parity.products_asked_for(mesh, processes, has_experts=False)]
    fsdp2 = found.pop("fsdp2")
    assert fsdp2["same"] and fsdp2["loss"] < 1e-5
    for name, result in found.items():
        if "refused" not in result:
            record = read_json(tmp_path / "out" / name / "strategy.json")
            assert parity.named(Sizes(**record["mesh"])) == name and result["loss"] < 1e-5
    refused = {name for name, result in found.items() if "refused" in result}
    assert refused == ({"tp4"} if everything else set()), "tp4 must be rejected: the model has two KV heads"
    names = ("single", "fsdp2")
    curves = {name: read_curve(tmp_path / "out" / name) for name in names}
    for curve in curves.values():
        assert list(curve.loss) == list(curve.grad_norm) == [1, 2, 3]
    records = [read_json(tmp_path / "out" / name / "strategy.json") for name in names]
    assert [(one["strategy"], one["ranks"]) for one in records] == [("single", 1), ("fsdp2", processes)]
    capsys.readouterr()
    other = Curve({step: loss + 1e-4 for step, loss in curves["fsdp2"].loss.items()}, curves["fsdp2"].grad_norm)
    outcomes = {"single": StrategyOutcome(curves["single"]), "fsdp2": StrategyOutcome(other)}
    assert not report_parity(outcomes, parity.TOLERANCES["fp32"], tmp_path)


def test_losses_that_are_not_finite_are_counted(tmp_path, capsys):
    outcome = StrategyOutcome(Curve({1: 5.0, 2: math.nan, 3: math.nan}, {1: 1.0, 2: math.nan, 3: math.nan}))
    report_parity({"single": outcome, "ddp": outcome}, parity.TOLERANCES["fp32"], tmp_path)
    assert "warning: single has a finite loss in only 1 of 3 steps" in capsys.readouterr().out
    shorter = StrategyOutcome(Curve({1: 5.0}, {1: 1.0}))
    report_parity({"single": outcome, "ddp": shorter}, parity.TOLERANCES["fp32"], tmp_path)
    found = json.loads((tmp_path / "parity.json").read_text())["ddp"]
    assert found == {"loss": None, "grad_norm": None, "same": False}, "JSON has no infinity"


def test_all_meshes_of_four_processes():
    names = parity.products_asked_for("all", 4, has_experts=False)
    assert len(names) == len(set(names)) == 14, "two dimensions of size 2 or one of size 4, without pure replication"
    assert {"dp_shard4", "pp2-tp2", "dp_replicate2-cp2"} <= set(names)
    with_experts = parity.products_asked_for("all", 4, has_experts=True)
    assert set(names) < set(with_experts) and "dp_shard4-ep2" in with_experts
    assert parity.products_asked_for("tp=2", 4, False) == ["dp_shard2-tp2"], "the other dimension must be sharding"
    assert all(parity.named(parity.sizes_called(name)) == name for name in with_experts)
    assert parity.sizes_called("zero1") is parity.sizes_called("fsdp2") is parity.sizes_called("pp") is None


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("tp=two", "tp=two is invalid; use all, or sizes for pp, dp_replicate, dp_shard, cp, tp, ep"),
        ("sp=2", "sp=2 is invalid"),
        ("tp=3", "tp=3 doesn't fit --processes 4; use sizes whose product is the number of processes"),
        ("pp=2,ep=4", "ep isn't part of the product, but must divide dp_shard x cp x tp"),
    ],
)
def test_impossible_meshes_are_rejected_with_the_possible_ones(mesh, message):
    with pytest.raises(InputError) as raised:
        parity.products_asked_for(mesh, 4, has_experts=True)
    assert message in str(raised.value)


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 2), ("fsdp2", 1), ("single", 1)])
def test_a_run_under_the_wrong_strategy_fails(strategy, ranks, tmp_path, monkeypatch, capsys):
    run = tmp_path / "fsdp2"
    run.mkdir()
    (run / "strategy.json").write_text(json.dumps({"strategy": strategy, "ranks": ranks}))
    monkeypatch.setattr(parity, "run_together", lambda *_: 0)
    assert parity.train_under("fsdp2", 2, tmp_path / "recipe.yaml", run, []) == StrategyOutcome(None)
    said = f"{run}: trained with {strategy} on {ranks} processes instead of fsdp2 on 2\n"
    assert capsys.readouterr().err == (tmp_path / "fsdp2.log").read_text() == said


@pytest.mark.parametrize("name", ["zero3_offload", "zero3_offload_nvme"])
def test_runs_record_the_stage_of_zero_but_not_where_it_offloads_to(name, tmp_path):
    (tmp_path / "strategy.json").write_text(json.dumps({"strategy": "zero3", "ranks": 2}))
    assert parity.mistaken_launch(tmp_path, name, 2) is None
    assert "instead of zero2 on 2" in parity.mistaken_launch(tmp_path, "zero2", 2)


def test_the_sizes_in_mesh_yaml_are_those_of_fsdp2(tmp_path):
    (tmp_path / "strategy.json").write_text('{"strategy": "fsdp2", "ranks": 2}')
    assert mistaken_launch(tmp_path, "mesh", 2) is None
    assert "trained with fsdp2 on 2 processes instead of ddp on 2" in mistaken_launch(tmp_path, "ddp", 2)
