"""DeepOne: a deep decoder-only language model with DeepNet's residual scaling.

Post-norm blocks with an up-weighted residual branch, x = LayerNorm(alpha * x + f(x)), and down-scaled initial weights
keep the expected update of the model bounded whatever its depth (DeepNet, arXiv 2203.00555, section 3; for a decoder
of N layers alpha = (2N)^(1/4) and beta = (8N)^(-1/4)). It also has rotary positions (arXiv 2104.09864), RMS-normalized
queries and keys as in Qwen3 (arXiv 2505.09388), and a SwiGLU feed-forward (arXiv 2002.05202) or ReLU squared.

This file imports only torch and transformers, because it is copied into every saved model folder.

Shape suffixes:
    B  sequences in the batch          T  query positions        S  key positions (cache included)
    D  hidden size                     F  feed-forward width     V  vocabulary size
    H  query heads                     K  key and value heads    E  width of one head
"""

# transformers declares these class attributes as plain lists and dicts.
# ruff: noqa: RUF012

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRMSNorm, eager_attention_forward
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

FEED_FORWARDS = ("swiglu", "relu2")


class DeepOneConfig(PreTrainedConfig):
    """Shape of a DeepOne model; the defaults give the 162M model.

    head_dim is hidden_size // num_attention_heads unless given; num_key_value_heads is num_attention_heads unless
    given. Raises ValueError when the shape is impossible.
    """

    model_type = "deepone"
    keys_to_ignore_at_inference = ["past_key_values"]
    # Read by the tensor parallelism of transformers and by other tools that use its plans. The norms of queries and
    # keys are replicated, but each rank only has the gradient from its own heads, so these gradients are all-reduced.
    base_model_tp_plan = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
        "layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }

    vocab_size: int = 32000
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_hidden_layers: int = 16
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rope_theta: float | int = 10000.0
    feed_forward: str = "swiglu"
    """swiglu: down(silu(gate(x)) * up(x)); relu2: down(relu(up(x))^2), without a gate (Primer, arXiv 2109.08668)."""
    layer_norm_eps: float = 1e-5
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    attention_dropout: float | int = 0.0
    use_cache: bool = True
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs):
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads "
                    f"{self.num_attention_heads}; change one of them or state head_dim"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_attention_heads % self.num_key_value_heads:
            heads = self.num_attention_heads
            key_heads = self.num_key_value_heads
            raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {key_heads}")
        if self.feed_forward not in FEED_FORWARDS:
            raise ValueError(f"feed_forward {self.feed_forward!r} must be {' or '.join(FEED_FORWARDS)}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary positions turn pairs, so it must be even")
        super().__post_init__(**kwargs)

    @property
    def residual_scale(self) -> float:
        """alpha of DeepNet for a decoder-only model."""
        return (2 * self.num_hidden_layers) ** 0.25

    @property
    def initial_gain(self) -> float:
        """beta of DeepNet for a decoder-only model."""
        return (8 * self.num_hidden_layers) ** -0.25


def rotary_cos_sin(
    position_ids_BT: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes cos and sin of the rotary angles, each (B, 1, T, E), in fp32.

    The frequencies are recomputed at each call instead of stored in a buffer: `.to(bfloat16)` would round a buffer,
    and the meta device would lose it.
    """
    exponents = torch.arange(0, head_dim, 2, device=position_ids_BT.device, dtype=torch.float32) / head_dim
    angles = position_ids_BT[:, None, :, None].float() * theta**-exponents
    angles_B1TE = torch.cat((angles, angles), dim=-1)
    return angles_B1TE.cos().to(dtype), angles_B1TE.sin().to(dtype)


def rotate(x_BHTE: torch.Tensor, cos_B1TE: torch.Tensor, sin_B1TE: torch.Tensor) -> torch.Tensor:
    """Rotates each pair (x_i, x_{i + E/2}) by its angle, so that dot products depend on relative positions only."""
    first, second = x_BHTE.chunk(2, dim=-1)
    return x_BHTE * cos_B1TE + torch.cat((-second, first), dim=-1) * sin_B1TE


def deepnet_linear(in_width: int, out_width: int, initial_gain: float) -> nn.Linear:
    """Returns a linear layer without bias that carries the gain of its initial weights.

    The gain is stored on the layer itself because, for code outside the library, transformers never passes a module
    without parameters of its own (such as the attention around its projections) to `_init_weights`.
    """
    linear = nn.Linear(in_width, out_width, bias=False)
    linear.initial_gain = initial_gain
    return linear


class DeepOneAttention(nn.Module):
    """Causal self-attention with RMS-normalized queries and keys."""

    def __init__(self, config: DeepOneConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        query_width = config.num_attention_heads * config.head_dim
        key_width = config.num_key_value_heads * config.head_dim
        self.q_proj = deepnet_linear(config.hidden_size, query_width, 1.0)
        self.k_proj = deepnet_linear(config.hidden_size, key_width, 1.0)
        self.v_proj = deepnet_linear(config.hidden_size, key_width, config.initial_gain)
        self.o_proj = deepnet_linear(query_width, config.hidden_size, config.initial_gain)
        self.q_norm = LlamaRMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = LlamaRMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(
        self,
        x_BTD: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        heads_shape = (*x_BTD.shape[:-1], -1, self.head_dim)
        query_BHTE = self.q_norm(self.q_proj(x_BTD).view(heads_shape)).transpose(1, 2)
        key_BKTE = self.k_norm(self.k_proj(x_BTD).view(heads_shape)).transpose(1, 2)
        value_BKTE = self.v_proj(x_BTD).view(heads_shape).transpose(1, 2)
        query_BHTE = rotate(query_BHTE, *position_embeddings)
        key_BKSE = rotate(key_BKTE, *position_embeddings)
        value_BKSE = value_BKTE
        if past_key_values is not None:
            key_BKSE, value_BKSE = past_key_values.update(key_BKSE, value_BKSE, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        # kwargs carry what a backend needs besides the mask, such as the document boundaries of packed sequences.
        kwargs |= {"dropout": self.attention_dropout if self.training else 0.0, "scaling": self.scaling}
        y_BTHE, weights_BHTS = attend(self, query_BHTE, key_BKSE, value_BKSE, attention_mask, **kwargs)
        return self.o_proj(y_BTHE.reshape(*x_BTD.shape[:-1], -1).contiguous()), weights_BHTS


class DeepOneMLP(nn.Module):
    """Feed-forward of the kind `DeepOneConfig.feed_forward`; only SwiGLU has a gate."""

    def __init__(self, config: DeepOneConfig):
        super().__init__()
        self.gate_proj = None
        if config.feed_forward == "swiglu":
            self.gate_proj = deepnet_linear(config.hidden_size, config.intermediate_size, config.initial_gain)
        self.up_proj = deepnet_linear(config.hidden_size, config.intermediate_size, config.initial_gain)
        self.down_proj = deepnet_linear(config.intermediate_size, config.hidden_size, config.initial_gain)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        if self.gate_proj is None:
            return self.down_proj(nn.functional.relu(self.up_proj(x_BTD)).square())
        return self.down_proj(nn.functional.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class DeepOneDecoderLayer(GradientCheckpointingLayer):
    """Two post-norm sublayers, each x = LayerNorm(alpha * x + f(x))."""

    def __init__(self, config: DeepOneConfig, layer_idx: int):
        super().__init__()
        self.residual_scale = config.residual_scale
        self.self_attn = DeepOneAttention(config, layer_idx)
        self.self_attn_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = DeepOneMLP(config)
        self.mlp_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x_BTD: torch.Tensor, **kwargs) -> torch.Tensor:
        attended_BTD, _ = self.self_attn(x_BTD, **kwargs)
        x_BTD = self.self_attn_layernorm(self.residual_scale * x_BTD + attended_BTD)
        return self.mlp_layernorm(self.residual_scale * x_BTD + self.mlp(x_BTD))


class DeepOnePreTrainedModel(PreTrainedModel):
    """Base class of the base model and the language model: initialization and the library's switches."""

    config_class = DeepOneConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DeepOneDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": DeepOneDecoderLayer, "attentions": DeepOneAttention}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draws Xavier normal weights: gain beta for values, outputs and feed-forward, 1 for queries and keys.

        The paper does not specify embedding, head and norms; they follow transformers: normal with initializer_range,
        ones and zeros.
        """
        if hasattr(module, "initial_gain"):
            init.xavier_normal_(module.weight, gain=module.initial_gain)
        else:
            super()._init_weights(module)


class DeepOneModel(DeepOnePreTrainedModel):
    """Base model from token IDs to hidden states. It has no final norm because the last block ends with one."""

    def __init__(self, config: DeepOneConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(DeepOneDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x_BTD = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            start = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = torch.arange(start, start + x_BTD.shape[1], device=x_BTD.device)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=x_BTD,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        cos_sin = rotary_cos_sin(position_ids, self.config.head_dim, self.config.rope_theta, x_BTD.dtype)
        for layer in self.layers:
            x_BTD = layer(
                x_BTD,
                attention_mask=mask,
                position_embeddings=cos_sin,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=x_BTD, past_key_values=past_key_values)


class DeepOneForCausalLM(DeepOnePreTrainedModel, GenerationMixin):
    """The base model with a linear head over the vocabulary."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: DeepOneConfig):
        super().__init__(config)
        self.model = DeepOneModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits_BTV = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits_BTV, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits_BTV,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
