"""Tests for a custom-code model with a recurrence, which processes each document in a separate row."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from support.project import events, losses, run_script

CODE = '''
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast


class RecurrentConfig(PretrainedConfig):
    model_type = "mine_recurrent"

    def __init__(self, vocab_size=512, n_layer=2, n_embd=32, **kwargs):
        self.vocab_size = vocab_size
        self.n_layer = n_layer
        self.n_embd = n_embd
        super().__init__(**kwargs)


class GatedRecurrence(nn.Module):
    """state = gate x state + (1 - gate) x value, after a short convolution."""

    def __init__(self, width):
        super().__init__()
        self.convolution = nn.Conv1d(width, width, 3, groups=width)
        self.gate = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, hidden_states, **kwargs):
        x = self.convolution(nn.functional.pad(hidden_states.transpose(1, 2), (2, 0))).transpose(1, 2)
        gate = torch.sigmoid(self.gate(x))
        step = (1 - gate) * self.value(x)
        state = torch.zeros_like(step[:, 0])
        states = []
        for t in range(step.shape[1]):
            state = gate[:, t] * state + step[:, t]
            states.append(state)
        return self.out(torch.stack(states, dim=1))


class RecurrentLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = nn.LayerNorm(config.n_embd)
        self.mixer = GatedRecurrence(config.n_embd)
        self.norm_2 = nn.LayerNorm(config.n_embd)
        self.up = nn.Linear(config.n_embd, 2 * config.n_embd)
        self.down = nn.Linear(2 * config.n_embd, config.n_embd)

    def forward(self, x, **kwargs):
        x = x + self.mixer(self.norm(x), **kwargs)
        return x + self.down(torch.relu(self.up(self.norm_2(x))).square())


class RecurrentPreTrainedModel(PreTrainedModel):
    config_class = RecurrentConfig
    base_model_prefix = "model"
    _no_split_modules = ["RecurrentLayer"]


class RecurrentModel(RecurrentPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.layers = nn.ModuleList(RecurrentLayer(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def set_input_embeddings(self, value):
        self.embed = value

    def forward(self, input_ids=None, inputs_embeds=None, attention_mask=None, position_ids=None, **kwargs):
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            x = layer(x)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x))


class RecurrentForCausalLM(RecurrentPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.model = RecurrentModel(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, logits_to_keep=0, **kwargs):
        hidden = self.model(input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)
        return CausalLMOutputWithPast(logits=self.lm_head(hidden.last_hidden_state))
'''
CONFIG = {
    "model_type": "mine_recurrent",
    "architectures": ["RecurrentForCausalLM"],
    "auto_map": {
        "AutoConfig": "recurrent.RecurrentConfig",
        "AutoModel": "recurrent.RecurrentModel",
        "AutoModelForCausalLM": "recurrent.RecurrentForCausalLM",
    },
    "vocab_size": 512,
}


@pytest.fixture
def own(recipe, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "recurrent.py").write_text(CODE)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    values = yaml.safe_load(recipe.read_text())
    values |= {"model": str(folder), "trust_remote_code": True, "budget": {"steps": 4}, "export": {"dtype": "fp32"}}
    values |= {"checkpoint": {"every_steps": 2, "keep_last": 3}, "validation": {"sequences": 4}}
    values["optim"]["schedule"] = "constant"
    recipe.write_text(yaml.safe_dump(values))
    return recipe


def test_it_separates_documents_resumes_and_loads(own, tmp_path):
    unbroken = tmp_path / "run"
    told = run_script("train.py", "--config", own).stdout
    assert "GatedRecurrence with each document in a separate row" in told
    # printed by the last check of final/, which uses the library's own forward pass
    assert "one document at a time" in told
    run_script(
        "train.py", "--config", own, "--output", tmp_path / "resumed", "--checkpoint.stop_at_step", "2", check=False
    )
    run_script("train.py", "--config", own, "--output", tmp_path / "resumed")
    assert losses(tmp_path / "resumed") == losses(unbroken)
    (resume,) = events(tmp_path / "resumed", "resume")
    assert resume["step"] == 2
    ends = [load_file(run / "checkpoints/step-00000004/model.safetensors") for run in (unbroken, tmp_path / "resumed")]
    assert ends[0].keys() == ends[1].keys() and all(torch.equal(ends[1][name], ends[0][name]) for name in ends[0])
    publication = (
        "--repo",
        "me/mine",
        "--license",
        "mit",
        "--checkpoint",
        "2",
        "--dry_run",
        "--output",
        tmp_path / "up",
    )
    commands = (("runs.py", "merge", unbroken, "--last", "2"), ("publish.py", "--run", unbroken, *publication))
    for command in commands:
        refused = run_script(*command, check=False)
        assert refused.returncode == 2 and "--trust_remote_code" in refused.stderr
        run_script(*command, "--trust_remote_code")
    for folder in (unbroken / "final", unbroken / "merged-2-4", tmp_path / "up/step-2"):
        _, loading = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
        assert not any(loading.values()), folder
