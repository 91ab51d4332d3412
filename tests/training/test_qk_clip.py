"""QK-clip must scale only the heads whose logits exceeded tau; test_muon_and_adafactor.py tests it under each
strategy."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pretrain.model import largest_logits as module_of_logits
from pretrain.model.attention import attention_arguments, document_layout
from pretrain.model.build import build_meta_model
from pretrain.model.largest_logits import largest_logits, record_largest_logits
from pretrain.optim.optimizers import optimizer_problems
from pretrain.parallel.zero import Zero
from pretrain.recipe import read_run_config
from pretrain.training.qk_clip import QkClip, factors_of, head_rows, qk_clip_problem
from support.tiny_models import LLAMA, TINY, TINY_MOE

IDS = torch.randint(1, 128, (4, 24), generator=torch.Generator().manual_seed(0))
IDS[0, 9] = IDS[2, 17] = 0  # document ends
UPDATED, SKIPPED = torch.zeros(()), torch.ones(())


def config_of(values):
    values = dict(values)
    return AutoConfig.for_model(values.pop("model_type"), **values)


def clipped(values: dict, tau: float):
    """Returns a model in training mode and its QK-clip, with a stub strategy."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(values), attn_implementation="groundwork_sdpa").train()
    record_largest_logits(model)
    strategy = SimpleNamespace(
        device=torch.device("cpu"),
        ranks=SimpleNamespace(count=1),
        name_of={parameter: name for name, parameter in model.named_parameters()},
        head_part=0,
        head_parts=1,
    )
    return model, QkClip(model, strategy, tau)


def largest_of_step(model, clip) -> torch.Tensor:
    """Runs a step's micro-steps. Returns the largest logits (L, H)."""
    clip.begin_step(2)
    for ids in IDS.split(2):
        model(ids, **attention_arguments(document_layout(ids.numpy(), 0), "groundwork_sdpa", "cpu"))
    return torch.stack([module.largest_logits_H for module, _ in clip.here.values()])


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("llama", {}),
        ("llama", {"num_key_value_heads": 4, "attention_bias": True}),
        ("llama", {"num_key_value_heads": 1}),
        ("gpt2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    ],
)
def test_only_heads_that_exceeded_tau_are_scaled_to_tau(name, values):
    model, clip = clipped({**TINY[name], **values}, tau=1.0)
    with torch.no_grad():  # makes logits differ and biases nonzero
        for parameter in model.parameters():
            parameter.mul_(3).add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.02)
    before = largest_of_step(model, clip)
    clip.tau = tau = before[0].median().item()
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    clip.end_step(SKIPPED)
    assert all(torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())
    clip.end_step(UPDATED)
    after = largest_of_step(model, clip)
    assert (before[0] > tau).any() and (before[0] < tau).any()
    # Checks only the first layer, because the inputs of later layers have changed.
    assert torch.allclose(after[0], before[0].clamp(max=tau), rtol=1e-5)
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, weights[name])}
    assert changed <= {rows.parameter for of_layer in head_rows(model).values() for rows in of_layer}
    if name == "gpt2":
        weight = "transformer.h.0.attn.c_attn.weight"
        assert torch.equal(model.get_parameter(weight)[:, 64:], weights[weight][:, 64:])  # the values


def test_a_shared_key_is_scaled_only_as_far_as_all_heads_need():
    of_queries, of_keys = factors_of(torch.tensor([1.0, 4.0, 16.0, 4.0]), 1.0, 2)
    assert of_keys.tolist() == [1.0, 0.5] and of_queries.tolist() == [1.0, 0.25, 0.125, 0.5]
    assert torch.equal(factors_of(torch.tensor([4.0, -torch.inf]), 1.0, 2)[0], torch.tensor([0.5, 1.0]))


@pytest.mark.parametrize(("most", "window", "has_documents"), [(64, None, True), (200, 5, False), (999, 5, True)])
def test_blockwise_maxima_match_the_full_matrix(monkeypatch, most, window, has_documents):
    query, key = (torch.randn(3, heads, 24, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2))
    found = document_layout(IDS[:3].numpy(), 0)
    position = torch.arange(24)
    distance = position[:, None] - position
    allowed = ((distance >= 0) & (distance < (window or 99))).expand(3, 24, 24)
    if has_documents:
        segment = (found["position_ids"] == 0).cumsum(1)
        allowed = allowed & (segment[:, :, None] == segment[:, None, :])
    scores = query @ key.repeat_interleave(2, dim=1).transpose(2, 3) / 8**0.5
    expected = scores.masked_fill(~allowed[:, None], -torch.inf).amax((0, 2, 3))
    monkeypatch.setitem(module_of_logits.MAX_LOGITS, "cpu", most)
    segments = found["cu_seq_lens_q"] if has_documents else None
    assert torch.allclose(largest_logits(query, key, None, None, segments, window), expected, rtol=1e-6)
    assert torch.allclose(largest_logits(query, key, allowed[:, None]), expected, rtol=1e-6)


def test_only_training_is_recorded():
    model, clip = clipped(LLAMA, 1.0)
    module, _ = clip.here[0]
    clip.begin_step(1)
    with torch.no_grad():
        model(IDS)
    model.eval()(IDS)
    assert (module.largest_logits_H == -torch.inf).all()
    model.train()(IDS)
    assert module.largest_logits_H.isfinite().all()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_supported_models_are_accepted(name):
    assert qk_clip_problem(config_of(TINY[name]), "groundwork_sdpa") is None


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (TINY["qwen3"], "qwen3 computes queries and keys that do not scale"),
        (TINY_MOE, "qwen3_moe computes queries and keys that do not scale"),
        ({**LLAMA, "model_type": "olmo2"}, "olmo2 computes queries and keys that do not scale"),
        (
            {"model_type": "gpt_neox", **{k: v for k, v in LLAMA.items() if k != "model_type"}},
            "no query and key weights",
        ),
    ],
)
def test_unsupported_models_are_rejected_by_name(values, reason):
    problem = qk_clip_problem(config_of(values), "groundwork_sdpa")
    assert reason in problem and "qk_clip: null" in problem


def test_attentions_with_their_own_masks_are_rejected_by_name():
    assert "does not support the attention flex_attention" in qk_clip_problem(config_of(LLAMA), "flex_attention")


def test_zero_and_other_optimizers_are_rejected_by_name(recipe):
    config = read_run_config(recipe, [("optim.name", "muon"), ("optim.muon.qk_clip", "100")])
    (problem,) = Zero.problems(config, "zero2")
    assert problem.startswith("optim.muon.qk_clip: not supported with zero2")
    config = read_run_config(recipe, [("optim.name", "adamw"), ("optim.muon.qk_clip", "100")])
    (problem,) = optimizer_problems(config.optim, build_meta_model(config_of(LLAMA)), "cpu")
    assert problem.startswith("optim.muon.qk_clip: requires optim.name: muon, got adamw")
