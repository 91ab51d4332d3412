"""Decoding IDs to text must match the tokenizer that encoded them."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from pretrain.data.tokenizer import LoadedTokenizer
from pretrain_tools.preparation.text_decoder import text_decoder

TEXTS = ["naïve 漢字\r\n\tword  two\0", "".join(map(chr, range(0x250))), "🙂 ＡＢ <|end|> </s> ▁ <0x41>", "a  b "]


def loaded(tokenizer):
    size = max(tokenizer.get_vocab().values()) + 1
    return LoadedTokenizer("tiny", tokenizer.to_str().encode(), size, "<|end|>", 0, ("<|end|>",), {})


def trained(tokenizer, alphabet=()):
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<|end|>"], initial_alphabet=list(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return trained(tokenizer, pre_tokenizers.ByteLevel.alphabet())


def byte_fallback():
    """Returns a byte-fallback tokenizer like those of Llama 2 and Mistral."""
    vocabulary = {"<unk>": 0, "<|end|>": 1} | {f"<0x{byte:02X}>": byte + 2 for byte in range(256)}
    vocabulary |= {"▁": 258, "a": 259, "▁a": 260, "o": 261}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def word_pieces():
    tokenizer = Tokenizer(
        models.WordPiece({"[UNK]": 0, "<|end|>": 1, "wor": 2, "##d": 3, "two": 4}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, byte_fallback, word_pieces])
def test_the_table_matches_the_tokenizers_decoding(make):
    tokenizer = make()
    decode = text_decoder(loaded(tokenizer))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert decode(np.array(ids, np.uint16)).decode() == tokenizer.decode(ids, skip_special_tokens=False)
    if make is not word_pieces:
        assert decode(np.array(tokenizer.encode(TEXTS[0]).ids)).decode() == TEXTS[0]
