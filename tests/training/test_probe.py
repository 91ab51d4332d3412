"""The probe must handle every causal model in transformers and detect each kind of fault."""

import functools
import json
import re

import pytest
import torch
import yaml
from transformers import AttentionInterface, AutoConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from pretrain.config import WindowSpec
from pretrain.errors import InputError
from pretrain.model import attention as attention_module
from pretrain.model.build import KeyedConfig
from pretrain.model.routers import RouterLosses
from pretrain.model.small_copy import kinds_of_layers, projects_hidden_states, reference_of
from pretrain.training import experts as experts_module
from pretrain.training import probe as probe_module
from pretrain.training.experts import Experts
from pretrain.training.probe import probe
from support import causal_models
from support.project import launch, run_script

MASKED = WindowSpec(64, document_mask=True)

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
NO_LOSSES = RouterLosses(2, balance=0.0)
LLAMA = {**SMALL, "num_hidden_layers": 2, "vocab_size": 61, "max_position_embeddings": 64}


@pytest.fixture(autouse=True)
def nothing_remembered():
    """Clears the caches, because their keys don't change if a test patches code."""
    probe_module._probe.cache_clear()
    reference_of.cache_clear()
    probe_module._balance_problem.cache_clear()


@pytest.mark.parametrize("model_type", causal_models.causal_models())
def test_every_causal_model_works_or_is_rejected_as_documented(model_type):
    """Compares with the table in the docs, which `PYTHONPATH=. python tests/support/causal_models.py` regenerates."""
    on, off = (causal_models.outcome(model_type, document_mask) for document_mask in (True, False))
    if off.startswith("refused"):
        found = (causal_models.reason_of(off),)
        assert on.startswith("refused"), "a model that can't train without the mask can't train with it"
    else:
        found = ("rejected" if on.startswith("refused") else on, off)
    assert causal_models.table_on_page()[model_type] == found


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 5},
        {"max_position_embeddings": 8},
        {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1},
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 40, "num_attention_heads": 32,
         "num_key_value_heads": 8, "vocab_size": 128_256},
        {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ],
    ids=["vocabulary", "positions", "one of each", "8B", "multi-query"],
)  # fmt: skip
def test_any_size_is_probed(changes):
    config = AutoConfig.for_model("llama", **{**LLAMA, **changes})
    found = probe(config, attention="auto", window=MASKED)
    assert found == probe_module.Probe("groundwork_sdpa", from_hidden_states=True, passed_over=())


def test_the_copy_has_every_kind_of_layer():
    config = AutoConfig.for_model("jamba")  # attention in layers 4, 12, ..., experts in every second layer
    total, layers = kinds_of_layers(config)
    assert (total, layers) == (32, 8) or layers > 4
    reference = reference_of(KeyedConfig.of(config))
    classes = {type(layer).__name__ for layer in reference.model.layers}
    assert classes == {"JambaAttentionDecoderLayer", "JambaMambaDecoderLayer"}


def found_of_llama(**arguments):
    config = AutoConfig.for_model("llama", **LLAMA)
    return probe(config, **{"attention": "auto", "window": MASKED, **arguments})


def replace_attention(monkeypatch, **fixed):
    """Replaces groundwork_sdpa with a version in which some arguments are fixed."""
    interface = AttentionInterface()
    monkeypatch.setitem(
        interface._global_mapping,
        "groundwork_sdpa",
        lambda *args, **kwargs: attention_module.sdpa(*args, **{**kwargs, **fixed}),
    )


def test_an_attention_that_ignores_documents_is_not_used(monkeypatch):
    replace_attention(monkeypatch, cu_seq_lens_q=None)
    found = found_of_llama()
    assert found.attention == "sdpa"
    assert "groundwork_sdpa: document_mask is not respected" in found.passed_over[0]
    assert found_of_llama(window=WindowSpec(64, document_mask=False)).attention == "groundwork_sdpa"


def test_an_attention_with_different_results_is_not_used(monkeypatch):
    replace_attention(monkeypatch, scaling=1.0)
    found = found_of_llama(window=WindowSpec(64, document_mask=False))
    assert found.attention == "sdpa" and "logits differ from the library's own" in found.passed_over[0]


def test_an_explicit_attention_is_rejected_with_alternatives(monkeypatch):
    names = {"sdpa": ["groundwork_sdpa"], "auto": ["groundwork_sdpa", "groundwork_eager"]}
    monkeypatch.setattr(probe_module, "candidates_of", lambda requested, config: names[requested])
    monkeypatch.setattr(
        probe_module, "_mixers", lambda *arguments: set()
    )  # otherwise, each document would be processed in a separate row
    replace_attention(monkeypatch, cu_seq_lens_q=None)
    with pytest.raises(InputError) as refused:
        found_of_llama(attention="sdpa")
    text = str(refused.value)
    assert "llama would not train correctly with attention sdpa" in text
    assert "--data.document_mask false" in text and "--attention auto" in text


def test_a_model_that_is_not_causal_is_rejected(monkeypatch):
    def not_causal(module, query, key, value, mask, **kwargs):
        return eager(module, query, key, value, None, **kwargs)

    eager = modeling_llama.eager_attention_forward
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", not_causal)
    with pytest.raises(
        InputError, match=r"llama is not causal: later tokens or other sequences change its logits by \d+\.\d%"
    ):
        found_of_llama()


@pytest.mark.parametrize(
    ("training", "said"),
    [
        (False, "is not causal: later tokens or other sequences change its logits by"),
        (True, "in training mode, later tokens or other sequences change its logits by"),
    ],
)
def test_a_model_that_mixes_sequences_is_rejected(monkeypatch, training, said):
    forward = LlamaForCausalLM.forward

    def mixed(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        if self.training or not training:
            output.logits = output.logits * (1 + output.logits.softmax(dim=0))
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", mixed)
    for document_mask in (False, True):
        with pytest.raises(InputError, match=said) as refused:
            found_of_llama(window=WindowSpec(64, document_mask=document_mask))
        assert "--data.document_mask" not in str(refused.value), "a remedy that doesn't help"


def test_dropout_is_not_mistaken_for_a_leak(monkeypatch):
    forward = LlamaForCausalLM.forward

    def dropped(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.logits = torch.dropout(output.logits, 0.5, self.training)
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", dropped)
    assert found_of_llama(window=WindowSpec(64, document_mask=False)).attention


def test_missing_and_nonfinite_gradients_are_rejected(monkeypatch):
    forward = LlamaForCausalLM.forward

    def without_the_last_layer(self, *args, **kwargs):
        self.model.layers[-1].requires_grad_(True)
        output = forward(self, *args, **kwargs)
        if self.training:
            output.logits = self.lm_head(self.model.embed_tokens(kwargs["input_ids"]))
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", without_the_last_layer)
    with pytest.raises(InputError) as refused:
        found_of_llama()
    told = str(refused.value)
    assert " parameters get no gradient: model.layers.*.self_attn.q_proj.weight, " in told
    assert " more. In your own class" in told

    def infinite(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.logits = output.logits * (torch.inf if self.training else 1.0)
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", infinite)
    with pytest.raises(InputError, match="a non-finite gradient"):
        found_of_llama()


def test_the_balancing_loss_must_reach_every_router(monkeypatch):
    config = AutoConfig.for_model("qwen3_moe")
    assert probe(config, attention="auto", window=MASKED, balances=True).attention == "groundwork_sdpa"
    without = functools.partial(Experts, losses=NO_LOSSES)
    monkeypatch.setattr(experts_module, "Experts", lambda model, strategy, losses: without(model, strategy))
    probe_module._balance_problem.cache_clear()
    with pytest.raises(InputError, match=r"does not reach 2 of its 2 routers, starting with model.layers.0.mlp.gate"):
        probe(config, attention="auto", window=MASKED, balances=True)


def test_the_source_of_the_logits_is_detected():
    assert projects_hidden_states(AutoConfig.for_model("llama", **LLAMA))
    assert not projects_hidden_states(AutoConfig.for_model("granite", **LLAMA, logits_scaling=4.0))
    assert projects_hidden_states(AutoConfig.for_model("granite", **LLAMA, logits_scaling=1.0))
    assert projects_hidden_states(AutoConfig.for_model("nanochat", **LLAMA, final_logit_softcapping=15.0))
    # Llama's forward pass ignores the cap, so the loss must not apply it.
    assert not projects_hidden_states(AutoConfig.for_model("llama", **LLAMA, final_logit_softcapping=1.0))
    # With such a large cap, the logits don't show whether it is applied.
    assert not projects_hidden_states(AutoConfig.for_model("nanochat", **LLAMA, final_logit_softcapping=1e4))


def with_model(recipe, tmp_path, **values) -> list[str]:
    """Changes the recipe to train this model for 4 steps. Returns the command."""
    (tmp_path / "model.json").write_text(json.dumps(values))
    settings = yaml.safe_load(recipe.read_text()) | {"model": str(tmp_path / "model.json"), "budget": {"steps": 4}}
    recipe.write_text(yaml.safe_dump(settings))
    return ["train.py", "--config", recipe]


MAMBA = {"model_type": "mamba", "vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
INKLING = {
    "model_type": "inkling2_text",
    "vocab_size": 512,
    "unpadded_vocab_size": 512,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_rel": 4,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "eos_token_id": None,
}
"""Model whose attention contains short convolutions and needs a mask, so documents can't be separate rows."""


def test_check_rejects_incorrect_training(recipe, tmp_path):
    arguments = with_model(recipe, tmp_path, **INKLING)
    refused = run_script(*arguments, "--loss.router_balance", "0", "--check", check=False)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert "inkling2_text would not train correctly" in refused.stderr
    assert "--data.document_mask false" in refused.stderr


def test_full_compilation_is_rejected_with_documents_as_rows(recipe, tmp_path):
    arguments = with_model(recipe, tmp_path, **MAMBA)
    refused = run_script(*arguments, "--compile", "full", "--check", check=False)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert "compile: full does not work with data.document_mask and mamba" in refused.stderr
    run_script(*arguments, "--check", "--data.document_mask", "false")


@pytest.mark.parametrize(
    ("values", "attention", "strategy"),
    [
        (MAMBA, "eager, within documents; MambaMixer with each document in a separate row", "ddp"),
        ({"model_type": "bloom", "vocab_size": 512, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "eager+mask", None),
    ],
    ids=["mamba", "bloom"],
)
def test_models_beyond_plain_attention_train_and_their_export_is_verified(
    recipe, tmp_path, values, attention, strategy
):
    arguments = with_model(recipe, tmp_path, **values)
    printed = (launch(strategy, 2, *arguments) if strategy else run_script(*arguments)).stdout
    assert re.search(rf"^attention +{re.escape(attention)}[,;]?", printed, re.MULTILINE)
    # Compares the training model on packed sequences with transformers on separate documents.
    differs = re.search(r"one document at a time, within (\S+) of", printed)
    assert float(differs.group(1)) < 1e-3
