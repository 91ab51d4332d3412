"""Records a run's config, model, data and environment in its folder, and prints the startup banner and warnings."""

import contextlib
import dataclasses
import importlib.metadata
import json
import shutil
import subprocess
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from pretrain.config import RunConfig
from pretrain.data.data_record import DATA_FILE, contamination_of, is_hub_id, preparation_of
from pretrain.data.manifest import MANIFEST_FILE, SPLITS, counts_in
from pretrain.data.shards import ShardReader
from pretrain.data.vocabulary import vocabulary_text
from pretrain.energy import EnergyMeter
from pretrain.files import IS_CHECKOUT, ROOT, write_durably
from pretrain.hardware import (
    DTYPES,
    describe_machine,
    device_in_words,
    emulation_of_bf16,
    environment_warnings,
    missing_bf16,
)
from pretrain.model import bf16_cpu_attention
from pretrain.model.attention import classes_in_rows, without_rows
from pretrain.model.build import FORMULA
from pretrain.model.model_config import padded_vocabulary, rope_in_words
from pretrain.optim.optimizers import OPTIMIZERS
from pretrain.parallel.strategy import device_type
from pretrain.recipe import as_yaml
from pretrain.registry import LOADED_CODE, digest_of
from pretrain.runs.run_folder import read_json
from pretrain.training.run import Run
from pretrain.training.run_plan import ModelPlan, RunPlan
from pretrain.units import count_text, counted, table

RECORDED_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "safetensors", "tokenizers", "numpy")

FAR = 5.0
"""Maximum ratio between the learning rate and auto's before a warning."""
FAR_FOR_ANOTHER_OPTIMIZER = 2.0
"""The same, if the command line changes the optimizer but not the learning rate."""
WASTE = 0.01
"""Maximum fraction of parameters in unused vocabulary rows before a warning."""


def announce(run: Run, peak_source: str) -> str:
    """Writes the record files, the banner, warnings and the first events. Returns the ID of this start.

    Args:
        peak_source: source of `run.peak_flops`, for the banner.
    """
    config = run.config
    plan = run.plan
    strategy = run.strategy
    log = run.log
    step = run.state.step
    is_main = strategy.ranks.is_main
    if is_main:
        write_records(run)
        record_sources(run)
        copy_extensions(config)
    meter = EnergyMeter(strategy.device, strategy.ranks.count) if is_main else None
    energy = meter.how if meter else None
    sizes = {
        "parameters": plan.parameters,
        "active_parameters": plan.active_parameters,
        "flops_per_token": plan.stages[0].flops_per_token,
        "ranks": strategy.ranks.count,
    }
    log.begin(config, meter=meter, facts={**sizes, "total_steps": plan.total_steps})
    peak = f"{run.peak_flops / 1e12:.3g} TFLOP/s per process ({peak_source})" if run.peak_flops else peak_source
    # With dispatch_batches, only the main rank opens the shards.
    packings = plan.batches.packings if is_main else {}
    built = {
        "strategy": f"{strategy.name}, {counted(strategy.ranks.count, 'process')} on {strategy.device.type}",
        "optimizer": strategy.optimizer_built,
        "peak for MFU": peak,
        "energy": energy,
        **{
            f"best fit, {plan.batches.folders[number]}, {length:,}": f"{packing.dropped_share():.2%} of tokens dropped"
            for (number, length), packing in packings.items()
        },
    }
    log.say(banner(config, plan, built))
    if run.continues:
        log.say(run.continues)
    if is_main:
        for warning in start_warnings(config, plan, run.command_line.overridden, strategy.device):
            log.warn(warning, step=step)
    start_id = uuid.uuid4().hex
    facts = {"start_id": start_id, **sizes, **dataclasses.asdict(plan.schedule), **dataclasses.asdict(plan.ramp)}
    if len(plan.stages) > 1:
        facts["stage_starts"] = plan.batches.stage_starts
    if plan.batches.origin is not None:  # the data differs from that in config.yaml
        facts["origin"] = dataclasses.asdict(plan.batches.origin)
        facts["data"] = config.data.model_dump(mode="json")
    log.write("start", step=step, **facts, energy=energy)
    if run.loaded_from:
        event = "branch" if run.is_new else "resume"
        log.write(event, step=step, path=run.loaded_from.name, run=str(run.loaded_from.parents[1]))
    return start_id


def write_records(run: Run) -> None:
    """Writes the config, model, strategy and environment, unless an earlier start has. Main rank only."""
    texts = {
        "config.yaml": lambda: as_yaml(run.config),
        "model.json": run.plan.model_config.to_json_string,
        "strategy.json": lambda: json.dumps(run.strategy.describe(), indent=1),
        "environment.json": lambda: json.dumps(environment_of(run.strategy.device), indent=1),
    }
    for name, text in texts.items():
        path = run.config.output / name
        if run.is_new or not path.exists():
            path.write_text(text(), encoding="utf-8")


def environment_of(device: torch.device) -> dict[str, Any]:
    """Describes the code, the machine and the packages. Contains no environment variables."""
    packages = package_versions(RECORDED_PACKAGES)
    return {"commit": commit(), **describe_machine(device), "packages": packages, "code": LOADED_CODE}


def record_sources(run: Run) -> None:
    """Adds the sources that aren't in data.json yet, as after a change of the mixture. Main rank only."""
    path = run.config.output / DATA_FILE
    known = {} if run.is_new else read_json(path)
    readers = run.plan.batches.readers
    if new := {folder: data_record(reader) for folder, reader in readers.items() if folder not in known}:
        write_durably(path, json.dumps(known | new, indent=1))


def copy_extensions(config: RunConfig) -> None:
    """Copies the extensions to RUN/extensions, with their hash in the file name."""
    for file in map(Path, config.extensions):
        copy = config.output / "extensions" / f"{file.stem}-{digest_of([file])}.py"
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)


def data_record(reader: ShardReader) -> dict:
    """Summarizes a source's manifest, for the model card and in case the shards are deleted."""
    manifest = reader.manifest
    fields = read_json(manifest.folder / MANIFEST_FILE)
    preparation = preparation_of(fields)
    datasets = dict.fromkeys(dataset["name"] for dataset in preparation.get("datasets", ()))
    return {
        "manifest_sha256": manifest.sha256,
        "tokenizer": {"name": manifest.tokenizer_name, "sha256": manifest.tokenizer_sha256},
        "vocabulary_size": manifest.vocabulary_size,
        "end_of_document_id": manifest.end_of_document_id,
        "totals": {split: counts_in(manifest.shards, split) for split in SPLITS},
        "hub_datasets": [name for name in datasets if is_hub_id(name)],
        "contamination": contamination_of(fields),
        "preparation": preparation,
        "input_files": len(manifest.source_names),
    }


def package_versions(packages: Iterable[str]) -> dict[str, str]:
    """Returns {package: version} for installed packages."""
    versions = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def commit() -> str | None:
    """Returns this code's git commit, with '+changes' if there are uncommitted changes; None outside a checkout."""
    if not IS_CHECKOUT:  # site-packages may be inside another repository
        return None
    # No tag matches, so git describes the commit by its hash.
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def stages_in_words(plan: RunPlan) -> dict[str, str]:
    """Describes stages with different windows or positions for the banner."""
    rows = {}
    for stage, step in zip(plan.stages, plan.batches.first_steps, strict=True):
        before = plan.stages[max(stage.number - 2, 0)]
        if stage.differs_from(before) or stage.window != plan.batches.window:
            parts = [
                f"from step {step:,} on, sequences of {stage.window.sequence_length:,} tokens",
                f"{stage.sequences_per_micro_batch:,} per micro-batch",
                rope_in_words(getattr(stage.model_config, "rope_parameters", None)),
            ]
            rows[f"stage {stage.number}"] = ", ".join(filter(None, parts))
    return rows


def banner(config: RunConfig, plan: RunPlan, built: dict[str, str | None]) -> str:
    """Returns the startup banner. built: rows about the built objects; None for rows to leave out."""
    ramp = plan.ramp
    length = config.data.sequence_length
    micro = config.batch.sequences_per_micro_batch
    full_micro_steps = ramp.sequences_per_level[-1] // (micro * plan.ranks)
    levels = " -> ".join(f"{level * length:,}" for level in ramp.sequences_per_level)
    is_sparse = plan.active_parameters < plan.parameters
    per_parameter = f"{plan.total_tokens / plan.active_parameters:.1f} per {'active ' if is_sparse else ''}parameter"
    limit = f"; at most {config.budget.minutes:g} min" if config.budget.minutes is not None else ""
    readers = plan.batches.readers
    epochs = plan.batches.epochs_at(plan.total_steps)
    vocabulary = vocabulary_text(plan.model_config.vocab_size, plan.batches.vocabulary_size)
    rows = {
        **rows_of_model(config, plan, plan.precision, vocabulary),
        "data": " + ".join(f"{folder} ({count_text(reader.tokens)} tokens)" for folder, reader in readers.items()),
        "epochs in total": ", ".join(f"{folder} {count:.2f}" for folder, count in epochs.items()),
        "tokens per step": f"{levels} = {counted(micro, 'sequence')} x {length:,} tokens x "
        f"{counted(plan.ranks, 'process')} x {full_micro_steps} micro-steps",
        "budget": f"{plan.total_steps:,} steps, {plan.total_tokens:,} tokens, {per_parameter}{limit}",
        **stages_in_words(plan),
        "learning rate": f"{plan.peak_learning_rate:.3g} at the peak, {plan.schedule.name}, "
        f"{plan.schedule.warmup_steps:,} warmup steps",
        "average": f"of the weights, {config.averaging.kind}" if config.averaging.kind != "none" else None,
        "FLOPs per token": f"{plan.flops_per_token:.4g} = {FORMULA}"
        + (" for whole windows; MFU also counts attention between documents" if config.data.document_mask else ""),
        **plan.router_losses.in_words(),
        **built,
    }
    return table([row for row in rows.items() if row[1] is not None])


def rows_of_model(config: RunConfig, model: ModelPlan, precision: str, vocabulary: str) -> dict[str, str | None]:
    """Returns the banner rows for the device and the model."""
    device = torch.device(device_type())
    is_fallback = config.precision == "auto" and precision != "bf16"
    reason = f" (auto: {missing_bf16(device.type)})" if is_fallback else ""
    weights = "bf16, rounded stochastically" if config.optim.stochastic_rounding else "fp32"
    is_sparse = model.active_parameters < model.parameters
    active = f"{model.active_parameters:,} active of " if is_sparse else ""
    attention = without_rows(model.attention) + (", within documents" if config.data.document_mask else "")
    if mixers := classes_in_rows(model.attention):
        attention += f"; {' and '.join(mixers)} with each document in a separate row"
    kernels = None
    if device.type == "cuda":
        from pretrain.model.kernels import kernels_used

        here = {"dtype": DTYPES[precision], "window": config.data.window, "model_config": model.model_config}
        kernels = kernels_used(config.attention, without_rows(model.attention), **here)
    return {
        "device": device_in_words(device),
        "model": f"{config.model} ({model.model_config.model_type}), {active}{model.parameters:,} parameters",
        "vocabulary": vocabulary,
        "precision": f"{precision}{reason}, weights and optimizer in {weights}",
        "attention": "; rejected ".join([attention, *model.passed_over]),
        "kernels": kernels,
    }


def start_warnings(config: RunConfig, plan: RunPlan, overridden: frozenset[str], device: torch.device) -> list[str]:
    """Lists warnings about the recipe. For warnings about a machine, see `machine_warnings`.

    Args:
        overridden: dotted paths of settings on the command line.
    """
    emulation = emulation_of_bf16(device) if config.precision == "bf16" else None
    found = (
        emulation and f"precision: {emulation}; use precision: fp32 or auto",
        unusual_learning_rate(config, plan, overridden),
        unused_vocabulary(config, plan),
        benchmarks_without_steps(config),
        *unhashed_blocks(plan.batches.readers),
    )
    return [*filter(None, found)]


def machine_warnings(plan: RunPlan, device: torch.device) -> list[str]:
    """Lists warnings about this machine."""
    return [*environment_warnings(device), *filter(None, [slower_attention(plan, device)])]


def slower_attention(plan: RunPlan, device: torch.device) -> str | None:
    """Returns a warning if the attention kernel for bf16 exists for this CPU but doesn't work, or None."""
    if device.type != "cpu" or plan.precision != "bf16" or without_rows(plan.attention) != "groundwork_sdpa":
        return None
    if bf16_cpu_attention.why_unsupported() or not (reason := bf16_cpu_attention.why_not()):
        return None
    return (
        "attention: takes several times as long as it could, because its kernel for bf16, which needs g++ or the C++ "
        f"compiler in CXX, does not work: {reason}"
    )


def unusual_learning_rate(config: RunConfig, plan: RunPlan, overridden: frozenset[str]) -> str | None:
    """Returns a warning if the peak learning rate is far from auto's, or None."""
    optim = config.optim
    stated = plan.peak_learning_rate
    if optim.learning_rate == "auto":
        return None
    usual = OPTIMIZERS[optim.name].auto_learning_rate(plan.parameters, plan.tokens_per_step)
    factor = stated / usual
    setting = "optim.learning_rate" if optim.learning_rate_per_sequence is None else "optim.learning_rate_per_sequence"
    by_hand = {"optim", setting} & overridden
    another = "optim.name" in overridden and not by_hand
    far = FAR_FOR_ANOTHER_OPTIMIZER if another else FAR
    is_low = config.init == "scratch" and factor < 1 / far  # low learning rates are normal for continued pretraining
    if factor <= far and not is_low:
        return None
    times = f"{factor:.3g} times" if factor > 1 else f"1/{1 / factor:.3g} of"
    origin = f"from the recipe, although --optim.name {optim.name} is on the command line, and is " if another else ""
    return (
        f"{setting}: the peak of {stated:.3g} is {origin}{times} auto's value for {optim.name} at "
        f"{count_text(plan.parameters)} parameters, {usual:.3g}; use --optim.learning_rate auto unless this is "
        "intended"
    )


def benchmarks_without_steps(config: RunConfig) -> str | None:
    """Returns a warning if benchmarks are configured without an interval, or None."""
    benchmarks = config.benchmarks
    if benchmarks.is_set or benchmarks == type(benchmarks)():
        return None
    return "benchmarks: nothing is evaluated during training; set every_steps or every_tokens"


def unhashed_blocks(readers: Mapping[str, ShardReader]) -> list[str]:
    """Lists warnings about object-store sources without block hashes, which were prepared by an earlier version."""
    remote = [reader.manifest for reader in readers.values() if reader.manifest.url is not None]
    return [
        f"data: {manifest.place} has no block hashes (.blocks files), so only the sizes of its objects are "
        "checked; prepare the data again to add them"
        for manifest in remote
        if any(not any(name.endswith(".blocks") for name in shard.beside) for shard in manifest.shards)
    ]


def unused_vocabulary(config: RunConfig, plan: RunPlan) -> str | None:
    """Returns a warning if the model's vocabulary is much larger than the data's, or None.

    Ignores padding and pretrained models.
    """
    ids = plan.batches.vocabulary_size
    rows = plan.model_config.vocab_size
    padded = padded_vocabulary(ids)
    if rows <= padded or config.init == "pretrained":
        return None
    matrices = 1 if getattr(plan.model_config, "tie_word_embeddings", False) else 2
    wasted = matrices * plan.model_config.hidden_size * (rows - padded)
    if wasted <= WASTE * plan.parameters:
        return None
    return (
        f"vocabulary: the model has {rows:,} rows, but the data has only {ids:,} token IDs, so "
        f"{count_text(wasted)} of {count_text(plan.parameters)} parameters ({wasted / plan.parameters:.0%}) are "
        f"unused; use --model.vocab_size auto to make it {padded:,}"
    )
