"""Finds tokens in the data's tokenizer that a pretrained model lacks."""

from transformers import PreTrainedConfig

from pretrain.config import RunConfig
from pretrain.data.shards import manifest_of
from pretrain.data.tokenizer import LoadedTokenizer, backend_of, load_tokenizer
from pretrain.errors import InputError
from pretrain.model.pretrained import NewTokens


def new_tokens(config: RunConfig, model_config: PreTrainedConfig) -> NewTokens | None:
    """Returns the tokens that the data's tokenizer adds to the model's tokenizer, or None if it adds none.

    `model.config` is the folder or Hub ID of the model. Raises InputError if a token ID means something else in the
    model, except for IDs of added tokens, which some models leave free for new names. If the data's tokenizer has more
    IDs, it must contain all of the model's tokens with the same IDs.
    """
    name = config.model.config
    try:
        manifest = manifest_of(config.data.mixtures[0].train[0])
    except (InputError, OSError):  # opening the data says why
        return None
    try:
        old = load_tokenizer(name)
    except InputError as error:
        if manifest.vocabulary_size <= model_config.vocab_size and "vocab_size" not in config.model.changes:
            return None  # a folder without a tokenizer, whose rows suffice
        raise InputError(
            f"model: {name}: the data's tokenizer has {manifest.vocabulary_size:,} IDs, and the model's own is needed "
            f"to give the new ones their first values, but {error}"
        ) from None
    if old.sha256 == manifest.tokenizer_sha256:
        return None
    if manifest.vocabulary_size <= old.vocabulary_size:
        if (manifest.tokenizer_folder / "tokenizer.json").is_file():  # with dispatched batches, one process has it
            _require_the_same_tokens(old, load_tokenizer(manifest.tokenizer_folder))
        return None
    if config.data.dispatch_batches:
        raise InputError(
            "data.dispatch_batches: each process needs the data's tokenizer to initialize the new tokens, but only "
            "the first process has it; train one step on the first machine only, and continue from its final/"
        )
    new = load_tokenizer(manifest.tokenizer_folder)
    old_backend, new_backend = (backend_of(each.json, each.name) for each in (old, new))
    ids = new_backend.get_vocab(with_added_tokens=True)
    moved = [
        token for token, number in old_backend.get_vocab(with_added_tokens=True).items() if ids.get(token) != number
    ]
    if moved:
        raise InputError(
            f"data: its tokenizer {manifest.tokenizer_name} ({new.vocabulary_size:,} IDs) is not an extension of the "
            f"model's ({old.vocabulary_size:,}): {len(moved):,} tokens have different IDs or none, first {moved[0]!r}"
            "; prepare the data with the model's own tokenizer, or with one that prepare_data.py --tokenizer ... "
            "--train_tokenizer SIZE made from it"
        )
    added = new_backend.get_added_tokens_decoder()
    parts: list[list[int]] = [[] for _ in range(new.vocabulary_size - old.vocabulary_size)]
    for token, number in ids.items():
        if number < old.vocabulary_size:
            continue
        if number in added:
            parts[number - old.vocabulary_size] = old_backend.encode(token, add_special_tokens=False).ids
        else:  # with the merges only, because a token may be a part of a character
            parts[number - old.vocabulary_size] = [part.id for part in old_backend.model.tokenize(token)]
    return NewTokens(old.vocabulary_size, parts, model_config.vocab_size)


def _require_the_same_tokens(old: LoadedTokenizer, new: LoadedTokenizer) -> None:
    """Raises InputError if an ID means different tokens in the two tokenizers. Ignores added tokens."""
    old_backend, new_backend = (backend_of(each.json, each.name) for each in (old, new))
    old_tokens = {number: token for token, number in old_backend.get_vocab(with_added_tokens=True).items()}
    added = old_backend.get_added_tokens_decoder().keys() | new_backend.get_added_tokens_decoder().keys()
    ids = {number: token for token, number in new_backend.get_vocab(with_added_tokens=True).items()}
    others = sorted(number for number, token in ids.items() if number not in added and old_tokens.get(number) != token)
    if others:
        first = others[0]
        raise InputError(
            f"data: its tokenizer {new.name} is not the model's {old.name}: {len(others):,} of {len(ids):,} IDs are "
            f"different tokens, starting with {first} ({ids[first]!r} instead of {old_tokens.get(first)!r}); prepare "
            "the data with the model's own tokenizer, or, to train with a different tokenizer, use a copy of the "
            "model's folder without its tokenizer files"
        )
