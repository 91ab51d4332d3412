"""Suggests changes after an out-of-memory error, with the memory that each would need.

    python -m pretrain_tools.planning.memory_advice < facts.json

Training runs start this command when they run out of memory. It prints a numbered list.
"""

import json
import sys
from dataclasses import replace

from pretrain.config import MemoryBudget, RunConfig
from pretrain.data.vocabulary import planned_model_config
from pretrain.mesh_sizes import Sizes
from pretrain.parallel.mesh import model_problems
from pretrain.units import bytes_text
from pretrain_tools.planning.footprints import largest_footprint
from pretrain_tools.planning.layouts import Layout, layout
from pretrain_tools.planning.memory import PlannedRun

FURTHER = ("ddp", "zero1", "zero2", "fsdp2", "cp", "zero3_offload")
"""Accelerate configs that shard or offload more and more, fastest first."""
FURTHER_ELSEWHERE = ("fsdp2", "cp", "zero3_offload")
"""Accelerate configs to suggest for strategies that aren't listed in FURTHER."""
USED = 0.9
"""Usable fraction of device memory. The rest is lost to fragmentation."""


def ladder(run: PlannedRun, divided: Layout, gpu_memory_bytes: float) -> list[str]:
    """Returns cumulative changes, with the memory that each needs, up to the first one that fits.

    Suggests activation checkpointing first, then smaller micro-batches, then strategies that shard more. These change
    results only through rounding.

    Args:
        divided: the current layout.
        gpu_memory_bytes: the device's memory.
    """
    sequences = run.config.batch.sequences_per_micro_batch
    ranks = divided.ranks
    further = FURTHER[FURTHER.index(divided.name) + 1 :] if divided.name in FURTHER else FURTHER_ELSEWHERE
    rungs: list[str] = []

    def climb(change: str) -> bool:
        total = largest_footprint(run, divided, sequences).total
        fits = total <= USED * gpu_memory_bytes
        verdict = "fits" if fits else "does not fit"
        rungs.append(f"{change}: needs {bytes_text(total)}, which {verdict} in {bytes_text(gpu_memory_bytes)}")
        return fits

    if run.config.activation_checkpointing == "none":
        is_compiled = run.config.compile in ("auto", "regional")
        part = (".memory_budget 0.5", MemoryBudget(memory_budget=0.5)) if is_compiled else (" 50%", 0.5)
        for option, setting in (part, (" full", "full")):
            run = run.changed(activation_checkpointing=setting)
            slower = run.work(divided, sequences).repeated_flops / 3
            if climb(f"--activation_checkpointing{option}, {slower:.0%} slower"):
                return rungs
    while sequences > 1:
        sequences //= 2
        if climb(f"--batch.sequences_per_micro_batch {sequences}"):
            return rungs
    for name in further:
        if name == "cp" and not can_share(run, ranks):
            continue
        if name == "zero3_offload" and run.device_type == "cpu":  # the states are already in CPU memory
            continue
        divided = layout(name, ranks)
        if (ranks > 1 or name == "zero3_offload") and climb(f"accelerate_configs/{name}.yaml"):
            return rungs
    return rungs


def can_share(run: PlannedRun, parts: int) -> bool:
    """Returns True if sequences can be split across this many processes."""
    divides = parts > 1 and run.config.data.sequence_length % parts == 0
    return divides and not model_problems(run.model_config, Sizes(cp=parts), run.config.pipeline.schedule)


def advise(facts: dict) -> list[str]:
    """Returns the suggestions for a run. facts: see `pretrain.training.starting.advice_on_memory`."""
    config = RunConfig.model_validate(facts["config"])
    model_config = planned_model_config(config)
    run = PlannedRun(config, model_config, facts["precision"], facts["device"], facts["memory_bytes"])
    divided = layout(facts["strategy"], facts["ranks"])
    if facts["sizes"]:  # those of a mesh may differ from the accelerate config's
        launched = Layout.of(Sizes(**facts["sizes"]), name=facts["strategy"])
        divided = replace(launched, offloads=facts["offloads"])
    if given := facts["deepspeed"].get("zero_optimization"):  # the user's JSON may differ from the shipped one
        divided = replace(divided, zero={key: value for key, value in given.items() if value != "auto"})
    return ladder(run, divided, facts["memory_bytes"])


if __name__ == "__main__":
    for number, rung in enumerate(advise(json.load(sys.stdin)), start=1):
        print(f"  {number}. {rung}")
