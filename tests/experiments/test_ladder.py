"""Tests for runs.py ladder: which runs are used, what is predicted and which requests are rejected."""

import json
import math
from pathlib import Path

import pytest
import yaml

from pretrain.errors import InputError
from pretrain.model.build import matrix_parameters
from pretrain.model.model_config import load_model_config
from pretrain_tools.experiments.ladder import LadderRun, read_ladder_runs, report_ladder, rungs_of
from support.project import ROOT, run_script
from support.tiny_models import LLAMA

WIDTHS = (32, 48, 64, 96, 128)


def loss_of(parameters, tokens):
    return 1.5 + 30 / parameters**0.3 + 60 / tokens**0.3


def write_ladder_run(
    folder, width, *, per_parameter=20, off=1.0, seed=1, ended=True, tokenizer="a", batch=None, model=(), **optim
):
    """Writes a run folder as train.py would, with the loss from a scaling law. Returns (N, tokens, loss)."""
    folder.mkdir(parents=True)
    file = folder / "model.json"
    file.write_text(json.dumps({**LLAMA, "hidden_size": width, "intermediate_size": 4 * width, **dict(model)}))
    parameters = matrix_parameters(load_model_config(str(file)))
    tokens = per_parameter * parameters
    optim = {"learning_rate": 1e-3, "schedule": "cosine", "warmup_steps": 1, **optim}
    settings = {"seed": seed, "output": str(folder), "data": {"sequence_length": 64}, "optim": optim}
    settings |= {"batch": {"tokens_per_step": batch}} if batch else {}
    settings |= {"diagnostics": {"every_steps": seed}, "energy": {"carbon_grams_per_kwh": seed}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    (folder / "data.json").write_text(json.dumps({"data/x": {"tokenizer": {"sha256": tokenizer}}}))
    lines = [{"event": "start", "step": 0, "total_steps": 10}]
    for step in (2, 5, 10):
        seen = tokens * step // 10
        lines.append({"event": "train", "step": step, "tokens": seen, "loss": 3.0})
        loss = loss_of(parameters, seen) * off
        lines.append({"event": "validation", "step": step, "source": "x", "loss": loss})
    lines += [{"event": "end", "code": 0, "step": 10}] * ended
    text = "".join(json.dumps({**line, "time": 1.0 + n}) + "\n" for n, line in enumerate(lines))
    (folder / "metrics.jsonl").write_text(text)
    return parameters, tokens, loss


def refusal(*folders, predict=()) -> str:
    with pytest.raises(InputError) as caught:
        report_ladder(folders, predict=predict, output=None)
    return "\n".join(caught.value.problems)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Four sizes with two seeds each, a run with a worse learning rate at the smallest size, and two unusable runs."""
    folder = tmp_path_factory.mktemp("sweeps") / "sizes"
    for width in WIDTHS[:-1]:
        for seed in (1, 2):
            write_ladder_run(
                folder / f"runs/width={width},seed={seed}", width, seed=seed, off=1 + 0.002 * (seed - 1.5)
            )
    write_ladder_run(folder / "runs/worse", WIDTHS[0], off=1.1, learning_rate=1e-5)
    write_ladder_run(folder / "runs/not_ended", WIDTHS[-1], ended=False)
    write_ladder_run(folder / "runs/diverged", WIDTHS[-1], off=math.nan)
    return folder


def test_a_larger_size_is_predicted_as_text_json_and_picture(sweep, tmp_path):
    parameters, tokens, loss = write_ladder_run(tmp_path / "larger", 160)
    asked = f"parameters={parameters},tokens={tokens}"
    recipe = ROOT / "recipes/llama_125m.yaml"
    said = run_script("runs.py", "ladder", sweep, "--predict", asked, "--predict", recipe).stdout
    values = json.loads((sweep / "ladder.json").read_text())
    first, second = values["predictions"]
    assert first["loss"] == pytest.approx(loss, rel=0.005) and first["interval"][0] <= loss <= first["interval"][1]
    assert first["name"] == asked and f"{first['loss']:.4f}" in said
    assert "diverged: skipped: its last validation loss is infinite or NaN" in said
    assert "not_ended: skipped: it hasn't finished" in said and "skipped: 1 run with worse settings" in said
    assert [len(rung["folders"]) for rung in values["rungs"]] == [2, 2, 2, 2]
    assert values["rungs"][0]["spread"] > 0 and abs(values["rungs"][0]["residual"]) < 0.005
    assert "back-test: a fit without the largest size" in said and "within the interval" in said
    assert "tokens grow with model size, so they mostly reflect the priors" in said
    assert second["times_compute"] > 1000 and "llama_125m.yaml: " in said.split("warning: ")[-1]
    assert (sweep / "ladder.png").stat().st_size > 10_000


def test_predictions_without_enough_runs_are_rejected(tmp_path, capsys):
    for width in WIDTHS[:3]:
        write_ladder_run(tmp_path / f"three/{width}", width)
    asked = ["parameters=1M,tokens=20M"]
    few = refusal(tmp_path / "three", predict=asked)
    assert "3 model sizes" in few and "aren't enough for a prediction" in few
    report_ladder([tmp_path / "three"], predict=[], output=None)
    assert "warning: 3 model sizes aren't enough for a prediction" in capsys.readouterr().out
    assert "all runs have the same size" in refusal(tmp_path / "three/32")
    with pytest.raises(InputError, match=r"--output \.: is a folder; use a path such as ladder"):
        report_ladder([tmp_path / "three"], predict=[], output=Path())
    with pytest.raises(InputError, match=r"--output s3://b/x: must be a local path"):
        report_ladder([tmp_path / "three"], predict=[], output=Path("s3://b/x/ladder"))

    for number, width in enumerate(WIDTHS):
        write_ladder_run(tmp_path / f"noisy/{width}", width, off=1 + 0.15 * (-1) ** number)
    assert "the noise around the scaling law is" in refusal(tmp_path / "noisy", predict=asked)

    write_ladder_run(tmp_path / "noisy/constant", 160, schedule="constant")
    write_ladder_run(tmp_path / "noisy/other_tokenizer", 192, tokenizer="b")
    none = ("runs.py", "ladder", tmp_path / "noisy", tmp_path / "none", "--predict", "parameters=1M")
    mixed = run_script(*none, check=False)
    assert mixed.returncode == 2 and "Traceback" not in mixed.stderr
    assert (
        "none: contains no runs" in mixed.stderr
        and "must be a recipe, or sizes such as parameters=30M,tokens=600M" in mixed.stderr
    )
    mixed = refusal(tmp_path / "noisy")
    assert "differ in the tokenizer" in mixed and "differ in optim.schedule" in mixed


def test_a_larger_size_with_fewer_steps_gives_a_warning(tmp_path, capsys):
    sizes = [
        write_ladder_run(tmp_path / f"runs/{width}", width, batch=batch)[:2]
        for width, batch in zip(WIDTHS[:-1], (256, 1024, 1024, 1024), strict=True)
    ]
    first, second = (round(tokens / batch) for (_, tokens), batch in zip(sizes, (256, 1024), strict=False))
    report_ladder([tmp_path / "runs"], predict=[], output=None)
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "steps of" in line]
    assert f"for only {second:,} steps of 1,024 tokens, " in said
    assert f"{first:,} steps of 256 tokens. This distorts the scaling law" in said


def test_losses_that_do_not_fall_with_compute_give_a_warning(tmp_path, capsys):
    for number, width in enumerate(WIDTHS[:-1]):
        write_ladder_run(tmp_path / f"runs/{width}", width, off=1 + 0.2 * number)
    report_ladder([tmp_path / "runs"], predict=[], output=None)
    assert "shows no benefit from compute" in capsys.readouterr().out


def test_different_models_of_the_same_size_are_not_averaged(tmp_path):
    write_ladder_run(tmp_path / "base", 32)
    other = {"rope_theta": 100.0, "transformers_version": "5.17.0"}
    *_, best = write_ladder_run(tmp_path / "best", 32, off=0.9, model=other)
    write_ladder_run(tmp_path / "seed", 32, off=0.9, seed=2, model=other | {"transformers_version": "5.18.0"})
    (rung,) = rungs_of(read_ladder_runs([tmp_path])[0])
    assert rung.loss == pytest.approx(best) and (len(rung.folders), rung.left_out) == (2, 1)


def test_token_counts_within_two_percent_are_one_rung():
    """Runs with another batch size, whose budget is rounded to other steps, must not count twice."""
    for tokens in range(1_000_000, 1_100_000, 1000):
        pair = [(tokens, 3.0), (round(1.01 * tokens), 2.9)]
        runs = [LadderRun(Path(f"{n}"), 10, n, loss, {"optim.learning_rate": loss}) for n, loss in pair]
        (rung,) = rungs_of(runs)
        assert (rung.loss, rung.left_out) == (2.9, 1)
    assert len(rungs_of([LadderRun(Path("x"), 10, n, 3.0, {}) for n in (1_000_000, 1_030_000)])) == 2
