"""Memory of the process that needs most: how states are held, and what each dimension of parallelism adds.

`PlannedRun.work` has divided model, sequences and experts; here weights, gradients and optimizer state follow from
their number and from how they are held (ZeRO, Rajbhandari et al., arXiv 1910.02054). All is arithmetic on shapes.
docs/performance.md compares the sums with measurements (bench/memory.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pretrain.config import RunConfig
from pretrain.data.vocabulary import planned_model_config
from pretrain.hardware import memory_bytes
from pretrain.parallel.pipeline import STAGE_LAYOUTS
from pretrain.parallel.pipeline_stages import split_layers
from pretrain.parallel.strategy import Strategy
from pretrain_tools.planning.layouts import Layout, running_layout
from pretrain_tools.planning.memory import FP32, Memory, PlannedRun, Sizes, Work, at_peak, loss_bytes


def largest_footprint(run: PlannedRun, layout: Layout, sequences: int) -> Memory:
    """Returns the footprint in the stage of the run that needs most.

    sequences: of a micro-batch at data.sequence_length.
    """
    stages = [footprint(stage, layout, rows) for stage, rows in run.stages(sequences)]
    return max(stages, key=lambda memory: memory.total)


def planned_memory(strategy: Strategy, config: RunConfig) -> Memory:
    """Returns what a plan says of this recipe as it runs here."""
    model_config = planned_model_config(config.model, config.data)
    device = strategy.device
    run = PlannedRun(config, model_config, strategy.precision, device.type, memory_bytes(device))
    return footprint(run, running_layout(strategy), config.batch.sequences_per_micro_batch)


def footprint(run: PlannedRun, layout: Layout, sequences: int) -> Memory:
    """Returns the memory of the process that needs most, with so many sequences per micro-batch."""
    work = run.work(layout, sequences)
    memory = in_mesh(work) if layout.is_mesh else STATES.get(layout.name, replicated)(work)
    return replace(
        memory,
        activations=memory.activations + (exchanged_heads(work) if memory.moment != "update" else 0),
        buffers=memory.buffers + exchanged_rows(work),
    )


def exchanged_heads(work: Work) -> float:
    """Returns the bytes of the copies that exchanges of heads make under cp."""
    if work.layout.cp == 1:
        return 0
    bytes_per_channel = work.tokens * work.compute
    copied = bytes_per_channel * work.sizes.exchanged_width  # on its way there, or back
    if work.run.config.activation_checkpointing == "none":  # each layer keeps its output on both sides of the exchange
        copied += bytes_per_channel * work.sizes.layers * work.sizes.width
    return copied


def exchanged_rows(work: Work) -> float:
    """Returns the bytes of a layer's rows on their way to experts and back under ep, if experts share evenly."""
    if work.layout.ep == 1:
        return 0
    return 2 * work.compute * work.tokens * work.sizes.choices * work.sizes.width


def replicated(work: Work) -> Memory:
    """Adds up the memory where every process holds everything.

    DDP's buckets stay between steps. In the last micro-step gradients are written into them; those of the micro-steps
    before it, which are not summed over the processes, have a place of their own.
    """
    sizes = work.sizes
    layout = work.layout
    is_ddp = layout.ranks > 1
    weight = work.parameter_bytes
    whole = weight * sizes.total
    resident = whole if is_ddp or work.accumulates else 0.0
    buckets = whole if is_ddp and work.accumulates else 0.0
    # A tied head's gradient waits for the embedding's; one of its own is added to the gradients at once.
    act = work.activation_bytes(work.activations, weight, waiting=work.head_gradient if sizes.is_tied else 0.0)
    head = 0.0 if sizes.is_tied else weight * sizes.head
    embedding = weight * sizes.embedding
    moments = {
        "loss": (resident, act["loss"]),
        "backward": (resident or head, act["backward"]),
        "first layer": (resident or whole - embedding - weight * sizes.layer, act["first layer"]),
        "embedding": (resident or whole - embedding, embedding + act["embedding"]),
        "update": (whole, work.update_bytes("whole", layout.ranks)),
    }
    return at_peak(moments, whole, work.optimizer_bytes(), buckets)


def in_mesh(work: Work) -> Memory:
    """Adds up any product of dimensions but plain copies: the stage that needs most, where there are stages.

    That is the first, with the embedding, or the last, with head and loss.
    """
    sizes = work.sizes
    if work.layout.pp == 1:
        return part_of_mesh(work, sizes.layers, sizes.root, {"loss", "backward", "first layer", "embedding"})
    schedule = STAGE_LAYOUTS[work.run.config.pipeline.schedule]
    owners = schedule.owners(work.layout.pp)
    layers = layers_of_stages(work.whole, len(owners))
    ends = {0: sizes.embedding, len(owners) - 1: sizes.head or sizes.embedding}
    found = []
    for rank in range(work.layout.pp):
        stages = [number for number, owner in enumerate(owners) if owner == rank]
        root = sum(ends.get(number, 0) for number in stages)
        if 0 in stages and stages[-1] == len(owners) - 1 and sizes.is_tied:
            root = sizes.embedding
        wanted = {"loss"} if stages[-1] == len(owners) - 1 else {"backward"}
        place = Place(rank, tuple(layers[number] for number in stages), stages[-1] == len(owners) - 1)
        found.append(part_of_mesh(work, sum(place.layers), root, wanted, place))
    return max(found, key=lambda memory: memory.total)


def layers_of_stages(sizes: Sizes, stages: int) -> list[int]:
    """Returns the layers of each stage, as the trainer cuts them."""
    last = sizes.root - sizes.embedding + (sizes.embedding if sizes.is_tied else 0)
    one = sizes.in_layers // sizes.layers
    return [len(part) for part in split_layers([one] * sizes.layers, stages, sizes.embedding, last)]


@dataclass(frozen=True)
class Place:
    """A process's place in a pipeline."""

    rank: int
    layers: tuple[int, ...]
    """Layers of each of its stages."""
    is_last: bool
    """True if it has the last stage."""

    def underway(self, schedule: str, ranks: int, microbatches: int) -> tuple[int, ...]:
        """Returns the microbatches at most whose activations each of its stages holds.

        Schedules that split the backward pass, and those that run forward first, may hold all.
        """
        stages = len(self.layers)
        if schedule == "1F1B":
            return (min(microbatches, ranks - self.rank),)
        if schedule == "Interleaved1F1B":  # in turns of as many microbatches as ranks
            first = (stages - 1) * ranks + 2 * (ranks - 1 - self.rank) + 1
            turns = [unit // ranks % stages for unit in range(min(first, stages * microbatches))]
            return tuple(turns.count(stage) for stage in range(stages))
        return (microbatches,) * stages


def part_of_mesh(work: Work, layers: int, root: int, wanted: set[str], place: "Place | None" = None) -> Memory:
    """Adds up what fully_shard holds of some layers and of what is in no layer.

    Over one rank it copies weights to the products' dtype and frees nothing. A pipeline's stages keep their gathered
    weights and whole gradients until the step's last microbatch, and reduce then.

    Args:
        root: elements in no layer.
        wanted: moments that occur here.
        place: in a pipeline.
    """
    sizes = work.sizes
    layout = work.layout
    compute = work.compute
    shards = layout.sharing_states
    elements = root + sizes.in_layers / sizes.layers * layers
    beside = (work.held.total - sizes.total + (work.padding - 1) * work.held.experts) / sizes.layers * layers
    held = (elements + beside) / shards
    states = work.parameter_bytes * held
    resident = states if work.accumulates else 0.0
    # What was reduced last is held until the step's last backward pass.
    is_held = work.accumulates and shards > 1 and layout.pp == 1 and not work.run.config.batch.no_sync
    held_over = FP32 * root if is_held else 0.0
    outside = compute * root
    layer = compute * sizes.layer
    if place is None:
        act = {
            **work.activation_bytes(
                work.activations_in_bf16, compute, waiting=compute * sizes.vocabulary * sizes.width
            ),
            "traveling": 0.0,
        }
    else:
        act = activations_of_stages(work, place)
    # A layer is gathered into one flat tensor and copied out of it; the next one is fetched meanwhile. Its gradients
    # are copied into a flat fp32 tensor, and that of the layer before is still being summed.
    gathered = 3 * layer
    reduced = layer + 2 * FP32 * sizes.layer
    whole = compute * elements - outside if layout.pp > 1 or shards == 1 else 0.0
    gradients = states
    if layout.pp > 1:
        resident = FP32 * elements if work.accumulates or act["has gradients"] else FP32 * sizes.layer
        gathered = 0.0
        reduced = layer
    elif work.accumulates and work.run.config.batch.no_sync:  # until the last backward pass has come to them
        resident = FP32 * elements
        gradients += FP32 * (sizes.root + sizes.layer)
    moments = {
        "loss": (resident, act["loss"], outside + held_over + max(layer + FP32 * sizes.layer, whole)),
        "backward": (resident, act["backward"], outside + held_over + reduced + max(gathered, whole)),
    }
    if place is None:
        moments["first layer"] = (gradients, act["first layer"], outside + gathered + reduced)
        in_embedding = outside + compute * sizes.embedding + FP32 * root + layer
        moments["embedding"] = (gradients, act["embedding"], in_embedding)
    holders = shards * layout.tp
    form = "sharded" if holders > 1 else "stage"  # the matrices that Muon multiplies are whole
    moments = {name: parts for name, parts in moments.items() if name in wanted}
    moments["update"] = (states, work.update_bytes(form, holders, work.whole if layout.tp > 1 else None), layer)
    return at_peak(moments, states, work.optimizer_bytes(held / work.held.total), act["traveling"])


def activations_of_stages(work: Work, place: Place) -> dict[str, float]:
    """Returns what activations and the loss take at each moment, of the microbatches of a pipeline that are underway.

    traveling: hidden states between stages: torch keeps a buffer for every microbatch that arrives and every gradient,
    and a stage what it has sent. What arrives is the first layer's input.
    has gradients: true if a backward pass has ended when most microbatches are underway.
    """
    settings = work.run.config.pipeline
    schedule = STAGE_LAYOUTS[settings.schedule]
    act = work.activations_in_bf16
    microbatches = len(schedule.owners(work.layout.pp)) * settings.microbatches_per_stage
    underway = place.underway(settings.schedule, work.layout.pp, microbatches)
    kept = sum(
        count * (act.before(work.sequences) + layers * act.per_layer(work.sequences))
        for count, layers in zip(underway, place.layers, strict=True)
    )
    hidden = work.compute * work.tokens * work.sizes.width
    leaving = len(underway) - 1 if place.is_last else len(underway)
    arriving = len(underway) - 1 if place.rank == 0 else len(underway)
    traveling = hidden * sum(microbatches + count for count in underway[:leaving])
    traveling += hidden * sum(microbatches - count for count in underway[len(underway) - arriving :])
    if place.is_last:
        kept += underway[-1] * (act.outside(work.sequences) - act.before(work.sequences))
    backward = kept + act.backward(work.sequences)
    return {
        "loss": kept + loss_bytes(work, work.compute, act.hidden(work.sequences)),
        "backward": backward,
        "traveling": traveling,
        "has gradients": any(count < microbatches for count in underway),
    }


def by_deepspeed(work: Work) -> Memory:
    """Adds up what DeepSpeed holds, offloaded or not: zero1 to zero3."""
    settings = work.layout.zero
    processes = work.layout.shards
    stage = settings["stage"]
    sizes = work.sizes
    compute = work.compute
    share = 1 / processes
    waiting = compute * sizes.vocabulary * sizes.width if sizes.is_tied else 0.0
    act = work.activation_bytes(work.activations_in_bf16, compute, waiting)
    # The fp32 masters are a copy even where the weights are fp32.
    states = FP32 * sizes.total * share + work.optimizer_bytes(share)
    weights = compute * sizes.total * (share if stage == 3 else 1.0)
    gradients, buckets = zero_gradients(work, stage, share, settings)
    unreduced = FP32 * sizes.total if work.run.config.batch.no_sync and work.accumulates and stage > 1 else 0.0
    gathered = 0.0
    if stage == 3:  # layers stay gathered up to this number of elements, or until their next use is further away
        gathered = compute * min(sizes.total, max(settings.get("stage3_max_live_parameters", 1e9), 2 * sizes.layer))
    resident = gradients if work.accumulates or stage == 3 or (stage == 1 and compute != FP32) else 0.0
    resident += unreduced
    moments = {
        "loss": (resident, act["loss"], gathered + (buckets if work.accumulates else 0.0)),
        "backward": (resident, act["backward"], gathered + buckets),
        "first layer": (gradients + unreduced, act["first layer"], gathered + buckets),
        "embedding": (gradients + unreduced, compute * sizes.embedding + act["embedding"], gathered + buckets),
    }
    optimizer = settings.get("offload_optimizer") or {}
    parameters = settings.get("offload_param") or {}
    if not (optimizer or parameters):
        updated = work.update_bytes("pieces", processes) + (2 * FP32 * sizes.total * share if stage < 3 else 0.0)
        # The masters belong to the optimizer: they change when it steps.
        return at_peak({**moments, "update": (gradients, updated)}, weights, states)
    # Gradients go to the host as well, where the optimizer needs them.
    moments = {name: (0.0, *parts[1:]) for name, parts in moments.items()}
    on_host = FP32 * sizes.total * share
    on_disk = optimizer.get("device") == "nvme"
    host = (0.0 if on_disk else states) + on_host + (weights if parameters else 0.0)
    disk = states + on_host if on_disk else 0.0
    return at_peak(moments, 0.0 if parameters else weights, 0.0, host=host, disk=disk)


def zero_gradients(work: Work, stage: int, share: float, settings: dict[str, Any]) -> tuple[float, float]:
    """Returns (gradients, buckets in which they are summed) of DeepSpeed, in bytes."""
    sizes = work.sizes
    largest = max(sizes.largest, sizes.layer)
    elements = max(settings.get("reduce_bucket_size", 5e8), 0)
    buckets = 2 if settings.get("overlap_comm") else 1
    if stage == 1 and work.compute != FP32:  # one flat fp32 tensor for all gradients, and those of a layer in bf16
        return FP32 * sizes.total, work.compute * sizes.total
    if stage == 1:
        return FP32 * sizes.total, buckets * FP32 * elements
    if stage == 2:  # in bf16 what arrives of the other processes in fp32 is added to a second partition
        copies = 2 if work.accumulates and work.compute != FP32 else 1
        return copies * FP32 * sizes.total * share, buckets * work.compute * elements + work.compute * largest
    return FP32 * sizes.total * share, FP32 * elements + (work.compute + FP32) * largest


STATES: dict[str, Callable[[Work], Memory]] = {
    "zero1": by_deepspeed,
    "zero2": by_deepspeed,
    "zero3": by_deepspeed,
    "zero3_offload": by_deepspeed,
    "zero3_offload_nvme": by_deepspeed,
}
"""{strategy that is no product of the mesh: how a process holds its states}; one that is not here is `replicated`."""
