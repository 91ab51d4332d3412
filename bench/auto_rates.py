"""Compares `learning_rate: auto` with learning-rate sweeps for models with 1M to 30M parameters.

    python bench/auto_rates.py --shards data/english --minutes 60
    python bench/auto_rates.py --table

Trains Llamas with AdamW and Muon for 200 to 500 steps each, the smallest model first, on shards with a 4,096-token
vocabulary, and adds each final validation loss to bench/auto_rates.json. Then trains with Muon at its best learning
rate for fewer and fewer steps, until it no longer beats AdamW's best loss. Run the same command again to continue.
Existing results are kept. `--table` prints Markdown: the best learning rates, how much higher the loss is with auto,
and how many steps Muon needs.
"""

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pretrain.optim.optimizers import OPTIMIZERS  # noqa: E402
from pretrain.optim.scaling_laws import scaling_law_batch  # noqa: E402

RESULTS = ROOT / "bench" / "auto_rates.json"
VOCABULARY = 4096
LENGTH = 256
FACTORS = (1.0, 1.7, 0.6)
"""Learning rates to try first, as multiples of `centre`.

The sweep is then extended by factors of 1.7 until the best learning rate is between two worse ones.
"""
SHARES = (0.6, 0.4)
"""Fractions of the steps to train with Muon. The second is only used if Muon still beats AdamW with the first."""


@dataclass(frozen=True)
class Size:
    """A Llama with tied embeddings, and the number of tokens to train on."""

    layers: int
    width: int
    intermediate: int
    parameters: int
    tokens: int

    @property
    def tokens_per_step(self) -> int:
        return max(LENGTH, 2 ** round(math.log2(scaling_law_batch(self.tokens))))

    def model(self) -> dict:
        return {
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": self.width,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.width // 32,
            "num_key_value_heads": self.width // 32,
            "max_position_embeddings": LENGTH,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "rms_norm_eps": 1e-5,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
        }


SIZES = {
    "1M": Size(4, 96, 256, 836_448, 500_000),
    "3M": Size(5, 192, 512, 3_000_384, 500_000),
    "10M": Size(8, 320, 848, 11_105_600, 150_000),
    "30M": Size(9, 512, 1376, 30_565_888, 100_000),
}


@dataclass(frozen=True)
class Point:
    """The result of one run."""

    size: str
    optimizer: str
    learning_rate: float
    loss: float
    """Final validation loss in nats per token."""
    parameters: int
    tokens: int
    tokens_per_step: int


def read_points() -> list[Point]:
    return [Point(**row) for row in json.loads(RESULTS.read_text())] if RESULTS.exists() else []


def write_points(points: list[Point]) -> None:
    RESULTS.write_text("[\n" + ",\n".join(json.dumps(asdict(point)) for point in points) + "\n]\n")


def centre(size: Size) -> float:
    """Returns the center of the sweep for both optimizers, from a published scaling law for AdamW.

    This must not depend on `auto`, so that existing results stay valid if the rule for `auto` changes.
    """
    return 0.00235 * (size.parameters / 108e6) ** (-1 / 3)


def auto_learning_rate(size: Size, optimizer: str) -> float:
    return OPTIMIZERS[optimizer].auto_learning_rate(size.parameters, size.tokens_per_step)


def train(name: str, optimizer: str, rate: float, share: float, shards: str) -> Point:
    size = SIZES[name]
    tokens = round(share * SIZES[name].tokens)
    with tempfile.TemporaryDirectory(prefix="groundwork-bench-") as folder:
        model = Path(folder, "model.json")
        output = Path(folder, "run")
        model.write_text(json.dumps(size.model()))
        settings = {
            "model": model, "output": output, "precision": "auto", "optim.name": optimizer,
            "optim.learning_rate": rate, "optim.warmup_steps": 25, "budget.tokens": tokens,
            "batch.tokens_per_step": size.tokens_per_step,
            "batch.sequences_per_micro_batch": size.tokens_per_step // LENGTH,
            "data.train": f"[{{shards: {shards}}}]", "data.sequence_length": LENGTH, "validation.every_steps": "null",
            "validation.sequences": 200, "checkpoint.every_steps": "null", "samples.every_steps": "null",
        }  # fmt: skip
        command = [sys.executable, "train.py", "--config", "recipes/demo.yaml"]
        command += [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if result.returncode:
            sys.exit(f"{' '.join(command)} exited with status {result.returncode}\n{result.stderr[-2000:]}")
        events = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    loss = [event["loss"] for event in events if event["event"] == "validation"][-1]
    return Point(name, optimizer, rate, loss, size.parameters, tokens, size.tokens_per_step)


def sweep_of(name: str, optimizer: str, points: list[Point], share: float = 1.0) -> list[Point]:
    """Returns the points for a size, an optimizer and a fraction of the steps."""
    of = (name, optimizer, round(share * SIZES[name].tokens))
    return [point for point in points if (point.size, point.optimizer, point.tokens) == of]


def next_rate(name: str, optimizer: str, points: list[Point]) -> float | None:
    """Returns the next learning rate to try, or None if the sweep is done.

    Starts with FACTORS, then extends the sweep until it includes auto's learning rate and an interior minimum.
    """
    rates = {p.learning_rate: p.loss for p in sweep_of(name, optimizer, points)}
    law = centre(SIZES[name])
    for factor in FACTORS:
        # A learning rate within about 20% of a factor counts as tried.
        if not any(abs(math.log(rate / law / factor)) < 0.2 for rate in rates):
            return float(f"{law * factor:.3g}")
    best = min(rates, key=rates.get)
    # The optimum may be outside the sweep, so extend it on this side.
    if best in (min(rates), max(rates)):
        return float(f"{best * (1.7 if best == max(rates) else 1 / 1.7):.3g}")
    # auto's loss is interpolated, so its learning rate must be inside the sweep.
    if not min(rates) <= auto_learning_rate(SIZES[name], optimizer) <= max(rates):
        below = auto_learning_rate(SIZES[name], optimizer) < min(rates)
        return float(f"{min(rates) / 1.7 if below else max(rates) * 1.7:.3g}")
    return None


def next_share(name: str, points: list[Point]) -> tuple[float, float] | None:
    """Returns (learning rate, fraction of the steps) for the next shorter Muon run, or None if no more are needed."""
    worst = best_of(sweep_of(name, "adamw", points))[1]
    best = min(sweep_of(name, "muon", points), key=lambda point: point.loss)
    for share in SHARES:
        done = sweep_of(name, "muon", points, share)
        if not done:
            return best.learning_rate, share
        # Muon is already worse than AdamW's best, and would be even worse with fewer steps.
        if done[0].loss >= worst:
            break
    return None


def steps_needed(name: str, points: list[Point]) -> float | None:
    """Returns the fraction of the steps that Muon needs to reach AdamW's best loss, or None if it is unknown.

    Interpolates linearly in the log of the fraction.
    """
    goal = best_of(sweep_of(name, "adamw", points))[1]
    losses = [(1.0, min(point.loss for point in sweep_of(name, "muon", points)))]
    losses += [(share, p.loss) for share in SHARES for p in sweep_of(name, "muon", points, share)]
    for (more, low), (less, high) in itertools.pairwise(losses):
        if low <= goal <= high:
            return more * (less / more) ** ((goal - low) / (high - low))
    return None


def best_of(points: list[Point]) -> tuple[float, float]:
    """Returns (learning rate, loss) at the minimum of a parabola through the best point and the two next to it.

    The parabola is a function of the log of the learning rate.
    """
    points = sorted(points, key=lambda point: point.learning_rate)
    at = min(range(len(points)), key=lambda index: points[index].loss)
    if at in (0, len(points) - 1):
        return points[at].learning_rate, points[at].loss
    return lowest(*((math.log(p.learning_rate), p.loss) for p in points[at - 1 : at + 2]))


def lowest(left, middle, right) -> tuple[float, float]:
    """Returns (e^x, y) at the minimum of the parabola through three points (x, y)."""
    x0, y0 = left
    x1, y1 = middle
    x2, y2 = right
    # Newton's form of the parabola, from divided differences.
    slope_0 = (y1 - y0) / (x1 - x0)
    slope_1 = (y2 - y1) / (x2 - x1)
    curvature = (slope_1 - slope_0) / (x2 - x0)
    x = (x0 + x1) / 2 - slope_0 / (2 * curvature)
    return math.exp(x), y0 + slope_0 * (x - x0) + curvature * (x - x0) * (x - x1)


def loss_at(points: list[Point], rate: float) -> float | None:
    """Interpolates the loss at a learning rate, linearly in its log. Returns None outside the sweep."""
    points = sorted(points, key=lambda point: point.learning_rate)
    for a, b in itertools.pairwise(points):
        if a.learning_rate <= rate <= b.learning_rate:
            share = math.log(rate / a.learning_rate) / math.log(b.learning_rate / a.learning_rate)
            return a.loss + share * (b.loss - a.loss)
    return None


def table(points: list[Point]) -> str:
    rows = [
        "| model | tokens, tokens per step | optimizer | lr: loss | best lr | auto lr | auto's loss above the best |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, size in SIZES.items():
        for optimizer in ("adamw", "muon"):
            own = sweep_of(name, optimizer, points)
            if len(own) < 2:
                continue
            rate, loss = best_of(own)
            auto = auto_learning_rate(size, optimizer)
            here = loss_at(own, auto)
            swept = ", ".join(
                f"{p.learning_rate:.2g}: {p.loss:.3f}" for p in sorted(own, key=lambda p: p.learning_rate)
            )
            above = "outside the sweep" if here is None else f"{max(0.0, here / loss - 1):.1%}"
            rows.append(
                f"| {size.parameters / 1e6:.1f}M | {size.tokens / 1e6:g}M, {size.tokens_per_step:,} | {optimizer} | "
                f"{swept} | {rate:.2g} | {auto:.2g} | {above} |"
            )
    return "\n".join(rows)


def table_of_steps(points: list[Point]) -> str:
    rows = ["| model | AdamW's best loss | steps: Muon's loss | steps Muon needs |", "|---|---|---|---|"]
    for name, size in SIZES.items():
        if any(next_rate(name, optimizer, points) is not None for optimizer in ("adamw", "muon")):
            continue
        found = {1.0: min(point.loss for point in sweep_of(name, "muon", points))}
        found |= {share: p.loss for share in SHARES for p in sweep_of(name, "muon", points, share)}
        shown = ", ".join(f"{share:.0%}: {loss:.3f}" for share, loss in found.items())
        needed = steps_needed(name, points)
        adamw = best_of(sweep_of(name, "adamw", points))[1]
        text = f"below {min(found):.0%}" if needed is None and min(found.values()) < adamw else "more than AdamW"
        rows.append(
            f"| {size.parameters / 1e6:.1f}M | {adamw:.3f} | {shown} | {f'{needed:.0%}' if needed else text} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", help="folder of shards with a validation split and a 4,096-token vocabulary")
    parser.add_argument("--minutes", type=float, default=60, help="stop starting new runs after this many minutes")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--optimizers", nargs="+", choices=("adamw", "muon"), default=["adamw", "muon"])
    parser.add_argument("--table", action="store_true", help="print existing results without training")
    given = parser.parse_args()
    if given.table:
        print(table(read_points()), table_of_steps(read_points()), sep="\n\n")
        return
    if not given.shards:
        parser.error("--shards is required unless you use --table")
    end = time.monotonic() + 60 * given.minutes
    for name in given.sizes:
        while time.monotonic() < end:
            points = read_points()
            wanted = {o: rate for o in given.optimizers if (rate := next_rate(name, o, points)) is not None}
            if wanted:  # continue with the optimizer that has fewer points
                optimizer = min(wanted, key=lambda o: len(sweep_of(name, o, points)))
                rate = wanted[optimizer]
                share = 1.0
            elif len(given.optimizers) == 2 and (shorter := next_share(name, points)):
                optimizer = "muon"
                rate, share = shorter
            else:
                break
            point = train(name, optimizer, rate, share, os.path.abspath(given.shards))
            write_points([*read_points(), point])
            print(point, flush=True)


if __name__ == "__main__":
    main()
