"""All runs in the terminal, as a table that moves with them; in a file or a pipe a line for each run that changed."""

import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from pretrain.runs.history import is_number
from pretrain.terminal import is_terminal, printable, sparkline
from pretrain.units import count_text, counted, duration_text
from pretrain_tools.runs.live_log import NO_NEWS, LiveRun, LiveRuns
from pretrain_tools.runs.status import RunStatus, facts_text, list_text, number_text, state_text

STATE_STYLES = {"running": "green", "finished": "cyan", "stopped": "yellow", "crashed": "red"}
LIVE_COLUMNS = {"run": 0, "state": 0, "step": 0, "loss": 0, "val loss": 70, "tok/s": 0, "MFU": 90, "left": 0,
                "trend": 150, "last event": 110}  # fmt: skip
"""{column: the least width of a terminal that shows it}"""
TREND_WIDTH, TREND_LINES = 16, 96
MOST_NAME_WIDTH = 40


def show_live(runs: LiveRuns, interval: float, after: Callable[[], None] = lambda: None, note: str = "") -> None:
    """Shows the runs until Ctrl-C or SIGTERM, refreshed every `interval` seconds.

    after: called after each look. note: stands below the table.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else the terminal would keep the other screen
    show = _show_table if is_terminal(sys.stdout) else _print_lines
    try:
        show(runs, interval, after, note)
    except KeyboardInterrupt:
        return


def _show_table(runs: LiveRuns, interval: float, after: Callable[[], None], note: str) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    try:
        with Live(console=console, auto_refresh=False, screen=True) as live:
            while True:
                found = runs.refresh()
                live.update(live_table(runs, found, console.width, console.height, note), refresh=True)
                after()
                time.sleep(interval)
    finally:
        console.print(live_table(runs, runs.refresh(), console.width))  # what was last seen stays on the screen


def _print_lines(runs: LiveRuns, interval: float, after: Callable[[], None], note: str) -> None:
    seen = -1
    if note:
        print(note, flush=True)
    while True:
        found = runs.refresh()
        for run in found:
            if run.version > seen:
                print(run_line(runs.name_of(run), run.status), flush=True)
        seen = max([seen, *(run.version for run in found)])
        after()
        time.sleep(interval)


def run_line(name: str, status: RunStatus) -> str:
    """'12:00:00  demo  running  step 120/586 · loss 2.8130 · 8.22k tok/s · 21 s left'"""
    parts = [
        f"step {step_text(status)}",
        f"loss {status.loss:.4f}" if status.loss is not None else "",
        f"{count_text(status.tokens_per_second)} tok/s" if status.tokens_per_second is not None else "",
        f"{duration_text(status.seconds_left)} left" if status.seconds_left is not None else "",
        last_event_text(status) if status.state != "running" else "",
    ]
    return f"{time.strftime('%H:%M:%S')}  {name}  {state_text(status)}  {' · '.join(filter(None, parts))}"


def print_once(runs: LiveRuns) -> None:
    """The table as it is now; plain text in a file."""
    found = runs.refresh()
    if not is_terminal(sys.stdout):
        print(list_text([run.status for run in found], within=runs.folder))
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(live_table(runs, found, console.width))


def live_table(runs: LiveRuns, found: Sequence[LiveRun], width: int, height: int | None = None, note: str = "") -> Any:
    """A rich.table.Table of as many runs as the height allows, with the columns for which it is wide enough."""
    from rich.table import Table
    from rich.text import Text

    names = [name for name, least in LIVE_COLUMNS.items() if width >= least]
    shown = found if height is None else found[: max(1, height - 3 - bool(note))]
    rows = [cells_of(runs.name_of(run), run.status, width) for run in shown]
    states = [run.status.state for run in found]
    parts = [counted(len(found), "run"), f"{states.count('running')} running", time.strftime("%H:%M:%S")]
    parts.insert(2, f"{len(found) - len(shown)} not shown" if len(shown) < len(found) else "")
    caption = " · ".join(filter(None, parts)) + ("" if height is None else " · Ctrl-C ends")
    table = Table(
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
        header_style="bold",
        caption=Text(caption + (f"\n{note}" if note else "")),
        caption_justify="left",
        caption_style="dim",
    )
    # What is left of the width goes to names; then to events, which have no end.
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
    widths["run"] = min(widths["run"], MOST_NAME_WIDTH)
    for name in ("last event", "run"):
        others = sum(size + 2 for column, size in widths.items() if column != name)
        if name in widths:
            widths[name] = max(len(name), min(widths[name], width - others))
    for name in names:
        side = "left" if name in ("run", "state", "trend", "last event") else "right"
        table.add_column(name, justify=side, no_wrap=True, overflow="ellipsis", width=widths[name])
    for run, row in zip(shown, rows, strict=True):
        cells = [Text(row[name], style=STATE_STYLES[run.status.state] if name == "state" else "") for name in names]
        table.add_row(*cells)
    return table


def cells_of(name: str, status: RunStatus, width: int) -> dict[str, str]:
    """{column: text} of a run, without what would steer a terminal."""
    losses = [e["loss"] for e in status.events if e["event"] == "train" and is_number(e.get("loss"))][-TREND_LINES:]
    cells = {
        "run": name,
        "state": state_text(status) if width >= LIVE_COLUMNS["last event"] else status.state,
        "step": step_text(status),
        "loss": number_text(status.loss, "{:.4f}"),
        "val loss": number_text(status.validation_loss, "{:.4f}"),
        "tok/s": count_text(status.tokens_per_second) if status.tokens_per_second is not None else "-",
        "MFU": number_text(status.mfu, "{:.1%}"),
        "left": re.sub(r"(\d\d min) \d\d s", r"\1", duration_text(status.seconds_left))
        if status.seconds_left is not None
        else "-",
        "trend": sparkline(losses, width=TREND_WIDTH) if losses else "",
        "last event": last_event_text(status),
    }
    return {column: printable(text) for column, text in cells.items()}


def step_text(status: RunStatus) -> str:
    """'120/586'; '-' before the first."""
    total = f"/{status.total_steps:,}" if status.total_steps else ""
    return f"{status.step:,}{total}" if status.step is not None else "-"


def last_event_text(status: RunStatus) -> str:
    """'checkpoint 12 s ago: step 500 · path ...'; of steps, validations and scores nothing."""
    event = next((event for event in reversed(status.events) if event["event"] not in NO_NEWS), None)
    if event is None:
        return ""
    ago = f" {duration_text(max(0.0, time.time() - event['time']))} ago" if is_number(event.get("time")) else ""
    facts = event.get("message") or event.get("reason") or facts_text(event)
    return f"{event['event']}{ago}: {' '.join(str(facts).split())}"
