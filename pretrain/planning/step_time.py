"""How long a step takes: the time to compute it at an MFU or at a measured speed, and what moving bytes adds.

An estimate, to compare strategies by and to know the order of magnitude; `plan.py --calibrate` measures.
"""

import math
from dataclasses import dataclass

from pretrain.config import RunConfig
from pretrain.gpus import Gpu
from pretrain.memory.footprint import Layout, data_ranks
from pretrain.memory.parts import FP32, Sizes
from pretrain.parallel.pipeline import STAGE_LAYOUTS

FRAGMENTATION = 0.08
"""Part of a GPU's memory that torch's allocator cannot use: pieces of the wrong size."""
CONTEXT_BYTES = 1.0 * 2**30
"""CUDA's context and cuBLAS workspaces, which torch does not count."""
COMMUNICATION_BYTES = 1.0 * 2**30
"""NCCL's buffers."""
LINK_EFFICIENCY = 0.7
"""Part of a link's rate that collectives reach."""
ALONE = ("zero3_offload", "zero3_offload_nvme")
"""Strategies with offload, which also serve one GPU."""
CPU_ADAM_BYTES_PER_SECOND = 100e9
NVME_BYTES_PER_SECOND = 5e9
"""Of one machine: what an update on the host, or the disk under it, moves per second."""
MFU_BY_PARAMETERS = ((5e8, 0.40), (4e9, 0.42), (math.inf, 0.46))
"""(largest size, MFU) of the best published codebases on H100s, in the formula that train.py logs: llm.c 40.7 %
at 124M, llm-foundry 41.8 % at 1.3B and 46.4 % at 7B. A plan at these is an aim: measure yours."""


@dataclass(frozen=True)
class Hardware:
    """What the run is planned on."""

    gpu: Gpu
    gpus: int
    machines: int

    @property
    def gpus_per_machine(self) -> int:
        return self.gpus // self.machines

    @property
    def usable_bytes(self) -> float:
        """Of a GPU's memory, for tensors."""
        reserved = CONTEXT_BYTES + (COMMUNICATION_BYTES if self.gpus > 1 else 0.0)
        return self.gpu.memory_bytes * (1 - FRAGMENTATION) - reserved

    @property
    def bytes_per_second(self) -> float:
        """Between GPUs, where all take part."""
        rate = self.gpu.network_bytes_per_second if self.machines > 1 else self.gpu.link_bytes_per_second
        return rate * LINK_EFFICIENCY


@dataclass(frozen=True)
class RunWork:
    """The work of a run, whatever it runs on."""

    sizes: Sizes
    active: int
    """Parameters that a token meets; all but for a mixture of experts."""
    non_embedding: int
    """N of 6N: the active parameters that take part in a matrix product."""
    tokens: int
    steps: int
    tokens_per_step: int
    flops_per_token: float
    recompute: float
    """Seconds of a step for each second it would take without activation checkpointing."""

    @property
    def flops(self) -> float:
        return self.flops_per_token * self.tokens


def default_mfu(parameters: int) -> float:
    return next(mfu for limit, mfu in MFU_BY_PARAMETERS if parameters <= limit)


@dataclass(frozen=True)
class Speed:
    """How fast a GPU computes: at an MFU, or as measured."""

    mfu: float
    source: str
    tokens_per_second: float | None = None
    """Of one process, measured; None: from the MFU."""

    def step_seconds(
        self,
        name: str,
        config: RunConfig,
        work: RunWork,
        hardware: Hardware,
        layout: Layout,
        micro_batch: int,
    ) -> tuple[float, float]:
        """(seconds of a step, those in which GPUs wait for each other)."""
        if self.tokens_per_second:
            compute = work.tokens_per_step / (self.tokens_per_second * hardware.gpus)
        else:
            flops = work.flops_per_token * work.tokens_per_step * work.recompute
            compute = flops / (hardware.gpus * hardware.gpu.bf16_flops * self.mfu)
        if name == "pp":
            compute *= 1 + bubble(config, layout.per_group)
        tokens = micro_batch * config.data.sequence_length
        micro_steps = max(1, work.tokens_per_step // (tokens * data_ranks(name, layout)))
        moved, hidden = traffic(name, work, hardware, layout, micro_steps, tokens)
        exposed = max(0.0, moved - hidden * compute)
        return compute + exposed + offload_seconds(name, work, hardware), exposed


def bubble(config: RunConfig, ranks: int) -> float:
    """Time a pipeline's processes wait, relative to the time they compute (Narayanan et al., arXiv 2104.04473)."""
    layout = STAGE_LAYOUTS[config.pipeline.schedule]
    if layout.splits_backward:
        return 0.0
    microbatches = len(layout.owners(ranks)) * config.pipeline.microbatch_scale
    return (ranks - 1) / (microbatches * layout.stages_per_rank)


def traffic(
    name: str, work: RunWork, hardware: Hardware, layout: Layout, micro_steps: int, tokens: int
) -> tuple[float, float]:
    """(seconds in which a GPU sends in a step, part of the computing behind which that can hide).

    Ring collectives: a sum of B bytes over n processes moves 2 B (n - 1) / n, a gather or a scatter half of that.
    """
    total, rate, ranks = work.sizes.total, hardware.bytes_per_second, hardware.gpus
    if ranks == 1:
        return 0.0, 0.0
    inside = hardware.gpu.link_bytes_per_second * LINK_EFFICIENCY
    ring = (ranks - 1) / ranks
    if name in ("ddp", "zero1"):  # summed in the last micro-step, during its backward pass
        return 2 * FP32 * total * ring / rate, 2 / 3 / micro_steps
    if name == "zero2":
        return (FP32 * micro_steps + 2) * total * ring / rate, 2 / 3
    if name == "hsdp":
        group = (layout.per_group - 1) / layout.per_group
        sums = 2 * FP32 * total / layout.per_group / rate
        return (2 * 2 + FP32) * micro_steps * total * group / inside + sums, 0.9
    if name == "tp":  # two sums of the hidden states forward, two backward, nothing to hide behind
        sizes = work.sizes
        seconds = 4 * sizes.layers * micro_steps * tokens * sizes.width * 2 * 2 * ring / inside
        return seconds + (2 * FP32 * total * ring / rate if layout.groups > 1 else 0.0), 0.0
    if name == "pp":
        return 0.0, 0.0
    return (2 * 2 + FP32) * micro_steps * total * ring / rate, 0.9


def offload_seconds(name: str, work: RunWork, hardware: Hardware) -> float:
    """Seconds of an update in the machine's memory: weights, moments and gradients are read, most written."""
    if name not in ALONE:
        return 0.0
    seconds = 28 * work.sizes.total / hardware.machines / CPU_ADAM_BYTES_PER_SECOND
    if name == "zero3_offload_nvme":
        seconds += 2 * 12 * work.sizes.total / hardware.machines / NVME_BYTES_PER_SECOND
    return seconds
