"""The speed of a run since its last log, and what its live line shows."""

from dataclasses import dataclass, field

from pretrain.training.guard import SpeedGuard
from pretrain.training.metrics import LiveFigures, Throughput


@dataclass
class Speed:
    """Counts from which `log_step` and `show_progress` take differences."""

    guard: SpeedGuard
    live: LiveFigures
    tokens_at_log: int
    flops_at_log: float
    tokens_shown: int
    """Tokens when the live line moved last."""
    saves_every: int
    """Steps between checkpoints."""
    throughput: Throughput = field(default_factory=Throughput)
