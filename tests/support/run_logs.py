"""Minimal run folders for tests that read logs."""

import json
import time
from pathlib import Path

CONFIG = """\
model: model_configs/llama_demo.json
output: runs/x
seed: {seed}
precision: bf16
data:
  train:
  - shards: data/demo
    weight: 1.0
  sequence_length: 256
batch:
  tokens_per_step: 2048
optim:
  name: adamw
  learning_rate: {learning_rate}
  schedule: cosine
  warmup_steps: 10
"""


def start_line(step: int = 0, total_steps: int = 100, **more) -> dict:
    return {"event": "start", "step": step, "parameters": 1000, "ranks": 1, "total_steps": total_steps, **more}


def train_line(step: int, loss: float | None = None, **more) -> dict:
    return {
        "event": "train",
        "step": step,
        "tokens": step * 2048,
        "loss": 5.0 - step / 100 if loss is None else loss,
        "grad_norm": 0.5,
        "learning_rate": 1e-3,
        "tokens_per_second": 1000.0,
        "mfu": 0.4,
        "peak_memory_bytes": 2_000_000_000,
        **more,
    }


def validation_line(step: int, loss: float, source: str = "demo") -> dict:
    return {"event": "validation", "step": step, "source": source, "loss": loss, "bits_per_byte": loss / 2}


def end_line(step: int, code: int = 0, reason: str = "done") -> dict:
    return {"event": "end", "reason": reason, "code": code, "step": step, "tokens": step * 2048}


def write_run(folder: Path, lines: list[dict], *, seed: int = 1, learning_rate: float = 1e-3) -> Path:
    """Writes a run folder with these log lines. Lines without a time are spaced one second apart, ending now."""
    folder.mkdir(parents=True, exist_ok=True)
    first = time.time() - len(lines)
    timed = [{**line, "time": line.get("time", first + n)} for n, line in enumerate(lines)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in timed))
    (folder / "config.yaml").write_text(CONFIG.format(seed=seed, learning_rate=learning_rate))
    (folder / "model.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    (folder / "strategy.json").write_text(json.dumps({"strategy": "ddp", "ranks": 2, "precision": "bf16"}))
    (folder / "environment.json").write_text(json.dumps({"commit": "0123456789abcdef", "device": "x86_64"}))
    return folder


def finished_run(folder: Path, **settings) -> Path:
    """Writes a finished run with 100 steps, three validations and an evaluation."""
    lines = [start_line()]
    for step in range(1, 101):
        lines.append(train_line(step))
        if step in (20, 60, 100):
            lines.append(validation_line(step, 4.5 - step / 100))
    lines += [{"event": "checkpoint", "step": 100, "path": "step-00000100", "bytes": 10, "seconds": 0.1}]
    lines += [end_line(100)]
    lines += [
        {"event": "evaluation", "step": 100, "tokens": 204800, "task": "arc_easy", "acc": 0.25, "acc_stderr": 0.01}
    ]
    return write_run(folder, lines, **settings)
