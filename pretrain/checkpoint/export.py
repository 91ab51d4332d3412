"""Exports the trained model to final/ in save_pretrained's format, with its tokenizer and a model card."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from pretrain.checkpoint.checkpoints import SaveError
from pretrain.checkpoint.tensor_files import write_group
from pretrain.data.manifest import TOKENIZER_FILES
from pretrain.files import CARD_FILE, Beat, commit
from pretrain.hardware import DTYPES
from pretrain.model.build import save_model_metadata
from pretrain.model.published_names import PublishedNames
from pretrain.parallel.launcher import ToolError, run_tool
from pretrain.parallel.strategy import Strategy


def describe_model(model: PreTrainedModel, tokenizer: Path, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Writes all files of a HF model folder except the weights: configs, custom model code and tokenizer.

    dtype: dtype of the weights, which is written to config.json.
    """
    model.config.dtype = dtype
    save_model_metadata(model, folder)
    add_converters_keys(folder / "config.json")
    # A foreign shard's tokenizer may be a model's folder, whose config and weights must not replace the run's.
    for name in ("tokenizer.json", *TOKENIZER_FILES):
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, folder / name)


def add_converters_keys(path: Path) -> None:
    """Adds n_ctx to GPT-2's config.json for llama.cpp's converter. transformers no longer writes it."""
    config = json.loads(path.read_text(encoding="utf-8"))
    if config["model_type"] == "gpt2":
        config["n_ctx"] = config["n_positions"]
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def export_final(run: Path, strategy: Strategy, dtype: str, describe: Callable[..., None], beat: Beat) -> Path:
    """Writes run/final atomically. A collective call. Raises SaveError if it fails on any rank."""
    ranks = strategy.ranks
    final = run / "final"
    unfinished = run / ".saving-final"
    with ranks.together(SaveError):
        if ranks.is_main:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
    with ranks.together(SaveError):
        group = strategy.model_tensors()
        buffers = {name for name, _ in strategy.causal_lm.named_buffers()}
        # Buffers aren't converted, because a rounded router bias would select different experts.
        dtypes = dict.fromkeys(group.shapes.keys() - buffers, DTYPES[dtype])
        published = PublishedNames(strategy.causal_lm.config)
        written = write_group(unfinished, "model", group, ranks.rank, ranks.count, dtypes, beat, published)
    files = {name: entry for share in ranks.gather(written) for name, entry in share.items()}
    with ranks.together(SaveError):
        if ranks.is_main:
            describe(unfinished, dtype=DTYPES[dtype])
            if problem := export_card(run, unfinished):
                ranks.print(f"warning: {problem}")
            commit(unfinished, final, files)
    return final


def export_card(run: Path, folder: Path) -> str | None:
    """Writes the model card. Returns an error message instead of raising an error, so that the export continues."""
    try:
        # Paths in the recipe are relative, so the child process must run in the current folder.
        run_tool("publishing.card", str(run.absolute()), str(folder.absolute()))
        return None
    except ToolError as error:
        text = f"the model card could not be written ({error})"
    (folder / CARD_FILE).write_text(f"# {run.resolve().name}\n\n{text}\n", encoding="utf-8")
    return text
