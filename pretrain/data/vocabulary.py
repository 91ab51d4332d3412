"""Looks up the vocabulary size of a recipe's shards, which may determine the model's."""

from transformers import PreTrainedConfig

from pretrain.config import Data, RunConfig
from pretrain.data.shards import manifest_of
from pretrain.errors import InputError
from pretrain.model.model_config import load_recipe_model_config, padded_vocabulary


def vocabulary_of(data: Data) -> int | None:
    """Returns the first source's vocabulary size, or None if its manifest is unreadable."""
    source = data.mixtures[0].train[0]
    try:
        return manifest_of(source).vocabulary_size
    except (InputError, OSError):
        return None


def planned_model_config(config: RunConfig) -> PreTrainedConfig:
    """Returns the recipe's model config, with the shards' vocabulary size if it doesn't set one.

    Raises the InputErrors of `load_recipe_model_config`.
    """
    return load_recipe_model_config(config.model, vocabulary_of(config.data))


def vocabulary_text(model_rows: int, vocabulary_size: int) -> str:
    """Formats a vocabulary size for a model with `model_rows` rows, such as '50,257 IDs, padded to 50,304'."""
    text = f"{vocabulary_size:,} IDs"
    if model_rows == vocabulary_size:
        return text
    if model_rows == padded_vocabulary(vocabulary_size):
        return f"{text}, padded to {model_rows:,}"
    return f"{text}, in a model with {model_rows:,} rows"
