"""8-bit AdamW on a mesh must match single-process training, and its checkpoints must load in any layout.

A small MoE model is trained in each layout, in a single launch with four processes. The vocabulary size isn't
divisible by the number of shards, so the last shard and its last block are shorter. `make test` runs this file with
bitsandbytes.
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
from pretrain.optim.tiles import chunk_of, whole_tile
from pretrain.parallel.block_tiles import blocks_problems
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
"""{launcher file: sizes}. Each layout resumes from the previous one's checkpoint."""
ONE_CODE = 0.0141
"""Largest difference between adjacent 8-bit codes, relative to the block's scale."""
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
        "seed": 2,
        "precision": "fp32",
        "data": {"train": [{"shards": str(shards)}], "sequence_length": 32},
        "budget": {"steps": 4},
        "batch": {"tokens_per_step": 512, "sequences_per_micro_batch": 2},
        "optim": {"name": "adamw_8bit", "learning_rate": 0.001, "warmup_steps": 2, "max_grad_norm": 0.5},
        "pipeline": {"schedule": "1F1B"},
        "compile": "none",
        "checkpoint": {"every_steps": 2, "keep_last": 9},
        "averaging": {"kind": "ema", "every_steps": 1},
        "logging": {"every_steps": 1},
    }
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
        # fsdp2.yaml has no parallelism_config, so sizes would be rejected.
        given = {"strategy": name, "environment": {} if name == "fsdp2" else variables(sizes)}
        start = str(folder / before / MIDDLE)
        them += [{"name": name, **given}, {"name": f"{name} resumed", "start_from": start, **given}]
        before = name
    train(4, them)
    return folder


def norms(run: Path) -> dict[int, float]:
    return {event["step"]: event["grad_norm"] for event in events(run, "train")}


@pytest.mark.parametrize("name", [*LAYOUTS, *(f"{name} resumed" for name in LAYOUTS)])
def test_8bit_training_matches_one_process(runs, name):
    wanted, found = losses(runs / "single"), losses(runs / name)
    assert set(found) == ({3, 4} if "resumed" in name else {1, 2, 3, 4})
    assert all(math.isclose(loss, wanted[step], rel_tol=1e-6) for step, loss in found.items())
    expected = norms(runs / "single")
    assert norms(runs / name) == pytest.approx({step: expected[step] for step in found}, rel=2e-6)


@pytest.mark.parametrize("name", LAYOUTS)
def test_8bit_state_in_a_checkpoint_matches_one_process(runs, name):
    expected, found = (load_file(runs / run / MIDDLE / "optimizer.safetensors") for run in ("single", name))
    assert {key: (value.dtype, value.shape) for key, value in found.items()} == {
        key: (value.dtype, value.shape) for key, value in expected.items()
    }
    for key, value in expected.items():
        if value.dtype == torch.uint8:
            codes = expected[key.replace("state", "qmap")]
            off = (codes[found[key].long()] - codes[value.long()]).abs()
            # Gradients differ by rounding, so a few moments are rounded to an adjacent code.
            assert off.max() < ONE_CODE and (off > 0).float().mean() < 2e-3, key
        else:
            assert torch.allclose(found[key], value, rtol=1e-4, atol=1e-9), key


def problem_of(sizes: Sizes, **shape: int) -> str:
    return "; ".join(blocks_problems(LlamaConfig(**TINY_LLAMA | shape), sizes))


def test_layouts_that_split_8bit_blocks_are_rejected():
    assert problem_of(Sizes(dp_shard=4)) == problem_of(Sizes(dp_shard=2, cp=2)) == ""
    assert problem_of(Sizes(dp_shard=4), vocab_size=575) == "", (
        "shards start at rows 144, 288 and 432, which are block boundaries"
    )
    found = problem_of(Sizes(dp_shard=4), vocab_size=568)  # shards start at row 142
    assert "adamw_8bit is not supported with 4 shards per parameter (dp_shard x cp)" in found
    assert "sharding model.embed_tokens.weight (568 x 64) would split its quantization blocks" in found
    found = problem_of(Sizes(dp_shard=64), hidden_size=56)
    assert "q_proj" not in found, "a tensor of 3,136 elements has fp32 moments"
    assert "(dp_shard x cp), because sharding" in found


def test_8bit_experts_sharded_by_another_dimension_are_rejected():
    few = Qwen3MoeConfig(**MODEL | {"num_experts": 2})
    assert not blocks_problems(few, Sizes(dp_shard=2)) and not blocks_problems(few, Sizes(dp_shard=2, ep=2))
    assert "experts.gate_up_proj (2 x 64 x 64)" in blocks_problems(few, Sizes(dp_shard=4))[0]
    assert "experts.gate_up_proj (2 x 64 x 64)" in blocks_problems(few, Sizes(dp_shard=4, ep=2))[0]


@pytest.mark.parametrize("shape", [(575, 64), (9, 512), (5120,), (8, 64, 32), (50257, 384)])
@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_8bit_scale_shards_match_shards_that_keep_blocks_whole(shape, count):
    unit = unit_rows(shape)
    sizes = (shape[0], table_shape(shape)[0])
    rows, units = ([chunk_of(((0, size),), n, count) for n in range(count)] for size in sizes)
    kept = all(keeps_blocks(shape, (part, *whole_tile(shape[1:]))) for part in rows)
    assert kept == all(start * math.prod(shape[1:]) % 256 == 0 for part in rows for start, _ in part)
    scaled = [tuple((first * unit, min(end * unit, shape[0])) for first, end in part) for part in units]
    assert (scaled == rows) == kept


def test_8bit_moments_are_refused_with_tp_and_in_host_memory(recipe, monkeypatch):
    given = read_run_config(recipe, [("optim.name", "adamw_8bit")])
    for name, value in (("WORLD_SIZE", "4"), ("ACCELERATE_USE_FSDP", "true"), ("FSDP_VERSION", "2")):
        monkeypatch.setenv(name, value)
    assert MeshStrategy.problems(given, "fsdp2") == []
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    (problem,) = MeshStrategy.problems(given, "fsdp2")
    assert problem.startswith("optim.name: adamw_8bit is not supported with fsdp_offload_params")
    monkeypatch.delenv("FSDP_OFFLOAD_PARAMS")
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    (problem,) = MeshStrategy.problems(given, "fsdp_tp")
    assert problem.startswith("optim.name: adamw_8bit is not supported with tp: tp splits matrices by columns")
