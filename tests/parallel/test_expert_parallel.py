"""Invalid settings for expert parallelism must be rejected, and plans must include its memory and traffic."""

import json
from types import SimpleNamespace

import pytest
import yaml

from pretrain.mesh_sizes import Sizes
from pretrain.model.model_config import load_model_config
from pretrain.parallel import expert_parallel
from pretrain.parallel.registry import strategy_named
from pretrain.recipe import read_run_config
from pretrain_tools.planning.footprints import footprint
from pretrain_tools.planning.layouts import Layout, layout
from pretrain_tools.planning.memory import FP32, PlannedRun, sizes_of
from pretrain_tools.planning.traffic import Links, Step, flows
from support.tiny_models import TINY_LLAMA, TINY_MOE, TINY_OLMOE

SIZE = "PARALLELISM_CONFIG_EP_SIZE"
EP = strategy_named("ep")


@pytest.fixture
def problems(recipe, tmp_path, monkeypatch):
    """Returns the problems found with a model and launch settings."""

    def problems(model: dict, processes: int = 2, size: str = "all") -> str:
        (tmp_path / "model.json").write_text(json.dumps(model))
        recipe.write_text(yaml.safe_dump(yaml.safe_load(recipe.read_text()) | {"model": str(tmp_path / "model.json")}))
        sizes = {SIZE: size, "ACCELERATE_USE_FSDP": "true"}
        sizes |= {"WORLD_SIZE": str(processes), "ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
        for name, value in sizes.items():
            monkeypatch.setenv(name, value)
        return "\n".join(EP.problems(read_run_config(recipe, []), "ep"))

    return problems


@pytest.mark.parametrize(
    ("model", "processes", "size", "message"),
    [
        ({}, 2, "all", ""),
        ({}, 8, "4", ""),
        (TINY_OLMOE, 4, "2", ""),
        (TINY_LLAMA, 2, "all", "model: llama has no experts; use ddp or fsdp2"),
        ({}, 3, "all", "valid values for parallelism_config_ep_size: 2, 4, 8"),
        (TINY_MOE | {"num_experts": 1, "num_experts_per_tok": 1}, 2, "all", "_ep_size: none; use fsdp2"),
        (
            {},
            1,
            "all",
            "parallelism_config_ep_size: 1 does not divide dp_shard x cp x tp = 1; use another strategy, or",
        ),
        (
            {},
            4,
            "3",
            "parallelism_config_ep_size: 3 does not divide dp_shard x cp x tp = 4; use 0 (all remaining)",
        ),
        (
            TINY_LLAMA
            | {"model_type": "llama4_text", "num_local_experts": 8, "head_dim": 16, "attention_chunk_size": 32},
            2,
            "all",
            "model: llama4_text has no experts; use ddp or fsdp2",
        ),
    ],
)
def test_indivisible_experts_are_rejected_with_alternatives(problems, model, processes, size, message):
    said = problems(model or TINY_MOE, processes, size)
    assert message in said and bool(said) == bool(message)


def test_a_pipeline_stage_may_have_only_dense_layers():
    """As in the first layers of DeepSeek-V3."""
    strategy = SimpleNamespace(sizes=Sizes(pp=2, ep=2))
    expert_parallel.ExpertParallel(strategy, "ep").combine({})  # torch rejects an empty list of gradients


def test_a_transformers_version_without_dispatch_is_rejected(problems, monkeypatch):
    monkeypatch.setattr(expert_parallel, "DISPATCH", "transformers.distributed.another")
    assert "ep needs a transformers release with transformers.distributed.another, such as 5.23" in problems(TINY_MOE)


def test_a_plan_shards_everything_and_sends_rows_to_experts(recipe, tmp_path):
    """The plan must account for sharded weights and optimizer state, and for the traffic of both experts and FSDP."""
    (tmp_path / "model.json").write_text(json.dumps(TINY_MOE))
    config = load_model_config(str(tmp_path / "model.json"))
    run, sizes = PlannedRun(read_run_config(recipe, []), config, "fp32"), sizes_of(config)
    experts = 2 * 8 * 3 * 64 * 32
    assert (sizes.experts, sizes.routers, sizes.choices) == (experts, 2, 2)
    four = layout("ep", 4)
    divided = footprint(run, four, 1)
    assert divided.parameters == FP32 * sizes.total / 4
    assert divided.optimizer == 2 * FP32 * sizes.total / 4
    links = Links(inside=1e9, network=1e8, per_machine=4)
    rows = 3 * 2 * 4 * 64 * 2 * 64 * FP32
    for ep in (4, 2):
        # Except in the last layer, weights are gathered again for the backward pass.
        dense, whole = sizes.total - experts, 0 if ep == 4 else experts / ep
        last = (dense - sizes.root) / 2
        gathered = 3 * FP32 * ((3 * dense - sizes.root - last) * 3 / 4 + (3 * whole - whole / 2) / 2)
        product = Layout.of(Sizes(**four.sizes.named() | {"ep": ep}))
        assert product.name == "ep"
        found = {flow.name: flow for flow in flows(Step(run.work(product, 1), 3, links))}
        assert found["ep"].seconds == pytest.approx(rows * (ep - 1) / ep / 1e9) and found["ep"].hides_behind == 0
        assert found["fsdp"].sent == pytest.approx(gathered) and found["fsdp"].hides_behind == 0.9
