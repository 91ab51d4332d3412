"""Converts a model to a single GGUF file for llama.cpp and tools based on it.

Format: gguf.md of https://github.com/ggml-org/ggml. llama.cpp implements each architecture separately, so only
model families that it fully supports are converted.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from pretrain.checkpoint.tensor_files import SavedTensors
from pretrain.errors import InputError
from pretrain.hardware import DTYPES
from pretrain_tools.preparation.tokenizer_training import SPLIT_PATTERN

FILE_TYPES = {"bf16": "MOSTLY_BF16", "fp16": "MOSTLY_F16", "fp32": "ALL_F32"}
FAMILY_KEYS = {
    "llama": {
        "hidden_act": ("silu",),
        "attention_bias": (False, True),
        "mlp_bias": (False, True),
        "pretraining_tp": (1,),
    },
    "qwen3": {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "use_sliding_window": (False,),
        "sliding_window": (None,),
    },
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
}
"""{model_type: {config.json key that affects the logits: values supported by llama.cpp}}"""
ROPE_KEYS = {
    "default": {"rope_theta"},
    "linear": {"rope_theta", "factor"},
    "llama3": {
        "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    },
}  # fmt: skip
"""{rope_type: keys in rope_parameters}"""
SPLITTERS = {
    "gpt-2": [None],
    "dbrx": [SPLIT_PATTERN],
    "qwen2": [SPLIT_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")],
    "smollm": ["digits", None],
}
"""{llama.cpp's name: patterns that split text before BPE}. None is GPT-2's pattern, which is built into ByteLevel."""


def check_convertible(folder: Path) -> None:
    """Raises InputError listing everything in a model folder that GGUF can't represent."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise InputError("--gguf: requires the gguf package; run pip install gguf") from None
    config = json.loads((folder / "config.json").read_bytes())
    tokenizer = json.loads((folder / "tokenizer.json").read_bytes())
    problems = config_problems(config) + tokenizer_problems(tokenizer)
    if splitter_of(tokenizer) is None:
        shown = json.dumps(tokenizer.get("pre_tokenizer"), ensure_ascii=False)[:200]
        problems.append(
            f"--gguf: the tokenizer splits text with {shown}, which llama.cpp doesn't support; use a tokenizer "
            "trained by prepare_data.py, or GPT-2's, Llama 3's, Qwen's or SmolLM's"
        )
    if problems:
        raise InputError(*problems)


def config_problems(config: Mapping[str, Any]) -> list[str]:
    """Lists settings in config.json that llama.cpp doesn't support."""
    family = config.get("model_type")
    if family not in FAMILY_KEYS:
        return [
            f"--gguf: model type {family} isn't supported (only {', '.join(FAMILY_KEYS)}); use llama.cpp's "
            "convert_hf_to_gguf.py instead, and compare the logits yourself"
        ]
    problems = []
    allowed = FAMILY_KEYS[family]
    known = CONFIG_MAPPING[family]()
    for key, value in config.items():
        if key in allowed:
            if value not in allowed[key]:
                choices = " or ".join(map(json.dumps, allowed[key]))
                problems.append(f"--gguf: {key} must be {choices} for {family} in llama.cpp, got {json.dumps(value)}")
        # All other keys of the class are sizes, or don't affect the logits. Old GPT-2 models have n_ctx.
        elif not hasattr(known, key) and key != "n_ctx":
            problems.append(f"--gguf: {key} can't be represented in a GGUF file of a {family} model")
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        problems.append("--gguf: layer_types must be full_attention in every layer for qwen3 in llama.cpp")
    rope = config.get("rope_parameters") or {}
    kind = rope.get("rope_type", "default")
    kinds = [name for name in ROPE_KEYS if name != "llama3" or family == "llama"]
    if kind not in kinds:
        problems.append(f"--gguf: rope_type must be one of {', '.join(kinds)} for {family} in llama.cpp, got {kind}")
    elif unknown := rope.keys() - ROPE_KEYS[kind] - {"rope_type"}:
        problems.append(f"--gguf: rope_parameters contains {', '.join(sorted(unknown))}, which GGUF can't represent")
    return problems


def tokenizer_problems(tokenizer: Mapping[str, Any]) -> list[str]:
    """Lists settings in tokenizer.json that llama.cpp doesn't support."""
    model = tokenizer["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        kind = "BPE with byte fallback, like SentencePiece's" if model.get("byte_fallback") else model.get("type")
        return [f"--gguf: the tokenizer must be byte-level BPE, such as one trained by prepare_data.py, got {kind}"]
    normalizer = tokenizer.get("normalizer")
    # Qwen uses NFC. llama.cpp omits it, and the comparison shows the effect.
    if normalizer and normalizer.get("type") != "NFC":
        return [f"--gguf: the tokenizer normalizes text ({normalizer.get('type')}), but llama.cpp doesn't"]
    flags = ("single_word", "lstrip", "rstrip")
    return [
        f"--gguf: the added token {added['content']!r} has {flag}: true, which a GGUF file can't represent"
        for added in tokenizer["added_tokens"]
        for flag in flags
        if added.get(flag)
    ]


def splitter_of(tokenizer: Mapping[str, Any]) -> str | None:
    """Returns llama.cpp's name for a tokenizer's pre-tokenizer, or None."""
    whole = tokenizer.get("pre_tokenizer") or {}
    patterns = []
    for step in whole.get("pretokenizers") or [whole]:
        kind = step.get("type")
        if kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
            patterns.append(step["pattern"].get("Regex"))
        elif kind == "Digits" and step.get("individual_digits"):
            patterns.append("digits")
        elif kind == "ByteLevel" and not step.get("add_prefix_space"):
            patterns += [None] if step.get("use_regex", True) else []
        else:
            return None
    found = next((name for name, of_name in SPLITTERS.items() if of_name == patterns), None)
    # Llama 3 splits like DBRX, but doesn't apply merges to words that are tokens.
    merges_all = not tokenizer["model"].get("ignore_merges")
    return found if merges_all else {"dbrx": "llama-bpe"}.get(found)


def write_gguf(folder: Path, path: Path, dtype: str, name: str | None = None) -> None:
    """Writes a convertible model folder as a GGUF file. Only one tensor is in memory at a time.

    dtype: dtype of matrices (bf16, fp16 or fp32). Vectors and position embeddings are always fp32.
    """
    import gguf

    config = AutoConfig.from_pretrained(folder)
    architecture = gguf.MODEL_ARCH[config.model_type.upper()]
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_type("model")
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[dtype]])
    if name is not None:
        writer.add_name(name)
    add_sizes(writer, config)
    saved = SavedTensors(folder, "model")
    shapes = saved.shapes()
    embedding = next(name for name in shapes if name.endswith(("embed_tokens.weight", "wte.weight")))
    add_tokenizer(writer, folder, rows=shapes[embedding][0])
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    added = rope_factors(config)
    dtypes = {}
    for name, shape in {**shapes, **{name: tuple(tensor.shape) for name, tensor in added.items()}}.items():
        place = name if name in added else names.get_name(name, try_suffixes=(".weight", ".bias"))
        is_matrix = len(shape) > 1 and not place.startswith("position_embd")
        dtypes[name] = DTYPES[dtype] if is_matrix else torch.float32
        kind = gguf.GGMLQuantizationType[FILE_TYPES[dtype].rpartition("_")[2] if is_matrix else "F32"]
        size = math.prod(shape) * dtypes[name].itemsize
        writer.add_tensor_info(place, shape[::-1] if is_conv1d(name, shape) else shape, np.dtype("f4"), size, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in dtypes:
        tensor = added[name] if name in added else in_order_of_llama_cpp(name, saved[name], config)
        # NumPy has no bf16, so write raw bytes.
        writer.write_tensor_data(tensor.to(dtypes[name]).contiguous().view(torch.uint8).numpy())
    writer.close()


def is_conv1d(name: str, shape: tuple[int, ...]) -> bool:
    """Returns True for GPT-2's Conv1D weights of shape (inputs, outputs), the transpose of nn.Linear's."""
    return len(shape) == 2 and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))


def in_order_of_llama_cpp(name: str, tensor: Tensor, config: PreTrainedConfig) -> Tensor:
    """Returns a tensor in llama.cpp's layout.

    For Llama, llama.cpp applies RoPE to adjacent elements of a head (0 and 1, 2 and 3), but transformers pairs i with
    i + D / 2, so this reorders the rows of Q and K. Qwen3 needs no reordering.
    """
    if is_conv1d(name, tuple(tensor.shape)):
        return tensor.T
    part = name.split(".")[-2]
    if config.model_type == "llama" and part in ("q_proj", "k_proj"):
        heads = config.num_attention_heads if part == "q_proj" else config.num_key_value_heads
        halves = tensor.view(heads, 2, tensor.shape[0] // heads // 2, -1)
        return halves.transpose(1, 2).reshape(tensor.shape)
    return tensor


def add_sizes(writer: Any, config: PreTrainedConfig) -> None:
    """Adds the model's sizes to the metadata."""
    from gguf import RopeScalingType

    is_gpt2 = config.model_type == "gpt2"
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.n_inner or 4 * config.hidden_size if is_gpt2 else config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if is_gpt2:
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def rope_factors(config: PreTrainedConfig) -> dict[str, Tensor]:
    """Returns Llama 3's divisors for the D / 2 RoPE frequencies, or {} for other models.

    The divisor is 1 for short wavelengths, `factor` for long ones, and interpolated in between
    (https://arxiv.org/abs/2407.21783, computed with transformers' formula).
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "llama3":
        return {}
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = rope["rope_theta"] ** -torch.linspace(0, 1, len(scaled) + 1, dtype=torch.float64)[:-1]
    return {"rope_freqs.weight": (plain / scaled.double()).float()}


def add_tokenizer(writer: Any, folder: Path, *, rows: int) -> None:
    """Adds a byte-level BPE tokenizer.

    rows: number of rows in the embedding. Padding rows become unused tokens.
    """
    from gguf import SpecialVocab, TokenType

    tokenizer = json.loads((folder / "tokenizer.json").read_bytes())
    tokens = [f"[PAD{number}]" for number in range(rows)]
    kinds = [TokenType.UNUSED] * rows
    for token, number in tokenizer["model"]["vocab"].items():
        tokens[number] = token
        kinds[number] = TokenType.NORMAL
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    writer.add_vocab_size(rows)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitter_of(tokenizer))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    special = SpecialVocab(folder, load_merges=True, n_vocab=rows)
    # llama.cpp adds BOS by default. Training separates documents only by the EOS token.
    special.add_special_token = {"bos": False, "eos": False, **special.add_special_token}
    special.add_to_gguf(writer, quiet=True)
