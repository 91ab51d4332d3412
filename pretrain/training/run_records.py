"""What a run's folder says of the run: resolved config, model, strategy, environment; and the start, announced."""

import contextlib
import dataclasses
import importlib.metadata
import json
import subprocess
import uuid
from collections.abc import Iterable
from pathlib import Path

from pretrain.config import RunConfig
from pretrain.data.manifest import MANIFEST_FILE, SPLITS
from pretrain.data.shards import ShardReader
from pretrain.hardware import describe_machine, missing_bf16
from pretrain.model.flops import FORMULA
from pretrain.parallel.strategy import Strategy, device_type
from pretrain.recipe import as_yaml
from pretrain.runs.publishing.card_facts import DATA_FILE, hub_datasets_of
from pretrain.runs.run_folder import read_json
from pretrain.training.cautions import cautions
from pretrain.training.resume import Continuation
from pretrain.training.run_plan import RunPlan
from pretrain.units import count_text

SPLIT_TOTALS = ("tokens", "documents", "text_bytes")
RECORDED_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "safetensors", "tokenizers", "numpy")


def announce(continuation: Continuation, peak: tuple[float | None, str]) -> str:
    """A run starts, its model and optimizer are built: writes the record, the banner, warnings and the first events.

    Args:
        peak: FLOP/s of one process, and where that number is from.

    Returns an id of this start, for commands that are meant for it.
    """
    config, run, state = continuation.config, continuation.run, continuation.state
    strategy, metrics, found = continuation.strategy, continuation.metrics, continuation.found
    if strategy.ranks.is_main and (continuation.is_new or not (config.output / "config.yaml").exists()):
        write_record(config, run, strategy)
    metrics.begin(config, total_steps=run.total_steps, first_step=state.step)
    peak_flops, peak_source = peak
    built = {
        "strategy": f"{strategy.name}, {strategy.ranks.count} processes on {strategy.device.type}",
        "optimizer": strategy.optimizer_built,
        "peak for MFU": f"{peak_flops / 1e12:.3g} TFLOP/s per process ({peak_source})" if peak_flops else peak_source,
    }
    metrics.say(banner(config, run, built))
    for caution in cautions(config, run, continuation.overridden, strategy.device) if strategy.ranks.is_main else ():
        metrics.write("warning", step=state.step, message=caution)
    start_id = uuid.uuid4().hex
    facts = {"start_id": start_id, "parameters": run.parameters, "ranks": strategy.ranks.count, **schedule_record(run)}
    facts |= {"active_parameters": run.active_parameters, "flops_per_token": run.flops_per_token}
    metrics.write("start", step=state.step, **facts)
    if found:
        event = "branch" if continuation.is_new else "resume"
        metrics.write(event, step=state.step, path=found.name, run=str(found.parents[1]))
    return start_id


def write_record(config: RunConfig, derived: RunPlan, strategy: Strategy) -> None:
    """Writes config.yaml, model.json, data.json, strategy.json and environment.json into the run's folder.

    Main rank only.

    Nothing of the process's environment variables goes in.
    """
    folder = config.output
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(as_yaml(config), encoding="utf-8")
    (folder / "model.json").write_text(derived.model_config.to_json_string(), encoding="utf-8")
    write_record_file(
        folder / DATA_FILE, {str(shards): data_record(reader) for shards, reader in derived.batches.readers.items()}
    )
    write_record_file(folder / "strategy.json", strategy.describe())
    write_record_file(folder / "environment.json", environment(strategy))


def data_record(reader: ShardReader) -> dict:
    """What a run keeps of its shards' manifest, for its card and for whoever asks when the shards have gone."""
    manifest = reader.manifest
    splits = {split: dict(zip(SPLIT_TOTALS, manifest.totals(split), strict=True)) for split in SPLITS}
    return {
        "manifest_sha256": manifest.sha256,
        "tokenizer": {"name": manifest.tokenizer_name, "sha256": manifest.tokenizer_sha256},
        "vocabulary_size": manifest.vocabulary_size,
        "end_of_document_id": manifest.end_of_document_id,
        "totals": splits,
        "hub_datasets": hub_datasets_of(read_json(manifest.folder / MANIFEST_FILE)),
        "input_files": len(manifest.source_names),
    }


def environment(strategy: Strategy) -> dict:
    """Versions, commit and machine."""
    packages = package_versions(RECORDED_PACKAGES)
    return {"commit": commit_of(Path(__file__).parent), **describe_machine(strategy.device), "packages": packages}


def package_versions(packages: Iterable[str]) -> dict[str, str]:
    """{package: version} of those that are installed."""
    versions = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def commit_of(folder: Path) -> str | None:
    """The code's commit, with '+changes' where the working tree differs from it; None outside a repository."""
    git = ["git", "-C", str(folder)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+changes" if changed.strip() else "")


def write_record_file(path: Path, values: dict) -> None:
    path.write_text(json.dumps(values, indent=1), encoding="utf-8")


def banner(config: RunConfig, derived: RunPlan, built: dict[str, str]) -> str:
    """The numbers of the run as they are in effect, one per line. `built` adds what only the built objects know."""
    ramp, length = derived.ramp, config.data.sequence_length
    micro = config.batch.sequences_per_micro_batch
    full_micro_steps = ramp.sequences_per_level[-1] // (micro * derived.ranks)
    levels = " -> ".join(f"{level * length:,}" for level in ramp.sequences_per_level)
    weights = "bf16, rounded stochastically" if config.optim.stochastic_rounding else "fp32"
    rows = {
        "model": f"{config.model} ({derived.model_config.model_type}), {parameters_text(derived)}",
        "precision": f"{derived.precision}{precision_reason(config, derived)}, weights and optimizer in {weights}",
        "attention": "; not ".join(
            [
                derived.attention + (", within documents" if config.data.document_mask else ""),
                *derived.attention_passed_over,
            ]
        ),
        "data": " + ".join(
            f"{folder} ({count_text(reader.tokens)} tokens)" for folder, reader in derived.batches.readers.items()
        ),
        "epochs in total": ", ".join(
            f"{folder} {epochs:.2f}" for folder, epochs in derived.batches.epochs_at(derived.total_steps).items()
        ),
        "tokens per step": f"{levels} = {micro} sequences x {length:,} tokens x {derived.ranks} processes x "
        f"{full_micro_steps} micro-steps",
        "budget": f"{derived.total_steps:,} steps, {derived.total_tokens:,} tokens, "
        f"{derived.total_tokens / derived.active_parameters:.1f} per "
        f"{'active ' if derived.active_parameters < derived.parameters else ''}parameter",
        "learning rate": f"{derived.peak_learning_rate:.3g} at the peak, {derived.schedule.name}, "
        f"{derived.schedule.warmup_steps:,} warmup steps",
        "FLOPs per token": f"{derived.flops_per_token:.4g} = {FORMULA}",
        **derived.router_losses.in_words(),
        **built,
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def precision_reason(config: RunConfig, derived: RunPlan) -> str:
    """Why auto is fp32, in brackets; '' for any other precision."""
    if config.precision != "auto" or derived.precision != "fp32":
        return ""
    return f" (auto: {missing_bf16(device_type())})"


def parameters_text(derived: RunPlan) -> str:
    """'125,264,640 parameters'; of a mixture of experts '124,000,000 active of 502,000,000 parameters'."""
    active = f"{derived.active_parameters:,} active of " if derived.active_parameters < derived.parameters else ""
    return f"{active}{derived.parameters:,} parameters"


def schedule_record(derived: RunPlan) -> dict:
    """The schedule and the batch levels, for the start event."""
    return {**dataclasses.asdict(derived.schedule), **dataclasses.asdict(derived.ramp)}
