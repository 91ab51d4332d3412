"""Finds tokens of the data's tokenizer that a pretrained model lacks."""

from tokenizers import Tokenizer
from transformers import PreTrainedConfig

from pretrain.config import RunConfig
from pretrain.data.shards import manifest_of
from pretrain.data.tokenizer import LoadedTokenizer, load_tokenizer
from pretrain.errors import InputError
from pretrain.model.pretrained import NewTokens


def new_tokens(config: RunConfig, model_config: PreTrainedConfig) -> NewTokens | None:
    """Returns the tokens that the data's tokenizer adds to the model's tokenizer, or None if it adds none.

    `config.model.config` is the model's folder or Hub ID. Raises InputError if the two tokenizers assign different
    tokens to an ID. Added tokens may differ, unless the data's tokenizer has more IDs than the model's.
    """
    name = config.model.config
    try:
        manifest = manifest_of(config.data.mixtures[0].train[0])
    except (InputError, OSError):  # opening the data reports the error
        return None
    try:
        old = load_tokenizer(name)
    except InputError as error:
        if manifest.vocabulary_size <= model_config.vocab_size and "vocab_size" not in config.model.changes:
            return None  # the model has no tokenizer, but enough rows
        raise InputError(
            f"model: {name}: the data's tokenizer has {manifest.vocabulary_size:,} IDs, and initializing the new ones "
            f"requires the model's own tokenizer, which cannot be loaded: {error}"
        ) from None
    if old.sha256 == manifest.tokenizer_sha256:
        return None
    if manifest.vocabulary_size <= old.vocabulary_size:
        if (manifest.tokenizer_folder / "tokenizer.json").is_file():  # may be missing with dispatched batches
            _require_the_same_tokens(old, load_tokenizer(manifest.tokenizer_folder))
        return None
    if config.data.dispatch_batches:
        raise InputError(
            "data.dispatch_batches: each process needs the data's tokenizer to initialize the new tokens, but only "
            "the first process has it; train one step on the first machine only, and continue from its final/"
        )
    new = load_tokenizer(manifest.tokenizer_folder)
    ids = new.backend.get_vocab()
    if moved := [token for token, number in old.backend.get_vocab().items() if ids.get(token) != number]:
        raise InputError(
            f"data: its tokenizer {manifest.tokenizer_name} ({new.vocabulary_size:,} IDs) is not an extension of the "
            f"model's ({old.vocabulary_size:,}): {len(moved):,} tokens have a different ID or none, such as "
            f"{moved[0]!r}; prepare the data with the model's own tokenizer, or with an extension of it made by "
            "prepare_data.py --tokenizer ... --train_tokenizer SIZE"
        )
    added = new.backend.get_added_tokens_decoder()
    parts: list[list[int]] = [[] for _ in range(new.vocabulary_size - old.vocabulary_size)]
    for token, number in ids.items():
        if number < old.vocabulary_size:
            continue
        if number in added:
            parts[number - old.vocabulary_size] = old.backend.encode(token, add_special_tokens=False).ids
        else:  # applies only the merges, because a token may be part of a character
            parts[number - old.vocabulary_size] = [part.id for part in old.backend.model.tokenize(token)]
    return NewTokens(old.vocabulary_size, parts, model_config.vocab_size)


def _require_the_same_tokens(old: LoadedTokenizer, new: LoadedTokenizer) -> None:
    """Raises InputError if the tokenizers assign different tokens to an ID. Ignores added tokens."""
    if differing := differing_tokens(old.backend, new.backend):
        raise InputError(
            f"data: its tokenizer {new.name} is not the model's {old.name}: {differing}; prepare "
            "the data with the model's own tokenizer, or, to train with a different tokenizer, use a copy of the "
            "model's folder without its tokenizer files"
        )


def differing_tokens(old: Tokenizer, new: Tokenizer, *, may_extend: bool = False) -> str:
    """Describes the IDs that map to different tokens; "" if there are none. Ignores added tokens.

    may_extend: True to also ignore IDs that only the new tokenizer has.
    """
    old_tokens = {number: token for token, number in old.get_vocab().items()}
    ignored = old.get_added_tokens_decoder().keys() | new.get_added_tokens_decoder().keys()
    ids = {number: token for token, number in new.get_vocab().items()}
    if may_extend:
        ignored |= ids.keys() - old_tokens.keys()
    others = sorted(
        number for number, token in ids.items() if number not in ignored and old_tokens.get(number) != token
    )
    if not others:
        return ""
    first = others[0]
    return (
        f"{len(others):,} of {len(ids):,} IDs map to different tokens, such as {first} ({ids[first]!r} instead of "
        f"{old_tokens.get(first)!r})"
    )
