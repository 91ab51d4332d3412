"""Tests for complete runs with the real scripts: train, kill and resume, with one and two processes."""

import importlib.util
import json
import shutil
import signal
import struct
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, pipeline

from pretrain.errors import InputError
from pretrain.model import compile
from pretrain.optim.optimizers import ModelShapes
from pretrain.parallel import registry
from pretrain.recipe import read_run_config
from pretrain.training.run_plan import derive
from support.faults import launch_with_faults
from support.numbered_shards import write_shards
from support.project import cpu_seconds, events, losses, run_script, start_script
from train import check

GOLDEN = {1: 6.24694, 4: 6.21027, 8: 6.16098, 12: 6.13158}
"""{step: loss} on synthetic shards, independent of the Python version.

If these change, then so does every user's training: initial weights, data order, loss or optimizer. Explain the reason
in the commit message.
"""
NUMBERS = ("loss", "perplexity", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "step_seconds")
"""Keys of a train event that are also sent to trackers."""


WITHOUT_EXPORT = ("--checkpoint.save_final", "false")
UNMEASURED = ("--validation.every_steps", "null", *WITHOUT_EXPORT)


def train(recipe, *overrides, **kwargs):
    return run_script("train.py", "--config", recipe, *overrides, **kwargs)


def weights(run, step):
    return load_file(run / f"checkpoints/step-{step:08d}/model.safetensors")


def test_a_run_from_start_to_finish(recipe, tmp_path):
    run = tmp_path / "my run"
    out = train(recipe, "--output", run).stdout
    curve = losses(run)
    assert list(curve) == list(range(1, 13))
    assert curve[12] < curve[1] - 0.3  # the text depends on the version of Python
    assert [event["step"] for event in events(run, "validation")] == [0, 6, 12]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "LATEST",
        "step-00000008",
        "step-00000012",
    ]
    (end,) = events(run, "end")
    assert (end["code"], end["reason"], end["tokens"]) == (0, "done", 12 * 256)
    assert f"evaluate.py --model '{run}/final' --interactive" in out
    for line in ("tokens per step", "256 = 1 sequence x 64 tokens x 1 process x 4 micro-steps", "attention"):
        assert line in out
    for name in ("config.yaml", "model.json", "data.json", "strategy.json", "environment.json", "train.log"):
        assert (run / name).stat().st_size > 0

    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(run / "final"),
        AutoTokenizer.from_pretrained(run / "final"),
    )
    assert model.dtype == torch.bfloat16
    exported, trained = model.state_dict(), weights(run, 12)
    assert all(torch.equal(exported[name], tensor.bfloat16()) for name, tensor in trained.items())
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    text = pipeline("text-generation", model=model, tokenizer=tokenizer)("def ", max_new_tokens=5)[0]["generated_text"]
    assert text.startswith("def ")

    again = train(recipe, "--output", run)
    assert "is already complete: 12 steps" in again.stdout
    assert losses(run) == curve, "a finished run must not be trained again"
    hint = f"To export it again with these settings, remove {run}/final first."
    assert hint not in again.stdout and hint in train(recipe, "--output", run, "--export.dtype", "fp32").stdout
    shutil.rmtree(run / "final")
    train(recipe, "--output", run, "--export.dtype", "fp32")
    assert AutoModelForCausalLM.from_pretrained(run / "final").dtype == torch.float32
    assert losses(run) == curve


def test_golden_losses(recipe, tmp_path, tokenizer):
    folder = tmp_path / "made_up"
    write_shards(folder, 1)
    noise = np.random.RandomState(0).randint(0, 8, 20_000)
    ids = np.zeros(20_000, np.uint16)
    for position in range(1, len(ids)):
        ids[position] = (ids[position - 1] * 5 + 7 + noise[position]) % 512
    ids.tofile(folder / "train-00000.bin")
    manifest = json.loads((folder / "manifest.json").read_text()) | {"vocabulary_size": 512}
    manifest["shards"][0] |= {"tokens": len(ids), "text_bytes": 4 * len(ids)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    shutil.copytree(tokenizer, folder / "tokenizer")
    train(recipe, "--data.train", f"[{{shards: {folder}}}]", *UNMEASURED)
    curve = losses(tmp_path / "run")
    # On other processors, a different summation order changes the last of the twelve losses by about 1e-5.
    assert {step: curve[step] for step in GOLDEN} == pytest.approx(GOLDEN, abs=1e-3)


def test_a_run_can_be_extended(recipe, tmp_path):
    settings = ("--optim.schedule", "constant", *WITHOUT_EXPORT)
    train(recipe, *settings)
    first = losses(tmp_path / "run")
    train(recipe, *settings, "--budget.steps", "14")
    assert {step: loss for step, loss in losses(tmp_path / "run").items() if step <= 12} == first
    assert events(tmp_path / "run", "resume")[0]["step"] == 12
    assert max(losses(tmp_path / "run")) == 14


def test_control_c_ends_in_words(recipe):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = start_script("train.py", "--config", recipe, "--budget.steps", 100_000, **pipes)
    try:
        for line in process.stdout:
            if line.startswith("step 5/"):
                process.send_signal(signal.SIGINT)
                break
        _, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "run the same command to resume" in errors and "Traceback" not in errors


def test_a_killed_run_continues_to_the_last_bit(recipe, tmp_path):
    """tests/parallel/test_kill_strategies.py tests several processes."""
    # With dropout, the random state must also be restored.
    model = json.loads((tmp_path / "tiny_llama.json").read_text()) | {"attention_dropout": 0.1}
    (tmp_path / "tiny_llama.json").write_text(json.dumps(model))
    arguments = ["train.py", "--config", str(recipe), "--budget.steps", "28", "--attention", "eager", *WITHOUT_EXPORT]
    run_script(*arguments, "--output", tmp_path / "whole")
    broken = tmp_path / "broken"
    for step in (6, 23):
        kill = [{"where": "backward", "step": step, "micro_step": 2, "what": "SIGKILL"}]
        killed = launch_with_faults(tmp_path / f"{step}", "single", 1, *arguments[1:], "--output", broken, faults=kill)
        assert killed.code == -signal.SIGKILL, killed.output
    run_script(*arguments, "--output", broken)
    assert losses(broken) == losses(tmp_path / "whole")
    expected, found = weights(tmp_path / "whole", 28), weights(broken, 28)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert not list((broken / "checkpoints").glob(".*")), "no temporary files of a killed save may be left"


def test_the_micro_batch_changes_speed_only(recipe, tmp_path):
    train(recipe, "--output", tmp_path / "one", *UNMEASURED)
    train(recipe, "--output", tmp_path / "four", "--batch.sequences_per_micro_batch", "4", *UNMEASURED)
    one, four = losses(tmp_path / "one"), losses(tmp_path / "four")
    assert all(abs(one[step] - four[step]) < 1e-5 for step in one)


def test_settings_that_differ_from_the_checkpoint_are_rejected(recipe, tmp_path):
    train(recipe, "--budget.steps", "4", *UNMEASURED)
    recipe.write_text(
        recipe.read_text().replace("seed: 1", "seed: 2").replace("sequence_length: 64", "sequence_length: 32")
    )
    refused = train(recipe, check=False)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert "seed: the run was started with 1, and 2 would change the data order" in refused.stderr
    assert "data.sequence_length: the run was started with 64, and 32 would change the data order" in refused.stderr
    named = train(recipe, "--seed", "2", "--data.sequence_length", "32", check=False)
    assert named.returncode == 2, "the change must be rejected even if named, because it would change the data order"


def test_a_damaged_checkpoint_is_skipped(recipe, tmp_path):
    train(recipe, *WITHOUT_EXPORT)
    whole = losses(tmp_path / "run")
    path = tmp_path / "run/checkpoints/step-00000012/model.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    folder = tmp_path / "run/checkpoints"
    for name in ("step-00000008.bak", "step-00000010"):  # a user's copy, and a renamed checkpoint
        shutil.copytree(folder / "step-00000008", folder / name)
    out = train(recipe, *WITHOUT_EXPORT).stdout
    assert "step-00000012 cannot be used: model.safetensors does not match its sha256" in out
    assert "step-00000010 cannot be used: trainer_state.json is from step 8; to use it, rename the folder to " in out
    assert "not saved" not in out
    assert events(tmp_path / "run", "resume")[-1]["path"] == "step-00000008"
    assert losses(tmp_path / "run") == whole
    names = ["damaged-step-00000010", "damaged-step-00000012", "step-00000008", "step-00000008.bak", "step-00000012"]
    assert sorted(path.name for path in folder.iterdir()) == ["LATEST", *names]

    (tmp_path / "run/rollbacks.json").write_text('[{"to_')
    refused = train(recipe, check=False)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert f"{tmp_path}/run/rollbacks.json is damaged" in refused.stderr and "or remove it" in refused.stderr
    (tmp_path / "run/rollbacks.json").unlink()
    for path in folder.glob("step-*"):
        (path / "MANIFEST.json").unlink()
    refused = train(recipe, check=False)
    assert refused.returncode == 17 and "none of the" in refused.stderr
    shutil.rmtree(folder)
    refused = train(recipe, check=False)
    assert refused.returncode == 17 and "metrics.jsonl lists step 12 as saved, but it is missing" in refused.stderr


def test_check_finds_everything_and_starts_nothing(recipe, tmp_path):
    assert "this run can start" in train(recipe, "--check").stdout
    imports = cpu_seconds("-c", "import torch, transformers, accelerate", tries=1)
    checking = cpu_seconds("train.py", "--config", recipe, "--check", tries=1)
    assert checking < 5 * imports, "the check takes 5 s, half of it for imports"
    bad = train(
        recipe, "--check", "--batch.tokens_per_step", "300", "--data.sequence_length", "256",
        "--data.train", "[{shards: no/such/folder}]", check=False,
    )  # fmt: skip
    assert bad.returncode == 2 and "Traceback" not in bad.stderr
    assert "batch.tokens_per_step: 300 is not a multiple of 1 sequences per micro-batch x data." in bad.stderr
    assert "nearest: 256 or 512" in bad.stderr
    assert "sequence_length: 256 is more than the model's max_position_embeddings, 128" in bad.stderr
    assert "no/such/folder: no such folder of prepared shards" in bad.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--optim.warmup_steps", "100"], "warmup_steps 100 is longer than the run (12 steps)"),
        (["--model", "model_configs/lama_30m.json"], "lama_30m.json"),
        (["--precision", "fp16"], "precision: fp16 needs a GPU"),
        (["--precision", "fp8"], "precision: fp8 needs a GPU with fp8 tensor cores"),
        (["--attention", "flash_attention_2"], "flash_attention_2"),
        (["--attention", "flex_attention"], "flex_attention"),
        (["--optim.name", "adamw_8bit"], "adamw_8bit"),
        (["--data.train.0.max_epochs", "0.001"], "used up"),
    ],
)
def test_impossible_settings_are_rejected(recipe, tmp_path, overrides, message):
    refused = train(recipe, *overrides, check=False)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert message in refused.stderr and "Traceback" not in refused.stderr
    assert not (tmp_path / "run/checkpoints").exists() or not any((tmp_path / "run/checkpoints").iterdir())


def test_vocabulary_larger_than_the_models(recipe, tmp_path):
    model = json.loads((tmp_path / "tiny_llama.json").read_text()) | {"vocab_size": 256}
    (tmp_path / "tiny_llama.json").write_text(json.dumps(model))
    refused = train(recipe, check=False)
    assert refused.returncode == 2
    assert "512" in refused.stderr and "256" in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    "overrides",
    [
        ["--precision", "bf16", "--compile", "regional"],
        ["--optim.name", "muon", "--optim.schedule", "wsd"],
        ["--optim.name", "adafactor", "--optim.stochastic_rounding", "true", "--optim.schedule", "linear"],
        ["--activation_checkpointing", "full", "--loss.z_loss", "1e-4", "--optim.schedule", "infinite"],
        ["--data.document_mask", "false", "--batch.ramp.from", "0.5", "--data.sampling", "random_windows"],
    ],
)
def test_settings_train(recipe, tmp_path, overrides):
    train(recipe, *overrides)
    curve = losses(tmp_path / "run")
    assert curve[12] < curve[1] - 0.3, "the loss must fall"


def records_of(content: bytes) -> list[bytes]:
    """Returns the records of a .wandb file.

    After a 7-byte wandb header, the file is a LevelDB log: 32 KiB blocks of record fragments, each preceded by a
    checksum, a length and a type.
    """
    records, begun, position = [], b"", 7
    while position + 7 <= len(content):
        if (left := -position % 2**15) and left < 7:
            position += left
            continue
        length, kind = struct.unpack_from("<HB", content, position + 4)
        begun += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # complete record, or its last fragment
            records, begun = [*records, begun], b""
    return records


def logged_by_wandb(folder):
    """Returns (wandb's run record, {name: {step: value}}) for an offline run."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("offline-run-*/*.wandb")
    found, runs = {}, []
    for record in map(Record.FromString, records_of(path.read_bytes())):
        runs += [record.run] if record.HasField("run") else []
        for item in record.history.item:
            name = item.key or "/".join(item.nested_key)
            found.setdefault(name, {})[record.history.step.num] = json.loads(item.value_json)
    return runs[0], found


def test_trackers_get_the_same_numbers(recipe, tmp_path):
    tracking = ["--tracking.entity", "team", "--tracking.tags", "a,b", "--tracking.group", "g"]
    trained = train(
        recipe, "--trackers", "tensorboard,wandb", *tracking, WANDB_MODE="offline", WANDB_PROJECT="of_the_shell"
    )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    on_board = {name: {event.step: event.value for event in board.Scalars(name)} for name in board.Tags()["scalars"]}
    known, in_wandb = logged_by_wandb(run / "wandb")
    assert (known.project, known.entity, known.display_name) == ("of_the_shell", "team", "run")
    assert (list(known.tags), known.run_group) == (["a", "b"], "g")
    assert known.run_id == json.loads((run / ".trackers.json").read_text())["wandb"]["id"]
    curves = {name for name in in_wandb if not name.startswith("_")}
    assert {name.partition("/")[0] for name in curves} == {"train", "validation"}, (
        "wandb must get no single-point charts"
    )
    assert "joules" not in trained.stdout + trained.stderr, "wandb must not print curves to the console"
    lines = {name: events(run, name) for name in ("train", "validation")}
    for event, number in [("train", n) for n in NUMBERS] + [("validation", n) for n in ("loss", "perplexity")]:
        name = f"train/{number}" if event == "train" else f"validation/{number}/source"
        expected = {line["step"]: line[number] for line in lines[event]}
        assert on_board[name] == pytest.approx(expected, rel=1e-6), name
        assert in_wandb[name] == pytest.approx(expected, rel=1e-6), name


def check_problems(recipe, *overrides) -> str:
    """Runs --check in this process and returns the problems that it finds."""
    with pytest.raises(InputError) as caught:
        derive(read_run_config(recipe, list(overrides)), ranks=1)
    return "\n".join(caught.value.problems)


def test_check_tests_the_paths_that_a_run_uses(recipe, tmp_path):
    (tmp_path / "file").touch()
    assert f"output: {tmp_path}/file: {tmp_path}/file is a file" in check_problems(
        recipe, ("output", f"{tmp_path}/file")
    )
    assert "is not a folder but a file" in check_problems(recipe, ("output", f"{tmp_path}/file/run"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").symlink_to("/unmounted/disk")
    for output in ("run", "run/checkpoints/new"):
        assert "is a link to /unmounted/disk, which does not exist" in check_problems(
            recipe, ("output", f"{tmp_path}/{output}")
        )
    assert "use at most 255 bytes" in check_problems(recipe, ("output", f"{tmp_path}/{'x' * 500}"))
    assert "a name cannot contain a NUL character" in check_problems(recipe, ("output", '"a\\0b"'))
    evaluates = ("benchmarks.every_steps", "4")
    found = check_problems(
        recipe,
        ("branch_from", f"{tmp_path}/trunk@500"),
        ("init", "pretrained"),
        evaluates,
        ("benchmarks.tasks", "helaswag"),
        ("benchmarks.include_path", str(tmp_path)),
    )
    assert "branch_from: " in found and "must be RUN@STEP" in found
    assert "benchmarks.tasks: helaswag: no such task" in found and "did you mean hellaswag?" in found
    assert "benchmarks.include_path: " in found and "contains no .yaml file" in found
    assert "init: pretrained, but model: " in found


def test_a_check_of_several_processes_is_printed_once_per_machine(recipe):
    command = ("train.py", "--config", recipe, "--check")
    assert run_script(*command, LOCAL_RANK="0").stdout.endswith("this run can start.\n")
    assert not run_script(*command, LOCAL_RANK="1").stdout


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="the package is installed")
def test_check_finds_problems_of_optimizer_and_batch(recipe):
    found = check_problems(
        recipe,
        ("optim.name", "adamw_8bit"),
        ("batch.tokens_per_step", "300"),
    )
    assert "optim.name: adamw_8bit needs bitsandbytes" in found
    assert "batch.tokens_per_step: 300 is not a multiple" in found


def test_check_finds_muon_without_matrices_to_update(recipe, monkeypatch):
    monkeypatch.setattr(ModelShapes, "is_hidden_matrix", lambda self, name: False)
    assert "optim.name: this model has no hidden matrices" in check_problems(recipe, ("optim.name", "muon"))


def test_check_finds_a_model_that_cannot_recompute_its_activations(recipe, monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "supports_gradient_checkpointing", False)
    found = check_problems(recipe, ("activation_checkpointing", "full"))
    assert found == "activation_checkpointing: full does not work with llama in transformers; use none"


def test_check_finds_a_model_that_cannot_recompute_some_layers(recipe, monkeypatch):
    monkeypatch.setattr(compile, "GradientCheckpointingLayer", torch.nn.Bilinear)
    found = check_problems(recipe, ("activation_checkpointing", "50%"))
    assert found.startswith(
        "activation_checkpointing: 0.5 does not work with llama, which can only recompute all layers or"
    )


def test_check_reports_strategy_problems_with_all_others(recipe, monkeypatch):
    monkeypatch.setattr(registry, "launched_strategy", lambda: "fsdp2")
    monkeypatch.setattr(registry, "launcher_problems", lambda config, precision, name: [])
    overrides = [("compile", "full"), ("batch.tokens_per_step", "300")]
    with pytest.raises(InputError) as caught:
        check(SimpleNamespace(config=read_run_config(recipe, overrides), recipe=recipe))
    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["compile", "batch.tokens_per_step"]


def test_a_started_branch_no_longer_needs_its_trunk(recipe, tmp_path):
    (tmp_path / "run/checkpoints/step-00000004").mkdir(parents=True)
    assert derive(read_run_config(recipe, [("branch_from", "gone@500")]), ranks=1)
