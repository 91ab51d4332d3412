"""Tests for decontamination: planted items and real lm-eval tasks are removed and reported."""

import json
import re
import string
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from pretrain.data.data_record import contamination_of, numbers_in
from pretrain.data.shards import open_shards
from pretrain.data.tokenizer import load_decoder
from pretrain.errors import InputError
from pretrain_tools.preparation.cleaning.account import CleaningAccount, ranges_text
from pretrain_tools.preparation.cleaning.decontamination import (
    Decontamination,
    read_benchmarks,
)
from pretrain_tools.preparation.cleaning.stages import TextBatch
from support.prepared import content_of, write_jsonl

RNG = np.random.default_rng(3)
LETTERS = list(string.ascii_lowercase)


def sentence(count):
    """Returns a sentence of random words."""
    return " ".join("".join(RNG.choice(LETTERS, 7)) for _ in range(count)).capitalize() + "."


LONG = [sentence(20) for _ in range(12)]
SHORT = [sentence(5) for _ in range(12)]
COPIES = (str, str.upper, lambda text: text.translate(str.maketrans(" ", "\n", ".")), lambda text: f'"{text[:-1]}"!')


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """(arguments, indices of the documents with items). 24 of 96 documents contain an item from one of two files, in
    different spelling."""
    for name in ("documents.formats.PART_BYTES", "documents.sources.PART_BYTES", "documents.byte_stream.READ_BYTES"):
        monkeypatch.setattr(f"pretrain_tools.preparation.{name}", 3000)
    write_jsonl(tmp_path / "long.jsonl", LONG)
    (tmp_path / "short.txt").write_text("\n\n".join([*SHORT, "Too short."]))
    documents = [f"{number} {sentence(40)} {sentence(40)}" for number in range(96)]
    holding = []
    for number, item in enumerate((*LONG[:9], *SHORT, *LONG[:3])):
        holding.append(number * 4)
        documents[number * 4] += f" {COPIES[number % 4](item)} {sentence(60)}"
    write_jsonl(tmp_path / "a.jsonl", documents[:50])
    write_jsonl(tmp_path / "b.jsonl", documents[50:])
    items = f"{tmp_path / 'long.jsonl'},{tmp_path / 'short.txt'}"
    inputs = ("--input", tmp_path / "a.jsonl", tmp_path / "b.jsonl", "--validation_fraction", 0.1)
    return (*inputs, "--decontaminate", items), holding


def documents_in(folder):
    decoder = load_decoder(folder / "tokenizer")
    texts = []
    for split in ("train", "validation"):
        reader = open_shards(folder, split)
        ids = np.zeros(reader.tokens, np.int64)
        reader.read(0, ids)
        ends = np.flatnonzero(ids == reader.manifest.end_of_document_id)
        texts += [
            decoder.decode(piece[piece != ids[ends[0]]].tolist()) for piece in np.split(ids, ends + 1) if piece.size
        ]
    return texts


def test_every_planted_item_is_found_and_nothing_else(planted, tmp_path, run):
    arguments, holding = planted
    told = run(*arguments, "--output", tmp_path / "out", "--workers", 1)
    left = {int(text.split()[0]) for text in documents_in(tmp_path / "out")}
    assert left == set(range(96)) - set(holding)
    manifest = json.loads((tmp_path / "out/manifest.json").read_bytes())
    found = manifest["cleaning"]["found"]
    assert found["long.jsonl"]["entries"] == "0-8" and found["long.jsonl"]["documents"] == 12
    assert found["short.txt"]["entries"] == "0-11" and found["short.txt"]["documents"] == 12
    assert manifest["cleaning"]["removed"]["decontamination.short.txt"]["documents"] == 12
    assert "long.jsonl: found 9 of 12 items in 12 documents; removed the documents" in told
    assert "short.txt: found 12 of 13 items (1 too short to search for) in 12 documents" in told
    assert "short.txt: found 12 of 13 items" in run("--inspect", tmp_path / "out", with_tokenizer=False)
    assert str(tmp_path) not in (tmp_path / "out/manifest.json").read_text()


def test_workers_and_slices_change_no_byte(planted, tmp_path, run):
    arguments = planted[0]
    run(*arguments, "--output", tmp_path / "one", "--workers", 1)
    run(*arguments, "--output", tmp_path / "two", "--workers", 2)
    for number in range(3):
        run(*arguments, "--output", tmp_path / "three", "--slice", f"{number}/3", "--workers", 1)
    run(*arguments, "--output", tmp_path / "three", "--merge_slices", 3, "--workers", 1)
    assert content_of(tmp_path / "two") == content_of(tmp_path / "three") == content_of(tmp_path / "one")


def test_changed_benchmarks_are_rejected(planted, tmp_path, run):
    run(*planted[0], "--output", tmp_path / "out", "--workers", 1)
    write_jsonl(tmp_path / "long.jsonl", [*LONG[:-1], sentence(20)])
    with pytest.raises(InputError, match=r"finished with different options or input: options\.cleaning.*") as caught:
        run(*planted[0], "--output", tmp_path / "out", "--workers", 1)
    name = r"options\.cleaning\.decontamination\.benchmarks\.long\.jsonl\.sha256"
    # The message must show only the difference, not both lists.
    assert re.search(rf"different options or input: {name} was '\w+' but is now '\w+'; use a new", str(caught.value))


TASKS = {
    "quiz": (
        [{"id": "quiz_17_validation_set", "support": "A text of the web that was there before it was in this item.",
          "question": "Which of these is it then?", "options": ["the first one", "the other"], "label": 1}],
        {"output_type": "multiple_choice", "doc_to_text": "{{support}}\nQuestion: {{question}}\nAnswer:",
         "doc_to_choice": "{{options}}", "doc_to_target": "label"},
    ),
    "pairs": (
        [{"good": "Some turtles alarm Kimberley.", "bad": "Some turtles come here Kimberley.", "field": "syntax"}],
        {"output_type": "multiple_choice", "doc_to_text": "", "doc_to_choice": "{{[good, bad]}}", "doc_to_target": 0},
    ),
    "sums": (
        [{"problem": "Ann has two pears and eats one.", "answer": "She has one pear."}],
        {"output_type": "generate_until", "doc_to_text": "Q: {{problem}} A:", "doc_to_target": "{{answer}}"},
    ),
    "blanks": (
        [{"sentence": "Ann saw Mary, but _ was late.", "option1": "Ann", "option2": "Mary", "answer": "2"}],
        {"output_type": "multiple_choice", "doc_to_text": "{{answer|int - 1}}", "doc_to_target": "was late.",
         "doc_to_choice": "{{ [sentence.split('_')[0] + option1, sentence.split('_')[0] + option2] }}"},
    ),
    "edited": (
        [{"ctx": "Removing ice [title] from a car: a man [step] scrapes the window.",
          "endings": ["He stops.", "It rains."]}],
        {"output_type": "multiple_choice", "doc_to_target": 0, "doc_to_choice": "{{endings}}",
         "doc_to_text": "Go on: {{ctx.replace('[title]', '').replace('[step]', '')|upper}}\nAnswer:"},
    ),
}  # fmt: skip
NATURAL = {
    "blanks": ["Ann saw Mary, but Ann was late.", "Ann saw Mary, but Mary was late."],
    "edited": ["Removing ice [title] from a car: a man [step] scrapes the window. He stops."],
}
UNNATURAL = [
    "Ann saw Mary",
    "it was late.",
]


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A folder that contains tasks/, and files/ with the same items as plain files."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for folder in ("tasks", "files"):
        (tmp_path / folder).mkdir()
    for name, (rows, task) in TASKS.items():
        path = tmp_path / f"tasks/{name}.data.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / f"files/{name}.jsonl").write_bytes(path.read_bytes())
        given = {"task": name, "dataset_path": "json", "validation_split": "validation"}
        given["dataset_kwargs"] = {"data_files": {"validation": str(path)}}
        (tmp_path / f"tasks/{name}.yaml").write_text(yaml.safe_dump(task | given))
    return tmp_path


@pytest.mark.parametrize("folder", ["tasks", "files"])
def test_items_are_found_in_natural_form_for_any_prompt_and_fields(tasks, folder):
    benchmarks = read_benchmarks([str(tasks / folder)])
    for benchmark in benchmarks:
        name = benchmark.name.removesuffix(".jsonl")
        stage = Decontamination((benchmark,))
        (recorded,) = stage.as_plan()["benchmarks"]
        assert recorded["sought"] == recorded["items"] == len(TASKS[name][0])
        texts = [*NATURAL.get(name, []), *UNNATURAL]
        verdicts = stage.judge(TextBatch([text.encode() for text in texts], [None] * len(texts)))
        assert sorted(verdicts.removed) == list(range(len(texts) - len(UNNATURAL))), name


def test_lm_eval_items_are_questions_with_answers(tasks):
    # Naming a task twice doesn't repeat its items.
    found = {b.name: b for b in read_benchmarks([str(tasks / "tasks"), str(tasks / "tasks/quiz.yaml")])}
    assert sorted(found) == sorted(TASKS)
    pairs = found["pairs"]
    quiz = found["quiz"]
    sums = found["sums"]
    question = "Which of these is it then?"
    # The task's own words, the passage and the ID aren't part of an item.
    assert quiz.items == [[[question, f"{question} the first one", f"{question} the other"], []]]
    assert pairs.items == [[["Some turtles alarm Kimberley.", "Some turtles come here Kimberley."], []]]
    problem = "Ann has two pears and eats one."
    assert sums.items == [[[problem, f"{problem} She has one pear."], []]]


def test_files_with_the_same_name_are_separate_benchmarks(tmp_path):
    for name in ("a/test.jsonl", "b/test.jsonl", "b/more.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f'"{name} {SHORT[0]}"\n')
    benchmarks = read_benchmarks([str(tmp_path / "a/test.jsonl"), str(tmp_path)])
    assert [benchmark.name for benchmark in benchmarks] == ["a/test.jsonl", "more.txt", "b/test.jsonl"]


def test_unreadable_benchmarks_are_named(tmp_path, monkeypatch):
    (tmp_path / "bad.jsonl").write_text('{"a": 1\n')
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "items.csv").write_text("a,b\n")
    printed = json.dumps(
        {"items": {}, "problems": ["helaswag: LookupError: no such task, and no such file or folder"]}
    )
    monkeypatch.setattr("subprocess.run", lambda *_, **__: SimpleNamespace(returncode=0, stdout=printed, stderr=""))
    with pytest.raises(InputError) as caught:
        read_benchmarks([str(tmp_path / name) for name in ("bad.jsonl", "empty.txt", "items.csv")] + ["helaswag"])
    bad, items, task, empty = caught.value.problems
    assert "bad.jsonl, line 1: invalid JSON" in bad and "items.csv: must be a .jsonl, .ndjson, .txt" in items
    assert "--decontaminate helaswag: LookupError: no such task" in task and "empty.txt: contains no items" in empty
    (tmp_path / "numbers.jsonl").write_text('{"id": 1}\n')
    with pytest.raises(InputError, match="contains no items with text"):
        read_benchmarks([str(tmp_path / "numbers.jsonl")])
    failed = SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nImportError: no lm_eval\n")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: failed)
    with pytest.raises(InputError, match=r"lm-eval failed \(ImportError: no lm_eval\)"):
        read_benchmarks(["hellaswag"])


def test_findings_of_parts_add_up_in_any_division():
    rng = np.random.default_rng(0)
    findings = [("ab"[n % 2], set(rng.integers(0, 40, n % 3).tolist())) for n in range(60)]

    def account_of(cuts):
        whole = CleaningAccount()
        for first, stop in zip((0, *cuts), (*cuts, len(findings)), strict=True):
            part = CleaningAccount()
            for name, entries in findings[first:stop]:
                part.add_found(name, 1, entries)
            whole.add(part)
        return whole

    whole = account_of(())
    assert account_of((7, 8, 31)) == whole == account_of(range(1, 60))
    assert numbers_in(whole.found["a"]["entries"]) == set().union(*(found for _, found in findings[::2]))
    assert ranges_text([7, 1, 2, 3, 9]) == "1-3,7,9" and numbers_in("") == set()


def test_folders_without_decontamination_report_nothing():
    assert contamination_of({}) == contamination_of({"options": {"cleaning": None}}) == []
