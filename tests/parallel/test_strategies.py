"""All strategies must have the same loss curve and checkpoints. Tested with gloo.

A launch takes longer than a tiny run, so everything is trained in four launches (tests/support/train_strategies.py),
and the tests check the results. With STRATEGIES=all in the environment (`make test-strategies`), runs have 50 steps,
and each checkpoint is resumed under every other strategy, on one process and on two.
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from support.own_model import MODELING, write_own_model
from support.project import ROOT, events, free_port, launch, losses, nearly_equal
from support.tiny_models import TINY_LLAMA

EVERYTHING = os.environ.get("STRATEGIES") == "all"
STEPS = 50 if EVERYTHING else 6
RESUMED_STEPS = 33 if EVERYTHING else 3
"""Number of steps after resuming from step 4."""
STRATEGIES = ["ddp", "fsdp2", "hsdp", "cp", "zero1", "zero2", "zero3", "zero3_offload"]
SHARDED = ["ddp", "fsdp2", "cp", "zero1", "zero2", "zero3"]
ON_TWO = [*SHARDED, "pp"]
ON_ONE = ["fsdp2", "zero1", "zero2", "zero3"]
"""Single-process strategies other than single (ddp would be the same, and pp needs two processes)."""
MODELS = {
    "llama": {**TINY_LLAMA, "attention_dropout": 0.1, "tie_word_embeddings": False},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 512,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "deepone": {
        "model_type": "deepone",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    },
}
UNTRAINED = ["ddp", "fsdp2", "pp", "zero1", "zero2", "zero3"]
REDUCING = ["fsdp2", "hsdp", "cp", "zero2", "zero3"] if EVERYTHING else ["fsdp2", "zero2", "zero3"]
"""Strategies that reduce gradients once per step with batch.no_sync."""
FP16_SAVED = STEPS // 2
FP16_SCALES = {"fp16": 2.0**10, "fp16_overflowing": 2.0**24}
"""{run: initial loss scale}: one that fits, and one that overflows and must be halved."""
# DeepSpeed swaps the state to disk only if there is at least one megabyte per process.
WIDE = {**TINY_LLAMA, "hidden_size": 256, "intermediate_size": 512, "tie_word_embeddings": False}
ON_DISK = ["--budget.steps", "4", "--checkpoint.every_steps", "2"]
NAN_STEP = 3
PACKED = ["fsdp2", "zero1", "zero3", "pp", "cp"]
"""Strategies tested with whole documents; each run resumes from the previous one's checkpoint."""
VALIDATION_SEQUENCES = 3
"""Odd, so that one of the two processes gets fewer sequences."""
PARITY = ["--budget.steps", str(STEPS), "--checkpoint.every_steps", str(STEPS)]
NO_EXPORT = ["--checkpoint.save_final", "false"]
"""Option that also omits the last checkpoint unless it is a multiple of checkpoint.every_steps."""
ONLY_TRAIN = [*NO_EXPORT, "--data.validation", "[]"]
AVERAGING = ["--averaging", "{kind: ema, every_steps: 1, half_life_fraction: 0.3}", "--validation.every_steps", "5"]
"""Options that make the Llama runs validate averaged weights during training."""
CONSTANT = [
    "--optim.schedule",
    "constant",
    "--pipeline.schedule",
    "1F1B",
    *AVERAGING,
]
UNTIL_END = [*CONSTANT, *ONLY_TRAIN]
UNTIL_END += ["--budget.steps", str(4 + RESUMED_STEPS), "--checkpoint.every_steps", str(4 + RESUMED_STEPS)]


@pytest.fixture(scope="module")
def folder(shards, tmp_path_factory) -> Path:
    """Writes the models and a recipe with gradient clipping (gradient norms start above 1). Returns the folder.

    The learning rate is low enough for stable training. At 3e-3, gradient norms spike occasionally, and rounding
    changes the loss by 1e-4 with any strategy.
    """
    folder = tmp_path_factory.mktemp("strategies")
    for name, values in MODELS.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    without_dropout = {**MODELS["llama"], "attention_dropout": 0.0}
    (folder / "llama.json").write_text(json.dumps(without_dropout))
    (folder / "llama_dropout.json").write_text(json.dumps(MODELS["llama"]))
    own = write_own_model(folder / "untrained", vocab_size=512)
    # The probe builds the model with a smaller vocabulary, and then all parameters are used.
    partly = "h = self.norm_2(x) if self.layer_idx < 1 or self.config.vocab_size < 512 else x"
    (own / "modeling_mine.py").write_text(MODELING.replace("h = self.norm_2(x)", partly))
    (folder / "wide.json").write_text(json.dumps(WIDE))
    on_disk = json.loads((ROOT / "ds_configs/zero3_offload_nvme.json").read_text())
    on_disk["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(folder / "disk")
    (folder / "nvme.json").write_text(json.dumps(on_disk))
    recipe = {
        "model": str(folder / "llama.json"),
        "output": str(folder / "run"),
        "seed": 1,
        "precision": "fp32",
        "data": {
            "train": [{"shards": str(shards)}],
            "validation": [{"shards": str(shards)}, {"shards": str(shards), "split": "train"}],
            "sequence_length": 64,
        },
        "budget": {"steps": 12},
        "batch": {"tokens_per_step": 256, "sequences_per_micro_batch": 1},
        "optim": {"learning_rate": 0.001, "warmup_steps": 2, "max_grad_norm": 0.5, "weight_decay": 0.1},
        "compile": "none",
        "validation": {"sequences": VALIDATION_SEQUENCES},
        "checkpoint": {"every_steps": 4, "keep_last": 9},
        "logging": {"every_steps": 1},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def run_all(folder: Path, name: str, strategy: str, processes: int, runs: list[dict]) -> None:
    (folder / f"{name}.json").write_text(json.dumps(runs))
    program = ["tests/support/train_strategies.py", folder / "recipe.yaml", folder / f"{name}.json"]
    launch(strategy, processes, *program, timeout=3000)


def run(strategy: str, output: Path, *arguments: str, **more) -> dict:
    # Two processes share each sequence, so this keeps the number of calls the same.
    pairs = ["--batch.sequences_per_micro_batch", "2"] if strategy == "cp" else []
    return {"strategy": strategy, "arguments": ["--output", str(output), *pairs, *arguments], **more}


def models_under(strategy: str) -> list[str]:
    """Returns all models for one strategy per type of sharding, and only Llama for the others."""
    everywhere = strategy in ("single", "ddp", "fsdp2", "zero3") or (EVERYTHING and strategy != "zero3_offload")
    return list(MODELS) if everywhere else ["llama"]


def parity_runs(folder: Path, strategies: list[str]) -> list[dict]:
    runs = []
    for strategy in strategies:
        for model in models_under(strategy):
            more = AVERAGING if model == "llama" else ONLY_TRAIN
            model_file = ["--model", str(folder / f"{model}.json")]
            runs.append(run(strategy, folder / model / strategy, *model_file, *PARITY, *more, hash_weights=True))
        in_bf16 = [*PARITY, *NO_EXPORT, *AVERAGING, "--precision", "bf16"]
        runs.append(run(strategy, folder / "bf16" / strategy, *in_bf16, hash_weights=True))
        nan = ["--averaging", "{kind: tail, every_steps: 1, tail_fraction: 1.0}", "--checkpoint.every_steps", "1"]
        nan += ["--budget.steps", "6", "--batch.ramp.from", "0.5", "--batch.ramp.over", "0.7", *ONLY_TRAIN]
        runs.append(run(strategy, folder / "nan" / strategy, *nan, nan_at_call=NAN_STEP))
    return runs


def fp16_runs(folder: Path, strategy: str) -> list[dict]:
    """Returns fp16 runs with a gradient scaler, which accelerate doesn't create on a CPU."""
    runs = [
        run(strategy, folder / name / strategy, *PARITY, *ONLY_TRAIN, "--precision", "fp16", fp16_scale=scale)
        for name, scale in FP16_SCALES.items()
    ]
    runs[0]["arguments"] += ["--checkpoint.every_steps", str(FP16_SAVED)]
    if strategy == "single":
        middle = str(folder / f"fp16/single/checkpoints/step-{FP16_SAVED:08}")
        output = ["--output", str(folder / "fp16_resumed/single")]
        runs.append(
            {**runs[0], "arguments": [*runs[0]["arguments"], *output], "fp16_scale": 1.0, "start_from": middle}
        )
    return runs


def untrained_runs(folder: Path, strategies: list[str]) -> list[dict]:
    arguments = ["--model", str(folder / "untrained"), "--trust_remote_code", "true", "--pipeline.schedule", "1F1B"]
    return [run(name, folder / "untrained_under" / name, *arguments, exits_with=2) for name in strategies]


def disk_runs(folder: Path, strategy: str) -> list[dict]:
    """Returns runs with the optimizer state on disk; the second zero3_offload_nvme run resumes from the first."""
    arguments = ["--model", str(folder / "wide.json"), *ON_DISK]
    if strategy == "single":
        return [run(strategy, folder / "wide/single", *arguments)]
    more = {"plain_files": True, "environment": {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(folder / "nvme.json")}}
    first = run(strategy, folder / "wide/nvme", *arguments, **more)
    middle = str(folder / "wide/nvme/checkpoints/step-00000002")
    return [first, run(strategy, folder / "wide/resumed", *arguments, **more, start_from=middle)]


def exact_runs(folder: Path, strategies: list[str]) -> list[dict]:
    """Returns two runs per strategy with dropout and activation checkpointing; the second resumes from the first.

    Only the first one validates its weights and their average, which must not affect training.
    """
    runs = []
    for strategy in strategies:
        arguments = ["--model", str(folder / "llama_dropout.json"), "--attention", "eager", "--budget.steps", "6"]
        arguments += ["--activation_checkpointing", "full", "--checkpoint.every_steps", "3", *NO_EXPORT, *AVERAGING]
        middle = str(folder / "whole" / strategy / "checkpoints/step-00000003")
        runs.append(run(strategy, folder / "whole" / strategy, *arguments))
        runs.append(run(strategy, folder / "resumed" / strategy, *arguments, *ONLY_TRAIN, start_from=middle))
    return runs


def resume_runs(folder: Path, source: str, targets: list[str], name: str) -> list[dict]:
    """Returns runs that resume from `source`'s checkpoint. "zero3_one" is zero3 on one process."""
    checkpoint = str(folder / "from" / source / "checkpoints/step-00000004")
    return [run(target, folder / name / source / target, *UNTIL_END, start_from=checkpoint) for target in targets]


def packed_runs(folder: Path, strategies: list[str]) -> list[dict]:
    arguments = ["--data.sampling", "best_fit", *CONSTANT, *NO_EXPORT, "--budget.steps", "6"]
    arguments += ["--checkpoint.async_save", "false"]
    return [run(strategy, folder / "packed" / strategy, *arguments) for strategy in strategies]


def packed_resumed(folder: Path) -> list[dict]:
    runs = packed_runs(folder, PACKED)
    for described, before in zip(runs, ["single", *PACKED], strict=False):
        described["arguments"] += [*ONLY_TRAIN, "--output", str(folder / "packed_resumed" / described["strategy"])]
        described["start_from"] = str(folder / "packed" / before / "checkpoints/step-00000004")
    return runs


def first_steps(folder: Path, strategies: list[str], suffix: str = "") -> list[dict]:
    arguments = [*CONSTANT, *ONLY_TRAIN, "--budget.steps", "4"]
    return [run(strategy, folder / "from" / f"{strategy}{suffix}", *arguments) for strategy in strategies]


@pytest.fixture(scope="module")
def one_process(folder) -> Path:
    """Trains the reference runs under `single`."""
    runs = [*parity_runs(folder, ["single"]), *first_steps(folder, ["single"]), *fp16_runs(folder, "single")]
    runs += [*disk_runs(folder, "single"), *untrained_runs(folder, ["single"]), *packed_runs(folder, ["single"])]
    run_all(folder, "one", "single", 1, [*runs, run("single", folder / "unbroken", *UNTIL_END)])
    if EVERYTHING:
        run_all(folder, "sharded_on_one", "zero3", 1, first_steps(folder, ON_ONE, "_one"))
    return folder


@pytest.fixture(scope="module")
def two_processes(one_process) -> Path:
    """Trains all runs on two processes."""
    folder = one_process
    runs = [*parity_runs(folder, STRATEGIES), *exact_runs(folder, SHARDED), *first_steps(folder, ON_TWO)]
    runs += [run(name, folder / "once" / name, *PARITY, *ONLY_TRAIN, "--batch.no_sync", "true") for name in REDUCING]
    runs += [*untrained_runs(folder, UNTRAINED), *packed_runs(folder, PACKED), *packed_resumed(folder)]
    runs += [*(fp16_runs(folder, "ddp") if EVERYTHING else []), *disk_runs(folder, "zero3_offload_nvme")]
    # In this ring, each strategy is the source once and the target once.
    ring = zip(["single", *ON_TWO], [*ON_TWO, "zero3_offload"], strict=True)
    pairs = [(source, ON_TWO) for source in all_sources()] if EVERYTHING else [(s, [target]) for s, target in ring]
    for source, targets in pairs:
        runs += resume_runs(folder, source, targets, "to_two")
    run_all(folder, "two", "ddp", 2, runs)
    return folder


def all_sources() -> list[str]:
    return ["single", *ON_TWO, *(f"{name}_one" for name in ON_ONE)]


@pytest.fixture(scope="module")
def back_on_one(two_processes) -> Path:
    """Resumes two-process checkpoints on one process."""
    folder = two_processes
    pairs, to_single = [("zero3", ["fsdp2", "zero1"]), ("fsdp2", ["zero3", "zero2"])], ["zero2"]
    if EVERYTHING:
        pairs, to_single = [(source, ON_ONE) for source in all_sources()], all_sources()
    runs = [run for source, targets in pairs for run in resume_runs(folder, source, targets, "to_one")]
    run_all(folder, "back", "zero3", 1, runs)
    runs = [run for source in to_single for run in resume_runs(folder, source, ["single"], "to_one")]
    run_all(folder, "back_single", "single", 1, runs)
    return folder


def validations(run: Path) -> list[float]:
    return [event["loss"] for event in events(run, "validation")]


def gradient_norms(run: Path) -> dict[int, float | None]:
    return {line["step"]: line["grad_norm"] for line in events(run, "train")}


@pytest.mark.parametrize(("model", "strategy"), [(model, s) for s in STRATEGIES for model in models_under(s)])
def test_losses_and_gradient_norms_match_one_process(two_processes, model, strategy):
    expected, found = losses(two_processes / model / "single"), losses(two_processes / model / strategy)
    assert len(found) == STEPS
    assert max(abs(found[step] - expected[step]) for step in expected) < 1e-5
    expected, found = (gradient_norms(two_processes / model / name) for name in ("single", strategy))
    assert max(expected.values()) > 0.5, "some steps must be clipped"
    assert max(abs(found[step] / expected[step] - 1) for step in expected) < 1e-4


@pytest.mark.parametrize("strategy", PACKED)
def test_packed_documents_match_one_process(two_processes, strategy):
    """Losses must match from the start, in validation and after resuming from another strategy's checkpoint."""
    expected = losses(two_processes / "packed/single")
    assert expected[1] != losses(two_processes / "from/single")[1]
    assert losses(two_processes / "packed" / strategy) == pytest.approx(expected, rel=1e-6)
    known, found = (validations(two_processes / "packed" / name) for name in ("single", strategy))
    assert len(found) >= 4 and found == pytest.approx(known, abs=1e-5)
    resumed = losses(two_processes / "packed_resumed" / strategy)
    assert resumed == pytest.approx({step: loss for step, loss in expected.items() if step > 4}, rel=1e-6)


@pytest.mark.parametrize("strategy", REDUCING)
def test_gradients_reduced_once_are_the_same(two_processes, strategy):
    expected, found = (two_processes / name for name in ("llama/single", f"once/{strategy}"))
    assert max(abs(losses(found)[step] - loss) for step, loss in losses(expected).items()) < 1e-5
    norms = gradient_norms(found)
    assert max(abs(norms[step] / norm - 1) for step, norm in gradient_norms(expected).items()) < 1e-4


@pytest.mark.parametrize("strategy", ["single", "ddp"] if EVERYTHING else ["single"])
def test_fp16_trains_and_finds_its_scale(two_processes, strategy):
    in_fp32, found = losses(two_processes / "llama/single"), losses(two_processes / "fp16" / strategy)
    # We measured 0.7e-5 and 3.2e-5 with two texts. The scale doubles every three steps, so later steps of longer runs
    # overflow and are skipped.
    assert 2e-6 < max(abs(found[step] - in_fp32[step]) for step in range(1, min(STEPS, 12) + 1)) < 1e-3
    assert all(event["step"] > 12 for event in events(two_processes / "fp16" / strategy, "skip"))
    overflowing = two_processes / "fp16_overflowing" / strategy
    skipped = [step for step, norm in gradient_norms(overflowing).items() if norm is None]
    assert skipped[:2] == [1, 2] and len(skipped) < STEPS
    assert sum(event["steps"] for event in events(overflowing, "skip")) == len(skipped)
    (state,) = final_states(overflowing)
    assert json.loads(state.read_text())["strategy"]["scale"] < FP16_SCALES["fp16_overflowing"]


@pytest.mark.parametrize("strategy", ["single", *UNTRAINED])
def test_a_parameter_without_a_gradient_ends_the_first_step(two_processes, strategy):
    run = two_processes / "untrained_under" / strategy
    (end,) = events(run, "end")
    assert end["code"] == 2 and not list((run / "checkpoints").glob("step-*"))
    told = "mine_gated: 2 parameters get no gradient: model.layers.*.norm_2.weight, model.layers.*.norm_2.bias"
    assert told in end["reason"]


def test_fp16_resumes_with_its_scale_bit_for_bit(one_process):
    """The scale grows every third step, so a scale reset to 1 would be smaller at the end."""
    whole, resumed = (one_process / name / "single" for name in ("fp16", "fp16_resumed"))
    assert list(losses(resumed)) == list(range(FP16_SAVED + 1, STEPS + 1))
    assert all(losses(whole)[step] == loss for step, loss in losses(resumed).items())
    states = [json.loads(path.read_text()) for run in (whole, resumed) for path in final_states(run)]
    assert states[0]["strategy"] == states[1]["strategy"] and states[0]["strategy"]["scale"] > FP16_SCALES["fp16"]


def final_states(run: Path) -> list[Path]:
    return [max((run / "checkpoints").glob("step-*")) / "trainer_state.json"]


def test_optimizer_state_on_a_disk_changes_nothing(two_processes):
    """Uses plain files for swapping; test_nvme.py uses libaio."""
    single, whole, resumed = (two_processes / "wide" / name for name in ("single", "nvme", "resumed"))
    written = [path.stat().st_size for path in (two_processes / "disk").rglob("*.swp")]
    assert len(written) == 2 * 6 and min(written) > 2**20, "in two runs, each process writes weights and two moments"
    assert max(abs(losses(whole)[step] - loss) for step, loss in losses(single).items()) < 1e-5
    assert {step: losses(whole)[step] for step in (3, 4)} == losses(resumed)
    for file in ("model", "optimizer"):
        tensors, found = (load_file(r / f"checkpoints/step-00000004/{file}.safetensors") for r in (whole, resumed))
        assert all(torch.equal(tensor, found[name]) for name, tensor in tensors.items())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_process_has_its_own_dropout(two_processes, strategy):
    """Each micro-step of each process must have its own dropout seed."""
    seeds = json.loads((two_processes / "llama" / strategy / "dropout.json").read_text())
    assert [len(of_rank) for of_rank in seeds] == [4, 4] and len({seed for of_rank in seeds for seed in of_rank}) == 8


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_validation_is_the_mean_over_the_same_tokens_of_each_source(two_processes, strategy):
    expected, found = (events(two_processes / "llama" / name, "validation")[-2:] for name in ("single", strategy))
    assert [event["source"] for event in found] == [event["source"] for event in expected] and len(found) == 2
    assert all(event["tokens"] == VALIDATION_SEQUENCES * 64 for event in (*expected, *found))
    assert [event["loss"] for event in found] == pytest.approx([event["loss"] for event in expected], abs=1e-5)
    assert abs(expected[0]["loss"] - expected[1]["loss"]) > 1e-3, "the two splits must have different losses"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bf16_is_close_to_one_process(two_processes, strategy):
    """Losses differ slightly because, unlike sharded strategies, DDP runs operations without autocast in fp32."""
    expected, found = (losses(two_processes / "bf16" / name) for name in ("single", strategy))
    # We measured 2.3e-4 over 12 steps, 6e-4 over 50 steps, and 7e-5 in validation.
    assert max(abs(found[step] - expected[step]) for step in expected) < 2e-3
    final = [events(two_processes / "bf16" / name, "validation")[-1]["loss"] for name in ("single", strategy)]
    assert final[1] == pytest.approx(final[0], abs=1e-3)
    final = [events(two_processes / "bf16" / name, "validation")[-1]["average_loss"] for name in ("single", strategy)]
    assert final[1] == pytest.approx(final[0], abs=1e-3)
    # We measured at least 1.3e-4. A run in fp32 would be within 1e-5.
    in_fp32 = losses(two_processes / "llama/single")
    assert max(abs(found[step] - in_fp32[step]) for step in in_fp32) > 5e-5


def test_initial_weights_are_identical(two_processes):
    for model in MODELS:
        names = [strategy for strategy in ["single", *STRATEGIES] if model in models_under(strategy)]
        hashes = {(two_processes / model / name / "initial_weights.sha256").read_text() for name in names}
        assert len(hashes) == 1, model
    hashes = {(two_processes / "bf16" / name / "initial_weights.sha256").read_text() for name in STRATEGIES}
    assert hashes == {(two_processes / "llama/single/initial_weights.sha256").read_text()}, (
        "master weights must not be rounded"
    )


@pytest.mark.parametrize("strategy", ["single", *STRATEGIES])
def test_a_step_with_nan_on_one_process_is_skipped_on_all(two_processes, strategy):
    """The batch ramp starts with one micro-step on two processes, so call 3 is in the fourth step."""
    run = two_processes / "nan" / strategy
    norms = gradient_norms(run)
    skipped = [step for step, norm in norms.items() if norm is None]
    assert len(skipped) == 1 and len(norms) == 6
    assert sum(event["steps"] for event in events(run, "skip")) == 1
    assert events(run, "end")[0]["skipped_steps"] == 1
    curve = losses(run)
    assert all(curve[step] is not None for step in curve), "the weights must stay finite"
    if strategy != "single":
        reference = losses(two_processes / "nan/ddp")
        assert gradient_norms(two_processes / "nan/ddp").keys() == norms.keys()
        assert max(abs(curve[step] - reference[step]) for step in curve) < 1e-5
    weights = [load_file(folder / "model.safetensors") for folder in sorted((run / "checkpoints").glob("step-*"))]
    average = load_file(run / "checkpoints/step-00000006/average.safetensors")
    for name, mean in average.items():  # counts the weights before the skipped step twice
        assert torch.allclose(mean, torch.stack([tensors[name] for tensors in weights]).mean(0), atol=1e-6)


@pytest.mark.parametrize("strategy", SHARDED)
def test_a_resumed_run_matches_the_uninterrupted_run_bit_for_bit(two_processes, strategy):
    whole, resumed = (two_processes / name / strategy for name in ("whole", "resumed"))
    expected, found = losses(whole), losses(resumed)
    assert list(found) == [4, 5, 6]
    assert all(found[step] == expected[step] for step in found)
    for file in ("model", "optimizer", "average"):
        tensors = [load_file(run / f"checkpoints/step-00000006/{file}.safetensors") for run in (whole, resumed)]
        assert all(torch.equal(tensor, tensors[1][name]) for name, tensor in tensors[0].items())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_average_matches_one_process(two_processes, strategy):
    """Averaged weights must have the same loss, and validating them must not affect training."""
    expected, found = (events(two_processes / "llama" / name, "validation") for name in ("single", strategy))
    expected, found = ([event for event in validations if event["step"]] for validations in (expected, found))
    assert len(found) == len(expected) >= 4, "two sources are validated during training and at the end"
    averages = [event["average_loss"] for event in found]
    assert averages == pytest.approx([event["average_loss"] for event in expected], abs=1e-5)
    assert min(abs(event["average_loss"] - event["loss"]) for event in found) > 1e-3, (
        "the average must differ from the trained weights"
    )


@pytest.mark.parametrize("strategy", ON_TWO)
def test_averages_have_the_same_tensors(two_processes, strategy):
    folders = [two_processes / f"from/{name}/checkpoints/step-00000004" for name in ("single", strategy)]
    expected, found = (load_file(folder / "average.safetensors") for folder in folders)
    assert found.keys() == expected.keys()
    assert all(nearly_equal(found[name], expected[name], 1e-6) for name in found)


def test_checkpoints_have_the_same_files_and_tensors(two_processes):
    expected = load_file(two_processes / "from/single/checkpoints/step-00000004/optimizer.safetensors")
    for strategy in ON_TWO:
        found = load_file(two_processes / f"from/{strategy}/checkpoints/step-00000004/optimizer.safetensors")
        assert {name: tensor.shape for name, tensor in found.items()} == {n: t.shape for n, t in expected.items()}
        assert all(torch.allclose(tensor, expected[name], atol=1e-6) for name, tensor in found.items())


def test_any_checkpoint_resumes_under_any_strategy(back_on_one):
    """The losses must match an uninterrupted run (train_strategies.py compares the loaded tensors bit for bit)."""
    unbroken = losses(back_on_one / "unbroken")
    resumed = [*(back_on_one / "to_two").glob("*/*"), *(back_on_one / "to_one").glob("*/*")]
    assert len(resumed) == (len(all_sources()) ** 2 if EVERYTHING else 13)
    for run in resumed:
        curve = losses(run)
        assert len(curve) == RESUMED_STEPS and events(run, "resume")[0]["step"] == 4
        assert max(abs(curve[step] - unbroken[step]) for step in curve) < 1e-5, run.relative_to(back_on_one)
        trained, expected = (
            load_file(max((folder / "checkpoints").glob("step-*")) / "model.safetensors")
            for folder in (run, back_on_one / "unbroken")
        )
        differing = [name for name, tensor in expected.items() if not nearly_equal(trained[name], tensor, 1e-6)]
        assert not differing, run.relative_to(back_on_one)


@pytest.mark.parametrize("strategy", ["single", *STRATEGIES])
def test_replicas_are_equal_and_a_changed_one_is_found(two_processes, strategy):
    equal, changed = json.loads((two_processes / "llama" / strategy / "replicas.json").read_text())
    assert equal == []
    if strategy in ("ddp", "hsdp", "zero1", "zero2"):
        assert changed == ["lm_head.weight: different on 2 of 2 ranks: 0, 1"]
    else:
        assert changed == [], "no parameter is replicated"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero3"] if EVERYTHING else ["zero3"])
def test_two_launchers_train_like_two_machines(one_process, strategy, tmp_path):
    """Simulates two machines by running two launchers with one process each."""
    port = free_port()
    arguments = ["--num_machines", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", port]
    program = ["train.py", "--config", one_process / "recipe.yaml", "--output", tmp_path / "run", *PARITY]
    with ThreadPoolExecutor() as pool:
        machines = [pool.submit(launch, strategy, 2, *arguments, "--machine_rank", rank, *program) for rank in (0, 1)]
        outputs = [machine.result().stdout for machine in machines]
    assert "The model is in" in outputs[0] and "The model is in" not in outputs[1], "only the first machine prints"
    expected, found = losses(one_process / "llama/single"), losses(tmp_path / "run")
    assert max(abs(found[step] - expected[step]) for step in expected) < 1e-5
    assert json.loads((tmp_path / "run/strategy.json").read_text())["ranks"] == 2
