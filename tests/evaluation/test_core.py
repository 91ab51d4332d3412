"""Tests for CORE and bits per byte: results match hand calculations, and incomplete inputs are rejected."""

import csv
import json
import math
import random
import shutil
import statistics
from argparse import Namespace

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from pretrain.data.shards import read_manifest
from pretrain.errors import InputError
from pretrain.hardware import DTYPES
from pretrain_tools.evaluation.evaluate import evaluation_strategy
from pretrain_tools.evaluation.lm_harness import score_tasks, select_tasks
from pretrain_tools.evaluation.task_names import CORE_SHOTS, SMALL_TASKS, core_tasks
from support.model_folders import save_tiny

WORDS = ("value", "file", "line", "import", "class", "return", "self", "name", "path", "None", "é", "if x:")
SCHEMAS = ("winograd", "winogrande")
LANGUAGE = ("jeopardy", "bigbench_qa_wikidata", "lambada_openai", "squad", "coqa")
CHANCE = {"boolq": 62, "bigbench_language_identification": 9.1}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, tokenizer, shards):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny", tokenizer, read_manifest(shards))


def scored(folder, names, include_path=None, bundle=None, **options):
    arguments = Namespace(num_fewshot=None, limit=None, batch_size=None, precision="auto", trust_remote_code=False)
    vars(arguments).update(options)
    return score_tasks(folder, select_tasks(names, include_path, bundle), evaluation_strategy(), arguments)


def items_of(kind, number):
    draw = random.Random(number)
    some = [" ".join(draw.choices(WORDS, k=draw.randint(1, 3))) for _ in range(6)]
    some[3] += "!"  # makes every choice distinct
    if kind == "language_modeling":
        return {"context": f"  {some[0]} {some[1]}: ", "continuation": draw.choice(WORDS)}
    if kind == "schema":
        return {"context_options": [some[0], f"{some[1]}, {some[2]}"], "continuation": some[3], "gold": number % 2}
    return {"query": f"{some[0]} {some[1]}", "choices": [f"{some[2]} {some[4]}", some[3]], "gold": number % 2}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A small version of DCLM's bundle: the 22 tasks with a dozen items each."""
    folder, tasks, rows = tmp_path_factory.mktemp("bundle"), [], []
    (folder / "eval_data/some").mkdir(parents=True)
    for place, (label, shots) in enumerate(CORE_SHOTS.items()):
        kind = "schema" if label in SCHEMAS else "language_modeling" if label in LANGUAGE else "multiple_choice"
        task = {"label": label, "dataset_uri": f"some/{label}.jsonl", "num_fewshot": [shots], "icl_task_type": kind}
        tasks.append(task | ({"continuation_delimiter": "\nAnswer: "} if place % 3 else {}))
        rows.append({"Eval Task": label, "Random baseline": CHANCE.get(label, 0 if label in LANGUAGE else 50)})
        lines = [json.dumps(items_of(kind, 100 * place + number)) for number in range(12)]
        (folder / "eval_data" / task["dataset_uri"]).write_text("\n".join(lines) + "\n")
    (folder / "core.yaml").write_text(yaml.safe_dump({"icl_tasks": tasks}))
    with open(folder / "eval_meta_data.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["Eval Task", "Random baseline"])
        writer.writeheader()
        writer.writerows(rows)
    return folder


def right_by_hand(model, tokenizer, task, data, number):
    """Returns True if the model answers an item correctly. As in nanochat's core_eval.py, each prompt gets one forward
    pass, and only the losses of differing tokens are compared."""
    between, kind = task.get("continuation_delimiter", " "), task["icl_task_type"]
    others = [item for place, item in enumerate(data) if place != number]
    shots = random.Random(1234 + number).sample(others, task["num_fewshot"][0])

    def text(item, choice=None):
        if kind == "language_modeling":
            return item["context"].strip() + between + (item["continuation"] if choice is None else "")
        choice = item["gold"] if choice is None else choice
        if kind == "schema":
            return item["context_options"][choice] + between + item["continuation"]
        return item["query"] + between + item["choices"][choice]

    before = "".join(text(shot) + "\n\n" for shot in shots)
    if kind == "language_modeling":
        prompts = [(before + text(data[number], 0)).strip(), before + text(data[number])]
    else:
        prompts = [before + text(data[number], choice) for choice in (0, 1)]
    ids = [[tokenizer.bos_token_id, *tokenizer(p, add_special_tokens=False).input_ids] for p in prompts]
    same = zip(*(row[::-1] if kind == "schema" else row for row in ids), strict=False)
    common = next((n for n, (a, b) in enumerate(same) if a != b), min(map(len, ids)))
    losses = []
    for row in ids[-1:] if kind == "language_modeling" else ids:
        start = len(row) - common if kind == "schema" else common
        kept = torch.tensor([row[-128:]])
        start -= len(row) - kept.shape[1]
        logits = model(kept[:, :-1]).logits[0, start - 1 :].float()
        if kind == "language_modeling":
            return torch.equal(logits.argmax(-1), kept[0, start:])
        losses.append(torch.nn.functional.cross_entropy(logits, kept[0, start:]).item())
    return losses.index(min(losses)) == data[number]["gold"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@torch.no_grad()
def test_core_equals_a_hand_calculation(model_folder, bundle, precision):
    """CORE matches a hand calculation, even for ten-shot prompts longer than the model's 128 positions.

    Losses are in fp32. Rounded to bf16, many choices would have the same loss.
    """
    scores = scored(model_folder, ["core"], bundle=bundle, precision=precision)
    measured = {score.task: score for score in scores}
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=DTYPES[precision]).eval()
    tokenizer, centered, errors = AutoTokenizer.from_pretrained(model_folder), [], []
    for task in yaml.safe_load((bundle / "core.yaml").read_text())["icl_tasks"]:
        label = task["label"]
        data = [json.loads(line) for line in (bundle / "eval_data" / task["dataset_uri"]).read_text().splitlines()]
        random.Random(1337).shuffle(data)
        right = [right_by_hand(model, tokenizer, task, data, number) for number in range(12)]
        chance = CHANCE.get(label, 0 if label in LANGUAGE else 50) / 100
        score = measured[f"core/{label}"]
        assert score.measures["acc"] == pytest.approx(sum(right) / 12, abs=1e-12), label
        assert (score.samples, score.few_shots, score.is_part) == (12, CORE_SHOTS[label], True)
        centered.append((sum(right) / 12 - chance) / (1 - chance))
        errors.append(statistics.stdev(map(float, right)) / math.sqrt(12) / (1 - chance))
        assert score.measures["centered_acc_stderr"] == pytest.approx(errors[-1], abs=1e-12)
    assert len(set(centered)) > 5
    assert measured["core"].measures["core"] == pytest.approx(sum(centered) / 22, abs=1e-12)
    assert measured["core"].measures["core_stderr"] == pytest.approx(math.sqrt(sum(e * e for e in errors)) / 22)
    assert measured["core"].samples == 22 * 12


def test_a_limit_below_the_number_of_examples(model_folder, bundle):
    """Ten-shot tasks can be tested with a single item, whose examples are then the following items."""
    for limit in (1, 0.1):
        scores = scored(model_folder, ["core"], bundle=bundle, limit=limit)
        assert {score.samples for score in scores[:-1]} == {1 if limit == 1 else 2}


def refused(folder):
    with pytest.raises(InputError) as caught:
        core_tasks(folder)
    (problem,) = caught.value.problems
    return problem


def test_core_needs_all_its_tasks_as_published(bundle, tmp_path):
    assert "set --eval_bundle to the folder" in refused(None)
    assert f"--eval_bundle {tmp_path}: core.yaml or eval_meta_data.csv cannot be read" in refused(tmp_path)
    tasks = yaml.safe_load((bundle / "core.yaml").read_text())["icl_tasks"]
    small = tmp_path / "small"
    small.mkdir()
    (small / "eval_data").symlink_to(bundle / "eval_data")
    (small / "eval_meta_data.csv").write_text((bundle / "eval_meta_data.csv").read_text().replace("copa,50", "copa,"))
    changes = {
        "hellaswag_zeroshot": {"num_fewshot": [5]},
        "jeopardy": {"icl_task_type": "schemata"},
        "squad": {"dataset_uri": "gone.jsonl"},
        "boolq": {"label": "unknown"},
    }
    changed = [task | changes.get(task["label"], {}) for task in tasks]
    (small / "core.yaml").write_text(yaml.safe_dump({"icl_tasks": changed}))
    text = refused(small)
    assert "lacks 5 of the 22 tasks of CORE" in text
    assert all(label in text for label in (*changes, "copa"))


def test_an_invalid_item_is_named(bundle, model_folder, tmp_path):
    broken = tmp_path / "broken"
    (broken / "eval_data/some").mkdir(parents=True)
    for name in ("core.yaml", "eval_meta_data.csv"):
        (broken / name).symlink_to(bundle / name)
    for path in (bundle / "eval_data/some").iterdir():
        (broken / "eval_data/some" / path.name).symlink_to(path)
    copa = broken / "eval_data/some/copa.jsonl"
    copa.unlink()
    for item, problem in {
        '{"query": "a", "choices": ["b", "c"], "gold": 2}': "no correct answer",
        '{"query": "a", "choices": ["b", "c"]}': "'gold'",
        '{"choices": ["b", "c"], "gold": 0}': "'query'",
    }.items():
        copa.write_text(item + "\n")
        with pytest.raises(InputError, match=rf"copa.jsonl:1: invalid multiple_choice item \({problem}\)"):
            scored(model_folder, ["core"], bundle=broken)


@pytest.fixture(scope="module")
def small_tasks(tmp_path_factory):
    """Stand-ins for the tasks in `small`, including a context task (winogrande) and a last-word task (lambada)."""
    folder = tmp_path_factory.mktemp("small")
    items = [items_of("multiple_choice", number) | {"number": number} for number in range(6)]
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"validation": str(folder / "items.jsonl")}},
        "validation_split": "validation",
        "output_type": "multiple_choice",
        "metric_list": [{"metric": "acc"}],
        "doc_to_text": "{{query}}",
        "doc_to_target": "gold",
        "doc_to_choice": "{{choices}}",
    }
    kinds = {
        "winogrande": {"doc_to_text": "gold", "doc_to_target": "{{query}}"},
        "lambada_openai": {"output_type": "loglikelihood", "doc_to_target": "{{' ' + choices[0]}}"},
        "sciq": {"doc_to_target": "{{choices[gold]}}"},  # the answer itself, not its index
    }
    for name in SMALL_TASKS:
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **common, **kinds.get(name, {})}))
    return folder, items


@torch.no_grad()
def test_bits_per_byte_equal_a_hand_calculation(model_folder, small_tasks):
    folder, items = small_tasks
    scores = scored(model_folder, ["small"], folder, precision="fp32")
    measured = {score.task: score for score in scores}
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)

    def bits(question, answer):
        ids = tokenizer(question + answer, return_tensors="pt").input_ids
        first = len(tokenizer(question).input_ids)
        nats = -model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)[first - 1 :].sum()
        return nats.item() / math.log(2) / len(answer.encode())

    right = [f" {item['choices'][item['gold']]}" for item in items]
    choices = [bits(item["query"], end) for item, end in zip(items, right, strict=True)]
    by_hand = {name: list(choices) for name in SMALL_TASKS}
    by_hand["winogrande"] = [bits(item["choices"][item["gold"]], f" {item['query']}") for item in items]
    by_hand["lambada_openai"] = [bits(item["query"], f" {item['choices'][0]}") for item in items]
    for name, values in by_hand.items():
        measures = measured[name].measures
        assert measures["bits_per_byte"] == pytest.approx(statistics.fmean(values), abs=1e-6), name
        assert measures["bits_per_byte_stderr"] == pytest.approx(statistics.stdev(values) / math.sqrt(6), abs=1e-6)
        assert "acc" in measures and measured[name].samples == 6
    means = [statistics.fmean(values) for values in by_hand.values()]
    assert measured["small"].measures["bits_per_byte"] == pytest.approx(statistics.fmean(means), abs=1e-6)
    assert measured["small"].samples == 48


def test_tasks_with_several_correct_answers_have_no_bits_per_byte(model_folder, small_tasks, tmp_path):
    folder, _ = small_tasks
    task = yaml.safe_load((folder / "piqa.yaml").read_text()) | {"task": "several", "doc_to_target": "{{[0, 1]}}"}
    (tmp_path / "several.yaml").write_text(yaml.safe_dump(task))
    (score,) = scored(model_folder, ["several"], tmp_path)
    assert score.measures["acc"] == 1 and "bits_per_byte" not in score.measures


def test_a_set_without_a_mean_keeps_its_scores(model_folder, small_tasks, tmp_path, capsys):
    own = shutil.copytree(small_tasks[0], tmp_path / "own")
    task = yaml.safe_load((own / "piqa.yaml").read_text()) | {"doc_to_target": "{{[0, 1]}}"}
    (own / "piqa.yaml").write_text(yaml.safe_dump(task))
    assert {score.task for score in scored(model_folder, ["small"], own)} == set(SMALL_TASKS)
    assert "warning: --tasks small: piqa in --include_path does not score" in capsys.readouterr().err
