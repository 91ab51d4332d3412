"""MoE models of every supported type, with a few thousand parameters."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

COMMON = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
COMMON |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
GROUPS = {"n_group": 2, "topk_group": 1, "moe_intermediate_size": 16, "num_key_value_heads": 4}
MODELS = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0]},
    "qwen2_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 2},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3},
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 16},
    "deepseek_v2": {**LATENT, **GROUPS, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}
    | {"topk_method": "group_limited_greedy", "first_k_dense_replace": 1},
    "deepseek_v3": {**LATENT, **GROUPS, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}
    | {"first_k_dense_replace": 1},
    "llama4_text": {"num_local_experts": 8, "num_experts_per_tok": 1, "head_dim": 8, "intermediate_size_mlp": 48}
    | {"interleave_moe_layer_step": 1, "attention_chunk_size": 32},
    "jetmoe": {"num_local_experts": 8, "num_experts_per_tok": 2, "kv_channels": 8},
    "flex_olmo": {"num_experts": 8, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 8, "num_experts_per_tok": 2, "router_jitter_noise": 0.0},
    "jamba": {"num_experts": 8, "num_experts_per_tok": 2, "attn_layer_period": 1, "attn_layer_offset": 0},
    "minimax": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "layer_types": ["full_attention"] * 3,
    },
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8},
    "qwen3_next": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    | {"shared_expert_intermediate_size": 16, "layer_types": ["full_attention"] * 3},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 0},
    "glm4_moe": {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "lfm2_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_dense_layers": 0}
    | {"layer_types": ["full_attention"] * 3},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2, "head_dim": 8},
}


def tiny_config(name: str, **more):
    return AutoConfig.for_model(name, **{**COMMON, **MODELS[name], **more})


def as_the_library_saves(folder: Path, target: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Saves the model in `folder` to `target` with save_pretrained and returns the saved tensors."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model._weight_conversions = None  # otherwise it saves under the loaded names
    model.save_pretrained(target)
    return load_file(target / "model.safetensors")
