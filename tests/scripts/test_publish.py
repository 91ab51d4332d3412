"""Tests for publish.py, end to end against a local mock of the Hub."""

import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import publish
from pretrain.checkpoint import tensor_files
from pretrain.errors import InputError, Problems
from pretrain.files import commit
from pretrain.processes import hold_while_open
from pretrain.recipe import read_run_config
from pretrain.runs.hub import login_problems, offer_problems
from pretrain.training.background_jobs import resume_publishing, start_publishing
from pretrain.training.run_plan import derive
from pretrain_tools.publishing.facts import Publication
from pretrain_tools.publishing.hub_upload import PublishError
from pretrain_tools.publishing.publish import models_to_publish, retry
from pretrain_tools.publishing.staging import checkpoint_model, find_publishable, stage
from pretrain_tools.runs.history import append_events
from support.hub_server import TOKEN, running_hub
from support.project import events, run_script, start_script
from support.run_folders import write_run
from support.tiny_experts import as_the_library_saves
from support.tiny_models import TINY_MOE

SOON = 300
"""Timeout in seconds, with a margin for busy machines."""
OFFER = ("--license", "apache-2.0", "--language", "en")
WENT_UP = {
    "README.md", "bom.cdx.json", "config.json", "generation_config.json", "loss.png", "model.safetensors",
    "provenance.json", "tokenizer.json", "tokenizer_config.json", "training_content.md",
}  # fmt: skip


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """A run with milestones at steps 4 and 8. Tests must not change it."""
    return write_run(tmp_path_factory.mktemp("runs") / "x")


@pytest.fixture
def run(finished_run, tmp_path):
    return shutil.copytree(finished_run, tmp_path / "x")


@pytest.fixture
def hub():
    with running_hub() as hub:
        yield hub


@pytest.fixture
def home(tmp_path):
    """Separate Hub settings, so that tests don't use the developer's token and cache."""
    return {"HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "", "HF_TOKEN_PATH": str(tmp_path / "home/token")}


def fingerprint(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "publish" not in path.relative_to(folder).parts
    }


def publish_run(run, hub, home, *arguments, check=True, **environment):
    return run_script(
        "publish.py", "--run", run, "--repo", "me/tiny", *OFFER, *arguments, check=check,
        **{**home, **hub.environment, **environment},
    )  # fmt: skip


def test_final_and_milestones_are_uploaded_and_load_again(run, hub, home, tmp_path):
    before = fingerprint(run)
    out = publish_run(run, hub, home, "--final", "--milestones")
    repository = hub.repositories["models", "me/tiny"]
    assert set(repository.branches) == {"main", "step-4", "step-8"}
    assert repository.messages == ["initial commit", "Step 4, 4k tokens", "Step 8, 8k tokens", "Step 8, 8k tokens"]
    assert not repository.private
    for revision in ("main", "step-4", "step-8"):
        assert set(hub.files("me/tiny", revision)) == WENT_UP | {".gitattributes"}
    assert TOKEN not in out.stdout + out.stderr
    assert f"main: uploaded to {hub.url}/me/tiny/tree/main" in out.stdout
    assert fingerprint(run) == before and not list((run / "publish").iterdir())

    # The published logits equal those of the trained weights, rounded to bf16 as in the recipe.
    program = (
        "import torch\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "from safetensors.torch import save_file\n"
        "logits = {}\n"
        "for revision in ('main', 'step-4', 'step-8'):\n"
        "    model = AutoModelForCausalLM.from_pretrained('me/tiny', revision=revision)\n"
        "    assert model.dtype == torch.bfloat16\n"
        "    logits[revision] = model(torch.arange(12).view(1, 12)).logits.detach().contiguous()\n"
        "assert AutoTokenizer.from_pretrained('me/tiny', revision='step-4').eos_token_id == 0\n"
        f"save_file(logits, {str(tmp_path / 'logits.safetensors')!r})\n"
    )
    run_script("-c", program, **{**home, **hub.environment})
    loaded = load_file(tmp_path / "logits.safetensors")
    ids_BT = torch.arange(12).view(1, 12)
    for revision, folder in (("main", "final"), ("step-4", "checkpoints/step-00000004")):
        model = AutoModelForCausalLM.from_pretrained(run / folder, dtype=torch.bfloat16)
        assert torch.equal(loaded[revision], model(ids_BT).logits)
    assert torch.equal(loaded["step-8"], loaded["main"])

    # A second call uploads nothing and creates no empty commit.
    uploads = list(hub.uploads)
    publish_run(run, hub, home, "--final", "--milestones")
    assert hub.uploads == uploads and len(repository.messages) == 4


def test_a_dry_run_writes_exactly_what_is_uploaded(run, hub, home, tmp_path):
    output = tmp_path / "dry"
    out = publish_run(run, hub, home, "--checkpoint", "4", "--final", "--dry_run", "--output", output, HF_TOKEN="")
    assert "main: step 8, 10 files" in out.stdout and not hub.repositories
    publish_run(run, hub, home, "--checkpoint", "4", "--final")
    for revision in ("main", "step-4"):
        gone_up = {name: file.content for name, file in hub.files("me/tiny", revision).items()}
        del gone_up[".gitattributes"]
        assert {path.name: path.read_bytes() for path in (output / revision).iterdir()} == gone_up


def test_a_repository_is_verified(run, hub, home):
    publish_run(run, hub, home)

    def verify(place):
        return run_script("publish.py", "--verify", place, check=False, **{**home, **hub.environment})

    out = verify("me/tiny")
    assert out.returncode == 0, out.stdout + out.stderr
    assert "me/tiny: 9 files and provenance.json are unchanged: step 8 of x, code abc123" in out.stdout
    api = HfApi(endpoint=hub.url, token=TOKEN)
    api.upload_file(path_or_fileobj=b"{}", path_in_repo="config.json", repo_id="me/tiny")
    api.upload_file(path_or_fileobj=b"import os", path_in_repo="extra.py", repo_id="me/tiny")
    out = verify("me/tiny@main")
    assert out.returncode == 1
    assert [line.split(": ")[1] for line in out.stdout.splitlines()] == [
        "extra.py was added",
        "config.json was changed",
    ]
    out = verify("me/none")
    assert out.returncode == 2 and "--verify me/none: not a local folder" in out.stderr


def test_an_upload_that_was_killed_is_completed(run, hub, home):
    reached, go_on, numbers = threading.Event(), threading.Event(), itertools.count(1)

    def stop_at_the_second_file(sha256):
        if next(numbers) == 2:
            reached.set()
            go_on.wait(SOON)
            raise ConnectionError("who sent it is dead")

    hub.before_upload = stop_at_the_second_file
    process = start_script(
        "publish.py", "--run", run, "--repo", "me/tiny", *OFFER, env={**home, **hub.environment},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        assert reached.wait(SOON), "the upload must reach its second file"
        wait_for(lambda: len(hub.uploads) == 1)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        go_on.set()
    hub.before_upload = lambda sha256: None
    assert set(hub.files("me/tiny")) == {".gitattributes"}, "an incomplete upload must not be visible"
    before = fingerprint(run)
    publish_run(run, hub, home)
    assert set(hub.files("me/tiny")) == WENT_UP | {".gitattributes"}
    assert len(hub.uploads) == len(set(hub.uploads)) == 2, "finished files must not be sent again"
    assert fingerprint(run) == before


def test_control_c_ends_in_words(run, hub, home):
    reached, go_on = threading.Event(), threading.Event()
    hub.before_upload = lambda sha256: (reached.set(), go_on.wait(SOON))
    command = ("publish.py", "--run", run, "--repo", "me/tiny", *OFFER)
    process = start_script(*command, env={**home, **hub.environment}, stderr=subprocess.PIPE)
    assert reached.wait(SOON)
    process.send_signal(signal.SIGINT)
    go_on.set()
    _, said = process.communicate(timeout=SOON)
    assert process.returncode == 130 and "interrupted; run the same command to resume" in said
    assert "Traceback" not in said


def test_a_network_failure_is_reported_and_leaves_the_run_intact(run, hub, home):
    before = fingerprint(run)
    out = publish_run(run, hub, home, check=False, HF_ENDPOINT="http://127.0.0.1:9")
    assert out.returncode == 1
    assert "publishing to me/tiny at http://127.0.0.1:9 failed: ConnectError" in out.stderr
    assert "run the same command to resume" in out.stderr and "Traceback" not in out.stderr
    assert fingerprint(run) == before


def test_failures_are_retried_during_training(monkeypatch, capsys):
    waits, outcomes = [], [PublishError("down"), PublishError("down"), "done"]
    monkeypatch.setattr(time, "sleep", waits.append)

    def act():
        outcome = outcomes.pop(0)
        if isinstance(outcome, PublishError):
            raise outcome
        return outcome

    assert retry(SimpleNamespace(beside_training=True, run=None), act) == "done"
    assert waits == [30, 60] and "attempt 2 failed; retrying in 60 s" in capsys.readouterr().err
    outcomes += [PublishError("down"), "done"]
    with pytest.raises(PublishError):
        retry(SimpleNamespace(beside_training=False, run=None), act)


def test_rejected_requests_say_what_to_change(run, hub, home):
    def refused(*arguments, **environment):
        out = publish_run(run, hub, home, *arguments, check=False, **environment)
        assert out.returncode == 2 and "Traceback" not in out.stderr
        assert TOKEN not in out.stdout + out.stderr
        return out.stderr

    assert "rejected the token; log in again" in refused(HF_TOKEN="hf_wrong" + "0" * 20)
    assert "--repo you/tiny: the token has no write access" in refused("--repo", "you/tiny")
    assert "the Hub rejected the model card" in refused("--license", "my-own")
    # The card was rejected before any model file was uploaded.
    assert set(hub.files("me/tiny")) == {".gitattributes"} and not hub.uploads
    assert "me/tiny already exists and is public" in refused("--private")


def test_a_private_repository_is_made_private(run, hub, home):
    publish_run(run, hub, home, "--private")
    assert hub.repositories["models", "me/tiny"].private


def refusal(*arguments):
    with pytest.raises(InputError) as caught:
        publish.main([str(argument) for argument in arguments])
    return caught.value.problems


@pytest.fixture
def logged_out(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no token"))


def test_all_problems_are_reported_at_once(finished_run, logged_out):
    problems = refusal(
        "--run", finished_run, "--repo", "a/b/c", "--language", "english", "--checkpoint", 5, "x", "--dryrun",
        "--output", "somewhere",
    )  # fmt: skip
    for words in (
        "--dryrun: unknown option; did you mean --dry_run?",
        "--checkpoint x: must be the step of a checkpoint",
        "--dry_run and --output DIR: only valid together",
        "--repo a/b/c: Repo id must be",
        "--license is missing, but publishing requires a license; set one, such as apache-2.0",
        "--language english: must be an ISO 639 code",
        "not logged in to the Hub: run `hf auth login`",
        f"--checkpoint 5: must be the step of a checkpoint of {finished_run}, or best",
    ):
        assert any(words in problem for problem in problems), (words, problems)
    assert len(problems) == 8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--run is required"),
        (["--run", "no/such/run"], "--run no/such/run: not a run folder"),
        (["--repo", "tiny"], "--repo tiny: must be OWNER/NAME, such as me/tiny"),
        ([], "--repo is missing; set it to OWNER/NAME"),
        (["--license", "Apache 2.0"], "--license Apache 2.0: not a Hub license ID, such as apache-2.0"),
        (["--dry_run"], "--dry_run and --output DIR: only valid together"),
    ],
)
def test_bad_input_is_refused(arguments, words, logged_out):
    assert any(words in problem for problem in refusal(*arguments))


@pytest.mark.parametrize("content", ["", "{: ["])
def test_a_run_with_a_damaged_config_is_not_published(run, logged_out, content):
    (run / "config.yaml").write_text(content)
    problems = refusal("--run", run, "--repo", "me/tiny", "--license", "mit")
    assert any(f"--run {run}: config.yaml is damaged or empty" in problem for problem in problems)


def test_an_unfinished_run_offers_its_checkpoint(run, logged_out):
    shutil.rmtree(run / "final")
    assert f"--run {run}: contains no final/, so training hasn't finished; use --checkpoint 8" in refusal("--run", run)


def test_a_damaged_model_is_not_published(run, logged_out):
    weights = run / "checkpoints/step-00000004/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    problems = refusal("--run", run, "--milestones")
    assert f"{weights.parent} is damaged: model.safetensors does not match its sha256" in problems


def test_a_recipe_without_milestones_has_none(run, logged_out):
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("keep_every: 4", "keep_every: null"))
    assert any(
        "has no checkpoint kept by checkpoint.keep_every (None)" in problem
        for problem in refusal("--run", run, "--milestones")
    )


def test_gaps_in_the_records_are_reported(tmp_path, logged_out, capsys):
    run = write_run(tmp_path / "x", steps=(4,))
    (run / "model.json").unlink()
    output = tmp_path / "dry"
    assert publish.main(["--run", str(run), "--repo", "me/x", *OFFER, "--dry_run", "--output", str(output)]) == 0
    assert (
        f"warning: {run}/model.json is missing or damaged, so the model card is incomplete" in capsys.readouterr().err
    )


def test_the_recipe_says_where_and_under_which_license(tmp_path, logged_out):
    publication = {"license": "mit", "language": ["en"]}
    run = write_run(tmp_path / "x", steps=(4,), hub={"repository": "me/x", "private": True}, publish=publication)
    assert publish.main(["--run", str(run), "--dry_run", "--output", str(tmp_path / "dry")]) == 0
    card = (tmp_path / "dry/main/README.md").read_text()
    assert "license: mit" in card and "- en" in card and 'model="me/x"' in card
    assert any("already contains main" in p for p in refusal("--run", run, "--dry_run", "--output", tmp_path / "dry"))
    (problem,) = refusal("--run", run, "--dry_run", "--output", "s3://b/dry")
    assert problem.startswith("--output s3://b/dry: must be a local path")
    (problem,) = refusal("--run", run, "--dry_run", "--output", run / "config.yaml/dry")
    assert "config.yaml is not a folder but a file; use another name" in problem


@pytest.mark.parametrize(("repository", "is_private"), [(None, False), ("me/checkpoints", False), ("me/x", True)])
def test_only_the_repository_in_the_recipe_is_private_by_default(repository, is_private, tmp_path, logged_out):
    run = write_run(tmp_path / "x", steps=(4,), hub={"repository": repository, "private": True})
    words = ["--run", str(run), "--repo", "me/x", *OFFER, "--dry_run", "--output", str(tmp_path / "dry")]
    arguments, problems = publish.read_arguments(words)
    models_to_publish(arguments, Problems(problems))
    assert arguments.private == is_private


def test_no_secret_is_uploaded(tmp_path, logged_out, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "canary-0123456789")
    run = write_run(tmp_path / "x", steps=(4,), trackers=["https://user:canary-0123456789@host"])
    problems = refusal("--run", run, "--repo", "me/x", *OFFER, "--dry_run", "--output", tmp_path / "dry")
    assert problems == [
        f"{name} contains the value of the secret WANDB_API_KEY; remove it from the recipe and publish again"
        for name in ("README.md", "provenance.json")
    ]
    assert not list((tmp_path / "dry").iterdir()), "nothing may be staged"


def test_a_checkpoint_in_several_files_is_rounded(run, tmp_path, monkeypatch):
    folder = run / "checkpoints/step-00000004"
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    (folder / "model.safetensors").unlink()
    (folder / "MANIFEST.json").unlink()
    whole.save_pretrained(folder, max_shard_size="100KB")
    sharded = tmp_path / "again"
    folder.rename(sharded)
    commit(sharded, folder, {})
    monkeypatch.setattr(tensor_files, "MAX_FILE_BYTES", 100_000)
    staged = stage(run, checkpoint_model(folder, 4), Publication("me/tiny", dtype="bf16"), tmp_path / "staged")
    index = json.loads((staged / "model.safetensors.index.json").read_text())
    weights = {}
    for path in staged.glob("model-*.safetensors"):
        weights |= load_file(path)
    assert len(list(staged.glob("model-*.safetensors"))) > 2 and set(index["weight_map"]) == set(weights)
    assert index["metadata"]["total_size"] == sum(tensor.numel() * 2 for tensor in weights.values())
    loaded = AutoModelForCausalLM.from_pretrained(staged)
    assert all(
        torch.equal(tensor.bfloat16(), loaded.state_dict()[name]) for name, tensor in whole.state_dict().items()
    )
    assert AutoTokenizer.from_pretrained(staged).eos_token_id == 0


def test_a_checkpoint_of_experts_is_published_as_the_library_saves_it(tmp_path):
    run = write_run(tmp_path / "run", model=TINY_MOE, steps=(4,))
    folder = run / "checkpoints/step-00000004"
    theirs = as_the_library_saves(folder, tmp_path / "library", torch.bfloat16)
    staged = stage(run, checkpoint_model(folder, 4), Publication("me/tiny", dtype="bf16"), tmp_path / "staged")
    ours = load_file(staged / "model.safetensors")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert "model.layers.0.mlp.experts.7.down_proj.weight" in ours


def test_weights_behind_a_symbolic_link_are_staged_as_a_file(tmp_path):
    run = write_run(tmp_path / "x")
    weights = run / "final/model.safetensors"
    weights.rename(run / "weights")
    weights.symlink_to("../weights")
    (model,) = find_publishable(run, steps=[], milestones=False, final=True)
    staged = stage(run, model, Publication("me/x", license="mit"), tmp_path / "look/main") / "model.safetensors"
    assert not staged.is_symlink() and staged.read_bytes() == weights.read_bytes()


def test_the_best_checkpoint_has_the_lowest_validation_loss(run):
    (model,) = find_publishable(run, steps=["best"], milestones=False, final=False)
    assert model.step == 4


def test_without_validation_there_is_no_best_checkpoint(run, logged_out):
    for folder in (run / "checkpoints").iterdir():
        (folder / "trainer_state.json").write_text('{"state": {}}')
    problems = refusal("--run", run, "--checkpoint", "best")
    assert any("--checkpoint best: must be the step of a checkpoint" in problem for problem in problems)


def wait_for(is_so, log=None):
    """Waits until the condition is true."""
    deadline = time.monotonic() + SOON
    while not is_so():
        assert time.monotonic() < deadline, log.read_text() if log else "too late"
        time.sleep(0.1)


def test_training_publishes_without_waiting_and_the_scores_follow(run, hub, home, monkeypatch):
    for name, value in {**home, **hub.environment, "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert offer_problems("me/tiny", "apache-2.0", ["en"]) == [] == login_problems()
    evaluation = run / "evaluations/step-00000004.log"
    evaluation.parent.mkdir()
    returned = threading.Event()
    hub.before_upload = lambda sha256: returned.wait(SOON)
    config = SimpleNamespace(
        output=run,
        hub=SimpleNamespace(repository="me/tiny", private=False),
        publish=SimpleNamespace(license="apache-2.0", language=["en"]),
        trust_remote_code=False,
    )
    warnings = []
    metrics = SimpleNamespace(is_main=True, warn=warnings.append)
    with open(evaluation, "a+b") as held:
        hold_while_open(held)  # held by the evaluation of this step
        start_publishing(config, 4, metrics)
        assert not hub.uploads, "publishing must not block training"
        returned.set()
        log = run / "publish" / "publish.log"
        wait_for(lambda: "step-4: waiting for evaluation scores" in log.read_text(), log)
        files = hub.files("me/tiny", "step-4")
        assert set(files) == WENT_UP | {".gitattributes"} and b"hellaswag" not in files["README.md"].content
        event = {"event": "evaluation", "step": 4, "task": "hellaswag", "acc": 0.25, "acc_stderr": 0.01}
        append_events(run, [{**event, "limit": None}])
    wait_for(lambda: log.read_text().count("step-4: uploaded to") == 2, log)
    again = hub.files("me/tiny", "step-4")
    assert b"| hellaswag | acc | 0.2500 " in again["README.md"].content
    assert again["model.safetensors"] == files["model.safetensors"] and len(hub.uploads) == len(set(hub.uploads))
    assert TOKEN not in log.read_text()
    wait_for(lambda: len(events(run, "publish")) == 2)
    commit = hub.repositories["models", "me/tiny"].branches["step-4"]
    assert [event["commit"] == commit for event in events(run, "publish")] == [False, True]
    assert not list((run / "publish").glob(".*.waiting"))
    # If publishing can't be started, the run gets a message and continues.
    config.output = run / "no such run"
    assert not warnings
    start_publishing(config, 4, metrics)
    assert "could not be started" in warnings[0]


def test_a_run_trains_while_the_hub_is_down_and_completes_its_uploads_later(recipe, hub, home, tmp_path, monkeypatch):
    run = tmp_path / "run"
    settings = ["--budget.steps", 8, "--checkpoint.keep_every", 4, "--publish.license", "mit"]
    settings += ["--hub.repository", "me/tiny", "--hub.every", "milestones", "--validation.every_steps", 100]
    down = {**home, **hub.environment, "HF_ENDPOINT": "http://127.0.0.1:9"}
    try:
        # The publishers are found by their command lines.
        run_script("train.py", "--config", recipe, *settings, fresh=True, **down)
        wait_for(lambda: len(events(run, "publish")) == 3, run / "publish/publish.log")
    finally:
        everybody = psutil.process_iter(["cmdline"])
        publishers = [process for process in everybody if str(run) in (process.info["cmdline"] or [])]
        for process in publishers:
            process.kill()
    psutil.wait_procs(publishers, timeout=SOON)
    assert len(publishers) == 3, "publishers must keep retrying after the run has ended"
    assert events(run, "end")[0]["code"] == 0 and (run / "final/MANIFEST.json").exists()
    assert all("ConnectError" in event["problem"] for event in events(run, "publish")) and not hub.repositories

    # The uploads resume at the run's next start, as after a machine failure.
    for name, value in {**home, **hub.environment}.items():
        monkeypatch.setenv(name, value)
    warnings = []
    metrics = SimpleNamespace(is_main=True, warn=warnings.append)
    resume_publishing(read_run_config(run / "config.yaml", []), metrics)
    wait_for(lambda: not list((run / "publish").glob(".*.waiting")), run / "publish/publish.log")
    repository = hub.repositories["models", "me/tiny"]
    assert set(repository.branches) == {"main", "step-4", "step-8"} and not warnings
    assert repository.private, "repositories must be private by default"
    assert set(hub.files("me/tiny", "step-4")) == WENT_UP | {".gitattributes"}
    assert b"source" in hub.files("me/tiny")["README.md"].content and TOKEN not in (run / "train.log").read_text()


def test_an_unwritable_folder_is_reported(run, hub, home):
    (run / "publish").write_text("a file where a folder should be")
    out = publish_run(run, hub, home, check=False)
    assert out.returncode == 1 and "publish is not writable" in out.stderr and "Traceback" not in out.stderr


def test_publishing_settings_are_checked_before_training(recipe, monkeypatch):
    problems = offer_problems("tiny", None, ["xx-", "en"])
    assert [problem.split()[0] for problem in problems] == ["hub.repository", "publish.license", "publish.language"]
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub = [("hub.repository", "me/x"), ("hub.every", "milestones")]
    with pytest.raises(InputError) as caught:
        derive(read_run_config(recipe, hub), ranks=1)
    assert [re.split("[:,]", problem)[0] for problem in caught.value.problems] == [
        "publish.license is missing",
        "hub.every",
    ]
    derive(read_run_config(recipe, [*hub, ("publish.license", "mit"), ("checkpoint.keep_every", "4")]), ranks=1)
