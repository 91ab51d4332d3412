"""Tests for tokenizer extension: old IDs are unchanged, and new text needs fewer tokens."""

import dataclasses
import itertools
import json
import re
from collections import Counter

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from pretrain.data.tokenizer import load_tokenizer
from pretrain.errors import InputError
from pretrain_tools.preparation.encode import ReferenceEncoder
from pretrain_tools.preparation.tokenizer_extension import extended, frequent_pairs
from support.project import run_script

NEW_TEXT = "gradient_checkpointing = True  # gradient_checkpointing, ungradient\n" * 40


def test_the_merges_equal_a_full_recount_after_each():
    words = [list("abab"), list("abc"), list("aaaa"), list("bca"), list("x")]
    counts = [5, 7, 3, 6, 9]
    found = []
    expected = []
    slow = [list(word) for word in words]
    for pair in frequent_pairs([list(word) for word in words], counts):
        found.append(pair)
        pairs = Counter()
        for word, count in zip(slow, counts, strict=True):
            for neighbors in itertools.pairwise(word):
                pairs[neighbors] += count
        expected.append(min(pairs, key=lambda pair: (-pairs[pair], pair)))
        for word in slow:
            place = 0
            while place < len(word) - 1:
                if (word[place], word[place + 1]) == pair:
                    word[place : place + 2] = ["".join(pair)]
                place += 1
    assert found == expected and len(found) > 4
    assert all(len(word) == 1 for word in slow)


def test_old_ids_stay_and_new_ones_are_used(tokenizer):
    base = load_tokenizer(tokenizer)
    size = base.vocabulary_size + 12
    new = extended(base, [NEW_TEXT], size, ["<|user|>", base.end_of_document])
    old_ids = Tokenizer.from_buffer(base.json).get_vocab()
    ids = Tokenizer.from_buffer(new.json).get_vocab()
    assert new.vocabulary_size == size and sorted(ids.values()) == list(range(size))
    assert {token: ids[token] for token in old_ids} == old_ids
    assert ids["<|user|>"] == base.vocabulary_size
    encoded = [next(iter(ReferenceEncoder(which).encode([NEW_TEXT.encode()]))) for which in (base, new)]
    assert set(range(base.vocabulary_size + 1, size)) & set(encoded[1])
    assert len(encoded[1]) < 0.7 * len(encoded[0])
    for text in (NEW_TEXT, "Größe 12345, naïve <|user|> 日本語"):
        ids = next(iter(ReferenceEncoder(new).encode([text.encode()])))
        decoded = Tokenizer.from_buffer(new.json).decode(ids.tolist(), skip_special_tokens=False)
        assert decoded == text and base.vocabulary_size not in ids


def test_unsupported_tokenizers_are_not_extended(tokenizer):
    base = load_tokenizer(tokenizer)
    with pytest.raises(InputError, match="already has 512 tokens and --special_tokens adds 1"):
        extended(base, [], 512, ["<|user|>"])
    content = json.loads(base.json)
    content["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
    other = dataclasses.replace(base, json=json.dumps(content).encode())
    with pytest.raises(InputError, match="only byte-level BPE tokenizers can be extended"):
        extended(other, [], 600, [])


def test_tokens_that_already_exist_do_not_become_special(tokenizer):
    base = load_tokenizer(tokenizer)
    backend = Tokenizer.from_buffer(base.json)
    word = backend.id_to_token(base.vocabulary_size - 1)
    backend.add_tokens(["<think>"])
    added = dataclasses.replace(base, json=backend.to_str().encode(), vocabulary_size=base.vocabulary_size + 1)
    said = f"already has the tokens {word} (ID {base.vocabulary_size - 1}), <think> (ID {base.vocabulary_size}); omit"
    with pytest.raises(InputError, match=re.escape(said)):
        extended(added, [NEW_TEXT], base.vocabulary_size + 12, ["<|user|>", word, "<think>"])


@pytest.mark.parametrize("extends", [False, True])
def test_ordinary_words_do_not_become_special(run, tokenizer, tmp_path, extends):
    (tmp_path / "a.txt").write_text(NEW_TEXT)
    options = ["--input", tmp_path / "a.txt", "--validation_fraction", 0, "--output", tmp_path / "new"]
    options += ["--train_tokenizer", 600, "--special_tokens", "<|user|>", "zyxself", "####", " "]
    with pytest.raises(InputError, match="--special_tokens 'zyxself' '####' ' ': can't be told apart from"):
        run(*options, with_tokenizer=extends)
    assert not (tmp_path / "new").exists()


def test_the_command_extends_with_special_tokens(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text(NEW_TEXT)
    output = tmp_path / "new"
    options = ["--input", tmp_path / "a.txt", "--validation_fraction", 0, "--output", output]
    options += ["--tokenizer", tokenizer, "--train_tokenizer", 520, "--special_tokens", "<|a|>", "<|b|>"]
    run_script("prepare_data.py", *options)
    loaded = AutoTokenizer.from_pretrained(output)
    assert len(loaded) == 520 and loaded.convert_tokens_to_ids(["<|a|>", "<|b|>"]) == [512, 513]
    assert loaded.decode(loaded.encode(NEW_TEXT)) == NEW_TEXT
    record = json.loads((output / "training.json").read_text())
    assert record["extends"]["sha256"] == load_tokenizer(tokenizer).sha256


def test_the_chosen_pre_tokenizer_splits_words(tmp_path):
    (tmp_path / "a.txt").write_text("1234 12345678 can't CAN'T\n\n" * 30)
    found = {}
    for name in ("gpt4", "qwen2", "gpt2"):
        options = ["--input", tmp_path / "a.txt", "--validation_fraction", 0, "--output", tmp_path / name]
        run_script("prepare_data.py", *options, "--train_tokenizer", 280, "--pre_tokenizer", name)
        backend = Tokenizer.from_file(str(tmp_path / name / "tokenizer.json"))
        found[name] = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str("12345 CAN'T")]
    assert found == {
        "gpt4": ["123", "45", "ĠCAN", "'T"],
        "qwen2": [*"12345", "ĠCAN", "'T"],
        "gpt2": ["12345", "ĠCAN", "'", "T"],
    }


def test_training_options_are_rejected_without_training(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    options = ["--input", tmp_path / "a.txt", "--output", tmp_path / "out", "--tokenizer", tokenizer]
    given = ["--special_tokens", "", "--pre_tokenizer", "gpt5"]
    said = run_script("prepare_data.py", *options, *given, check=False).stderr
    assert "require --train_tokenizer SIZE" in said and "--pre_tokenizer gpt5: must be gpt4, qwen2 or gpt2" in said
    assert "keeps its own" in said and "cannot be empty" in said
