"""What a plan knows of a run under a strategy before anything runs: how processes divide it, and what a step sends."""

from dataclasses import dataclass, field
from typing import Any

from pretrain.memory.parts import Sizes


@dataclass(frozen=True)
class Layout:
    """How a launcher file divides a run over processes."""

    name: str
    """File in accelerate_configs/."""
    ranks: int
    machines: int = 1
    groups: int = 1
    """Of processes that hold one model together, for hsdp, tp, pp and ep: the others hold copies."""
    parts: int = 1
    """Of a sequence, each on a process of its own, for cp."""
    problem: str | None = None
    """Why so many processes cannot run it."""
    environment: dict[str, str] = field(default_factory=dict)
    """What the launcher would set, as far as the strategy's `problems` read it."""
    options: str = ""
    """For the launcher, where the file itself says something else."""
    zero: dict[str, Any] = field(default_factory=dict)
    """zero_optimization of the DeepSpeed JSON."""

    @property
    def per_group(self) -> int:
        return self.ranks // self.groups

    @property
    def ring(self) -> float:
        """Part of its bytes that each process sends when all gather something, in a ring; a sum takes two."""
        return (self.ranks - 1) / self.ranks


@dataclass(frozen=True)
class StepTraffic:
    """What a strategy's traffic in a step follows from."""

    sizes: Sizes
    micro_steps: int
    tokens: int
    """Of a process in a micro-step."""
    inside: float
    """Bytes per second between the GPUs of a machine."""
    across: float
    """The same where all GPUs take part."""
    reduces_once: bool = False
    """batch.reduce_once"""

    @property
    def reductions(self) -> int:
        """Of gradients, where the recipe chooses."""
        return 1 if self.reduces_once else self.micro_steps
