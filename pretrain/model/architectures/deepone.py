"""DeepOne: a deep decoder-only language model with DeepNet's residual scaling.

Blocks are post-norm, x = LayerNorm(alpha * x + f(x)), and initial weights are scaled down by beta, which bounds the
expected model update at any depth. For a decoder with N layers, alpha = (2N)^(1/4) and beta = (8N)^(-1/4) (DeepNet,
arXiv 2203.00555, section 3). The model also has rotary positions (arXiv 2104.09864), RMS-normalized queries and keys
as in Qwen3 (arXiv 2505.09388), and a SwiGLU (arXiv 2002.05202) or squared-ReLU MLP.

This file only imports transformers and torch, because it is copied to every saved model folder.

Shape suffixes:
    B  sequences in the batch    T  positions    D  hidden size    E  head width
"""

# transformers declares these class attributes as plain lists and dicts.
# ruff: noqa: RUF012

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, Qwen3Config
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaModel, LlamaPreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

FEED_FORWARDS = ("swiglu", "relu2")


class DeepOneConfig(PreTrainedConfig):
    """DeepOne configuration. The defaults are for the 162M model.

    head_dim defaults to hidden_size // num_attention_heads, and num_key_value_heads to num_attention_heads. Raises
    ValueError if the values don't fit together.
    """

    model_type = "deepone"
    keys_to_ignore_at_inference = ["past_key_values"]
    base_model_tp_plan = Qwen3Config.base_model_tp_plan
    attention_bias = False

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
    """swiglu: down(silu(gate(x)) * up(x)). relu2: down(relu(up(x))^2) (Primer, arXiv 2109.08668)."""
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
                    f"{self.num_attention_heads}; change one of them or set head_dim"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads < 1 or self.num_attention_heads % self.num_key_value_heads:
            heads = self.num_attention_heads
            key_heads = self.num_key_value_heads
            raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {key_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; it must be even for rotary positions")
        if self.feed_forward not in FEED_FORWARDS:
            raise ValueError(f"feed_forward {self.feed_forward!r} must be {' or '.join(FEED_FORWARDS)}")
        super().__post_init__(**kwargs)

    @property
    def residual_scale(self) -> float:
        """DeepNet's alpha for a decoder-only model."""
        return (2 * self.num_hidden_layers) ** 0.25

    @property
    def initial_gain(self) -> float:
        """DeepNet's beta for a decoder-only model."""
        return (8 * self.num_hidden_layers) ** -0.25


class DeepOneRotaryEmbedding(nn.Module):
    """Computes the cosines and sines of the rotary angles.

    The frequencies aren't stored in a buffer, because it would be rounded by `.to(bfloat16)` and lost on the meta
    device.
    """

    def __init__(self, config: DeepOneConfig):
        super().__init__()
        self.config = config

    def forward(self, x_BTD: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cos and sin, each (B, T, E), computed in fp32 and cast to the dtype of x_BTD."""
        width = self.config.head_dim
        exponents = torch.arange(0, width, 2, device=position_ids.device, dtype=torch.float32) / width
        angles = position_ids[:, :, None].float() * self.config.rope_theta**-exponents
        angles_BTE = torch.cat((angles, angles), dim=-1)
        return angles_BTE.cos().to(x_BTD.dtype), angles_BTE.sin().to(x_BTD.dtype)


class DeepOneAttention(Qwen3Attention):
    """Causal self-attention with RMS-normalized queries and keys."""

    def __init__(self, config: DeepOneConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        # The gain is set on the linear layers, because transformers never calls `_init_weights` of custom code with
        # modules that have no parameters of their own, such as this one.
        self.q_proj.initial_gain = self.k_proj.initial_gain = 1.0
        self.v_proj.initial_gain = self.o_proj.initial_gain = config.initial_gain


class DeepOneMLP(nn.Module):
    """SwiGLU or squared-ReLU MLP (see `DeepOneConfig.feed_forward`)."""

    def __init__(self, config: DeepOneConfig):
        super().__init__()
        self.gate_proj = None
        if config.feed_forward == "swiglu":
            self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        for linear in self.children():
            linear.initial_gain = config.initial_gain

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        if self.gate_proj is None:
            return self.down_proj(nn.functional.relu(self.up_proj(x_BTD)).square())
        return self.down_proj(nn.functional.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class DeepOneDecoderLayer(GradientCheckpointingLayer):
    """Decoder layer with two post-norm sublayers, each x = LayerNorm(alpha * x + f(x))."""

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


class DeepOnePreTrainedModel(LlamaPreTrainedModel):
    """Base class with class attributes and weight initialization."""

    config_class = DeepOneConfig
    _no_split_modules = ["DeepOneDecoderLayer"]
    _can_record_outputs = {"hidden_states": DeepOneDecoderLayer, "attentions": DeepOneAttention}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initializes linear layers with Xavier normal weights: gain beta for values, outputs and MLP, else 1.

        The paper doesn't specify the embedding, head and norms, so they are initialized as in transformers.
        """
        if hasattr(module, "initial_gain"):
            init.xavier_normal_(module.weight, gain=module.initial_gain)
        else:
            super()._init_weights(module)


class DeepOneModel(DeepOnePreTrainedModel, LlamaModel):
    """Base model without a final norm, because the last block ends with one."""

    def __init__(self, config: DeepOneConfig):
        PreTrainedModel.__init__(self, config)  # LlamaModel's __init__ would build Llama's layers
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(DeepOneDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.Identity()
        self.rotary_emb = DeepOneRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()


class DeepOneForCausalLM(DeepOnePreTrainedModel, LlamaForCausalLM):
    """Base model with a linear output head."""

    def __init__(self, config: DeepOneConfig):
        PreTrainedModel.__init__(self, config)
        self.model = DeepOneModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
