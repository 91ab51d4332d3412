"""Seconds of a step in which GPUs send, wait or compute elsewhere: a function for each kind of parallelism.

Ring collectives: a sum of B bytes over n processes moves 2 B (n - 1) / n, a gather or a scatter half of that.
"""

from dataclasses import dataclass, replace

from pretrain.config import RunConfig
from pretrain.optim.optimizers import OptimizerSpec
from pretrain.parallel.pipeline import STAGE_LAYOUTS
from pretrain.parallel.registry import strategy_named
from pretrain_tools.planning.layouts import Layout
from pretrain_tools.planning.memory import FP32, Sizes
from pretrain_tools.planning.optimizer_bytes import exchanged_bytes, with_experts_in_parts

CPU_ADAM_BYTES_PER_SECOND = 100e9
"""Bytes that an update on the host moves per second, on one machine."""
NVME_BYTES_PER_SECOND = 5e9
"""Bytes that a machine's disk moves per second."""
EXCHANGES_OF_ROWS = 4
"""Exchanges of rows under ep, in a layer and micro-step: there and back, in both directions."""


@dataclass(frozen=True)
class StepTraffic:
    """Numbers of a step from which its traffic follows."""

    sizes: Sizes
    micro_steps: int
    tokens: int
    """Tokens of a process in a micro-step."""
    inside: float
    """Bytes per second between the GPUs of a machine."""
    across: float
    """The same where all GPUs take part."""
    reduces_once: bool = False
    """batch.reduce_once"""

    @property
    def reductions(self) -> int:
        """Reductions of gradients, where the recipe chooses."""
        return 1 if self.reduces_once else self.micro_steps


def traffic(layout: Layout, step: StepTraffic) -> tuple[float, float]:
    """Returns (seconds in which a GPU sends in a step, part of the computing behind which that can hide)."""
    match layout.name:
        case "fsdp2" | "hsdp" | "cp":
            return _sharded(layout, step)
        case "tp":
            sums = 2 * FP32 * step.sizes.total * layout.ring / step.across if layout.groups > 1 else 0.0
            return _hidden_states(layout, step) + sums, 0.0
        case "fsdp_tp":
            seconds, hidden = _sharded(replace(layout, ranks=layout.groups, groups=1), step)
            return seconds / layout.per_group, hidden
        case "pp":  # next to nothing: hidden states between neighbors
            return 0.0, 0.0
        case "ep":
            return _experts(layout, step)
    if layout.zero.get("stage") == 3:
        return _sharded(layout, step)
    if layout.zero.get("stage") == 2:
        return (FP32 * step.reductions + 2) * step.sizes.total * layout.ring / step.across, 2 / 3
    # Copies: gradients are summed in the last micro-step, during its backward pass.
    return 2 * FP32 * step.sizes.total * layout.ring / step.across, 2 / 3 / step.micro_steps


def _sharded(layout: Layout, step: StepTraffic) -> tuple[float, float]:
    """Weights in bf16 forward and again backward, but for those beside the layers; gradients in fp32."""
    total = step.sizes.total
    gathered = 2 * (2 * total - step.sizes.root) * step.micro_steps + FP32 * total * step.reductions
    if layout.groups == 1:
        return gathered * layout.ring / step.across, 0.9
    sums = 2 * FP32 * total / layout.per_group / step.across
    return gathered * ((layout.per_group - 1) / layout.per_group) / step.inside + sums, 0.9


def _hidden_states(layout: Layout, step: StepTraffic) -> float:
    """tp: two sums of the hidden states forward, two backward, with nothing to hide behind."""
    sizes = step.sizes
    return 4 * sizes.layers * step.micro_steps * step.tokens * sizes.width * 2 * 2 * layout.ring / step.inside


def _experts(layout: Layout, step: StepTraffic) -> tuple[float, float]:
    """Rows in bf16, then sums of the gradients, with nothing to hide behind."""
    sizes = step.sizes
    rows = EXCHANGES_OF_ROWS * 2 * step.micro_steps * step.tokens * sizes.routers * sizes.choices * sizes.width
    sums = 2 * FP32 * (sizes.total - sizes.experts) * layout.ring
    sums += 2 * FP32 * sizes.experts / layout.per_group * (layout.groups - 1) / layout.groups
    return rows * (layout.per_group - 1) / layout.per_group / step.inside + sums / step.across, 0.0


def exchange_seconds(layout: Layout, step: StepTraffic, optimizer: OptimizerSpec) -> float:
    """Returns seconds of exchanges with nothing to hide behind: of matrices for an update, of heads under cp."""
    if layout.name == "fsdp_tp":
        return _hidden_states(replace(layout, ranks=layout.per_group, groups=1), step)
    if layout.name == "ep":  # each process updates its own experts alone
        beside_experts = type(optimizer)(with_experts_in_parts(optimizer.model, 0))
        return exchanged_bytes(beside_experts, "whole", layout.ranks) / step.across
    if layout.zero.get("stage") in (1, 2):  # only matrices that the flat partitions cut
        return 0.0
    sent = exchanged_bytes(optimizer, strategy_named(layout.name).parameter_form, layout.per_group)
    seconds = sent / (step.inside if layout.groups > 1 else step.across)
    if layout.name == "cp":  # heads, twice in each layer and direction
        tokens = step.micro_steps * step.tokens / layout.parts
        heads = 2 * 2 * step.sizes.layers * step.sizes.exchanged_width * tokens * (layout.parts - 1) / layout.parts
        seconds += heads / step.inside
    return seconds


def idle(config: RunConfig, layout: Layout) -> float:
    """Returns the time in which processes wait for each other's results, relative to the time they compute.

    That is a pipeline's bubble (Narayanan et al., arXiv 2104.04473).
    """
    if layout.name != "pp":
        return 0.0
    schedule = STAGE_LAYOUTS[config.pipeline.schedule]
    if schedule.splits_backward:
        return 0.0
    microbatches = len(schedule.owners(layout.per_group)) * config.pipeline.microbatch_scale
    return (layout.per_group - 1) / (microbatches * schedule.stages_per_rank)


def offload_seconds(layout: Layout, parameters: int) -> float:
    """Returns how much longer an update takes because it is not on the GPU.

    Weights, moments and gradients are read, most written, in the machine's memory.
    """
    offload = layout.zero.get("offload_optimizer")
    if not offload:
        return 0.0
    seconds = 28 * parameters / layout.machines / CPU_ADAM_BYTES_PER_SECOND
    if offload["device"] == "nvme":
        seconds += 2 * 12 * parameters / layout.machines / NVME_BYTES_PER_SECOND
    return seconds


def reduces_by_choice(name: str, precision: str) -> bool:
    """True where batch.reduce_once trades memory for communication; elsewhere it is so anyway, or refused."""
    # DeepSpeed adds gradients that it does not reduce up in the dtype of the weights.
    return name in ("fsdp2", "hsdp", "cp", "fsdp_tp") or (name in ("zero2", "zero3") and precision == "fp32")
