"""8-bit AdamW on meshes: the blocks of one process, the same curve, and a state that every layout loads.

One launch of four processes trains a small mixture under each layout. Its vocabulary does not divide: the last shard is
shorter, and its last block too. `make test` runs this file with bitsandbytes.
"""

import json
import math
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import LlamaConfig, Qwen3MoeConfig

from pretrain.mesh_sizes import Sizes
from pretrain.optim.adamw_8bit import keeps_blocks, table_shape, unit_rows
from pretrain.parallel.block_tiles import blocks_problem
from pretrain.parallel.mesh import MeshStrategy
from pretrain.recipe import read_run_config
from support.mesh_products import variables
from support.project import events, launch, losses
from support.tiny_models import TINY_LLAMA, TINY_MOE

MODEL = TINY_MOE | {"vocab_size": 575, "num_key_value_heads": 4, "head_dim": 16}
LAYOUTS = {
    "fsdp2": Sizes(dp_shard=4),
    "hsdp": Sizes(dp_replicate=2, dp_shard=2),
    "mesh": Sizes(pp=2, dp_shard=2),
    "ep": Sizes(dp_shard=4, ep=2),
}
"""{launcher file: sizes}; each resumes from the checkpoint of the one before."""
MIDDLE = "checkpoints/step-00000002"


@pytest.fixture(scope="module")
def runs(shards, tmp_path_factory) -> Path:
    pytest.importorskip("bitsandbytes")
    folder = tmp_path_factory.mktemp("adamw_8bit")
    (folder / "model.json").write_text(json.dumps(MODEL))
    recipe = folder / "recipe.yaml"
    values = {
        "model": str(folder / "model.json"),
        "output": str(folder / "run"),
        "seed": 1,
        "precision": "fp32",
        "data": {"train": [{"shards": str(shards)}], "sequence_length": 32},
        "budget": {"steps": 4},
        "batch": {"tokens_per_step": 512, "sequences_per_micro_batch": 2},
        "optim": {
            "name": "adamw_8bit", "learning_rate": 0.001, "schedule": "constant", "warmup_steps": 2, "max_grad_norm": 0.5
        },
        "pipeline": {"schedule": "1F1B"},
        "compile": "none",
        "checkpoint": {"every_steps": 2, "keep_last": 9},
        "averaging": {"kind": "ema", "every_steps": 1},
        "logging": {"every_steps": 1},
    }  # fmt: skip
    recipe.write_text(yaml.safe_dump(values))

    def train(processes: int, runs: list[dict]) -> None:
        for run in runs:
            run["arguments"] = ["--output", str(folder / run.pop("name"))]
        (folder / "runs.json").write_text(json.dumps(runs))
        program = ("tests/support/train_strategies.py", recipe, folder / "runs.json")
        launch("single" if processes == 1 else "ddp", processes, *program, timeout=3000)

    train(1, [{"name": "single", "strategy": "single"}])
    them = []
    before = "single"
    for name, sizes in LAYOUTS.items():
        given = {"strategy": name, "environment": variables(sizes)}
        start = str(folder / before / MIDDLE)
        them += [{"name": name, **given}, {"name": f"{name} resumed", "start_from": start, **given}]
        before = name
    train(4, them)
    return folder


def norms(run: Path) -> dict[int, float]:
    return {event["step"]: event["grad_norm"] for event in events(run, "train")}


@pytest.mark.parametrize("name", [*LAYOUTS, *(f"{name} resumed" for name in LAYOUTS)])
def test_layouts_train_with_8bit_moments_as_one_process_does(runs, name):
    wanted, found = losses(runs / "single"), losses(runs / name)
    assert set(found) == ({3, 4} if "resumed" in name else {1, 2, 3, 4})
    assert all(math.isclose(loss, wanted[step], rel_tol=1e-6) for step, loss in found.items())
    expected = norms(runs / "single")
    assert norms(runs / name) == pytest.approx({step: expected[step] for step in found}, rel=2e-6)


@pytest.mark.parametrize("name", LAYOUTS)
def test_8bit_state_in_a_checkpoint_is_that_of_one_process(runs, name):
    expected, found = (load_file(runs / run / MIDDLE / "optimizer.safetensors") for run in ("single", name))
    assert {key: (value.dtype, value.shape) for key, value in found.items()} == {
        key: (value.dtype, value.shape) for key, value in expected.items()
    }
    for key, value in expected.items():
        if value.dtype == torch.uint8:
            off = (found[key].int() - value.int()).abs()
            assert off.max() <= 1 and (off > 0).float().mean() < 0.01, key
        else:
            assert torch.allclose(found[key], value, rtol=1e-4, atol=1e-9), key
