"""Memory of the process that needs most: a function for each kind of parallelism, all arithmetic on shapes.

Weights, gradients and optimizer state follow from the number of parameters and how they are divided (ZeRO, Rajbhandari
et al., arXiv 1910.02054). docs/performance.md compares the sums with measurements (bench/memory.py).
"""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pretrain.config import RunConfig
from pretrain.data.vocabulary import planned_model_config
from pretrain.parallel.pipeline import STAGE_LAYOUTS, PipelineParallel
from pretrain.parallel.strategy import Strategy
from pretrain_tools.planning.layouts import Layout, running_layout
from pretrain_tools.planning.memory import FP32, Memory, PlannedRun, Work, at_peak, loss_bytes, sizes_of

Footprint = Callable[[PlannedRun, Layout, int], Memory]
"""(run, layout, sequences of a micro-batch) to the memory of the process that needs most."""


def largest_footprint(run: PlannedRun, layout: Layout, sequences: int) -> Memory:
    """Returns the footprint in the stage of the run that needs most.

    sequences: of a micro-batch at data.sequence_length.
    """
    stages = [footprint(stage, layout, rows) for stage, rows in run.stages(sequences)]
    return max(stages, key=lambda memory: memory.total)


def planned_memory(strategy: Strategy, config: RunConfig) -> Memory:
    """Returns what a plan says of this recipe as it runs here."""
    run = PlannedRun(config, planned_model_config(config.model, config.data), strategy.precision, strategy.device.type)
    return footprint(run, running_layout(strategy), config.batch.sequences_per_micro_batch)


def footprint(run: PlannedRun, layout: Layout, sequences: int) -> Memory:
    """Returns the memory of the process that needs most, with so many sequences per micro-batch."""
    return FOOTPRINTS.get(layout.name, of_copies)(run, layout, sequences)


def of_copies(run: PlannedRun, layout: Layout, sequences: int) -> Memory:
    """single, ddp: everything on every process."""
    work = run.work(sequences, layout.micro_batches)
    return replicated(work, work.update_bytes("whole", layout.ranks), is_ddp=layout.ranks > 1)


def replicated(work: Work, update_bytes: float, *, is_ddp: bool) -> Memory:
    """Adds up the memory where everything is on every process.

    DDP's buckets stay between steps. In the last micro-step gradients are written into them; those of the micro-steps
    before it, which are not summed over the processes, have a place of their own.
    """
    sizes = work.sizes
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
        "update": (whole, update_bytes),
    }
    return at_peak(moments, whole, work.optimizer_bytes(), buckets)


def of_shards(run: PlannedRun, layout: Layout, sequences: int) -> Memory:
    """fsdp2, hsdp: 1/shards of everything, and the layers at work whole."""
    work = run.work(sequences, layout.ranks)
    sizes = work.sizes
    compute = work.compute
    share = 1 / layout.per_group
    act = work.activation_bytes(work.activations_in_bf16, compute, compute * sizes.vocabulary * sizes.width)
    gradients = FP32 * sizes.total * share
    resident = gradients if work.accumulates else 0.0
    if work.accumulates and run.config.batch.reduce_once:  # whole, until the last backward pass has come to them
        resident = FP32 * sizes.total
        gradients += FP32 * (sizes.root + sizes.layer)
    root = compute * sizes.root
    layer = compute * sizes.layer
    # A layer is gathered into one flat tensor and copied out of it; the next one is fetched meanwhile. Its gradients
    # are copied into a flat fp32 tensor, and that of the layer before is still being summed.
    gathered = 3 * layer
    reduced = layer + 2 * FP32 * sizes.layer
    moments = {
        "loss": (resident, act["loss"], root + layer + FP32 * sizes.layer),
        "backward": (resident, act["backward"], root + gathered + reduced),
        "first layer": (gradients, act["first layer"], root + gathered + reduced),
        "embedding": (gradients, act["embedding"], root + compute * sizes.embedding + FP32 * sizes.root + layer),
        "update": (FP32 * sizes.total * share, work.update_bytes("sharded", layout.per_group), layer),
    }
    return at_peak(moments, FP32 * sizes.total * share, work.optimizer_bytes(share))


def of_sequence_parts(run: PlannedRun, layout: Layout, sequences: int) -> Memory:
    """cp: as under FSDP2 with a part of each sequence, and the copies that exchanges make."""
    data = run.config.data
    sizes = sizes_of(run.model_config)
    length = data.sequence_length // layout.parts
    config = run.config.model_copy(update={"data": data.model_copy(update={"sequence_length": length})})
    memory = of_shards(replace(run, config=config), layout, sequences)
    bytes_per_layer = sequences * length * (FP32 if run.precision == "fp32" else 2)
    copied = bytes_per_layer * sizes.exchanged_width  # on its way there, or back
    if config.activation_checkpointing == "none":  # each layer keeps its output on both sides of the exchange
        copied += bytes_per_layer * sizes.layers * sizes.width
    return replace(memory, activations=memory.activations + copied) if memory.moment != "update" else memory


def of_slices(run: PlannedRun, layout: Layout, sequences: int) -> Memory:
    """tp: heads and intermediate width divided, all else whole."""
    part = replace(run, model_config=sliced(run.model_config, layout.per_group))
    update_bytes = run.work(sequences, layout.groups).update_bytes("pieces", layout.per_group)
    return replicated(part.work(sequences, layout.groups), update_bytes, is_ddp=False)


def of_sharded_slices(run: PlannedRun, layout: Layout, sequences: int) -> Memory:
    """fsdp_tp: a slice, sharded over the groups."""
    part = replace(run, model_config=sliced(run.model_config, layout.per_group))
    return of_shards(part, replace(layout, ranks=layout.groups, groups=1), sequences)


def sliced(model_config: Any, shares: int) -> Any:
    """Returns the model of one process of tensor parallel: heads and intermediate width divided."""
    part = copy.deepcopy(model_config)
    part.head_dim = getattr(part, "head_dim", None) or part.hidden_size // part.num_attention_heads
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(part, name, None):
            setattr(part, name, max(1, getattr(part, name) // shares))
    return part


def of_experts(run: PlannedRun, layout: Layout, sequences: int) -> Memory:
    """ep: as DDP's, with a part of the experts; and a layer's rows that are underway, if experts share evenly."""
    work = run.work(sequences, layout.ranks)
    part = replace(work, sizes=work.sizes.in_parts(layout.per_group))
    memory = replicated(part, part.update_bytes("whole", layout.ranks), is_ddp=False)
    rows = work.compute * work.tokens * work.sizes.choices * work.sizes.width
    return replace(memory, buffers=memory.buffers + 2 * rows)


def of_stages(run: PlannedRun, layout: Layout, sequences: int) -> Memory:
    """pp: the process that needs most is either the first, with the embedding, or the last, with head and loss."""
    settings = run.config.pipeline
    ranks = layout.per_group
    # A forward pass has one pipeline microbatch.
    work = run.work(sequences, layout.ranks, PipelineParallel.parts_of_micro_batch(run.config))
    sizes = work.sizes
    act = work.activations
    schedule = STAGE_LAYOUTS[settings.schedule]
    stages = len(schedule.owners(ranks))
    microbatches = stages * settings.microbatch_scale
    layers = math.ceil(sizes.layers / ranks)
    kept_layers = sizes.layers / stages * microbatches * schedule.stages_per_rank  # of all microbatches at once
    in_flight = {"1F1B": ranks, "Interleaved1F1B": (3 * ranks - 1) / 2 * schedule.stages_per_rank / 2}
    if settings.schedule in in_flight:
        kept_layers = min(kept_layers, layers * in_flight[settings.schedule])
    kept = act.outside(work.sequences) * microbatches + kept_layers * act.per_layer(work.sequences)
    loss = loss_bytes(work, work.parameter_bytes, act.hidden(work.sequences))
    first = layers * sizes.layer + sizes.embedding
    last = layers * sizes.layer + (sizes.head or sizes.embedding)
    both = last + (sizes.embedding if sizes.head else 0)
    # Hidden states travel in fp32: for every microbatch underway, one that arrives and one that leaves.
    traveling = 2 * FP32 * microbatches * work.tokens * sizes.width
    ends = {
        "backward": (first, kept + act.backward(work.sequences)),
        "loss": (both if schedule.is_v else last, (kept if schedule.is_v else kept / 2) + loss),
    }
    found = []
    for moment, (elements, activations) in ends.items():
        moments = {moment: (FP32 * elements, activations), "update": (FP32 * elements, work.update_bytes("stage"))}
        share = elements / sizes.total
        found.append(at_peak(moments, FP32 * elements, work.optimizer_bytes(share), traveling))
    return max(found, key=lambda memory: memory.total)


def of_zero(run: PlannedRun, layout: Layout, sequences: int) -> Memory:
    """zero1 to zero3: as DeepSpeed holds it, offloaded or not."""
    work = run.work(sequences, layout.ranks)
    settings = layout.zero
    stage = settings["stage"]
    sizes = work.sizes
    compute = work.compute
    share = 1 / layout.ranks
    waiting = compute * sizes.vocabulary * sizes.width if sizes.is_tied else 0.0
    act = work.activation_bytes(work.activations_in_bf16, compute, waiting)
    # The fp32 masters are a copy even where the weights are fp32.
    states = FP32 * sizes.total * share + work.optimizer_bytes(share)
    weights = compute * sizes.total * (share if stage == 3 else 1.0)
    gradients, buckets = zero_gradients(work, stage, share, settings)
    unreduced = FP32 * sizes.total if run.config.batch.reduce_once and work.accumulates and stage > 1 else 0.0
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
        updated = work.update_bytes("pieces", layout.ranks) + (2 * FP32 * sizes.total * share if stage < 3 else 0.0)
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


FOOTPRINTS: dict[str, Footprint] = {
    "fsdp2": of_shards,
    "hsdp": of_shards,
    "zero1": of_zero,
    "zero2": of_zero,
    "zero3": of_zero,
    "zero3_offload": of_zero,
    "zero3_offload_nvme": of_zero,
    "cp": of_sequence_parts,
    "tp": of_slices,
    "fsdp_tp": of_sharded_slices,
    "ep": of_experts,
    "pp": of_stages,
}
"""{strategy: its footprint}; one that is not here is as `of_copies`."""
