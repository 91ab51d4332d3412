"""A run started with an earlier version must continue with this one. tests/golden_run was written at commit d6ef3fc.

It contains shards with 64 token IDs, the folder of a 12-step run that was killed after the checkpoint of step 6, and
the continued run's log (continued.jsonl). A new format version needs an additional golden run; this one must not
change.
"""

import json
import shutil

import pytest
from safetensors.torch import load_file

from pretrain.files import damage
from support.project import ROOT, events, run_script

GOLDEN = ROOT / "tests/golden_run"
STEPS = {name: f"checkpoints/step-{number:08d}" for name, number in (("before", 6), ("after", 12))}


@pytest.fixture(scope="module")
def continued(tmp_path_factory):
    """Resumes a copy of the run and trains it to the end. Its recipe has shard paths relative to the project root."""
    run = tmp_path_factory.mktemp("golden") / "run"
    shutil.copytree(GOLDEN / "run", run)
    run_script("train.py", "--config", GOLDEN / "run/config.yaml", "--output", run)
    return run


def test_a_run_of_an_earlier_version_continues_identically(continued):
    """The tolerance allows for a different summation order on other CPUs. We measured 3e-8, only in gradient norms."""
    (resume,) = events(continued, "resume")
    assert (resume["step"], resume["path"]) == (6, "step-00000006")
    lines = [json.loads(line) for line in (continued / "metrics.jsonl").read_text().splitlines()]
    found = [e for e in lines if e["step"] > 6 and e["event"] in ("train", "validation")]
    expected = [json.loads(line) for line in (GOLDEN / "continued.jsonl").read_text().splitlines()]
    assert len(found) == len(expected) == 7
    for now, then in zip(found, expected, strict=True):
        numbers = {name: value for name, value in then.items() if not isinstance(value, str)}
        assert {name: now[name] for name in numbers} == pytest.approx(numbers, rel=1e-6)
        assert {name: now[name] for name in then.keys() - numbers} == {n: then[n] for n in then.keys() - numbers}


def test_checkpoints_keep_their_format(continued):
    """Entries may be added, but none may be removed or renamed."""
    before, after = (continued / step for step in STEPS.values())
    assert damage(before) == damage(after) == []
    assert {path.name for path in before.iterdir()} <= {path.name for path in after.iterdir()}
    states = [json.loads((folder / "trainer_state.json").read_text()) for folder in (before, after)]
    assert states[0].keys() <= states[1].keys() and states[0]["state"].keys() <= states[1]["state"].keys()
    assert states[0]["identity"] == states[1]["identity"]
    for file in ("model", "optimizer"):
        tensors = [load_file(folder / f"{file}.safetensors") for folder in (before, after)]
        shapes = [{name: (tensor.shape, tensor.dtype) for name, tensor in saved.items()} for saved in tensors]
        assert shapes[0] == shapes[1]


def test_metrics_keep_their_names(continued):
    lines = [json.loads(line) for line in (continued / "metrics.jsonl").read_text().splitlines()]
    earlier, later = ([e for e in lines if (e["step"] > 6) == is_later] for is_later in (False, True))
    for event in ("train", "validation", "checkpoint"):
        now, then = (next(e.keys() for e in these if e["event"] == event) for these in (later, earlier))
        assert then <= now, event
