"""Predicts the peak memory per process from tensor shapes.

Covers weights, gradients and optimizer state (ZeRO: Rajbhandari et al., arXiv 1910.02054), and each strategy's
overhead. docs/measurements_memory.md compares the predictions with measurements (bench/memory.py).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.distributed.pipelining.schedules import get_schedule_class

from pretrain.config import RunConfig
from pretrain.data.vocabulary import planned_model_config
from pretrain.hardware import memory_bytes
from pretrain.parallel.pipeline import STAGE_LAYOUTS
from pretrain.parallel.pipeline_stages import split_layers
from pretrain.parallel.strategy import Strategy
from pretrain_tools.planning.layouts import Layout, launched_layout
from pretrain_tools.planning.memory import FP32, Memory, PlannedRun, Sizes, Work, at_peak, loss_bytes


def largest_footprint(run: PlannedRun, layout: Layout, sequences: int) -> Memory:
    """Returns the largest footprint of any stage of the run.

    sequences: number of sequences per micro-batch, for data.sequence_length.
    """
    stages = [footprint(stage, layout, rows) for stage, rows in run.stages(sequences)]
    return max(stages, key=lambda memory: memory.total)


def planned_memory(strategy: Strategy, config: RunConfig) -> Memory:
    """Returns the planned memory of a recipe with the running strategy."""
    model_config = planned_model_config(config)
    device = strategy.device
    run = PlannedRun(config, model_config, strategy.precision, device.type, memory_bytes(device))
    return footprint(run, launched_layout(strategy.name), config.batch.sequences_per_micro_batch)


def footprint(run: PlannedRun, layout: Layout, sequences: int) -> Memory:
    """Returns the highest peak memory of any process.

    sequences: number of sequences per micro-batch.
    """
    work = run.work(layout, sequences)
    return in_mesh(work) if layout.is_mesh else STATES.get(layout.name, replicated)(work)


def replicated(work: Work) -> Memory:
    """Computes the memory of a process with a full replica of the model.

    DDP's buckets persist between steps, but only the last micro-step uses them. Earlier micro-steps accumulate
    gradients in separate tensors.
    """
    sizes = work.sizes
    layout = work.layout
    is_ddp = layout.ranks > 1
    weight = work.parameter_bytes
    whole = weight * sizes.total
    resident = whole if is_ddp or work.accumulates else 0.0
    buckets = whole if is_ddp and work.accumulates else 0.0
    # A tied head's gradient stays in memory until the embedding's is computed.
    act = work.activation_bytes(work.activations, weight, waiting=work.head_gradient if sizes.is_tied else 0.0)
    head = 0.0 if sizes.is_tied else weight * sizes.head
    embedding = weight * sizes.embedding
    moments = {
        "loss": (resident, act["loss"]),
        "norm": (resident or head, act["norm"]),
        "backward": (resident or head, act["backward"]),
        "first layer": (resident or whole - embedding - weight * sizes.layer, act["first layer"]),
        "embedding": (resident or whole - embedding, embedding + act["embedding"]),
        "update": (whole, work.update_bytes("whole", layout.ranks)),
    }
    return at_peak(moments, whole, work.optimizer_bytes(), buckets)


def in_mesh(work: Work) -> Memory:
    """Computes the memory with any mesh except DDP's. With a pipeline, returns the maximum over all ranks."""
    sizes = work.sizes
    if work.layout.pp == 1:
        return part_of_mesh(work, sizes.root)
    schedule = STAGE_LAYOUTS[work.run.config.pipeline.schedule]
    owners = schedule.owners(work.layout.pp)
    last = len(owners) - 1
    layers = layers_of_stages(work.whole, len(owners))
    ends = {0: sizes.embedding, last: (sizes.head or sizes.embedding) + sizes.terms}
    found = []
    for rank in range(work.layout.pp):
        stages = [number for number, owner in enumerate(owners) if owner == rank]
        root = sum(ends.get(number, 0) for number in stages)
        if {0, last} <= set(stages) and sizes.is_tied:
            root = sizes.embedding + sizes.terms
        place = Place(rank, tuple(layers[number] for number in stages), last in stages)
        found.append(part_of_mesh(work, root, place))
    return max(found, key=lambda memory: memory.total)


def layers_of_stages(sizes: Sizes, stages: int) -> list[int]:
    """Returns the number of layers in each pipeline stage."""
    last = sizes.root if sizes.is_tied else sizes.root - sizes.embedding
    one = sizes.in_layers // sizes.layers
    return [len(part) for part in split_layers([one] * sizes.layers, stages, sizes.embedding, last)]


@dataclass(frozen=True)
class Place:
    """The pipeline stages of a process."""

    rank: int
    layers: tuple[int, ...]
    """Number of layers in each of the process's stages."""
    is_last: bool
    """True if the process has the last stage."""

    def moments(self, schedule: str, ranks: int, microbatches: int) -> Iterator["Underway"]:
        """Yields the microbatches in flight whenever memory may peak."""
        stages = len(self.layers)
        none = (0,) * stages
        if schedule == "1F1B":
            most = min(microbatches, ranks - self.rank)
            yield Underway((most,), none, most < microbatches, ends_forward=True)
            return
        if schedule not in IN_ORDER:  # all forward passes come first
            yield Underway((microbatches,) * stages, none, has_gradients=False, ends_forward=True)
            return
        underway = list(none)
        waiting = list(none)
        has_gradients = False
        for action in actions_of(schedule, ranks, self.rank, microbatches):
            stage = action.stage_index // ranks
            kind = action.computation_type.value
            underway[stage] += kind == "F"
            waiting[stage] += kind == "I"
            ends_forward = kind == "F" and stage == stages - 1
            yield Underway(tuple(underway), tuple(waiting), has_gradients, ends_forward)
            waiting[stage] -= kind == "W"
            underway[stage] -= kind in ("W", "B")
            has_gradients |= kind in ("W", "B")


IN_ORDER = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
"""Schedules that interleave a process's stages."""


def actions_of(schedule: str, ranks: int, rank: int, microbatches: int) -> list[Any]:
    """Lists a process's actions in torch's schedule. torch has no public function for this."""
    kind = get_schedule_class(schedule)
    stages = len(STAGE_LAYOUTS[schedule].owners(ranks))
    rounds = max(1, microbatches // ranks)
    asked = object.__new__(kind)
    vars(asked).update(pp_group_size=ranks, rank=rank, n_local_stages=stages // ranks, _num_stages=stages)
    vars(asked).update(num_stages=stages, _n_microbatches=microbatches, number_of_rounds=rounds)
    asked.microbatches_per_round = microbatches // rounds
    return [action for action in asked._calculate_single_rank_operations(rank) if action]


@dataclass(frozen=True)
class Underway:
    """Microbatches in flight in a process at one moment, counted per stage."""

    counts: tuple[int, ...]
    """Number of microbatches with activations in memory."""
    waiting: tuple[int, ...]
    """Number of microbatches whose input gradients exist, but whose weight gradients don't exist yet."""
    has_gradients: bool
    """True if weight gradients exist."""
    ends_forward: bool
    """True if the process's last stage may be in a forward pass, which includes the loss on the last rank."""


def part_of_mesh(work: Work, root: int, place: Place | None = None) -> Memory:
    """Computes a process's memory with fully_shard.

    On a single rank, fully_shard copies the weights to the matmuls' dtype and never frees the copies. Pipeline stages
    keep gathered weights and unsharded gradients until the step's last microbatch.

    Args:
        root: number of parameters outside the layers.
        place: None without a pipeline.
    """
    sizes = work.sizes
    layers = sum(place.layers) if place else sizes.layers
    layout = work.layout
    compute = work.compute
    shards = layout.sharing_states
    elements = root + sizes.in_layers / sizes.layers * layers
    beside = (work.held.total - sizes.total + (work.padding - 1) * work.held.experts) / sizes.layers * layers
    held = (elements + beside) / shards
    states = work.parameter_bytes * held
    optimizer = work.optimizer_bytes(held / work.held.total)
    host = 0.0
    if layout.offloads:
        host = 2 * states + optimizer
        states = optimizer = 0.0
    resident = at_loss = states if work.accumulates else 0.0
    # The last reduced gradients stay in memory until the next backward pass reduces its first layer.
    is_held = work.accumulates and shards > 1 and layout.pp == 1 and not work.run.config.batch.no_sync
    held_over = FP32 * root if is_held else 0.0
    outside = compute * root
    layer = compute * sizes.layer
    sent_in_fp8 = sizes.in_fp8 / sizes.layers if work.gathers_fp8 else 0.0
    gathered_layer = layer - (compute - 1) * sent_in_fp8
    if place is None:
        waiting = compute * sizes.vocabulary * sizes.width
        act = work.activation_bytes(work.activations_in_bf16, compute, waiting)
    else:
        act = activations_of_stages(work, place)
    # In the backward pass, the next layer is prefetched into a flat tensor. The gradients of the layer before are
    # reduced from a flat fp32 tensor. By then, that layer's activations are free.
    gathered = 2 * gathered_layer
    flat = FP32 * sizes.layer * (1 + 1 / shards)
    freed = (act["backward"] - act["first layer"]) / (layers - 1) if place is None and layers > 1 else flat
    reduced = max(held_over, flat - freed)
    whole = 0.0
    if layout.pp > 1 or shards == 1:
        whole = compute * elements - outside - (compute - 1) * sent_in_fp8 * layers
    # Before the root's gradients are reduced, only accumulated ones exist.
    gradients = states if work.accumulates else max(0.0, states - work.parameter_bytes * root / shards)
    if layout.pp > 1:
        resident, at_loss = (
            FP32 * (elements if work.accumulates or act[f"gradients {moment}"] else sizes.layer)
            for moment in ("backward", "at the loss")
        )
        gathered = 0.0
        reduced = layer
    elif work.accumulates and work.run.config.batch.no_sync:  # unsharded gradients, until they are reduced
        resident = at_loss = FP32 * elements
        gradients += FP32 * (sizes.root + sizes.layer)
    moments = {
        "loss": (at_loss, act["loss"], outside + held_over + max(2 * gathered_layer, whole)),
        "norm": (resident, act["norm"], outside + held_over + max(gathered_layer, whole)),
        "backward": (resident, act["backward"], outside + reduced + max(gathered, whole)),
    }
    if place is None:
        moments["first layer"] = (gradients, act["first layer"], outside + max(gathered_layer, whole) + flat)
        reduction = FP32 * root + (FP32 * root / shards if shards > 1 else outside)
        in_embedding = compute * sizes.embedding + max(outside + flat, reduction)
        moments["embedding"] = (gradients, act["embedding"], in_embedding)
    elif not place.is_last:
        del moments["loss"], moments["norm"]
    holders = shards * layout.tp
    form = "sharded" if holders > 1 else "stage"  # a stage's matrices aren't sharded
    moments["update"] = (states, work.update_bytes(form, holders, work.whole if layout.tp > 1 else None), layer)
    return at_peak(moments, states, optimizer, act.get("traveling", 0.0), host=host)


def activations_of_stages(work: Work, place: Place) -> dict[str, float]:
    """Returns the activation and loss memory of all microbatches in flight, at each moment.

    traveling: hidden states sent between stages. torch keeps the sent tensors, and a receive buffer for each
        microbatch and each gradient.
    gradients: True if a backward pass has finished before that moment.
    """
    settings = work.run.config.pipeline
    schedule = STAGE_LAYOUTS[settings.schedule]
    act = work.activations_in_bf16
    microbatches = len(schedule.owners(work.layout.pp)) * settings.microbatches_per_stage
    per_layer = act.per_layer(work.sequences) + (1 - work.recomputed) * work.kept_by_exchanges
    # Until the weight gradients are computed, torch keeps the gradient of each matmul's output.
    per_waiting_layer = work.compute * work.tokens * results_of_layer(work)

    def kept_at(moment: Underway) -> float:
        parts = zip(moment.counts, moment.waiting, place.layers, strict=True)
        before = act.before(work.sequences)
        kept = sum(n * (before + layers * per_layer) + late * layers * per_waiting_layer for n, late, layers in parts)
        return kept + (moment.counts[-1] * (act.outside(work.sequences) - before) if place.is_last else 0.0)

    found = list(place.moments(settings.schedule, work.layout.pp, microbatches))
    largest = max(found, key=lambda moment: (kept_at(moment), moment.has_gradients))
    at_loss = max((moment for moment in found if moment.ends_forward), key=kept_at)
    hidden = work.compute * work.tokens * work.sizes.width
    leaving = largest.counts[:-1] if place.is_last else largest.counts
    arriving = largest.counts[1:] if place.rank == 0 else largest.counts
    traveling = sum(microbatches + count for count in leaving) + sum(microbatches - count for count in arriving)
    in_layer = act.in_layer(work.sequences) + work.traveling
    if place.is_last:
        in_layer -= act.outside(work.sequences) - act.before(work.sequences)
    last = act.hidden(work.sequences)
    return {
        "loss": kept_at(at_loss) + last + loss_bytes(work, work.compute, last),
        "norm": kept_at(at_loss) + act.norm(work.sequences),
        "backward": kept_at(largest) + in_layer,
        "traveling": hidden * traveling,
        "gradients at the loss": at_loss.has_gradients,
        "gradients backward": largest.has_gradients,
    }


def results_of_layer(work: Work) -> int:
    """Returns the number of elements per token in the outputs of a layer's matrices and norms."""
    sizes = work.sizes
    shapes = sizes.shapes
    given = 0
    for name, shape in shapes.shapes.items():
        if name in shapes.experts:
            # With ep, each tensor-parallel rank sends its share of the tokens to the experts.
            given += sizes.choices * shape[1] // (work.layout.tp if work.layout.ep > 1 else 1)
        elif len(shape) == 2 and name not in shapes.embeddings | shapes.heads:
            given += shape[1] if name in shapes.transposed else shape[0]
        elif name.endswith("weight") and len(shape) == 1:
            given += shape[0]
    return given // sizes.layers


def by_deepspeed(work: Work) -> Memory:
    """Computes DeepSpeed's memory for zero1 to zero3, with or without offloading."""
    settings = work.layout.zero
    processes = work.layout.shards
    stage = settings["stage"]
    sizes = work.sizes
    compute = work.compute
    share = 1 / processes
    if stage == 1 and compute == FP32 and not work.accumulates:
        stage = 2  # DeepSpeed then keeps no gradients for other ranks' partitions
    waiting = compute * sizes.vocabulary * sizes.width if sizes.is_tied else 0.0
    act = work.activation_bytes(work.activations_in_bf16, compute, waiting)
    # The fp32 master weights are a separate copy even if the weights are fp32.
    states = FP32 * sizes.total * share + work.optimizer_bytes(share)
    weights = compute * sizes.total * (share if stage == 3 else 1.0)
    gradients, buckets, copies = zero_gradients(work, stage, share, settings)
    bucket_size = settings.get("reduce_bucket_size", LARGE_BUCKET)
    # Stages 2 and 3 reduce full buckets during the backward pass, and the rest after it.
    fills_bucket = stage > 1 and sizes.total > bucket_size
    in_pass = buckets + (copies if fills_bucket else 0.0)
    # Stage 1's bf16 gradients are created one by one in the backward pass.
    at_its_start = 0.0 if stage == 1 and not work.accumulates else buckets
    # When the first bucket is full, the layers whose gradients it contains have freed their activations.
    filled = max(0.0, bucket_size - sizes.head) / sizes.in_layers
    at_first_bucket = act["backward"] - min(1.0, filled) * (act["backward"] - act["first layer"])
    unreduced = FP32 * sizes.total if work.run.config.batch.no_sync and work.accumulates and stage > 1 else 0.0
    in_flight = gathered = fetched = 0.0
    if stage == 3:
        in_flight = compute * max(sizes.largest, sizes.layer)
        # Layers stay gathered up to this number of elements.
        gathered = compute * min(sizes.total, max(settings.get("stage3_max_live_parameters", 1e9), 2 * sizes.layer))
        # Prefetched weights are received in one flat tensor and copied out.
        fetched = compute * min(sizes.total, settings.get("stage3_prefetch_bucket_size", 5e7))
    resident = gradients if work.accumulates or stage == 3 or (stage == 1 and compute != FP32) else 0.0
    resident += unreduced
    moments = {
        "first gather": (resident, 0.0, gathered + buckets + fetched),
        "loss": (resident, act["loss"], gathered + (buckets if work.accumulates or stage == 3 else 0.0)),
        "norm": (resident, act["norm"], gathered + at_its_start + in_flight),
        "backward": (resident, act["backward"], gathered + at_its_start + in_flight),
        "first layer": (gradients + unreduced, act["first layer"], gathered + in_pass + in_flight),
        "embedding": (
            gradients + unreduced,
            act["embedding"],
            gathered + in_pass + max(in_flight, compute * sizes.embedding),
        ),
        "last bucket": (gradients + unreduced, 0.0, buckets + copies),
    }
    if fills_bucket:
        moments["first bucket"] = (resident, at_first_bucket, gathered + in_pass + in_flight)
    optimizer = settings.get("offload_optimizer") or {}
    parameters = settings.get("offload_param") or {}
    if not (optimizer or parameters):
        updated = work.update_bytes("pieces", processes) + (2 * FP32 * sizes.total * share if stage < 3 else 0.0)
        # The master weights count as optimizer state.
        return at_peak({**moments, "update": (gradients, updated)}, weights, states)
    # The optimizer runs on the CPU, so gradients are also offloaded.
    moments = {name: (0.0, *parts[1:]) for name, parts in moments.items()}
    accumulated = FP32 * sizes.total * share
    optimized = states + accumulated  # the optimizer has its own copy of the gradients
    disk = 0.0
    if optimizer.get("device") == "nvme":
        disk = optimized
        optimized = swap_buffers(sizes, share, settings)
    host = optimized + accumulated + (weights if parameters else 0.0)
    return at_peak(moments, 0.0 if parameters else weights, 0.0, host=host, disk=disk)


def swap_buffers(sizes: Sizes, share: float, settings: dict[str, Any]) -> float:
    """Returns the bytes of DeepSpeed's buffers in CPU memory for NVMe, each as large as the largest sub-group.

    A sub-group ends with the parameter that reaches `sub_group_size` (default 1e9 elements per process).
    """
    largest = sub_group = 0.0
    for shape in sizes.shapes.shapes.values():
        sub_group += math.prod(shape) * share
        largest = max(largest, sub_group)
        if sub_group >= settings.get("sub_group_size", 1e9):
            sub_group = 0.0
    return FP32 * settings["offload_optimizer"].get("buffer_count", 4) * largest


LARGE_BUCKET = 5e8
"""Number of elements in DeepSpeed's default bucket and in its bf16 optimizer's buckets."""


def zero_gradients(work: Work, stage: int, share: float, settings: dict[str, Any]) -> tuple[float, float, float]:
    """Returns DeepSpeed's (gradients, buckets, bucket copies) in bytes."""
    sizes = work.sizes
    elements = settings.get("reduce_bucket_size", LARGE_BUCKET)
    buckets = 2 if settings.get("overlap_comm") else 1
    if stage == 1 and work.compute != FP32:  # a flat fp32 tensor for all gradients, in addition to the bf16 ones
        return FP32 * sizes.total, work.compute * sizes.total, FP32 * min(LARGE_BUCKET, sizes.total)
    if stage == 1:
        return FP32 * sizes.total, buckets * FP32 * elements, 0.0
    filled = min(elements, sizes.total)
    if stage == 2:
        # In fp32, partitions contain whole parameters, and later micro-steps are reduced into a second partition.
        partition = FP32 * (sizes.total * share + (sizes.largest if work.compute == FP32 else 0))
        partitions = 2 if work.accumulates and work.compute == FP32 else 1
        # One flat copy, plus an fp32 copy in bf16 training.
        copies = filled * (work.compute + FP32 * (work.compute != FP32))
        return partitions * partition, buckets * work.compute * elements, copies
    return FP32 * sizes.total * share, FP32 * elements, FP32 * filled


STATES: dict[str, Callable[[Work], Memory]] = dict.fromkeys(
    ("zero1", "zero2", "zero3", "zero3_offload", "zero3_offload_nvme"), by_deepspeed
)
"""{strategy without a mesh: memory function}. Others use `replicated`."""
