"""Weight averaging must match its formula, leave training unchanged and cover the right steps."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from pretrain.config import Averaging
from pretrain.optim.averaging import WeightAverage, average_after_step, averaging_problems, can_continue
from pretrain.recipe import read_run_config
from support.project import events, losses, run_script

STEPS = 400


def walk(steps: int = STEPS) -> torch.Tensor:
    """Returns the weights after each step of a random walk, (steps, 7) in fp64."""
    torch.manual_seed(0)
    return torch.randn(steps, 7).cumsum(0).double()


def averaged(settings: Averaging, weights: torch.Tensor, total_steps: int = STEPS) -> torch.Tensor:
    """Averages the weights step by step, as a run does."""
    state, mean, parameter = None, None, {"w": torch.zeros(weights.shape[1])}
    for step in range(1, len(weights) + 1):
        parameter["w"].copy_(weights[step - 1])
        if step % settings.every_steps:
            continue
        state, share = average_after_step(settings, state, step, total_steps)
        if share == 1.0:
            mean = WeightAverage(parameter)
        elif state:
            mean.update(parameter, share)
    return mean.means["w"].double()


@pytest.mark.parametrize(("every_steps", "half_life_fraction"), [(1, 0.05), (4, 0.05), (7, 0.3)])
def test_ema_has_the_decay_of_its_half_life_for_any_interval(every_steps, half_life_fraction):
    """A copy's share must halve after each half-life; the first copies have equal shares."""
    weights = walk()
    taken = weights[every_steps - 1 :: every_steps]
    decay = 2 ** (-every_steps / (half_life_fraction * STEPS))
    expected = torch.zeros_like(weights[0])
    for number, copy in enumerate(taken, start=1):
        expected += max(1 / number, 1 - decay) * (copy - expected)
    found = averaged(Averaging(kind="ema", every_steps=every_steps, half_life_fraction=half_life_fraction), weights)
    assert torch.allclose(found, expected, atol=1e-5)
    # In a run much longer than the half-life, this is close to an exponential moving average of all steps.
    shares = decay ** torch.arange(len(taken) - 1, -1, -1, dtype=torch.float64)
    plain = (shares[:, None] * taken).sum(0) / shares.sum()
    if half_life_fraction < 0.1:
        assert torch.allclose(found, plain, atol=1e-3)


def test_tail_is_the_mean_of_the_end():
    weights = walk()
    found = averaged(Averaging(kind="tail", every_steps=4, tail_fraction=0.25), weights)
    assert torch.allclose(found, weights[303::4].mean(0), atol=1e-5)


def test_an_average_continues_only_in_the_same_schedule():
    tail, state = Averaging(kind="tail"), {"kind": "tail", "first_step": 810, "count": 20}
    assert can_continue(tail, state, total_steps=1000)
    assert not can_continue(tail, state, total_steps=2000), "the tail of an extended run starts later"
    assert average_after_step(tail, state, 1010, total_steps=2000) == (None, 0.0)
    assert average_after_step(tail, state, 1610, total_steps=2000)[1] == 1.0, "a new average must start"
    assert can_continue(tail, state, total_steps=900), "an average may continue if the run is annealed early"
    assert not can_continue(Averaging(kind="ema"), state, total_steps=1000)
    assert average_after_step(Averaging(kind="ema"), None, 500, total_steps=1000)[1] == 1.0


def test_exchanging_mean_and_weights_is_reversible_bit_for_bit():
    weights = {"a": torch.randn(5, 3), "b": torch.tensor([1e-40, -0.0, float("inf")])}
    mean = WeightAverage(weights)
    weights["a"].add_(1)
    mean.update(weights, 0.3)
    before = [tensor.clone() for tensor in (*weights.values(), *mean.means.values())]
    mean.exchange(weights)
    assert weights["a"].equal(before[2]) and mean.means["a"].equal(before[0])
    mean.exchange(weights)
    after = [*weights.values(), *mean.means.values()]
    assert all(a.view(torch.int32).equal(b.view(torch.int32)) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"export.weights": "average"}, "export.weights: average, but averaging.kind is none"),
        (
            {"averaging.kind": "ema", "optim.name": "adafactor", "optim.stochastic_rounding": "true"},
            "averaging.kind: ema averages weights in fp32",
        ),
        (
            {"averaging.kind": "tail"},
            "averaging.every_steps: 10 averages only 0 of the 2 steps, but an average needs at least two",
        ),
        ({"averaging.kind": "ema"}, "averaging.every_steps: 10 averages only 1 of the 12 steps"),
    ],
)
def test_invalid_averaging_is_rejected(recipe, settings, problem):
    config = read_run_config(recipe, list(settings.items()))
    found = averaging_problems(
        config.averaging,
        total_steps=12,
        exports_average=config.export.weights == "average",
        rounds_stochastically=config.optim.stochastic_rounding,
    )
    assert found[0].startswith(problem)


def folders(run) -> list:
    return sorted((run / "checkpoints").glob("step-*"))


def test_averaging_does_not_change_training(recipe, tmp_path):
    every = ["--checkpoint", "{every_steps: 1, keep_last: 20}", "--export.dtype", "fp32"]
    ema = ["--averaging", "{kind: ema, every_steps: 2, half_life_fraction: 0.25}", "--export.weights", "average"]
    tail = ["--averaging", "{kind: tail, every_steps: 1, tail_fraction: 0.75}"]
    plain, run, late = (tmp_path / name for name in ("plain", "run", "late"))

    def train(output, *arguments):
        return run_script("train.py", "--config", recipe, "--output", output, *every, *arguments).stdout

    train(plain)
    train(run, *ema)
    assert losses(run) == losses(plain), "validating the average at step 6 must not affect training"
    weights = [load_file(folder / "model.safetensors") for folder in folders(plain)]
    assert [(folder / "average.safetensors").exists() for folder in folders(run)] == [False] + [True] * 11
    found, decay = load_file(run / "checkpoints/step-00000012/average.safetensors"), 2 ** (-2 / 3)
    for name, tensor in found.items():
        expected = torch.zeros_like(tensor, dtype=torch.float64)
        for number, copy in enumerate(weights[1::2], start=1):
            expected += max(1 / number, 1 - decay) * (copy[name] - expected)
        assert torch.allclose(tensor.double(), expected, atol=1e-6)
    final = load_file(run / "final/model.safetensors")
    assert final.keys() == found.keys() and all(final[name].equal(found[name]) for name in final)
    (export,) = events(run, "export")
    assert (export["weights"], export["problems"]) == ("average", [])
    validations = {event["step"]: event for event in events(run, "validation")}
    assert "average_loss" not in validations[0] and validations[12]["average_loss"] != validations[12]["loss"]
    assert validations[12]["loss"] == events(plain, "validation")[-1]["loss"], (
        "the loss must be that of the raw weights"
    )
    shards = read_run_config(recipe).data.train[0].shards
    evaluate = ["evaluate.py", "--model", f"{run}@12", "--weights", "average", "--data", shards, "--sequences", 8]
    run_script(*evaluate, "--output", tmp_path / "x.json")
    (model,) = json.loads((tmp_path / "x.json").read_text())["models"]
    assert model["sources"]["source"]["loss"] == pytest.approx(validations[12]["average_loss"], abs=1e-5)
    assert events(run, "evaluation") == [], "scores of averaged weights must not be added to the run"

    # Averaging is enabled in the middle of the run, after the tail's start at step 3.
    (late / "checkpoints").mkdir(parents=True)
    shutil.copytree(plain / "checkpoints/step-00000008", late / "checkpoints/step-00000008")
    said = train(late, *tail)
    assert "averaging: the checkpoint contains no tail average; starting a new one from its weights" in said
    assert losses(late) == {step: loss for step, loss in losses(plain).items() if step > 8}
    found = load_file(late / "checkpoints/step-00000012/average.safetensors")
    for name, tensor in found.items():
        expected = torch.stack([copy[name].double() for copy in weights[8:]]).mean(0)
        assert torch.allclose(tensor.double(), expected, atol=1e-6)
    state = json.loads((late / "checkpoints/step-00000012/trainer_state.json").read_text())["state"]
    assert state["average"] == {"kind": "tail", "first_step": 9, "count": 4}
