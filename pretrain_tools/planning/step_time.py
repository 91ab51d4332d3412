"""Estimates step time from an assumed MFU and the bytes moved.

The estimate is only good for comparing strategies and for the order of magnitude.
"""

import math
from dataclasses import dataclass, field

from pretrain.gpus import CPU, Gpu
from pretrain.optim.batch_ramp import BatchRamp
from pretrain_tools.planning.memory import Sizes
from pretrain_tools.planning.traffic import Links

FRAGMENTATION = 0.08
"""Fraction of GPU memory lost to fragmentation."""
CONTEXT_BYTES = 1.0 * 2**30
"""Memory for the CUDA context and cuBLAS workspaces, which torch doesn't count."""
COMMUNICATION_BYTES = 1.0 * 2**30
"""Memory for NCCL's buffers."""
LINK_EFFICIENCY = 0.7
"""Fraction of a link's bandwidth that collectives reach."""
MFU_BY_PARAMETERS = ((5e8, 0.40), (4e9, 0.42), (math.inf, 0.46))
"""(parameter limit, MFU) of the best published codebases on H100s, using train.py's MFU formula: llm.c 40.7% at 124M,
llm-foundry 41.8% at 1.3B and 46.4% at 7B. Treat them as targets."""


@dataclass(frozen=True)
class Hardware:
    """The hardware of a planned run."""

    gpu: Gpu
    gpus: int
    machines: int

    @property
    def gpus_per_machine(self) -> int:
        return self.gpus // self.machines

    @property
    def device_type(self) -> str:
        return "cpu" if self.gpu.name == CPU else "cuda"

    @property
    def unit(self) -> str:
        """Noun for one of `gpus`."""
        return "process" if self.device_type == "cpu" else "GPU"

    @property
    def usable_bytes(self) -> float:
        """Bytes available for tensors on a GPU. On a CPU, CONTEXT_BYTES is reserved for the system and Python."""
        # NCCL allocates its buffers outside torch's allocator.
        reserved = CONTEXT_BYTES + (COMMUNICATION_BYTES if self.gpus > 1 else 0.0)
        return self.gpu.memory_bytes * (1 - FRAGMENTATION) - reserved

    @property
    def links(self) -> Links:
        """Effective bandwidths of collectives."""
        rates = (self.gpu.link_bytes_per_second, self.gpu.network_bytes_per_second)
        return Links(*(rate * LINK_EFFICIENCY for rate in rates), self.gpus_per_machine)


@dataclass(frozen=True)
class RunWork:
    """The work in a run, independent of the hardware."""

    sizes: Sizes
    active: int
    """Number of active parameters. In dense models, all parameters are active."""
    non_embedding: int
    """Active parameters in matmuls: the N in 6N."""
    ramp: BatchRamp
    """Batch size schedule."""
    tokens: int
    tokens_per_step: int
    flops_per_token: float

    @property
    def steps(self) -> int:
        return self.ramp.total_steps

    @property
    def full_steps(self) -> float:
        """Number of steps with the full batch that take as long as the run, whose batch may be smaller at first."""
        return self.tokens / self.tokens_per_step

    @property
    def flops(self) -> float:
        return self.flops_per_token * self.tokens


MFU_OF_CPUS = 0.4
"""MFU at the lower end of the 40% to 77% of models with 14M parameters in bf16 on two cores (docs/performance.md)."""
FULL_CPU_PARAMETERS = 6e6
"""Minimum number of parameters for `MFU_OF_CPUS` at 1 TFLOP/s, which grows with (peak FLOP/s) ** 1.25.

Smaller models spend most of their time outside matmuls. MFU measured on two cores, by peak and parameters: in fp32 at
0.17 TFLOP/s, 0.46 with 0.6M; in bf16 at 0.45 TFLOP/s, 0.14 with 0.6M and 0.34 to 0.4 with 2M to 3M; in bf16 at 1.53
TFLOP/s (AMX), 0.14 with 2.8M and 0.46 with 13.8M.
"""


def default_mfu(parameters: int, device_type: str, peak_flops: float) -> float:
    """Estimates the MFU of a model. On a GPU, assumes that the model is large enough to fill it."""
    if device_type == "cpu":
        full = FULL_CPU_PARAMETERS * (peak_flops / 1e12) ** 1.25
        return MFU_OF_CPUS * min(1.0, parameters / full) ** 0.75
    return next(mfu for limit, mfu in MFU_BY_PARAMETERS if parameters <= limit)


FULL_GPU_PARAMETERS = 1e8
"""Minimum number of parameters for `default_mfu` on a GPU."""
GPU_MFU_EXPONENT = 0.4
"""Exponent of the parameter count in the MFU of smaller models, whose matmuls don't fill the GPU."""


def mfu_of_size(parameters: int, device_type: str, peak_flops: float) -> float:
    """Estimates the MFU of a model that may be too small to fill the device."""
    mfu = default_mfu(parameters, device_type, peak_flops)
    if device_type == "cpu":
        return mfu
    return mfu * min(1.0, parameters / FULL_GPU_PARAMETERS) ** GPU_MFU_EXPONENT


WORDS = {
    "fsdp": "gathering weights and reducing gradients across shards",
    "dp_replicate": "summing gradients across replicas",
    "tp": "summing hidden states across tp",
    "cp": "exchanging heads across cp",
    "ep": "sending tokens to experts across ep",
    "pp": "passing hidden states between pp stages",
    "update": "exchanging matrices or weights for the optimizer update",
}
"""{name of a `Flow`: description}"""


@dataclass(frozen=True)
class StepTime:
    """Breakdown of a step in seconds."""

    computing: float
    waiting: float = 0.0
    """Pipeline bubble."""
    sending: dict[str, float] = field(default_factory=dict)
    """{mesh dimension or `update`: seconds not overlapped with computation}"""
    on_host: float = 0.0
    """Optimizer update on the CPU."""
    sent: dict[str, float] = field(default_factory=dict)
    """{mesh dimension or `update`: bytes sent per GPU}"""

    @property
    def exposed(self) -> float:
        """Seconds of communication not overlapped with computation."""
        return sum(self.sending.values())

    @property
    def seconds(self) -> float:
        return self.computing + self.waiting + self.exposed + self.on_host

    @property
    def parts(self) -> dict[str, float]:
        """{description: seconds}."""
        parts = {"computing": self.computing, "waiting in the pipeline": self.waiting}
        parts |= {WORDS[name]: seconds for name, seconds in self.sending.items()}
        return {**parts, "updating on the CPU": self.on_host}
