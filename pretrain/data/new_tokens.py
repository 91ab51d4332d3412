"""Tokens that the data's tokenizer has beyond a pretrained model's own."""

from transformers import PreTrainedConfig

from pretrain.config import RunConfig
from pretrain.data.shards import manifest_of
from pretrain.data.tokenizer import backend_of, load_tokenizer
from pretrain.errors import InputError
from pretrain.model.pretrained import NewTokens


def new_tokens(config: RunConfig, model_config: PreTrainedConfig) -> NewTokens | None:
    """Returns what the data's tokenizer adds to the tokenizer in the folder or Hub ID of the recipe's model.

    None: nothing. Raises InputError if the data have ids that the model's tokenizer lacks, and are not of an extension
    of it: all of its tokens with their ids, and more.
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
            f"model: {name}: the data's tokenizer has {manifest.vocabulary_size:,} ids, and the model's own is needed "
            f"to give the new ones their first values, but {error}"
        ) from None
    if manifest.vocabulary_size <= old.vocabulary_size or old.sha256 == manifest.tokenizer_sha256:
        return None
    if config.data.dispatch_batches:
        raise InputError(
            "data.dispatch_batches: each process gives new tokens their first values by the data's tokenizer, which "
            "only the first process has; take one step on the first machine alone, and continue from its final/"
        )
    new = load_tokenizer(manifest.tokenizer_folder)
    old_backend, new_backend = (backend_of(each.json, each.name) for each in (old, new))
    ids = new_backend.get_vocab(with_added_tokens=True)
    moved = [
        token for token, number in old_backend.get_vocab(with_added_tokens=True).items() if ids.get(token) != number
    ]
    if moved:
        raise InputError(
            f"data: its tokenizer {manifest.tokenizer_name} ({new.vocabulary_size:,} ids) is not an extension of the "
            f"model's ({old.vocabulary_size:,}): {len(moved):,} tokens have other ids or none, first {moved[0]!r}; "
            "prepare the data with the model's own tokenizer, or with one that prepare_data.py --tokenizer ... "
            "--train_tokenizer SIZE made from it"
        )
    added = new_backend.get_added_tokens_decoder()
    parts: list[list[int]] = [[] for _ in range(new.vocabulary_size - old.vocabulary_size)]
    for token, number in ids.items():
        if number < old.vocabulary_size:
            continue
        if number in added:
            parts[number - old.vocabulary_size] = old_backend.encode(token, add_special_tokens=False).ids
        else:  # by the merges alone: a token may be a part of a character
            parts[number - old.vocabulary_size] = [part.id for part in old_backend.model.tokenize(token)]
    return NewTokens(old.vocabulary_size, parts, model_config.vocab_size)
