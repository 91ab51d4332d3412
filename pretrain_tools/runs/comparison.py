"""Shows runs as text: a one-page summary, a side-by-side comparison, a CSV export."""

import csv
import itertools
import json
import os
import statistics
from pathlib import Path
from typing import Any

from pretrain.errors import InputError
from pretrain.runs.run_folder import read_config, read_json
from pretrain.units import bytes_text, count_text, counted, duration_text, energy_text, table
from pretrain_tools.preparation.cleaning.decontamination import contamination_text
from pretrain_tools.runs.history import History, is_number, read_history, require_runs
from pretrain_tools.runs.status import RunStatus, number_text, read_status, state_text

SMOOTHED_LINES = 10
SHOWN_STEPS = 10
EXPORTED = ("train", "validation", "evaluation")
WIDEST_CELL = 44


def require_writable(path: Path) -> None:
    """Raises InputError if a file cannot be created at this path."""
    folder = path.parent
    if not folder.is_dir():
        raise InputError(f"--output {path}: {folder} is not a folder; create it, or choose another path")
    if not os.access(folder, os.W_OK):
        raise InputError(f"--output {path}: {folder} is not writable; choose another path")
    if path.is_dir():
        raise InputError(f"--output {path}: is a folder; give a file name in it, such as {path / 'plot'}")


def flatten_settings(values: Any, prefix: str = "") -> dict[str, Any]:
    """Flattens nested settings to dotted names: {'a': {'b': 1}} becomes {'a.b': 1}.

    Lists of plain values stay whole; lists of dicts or lists are flattened by index.
    """
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
    """Reads every setting that the run's folder records, by dotted name; missing files are skipped."""
    records = {name: read_json(run / f"{name}.json") for name in ("model", "strategy", "environment")}
    # `model` may be a plain path in config.yaml, while the keys of model.json start with "model.": both stay.
    found = {**flatten_settings(read_config(run)), **flatten_settings({k: v for k, v in records.items() if v})}
    return {name: value for name, value in found.items() if name}


def setting_differences(settings: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Returns {name: value in each run} for the settings that differ; None if a run has no such setting."""
    names = dict.fromkeys(itertools.chain.from_iterable(settings))
    rows = {name: [of_run.get(name) for of_run in settings] for name in names}
    return {name: row for name, row in rows.items() if any(value != row[0] for value in row)}


def smoothed_loss(history: History) -> float | None:
    """Computes the mean training loss of the last SMOOTHED_LINES logged lines; one step's loss is too noisy."""
    losses = [e["loss"] for e in history.of("train")[-SMOOTHED_LINES:] if is_number(e.get("loss"))]
    return statistics.fmean(losses) if losses else None


def results_of(history: History, status: RunStatus) -> dict[str, str]:
    """Formats the results of a run: {name: text}, without those that were not measured."""
    results = {
        "state": state_text(status),
        "step": _text(status.step, "{:,}"),
        "of steps": _text(status.total_steps or None, "{:,}"),
        "tokens": _text(history.last("train").get("tokens"), "{:,}"),
        f"training loss, last {SMOOTHED_LINES} lines": _text(smoothed_loss(history), "{:.4f}"),
    }
    for source, events in history.validation().items():
        measured = [e for e in events if is_number(e.get("loss"))]
        if measured:
            last = measured[-1]
            best = min(measured, key=lambda e: e["loss"])
            per_byte = _text(last.get("bits_per_byte"), ", {:.4f} bits/byte") or ""
            results[f"validation {source}"] = f"{last['loss']:.4f}{per_byte}"
            results[f"validation {source}, average"] = _text(last.get("average_loss"), "{:.4f}")
            results[f"best validation {source}"] = f"{best['loss']:.4f} at step {best['step']:,}"
    for name, scores in history.scores().items():
        results[name] = f"{scores[-1].value:.4f}" + (_text(scores[-1].standard_error, " ± {:.4f}") or "")
    peaks = [event.get("peak_memory_bytes") for event in history.of("train")]
    memory = max(filter(is_number, peaks), default=None)
    results |= {
        "running time": duration_text(history.events[-1]["hours"] * 3600),
        "tokens per second, median": _text(history.median("tokens_per_second"), "{:,.0f}"),
        "MFU, median": _text(history.median("mfu"), "{:.1%}"),
        "peak memory": bytes_text(memory) if memory is not None else None,
        "energy": _energy(history),
    }
    for name in ("resume", "rollback", "spike", "skip", "warning"):
        results[f"{name} events"] = str(len(history.of(name)) or "") or None
    return {name: text for name, text in results.items() if text is not None}


def _energy(history: History) -> str | None:
    if history.joules is None:
        return None
    grid = flatten_settings(read_config(history.folder)).get("energy.grid_grams_per_kwh")
    return energy_text(history.joules, history.last("start").get("energy"), grid)


def _text(value: float | None, form: str) -> str | None:
    return form.format(value) if is_number(value) else None


def print_comparison(folders: list[Path]) -> None:
    """Prints differing settings and results. Raises InputError for fewer than two runs, or a folder that is no run."""
    if len(folders) < 2:
        raise InputError(f"compare {folders[0]}: only one run given; give two or more, or use summary")
    print(comparison_text([(read_history(run), read_status(run)) for run in require_runs(folders)]))


def comparison_text(runs: list[tuple[History, RunStatus]]) -> str:
    """Formats the differing settings and the results, one column per run."""
    histories = [history for history, _ in runs]
    header = ["", *names_of(histories)]
    differ = setting_differences([recorded_settings(history.folder) for history in histories])
    # The output folder always differs, and is already the column's header.
    shown = {name: row for name, row in differ.items() if name not in ("output", "model.transformers_version")}
    settings = table([header, *([name, *map(_cell, row)] for name, row in shown.items())]) if shown else "  none"
    results = [results_of(history, status) for history, status in runs]
    names = dict.fromkeys(itertools.chain.from_iterable(results))
    rows = [[name, *(result.get(name, "-") for result in results)] for name in names]
    return "\n".join(["settings that differ", settings, "", "results", table([header, *rows])])


def names_of(histories: list[History]) -> list[str]:
    """Returns a name for each run: the folder's name, or its path if two runs share that name."""
    names = [history.folder.name for history in histories]
    return [str(h.folder) if names.count(h.folder.name) > 1 else h.folder.name for h in histories]


def _cell(value: Any) -> str:
    text = "-" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= WIDEST_CELL else f"{text[: WIDEST_CELL - 3]}..."


def summary_text(history: History, status: RunStatus) -> str:
    """Formats a one-page summary of a run: settings, results, loss curve."""
    settings = recorded_settings(history.folder)
    start = history.last("start")
    total = start.get("parameters")
    active = start.get("active_parameters")
    parameters = _text(total, ", {:,} parameters") or ""
    # Only MoE models have fewer active parameters than parameters.
    parameters += (_text(active, ", {:,} active") or "") if active != total else ""
    data = [str(value) for key, value in settings.items() if key.startswith("data.") and key.endswith(".shards")]
    optim = {key: settings.get(f"optim.{key}") for key in ("name", "learning_rate", "schedule", "warmup_steps")}
    ranks = settings.get("strategy.ranks")
    processes = counted(ranks, "process") if ranks is not None else None
    machine = (settings.get("strategy.strategy"), processes, settings.get("environment.device"))
    kept_out = {
        contamination_text(row): None
        for record in read_json(history.folder / "data.json").values()
        for row in record.get("contamination") or []
    }
    about = {
        "model": f"{settings.get('model', settings.get('model.config', '?'))}{parameters}",
        "data": f"{' + '.join(dict.fromkeys(data)) or '?'}, {settings.get('data.sequence_length', '?')} tokens per "
        "sequence",
        "batch": _text(settings.get("batch.tokens_per_step"), "{:,} tokens per step") or "?",
        "optimizer": f"{optim['name']}, learning rate {optim['learning_rate']}, {optim['schedule']}, "
        f"{optim['warmup_steps']} warmup steps",
        "ran on": ", ".join(filter(None, machine)) or "?",
        "precision": str(settings.get("strategy.precision", settings.get("precision", "?"))),
        "seed": str(settings.get("seed", "?")),
        "code": str(settings.get("environment.commit", "?"))[:12],
        **({"kept out of the data": "; ".join(kept_out)} if kept_out else {}),
        **results_of(history, status),
    }
    return "\n".join([str(history.folder), "", table(list(map(list, about.items()))), "", _curve_text(history)])


def _curve_text(history: History) -> str:
    """Formats a table of up to SHOWN_STEPS evenly spaced steps."""
    train = [e for e in history.of("train") if is_number(e.get("loss"))]
    if not train:
        return "no steps logged yet"
    count = min(SHOWN_STEPS, len(train))
    picked = sorted({round(n * (len(train) - 1) / max(1, count - 1)) for n in range(count)})
    header = ["step", "tokens", "loss", "grad norm", "learning rate", "tok/s", "running time"]
    rows = [
        [
            f"{event['step']:,}",
            count_text(event.get("tokens") or 0),
            f"{event['loss']:.4f}",
            number_text(event.get("grad_norm"), "{:.3f}"),
            number_text(event.get("learning_rate"), "{:.2e}"),
            number_text(event.get("tokens_per_second"), "{:,.0f}"),
            duration_text(event["hours"] * 3600),
        ]
        for event in (train[number] for number in picked)
    ]
    return table([header, *rows], right=set(range(7)))


def export_runs(folders: list[Path], path: Path) -> None:
    """Writes every logged line as CSV. Raises InputError for a folder that is no run, or an unwritable path."""
    runs = require_runs(folders)
    require_writable(path)
    print(f"{path}: {write_csv([read_history(run) for run in runs], path):,} rows")


def write_csv(histories: list[History], path: Path) -> int:
    """Writes the logged lines of all runs as CSV, one row per line, and returns the number of rows.

    Columns are `run`, `event`, then the union of the lines' keys; a cell is empty if its line lacks the key. Raises
    OSError.
    """
    rows = [
        {"run": name, **event}
        for name, history in zip(names_of(histories), histories, strict=True)
        for event in history.events
        if event["event"] in EXPORTED
    ]
    columns = dict.fromkeys(["run", "event", "step", "tokens", "hours", "time", *itertools.chain.from_iterable(rows)])
    # Write to a temporary name and rename: a script may read the old table during a new export.
    unfinished = path.with_name(f".{path.name}.unfinished")
    with open(unfinished, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    unfinished.replace(path)
    return len(rows)
