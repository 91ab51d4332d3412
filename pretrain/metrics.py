"""One dict per event, to metrics.jsonl, train.log, the console and the trackers. Only the main rank writes.

metrics.jsonl has one JSON object per line, `event` first; numbers that are not finite are written as null.
"""

import json
import math
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from pretrain.config import RunConfig

SHOWN = {
    "train": "step {step:,}/{total_steps:,} · loss {loss:.4f} · lr {learning_rate:.2e} · norm {grad_norm:.3f} · "
    "{tokens_per_second:,.0f} tok/s{mfu_text} · {tokens_text} · {time_left} left",
    "validation": "step {step:,} · validation {source} · loss {loss:.4f} · perplexity {perplexity:.2f} · "
    "{bits_per_byte:.4f} bits/byte",
    "checkpoint": "step {step:,} · checkpoint {path} · {bytes_text} in {seconds:.1f} s",
    "resume": "continues from {path} at step {step:,}",
    "skip": "step {step:,} · {steps} of the last steps skipped: the gradient norm was not finite",
    "warning": "warning: {message}",
    "end": "{reason} after {steps:,} steps and {tokens:,} tokens in {duration}",
}
"""How an event reads on the console and in train.log; the others are only written to metrics.jsonl."""


class Throughput:
    """Speed between two log steps. Time spent paused (validation, checkpoints) does not count."""

    def __init__(self):
        self._start = time.perf_counter()
        self._paused = self._data = 0.0
        self._steps = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._paused += time.perf_counter() - start

    @contextmanager
    def loading_data(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._data += time.perf_counter() - start

    def step_done(self) -> None:
        self._steps += 1

    def read(
        self, tokens: int, flops_per_token: float, peak_flops: float | None, ranks: int
    ) -> dict[str, float | None]:
        """Figures since the last reading, of `tokens` over all ranks; starts the next interval."""
        seconds = max(time.perf_counter() - self._start - self._paused, 1e-9)
        steps = max(self._steps, 1)
        figures = {
            "tokens_per_second": tokens / seconds,
            "mfu": flops_per_token * tokens / seconds / (peak_flops * ranks) if peak_flops else None,
            "step_seconds": seconds / steps,
            "data_seconds": self._data / steps,
        }
        self.__init__()
        return figures


class Metrics:
    """Where events go. Calls on other ranks than the main one do nothing.

    Args:
        run: the run's folder.
        is_main: whether this process speaks.
        total_steps, first_step: for the progress bar and the time left.
        config: goes to the trackers, whole.
    """

    def __init__(self, run: Path, *, is_main: bool, total_steps: int, first_step: int, config: RunConfig):
        self.is_main, self.total_steps = is_main, total_steps
        self._start, self._first_step = time.perf_counter(), first_step
        self._paused = 0.0
        if not is_main:
            return
        run.mkdir(parents=True, exist_ok=True)
        self._lines = open(run / "metrics.jsonl", "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._log = open(run / "train.log", "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._bar = tqdm(
            total=total_steps, initial=first_step, unit="step", dynamic_ncols=True, disable=not sys.stderr.isatty()
        )
        self._trackers = start_trackers(run, config)

    def write(self, event: str, **values: Any) -> None:
        """One event: a line in metrics.jsonl, and in train.log and on the console in words."""
        if not self.is_main:
            return
        line = {"event": event, **values, "time": round(time.time(), 3)}
        self._lines.write(json.dumps(finite(line), allow_nan=False) + "\n")
        if event in SHOWN:
            self.say(self._in_words(event, values))
        numbers = {
            f"{event}/{name}" + (f"/{values['source']}" if "source" in values else ""): value
            for name, value in values.items()
            if isinstance(value, int | float) and name != "step"
        }
        if "step" in values:
            for tracker in self._trackers:
                tracker.log(numbers, step=values["step"])

    def say(self, text: str) -> None:
        """Words to the console, above the progress bar, and to train.log."""
        if not self.is_main:
            return
        self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        if self._bar.disable:
            print(text, flush=True)
        else:
            self._bar.write(text)

    def step_done(self, step: int, loss: float | None = None) -> None:
        """Moves the progress bar to after `step`."""
        if self.is_main:
            if loss is not None:
                self._bar.set_postfix_str(f"loss {loss:.4f}")
            self._bar.update(step + 1 - self._bar.n)

    def close(self) -> None:
        if self.is_main:
            self._bar.close()
            for tracker in self._trackers:
                tracker.finish()
            self._lines.close()
            self._log.close()

    def _in_words(self, event: str, values: dict[str, Any]) -> str:
        extra: dict[str, Any] = {"total_steps": self.total_steps}
        if event == "train":
            left = (self.total_steps - values["step"]) * values["step_seconds"]
            extra["time_left"] = duration_text(left)
            extra["mfu_text"] = f" · MFU {values['mfu']:.1%}" if values.get("mfu") else ""
            extra["tokens_text"] = f"{count_text(values['tokens'])} tokens"
        if event == "checkpoint":
            extra["bytes_text"] = f"{values['bytes'] / 1e6:,.1f} MB"
        if event == "end":
            extra["duration"] = duration_text(values["seconds"])
        return SHOWN[event].format(**values, **extra)


def start_trackers(run: Path, config: RunConfig) -> list[Any]:
    """accelerate's trackers for the names in the recipe, each knowing the resolved config."""
    if not config.trackers:
        return []
    from accelerate.tracking import TensorBoardTracker, WandBTracker

    make = {
        "wandb": lambda: WandBTracker("groundwork", name=run.name, dir=str(run), resume="allow", id=run_id(run)),
        "tensorboard": lambda: TensorBoardTracker("tensorboard", logging_dir=run),
    }
    trackers = [make[name]() for name in config.trackers]
    for tracker in trackers:
        tracker.start()
        tracker.store_init_configuration(flatten(config.model_dump(mode="json")))
    return trackers


def run_id(run: Path) -> str:
    """The tracker's name for this folder: the same after a restart, so that it continues the same curve."""
    path = run / ".tracker_id"
    if not path.exists():
        path.write_text(f"{run.name}-{time.time_ns():x}")
    return path.read_text()


def flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """{'a': {'b': 1}} -> {'a.b': 1}; lists by position; None as text, which every tracker takes."""
    if isinstance(values, dict | list):
        items = values.items() if isinstance(values, dict) else enumerate(values)
        return {key: leaf for name, value in items for key, leaf in flatten(value, f"{prefix}{name}.").items()}
    return {prefix.removesuffix("."): "null" if values is None else values}


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The events of a run, in order; a last line that a crash cut short is left out."""
    events = []
    with open(run / "metrics.jsonl", encoding="utf-8") as file:
        for line in file:
            try:
                events.append(json.loads(line))
            except ValueError:
                continue
    return events


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory the process has held: on the GPU where there is one, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def finite(values: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def count_text(count: float) -> str:
    """1234567 -> '1.23M'"""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


def duration_text(seconds: float) -> str:
    """3725 -> '1 h 02 min'"""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02d} h"
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
