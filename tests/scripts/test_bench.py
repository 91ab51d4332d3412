"""Tests for the benchmarks' logic, with contestants that don't train and tiny shapes."""

import itertools
import json
import math
import re
import subprocess
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench import architectures, contest, cpu, gpu, peers, time_to_loss
from bench.contest import Contestant
from bench.plain_gpt import PlainGPT
from bench.shapes import CPU_SHAPES, GPU_SHAPES, LLAMA_14M, write_shards
from pretrain.config import WindowSpec
from pretrain.data.batches import read_windows, windows_of
from pretrain.data.shards import open_shards
from pretrain.errors import InputError
from pretrain.model.model_config import load_model_config
from pretrain.recipe import read_run_config
from pretrain_tools.planning.own_text import Machine
from pretrain_tools.preparation.verification import verify_shards
from support import numbered_shards
from support.project import ROOT, launch, run_script
from support.warm_python import WarmPopen

TINY = replace(LLAMA_14M, layers=1, hidden_size=32, heads=2, vocabulary_size=256, sequence_length=16, sequences=2)
WRITES_LINES = """
import json, sys, time
with open(sys.argv[1], "w") as file:
    for step in range(1, 1_000_000):
        time.sleep({seconds})
        file.write(json.dumps({{"event": "train", "step": step, "time": time.time()}}) + "\\n")
        file.flush()
"""


def contestant(folder: Path, name: str, seconds: float, tokens_per_step: int = 100) -> Contestant:
    steps_file = folder / f"{name}.jsonl"
    return Contestant(name, ["-c", WRITES_LINES.format(seconds=seconds), str(steps_file)], steps_file, tokens_per_step)


def test_contestants_take_turns_and_none_is_left(tmp_path):
    slow, fast = contestant(tmp_path, "slow", 0.2), contestant(tmp_path, "fast", 0.02)
    contest.hold([slow, fast], ROOT, rounds=2, reports=3, warm_up=1)
    assert slow.process is None and fast.process is None
    # On a busy machine, a contestant may write another line before it is stopped.
    assert len(slow.tokens_per_second) >= 6 and len(fast.tokens_per_second) >= 6
    assert len(slow.cpu_seconds_per_step) == 2
    # Each contestant is paused while the other runs, and pauses don't count: 0.2 s of sleep gives 500 tokens/s.
    assert max(slow.tokens_per_second) <= 500 and max(slow.tokens_per_second) < max(fast.tokens_per_second)
    lines = [json.loads(line) for line in fast.steps_file.read_text().splitlines()]
    standstill = max(after["time"] - before["time"] for before, after in itertools.pairwise(lines))
    assert standstill > 0.5
    assert slow.start_seconds > 0.2 and slow.peak_memory_bytes > 2**20
    size = fast.steps_file.stat().st_size
    time.sleep(0.1)
    assert fast.steps_file.stat().st_size == size, "the process must be paused"


def test_a_launchers_ranks_are_paused_and_killed_although_they_have_their_own_sessions(tmp_path):
    """Otherwise, the ranks of `accelerate launch` would go on training after their measurement."""
    ranks = contestant(tmp_path, "ranks", 0.02)
    started = "subprocess.Popen([sys.executable, *sys.argv[1:]], start_new_session=True).wait()"
    ranks.command = ["-c", f"import subprocess, sys; {started}", *ranks.command]
    fast = contestant(tmp_path, "fast", 0.02)
    contest.hold([ranks, fast], ROOT, rounds=1, reports=10, warm_up=1)
    lines = [json.loads(line) for line in ranks.steps_file.read_text().splitlines()]
    assert max(after["time"] - before["time"] for before, after in itertools.pairwise(lines)) > 0.03
    size = ranks.steps_file.stat().st_size
    time.sleep(0.2)
    assert ranks.steps_file.stat().st_size == size, "the rank must be dead"


def test_a_contestant_that_dies_is_reported_with_its_output_and_the_others_end(tmp_path):
    well, bad = contestant(tmp_path, "well", 0.02), contestant(tmp_path, "bad", 0.02)
    bad.command = ["-c", "raise SystemExit('no such model')"]
    with pytest.raises(InputError, match="bad exited with status 1") as refused:
        contest.hold([well, bad], ROOT, rounds=1, reports=1)
    assert "no such model" in str(refused.value) and well.process is None


def test_all_contestants_end_if_one_dies_in_its_turn(tmp_path):
    bad, well = contestant(tmp_path, "bad", 0.02), contestant(tmp_path, "well", 0.02)
    bad.command[1] = bad.command[1].replace("1_000_000", "8")
    with pytest.raises(InputError, match="bad exited with status 0"):
        contest.hold([bad, well], ROOT, rounds=9, reports=2, warm_up=1)
    assert bad.process is None and well.process is None


def test_table_has_medians_and_ratios_to_the_first():
    first, second = (Contestant(name, [], Path("x"), 1) for name in ("groundwork", "other"))
    first.turns, second.turns = [[90.0, 100.0, 500.0]], [[50.0]]
    first.cpu_seconds_per_step, second.cpu_seconds_per_step = [2.0], [3.0]
    rows = contest.table([first, second], flops_per_token=2.0, peak_flops=1000.0)
    assert rows[2].startswith("| groundwork | 100 | 20.0% | 1.000 x | 2.000 | 1.000 x |")
    assert rows[3].startswith("| other | 50 | 10.0% | 2.000 x | 3.000 | 1.500 x |")
    assert {row.count("|") for row in rows} == {9}


def test_the_ratio_is_computed_within_rounds():
    first, second = (Contestant(name, [], Path("x"), 1) for name in ("groundwork", "other"))
    # The machine is half as fast in the second round, and slows down between the turns of the third.
    first.turns, second.turns = [[110.0, 110.0], [55.0], [110.0]], [[100.0], [50.0, 50.0, 20.0], [50.0]]
    assert contest.faster_by(first, second) == pytest.approx(1.1)


def test_speeds_count_the_steps_between_reports():
    lines = [{"step": 10, "time": 5.0}, {"step": 20, "time": 7.0}, {"step": 30, "time": 11.0}]
    assert contest.speeds(lines, tokens_per_step=4) == [20.0, 10.0]


def test_made_up_shards_are_sound(tmp_path):
    folder = write_shards(tmp_path / "shards", vocabulary_size=300, tokens=20_000)
    tokenizer_is_missing = [problem for problem in verify_shards(folder) if "tokenizer" in problem]
    assert verify_shards(folder) == tokenizer_is_missing
    assert open_shards(folder, "train").tokens == 20_000


@pytest.mark.parametrize("shape", [*CPU_SHAPES.values(), *GPU_SHAPES.values()], ids=[*CPU_SHAPES, *GPU_SHAPES])
def test_shapes_have_the_parameters_that_their_names_say(shape):
    values = shape.model_json()
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    wanted = {"124m": 124e6, "350m": 354e6, "1.3b": 1.3e9, "7b": 6.6e9, "llama": 13.8e6, "gpt2": 14e6}
    name = next(name for name, other in (CPU_SHAPES | GPU_SHAPES).items() if other is shape)
    if name in wanted:
        assert parameters == pytest.approx(wanted[name], rel=0.03)


def test_recipe_is_one_that_train_accepts(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(cpu.recipe(TINY, Path("model.json"), Path("shards"), tmp_path / "run"))
    config = read_run_config(path)
    assert config.batch.tokens_per_step == TINY.tokens_per_step and not config.data.document_mask


def test_plain_gpt_learns_and_begins_near_chance():
    torch.manual_seed(0)
    model = PlainGPT(TINY)
    ids = torch.randint(TINY.vocabulary_size, (2, 17))
    before = model(ids[:, :-1], ids[:, 1:])
    assert before.item() == pytest.approx(torch.tensor(256.0).log().item(), abs=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        model(ids[:, :-1], ids[:, 1:]).backward()
        optimizer.step()
    assert model(ids[:, :-1], ids[:, 1:]) < before - 1


def test_plain_gpt_sees_no_later_token():
    model, ids = PlainGPT(TINY), torch.randint(TINY.vocabulary_size, (1, 16))
    changed = ids.clone()
    changed[0, 8:] = (ids[0, 8:] + 1) % TINY.vocabulary_size
    targets = torch.full_like(ids, -100)
    targets[0, :8] = ids[0, :8]
    assert torch.equal(model(ids, targets), model(changed, targets))


@pytest.mark.parametrize(("peer", "precision"), [("plain", "fp32"), ("bare", "bf16"), ("trainer", "fp32")])
def test_peers_train_and_write_their_steps(peer, precision, tmp_path):
    shards = write_shards(tmp_path / "shards", TINY.vocabulary_size, tokens=2_000)
    steps_file = tmp_path / "steps.jsonl"
    command = peers.command_of(peer, TINY, shards, steps_file, compiles=False, report_every=2, precision=precision)
    run_script(*command, "--steps", "5")
    lines = [json.loads(line) for line in steps_file.read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4] and lines[0]["time"] < lines[1]["time"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "lama"], "--shapes: 'lama'; did you mean llama?"),
        (["--contestants", "groundwrok"], "--contestants: 'groundwrok'; did you mean groundwork?"),
        (["--rounds", "0"], "--rounds: must be at least 1"),
        (["--set", "compile"], "--set: 'compile' must be SETTING=VALUE"),
    ],
)
def test_mistyped_arguments_are_refused_in_words(arguments, message):
    with pytest.raises(InputError) as refused:
        cpu.parse_arguments(arguments)
    assert message in refused.value.problems


class Forked(WarmPopen):
    """Replacement for Popen that forks contestants from a warm interpreter."""

    def __init__(self, *arguments, env, **settings):
        super().__init__(*arguments, env=env | {"HF_HUB_OFFLINE": "1"}, **settings)


def test_gpu_bench_lists_all_combinations_or_the_reason(monkeypatch, capsys):
    """The table contains all combinations that run, and explains why others don't. On a CPU, flex_attention has no
    backward pass."""
    monkeypatch.setattr(contest.subprocess, "Popen", Forked)
    rows = gpu.measure_shape(
        TINY, ["compile=none"], attentions=["auto", "flex_attention"], losses=["logits"], peers=[], reports=1,
        report_every=1,
    )  # fmt: skip
    assert [(row.name, row.documents, row.attention) for row in rows] == [
        ("groundwork", "off", "auto"),
        ("groundwork", "off", "flex_attention"),
        ("groundwork_documents", "on", "auto"),
        ("groundwork_documents", "on", "flex_attention"),
    ]
    said = [line for line in capsys.readouterr().err.splitlines() if ", documents " in line]
    assert len(said) == len(rows) and all(line.startswith(row.name) for line, row in zip(said, rows, strict=True))
    lines = gpu.table("tiny", TINY, rows, peak=1e12)
    assert rows[0].tokens_per_second > 0 and rows[0].peak_memory_bytes > 2**20 and rows[1].tokens_per_second is None
    assert len([line for line in lines if line.startswith("| groundwork")]) == 2
    assert any("flex_attention has no backward pass on cpu" in line for line in lines)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is available")
def test_gpu_bench_says_that_there_is_no_gpu():
    assert "torch finds none here" in run_script("bench/gpu.py").stdout


def test_gpu_bench_rejects_unknown_names():
    with pytest.raises(InputError) as refused:
        gpu.parse_arguments(["--shapes", "124M", "--losses", "chunkd", "--reports", "0"])
    assert refused.value.problems == [
        "--shapes: '124M'; did you mean 124m?",
        "--losses: 'chunkd'; did you mean chunked?",
        "--reports: must be at least 1, got 0",
    ]


def test_the_time_to_a_loss_is_interpolated():
    points = [(10.0, 4.0), (20.0, 3.0), (30.0, 2.5)]
    assert time_to_loss.time_to(points, 3.5) == pytest.approx(15.0)
    assert time_to_loss.time_to(points, 5.0) == 10.0  # at the first measurement, not earlier
    assert time_to_loss.time_to(points, 2.5) == pytest.approx(30.0)
    assert time_to_loss.time_to(points, 2.4) is None


def test_peers_are_measured_on_the_windows_that_train_py_validates_on(tmp_path):
    shards = numbered_shards.write_shards(tmp_path / "shards", 64, validation=5_000)
    window = WindowSpec(16, document_mask=False)
    reader = open_shards(shards, "validation")
    starts = windows_of(reader, window, time_to_loss.VALIDATION_TOKENS // 16)
    expected = {tuple(row) for row in read_windows(reader, starts, window, len(starts))[:, 1:].reshape(-1, 8).tolist()}
    seen = set()

    def loss(ids_BT: torch.Tensor) -> float:
        seen.update(map(tuple, ids_BT[:, 1:].tolist()))
        return 2.0

    given = Namespace(output=tmp_path, peer="nanogpt", minutes=1.0, window=16, shards=shards)
    curve = time_to_loss.Curve(given, 8, loss)
    curve.measure()
    assert seen == expected
    tokens, _, text_bytes = reader.manifest.totals("validation")
    assert curve.points[0][1] == pytest.approx(2.0 / math.log(2) * tokens / text_bytes)


def test_families_of_one_size_have_nearly_the_same_parameters_in_their_layers(tmp_path):
    counts = {}
    for name, values in architectures.FAMILIES.items():
        path = tmp_path / "model.json"
        path.write_text(json.dumps(values | {"vocab_size": 64}))
        config = load_model_config(str(path))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        embeddings = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
        counts[name] = sum(p.numel() for p in model.parameters() if id(p) not in embeddings and p.ndim == 2)
    assert max(counts.values()) / min(counts.values()) < 1.06, counts


def test_both_kinds_of_context_parallelism_give_the_same_results():
    """The benchmark itself compares their gradients."""
    out = launch("ddp", 2, "bench/context.py", "--shapes", "64x4x2x8", "32x2x1x8", "--repeats", "1").stdout
    rows = [line for line in out.splitlines() if re.match(r"\| \d+ \| ", line)]
    assert [row.split(" | ")[:2] for row in rows] == [["| 64", "4 / 2 x 8"], ["| 32", "2 / 1 x 8"]]


def test_time_to_loss_starts_with_a_valid_recipe(tmp_path, shards, monkeypatch):
    started = []

    def run(command, **_):
        started.append(command)
        return subprocess.CompletedProcess(command, 1, "", "stopped by the test")

    # Measuring would change this process's number of threads.
    machine = Machine("cpu", "2 CPU threads", "fp32", 1e11, 2**33, 0.5)
    monkeypatch.setattr(Machine, "measured", lambda minutes: machine)
    monkeypatch.setattr(time_to_loss.subprocess, "run", run)
    given = time_to_loss.parse_arguments(["--shards", str(shards), "--minutes", "0.5", "--output", str(tmp_path)])
    with pytest.raises(InputError, match="stopped by the test"):
        time_to_loss.train_groundwork(given)
    config = read_run_config(Path(started[0][3]), [])
    assert Path(config.model.config).is_file() and config.optim.name == "muon"
