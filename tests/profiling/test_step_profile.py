"""Tests for profiling two processes: injected causes are reported, and a healthy run has none."""

import gzip
import json
import statistics
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from pretrain_tools.profiling import step_profile
from support.faults import launch_with_faults
from support.project import ROOT, events, losses, run_script

STEPS = 4
EFFECTS = {"busy machine"}
"""Causes that may also come from tests running in parallel."""


@pytest.fixture
def train(recipe, tmp_path):
    """Returns a function that runs two processes with faults and returns the finished run."""
    model = json.loads((tmp_path / "tiny_llama.json").read_text())
    model |= {"hidden_size": 128, "intermediate_size": 384}

    def train(*settings, faults=(), model_type="llama", **options):
        (tmp_path / "tiny_llama.json").write_text(json.dumps(model | {"model_type": model_type}))
        faults = [{"always": True, "what": "sleep", **fault} for fault in faults]
        ended = launch_with_faults(
            tmp_path / "faults", "ddp", 2, "--config", recipe, "--budget.steps", "12", "--validation.every_steps",
            "100000", "--checkpoint.every_steps", "100000", "--data.sequence_length", "128", "--batch.tokens_per_step",
            "2048", "--batch.sequences_per_micro_batch", "4", *settings, faults=faults, **options,
        )  # fmt: skip
        return ended

    return train


def report_of(run):
    (path,) = (run / "profile").iterdir()
    return json.loads((path / "report.json").read_text())


def causes_of(ended, run):
    """Returns {name: text} for the reported causes, excluding those from a busy machine."""
    assert ended.code == 0, ended.output
    assert events(run, "train")[-1]["step"] == 12, "training must continue after the profile"
    return {cause["name"]: cause["text"] for cause in report_of(run)["causes"] if cause["name"] not in EFFECTS}


def test_a_rank_that_takes_longer_is_named(train, tmp_path):
    ended = train("--profile", STEPS, faults=[{"where": "forward", "seconds": 0.15}])
    found = causes_of(ended, tmp_path / "run")
    assert list(found) == ["slow rank"]
    assert found["slow rank"].startswith("rank 1 on ") and "mostly in forward" in found["slow rank"]
    assert "the other ranks wait: rank 0 for " in found["slow rank"]
    assert found["slow rank"] in " ".join(ended.output.split()), "the cause must be printed"
    folder = tmp_path / "run/profile" / f"step-{7:08d}"
    for rank in (0, 1):
        with gzip.open(folder / f"trace-rank-{rank:05d}.json.gz") as file:
            names = {event.get("name") for event in json.load(file)["traceEvents"]}
        assert {"groundwork: step 7", "groundwork: forward", "groundwork: update"} <= names


def test_a_slow_disk_is_named(train, tmp_path):
    ended = train("--profile", STEPS, faults=[{"where": "disk", "seconds": 0.4}])
    found = causes_of(ended, tmp_path / "run")
    assert list(found) == ["waiting for data"]
    assert "rank 1 waited for data, up to " in found["waiting for data"]


def test_a_line_that_waits_for_the_device_is_named(train, tmp_path):
    ended = train("--profile", STEPS, model_type="reading_llama", architecture="support.reading_llama")
    found = causes_of(ended, tmp_path / "run")
    # If other tests use the cores, one rank may really be slower.
    assert found.keys() - {"slow rank"} == {"synchronizing line"}
    source = (ROOT / "tests/support/reading_llama.py").read_text().splitlines()
    line = next(number for number, text in enumerate(source, start=1) if "# reads the value" in text)
    assert f"tests/support/reading_llama.py:{line} (in forward, 2 times per step)" in found["synchronizing line"]


def test_a_healthy_run_is_reported_as_healthy(train, tmp_path):
    ended = train("--profile", STEPS)
    found = causes_of(ended, tmp_path / "run")
    report = report_of(tmp_path / "run")
    for rank in report["ranks"]:
        if statistics.median(step["runnable"] for step in rank["steps"]) > rank["cores"]:
            # Other tests use the cores, so one rank may really be slower.
            found.pop("slow rank", None)
    assert found == {}
    assert ("No problems found. A step takes" in report["text"]) == (report["causes"] == [])
    (event,) = events(tmp_path / "run", "profile")
    assert event["verdict"] == report["verdict"]


def test_a_profile_changes_no_loss(recipe, tmp_path):
    run_script("train.py", recipe, "--output", tmp_path / "plain")
    said = run_script("train.py", recipe, "--profile", STEPS).stdout
    assert "rank 0" in said and "Profile of" in said
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")


class NoRecording:
    """Mock recording that records nothing."""

    def __init__(self, *_):
        self.calls = []

    def __getattr__(self, name):
        return lambda *_, **__: self.calls.append(name) or 1


@pytest.fixture
def session(tmp_path, monkeypatch):
    """Returns (function that advances a profile to a step, messages), for a mock run of 100 steps."""
    monkeypatch.setattr(step_profile, "Recording", NoRecording)
    said, state = [], SimpleNamespace(step=0)
    ranks = SimpleNamespace(gather=lambda value: [value], barrier=lambda: None, is_main=True)
    run = SimpleNamespace(
        state=state,
        watch=SimpleNamespace(beat=lambda: None),
        strategy=SimpleNamespace(ranks=ranks),
        log=SimpleNamespace(say=said.append, warn=lambda message, **_: said.append(message)),
        config=SimpleNamespace(output=tmp_path),
        plan=SimpleNamespace(total_steps=100),
        pausing=lambda work: nullcontext(),
    )
    profile = step_profile.StepProfile(run, None, steps=10)

    def step_to(step):
        state.step = step
        profile.after_step()

    return step_to, said


def test_a_profile_starts_after_warm_up_and_is_canceled_by_a_rollback(session):
    step_to, said = session
    for step in range(1, 5):
        step_to(step)
    assert said == []
    step_to(5)
    assert said == ["profiling 10 steps, starting with step 7; training continues"]
    step_to(3)
    assert said[1:] == ["profile canceled: the run rolled back to step 3 during the profile"]
    step_to(5)
    assert len(said) == 2, "the profile must be abandoned after a rollback"


@pytest.mark.parametrize(
    ("given", "problem"),
    [("0", "must be from 1 to 100 steps"), ("7", "only 6 of 12 steps are left"), ("x", "as in --profile 20")],
)
def test_steps_that_cannot_be_profiled_are_refused(recipe, tmp_path, given, problem):
    result = run_script("train.py", recipe, "--profile", given, check=False)
    assert result.returncode == 2 and problem in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()
