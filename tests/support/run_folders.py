"""Run folders as train.py writes them, for tests of code that reads them."""

import json
import math
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pretrain.checkpoint.export import describe_model
from pretrain.files import commit
from pretrain.model.build import build_model, set_end_of_document
from pretrain.model.model_config import load_model_config
from support.tiny_models import TINY_LLAMA

TEXT = "def read(self, size=None):\n    return self.file.read(size)\n" * 20
TOKENS_PER_STEP = 1000


def write_tokenizer(folder: Path) -> Path:
    """Writes a byte-level BPE tokenizer with up to 300 token IDs. The end-of-document ID is 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(folder)
    return folder


def write_model(
    folder: Path, tokenizer: Path, model: dict, *, seed: int, dtype: torch.dtype = torch.float32, **files: str
) -> Path:
    """Writes a sealed model folder with random weights.

    files: additional text files. Names have two underscores instead of a dot.
    """
    unfinished = folder.with_name(f".saving-{folder.name}")
    unfinished.mkdir(parents=True)
    description = unfinished / "description.json"
    description.write_text(json.dumps(model))
    config = load_model_config(str(description))
    description.unlink()
    set_end_of_document(config, 0)
    whole = build_model(config, seed=seed)
    weights = {name: parameter.detach().to(dtype).contiguous() for name, parameter in whole.named_parameters()}
    save_file(weights, unfinished / "model.safetensors", metadata={"format": "pt"})
    describe_model(whole, tokenizer, unfinished, dtype=dtype)
    for name, text in files.items():
        (unfinished / name.replace("__", ".")).write_text(text)
    commit(unfinished, folder, {})
    return folder


def recipe_values(run: Path) -> dict:
    return {
        "model": "model_configs/tiny.json",
        "init": "scratch",
        "output": str(run),
        "seed": 7,
        "precision": "fp32",
        "data": {
            "train": [{"shards": str(run.parent / "docs"), "weight": 3.0}, {"shards": str(run.parent / "code")}],
            "sequence_length": 100,
            "document_mask": True,
        },
        "batch": {"tokens_per_step": TOKENS_PER_STEP},
        "optim": {"name": "adamw", "learning_rate": 0.001, "schedule": "cosine", "weight_decay": 0.1},
        "checkpoint": {"every_steps": 4, "keep_every": 4},
        "export": {"dtype": "bf16"},
    }


def write_run(run: Path, *, model: dict = TINY_LLAMA, steps: tuple[int, ...] = (4, 8), **settings: object) -> Path:
    """Writes a run with final/ and a checkpoint at each of `steps`. The first checkpoint has the best validation loss.

    settings: recipe sections.
    """
    run.mkdir(parents=True)
    tokenizer = write_tokenizer(run.parent / "tokenizer")
    (run / "config.yaml").write_text(yaml.safe_dump({**recipe_values(run), **settings}))
    (run / "model.json").write_text(json.dumps(model))
    (run / "strategy.json").write_text(json.dumps({"strategy": "ddp", "ranks": 2, "precision": "fp32"}))
    packages = {"torch": "2.13.0", "transformers": "5.23.0"}
    (run / "environment.json").write_text(json.dumps({"device": "H100", "commit": "abc123", "packages": packages}))
    for step in steps:
        state = {"state": {"step": step, "tokens": step * TOKENS_PER_STEP}, "validation_loss": 1.0 + step}
        write_model(
            run / f"checkpoints/step-{step:08d}", tokenizer, model, seed=step,
            trainer_state__json=json.dumps(state), optimizer__safetensors="stays at home",
        )  # fmt: skip
    write_model(run / "final", tokenizer, model, seed=steps[-1], dtype=torch.bfloat16)
    write_metrics(run, steps[-1])
    return run


def write_metrics(run: Path, last_step: int) -> None:
    """Writes metrics with a falling loss, a validation every four steps and a successful end."""
    lines: list[dict] = [
        {"event": "start", "step": 0, "parameters": 106_816, "total_steps": last_step, "warmup_steps": 2}
    ]
    for step in range(1, last_step + 1):
        line = {"event": "train", "step": step, "tokens": step * TOKENS_PER_STEP, "loss": 6 * math.exp(-step / 9)}
        lines.append({**line, "learning_rate": 0.001, "tokens_per_second": 5000.0, "mfu": 0.4})
        if step % 4 == 0:
            measures = {"loss": 6 - step / 4, "perplexity": math.exp(6 - step / 4), "bits_per_byte": 2 - step / 40}
            lines.append({"event": "validation", "step": step, "source": "docs", **measures})
    lines.append({"event": "end", "code": 0, "step": last_step, "tokens": last_step * TOKENS_PER_STEP})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
