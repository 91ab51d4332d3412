"""Trains a recipe for a hundred steps and prints pass or fail for each check."""

import math
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path

from pretrain.config import RunConfig
from pretrain.errors import EXIT_INTERRUPTED, InputError
from pretrain.parallel.strategy import Strategy, device_type
from pretrain.runs.event_log import read_metrics
from pretrain.runs.run_folder import METRICS_FILE, checkpoint_damage, checkpoint_folders, checkpoint_name
from pretrain.training.run_plan import derive
from pretrain_tools.planning.footprints import planned_memory
from pretrain_tools.planning.width_check import width_verdict

SMOKE_STEPS = 100
FAILED = 1
MEMORY_TOLERANCE = 0.15
SMALL_BYTES = 32e6
"""Difference in memory, in bytes, that always passes."""
FALLS = 0.99
"""Maximum ratio of final to initial loss when training from scratch."""
STAYS = 1.05
"""Maximum ratio of final to initial loss when continuing from pretrained weights."""


def smoke_test(config: RunConfig, strategy: Strategy, train: Callable[[RunConfig, int], int]) -> int:
    """Trains the recipe's first steps, resumes from the middle, and prints pass or fail for each check.

    Runs on all ranks and overwrites <output>-smoke. Returns 0 if all checks pass, 1 if one fails, or training's exit
    status.

    train: trains a config for a number of steps and returns the exit status.
    """
    run = derive(config, strategy.data_ranks * strategy.micro_batches_per_call)
    steps = min(SMOKE_STEPS, run.total_steps)
    if steps < 2:
        raise InputError("--smoke: budget: a run of one step can't resume from its middle; use at least 2 steps")
    half = (steps + 1) // 2  # rounded up, so that a checkpoint falls only there and at the end
    folder = config.output.with_name(f"{config.output.name}-smoke")
    if problem := strategy.ranks.gather(folder_problem(folder))[0]:
        raise InputError(problem)
    config = short_config(config, half).model_copy(update={"output": folder})
    if strategy.ranks.is_main:
        shutil.rmtree(folder, ignore_errors=True)
    strategy.ranks.barrier()
    if code := train(config, steps):
        return code
    # The second run appends to the same log.
    first = read_metrics(folder)
    exports = [event for event in first if event["event"] == "export"]
    if not strategy.ranks.gather(exports)[0]:  # a signal interrupted the check of final/
        return EXIT_INTERRUPTED
    if strategy.ranks.is_main:
        # Remove the last checkpoint and final/, so that the run resumes from the middle.
        (folder / "checkpoints" / checkpoint_name(steps)).rename(folder / "first-end")
        shutil.rmtree(folder / "final")
    strategy.ranks.barrier()
    if code := train(config, steps):
        return code
    verdicts = {}
    if strategy.ranks.is_main:
        again = read_metrics(folder)[len(first) :]
        trained = [event for event in first if event["event"] == "train"]
        verdicts = {
            "the loss falls": loss_verdict(trained, FALLS if config.init == "scratch" else STAYS),
            "gradient norms": norm_verdict(first, config.guard.alert_grad_norm),
            "learning rate": rate_verdict(trained, run.learning_rate),
            "resumed exactly": resume_verdict(trained, again, half),
            "checkpoint": "; ".join(checkpoint_damage(folder / "checkpoints" / checkpoint_name(steps))) or None,
            "model folder": "; ".join(exports[-1]["problems"]) or None,
        }
        if strategy.device.type == "cuda":  # only the CUDA allocator counts bytes
            measured = max(event["peak_memory_bytes"] for event in trained)
            verdicts["memory as planned"] = memory_problem(measured, planned_memory(strategy, config).total)
        if config.optim.parametrization == "mup":
            peak = config.optim.learning_rate or run.peak_learning_rate
            verdicts["changes independent of width"] = width_verdict(config.optim, run.model_config, peak)
        for name, problem in verdicts.items():
            print(f"{'FAIL' if problem else 'ok':<5} {name}{f': {problem}' if problem else ''}", flush=True)
    # All ranks must return the same status, but only the main rank has verdicts.
    return FAILED if strategy.ranks.gather(any(verdicts.values()))[0] else 0


def folder_problem(folder: Path) -> str | None:
    """Returns why a folder can't be overwritten: it isn't the output of an earlier smoke test."""
    is_empty = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    is_short_run = (folder / METRICS_FILE).exists() and max(checkpoint_folders(folder), default=0) <= SMOKE_STEPS
    if is_empty or is_short_run:
        return None
    return f"--smoke: would overwrite {folder}, which isn't from a smoke test; rename it, or use another --output"


def short_config(config: RunConfig, every: int) -> RunConfig:
    """Returns a recipe for a short test, without trackers, evaluations and uploads.

    every: number of steps between checkpoints and validations.
    """
    intervals = {"every_steps": every, "every_tokens": None}
    sections = {
        "checkpoint": {**intervals, "keep_last": 9, "save_final": True, "stop_at_step": None, "mirror": None},
        "validation": {**intervals, "sequences": min(config.validation.sequences, 64)},
        "budget": {"minutes": None},
        "benchmarks": {"every_steps": None, "every_tokens": None},
        "logging": {"every_steps": 1},
        "hub": {"repository": None},
    }
    update = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update={**update, "branch_from": None, "interval_scale": 1.0, "trackers": []})


def loss_verdict(trained: list[dict], most: float) -> str | None:
    """Compares the mean losses in the first and the last tenth of the steps."""
    losses = [event["loss"] or math.inf for event in trained]
    few = max(1, len(losses) // 10)
    begin = statistics.fmean(losses[:few])
    end = statistics.fmean(losses[-few:])
    return None if end < most * begin else f"started at {begin:.4f} and ended at {end:.4f}"


def norm_verdict(events: list[dict], most: float) -> str | None:
    skipped = sum(event["event"] == "skip" for event in events)
    norms = [event["grad_norm"] for event in events if event["event"] == "train"]
    if skipped or None in norms:
        return f"{skipped or norms.count(None)} steps had non-finite gradients"
    return None if max(norms) <= most else f"up to {max(norms):.3g}, above the limit of {most:g}"


def rate_verdict(trained: list[dict], planned: Callable[[int], float]) -> str | None:
    wrong = [event for event in trained if not math.isclose(event["learning_rate"], planned(event["step"] - 1))]
    return f"{wrong[0]['learning_rate']} at step {wrong[0]['step']}" if wrong else None


def resume_verdict(trained: list[dict], again: list[dict], half: int) -> str | None:
    """Compares losses bit by bit. On GPUs, small differences due to atomic additions are only reported."""
    whole = {event["step"]: event["loss"] for event in trained if event["step"] > half}
    resumed = {event["step"]: event["loss"] for event in again if event["event"] == "train"}
    if set(whole) != set(resumed):
        return f"resumed at step {min(resumed, default=None)} instead of {half + 1}"
    largest = max(abs(whole[step] - resumed[step]) for step in whole) if whole else 0.0
    if largest and device_type() == "cuda" and largest < 1e-3:
        print(
            f"      losses differ by {largest:.1e} after resuming, because the summation order in GPU kernels varies"
        )
        return None
    return f"losses differ by up to {largest:.2e}" if largest else None


def memory_problem(measured: float, planned: float) -> str | None:
    """Compares peak memory with plan.py's prediction. Using less memory than planned passes."""
    if measured - planned <= max(MEMORY_TOLERANCE * planned, SMALL_BYTES):
        return None
    return (
        f"peak memory was {measured / 1e9:.3g} GB, but the plan predicted {planned / 1e9:.3g} GB; for this recipe, "
        "use the measured value"
    )
