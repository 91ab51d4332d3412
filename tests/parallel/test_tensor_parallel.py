"""Tensor-parallel plans must cover every matrix of a layer, and unsupported models must be rejected at startup."""

import inspect
import json
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from pretrain.model.attention import IGNORED
from pretrain.model.build import build_meta_model
from pretrain.model.loss import LanguageModelLoss
from pretrain.model.own_code import register_all
from pretrain.parallel import tensor_parallel
from pretrain.parallel.mesh import MeshStrategy
from pretrain.parallel.tensor_parallel import (
    SUMMED,
    input_problem,
    plan_problem,
    share_head,
    split_unit,
    style_of,
    tensor_plan_of,
)
from pretrain.recipe import read_run_config
from support.tiny_models import LLAMA, TINY_LLAMA, TINY_MOE

register_all()


@pytest.fixture
def launched(monkeypatch):
    """Sets the environment variables that `accelerate launch` sets for tp.yaml."""

    def launched(processes: int, size: str = "None"):
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
        monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", size)

    return launched


def problems(recipe, **overrides) -> str:
    return "\n".join(MeshStrategy.problems(read_run_config(recipe, list(overrides.items())), "tp"))


def test_a_style_is_found_by_pattern():
    plan = {"layers.*.self_attn.q_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}
    assert style_of("layers.11.self_attn.q_proj", plan) == "colwise"
    assert style_of("layers.3.mlp.down_proj", plan) == "rowwise"
    assert style_of("layers.3.self_attn", plan) is style_of("other.layers.3.mlp.down_proj", plan) is None


def test_deepone_has_a_plan_for_every_matrix_of_a_layer():
    """A matrix missing from the plan wouldn't be split, and a wrong name would have no effect."""
    config = AutoConfig.for_model("deepone", num_hidden_layers=2)
    layer = build_meta_model(config).model.layers[0]
    split = {name: style_of(f"layers.0.{name}", tensor_plan_of(config)) for name, module in layer.named_modules()}
    matrices = {name for name, module in layer.named_modules() if getattr(module, "weight", None) is not None}
    matrices = {name for name in matrices if layer.get_submodule(name).weight.dim() == 2}
    assert matrices == {name for name, style in split.items() if style in ("colwise", "rowwise")}
    assert {name for name, style in split.items() if style == SUMMED} == {"self_attn.q_norm", "self_attn.k_norm"}


@pytest.mark.parametrize(
    ("model_type", "size", "message"),
    [
        ("llama", 2, None),
        ("qwen3", 4, None),
        ("deepone", 2, None),
        (
            "gpt2",
            2,
            "model: gpt2 does not support tp: its tensor-parallel plan has no matrices; use fsdp2, or an architecture",
        ),
        ("phi3", 2, "model: phi3 does not support tp: its tensor-parallel plan has colwise_gather"),
        (
            "llama",
            8,
            "num_attention_heads 8, num_key_value_heads 4, intermediate_size 64 must all be divisible by 8, "
            "the number of tensor-parallel processes; 2, 4 would work",
        ),
    ],
)
def test_a_model_that_cannot_be_split_is_refused(model_type, size, message):
    shape = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 64, "hidden_size": 64}
    config = AutoConfig.for_model(model_type, **({} if model_type == "gpt2" else shape))
    found = plan_problem(config, size)
    assert found is None if message is None else message in found


def test_a_tied_embedding_in_the_plan_is_replicated():
    """transformers 5.17 adds it to the plan of each model that ties its embeddings."""
    config = AutoConfig.for_model("llama", tie_word_embeddings=True)
    config.base_model_tp_plan = {**config.base_model_tp_plan, "embed_tokens": "embedding_rowwise"}
    assert plan_problem(config, 2) is None


def test_layers_of_different_sizes_are_rejected():
    config = AutoConfig.for_model("gemma3n_text")
    assert "model: gemma3n_text does not support tp: its layers differ in intermediate_size" in plan_problem(config, 2)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "deepone"])
def test_inputs_of_split_matrices_have_no_other_use(model_type):
    assert input_problem(AutoConfig.for_model(model_type)) is None


def test_another_use_of_the_inputs_of_split_matrices_is_rejected(monkeypatch):
    """The gradient of that use would be summed across ranks, although each rank already has the full gradient."""
    plain = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: plain(self, x) + x)
    config = AutoConfig.for_model("llama", hidden_size=64, num_attention_heads=4, intermediate_size=80)
    assert "model: llama does not support tp: the inputs of its column-split" in input_problem(config)


def test_a_planned_module_that_is_not_linear_is_rejected():
    config = AutoConfig.for_model("llama", hidden_size=64, num_attention_heads=4, intermediate_size=96)
    config.base_model_tp_plan = {"layers.*.input_layernorm": "colwise"}
    assert "layers.0.input_layernorm in its tensor-parallel plan is LlamaRMSNorm, not nn.Linear" in input_problem(
        config
    )


@pytest.fixture
def two_ranks_in_name():
    """Creates a fake group of two ranks, in which collectives return immediately."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (1, 2), mesh_dim_names=("fsdp", "tp"))
    dist.destroy_process_group()


@pytest.mark.parametrize("is_older", [False, True])
def test_experts_are_split_with_each_transformers(two_ranks_in_name, monkeypatch, is_older):
    """5.17 reads the plan from the model."""
    apply = tensor_parallel.apply_tensor_parallelism
    if is_older and "tp_plan" in inspect.signature(apply).parameters:
        older = lambda model, tp_mesh: apply(model, tp_mesh, model.tp_plan)  # noqa: E731
        monkeypatch.setattr(tensor_parallel, "apply_tensor_parallelism", older)
    config = AutoConfig.for_model(**TINY_MOE)
    model = AutoModelForCausalLM.from_config(config)
    split_unit(model, "model.layers.0", two_ranks_in_name["tp"], torch.device("cpu"), splits_experts=True)
    width = TINY_MOE["moe_intermediate_size"]
    up = model.model.layers[0].mlp.experts.gate_up_proj
    assert (up.shape[1], up.to_local().shape[1]) == (2 * width, width)


def test_layers_need_at_most_half_the_cpu_time_of_dtensors(two_ranks_in_name):
    """The matrices are so small that CPU time measures only the overhead."""
    config = AutoConfig.for_model(**LLAMA)
    hidden_BTD = torch.randn(1, 16, LLAMA["hidden_size"])
    mesh = two_ranks_in_name
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    plan_of_model = tensor_plan_of(config)

    def model_of_dtensors() -> torch.nn.Module:
        model = AutoModelForCausalLM.from_config(config)
        for index, layer in enumerate(model.model.layers):
            named = {name: style_of(f"layers.{index}.{name}", plan_of_model) for name, _ in layer.named_modules()}
            plan = {name: styles[style]() for name, style in named.items() if style in styles}
            parallelize_module(layer, mesh["tp"], plan, src_data_rank=None)
        return model

    def model_of_local_parts() -> torch.nn.Module:
        model = AutoModelForCausalLM.from_config(config)
        for index in range(len(model.model.layers)):
            unit = f"model.layers.{index}"
            split_unit(model, unit, mesh["tp"], torch.device("cpu"), splits_experts=False)
        return model

    def seconds(model: torch.nn.Module) -> float:
        rotary = model.model.rotary_emb(hidden_BTD, torch.arange(16)[None])
        start = time.process_time()
        for _ in range(5):
            x = hidden_BTD.clone().requires_grad_()
            for layer in model.model.layers:
                x = layer(x, position_embeddings=rotary, attention_mask=None)
            x.sum().backward()
        return time.process_time() - start

    models = [model_of_dtensors(), model_of_local_parts()]
    rounds = [[seconds(model) for model in models] for _ in range(6)]
    dtensors, local_parts = (min(times) for times in zip(*rounds, strict=True))
    assert local_parts < 0.5 * dtensors, f"{local_parts:.3f} s against {dtensors:.3f} s"


def test_refusals_before_the_start(launched, recipe, tmp_path):
    launched(2)
    assert problems(recipe) == ""
    found = problems(recipe, **{"optim.name": "adamw_8bit"})
    assert found.startswith("optim.name: adamw_8bit is not supported with tp: tp splits matrices by columns")
    assert "use adamw, or adamw_8bit with dp_shard" in found
    launched(4)
    assert "must all be divisible by 4, the number of tensor-parallel processes; 2 would work" in problems(recipe)
    launched(4, "3")
    assert (
        "launcher: parallelism_config_tp_size 3 does not fit the number of processes (4); use 0 (all remaining) "
        "or 2, 4, or --num_processes 3"
    ) in problems(recipe)
    launched(2)
    (tmp_path / "one_head.json").write_text(json.dumps(TINY_LLAMA | {"num_key_value_heads": 1}))
    assert "no number would work; use another strategy" in problems(recipe, model=str(tmp_path / "one_head.json"))


def test_partial_losses_add_up_to_the_loss(monkeypatch):
    """With ten tokens on four processes, the last process gets only one. Some targets are ignored."""
    causal_lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA))
    hidden = torch.randn(2, 5, LLAMA["hidden_size"], requires_grad=True)
    targets = torch.randint(LLAMA["vocab_size"], (2, 5))
    targets[0, 1:3] = targets[1, 4] = IGNORED
    head = causal_lm.get_output_embeddings().weight
    whole, cross_entropy = LanguageModelLoss(causal_lm, z_loss=1e-2).loss_of_hidden(hidden, targets)
    expected = torch.autograd.grad(whole, (hidden, head))
    losses, entropies, of_head, gathered = [], [], [], []
    for rank in range(4):
        with mock.patch.object(tensor_parallel, "dist") as dist:
            dist.get_rank.return_value, dist.get_world_size.return_value = rank, 4
            monkeypatch.setattr(tensor_parallel, "gather_flat", lambda whole, part, group: gathered.append(part))
            model = LanguageModelLoss(causal_lm, z_loss=1e-2)
            share_head(model, None)
            loss, entropy = model.loss_of_hidden(hidden, targets)
            of_head.append(torch.autograd.grad(loss, (hidden, head))[1])
        losses.append(loss.detach())
        entropies.append(entropy)
    assert sum(losses) == pytest.approx(whole.item()) and sum(entropies) == pytest.approx(cross_entropy.item())
    torch.testing.assert_close(sum(of_head), expected[1])
    torch.testing.assert_close(torch.cat(gathered)[:10].view_as(hidden), expected[0])
