"""Loss terms with trained parameters must have the same values, and must resume correctly, under every strategy.

There are launches with one, two and, with STRATEGIES=all, four processes (tests/support/train_strategies.py). One term
is the multi-token prediction example. The other one uses its parameters, the logits and activation checkpointing
directly.
"""

import json
import os
from itertools import combinations

import pytest
import torch
import yaml
from safetensors.torch import load_file

from pretrain.mesh_sizes import Sizes
from support.mesh_products import MODELS, SCHEDULES, name_of, variables
from support.project import ROOT, events, launch

EVERYTHING = os.environ.get("STRATEGIES") == "all"
STEPS = 4
MIDDLE, END = "checkpoints/step-00000002", "checkpoints/step-00000004"
MTP = "multi_token_prediction"
PROBE = '''
import torch
from torch.utils.checkpoint import checkpoint
from pretrain.model.loss_terms import LossTerm
from pretrain.registry import LOSS_TERMS


@LOSS_TERMS.register("probe")
class Probe(LossTerm):
    """Loss term that uses the embedding, the head and activation checkpointing directly."""

    by_token = True
    embeds = True

    def module(self):
        return torch.nn.Linear(self.model_config.hidden_size, self.model_config.hidden_size)

    def __call__(self, seen):
        return checkpoint(self.part, seen, use_reentrant=False)

    def part(self, seen):
        wanted_BTD = seen.embedding(seen.documents_BT) @ self.trained.weight + self.trained.bias
        logits_BTV = seen.logits(seen.hidden_BTD - wanted_BTD) + seen.head(wanted_BTD)
        of_weights = (seen.embedding.weight[:8] * seen.head.weight[:8]).sum()
        return logits_BTV.square().mean(-1) + of_weights
'''
TERMS = {MTP: {"depths": 2, "coefficient": 0.5}, "probe": {"coefficient": 0.2}}
UNTIED = {"tie_word_embeddings": False}
Case = tuple[str, dict[str, str], str]
"""(launcher file, sizes, pipeline.schedule)"""
OF_TWO: dict[str, Case] = {
    "tied tp": ("tp", {}, "1F1B"),
    "tied pp": ("pp", {}, "ZBVZeroBubble"),
    "untied cp": ("cp", {}, "1F1B"),
    "untied zero3": ("zero3", {}, "1F1B"),
    "tied zero1": ("zero1", {}, "1F1B"),
}
OF_FOUR: dict[str, Case] = {}
RESUMED = ["adamw tied pp", "adamw untied zero3"]
RUNS = [*(f"adamw {name}" for name in OF_TWO), "muon untied pp"]
OF_TWO["untied pp"] = ("pp", {}, "1F1B")
if EVERYTHING:
    OF_TWO |= {
        f"{model} {strategy}": (strategy, {}, "1F1B")
        for model in ("tied", "untied")
        for strategy in ("ddp", "fsdp2", "tp", "cp", "zero1", "zero2", "zero3", "zero3_offload")
    }
    OF_TWO |= {f"{model} pp {name}": ("pp", {}, name) for model in ("tied", "untied") for name in SCHEDULES}
    OF_TWO["moe ep"] = ("ep", {}, "1F1B")
    for model, schedule in (("tied", "ZBVZeroBubble"), ("untied", "Interleaved1F1B")):
        for pair in combinations(("dp_replicate", "dp_shard", "pp", "cp", "tp"), 2):
            sizes = Sizes(**dict.fromkeys(pair, 2))
            OF_FOUR[name_of(model, sizes)] = ("mesh", variables(sizes), schedule)
    for more in ({"dp_shard": 4}, *({"dp_shard": 2, name: 2} for name in ("tp", "pp", "cp"))):
        sizes = Sizes(ep=2, **more)
        OF_FOUR[name_of("moe", sizes)] = ("mesh", variables(sizes), "1F1B")
    RUNS = [f"{optimizer} {name}" for optimizer in ("adamw", "muon") for name in OF_TWO | OF_FOUR]
    RESUMED = RUNS


def alone(name: str) -> str:
    optimizer, model, *_ = name.split()
    return f"{optimizer} {model} alone"


@pytest.fixture(scope="module")
def runs(shards, tmp_path_factory):
    folder = tmp_path_factory.mktemp("terms")
    models = {"tied": MODELS["dense"], "untied": MODELS["dense"] | UNTIED, "moe": MODELS["moe"]}
    for name, values in models.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    (folder / "probe.py").write_text(PROBE)
    recipe = {
        "model": str(folder / "tied.json"),
        "output": str(folder / "run"),
        "extensions": [str(ROOT / "examples/multi_token_prediction.py"), str(folder / "probe.py")],
        "loss": {"terms": TERMS},
        "seed": 1,
        "precision": "fp32",
        "data": {"train": [{"shards": str(shards)}], "sequence_length": 32},
        "budget": {"steps": STEPS},
        "batch": {"tokens_per_step": 512, "sequences_per_micro_batch": 2},
        "optim": {"learning_rate": 0.001, "schedule": "constant", "warmup_steps": 2, "max_grad_norm": 0.5},
        "compile": "none",
        "validation": {"sequences": 4},
        "checkpoint": {"every_steps": 2, "keep_last": 9, "save_final": False},
        "averaging": {"kind": "ema", "every_steps": 1},
        "logging": {"every_steps": 1},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))

    def run(name: str, case: Case, **more) -> dict:
        strategy, environment, schedule = case
        optimizer, model, *_ = name.split()
        arguments = ["--output", str(folder / name), "--model", str(folder / f"{model}.json")]
        arguments += ["--optim.name", optimizer, "--pipeline.schedule", schedule]
        return {"strategy": strategy, "arguments": arguments, "environment": environment, "muon_bucket": 2**13, **more}

    def train(processes: int, them: list[dict]) -> None:
        (folder / "runs.json").write_text(json.dumps(them))
        program = ("tests/support/train_strategies.py", folder / "recipe.yaml", folder / "runs.json")
        launch("single" if processes == 1 else "ddp", processes, *program, timeout=3000)

    before = {name: name for name in map(alone, RUNS)}
    train(1, [run(name, ("single", {}, "1F1B")) for name in before])
    for processes, cases in ((2, OF_TWO), (4, OF_FOUR)):
        them = []
        for name in RUNS:
            case = cases.get(name.partition(" ")[2])
            if case is None:
                continue
            them.append(run(name, case))
            if name in RESUMED:
                them[-1]["arguments"] += ["--checkpoint.save_final", "true"]
                them.append(run(f"{name} resumed", case, start_from=str(folder / before[alone(name)] / MIDDLE)))
            before[alone(name)] = name
        if them:
            train(processes, them)
    return folder


def curve(run) -> dict[int, list[float]]:
    """Returns {step: [loss, loss terms, gradient norm]}."""
    figures = ("loss", f"loss_{MTP}", "loss_probe", "grad_norm")
    return {event["step"]: [event[figure] for figure in figures] for event in events(run, "train")}


@pytest.mark.parametrize("name", RUNS)
def test_strategies_train_alike(runs, name):
    expected, found = curve(runs / alone(name)), curve(runs / name)
    check(found, expected)
    assert [*found] == [1, 2, 3, 4] and expected[4][1] < expected[1][1], "the term's parameters must be trained"
    for file in ("loss_terms", "average_loss_terms", "optimizer"):
        tensors, given = (load_file(runs / run / END / f"{file}.safetensors") for run in (alone(name), name))
        assert tensors.keys() == given.keys()
        assert all(torch.allclose(given[key], tensor, atol=2e-5) for key, tensor in tensors.items())
    equal, _ = json.loads((runs / name / "replicas.json").read_text())
    assert equal == []


@pytest.mark.parametrize("name", RESUMED)
def test_a_strategy_resumes_the_run_of_another(runs, name):
    """The losses must match an uninterrupted run (train_strategies.py compares the loaded tensors bit for bit)."""
    found = curve(runs / f"{name} resumed")
    assert [*found] == [3, 4]
    check(found, curve(runs / alone(name)))


@pytest.mark.parametrize("name", RESUMED)
def test_an_exported_model_has_no_terms(runs, name):
    """The terms' parameters must only be in the checkpoint."""
    saved, exported = (load_file(runs / name / folder / "model.safetensors") for folder in (END, "final"))
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[key], tensor.bfloat16()) for key, tensor in saved.items())
    assert not events(runs / name, "export")[0]["problems"]


def check(found: dict[int, list[float]], expected: dict[int, list[float]]) -> None:
    for step, (*figures, norm) in found.items():
        assert figures == pytest.approx(expected[step][:3], rel=1e-6), step
        assert norm == pytest.approx(expected[step][3], rel=2e-6), step
