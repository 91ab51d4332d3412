"""MoE runs must match one process under every strategy and micro-batch size, resume exactly and balance experts.

Everything is trained in two launches (tests/support/train_strategies.py), and the tests check the results. Runs on
four processes are tested in tests/parallel/test_mesh.py. With STRATEGIES=all in the environment (`make
test-strategies`), runs have 20 steps, both models are trained with all optimizers under every strategy, and each
strategy's checkpoint is resumed under every other strategy.
"""

import json
import os
from itertools import permutations
from pathlib import Path

import pytest
import torch
import yaml

from pretrain.checkpoint.tensor_files import SavedTensors
from support.project import events, launch, losses
from support.tiny_experts import as_the_library_saves
from support.tiny_models import TINY_MOE, TINY_OLMOE

EVERYTHING = os.environ.get("STRATEGIES") == "all"
STEPS = 20 if EVERYTHING else 12
STRATEGIES = ["ddp", "fsdp2", "hsdp", "zero1", "zero2", "zero3", "ep", "cp"]
KINDS = {
    "qwen3_moe": [],
    "olmoe": ["--model", "{folder}/olmoe.json"],
    "idle": ["--model", "{folder}/idle.json"],  # at first, every token selects the same two experts
    "muon": ["--optim.name", "muon"],
    "adafactor": ["--optim.name", "adafactor"],
}
"""{kind of run: arguments}. The first kind is also resumed."""
UNDER = {
    "qwen3_moe": STRATEGIES if EVERYTHING else ["fsdp2", "zero2", "zero3", "ep", "cp"],
    "olmoe": STRATEGIES if EVERYTHING else ["ep"],
    "idle": ["ep"],
    "muon": STRATEGIES if EVERYTHING else ["ep"],
    "adafactor": STRATEGIES if EVERYTHING else [],
}
CASES = [(kind, strategy) for kind, strategies in UNDER.items() for strategy in strategies]
PAIRS = [("single", "ep"), ("ep", "zero2"), ("zero3", "ep"), ("ep", "cp"), ("cp", "fsdp2")]
"""(strategy that saves, strategy that resumes)."""
if EVERYTHING:
    PAIRS = [pair for pair in permutations(["single", *STRATEGIES], 2) if pair[1] != "single"]
BIASED = {"model_type": "deepseek_v3", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96}
BIASED |= {"moe_intermediate_size": 32, "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 9}
BIASED |= {"num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": None}
BIASED |= {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
BIASED |= {"qk_nope_head_dim": 8, "v_head_dim": 8, "max_position_embeddings": 128, "tie_word_embeddings": True}
"""Model with a dense first layer. Later layers have a shared expert and nine routed experts, an odd number so that two
ranks can't split them evenly."""
BY_BIAS = ["--loss.router_bias_rate", "0.01", "--optim.name", "muon"]
SHARDED = ["ddp", "fsdp2", "zero1", "zero3", "cp", "pp"] if EVERYTHING else ["fsdp2", "zero3", "cp", "pp"]
ALONE = {
    "micro_batch_4": ["--batch.sequences_per_micro_batch", "4"],
    "recomputed": ["--activation_checkpointing", "full"],
}
if EVERYTHING:
    ALONE["compiled"] = ["--compile", "regional"]
BALANCE = ["--loss.router_balance", "0.5"]
ONLY_TRAIN = ["--checkpoint.save_final", "false", "--data.validation", "[]"]
LONG = ["--budget.steps", "150", "--batch.tokens_per_step", "512", "--batch.sequences_per_micro_batch", "8"]
LONG += ["--optim.learning_rate", "3e-3", "--optim.max_grad_norm", "1.0", "--optim.warmup_steps", "20"]
LONG += ["--logging.every_steps", "20", "--checkpoint.every_steps", "1000", *ONLY_TRAIN]


@pytest.fixture(scope="module")
def runs(shards, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    (folder / "model.json").write_text(json.dumps(TINY_MOE))
    (folder / "idle.json").write_text(json.dumps(TINY_MOE | {"initializer_range": 0.0}))
    (folder / "olmoe.json").write_text(json.dumps(TINY_OLMOE | {"tie_word_embeddings": False}))
    (folder / "biased.json").write_text(json.dumps(BIASED))
    recipe = {
        "model": str(folder / "model.json"),
        "output": str(folder / "run"),
        "seed": 1,
        "precision": "fp32",
        "data": {"train": [{"shards": str(shards)}], "sequence_length": 64},
        "budget": {"steps": STEPS},
        "batch": {"tokens_per_step": 256, "sequences_per_micro_batch": 1},
        "optim": {"learning_rate": 0.001, "warmup_steps": 2, "max_grad_norm": 0.5},
        "pipeline": {"schedule": "1F1B"},
        "compile": "none",
        "checkpoint": {"every_steps": 4, "keep_last": 9},
        "validation": {"sequences": 4},
        "logging": {"every_steps": 1},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))

    def run(strategy: str, name: str, *arguments: str, **more) -> dict:
        return {"strategy": strategy, "arguments": ["--output", str(folder / name), *arguments], **more}

    def trained(kind: str, strategy: str, name: str = "", *more_arguments: str, **more) -> dict:
        arguments = [*(argument.format(folder=folder) for argument in KINDS[kind]), *more_arguments]
        # With this bucket size, Muon computes in fp32.
        return run(strategy, name or f"{kind} {strategy}", *BALANCE, *arguments, muon_bucket=2**20, **more)

    def resumed(source: str, target: str, name: str) -> dict:
        middle = str(folder / f"qwen3_moe {source}/checkpoints/step-00000004")
        return trained("qwen3_moe", target, name, *ONLY_TRAIN, start_from=middle)

    alone = [trained(kind, "single") for kind in KINDS if UNDER[kind]]
    alone += [run("single", name, *BALANCE, *arguments, *ONLY_TRAIN) for name, arguments in ALONE.items()]
    alone.append(resumed("single", "single", "resumed"))
    alone.append(run("single", "balanced", *LONG, "--loss.router_balance", "0.1"))
    alone.append(run("single", "left_alone", *LONG, "--loss.router_balance", "0"))
    biased, in_fp32 = ["--model", str(folder / "biased.json"), *BY_BIAS], {"muon_bucket": 2**24}
    alone.append(run("single", "biased", *biased, **in_fp32))
    of_biased = str(folder / "biased/checkpoints/step-00000004")
    alone.append(run("single", "biased_resumed", *biased, start_from=of_biased, **in_fp32))
    for_ep = [*biased, "--model.n_routed_experts", "8"]  # divisible by two processes
    alone.append(run("single", "for_ep", *for_ep, **in_fp32))
    alone.append(run("single", "biased_skipped", *biased, nan_at_call=4 * STEPS - 4, **in_fp32))  # in the last step
    together = [trained(kind, strategy) for kind, strategy in CASES]
    together += [resumed(*pair, " ".join(pair)) for pair in PAIRS]
    together += [run(strategy, f"biased_{strategy}", *biased, **in_fp32) for strategy in SHARDED]
    together.append(run("ep", "biased_ep", *for_ep, **in_fp32))
    together.append(run("zero3", "biased_resumed_zero3", *biased, start_from=of_biased, **in_fp32))
    for strategy, processes, descriptions in (("single", 1, alone), ("ddp", 2, together)):
        (folder / f"{processes}.json").write_text(json.dumps(descriptions))
        launch(
            strategy, processes, "tests/support/train_strategies.py", folder / "recipe.yaml", folder /
            f"{processes}.json", timeout=3000,
        )  # fmt: skip
    return folder


def figures(run: Path) -> dict[str, dict[int, float]]:
    names = ("loss", "grad_norm", "router_balance_loss", "expert_entropy", "expert_load_max")
    return {name: {line["step"]: line[name] for line in events(run, "train")} for name in names}


def differences(run: Path, expected: Path) -> dict[str, float]:
    """Returns the largest difference of each metric over all steps."""
    return {
        name: max(abs(value - figures(expected)[name][step]) for step, value in steps.items())
        for name, steps in figures(run).items()
    }


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, f"{kind} {strategy}") for kind, strategy in CASES),
        *(("qwen3_moe", name) for name in ALONE),
    ],
)
def test_every_step_matches_one_process(runs, kind, name):
    """Expert loads must be equal and losses within 1e-6, or two units in the last place at a loss of 6."""
    tolerances = {"loss": 1e-6, "grad_norm": 2e-5, "router_balance_loss": 1e-6}
    assert list(losses(runs / name)) == list(range(1, STEPS + 1))
    found = differences(runs / name, runs / f"{kind} single")
    if kind == "muon":  # after orthogonalization, rounding can change which expert is selected near a tie
        found, tolerances = {"loss": found["loss"]}, {"loss": 1e-4}
    for figure, difference in found.items():
        assert difference <= tolerances.get(figure, 1e-6), figure


def test_a_process_without_tokens_does_not_block(runs):
    assert figures(runs / "idle ep")["expert_load_max"][1] == 4, "two of eight experts must get all tokens"


@pytest.mark.parametrize("name", ["resumed", *map(" ".join, PAIRS)])
def test_a_resumed_run_restores_the_previous_steps_expert_loads(runs, name):
    """Without the previous step's expert counts, the first step after resuming would have no balancing loss.

    On one process, the resumed run must match bit for bit.
    """
    assert list(losses(runs / name)) == list(range(5, STEPS + 1))
    tolerance = 0 if name == "resumed" else 2e-5
    assert max(differences(runs / name, runs / "qwen3_moe single").values()) <= tolerance


def test_experts_are_balanced_only_with_the_loss(runs):
    """After 150 steps on real text, expert loads must be balanced with the loss and unbalanced without it."""
    balanced, left_alone = events(runs / "balanced", "train")[-1], events(runs / "left_alone", "train")[-1]
    assert balanced["expert_entropy_min"] > 0.95 > 0.9 > left_alone["expert_entropy"]
    assert balanced["expert_load_max"] < 2 < left_alone["expert_load_max"]
    assert losses(runs / "balanced")[150] < losses(runs / "balanced")[20] - 0.4


def biases(folder: Path) -> dict:
    tensors = SavedTensors(folder, "model")
    return {name: tensors[name] for name in tensors if name.endswith("e_score_correction_bias")}


@pytest.mark.parametrize("name", [*SHARDED, "ep", "resumed", "resumed_zero3"])
def test_router_bias_and_muon_experts_match_one_process(runs, name):
    """The bias and the experts must be updated, saved, loaded and exported in the same way."""
    expected, found = runs / ("for_ep" if name == "ep" else "biased"), runs / f"biased_{name}"
    exact = name == "resumed"
    steps = figures(runs / "biased")["loss"]
    last = f"step-{max(steps):08d}"
    for figure, tolerance in (("loss", 1e-5), ("expert_load_max", 1e-6), ("router_bias_max", 0)):
        whole, here = ({e["step"]: e[figure] for e in events(run, "train")} for run in (expected, found))
        assert len(here) == len(steps) - (4 if "resumed" in name else 0)
        assert max(abs(whole[step] - value) for step, value in here.items()) <= (0 if exact else tolerance), figure
    saved = biases(expected / "checkpoints" / last)
    for other in (found / "checkpoints" / last, found / "final"):
        again = biases(other)
        assert again.keys() == saved.keys() and len(saved) == 2
        assert all(torch.equal(bias, again[key]) and bias.any() for key, bias in saved.items()), (
            "the bias must also be fp32 in final/"
        )
    assert not events(found, "export")[0]["problems"]


EXPORTED = [*(f"{kind} {strategy}" for kind, strategy in CASES), "biased", *(f"biased_{name}" for name in SHARDED)]


@pytest.mark.parametrize("name", EXPORTED)
def test_final_matches_save_pretrained_of_the_last_checkpoint(runs, name, tmp_path):
    """The export must contain a separate tensor for each expert."""
    last = runs / name / f"checkpoints/step-{STEPS:08d}"
    exported = SavedTensors(runs / name / "final", "model")
    expected = as_the_library_saves(last, tmp_path, torch.bfloat16)
    assert set(exported) == set(expected) and any(".experts.7.down_proj.weight" in key for key in exported)
    assert all(torch.equal(exported[key], expected[key]) for key in exported)
    assert any(".experts.down_proj" in key for key in SavedTensors(last, "model")), (
        "checkpoints store the experts of a layer in one tensor"
    )
    assert not events(runs / name, "export")[0]["problems"]


def test_a_skipped_step_does_not_change_the_bias(runs):
    whole, skipped = (events(runs / name, "train") for name in ("biased", "biased_skipped"))
    assert whole[-2]["router_bias_max"] == skipped[-2]["router_bias_max"]
    assert events(runs / "biased_skipped", "skip")[0]["step"] == STEPS
    before, after = (biases(runs / f"biased_skipped/checkpoints/step-{step:08d}") for step in (STEPS - 4, STEPS))
    full = biases(runs / f"biased/checkpoints/step-{STEPS:08d}")
    moves = {key: ((after[key] - before[key]).abs() / 0.01).round() for key in full}
    assert all(move.max() <= 3 for move in moves.values()), "only the three completed steps may move the bias"
    assert any(not torch.equal(full[key], after[key]) for key in full)


def test_the_start_event_has_active_parameters_and_their_flops(runs):
    start = events(runs / "qwen3_moe single", "start")[0]
    experts = 2 * 8 * 3 * 64 * 32
    assert start["parameters"] - start["active_parameters"] == experts * 6 // 8
    attention = 12 * 2 * 64 * 64
    assert start["flops_per_token"] == 6 * start["active_parameters"] + attention
