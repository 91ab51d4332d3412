"""Reads the events in metrics.jsonl for the trainer."""

import json
import os
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from typing import Any

from pretrain.runs.run_folder import METRICS_FILE

CURVES = frozenset({"train", "validation", "evaluation", "sample", "skip", "diagnostics", "stage"})
"""Events that describe the model at a step. Other events stay valid after a rollback."""
END_BYTES = 1 << 19
"""Size of the part of a log that `last_events` reads, about 2,500 lines."""
MOST_DIGITS = 300

Event = dict[str, Any]


def read_metrics(run: Path) -> list[Event]:
    """Returns a run's events in log order, including repeated steps. Returns [] if there is no log."""
    try:
        with open(run / METRICS_FILE, "rb") as file:
            return parse_lines(file)
    except FileNotFoundError:
        return []


def to_int(text: str) -> int:
    """Parses an integer. Raises ValueError if it may be too large for a float, which no logged number is."""
    if len(text) > MOST_DIGITS:
        raise ValueError
    return int(text)


def parse_lines(lines: Iterable[bytes]) -> list[Event]:
    """Parses events from a log's lines. Skips truncated and invalid lines."""
    events = []
    for line in lines:
        try:
            event = json.loads(line, parse_int=to_int)
        except ValueError:
            continue
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            continue
        if event["event"] not in CURVES or isinstance(event.get("step"), int | None):
            events.append(event)
    return events


def is_cut(log: FileIO) -> bool:
    """Returns True if a crash has truncated the last line of a log that is open for appending."""
    size = log.tell()
    return size > 0 and os.pread(log.fileno(), 1, size - 1) != b"\n"


def last_events(run: Path) -> list[Event]:
    """Returns the events in the last END_BYTES of the log, in log order."""
    with open(run / METRICS_FILE, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - END_BYTES))
        return parse_lines(file)


def last_position(run: Path) -> dict[str, int]:
    """Returns {step, tokens} of the newest event that contains both, or zeros. Reads only the end of the log."""
    known = [event for event in last_events(run) if {"step", "tokens"} <= event.keys()]
    return {name: known[-1][name] if known else 0 for name in ("step", "tokens")}
