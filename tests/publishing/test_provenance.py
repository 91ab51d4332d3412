"""Tests for provenance.json: any change to a published folder is reported, and the model's origin is recorded."""

import json
import shutil

import pytest

import publish
from pretrain.errors import InputError
from pretrain_tools.publishing.facts import Publication
from pretrain_tools.publishing.provenance import UNSEALED, digest_of, provenance_problems
from pretrain_tools.publishing.staging import find_publishable, stage
from pretrain_tools.runs.history import append_events
from support.run_folders import write_run


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """{revision: folder} for final/ and for a checkpoint with its optimizer. Tests must not change them."""
    folder = tmp_path_factory.mktemp("runs")
    run, docs = write_run(folder / "x"), str(folder / "docs")
    record = {"manifest_sha256": "d" * 64, "tokenizer": {"name": "/home/me/bpe", "sha256": "e" * 64}}
    (run / "data.json").write_text(json.dumps({docs: {**record, "totals": {"train": {"tokens": 5000}}}}))
    append_events(run, [{"event": "evaluation", "step": 8, "task": "quiz", "acc": 0.5, "acc_stderr": 0.1}])
    models = find_publishable(run, steps=[4], milestones=False, final=False)
    models += find_publishable(run, steps=[], milestones=False, final=True)
    offer = Publication("me/tiny", license="mit")
    return {model.revision: stage(run, model, offer, folder / "staged" / model.revision) for model in models}


@pytest.fixture(params=["main", "step-4"])
def folder(request, published, tmp_path):
    return shutil.copytree(published[request.param], tmp_path / "copy")


def changed(content: bytes, position: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]


def test_every_file_changed_by_a_byte_missing_or_added_is_named(folder):
    assert provenance_problems(folder) == [] and publish.main(["--verify", str(folder)]) == 0
    files = sorted(path for path in folder.iterdir())
    known = {"provenance.json", "README.md", "model.safetensors", "config.json", "bom.cdx.json", "training_content.md"}
    assert known <= {path.name for path in files}
    for path in files:
        content = path.read_bytes()
        for position in (0, len(content) // 2, len(content) - 1):
            path.write_bytes(changed(content, position))
            (problem,) = provenance_problems(folder)
            assert problem.startswith(f"{path.name} was changed"), position
        path.unlink()
        (problem,) = provenance_problems(folder)
        assert problem.startswith(f"{path.name} is missing")
        path.write_bytes(content)
    (folder / "code").mkdir()
    (folder / "code/more.py").write_text("import os")
    (folder / ".gitattributes").write_text("the Hub's own")
    (folder / "linked").symlink_to(folder / "code")
    assert provenance_problems(folder) == ["code/more.py was added", "linked was added"]


def test_a_change_to_any_byte_of_the_provenance_is_detected(published, tmp_path):
    """To save time, only every seventh byte is tested, and the other files are left out."""
    provenance = tmp_path / "provenance.json"
    content = (published["main"] / "provenance.json").read_bytes()
    for position in range(0, len(content), 7):
        provenance.write_bytes(changed(content, position))
        assert provenance_problems(tmp_path)[0].startswith("provenance.json was changed"), position


def test_several_changes_are_all_named(folder, capsys):
    (folder / "README.md").write_text("a better model")
    (folder / "config.json").unlink()
    provenance = folder / "provenance.json"
    provenance.write_text(provenance.read_text().replace("abc123", "abc124"))
    assert publish.main(["--verify", str(folder)]) == 1
    named = [line.removeprefix(f"{folder}: ").split()[0] for line in capsys.readouterr().out.splitlines()]
    assert named == ["provenance.json", "config.json", "README.md"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda contents: contents.pop("model"), "provenance.json was changed: it can't be read (KeyError: 'model')"),
        (
            lambda contents: contents["model"].update(step="8"),
            "provenance.json was changed: it can't be read (ValueError",
        ),
        (lambda contents: contents["files"].update({"\ud800": {"bytes": 1, "sha256": ""}}), r"\ud800 is missing"),
        (lambda contents: contents["model"].update(run="x\n\x1b[2J"), r"step 8 of x\n\x1b[2J, code"),
    ],
)
def test_a_forged_provenance_neither_crashes_nor_hides_lines(published, tmp_path, capsys, change, said):
    folder = shutil.copytree(published["main"], tmp_path / "copy")
    path = folder / "provenance.json"
    contents = json.loads(path.read_bytes())
    change(contents)
    text = json.dumps({**contents, "seal": UNSEALED})
    path.write_text(text.replace(UNSEALED, digest_of(text.encode()), 1))
    publish.main(["--verify", str(folder)])
    assert said in capsys.readouterr().out


def test_it_records_the_models_origin(published):
    contents = json.loads((published["main"] / "provenance.json").read_text())
    assert contents["model"] == {
        "run": "x", "repository": "me/tiny", "revision": "main", "step": 8, "tokens": 8000, "parameters": 106_816,
    }  # fmt: skip
    assert contents["code_commit"] == "abc123" and contents["packages"]["torch"] == "2.13.0"
    docs, code = contents["data"]
    assert docs["manifest_sha256"] == "d" * 64 and docs["tokenizer_sha256"] == "e" * 64 and docs["tokens"] == 5000
    assert docs["tokenizer"] == "bpe" and code["manifest_sha256"] is None
    assert contents["lineage"] == ["initialized randomly with seed 7"]
    assert contents["validation"] == [
        {"source": "docs", "step": 8, "loss": 4.0, "perplexity": pytest.approx(54.59815), "bits_per_byte": 1.8}
    ]
    (score,) = contents["evaluations"]
    assert (score["task"], score["metric"], score["value"], score["standard_error"]) == ("quiz", "acc", 0.5, 0.1)
    assert contents["recipe"]["optim"]["learning_rate"] == 0.001 and contents["recipe"]["output"] == "x"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--verify", "/nowhere"], "--verify /nowhere: not a local folder, and the Hub download failed"),
        (["--verify", "me/x", "--repo", "me/y"], "--repo: can't be combined with --verify"),
    ],
)
def test_what_cannot_be_verified_is_refused(arguments, words):
    with pytest.raises(InputError) as caught:
        publish.main(arguments)
    assert words in str(caught.value)
