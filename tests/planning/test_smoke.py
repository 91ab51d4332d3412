"""Tests for train.py --smoke: each check passes or fails, including under a sharded strategy."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch

from pretrain.errors import EXIT_INTERRUPTED, InputError
from pretrain.recipe import read_run_config
from pretrain.training.run_plan import derive, due_after
from pretrain_tools.planning import smoke
from pretrain_tools.planning.smoke import memory_problem, short_config
from pretrain_tools.runs.history import append_events
from support.project import launch, run_script
from support.run_folders import write_run

PARTS = ("the loss falls", "gradient norms", "learning rate", "resumed exactly", "checkpoint", "model folder")


@pytest.mark.parametrize("strategy", ["zero3"])
def test_every_part_of_a_sound_recipe_passes(recipe, tmp_path, strategy):
    out = launch(strategy, 2, "train.py", "--config", recipe, "--smoke").stdout
    assert [line for line in out.splitlines() if line.startswith(("ok", "FAIL"))] == [
        f"ok    {part}" for part in PARTS
    ]
    assert (tmp_path / "run-smoke/metrics.jsonl").exists() and not (tmp_path / "run").exists()


def test_memory_above_the_plan_is_a_failure_and_memory_below_it_is_not():
    assert memory_problem(1.14e9, 1e9) is None and memory_problem(0.5e9, 1e9) is None
    assert memory_problem(1.2e9, 1e9).startswith("peak memory was 1.2 GB, but the plan predicted 1 GB")
    assert memory_problem(40e6, 10e6) is None, "a difference of a few megabytes must be ignored"


ONE_PROCESS = SimpleNamespace(is_main=True, barrier=lambda: None, gather=lambda value: [value], print=print)


@pytest.mark.parametrize(
    ("last_loss", "resumed_loss", "problems", "failed"),
    [
        (4.0, 4.0, [], []),
        (6.0, 6.0, [], ["the loss falls"]),
        (4.0, 4.001, [], ["resumed exactly"]),
        (4.0, 4.0, ["logits differ"], ["model folder"]),
    ],
)
def test_a_failed_check_is_named(recipe, monkeypatch, capsys, last_loss, resumed_loss, problems, failed):
    """Recorded runs replace training: 12 steps, and a run resumed halfway."""
    config = read_run_config(recipe)
    planned = derive(config, 1).learning_rate

    def train(config, steps):
        run = config.output
        first = run / "first-end"
        if first.exists():  # second training
            first.rename(run / "checkpoints" / f"step-{steps:08d}")
            (run / "elsewhere").rename(run / "final")
        else:
            write_run(run, steps=(steps // 2, steps))
            (run / "metrics.jsonl").unlink()
            shutil.copytree(run / "final", run / "elsewhere")
        again = list(range(steps // 2 + 1, steps + 1)) if (run / "metrics.jsonl").exists() else []
        append_events(run, [
            {"event": "train", "step": step, "grad_norm": 1.0, "learning_rate": planned(step - 1),
             "loss": 6.0 if step < steps else resumed_loss if again else last_loss}
            for step in again or range(1, steps + 1)
        ] + [{"event": "export", "step": steps, "problems": problems}])  # fmt: skip
        return 0

    strategy = SimpleNamespace(data_ranks=1, micro_batches_per_call=1, ranks=ONE_PROCESS, device=torch.device("cpu"))
    assert smoke.smoke_test(config, strategy, train) == (1 if failed else 0)
    out = capsys.readouterr().out
    assert [line[6:].split(":")[0] for line in out.splitlines() if line.startswith("FAIL")] == failed
    assert out.count("\nok ") + out.startswith("ok ") == len(PARTS) - len(failed)


def test_a_signal_during_the_check_of_the_model_ends_the_test(recipe):
    strategy = SimpleNamespace(data_ranks=1, micro_batches_per_call=1, ranks=ONE_PROCESS)

    def train(short, last_step):
        short.output.mkdir()
        append_events(short.output, [{"event": "train", "step": last_step}])  # but no export
        return 0

    assert smoke.smoke_test(read_run_config(recipe), strategy, train) == EXIT_INTERRUPTED


def test_a_run_of_one_step_is_refused(recipe):
    strategy = SimpleNamespace(data_ranks=1, micro_batches_per_call=1, ranks=ONE_PROCESS)
    config = read_run_config(recipe, [("budget.steps", "1"), ("optim.warmup_steps", "0")])
    with pytest.raises(InputError, match="at least 2 steps"):
        smoke.smoke_test(config, strategy, lambda short, last_step: 9)


@pytest.mark.parametrize(("steps", "saved"), [(12, [6, 12]), (13, [7, 13]), (3, [2, 3]), (500, [50, 100])])
def test_the_middle_is_the_only_checkpoint_before_the_end(recipe, steps, saved):
    """Otherwise, the run wouldn't resume from the middle."""
    strategy = SimpleNamespace(data_ranks=1, micro_batches_per_call=1, ranks=ONE_PROCESS)

    def train(short, last_step):
        plan = derive(short, 1)
        assert [step for step in range(1, last_step + 1) if due_after(step, short, plan).saves] == saved
        return 9

    config = read_run_config(recipe, [("budget.steps", str(steps))])
    assert smoke.smoke_test(config, strategy, train) == 9


def test_nothing_is_uploaded_and_nothing_ends_the_run_early(recipe):
    changes = [("hub.repository", "me/tiny"), ("checkpoint.mirror", "s3://x/y"), ("checkpoint.stop_at_step", "6")]
    changes += [("branch_from", "runs/x@1000"), ("budget.minutes", "1")]
    config = short_config(read_run_config(recipe, changes), 6)
    assert config.budget.minutes is None
    assert (config.hub.repository, config.checkpoint.mirror) == (None, None)
    assert (config.branch_from, config.checkpoint.stop_at_step) == (None, None)


def test_flags_that_exclude_each_other(recipe):
    refused = run_script("train.py", "--config", recipe, "--smoke", "--check", check=False)
    assert refused.returncode == 2 and "use --check, --check --verbose, or --smoke" in refused.stderr


def test_where_every_setting_comes_from(recipe):
    out = run_script("train.py", "--config", recipe, "--check", "--verbose", "--optim.eps", "1e-7").stdout
    rows = {line.split()[0]: line.split(None, 1)[1] for line in out.splitlines() if line and "  " in line}
    assert rows["optim.eps"].split() == ["1e-07", "command", "line"]
    assert rows["optim.learning_rate"].split() == ["0.003", str(recipe)]
    assert rows["optim.betas.0"].split() == ["0.9", "default"]
    assert "this run can start" in out
    assert json.loads(rows["budget.steps"].split()[0]) == 12


def test_a_folder_that_is_not_from_a_smoke_test_is_kept(recipe, tmp_path):
    notes = tmp_path / "run-smoke/notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    refused = run_script("train.py", "--config", recipe, "--smoke", check=False)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr and notes.read_text() == "mine"
    assert f"--smoke: would overwrite {notes.parent}, which isn't from a smoke test" in refused.stderr
    (notes.parent / "metrics.jsonl").touch()
    assert smoke.folder_problem(notes.parent) is None
    (notes.parent / "checkpoints/step-00000200").mkdir(parents=True)
    assert "isn't from a smoke test" in smoke.folder_problem(notes.parent)
