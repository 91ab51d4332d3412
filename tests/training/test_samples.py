"""Tests for token sampling with the settings of a recipe's samples and of evaluate.py."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pretrain.config import Samples
from pretrain.parallel.ranks import Ranks
from pretrain.parallel.tensor_group import TensorGroup
from pretrain.training.samples import Sampling, generate_text, sample_texts
from support.run_folders import write_tokenizer
from support.tiny_models import TINY_LLAMA


@pytest.fixture(scope="module")
def model():
    """Returns an untrained model, whose predictions are nearly uniform."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY_LLAMA)).eval()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = 0
    return model


@pytest.fixture(scope="module")
def continued(model):
    """Returns a function that uses the model to continue two IDs."""
    as_ids = SimpleNamespace(decode=lambda ids, **_: tuple(ids.tolist()))
    return lambda **settings: generate_text(model, as_ids, torch.tensor([[1, 2]]), Sampling(8, **settings))


def test_sampling_only_the_most_likely_token_is_greedy(continued):
    greedy = continued()
    assert continued(temperature=2.0, top_p=1e-6) == continued(temperature=2.0, top_k=1) == greedy
    assert continued(temperature=1e-6) == greedy
    sampled = [continued(temperature=2.0, seed=seed) for seed in range(3)]
    assert len({greedy, *sampled}) == 4 and sampled[0] == continued(temperature=2.0)


def texts_of_gpt2(folder, device, **settings) -> list[tuple[str, str]]:
    """Samples from an untrained GPT-2 with 16 positions, on a device that holds all weights."""
    values = {"vocab_size": 512, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16}
    config = AutoConfig.for_model("gpt2", **values, bos_token_id=None, eos_token_id=None)
    group = TensorGroup.of(dict(AutoModelForCausalLM.from_config(config).named_parameters()))
    strategy = SimpleNamespace(
        model_tensors=lambda: group, ranks=Ranks(), holds_whole_model=True, device=torch.device(device)
    )
    settings = Samples(**settings, max_new_tokens=40, every_steps=1)
    return sample_texts(strategy, config, write_tokenizer(folder), settings, seed=0, beat=lambda: None)


def test_a_text_ends_at_the_last_learned_position(tmp_path):
    (short, long) = texts_of_gpt2(tmp_path / "tokenizer", "cpu", prompts=["a", "a" * 200])
    assert short[1].startswith("a") and long[1].endswith("[too long for the model's 16 positions]")


def test_deterministic_runs_sample_on_the_cpu_if_a_gpu_has_no_kernel(tmp_path, monkeypatch):
    """Needs no GPU, because nothing may be moved to it. torch lists cumsum, which top_p needs."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    ((_, text),) = texts_of_gpt2(tmp_path / "tokenizer", "cuda", prompts=["a"], top_p=0.9)
    assert text.startswith("a")


@torch.no_grad()
def test_top_p_keeps_the_smallest_sufficient_set(model, continued):
    chances, order = model(torch.tensor([[1, 2]])).logits[0, -1].softmax(-1).sort(descending=True)
    kept = set(order[: int((chances.cumsum(0) < 0.5).sum()) + 1].tolist())
    assert 100 < len(kept) < 256, "top_p must exclude more than half of the 512 IDs"
    for top_p, are_kept in ((0.5, True), (None, False)):
        first = {continued(temperature=1.0, top_p=top_p, seed=seed)[2] for seed in range(20)}
        assert (first <= kept) == are_kept
