"""Plans, and what is refused before tensor parallelism starts."""

import json
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import pretrain.model.architectures  # noqa: F401  (registers the local models)
from pretrain.model.attention import IGNORED
from pretrain.model.build import build_meta_model
from pretrain.model.loss import LanguageModelLoss
from pretrain.parallel import tensor_parallel
from pretrain.parallel.mesh import MeshStrategy
from pretrain.parallel.tensor_parallel import (
    SUMMED,
    plan_problem,
    share_head,
    style_of,
    tensor_plan_of,
)
from pretrain.recipe import read_run_config
from support.tiny_models import LLAMA, TINY_LLAMA


@pytest.fixture
def launched(monkeypatch):
    """Sets what `accelerate launch` sets for tp.yaml."""

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
    """A matrix that is left out would be computed whole on every process, and a wrong name would split nothing."""
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
        ("gpt2", 2, "model: gpt2 has no tensor-parallel plan; use pp or fsdp2, or an architecture"),
        ("phi3", 2, "model: phi3 has colwise_gather_output, rowwise_split_input in its tensor-parallel plan"),
        (
            "llama",
            8,
            "num_attention_heads 8, num_key_value_heads 4, intermediate_size 64 cannot all be divided by 8 "
            "tensor-parallel processes; 2, 4 can be used",
        ),
    ],
)
def test_a_model_that_cannot_be_split_is_refused(model_type, size, message):
    shape = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 64, "hidden_size": 64}
    config = AutoConfig.for_model(model_type, **({} if model_type == "gpt2" else shape))
    found = plan_problem(config, size)
    assert found is None if message is None else message in found


def test_refusals_before_the_start(launched, recipe, tmp_path):
    launched(2)
    assert problems(recipe) == ""
    found = problems(recipe, **{"optim.name": "adamw_8bit"})
    assert found.startswith("optim.name: adamw_8bit does not run under tp")
    assert "choose adamw or adafactor or muon, or a strategy" in found
    launched(4)
    assert "cannot all be divided by 4 tensor-parallel processes; 2 can be used" in problems(recipe)
    launched(4, "3")
    assert (
        "launcher: parallelism_config_tp_size 3 does not divide 4 processes; use 0 (all that are left) or 2, 4"
    ) in problems(recipe)
    launched(2)
    (tmp_path / "one_head.json").write_text(json.dumps(TINY_LLAMA | {"num_key_value_heads": 1}))
    assert "no number can: use another strategy" in problems(recipe, model=str(tmp_path / "one_head.json"))


def test_shares_of_the_loss_add_up_to_it():
    """Ten tokens on four processes: three each, one on the last; some targets do not count."""
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
            dist.all_gather_into_tensor = lambda whole, part, group: gathered.append(part)
            model = LanguageModelLoss(causal_lm, z_loss=1e-2)
            assert share_head(model, None) == [head]
            loss, entropy = model.loss_of_hidden(hidden, targets)
            of_head.append(torch.autograd.grad(loss, (hidden, head))[1])
        losses.append(loss.detach())
        entropies.append(entropy)
    assert sum(losses) == pytest.approx(whole.item()) and sum(entropies) == pytest.approx(cross_entropy.item())
    torch.testing.assert_close(sum(of_head), expected[1])
    torch.testing.assert_close(torch.cat(gathered)[:10].view_as(hidden), expected[0])
