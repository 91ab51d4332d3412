"""Vocabulary size of a recipe's shards, and the model that is sized by it."""

from transformers import PreTrainedConfig

from pretrain.config import Data, ModelSource
from pretrain.data.shards import manifest_of
from pretrain.errors import InputError
from pretrain.model.model_config import load_recipe_model_config, padded_vocabulary


def vocabulary_of(data: Data) -> int | None:
    """Returns the first source's vocabulary size; None if its manifest is unreadable (opening it says why)."""
    source = data.mixtures[0].train[0]
    try:
        return manifest_of(source).vocabulary_size
    except (InputError, OSError):
        return None


def planned_model_config(model: ModelSource, data: Data) -> PreTrainedConfig:
    """Returns the configuration of a recipe's model, with the shards' vocabulary size if it states none.

    Raises InputError as `load_recipe_model_config` does.
    """
    return load_recipe_model_config(model, vocabulary_of(data))


def assumed_vocabulary(model: ModelSource, data: Data, model_config: PreTrainedConfig) -> list[str]:
    """Lists notes on the vocabulary for a plan whose shards do not exist yet; empty if the model states its size."""
    if vocabulary_of(data) is not None:
        return []
    if len({load_recipe_model_config(model, size).vocab_size for size in (64, 128)}) == 1:
        return []
    return [
        f"vocabulary: follows the data, which is not prepared yet; planned with {model_config.vocab_size:,} "
        "rows; --model.vocab_size N plans with another"
    ]


def vocabulary_text(model_rows: int, vocabulary_size: int) -> str:
    """Returns '50,257 ids, padded to 50,304' for a model with that many rows."""
    text = f"{vocabulary_size:,} ids"
    if model_rows == vocabulary_size:
        return text
    if model_rows == padded_vocabulary(vocabulary_size):
        return f"{text}, padded to {model_rows:,}"
    return f"{text} in a model's {model_rows:,}, as stated"
