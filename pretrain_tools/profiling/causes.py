"""Rules that diagnose a slow run.

All values are medians over the profiled steps, so that a single outlier doesn't trigger a rule.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pretrain.units import counted
from pretrain_tools.profiling.trace_events import BACKWARD, COMMUNICATION, FORWARD, POINTWISE, StepRecord

DATA_SHARE = 0.10
"""Minimum fraction of a step that a rank spends waiting for data."""
SLOW_SHARE = 0.15
"""Minimum fraction of a step by which a rank's own time exceeds the median of the other ranks."""
SLOW_STEPS = 0.75
"""Minimum fraction of the steps in which a slow rank is that much slower. On a busy machine, any rank can be slower in
half of a few steps."""
COMMUNICATION_SHARE = 0.30
"""Minimum fraction of a step spent in exposed communication."""
BUSY_SHARE = 0.15
"""Minimum fraction of a step in which the main thread was runnable but waited for a core."""
IDLE_SHARE = 0.15
"""Minimum fraction of a step in which a GPU is idle."""
BETWEEN_SHARE = 0.15
"""Minimum fraction of a step spent on logging and synchronizing ranks after the update."""
POINTWISE_SHARE = 0.45
"""Minimum fraction of the GPU's kernel time spent in memory-bound kernels (pointwise, copies)."""
BUSY = "busy machine"
LEAST_SECONDS = 1e-3
"""Minimum time per step for rules whose threshold is a fraction of a step."""


@dataclass(frozen=True)
class Cause:
    """A reason why the run is slow."""

    name: str
    seconds: float
    """Time lost per step, if known."""
    text: str
    """Description, including measured values."""
    remedy: str


def medians(mappings: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns the median of each key's values. Missing keys count as 0."""
    mappings = list(mappings)
    keys = dict.fromkeys(key for mapping in mappings for key in mapping)
    return {key: statistics.median(mapping.get(key, 0.0) for mapping in mappings) for key in keys}


@dataclass(frozen=True)
class RankSteps:
    """One rank's recording."""

    rank: int
    host: str
    device: str
    cores: int
    steps: list[StepRecord]
    sync_lines: list[dict[str, Any]]
    """The most frequent lines that wait for the device, see `SyncLines.found`."""
    compilations: list[dict[str, Any]]
    """Compilations during the recording, see `compilations_since`."""
    retries_per_step: float
    """Number of times torch freed its cache and retried a failed allocation."""
    problems: list[str]
    """Errors of the profiler."""

    def typical(self, name: str) -> float:
        """Returns the median of a `StepRecord` attribute over the steps."""
        return statistics.median(getattr(step, name) for step in self.steps)

    def typical_parts(self, name: str) -> dict[str, float]:
        """Returns the medians of a `StepRecord` dict, such as `phases`, over the steps."""
        return medians(getattr(step, name) for step in self.steps)


@dataclass(frozen=True)
class Evidence:
    """The input to the rules."""

    ranks: list[RankSteps]
    micro_steps: int
    on_device: bool
    compile_mode: str = "none"

    @cached_property
    def seconds(self) -> float:
        """Step time. It is about equal on all ranks, because they wait for the slowest one."""
        return self.median("seconds")

    @cached_property
    def communication(self) -> float:
        """Seconds of communication per step: the minimum blocked time of any rank, summed over phases."""
        if len(self.ranks) == 1:
            return 0.0
        blocked = [rank.typical_parts("blocked_in") for rank in self.ranks]
        # The last rank to enter a collective waits only for the transfer.
        return sum(min(of_rank.get(part, 0.0) for of_rank in blocked) for part in blocked[0])

    def each(self, name: str) -> list[float]:
        """Returns a `StepRecord` attribute's typical value on each rank."""
        return [rank.typical(name) for rank in self.ranks]

    def median(self, name: str) -> float:
        """Returns the median of a `StepRecord` attribute's typical value over the ranks."""
        return statistics.median(self.each(name))

    def waiting(self, rank: RankSteps) -> float:
        """Returns the seconds per step that this rank waits for slower ranks."""
        return max(0.0, rank.typical("blocked") - self.communication)

    def least(self, share: float) -> float:
        """Converts a rule's threshold from a fraction of a step to seconds."""
        return max(share * self.seconds, LEAST_SECONDS)

    def part(self, seconds: float) -> str:
        """Formats seconds relative to the step, such as '38% of the step (61 ms of 161 ms)'."""
        return f"{seconds / self.seconds:.0%} of the step ({milliseconds(seconds)} of {milliseconds(self.seconds)})"


def find_causes(evidence: Evidence) -> list[Cause]:
    """Returns the causes found, costliest first. A busy machine comes first, because it can cause the others."""
    rules = (
        busy_machine, slow_data, slow_rank, slow_communication, recompilations, synchronizing_lines, idle_device,
        slow_between_steps, full_memory, wasteful_kernels,
    )  # fmt: skip
    found = [cause for rule in rules if (cause := rule(evidence)) is not None]
    return sorted(found, key=lambda cause: (cause.name != BUSY, -cause.seconds))


def named(ranks: list[RankSteps]) -> str:
    """Formats ranks, such as 'rank 1', 'ranks 0, 1', or 'ranks 0, 1, 2, 3, 4 and 3 more'."""
    numbers = ", ".join(str(rank.rank) for rank in ranks[:5])
    more = f" and {len(ranks) - 5} more" if len(ranks) > 5 else ""
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {numbers}{more}"


def milliseconds(seconds: float) -> str:
    """Formats a time, such as '31.2 ms' or '1.5 s'."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def busy_machine(evidence: Evidence) -> Cause | None:
    rank = max(evidence.ranks, key=lambda rank: rank.typical("starved"))
    starved = rank.typical("starved")
    if starved < evidence.least(BUSY_SHARE):
        return None
    text = (
        f"the machine is busy: {rank.typical('runnable'):.0f} runnable processes and threads for "
        f"{counted(rank.cores, 'core')} on {rank.host}; {named([rank])} waited "
        f"{milliseconds(starved)} of a {milliseconds(evidence.seconds)} step "
        f"({starved / evidence.seconds:.0%}) for a core"
    )
    remedy = (
        "stop other programs there, or use fewer threads (OMP_NUM_THREADS) or processes for this run; a busy machine "
        "can also cause the findings about ranks and communication below"
    )
    return Cause(BUSY, starved, text, remedy)


def slow_data(evidence: Evidence) -> Cause | None:
    late = [rank for rank in evidence.ranks if rank.typical("data") >= evidence.least(DATA_SHARE)]
    if not late:
        return None
    worst = max(late, key=lambda rank: rank.typical("data"))
    seconds = worst.typical("data")
    text = (
        f"{named(late)} waited for data, up to {evidence.part(seconds)} on {worst.host}; all ranks wait for "
        "the slowest one"
    )
    remedy = "copy the shards to a local disk, or check for other load on the disk or the network"
    return Cause("waiting for data", seconds, text, remedy)


def slow_rank(evidence: Evidence) -> Cause | None:
    if len(evidence.ranks) == 1:
        return None
    rank = max(evidence.ranks, key=lambda rank: rank.typical("own_with_core"))
    others = [other for other in evidence.ranks if other is not rank]
    own = rank.typical("own_with_core")
    usual = statistics.median(other.typical("own_with_core") for other in others)
    # The median excludes this rank. With only two ranks, it would otherwise be half of its own baseline.
    excess = own - usual
    least = evidence.least(SLOW_SHARE)
    if excess < least or slower_steps(rank, others, least) < SLOW_STEPS:
        return None
    usual_idle = statistics.median(other.typical("idle") for other in others)
    how = "computing"
    # True if idle time explains most of the excess.
    if rank.typical("idle") - usual_idle > excess / 2:
        how = "GPU idle" if evidence.on_device else "outside any operator: Python, a lock or a sleep"
    waits = ", ".join(
        f"rank {other.rank} for {milliseconds(evidence.waiting(other))}"
        for other in sorted(others, key=evidence.waiting, reverse=True)[:3]
    )
    text = (
        f"rank {rank.rank} on {rank.host} ({rank.device}) takes {milliseconds(excess)} longer "
        f"per step than the other ranks' median ({milliseconds(own)} instead of {milliseconds(usual)}, "
        f"{excess / evidence.seconds:.0%} of the step), mostly in {phase_of_excess(rank, others)} ({how}); the "
        f"other ranks wait: {waits}"
    )
    remedy = (
        "check that machine for other processes, a hot or throttled GPU (nvidia-smi -q -d PERFORMANCE), or "
        "code that only this rank runs; or exclude the machine"
    )
    return Cause("slow rank", excess, text, remedy)


def slower_steps(rank: RankSteps, others: list[RankSteps], seconds: float) -> float:
    """Returns the fraction of the steps in which the rank's own time exceeds the other ranks' median by `seconds`."""
    same_steps = zip(rank.steps, *(other.steps for other in others), strict=True)
    slower = [
        own.own_with_core - statistics.median(other.own_with_core for other in rest) >= seconds
        for own, *rest in same_steps
    ]
    return sum(slower) / len(slower)


def phase_of_excess(rank: RankSteps, others: list[RankSteps]) -> str:
    """Returns the phase in which the rank's own time exceeds the other ranks' by the most."""

    def own_phases(of: RankSteps) -> dict[str, float]:
        phases = of.typical_parts("phases")
        for part, seconds in of.typical_parts("blocked_in").items():
            phases[part] -= seconds
        return phases

    mine = own_phases(rank)
    theirs = medians(map(own_phases, others))
    return max(mine, key=lambda name: mine[name] - theirs.get(name, 0.0))


def slow_communication(evidence: Evidence) -> Cause | None:
    seconds = evidence.communication
    if seconds < evidence.least(COMMUNICATION_SHARE):
        return None
    text = f"communication takes {evidence.part(seconds)} without overlapping computation, although no rank is late"
    remedy = (
        "use more micro-steps or larger micro-batches between reductions, another strategy (plan.py ranks them), or a "
        "faster link (NCCL_DEBUG=INFO prints the one in use)"
    )
    return Cause(COMMUNICATION, seconds, text, remedy)


def recompilations(evidence: Evidence) -> Cause | None:
    compiling = [rank for rank in evidence.ranks if rank.compilations]
    found = [compiled for rank in compiling for compiled in rank.compilations]
    if not found:
        return None
    steps = len(evidence.ranks[0].steps)
    longest = max(found, key=lambda compiled: compiled["seconds"])
    # All ranks wait for the slowest compilation.
    seconds = max(sum(compiled["seconds"] for compiled in rank.compilations) for rank in compiling) / steps
    reason = f": {longest['reason']}" if longest["reason"] else ""
    text = (
        f"{counted(len(found), 'compilation')} in {counted(steps, 'step')} after the warm-up, "
        f"{milliseconds(seconds)} per step, on {named(compiling)}; the longest was {longest['place']}{reason}"
    )
    remedy = "keep tensor shapes and Python values in the model constant across steps"
    return Cause("recompilation", seconds, text, remedy)


def synchronizing_lines(evidence: Evidence) -> Cause | None:
    """Finds lines of code in the forward or backward pass that wait for the GPU in every micro-step."""
    lines: Counter[tuple[str, str]] = Counter()
    for rank in evidence.ranks:
        for line in rank.sync_lines:
            key = (line["place"], line["phase"])
            lines[key] = max(lines[key], line["count"] / len(rank.steps))
    # It's normal to read a value less often than once per micro-step, for example to log the loss.
    often = [
        f"{place} (in {phase}, {count:,.0f} times per step)"
        for (place, phase), count in lines.most_common()
        if phase in (FORWARD, BACKWARD) and count >= evidence.micro_steps
    ]
    if not often:
        return None
    idle = evidence.median("idle")
    text = (
        f"{counted(len(often), 'line')} with a wait for the device in every micro-step, most often "
        f"{', '.join(often[:5])}; the GPU is idle for {milliseconds(idle)} per step"
    )
    remedy = "keep the value on the device (torch.where, masks), or read it once per step after the update"
    return Cause("synchronizing line", idle, text, remedy)


def idle_device(evidence: Evidence) -> Cause | None:
    """Finds idle time on all GPUs. For a single idle rank, see `slow_rank`."""
    idle = min(evidence.each("idle_in_passes"))
    if not evidence.on_device or idle < evidence.least(IDLE_SHARE):
        return None
    kernels = max(evidence.each("launched"))
    text = f"the GPU is idle for {evidence.part(idle)}: the CPU is too slow to launch {kernels:,.0f} kernels per step"
    remedy = "use compile: regional or full to launch fewer kernels, larger micro-batches, or a faster CPU"
    return Cause("host", idle, text, remedy)


def slow_between_steps(evidence: Evidence) -> Cause | None:
    seconds = max(evidence.each("idle_between"))
    if seconds < evidence.least(BETWEEN_SHARE):
        return None
    text = f"work between steps takes {evidence.part(seconds)}: logging, trackers or synchronization between ranks"
    remedy = "use a larger logging.every_steps, fewer trackers, or a run folder on a faster disk"
    return Cause("between steps", seconds, text, remedy)


def full_memory(evidence: Evidence) -> Cause | None:
    rank = max(evidence.ranks, key=lambda rank: rank.retries_per_step)
    retries = rank.retries_per_step
    if not retries:
        return None
    text = (
        f"the GPU is running out of memory: on {named([rank])}, torch freed its cache and retried an allocation "
        f"{retries:.1f} times per step"
    )
    return Cause("memory", 0.0, text, "use smaller micro-batches, or PYTORCH_ALLOC_CONF=expandable_segments:True")


def kernel_shares(evidence: Evidence) -> dict[str, tuple[float, float]]:
    """Returns {kind: (seconds per step, fraction of the step)}, medians across ranks.

    Includes only exposed communication.
    """
    found = medians(rank.typical_parts("kernels") for rank in evidence.ranks)
    found[COMMUNICATION] = evidence.communication
    return {kind: (seconds, seconds / evidence.seconds) for kind, seconds in found.items()}


def wasteful_kernels(evidence: Evidence) -> Cause | None:
    """Finds memory-bound kernels on GPUs. On a CPU, a small model's step is mostly overhead."""
    if not evidence.on_device:
        return None
    shares = kernel_shares(evidence)
    computed = sum(seconds for kind, (seconds, _) in shares.items() if kind != COMMUNICATION)
    moved = sum(shares.get(kind, (0.0, 0.0))[0] for kind in (POINTWISE, "copies"))
    if computed and moved / computed >= POINTWISE_SHARE and moved >= LEAST_SECONDS:
        text = (
            f"pointwise kernels and copies take {moved / computed:.0%} of the kernel time ({milliseconds(moved)} "
            f"per step) and are limited by memory bandwidth; the run uses compile: {evidence.compile_mode}"
        )
        # Assume that fusion would reduce these kernels to 25% of the work.
        return Cause("kernels", moved - 0.25 * computed, text, "use compile: regional to fuse them")
    return None
