import json
import shutil

import numpy as np
import pytest

from pretrain.data.tokenizer import LoadedTokenizer, load_tokenizer
from pretrain.errors import InputError
from pretrain_tools.preparation.documents.formats import Reading
from pretrain_tools.preparation.documents.sources import Files, find_sources
from pretrain_tools.preparation.encode import (
    AGREEMENT_TEXTS,
    DisagreementError,
    FastEncoder,
    ReferenceEncoder,
    make_encoder,
)
from pretrain_tools.preparation.plan import PreparationOptions, PreparationRequest
from pretrain_tools.preparation.tokenizer_training import train_tokenizer

END = "<|endoftext|>"
TEXTS = [text.encode() for text in AGREEMENT_TEXTS] + [
    bytes(range(128)),
    "".join(map(chr, range(0x80, 0x3000, 7))).encode(),
    b"",
    b"print('x')\r\n" * 2000,
]


@pytest.fixture(scope="module")
def loaded(tokenizer) -> LoadedTokenizer:
    return load_tokenizer(tokenizer)


def changed(tokenizer, tmp_path, **changes):
    """Returns a copy of a tokenizer folder with changed fields in tokenizer.json."""
    folder = tmp_path / "changed"
    shutil.copytree(tokenizer, folder)
    fields = json.loads((folder / "tokenizer.json").read_text())
    fields.update(changes)
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    return folder


def write_wordpiece(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "b": 2, "[SEP]": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["[SEP]"])
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("make", [ReferenceEncoder, FastEncoder])
def test_byte_level_text_decodes_exactly(loaded, tokenizer, make):
    from transformers import AutoTokenizer

    decode = AutoTokenizer.from_pretrained(tokenizer).decode
    for text, ids in zip(TEXTS, make(loaded).encode(TEXTS), strict=True):
        assert decode(ids.tolist()).encode() == text


def test_fast_and_reference_and_transformers_give_the_same_ids(loaded, tokenizer):
    from transformers import AutoTokenizer

    transformers_tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    fast = FastEncoder(loaded).encode(TEXTS)
    reference = ReferenceEncoder(loaded).encode(TEXTS)
    for text, fast_ids, reference_ids in zip(TEXTS, fast, reference, strict=True):
        assert fast_ids.tolist() == reference_ids.tolist()
        assert reference_ids.tolist() == transformers_tokenizer(text.decode(), add_special_tokens=False).input_ids
    FastEncoder(loaded).compare(TEXTS)


@pytest.mark.parametrize("make", [ReferenceEncoder, FastEncoder])
def test_special_tokens_in_text_are_plain_text(loaded, make):
    text = f"a{END}b {END}{END}".encode()
    (ids,) = make(loaded).encode([text])
    assert loaded.end_of_document_id not in ids
    assert len(ids) > 20


def test_an_end_token_that_is_not_marked_special_is_plain_text_too(tokenizer, tmp_path):
    fields = json.loads((tokenizer / "tokenizer.json").read_text())
    fields["added_tokens"][0]["special"] = False
    loaded = load_tokenizer(changed(tokenizer, tmp_path, added_tokens=fields["added_tokens"]))
    for make in (ReferenceEncoder, FastEncoder):
        (ids,) = make(loaded).encode([f"a{END}b".encode()])
        assert loaded.end_of_document_id not in ids


@pytest.mark.parametrize(("flag", "text"), [("single_word", "xfoxes fox"), ("rstrip", "a fox  <tag> b")])
def test_flags_of_added_tokens_are_followed(tokenizer, tmp_path, flag, text):
    from tokenizers import AddedToken

    backend = load_tokenizer(tokenizer).backend.from_file(str(tokenizer / "tokenizer.json"))
    backend.add_tokens([AddedToken(content, **{flag: True}) for content in ("fox", " <tag>")])
    folder = changed(tokenizer, tmp_path)
    backend.save(str(folder / "tokenizer.json"))
    loaded = load_tokenizer(folder)
    fast, reference = (make(loaded).encode([text.encode()])[0].tolist() for make in (FastEncoder, ReferenceEncoder))
    assert fast == reference


def test_templates_truncation_and_padding_of_a_tokenizer_are_ignored(tokenizer, tmp_path, loaded):
    folder = changed(
        tokenizer,
        tmp_path,
        truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 99},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": END,
        },
        post_processor={
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": END, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {END: {"id": END, "ids": [0], "tokens": [END]}},
        },
    )
    (expected,) = ReferenceEncoder(loaded).encode([TEXTS[0]])
    encoder, _ = make_encoder(load_tokenizer(folder), "auto")
    for each in (encoder, ReferenceEncoder(load_tokenizer(folder))):
        assert each.encode([TEXTS[0]])[0].tolist() == expected.tolist()


def test_auto_uses_the_fast_path_if_it_agrees(loaded):
    encoder, reason = make_encoder(loaded, "auto")
    assert (type(encoder), reason) == (FastEncoder, None)
    assert type(make_encoder(loaded, "reference")[0]) is ReferenceEncoder


def test_auto_falls_back_for_unsupported_tokenizers(tmp_path):
    loaded = load_tokenizer(write_wordpiece(tmp_path / "t"), "[SEP]")
    encoder, reason = make_encoder(loaded, "auto")
    assert type(encoder) is ReferenceEncoder
    assert "gigatoken" in reason
    assert encoder.encode([b"a b [SEP]"])[0].tolist()[:2] == [1, 2]


def test_a_disagreement_is_found(loaded, monkeypatch):
    encoder = FastEncoder(loaded)
    encoder.compare([b"one two"])
    right = encoder._encode
    encoder._encode = lambda text: right(text)[:-1] if b"two" in text else right(text)
    with pytest.raises(DisagreementError, match="different token IDs for 'one two'"):
        encoder.compare([b"three", b"one two", b"four"])


def test_encoders_can_be_pickled(loaded):
    import pickle

    for make in (ReferenceEncoder, FastEncoder):
        encoder = make(loaded)
        again = pickle.loads(pickle.dumps(encoder))
        assert np.array_equal(again.encode(TEXTS[:1])[0], encoder.encode(TEXTS[:1])[0])


def test_folder_file_and_saved_copy_are_the_same_tokenizer(tokenizer, loaded, tmp_path):
    from_file = load_tokenizer(tokenizer / "tokenizer.json")
    assert from_file.sha256 == loaded.sha256
    assert from_file.name == loaded.name == tokenizer.name
    assert (from_file.vocabulary_size, from_file.end_of_document) == (512, END)
    from_file.save(tmp_path / "copy")
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(tmp_path / "copy").eos_token == END
    assert load_tokenizer(tmp_path / "copy").sha256 == loaded.sha256


def test_vocabulary_and_merges_without_tokenizer_json(tokenizer, loaded, tmp_path):
    model = json.loads(loaded.json)["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": END, "bos_token": END, "unk_token": END}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    converted = load_tokenizer(tmp_path)
    assert (converted.vocabulary_size, converted.end_of_document_id) == (512, loaded.end_of_document_id)
    (ids,) = ReferenceEncoder(converted).encode([b"import os\n"])
    assert b"tokenizer.json" not in converted.files
    assert len(ids) > 1


def test_the_end_of_document_is_given_or_found_or_required(tokenizer, tmp_path):
    assert load_tokenizer(tokenizer, "a").end_of_document == "a"
    with pytest.raises(InputError, match=r"has no token '</s>'; set .* --end_of_document TOKEN"):
        load_tokenizer(tokenizer, "</s>")
    with pytest.raises(InputError, match=r"has no token '<\|endoftext\|>'.*special tokens: \[SEP\]"):
        load_tokenizer(write_wordpiece(tmp_path / "t"))


def test_missing_and_broken_tokenizers_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match="no such tokenizer folder or file; use a tokenizer folder"):
        load_tokenizer("./no/such/folder")
    with pytest.raises(InputError, match=r"contains no tokenizer files, such as tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(InputError, match=r"the tokenizers library cannot load this tokenizer"):
        load_tokenizer(tmp_path)


def train(tmp_path, output, size=400, text_bytes=200_000_000, **options):
    documents = Files(find_sources([f"{tmp_path}/*.txt"]))
    options = PreparationOptions(reading=Reading(documents="paragraph"), **options)
    train_tokenizer(
        PreparationRequest(documents, options, None, output, vocabulary_size=size, sample_bytes=text_bytes)
    )


def write_paragraphs(path, count=300):
    rng = np.random.default_rng(0)
    words = ["attention", "is", "all", "you", "need", "1234567", "don't", "naïve", "the", "model"]
    path.write_text("\n\n".join(" ".join(rng.choice(words, 40)) for _ in range(count)))


def test_training_is_deterministic_and_reports_compression_on_unseen_text(tmp_path, capsys):
    write_paragraphs(tmp_path / "a.txt")
    train(tmp_path, tmp_path / "one", validation_fraction=0.1)
    printed = capsys.readouterr().out
    assert "bytes per token on" in printed
    assert "held-out" in printed
    train(tmp_path, tmp_path / "two", validation_fraction=0.1)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_repeated_training_is_recognized_and_other_options_are_rejected(tmp_path, capsys):
    write_paragraphs(tmp_path / "a.txt")
    train(tmp_path, tmp_path / "one")
    before = (tmp_path / "one" / "tokenizer.json").stat().st_mtime_ns
    train(tmp_path, tmp_path / "one")
    assert "already complete" in capsys.readouterr().out
    assert (tmp_path / "one" / "tokenizer.json").stat().st_mtime_ns == before
    with pytest.raises(
        InputError, match="was trained with different options or input: vocabulary_size was 400 but is now 300"
    ):
        train(tmp_path, tmp_path / "one", size=300)
    write_paragraphs(tmp_path / "b.txt", 2)
    with pytest.raises(InputError, match=r"source b.txt was added"):
        train(tmp_path, tmp_path / "one")


def test_the_sample_is_bounded(tmp_path, capsys):
    write_paragraphs(tmp_path / "a.txt")
    train(tmp_path, tmp_path / "one", text_bytes=20_000)
    taken = int(capsys.readouterr().out.split("trained on ")[1].split(" bytes")[0].replace(",", ""))
    assert 10_000 < taken < 25_000


def test_words_and_digits_are_split_as_in_current_models(tmp_path):
    write_paragraphs(tmp_path / "a.txt")
    train(tmp_path, tmp_path / "one")
    loaded = load_tokenizer(tmp_path / "one")
    pieces = {ids.tobytes() for ids in ReferenceEncoder(loaded).encode([b"123", b"456", b"7", b" attention", b"'t"])}
    assert len(ReferenceEncoder(loaded).encode([b"1234567"])[0]) == 3
    assert all(len(piece) == 4 for piece in pieces)


def test_bad_training_input_leaves_nothing_behind(tmp_path):
    with pytest.raises(InputError, match="--train_tokenizer 256: must be at least 257"):
        write_paragraphs(tmp_path / "a.txt", 3)
        train(tmp_path, tmp_path / "one", size=256)
    (tmp_path / "a.txt").write_bytes(b"ok\n\nbad \xff\n\nok")
    with pytest.raises(InputError, match=r"a.txt, line 3: not UTF-8"):
        train(tmp_path, tmp_path / "one")
    (tmp_path / "a.txt").write_bytes(b"\n\n")
    with pytest.raises(InputError, match="the input contains no documents to train on"):
        train(tmp_path, tmp_path / "one")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_too_little_text_for_the_vocabulary_is_reported(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("the the the")
    train(tmp_path, tmp_path / "one", size=1000)
    assert "Created only 260 of 1,000 tokens: the text has too few pairs to merge" in capsys.readouterr().out
