"""Custom model with value embeddings, sliding windows and residual scalars, similar to nanochat's.

    python train.py --config recipes/demo.yaml --model examples/modern --trust_remote_code --model.vocab_size auto \
        --output runs/modern

- Each layer starts with x = a x + b x_0, with learned scalars a and b. x_0 is the normalized embedding.
- Every second layer, including the last one, adds a gated token embedding to its values (value residual learning,
  arXiv 2410.17897).
- Every `full_every`-th layer and the last one use full attention. The others use a window of `sliding_window` tokens.
- Queries and keys are RMS-normalized, norms have no weights, and the MLP uses squared ReLU (arXiv 2109.08668).

Masks, rotary embeddings and attention functions are from transformers. This file is copied to every checkpoint.

Shape suffixes: B sequences, T positions, D width, K key-value heads, E head width.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

GATE_CHANNELS = 12
MASKS = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}


class ModernConfig(PreTrainedConfig):
    """Model configuration."""

    model_type = "modern"

    vocab_size: int = 32000
    hidden_size: int = 192
    intermediate_size: int = 768
    num_hidden_layers: int = 6
    num_attention_heads: int = 6
    num_key_value_heads: int = 6
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    sliding_window: int = 64
    full_every: int = 4
    rope_parameters: dict | None = None
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    use_cache: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    def __post_init__(self, **kwargs):
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        # Always recomputed, so that num_hidden_layers can be changed.
        kwargs.pop("layer_types", None)
        counts = range(1, self.num_hidden_layers + 1)
        full = [count % self.full_every == 0 or count == self.num_hidden_layers for count in counts]
        self.layer_types = ["full_attention" if is_full else "sliding_attention" for is_full in full]
        super().__post_init__(**kwargs)


def norm(x: torch.Tensor) -> torch.Tensor:
    """RMSNorm without a weight."""
    return F.rms_norm(x, x.shape[-1:], eps=1e-6)


class ModernLayer(GradientCheckpointingLayer):
    """Transformer layer: attention and MLP, each with a residual connection."""

    def __init__(self, config: ModernConfig, layer_idx: int):
        super().__init__()
        # transformers' attention functions need these attributes.
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = True
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.attention_type = config.layer_types[layer_idx]
        self.sliding_window = config.sliding_window if self.attention_type == "sliding_attention" else None
        width = config.hidden_size
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.of_stream = nn.Parameter(torch.ones(1))
        self.of_embedding = nn.Parameter(torch.zeros(1))
        self.q_proj = nn.Linear(width, queries, bias=False)
        self.k_proj = nn.Linear(width, keys, bias=False)
        self.v_proj = nn.Linear(width, keys, bias=False)
        self.o_proj = nn.Linear(queries, width, bias=False)
        self.up_proj = nn.Linear(width, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, width, bias=False)
        self.value_embedding = None
        if (config.num_hidden_layers - 1 - layer_idx) % 2 == 0:
            self.value_embedding = nn.Embedding(config.vocab_size, keys)
            self.value_gate = nn.Linear(GATE_CHANNELS, config.num_key_value_heads, bias=False)

    def forward(self, x_BTD, first_BTD, input_ids_BT, cos_sin, attention_mask=None, **kwargs):
        x_BTD = self.of_stream * x_BTD + self.of_embedding * first_BTD
        x_BTD = x_BTD + self.attend(norm(x_BTD), input_ids_BT, cos_sin, attention_mask, **kwargs)
        return x_BTD + self.down_proj(F.relu(self.up_proj(norm(x_BTD))).square())

    def attend(self, x_BTD, input_ids_BT, cos_sin, attention_mask, **kwargs):
        heads = (*x_BTD.shape[:2], -1, self.head_dim)
        q, k = (norm(proj(x_BTD).view(heads).transpose(1, 2)) for proj in (self.q_proj, self.k_proj))
        v_BTKE = self.v_proj(x_BTD).view(heads)
        if self.value_embedding is not None:
            gate_BTK = 2 * torch.sigmoid(self.value_gate(x_BTD[..., :GATE_CHANNELS]))
            v_BTKE = v_BTKE + gate_BTK[..., None] * self.value_embedding(input_ids_BT).view(heads).to(v_BTKE.dtype)
        q, k = apply_rotary_pos_emb(q, k, *cos_sin)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        how = {"dropout": 0.0, "scaling": self.head_dim**-0.5, "sliding_window": self.sliding_window}
        y, _ = attention(self, q, k, v_BTKE.transpose(1, 2), attention_mask, **how, **kwargs)
        return self.o_proj(y.reshape(*x_BTD.shape[:2], -1))


class ModernPreTrainedModel(PreTrainedModel):
    """Base class with capability flags for transformers, and weight initialization."""

    config_class = ModernConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("ModernLayer",)
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, ModernLayer):
            nn.init.ones_(module.of_stream)
            nn.init.constant_(module.of_embedding, 0.1)


class ModernModel(ModernPreTrainedModel):
    """Embedding, layers and final norm."""

    def __init__(self, config: ModernConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(ModernLayer(config, place) for place in range(config.num_hidden_layers))
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, use_cache=None, **kwargs):
        first_BTD = x_BTD = norm(self.embed_tokens(input_ids))
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        masks = attention_mask
        if not isinstance(masks, dict):
            about = {"config": self.config, "inputs_embeds": x_BTD, "attention_mask": attention_mask}
            about |= {"past_key_values": None, "position_ids": position_ids}
            masks = {kind: MASKS[kind](**about) for kind in dict.fromkeys(self.config.layer_types)}
        cos_sin = self.rotary_emb(x_BTD, position_ids)
        for layer in self.layers:
            mask = masks[layer.attention_type]
            x_BTD = layer(x_BTD, first_BTD, input_ids, cos_sin, mask, position_ids=position_ids, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=norm(x_BTD))


class ModernForCausalLM(ModernPreTrainedModel, GenerationMixin):
    """Model with an output head. It has no KV cache, so generation recomputes all tokens."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: ModernConfig):
        super().__init__(config)
        self.model = ModernModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, labels=None, **kwargs):
        hidden_BTD = self.model(input_ids, **kwargs).last_hidden_state
        logits = self.lm_head(hidden_BTD)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits)
