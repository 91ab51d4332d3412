"""Tests for evaluation: results match the training run, the harness and transformers, on one and two ranks."""

import importlib.util
import json
import math
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from pretrain.data.shards import read_manifest
from pretrain.errors import InputError
from pretrain.files import commit
from pretrain.model.own_code import register_all
from pretrain_tools.evaluation.evaluate import evaluate_models
from pretrain_tools.evaluation.lm_harness import evaluate_package_importable, select_tasks
from support.model_folders import save_tiny
from support.project import ROOT, cpu_seconds, events, free_port, run_in_turn, run_script

register_all()

SENTENCES = (
    "def f(x):",
    "import os",
    "for line in file:",
    "return value",
    "class A:",
    "x = 1",
    "if a is None:",
    "try:",
)


def script():
    """Imports evaluate.py under a different name, so that it doesn't shadow the library."""
    spec = importlib.util.spec_from_file_location("evaluate_script", ROOT / "evaluate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(*words):
    return script().read_arguments([str(word) for word in words])


def evaluate(*words):
    """Runs evaluate.py's command line in this process."""
    return evaluate_models(read(*words))[0]


def problems_of(call, *words) -> str:
    with pytest.raises(InputError) as caught:
        call(*words)
    return "\n".join(caught.value.problems)


@pytest.fixture(scope="module")
def manifest(shards):
    return read_manifest(shards)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, tokenizer, manifest):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny", tokenizer, manifest)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Three tasks, one per request type, and a group. One task imports the `evaluate` library, as some real
    tasks do."""
    folder = tmp_path_factory.mktemp("tasks")
    lines = [
        {"text": f"{a}\n    {b}", "start": a, "choices": [b, c, "é" * (i + 1)], "answer": i % 2}
        for i, (a, b, c) in enumerate(zip(SENTENCES, SENTENCES[1:] + SENTENCES[:1], SENTENCES[::-1], strict=True))
    ]
    (folder / "documents.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "texts.py").write_text(
        "import evaluate\n\n\ndef start(document):\n    assert evaluate.load\n    return document['start']\n"
    )
    common = f"""
dataset_path: json
dataset_kwargs: {{data_files: {{validation: "{folder}/documents.jsonl", train: "{folder}/documents.jsonl"}}}}
validation_split: validation
training_split: train
fewshot_split: train
"""
    choice = "output_type: multiple_choice\ndoc_to_target: answer\ndoc_to_choice: '{{choices}}'\n"
    accuracy = "metric_list: [{metric: acc}, {metric: acc_norm}]\n"
    (folder / "one.yaml").write_text(
        f"task: tiny_choice\ndoc_to_text: !function texts.start\n{common}{choice}{accuracy}"
    )
    (folder / "two.yaml").write_text(f"task: tiny_plain\ndoc_to_text: '{{{{start}}}}'\n{common}{choice}{accuracy}")
    (folder / "three.yaml").write_text(
        f"task: tiny_rolling\ndoc_to_text: ''\ndoc_to_target: '{{{{text}}}}'\n{common}"
        "output_type: loglikelihood_rolling\nmetric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]\n"
    )
    (folder / "four.yaml").write_text(
        f"task: tiny_text\ndoc_to_text: '{{{{start}}}}'\ndoc_to_target: ' x'\n{common}output_type: generate_until\n"
        "generation_kwargs: {max_gen_toks: 4, until: ['\\n']}\nmetric_list: [{metric: exact_match}]\n"
    )
    (folder / "group.yaml").write_text(
        "group: tiny_group\ntask: [tiny_choice, tiny_plain]\n"
        "aggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
    )
    return folder


ALL_TASKS = "tiny_choice,tiny_plain,tiny_rolling,tiny_text"


def harness_alone(folder, include_path, names, **settings):
    """Returns the lm_eval command's scores, with only the local tasks registered."""
    with evaluate_package_importable():
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager

        results = simple_evaluate(
            model="hf",
            model_args={"pretrained": str(folder)},
            tasks=names.split(","),
            task_manager=TaskManager(include_path=str(include_path), include_defaults=False),
            batch_size=1,
            device="cpu",
            log_samples=False,
            **settings,
        )
    return {
        task: {key.removesuffix(",none"): value for key, value in row.items() if key.endswith(",none")}
        for task, row in {**results["results"], **results.get("groups", {})}.items()
    }


def flat(evaluation) -> dict:
    """Returns {task: {metric: value, metric_stderr: value}} with N/A for missing standard errors, as the harness
    writes them. Bits per byte are dropped, except for the rolling task, where the harness also reports them."""
    tasks = evaluation["tasks"] if isinstance(evaluation, dict) else evaluation.as_dict()["tasks"]
    about = ["few_shots", "samples", "version", "is_part"]
    return {
        task: {
            key: "N/A" if value is None else value
            for key, value in row.items()
            if key not in about and not (key.startswith("bits_per_byte") and task != "tiny_rolling")
        }
        for task, row in tasks.items()
    }


def test_help_is_instant_and_importing_does_nothing():
    assert "--include_path" in run_script("evaluate.py", "--help").stdout
    assert cpu_seconds("evaluate.py", "--help") < cpu_seconds("-c", "import numpy"), (
        "--help must be faster than importing numpy (0.1 s)"
    )
    code = "import evaluate, sys; assert not {'torch', 'lm_eval', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_without_a_task_the_choices_are_listed():
    # Import by path: the `evaluate` library must stay importable.
    spec = importlib.util.spec_from_file_location("evaluation_script", ROOT / "evaluate.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    read_arguments = script.read_arguments
    with pytest.raises(InputError, match=r"nothing to do: use --data FOLDER .*, --prompt TEXT or --interactive"):
        read_arguments(["--model", "runs/x"])
    assert read_arguments(["--model", "runs/x", "--prompt", ""]).tasks == []
    assert read_arguments(["--model", "runs/x", "--tasks", "a,b", "c"]).tasks == ["a", "b", "c"]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--modle", "a"], "--modle: unknown; did you mean --model?"),
        (["--prompt", "Once", "upon"], "upon: unexpected argument; put prompts"),
        (["--limit", "many"], "--limit many: must be a valid number"),
        (["--limit", "0"], "--limit 0: must be greater than 0"),
        (["--limit", "2.5"], "--limit 2.5: must be a whole number of documents, or a fraction below 1"),
        (["--batch_size", "0"], "--batch_size 0: must be greater than 0 or 'auto'"),
        (["--num_fewshot", "-1"], "--num_fewshot -1: must be greater than or equal to 0"),
        (["--num_fewshot", "3", "--tasks", "core"], "--num_fewshot: cannot be used with core"),
        (["--precision", "fp23"], "--precision fp23: must be 'auto', 'bf16', 'fp16' or 'fp32'"),
        (["--split", "test"], "--split test: must be 'validation' or 'train'"),
        (["--document_mask", "yes"], "--document_mask yes: must be 'on' or 'off'"),
        (
            ["--top_k", "5", "--temperature", "0"],
            "--top_k: cannot be used with --temperature 0, which is greedy decoding",
        ),
        (["--top_p", "1.5"], "--top_p 1.5: must be less than or equal to 1"),
        (["--top_p", "1.5", "--limit", "2.5"], "--limit 2.5: must be a whole number of documents"),
        (["--interactive", "--data", "x"], "--interactive: cannot be combined with --data"),
        (["--temperature", "nan"], "--temperature nan: must be a finite number"),
    ],
)
def test_messages_of_the_command_line(words, message):
    text = problems_of(read, *words)
    assert message in text
    assert "--model is required" in text  # all problems are reported together


def test_all_problems_of_the_inputs_are_reported_together(model_folder, tmp_path):
    text = problems_of(
        evaluate, "--model", model_folder, tmp_path / "none", "--data", tmp_path / "no_data", "--output", tmp_path
    )  # fmt: skip
    for part in (
        f"--model {tmp_path}/none: neither a local folder nor a Hub ID",
        f"{tmp_path}/no_data: no such folder of prepared shards",
        f"--output {tmp_path}: is a folder",
    ):
        assert part in text
    text = problems_of(evaluate, "--model", model_folder, "--tasks", "base", "--output", tmp_path / "none/x.json")
    assert f"--output {tmp_path}/none/x.json: {tmp_path}/none is not a folder; create it" in text
    text = problems_of(evaluate, "--model", model_folder, "--tasks", "base", "--output", "s3://b/x.json")
    assert "--output s3://b/x.json: must be a local path" in text


# Loss on shards


def test_loss_equals_the_models_own(model_folder, shards, manifest):
    (result,) = evaluate(
        "--model", model_folder, "--data", shards, "--sequence_length", 128, "--document_mask", "off", "--precision",
        "fp32",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    ids = np.concatenate([np.fromfile(shards / s.file, "<u2") for s in manifest.of_split("validation")]).astype(int)
    windows = torch.tensor(np.stack([ids[i : i + 129] for i in range(0, len(ids) - 128, 128)]))
    with torch.no_grad():
        logits = model(input_ids=windows[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()
    measured = result.sources["source"]
    tokens, _, text_bytes = manifest.totals("validation")
    assert measured["tokens"] == windows[:, 1:].numel()
    assert measured["loss"] == pytest.approx(loss, rel=1e-5)  # fp32 with a different order of summation
    assert measured["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert measured["bits_per_byte"] == pytest.approx(loss / math.log(2) * tokens / text_bytes, rel=1e-5)


def test_another_tokenizer_is_rejected(model_folder, shards, tokenizer, manifest, tmp_path):
    small = save_tiny(tmp_path / "small", tokenizer, manifest, vocab_size=256)
    text = problems_of(evaluate, "--model", small, "--data", shards)
    assert "(512 IDs)" in text and "has a vocabulary of 256" in text
    other = tmp_path / "other"
    shutil.copytree(model_folder, other)
    changed = json.loads((other / "tokenizer.json").read_text())
    (other / "tokenizer.json").write_text(json.dumps(changed, indent=4))
    evaluate("--model", other, "--data", shards, "--sequences", 1)  # the same tokenizer with different JSON formatting
    changed["model"]["merges"] = changed["model"]["merges"][:-3]
    (other / "tokenizer.json").write_text(json.dumps(changed))
    text = problems_of(evaluate, "--model", other, "--data", shards)
    assert "has a different tokenizer (512 IDs, sha256 " in text and manifest.tokenizer_sha256[:12] in text


def test_an_id_outside_the_vocabulary_names_its_shard(model_folder, shards, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(shards, broken)
    ids = np.memmap(broken / "validation-00000.bin", dtype="<u2", mode="r+")
    ids[40] = 600
    ids.flush()
    text = problems_of(evaluate, "--model", model_folder, "--data", broken, "--sequence_length", 32)
    assert f"{broken}: split validation contains token ID 600 (between tokens 32 and 65)" in text


def test_sequences_that_are_too_long(model_folder, shards):
    text = problems_of(evaluate, "--model", model_folder, "--data", shards, "--sequence_length", 129)
    assert "--sequence_length 129: " in text and "only has 128 positions; use at most --sequence_length 128" in text


def test_the_runs_own_validation_is_repeated(recipe, shards, tasks, tmp_path):
    """The run's own validation is reproduced on one and two ranks, and results are added to the run's metrics."""
    run_script("train.py", "--config", recipe)
    run = tmp_path / "run"
    last = events(run, "validation")[-1]
    words = ["--data", shards, "--sequences", 8]
    (result,) = evaluate("--model", f"{run}@12", *words)
    # With the run's windows, masks, micro-batches and fp32 weights, results must be identical.
    assert {"loss", "perplexity", "bits_per_byte", "tokens", "loss_by_position"} <= set(result.sources["source"])
    assert result.sources["source"] == {name: last[name] for name in result.sources["source"]}
    two = run_script(
        "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/ddp.yaml", "--num_processes", "2",
        "--main_process_port", free_port(), "evaluate.py", "--model", f"{run}@12", f"{run}/final", *words, "--tasks",
        ALL_TASKS, "--include_path", tasks, "--num_fewshot", "2", "--output", tmp_path / "two.json",
    )  # fmt: skip
    assert two.stdout.count("source or task") == 1  # one table, printed by one rank
    checkpoint, final = json.loads((tmp_path / "two.json").read_text())["models"]
    assert checkpoint["sources"]["source"]["loss"] == pytest.approx(last["loss"], rel=1e-6)  # two partial sums
    assert checkpoint["step"] == final["step"] == 12 and checkpoint["tokens"] == 12 * 256
    expected = harness_alone(run / "checkpoints/step-00000012", tasks, ALL_TASKS, num_fewshot=2)
    assert flat(checkpoint) == expected  # few-shot examples, too, which the harness would sample per rank
    lines = events(run, "evaluation")
    assert [line["model"] for line in lines] == [f"{run}@12"] * 6 + [f"{run}/final"] * 5
    assert {"step", "tokens", "time", "loss", "perplexity", "bits_per_byte"} <= set(lines[0])
    by_task = {line.get("task"): line for line in lines[1:]}
    assert by_task["tiny_choice"]["acc"] == final["tasks"]["tiny_choice"]["acc"]


def test_scores_equal_the_harness_to_the_last_digit(model_folder, tasks):
    (result,) = evaluate("--model", model_folder, "--tasks", f"{ALL_TASKS},tiny_group", "--include_path", tasks)
    expected = harness_alone(model_folder, tasks, "tiny_group,tiny_rolling,tiny_text")
    assert flat(result) == expected
    assert result.as_dict()["tasks"]["tiny_choice"]["samples"] == len(SENTENCES)
    assert 0 < result.tasks[0].measures["acc_stderr"] < 1
    assert not any(score.is_part for score in result.tasks)  # all tasks were requested by name


def test_models_side_by_side_do_not_influence_each_other(model_folder, tasks, tmp_path, tokenizer, manifest, capsys):
    """One of the models is a local architecture, loaded without trust_remote_code."""
    deepone = save_tiny(tmp_path / "deepone", tokenizer, manifest, "deepone")
    words = ["--tasks", "tiny_group,tiny_rolling", "--include_path", tasks, "--limit", 5]
    first, second, third = evaluate("--model", model_folder, deepone, model_folder, *words)
    assert flat(first) == flat(third) != flat(second)
    shown = capsys.readouterr().out
    assert "2 tasks in groups are not shown" in shown
    assert "±" in shown and shown.count("k parameters") == 3, "each model must have one row"


def test_task_names_are_checked_first(model_folder, tasks, tmp_path):
    selected = select_tasks(["tiny_choice", "tiny_p*"], tasks)
    assert [task.task_name for task in selected.loaded] == ["tiny_choice", "tiny_plain"]
    text = problems_of(select_tasks, ["tiny_chioce", "no.yaml"], tasks)
    assert "--tasks tiny_chioce: no such task, group, set or .yaml file; did you mean tiny_choice?" in text
    assert "--tasks no.yaml: no such task" in text
    # A known name, because the harness's index takes 10 seconds to build.
    text = problems_of(evaluate, "--model", model_folder, "--tasks", "base", "--include_path", tmp_path / "none")
    assert f"--include_path {tmp_path}/none: contains no .yaml file" in text


def test_a_task_without_its_data(tasks, tmp_path):
    copied = yaml.safe_load((tasks / "two.yaml").read_text())
    copied["dataset_kwargs"] = {"data_files": {"validation": str(tmp_path / "gone.jsonl")}}
    (tmp_path / "two.yaml").write_text(yaml.safe_dump({**copied, "task": "tiny_gone"}))
    with pytest.raises(InputError, match=r"--tasks tiny_gone: its data or definition cannot be loaded .*gone.jsonl"):
        select_tasks(["tiny_gone"], tmp_path)


# Samples, JSON


def test_a_sample_continues_the_prompt(model_folder, capsys):
    words = ["--model", model_folder, "--prompt", "def f", "--max_new_tokens", 8]
    (greedy,) = evaluate(*words, "--temperature", 0)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    ids = tokenizer("def f", return_tensors="pt").input_ids
    output = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert greedy.sample == tokenizer.decode(output[0], skip_special_tokens=True)
    assert greedy.sample in capsys.readouterr().out
    drawn = [evaluate(*words, "--temperature", 5, "--seed", seed)[0].sample for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert evaluate(*words, "--temperature", 5, "--top_k", 1)[0].sample == greedy.sample
    text = problems_of(evaluate, "--model", model_folder, "--prompt", "x", "--max_new_tokens", 200)
    assert "exceed the model's 128 positions; use at most --max_new_tokens 127" in text


def test_a_model_without_a_tokenizer(model_folder, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(model_folder, bare, ignore=shutil.ignore_patterns("tokenizer*", "vocab*", "merges*", "special*"))
    text = problems_of(evaluate, "--model", bare, "--prompt", "x")
    assert "--tasks and --prompt need its tokenizer, which cannot be loaded" in text


def test_scores_are_printed_if_the_disk_is_full(model_folder, shards, tmp_path, capsys):
    (tmp_path / ".results.json.new").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        evaluate("--model", model_folder, "--data", shards, "--sequences", 4, "--output", tmp_path / "results.json")
    assert "perplexity" in capsys.readouterr().out


def test_json_and_lines_of_a_run(model_folder, shards, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(model_folder, run / "final")
    for step in (4, 8):
        folder = run / "checkpoints" / f"step-{step:08d}"
        unfinished = folder.with_name(f".saving-{step}")
        shutil.copytree(model_folder, unfinished)
        (unfinished / "trainer_state.json").write_text(json.dumps({"state": {"step": step, "tokens": 10 * step}}))
        commit(unfinished, folder, {})
    values = {
        "model": str(model_folder), "output": str(run), "precision": "fp32", "budget": {"steps": 8},
        "data": {"train": [{"shards": str(shards)}], "sequence_length": 64},
        "batch": {"tokens_per_step": 256, "sequences_per_micro_batch": 4}, "optim": {"learning_rate": 0.001},
        "trackers": ["tensorboard"],
    }  # fmt: skip
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    (run / "metrics.jsonl").write_text('{"event": "end", "code": 0, "step": 8, "tokens": 80}\n{"event": "tra')
    evaluate(
        "--model", f"{run}@all", "--data", shards, "--sequences", 4, "--output", tmp_path / "results.json"
    )  # fmt: skip
    results = json.loads((tmp_path / "results.json").read_text())
    assert [model["tokens"] for model in results["models"]] == [40, 80]
    assert results["models"][0]["source_settings"]["sequence_length"] == 64  # the run's sequence length
    assert results["settings"]["sequences"] == 4
    assert {"torch", "transformers", "lm_eval"} <= set(results["versions"])
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert lines[1] == '{"event": "tra'  # a truncated line from a crash is kept
    assert [json.loads(line)["step"] for line in lines[2:]] == [4, 8]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    logged = [event.value for event in board.Scalars("evaluation/loss/source")]
    assert logged == pytest.approx([model["sources"]["source"]["loss"] for model in results["models"]], rel=1e-6)


def test_an_emulated_precision_gives_a_warning(model_folder, shards):
    """Environment variables simulate an old CPU, where the default is fp32."""
    asked = ("evaluate.py", "--model", model_folder, "--data", shards, "--sequences", "1")
    old_cpu = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "CUDA_VISIBLE_DEVICES": ""}
    (_, in_bf16), (_, by_itself) = run_in_turn((*asked, "--precision", "bf16"), asked, **old_cpu)
    assert "warning: bf16 is emulated here" in in_bf16 and "use --precision fp32" in in_bf16
    assert "emulated" not in by_itself
