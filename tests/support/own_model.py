"""Model folder with custom code in the style of transformers 4, with nanoGPT's setting names."""

import json
from pathlib import Path

CONFIGURATION = """\
from transformers import PretrainedConfig


class MineConfig(PretrainedConfig):
    model_type = "mine_gated"

    def __init__(self, vocab_size=256, n_layer=2, n_head=4, n_embd=32, gate="silu", n_positions=128, **kwargs):
        self.vocab_size = vocab_size
        self.n_layer = n_layer
        self.n_head = n_head
        self.n_embd = n_embd
        self.gate = gate
        self.n_positions = n_positions
        super().__init__(**kwargs)
"""
MODELING = """\
import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.masking_utils import create_causal_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

from .configuration_mine import MineConfig


class MineBlock(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.heads = config.n_head
        self.layer_idx = layer_idx
        self.head_dim = config.n_embd // config.n_head
        self.config = config
        self.num_key_value_groups = 1
        self.is_causal = True
        self.norm_1 = nn.LayerNorm(config.n_embd)
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.out = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.norm_2 = nn.LayerNorm(config.n_embd)
        self.gate = nn.Linear(config.n_embd, 2 * config.n_embd, bias=False)
        self.up = nn.Linear(config.n_embd, 2 * config.n_embd, bias=False)
        self.down = nn.Linear(2 * config.n_embd, config.n_embd, bias=False)
        self.act = ACT2FN[config.gate]

    def forward(self, x, attention_mask=None, **kwargs):
        q, k, v = (
            part.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        y, _ = attend(self, q, k, v, attention_mask, dropout=0.0, scaling=self.head_dim**-0.5, **kwargs)
        x = x + self.out(y.reshape(x.shape))
        h = self.norm_2(x)
        return x + self.down(self.act(self.gate(h)) * self.up(h))


class MinePreTrainedModel(PreTrainedModel):
    config_class = MineConfig
    base_model_prefix = "model"
    _no_split_modules = ["MineBlock"]
    _supports_sdpa = True
    _supports_attention_backend = True
    _supports_flex_attn = True

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)


class MineModel(MinePreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.positions = nn.Embedding(config.n_positions, config.n_embd)
        self.layers = nn.ModuleList(MineBlock(config, index) for index in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def set_input_embeddings(self, value):
        self.embed = value

    def forward(self, input_ids=None, inputs_embeds=None, attention_mask=None, position_ids=None, **kwargs):
        if inputs_embeds is None:
            inputs_embeds = self.embed(input_ids)
        if position_ids is None:
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)[None]
        kwargs.pop("use_cache", None)
        mask = create_causal_mask(
            config=self.config, inputs_embeds=inputs_embeds, attention_mask=attention_mask, past_key_values=None,
            position_ids=position_ids,
        )
        x = inputs_embeds + self.positions(position_ids)
        for layer in self.layers:
            x = layer(x, attention_mask=mask, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x))


class MineForCausalLM(MinePreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.model = MineModel(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, logits_to_keep=0, **kwargs):
        hidden = self.model(input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)
        return CausalLMOutputWithPast(logits=self.lm_head(hidden.last_hidden_state))
"""
CONFIG = {
    "model_type": "mine_gated",
    "architectures": ["MineForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_mine.MineConfig",
        "AutoModel": "modeling_mine.MineModel",
        "AutoModelForCausalLM": "modeling_mine.MineForCausalLM",
    },
    "n_layer": 2,
    "n_embd": 48,
}


def write_own_model(folder: Path, **changes) -> Path:
    """Writes config.json and two Python files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "configuration_mine.py").write_text(CONFIGURATION)
    (folder / "modeling_mine.py").write_text(MODELING)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder
