"""Measures a model's loss, perplexity and bits per byte on prepared shards, like validation during training."""

import argparse
import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from pretrain.config import RunConfig, WindowSpec
from pretrain.data.manifest import Manifest
from pretrain.data.shards import ShardReader, open_shards
from pretrain.errors import InputError, Problems
from pretrain.hardware import DTYPES
from pretrain.model.attention import choose_attention
from pretrain.model.build import use_attention
from pretrain.model.loss import LanguageModelLoss, choose_loss
from pretrain.parallel.strategy import Strategy, device_type, resolve_precision
from pretrain.recipe import read_run_config
from pretrain.training.probe import probe
from pretrain.training.validation import measure, source_name
from pretrain_tools.runs.addresses import ModelAddress

LONGEST_DEFAULT_SEQUENCE = 2048


@dataclass(frozen=True)
class ShardSettings:
    """Evaluation settings. For a model from a run, they default to the run's settings."""

    window: WindowSpec
    precision: str
    """Compute precision: fp32, bf16 or fp16. The weights are in fp32."""
    attention: str
    """attn_implementation; see pretrain/model/attention.py."""
    loss_backend: str
    sequences_per_micro_batch: int
    sequences: int | None
    """Number of sequences per source; None for all."""


def settings_for(address: ModelAddress, config: PreTrainedConfig, arguments: argparse.Namespace) -> ShardSettings:
    """Returns the settings from the command line, or else from the model's run, or else the defaults.

    Raises InputError if the run's config.yaml is unreadable or the sequence length exceeds the model's positions.
    """
    run = run_config_of(address)
    positions = getattr(config, "max_position_embeddings", None)
    length = arguments.sequence_length or (run.data.sequence_length if run else None)
    if length is None:
        length = min(LONGEST_DEFAULT_SEQUENCE, positions or LONGEST_DEFAULT_SEQUENCE)
    if positions is not None and length > positions:
        raise InputError(
            f"--sequence_length {length:,}: {address.name} only has {positions:,} positions; use at most "
            f"--sequence_length {positions}"
        )
    precision = run.precision if run and arguments.precision == "auto" else arguments.precision
    if precision == "fp16" and arguments.precision == "auto" and device_type() == "cpu":
        precision = "fp32"  # the CPU doesn't support fp16
    if precision == "fp8":
        precision = "bf16"  # fp8 is used only in training
    document_mask = {"on": True, "off": False}.get(arguments.document_mask, run.data.document_mask if run else None)
    resolved = resolve_precision(precision)
    # A model trained in bf16 may exceed the range of fp16.
    precision = "fp32" if precision == "auto" and resolved == "fp16" else resolved
    attention, document_mask = _attention(config, run.attention if run else "auto", precision, length, document_mask)
    return ShardSettings(
        window=WindowSpec(length, document_mask),
        precision=precision,
        attention=attention,
        loss_backend=choose_loss(run.loss.backend if run else "auto", device_type=device_type(), compile_mode="none"),
        sequences_per_micro_batch=(arguments.batch_size if arguments.batch_size != "auto" else None)
        or (run.batch.sequences_per_micro_batch if run else 8),
        sequences=arguments.sequences,
    )


def _attention(
    config: PreTrainedConfig, requested: str, precision: str, length: int, document_mask: bool | None
) -> tuple[str, bool]:
    """Chooses (attention, document_mask): the run's kernel, or an equivalent one if this machine doesn't support it.

    If document_mask is None, turns it on if the architecture supports it. Models with custom code use eager attention
    without a document mask.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "eager", False
    try:
        choose_attention(requested, device_type=device_type(), dtype=DTYPES[precision])
    except InputError:
        requested = "auto"
    try:
        wanted = document_mask is not False
        return probe(config, attention=requested, window=WindowSpec(length, wanted)).attention, wanted
    except InputError:
        if document_mask is not None:
            raise
        return probe(config, attention=requested, window=WindowSpec(length, False)).attention, False


def run_config_of(address: ModelAddress) -> RunConfig | None:
    """Reads the recipe of the model's run; None if the model doesn't belong to a run. Raises InputError."""
    if address.run is None:
        return None
    try:
        return read_run_config(address.run / "config.yaml", loads_extensions=False)
    except InputError as error:
        raise InputError(
            *error.problems, f"{address.name}: to evaluate it without its recipe, copy the model folder out of the run"
        ) from error


def open_evaluation_shards(
    address: ModelAddress, config: PreTrainedConfig, window: WindowSpec, arguments: argparse.Namespace
) -> dict[str, ShardReader]:
    """Opens --data as {name: reader}. Raises InputError listing all folders that are unusable with the model."""
    readers: dict[str, ShardReader] = {}
    problems = Problems()
    for folder in arguments.data:
        reader = problems.attempt(open_shards, folder, arguments.split, arguments.tokenizer)
        if reader is None:
            continue
        if not window.count_in(reader.tokens):
            problems.append(
                f"--data {folder}: contains {reader.tokens:,} {arguments.split} tokens, fewer than one sequence of "
                f"{window.sequence_length:,} + 1; use at most --sequence_length {reader.tokens - 1}"
            )
        problems += tokenizer_problems(address, config, reader.manifest)
        readers[source_name(folder, readers)] = reader
    problems.stop_if_any()
    return readers


def tokenizer_problems(address: ModelAddress, config: PreTrainedConfig, manifest: Manifest) -> list[str]:
    """Returns [problem] if the model and the shards have different tokenizers, otherwise []."""
    own_file = address.folder / "tokenizer.json"
    shards_file = manifest.tokenizer_folder / "tokenizer.json"
    shards_text = f"{manifest.place} was prepared with {manifest.tokenizer_name} ({manifest.vocabulary_size:,} IDs)"
    if config.vocab_size < manifest.vocabulary_size:
        return [
            f"--data {shards_text}, but {address.name} has a vocabulary of {config.vocab_size:,}; prepare the data "
            "with the model's tokenizer"
        ]
    if not own_file.is_file():
        return []
    from pretrain.data.tokenizer import load_tokenizer

    own_json = own_file.read_bytes()
    if hashlib.sha256(own_json).hexdigest() == manifest.tokenizer_sha256:
        return []
    if shards_file.is_file() and _ids_of(own_json) == _ids_of(shards_file.read_bytes()):
        return []
    own = load_tokenizer(address.folder)
    return [
        f"--data {shards_text}, sha256 {manifest.tokenizer_sha256[:12]}, but {address.name} has a different tokenizer "
        f"({own.vocabulary_size:,} IDs, sha256 {own.sha256[:12]}); prepare the data with --tokenizer {address.folder}"
    ]


def _ids_of(tokenizer_json: bytes) -> dict[str, Any]:
    """Returns the parts of tokenizer.json that affect the token IDs of plain text, normalized for comparison."""
    from tokenizers import Tokenizer

    parts = json.loads(Tokenizer.from_buffer(tokenizer_json).to_str())
    return {name: parts.get(name) for name in ("model", "normalizer", "pre_tokenizer", "added_tokens")}


def measure_shards(
    causal_lm: PreTrainedModel, readers: dict[str, ShardReader], strategy: Strategy, settings: ShardSettings
) -> dict[str, dict[str, Any]]:
    """Measures {source: {loss, perplexity, bits_per_byte, tokens, ...}}. Must be called on all ranks.

    Each rank holds the whole model in fp32.
    """
    # Use the run's kernels, so that the results match the run exactly.
    use_attention(causal_lm, settings.attention)
    model = LanguageModelLoss(causal_lm, backend=settings.loss_backend).to(strategy.device)
    dtype = DTYPES[settings.precision]
    windows = [settings.window.count_in(reader.tokens) for reader in readers.values()]
    sequences = settings.sequences or max(windows)
    at_once = settings.sequences_per_micro_batch * strategy.ranks.count
    batches = sum(-(-min(sequences, count) // at_once) for count in windows)
    autocast = torch.autocast(strategy.device.type, dtype=dtype, enabled=dtype != torch.float32)
    with autocast, tqdm(total=batches, desc="loss", unit="batch", disable=not strategy.ranks.is_main) as bar:
        return measure(
            model,
            readers,
            strategy,
            window=settings.window,
            sequences=sequences,
            sequences_per_micro_batch=settings.sequences_per_micro_batch,
            attention=settings.attention,
            after_batch=bar.update,
        )
