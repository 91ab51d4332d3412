"""Which stage goes where, and what is refused before a pipeline starts."""

import json
from typing import get_args

import pytest

from pretrain.config import Pipeline
from pretrain.parallel.pipeline import STAGE_LAYOUTS, PipelineParallel
from pretrain.recipe import read_run_config
from support.tiny_models import TINY_LLAMA


@pytest.fixture
def launched(monkeypatch):
    """Sets what `accelerate launch` sets for pp.yaml."""

    def launched(processes: int, size: str = "None"):
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
        monkeypatch.setenv("MEGATRON_LM_PP_DEGREE", size)

    return launched


def problems(recipe, *overrides) -> str:
    return "\n".join(
        PipelineParallel.problems(read_run_config(recipe, list(zip(*[iter(overrides)] * 2, strict=True))), "pp")
    )


@pytest.fixture
def deeper(recipe, tmp_path):
    """The tiny recipe with four layers and two sequences per micro-batch, which a pipeline of two can run."""
    (tmp_path / "tiny_llama.json").write_text(json.dumps(TINY_LLAMA | {"num_hidden_layers": 4}))
    recipe.write_text(recipe.read_text().replace("sequences_per_micro_batch: 1", "sequences_per_micro_batch: 2"))
    return recipe


def test_every_schedule_of_the_recipe_is_known():
    assert tuple(STAGE_LAYOUTS) == get_args(Pipeline.model_fields["schedule"].annotation)


def test_owners_of_the_stages():
    assert STAGE_LAYOUTS["1F1B"].owners(3) == [0, 1, 2]
    assert STAGE_LAYOUTS["Interleaved1F1B"].owners(3) == [0, 1, 2, 0, 1, 2]
    assert STAGE_LAYOUTS["ZBVZeroBubble"].owners(3) == [0, 1, 2, 2, 1, 0]


def test_what_can_run_is_not_refused(launched, deeper):
    launched(2)
    assert problems(deeper) == ""
    launched(4, "2")
    assert problems(deeper) == ""


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["--batch.sequences_per_micro_batch", "3"],
            "sequences_per_micro_batch: 3 is not a multiple of 2 stages per process of Interleaved1F1B x "
            "pipeline.microbatch_scale 1 = 2; nearest: 2 or 4",
        ),
        (["--pipeline.microbatch_scale", "4"], "sequences_per_micro_batch: 2 is not a multiple of"),
        (
            ["--pipeline.schedule", "InterleavedZeroBubble", "--activation_checkpointing", "full"],
            "activation_checkpointing: full does not run with pipeline.schedule InterleavedZeroBubble",
        ),
        (["--attention", "flex_attention"], "attention: flex_attention does not run under a pipeline"),
        (["--optim.name", "adafactor", "--optim.stochastic_rounding", "true"], "optim.stochastic_rounding"),
    ],
)
def test_settings_that_cannot_run_are_refused(launched, deeper, overrides, message):
    launched(2)
    pairs = [text.removeprefix("--") for text in overrides]
    assert message in problems(deeper, *pairs)


def test_all_problems_are_found_at_once(launched, deeper):
    launched(3, "2")
    found = problems(
        deeper, "batch.sequences_per_micro_batch", "3", "attention", "flex_attention", "pipeline.schedule", "1F1B"
    )
    assert "megatron_lm_pp_degree: 2 of 3 processes cannot share a model; use null (all processes) or 3" in found
    assert "flex_attention" in found


@pytest.mark.parametrize(("processes", "size"), [(1, "None"), (4, "1"), (4, "0"), (4, "two")])
def test_sizes_that_make_no_pipeline_are_refused(launched, deeper, processes, size):
    launched(processes, size)
    assert "launcher: megatron_lm_pp_degree: " in problems(deeper)


def test_too_few_layers_are_refused_with_what_works(launched, deeper, tmp_path):
    launched(3)
    assert (
        "model: 4 layers are fewer than the 6 stages of pipeline.schedule Interleaved1F1B on 3 processes (2 each); "
        "use pipeline.schedule GPipe or 1F1B, which need 3, or at most 2 processes per pipeline"
    ) in problems(deeper)
    assert problems(deeper, "pipeline.schedule", "1F1B") == ""
    launched(5)
    assert "use at most 4 processes per pipeline" in problems(deeper, "pipeline.schedule", "GPipe")


def test_a_model_that_cannot_be_cut_is_refused(launched, deeper, tmp_path):
    launched(2)
    granite = {"model_type": "granite", "num_hidden_layers": 4, "logits_scaling": 8.0}
    (tmp_path / "granite.json").write_text(json.dumps(TINY_LLAMA | granite))
    found = problems(deeper, "model", str(tmp_path / "granite.json"))
    assert "model: granite cannot be cut into pipeline stages: its logits are more than" in found
