"""Inspects runs and controls live ones.

python runs.py list [FOLDER]                 # every run under a folder: state, step, loss, speed, time left
python runs.py watch [FOLDER]                # the same, live; --page: with curves and controls in a browser
python runs.py status RUN                    # one run: progress, loss, last events; --watch to refresh
python runs.py plot RUN...                   # curves: a PNG and an interactive HTML page
python runs.py compare RUN...                # differing settings and results, side by side
python runs.py summary RUN                   # a run on one page
python runs.py export RUN... --output x.csv  # every logged line as a table
python runs.py documents RUN --step N        # the text that a step was trained on
python runs.py merge RUN --last 5            # the mean of its last checkpoints, as a model folder
python runs.py save|stop|abort|anneal RUN    # controls a live run, from any machine that shares its disk
python runs.py profile RUN                   # why is a live run slow?
python runs.py parity --config recipes/NAME.yaml --steps 50     # same losses under every strategy?
python runs.py sweep --config recipes/NAME.yaml --vary optim.learning_rate=1e-3,2e-3 --output sweeps/x
python runs.py ladder SWEEP --predict parameters=30M,tokens=600M     # the loss of a larger run
python runs.py mixture --config recipes/NAME.yaml --output sweeps/y  # weights of the sources, by many small runs
"""

import argparse
import contextlib
import functools
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.errors import EXIT_INTERRUPTED, InputError, run_script
from pretrain.runs.control import COMMANDS
from pretrain.runs.history import find_runs, read_history, require_run, require_runs
from pretrain.runs.run_folder import METRICS_FILE
from pretrain_tools.runs.commands import send, wait_for_answer, wait_for_profile, withdraw
from pretrain_tools.runs.comparison import comparison_text, names_of, summary_text, write_csv
from pretrain_tools.runs.status import list_text, read_status, status_text

if TYPE_CHECKING:
    from pretrain_tools.runs.live_log import LiveRuns

ROOT_OF_RUNS = Path("runs")
USUAL_PORT, LAST_PORT = 8765, 65_535


def list_runs(arguments: argparse.Namespace) -> int:
    """One line per run under a folder."""
    folder = arguments.folder
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; give a folder that contains runs")
    runs = [folder] if (folder / METRICS_FILE).is_file() else find_runs(folder)
    if not runs:
        raise InputError(f"{folder}: contains no runs; start one with train.py, or give another folder")
    within = folder if runs != [folder] else folder.parent
    print(list_text([read_status(run, brief=True) for run in runs], within=within))
    return 0


def status(arguments: argparse.Namespace) -> int:
    """How one run is doing; of a folder of runs, their list."""
    folder = arguments.run_folder
    if folder.is_dir() and not (folder / METRICS_FILE).is_file() and find_runs(folder):
        arguments.folder = folder
        return list_runs(arguments)
    run = require_run(folder)
    while True:
        now = read_status(run)
        if arguments.watch is not None and sys.stdout.isatty():
            print("\033[H\033[2J", end="")
        print(status_text(now), flush=True)
        if arguments.watch is None or now.state != "running":
            return 0
        try:
            time.sleep(arguments.watch)
        except KeyboardInterrupt:
            return 0
        if not sys.stdout.isatty():
            print()


def watch(arguments: argparse.Namespace) -> int:
    """Shows all runs of a folder until Ctrl-C, in the terminal and, if asked for, as a page."""
    from pretrain_tools.runs.live_log import LiveRuns
    from pretrain_tools.runs.live_table import print_once, show_live

    folder, problems = arguments.folder, []
    if not folder.is_dir():
        problems.append(f"{folder}: no such folder; give a folder that contains runs")
    if arguments.once and arguments.page:
        problems.append("--once: not with --page, which serves until Ctrl-C; --output FILE writes the page as a file")
    if arguments.port is not None and not arguments.page:
        problems.append("--port: only valid with --page")
    if arguments.port is not None and arguments.port > LAST_PORT:
        problems.append(f"--port {arguments.port}: must be from 0 to {LAST_PORT}")
    if problems:
        raise InputError(*problems)
    if arguments.output is not None:
        require_writable(arguments.output)
    runs = LiveRuns(folder)
    if not runs.refresh():
        raise InputError(f"{folder}: contains no runs; start one with train.py, or give another folder")
    if arguments.output is None and not arguments.page:
        print_once(runs) if arguments.once else show_live(runs, arguments.interval)
        return 0
    return watch_page(arguments, runs)


def watch_page(arguments: argparse.Namespace, runs: "LiveRuns") -> int:
    """The same with a page, served, written, or both."""
    from pretrain_tools.runs.live_page import LiveData, PageServer, write_live_page
    from pretrain_tools.runs.live_table import print_once, show_live

    data, notes = LiveData(runs), []

    def write() -> None:
        if arguments.output is not None:
            write_live_page(data, arguments.output, None if arguments.once else arguments.interval)

    def write_again() -> None:
        with contextlib.suppress(OSError):  # a shared disk that is away for a while: the page says how old it is
            write()

    write()
    notes += [str(arguments.output)] if arguments.output is not None else []
    if arguments.once:
        print_once(runs)
        print(notes[0])
        return 0
    if not arguments.page:
        show_live(runs, arguments.interval, write_again, notes[0])
        return 0
    port = USUAL_PORT if arguments.port is None else arguments.port
    with PageServer(data, port, arguments.interval) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            show_live(runs, arguments.interval, write_again, " · ".join([server.address, *notes]))
        finally:
            server.shutdown()
    return 0


def plot(arguments: argparse.Namespace) -> int:
    """Writes the PNG and the page, by default into the nearest folder that holds all runs."""
    from pretrain_tools.runs.curves import curves_of
    from pretrain_tools.runs.plots import write_page, write_png

    runs = require_runs(arguments.runs)
    folder = runs[0] if len(runs) == 1 else Path(os.path.commonpath([run.resolve().parent for run in runs]))
    folder = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    base = arguments.output or folder / "plot"
    base = base.with_suffix("") if base.suffix in (".png", ".html") else base
    require_writable(base)
    histories = [read_history(run) for run in runs]
    if not any(history.of("train") for history in histories):
        raise InputError(f"{', '.join(map(str, runs))}: no steps logged yet, nothing to plot")
    names = names_of(histories)
    curves = [curves_of(name, h, read_status(h.folder)) for name, h in zip(names, histories, strict=True)]
    for ending, write in ((".html", write_page), (".png", write_png)):
        path = base.with_name(base.name + ending)
        write(curves, path)
        print(path)
    return 0


def require_writable(path: Path) -> None:
    """Raises InputError if no file can be made there."""
    folder = path.parent
    if not folder.is_dir():
        raise InputError(f"--output {path}: {folder} is not a folder; create it, or choose another path")
    if not os.access(folder, os.W_OK):
        raise InputError(f"--output {path}: {folder} is not writable; choose another path")
    if path.is_dir():
        raise InputError(f"--output {path}: is a folder; give a file name in it, such as {path / 'plot'}")


def compare(arguments: argparse.Namespace) -> int:
    """Prints settings that differ and results."""
    if len(arguments.runs) < 2:
        raise InputError(f"compare {arguments.runs[0]}: only one run given; give two or more, or use summary")
    print(comparison_text([(read_history(run), read_status(run)) for run in require_runs(arguments.runs)]))
    return 0


def summary(arguments: argparse.Namespace) -> int:
    """Prints a run on one page."""
    history = read_history(arguments.run_folder)
    print(summary_text(history, read_status(arguments.run_folder)))
    return 0


def export(arguments: argparse.Namespace) -> int:
    """Writes every logged line as CSV."""
    runs = require_runs(arguments.runs)
    require_writable(arguments.output)
    rows = write_csv([read_history(run) for run in runs], arguments.output)
    print(f"{arguments.output}: {rows:,} rows")
    return 0


def documents(arguments: argparse.Namespace) -> int:
    """Prints what was in a step."""
    from pretrain_tools.runs.step_documents import documents_text

    run = require_run(arguments.run_folder)
    print(documents_text(run, arguments.step, limit=arguments.limit, characters=arguments.characters))
    return 0


def merge(arguments: argparse.Namespace) -> int:
    """Writes the mean of several models."""
    from pretrain_tools.runs.merge import merge_models

    folder, names = merge_models(
        arguments.models, last=arguments.last, weights=arguments.weights, output=arguments.output
    )
    print(f"The mean of {', '.join(names)} is in {folder}.")
    print(f"Try: python evaluate.py --model {folder} --data FOLDER")
    return 0


def steer(arguments: argparse.Namespace) -> int:
    """Sends a command to a live run and waits until it is done; exit status 1 for a profile that has found causes."""
    command, run = arguments.command, arguments.run_folder
    request = {"id": uuid.uuid4().hex}  # known before it is sent: Ctrl-C may come while it is being written
    more = {"steps": arguments.steps} if command == "profile" else {}
    code, shown = 0, 0

    def show(seconds: float) -> None:
        nonlocal shown
        if seconds > 1 and int(seconds) > shown and (sys.stderr.isatty() or int(seconds) % 10 == 0):
            shown = int(seconds)
            end = "" if sys.stderr.isatty() else "\n"
            print(f"\r{command}: waiting for the run, {shown} s", end=end, file=sys.stderr, flush=True)

    try:
        request = send(run, command, request["id"], **more)
        print(wait_for_answer(run, request, timeout_seconds=arguments.timeout, show=show), flush=True)
        if command == "profile":
            report = wait_for_profile(run, request, show=show)
            print("\n" * sys.stderr.isatty() + report["text"])
            code = 1 if report["causes"] else 0
    except KeyboardInterrupt:
        withdraw(run, request)
        print(f"\n{command}: gave up waiting; cancelled, unless the run has already picked it up", file=sys.stderr)
        return EXIT_INTERRUPTED
    finally:
        if shown and sys.stderr.isatty():
            print(file=sys.stderr)
    return code


def parity(arguments: argparse.Namespace) -> int:
    """Trains the recipe for a few steps under each strategy and compares; exit status 1 if one differs."""
    from pretrain.recipe import pair_up
    from pretrain_tools.runs.parity import measure_parity, measure_parity_of_models, strategy_names

    measure = measure_parity
    if arguments.models:
        measure = functools.partial(measure_parity_of_models, models=arguments.models)
    return measure(
        arguments.config,
        arguments.output,
        steps=arguments.steps,
        strategies=arguments.strategies.split(",") if arguments.strategies else strategy_names(),
        processes=arguments.processes,
        precision=arguments.precision,
        changes=pair_up(arguments.changes),
    )


def sweep(arguments: argparse.Namespace) -> int:
    """Trains the recipe under every combination of settings and compares."""
    from pretrain.errors import Problems
    from pretrain.recipe import pair_up
    from pretrain_tools.experiments.sweep import run_sweep
    from pretrain_tools.experiments.sweep_plan import SweepRequest, read_axes

    problems = Problems()
    axes = problems.attempt(read_axes, arguments.vary)
    changes = problems.attempt(pair_up, arguments.changes)
    problems.stop_if_any()
    request = SweepRequest(
        arguments.config, tuple(axes), tuple(changes), arguments.seeds, arguments.halving, arguments.search,
        arguments.output,
    )  # fmt: skip
    return run_sweep(request, arguments.parallel)


def mixture(arguments: argparse.Namespace) -> int:
    """Trains on many mixtures and proposes weights."""
    from pretrain.recipe import pair_up
    from pretrain_tools.experiments.mixture import mixture_request, run_mixture

    changes = pair_up(arguments.changes)
    request = mixture_request(arguments.config, changes, arguments.runs, arguments.seeds, arguments.output)
    return run_mixture(request, arguments.parallel)


def ladder(arguments: argparse.Namespace) -> int:
    """Fits the loss by size and tokens and predicts."""
    from pretrain.errors import Problems
    from pretrain_tools.experiments.ladder import (
        common_place,
        make_ladder,
        read_ladder_runs,
        read_predictions,
        rungs_of,
    )
    from pretrain_tools.experiments.ladder_report import ladder_text, write_ladder

    problems = Problems()
    asked = problems.attempt(read_predictions, arguments.predict, arguments.count)
    found = problems.attempt(read_ladder_runs, arguments.runs, arguments.count, arguments.intermediate)
    base = arguments.output or common_place(arguments.runs)
    problems.attempt(require_writable, base)
    problems.stop_if_any()
    made = make_ladder(rungs_of(found[0]), asked, arguments.count)
    print(ladder_text(made, found[1]))
    for path in write_ladder(made, base):
        print(path)
    return 0


def positive(text: str, kind: type = float) -> float:
    """A number of that kind above zero, for argparse."""
    value = kind(text.replace(",", ""))
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def whole(text: str) -> int:
    """A whole number from 0, for argparse."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 0")
    return int(text)


def natural(text: str) -> int:
    """A whole number from 1, for argparse."""
    return positive(text, int)


def parser() -> argparse.ArgumentParser:
    """The command line, one subcommand per function above."""
    root = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = root.add_subparsers(required=True, metavar="COMMAND", dest="command")
    add_readers(commands)
    add_merge(commands)
    for name, text in COMMANDS.items():
        command = add_command(commands, name, steer, text)
        command.add_argument("--timeout", type=positive, default=60.0, help="seconds to wait (default 60)")
        if name == "profile":
            command.add_argument("--steps", type=natural, default=20, help="to record (default 20)")
    add_parity(commands)
    add_sweep(commands)
    add_mixture(commands)
    add_ladder(commands)
    return root


def add_command(
    commands: argparse._SubParsersAction,
    name: str,
    run: Callable,
    help: str,
    given: str = "run_folder",
    **options: Any,
) -> argparse.ArgumentParser:
    """A subcommand that `run` does, for a run or, with other options of its argument, for several."""
    command = commands.add_parser(name, help=help)
    command.set_defaults(run=run)
    command.add_argument(given, type=Path, **({"metavar": "RUN"} | options))
    return command


def add_readers(commands: argparse._SubParsersAction) -> None:
    """The commands that only read."""
    default, several = {"nargs": "?", "default": ROOT_OF_RUNS}, {"given": "runs", "nargs": "+"}
    add_command(
        commands, "list", list_runs, "all runs under a folder (default runs)", "folder", metavar=None, **default
    )
    command = add_command(
        commands, "watch", watch, "all runs under a folder, live (default runs)", "folder", metavar=None, **default
    )
    command.add_argument("--page", action="store_true", help="a page with curves and controls too, for this machine")
    command.add_argument("--port", type=whole, metavar="PORT", help=f"of the page (default {USUAL_PORT}; 0: any)")
    command.add_argument("--output", type=Path, metavar="FILE.html", help="keep the page up to date as one file, too")
    command.add_argument("--once", action="store_true", help="as it is now, and end")
    command.add_argument(
        "--interval", type=positive, default=2.0, metavar="SECONDS", help="between two looks (default 2)"
    )
    command = add_command(commands, "status", status, "state and progress of a run", **default)
    command.add_argument("--watch", type=positive, nargs="?", const=2.0, metavar="SECONDS", help="refresh every N (2)")
    command = add_command(commands, "plot", plot, "curves of one or more runs, as PNG and HTML", **several)
    command.add_argument(
        "--output", type=Path, help="path without a suffix (default: plot.png and plot.html in the run's folder, or "
        "in the folder that contains the runs)",
    )  # fmt: skip
    add_command(commands, "compare", compare, "differing settings and results, side by side", **several)
    add_command(commands, "summary", summary, "a run on one page")
    command = add_command(commands, "export", export, "all logged metrics as CSV", **several)
    command.add_argument("--output", type=Path, required=True, metavar="FILE.csv")
    command = add_command(commands, "documents", documents, "the documents that a step was trained on")
    command.add_argument("--step", type=natural, required=True, help="as logged: the first step is 1")
    command.add_argument("--limit", type=natural, default=8, help="sequences to show (default 8)")
    command.add_argument("--characters", type=natural, default=600, help="shown of each document (default 600)")


def add_merge(commands: argparse._SubParsersAction) -> None:
    """The command that writes a model."""
    command = commands.add_parser("merge", help="the mean of checkpoints or models, as a model folder")
    command.set_defaults(run=merge)
    command.add_argument("models", nargs="+", metavar="MODEL", help="a run, RUN@STEP, or a model folder")
    command.add_argument("--last", type=natural, metavar="N", help="of a run: its N newest checkpoints")
    command.add_argument(
        "--weights", choices=["raw", "average"], default="raw",
        help="raw, or average: the mean that each checkpoint has of its own; of one model that is an export (raw)",
    )  # fmt: skip
    command.add_argument("--output", type=Path, metavar="FOLDER", help="(default: merged-FIRST-LAST in the run)")


def add_parity(commands: argparse._SubParsersAction) -> None:
    """The command that trains under every strategy."""
    command = commands.add_parser(
        "parity",
        help="check that a recipe trains identically under every strategy",
        epilog="Any setting of the recipe can be changed by its path, as with train.py: --data.sequence_length 256",
    )
    command.set_defaults(run=parity)
    command.add_argument("--config", type=Path, required=True, metavar="RECIPE")
    command.add_argument("--steps", type=int, default=50, help="optimizer steps of each run (default 50)")
    command.add_argument("--strategies", help="names in accelerate_configs/, comma-separated (default: all)")
    command.add_argument(
        "--models", type=Path, nargs="+", metavar="JSON",
        help="each of these in the place of the recipe's, such as model_configs/qwen3_moe_5m.json, which ep trains",
    )  # fmt: skip
    command.add_argument("--processes", type=int, default=2, help="processes, except of single (default 2)")
    command.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32", help="(default fp32)")
    command.add_argument("--output", type=Path, default=Path("runs/parity"), help="(default runs/parity)")


def add_sweep(commands: argparse._SubParsersAction) -> None:
    """The command that trains under several settings."""
    command = commands.add_parser(
        "sweep",
        help="train a recipe under several settings and compare; the same command continues",
        epilog="Any other setting of the recipe can be changed by its path, as with train.py: --budget.steps 500",
    )
    command.set_defaults(run=sweep)
    command.add_argument("--config", type=Path, required=True, metavar="RECIPE")
    command.add_argument(
        "--vary", action="append", required=True, metavar="SETTING=V1,V2", help="every combination is trained; or, "
        "with --search, a range: optim.learning_rate=1e-4..1e-2",
    )  # fmt: skip
    command.add_argument(
        "--seeds", type=natural, default=1, help="runs of each, from the recipe's seed on (default 1)"
    )
    command.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    command.add_argument(
        "--halving", type=natural, metavar="RUNGS", help="successive halving: 3 ends the worse half after a quarter "
        "of the steps, and half of the rest after half of them",
    )  # fmt: skip
    command.add_argument("--search", type=natural, metavar="N", help="try N settings, picked by optuna")
    command.add_argument("--parallel", type=natural, metavar="N", help="runs at a time (default: the GPUs, or 1)")


def add_mixture(commands: argparse._SubParsersAction) -> None:
    """The command that proposes weights of sources."""
    command = commands.add_parser(
        "mixture",
        help="train a small recipe on many mixtures of its sources and propose weights; the same command continues",
        epilog="Any setting of the recipe can be changed by its path, as with train.py: --budget.steps 500",
    )
    command.set_defaults(run=mixture)
    command.add_argument("--config", type=Path, required=True, metavar="RECIPE")
    command.add_argument("--runs", type=natural, default=16, help="mixtures, the recipe's own first (default 16)")
    command.add_argument("--seeds", type=natural, default=1, help="runs of each (default 1)")
    command.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    command.add_argument("--parallel", type=natural, metavar="N", help="runs at a time (default: the GPUs, or 1)")


def add_ladder(commands: argparse._SubParsersAction) -> None:
    """The command that predicts losses."""
    help_of_runs = {"metavar": "RUN_OR_SWEEP", "nargs": "+", "given": "runs"}
    command = add_command(
        commands, "ladder", ladder, "loss by size and tokens, fitted to runs; predictions", **help_of_runs
    )
    command.add_argument(
        "--predict", action="append", default=[], metavar="RUN",
        help="parameters=30M,tokens=600M, or a recipe; may be repeated",
    )  # fmt: skip
    command.add_argument(
        "--count", choices=["matrix", "total"], default="matrix", help="what N counts: parameters in matrix products, "
        "without embeddings that are looked up, or all (default matrix)",
    )  # fmt: skip
    command.add_argument(
        "--intermediate", action="store_true", help="of runs of constant rate, losses on the way as well"
    )
    command.add_argument(
        "--output", type=Path, metavar="PATH", help="without a suffix (default: ladder, in the folder)"
    )


def main() -> int:
    arguments, rest = parser().parse_known_args(sys.argv[1:])
    arguments.changes = rest
    if arguments.changes and arguments.run not in (parity, sweep, mixture):
        parser().error(f"unrecognized arguments: {' '.join(arguments.changes)}")
    return arguments.run(arguments)


if __name__ == "__main__":
    run_script(main)
