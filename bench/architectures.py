"""Compares Llama, Qwen3, GPT-2, nanochat and DeepOne, each with AdamW and Muon, at equal FLOPs. Prints Markdown.

    python bench/architectures.py --shards data/demo --output runs/architectures --minutes 60

All models have 4 layers of width 128 with about the same number of parameters, and train on as many tokens as the FLOP
budget allows. Each combination is trained with three learning rates and one seed, then with the best learning rate and
the other seeds. The metric is validation bits per byte. Results are saved in OUTPUT/results.json. Run the same command
again to continue an interrupted benchmark.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pretrain.data.shards import read_manifest  # noqa: E402
from pretrain.errors import InputError, run_script  # noqa: E402
from pretrain.files import as_json, write_durably  # noqa: E402
from pretrain.model.model_config import padded_vocabulary  # noqa: E402

LAYERS = 4
WIDTH = 128
HEADS = 2
SEQUENCE_LENGTH = 256
TOKENS_PER_STEP = 2048
LLAMA = {
    "hidden_size": WIDTH,
    "intermediate_size": 344,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": SEQUENCE_LENGTH,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **LLAMA, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **LLAMA, "head_dim": WIDTH // HEADS, "tie_word_embeddings": True},
    "gpt2": {
        "model_type": "gpt2", "n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "n_positions": SEQUENCE_LENGTH,
        "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
    },
    "nanochat": {"model_type": "nanochat", **LLAMA, "intermediate_size": 4 * WIDTH},
    "deepone": {"model_type": "deepone", **LLAMA},
    "deepone, relu2": {"model_type": "deepone", **LLAMA, "feed_forward": "relu2", "intermediate_size": 4 * WIDTH},
}  # fmt: skip
"""Model config by name, without vocab_size. MLPs with ReLU squared or GELU have no gate, so they are wider."""
RATES = {"adamw": (2e-3, 4e-3, 8e-3), "muon": (5e-3, 1e-2, 2e-2)}
"""Peak learning rates to try, around the best ones for a Llama of this size."""


@dataclass(frozen=True)
class Trial:
    """A training run."""

    family: str
    optimizer: str
    learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.family}-{self.optimizer}-{self.learning_rate:g}-{self.seed}".replace(", ", "_")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line. Raises InputError if a number isn't positive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shards", type=Path, default=Path("data/demo"), help="folder of prepared data (default: data/demo)"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/architectures"))
    parser.add_argument("--flops", type=float, default=8e12, help="FLOPs per run (default: 8e12)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="stop starting new runs after this many minutes"
    )
    given = parser.parse_args(arguments)
    problems = [f"--{name}: must be above 0" for name in ("flops", "minutes") if not getattr(given, name) > 0]
    if problems:
        raise InputError(*problems)
    return given


def train(trial: Trial, given: argparse.Namespace) -> dict[str, float]:
    """Trains in a separate process. Returns bits_per_byte and tokens. Raises InputError if training fails."""
    from pretrain.model.build import flops_per_token
    from pretrain.model.model_config import load_model_config

    vocabulary = padded_vocabulary(read_manifest(given.shards).vocabulary_size)
    model = given.output / f"{trial.family.replace(', ', '_')}.json"
    model.write_text(json.dumps(FAMILIES[trial.family] | {"vocab_size": vocabulary}))
    flops = TOKENS_PER_STEP * flops_per_token(load_model_config(str(model)), SEQUENCE_LENGTH)
    # All models get the same FLOPs, so cheaper ones train on more tokens.
    steps = round(given.flops / flops)
    run = given.output / trial.name
    settings = {
        "model": model, "output": run, "seed": trial.seed, "precision": "auto", "compile": "none",
        "data.train": f"[{{shards: {given.shards}}}]", "data.sequence_length": SEQUENCE_LENGTH,
        "budget.steps": steps, "batch.tokens_per_step": TOKENS_PER_STEP, "batch.sequences_per_micro_batch": 8,
        "optim.name": trial.optimizer, "optim.learning_rate": trial.learning_rate,
        "optim.warmup_steps": max(1, steps // 50), "validation.sequences": 256, "checkpoint.keep_last": 1,
    }  # fmt: skip
    recipe = run.with_suffix(".yaml")
    recipe.write_text(_as_yaml(settings))
    done = subprocess.run(
        [sys.executable, "train.py", "--config", str(recipe)], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        raise InputError(f"{trial.name} exited with status {done.returncode}: {done.stderr[-1500:]}")
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [event for event in events if event["event"] == "validation"][-1]
    return {"bits_per_byte": last["bits_per_byte"], "tokens": steps * TOKENS_PER_STEP}


def _as_yaml(settings: dict[str, Any]) -> str:
    """Converts settings with dotted names to YAML."""
    sections: dict[str, list[str]] = {}
    for path, value in settings.items():
        section, _, name = path.partition(".")
        sections.setdefault(section, []).append(f"{name}: {value}" if name else str(value))
    return "".join(
        f"{section}: {{{', '.join(values)}}}\n" if ": " in values[0] else f"{section}: {values[0]}\n"
        for section, values in sections.items()
    )


def main() -> int:
    given = parse_arguments()
    given.output.mkdir(parents=True, exist_ok=True)
    path = given.output / "results.json"
    ends = time.monotonic() + 60 * given.minutes
    results = json.loads(path.read_text()) if path.exists() else {}

    def bits_of(trial: Trial) -> float | None:
        """Returns a trial's bits per byte, training it if necessary, or None if no time is left."""
        if trial.name not in results and time.monotonic() < ends:
            results[trial.name] = train(trial, given)
            write_durably(path, as_json(results))
            print(f"{trial.name}: {results[trial.name]['bits_per_byte']:.4f} bits per byte", file=sys.stderr)
        return results[trial.name]["bits_per_byte"] if trial.name in results else None

    print("| | optimizer | tokens | learning rate | bits per byte | seeds |\n|---|---|---:|---:|---:|---|")
    for family in FAMILIES:
        for optimizer, rates in RATES.items():
            first = {rate: bits_of(Trial(family, optimizer, rate, given.seeds[0])) for rate in rates}
            if None in first.values():
                continue
            best = min(first, key=first.get)
            bits = [bits_of(Trial(family, optimizer, best, seed)) for seed in given.seeds]
            if None in bits:
                continue
            tokens = results[Trial(family, optimizer, best, given.seeds[0]).name]["tokens"]
            spread = f"{min(bits):.3f} to {max(bits):.3f}"
            mean = statistics.fmean(bits)
            print(f"| {family} | {optimizer} | {tokens:,} | {best:g} | {mean:.3f} | {spread} |", flush=True)
    return 0


if __name__ == "__main__":
    run_script(main)
