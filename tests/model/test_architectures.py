"""Tests for the local architectures: DeepOne's formulas and cache, and loading a saved folder without Groundwork."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import pretrain.model.architectures
from pretrain.errors import InputError
from pretrain.model.architectures.deepone import DeepOneConfig, DeepOneForCausalLM, DeepOneModel
from pretrain.model.build import build_model, save_model_metadata
from pretrain.model.own_code import register_all, register_own

register_all()


def tiny(**changes) -> DeepOneConfig:
    shape = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return DeepOneConfig(**{**shape, **changes})


@pytest.fixture(scope="module")
def model() -> DeepOneForCausalLM:
    return build_model(tiny(), seed=1).eval()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))


def test_local_architectures_are_registered():
    assert "deepone" in pretrain.model.architectures.MODEL_TYPES
    config = AutoConfig.for_model("deepone", hidden_size=32, num_attention_heads=4, num_hidden_layers=1)
    with torch.device("meta"):
        assert type(AutoModelForCausalLM.from_config(config)) is DeepOneForCausalLM
        assert type(AutoModel.from_config(config)) is DeepOneModel


def test_a_file_is_named_by_its_model_type(tmp_path, monkeypatch):
    text = Path(pretrain.model.architectures.__file__).with_name("deepone.py").read_text()
    (tmp_path / "other.py").write_text(text.replace('"deepone"', '"deeptwo"'))
    monkeypatch.setattr(pretrain.model.architectures, "__path__", [str(tmp_path)])
    with pytest.raises(InputError, match=r"other\.py: its model_type is 'deeptwo'; rename the file to deeptwo\.py"):
        register_own("other")


def test_every_architecture_file_imports_only_torch_and_transformers():
    for path in Path(pretrain.model.architectures.__file__).parent.glob("*.py"):
        if path.name != "__init__.py":
            lines = [line.split() for line in path.read_text().splitlines()]
            imported = {words[1].split(".")[0] for words in lines if words[:1] in (["import"], ["from"])}
            assert imported <= {"torch", "transformers", *sys.stdlib_module_names}, path.name


def test_relu_squared_has_no_gate_and_scales_quadratically():
    mlp = build_model(tiny(feed_forward="relu2"), seed=1).model.layers[0].mlp
    assert {name for name, _ in mlp.named_parameters()} == {"up_proj.weight", "down_proj.weight"}
    x_TD = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    expected_TD = (x_TD @ mlp.up_proj.weight.T).clamp(min=0) ** 2 @ mlp.down_proj.weight.T
    assert torch.allclose(mlp(x_TD), expected_TD, atol=1e-6)
    assert torch.allclose(mlp(2 * x_TD), 4 * mlp(x_TD), atol=1e-6)
    with pytest.raises(ValueError, match="feed_forward 'gelu' must be swiglu or relu2"):
        tiny(feed_forward="gelu")


def test_residual_scale_and_gain_are_deepnets():
    config = tiny(num_hidden_layers=16)
    assert config.residual_scale == pytest.approx(32**0.25)
    assert config.initial_gain == pytest.approx(128**-0.25)


@pytest.mark.parametrize("maker", ["ours", "the library's"])
def test_initial_weights_have_deepnets_spread(maker):
    config = tiny(hidden_size=128, intermediate_size=256, num_hidden_layers=4)
    torch.manual_seed(0)
    model = build_model(config, seed=0) if maker == "ours" else AutoModelForCausalLM.from_config(config)
    gain = (8 * 4) ** -0.25
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        expected = {attention.q_proj: 1, attention.k_proj: 1, attention.v_proj: gain, attention.o_proj: gain}
        expected |= {mlp.gate_proj: gain, mlp.up_proj: gain, mlp.down_proj: gain}
        for linear, gain_of_role in expected.items():
            xavier = gain_of_role * math.sqrt(2 / (linear.in_features + linear.out_features))
            # With at least 8,192 samples, the sample std is within 4% (5 sigma) of the true std.
            assert linear.weight.std().item() == pytest.approx(xavier, rel=0.04)
    assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.04)


def test_a_layer_computes_the_formula(model, ids):
    layer = model.model.layers[0]
    x_BTD = model.model.embed_tokens(ids)
    after_attention = model.model(ids, output_hidden_states=True).hidden_states[1]
    cos_sin = model.model.rotary_emb(x_BTD, torch.arange(12)[None])
    attended, _ = layer.self_attn(x_BTD, position_embeddings=cos_sin, attention_mask=None)
    y = torch.nn.functional.layer_norm(6**0.25 * x_BTD + attended, (32,))
    fed = layer.mlp.down_proj(torch.nn.functional.silu(layer.mlp.gate_proj(y)) * layer.mlp.up_proj(y))
    expected = torch.nn.functional.layer_norm(6**0.25 * y + fed, (32,))
    torch.testing.assert_close(after_attention, expected, atol=1e-5, rtol=1e-5)


def test_a_token_sees_only_the_past(model, ids):
    changed = ids.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 64
    difference = (model(ids).logits - model(changed).logits).abs().amax(dim=(0, 2))
    assert difference[:7].max() == 0
    assert difference[7:].min() > 0


def test_positions_are_relative_and_matter(model, ids):
    shifted = model(ids, position_ids=torch.arange(100, 112)[None]).logits
    # In fp32, the angles of positions near 100 have a rounding error of 1e-5, which three layers amplify about ten
    # times.
    torch.testing.assert_close(shifted, model(ids).logits, atol=1e-4, rtol=1e-4)
    stretched = model(ids, position_ids=3 * torch.arange(12)[None]).logits
    assert (stretched - model(ids).logits).abs().max() > 1e-3


def test_eager_and_sdpa_agree(ids):
    eager = build_model(tiny(), seed=1, attention="eager").eval()
    sdpa = build_model(tiny(), seed=1, attention="sdpa").eval()
    torch.testing.assert_close(eager(ids).logits, sdpa(ids).logits, atol=1e-5, rtol=1e-5)


def test_generation_with_cache_equals_without(model, ids):
    options = {"max_new_tokens": 10, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    cached = model.generate(ids, use_cache=True, **options)
    plain = model.generate(ids, use_cache=False, **options)
    assert cached.sequences.tolist() == plain.sequences.tolist()
    assert cached.past_key_values.get_seq_length() == 21
    torch.testing.assert_close(torch.stack(cached.logits), torch.stack(plain.logits), atol=1e-5, rtol=1e-5)


def test_left_padding_does_not_change_what_is_generated(model, ids):
    padded = torch.cat((torch.zeros(2, 3, dtype=torch.long), ids), dim=1)
    mask = torch.cat((torch.zeros(2, 3, dtype=torch.long), torch.ones_like(ids)), dim=1)
    alone = model.generate(ids, max_new_tokens=5, do_sample=False)
    beside = model.generate(padded, attention_mask=mask, max_new_tokens=5, do_sample=False)
    assert beside[:, 3:].tolist() == alone.tolist()


def test_arguments_of_forward_reach_the_attention_function(ids):
    seen = []

    def recording(module, query, key, value, attention_mask, *, document_starts=None, **kwargs):
        seen.append(document_starts)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("recording", recording)
    build_model(tiny(), seed=1, attention="recording")(ids, document_starts="marker")
    assert seen == ["marker"] * 3


def test_activation_checkpointing_gives_the_same_gradients(ids):
    plain, checkpointed = build_model(tiny(), seed=1).train(), build_model(tiny(), seed=1).train()
    checkpointed.gradient_checkpointing_enable()
    plain(ids, labels=ids).loss.backward()
    checkpointed(ids, labels=ids, use_cache=False).loss.backward()
    for expected, got in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad)


def test_the_loss_shifts_the_labels_once(model, ids):
    logits = model(ids).logits
    by_hand = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(model(ids, labels=ids).loss, by_hand)
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, logits[:, -2:])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 33}, "hidden_size 33 is not a multiple of num_attention_heads 4"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"num_key_value_heads": 0}, "num_attention_heads 4 is not a multiple of num_key_value_heads 0"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
    ],
)
def test_an_impossible_shape_is_refused(changes, message):
    """transformers doesn't check a folder's config.json, and with head_dim 1 the model would even run."""
    with pytest.raises(ValueError, match=message):
        tiny(**changes)


def test_a_saved_folder_loads_without_groundwork(tmp_path, ids):
    folder = tmp_path / "folder"
    model = build_model(tiny(tie_word_embeddings=True), seed=1).eval()
    save_model_metadata(model, folder)
    model.save_pretrained(tmp_path / "weights")
    shutil.move(tmp_path / "weights" / "model.safetensors", folder)
    auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
    assert auto_map == {"AutoConfig": "deepone.DeepOneConfig", "AutoModelForCausalLM": "deepone.DeepOneForCausalLM"}
    script = (
        "import sys, torch\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained('folder', trust_remote_code=True).eval()\n"
        "assert 'pretrain' not in sys.modules\n"
        f"torch.save(model(torch.tensor({ids.tolist()})).logits, 'logits.pt')\n"
        "generated = model.generate(torch.tensor([[1, 2]]), max_new_tokens=3, do_sample=False)\n"
        "assert generated.shape == (1, 5)\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["HF_MODULES_CACHE"] = str(tmp_path / "modules")
    finished = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert finished.returncode == 0, finished.stderr
    assert torch.equal(torch.load(tmp_path / "logits.pt"), model(ids).logits)
