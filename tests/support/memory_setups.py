"""Setups of tests/planning/test_step_memory.py: models of model_configs/ under strategies, with real micro-batches."""

import json
import os
from dataclasses import dataclass
from typing import Any

from pretrain.mesh_sizes import variable
from pretrain_tools.planning.layouts import Layout, layout
from support.project import ROOT
from support.ranks_on_fake_cuda import RANKS, Launch

EVERYTHING = os.environ.get("STRATEGIES") == "all"


@dataclass(frozen=True)
class MemorySetup:
    """A model under a strategy."""

    strategy: str
    """In accelerate_configs/."""
    model: str
    """In model_configs/."""
    compiled: bool = True
    micro_steps: int = 1
    sequences: int = 8
    length: int = 2048
    checkpointing: str | float = "none"
    layers: int | None = None
    """None: as many as the model has."""
    size: int | None = None
    """Of the strategy's dimension; None: as its file says."""

    @property
    def name(self) -> str:
        words = [self.strategy, self.model, *(["compiled"] if self.compiled else [])]
        words += [f"{self.micro_steps} micro-steps"] if self.micro_steps > 1 else []
        words += [f"recomputed {self.checkpointing}"] if self.checkpointing != "none" else []
        words += [f"{self.layers} layers"] if self.layers else []
        words += [f"size {self.size}"] if self.size else []
        return ", ".join(words)

    @property
    def ranks(self) -> int:
        return 1 if self.strategy == "single" else RANKS

    @property
    def looked_at(self) -> list[int]:
        """Ranks; of a pipeline the first and the last stage's."""
        return [0, RANKS - 1] if self.strategy == "pp" else [0]

    def model_config(self) -> dict[str, Any]:
        values = json.loads((ROOT / f"model_configs/{self.model}.json").read_text())
        name = "n_layer" if "n_layer" in values else "num_hidden_layers"
        values[name] = self.layers or values[name]
        # Fake tensors cannot say which ranks share a tied matrix.
        return values | ({"tie_word_embeddings": False} if self.strategy == "pp" else {})

    @property
    def settings(self) -> tuple[tuple[str, str], ...]:
        compile_mode = "regional" if self.compiled else "none"
        tokens = self.micro_steps * self.layout.micro_batches * self.sequences * self.length
        return (
            ("compile", compile_mode),
            ("loss.backend", "chunked_compiled"),
            ("activation_checkpointing", str(self.checkpointing)),
            ("batch.tokens_per_step", str(tokens)),
        )

    @property
    def layout(self) -> Layout:
        return layout(self.strategy, self.ranks, size=self.size)

    def launch(self, rank: int) -> Launch:
        values = self.model_config()
        return Launch(
            self.strategy,
            rank,
            ((variable(self.strategy), str(self.size)),) if self.size else (),
            layers=values.get("num_hidden_layers") or values["n_layer"],
            model=self.model,
            settings=self.settings,
            ranks=self.ranks,
            sequences=self.sequences,
            length=self.length,
        )


SETUPS = [
    MemorySetup(strategy, "llama_125m", compiled, micro_steps)
    for strategy in ("single", "ddp", "fsdp2", "hsdp", "tp", "fsdp_tp", "cp", "pp")
    for compiled in (False, True)
    for micro_steps in (1, 2)
]
