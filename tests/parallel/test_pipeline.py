"""Invalid pipeline settings must be rejected, and curriculum stages with different sequence lengths must work."""

import itertools
import json
from types import SimpleNamespace
from typing import get_args
from unittest.mock import MagicMock

import pytest
import torch
import yaml

from pretrain.config import Pipeline
from pretrain.errors import InputError
from pretrain.parallel import mesh
from pretrain.parallel.mesh import MeshStrategy
from pretrain.parallel.pipeline import STAGE_LAYOUTS
from pretrain.parallel.pipeline_stages import split_micro_batch
from pretrain.parallel.registry import parts_of_micro_batch
from pretrain.recipe import read_run_config
from pretrain.training.run_plan import micro_batch_of, sequences_of
from support.project import events, launch, losses, run_script
from support.tiny_models import TINY_LLAMA


@pytest.fixture
def launched(monkeypatch):
    """Sets the environment variables that `accelerate launch` sets for pp.yaml."""

    def launched(processes: int, size: str = "None"):
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
        monkeypatch.setenv("PARALLELISM_CONFIG_PP_SIZE", size)

    return launched


def problems(recipe, *overrides) -> str:
    return "\n".join(
        MeshStrategy.problems(read_run_config(recipe, list(zip(*[iter(overrides)] * 2, strict=True))), "pp")
    )


@pytest.fixture
def deeper(recipe, tmp_path):
    """Adapts the tiny recipe to a pipeline with two processes: four layers, and two sequences per micro-batch."""
    (tmp_path / "tiny_llama.json").write_text(json.dumps(TINY_LLAMA | {"num_hidden_layers": 4}))
    recipe.write_text(recipe.read_text().replace("sequences_per_micro_batch: 1", "sequences_per_micro_batch: 2"))
    return recipe


def test_every_schedule_of_the_recipe_is_known():
    assert tuple(STAGE_LAYOUTS) == get_args(Pipeline.model_fields["schedule"].annotation)


def test_all_ranks_of_a_pipeline_communicate_before_some_send(monkeypatch):
    """NCCL creates a group's communicator during its first operation, so all ranks must participate in it."""
    seen = []
    monkeypatch.setattr(mesh.dist, "all_reduce", lambda tensor, group: seen.append(group))
    monkeypatch.setattr(mesh, "PipelineModel", lambda *arguments, **settings: seen.append("sends"))
    settings = SimpleNamespace(pipeline=Pipeline(), compile="none")
    fields = ("roots", "stage_owners", "microbatches", "causal_lm", "sizes")
    strategy = SimpleNamespace(config=settings, device="cpu", pp_group="group", **dict.fromkeys(fields, MagicMock()))
    MeshStrategy.pipeline(strategy)
    assert seen == ["group", "sends"]


def test_owners_of_the_stages():
    assert STAGE_LAYOUTS["1F1B"].owners(3) == [0, 1, 2]
    assert STAGE_LAYOUTS["Interleaved1F1B"].owners(3) == [0, 1, 2, 0, 1, 2]
    assert STAGE_LAYOUTS["ZBVZeroBubble"].owners(3) == [0, 1, 2, 2, 1, 0]


def test_valid_settings_are_accepted(launched, deeper):
    launched(2)
    assert problems(deeper) == ""
    launched(4, "2")
    assert problems(deeper) == ""


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["--pipeline.schedule", "InterleavedZeroBubble", "--activation_checkpointing", "full"],
            "activation_checkpointing: full is not supported with pipeline.schedule InterleavedZeroBubble",
        ),
        (["--attention", "flex_attention"], "attention: flex_attention is not supported with a pipeline"),
    ],
)
def test_unsupported_settings_are_rejected(launched, deeper, overrides, message):
    launched(2)
    pairs = [text.removeprefix("--") for text in overrides]
    assert message in problems(deeper, *pairs)


def test_all_problems_are_found_at_once(launched, deeper):
    launched(3, "2")
    found = problems(deeper, "attention", "flex_attention", "pipeline.schedule", "1F1B")
    assert "pp_size 2 does not fit the number of processes (3); use 0 (all remaining) or 3, or" in found
    assert "flex_attention" in found


@pytest.mark.parametrize(("processes", "size"), [(1, "None"), (4, "3"), (4, "-1"), (4, "two")])
def test_invalid_pipeline_sizes_are_rejected(launched, deeper, processes, size):
    launched(processes, size)
    assert "launcher: parallelism_config_pp_size" in problems(deeper)


def test_too_few_layers_are_rejected(launched, deeper, tmp_path):
    launched(3)
    assert (
        "model: 4 layers are too few for pipeline.schedule Interleaved1F1B on 3 processes, which needs 6 stages (2 "
        "per process); use fewer processes per pipeline, or GPipe or 1F1B"
    ) in problems(deeper)
    assert problems(deeper, "pipeline.schedule", "1F1B") == ""
    launched(5)
    assert "use fewer processes per pipeline" in problems(deeper, "pipeline.schedule", "GPipe")


def test_a_model_that_cannot_be_split_is_rejected(launched, deeper, tmp_path):
    launched(2)
    granite = {"model_type": "granite", "num_hidden_layers": 4, "logits_scaling": 8.0}
    (tmp_path / "granite.json").write_text(json.dumps(TINY_LLAMA | granite))
    found = problems(deeper, "model", str(tmp_path / "granite.json"))
    assert "model: granite cannot be split into pipeline stages: its logits are not just" in found


@pytest.fixture
def lengthening(deeper):
    """Changes `deeper` to ten sequences of 32 tokens per micro-batch, and to 128 tokens halfway through the run."""
    values = yaml.safe_load(deeper.read_text())
    (source,) = values["data"]["train"]
    values["data"] = {
        "sequence_length": 32,
        "stages": [{"until": 0.5, "train": [source]}, {"train": [source], "sequence_length": 128}],
    }
    values["batch"] = {"tokens_per_step": 1280, "sequences_per_micro_batch": 10}
    values["budget"]["steps"] = 4
    deeper.write_text(yaml.safe_dump(values))
    return deeper


def test_accepted_micro_batches_can_be_split(launched, lengthening):
    """Every accepted micro-batch must be divisible into equal pipeline microbatches with every schedule and sequence
    length."""
    launched(2)
    recipe = read_run_config(lengthening)
    accepted = refused = 0
    for schedule, scale, pipelines, ranks, sequences, steps, longer in itertools.product(
        STAGE_LAYOUTS, (1, 2), (1, 2), (2, 3), (1, 2, 4, 5, 6, 10, 12), (1, 3, 4), (32, 64, 96)
    ):
        second = recipe.data.stages[1].model_copy(update={"sequence_length": longer})
        data = recipe.data.model_copy(update={"stages": [recipe.data.stages[0], second]})
        settings = Pipeline(schedule=schedule, microbatches_per_stage=scale)
        config = recipe.model_copy(update={"data": data, "pipeline": settings})
        tokens = steps * sequences * 32 * pipelines * ranks
        config = config.with_batch(tokens_per_step=tokens, sequences_per_micro_batch=sequences)
        parts = parts_of_micro_batch(config)
        try:
            sequences_of(config, pipelines * ranks, parts)
        except InputError:
            refused += 1
            continue
        accepted += 1
        microbatches = len(STAGE_LAYOUTS[schedule].owners(ranks)) * scale
        for number, length in enumerate((32, longer)):
            micro_batch = micro_batch_of(config, number, pipelines * ranks, parts)
            split = split_micro_batch(*2 * [torch.zeros(micro_batch * ranks, length)], {}, microbatches)
            assert [len(part.targets_BT) for part in split] == [micro_batch // parts] * microbatches
            assert micro_batch * length <= max(length, sequences * 32)
            assert tokens % (micro_batch * ranks * pipelines * length) == 0
    assert accepted > 500 and refused > 500


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (
            [],
            [
                "data.stages[1].sequence_length: batch.tokens_per_step 1,280 is not a multiple of 2 sequences x 128 "
                "tokens x 2 processes = 512; nearest: 2,560"
            ],
        ),
        (
            ["--batch.sequences_per_micro_batch", "5"],
            [
                "batch.sequences_per_micro_batch: 5 is not a multiple of 2, the number of microbatches that each "
                "pipeline process splits it into (stages per process of Interleaved1F1B x "
                "pipeline.microbatches_per_stage 1); nearest: 4 or 6"
            ],
        ),
        (
            ["--batch.sequences_per_micro_batch", "4"],
            [
                "data.stages[1].sequence_length: 4 sequences per micro-batch become 1 of 128 tokens, but the pipeline "
                "needs at least 2 per process; use "
                "batch.sequences_per_micro_batch 8",
                "1,280 is not a multiple of 2 sequences x 128 tokens x 2 processes = 512; nearest: 1,024 or 1,536",
            ],
        ),
    ],
)
def test_stages_with_too_few_sequences_are_rejected_before_the_start(lengthening, overrides, messages):
    pp = {"WORLD_SIZE": "2", "ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_PP_SIZE": "2"}
    result = run_script("train.py", "--config", lengthening, "--check", *overrides, check=False, **pp)
    assert result.returncode == 2 and all(message in result.stderr for message in messages)


def test_a_run_with_growing_sequences_passes_the_stage_boundary(lengthening, tmp_path):
    """With the batch size suggested by the error message, losses must match those of one process."""
    settings = ("--config", lengthening, "--batch.tokens_per_step", "2560", "--data.validation", "[]")
    settings += ("--checkpoint.save_final", "false")
    refused = launch("pp", 2, "train.py", "--config", lengthening, check=False)
    assert "batch.tokens_per_step 1,280 is not a multiple" in refused.stderr
    assert not (tmp_path / "run").exists()
    launch("pp", 2, "train.py", *settings)
    run_script("train.py", *settings, "--output", tmp_path / "alone")
    assert [stage["sequences_per_micro_batch"] for stage in events(tmp_path / "run", "stage")] == [2]
    expected, found = losses(tmp_path / "alone"), losses(tmp_path / "run")
    assert len(found) == 4 and max(abs(found[step] - loss) for step, loss in expected.items()) <= 2e-6
