"""final/: the trained model as a Hugging Face folder, in the export dtype, with tokenizer and model card."""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from pretrain.checkpoint import SaveFailed, commit, write_group
from pretrain.hardware import DTYPES
from pretrain.metrics import count_text
from pretrain.model import save_model_metadata
from pretrain.strategy import Strategy


def describe_model(model: PreTrainedModel, tokenizer: Path, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Everything of a HF model folder but the weights: configs, code of local architectures, tokenizer.

    dtype: of the weights in the folder; from_pretrained loads in it.
    """
    model.config.dtype = dtype
    save_model_metadata(model, folder)
    for path in tokenizer.iterdir():
        shutil.copyfile(path, folder / path.name)


def export_final(
    run: Path, strategy: Strategy, dtype: str, describe: Callable[..., None], card: dict[str, str]
) -> Path:
    """Writes run/final, whole or not at all; all ranks together. Raises SaveFailed if one cannot write."""
    final, unfinished = run / "final", run / ".saving-final"
    with strategy.together(SaveFailed):
        if strategy.is_main:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
    with strategy.together(SaveFailed):
        written = write_group(
            unfinished, "model", strategy.model_tensors(), strategy.rank, strategy.ranks, DTYPES[dtype]
        )
    files = {name: entry for share in strategy.gather(written) for name, entry in share.items()}
    with strategy.together(SaveFailed):
        if strategy.is_main:
            describe(unfinished, dtype=DTYPES[dtype])
            (unfinished / "README.md").write_text(model_card(run.name, card), encoding="utf-8")
            commit(unfinished, final, files)
    return final


def model_card(name: str, facts: dict[str, str]) -> str:
    """A model card of what is known for certain: how the model was made and how to load it."""
    rows = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

A base language model, pretrained from scratch with Groundwork. It continues text; it follows no instructions.

| | |
|---|---|
{rows}

```python
from transformers import pipeline

generate = pipeline("text-generation", model="path/to/this/folder")
print(generate("Once", max_new_tokens=50)[0]["generated_text"])
```
"""


def card_facts(config, derived, validation: dict[str, dict[str, float]]) -> dict[str, str]:
    """What the card states: architecture, data, training, result."""
    facts = {
        "architecture": derived.model_config.model_type,
        "parameters": f"{derived.parameters:,}",
        "training tokens": count_text(derived.total_tokens),
        "data": ", ".join(Path(folder).name for folder in derived.batches.readers),
        "sequence length": f"{config.data.sequence_length:,}",
        "optimizer": config.optim.name,
        "learning rate": f"{derived.peak_learning_rate:.3g} at the peak, {config.optim.schedule}",
        "precision": derived.precision,
    }
    for source, result in validation.items():
        facts[f"validation loss ({source})"] = f"{result['loss']:.4f} ({result['bits_per_byte']:.4f} bits per byte)"
    return facts
