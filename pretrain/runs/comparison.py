"""Runs as text: a one-page summary, a side-by-side comparison, a CSV export."""

import csv
import itertools
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pretrain.runs.history import Event, History, is_number
from pretrain.runs.run_folder import read_json
from pretrain.runs.status import RunStatus, state_text
from pretrain.units import bytes_text, count_text, duration_text, table

RECORDS = {"config.yaml": "", "model.json": "model.", "strategy.json": "strategy.", "environment.json": "environment."}
"""{file of a run's folder: what its settings are prefixed with}"""
SMOOTHED_LINES = 10
SHOWN_STEPS = 10
EXPORTED = ("train", "validation", "evaluation")
WIDEST_CELL = 44


def flatten_settings(values: Any, prefix: str = "") -> dict[str, Any]:
    """{'a': {'b': 1}} -> {'a.b': 1}; lists of plain values stay whole, others go by position."""
    if isinstance(values, dict) and values:
        return {
            key: leaf
            for name, value in values.items()
            for key, leaf in flatten_settings(value, f"{prefix}{name}.").items()
        }
    if isinstance(values, list) and any(isinstance(value, dict | list) for value in values):
        return flatten_settings(dict(enumerate(values)), prefix)
    return {prefix.removesuffix("."): values}


def recorded_settings(run: Path) -> dict[str, Any]:
    """Every setting that the run's folder records, by dotted name; files that are missing are left out."""
    settings = {}
    for name, prefix in RECORDS.items():
        settings |= {f"{prefix}{key}": value for key, value in flatten_settings(_record(run / name)).items() if key}
    return settings


def _record(path: Path) -> dict:
    if path.suffix != ".yaml":
        return read_json(path)
    import yaml

    try:
        values = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}


def setting_differences(settings: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """{name: its value in each run} of the settings that differ; None where a run has no such setting."""
    names = dict.fromkeys(itertools.chain.from_iterable(settings))
    rows = {name: [of_run.get(name) for of_run in settings] for name in names}
    return {name: row for name, row in rows.items() if any(value != row[0] for value in row)}


def smoothed_loss(history: History) -> float | None:
    """Mean training loss of the last logged lines: a single step's is too noisy."""
    losses = [e["loss"] for e in history.of("train")[-SMOOTHED_LINES:] if is_number(e.get("loss"))]
    return statistics.fmean(losses) if losses else None


def results_of(history: History, status: RunStatus) -> dict[str, str]:
    """What a run came to, by name, as text."""
    train = history.of("train")
    last = train[-1] if train else {}
    results = {
        "state": state_text(status),
        "step": f"{status.step:,}" if status.step is not None else None,
        "of steps": f"{status.total_steps:,}" if status.total_steps else None,
        "tokens": f"{last['tokens']:,}" if is_number(last.get("tokens")) else None,
        f"training loss, last {SMOOTHED_LINES} lines": _text(smoothed_loss(history), "{:.4f}"),
    }
    for source, events in history.validation().items():
        measured = [e for e in events if is_number(e.get("loss"))]
        if measured:
            best = min(measured, key=lambda e: e["loss"])
            results[f"validation {source}"] = _validation_text(measured[-1])
            results[f"best validation {source}"] = f"{best['loss']:.4f} at step {best['step']:,}"
    for name, scores in history.scores().items():
        results[name] = _text(scores[-1].value, "{:.4f}") + _text(scores[-1].standard_error, " ± {:.4f}", "")
    results |= _costs(history, train)
    return {name: text for name, text in results.items() if text is not None}


def _validation_text(event: Event) -> str:
    per_byte = f", {event['bits_per_byte']:.4f} bits/byte" if is_number(event.get("bits_per_byte")) else ""
    return f"{event['loss']:.4f}{per_byte}"


def _costs(history: History, train: list[Event]) -> dict[str, str | None]:
    def median(name: str) -> float | None:
        values = [e[name] for e in train if is_number(e.get(name))]
        return statistics.median(values) if values else None

    memory = max((e["peak_memory_bytes"] for e in train if is_number(e.get("peak_memory_bytes"))), default=None)
    counts = {name: len(history.of(name)) for name in ("resume", "rollback", "spike", "skip", "warning")}
    return {
        "running time": duration_text(history.events[-1]["hours"] * 3600),
        "tokens per second, median": _text(median("tokens_per_second"), "{:,.0f}"),
        "MFU, median": _text(median("mfu"), "{:.1%}"),
        "peak memory": bytes_text(memory) if memory is not None else None,
        **{f"{name} events": str(count) for name, count in counts.items() if count},
    }


def _text(value: float | None, form: str, missing: str | None = None) -> str | None:
    return form.format(value) if is_number(value) else missing


def comparison_text(runs: list[tuple[History, RunStatus]]) -> str:
    """Settings that differ and results, one column per run."""
    histories = [history for history, _ in runs]
    header = ["", *names_of(histories)]
    settings = [recorded_settings(history.folder) for history in histories]
    differ = setting_differences(settings)
    # Where a run writes is its name, which heads the column.
    shown = {name: row for name, row in differ.items() if name not in ("output", "model.transformers_version")}
    lines = ["settings that differ"]
    if shown:
        rows = [[name, *(_cell(value) for value in row)] for name, row in shown.items()]
        lines.append(table([header, *rows]))
    else:
        lines.append("  none")
    results = [results_of(history, status) for history, status in runs]
    names = dict.fromkeys(itertools.chain.from_iterable(results))
    rows = [[name, *(result.get(name, "-") for result in results)] for name in names]
    return "\n".join([*lines, "", "results", table([header, *rows])])


def names_of(histories: list[History]) -> list[str]:
    """A name for each run: the folder's own, or its path where two share one."""
    names = [history.name for history in histories]
    return [str(h.folder) if names.count(h.name) > 1 else h.name for h in histories]


def _cell(value: Any) -> str:
    text = "-" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= WIDEST_CELL else f"{text[: WIDEST_CELL - 3]}..."


def summary_text(history: History, status: RunStatus) -> str:
    """A run on one page: what it is, what it came to, what happened to it."""
    settings = recorded_settings(history.folder)
    start = history.last("start")
    parameters = f", {start['parameters']:,} parameters" if is_number(start.get("parameters")) else ""
    data = [value for key, value in settings.items() if key.startswith("data.") and key.endswith(".shards")]
    optim = {key: settings.get(f"optim.{key}") for key in ("name", "learning_rate", "schedule", "warmup_steps")}
    batch, length = settings.get("batch.tokens_per_step"), settings.get("data.sequence_length", "?")
    machine = ", ".join(
        f"{settings[key]}{word}"
        for key, word in (("strategy.strategy", ""), ("strategy.ranks", " processes"), ("environment.device", ""))
        if settings.get(key) is not None
    )
    about = {
        "model": f"{settings.get('model', '?')}{parameters}",
        "data": f"{' + '.join(dict.fromkeys(map(str, data))) or '?'}, {length} tokens per sequence",
        "batch": f"{batch:,} tokens per step" if is_number(batch) else "?",
        "optimizer": f"{optim['name']}, learning rate {optim['learning_rate']}, {optim['schedule']}, "
        f"{optim['warmup_steps']} warmup steps",
        "ran on": machine or "?",
        "precision": str(settings.get("strategy.precision", settings.get("precision", "?"))),
        "seed": str(settings.get("seed", "?")),
        "code": str(settings.get("environment.commit", "?"))[:12],
    }
    rows = [[name, value] for name, value in (about | results_of(history, status)).items()]
    return "\n".join([str(history.folder), "", table(rows), "", *_curve_lines(history)])


def _curve_lines(history: History) -> list[str]:
    """The run at some steps, evenly spread."""
    train = [e for e in history.of("train") if is_number(e.get("loss"))]
    if not train:
        return ["no step is logged yet"]
    count = min(SHOWN_STEPS, len(train))
    picked = sorted({round(n * (len(train) - 1) / max(1, count - 1)) for n in range(count)})
    rows = [["step", "tokens", "loss", "grad norm", "learning rate", "tok/s", "running time"]]
    for event in (train[number] for number in picked):
        rows.append(
            [
                f"{event['step']:,}",
                count_text(event.get("tokens") or 0),
                f"{event['loss']:.4f}",
                _text(event.get("grad_norm"), "{:.3f}", "-"),
                _text(event.get("learning_rate"), "{:.2e}", "-"),
                _text(event.get("tokens_per_second"), "{:,.0f}", "-"),
                duration_text(event["hours"] * 3600),
            ]
        )
    return [table(rows, right=set(range(7)))]


def write_csv(histories: list[History], path: Path) -> int:
    """Writes every line of the curves as a table, one row per line, `run` and `event` first; returns the rows.

    Columns are the union of the lines' own names; a cell is empty where a line has no such number. Raises OSError.
    """
    rows = [
        {"run": name, **event}
        for name, history in zip(names_of(histories), histories, strict=True)
        for event in history.events
        if event["event"] in EXPORTED
    ]
    columns = _columns(rows)
    unfinished = path.with_name(f".{path.name}.unfinished")
    with open(unfinished, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    unfinished.replace(path)
    return len(rows)


def _columns(rows: Iterable[dict]) -> list[str]:
    first = ["run", "event", "step", "tokens", "hours", "time"]
    found = dict.fromkeys(key for row in rows for key in row)
    return [*first, *(key for key in found if key not in first)]
