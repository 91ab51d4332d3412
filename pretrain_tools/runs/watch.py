"""Shows all runs of a folder live (runs.py watch): as a table in the terminal."""

import contextlib
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pretrain.terminal import is_terminal
from pretrain.units import counted
from pretrain_tools.runs.live_runs import LiveRun, LiveRuns
from pretrain_tools.runs.status import cells_of, print_list, runs_in

STATE_STYLES = {"running": "green", "finished": "cyan", "stopped": "yellow", "crashed": "red"}
LIVE_COLUMNS = {"run": 0, "state": 0, "step": 0, "loss": 0, "val loss": 70, "tok/s": 0, "MFU": 90, "left": 0,
                "trend": 150, "last event": 110}  # fmt: skip
"""Minimum width of the terminal, in characters, at which each column is shown."""
LEFT_ALIGNED = ("run", "state", "trend", "last event")
SHORTENED = ("run", "last event")
"""Columns that are shortened where the terminal is too narrow, the longer one first."""
MOST_NAME_WIDTH = 40


def watch(folder: Path, interval: float) -> None:
    """Shows the runs of a folder until Ctrl-C or SIGTERM; in a file or a pipe, once. Raises InputError without runs.

    interval: seconds between refreshes.
    """
    if not is_terminal(sys.stdout):
        return print_list(folder)
    runs_in(folder)
    # SIGTERM raises KeyboardInterrupt, like Ctrl-C; otherwise the terminal would stay on the alternate screen.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        show_table(LiveRuns(folder), interval)


def refreshes(runs: LiveRuns, interval: float) -> Iterator[list[LiveRun]]:
    """Yields the runs every `interval` seconds."""
    while True:
        yield runs.refresh()
        time.sleep(interval)


def show_table(runs: LiveRuns, interval: float) -> None:
    """Redraws the table on the terminal's alternate screen."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    try:
        with Live(console=console, auto_refresh=False, screen=True) as live:
            for found in refreshes(runs, interval):
                live.update(live_table(found, console.width, console.height), refresh=True)
    finally:
        console.print(live_table(runs.refresh(), console.width))  # leave the last table in the scrollback


def live_table(found: Sequence[LiveRun], width: int, height: int | None = None) -> Any:
    """Builds a rich.table.Table with the rows and columns that fit into `height` and `width`, in characters."""
    from rich.table import Table
    from rich.text import Text

    shown = found if height is None else found[: max(1, height - 3)]
    running = sum(run.status.state == "running" for run in found)
    hidden = f"{len(found) - len(shown)} not shown" if len(shown) < len(found) else ""
    end = "Ctrl-C ends" if height is not None else ""
    parts = [counted(len(found), "run"), f"{running} running", hidden, time.strftime("%H:%M:%S"), end]
    caption = Text(" · ".join(filter(None, parts)))
    layout = {"box": None, "padding": (0, 2, 0, 0), "pad_edge": False, "header_style": "bold"}
    table = Table(**layout, caption=caption, caption_justify="left", caption_style="dim")
    columns = [name for name, least in LIVE_COLUMNS.items() if width >= least]
    for name in columns:
        table.add_column(
            Text(name, no_wrap=True),
            justify="left" if name in LEFT_ALIGNED else "right",
            # Rich narrows only columns that may wrap; their cells, which may not, end in an ellipsis instead.
            no_wrap=name not in SHORTENED,
            min_width=len(name),
            max_width=MOST_NAME_WIDTH if name == "run" else None,
        )
    for run in shown:
        cells = cells_of(run.name, run.status)
        styles = {"state": STATE_STYLES[run.status.state]}
        texts = (Text(cells[name], styles.get(name, ""), no_wrap=True, overflow="ellipsis") for name in columns)
        table.add_row(*texts)
    return table
