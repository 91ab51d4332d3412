"""What each strategy makes a process hold: the arithmetic of pretrain/memory/parts.py, one function per strategy.

n processes share what a strategy divides. The moments compared are the loss (all activations and the logits of a
chunk), the backward pass of the last layer, that of the first (all gradients are there by then), that of the
embedding, and the update.
"""

import copy
import functools
import json
import math
from dataclasses import dataclass
from typing import Any

from pretrain.config import RunConfig
from pretrain.files import ROOT
from pretrain.memory.parts import FP32, Memory, Work, at_peak, loss_bytes, optimizer_bytes, update_bytes, work_of
from pretrain.parallel.pipeline import STAGE_LAYOUTS

DEEPSPEED_FILES = {
    "zero1": "ds_configs/zero1.json",
    "zero2": "ds_configs/zero2.json",
    "zero3": "ds_configs/zero3.json",
    "zero3_offload": "ds_configs/zero3_offload_cpu.json",
    "zero3_offload_nvme": "ds_configs/zero3_offload_nvme.json",
}
"""Launcher files that run DeepSpeed, and the JSON that each names."""
LAUNCHER_FILES = ("single", "ddp", "fsdp2", "zero1", "zero2", "zero3", "hsdp", "tp", "pp", *DEEPSPEED_FILES)
LAUNCHER_FILES = tuple(dict.fromkeys(LAUNCHER_FILES))
"""Names in accelerate_configs/, simplest first."""


@dataclass(frozen=True)
class Layout:
    """How the processes of a strategy divide a run."""

    ranks: int
    groups: int = 1
    """Of processes that hold one model together, for hsdp, tp and pp: the others hold copies."""

    @property
    def per_group(self) -> int:
        return self.ranks // self.groups


def layout_of(name: str, ranks: int, machines: int = 1) -> Layout:
    """hsdp: one group per machine (2 on one machine). tp: the processes of a machine. Else all processes together."""
    if name == "hsdp":
        return Layout(ranks, machines if machines > 1 else min(2, ranks))
    return Layout(ranks, machines if name == "tp" else 1)


def data_ranks(name: str, layout: Layout) -> int:
    """By how many micro-batches a micro-step is larger than one: pipelines take one for each of their processes."""
    return layout.groups if name == "tp" else layout.ranks


def footprint(
    config: RunConfig,
    model_config: Any,
    name: str,
    layout: Layout,
    *,
    precision: str,
    sequences: int,
    device_type: str = "cuda",
    deepspeed: dict[str, Any] | None = None,
) -> Memory:
    """Memory of the process that needs most.

    Args:
        name: one of LAUNCHER_FILES.
        precision: the recipe's, with auto resolved.
        sequences: batch.sequences_per_micro_batch.
        device_type: cuda or cpu.
        deepspeed: zero_optimization of the DeepSpeed JSON, where it is not the shipped one.
    """
    length = config.data.sequence_length
    micro_steps = max(1, config.batch.tokens_per_step // (sequences * length * data_ranks(name, layout)))
    make_work = functools.partial(work_of, config, precision=precision, device_type=device_type)
    if name == "pp":
        settings, ranks = config.pipeline, layout.per_group
        microbatches = STAGE_LAYOUTS[settings.schedule].stages_per_rank * settings.microbatch_scale
        rows = max(1, sequences // microbatches)
        work = make_work(model_config, sequences=rows, micro_steps=micro_steps)
        return pipeline(work, ranks, settings.schedule, settings.microbatch_scale)
    if name == "tp":
        model_config = sliced(model_config, layout.per_group)
    work = make_work(model_config, sequences=sequences, micro_steps=micro_steps)
    if name in ("single", "ddp", "tp"):
        return replicated(work, is_ddp=name == "ddp" and layout.ranks > 1)
    if name in ("fsdp2", "hsdp"):
        return fully_sharded(work, layout.per_group)
    if deepspeed is None:
        deepspeed = json.loads((ROOT / DEEPSPEED_FILES[name]).read_text(encoding="utf-8"))["zero_optimization"]
    return zero(work, int(name[4]), layout.ranks, deepspeed)


def sliced(model_config: Any, shares: int) -> Any:
    """The model of one process of tensor parallel: heads and intermediate width divided."""
    part = copy.deepcopy(model_config)
    part.head_dim = getattr(part, "head_dim", None) or part.hidden_size // part.num_attention_heads
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(part, name, None):
            setattr(part, name, max(1, getattr(part, name) // shares))
    return part


def replicated(work: Work, *, is_ddp: bool) -> Memory:
    """single and ddp: everything on every process.

    DDP's buckets stay between steps. In the last micro-step gradients are written into them; those of the micro-steps
    before it, which are not summed over the processes, have a place of their own.
    """
    sizes, act = work.sizes, work.activations
    weight = work.parameter_bytes
    parameters, optimizer = weight * sizes.total, optimizer_bytes(work)
    whole = weight * sizes.total
    resident = whole if is_ddp or work.accumulates else 0.0
    buckets = whole if is_ddp and work.accumulates else 0.0
    hidden = act.hidden(work.sequences)
    loss = loss_bytes(work, weight, hidden)
    kept = act.kept(sizes.layers, work.sequences)
    # A tied head's gradient waits for the embedding's; one of its own is added to the gradients at once.
    waiting = loss.head_gradient if sizes.is_tied else 0.0
    head = 0.0 if sizes.is_tied else weight * sizes.head
    embedding = weight * sizes.embedding
    first = act.kept(1, work.sequences) + hidden + act.backward(work.sequences)
    moments = {
        "loss": (resident, kept + loss.kept + loss.working),
        "backward": (resident or head, kept + waiting + hidden + act.backward(work.sequences)),
        "first layer": (resident or whole - embedding - weight * sizes.layer, first + waiting),
        "embedding": (resident or whole - embedding, embedding + waiting + hidden),
        "update": (whole, update_bytes(work)),
    }
    return at_peak(moments, parameters, optimizer, buckets)


def fully_sharded(work: Work, shards: int) -> Memory:
    """fsdp2 and hsdp: 1/shards of everything, and the layers at work whole."""
    sizes, act, compute = work.sizes, work.activations_in_bf16, work.compute
    share = 1 / shards
    hidden = act.hidden(work.sequences)
    loss = loss_bytes(work, compute, hidden)
    kept = act.kept(sizes.layers, work.sequences)
    gradients = FP32 * sizes.total * share
    resident = gradients if work.accumulates else 0.0
    root, layer = compute * sizes.root, compute * sizes.layer
    # A layer is gathered into one flat tensor and copied out of it; the next one is fetched meanwhile. Its gradients
    # are copied into a flat fp32 tensor, and that of the layer before is still being summed over the processes.
    gathered = 3 * layer
    reduced = layer + 2 * FP32 * sizes.layer
    waiting = compute * sizes.vocabulary * sizes.width
    first = act.kept(1, work.sequences) + waiting + hidden + act.backward(work.sequences)
    moments = {
        "loss": (resident, kept + loss.kept + loss.working, root + layer + FP32 * sizes.layer),
        "backward": (resident, kept + waiting + hidden + act.backward(work.sequences), root + gathered + reduced),
        "first layer": (gradients, first, root + gathered + reduced),
        "embedding": (gradients, waiting + hidden, root + compute * sizes.embedding + FP32 * sizes.root + layer),
        "update": (gradients, update_bytes(work), layer),
    }
    return at_peak(moments, FP32 * sizes.total * share, optimizer_bytes(work, share))


def zero(work: Work, stage: int, shares: int, settings: dict[str, Any]) -> Memory:
    """ZeRO 1, 2 and 3 as DeepSpeed holds them, offloaded or not.

    Args:
        shares: processes over which the states are divided.
        settings: zero_optimization of the DeepSpeed JSON.
    """
    sizes, act, compute = work.sizes, work.activations_in_bf16, work.compute
    share = 1 / shares
    hidden = act.hidden(work.sequences)
    loss = loss_bytes(work, compute, hidden)
    kept = act.kept(sizes.layers, work.sequences)
    waiting = compute * sizes.vocabulary * sizes.width if sizes.is_tied else 0.0
    # The fp32 masters are a copy even where the weights are fp32.
    states = FP32 * sizes.total * share + optimizer_bytes(work, share)
    weights = compute * sizes.total * (share if stage == 3 else 1.0)
    gradients, buckets = zero_gradients(work, stage, share, settings)
    first = act.kept(1, work.sequences) + waiting + hidden + act.backward(work.sequences)
    gathered = 0.0
    if stage == 3:  # layers stay gathered up to this number of elements, or until their next use is further away
        gathered = compute * min(sizes.total, max(settings.get("stage3_max_live_parameters", 1e9), 2 * sizes.layer))
    resident = gradients if work.accumulates or stage == 3 or (stage == 1 and compute != FP32) else 0.0
    moments = {
        "loss": (resident, kept + loss.kept + loss.working, gathered + (buckets if work.accumulates else 0.0)),
        "backward": (resident, kept + waiting + hidden + act.backward(work.sequences), gathered + buckets),
        "first layer": (gradients, first, gathered + buckets),
        "embedding": (gradients, waiting + compute * sizes.embedding + hidden, gathered + buckets),
        "update": (gradients, 2 * FP32 * sizes.total * share if stage < 3 else 0.0),
    }
    if not (settings.get("offload_optimizer") or settings.get("offload_param")):
        # The masters belong to the optimizer: they change when it steps.
        return at_peak(moments, weights, states)
    return offloaded(moments, weights, states, FP32 * sizes.total * share, settings)


def zero_gradients(work: Work, stage: int, share: float, settings: dict[str, Any]) -> tuple[float, float]:
    """(gradients, buckets in which they are summed) of DeepSpeed, in bytes."""
    sizes = work.sizes
    largest = max((sizes.largest, sizes.layer))
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


def offloaded(
    moments: dict[str, tuple[float, ...]], weights: float, states: float, gradients: float, settings: dict[str, Any]
) -> Memory:
    """Optimizer state, its gradients and, where asked for, weights in the machine's memory or on its disk."""
    optimizer, parameters = settings.get("offload_optimizer") or {}, settings.get("offload_param") or {}
    on_disk = optimizer.get("device") == "nvme"
    host = (0.0 if on_disk else states) + gradients + (weights if parameters else 0.0)
    moments = {name: (0.0, *parts[1:]) for name, parts in moments.items() if name != "update"}
    return at_peak(
        moments, 0.0 if parameters else weights, 0.0, host=host, disk=states + gradients if on_disk else 0.0
    )


def pipeline(work: Work, ranks: int, schedule: str, microbatch_scale: int) -> Memory:
    """pp: the process that needs most, either the first, with the embedding, or the last, with head and loss.

    `work` is that of one pipeline microbatch, with the whole model.
    """
    sizes, act, layout = work.sizes, work.activations, STAGE_LAYOUTS[schedule]
    stages = len(layout.owners(ranks))
    microbatches = stages * microbatch_scale
    layers = math.ceil(sizes.layers / ranks)
    whole = sizes.layers / stages * microbatches * layout.stages_per_rank  # layers x microbatches, all kept at once
    in_flight = {"1F1B": ranks, "Interleaved1F1B": (3 * ranks - 1) / 2 * layout.stages_per_rank / 2}.get(schedule)
    kept_layers = whole if in_flight is None else min(whole, layers * in_flight)
    kept = act.outside(work.sequences) * microbatches + kept_layers * act.per_layer(work.sequences)
    loss = loss_bytes(work, work.parameter_bytes, act.hidden(work.sequences))
    first = layers * sizes.layer + sizes.embedding
    last = layers * sizes.layer + (sizes.head or sizes.embedding)
    both = last + (sizes.embedding if sizes.head else 0)
    # Hidden states travel in fp32: what arrives and what leaves, for every microbatch under way.
    travelling = 2 * FP32 * microbatches * work.tokens * sizes.width
    ends = {
        "backward": (first, kept + act.backward(work.sequences)),
        "loss": (both if layout.is_v else last, (kept if layout.is_v else kept / 2) + loss.kept + loss.working),
    }
    found = []
    for moment, (elements, activations) in ends.items():
        moments = {moment: (FP32 * elements, activations), "update": (FP32 * elements, update_bytes(work))}
        share = elements / sizes.total
        found.append(at_peak(moments, FP32 * elements, optimizer_bytes(work, share), travelling))
    return max(found, key=lambda memory: memory.total)
