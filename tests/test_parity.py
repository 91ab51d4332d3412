"""runs.py parity: what it makes of curves; the runs themselves are those of test_strategies.py."""

import json
import math

import pytest
from conftest import ROOT, run_script

from pretrain.parity import Curve, differences, read_curve, report, run_overrides, strategy_names, table

REFERENCE = Curve({1: 6.0, 2: 5.0}, {1: 2.0, 2: 1.0})


def test_differences_are_the_largest_over_the_steps():
    loss, norm = differences(Curve({1: 6.0, 2: 5.25}, {1: 1.5, 2: 1.0}), REFERENCE)
    assert (loss, norm) == (0.25, 0.25)


def test_missing_steps_and_numbers_that_are_not_finite_are_infinitely_far():
    assert differences(Curve({1: 6.0}, {1: 2.0}), REFERENCE) == (math.inf, math.inf)
    assert differences(Curve({1: 6.0, 2: math.nan}, {1: 2.0, 2: 1.0}), REFERENCE) == (math.inf, 0.0)
    both = Curve({1: 6.0, 2: 5.0}, {1: math.nan, 2: 1.0})
    assert differences(both, both) == (0.0, 0.0), "the same step skipped in both is the same"


def test_report_decides_the_exit_status(tmp_path, capsys):
    good = {"single": REFERENCE, "ddp": Curve({1: 6.000001, 2: 5.0}, REFERENCE.grad_norm)}
    assert report(good, (1e-5, 1e-4), tmp_path) == 0
    assert report({**good, "zero3": Curve({1: 6.1, 2: 5.0}, REFERENCE.grad_norm)}, (1e-5, 1e-4), tmp_path) == 1
    assert json.loads((tmp_path / "parity.json").read_text())["zero3"]["same"] is False
    assert report({**good, "tp": None}, (1e-5, 1e-4), tmp_path) == 1, "what did not run proves nothing"
    text = capsys.readouterr().out
    assert "the same" in text and "DIFFERENT" in text and "did not run; see" in text


def test_the_table_has_every_step_and_strategy(tmp_path):
    lines = [{"event": "start"}, {"event": "train", "step": 1, "loss": 6.5, "grad_norm": None}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    curve = read_curve(tmp_path / "metrics.jsonl")
    text = table({"single": curve, "ddp": curve, "tp": None})
    assert "single" in text and "ddp" in text and "tp" not in text
    assert "6.500000" in text and "nan" in text


def test_bad_requests_are_refused_at_once(tmp_path):
    (tmp_path / "ddp").mkdir()
    refused = run_script(
        "runs.py", "parity", "--config", "recipes/demo.yaml", "--strategies", "ddp,zero4", "--output", tmp_path,
        check=False,
    )  # fmt: skip
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert "zero4 is unknown; did you mean zero" in refused.stderr
    assert f"{tmp_path / 'ddp'} exists" in refused.stderr


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_can_be_cut_short(recipe):
    overrides = run_overrides(recipe, 20, "fp32")
    assert overrides[overrides.index("--budget") + 1] == "{steps: 20}"
    assert int(overrides[overrides.index("--optim.warmup_steps") + 1]) <= 2


def test_strategies_are_the_files_there_are():
    names = strategy_names()
    assert names[0] == "single" and {"ddp", "fsdp2", "hsdp", "zero1", "zero2", "zero3", "zero3_offload"} <= set(names)
    assert "zero3_offload_nvme" not in names
