"""What to change when memory runs out, with what each change would need."""

from pretrain.config import RunConfig
from pretrain.memory.footprint import footprint, layout_of
from pretrain.memory.parts import Memory
from pretrain.model.model_config import load_model_config
from pretrain.units import bytes_text

FURTHER = {
    "single": ("zero3_offload",),
    "ddp": ("zero1", "zero2", "fsdp2", "zero3_offload"),
    "zero1": ("zero2", "fsdp2", "zero3_offload"),
    "zero2": ("fsdp2", "zero3_offload"),
    "fsdp2": ("zero3_offload",),
    "hsdp": ("fsdp2", "zero3_offload"),
    "zero3": ("zero3_offload",),
    "tp": ("fsdp2", "zero3_offload"),
    "pp": ("fsdp2", "zero3_offload"),
    "zero3_offload": ("zero3_offload_nvme",),
}
"""Launcher files that divide or move away more than a strategy does, the fastest first."""


def ladder(
    config: RunConfig,
    strategy_name: str,
    ranks: int,
    gpu_memory_bytes: float,
    *,
    precision: str = "bf16",
    device_type: str = "cuda",
) -> list[str]:
    """What to try, in this order, each with what it would need of a GPU; every rung keeps the ones before it.

    First activation checkpointing, then half the micro-batch down to one sequence, then a strategy that divides more.
    Nothing of it changes results beyond rounding. The list ends with the first rung that fits.

    Args:
        strategy_name: a name in accelerate_configs/.
        gpu_memory_bytes: what the device has.
        precision: the recipe's, with auto resolved.
    """
    model_config = load_model_config(config.model)
    name, sequences = strategy_name, config.batch.sequences_per_micro_batch

    def need(changed: RunConfig) -> Memory:
        layout = layout_of(name, ranks)
        return footprint(
            changed, model_config, name, layout, precision=precision, sequences=sequences, device_type=device_type
        )

    rungs: list[str] = []

    def climb(change: str) -> bool:
        total = need(config).total
        fits = total <= 0.9 * gpu_memory_bytes
        verdict = "fits" if fits else "does not fit"
        rungs.append(f"{change}: needs {bytes_text(total)} of {bytes_text(gpu_memory_bytes)}, {verdict}")
        return fits

    if config.activation_checkpointing == "none":
        config = config.model_copy(update={"activation_checkpointing": "full"})
        if climb("--activation_checkpointing full, a third slower"):
            return rungs
    while sequences > 1:
        sequences //= 2
        if climb(f"--batch.sequences_per_micro_batch {sequences}"):
            return rungs
    for name in FURTHER.get(strategy_name, ()):
        if (ranks > 1 or name == "zero3_offload") and climb(f"accelerate_configs/{name}.yaml"):
            return rungs
    return rungs
