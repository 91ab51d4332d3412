"""Models with a few thousand parameters."""

TINY_LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
TINY_OLMOE = {**TINY_LLAMA, **EXPERTS, "model_type": "olmoe", "intermediate_size": 32, "num_key_value_heads": 4}
TINY_MOE = {**TINY_LLAMA, **EXPERTS, "model_type": "qwen3_moe", "moe_intermediate_size": 32}


LLAMA = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
TINY = {
    "llama": LLAMA,
    "llama_tied": {**LLAMA, "tie_word_embeddings": True},
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", "vocab_size": 128, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "deepone": {**LLAMA, "model_type": "deepone"},
}
