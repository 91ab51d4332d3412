"""A profile names what was planted in a run of two processes, and finds nothing in a healthy one."""

import json

import pytest

from support.faults import launch_with_faults

STEPS = 4


@pytest.fixture
def profiled(recipe, tmp_path):
    """Runs two processes with --profile and these faults; gives the report."""
    model = json.loads((tmp_path / "tiny_llama.json").read_text())
    model |= {"hidden_size": 128, "intermediate_size": 384}

    def profiled(faults=(), model_type="llama", strategy="ddp", processes=2, **options):
        (tmp_path / "tiny_llama.json").write_text(json.dumps(model | {"model_type": model_type}))
        faults = [{"always": True, "what": "sleep", **fault} for fault in faults]
        ended = launch_with_faults(
            tmp_path / "faults", strategy, processes, "--config", recipe, "--profile", STEPS, "--budget.steps", "12",
            "--validation.every_steps", "100", "--checkpoint.every_steps", "100", "--data.sequence_length", "128",
            "--batch.tokens_per_step", "2048", "--batch.sequences_per_micro_batch", "4", faults=faults, **options,
        )  # fmt: skip
        assert ended.code == 0, ended.output
        (path,) = (tmp_path / "run/profile").iterdir()
        return json.loads((path / "report.json").read_text()), path

    return profiled


def test_healthy(profiled):
    report, path = profiled()
    print(report["text"])


def test_straggler(profiled):
    report, path = profiled([{"where": "forward", "seconds": 0.1}])
    print(report["text"])


def test_disk(profiled):
    report, path = profiled([{"where": "disk", "seconds": 0.3}])
    print(report["text"])


def test_sync(profiled):
    report, path = profiled(model_type="reading_llama", architecture="support.reading_llama")
    print(report["text"])
