"""ZeRO-3 with the optimizer state on disk, if libaio is installed. Compiling the operator takes minutes, but happens
only once."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from pretrain.config import Averaging, Optim
from pretrain.errors import InputError
from pretrain.parallel import zero
from support.project import ROOT, events, launch, losses
from support.tiny_models import TINY_LLAMA

# DeepSpeed swaps a sub-group's state to disk only if it has at least one megabyte per process.
WIDE = TINY_LLAMA | {"hidden_size": 256, "intermediate_size": 512, "tie_word_embeddings": False}
ARGUMENTS = ["--optim.schedule", "constant", "--checkpoint.every_steps", "6", "--checkpoint.keep_last", "9"]


@pytest.fixture
def on_disk(tmp_path) -> list:
    """Returns `accelerate launch` options that put the optimizer state in a temporary folder."""
    settings = json.loads((ROOT / "ds_configs/zero3_offload_nvme.json").read_text())
    settings["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(tmp_path / "disk")
    settings["zero_optimization"]["sub_group_size"] = 300_000
    (tmp_path / "nvme.json").write_text(json.dumps(settings))
    return ["--deepspeed_config_file", tmp_path / "nvme.json"]


@pytest.mark.skipif(
    os.environ.get("STRATEGIES") != "all" or zero.missing_for_nvme(),
    reason="needs libaio, and is for make test-strategies",
)
def test_nvme_matches_one_process_and_resumes_exactly(recipe, on_disk, tmp_path):
    (tmp_path / "tiny_llama.json").write_text(json.dumps(WIDE))

    def train(strategy: str, processes: int, run: str, steps: int, *options) -> Path:
        program = ["train.py", "--config", recipe, "--output", tmp_path / run, "--budget.steps", steps, *ARGUMENTS]
        launch(strategy, processes, *options, *program, timeout=3000)
        return tmp_path / run

    single = train("single", 1, "single", 12)
    whole = train("zero3_offload_nvme", 2, "whole", 12, *on_disk)
    written = [path.stat().st_size for path in (tmp_path / "disk").rglob("*.swp")]
    assert len(written) == 12 and min(written) > 2**20, "each process writes weights and moments of two sub-groups"
    assert max(abs(losses(whole)[step] - loss) for step, loss in losses(single).items()) < 1e-5
    norms, expected = ([event["grad_norm"] for event in events(run, "train")] for run in (whole, single))
    assert norms == pytest.approx(expected, rel=1e-4)

    broken = train("zero3_offload_nvme", 2, "broken", 6, *on_disk)
    train("zero3_offload_nvme", 2, "broken", 12, *on_disk)
    assert losses(broken) == losses(whole)
    for file in ("model", "optimizer"):
        tensors, found = (load_file(r / f"checkpoints/step-00000012/{file}.safetensors") for r in (whole, broken))
        assert all(torch.equal(tensor, found[name]) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("device", "has_libaio", "cuda_home", "missing"),
    [
        ("cpu", True, None, None),
        ("cpu", False, None, "libaio"),
        ("cuda", False, None, "libaio"),
        ("cuda", True, None, "the toolkit for CUDA"),
        ("cuda", True, "without nvcc", "the toolkit for CUDA"),
        ("cuda", True, "whole", None),
    ],
)
def test_missing_requirements_are_reported_before_the_start(
    monkeypatch, tmp_path, device, has_libaio, cuda_home, missing
):
    if cuda_home:
        cuda_home = str(tmp_path / cuda_home)
        nvcc = tmp_path / "whole/bin/nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 13.0, V13.0.48\n")
        nvcc.chmod(0o755)
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", cuda_home)
    builder = SimpleNamespace(is_compatible=lambda: has_libaio)
    monkeypatch.setattr("deepspeed.ops.op_builder.AsyncIOBuilder", lambda: builder)
    monkeypatch.setattr(zero, "device_type", lambda: device)
    monkeypatch.setattr(zero, "uses_nvme", lambda: True)
    monkeypatch.setattr(zero.Strategy, "problems", classmethod(lambda cls, config, name: []))
    refusals = zero.Zero.problems(
        SimpleNamespace(
            optim=Optim(learning_rate=1e-3), averaging=Averaging(), batch=SimpleNamespace(no_sync=False),
            precision="fp32",
        ),
        "zero3_offload_nvme",
    )  # fmt: skip
    assert len(refusals) == (missing is not None)
    assert all(f"nvme needs {missing}" in refusal and "zero3_offload.yaml" in refusal for refusal in refusals)


def test_two_runs_cannot_swap_to_the_same_files(tmp_path, monkeypatch):
    held = zero.hold_swap_files(tmp_path / "disk")
    assert zero.hold_swap_files(tmp_path / "disk") == held, "a process may build several strategies"
    monkeypatch.setenv("RANK", "1")
    os.close(zero.hold_swap_files.__wrapped__(tmp_path / "disk"))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(InputError, match="another run keeps its optimizer state in"):
        zero.hold_swap_files.__wrapped__(tmp_path / "disk")
    os.close(held)
    os.close(zero.hold_swap_files.__wrapped__(tmp_path / "disk"))
