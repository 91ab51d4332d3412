"""Pipeline- and tensor-parallel runs must have the same losses as one process and resume each other's checkpoints.

Everything is trained in three launches (tests/support/train_strategies.py): on one process, on two processes with both
strategies, and on one process again. With STRATEGIES=all in the environment (`make test-strategies`), losses are
compared for 50 steps.
"""

import json
import os

import pytest
import torch
import yaml
from safetensors.torch import load_file

from pretrain.parallel.pipeline import STAGE_LAYOUTS
from support.project import events, launch, losses
from support.tiny_models import TINY_LLAMA

EVERYTHING = os.environ.get("STRATEGIES") == "all"
STEPS = 50 if EVERYTHING else 6
SHORT = 4
"""Number of steps before the checkpoint that other runs resume from."""
MIDDLE, END = f"checkpoints/step-{SHORT:08}", f"checkpoints/step-{2 * SHORT:08}"
LLAMA = TINY_LLAMA | {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64}
MODELS = {
    "llama": LLAMA,
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 16},
    "deepone": LLAMA | {"model_type": "deepone", "tie_word_embeddings": False},
    # Five layers don't divide evenly into four stages.
    "gpt2": {"model_type": "gpt2", "vocab_size": 512, "n_embd": 32, "n_layer": 5, "n_head": 4, "n_positions": 128},
}
# DTensors are slow on a CPU, so tensor-parallel models have two layers.
MODELS |= {f"{name}_shallow": MODELS[name] | {"num_hidden_layers": 2} for name in ("llama", "qwen3")}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
PARITY = [
    *(("pp", "llama", schedule) for schedule in STAGE_LAYOUTS),
    *(("pp", model, "Interleaved1F1B") for model in ("gpt2", "deepone", "qwen3")),
    ("tp", "llama_shallow", None),
    ("tp", "qwen3_shallow", None),
]


@pytest.fixture(scope="module")
def runs(shards, tmp_path_factory):
    """Trains all runs. Returns {name: run folder}."""
    folder = tmp_path_factory.mktemp("model_parallel")
    for name, values in MODELS.items():
        (folder / f"{name}.json").write_text(json.dumps(values | (NO_DROPOUT if name == "gpt2" else {})))
    (folder / "dropout.json").write_text(json.dumps(MODELS["gpt2"]))
    recipe = folder / "recipe.yaml"
    values = {
        "model": str(folder / "llama.json"),
        "output": str(folder / "run"),
        "seed": 1,
        "precision": "fp32",
        "data": {"train": [{"shards": str(shards)}], "sequence_length": 32},
        "budget": {"steps": STEPS},
        # Two micro-steps on two processes.
        "batch": {"tokens_per_step": 256, "sequences_per_micro_batch": 2},
        # Gradient norms are between 0.5 and 2, so most steps are clipped.
        "optim": {"learning_rate": 0.001, "warmup_steps": 2, "weight_decay": 0.1, "max_grad_norm": 0.5},
        "compile": "none",
        # With six sequences, the last micro-batch isn't full.
        "validation": {"every_steps": STEPS // 2, "sequences": 6},
        "logging": {"every_steps": 1},
        "averaging": {"kind": "ema", "every_steps": 1},
        "checkpoint": {"save_final": False},
        "export": {"dtype": "fp32"},
    }
    recipe.write_text(yaml.safe_dump(values))
    short = ["--budget.steps", str(SHORT), "--optim.schedule", "constant", "--checkpoint.every_steps", str(SHORT)]
    longer, longest = ([short[0], str(times * SHORT), *short[2:]] for times in (2, 3))
    exported = ["--checkpoint.save_final", "true"]
    only_train = ["--data.validation", "[]"]
    diverging = ["--optim.learning_rate", "1e30", "--budget.steps", "4", *only_train]

    def run(name, *arguments):
        return ["--output", str(folder / name), *arguments]

    def model(name):
        return ["--model", str(folder / f"{name}.json")]

    def train(launcher, processes, **runs):
        every = [
            # The guard stops diverging runs.
            {"strategy": name, "arguments": arguments, "exits_with": 16 if diverging[1] in arguments else 0}
            for name, them in runs.items()
            for arguments in them
        ]
        (folder / "runs.json").write_text(json.dumps(every))
        program = ["tests/support/train_strategies.py", recipe, folder / "runs.json"]
        (folder / f"{launcher}.txt").write_text(launch(launcher, processes, *program, timeout=3000).stdout)

    bf16 = ["--precision", "bf16", "--budget.steps", str(min(20, STEPS))]
    compiled = ["--compile", "regional"]
    zero_bubble = ["--pipeline.schedule", "ZBVZeroBubble", *model("dropout")]
    train(
        *("single", 1),
        single=[
            *(run(name, *model(name)) for name in MODELS),
            run("single-whole", *longest, *exported),
            run("moved", *short, *only_train),
            run("single-bf16", *bf16),
            run("single-diverging", *diverging),
        ],
    )
    train(
        *("ddp", 2),
        pp=[
            *(
                # Zero-bubble schedules ignore `compile`.
                run(f"pp-{m}-{s}", *model(m), "--pipeline.schedule", s, *(compiled if "Bubble" in s else []))
                for strategy, m, s in PARITY
                if strategy == "pp"
            ),
            run("moved", *longer, *only_train),
            run("pp-whole", *zero_bubble, *longer, *exported),
            run("pp-broken", *zero_bubble, *short, *only_train),
            run("pp-broken", *zero_bubble, *longer, *only_train),
            run("pp-bf16", *bf16),
            run("pp-diverging", *diverging),
        ],
        tp=[
            *(run(f"tp-{m}-{s}", *model(m)) for strategy, m, s in PARITY if strategy == "tp"),
            run("tp-whole", *longer, *exported),
            run("tp-broken", *short, *only_train),
            run("tp-broken", *longer, *only_train),
            run("tp-bf16", *bf16),
            run("tp-diverging", *diverging),
        ],
    )
    train(*("single", 1), single=[run(name, *longest, *only_train) for name in ("moved", "tp-broken")])
    return {path.name: path for path in folder.iterdir() if path.is_dir()}


def norms(run):
    return {line["step"]: line["grad_norm"] for line in events(run, "train")}


@pytest.mark.parametrize(("strategy", "model", "schedule"), PARITY)
def test_losses_and_gradient_norms_match_one_process(runs, strategy, model, schedule):
    """We measured differences of 1e-6 in losses and 3e-5 in norms, because Adam amplifies rounding differences."""
    single, other = runs[model], runs[f"{strategy}-{model}-{schedule}"]
    assert set(losses(single)) == set(losses(other)) == set(range(1, STEPS + 1))
    assert all(abs(losses(other)[step] - loss) < 1e-5 for step, loss in losses(single).items())
    assert all(norms(other)[step] == pytest.approx(norm, rel=1e-4) for step, norm in norms(single).items())
    assert any(norm > 0.5 for norm in norms(single).values()), "some steps must be clipped"
    expected, found = ([(e["step"], e["loss"]) for e in events(run, "validation")] for run in (single, other))
    assert [step for step, _ in found] == [0, STEPS // 2, STEPS]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], abs=1e-5)
    expected, found = ([e.get("average_loss") for e in events(run, "validation")] for run in (single, other))
    assert found[1:] == pytest.approx(expected[1:], abs=1e-5) and None not in found[1:]


def test_layers_with_split_backward_are_not_compiled(runs):
    said = (runs["llama"].parent / "ddp.txt").read_text()
    for schedule, settings in STAGE_LAYOUTS.items():
        line = f"compile: regional has no effect with {schedule}, because a compiled layer cannot compute"
        assert said.count(line) == int(settings.splits_backward), schedule


@pytest.mark.parametrize("strategy", ["pp", "tp"])
def test_bf16_is_close(runs, strategy):
    single, other = losses(runs["single-bf16"]), losses(runs[f"{strategy}-bf16"])
    assert all(abs(other[step] - single[step]) < 2e-3 for step in single), "1.5e-4 was measured"
    # We measured 2.7e-5. A run in fp32 would be within 1e-6.
    in_fp32 = losses(runs["llama"])
    assert max(abs(other[step] - in_fp32[step]) for step in (1, 2, 3)) > 1e-5
    validation = [events(runs[name], "validation")[-1]["loss"] for name in ("single-bf16", f"{strategy}-bf16")]
    assert validation[0] == pytest.approx(validation[1], abs=2e-3)


@pytest.mark.parametrize("strategy", ["pp", "tp"])
def test_a_resumed_run_matches_the_uninterrupted_run_bit_for_bit(runs, strategy):
    """The pp run uses dropout and a schedule that recomputes some gradients."""
    whole, broken = runs[f"{strategy}-whole"], runs[f"{strategy}-broken"]
    assert {step: loss for step, loss in losses(broken).items() if step <= 2 * SHORT} == losses(whole)
    assert events(broken, "resume")[0]["step"] == SHORT
    for file in ("model", "optimizer"):
        expected, found = (load_file(run / END / f"{file}.safetensors") for run in (whole, broken))
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_checkpoints_move_between_one_process_and_a_pipeline(runs):
    """Runs four steps on one process, four in a pipeline, and four on one process again."""
    whole, moved = losses(runs["single-whole"]), losses(runs["moved"])
    assert [event["step"] for event in events(runs["moved"], "resume")] == [SHORT, 2 * SHORT]
    assert all(abs(moved[step] - whole[step]) < 1e-5 for step in range(1, 3 * SHORT + 1))


def test_checkpoints_move_from_tensor_parallel_to_one_process(runs):
    whole, moved = losses(runs["single-whole"]), losses(runs["tp-broken"])
    assert [event["step"] for event in events(runs["tp-broken"], "resume")] == [SHORT, 2 * SHORT]
    assert all(abs(moved[step] - whole[step]) < 1e-5 for step in range(1, 3 * SHORT + 1))


@pytest.mark.parametrize("strategy", ["pp", "tp"])
def test_checkpoints_have_the_same_tensor_names_and_shapes(runs, strategy):
    single, other = runs["single-whole"], runs["moved" if strategy == "pp" else "tp-broken"]
    for file in ("model", "optimizer"):
        expected, found = (load_file(run / END / f"{file}.safetensors") for run in (single, other))
        assert {n: (t.shape, t.dtype) for n, t in expected.items()} == {
            n: (t.shape, t.dtype) for n, t in found.items()
        }


@pytest.mark.parametrize("strategy", ["pp", "tp"])
def test_a_nonfinite_step_is_skipped_on_all_processes(runs, strategy):
    """After an update of 1e30, every gradient is NaN, so the remaining steps must be skipped."""
    skips = [[e["step"] for e in events(runs[f"{name}-diverging"], "skip")] for name in ("single", strategy)]
    assert skips[0] == skips[1] == [2, 3, 4]
    assert [norm is None for norm in norms(runs[f"{strategy}-diverging"]).values()] == [False, True, True, True]


@pytest.mark.parametrize(
    ("run", "name"), [("pp-llama-GPipe", "model.embed_tokens.weight"), ("tp-whole", "model.norm")]
)
def test_replicas_are_equal_and_a_changed_one_is_found(runs, run, name):
    """The replicated parameters are the tied embedding under pp and the norms under tp."""
    equal, changed = json.loads((runs[run] / "replicas.json").read_text())
    assert equal == []
    (line,) = changed
    assert line.startswith(name) and line.endswith(": different on 2 of 2 ranks: 0, 1")
