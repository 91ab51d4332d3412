"""Defines model and batch shapes for the benchmarks, and writes shards of synthetic documents."""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.data.manifest import SHARDS_FORMAT, dtype_for, id_dtype

END_OF_DOCUMENT_ID = 0
MEAN_DOCUMENT_TOKENS = 800
"""Mean document length in tokens, similar to web pages and source files. The median is about 60% of this."""


@dataclass(frozen=True)
class Shape:
    """A model with tied embeddings, and its batch size."""

    architecture: str
    """Architecture: llama, gpt2 or mixtral (a Llama with 8 experts per layer, 2 of them active per token)."""
    layers: int
    hidden_size: int
    heads: int
    vocabulary_size: int
    sequence_length: int
    sequences: int
    """Sequences per step and process."""
    intermediate_size: int | None = None
    """Intermediate size of Llama's MLP or of an expert. None means 8/3 of hidden_size, rounded up to a multiple of 64.

    GPT-2 always uses 4 * hidden_size."""

    @property
    def tokens_per_step(self) -> int:
        return self.sequences * self.sequence_length

    def in_words(self) -> str:
        return (
            f"{self.architecture}, {self.layers} layers of {self.hidden_size}, {self.heads} heads, vocabulary "
            f"{self.vocabulary_size:,}, {self.sequences} x {self.sequence_length:,} tokens per step"
        )

    def model_json(self) -> dict[str, Any]:
        """Returns the model's config.json for transformers."""
        ids = {"bos_token_id": END_OF_DOCUMENT_ID, "eos_token_id": END_OF_DOCUMENT_ID}
        if self.architecture == "gpt2":
            no_dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
            sizes = {"n_layer": self.layers, "n_embd": self.hidden_size, "n_head": self.heads}
            window = {"n_positions": self.sequence_length, "vocab_size": self.vocabulary_size}
            return {"model_type": "gpt2", **sizes, **window, **no_dropout, **ids}
        experts = {"num_local_experts": 8, "num_experts_per_tok": 2} if self.architecture == "mixtral" else {}
        return {
            "model_type": self.architecture,
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size or -(-self.hidden_size * 8 // 3 // 64) * 64,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "vocab_size": self.vocabulary_size,
            "max_position_embeddings": self.sequence_length,
            "tie_word_embeddings": True,
            **experts,
            **ids,
        }


LLAMA_14M = Shape("llama", 6, 384, 6, 8192, 512, 8)
CPU_SHAPES = {
    "llama": LLAMA_14M,
    "gpt2": replace(LLAMA_14M, architecture="gpt2"),
    "tiny": Shape("gpt2", 4, 128, 4, 65, 64, 12),
    "small": replace(LLAMA_14M, layers=4, hidden_size=128, heads=4, vocabulary_size=1024, sequence_length=256),
    "long": replace(LLAMA_14M, sequence_length=4096, sequences=1),
    "large_vocabulary": replace(LLAMA_14M, vocabulary_size=131_072, layers=2, sequences=2),
}
"""Shapes for two CPU cores: Llama and GPT-2 with 14M parameters, small models, long sequences, a 128k vocabulary."""

GPU_SHAPES = {
    "124m": Shape("gpt2", 12, 768, 12, 50_304, 1024, 64),
    "350m": Shape("gpt2", 24, 1024, 16, 50_304, 1024, 32),
    "1.3b": Shape("llama", 24, 2048, 16, 50_304, 2048, 16, 5632),
    "7b": Shape("llama", 32, 4096, 32, 32_000, 2048, 4, 11_008),
}
"""Shapes for one GPU with at least 80 GB. 7B doesn't fit: fp32 weights, gradients and AdamW moments take 108 GB."""


def write_model(shape: Shape, folder: Path) -> Path:
    """Writes the shape's model JSON and returns its path."""
    path = folder / "model.json"
    path.write_text(json.dumps(shape.model_json(), indent=1))
    return path


def write_shards(folder: Path, vocabulary_size: int, tokens: int, seed: int = 0) -> Path:
    """Writes shards of synthetic documents for speed measurements, and returns the folder.

    Token IDs follow Zipf's law, and document lengths are log-normal.
    """
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    # IDs start at 1, because 0 ends a document.
    ids = 1 + random.zipf(1.2, tokens) % (vocabulary_size - 1)
    lengths = 1 + random.lognormal(np.log(MEAN_DOCUMENT_TOKENS) - 0.5, 1.0, tokens).astype(np.int64)
    ends = np.cumsum(lengths) - 1
    ends = np.append(ends[ends < tokens - 1], tokens - 1)
    ids[ends] = END_OF_DOCUMENT_ID
    content = ids.astype(id_dtype(dtype_for(vocabulary_size))).tobytes()
    (folder / "train-00000.bin").write_bytes(content)
    # text_bytes is made up. It only affects bits per byte.
    counts = {"tokens": tokens, "documents": len(ends), "text_bytes": 4 * tokens}
    shard = {"file": "train-00000.bin", "split": "train", **counts, "sha256": hashlib.sha256(content).hexdigest()}
    manifest = {
        **SHARDS_FORMAT,
        "tokenizer": {"name": "made up", "sha256": "0" * 64},
        "vocabulary_size": vocabulary_size,
        "end_of_document_id": END_OF_DOCUMENT_ID,
        "dtype": dtype_for(vocabulary_size),
        "shards": [shard],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    return folder
