"""Memory of the process that needs most: how states are held, and what each dimension of parallelism adds.

`PlannedRun.work` has divided model, sequences and experts; here weights, gradients and optimizer state follow from
their number and from how they are held (ZeRO, Rajbhandari et al., arXiv 1910.02054). All is arithmetic on shapes.
docs/performance.md compares the sums with measurements (bench/memory.py).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pretrain.config import RunConfig
from pretrain.data.vocabulary import planned_model_config
from pretrain.parallel.pipeline import STAGE_LAYOUTS
from pretrain.parallel.strategy import Strategy
from pretrain_tools.planning.layouts import Layout, running_layout
from pretrain_tools.planning.memory import FP32, Memory, PlannedRun, Work, at_peak, loss_bytes


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
    work = run.work(layout, sequences)
    memory = in_stages(work) if layout.pp > 1 else STATES.get(layout.name, replicated)(work)
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
    """Adds up the memory where every process holds all of its slice.

    DDP's buckets stay between steps. In the last micro-step gradients are written into them; those of the micro-steps
    before it, which are not summed over the processes, have a place of their own. tp and ep sum without buckets.
    """
    sizes = work.sizes
    layout = work.layout
    is_ddp = layout.replicas == layout.ranks > 1
    weight = work.parameter_bytes
    whole = weight * sizes.total
    resident = whole if is_ddp or work.accumulates else 0.0
    buckets = whole if is_ddp and work.accumulates else 0.0
    # A tied head's gradient waits for the embedding's; one of its own is added to the gradients at once.
    act = work.activation_bytes(work.activations, weight, waiting=work.head_gradient if sizes.is_tied else 0.0)
    head = 0.0 if sizes.is_tied else weight * sizes.head
    embedding = weight * sizes.embedding
    if layout.tp > 1:  # the matrices that Muon multiplies are whole
        updated = work.update_bytes("pieces", layout.tp, work.whole)
    else:
        updated = work.update_bytes("whole", layout.ranks)
    moments = {
        "loss": (resident, act["loss"]),
        "backward": (resident or head, act["backward"]),
        "first layer": (resident or whole - embedding - weight * sizes.layer, act["first layer"]),
        "embedding": (resident or whole - embedding, embedding + act["embedding"]),
        "update": (whole, updated),
    }
    return at_peak(moments, whole, work.optimizer_bytes(), buckets)


def fully_sharded(work: Work) -> Memory:
    """Adds up an equal shard of everything and whole layers at work: fsdp2, hsdp, cp, fsdp_tp, ep."""
    sizes = work.sizes
    compute = work.compute
    processes = work.layout.sharing_states
    share = 1 / processes
    act = work.activation_bytes(work.activations_in_bf16, compute, compute * sizes.vocabulary * sizes.width)
    states = work.parameter_bytes * work.held.total * share
    gradients = states
    resident = gradients if work.accumulates else 0.0
    if work.accumulates and work.run.config.batch.reduce_once:  # whole, until the last backward pass has come to them
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
        # The matrices that Muon multiplies are whole.
        "update": (states, work.update_bytes("sharded", processes * work.layout.tp, work.whole), layer),
    }
    return at_peak(moments, states, work.optimizer_bytes(share))


def in_stages(work: Work) -> Memory:
    """Adds up the first stage, with the embedding, and the last, with head and loss, and returns the larger: pp."""
    settings = work.run.config.pipeline
    ranks = work.layout.pp
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
    dividing = work.layout.sharing_states * work.layout.tp
    updated = work.update_bytes("sharded" if dividing > 1 else "stage", dividing, work.whole)
    for moment, (stage_elements, activations) in ends.items():
        elements = stage_elements / work.layout.sharing_states
        moments = {moment: (FP32 * elements, activations), "update": (FP32 * elements, updated)}
        share = elements / sizes.total
        found.append(at_peak(moments, FP32 * elements, work.optimizer_bytes(share), traveling))
    return max(found, key=lambda memory: memory.total)


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
    unreduced = FP32 * sizes.total if work.run.config.batch.reduce_once and work.accumulates and stage > 1 else 0.0
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
    "fsdp2": fully_sharded,
    "hsdp": fully_sharded,
    "cp": fully_sharded,
    "fsdp_tp": fully_sharded,
    "zero1": by_deepspeed,
    "zero2": by_deepspeed,
    "zero3": by_deepspeed,
    "zero3_offload": by_deepspeed,
    "zero3_offload_nvme": by_deepspeed,
    "ep": fully_sharded,
    "mesh": fully_sharded,
}
"""{strategy: how a process without a pipeline holds weights, gradients and optimizer state}; one that is not here is
`replicated`."""
