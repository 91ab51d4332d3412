"""Formats runs as text: a one-page summary, or a side-by-side comparison."""

import itertools
import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

from pretrain.data.data_record import DATA_FILE
from pretrain.errors import InputError
from pretrain.runs.run_folder import read_config, read_json
from pretrain.units import bytes_text, duration_text, leaves, table
from pretrain_tools.preparation.cleaning.decontamination import contamination_text
from pretrain_tools.runs.history import (
    MEASURES,
    History,
    is_number,
    measured,
    read_data_record,
    read_history,
    require_runs,
)
from pretrain_tools.runs.status import RunStatus, read_status, state_text, text_of

SMOOTHED_LINES = 10
WIDEST_CELL = 44
SUMMARIZED = (
    "model", "model.config", "data.sequence_length", "batch.tokens_per_step", "optim.name", "optim.learning_rate",
    "optim.schedule", "optim.warmup_steps", "precision", "seed", "strategy.strategy", "strategy.ranks",
    "strategy.precision", "environment.device", "environment.commit",
)  # fmt: skip
"""Settings shown in a summary, in addition to the data folders."""


flatten_settings = partial(leaves, whole_lists=True)
"""Flattens nested settings to dotted names: {'a': {'b': 1}} becomes {'a.b': 1}. Lists of values are left unchanged."""


def recorded_settings(run: Path) -> dict[str, Any]:
    """Reads all settings recorded by a run, as {dotted name: value}. Skips missing files."""
    records = {name: read_json(run / f"{name}.json") for name in ("model", "strategy", "environment")}
    # `model` may be a path in config.yaml. It doesn't collide with the keys of model.json, which start with "model.".
    found = {**flatten_settings(read_config(run)), **flatten_settings({k: v for k, v in records.items() if v})}
    return {name: value for name, value in found.items() if name}


def warn_of_settings(run: Path) -> None:
    """Prints a warning if the run's settings can't be read."""
    if not read_config(run):
        print(
            f"warning: {run / 'config.yaml'}: is missing or unreadable, so its settings aren't shown", file=sys.stderr
        )


def setting_differences(settings: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Returns {name: list of the runs' values} for settings that differ, with None for missing values."""
    names = dict.fromkeys(itertools.chain.from_iterable(settings))
    rows = {name: [of_run.get(name) for of_run in settings] for name in names}
    return {name: row for name, row in rows.items() if any(value != row[0] for value in row)}


def results_of(history: History, status: RunStatus) -> dict[str, str]:
    """Formats a run's results as {name: text}. Omits missing results."""
    lines = history.of("train")[-SMOOTHED_LINES:]
    losses = [event["loss"] for event in measured(lines, "loss")]
    mean = f"{statistics.fmean(losses):.4f}" if losses else "-"
    if 0 < len(losses) < len(lines):
        mean += f" ({len(lines) - len(losses)} not finite)"
    results = {
        "state": state_text(status),
        "step": text_of(status.step, ","),
        "tokens": text_of(history.last("train").get("tokens"), ","),
        f"training loss, last {SMOOTHED_LINES} lines": mean,
    }
    for source, events in history.validation().items():
        last = events[-1]
        bits = last.get("bits_per_byte")
        per_byte = f", {bits:.4f} bits/byte" if is_number(bits) else ""
        loss = last.get("loss")
        results[f"validation {source}"] = f"{loss:.4f}{per_byte}" if is_number(loss) else "not finite"
        results[f"validation {source}, average"] = text_of(last.get("average_loss"), ".4f")
        if validations := measured(events, "loss"):
            best = min(validations, key=lambda e: e["loss"])
            results[f"best validation {source}"] = f"{best['loss']:.4f} at step {best['step']:,}"
    for name, scores in history.scores().items():
        results[name] = scores[-1].text
    results |= {
        "running time": duration_text(history.events[-1]["hours"] * 3600),
        "tokens per second, median": text_of(history.median("tokens_per_second"), ",.0f"),
        "MFU, median": text_of(history.median("mfu"), ".1%"),
        "peak memory": text_of(max(history.values("peak_memory_bytes"), default=None), bytes_text),
        "energy": history.energy or "-",
    }
    diagnostics = history.last("diagnostics")
    for key, name in MEASURES.items():
        if values := list(filter(is_number, diagnostics.get(key, ()))):
            results[f"{name}, median and largest"] = f"{statistics.median(values):.3g}, {max(values):.3g}"
    for name in ("resume", "rollback", "spike", "skip", "warning"):
        results[f"{name} events"] = text_of(len(history.of(name)) or None, str)
    return {name: text for name, text in results.items() if text != "-"}


def comparison_text(folders: list[Path]) -> str:
    """Formats the results and all settings that differ, with one column per run.

    Raises InputError for fewer than two runs, or if a folder isn't a run.
    """
    if len(folders) < 2:
        raise InputError(f"compare {folders[0]}: needs at least two runs; for a single run, use summary")
    require_runs(folders)
    for run in folders:
        warn_of_settings(run)
    header = ["", *map(str, folders)]
    differ = setting_differences([recorded_settings(run) for run in folders])
    # The output folder always differs.
    shown = {name: row for name, row in differ.items() if name not in ("output", "model.transformers_version")}
    settings = table([header, *([name, *map(_cell, row)] for name, row in shown.items())]) if shown else "  none"
    results = [results_of(read_history(run), read_status(run)) for run in folders]
    names = dict.fromkeys(itertools.chain.from_iterable(results))
    rows = [[name, *(result.get(name, "-") for result in results)] for name in names]
    return "\n".join(["settings that differ", settings, "", "results", table([header, *rows])])


def _cell(value: Any) -> str:
    text = "-" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= WIDEST_CELL else f"{text[: WIDEST_CELL - 3]}..."


def summary_text(run: Path) -> str:
    """Formats a one-page summary of a run. Raises InputError if the folder isn't a run."""
    history = read_history(run)
    warn_of_settings(run)
    start = history.last("start")
    records = read_data_record(run).values()
    if not records:
        print(f"warning: {run / DATA_FILE}: is missing or damaged, so its data isn't described", file=sys.stderr)
    kept_out = [contamination_text(row) for record in records for row in record.get("contamination") or []]
    about = {
        "parameters": text_of(start.get("parameters"), ","),
        "active parameters": text_of(start.get("active_parameters"), ","),
        **{
            name: _cell(value)
            for name, value in recorded_settings(run).items()
            if name in SUMMARIZED or name.endswith(".shards")
        },
        "decontaminated": "; ".join(dict.fromkeys(kept_out)) or "-",
        **results_of(history, read_status(run)),
    }
    return "\n".join([str(run), "", table([[name, text] for name, text in about.items() if text != "-"])])
