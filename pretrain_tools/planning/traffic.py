"""Seconds of a step in which GPUs send, wait or compute elsewhere: a function for each kind of parallelism.

Ring collectives: a sum of B bytes over n processes moves 2 B (n - 1) / n, a gather or a scatter half of that.
"""

from dataclasses import dataclass

from pretrain.config import RunConfig
from pretrain.optim.optimizers import OptimizerSpec
from pretrain.parallel.pipeline import STAGE_LAYOUTS
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


def ring(processes: int) -> float:
    """Returns the part of its bytes that each process sends when all gather something; a sum takes two."""
    return (processes - 1) / processes


def traffic(layout: Layout, step: StepTraffic) -> tuple[float, float]:
    """Returns (seconds in which a GPU sends in a step, part of the computing behind which that can hide)."""
    total = step.sizes.total
    sums = 2 * FP32 * total * ring(layout.ranks) / step.across
    stage = layout.zero.get("stage")
    if layout.pp > 1:  # next to nothing: hidden states between neighbors
        return 0.0, 0.0
    if layout.ep > 1:
        rows = _rows(layout, step)
        sharded = _sharded(layout, step)
        return rows + sharded, 0.9 * sharded / (rows + sharded)
    if layout.name in ("fsdp2", "hsdp", "cp", "fsdp_tp") or stage == 3:
        return _sharded(layout, step), 0.9
    if layout.tp > 1:
        return _hidden_states(layout.ranks, step) + (sums if layout.replicas > 1 else 0.0), 0.0
    if stage == 2:
        return (FP32 * step.reductions + 2) * total * ring(layout.ranks) / step.across, 2 / 3
    # Copies: gradients are summed in the last micro-step, during its backward pass.
    return sums, 2 / 3 / step.micro_steps


def _sharded(layout: Layout, step: StepTraffic) -> float:
    """Returns the seconds of weights in bf16, forward and but for the root backward, and of gradients in fp32."""
    total = step.sizes.total - step.sizes.experts * (1 - 1 / layout.ep)
    gathered = 2 * (2 * total - step.sizes.root) * step.micro_steps + FP32 * total * step.reductions
    processes = layout.sharing_states
    if layout.replicas == 1:
        return gathered * ring(processes) / step.across / layout.tp
    return gathered * ring(processes) / step.inside + 2 * FP32 * total / processes / step.across


def _hidden_states(processes: int, step: StepTraffic) -> float:
    """Returns the seconds of two sums of the hidden states forward, two backward, in each layer: tp."""
    sizes = step.sizes
    return 4 * sizes.layers * step.micro_steps * step.tokens * sizes.width * 2 * 2 * ring(processes) / step.inside


def _rows(layout: Layout, step: StepTraffic) -> float:
    """Returns the seconds of rows in bf16 on their way to experts and back: ep."""
    sizes = step.sizes
    rows = EXCHANGES_OF_ROWS * 2 * step.micro_steps * step.tokens * sizes.routers * sizes.choices * sizes.width
    return rows * ring(layout.ep) / step.inside


def exchange_seconds(layout: Layout, step: StepTraffic, optimizer: OptimizerSpec) -> float:
    """Returns seconds of exchanges with nothing to hide behind: of matrices for an update, of heads under cp."""
    if layout.tp > 1 and layout.shards > 1:  # both divide the matrices
        sent = exchanged_bytes(optimizer, "sharded", layout.sharing_states * layout.tp)
        return _hidden_states(layout.tp, step) + sent / step.across
    if layout.ep > 1:  # each process updates its own experts alone
        beside_experts = type(optimizer)(with_experts_in_parts(optimizer.model, 0))
        return exchanged_bytes(beside_experts, "sharded", layout.ranks) / step.across
    if layout.zero.get("stage") in (1, 2):  # only matrices that the flat partitions cut
        return 0.0
    # Where every process has a copy, all share the update; where a group has one, each group updates its own.
    groups = 1 if layout.replicas == layout.ranks else layout.replicas
    sent = exchanged_bytes(optimizer, form_of(layout), layout.ranks // groups)
    seconds = sent / (step.inside if groups > 1 else step.across)
    if layout.cp > 1:  # heads, twice in each layer and direction
        tokens = step.micro_steps * step.tokens / layout.cp
        heads = 2 * 2 * step.sizes.layers * step.sizes.exchanged_width * tokens * ring(layout.cp)
        seconds += heads / step.inside
    return seconds


def form_of(layout: Layout) -> str:
    """Names the form in which an optimizer gets the parameters; see `OptimizerSpec.takes`."""
    if layout.zero or layout.tp > 1:
        return "pieces"
    if layout.pp > 1 and layout.sharing_states == 1:
        return "stage"
    return "sharded" if layout.sharing_states > 1 else "whole"


def idle(config: RunConfig, layout: Layout) -> float:
    """Returns the time in which processes wait for each other's results, relative to the time they compute.

    That is a pipeline's bubble (Narayanan et al., arXiv 2104.04473).
    """
    if layout.pp == 1:
        return 0.0
    schedule = STAGE_LAYOUTS[config.pipeline.schedule]
    if schedule.splits_backward:
        return 0.0
    microbatches = len(schedule.owners(layout.pp)) * config.pipeline.microbatch_scale
    return (layout.pp - 1) / (microbatches * schedule.stages_per_rank)


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
    """Tells where batch.reduce_once trades memory for communication; elsewhere it is so anyway, or refused."""
    # DeepSpeed adds gradients that it does not reduce up in the dtype of the weights.
    return name in ("fsdp2", "hsdp", "cp", "fsdp_tp") or (name in ("zero2", "zero3") and precision == "fp32")
