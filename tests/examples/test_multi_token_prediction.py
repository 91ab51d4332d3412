"""The example of multi-token prediction: its loss, its parameters under strategies, checkpoints and resumes."""

import os

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from pretrain.config import Loss, WindowSpec
from pretrain.errors import InputError
from pretrain.mesh_sizes import Sizes
from pretrain.model import loss_terms
from pretrain.model.attention import model_inputs
from pretrain.model.build import build_model
from pretrain.registry import LOSS_TERMS, load_extensions
from pretrain.training.resuming import refuse_other_terms
from support.project import ROOT, events, launch, run_script
from support.tiny_models import TINY_LLAMA

EXAMPLE = ROOT / "examples/multi_token_prediction.py"
NAME = "multi_token_prediction"
STRATEGIES = [("fsdp2", 2), ("ddp", 2), ("hsdp", 4)]
if os.environ.get("STRATEGIES") != "all":
    del STRATEGIES[1:]


def made(model, seed=1, **options):
    load_extensions([str(EXAMPLE)])
    return loss_terms.LossTerms(Loss(terms={NAME: options}), model.config, seed=seed, dtype=torch.float32)


def test_each_depth_predicts_a_later_token_of_its_own_document():
    model = build_model(AutoConfig.for_model(**TINY_LLAMA), seed=1, attention="groundwork_sdpa")
    terms = made(model, depths=2)
    lengths = (7, 5, 1, 12)
    ids = torch.cat([torch.arange(n) + n * (torch.arange(n) > 0) for n in lengths] + [torch.zeros(1)]).long()
    total = sum(lengths)
    batch = model_inputs(
        ids[None].numpy(),
        WindowSpec(total, document_mask=True),
        end_of_document_id=0,
        device=torch.device("cpu"),
        attention="groundwork_sdpa",
    )
    inputs = batch.pop("input_ids_BT")
    targets = batch.pop("targets_BT")
    hidden = model.base_model(input_ids=inputs, use_cache=False, **batch).last_hidden_state
    found = terms.add(inputs, targets, hidden, model, batch)
    expected = 0.0
    for start, length in zip(torch.tensor((0, *lengths)).cumsum(0).tolist(), lengths, strict=False):
        own = ids[None, start : start + length]
        following = ids[start + 1 : start + length + 1]  # the last one begins the next document
        state = model.base_model(input_ids=own, use_cache=False).last_hidden_state
        for k, depth in enumerate(terms.terms[NAME].trained, start=1):
            if length <= k:
                break
            state = depth(state[:, : length - k], model.get_input_embeddings()(own[:, k:]), {})
            logits = model.get_output_embeddings()(state)
            expected += F.cross_entropy(logits[0], following[k:], reduction="sum")
    torch.testing.assert_close(found, 0.3 * expected / 2 / total, rtol=1e-5, atol=1e-6)


def test_initial_values_depend_on_the_seed_alone():
    model = build_model(AutoConfig.for_model(**TINY_LLAMA), seed=1)
    first = made(model).trained.state_dict()
    torch.manual_seed(123)
    same = made(model).trained.state_dict()
    other = made(model, seed=2).trained.state_dict()
    key = f"{NAME}.0.projection.weight"
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first[key], other[key])


@pytest.fixture
def with_term(recipe):
    values = yaml.safe_load(recipe.read_text())
    values |= {"extensions": [str(EXAMPLE)], "budget": {"steps": 6}, "checkpoint": {"every_steps": 3, "keep_last": 3}}
    values |= {"loss": {"terms": {NAME: {"coefficient": 0.5}}}, "averaging": {"kind": "ema", "every_steps": 1}}
    recipe.write_text(yaml.safe_dump(values))
    return recipe


def curve(run):
    """{step: [loss, term, gradient norm]}."""
    return {e["step"]: [e["loss"], e[f"loss_{NAME}"], e["grad_norm"]] for e in events(run, "train")}


def saved(run, step, file):
    return load_file(run / f"checkpoints/step-{step:08d}/{file}.safetensors")


def weights_and_averages(run):
    folder = run / "checkpoints/step-00000006"
    return load_file(folder / "loss_terms.safetensors") | {
        f"average of {name}": mean for name, mean in load_file(folder / "average_loss_terms.safetensors").items()
    }


@pytest.mark.parametrize(("strategy", "processes"), STRATEGIES)
def test_strategies_train_alike_and_continue_each_other(with_term, tmp_path, strategy, processes):
    run_script("train.py", "--config", with_term)
    mixed = ("train.py", "--config", with_term, "--output", tmp_path / "mixed", "--checkpoint.stop_at_step")
    launch(strategy, processes, *mixed, "2", check=False)
    run_script(*mixed, "4", check=False)
    launch(strategy, processes, *mixed, "null")
    alone = curve(tmp_path / "run")
    for step, figures in curve(tmp_path / "mixed").items():
        assert figures == pytest.approx(alone[step], rel=1e-6), step
    expected = weights_and_averages(tmp_path / "run")
    found = weights_and_averages(tmp_path / "mixed")
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5)  # after AdamW, of small gradients
    key = f"loss_terms.{NAME}.0.projection.weight"
    assert not torch.equal(expected[key], expected[f"average of {key}"])
    assert alone[6][1] < alone[1][1], "the term's own parameters learn"
    for folder in ("final", "checkpoints/step-00000006"):
        _, told = AutoModelForCausalLM.from_pretrained(tmp_path / "mixed" / folder, output_loading_info=True)
        assert not any(told.values())


class Trained(loss_terms.LossTerm):
    """Has a parameter."""

    by_token = True

    def module(self):
        return torch.nn.Linear(1, 1)

    def __call__(self, seen):
        return seen.hidden_BTD.sum(-1)


@pytest.mark.parametrize("size", ["tp", "pp", "cp", "ep", "zero"])
def test_other_strategies_are_refused_by_name(size, monkeypatch):
    monkeypatch.setitem(LOSS_TERMS, "trained", Trained)
    monkeypatch.setattr(loss_terms, "launched_sizes", lambda: Sizes(**{} if size == "zero" else {size: 2}))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", str(size == "zero").lower())
    problems = loss_terms.term_problems(Loss(terms={"trained": None}), "auto")
    assert any("trained has trained parameters, which run under ddp, fsdp2 and hsdp alone" in p for p in problems)
    (problem,) = loss_terms.term_problems(Loss(terms={"trained": None}), "auto", scales_width=True)[len(problems) :]
    assert "parametrization" in problem


def test_a_checkpoint_with_other_parameters_is_refused():
    with pytest.raises(InputError, match=r"first loss_terms\.a: \(2,\) here, \(3,\) there"):
        refuse_other_terms({"loss_terms.a": (2,)}, {"loss_terms.a": (3,), "loss_terms.b": (1,)})
