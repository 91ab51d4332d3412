"""Verifies the exported model by comparing its logits and losses with the trained model's."""

import itertools
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from pretrain.config import WindowSpec
from pretrain.data.batches import read_windows, windows_of
from pretrain.data.shards import ShardReader
from pretrain.errors import one_line
from pretrain.files import damage
from pretrain.hardware import DTYPES

LOSS_TOLERANCE = {"fp32": 2e-3, "bf16": 5e-2, "fp16": 2e-2, "fp8": 2e-1}
"""{precision: allowed loss difference in nats per token}.

The tolerances are well above rounding errors (about 1e-3 in bf16) and well below the effect of one wrong tensor.
"""
PROBE_SEQUENCES = 2
PROBE_TOKENS = 32


@dataclass
class ExportCheck:
    """Result of `verify_export`."""

    folder: Path
    problems: list[str] = field(default_factory=list)
    """Problems found. Empty if the export is correct."""
    left_out: list[str] = field(default_factory=list)
    """Skipped comparisons, with reasons."""
    logit_difference: float | None = None
    """Maximum logit difference caused by rounding the weights, relative to the largest logit."""
    loss_difference: float | None = None
    """Maximum loss difference between the training model and the export across all sources, in nats per token."""

    def in_words(self) -> str:
        """Summarizes the result in one line."""
        if self.problems:
            return f"{self.folder} does NOT match the trained model: {'; '.join(self.problems)}"
        said = []
        if self.logit_difference is not None:
            said.append(
                "logits identical to the last checkpoint's in the same dtype, and within "
                f"{self.logit_difference:.1e} of the fp32 logits (relative to the largest logit)"
            )
        if self.loss_difference is not None:
            said.append(
                f"loss in transformers' forward pass, one document at a time, within {self.loss_difference:.1e} of "
                "the training model's"
            )
        said += [f"not compared: {reason}" for reason in self.left_out]
        return f"{self.folder} verified: {'; '.join(said)}"


@dataclass(frozen=True)
class TrainingLosses:
    """Validation losses of the training model."""

    losses: dict[str, float]
    """{source: mean loss in its first window, in nats per token}."""
    readers: dict[str, ShardReader]
    """{source: reader for its validation shards}."""
    window: WindowSpec


def verify_export(
    folder: Path, checkpoint: Path, *, dtype: str, precision: str, trained: TrainingLosses | None = None
) -> ExportCheck:
    """Compares an exported model with the checkpoint of the same step and with the training model.

    The logits must be bit-identical to the checkpoint's, after rounding the checkpoint's weights to the export dtype.
    The loss must match the training model's within LOSS_TOLERANCE. The loss also reveals errors that are in both the
    checkpoint and the export, such as incorrectly gathered tensors.

    Args:
        dtype: `export.dtype`.
        precision: the run's resolved precision.
    """
    check = ExportCheck(folder)
    check.problems += [f"damaged: {problem}" for problem in damage(folder)]
    if check.problems:
        return check
    parameters = sum(path.stat().st_size for path in folder.glob("model*.safetensors")) // DTYPES[dtype].itemsize
    if (needed := 5 * parameters) > (free := free_bytes()):
        check.left_out.append(f"fp32 needs {needed / 1e9:.1f} GB of memory, but only {free / 1e9:.1f} GB are free")
        return check
    transformers_logging.disable_progress_bar()  # the run is almost over
    exported = load_whole(folder, check)
    if exported is None:
        return check
    check.problems += exported_tokenizer_problems(folder, exported)
    probe = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(exported.config.vocab_size, (PROBE_SEQUENCES, PROBE_TOKENS), generator=probe)
    if trained and trained.losses and (needed := bytes_of_scores(exported, trained.window)) > (free := free_bytes()):
        check.left_out.append(
            f"the loss (sequences of {trained.window.sequence_length:,} tokens need {needed / 1e9:.1f} GB of memory, "
            f"but only {free / 1e9:.1f} GB are free)"
        )
    elif trained and trained.losses:
        compare_losses(check, exported, trained, max(LOSS_TOLERANCE[dtype], LOSS_TOLERANCE[precision]))
    else:
        check.left_out.append("the loss (no validation data)")
    logits_BTV = exported_logits(exported, ids_BT)
    del exported  # frees memory for the checkpoint's model
    compare_logits(check, logits_BTV, checkpoint, ids_BT, DTYPES[dtype])
    return check


def free_bytes() -> int:
    """Returns the machine's available memory in bytes."""
    import psutil

    return psutil.virtual_memory().available


def bytes_of_scores(model: PreTrainedModel, window: WindowSpec) -> int:
    """Returns the memory for a window's logits, and for three copies of its attention scores in eager mode."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    length = window.sequence_length
    return 4 * length * (2 * config.vocab_size + 3 * length * (heads if isinstance(heads, int) else 0))


def load_whole(folder: Path, check: ExportCheck) -> PreTrainedModel | None:
    """Loads a model in fp32 with from_pretrained. Returns None and records the problem if weights don't match."""
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, use_safetensors=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        check.problems.append(f"from_pretrained cannot load {folder} ({one_line(error)})")
        return None
    problems = [
        f"{folder}: from_pretrained reports {len(names)} {kind} weights, starting with {names[0]}"
        for kind in ("missing", "unexpected", "mismatched")
        if (names := sorted(map(str, info[f"{kind}_keys"])))
    ]
    check.problems += problems
    return None if problems else model.eval()


def exported_tokenizer_problems(folder: Path, model: PreTrainedModel) -> list[str]:
    """Lists mismatches between the tokenizer and the model."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        return [f"its tokenizer cannot be loaded ({one_line(error)})"]
    problems = []
    if len(tokenizer) > model.config.vocab_size:
        problems.append(
            f"the tokenizer has {len(tokenizer):,} token IDs, but vocab_size is {model.config.vocab_size:,}"
        )
    ends = {tokenizer.eos_token_id, model.config.eos_token_id}
    if model.can_generate():
        ends.add(model.generation_config.eos_token_id)
    if len(ends) > 1:
        problems.append(f"tokenizer, config and generation_config have different end-of-text IDs: {ends}")
    return problems


@torch.no_grad()
def exported_logits(model: PreTrainedModel, ids_BT: torch.Tensor) -> torch.Tensor:
    """Returns logits (B, T, V)."""
    return model(input_ids=ids_BT, use_cache=False).logits


def compare_logits(
    check: ExportCheck, logits_BTV: torch.Tensor, checkpoint: Path, ids_BT: torch.Tensor, dtype: torch.dtype
) -> None:
    """Compares the export's logits with the checkpoint's, both for fp32 weights and for rounded weights."""
    if not (checkpoint / "config.json").is_file():
        check.left_out.append(f"{checkpoint} doesn't exist")
        return
    masters = load_whole(checkpoint, check)
    if masters is None:
        return
    exact_BTV = exported_logits(masters, ids_BT)
    for parameter in masters.parameters():
        parameter.data = parameter.data.to(dtype).float()
    rounded_BTV = exported_logits(masters, ids_BT)
    if rounded_BTV.shape != logits_BTV.shape:
        check.problems.append(f"logits have shape {tuple(logits_BTV.shape)} instead of {tuple(rounded_BTV.shape)}")
    elif not torch.equal(rounded_BTV, logits_BTV):
        largest = (rounded_BTV - logits_BTV).abs().max().item()
        check.problems.append(f"logits differ by up to {largest:.3g} from those of {checkpoint.name}")
    else:
        check.logit_difference = ((exact_BTV - logits_BTV).abs().max() / exact_BTV.abs().max()).item()


@torch.no_grad()
def losses_of(model: PreTrainedModel, readers: dict[str, ShardReader], window: WindowSpec) -> dict[str, float]:
    """Returns {source: mean loss in its first window, in nats per token}.

    Runs each document separately with transformers' forward pass, so that the result is independent of the training
    code.
    """
    losses = {}
    for name, reader in readers.items():
        ids = read_windows(reader, windows_of(reader, window, 1), window, rows=1)
        ids_T = torch.from_numpy(ids[0].astype(np.int64))
        starts = {0}
        if window.document_mask:
            starts |= set((ids_T[:-1] == reader.manifest.end_of_document_id).nonzero()[:, 0].tolist())
        bounds = [*sorted(starts), window.sequence_length]
        total = 0.0
        for start, end in itertools.pairwise(bounds):
            logits_TV = exported_logits(model, ids_T[None, start:end])[0]
            total += F.cross_entropy(logits_TV.float(), ids_T[start + 1 : end + 1], reduction="sum").item()
        losses[name] = total / window.sequence_length
    return losses


def compare_losses(check: ExportCheck, model: PreTrainedModel, trained: TrainingLosses, tolerance: float) -> None:
    """Compares losses. Records a problem if a loss is NaN or differs by more than `tolerance` nats per token."""
    exported = losses_of(model, trained.readers, trained.window)
    for name, loss in trained.losses.items():
        difference = abs(exported[name] - loss)
        if not difference <= tolerance:
            check.problems.append(
                f"the loss on {name} is {exported[name]:.4f}, but the training model's is {loss:.4f}; rounding "
                f"explains at most {tolerance:g}"
            )
        check.loss_difference = max(check.loss_difference or 0.0, difference)
