"""Terms of the loss with trained parameters train alike under every strategy, and continue each other's runs.

Launches of one, two and, with STRATEGIES=all, four processes (tests/support/train_strategies.py). The terms are the example of
multi-token prediction, and one that uses its parameters, the logits and a recomputation itself.
"""

import json
import os
from itertools import pairwise

import pytest
import torch
import yaml
from safetensors.torch import load_file

from pretrain.mesh_sizes import Sizes
from support.mesh_products import MODELS, name_of, variables
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
    """Logits of what a matrix makes of the hidden states are near those of the embedding of the document's number."""

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
OF_TWO = {
    "tied tp": ("tp", {}),
    "tied pp": ("pp", {}, "--pipeline.schedule", "ZBVZeroBubble"),
    "untied pp": ("pp", {}, "--pipeline.schedule", "1F1B"),
    "untied cp": ("cp", {}),
    "untied zero3": ("zero3", {}),
    "tied zero1": ("zero1", {}),
    "moe ep": ("ep", {}),
}
ALSO = {
    "tied cp": ("cp", {}),
    "tied zero2": ("zero2", {}),
    "tied zero3": ("zero3", {}),
    "tied zero3_offload": ("zero3_offload", {}),
    "tied ddp": ("ddp", {}),
    "tied fsdp2": ("fsdp2", {}),
    "untied tp": ("tp", {}),
    "untied zero1": ("zero1", {}),
    "untied zero2": ("zero2", {}),
}
for which, name in ((which, name) for which in ("tied", "untied") for name in (
    "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "1F1B"
)):
    ALSO[f"{which} pp {name}"] = ("pp", {}, "--pipeline.schedule", name)
PRODUCTS = [
    Sizes(**{a: 2, b: 2}) for a, b in (
        ("tp", "pp"), ("tp", "cp"), ("tp", "dp_shard"), ("pp", "cp"), ("pp", "dp_shard"), ("cp", "dp_shard"),
        ("dp_replicate", "dp_shard"), ("dp_replicate", "tp"), ("dp_replicate", "pp"), ("dp_replicate", "cp"),
    )
]
OF_FOUR = {
    name_of(which, sizes): ("mesh", variables(sizes), "--pipeline.schedule", schedule)
    for which, schedule in (("tied", "ZBVZeroBubble"), ("untied", "Interleaved1F1B"))
    for sizes in PRODUCTS
} | {
    name_of("moe", sizes): ("mesh", variables(sizes), "--pipeline.schedule", "1F1B")
    for sizes in (Sizes(dp_shard=4, ep=2), Sizes(dp_shard=2, tp=2, ep=2), Sizes(dp_shard=2, pp=2, ep=2), Sizes(dp_shard=2, cp=2, ep=2))
}
CASES = {2: OF_TWO | (ALSO if EVERYTHING else {}), 4: OF_FOUR if EVERYTHING else {}}
NAMES = [name for cases in CASES.values() for name in cases]
OPTIMIZERS = ("adamw", "muon") if EVERYTHING else ("adamw",)
RUNS = [f"{optimizer} {name}" for optimizer in OPTIMIZERS for name in NAMES]
MUON = [] if EVERYTHING else ["muon tied tp", "muon untied pp"]


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
        "validation": {"every_steps": STEPS, "sequences": 4},
        "checkpoint": {"every_steps": 2, "keep_last": 9},
        "averaging": {"kind": "ema", "every_steps": 1},
        "logging": {"every_steps": 1},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))

    def run(name: str, strategy: str, environment: dict, *options: str, **more) -> dict:
        optimizer, model, *_ = name.split()
        arguments = ["--output", str(folder / name), "--model", str(folder / f"{model}.json"), *options]
        arguments += ["--optim.name", optimizer]
        return {"strategy": strategy, "arguments": arguments, "environment": environment, "muon_bucket": 2**13, **more}

    def train(processes: int, them: list[dict]) -> None:
        (folder / "runs.json").write_text(json.dumps(them))
        program = ("tests/support/train_strategies.py", folder / "recipe.yaml", folder / "runs.json")
        launch("single" if processes == 1 else "ddp", processes, *program, timeout=3000)

    every = [*RUNS, *MUON]
    train(1, [run(name, "single", {}) for name in dict.fromkeys(map(alone, every))])
    before = {name: name for name in map(alone, every)}
    for processes, cases in CASES.items():
        them = []
        for name in every:
            case = cases.get(name.partition(" ")[2])
            if case is None:
                continue
            them.append(run(name, *case))
            start = str(folder / before[alone(name)] / MIDDLE)
            them.append(run(f"{name} resumed", *case, start_from=start))
            before[alone(name)] = name
        if them:
            train(processes, them)
    return folder


def curve(run) -> dict[int, list[float]]:
    """{step: [loss, terms, gradient norm]}."""
    figures = ("loss", f"loss_{MTP}", "loss_probe", "grad_norm")
    return {event["step"]: [event[figure] for figure in figures] for event in events(run, "train")}


@pytest.mark.parametrize("name", [*RUNS, *MUON])
def test_strategies_train_alike_and_continue_each_other(runs, name):
    """Every load is compared with the checkpoint, bit by bit, by train_strategies.py."""
    expected, found, resumed = (curve(runs / run) for run in (alone(name), name, f"{name} resumed"))
    assert [*found] == [1, 2, 3, 4] and [*resumed] == [3, 4]
    for step, figures in [*found.items(), *resumed.items()]:
        assert figures[:3] == pytest.approx(expected[step][:3], rel=1e-6), step
        assert figures[3] == pytest.approx(expected[step][3], rel=2e-6), step
    assert expected[4][1] < expected[1][1], "the term's own parameters learn"
    for file in ("loss_terms", "average_loss_terms", "optimizer"):
        tensors, given = (load_file(runs / run / END / f"{file}.safetensors") for run in (alone(name), name))
        assert tensors.keys() == given.keys()
        assert all(torch.allclose(given[key], tensor, atol=2e-5) for key, tensor in tensors.items())
    equal, _ = json.loads((runs / name / "replicas.json").read_text())
    assert equal == []
