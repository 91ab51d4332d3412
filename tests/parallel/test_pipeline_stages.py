"""Pipeline stages must be balanced and together compute the same function as the full model."""

import itertools

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from pretrain.model.attention import attention_arguments, document_layout
from pretrain.model.build import InitialWeights, build_meta_model, build_model
from pretrain.model.loss import LanguageModelLoss
from pretrain.model.own_code import register_all
from pretrain.parallel.pipeline_stages import (
    Stage,
    cut_problem,
    split_layers,
    split_micro_batch,
    stage_parameters,
)

register_all()

END = 3
CUTTABLE = "deepone gpt2 gpt_neox llama mistral olmo olmo2 olmo3 phi3 qwen2 qwen3 smollm3 stablelm starcoder2".split()  # noqa: SIM905
SPECIAL = {
    "gpt2": {"n_embd": 32, "n_layer": 5, "n_head": 4, "n_positions": 64},
    # There are two types of layers, so each stage needs the original indices of its layers.
    "olmo3": {"sliding_window": 8},
    "qwen3": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2, "head_dim": 8},
}


def tiny_config(model_type: str, tied: bool):
    values = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    if model_type == "gpt_neox":
        del values["num_key_value_heads"]
    values = SPECIAL["gpt2"] if model_type == "gpt2" else values | SPECIAL.get(model_type, {})
    ends = {"pad_token_id": None, "eos_token_id": END, "bos_token_id": END}
    return AutoConfig.for_model(model_type, vocab_size=97, tie_word_embeddings=tied, **ends, **values)


def batch():
    """Returns four sequences with several documents. Most targets in the last sequence are ignored."""
    ids = np.random.default_rng(0).integers(0, 97, (4, 32))
    arguments = attention_arguments(document_layout(ids, END), "groundwork_sdpa", "cpu")
    targets = torch.from_numpy(ids).roll(-1, 1)
    targets[3, 5:] = -100
    return torch.from_numpy(ids), targets, arguments


@pytest.mark.parametrize("model_type", CUTTABLE)
def test_supported_models_can_be_split(model_type):
    assert cut_problem(tiny_config(model_type, tied=True)) is None


@pytest.mark.parametrize(
    ("scale", "reason"), [("embedding_multiplier", "with two stages"), ("logits_scaling", "output head")]
)
def test_models_that_cannot_be_split_are_rejected_with_the_reason(scale, reason):
    """Granite's base model scales its input, and every stage would do that again."""
    assert cut_problem(AutoConfig.for_model("granite")) is None
    problem = cut_problem(AutoConfig.for_model("granite", **{scale: 8.0}))
    assert "granite cannot be split into pipeline stages" in problem and reason in problem


@pytest.mark.parametrize("model_type", CUTTABLE)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_consecutive_stages_match_the_full_model(model_type, tied):
    """The tolerance allows for a different fp32 summation order; losses are near 4.6 and gradients below 1."""
    config = tiny_config(model_type, tied)
    ids, targets, arguments = batch()
    whole = LanguageModelLoss(build_model(config, seed=1, attention="groundwork_sdpa").eval())
    expected, cross_entropy = whole(ids, targets, **arguments)
    expected.backward()

    model = LanguageModelLoss(build_meta_model(config, attention="groundwork_sdpa").eval())
    ranges, counts = stage_parameters(model.causal_lm, 3)
    stages = [Stage(model, layers, "fp32") for layers in ranges]
    InitialWeights(seed=1).fill(model.causal_lm, "")
    model.causal_lm.tie_weights()
    assert counts == [sum(p.numel() for p in stage.parameters()) for stage in stages]
    microbatches = split_micro_batch(ids, targets, arguments, 2)
    losses = []
    for stage in stages:
        stage.begin(microbatches, micro_steps=1)
    for number in range(2):
        x = ids[2 * number : 2 * number + 2]
        for stage in stages:
            x = stage(x)
        losses.append(x)
    sum(losses).backward()

    assert sum(losses).item() == pytest.approx(expected.item(), abs=2e-6)
    assert stages[-1].cross_entropy.item() == pytest.approx(cross_entropy.item(), abs=2e-6)
    for name, parameter in whole.causal_lm.named_parameters():
        torch.testing.assert_close(
            model.causal_lm.get_parameter(name).grad, parameter.grad, atol=2e-6, rtol=1e-4, msg=lambda m, n=name: n + m
        )


def test_a_stage_has_only_its_own_layers():
    model = LanguageModelLoss(build_meta_model(tiny_config("llama", tied=False), attention="groundwork_sdpa"))
    ranges, _ = stage_parameters(model.causal_lm, 3)
    stages = [Stage(model, layers, "fp32") for layers in ranges]
    held = set(stages[1].parameters())
    made = {name for name, parameter in model.causal_lm.named_parameters() if parameter in held}
    layers = {f"model.layers.{number}." for number in ranges[1]}
    assert made and {name[: name.index(".", 13) + 1] for name in made} == layers
    assert made == {n for n, _ in model.causal_lm.named_parameters() if any(n.startswith(layer) for layer in layers)}


def test_layers_are_split_evenly_with_at_least_one_per_stage():
    assert split_layers([1] * 8, 4, first=0, last=0) == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    # If the embedding and head each cost as much as ten layers, their stages get one layer each.
    assert split_layers([1] * 8, 4, first=10, last=10) == [range(1), range(1, 4), range(4, 7), range(7, 8)]
    assert [len(part) for part in split_layers([3, 1, 1, 1, 3], 3, first=0, last=0)] == [1, 3, 1]


def test_the_split_is_optimal():
    generator = np.random.default_rng(0)
    for _ in range(20):
        sizes = generator.integers(1, 9, 7).tolist()
        first, last = generator.integers(0, 20, 2).tolist()

        def squares(ends, sizes=sizes, first=first, last=last):
            stages = [sum(sizes[a:b]) for a, b in itertools.pairwise([0, *ends, 7])]
            stages[0] += first
            stages[-1] += last
            return sum(stage**2 for stage in stages)

        found = [part.stop for part in split_layers(sizes, 3, first, last)][:-1]
        assert squares(found) == min(squares(ends) for ends in itertools.combinations(range(1, 7), 2))


def test_a_part_of_a_micro_batch_has_its_own_segments():
    ids, targets, arguments = batch()
    parts = split_micro_batch(targets, targets, arguments, 2)
    assert sum(part.weight.item() for part in parts) == pytest.approx(1.0)
    assert parts[1].weight.item() == pytest.approx((32 + 5) / (3 * 32 + 5))
    for number, part in enumerate(parts):
        rows = slice(2 * number, 2 * number + 2)
        expected = document_layout(ids[rows].numpy(), END)
        found = part.attention_arguments
        assert set(found) == set(arguments)
        assert torch.equal(found["position_ids"], expected["position_ids"])
        assert set(found["cu_seq_lens_q"].tolist()) == {*expected["cu_seq_lens_q"].tolist()}
        assert torch.equal(part.targets_BT, targets[rows])


def test_parts_with_different_numbers_of_segments_share_one_compilation():
    ids, targets, _ = batch()
    lengths = torch.compile(torch.diff, dynamic=False, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for ids_BT in (ids, torch.ones_like(ids), torch.full_like(ids, END)):
            arguments = attention_arguments(document_layout(ids_BT.numpy(), END), "groundwork_sdpa", "cpu")
            for part in split_micro_batch(targets, targets, arguments, 2):
                segments = part.attention_arguments["cu_seq_lens_q"]
                assert torch.equal(lengths(segments), torch.diff(segments))


def test_a_part_of_a_micro_batch_has_its_own_masks():
    ids, targets, _ = batch()
    attention = "eager+masks(full_attention,sliding_attention=8)"
    arguments = attention_arguments(document_layout(ids.numpy(), END), attention, "cpu")
    for number, part in enumerate(split_micro_batch(ids, targets, arguments, 2)):
        rows = slice(2 * number, 2 * number + 2)
        assert torch.equal(part.attention_arguments["position_ids"], arguments["position_ids"][rows])
        for kind, mask in part.attention_arguments["attention_mask"].items():
            assert torch.equal(mask, arguments["attention_mask"][kind][rows])
