"""One dict per event, to metrics.jsonl, train.log, the console and the trackers. Only the main rank writes.

metrics.jsonl has one JSON object per line, `event` first; numbers that are not finite are written as null.
"""

import json
import math
import os
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
from pretrain.runs.history import read_end
from pretrain.runs.run_folder import METRICS_FILE
from pretrain.training.trackers import Trackers
from pretrain.units import bytes_text, count_text, duration_text

SHOWN = {
    "train": "step {step:,}/{total_steps:,} · loss {loss:.4f} · lr {learning_rate:.2e} · norm {grad_norm:.3f} · "
    "{tokens_per_second:,.0f} tok/s{mfu_text} · {tokens_text} · {time_left} left",
    "validation": "step {step:,} · validation {source} · loss {loss:.4f} · perplexity {perplexity:.2f} · "
    "{bits_per_byte:.4f} bits/byte",
    "checkpoint": "step {step:,} · checkpoint {path} · {bytes_text} in {seconds:.1f} s, "
    "training paused {stall_seconds:.2f} s",
    "resume": "resumed from {path} at step {step:,}",
    "sample": "step {step:,} · {text!r}",
    "branch": "branched from {path} of {run}; the learning rate decays from here",
    "skip": "step {step:,} · skipped: non-finite gradient",
    "spike": "step {step:,} · SPIKE: {message}",
    "divergence": "step {step:,} · DIVERGENCE: {message}",
    "explosion": "step {step:,} · GRADIENT: {message}",
    "rollback": "rolling back to step {to_step:,}: {reason}; {change}",
    "control": "step {step:,} · {command}, requested by runs.py",
    "warning": "warning: {message}",
    "end": "{reason}: {step:,} steps and {tokens:,} tokens; {duration} since start; exit status {code}",
}
"""Events as printed on the console and in train.log; all others go to metrics.jsonl only."""


class Throughput:
    """Speed between two log steps. Time spent paused (validation, checkpoints) does not count."""

    def __init__(self):
        self._start = time.perf_counter()
        self._paused = self._data = 0.0
        self._steps = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around work that is not training."""
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


class LineFile:
    """A file that lines are appended to. A full disk costs lines, with one warning, and never the run."""

    def __init__(self, path: Path):
        self.path = path
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115
        self._failed = False
        if self._file.tell() and os.pread(self._file.fileno(), 1, self._file.tell() - 1) != b"\n":
            self.write("")  # a crash cut the last line short: the next must not continue it

    def write(self, line: str) -> None:
        try:
            self._file.write(line.encode() + b"\n")
        except (OSError, ValueError) as error:  # ValueError: closed by another thread that is ending the run
            if not self._failed:
                print(f"{self.path} cannot be written ({error}); training continues", file=sys.stderr, flush=True)
            self._failed = True

    def close(self) -> None:
        self._file.close()


class Metrics:
    """Where events go. Calls on other ranks than the main one do nothing.

    Args:
        run: the run's folder.
        is_main: whether this process writes and prints.
    """

    def __init__(self, run: Path, *, is_main: bool):
        self.is_main, self._run, self.total_steps = is_main, run, 0
        self.began, self._ended = False, False
        """began: the run has started training; the same on all ranks."""
        self._started, self._trackers = time.perf_counter(), None
        self._stand: dict[str, int] | None = None
        if is_main:
            run.mkdir(parents=True, exist_ok=True)
            self._lines, self._log = LineFile(run / METRICS_FILE), LineFile(run / "train.log")
            self._bar = tqdm(unit="step", dynamic_ncols=True, disable=True)

    def begin(self, config: RunConfig, *, total_steps: int, first_step: int) -> None:
        """Called before training: starts the progress bar, and the trackers with the whole config."""
        self.began = True
        if not self.is_main:
            return
        self.total_steps, hidden = total_steps, not sys.stderr.isatty()
        self._bar = tqdm(total=total_steps, initial=first_step, unit="step", dynamic_ncols=True, disable=hidden)
        self._trackers = Trackers(config.output, config, lambda text: self.write("warning", message=text))

    def change_total(self, total_steps: int) -> None:
        """The run has become shorter or longer."""
        if self.is_main:
            self.total_steps = self._bar.total = total_steps

    def write(self, event: str, **values: Any) -> None:
        """Writes an event to metrics.jsonl, and as text to train.log and the console."""
        if not self.is_main:
            return
        line = {"event": event, **values, "time": round(time.time(), 3)}
        self._lines.write(json.dumps(finite(line), allow_nan=False))
        if event in SHOWN:
            self.say(self._in_words(event, values), is_error=bool(values.get("code")))
        numbers = {
            f"{event}/{name}" + (f"/{values['source']}" if "source" in values else ""): value
            for name, value in values.items()
            if isinstance(value, int | float) and name != "step"
        }
        if "step" in values and numbers and self._trackers is not None:
            self._trackers.log(numbers, step=values["step"])

    def track(self, numbers: dict[str, float]) -> None:
        """Sends late figures to the trackers, at the current step, since trackers accept no earlier one."""
        if self._trackers is not None:
            self._trackers.log(numbers, step=self._where()["step"])

    def say(self, text: str, is_error: bool = False) -> None:
        """Text for the console, above the progress bar, and for train.log."""
        if not self.is_main:
            return
        self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")
        if self._bar.disable:
            print(text, file=sys.stderr if is_error else sys.stdout, flush=True)
        else:
            self._bar.write(text)

    def stands_at(self, step: int, tokens: int) -> None:
        """Sets steps and tokens so far, for the progress bar and the end event."""
        if self.is_main:
            self._stand = {"step": step, "tokens": tokens}
            if not self._bar.disable:
                self._bar.update(step - self._bar.n)

    def _where(self) -> dict[str, int]:
        """Steps and tokens so far; if this attempt ends before they are known, those of the previous attempt."""
        if self._stand is None:
            known = [event for event in read_end(self._run) if {"step", "tokens"} <= event.keys()]
            self._stand = {name: known[-1][name] if known else 0 for name in ("step", "tokens")}
        return self._stand

    def end(self, code: int, reason: str, **values: Any) -> None:
        """Writes the last event of this attempt and closes everything. Of two simultaneous ends the first counts."""
        if not self.is_main or self._ended:
            return
        self._ended = True
        seconds = time.perf_counter() - self._started
        self.write("end", reason=reason, code=code, **{**self._where(), **values}, seconds=seconds)
        self._bar.close()
        if self._trackers is not None:
            self._trackers.finish()
        self._lines.close()
        self._log.close()

    def _in_words(self, event: str, values: dict[str, Any]) -> str:
        extra: dict[str, Any] = {"total_steps": self.total_steps}
        if event == "train":
            extra["time_left"] = duration_text((self.total_steps - values["step"]) * values["step_seconds"])
            extra["mfu_text"] = f" · MFU {values['mfu']:.1%}" if values.get("mfu") else ""
            extra["tokens_text"] = f"{count_text(values['tokens'])} tokens"
        if event == "checkpoint":
            extra["bytes_text"] = bytes_text(values["bytes"])
        if event == "end":
            extra["duration"] = duration_text(values["seconds"])
        return SHOWN[event].format(**{**extra, **values})


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of the process: on the GPU if there is one, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def finite(values: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
