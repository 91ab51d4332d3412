"""What to change when memory runs out, with what each change would need."""

from dataclasses import replace

from pretrain.memory.parts import PlannedRun
from pretrain.parallel.context_parallel import model_problem
from pretrain.parallel.registry import STRATEGIES
from pretrain.units import bytes_text

FURTHER = {
    "single": ("zero3_offload",),
    "ddp": ("zero1", "zero2", "fsdp2", "cp", "zero3_offload"),
    "zero1": ("zero2", "fsdp2", "cp", "zero3_offload"),
    "zero2": ("fsdp2", "cp", "zero3_offload"),
    "fsdp2": ("cp", "zero3_offload"),
    "zero3": ("cp", "zero3_offload"),
    "cp": (),
}
"""Launcher files that divide or move away more than a strategy does, the fastest first."""
FURTHER_ELSEWHERE = ("fsdp2", "cp", "zero3_offload")
"""The same for all others."""
MOST_PARTS = 64
"""Processes of a sequence that are advised."""


def ladder(run: PlannedRun, strategy_name: str, ranks: int, gpu_memory_bytes: float) -> list[str]:
    """What to try, in this order, each with what it would need of a GPU; every rung keeps the ones before it.

    First activation checkpointing, then half the micro-batch down to one sequence, then a strategy that divides more.
    Nothing of it changes results beyond rounding. The list ends with the first rung that fits.

    Args:
        strategy_name: a name in accelerate_configs/.
        gpu_memory_bytes: what the device has.
    """
    name, sequences = strategy_name, run.config.batch.sequences_per_micro_batch
    rungs: list[str] = []

    def climb(change: str) -> bool:
        total = STRATEGIES[name].largest_footprint(run, STRATEGIES[name].layout(name, ranks), sequences).total
        fits = total <= 0.9 * gpu_memory_bytes
        verdict = "fits" if fits else "does not fit"
        rungs.append(f"{change}: needs {bytes_text(total)} of {bytes_text(gpu_memory_bytes)}, {verdict}")
        return fits

    if run.config.activation_checkpointing == "none":
        run = replace(run, config=run.config.model_copy(update={"activation_checkpointing": "full"}))
        if climb("--activation_checkpointing full, a third slower"):
            return rungs
    while sequences > 1:
        sequences //= 2
        if climb(f"--batch.sequences_per_micro_batch {sequences}"):
            return rungs
    for name in FURTHER.get(strategy_name, FURTHER_ELSEWHERE):
        if name == "cp" and not can_share(run, ranks):
            continue
        if name == "zero3_offload" and run.device_type == "cpu":  # it would move things to where they are
            continue
        if (ranks > 1 or name == "zero3_offload") and climb(f"accelerate_configs/{name}.yaml"):
            return rungs
    return rungs


def can_share(run: PlannedRun, parts: int) -> bool:
    """Whether so many processes can each hold a part of every sequence."""
    divides = parts > 1 and run.config.data.sequence_length % parts == 0
    return divides and model_problem(run.model_config, parts) is None


def context_advice(run: PlannedRun, gpu_memory_bytes: float) -> str | None:
    """How many processes would have to share each sequence, alone in its micro-batch; None if none do.

    Args:
        gpu_memory_bytes: as of `ladder`.
    """
    strategy, full = STRATEGIES["cp"], {"activation_checkpointing": "full"}
    again = replace(run, config=run.config.model_copy(update=full))
    for parts in (2**n for n in range(1, MOST_PARTS.bit_length())):
        for planned, words in ((run, ""), (again, " and --activation_checkpointing full")):
            total = strategy.largest_footprint(planned, strategy.layout("cp", parts), 1).total
            if can_share(planned, parts) and total <= 0.9 * gpu_memory_bytes:
                micro_batch = "--batch.sequences_per_micro_batch 1"
                what = (
                    f"accelerate_configs/cp.yaml, {parts} processes sharing each sequence, with {micro_batch}{words}"
                )
                return f"{what}: needs {bytes_text(total)} of each one's {bytes_text(gpu_memory_bytes)}, fits"
    return None
