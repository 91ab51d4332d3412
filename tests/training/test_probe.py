"""The probe: what it finds of every causal model of transformers, and that it finds each kind of fault."""

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
    """Caches know configurations, not what a test does to the code."""
    probe_module._probe.cache_clear()
    reference_of.cache_clear()
    probe_module._balance_problem.cache_clear()


@pytest.mark.parametrize("model_type", causal_models.causal_models())
def test_every_causal_model_works_or_is_refused_by_name_as_the_page_says(model_type):
    """For a new version of transformers `PYTHONPATH=. python tests/support/causal_models.py` writes the table anew."""
    on, off = (causal_models.outcome(model_type, document_mask) for document_mask in (True, False))
    if off.startswith("refused"):
        found = (causal_models.reason_of(off),)
        assert on.startswith("refused"), "a model that does not train without the mask does not train with it"
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
    assert found == probe_module.Probe("groundwork_sdpa", from_hidden_states=True)


def test_every_kind_of_layer_is_in_the_copy():
    config = AutoConfig.for_model("jamba")  # attention in layers 4, 12, ..., experts in every second one
    total, layers = kinds_of_layers(config)
    assert (total, layers) == (32, 8) or layers > 4
    reference = reference_of(KeyedConfig.of(config))
    classes = {type(layer).__name__ for layer in reference.model.layers}
    assert classes == {"JambaAttentionDecoderLayer", "JambaMambaDecoderLayer"}


def found_of_llama(**arguments):
    config = AutoConfig.for_model("llama", **LLAMA)
    return probe(config, **{"attention": "auto", "window": MASKED, **arguments})


def replace_attention(monkeypatch, **fixed):
    """groundwork_sdpa with some of its arguments overruled."""
    interface = AttentionInterface()
    monkeypatch.setitem(
        interface._global_mapping,
        "groundwork_sdpa",
        lambda *args, **kwargs: attention_module.sdpa(*args, **{**kwargs, **fixed}),
    )


def test_an_attention_that_ignores_documents_is_passed_over(monkeypatch):
    replace_attention(monkeypatch, cu_seq_lens_q=None)
    found = found_of_llama()
    assert found.attention == "sdpa"
    assert "groundwork_sdpa: document_mask is not respected" in found.passed_over[0]
    assert found_of_llama(window=WindowSpec(64, document_mask=False)).attention == "groundwork_sdpa"


def test_an_attention_that_computes_something_else_is_passed_over(monkeypatch):
    replace_attention(monkeypatch, scaling=1.0)
    found = found_of_llama(window=WindowSpec(64, document_mask=False))
    assert found.attention == "sdpa" and "logits differ from the library's own" in found.passed_over[0]


def test_what_was_asked_for_by_name_is_refused_with_what_can_be_done(monkeypatch):
    monkeypatch.setattr(probe_module, "candidates_of", lambda requested, config: ["groundwork_sdpa"])
    monkeypatch.setattr(probe_module, "_mixers", lambda *arguments: set())  # or documents would be rows of their own
    replace_attention(monkeypatch, cu_seq_lens_q=None)
    with pytest.raises(InputError) as refused:
        found_of_llama(attention="sdpa")
    text = str(refused.value)
    assert "llama would not train correctly with attention sdpa" in text
    assert "--data.document_mask false" in text and "--attention auto" in text


def test_a_model_that_sees_the_future_is_refused(monkeypatch):
    def not_causal(module, query, key, value, mask, **kwargs):
        return eager(module, query, key, value, None, **kwargs)

    eager = modeling_llama.eager_attention_forward
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", not_causal)
    with pytest.raises(InputError, match=r"llama is not causal: later tokens change earlier logits by \d+\.\d%"):
        found_of_llama()


def test_gradients_must_be_there_and_finite(monkeypatch):
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


def test_where_the_logits_come_from_is_found_out():
    assert projects_hidden_states(AutoConfig.for_model("llama", **LLAMA))
    assert not projects_hidden_states(AutoConfig.for_model("granite", **LLAMA, logits_scaling=4.0))
    assert projects_hidden_states(AutoConfig.for_model("granite", **LLAMA, logits_scaling=1.0))
    assert projects_hidden_states(AutoConfig.for_model("nanochat", **LLAMA, final_logit_softcapping=15.0))
    # Its own forward pass ignores a cap, so the loss must not apply one.
    assert not projects_hidden_states(AutoConfig.for_model("llama", **LLAMA, final_logit_softcapping=1.0))
    # Whether logits of this size are capped cannot be seen.
    assert not projects_hidden_states(AutoConfig.for_model("nanochat", **LLAMA, final_logit_softcapping=1e4))


def with_model(recipe, tmp_path, **values) -> list[str]:
    """The recipe of this model, for 4 steps."""
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
"""Short convolutions within an attention that needs a mask, which rows of one document each do not have."""


def test_check_refuses_what_would_train_wrongly(recipe, tmp_path):
    arguments = with_model(recipe, tmp_path, **INKLING)
    refused = run_script(*arguments, "--loss.router_balance", "0", "--check", check=False)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert "inkling2_text would not train correctly" in refused.stderr
    assert "--data.document_mask false" in refused.stderr


def test_documents_in_rows_refuse_what_changes_shapes_or_divides_windows(recipe, tmp_path):
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
    # The loss of packed windows under the training model, and of each document alone by the library.
    differs = re.search(r"one document at a time, within (\S+) of", printed)
    assert float(differs.group(1)) < 1e-3
