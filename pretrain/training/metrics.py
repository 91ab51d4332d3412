"""Logs events from the main rank to metrics.jsonl, train.log, the console and trackers.

metrics.jsonl has one JSON object per line, with `event` as the first key. Non-finite numbers are written as null.
"""

import errno
import json
import math
import os
import resource
import sys
import textwrap
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pretrain.config import RunConfig
from pretrain.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED
from pretrain.model.model_config import rope_in_words
from pretrain.runs.event_log import is_cut, last_position
from pretrain.runs.run_folder import METRICS_FILE
from pretrain.terminal import LIVE_LINE, is_terminal, printable, say, say_stage
from pretrain.units import bytes_text, count_text, duration_text

if TYPE_CHECKING:
    from pretrain.energy import EnergyMeter
    from pretrain.training.trackers import Trackers

SHOWN = {
    "train": "step {step:,}/{total_steps:,} · loss {loss:.4f} · {terms_text} · perplexity {perplexity:.5g} · "
    "lr {learning_rate:.2e} · norm {grad_norm:.3f} · {tokens_per_second:,.0f} tok/s · {mfu_text} · {tokens_text} · "
    "{left_text}",
    "validation": "step {step:,} · validation {source} · loss {loss:.4f} · {average_text} · {stage_text} · "
    "perplexity {perplexity:.2f} · {bits_per_byte:.4f} bits/byte",
    "checkpoint": "step {step:,} · checkpoint {path} · {bytes_text} in {seconds:.1f} s · "
    "training paused {stall_seconds:.2f} s",
    "stage": "step {step:,} · stage {stage}: sequences of {sequence_length:,} tokens · {positions_text} · "
    "{sequences_per_step:,} per step",
    "fetch": "{path} fetched from the mirror {mirror}: {bytes_text} in {seconds:.1f} s",
    "resume": "resumed from {path} at step {step:,}",
    "sample": "step {step:,} · sample:\n{sample_text}",
    "branch": "branched from {path} of {run}",
    "skip": "step {step:,} · skipped: non-finite gradient",
    "spike": "step {step:,} · SPIKE: {message}",
    "divergence": "step {step:,} · DIVERGENCE: {message}",
    "explosion": "step {step:,} · GRADIENT: {message}",
    "rollback": "rolling back to step {to_step:,}: {reason}; {change}",
    "control": "step {step:,} · {command}, requested by {by}",
    "profile": "step {step:,} · profile in {path}: {verdict}",
    "warning": "warning: {message}",
    "end": "{reason}: {step:,} steps and {tokens:,} tokens; {duration} since start; exit status {code}",
}
"""Event formats for the console and train.log. Empty parts between dots are left out. Other events are written only to
metrics.jsonl.
"""

TRACKED = ("train", "validation")
"""Events sent to the trackers."""
ALARMS = ("skip", "spike", "divergence", "explosion", "rollback", "warning")
"""Events shown in yellow on a terminal."""
STEPS_OF_SPEED = 32
"""Number of steps that the progress line's speed is averaged over."""
SECONDS_BETWEEN_DRAWINGS = 0.1


class Throughput:
    """Measures the speed between two log steps, excluding pauses such as validation and checkpoints."""

    def __init__(self):
        self._ends: deque[float] = deque(maxlen=STEPS_OF_SPEED)
        self.pace: float | None = None
        """Expected seconds per step, excluding steps that compile; None if unknown."""
        self._begin()
        self._compiles = True

    def _begin(self) -> None:
        self._start = time.perf_counter()
        self._paused = 0.0
        self._data = 0.0
        self._steps = 0
        self._compiles = False

    def expect_compiling(self) -> None:
        """Excludes the next step from the speed, because it includes compilation."""
        self._ends.clear()
        self._compiles = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time within the context from the speed."""
        start = time.perf_counter()
        yield
        self._paused += time.perf_counter() - start
        self._ends.clear()

    @contextmanager
    def loading_data(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._data += time.perf_counter() - start

    def step_done(self) -> None:
        self._steps += 1
        self._ends.append(time.perf_counter())
        self.pace = self.recent_step_seconds or self.pace

    @property
    def recent_step_seconds(self) -> float | None:
        """Mean seconds per step since the last pause, excluding the first step; None before the second step."""
        steps = len(self._ends) - 1
        return (self._ends[-1] - self._ends[0]) / steps if steps > 0 else None

    def read(self, tokens: int, flops: float, peak_flops: float | None, ranks: int) -> dict[str, float | None]:
        """Returns the speed metrics since the last call. tokens, flops: totals over all ranks since then."""
        seconds = max(time.perf_counter() - self._start - self._paused, 1e-9)
        steps = max(self._steps, 1)
        if not self._compiles:  # the only estimate if every step is followed by a pause
            self.pace = self.recent_step_seconds or seconds / steps
        figures = {
            "tokens_per_second": tokens / seconds,
            "mfu": flops / seconds / (peak_flops * ranks) if peak_flops else None,
            "step_seconds": seconds / steps,
            "data_seconds": self._data / steps,
        }
        self._begin()
        return figures


class LineFile:
    """Append-only text file. If writing fails, warns once and drops the lines instead of raising."""

    def __init__(self, path: Path):
        self.path = path
        # Unbuffered, so that no lines are lost in a crash.
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115
        self._failed = False
        self._is_cut = is_cut(self._file)
        """True if the last line was only partially written."""

    def write(self, line: str) -> None:
        content = b"\n" * self._is_cut + line.encode() + b"\n"
        try:
            written = self._file.write(content)
            self._is_cut = written < len(content)
            if self._is_cut:  # the disk is almost full
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except (OSError, ValueError) as error:  # ValueError: closed by another thread
            if not self._failed:
                say(f"{self.path} cannot be written ({error}); training continues", sys.stderr)
            self._failed = True

    def close(self) -> None:
        self._file.close()


class Metrics:
    """Logs a run's events. On ranks other than the main rank, the methods do nothing.

    Args:
        run: the run folder.
        is_main: True on the main rank.
    """

    def __init__(self, run: Path, *, is_main: bool):
        self.is_main = is_main
        self.total_steps = 0
        """Planned number of steps."""
        self.began = False
        """True after `begin`, on all ranks."""
        self._ended = False
        self.started = time.perf_counter()
        self._trackers: Trackers | None = None
        self._meter: EnergyMeter | None = None
        self._drawn = 0.0
        self.seconds_left: float | None = None
        """Expected time to the end of training; None if unknown."""
        if is_main:
            run.mkdir(parents=True, exist_ok=True)
            self._lines = LineFile(run / METRICS_FILE)
            self._log = LineFile(run / "train.log")
            self._position = last_position(run)
            """Current step and token count, at first those of the previous attempt."""

    def begin(self, config: RunConfig, *, meter: "EnergyMeter | None" = None, facts: dict | None = None) -> None:
        """Starts the progress line and the trackers, which receive `facts` about the run and the config."""
        self.began = True
        self._meter = meter
        if self.is_main and config.trackers:
            from pretrain.training.trackers import Trackers

            self._trackers = Trackers(config.output, config, self.warn, facts)

    @property
    def is_live(self) -> bool:
        """True if this process shows a progress line on a terminal."""
        return self.is_main and self.began and not self._ended and is_terminal(sys.stderr)

    def expect(self, what: str) -> None:
        """Announces a long wait, in the progress line if there is one."""
        if self.is_live:
            LIVE_LINE.show(f"{what} ...")
        elif self.is_main:
            say_stage(what)

    @property
    def draws(self) -> bool:
        """True if the progress line is due for an update, every SECONDS_BETWEEN_DRAWINGS."""
        return time.perf_counter() - self._drawn >= SECONDS_BETWEEN_DRAWINGS and self.is_live

    def show(self, line: str) -> None:
        """Updates the progress line, if it `draws`."""
        if self.draws:
            self._drawn = time.perf_counter()
            LIVE_LINE.show(line)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Shows `what` in the progress line within the context."""
        if not self.is_live:
            yield
            return
        before = LIVE_LINE.text
        LIVE_LINE.show(f"step {self._position['step']:,} · {what} ...")
        try:
            yield
        finally:
            LIVE_LINE.show(before)

    def write(self, event: str, **values: Any) -> None:
        """Writes an event to metrics.jsonl and, as text, to train.log and the console."""
        if not self.is_main:
            return
        line = {"event": event, **values, "time": round(time.time(), 3)}
        self._lines.write(json.dumps(finite(line), allow_nan=False))
        if event in SHOWN:
            failed = values.get("code") not in (None, EXIT_DONE, EXIT_PREEMPTED, EXIT_INTERRUPTED)
            color = "red" if failed else "yellow" if event in ALARMS else None
            stream = sys.stderr if values.get("code") else sys.stdout
            text = self._in_words(event, values)
            self._log_line(text)
            say(text, stream, color)
        if event in TRACKED and self._trackers is not None:
            self._trackers.log_event(event, values)

    def warn(self, message: str, **values: Any) -> None:
        """Writes a warning event."""
        self.write("warning", **values, message=message)

    def energy(self) -> dict[str, float]:
        """Returns {'joules': energy used since the last call}; {} if unknown."""
        joules = self._meter and self._meter.joules()
        return {} if joules is None else {"joules": joules}

    def track(self, numbers: dict[str, float]) -> None:
        """Sends late metrics to the trackers, at the current step because trackers reject earlier steps."""
        if self._trackers is not None:
            self._trackers.log(numbers, step=self._position["step"])

    def say_scores(self, step: int, task: str, measures: dict[str, Any]) -> None:
        """Writes a task's scores to the console and train.log, without standard errors."""
        scores = [
            f"{name} {value:.4f}"
            for name, value in measures.items()
            if isinstance(value, float) and not name.endswith("_stderr")
        ]
        self.say(f"step {step:,} · {task} · {' · '.join(scores)}")

    def say(self, text: str) -> None:
        """Writes text to the console and train.log."""
        if self.is_main:
            self._log_line(text)
            say(text)

    def _log_line(self, text: str) -> None:
        self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")

    def set_position(self, step: int, tokens: int) -> None:
        """Sets the current step and token count, which the end event reports."""
        self._position = {"step": step, "tokens": tokens}

    def end(self, code: int, reason: str, **values: Any) -> None:
        """Writes the end event and closes all outputs. Later calls do nothing."""
        if not self.is_main or self._ended:
            return
        self._ended = True
        LIVE_LINE.clear()
        seconds = time.perf_counter() - self.started
        self.write("end", reason=reason, code=code, **{**self._position, **values}, seconds=seconds, **self.energy())
        if self._trackers is not None:
            self._trackers.finish()
        self._lines.close()
        self._log.close()

    def _in_words(self, event: str, values: dict[str, Any]) -> str:
        texts = {**values, "total_steps": self.total_steps}
        if event == "train":
            left = self.seconds_left
            texts["left_text"] = f"{duration_text(left)} left" if left is not None else ""
            texts["mfu_text"] = f"MFU {values['mfu']:.1%}" if values.get("mfu") else ""
            texts["tokens_text"] = f"{count_text(values['tokens'])} tokens"
            terms = {name: value for name, value in values.items() if name.startswith("loss_")}
            texts["terms_text"] = " · ".join(f"{name} {value:.4g}" for name, value in terms.items())
        elif event == "validation":
            length = values.get("stage_sequence_length")
            texts["stage_text"] = f"at {length:,} tokens {values['stage_loss']:.4f}" if length else ""
            texts["average_text"] = f"average weights {values['average_loss']:.4f}" if "average_loss" in values else ""
        elif event in ("checkpoint", "fetch"):
            texts["bytes_text"] = bytes_text(values["bytes"])
        elif event == "stage":
            texts["positions_text"] = rope_in_words(values["rope_parameters"])
        elif event == "sample":
            texts["sample_text"] = textwrap.indent(printable(values["text"]), "  ")
        elif event == "end":
            texts["duration"] = duration_text(values["seconds"])
        parts = [part.format(**texts) for part in SHOWN[event].split(" · ")]
        return " · ".join(filter(None, parts))


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the process's peak GPU memory, or its peak resident memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def finite(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON doesn't support, with None, also inside dicts and lists."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
