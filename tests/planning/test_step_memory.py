"""Compares a step's planned memory with that on a simulated GPU; see support/memory_on_fake_cuda.py.

STRATEGIES=all tests every strategy, with and without compiled layers and several micro-steps, and full models of up to
1.3B parameters.
"""

import importlib.util
import re
from pathlib import Path

import pytest

from pretrain.model.model_config import load_model_config
from pretrain_tools.planning.footprints import footprint
from pretrain_tools.planning.memory import Memory, PlannedRun
from support.fake_cuda import Outcome, outcomes_of
from support.memory_setups import (
    FURTHER,
    FURTHER_IN_FP8,
    SETUPS,
    SETUPS_IN_FP8,
    TYPICAL,
    TYPICAL_IN_FP8,
    MemorySetup,
)
from support.project import ROOT
from support.ranks_on_fake_cuda import MODELS, read_config

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def outcomes():
    return outcomes_of("support.memory_on_fake_cuda")


def memory_of(setup: MemorySetup, folder: Path, monkeypatch) -> Memory:
    """Returns a setup's planned memory."""
    monkeypatch.setitem(MODELS, setup.model, setup.model_config())
    config = read_config(folder, setup.launch(0))
    run = PlannedRun(config, load_model_config(config.model.config), config.precision, device_bytes=80 << 30)
    return footprint(run, setup.layout, setup.sequences)


def compare(outcomes: dict[str, Outcome], setup: MemorySetup, folder: Path, monkeypatch) -> None:
    """Asserts that a setup's planned memory is within 5% of the peak of a step."""
    seen = [outcomes[f"{setup.name}, rank {rank}"] for rank in setup.looked_at]
    assert all(outcome.error is None for outcome in seen), [outcome.error for outcome in seen]
    needed = max(max(outcome.result["device"].values()) for outcome in seen)
    planned = memory_of(setup, folder, monkeypatch)
    total = planned.total + (planned.host if setup.layout.zero else 0)  # ZeRO runs on the CPU
    print(f"{setup.name}: {total / needed:.3f} of {needed / 1e9:.2f} GB", planned)
    assert total == pytest.approx(needed, rel=0.05)


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_a_plan_predicts_the_peak_of_a_step(outcomes, setup, tmp_path, monkeypatch):
    compare(outcomes, setup, tmp_path, monkeypatch)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="pip install torchao")
@pytest.mark.parametrize("setup", SETUPS_IN_FP8, ids=lambda setup: setup.name)
def test_a_plan_predicts_the_peak_of_a_step_in_fp8(setup, tmp_path, monkeypatch):
    compare(outcomes_of("support.fp8_memory_on_fake_cuda"), setup, tmp_path, monkeypatch)


def test_the_performance_page_says_about_how_many_steps_are_compared():
    text = (ROOT / "docs/performance.md").read_text()
    (steps,) = re.findall(r"\| About (\d+) training steps with fake tensors", text)
    listed = [*TYPICAL, *FURTHER, *TYPICAL_IN_FP8, *FURTHER_IN_FP8]
    assert int(steps) == pytest.approx(len(listed), rel=0.1)


OFFLOADED = [setup for setup in SETUPS if setup.offloads or "offload" in setup.strategy]


@pytest.mark.parametrize("setup", OFFLOADED, ids=lambda setup: setup.name)
def test_a_plan_predicts_the_offloaded_memory(outcomes, setup, tmp_path, monkeypatch):
    seen = [outcomes[f"{setup.name}, rank {rank}"].result for rank in setup.looked_at]
    planned = memory_of(setup, tmp_path, monkeypatch)
    if setup.layout.zero:
        bucket = 4 * setup.layout.zero["reduce_bucket_size"]  # the only tensor on the device between steps
        assert planned.host == pytest.approx(seen[0]["device"]["between"] - bucket, rel=0.02)
    else:
        assert planned.host == pytest.approx(max(result["host"] for result in seen), rel=0.02)
    assert planned.disk == pytest.approx(seen[0]["disk"], rel=0.02)
