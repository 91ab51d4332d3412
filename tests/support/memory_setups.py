"""Setups for tests/planning/test_step_memory.py."""

import json
import os
from dataclasses import dataclass, replace
from typing import Any

from pretrain.config import MemoryBudget
from pretrain.mesh_sizes import DIMENSIONS, Sizes, variable
from pretrain.parallel.zero import missing_for_nvme
from pretrain_tools.planning.layouts import Layout, layout
from support.project import ROOT
from support.ranks_on_fake_cuda import RANKS, Launch

EVERYTHING = os.environ.get("STRATEGIES") == "all"


@dataclass(frozen=True)
class MemorySetup:
    """A model and a strategy."""

    strategy: str
    """Name of a file in accelerate_configs/."""
    model: str
    """Name of a file in model_configs/."""
    compiled: bool = True
    micro_steps: int = 1
    sequences: int = 8
    length: int = 2048
    checkpointing: str | float | MemoryBudget = "none"
    settings: tuple[tuple[str, str], ...] = ()
    layers: int | None = None
    """Number of layers; None: the model's default."""
    size: int | None = None
    """Size of the strategy's mesh dimension; None: the default in its accelerate config."""
    offloads: bool = False
    """Keep the sharded states in CPU memory (`fsdp_offload_params`)."""
    mesh: Sizes | None = None
    """Sizes of the dimensions of the strategy `mesh`."""
    vocabulary: int | None = None
    """Number of token IDs; None: the model's default."""
    buckets: tuple[tuple[str, int], ...] = ()
    """ZeRO settings that replace those in the strategy's DeepSpeed JSON."""

    @property
    def name(self) -> str:
        mesh = [f"{name}{size}" for name, size in self.mesh.named().items()] if self.mesh else []
        words = [" ".join([self.strategy, *mesh]), self.model, *(["compiled"] if self.compiled else [])]
        words += [f"{self.micro_steps} micro-steps"] if self.micro_steps > 1 else []
        words += [f"recomputed {self.checkpointing}"] if self.checkpointing != "none" else []
        words += [value for _, value in self.settings]
        words += [f"{self.layers} layers"] if self.layers else []
        words += [f"size {self.size}"] if self.size else []
        words += ["offloaded"] if self.offloads else []
        words += ["small buckets"] if self.buckets else []
        words += [f"{self.sequences * self.length} tokens"] if self.strategy.startswith("zero") else []
        return ", ".join(words)

    @property
    def ranks(self) -> int:
        return 1 if self.strategy == "single" else RANKS

    @property
    def looked_at(self) -> list[int]:
        """Returns the ranks to measure; for pipelines, one per stage."""
        if self.layout.pp > 1:
            return list(range(0, RANKS, RANKS // self.layout.pp))
        # ZeRO-1 and 2 reduce the last rank's gradients first, so this rank needs the most memory.
        return [RANKS - 1] if self.strategy.startswith("zero") else [0]

    def model_config(self) -> dict[str, Any]:
        values = json.loads((ROOT / f"model_configs/{self.model}.json").read_text())
        name = "n_layer" if "n_layer" in values else "num_hidden_layers"
        values[name] = self.layers or values[name]
        values["vocab_size"] = self.vocabulary or values["vocab_size"]
        # Fake tensors can't determine which ranks share a tied matrix.
        return values | ({"tie_word_embeddings": False} if self.layout.pp > 1 else {})

    @property
    def recipe(self) -> tuple[tuple[str, str], ...]:
        compile_mode = "regional" if self.compiled else "none"
        tokens = self.micro_steps * self.layout.micro_batches * self.sequences * self.length
        return (
            ("compile", compile_mode),
            ("loss.backend", "chunked_compiled"),
            ("activation_checkpointing", str(self.checkpointing)),
            ("batch.tokens_per_step", str(tokens)),
            *self.settings,
        )

    @property
    def layout(self) -> Layout:
        given = Layout.of(self.mesh) if self.mesh else layout(self.strategy, self.ranks, size=self.size)
        return replace(given, offloads=self.offloads, zero=given.zero and given.zero | dict(self.buckets))

    def launch(self, rank: int) -> Launch:
        values = self.model_config()
        return Launch(
            self.strategy,
            rank,
            (
                *(((variable(self.strategy), str(self.size)),) if self.size else ()),
                *((variable(name), str(getattr(self.mesh, name))) for name in DIMENSIONS if self.mesh),
                ("FSDP_OFFLOAD_PARAMS", str(self.offloads).lower()),
            ),
            layers=values.get("num_hidden_layers") or values["n_layer"],
            model=self.model,
            settings=self.recipe,
            ranks=self.ranks,
            sequences=self.sequences,
            length=self.length,
        )


def zero(stage: int | str, micro_steps: int, precision: str = "bf16") -> MemorySetup:
    """Returns a ZeRO setup, which runs 16 tokens uncompiled on the CPU. stage: the strategy's name after `zero`."""
    settings = (("precision", precision),)
    sizes = {"layers": 2, "sequences": 1, "length": 16}
    return MemorySetup(f"zero{stage}", "llama_125m", False, micro_steps, settings=settings, **sizes)


BUCKETS = (
    "reduce_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "sub_group_size",
)


def in_small_buckets(setup: MemorySetup) -> MemorySetup:
    """Returns a ZeRO setup whose buckets are as small, relative to a layer, as those of a model with 7B parameters.

    Otherwise, one bucket would hold all gradients. The vocabulary is small, because most of the time would go into the
    logits.
    """
    shrink = {"llama_125m": 17.5, "llama_1b": 4.6}[setup.model]
    buckets = {name: int(size / shrink) for name, size in setup.layout.zero.items() if name in BUCKETS}
    layers = 6 if setup.strategy in ("zero1", "zero2", "zero3_offload_nvme") else 12
    return replace(setup, layers=layers, vocabulary=4096, buckets=tuple(buckets.items()))


def with_activations(stage: int | str, micro_steps: int) -> MemorySetup:
    """Returns a ZeRO setup with enough tokens for activations to take most of the memory."""
    return replace(in_small_buckets(zero(stage, micro_steps)), layers=12, sequences=4, length=256)


def on_nvme(micro_steps: int) -> MemorySetup:
    """Returns a setup whose gradients are large enough for DeepSpeed to write them to disk."""
    return in_small_buckets(replace(zero("3_offload_nvme", micro_steps), model="llama_1b"))


ZERO_STAGES = (1, 2, 3, "3_offload")
TYPICAL_ZERO = ((1, 2), (2, 1), (3, 1), ("3_offload", 1))
"""(stage, micro-steps)."""
NVME = EVERYTHING and not missing_for_nvme()
TYPICAL = [
    MemorySetup("ddp", "llama_125m", layers=2),
    MemorySetup("fsdp2", "gpt2_124m", micro_steps=2, layers=2, sequences=16, length=1024),
    MemorySetup("cp", "llama_125m", layers=3, size=4),
    MemorySetup("tp", "llama_125m", layers=3, size=4, checkpointing=MemoryBudget(memory_budget=0.6)),
    *(in_small_buckets(zero(stage, micro_steps)) for stage, micro_steps in TYPICAL_ZERO),
    # Compiling takes most of the time, so these setups are uncompiled.
    MemorySetup("single", "llama_125m", compiled=False, layers=2),
    MemorySetup("hsdp", "qwen3_0.6b", compiled=False, layers=2),
    MemorySetup("fsdp_tp", "llama_125m", compiled=False, micro_steps=2, layers=2),
    MemorySetup("pp", "llama_125m", compiled=False, micro_steps=2, layers=4, size=2),
    MemorySetup("ep", "qwen3_moe_500m", compiled=False, layers=2),
    MemorySetup("fsdp2", "deepseek_v3_500m", compiled=False, layers=3),
]
"""Setups to test in every run of the test suite."""
DIVIDED = [MemorySetup(strategy, "llama_125m", layers=3, size=4) for strategy in ("tp", "cp")]
DIVIDED += [MemorySetup("fsdp_tp", "llama_125m", layers=3), MemorySetup("ep", "qwen3_moe_500m", layers=3)]
WHOLE = ("gpt2_124m", "llama_125m", "qwen3_0.6b", "qwen3_moe_500m", "llama_1b", "nanochat_d12")
FURTHER = [
    *(
        MemorySetup(strategy, "llama_125m", layers=3, size=size, checkpointing=MemoryBudget(memory_budget=budget))
        for strategy, size in (("ddp", None), ("fsdp2", None), ("cp", 4))
        for budget in (0.2, 0.6)
    ),
    *(MemorySetup("ddp", model, sequences=2) for model in WHOLE),
    *(MemorySetup("fsdp2", model, sequences=2) for model in WHOLE),
    *(
        replace(MemorySetup(strategy, "llama_125m", layers=3), compiled=compiled, micro_steps=micro_steps)
        for strategy in ("single", "ddp", "fsdp2", "hsdp")
        for compiled, micro_steps in ((False, 1), (False, 2), (True, 2))
    ),
    *(replace(setup, micro_steps=2) for setup in DIVIDED),
    *(setup for setup in DIVIDED if setup not in TYPICAL),
    *(
        MemorySetup(strategy, "llama_125m", layers=3, compiled=False, micro_steps=micro_steps, offloads=True)
        for strategy in ("fsdp2", "fsdp_tp")
        for micro_steps in (1, 2)
    ),
    *(
        MemorySetup("pp", "llama_125m", False, 2, size=2, offloads=True, settings=(("pipeline.schedule", schedule),))
        for schedule in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
    ),
    *(MemorySetup("pp", "llama_125m", size=4, micro_steps=micro_steps) for micro_steps in (1, 2)),
    *(
        MemorySetup("pp", "llama_125m", size=2, settings=(("pipeline.schedule", schedule),))
        for schedule in ("GPipe", "Interleaved1F1B")
    ),
    *(
        MemorySetup("pp", "llama_125m", compiled=False, size=size, settings=(("pipeline.schedule", schedule),))
        for schedule in ("ZBVZeroBubble", "InterleavedZeroBubble")
        for size in (2, 4)
    ),
    *(zero(stage, n, precision) for stage in ZERO_STAGES for n in (1, 2) for precision in ("fp32", "bf16")),
    *(
        in_small_buckets(zero(stage, micro_steps, precision))
        for stage in ZERO_STAGES
        for micro_steps in (1, 2)
        for precision in ("fp32", "bf16")
        if precision == "fp32" or (stage, micro_steps) not in TYPICAL_ZERO
    ),
    *(with_activations(stage, micro_steps) for stage in ZERO_STAGES for micro_steps in (1, 2)),
    *(on_nvme(micro_steps) for micro_steps in (1, 2) if NVME),
    *(
        MemorySetup(strategy, model, sequences=4 if strategy == "pp" else 2, layers=4, size=size)
        for model in ("llama_1b", "qwen3_0.6b")
        for strategy, size in (("single", None), ("tp", 4), ("cp", 4), ("fsdp_tp", None), ("hsdp", None), ("pp", 2))
    ),
    *(MemorySetup(strategy, "llama_1b", False, 2, sequences=2, layers=4, size=4) for strategy in ("tp", "cp")),
    MemorySetup("mesh", "llama_1b", sequences=4, layers=4, mesh=Sizes(pp=2, dp_shard=2, tp=2)),
    MemorySetup("mesh", "llama_1b", sequences=2, layers=4, mesh=Sizes(dp_shard=2, cp=2, tp=2)),
    *(
        MemorySetup("mesh", "llama_125m", False, 2, layers=4 if mesh.pp > 1 else 3, mesh=mesh)
        for mesh in (
            Sizes(dp_shard=4, cp=2),
            Sizes(dp_replicate=2, tp=4),
            Sizes(dp_shard=2, cp=2, tp=2),
            Sizes(pp=2, tp=4),
            Sizes(pp=2, dp_shard=4),
        )
    ),
    MemorySetup("mesh", "qwen3_moe_500m", False, layers=2, mesh=Sizes(dp_shard=8, ep=4)),
    MemorySetup("mesh", "qwen3_moe_500m", False, 2, layers=2, mesh=Sizes(dp_shard=4, tp=2, ep=4)),
    MemorySetup("hsdp", "llama_125m", layers=3, checkpointing=MemoryBudget(memory_budget=0.4)),
    MemorySetup("pp", "llama_125m", layers=4, size=2, checkpointing=MemoryBudget(memory_budget=0.4)),
    MemorySetup("cp", "llama_125m", layers=2, size=4),
    MemorySetup("ep", "qwen3_moe_500m", compiled=False, layers=3),
    MemorySetup("ep", "qwen3_moe_500m", layers=3, checkpointing="full"),
    MemorySetup("ep", "qwen3_moe_500m", layers=3, checkpointing=MemoryBudget(memory_budget=0.4)),
    MemorySetup("ep", "deepseek_v3_500m", layers=3),
    MemorySetup("ep", "deepseek_v3_500m", layers=4, checkpointing=0.5),
    MemorySetup("ep", "deepseek_v3_500m", compiled=False, layers=3),
    *(
        MemorySetup(strategy, "deepseek_v3_500m", compiled, layers=3, checkpointing="full")
        for strategy, compiled in (("ep", True), ("ep", False), ("fsdp2", False))
    ),
    MemorySetup("fsdp2", "gpt2_124m", layers=3, vocabulary=4096, checkpointing="full"),
    *(
        MemorySetup(strategy, "qwen3_moe_500m", compiled, layers=4, checkpointing=0.5)
        for strategy in ("ep", "fsdp2")
        for compiled in (False, True)
    ),
    MemorySetup("fsdp2", "deepseek_v3_500m", sequences=4),
    *(MemorySetup("ep", "olmoe_7b", compiled, sequences=2, layers=2) for compiled in (False, True)),
    MemorySetup("cp", "llama_125m", layers=3, size=4, checkpointing="full"),
    MemorySetup("fsdp2", "llama_125m", layers=4, vocabulary=4096, checkpointing="full"),
    MemorySetup("fsdp2", "llama_1b", layers=4, sequences=4, vocabulary=4096, checkpointing="full"),
    *(MemorySetup("fsdp2", model, layers=3, checkpointing="full") for model in ("qwen3_moe_500m", "deepseek_v3_500m")),
    MemorySetup("ddp", "gpt2_124m", compiled=False, layers=3),
    *(
        MemorySetup(strategy, "gpt2_124m", compiled=False, layers=3, vocabulary=4096, checkpointing="full")
        for strategy in ("ddp", "fsdp2")
    ),
    *(
        MemorySetup(strategy, "llama_125m", compiled=False, layers=4, vocabulary=4096, checkpointing="full")
        for strategy in ("single", "fsdp2")
    ),
]
SETUPS = [*TYPICAL, *(FURTHER if EVERYTHING else [])]


def in_fp8(strategy: str, compiled: bool = True, model: str = "llama_125m", **more: Any) -> MemorySetup:
    return MemorySetup(strategy, model, compiled, settings=(("precision", "fp8"),), **more)


TYPICAL_IN_FP8 = [
    in_fp8("fsdp2", layers=2),
    # With a small vocabulary, memory peaks in a layer's backward pass, which casts its matrices.
    in_fp8("single", compiled=False, layers=3, vocabulary=4096, checkpointing="full"),
]
FURTHER_IN_FP8 = [
    *(in_fp8(strategy, compiled, layers=3) for strategy in ("single", "ddp", "hsdp") for compiled in (True, False)),
    *(in_fp8(strategy, compiled, layers=3, size=4) for strategy in ("tp", "cp") for compiled in (True, False)),
    *(in_fp8("fsdp_tp", compiled, layers=3, micro_steps=2) for compiled in (True, False)),
    *(in_fp8("pp", compiled, layers=4, size=2, micro_steps=2) for compiled in (True, False)),
    in_fp8("fsdp2", compiled=False, layers=3, micro_steps=2, vocabulary=4096),
    in_fp8("fsdp2", compiled=False, layers=3, checkpointing="full"),
    in_fp8("fsdp2", compiled=False, layers=3, offloads=True),
    in_fp8("ddp", layers=3, checkpointing=MemoryBudget(memory_budget=0.4)),
    *(in_fp8(strategy, model="llama_1b", layers=4, sequences=2) for strategy in ("fsdp2", "fsdp_tp")),
    in_fp8("fsdp2", model="qwen3_0.6b", sequences=2),
    in_fp8("ep", compiled=False, model="qwen3_moe_500m", layers=2),
]
SETUPS_IN_FP8 = [*TYPICAL_IN_FP8, *(FURTHER_IN_FP8 if EVERYTHING else [])]
"""Setups that need torchao."""
