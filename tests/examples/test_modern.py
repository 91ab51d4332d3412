"""Tests for the example model with its own code: it trains on packed documents and loads without Groundwork."""

import torch
from transformers import AutoModelForCausalLM

from support.project import ROOT, losses, run_script

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
SIZES |= {"num_hidden_layers": 4, "sliding_window": 16, "vocab_size": "auto"}


def test_it_trains_on_packed_documents_and_loads_with_from_pretrained(recipe, tmp_path):
    sizes = [word for name, value in SIZES.items() for word in (f"--model.{name}", value)]
    told = run_script(
        "train.py", "--config", recipe, "--model", ROOT / "examples/modern", "--trust_remote_code", *sizes
    ).stdout
    assert "loss in transformers' forward pass, one document at a time" in told
    run = tmp_path / "run"
    assert losses(run)[12] < losses(run)[1] - 0.1
    assert (run / "final/modeling_modern.py").exists()
    model = AutoModelForCausalLM.from_pretrained(run / "final", trust_remote_code=True)
    layers = model.model.layers
    assert [layer.sliding_window for layer in layers] == [16, 16, 16, None]
    assert [layer.value_embedding is not None for layer in layers] == [False, True, False, True]
    assert all(not torch.equal(layer.of_stream.detach(), torch.ones(1)) for layer in layers), (
        "the scalars must change in training"
    )
    ids = torch.arange(40)[None]
    changed = ids.clone()
    changed[0, 0] = 99
    with torch.no_grad():
        logits = [model(given).logits for given in (ids, changed)]
    assert not torch.equal(logits[0][0, -1], logits[1][0, -1]), "a full-attention layer must see beyond the window"
