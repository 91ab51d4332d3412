"""Model folders with a tokenizer, for evaluate.py."""

import shutil
from pathlib import Path

import torch
from transformers import AutoConfig

from pretrain.model.build import build_model, save_model_metadata, set_end_of_document
from support.tiny_models import TINY_LLAMA


def save_tiny(folder, tokenizer, manifest, model_type="llama", **changes) -> Path:
    """Saves a model with scaled-up weights, so that its predictions vary."""
    config = AutoConfig.for_model(**{**TINY_LLAMA, "model_type": model_type, **changes})
    set_end_of_document(config, manifest.end_of_document_id)
    model = build_model(config, seed=3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name:
                parameter.mul_(5)
    model.save_pretrained(folder)
    save_model_metadata(model, folder)
    for path in tokenizer.iterdir():
        shutil.copy(path, folder / path.name)
    return folder
