"""Tests for the model card: correct, complete, readable by the Hub, and without details about the machine."""

import json

import pytest
import yaml
from huggingface_hub import ModelCard

from pretrain_tools.publishing.card import model_card, plot_losses, write_card
from pretrain_tools.publishing.facts import Publication, gaps_in_records, read_facts
from pretrain_tools.runs.comparison import summary_text
from support.run_folders import recipe_values, write_metrics, write_run

OFFER = Publication("me/tiny", "main", "apache-2.0", ("en", "de"), "bf16")


@pytest.fixture
def run(tmp_path):
    """A run without models, which the card doesn't need."""
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(recipe_values(folder)))
    (folder / "model.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 512, "num_hidden_layers": 2}))
    (folder / "strategy.json").write_text(json.dumps({"strategy": "fsdp2", "ranks": 8, "precision": "bf16"}))
    (folder / "environment.json").write_text(json.dumps({"device": "H100", "commit": "abc123"}))
    write_metrics(folder, 8)
    return folder


def change_recipe(run, **settings):
    (run / "config.yaml").write_text(yaml.safe_dump({**recipe_values(run), **settings}))


def add_event(run, **event):
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(event) + "\n")


def add_evaluation(run, task, **measures):
    add_event(run, event="evaluation", step=8, tokens=8000, model="x", task=task, **measures)


def card(run, step=None, offer=OFFER):
    return model_card(read_facts(run, step, offer=offer), has_picture=True)


def test_metadata_survives_the_hubs_own_reader(run):
    add_evaluation(run, "hellaswag", acc=0.31, acc_stderr=0.005, few_shots=0, samples=10042)
    read = ModelCard(card(run)).data
    assert (read.license, read.language, read.library_name) == ("apache-2.0", ["en", "de"], "transformers")
    assert read.pipeline_tag == "text-generation"
    (result,) = read.eval_results
    assert (result.dataset_name, result.metric_type, result.metric_value) == ("hellaswag (0-shot)", "acc", 0.31)
    assert read.model_name == "tiny"
    assert ModelCard(f"---\n{read.to_yaml()}\n---\n").data.to_dict() == read.to_dict()


def test_energy_of_all_steps_is_on_the_card(run):
    """The energy includes repeated steps, but no steps after the checkpoint."""
    change_recipe(run, energy={"carbon_grams_per_kwh": 400.0})
    add_event(run, event="start", step=6, energy="measured by NVML", parameters=106_816)
    for step, joules in ((7, 3.6e6), (8, 1.8e6), (9, 9e9)):
        add_event(run, event="train", step=step, tokens=1000 * step, joules=joules)
    text = card(run, step=8)
    assert "| energy | 1.5 kWh, measured by NVML (600 g of CO2 at 400 g/kWh) |" in text
    change_recipe(run, energy={"carbon_grams_per_kwh": None})
    assert "| energy | 1.5 kWh, measured by NVML |" in card(run, step=8)


def test_tokens_between_two_log_lines_come_from_the_checkpoint(run):
    logged = read_facts(run, 8)
    state = run / "checkpoints/step-00000010/trainer_state.json"
    state.parent.mkdir(parents=True)
    state.write_text(json.dumps({"state": {"step": 10, "tokens": 10_000}}))
    facts = read_facts(run, 10)
    assert (logged.tokens, facts.tokens, read_facts(run, 9).tokens) == (8000, 10_000, None)
    assert facts.training_flops == pytest.approx(logged.training_flops * 10 / 8)
    assert f"{run}/metrics.jsonl ends at step 8, before the model's step 10" in gaps_in_records(run, 10)
    assert gaps_in_records(run, 8) == [f"{run}/data.json is missing or damaged"]


def test_the_peak_learning_rate_may_lie_between_log_lines(run):
    log = run / "metrics.jsonl"
    log.write_text(log.read_text().replace('"learning_rate": 0.001', '"learning_rate": 0.0001'))
    assert "| learning rate | 0.001 (peak), cosine, 2 warmup steps |" in card(run, step=8)
    change_recipe(run, optim={"learning_rate": None, "schedule": "cosine", "learning_rate_per_sequence": 1e-5})
    assert "| learning rate | 0.0001 (peak)" in card(run, step=8)


@pytest.mark.parametrize(
    "record", [[1], {"contamination": [{"items": 1}]}, {"contamination": 3}, {"preparation": "x"}]
)
def test_a_damaged_data_record_is_a_gap(run, record, capsys):
    intact = card(run, step=8)
    (run / "data.json").write_text(json.dumps({"data/docs": record}))
    assert gaps_in_records(run, 8) == [f"{run}/data.json is missing or damaged"]
    assert card(run, step=8) == intact
    assert "parameters" in summary_text(run)
    assert f"warning: {run}/data.json: is missing or damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "| architecture | llama |",
        "| parameters | 106,816 |",
        "| docs | 75.0% | not recorded |",
        "| budget | 8k tokens in 8 steps, 0.0749 per parameter |",
        "| global batch | 1,000 tokens (10 sequences of 100) |",
        "| learning rate | 0.001 (peak), cosine, 2 warmup steps |",
        "| hardware | H100, 8 processes |",
        "| strategy | fsdp2 |",
        "| throughput | 5,000 tokens/s, MFU 40.0% |",
        "| docs | 4.0000 | 54.60 | 1.8000 |",
        "![Training and validation loss](loss.png)",
        'model="me/tiny"',
        "initialized randomly with seed 7",
        "It was trained only on text in these languages: en, de.",
    ],
)
def test_the_card_states(run, line):
    assert line in card(run)


def test_a_checkpoints_card_omits_later_events(run):
    add_evaluation(run, "hellaswag", acc=0.31)
    text = card(run, step=4, offer=Publication("me/tiny", "step-4"))
    assert "4k tokens in 4 steps, 0.0374 per parameter of 8 planned" in text
    assert "| docs | 5.0000 |" in text and "| docs | 4.0000 |" not in text
    assert "hellaswag" not in text
    assert 'revision="step-4"' in text
    assert "intermediate checkpoint (step 4 of 8)" in text


def test_a_run_that_was_annealed_is_not_partial(run):
    log = run / "metrics.jsonl"
    log.write_text(log.read_text().replace('"total_steps": 8', '"total_steps": 20'))
    assert "8k tokens in 8 steps, 0.0749 per parameter of 20 planned" in card(run)
    add_event(run, event="control", step=6, command="anneal", by="budget.minutes", total_steps=8)
    text = card(run)
    assert "planned" not in text and "intermediate checkpoint" not in text
    assert "intermediate checkpoint (step 4 of 8)" in card(run, step=4)


def test_a_mixture_changed_by_a_resume_is_on_the_card(run):
    """Every mixture counts that the model was trained on, also one that a later start changed again."""
    first = recipe_values(run)["data"]
    web = {**first, "train": [{"shards": "data/web", "weight": 1.0}]}
    (run / "data.json").write_text(json.dumps({"data/web": {"totals": {"train": {"tokens": 5_000_000}}}}))
    for step, origin, data in ((4, 3, web), (5, 5, web), (6, 5, web), (7, 7, first)):
        add_event(run, event="start", step=step, origin={"step": origin, "sample": 0, "sources": []}, data=data)
        add_event(run, event="train", step=step + 1, tokens=1000 * (step + 1), loss=1.0)
    found = {(source.stage, source.name, source.weight) for source in read_facts(run).sources}
    before, after = ({(steps, "docs", 0.75), (steps, "code", 0.25)} for steps in ("steps 1 to 3", "from step 8 on"))
    assert found == before | {("steps 4 to 7", "web", 1.0)} | after
    assert "| steps 4 to 7 | web | 100.0% | 5M |" in card(run)
    assert {source.stage for source in read_facts(run, 4).sources} == {None}


def test_repeated_steps_count_once(run):
    add_event(run, event="rollback", step=8, to_step=4, reason="loss 9.1", change="data of 4 steps left out")
    add_event(run, event="train", step=5, tokens=5000, loss=1.25)
    facts = read_facts(run)
    assert facts.step == 5 and facts.tokens == 5000
    text = card(run)
    assert "| final training loss | 1.2500 |" in text
    assert "- rolled back to step 4: loss 9.1; data of 4 steps left out" in text


def test_the_scores_of_a_task_stand_together(run):
    add_evaluation(run, "sciq", acc=0.5, acc_norm=0.75)
    add_evaluation(run, "lambada", acc=0.25, perplexity=31.4159)
    rows = "| lambada | acc | 0.2500 |\n|  | perplexity | 31.42 |\n| sciq | acc | 0.5000 |\n|  | acc norm | 0.7500 |"
    assert rows in card(run)


def test_scores_on_part_of_a_task_are_marked_and_not_in_the_metadata(run):
    add_evaluation(run, "piqa", acc=0.9, limit=10)
    add_evaluation(run, "sciq", acc=0.5, acc_stderr=0.01)
    text = card(run)
    assert "| piqa \\* | acc | 0.9000 |" in text and "| sciq | acc | 0.5000 ± 0.0100 |" in text
    assert [result.dataset_name for result in ModelCard(text).data.eval_results] == ["sciq"]


def test_a_quick_test_does_not_replace_the_scores_on_the_whole_task(run):
    for limit, acc in ((None, 0.4), (None, 0.5), (10, 0.9)):
        add_evaluation(run, "sciq", acc=acc, limit=limit)
    for limit, acc in ((10, 0.9), (20, 0.8)):
        add_evaluation(run, "piqa", acc=acc, limit=limit)
    text = card(run)
    assert "| sciq | acc | 0.5000 |" in text and "| piqa \\* | acc | 0.8000 |" in text


def test_the_losses_of_two_splits_stay_apart(run):
    for split, loss in (("validation", 4.5), ("train", 3.5)):
        add_event(run, event="evaluation", step=8, tokens=8000, model="x", source="docs", split=split, loss=loss)
    text = card(run)
    assert "| docs validation | loss | 4.5000 |" in text and "| docs train | loss | 3.5000 |" in text


def test_scores_of_the_step_come_from_the_log(run):
    add_event(
        run, event="evaluation", step=8, tokens=8000, model="x", task="arc", acc=0.25, acc_stderr=0.1, few_shots=5
    )
    add_event(run, event="evaluation", step=8, tokens=8000, model="x", source="docs", split="validation", loss=4.5)
    add_event(run, event="evaluation", step=4, tokens=4000, model="x", task="arc", acc=0.1)
    facts = read_facts(run)
    found = {(score.task, score.metric, score.value, score.standard_error, score.few_shots) for score in facts.scores}
    assert found == {("arc", "acc", 0.25, 0.1, 5), ("docs", "loss", 4.5, None, None)}


def test_the_card_names_no_folder_of_the_machine(run):
    prompts = ["Either/or ..."]
    change_recipe(run, model="/home/somebody/models/big.json", output="~/runs/x", samples={"prompts": prompts})
    text = card(run)
    assert prompts[0] in text, "text with dots isn't a path"
    assert str(run.parent) not in text and "somebody" not in text and "~/" not in text
    assert "shards: docs" in text and "model: big.json" in text


def test_the_base_model_is_linked(run):
    change_recipe(run, model="owner/base@v1", init="pretrained")
    text = card(run)
    assert ModelCard(text).data.base_model == "owner/base"
    assert "initialized with the weights of owner/base@v1" in text


def test_the_data_is_described_from_the_runs_record(run):
    kept = {
        "tokenizer": {"name": "owner/bpe"},
        "vocabulary_size": 500,
        "totals": {"train": {"tokens": 5_000_000, "documents": 1200, "text_bytes": 20_000_000_000}},
        "hub_datasets": ["owner/web"],
        "contamination": [
            {"benchmark": "blimp", "items": 1200, "sought": 1100, "found": 7, "documents": 9, "remove": "document"},
        ],
    }
    (run / "data.json").write_text(json.dumps({str(run.parent / "docs"): kept}))
    text = card(run)
    assert "| docs (owner/web) | 75.0% | 5M | 1,200 | 20.0 GB | owner/bpe |" in text
    assert "The training data was decontaminated against these benchmarks" in text
    assert "| docs | blimp | 1,200 (1,100 searched for) | 7 | 9, removed |" in text
    assert ModelCard(text).data.datasets == ["owner/web"]
    assert "500 token IDs; the other 12 rows are padding" in text


def test_sources_with_the_same_name_have_a_row_each(run):
    folders = ("data/en/web", "data/de/web")
    change_recipe(run, data={"train": [{"shards": folder} for folder in folders]})
    found = {"items": 9, "sought": 9, "found": 1, "documents": 1, "remove": "document"}
    records = {name: {"manifest_sha256": name, "contamination": [{"benchmark": name, **found}]} for name in folders}
    (run / "data.json").write_text(json.dumps(records))
    text = card(run)
    assert all(f"| web | {folder} | 9 |" in text for folder in folders)


def test_a_curriculum_shows_its_stages(run):
    stages = [
        {"train": [{"shards": "a"}], "until": 0.25},
        {"train": [{"shards": "b"}, {"shards": "a", "max_epochs": 2}]},
    ]
    change_recipe(run, data={"stages": stages})
    text = card(run)
    assert "| 0% to 25% | a | 100.0% |" in text
    assert "| 25% to 100% | a | 50.0%, at most 2 epochs |" in text


def test_a_run_with_few_records_has_a_card(tmp_path):
    (tmp_path / "config.yaml").write_text("model: x.json\n")
    write_card(read_facts(tmp_path, model_folder=tmp_path), tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert ModelCard(text).data.library_name == "transformers"
    assert "loss.png" not in text and not (tmp_path / "loss.png").exists()
    assert "| global batch | not recorded |" in text and "## Data\n\nNot recorded." in text


def test_the_picture_is_the_same_every_time_and_shows_the_losses(run, tmp_path):
    facts = read_facts(run)
    assert plot_losses(facts, tmp_path / "a.png") and plot_losses(facts, tmp_path / "b.png")
    picture = (tmp_path / "a.png").read_bytes()
    assert picture == (tmp_path / "b.png").read_bytes() and picture.startswith(b"\x89PNG")
    assert plot_losses(read_facts(run, step=4), tmp_path / "c.png")
    assert picture != (tmp_path / "c.png").read_bytes()


def test_a_local_architecture_asks_for_trust(tmp_path):
    model = {"model_type": "deepone", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    run = write_run(tmp_path / "x", model={**model, "intermediate_size": 64, "vocab_size": 512}, steps=(4,))
    write_card(read_facts(run, model_folder=run / "final", offer=OFFER), run / "final")
    assert 'model="me/tiny", trust_remote_code=True' in (run / "final/README.md").read_text()
