import gzip
import io
import json
import os
import subprocess
import sys
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import prepare_data
from pretrain.data.shards import read_manifest
from pretrain.data.tokenizer import load_tokenizer
from pretrain.errors import InputError
from pretrain_tools.preparation.documents.hub_dataset import open_dataset
from pretrain_tools.preparation.documents.records import Reading, is_drawn
from pretrain_tools.preparation.documents.sources import BEGINNING, Position
from pretrain_tools.preparation.encode import FastEncoder, ReferenceEncoder
from pretrain_tools.preparation.verification import verify_shards
from support.prepared import END, as_parquet, content_of, make_parts_small, stream_of, texts, write_jsonl
from support.project import ROOT, cpu_seconds, run_script

EVERYTHING = os.environ.get("FAULTS") == "all"


def test_shards_have_every_document_in_order_with_its_end_id(tmp_path, run, tokenizer):
    documents = texts()
    write_jsonl(tmp_path / "a.jsonl", documents)
    run("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--validation_fraction", "0.1")
    encoder = ReferenceEncoder(load_tokenizer(tokenizer))
    end = read_manifest(tmp_path / "out").end_of_document_id
    for split in ("train", "validation"):
        of_split = [d.encode() for d in documents if is_drawn(d.encode(), 0.1) == (split == "validation")]
        expected = [i for ids in encoder.encode(of_split) for i in [*ids.tolist(), end]]
        assert stream_of(tmp_path / "out", split).tolist() == expected
        assert read_manifest(tmp_path / "out").totals(split) == (
            len(expected),
            len(of_split),
            sum(map(len, of_split)),
        )
    assert 20 < len(of_split) < 60
    assert verify_shards(tmp_path / "out") == []


def test_the_tokenizer_is_copied_to_the_shards(tmp_path, run, tokenizer):
    from transformers import AutoTokenizer

    write_jsonl(tmp_path / "a.jsonl", ["one text"])
    run("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--validation_fraction", "0")
    decode = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer").decode
    assert decode(stream_of(tmp_path / "out", "train")) == "one text" + END


def test_workers_engines_and_order_of_options_change_no_byte(tmp_path, run, monkeypatch):
    make_parts_small(monkeypatch, 2000)
    write_jsonl(tmp_path / "a.jsonl", texts())
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    folders = []
    for number, options in enumerate((["--workers", 1], ["--workers", 3], ["--engine", "reference", "--workers", 2])):
        folders.append(tmp_path / f"out{number}")
        run("--input", f"{tmp_path}/*.jsonl*", "--output", folders[-1], "--shard_tokens", "5k", *options)
    assert len(read_manifest(folders[0]).shards) > 5
    assert content_of(folders[0]) == content_of(folders[1]) == content_of(folders[2])


def test_the_manifest_has_no_information_about_the_machine(tmp_path, run):
    write_jsonl(tmp_path / "a.jsonl", texts(5))
    run("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--workers", 1)
    text = (tmp_path / "out" / "manifest.json").read_text()
    assert str(tmp_path) not in text
    assert json.loads(text)["sources"][0]["path"] == "a.jsonl"
    assert "workers" not in text


def test_running_again_redoes_nothing(tmp_path, run):
    write_jsonl(tmp_path / "a.jsonl", texts(20))
    arguments = ("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out")
    run(*arguments)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")}
    assert "already complete" in run(*arguments)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")} == before


def test_a_folder_from_a_different_request_is_rejected_with_the_differences(tmp_path, run):
    write_jsonl(tmp_path / "a.jsonl", texts(20))
    arguments = ("--input", f"{tmp_path}/*.jsonl", "--output", tmp_path / "out")
    run(*arguments)
    before = content_of(tmp_path / "out")
    with pytest.raises(
        InputError, match=r"with different options or input: options\.shard_tokens was 100000000 but is now"
    ):
        run(*arguments, "--shard_tokens", "1M")
    write_jsonl(tmp_path / "b.jsonl", ["new"])
    write_jsonl(tmp_path / "a.jsonl", texts(21))
    with pytest.raises(InputError, match=r"source b.jsonl was added; source a.jsonl has changed; use a new --output"):
        run(*arguments)
    assert content_of(tmp_path / "out") == before


def test_a_folder_with_other_files_is_left_alone(tmp_path, run):
    write_jsonl(tmp_path / "a.jsonl", texts(5))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("x")
    with pytest.raises(InputError, match=r"already contains other files \(precious.txt\)"):
        run("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out")
    assert content_of(tmp_path / "out") == {"precious.txt": b"x"}


def test_limits_are_exact_to_the_document(tmp_path, run):
    write_jsonl(tmp_path / "a.jsonl", texts())
    run("--input", tmp_path / "a.jsonl", "--output", tmp_path / "n", "--max_documents", 7, "--validation_fraction", 0)
    assert read_manifest(tmp_path / "n").totals("train")[1] == 7
    whole = stream_of(tmp_path / "n", "train")
    ends = np.flatnonzero(whole == read_manifest(tmp_path / "n").end_of_document_id) + 1
    limit = int(ends[3]) + 1
    run("--input", tmp_path / "a.jsonl", "--output", tmp_path / "t", "--max_tokens", limit, "--validation_fraction", 0)
    assert stream_of(tmp_path / "t", "train").tolist() == whole[: ends[3]].tolist()


BAD_LINES = {
    "invalid JSON": b'{"text": "cut',
    "no field 'text'": b'{"body": "x"}',
    "not UTF-8": b'{"text": "\xff\xfe"}',
    "lone surrogate": b'{"text": "\\udc00"}',
}


@pytest.mark.parametrize(("reason", "line"), BAD_LINES.items())
def test_a_bad_line_stops_with_its_place_and_leaves_nothing(tmp_path, run, reason, line):
    write_jsonl(tmp_path / "a.jsonl", texts(3), [b"", line, b'{"text": "after"}'])
    with pytest.raises(InputError) as caught:
        run("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out")
    (problem,) = caught.value.problems
    assert f"{tmp_path}/a.jsonl, line 5: " in problem
    assert reason in problem
    assert "fix the input, or use --on_error skip" in problem
    assert not (tmp_path / "out").exists()


def test_bad_lines_are_skipped_and_counted_up_to_the_limit(tmp_path, run):
    write_jsonl(tmp_path / "a.jsonl", texts(3), [*BAD_LINES.values(), b'{"text": ""}', b'{"text": "NUL \\u0000"}'])
    arguments = ("--input", tmp_path / "a.jsonl", "--validation_fraction", 0, "--on_error", "skip")
    printed = run(*arguments, "--output", tmp_path / "out", "--max_errors", 4)
    assert "4; skipped 1 empty, 4 bad" in printed
    assert "a.jsonl, line 4: invalid JSON" in printed
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["skipped"]["empty_documents"] == 1
    assert manifest["skipped"]["bad_records"] == 4
    assert manifest["skipped"]["first_bad_records"][3].startswith("a.jsonl, line 7: not valid Unicode")
    with pytest.raises(InputError, match=r"line 7: .*makes 4 bad records, but --max_errors is 3"):
        run(*arguments, "--output", tmp_path / "other", "--max_errors", 3)
    assert not (tmp_path / "other").exists()


def test_a_truncated_gzip_is_named_and_can_be_skipped(tmp_path, run):
    rng = np.random.default_rng(0)
    write_jsonl(tmp_path / "whole", [rng.bytes(100).hex() for _ in range(500)])
    content = gzip.compress((tmp_path / "whole").read_bytes())
    (tmp_path / "a.jsonl.gz").write_bytes(content[: len(content) // 2])
    arguments = ("--input", tmp_path / "a.jsonl.gz", "--output", tmp_path / "out")
    with pytest.raises(InputError, match=r"a.jsonl.gz, line \d+: gz data is truncated"):
        run(*arguments)
    assert not (tmp_path / "out").exists()
    assert "skipped 0 empty, 1 bad" in run(*arguments, "--on_error", "skip")


@pytest.mark.parametrize("content", [b"", b'{"text": ""}\n', b"\n\n"])
def test_input_without_documents_is_an_error_that_leaves_nothing(tmp_path, run, content):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=r"the input contains no documents .* nothing was written"):
        run("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--max_tokens", 5)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("goal", ["shards", "tokenizer"])
@pytest.mark.parametrize(
    "option, said",
    [
        (("--text_field", "body", "--on_error", "skip"), r"--text_field .*\n  a.jsonl, line 1: no field 'body'"),
        (("--min_characters", 100), r"0 bad, 2 filtered.* change --only, --min_characters"),
    ],
)
def test_why_no_documents_are_left_is_told(tmp_path, run, goal, option, said):
    write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    training = ("--train_tokenizer", 300) if goal == "tokenizer" else ()
    arguments = ("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", *option, *training)
    with pytest.raises(InputError, match=said):
        run(*arguments, with_tokenizer=not training)
    assert not (tmp_path / "out").exists()


def test_options_that_training_would_ignore_are_rejected(tmp_path, run):
    write_jsonl(tmp_path / "a.jsonl", ["one"])
    source = ("--input", tmp_path / "a.jsonl", "--max_tokens", 9)
    output = ("--output", tmp_path / "out", "--near_duplicates", 0.8, "--clean")
    with pytest.raises(InputError) as caught:
        run("--train_tokenizer", 300, *source, *output, with_tokenizer=False)
    names = ("--clean", "--near_duplicates", "--max_tokens")
    assert caught.value.problems == [f"{name}: not supported with --train_tokenizer; omit it" for name in names]
    with pytest.raises(InputError) as caught:
        run("--train_classifier", "good.jsonl", "other.jsonl", *output, with_tokenizer=False)
    assert caught.value.problems == [f"{name}: not supported with --train_classifier; omit it" for name in names[:2]]


@pytest.mark.parametrize("pattern", ["**", "**/*.json*"])
@pytest.mark.parametrize("training", [(), ("--train_tokenizer", 300)])
def test_the_output_is_not_its_own_input(tmp_path, monkeypatch, run, training, pattern):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    write_jsonl(tmp_path / "x/a.jsonl", texts(50))
    output = tmp_path / "x/out"
    run("--input", f"x/{pattern}", "--output", output, *training, with_tokenizer=not training)
    before = content_of(output)
    told = run("--input", f"x/{pattern}", "--output", output, *training, with_tokenizer=not training)
    assert "already complete" in told and content_of(output) == before
    with pytest.raises(InputError, match="matches only files in --output x/out; use another folder"):
        run("--input", "x/out/*.json", "--output", "x/out", *training, with_tokenizer=not training)


def test_why_a_dataset_cannot_be_read_is_told(tmp_path, run):
    columns = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    (tmp_path / "rows").mkdir()
    pq.write_table(columns, tmp_path / "rows/a.parquet")
    with pytest.raises(InputError, match=r"--dataset .*rows: cannot load .*\(ArrowInvalid: Multiple matches"):
        run("--dataset", tmp_path / "rows", "--output", tmp_path / "out")


def test_a_near_duplicate_search_without_documents_leaves_nothing(tmp_path, run):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": ""}\n')
    with pytest.raises(InputError, match="nothing was written"):
        run("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--near_duplicates", 0.8)
    assert not (tmp_path / "out").exists()


def test_a_first_document_longer_than_max_tokens_is_an_error_that_leaves_nothing(tmp_path, run):
    write_jsonl(tmp_path / "a.jsonl", ["", "many more than five tokens of text"])
    with pytest.raises(InputError, match=r"the first document is longer than --max_tokens 5, .* raise --max_tokens"):
        run("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--max_tokens", 5)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "megabytes", [8, pytest.param(200, marks=pytest.mark.skipif(not EVERYTHING, reason="in make test-faults"))]
)
def test_a_long_document_goes_through(tmp_path, run, megabytes):
    text = "a long line of text, " * (megabytes * 50_000)
    write_jsonl(tmp_path / "a.jsonl", ["before", text, "after"])
    run("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--validation_fraction", 0)
    manifest = read_manifest(tmp_path / "out")
    assert manifest.totals("train")[1:] == (3, len(text) + len("beforeafter"))
    assert verify_shards(tmp_path / "out") == []


def test_all_problems_with_the_command_are_reported_at_once(tmp_path, run):
    with pytest.raises(InputError) as caught:
        run(
            *("--input", f"{tmp_path}/*.jsonl", "--tokenizer", "./none", "--shard_tokens", "0", "--max_tokens", "ten"),
            *("--validation_fraction", "1.5", "--engine", "quick", "--documents", "page", "--workers", "1.5"),
            with_tokenizer=False,
        )
    told = "\n".join(caught.value.problems)
    for expected in (
        "--output FOLDER is required",
        "--input",
        "no such file",
        "./none: no such tokenizer folder or file",
        "--shard_tokens 0: must be a whole number of at least 1",
        "--max_tokens ten: must be a whole number",
        "--validation_fraction 1.5: must be at least 0 and less than 1",
        "--engine quick: must be auto, reference, ray or reference,ray",
        "--documents page: must be file, line or paragraph",
        "--workers 1.5: must be a whole number",
    ):
        assert expected in told


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--language", "unknown language"),
        ("--decontaminate", "must be lm-eval tasks or item files"),
        ("--split_field", "no field ''"),
    ],
)
def test_an_empty_value_is_not_ignored(tmp_path, run, option, said):
    write_jsonl(tmp_path / "a.jsonl", ["one"])
    with pytest.raises(InputError, match=said):
        run("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", option, "")


def test_input_and_output_must_each_be_given_once(tmp_path, run):
    with pytest.raises(InputError) as caught:
        run(with_tokenizer=False)
    assert [problem.split(",")[0] for problem in caught.value.problems] == [
        "use either --input 'FILES' or --dataset NAME",
        "--output FOLDER is required",
        "use either --tokenizer FOLDER|FILE|HUB_ID",
    ]


@pytest.mark.parametrize("wrong", ["one of the first documents", "some later ones"])
def test_a_wrong_fast_path_is_noticed_and_everything_starts_over(tmp_path, run, monkeypatch, tokenizer, capsys, wrong):
    make_parts_small(monkeypatch, 2000)
    documents = [text.replace(END, "") for text in texts()]
    write_jsonl(tmp_path / "a.jsonl", documents)
    arguments = ("--input", tmp_path / "a.jsonl", "--workers", 1)
    run(*arguments, "--output", tmp_path / "right")
    is_wrong = {
        "one of the first documents": lambda text: text == documents[1].encode(),
        "some later ones": lambda text: text.startswith(b"3"),
    }[wrong]
    made = FastEncoder.__init__

    def wrong_after_a_while(self, *given):
        made(self, *given)
        right = self._encode
        self._encode = lambda text: right(text)[:-1] if is_wrong(text) else right(text)

    monkeypatch.setattr(FastEncoder, "__init__", wrong_after_a_while)
    monkeypatch.setattr(sys, "argv", ["prepare_data.py", *map(str, arguments), "--output", str(tmp_path / "out")])
    sys.argv += ["--tokenizer", str(tokenizer)]
    assert prepare_data.main() == 0
    assert (
        "starting over with the tokenizers library: gigatoken and tokenizers return different"
        in capsys.readouterr().err
    )
    assert content_of(tmp_path / "out") == content_of(tmp_path / "right")


def test_datasets_by_folder_with_a_number_of_examples(tmp_path, run, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("pretrain_tools.preparation.documents.hub_dataset.ROWS_PER_PART", 8)
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "train.jsonl", texts(50))
    same = ("--validation_fraction", 0)
    run("--dataset", f"{tmp_path}/set:20", "--output", tmp_path / "loaded", *same)
    run("--dataset", f"{tmp_path}/set:20", "--streaming", "--output", tmp_path / "streamed", *same)
    run("--input", tmp_path / "set" / "*.jsonl", "--max_documents", 20, "--output", tmp_path / "files", *same)
    expected = stream_of(tmp_path / "files", "train").tolist()
    assert stream_of(tmp_path / "loaded", "train").tolist() == expected
    assert stream_of(tmp_path / "streamed", "train").tolist() == expected
    with pytest.raises(InputError, match=r"split tran: Unknown split .* Should be one of \['train'\]"):
        run("--dataset", tmp_path / "set", "--split", "tran", "--output", tmp_path / "x")
    with pytest.raises(InputError, match=r"no column 'body' \(columns: text\)"):
        run("--dataset", tmp_path / "set", "--text_field", "body", "--output", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_stream_continues_from_any_part_without_earlier_files(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("pretrain_tools.preparation.documents.hub_dataset.ROWS_PER_PART", 8)
    (tmp_path / "set").mkdir()
    for number in range(3):
        write_jsonl(tmp_path / f"set/train-{number}.jsonl", [f"{number} {row}" for row in range(20)])

    def parts_from(dataset, start):
        parts = list(dataset.parts(Reading(), start))
        return parts, [record.text.decode() for part in parts for _, record in part.records(Reading())]

    whole = [f"{number} {row}" for number in range(3) for row in range(20)]
    for limit, expected in (("", whole), (":45", whole[:45]), (":20", whole[:20])):
        dataset = open_dataset(f"{tmp_path}/set{limit}", None, "train", streaming=True)
        parts, texts_read = parts_from(dataset, BEGINNING)
        assert texts_read == expected
        done = 0
        for part in parts:
            done += len(list(part.records(Reading())))
            # as read from progress.json
            start = Position(*json.loads(json.dumps(part.after)))
            assert parts_from(dataset, start)[1] == expected[done:], (limit, start)
    source, record = list(parts[-1].records(Reading()))[-1]
    assert source.name == "set/train/00000" and record.place == 20
    dataset = open_dataset(f"{tmp_path}/set", None, "train", streaming=True)
    third = next(part.after for part in dataset.parts(Reading(), BEGINNING) if part.after[:2] == (2, 1))
    (tmp_path / "set/train-0.jsonl").unlink()
    (tmp_path / "set/train-1.jsonl").unlink()
    assert parts_from(dataset, third)[1] == whole[48:]


def test_a_missing_dataset_is_named(run, tmp_path, monkeypatch):
    # The libraries read these on import. Without them, they would wait a long time for the network.
    for name in ("huggingface_hub.constants.HF_HUB_OFFLINE", "datasets.config.HF_HUB_OFFLINE"):
        monkeypatch.setattr(name, True)
    with pytest.raises(InputError, match=r"--dataset nobody/nothing \(no such local folder, so it was looked up on"):
        run("--dataset", "nobody/nothing", "--output", tmp_path / "x")


def test_verify_tells_good_from_bad(tmp_path, run):
    write_jsonl(tmp_path / "a.jsonl", texts(9))
    run("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--validation_fraction", 0)
    assert "all 1 shards verified" in run("--verify", tmp_path / "out", with_tokenizer=False)
    content = bytearray((tmp_path / "out" / "train-00000.bin").read_bytes())
    content[10] ^= 4
    (tmp_path / "out" / "train-00000.bin").write_bytes(content)
    with pytest.raises(InputError, match=r"train-00000.bin: its content has changed"):
        run("--verify", tmp_path / "out", with_tokenizer=False)


@pytest.mark.parametrize("flag", ["--verify", "--inspect"])
def test_inspect_and_verify_reject_input(tmp_path, run, flag):
    with pytest.raises(InputError, match=f"{flag} x: reads a prepared folder, so it cannot be combined with --input"):
        run(flag, "x", "--input", tmp_path / "a.jsonl", with_tokenizer=False)


def test_bad_input_exits_with_2_and_no_traceback_and_help_is_fast(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"x")
    command = [sys.executable, "prepare_data.py", "--input", f"{tmp_path}/a.jsonl", "--output", f"{tmp_path}/out"]
    failed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert failed.returncode == 2
    assert failed.stderr.startswith("use either --tokenizer")
    assert "Traceback" not in failed.stderr
    assert "--max_tokens" in run_script("prepare_data.py", "--help").stdout
    # --help takes 0.05 s. Importing numpy would take 0.1 s, and torch 1.5 s.
    assert cpu_seconds("prepare_data.py", "--help") < cpu_seconds("-c", "import numpy")


def test_help_imports_nothing_heavy():
    code = (
        "import sys, prepare_data; print([m for m in ('torch', 'numpy', 'transformers', 'tqdm') if m in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert loaded.stdout.strip() == "[]"


def test_a_name_that_is_not_utf8_is_recorded_by_its_bytes(tmp_path, run):
    try:
        write_jsonl(tmp_path / "caf\udce9.jsonl", [*texts(20), ""])
    except OSError:
        pytest.skip("this file system supports only UTF-8 names")
    arguments = ("--input", f"{tmp_path}/*.jsonl", "--output", tmp_path / "out")
    run(*arguments)
    assert json.loads((tmp_path / "out/manifest.json").read_bytes())["sources"][0]["path"] == "caf\\xe9.jsonl"
    assert "already complete" in run(*arguments)


def test_unread_archive_members_are_reported_and_recorded(tmp_path, run):
    for number, name in enumerate(("a.tar", "b.tar")):
        with tarfile.open(tmp_path / name, "w") as archive:
            for member in ("one.txt", "two.html", "three.html", "four.zip"):
                entry = tarfile.TarInfo(member)
                entry.size = len(content := f"{number} {member}".encode())
                archive.addfile(entry, io.BytesIO(content))
    arguments = ("--input", f"{tmp_path}/*.tar", "--validation_fraction", 0)
    told = run(*arguments, "--output", tmp_path / "out")
    line = "not read         tar archive members that are not documents: 4 .html, 2 .zip"
    assert line in told and "documents        2;" in told
    assert line in run(*arguments, "--output", tmp_path / "out"), "a finished folder must show the same line"
    for number in range(2):
        run(*arguments, "--output", tmp_path / "merged", "--slice", f"{number}/2")
    run(*arguments, "--output", tmp_path / "merged", "--merge_slices", 2)
    assert content_of(tmp_path / "merged") == content_of(tmp_path / "out")


def test_a_table_without_the_column_counts_as_its_rows_against_the_limit(tmp_path, run):
    write_jsonl(tmp_path / "a.jsonl", texts(20))
    (tmp_path / "b.parquet").write_bytes(as_parquet([f"{n}" for n in range(150)]).replace(b"text", b"body"))
    arguments = ("--input", f"{tmp_path}/[ab].*", "--output", tmp_path / "out", "--on_error", "skip")
    with pytest.raises(
        InputError, match=r"b\.parquet, row 1: no column 'text'.* 150 bad records, but --max_errors is"
    ):
        run(*arguments)
    assert "150 bad" in run(*arguments, "--max_errors", 150)
    skipped = json.loads((tmp_path / "out/manifest.json").read_bytes())["skipped"]
    assert skipped["bad_records"] == 150 and len(skipped["first_bad_records"]) == 1
