"""Implements train.py --check, which prints warnings, a time estimate for this machine and the launch command."""

import os
import shlex
import shutil
from collections.abc import Sequence

import torch

from pretrain.config import RunConfig
from pretrain.data.shards import ShardReader
from pretrain.errors import InputError, one_line
from pretrain.hardware import memory_bytes, peak_flops
from pretrain.parallel.launcher import launched_strategy
from pretrain.parallel.strategy import device_type
from pretrain.training.run_plan import RunPlan, sequences_of
from pretrain.training.run_records import machine_warnings, start_warnings
from pretrain.units import bytes_text, count_text, counted, duration_text
from pretrain_tools.planning.candidates import storage_of, work_of_run
from pretrain_tools.planning.footprints import largest_footprint
from pretrain_tools.planning.layouts import launched_layout
from pretrain_tools.planning.memory import PlannedRun, sizes_of
from pretrain_tools.planning.memory_advice import ladder
from pretrain_tools.planning.step_time import default_mfu

USEFUL_EPOCHS = 4
"""Number of epochs after which repeated tokens lose value (arXiv 2305.16264)."""
FEWEST_STEPS = 100
MOST_OF_VOCABULARY = 0.5
"""Fraction of parameters in the embedding and head above which --check warns."""
WARNING_PREFIX = "warning: "
CHECK_FLAGS = ("--check", "--verbose")


def judgement(
    config: RunConfig,
    run: RunPlan,
    overridden: frozenset[str],
    validation: dict[str, ShardReader],
    words: Sequence[str],
) -> list[str]:
    """Returns the lines to print after the banner. Measuring this machine takes a second.

    Args:
        validation: result of `open_validation`.
        words: command-line arguments.
    """
    device = torch.device(device_type())
    found = (
        repeated_data(run),
        missing_validation(config, validation),
        heavy_vocabulary(run),
        few_steps(config, run),
        memory_shortage(config, run, device),
        small_disk(config, run),
    )
    about_run = start_warnings(config, run, overridden, device)
    warnings = [*about_run, *machine_warnings(run, device), *filter(None, found)]
    lines = [f"{WARNING_PREFIX}{warning}" for warning in warnings]
    return [*lines, time_here(config, run, device), f"start the run with: {launch_command(config, words)}"]


def warnings_in_words(lines: Sequence[str]) -> str:
    """Summarizes the lines from `judgement`: 'No problems found', or 'No errors, 2 warnings above'."""
    count = sum(line.startswith(WARNING_PREFIX) for line in lines)
    return f"No errors, {counted(count, 'warning')} above" if count else "No problems found"


def repeated_data(run: RunPlan) -> str | None:
    counts = run.batches.epochs_at(run.total_steps)
    epochs = {folder: count for folder, count in counts.items() if round(count, 1) > USEFUL_EPOCHS}
    if not epochs:
        return None
    each = ", ".join(f"{folder} {count:,.1f} times" for folder, count in epochs.items())
    new = sum(reader.tokens for reader in run.batches.readers.values())
    return (
        f"data: the run repeats {each}, because the budget is {count_text(run.total_tokens)} tokens, but the data "
        f"contains only {count_text(new)}. Training for more than {USEFUL_EPOCHS} epochs helps little "
        "(arXiv 2305.16264); add data, or use a smaller budget"
    )


def missing_validation(config: RunConfig, validation: dict[str, ShardReader]) -> str | None:
    if validation or config.data.validation is not None:
        return None
    return (
        "validation: no source has a validation split of at least one sequence, so you won't see overfitting; "
        "prepare the data with --validation_fraction 0.05, or set data.validation"
    )


def heavy_vocabulary(run: RunPlan) -> str | None:
    sizes = sizes_of(run.model_config)
    share = (sizes.embedding + sizes.head) / sizes.total
    if share <= MOST_OF_VOCABULARY:
        return None
    return (
        f"vocabulary: the embedding and head for {sizes.vocabulary:,} IDs are {share:.0%} of "
        f"{count_text(sizes.total)} parameters; use a smaller tokenizer (--train_tokenizer)"
    )


def few_steps(config: RunConfig, run: RunPlan) -> str | None:
    if run.total_steps >= FEWEST_STEPS:
        return None
    return (
        f"batch: with {config.batch.tokens_per_step:,} tokens per step, the run has only {run.total_steps:,} steps, "
        f"including {run.schedule.warmup_steps:,} warmup steps. A model learns little in fewer than {FEWEST_STEPS} "
        "steps; lower batch.tokens_per_step or raise the budget"
    )


def memory_shortage(config: RunConfig, run: RunPlan, device: torch.device) -> str | None:
    """Returns a warning with remedies if a step won't fit in this machine's memory."""
    have = memory_bytes(device)
    planned = PlannedRun(config, run.model_config, run.precision, device.type, have)
    layout = launched_layout(launched_strategy())
    # Tracing takes seconds, and most checked runs fit.
    if fits_by_far(config, run, have):
        return None
    try:
        need = largest_footprint(planned, layout, config.batch.sequences_per_micro_batch).total
    except Exception as error:  # a library's model class may raise anything here
        return f"memory: cannot be estimated for {run.model_config.model_type} ({one_line(error)})"
    if need <= have:
        return None
    remedies = ladder(planned, layout, have)
    return (
        f"memory: with {layout.name}, a step with sequences of {config.data.longest_window.sequence_length:,} tokens "
        f"needs {bytes_text(need)}, but {'this GPU' if device.type == 'cuda' else 'each process here'} has "
        f"{bytes_text(have)}; {'; '.join(remedies)}"
    )


def fits_by_far(config: RunConfig, run: RunPlan, have: int) -> bool:
    """Returns True if even several times the usual memory (arXiv 2205.04198) fits in `have` bytes without sharding."""
    sizes = sizes_of(run.model_config)
    heads = getattr(run.model_config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return False
    length = config.data.longest_window.sequence_length
    per_layer = length * 200 * sizes.width + 3 * heads * length**2
    values = sizes.layers * per_layer + 4 * length * sizes.vocabulary
    return 20 * run.parameters + 4 * config.batch.sequences_per_micro_batch * values <= have


def small_disk(config: RunConfig, run: RunPlan) -> str | None:
    """Returns a warning if checkpoints and the final model won't fit on the disk."""
    storage = storage_of(config, work_of_run(config, run.model_config))
    place = next(folder for folder in (config.output.absolute(), *config.output.absolute().parents) if folder.is_dir())
    # The run folder may not exist yet, so use its nearest existing parent.
    # Existing checkpoints and the final model will be replaced.
    existing = config.output.glob("*/**/*.safetensors")
    free = shutil.disk_usage(place).free + sum(path.stat().st_size for path in existing if path.is_file())
    if storage.total <= free:
        return None
    return (
        f"disk: checkpoints and the final model need up to {bytes_text(storage.total)} ({storage.kept} checkpoints of "
        f"{bytes_text(storage.checkpoint)} and one being written), but {place} has only {bytes_text(free)}; lower "
        "checkpoint.keep_last, raise checkpoint.keep_every, or use a different --output"
    )


def time_here(config: RunConfig, run: RunPlan, device: torch.device) -> str:
    """Estimates the run's time, or reports its time limit."""
    if config.budget.minutes is not None:
        return f"time on this machine: at most {config.budget.minutes:g} min (budget.minutes)"
    peak, source = peak_flops(device, run.precision)
    if peak is None:
        return f"time on this machine: unknown ({source})"
    mfu = default_mfu(run.active_parameters, device.type, peak)
    seconds = run.total_flops / (peak * run.ranks * mfu)
    return (
        f"time on this machine: about {duration_text(seconds)} for {count_text(run.total_tokens)} tokens in "
        f"{counted(run.ranks, 'process')}, at an MFU of {mfu:.0%} of {peak / 1e12:.3g} TFLOP/s ({source})"
    )


def launch_command(config: RunConfig, words: Sequence[str]) -> str:
    """Formats the launch command, for all of this machine's GPUs if they divide the batch evenly."""
    asked = shlex.join(["train.py", *(word for word in words if word not in CHECK_FLAGS)])
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    # The launcher's command line isn't known here.
    if processes > 1:
        return f"the same launcher command, followed by {asked}"
    gpus = torch.cuda.device_count() if device_type() == "cuda" else 0
    try:
        # train.py rejects a batch that can't be divided.
        sequences_of(config, max(1, gpus))
    except InputError:
        gpus = 1
    if gpus <= 1:
        return f"python {asked}"
    return f"accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes {gpus} {asked}"
