"""What a token costs: the parameters that take part in its computation, and the floating-point operations."""

from transformers import PreTrainedConfig

from pretrain.model.build import build_meta_model, count_non_embedding_parameters, count_parameters
from pretrain.model.routers import inactive_parameters

FORMULA = "6N + 12 x layers x heads x head width x sequence length"


def active_parameters(config: PreTrainedConfig) -> int:
    """All of a dense model's; of a mixture of experts those that a token meets: without the experts not chosen."""
    return count_parameters(config) - inactive_parameters(build_meta_model(config))


def matrix_parameters(config: PreTrainedConfig) -> int:
    """N of 6N: the active parameters that take part in a matrix product (see `count_non_embedding_parameters`)."""
    return count_non_embedding_parameters(config) - inactive_parameters(build_meta_model(config))


def flops_per_token(config: PreTrainedConfig, sequence_length: int) -> float:
    """Forward and backward passes of training: FORMULA (PaLM, arXiv 2204.02311, appendix B), N active.

    Where keys and values are of different width, as with multi-head latent attention, the mean of both counts.
    """
    attention = 12 * config.num_hidden_layers * attention_width(config) * sequence_length
    return 6 * matrix_parameters(config) + attention


def attention_width(config: PreTrainedConfig) -> float:
    """Query heads x width of a head, which need not be the hidden width (Qwen3); 0 for a model without attention."""
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return 0.0 if heads is None else config.hidden_size
    if getattr(config, "v_head_dim", None) and getattr(config, "qk_nope_head_dim", None):
        return heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim) / 2
    head_width = getattr(config, "head_dim", None)
    return heads * head_width if isinstance(head_width, int) else config.hidden_size
