"""Measures the loss at different learning rates for widths 64 to 512, with and without `parametrization: mup`.

    python bench/width_rates.py --shards data/english --minutes 60
    python bench/width_rates.py --table

Trains two-layer Llamas with untied embeddings for sixty steps, narrow models first, and tries learning rates around
the best one so far. Adds the mean loss over the last ten steps to bench/width_rates.json. Run the same command again
to continue.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from transformers import LlamaConfig  # noqa: E402

from pretrain.config import Optim  # noqa: E402
from pretrain.data.shards import ShardReader, open_shards  # noqa: E402
from pretrain.model.build import build_model  # noqa: E402
from pretrain.model.width_roles import initial_scales  # noqa: E402
from pretrain.optim.optimizers import OPTIMIZERS, ModelShapes  # noqa: E402

RESULTS = ROOT / "bench" / "width_rates.json"
WIDTHS = (64, 128, 256, 512)
BASE = 64
STEPS = 60
WARMUP = 6
SEQUENCES = 8
LENGTH = 64
STEP = 2.0
"""Ratio between consecutive learning rates."""
FIRST = {"adamw": 2**-7, "muon": 2**-6}


def train(optimizer: str, transfer: str, width: int, rate: float, reader: ShardReader) -> float:
    """Trains a model and returns its mean loss over the last ten steps, in nats per token.

    The learning rate warms up, then decays linearly to zero.
    """
    config = LlamaConfig(
        vocab_size=reader.manifest.vocabulary_size, hidden_size=width, intermediate_size=5 * width // 2,
        num_hidden_layers=2, num_attention_heads=width // 32, head_dim=32, tie_word_embeddings=False,
    )  # fmt: skip
    settings = Optim(
        name=optimizer,
        learning_rate=rate,
        parametrization=transfer,
        mup_base_width=BASE if transfer == "mup" else None,
    )
    model = build_model(config, seed=1)
    scales = initial_scales(config, BASE) if transfer == "mup" else {}
    # muP scales each weight's initialization with the width.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter *= scales.get(name, 1.0)
    spec = OPTIMIZERS[optimizer](ModelShapes.of(model, settings))
    built = spec.make(list(model.named_parameters()), settings, rate, 1, "cpu")
    random = np.random.default_rng(1)
    losses = []
    ids_BT = np.zeros((SEQUENCES, LENGTH + 1), np.int64)
    for step in range(STEPS):
        for row, start in zip(ids_BT, random.integers(0, reader.tokens - LENGTH, SEQUENCES), strict=True):
            reader.read(int(start), row)
        factor = min((step + 1) / WARMUP, (STEPS - step) / (STEPS - WARMUP))
        for group in built.param_groups:
            group["lr"] = rate * factor * group.get("learning_rate_scale", 1.0)
        batch_BT = torch.from_numpy(ids_BT)
        loss = F.cross_entropy(model(batch_BT[:, :-1]).logits.flatten(0, 1), batch_BT[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        built.step()
        built.zero_grad()
        losses.append(loss.item())
    mean = sum(losses[-10:]) / 10
    # A diverged run gets a large finite loss, because NaN can't be compared or written as JSON.
    return mean if math.isfinite(mean) else 99.0


def next_rate(found: dict[float, float], first: float) -> float | None:
    """Returns the next learning rate to try, or None if those on both sides of the best one have been tried.

    The sweep starts with `first` and extends outward.
    """
    if not found:
        return first
    best = min(found, key=found.get)
    return next((rate for rate in (best * STEP, best / STEP) if rate not in found), None)


def read_results() -> dict[str, dict[str, float]]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def table(results: dict[str, dict[str, float]]) -> str:
    rows = ["| optimizer | parametrization | " + " | ".join(f"width {w}" for w in WIDTHS) + " |", "|---" * 6 + "|"]
    for optimizer in FIRST:
        for transfer in ("none", "mup"):
            cells = []
            for width in WIDTHS:
                found = results.get(f"{optimizer} {transfer} {width}", {})
                best = min(found, key=found.get, default=None)
                cells.append(f"{float(best):.3g}: {found[best]:.3f}" if len(found) > 2 else "")
            rows.append(f"| {optimizer} | {transfer} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", help="folder of shards")
    parser.add_argument("--minutes", type=float, default=60, help="stop starting new runs after this many minutes")
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    parser.add_argument("--table", action="store_true", help="print existing results without training")
    given = parser.parse_args()
    if given.table:
        print(table(read_results()))
        return
    if not given.shards:
        parser.error("--shards is required unless you use --table")
    reader = open_shards(given.shards, "train")
    end = time.monotonic() + 60 * given.minutes
    for width in given.widths:
        for optimizer, first in FIRST.items():
            for transfer in ("mup", "none"):
                key = f"{optimizer} {transfer} {width}"
                while time.monotonic() < end:
                    results = read_results()
                    found = {float(rate): loss for rate, loss in results.get(key, {}).items()}
                    if (rate := next_rate(found, first)) is None:
                        break
                    results.setdefault(key, {})[str(rate)] = round(train(optimizer, transfer, width, rate, reader), 4)
                    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
