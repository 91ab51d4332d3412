"""Shows all runs of a folder live (runs.py watch): as a table in the terminal, on a page, or both.

If the output is a file or a pipe, prints a line for each run that changed.
"""

import contextlib
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pretrain.errors import InputError
from pretrain.terminal import is_terminal, printable, sparkline
from pretrain.units import count_text, counted, duration_text
from pretrain_tools.runs.comparison import require_writable
from pretrain_tools.runs.history import is_number
from pretrain_tools.runs.live_log import LiveRun, LiveRuns
from pretrain_tools.runs.status import (
    RunStatus,
    last_event_text,
    list_text,
    number_text,
    runs_in,
    state_text,
)

USUAL_PORT = 8765
LAST_PORT = 65_535
STATE_STYLES = {"running": "green", "finished": "cyan", "stopped": "yellow", "crashed": "red"}
LIVE_COLUMNS = {"run": 0, "state": 0, "step": 0, "loss": 0, "val loss": 70, "tok/s": 0, "MFU": 90, "left": 0,
                "trend": 150, "last event": 110}  # fmt: skip
"""Minimum width of the terminal, in characters, at which each column is shown."""
LEFT_ALIGNED = ("run", "state", "trend", "last event")
TREND_WIDTH = 16
TREND_LINES = 96
MOST_NAME_WIDTH = 40


def watch(
    folder: Path, *, interval: float, once: bool = False, page: bool = False, port: int | None = None, output=None
) -> None:
    """Shows the runs of a folder until Ctrl-C or SIGTERM.

    Raises InputError with all problems of the arguments.

    Args:
        interval: seconds between refreshes.
        once: print the current state and return.
        page: also serve a page on this machine at `port` (None: USUAL_PORT).
        output: also keep the page up to date in this file.
    """
    problems = []
    if not folder.is_dir():
        problems.append(f"{folder}: no such folder; give a folder that contains runs")
    if once and page:
        problems.append("--once: not with --page, which serves until Ctrl-C; --output FILE writes the page as a file")
    if port is not None and not page:
        problems.append("--port: only valid with --page")
    if port is not None and port > LAST_PORT:
        problems.append(f"--port {port}: must be from 0 to {LAST_PORT}")
    if problems:
        raise InputError(*problems)
    if output is not None:
        require_writable(output)
    runs_in(folder)
    runs = LiveRuns(folder)
    if output is None and not page:
        return print_once(runs) if once else show_live(runs, interval)
    # Imported here because the table needs neither http.server nor numpy.
    from pretrain_tools.runs.page import LiveData, PageServer, write_live_page

    data = LiveData(runs)
    write = None if output is None else lambda: write_live_page(data, output, None if once else interval)
    if write is not None:
        write()
    if once:
        print_once(runs)
        print(output)
        return None
    notes = [] if output is None else [str(output)]
    if not page:
        return show_live(runs, interval, write, notes[0])
    with PageServer(data, USUAL_PORT if port is None else port, interval) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            show_live(runs, interval, write, " · ".join([server.address, *notes]))
        finally:
            server.shutdown()
    return None


def show_live(runs: LiveRuns, interval: float, write: Callable[[], None] | None = None, note: str = "") -> None:
    """Shows the runs until Ctrl-C or SIGTERM.

    write: called after each refresh. note: shown below the table.
    """
    # SIGTERM raises KeyboardInterrupt, like Ctrl-C; otherwise the terminal would stay on the alternate screen.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    show = show_table if is_terminal(sys.stdout) else print_lines
    with contextlib.suppress(KeyboardInterrupt):
        show(runs, interval, write, note)


def between_looks(write: Callable[[], None] | None, interval: float) -> None:
    """Writes the page and waits for `interval` seconds."""
    if write is not None:
        with contextlib.suppress(OSError):  # a shared disk may be unavailable for a while; the page shows its age
            write()
    time.sleep(interval)


def show_table(runs: LiveRuns, interval: float, write: Callable[[], None] | None, note: str) -> None:
    """Redraws the table on the terminal's alternate screen."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    try:
        with Live(console=console, auto_refresh=False, screen=True) as live:
            while True:
                live.update(live_table(runs, runs.refresh(), console.width, console.height, note), refresh=True)
                between_looks(write, interval)
    finally:
        console.print(live_table(runs, runs.refresh(), console.width))  # leave the last table in the scrollback


def print_lines(runs: LiveRuns, interval: float, write: Callable[[], None] | None, note: str) -> None:
    """Prints a line for each run that changed since the last refresh."""
    seen = -1
    if note:
        print(note, flush=True)
    while True:
        found = runs.refresh()
        for run in found:
            if run.version > seen:
                print(run_line(runs.name_of(run), run.status), flush=True)
        # Keep the previous value: the run with the largest version may have been deleted.
        seen = max([seen, *(run.version for run in found)])
        between_looks(write, interval)


def run_line(name: str, status: RunStatus) -> str:
    """Formats a run in one line: '12:00:00  demo  running  step 120/586 · loss 2.8130 · 8.22k tok/s · 21 s left'."""
    parts = [
        f"step {step_text(status)}",
        f"loss {status.loss:.4f}" if status.loss is not None else "",
        f"{count_text(status.tokens_per_second)} tok/s" if status.tokens_per_second is not None else "",
        f"{duration_text(status.seconds_left)} left" if status.seconds_left is not None else "",
        last_event_text(status) if status.state != "running" else "",
    ]
    return f"{time.strftime('%H:%M:%S')}  {name}  {state_text(status)}  {' · '.join(filter(None, parts))}"


def print_once(runs: LiveRuns) -> None:
    """Prints the table once, as plain text if the output is not a terminal."""
    # A file gets all columns, whatever their width, and no escape sequences.
    found = runs.refresh()
    if not is_terminal(sys.stdout):
        print(list_text([run.status for run in found], within=runs.folder))
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(live_table(runs, found, console.width))


def live_table(runs: LiveRuns, found: Sequence[LiveRun], width: int, height: int | None = None, note: str = "") -> Any:
    """Builds a rich.table.Table with the rows and columns that fit into `height` and `width`, in characters."""
    from rich.table import Table
    from rich.text import Text

    shown = found if height is None else found[: max(1, height - 3 - bool(note))]
    rows = [cells_of(runs.name_of(run), run.status, width) for run in shown]
    running = sum(run.status.state == "running" for run in found)
    hidden = f"{len(found) - len(shown)} not shown" if len(shown) < len(found) else ""
    end = "Ctrl-C ends" if height is not None else ""
    parts = [counted(len(found), "run"), f"{running} running", hidden, time.strftime("%H:%M:%S"), end]
    caption = Text("\n".join(filter(None, [" · ".join(filter(None, parts)), note])))
    layout = {"box": None, "padding": (0, 2, 0, 0), "pad_edge": False, "header_style": "bold"}
    table = Table(**layout, caption=caption, caption_justify="left", caption_style="dim")
    # If the terminal is too narrow, shorten the last event first, then the names.
    widths = {
        name: max(len(name), *(len(row[name]) for row in rows))
        for name, least in LIVE_COLUMNS.items()
        if width >= least
    }
    widths["run"] = min(widths["run"], MOST_NAME_WIDTH)
    for name in ("last event", "run"):
        if name in widths:
            others = sum(size + 2 for column, size in widths.items() if column != name)
            widths[name] = max(len(name), min(widths[name], width - others))
    for name, size in widths.items():
        side = "left" if name in LEFT_ALIGNED else "right"
        table.add_column(name, justify=side, no_wrap=True, overflow="ellipsis", width=size)
    for run, row in zip(shown, rows, strict=True):
        table.add_row(
            *(Text(row[name], style=STATE_STYLES[run.status.state] if name == "state" else "") for name in widths)
        )
    return table


def cells_of(name: str, status: RunStatus, width: int) -> dict[str, str]:
    """Returns the cells of a run by column, without control characters."""
    losses = [e["loss"] for e in status.events if e["event"] == "train" and is_number(e.get("loss"))][-TREND_LINES:]
    left = duration_text(status.seconds_left) if status.seconds_left is not None else "-"
    cells = {
        "run": name,
        "state": state_text(status) if width >= LIVE_COLUMNS["last event"] else status.state,
        "step": step_text(status),
        "loss": number_text(status.loss, "{:.4f}"),
        "val loss": number_text(status.validation_loss, "{:.4f}"),
        "tok/s": count_text(status.tokens_per_second) if status.tokens_per_second is not None else "-",
        "MFU": number_text(status.mfu, "{:.1%}"),
        "left": re.sub(r"(\d\d min) \d\d s", r"\1", left),
        "trend": sparkline(losses, width=TREND_WIDTH) if losses else "",
        "last event": last_event_text(status),
    }
    return {column: printable(text) for column, text in cells.items()}


def step_text(status: RunStatus) -> str:
    """Formats the progress as '120/586'; '-' before the first step."""
    total = f"/{status.total_steps:,}" if status.total_steps else ""
    return f"{status.step:,}{total}" if status.step is not None else "-"
