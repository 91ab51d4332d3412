"""Tests for keeping documents apart in the mixers of hybrid models, with one document per row."""

import functools
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig

from pretrain.config import WindowSpec
from pretrain.model.attention import attention_arguments, classes_in_rows, document_layout
from pretrain.model.build import build_model, flops_per_token
from pretrain.model.compile import checkpoint_activations, compile_model
from pretrain.model.document_rows import MAX_CELLS_PER_TOKEN, DocumentRows, in_rows
from pretrain.model.loss import LanguageModelLoss
from pretrain.training.probe import LEAK, probe
from pretrain_tools.planning.activations import ForwardPass, trace_activations

END = 1
LENGTHS = ((40, 3, 21), (1, 33, 30))
"""Document lengths in two windows of 64 tokens."""
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "max_position_embeddings": 64,
}
KINDS = ["linear_attention", "full_attention", "linear_attention"]
DELTA = {
    "layer_types": KINDS,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA_2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16}
OF_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {
    "bamba": {**MAMBA_2, "attn_layer_indices": [1]},
    "falcon_h1": {**MAMBA_2, "mamba_d_ssm": 64, "head_dim": 8},
    "granitemoehybrid": {**MAMBA_2, "layer_types": KINDS, "shared_intermediate_size": 48, "num_local_experts": 0},
    "jamba": {
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "num_experts": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {**OF_EXPERTS, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "mamba": {"state_size": 8, "num_hidden_layers": 2},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 16},
    "minimax": {"layer_types": KINDS, "head_dim": 8, "num_local_experts": 2, "block_size": 16},
    "olmo_hybrid": {**DELTA, "num_key_value_heads": 4},
    "qwen3_5_text": DELTA,
    "qwen3_next": {**DELTA, **OF_EXPERTS, "shared_expert_intermediate_size": 16},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 16},
    "rwkv": {"attention_hidden_size": 32, "context_length": 64},
    "xlstm": {"num_heads": 4, "num_hidden_layers": 2},
    "zamba2": {
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "hybrid_layer_ids": [1, 3],
        "num_mem_blocks": 2,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "mamba_d_state": 8,
        "mamba_ngroups": 1,
        "chunk_size": 16,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
}
"""{model_type: its config keys}. test_probe.py tests the other families in docs/architectures.md."""


def config_of(model_type: str):
    without_tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return AutoConfig.for_model(model_type, **{**SIZES, **without_tokens, **FAMILIES[model_type]})


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    ids = torch.randint(2, SIZES["vocab_size"], (2, 64), generator=torch.Generator().manual_seed(0))
    for row, lengths in enumerate(LENGTHS):
        for length, end in zip(lengths, itertools.accumulate(lengths), strict=True):
            ids[row, end - length] = END
    return ids


def inputs_of(ids: torch.Tensor, attention: str) -> dict:
    arguments = attention_arguments(document_layout(ids.numpy().copy(), END), attention, "cpu")
    return {"input_ids_BT": ids, "targets_BT": ids.roll(-1, 1), **arguments}


def hidden_states(model, ids: torch.Tensor, attention: str = "eager", documents: bool = False) -> torch.Tensor:
    arguments = attention_arguments(document_layout(ids.numpy().copy(), END), attention, "cpu") if documents else {}
    return model.base_model(input_ids=ids, use_cache=False, **arguments)[0]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_documents_do_not_affect_each_other_and_match_separate_passes(model_type, ids):
    config = config_of(model_type)
    attention = probe(config, attention="auto", window=WindowSpec(64, document_mask=True)).attention
    assert classes_in_rows(attention)
    model = build_model(config, seed=0, attention=attention).eval()
    alone = build_model(config, seed=0, attention="eager").eval()
    changed = ids.clone()
    changed[0, 1:40] = (changed[0, 1:40] - 2 + 7) % 59 + 2
    with torch.no_grad():
        packed = hidden_states(model, ids, attention, documents=True)
        scale = packed.abs().max()
        other = hidden_states(model, changed, attention, documents=True)
        # Positions from 40 on belong to other documents and must not change; the rest must change.
        assert (other - packed).flatten(0, 1)[40:].abs().max() <= LEAK * scale
        assert (other - packed)[0, 1:40].abs().max() > 100 * LEAK * scale
        for row, lengths in enumerate(LENGTHS):
            for length, end in zip(lengths, itertools.accumulate(lengths), strict=True):
                own = hidden_states(alone, ids[row : row + 1, end - length : end])
                assert (packed[row, end - length : end] - own[0]).abs().max() <= LEAK * scale
        whole = hidden_states(model, ids)  # without document boundaries, mixers use the whole window
        assert (whole - hidden_states(alone, ids)).abs().max() <= LEAK * scale


def test_loss_and_gradients_of_a_packed_window_are_those_of_its_documents(ids, monkeypatch):
    # The eager backend avoids 80 s of C++ compilation.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    config = config_of("qwen3_5_text")
    attention = probe(config, attention="auto", window=WindowSpec(64, document_mask=True)).attention
    gradients = []
    for mode in ("alone", "packed", "recomputed", "compiled", "recomputed and compiled"):
        model = build_model(config, seed=0, attention="eager" if mode == "alone" else attention).train()
        loss = LanguageModelLoss(model)
        inputs = inputs_of(ids, attention)
        if "recomputed" in mode:
            checkpoint_activations(model, "full")
        if "compiled" in mode:
            torch.compiler.reset()
            torch._dynamo.utils.counters.clear()
            compile_model(loss, model, "regional")
        if mode == "alone":
            total = 0
            for row, lengths in enumerate(LENGTHS):
                for length, end in zip(lengths, itertools.accumulate(lengths), strict=True):
                    here = slice(end - length, end)
                    logits = model(input_ids=ids[row : row + 1, here], use_cache=False).logits[0]
                    total = total + F.cross_entropy(logits, inputs["targets_BT"][row, here], reduction="sum") / 128
        else:
            total, _ = loss(**inputs)
            assert ("compiled" in mode) <= (torch._dynamo.utils.counters["stats"]["unique_graphs"] > 2), mode
        total.backward()
        gradients.append([total.detach(), *(parameter.grad for parameter in model.parameters())])
    for mode in gradients[1:]:
        for found, wanted in zip(mode, gradients[0], strict=True):
            torch.testing.assert_close(found, wanted, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("lengths", [[64], [1] * 64, [40, 3, 21], [33, 31], [17, 16, 15, 8, 4, 2, 1, 1], [62, 1, 1]])
def test_every_token_has_one_cell_and_padding_is_bounded(lengths):
    ids = np.full((2, 64), 5)
    for row in range(2):
        ids[row, np.cumsum([0, *lengths[:-1]])] = END
    rows = DocumentRows.of(document_layout(ids, END)["cu_seq_lens_q"], (2, 64))
    assert rows.tokens[rows.cells].tolist() == list(range(128))
    assert len(rows.tokens) == sum(count * length for count, length in rows.shapes) <= MAX_CELLS_PER_TOKEN * 128
    first = 0
    for count, length in rows.shapes:
        for row in rows.tokens[first : first + count * length].view(count, length):
            steps = row.diff()  # one document in order, then padded with its last token
            assert set(steps.tolist()) <= {0, 1} and (steps.diff() <= 0).all()
            assert END not in ids.flatten()[row.unique()[1:].numpy()]
        first += count * length


def test_a_mixer_with_an_unexpected_shape_is_rejected(ids):
    mixer = torch.nn.Linear(4, 4)
    mixer.current_documents = type("Current", (), {})()
    mixer.current_documents.rows = DocumentRows.of(document_layout(ids.numpy().copy(), END)["cu_seq_lens_q"], (2, 64))
    with pytest.raises(ValueError, match="needs hidden states of shape"):
        in_rows(mixer, torch.zeros(2, 32, 4))


def test_flops_and_memory_of_a_hybrid_count_each_layer_type():
    config = config_of("lfm2")
    by_length = flops_per_token(config, 2048) - flops_per_token(config, 1024)
    assert by_length == 12 * 1 * 32 * 1024  # one of the three layers uses attention
    shape = {"weights": torch.float32, "autocast": False}
    packed = ForwardPass(WindowSpec(64, document_mask=True), mixers=("Lfm2ShortConv",), **shape)
    kept = {}
    for name, kinds in {"hybrid": FAMILIES["lfm2"]["layer_types"], "mixers": ["conv"] * 3}.items():
        config.layer_types = kinds
        kept[name] = trace_activations(config, packed).kept(3, 2)
    assert kept["hybrid"] < kept["mixers"]
    unpacked = trace_activations(config, ForwardPass(WindowSpec(64, document_mask=False), **shape)).kept(3, 2)
    assert 1.2 * unpacked < kept["mixers"] < 2.6 * unpacked
