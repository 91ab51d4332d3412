"""Setups for tests/model/test_gpu_traffic.py."""

import json
from dataclasses import dataclass

from support.project import ROOT

TP_RANKS = 4
"""Number of tensor-parallel ranks."""


@dataclass(frozen=True)
class Setup:
    """A model and a strategy."""

    model: str
    """Name of a file in model_configs/."""
    strategy: str
    """Name of a file in accelerate_configs/."""
    sequences: int
    length: int

    @property
    def name(self) -> str:
        return f"{self.model} {self.strategy}"

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    def model_config(self) -> dict[str, object]:
        """Returns the model's JSON without its number of layers."""
        values = json.loads((ROOT / f"model_configs/{self.model}.json").read_text())
        return {name: value for name, value in values.items() if name not in ("n_layer", "num_hidden_layers")}

    @property
    def width(self) -> int:
        """Returns the hidden size."""
        values = self.model_config()
        return values.get("hidden_size") or values["n_embd"]


BATCHES = {
    "gpt2_124m": (64, 1024),
    "llama_125m": (16, 2048),
    "llama_1b": (8, 2048),
    "qwen3_0.6b": (8, 2048),
    "qwen3_moe_500m": (8, 2048),
    "nanochat_d12": (16, 2048),
}
"""{model: (sequences, tokens per sequence)}."""
STRATEGIES = ("single", "ddp", "fsdp2", "tp")
WITHOUT_PLAN = ("gpt2_124m", "nanochat_d12")
"""Models without a tensor-parallel plan in transformers."""
SETUPS = [
    Setup(model, strategy, *BATCHES[model])
    for model in BATCHES
    for strategy in STRATEGIES
    if strategy != "tp" or model not in WITHOUT_PLAN
]
