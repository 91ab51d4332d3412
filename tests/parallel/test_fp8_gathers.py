"""Sharded fp8 layers must gather their weights in fp8, with nearly the same losses as with bf16 gathers.

ZeRO gathers weights in bf16.
"""

import importlib.util
import json
from pathlib import Path

import pytest
import yaml

from pretrain.model.model_config import load_model_config
from pretrain_tools.planning.layouts import Layout
from pretrain_tools.planning.memory import PlannedRun
from pretrain_tools.planning.traffic import Links, Step, flows
from support.fake_cuda import outcomes_of
from support.fp8_on_fake_cuda import LAUNCHES, SIZES
from support.project import events, launch, losses
from support.ranks_on_fake_cuda import MODEL, SEQUENCES, read_config
from support.tiny_models import TINY_LLAMA

# torchao isn't in the test requirements, because accelerate would then import it in every process.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="pip install torchao")
LAYERS, WIDTH, MLP = 2, MODEL["hidden_size"], MODEL["intermediate_size"]
MICRO_STEPS = ("micro-step", "last micro-step")
ZERO = ("zero1", "zero2", "zero3")


@pytest.fixture(scope="module")
def seen():
    outcomes = outcomes_of("support.fp8_on_fake_cuda")
    assert all(outcome.error is None for outcome in outcomes.values()), outcomes
    return {name: outcome.result for name, outcome in outcomes.items()}


def gathered(result: dict, moment: str) -> int:
    return result[moment]["collectives"]["all-gather of 8 by 1"][1]


def test_layer_matrices_are_gathered_in_one_byte_per_element(seen):
    matrices = LAYERS * (4 * WIDTH**2 + 3 * WIDTH * MLP)
    # Weights are gathered again for the backward pass, except in the last layer.
    for moment, passes in (("micro-step", 1.5), ("last micro-step", 1.5), ("validation", 1)):
        assert gathered(seen["bf16"], moment) - gathered(seen["fp8"], moment) == passes * matrices
        # The scales of all weights are computed with a single all-reduce, in the first micro-step.
        scales = {} if moment == "last micro-step" else {"all-reduce of 8 by 1": [1, 4 * LAYERS * 7]}
        found = seen["fp8"][moment]["collectives"]
        assert {name: counts for name, counts in found.items() if "all-reduce" in name} == scales
    assert all(seen["fp8"][moment]["waits"] == seen["fp8"][moment]["unawaited_copies"] == 0 for moment in MICRO_STEPS)
    assert seen["fp8"]["micro-step"]["peak_bytes"] < seen["bf16"]["micro-step"]["peak_bytes"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, shards) -> Path:
    """Trains the same model with one process and with two: gathering in fp8, gathering in bf16, and compiled."""
    folder = tmp_path_factory.mktemp("fp8")
    model = folder / "model.json"
    model.write_text(json.dumps(TINY_LLAMA))
    values = {
        "model": str(model),
        "output": str(folder / "run"),
        "seed": 1,
        "precision": "fp8",
        "data": {"train": [{"shards": str(shards)}], "sequence_length": 32},
        "budget": {"steps": 4},
        "batch": {"tokens_per_step": 256, "sequences_per_micro_batch": 2},
        "optim": {"learning_rate": 0.003, "warmup_steps": 0},
        "compile": "none",
        "validation": {"every_steps": 2, "sequences": 4},
        "checkpoint": {"every_steps": 2, "keep_last": 9},
        "averaging": {"kind": "ema", "every_steps": 1},
        "logging": {"every_steps": 1},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))

    def train(processes: int, runs: dict[str, dict]) -> None:
        strategy = "single" if processes == 1 else "fsdp2"
        listed = [
            {"strategy": strategy, "emulates_fp8": True, **more, "arguments": ["--output", str(folder / name), *words]}
            for name, (words, more) in runs.items()
        ]
        (folder / "runs.json").write_text(json.dumps(listed))
        program = ("tests/support/train_strategies.py", folder / "recipe.yaml", folder / "runs.json")
        launch("single" if processes == 1 else "ddp", processes, *program)

    train(1, {"alone": ((), {}), "alone in bf16": (("--precision", "bf16"), {})})
    middle = str(folder / "alone/checkpoints/step-00000002")
    runs = {
        "fp8": ((), {}),
        # Offloaded weights are gathered in bf16.
        "bf16": ((), {"environment": {"FSDP_OFFLOAD_PARAMS": "true"}}),
        "compiled": (("--compile", "regional"), {"aot_eager": True}),
        "resumed": ((), {"start_from": middle}),
        **{name: ((), {"strategy": name}) for name in ZERO},
        "zero3 compiled": (("--compile", "regional"), {"strategy": "zero3", "aot_eager": True}),
        "zero1 resumed": ((), {"strategy": "zero1", "start_from": str(folder / "zero3/checkpoints/step-00000002")}),
    }
    train(2, runs)
    return folder


@pytest.mark.parametrize("name", ["fp8", "bf16", "compiled", "resumed"])
def test_losses_match_one_process_up_to_rounding(runs, name):
    """Different scales change the first loss by 4e-4."""
    wanted = losses(runs / "alone")
    found = losses(runs / name)
    assert found and all(loss == pytest.approx(wanted[step], abs=5e-3) for step, loss in found.items())


@pytest.mark.parametrize("name", [*ZERO, "zero3 compiled", "zero1 resumed"])
def test_zero_has_the_same_losses_as_fsdp2_with_bf16_gathers(runs, name):
    """fp8 changes the losses by up to 1e-3."""
    wanted = losses(runs / "bf16")
    found = losses(runs / name)
    assert len(found) == (2 if "resumed" in name else 4)
    assert all(loss == pytest.approx(wanted[step], abs=1e-5) for step, loss in found.items())


def test_one_process_also_trains_in_fp8(runs):
    in_fp8, in_bf16 = (losses(runs / name) for name in ("alone", "alone in bf16"))
    assert all(0 < abs(loss - in_bf16[step]) < 5e-3 for step, loss in in_fp8.items())


def test_weights_gathered_in_fp8_are_rounded_once(runs):
    """Weights must be rounded directly from fp32 to fp8, so losses are slightly different than with bf16 gathers."""
    in_fp8, in_bf16 = (losses(runs / name) for name in ("fp8", "bf16"))
    assert all(0 < abs(loss - in_bf16[step]) < 5e-3 for step, loss in in_fp8.items())


def test_validation_with_averaged_weights_has_its_own_scales(runs):
    of_runs = [[event["loss"] for event in events(runs / name, "validation")] for name in ("alone", "fp8")]
    assert of_runs[1] == pytest.approx(of_runs[0], abs=5e-3)


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_plan_predicts_the_traffic(seen, name, tmp_path):
    config = read_config(tmp_path, LAUNCHES[name])
    sizes = SIZES[name]
    run = PlannedRun(config, load_model_config(config.model.config), config.precision)
    planned = flows(Step(run.work(Layout.of(sizes), SEQUENCES), 2, Links(1.0, 1.0, 8)))[0]
    collectives = [seen[name][moment]["collectives"] for moment in MICRO_STEPS]
    kinds = [f"{kind} of 8 by {sizes.tp}" for kind in ("all-gather", "reduce-scatter")]
    sent = sum(of[kind][1] for of in collectives for kind in kinds)
    assert planned.sent == pytest.approx(sent * 7 / 8, rel=0.001)
