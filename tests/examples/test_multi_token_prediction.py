"""Tests for the multi-token prediction example: its loss, and its parameters in checkpoints."""

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from pretrain.config import Loss, WindowSpec
from pretrain.errors import InputError
from pretrain.model import loss_terms
from pretrain.model.attention import model_inputs
from pretrain.model.build import build_model
from pretrain.registry import LOSS_TERMS, load_extensions
from pretrain.training.continued_plan import refuse_other_terms
from support.project import ROOT, events, run_script
from support.tiny_models import TINY_LLAMA

EXAMPLE = ROOT / "examples/multi_token_prediction.py"
NAME = "multi_token_prediction"


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
    found = terms.add(inputs, targets, hidden, model.get_output_embeddings(), model.get_input_embeddings(), batch)
    expected = 0.0
    for start, length in zip(torch.tensor((0, *lengths)).cumsum(0).tolist(), lengths, strict=False):
        own = ids[None, start : start + length]
        following = ids[start + 1 : start + length + 1]  # the last target is the first token of the next document
        state = model.base_model(input_ids=own, use_cache=False).last_hidden_state
        for k, depth in enumerate(terms.terms[NAME].trained, start=1):
            if length <= k:
                break
            state = depth(state[:, : length - k], model.get_input_embeddings()(own[:, k:]), {})
            logits = model.get_output_embeddings()(state)
            expected += F.cross_entropy(logits[0], following[k:], reduction="sum")
    torch.testing.assert_close(found, 0.3 * expected / 2 / total, rtol=1e-5, atol=1e-6)


class NothingWaits(TorchDispatchMode):
    """Dispatch mode that fails on operations that would synchronize the host with the GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func._opname not in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal"), func
        return func(*args, **(kwargs or {}))


def test_a_step_never_synchronizes():
    model = build_model(AutoConfig.for_model(**TINY_LLAMA), seed=1, attention="groundwork_sdpa")
    terms = made(model)
    ids = torch.arange(24)[None] % 9
    hidden = torch.randn(1, 24, 64, requires_grad=True)
    positions = {"position_ids": torch.arange(24)[None] % 8}
    with NothingWaits():
        terms.add(ids, ids, hidden, model.get_output_embeddings(), model.get_input_embeddings(), positions).backward()


def test_initial_values_depend_only_on_the_seed():
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


def test_parameters_are_in_checkpoints_and_not_in_the_model(with_term, tmp_path):
    """Checkpoints store the loss term's parameters separately from the model. tests/parallel/test_term_strategies.py
    covers all strategies."""
    run_script("train.py", "--config", with_term)
    run = tmp_path / "run"
    folder = run / "checkpoints/step-00000006"
    saved, average = (load_file(folder / f"{name}.safetensors") for name in ("loss_terms", "average_loss_terms"))
    key = f"loss_terms.{NAME}.0.projection.weight"
    assert saved.keys() == average.keys() and not torch.equal(saved[key], average[key])
    refused = run_script("train.py", "--config", with_term, "--loss.terms", "{}", "--check", check=False)
    assert refused.returncode == 2 and f"the recipe has none, but {folder} has {NAME}" in refused.stderr
    first, *_, last = (event[f"loss_{NAME}"] for event in events(run, "train"))
    assert last < first, "the loss term's parameters must learn"
    for place in (run / "final", folder):
        _, told = AutoModelForCausalLM.from_pretrained(place, output_loading_info=True)
        assert not any(told.values())


class Trained(loss_terms.LossTerm):
    """A loss term with a parameter."""

    def module(self):
        return torch.nn.Linear(1, 1)

    def __call__(self, seen):
        return seen.hidden_BTD.sum(-1)


def test_terms_with_unscaled_parameters_are_rejected_with_mup(monkeypatch):
    monkeypatch.setitem(LOSS_TERMS, "trained", Trained)
    (problem,) = loss_terms.term_problems(Loss(terms={"trained": None}), "auto", scales_width=True)
    assert "parametrization" in problem


def test_a_checkpoint_with_other_parameters_is_refused():
    with pytest.raises(InputError, match=r"starting with loss_terms\.a \(\(2,\) now, \(3,\) in the checkpoint\)"):
        refuse_other_terms({"loss_terms.a": (2,)}, {"loss_terms.a": (3,), "loss_terms.b": (1,)})
