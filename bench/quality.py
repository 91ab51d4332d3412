"""Compares how much speed settings and random seeds change the loss curve. Prints Markdown.

    python bench/quality.py --config recipes/demo.yaml --steps 300 --seeds 1 2 3

Trains the recipe with fast settings (bf16, compiled layers, chunked loss, the fastest attention available) and with
plain settings (fp32, not compiled, full logits, eager attention), each with every seed. The seed determines the
initial weights and the data order. `make demo` prepares the demo's data. Exits with status 1 if the settings change
the curve more than the seeds do.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tqdm import tqdm  # noqa: E402

SETTINGS = {
    "fast": {"precision": "bf16", "compile": "regional"},
    "plain": {"precision": "fp32", "compile": "none", "attention": "eager", "loss.backend": "logits"},
}
WINDOW = 20
"""Number of steps over which the training loss is averaged before comparing curves, because single steps are noisy."""


def train(config: str, seed: int, steps: int, settings: dict[str, str], output: Path) -> tuple[list[float], float]:
    """Trains a run. Returns the training loss of every step and the final validation loss."""
    command = [sys.executable, "train.py", "--config", config, "--output", str(output), "--seed", str(seed)]
    command += ["--budget.steps", str(steps), "--logging.every_steps", "1"]
    for name, value in settings.items():
        command += [f"--{name}", value]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(command)} exited with status {result.returncode}\n{result.stderr[-2000:]}")
    events = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "train"]
    return losses, [event["loss"] for event in events if event["event"] == "validation"][-1]


def distance(first: list[float], second: list[float]) -> float:
    """Returns the largest difference between two curves in nats, after averaging over WINDOW steps."""
    means = [
        [statistics.fmean(curve[at : at + WINDOW]) for at in range(0, len(curve) - WINDOW + 1, WINDOW)]
        for curve in (first, second)
    ]
    return max(abs(a - b) for a, b in zip(*means, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="recipes/demo.yaml")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    given = parser.parse_args()
    curves: dict[tuple[str, int], list[float]] = {}
    validation: dict[tuple[str, int], float] = {}
    with tempfile.TemporaryDirectory(prefix="groundwork-bench-") as folder:
        runs = list(itertools.product(SETTINGS, given.seeds))
        for number, (name, seed) in enumerate(tqdm(runs, unit="run")):
            found = train(given.config, seed, given.steps, SETTINGS[name], Path(folder, str(number)))
            curves[name, seed], validation[name, seed] = found
    print(f"Validation loss after {given.steps} steps of {given.config}:\n")
    print(f"| | {' | '.join(f'seed {seed}' for seed in given.seeds)} | mean |\n{'|---' * (len(given.seeds) + 2)}|")
    for name in SETTINGS:
        losses = [validation[name, seed] for seed in given.seeds]
        print(f"| {name} | {' | '.join(f'{loss:.4f}' for loss in losses)} | {statistics.fmean(losses):.4f} |")
    settings = [distance(*(curves[name, seed] for name in SETTINGS)) for seed in given.seeds]
    pairs = list(itertools.combinations(given.seeds, 2))
    seeds = [distance(curves[name, a], curves[name, b]) for name in SETTINGS for a, b in pairs]
    print(f"\nLargest difference between training curves, in nats (means over {WINDOW} steps):")
    print(f"- same seed, different settings: {min(settings):.4f} to {max(settings):.4f}")
    print(f"- same settings, different seeds: {min(seeds):.4f} to {max(seeds):.4f}")
    # The difference between seeds is the noise level, which the settings must not exceed.
    return int(max(settings) > max(seeds))


if __name__ == "__main__":
    sys.exit(main())
