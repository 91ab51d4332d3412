"""Estimates a GPU's communication per step along each mesh dimension, its overlap with computation, and idle time.

In a ring, an all-reduce of B bytes over n processes moves 2 B (n - 1) / n. All-gather, reduce-scatter and all-to-all
move half of that. tests/parallel/test_products.py compares these numbers with the trainer's communication.
"""

import math
from dataclasses import dataclass

from pretrain.config import RunConfig
from pretrain.optim.optimizers import OPTIMIZERS
from pretrain.parallel.pipeline import STAGE_LAYOUTS
from pretrain_tools.planning.layouts import Layout
from pretrain_tools.planning.memory import FP32, Sizes, Work
from pretrain_tools.planning.optimizer_bytes import exchanged_bytes, with_experts_in_parts

CPU_ADAM_BYTES_PER_SECOND = 100e9
"""Throughput of an optimizer update on the CPU, per machine."""
NVME_BYTES_PER_SECOND = 5e9
"""Disk bandwidth per machine."""


@dataclass(frozen=True)
class Links:
    """A GPU's bandwidth in bytes per second, in one direction."""

    inside: float
    """Bandwidth to the other GPUs in the machine."""
    network: float
    """Bandwidth to other machines."""
    per_machine: int
    """Number of GPUs per machine."""

    def seconds(self, sent: float, size: int, distance: int, *, is_exchange: bool = False) -> float:
        """Returns the seconds that each GPU of a group needs to send these bytes.

        A ring across machines uses the network adapters of all members on a machine. In an all-to-all, each member
        uses only its own adapter.

        distance: distance between consecutive ranks of the group.
        """
        here = min(size, max(1, self.per_machine // distance))  # members on one machine
        if here == size:
            return sent / self.inside
        if is_exchange:
            return sent * (size - here) / (size - 1) / self.network
        return sent / min(self.inside, here * self.network)


@dataclass(frozen=True)
class Flow:
    """A GPU's communication per step along one mesh dimension."""

    name: str
    """Name of the dimension, or `update` for the optimizer update."""
    sent: float
    """Bytes sent per GPU."""
    seconds: float
    hides_behind: float = 0.0
    """Fraction of the computation that can overlap with the communication."""

    def exposed(self, compute: float) -> float:
        """Returns the seconds that don't overlap with `compute` seconds of computation."""
        return max(0.0, self.seconds - self.hides_behind * compute)


@dataclass(frozen=True)
class Step:
    """One process's step."""

    work: Work
    """The process's share of a micro-step."""
    micro_steps: int
    links: Links

    @property
    def config(self) -> RunConfig:
        return self.work.run.config

    @property
    def reductions(self) -> int:
        """Number of gradient reductions per step. Pipelines reduce only after the last microbatch."""
        return 1 if self.config.batch.no_sync or self.work.layout.pp > 1 else self.micro_steps

    @property
    def passes(self) -> int:
        """Number of forward and backward passes per step, including recomputation."""
        return self.micro_steps * (3 if self.work.recomputed else 2)

    def flow(
        self,
        name: str,
        group: str | None = None,
        *,
        gathers: float = 0.0,
        sums: float = 0.0,
        exchanges: float = 0.0,
        hides: float = 0.0,
    ) -> Flow:
        """Combines the collectives of a group, by default the one called `name`.

        gathers, sums and exchanges are the sizes of the full tensors in bytes.
        """
        size, distance = self.work.layout.groups[group or name]
        in_rings = (gathers + 2 * sums) * (size - 1) / size
        exchanged = exchanges * (size - 1) / size
        seconds = self.links.seconds(in_rings, size, distance)
        seconds += self.links.seconds(exchanged, size, distance, is_exchange=True)
        return Flow(name, in_rings + exchanged, seconds, hides)


def flows(step: Step) -> list[Flow]:
    """Lists a GPU's communication in a step. Groups of a single process send nothing."""
    found = mesh_flows(step) if step.work.layout.is_mesh else copies_flows(step)
    return [flow for flow in [*found, update_flow(step)] if flow.sent]


def copies_flows(step: Step) -> list[Flow]:
    """Lists the communication of DDP and DeepSpeed. DDP and ZeRO-1 reduce only in the last backward pass."""
    work = step.work
    total = work.sizes.total
    stage = work.layout.zero.get("stage")
    if stage == 3:
        gathered = work.compute * (2 * total - work.sizes.root) * step.micro_steps
        return [step.flow("fsdp", gathers=gathered + FP32 * total * step.reductions, hides=0.9)]
    # ZeRO-1 and 2 all-reduce the gradients, although each rank only needs its shard.
    reductions = step.reductions if stage == 2 else 1
    hides = 2 / 3 * reductions / step.micro_steps
    return [step.flow("dp_replicate", "all", sums=FP32 * total * reductions, hides=hides)]


def mesh_flows(step: Step) -> list[Flow]:
    """Lists the communication along each dimension of a mesh."""
    work = step.work
    layout = work.layout
    sizes = work.sizes
    calls = step.micro_steps
    microbatches = pipeline_microbatches(step.config, layout)
    # Elements of the hidden states in a micro-step. `work.tokens` counts a single pipeline microbatch.
    hidden = work.tokens * microbatches * sizes.width
    # Layers are gathered in the forward and backward passes, except the last one, which stays gathered in between.
    # Pipelines gather only before the step's first microbatch.
    times = 2 - 1 / sizes.layers if layout.pp == 1 else 1
    gathers = calls if layout.pp == 1 else 1
    root = root_of_stage(sizes, layout)
    dense = sizes.in_layers / layout.pp
    experts = 0.0  # sharded separately from the dense layers
    if layout.ep > 1:
        dense -= sizes.experts / layout.pp
        experts = work.padding * sizes.experts / layout.pp
    else:
        dense += (work.padding - 1) * sizes.experts / layout.pp
    in_fp8 = sizes.in_fp8 / layout.pp if step.config.precision == "fp8" else 0.0
    gathered = (work.compute * (times * dense + root) - times * in_fp8) * gathers
    of_dense = step.flow("fsdp", gathers=gathered + FP32 * (dense + root) * step.reductions)
    gathered = work.compute * times * experts * gathers
    of_experts = step.flow("efsdp", gathers=gathered + FP32 * experts * step.reductions)
    own = (dense + root) / layout.sizes.fsdp + experts / layout.sizes.efsdp
    exchanged = work.compute * hidden / sizes.width * sizes.exchanged_width * sizes.layers / layout.pp
    rows = 2 * work.compute * hidden / layout.tp * work.whole.choices * sizes.routers / layout.pp
    return [
        Flow(
            "fsdp",
            of_dense.sent + of_experts.sent,
            of_dense.seconds + of_experts.seconds,
            hides_behind=0.9 if layout.pp == 1 else 0.3 / microbatches,
        ),
        step.flow("dp_replicate", sums=FP32 * own, hides=2 / 3 / calls if layout.pp == 1 else 0.0),
        *([tp_flow(step, hidden)] if layout.tp > 1 else []),
        step.flow("cp", exchanges=exchanged * step.passes),
        step.flow("ep", exchanges=rows * step.passes),
        *([pp_flow(step, hidden)] if layout.pp > 1 else []),
    ]


def root_of_stage(sizes: Sizes, layout: Layout) -> float:
    """Returns the parameters outside the layers in a pipeline's first or last stage, whichever has more."""
    return sizes.root if layout.pp == 1 else max(sizes.embedding, sizes.root - sizes.embedding)


def tp_flow(step: Step, hidden: float) -> Flow:
    """Returns the all-reduces of hidden states, two per layer and pass, and of unsplit parameters' gradients.

    With ep, each process sends its share of the tokens to experts and gathers the results. The gradient of the last
    hidden states is also gathered, because each process computes the loss for its share of the tokens.
    """
    work = step.work
    layout = work.layout
    by_experts = work.sizes.routers if layout.ep > 1 else 0
    sums = work.compute * hidden * (2 * work.sizes.layers - by_experts) / layout.pp * step.passes
    gathers = work.compute * hidden * (by_experts / layout.pp * step.passes + step.micro_steps)
    split = (work.whole.total - work.held.total) * layout.tp / (layout.tp - 1)
    unsplit = (work.whole.in_layers - split) / layout.pp + root_of_stage(work.whole, layout)
    return step.flow("tp", sums=sums + FP32 * unsplit / layout.sharing_states, gathers=gathers)


def pp_flow(step: Step, hidden: float) -> Flow:
    """Returns the hidden states and gradients sent between stages, which don't overlap with computation."""
    layout = step.work.layout
    stages = STAGE_LAYOUTS[step.config.pipeline.schedule].stages_per_rank
    sent = 2 * step.work.compute * hidden * stages * step.micro_steps
    _, distance = layout.groups["pp"]
    is_inside = distance * layout.pp <= step.links.per_machine
    return Flow("pp", sent, sent / (step.links.inside if is_inside else step.links.network))


def update_flow(step: Step) -> Flow:
    """Returns the communication of an optimizer update: Muon's matrices, Adafactor's sums or ZeRO's weights."""
    work = step.work
    layout = work.layout
    size = layout.sharing_states * layout.tp if layout.is_mesh else layout.ranks
    # ZeRO-1 and 2 gather the weights, but only exchange matrices that are split between their flat partitions.
    if layout.zero.get("stage") in (1, 2):
        return step.flow("update", "all", gathers=work.compute * work.sizes.total)
    shapes = work.whole.shapes
    if layout.ep > 1:  # each process updates only its own experts
        shapes = with_experts_in_parts(shapes, 0)
    form = "sharded" if layout.is_mesh or layout.zero else "whole"
    sent = exchanged_bytes(OPTIMIZERS[step.config.optim.name](shapes), form, size) / layout.pp
    return Flow("update", sent, step.links.seconds(sent, size, 1))


def pipeline_microbatches(config: RunConfig, layout: Layout) -> int:
    """Returns the number of microbatches per micro-step; 1 without a pipeline."""
    if layout.pp == 1:
        return 1
    return len(STAGE_LAYOUTS[config.pipeline.schedule].owners(layout.pp)) * config.pipeline.microbatches_per_stage


def uneven(layout: Layout, layers: int) -> float:
    """Returns the number of layers in the largest pipeline stage relative to the mean."""
    return math.ceil(layers / layout.pp) * layout.pp / layers


def idle(config: RunConfig, layout: Layout) -> float:
    """Returns a pipeline's bubble as a fraction of its computing time (Narayanan et al., arXiv 2104.04473)."""
    schedule = STAGE_LAYOUTS[config.pipeline.schedule]
    if schedule.splits_backward:
        return 0.0
    return (layout.pp - 1) / (pipeline_microbatches(config, layout) * schedule.stages_per_rank)


def offload_seconds(layout: Layout, parameters: int) -> float:
    """Returns the additional seconds for an offloaded optimizer update."""
    offload = layout.zero.get("offload_optimizer")
    if not offload:
        return 0.0
    seconds = 28 * parameters / layout.machines / CPU_ADAM_BYTES_PER_SECOND
    if offload["device"] == "nvme":
        # fp32 weights, their gradients and AdamW's states
        seconds += 2 * 16 * parameters / layout.machines / NVME_BYTES_PER_SECOND
    return seconds
