"""Measures the time to reach a loss with Groundwork's automatic settings, nanoGPT's settings, and run_clm.

    python bench/time_to_loss.py --shards data/demo --minutes 10 --output runs/time_to_loss

All contestants get the same text, tokenizer, cores and time, and run one after the other. The time includes twenty
validations on the same held-out tokens. Prints Markdown that shows when Groundwork reached the final loss of each
baseline, and plots the loss curves to OUTPUT/curves.png. Existing results are reused.

Contestants:
    groundwork     the recipe that `train.py --text` writes for this number of minutes
    nanogpt        the CPU settings in nanoGPT's README: 4 layers of 128, 12 sequences of 64, AdamW at 1e-3 to 1e-4
    nanogpt_large  nanoGPT's settings with Groundwork's layers, width, sequence length and batch size
    run_clm        GPT-2 of this size and the Transformers Trainer, with defaults (5e-5, linear, 8 sequences, dropout)
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.shapes import Shape  # noqa: E402
from pretrain.errors import InputError, run_script  # noqa: E402

MEASUREMENTS = 20
VALIDATION_TOKENS = 32_768
PEERS = ("nanogpt", "nanogpt_large", "run_clm")
TIMED_STEPS = 20
"""Number of timed steps. From their speed, a baseline computes how many steps it has time for."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line. Raises InputError if --minutes isn't positive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=Path, default=Path("data/demo"))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--output", type=Path, default=Path("runs/time_to_loss"))
    parser.add_argument("--peer", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--window", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--shape", type=lambda text: Shape(**json.loads(text)), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if not given.minutes > 0:
        raise InputError(f"--minutes {given.minutes:g}: must be above 0")
    return given


class Curve:
    """Validation curve: (seconds since the process started, bits per byte), measured after every 5% of the time."""

    def __init__(self, given: argparse.Namespace, length: int, loss: Callable[[Any], float]):
        import torch

        from pretrain.config import WindowSpec
        from pretrain.data.batches import read_windows, windows_of
        from pretrain.data.shards import open_shards

        self._path = given.output / f"{given.peer}.json"
        self._seconds = 60 * given.minutes
        self._loss = loss
        reader = open_shards(given.shards, "validation")
        window = WindowSpec(given.window, document_mask=False)
        starts = windows_of(reader, window, VALIDATION_TOKENS // given.window)
        ids_BT = torch.from_numpy(read_windows(reader, starts, window, len(starts)))
        # Windows have the same length for all models and are split to this model's sequence length, so that all models
        # predict the same tokens.
        pieces_BT = [ids_BT[:, at : at + length + 1] for at in range(0, given.window, length)]
        self._batches = torch.cat(pieces_BT).split(16)
        tokens, _, text_bytes = reader.manifest.totals("validation")
        self._bits_per_nat = tokens / text_bytes / math.log(2)
        self.points: list[tuple[float, float]] = []

    def due(self) -> bool:
        return _seconds_of_process() > (len(self.points) + 1) / MEASUREMENTS * self._seconds

    def measure(self) -> None:
        import torch

        with torch.no_grad():
            losses = [self._loss(batch) * len(batch) for batch in self._batches]
        nats = sum(losses) / sum(map(len, self._batches))
        self.points.append((_seconds_of_process(), nats * self._bits_per_nat))

    def write(self) -> None:
        self._path.write_text(json.dumps(self.points))


def _seconds_of_process() -> float:
    """Returns the seconds since the process was created. This includes imports, which users also wait for."""
    import psutil

    return time.time() - psutil.Process().create_time()


def steps_left(given: argparse.Namespace, seconds_per_step: float, spent: float = 0.0) -> int:
    """Returns how many steps there is time for, with 5% reserved for validation."""
    return max(TIMED_STEPS + 1, int((60 * given.minutes * 0.95 - spent) / seconds_per_step))


def train_nanogpt(given: argparse.Namespace) -> None:
    """Trains like nanoGPT's train.py with its settings for a small model, for as many steps as there is time for."""
    import torch

    from bench.peers import Windows
    from bench.plain_gpt import PlainGPT

    torch.manual_seed(1337)
    model = PlainGPT(given.shape)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=True)
    windows = Windows(given.shards, given.shape)

    def validation_loss(ids_BT: Any) -> float:
        return model(ids_BT[:, :-1], ids_BT[:, 1:]).item()

    curve = Curve(given, given.shape.sequence_length, validation_loss)
    total = math.inf
    step = 0
    began = time.monotonic()
    while step < total:
        if step == TIMED_STEPS:
            spent = _seconds_of_process()
            total = step + steps_left(given, (time.monotonic() - began) / step, spent)
        # nanoGPT's schedule: 100 warmup steps, then cosine decay from 1e-3 to 1e-4.
        progress = 0.0 if math.isinf(total) else max(0.0, step - 100) / max(1, total - 100)
        rate = min(1.0, (step + 1) / 100) * (1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
        for group in optimizer.param_groups:
            group["lr"] = rate
        model(*windows.batch("cpu")).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if curve.due():
            curve.measure()
    curve.measure()
    curve.write()


def train_run_clm(given: argparse.Namespace) -> None:
    """Trains GPT-2 in the given shape with the Transformers Trainer, both with their defaults."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from bench.peers import Windows

    torch.manual_seed(42)
    shape = given.shape
    config = GPT2Config(
        vocab_size=shape.vocabulary_size, n_layer=shape.layers, n_embd=shape.hidden_size, n_head=shape.heads,
        n_positions=shape.sequence_length, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)

    def validation_loss(ids_BT: Any) -> float:
        model.eval()
        logits_BTV = model(input_ids=ids_BT[:, :-1]).logits
        model.train()
        return torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten()).item()

    curve = Curve(given, shape.sequence_length, validation_loss)

    class Measures(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if curve.due():
                curve.measure()

    def trainer(steps: int, callbacks: list[TrainerCallback]) -> Trainer:
        settings = TrainingArguments(
            output_dir=str(given.output / "run_clm"), max_steps=steps, use_cpu=True, save_strategy="no",
            report_to="none", disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        return Trainer(model, settings, train_dataset=Windows(given.shards, shape), callbacks=callbacks)

    first = {name: value.clone() for name, value in model.state_dict().items()}
    began = time.monotonic()
    trainer(TIMED_STEPS, []).train()
    seconds_per_step = (time.monotonic() - began) / TIMED_STEPS
    # The timed steps only determine the number of steps. Training restarts from the initial weights.
    model.load_state_dict(first)
    trainer(steps_left(given, seconds_per_step, _seconds_of_process()), [Measures()]).train()
    curve.measure()
    curve.write()


def train_groundwork(given: argparse.Namespace) -> tuple[list[tuple[float, float]], Shape]:
    """Runs train.py with the recipe that it chooses for this text. Returns the curve and the chosen shape."""
    from pretrain.model.model_config import padded_vocabulary
    from pretrain_tools.planning.own_text import Machine, Prepared, SizedRecipe
    from pretrain_tools.planning.sizing import choose_sizing

    run = given.output / "groundwork"
    path = given.output / "groundwork.yaml"
    kept = given.output / "groundwork.json"
    if not kept.exists():
        prepared = Prepared.read(given.shards)
        machine = Machine.measured(given.minutes)
        vocabulary = padded_vocabulary(prepared.vocabulary)
        sizing = choose_sizing(machine.flops, prepared.training_tokens, vocabulary, machine.most_parameters)
        model = given.output / "groundwork_model.json"
        recipe = SizedRecipe(run, model, given.shards, machine, prepared, sizing)
        model.write_text(sizing.shape.json_text)
        path.write_text(recipe.text("# bench/time_to_loss.py"))
        chosen = sizing.shape
        length = sizing.shape.sequence_length
        every = max(1, sizing.steps // MEASUREMENTS)
        began = time.time()
        command = [sys.executable, "train.py", "--config", str(path), "--validation.every_steps", str(every)]
        command += ["--validation.sequences", str(VALIDATION_TOKENS // length), "--samples.every_steps", "null"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise InputError(f"train.py exited with status {done.returncode}: {done.stderr[-1500:]}")
        events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        points = [(e["time"] - began, e["bits_per_byte"]) for e in events if e["event"] == "validation" and e["step"]]
        sequences = sizing.tokens_per_step // length
        shape = Shape("gpt2", chosen.layers, chosen.width, chosen.heads, vocabulary, length, sequences)
        kept.write_text(json.dumps({"points": points, "shape": vars(shape)}))
    kept = json.loads(kept.read_text())
    return kept["points"], Shape(**kept["shape"])


def curve_of_peer(peer: str, given: argparse.Namespace, shape: Shape, window: int) -> list[tuple[float, float]]:
    """Returns a baseline's curve. Trains it in a separate process unless its result exists."""
    path = given.output / f"{peer}.json"
    if not path.exists():
        command = ["-m", "bench.time_to_loss", "--peer", peer, "--shape", json.dumps(vars(shape)), "--window", window]
        command += ["--shards", given.shards, "--minutes", given.minutes, "--output", given.output]
        done = subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise InputError(f"{peer} exited with status {done.returncode}: {done.stderr[-1500:]}")
    return json.loads(path.read_text())


def time_to(points: list[tuple[float, float]], bits: float) -> float | None:
    """Returns the seconds until a curve reaches `bits`, interpolated linearly, or None if it doesn't."""
    for (t0, b0), (t1, b1) in zip([(0.0, math.inf), *points], points, strict=False):
        if b1 <= bits:
            return t1 if math.isinf(b0) else t0 + (t1 - t0) * (b0 - bits) / (b0 - b1)
    return None


def draw(curves: dict[str, list[tuple[float, float]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axis = figure.subplots()
    for name, points in curves.items():
        axis.plot([t / 60 for t, _ in points], [bits for _, bits in points], marker=".", label=name)
    axis.set(xlabel="minutes", ylabel="validation bits per byte")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main() -> int:
    given = parse_arguments()
    given.output.mkdir(parents=True, exist_ok=True)
    if given.peer:
        (train_run_clm if given.peer == "run_clm" else train_nanogpt)(given)
        return 0
    ours, chosen = train_groundwork(given)
    own_size = Shape("gpt2", 4, 128, 4, chosen.vocabulary_size, 64, 12)
    shapes = {"nanogpt": own_size, "nanogpt_large": chosen, "run_clm": Shape(**vars(chosen) | {"sequences": 8})}
    curves = {"groundwork": ours} | {
        peer: curve_of_peer(peer, given, shapes[peer], chosen.sequence_length) for peer in PEERS
    }
    draw(curves, given.output / "curves.png")
    print(
        "| | final bits per byte | Groundwork reached it after | share of the baseline's time |\n|---|---:|---:|---:|"
    )
    for name, points in curves.items():
        seconds, bits = points[-1]
        reached = time_to(ours, bits)
        share = f"{reached / seconds:.0%}" if reached is not None else "not reached"
        print(
            f"| {name} | {bits:.3f} | {'-' if reached is None else f'{reached:.0f} s'} of {seconds:.0f} s | {share} |"
        )
    return 0


if __name__ == "__main__":
    run_script(main)
