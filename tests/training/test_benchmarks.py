"""Benchmarks run during training must give the same scores as evaluate.py under every strategy."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import AutoTokenizer

from pretrain import config
from pretrain.config import WindowSpec
from pretrain.parallel.ranks import Ranks
from pretrain.runs.run_folder import EVALUATIONS
from pretrain.training.benchmarks import Benchmarks, Requests, Task, packed
from pretrain_tools.evaluation.answers import encoder
from support.project import events, launch, run_script

TASKS = "one,two,three,pair"
ONLY_TRAIN = ["--checkpoint.save_final", "false", "--data.validation", "[]"]
TOGETHER = ("ddp", "cp", "pp", "tp", "zero3")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Writes multiple-choice tasks, a likelihood task, a generation task and a group."""
    folder = tmp_path_factory.mktemp("tasks")
    texts = [f"def f{i}(self, {'x' * (i % 7)}):" for i in range(9)]
    lines = [
        {"start": f"class A{i}:\n", "choices": [texts[i], "é" * (i + 1), " zz"], "answer": i % 3} for i in range(9)
    ]
    (folder / "documents.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = f"""
dataset_path: json
dataset_kwargs: {{data_files: {{validation: "{folder}/documents.jsonl", train: "{folder}/documents.jsonl"}}}}
validation_split: validation
training_split: train
fewshot_split: train
doc_to_text: '{{{{start}}}}'
"""
    choice = "output_type: multiple_choice\ndoc_to_target: answer\ndoc_to_choice: '{{choices}}'\n"
    both = "metric_list: [{metric: acc}, {metric: acc_norm}]\n"
    (folder / "one.yaml").write_text(f"task: one\n{common}{choice}{both}")
    (folder / "two.yaml").write_text(f"task: two\nnum_fewshot: 1\n{common}{choice}metric_list: [{{metric: acc}}]\n")
    (folder / "three.yaml").write_text(
        f"task: three\n{common}doc_to_target: ' {{{{choices[0]}}}}'\noutput_type: loglikelihood\n"
        "metric_list: [{metric: acc}]\n"
    )
    (folder / "four.yaml").write_text(
        f"task: four\n{common}doc_to_target: ' x'\noutput_type: generate_until\n"
        "metric_list: [{metric: exact_match}]\n"
    )
    (folder / "group.yaml").write_text(
        "group: pair\ntask: [one, two]\naggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
    )
    return folder


def scores(run, model: str | None = None) -> dict:
    return {
        event["task"]: {name: event[name] for name in ("acc", "acc_norm", "bits_per_byte", "samples") if name in event}
        for event in events(run, "evaluation")
        if model is None or event["model"] == model
    }


def test_scores_match_evaluate_under_every_strategy(recipe, tasks, tmp_path):
    options = ["--benchmarks.every_steps", "2", "--benchmarks.tasks", f"[{TASKS}]", "--benchmarks.where", "in_loop"]
    options += [
        "--benchmarks.include_path",
        str(tasks),
        "--precision",
        "fp32",
        "--budget.steps",
        "2",
        "--compile",
        "none",
    ]
    options += ["--optim.warmup_steps", "1", "--batch.sequences_per_micro_batch", "2", "--pipeline.schedule", "1F1B"]
    alone = tmp_path / "alone"
    run_script("train.py", "--config", recipe, *options, "--output", alone)
    found = scores(alone)
    assert {name: row["samples"] for name, row in found.items()} == {"one": 9, "two": 9, "three": 9, "pair": 18}

    words = ("--tasks", *TASKS.split(","), "--include_path", tasks, "--precision", "fp32")
    run_script("evaluate.py", "--model", f"{alone}@2", *words, "--output", tmp_path / "results.json")
    (result,) = json.loads((tmp_path / "results.json").read_text())["models"]
    for name, row in found.items():
        for measure, value in row.items():
            if (expected := result["tasks"][name].get(measure)) is not None:
                assert value == pytest.approx(expected, rel=1e-4), (name, measure)
        assert result["tasks"][name]["bits_per_byte"] is not None

    options += ONLY_TRAIN
    (tokenized,) = (alone / EVALUATIONS).glob("answers-*.npz")
    for name in TOGETHER[1:]:  # the others tokenize the same requests, which takes longer than training
        (tmp_path / name / EVALUATIONS).mkdir(parents=True)
        shutil.copy2(tokenized, tmp_path / name / EVALUATIONS)
    runs = [{"strategy": name, "arguments": [*options, "--output", str(tmp_path / name)]} for name in TOGETHER]
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    launch("ddp", 2, "tests/support/train_strategies.py", recipe, tmp_path / "runs.json")
    for name in TOGETHER:
        (own,) = (tmp_path / name / EVALUATIONS).glob("answers-*.npz")
        assert (own.stat().st_mtime_ns != tokenized.stat().st_mtime_ns) == (name == TOGETHER[0])
        of_strategy = scores(tmp_path / name)
        assert of_strategy.keys() == found.keys()
        for task, row in found.items():
            assert of_strategy[task] == pytest.approx(row, rel=1e-5), (name, task)


def test_an_unsupported_task_is_only_a_warning(recipe, tasks, tmp_path):
    run_script(
        "train.py", "--config", recipe, "--benchmarks.every_steps", "2", "--benchmarks.tasks", "[one, four]",
        "--benchmarks.where", "in_loop", "--benchmarks.include_path", tasks, "--budget.steps", "2",
        "--optim.warmup_steps", "1", *ONLY_TRAIN,
    )  # fmt: skip
    (warning,) = [e["message"] for e in events(tmp_path / "run", "warning") if "benchmarks" in e["message"]]
    assert "--tasks four: where: in_loop only supports tasks with a single correct answer" in warning
    assert events(tmp_path / "run", "end")[0]["code"] == 0


def test_requests_that_cannot_be_written_are_only_a_warning(tmp_path):
    (tmp_path / EVALUATIONS).write_text("")  # not a folder
    benchmarks = Benchmarks(tmp_path, config.Benchmarks(tasks=["one"]), tmp_path)
    benchmarks.begin()
    strategy = SimpleNamespace(ranks=Ranks(), data_ranks=1)
    window = WindowSpec(8, True)
    found = benchmarks.measure(None, strategy, window=window, sequences=1, attention="sdpa", beat=lambda: None)
    assert EVALUATIONS in found


def requests_of(lengths: list[int]) -> Requests:
    """Returns one request per length. Its IDs are consecutive, and the last one is the answer."""
    ends = np.cumsum(lengths)
    ones = np.ones(len(lengths), int)
    task = Task("t", ("acc",), ((0, len(lengths)),), None, False)
    return Requests([task], np.arange(ends[-1]), ends, ones, ones, ones, np.arange(1, len(lengths) + 1), ones * 0)


@pytest.mark.parametrize("documents", [True, False])
def test_every_answer_is_predicted_once_from_its_own_question(documents):
    lengths = [4, 3, 9, 2, 5, 12, 3]
    requests = requests_of(lengths)
    windows = packed(requests, WindowSpec(8, documents), 1)
    assert windows.shortened == 1 and len(windows.ids) == (5 if documents else 7)
    for number, end in enumerate(requests.ends):
        (row,), (place,) = np.nonzero(windows.request == number)
        assert windows.ids[row, place + 1] == end - 1
        begin = np.flatnonzero(windows.begins[row, : place + 1])[-1]
        question = windows.ids[row, begin : place + 1]
        assert question.tolist() == list(range(end - 1 - len(question), end - 1))
        assert len(question) == min(lengths[number] - 1, 8)


def test_windows_after_the_last_have_no_request():
    windows = packed(requests_of([4, 8, 8]), WindowSpec(8, True), 4)
    assert windows.ids.shape == (4, 9) and (windows.request[2] == 2).sum() == 1
    assert (windows.request[3] == -1).all() and not windows.ids[3].any()


def test_an_empty_question_begins_with_bos_as_in_the_harness(tokenizer, tmp_path):
    """Tasks without a question, such as BLiMP, must give the same scores as evaluate.py."""
    own = AutoTokenizer.from_pretrained(tokenizer)
    own.add_special_tokens({"bos_token": "<|begin|>"})
    own.save_pretrained(tmp_path)
    model = encoder(tmp_path)
    model.loglikelihood([SimpleNamespace(args=("", "class"))], disable_tqdm=True)
    question, _ = model.pairs["", "class"]
    assert question == [own.bos_token_id] != [own.eos_token_id]
