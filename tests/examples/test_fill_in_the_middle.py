"""Tests for the fill-in-the-middle example: document reordering and reproducible windows."""

import shutil

import numpy as np
import pytest
import yaml
from transformers import AutoTokenizer

from pretrain.config import Data
from pretrain.data.batches import Batches
from pretrain.errors import InputError
from pretrain.optim.batch_ramp import batch_ramp
from pretrain.registry import TRANSFORMATIONS, load_extensions
from support.numbered_shards import write_shards
from support.project import ROOT, events, run_script

EXAMPLE = str(ROOT / "examples/fill_in_the_middle.py")
NAME = "fill_in_the_middle"
TOKENS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
END_OF_DOCUMENT = 0


@pytest.fixture(scope="module")
def special(tokenizer, tmp_path_factory):
    """The tiny tokenizer with the three special tokens, added as in docs/own_data.md."""
    folder = tmp_path_factory.mktemp("tokenizers") / "fim"
    extended = AutoTokenizer.from_pretrained(tokenizer)
    extended.add_special_tokens({"additional_special_tokens": TOKENS})
    extended.save_pretrained(folder)
    return folder


def made(tokenizer, **options):
    load_extensions([EXAMPLE])
    kind = TRANSFORMATIONS[NAME]
    return kind(kind.Options(**options), tokenizer, END_OF_DOCUMENT)


def documents_of(ids):
    return [part.tolist() for part in np.split(ids, np.flatnonzero(ids == END_OF_DOCUMENT)) if len(part)]


def original(document, transformation):
    """Returns a document in its original order, and the format it was reordered to."""
    before, after, fill = transformation.prefix, transformation.suffix, transformation.middle
    opening = [token for token in document[:1] if token == END_OF_DOCUMENT]
    text = document[len(opening) :]
    if text[:1] != [before]:
        return document, "plain"
    first, last, end = text.index(before) + 1, text.index(after), text.index(fill)
    return [*opening, *text[first:last], *text[end + 1 :], *text[last + 1 : end]], "SPM" if last == first else "PSM"


def test_documents_are_reordered_within_themselves(special):
    transformation = made(special)
    lengths = (6, 30, 1, 2, 80, 41)
    ids = np.concatenate([np.arange(n) + 10 for n in lengths]).astype(np.uint16)
    ids[np.cumsum(lengths)[:-1]] = END_OF_DOCUMENT
    kinds = []
    for key in range(300):
        changed = transformation(ids, key)
        assert len(changed) == len(ids) and np.array_equal(changed, transformation(ids, key))
        complete = documents_of(changed)[:-1]  # the window may truncate the last document
        for before, after in zip(documents_of(ids), complete, strict=False):
            restored, kind = original(after, transformation)
            assert restored == before
            kinds.append(kind if len(before) > 10 else "short")
    shares = {kind: kinds.count(kind) / (len(kinds) - kinds.count("short")) for kind in ("plain", "PSM", "SPM")}
    assert shares == pytest.approx({"plain": 0.5, "PSM": 0.25, "SPM": 0.25}, abs=0.06)


@pytest.mark.parametrize(("options", "kinds"), [({"rate": 0}, {"plain"}), ({"rate": 1, "spm_rate": 1}, {"SPM"})])
def test_documents_are_transformed_at_the_given_rates(special, options, kinds):
    transformation = made(special, **options)
    ids = np.array([END_OF_DOCUMENT, *range(10, 40), END_OF_DOCUMENT, 7, 8])
    assert {original(documents_of(transformation(ids, key))[0], transformation)[1] for key in range(50)} == kinds


def test_a_tokenizer_without_the_tokens_is_refused(special, tokenizer):
    with pytest.raises(InputError, match=r"special tokens .*; set tokens: .PREFIX, SUFFIX, MIDDLE. to the tokenizer"):
        made(tokenizer)
    with pytest.raises(InputError, match="doesn't have the special tokens <A>, <B>, <C>;"):
        made(special, tokens=["<A>", "<B>", "<C>"])


def test_windows_are_the_same_on_any_number_of_ranks_and_after_a_resume(special, tmp_path):
    load_extensions([EXAMPLE])
    folder = write_shards(tmp_path / "a", 5_000, vocabulary=600)
    shutil.copytree(special, folder / "tokenizer")

    def batches(**changes):
        values = {"train": [{"shards": folder}], "sequence_length": 64, "transformations": {NAME: {"rate": 1.0}}}
        ramp = batch_ramp(4, total_steps=60, ramp_from=1.0, ramp_over=0.0)
        return Batches(Data(**values | changes), seed=1, ramp=ramp)

    def step(number, ranks=1, sequences=4, **changes):
        found = batches(**changes)
        micro_steps = 4 // (ranks * sequences)
        parts = [
            found.read(number, micro_step, rank, ranks=ranks, sequences=sequences)
            for micro_step in range(micro_steps)
            for rank in range(ranks)
        ]
        return np.concatenate(parts)

    for number in (0, 25, 59):
        whole = step(number)
        assert np.array_equal(whole, step(number, ranks=2, sequences=1))
        assert np.array_equal(whole, step(number, ranks=4, sequences=1))
        assert not np.array_equal(whole, step(number, transformations={}))
    later = batches().changed(skipped=[(8, 4)]).read(2, 0, 0, ranks=1, sequences=4)
    assert np.array_equal(later, step(3)), "skipping samples must not change another sample's index"
    first, again = (batches().read(number, 0, 0, ranks=1, sequences=4) for number in (0, 39))
    assert not {row.tobytes() for row in first} & {row.tobytes() for row in again}


def test_a_run_trains_on_transformed_windows_and_validates_on_the_text(recipe, special, text_files, tmp_path):
    words = ("--input", f"{text_files}/*.py", "--validation_fraction", "0.2", "--tokenizer", special)
    run_script("prepare_data.py", *words, "--output", tmp_path / "shards")
    values = yaml.safe_load(recipe.read_text())
    values["data"]["train"] = [{"shards": str(tmp_path / "shards")}]
    values |= {"budget": {"steps": 2}, "extensions": [EXAMPLE]}
    recipe.write_text(yaml.safe_dump(values))
    again = ("train.py", "--config", recipe, "--model.vocab_size", "auto")
    run_script(*again, "--output", tmp_path / "plain")
    run_script(*again, "--data.transformations", f"{{{NAME}: {{rate: 1}}}}")
    run, plain = (tmp_path / name for name in ("run", "plain"))
    assert events(run, "train")[0]["loss"] != events(plain, "train")[0]["loss"]
    before = [[event for event in events(folder, "validation") if event["step"] == 0] for folder in (run, plain)]
    assert before[0][0]["loss"] == before[1][0]["loss"]
    told = run_script(*again, "--budget.steps", "3").stdout
    assert "data.transformations: {'fill_in_the_middle': {'rate': 1}} until now" in told
    refused = run_script(*again, "--check", "--data.transformations", f"{{{NAME}: {{rat: 1}}}}", check=False)
    assert refused.returncode == 2 and "transformations.fill_in_the_middle has no option rat" in refused.stderr
