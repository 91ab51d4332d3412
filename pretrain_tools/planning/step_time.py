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
"""MFU slightly below the 42% to 51% of small models on two cores (docs/performance.md)."""


def default_mfu(parameters: int, device_type: str = "cuda") -> float:
    if device_type == "cpu":
        return MFU_OF_CPUS
    return next(mfu for limit, mfu in MFU_BY_PARAMETERS if parameters <= limit)


MFU_OF_SMALL = {("cpu", "bf16"): (0.3, 2e6), ("cpu", "fp32"): (0.42, 5e5)}
"""{(device, precision): (MFU, minimum number of parameters to reach it)}. These are assumptions based on small models
on two cores: in bf16, 0.14 with 0.6M parameters and 0.34 to 0.4 with 2M to 3M; in fp32 with AVX2, which has half the
peak, 0.46 with 0.6M."""
FULL_GPU_PARAMETERS = 1e8
"""Minimum number of parameters for `default_mfu` on a GPU."""
MFU_EXPONENT = 0.4
"""Exponent of the parameter count in the MFU of smaller models, whose matmuls don't fill the device."""


def mfu_of_size(parameters: int, device_type: str, precision: str) -> float:
    """Estimates the MFU of a model that may be too small to fill the device."""
    if device_type == "cpu":
        most, full = MFU_OF_SMALL[device_type, precision]
    else:
        most, full = default_mfu(parameters), FULL_GPU_PARAMETERS
    return most * min(1.0, parameters / full) ** MFU_EXPONENT


WORDS = {
    "fsdp": "gathering weights and reducing gradients across shards",
    "dp_replicate": "summing gradients across replicas",
    "tp": "summing hidden states across tp",
    "cp": "exchanging heads across cp",
    "ep": "sending tokens to experts across ep",
    "pp": "passing hidden states between pp stages",
    "update": "exchanging matrices for the optimizer update",
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
