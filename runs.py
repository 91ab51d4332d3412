"""Inspects runs and controls live ones.

python runs.py list [FOLDER]                 # list all runs in a folder: state, step, loss, speed, time left
python runs.py status RUN                    # show a run's progress, loss and last events
python runs.py plot RUN...                   # plot curves as a PNG
python runs.py compare RUN...                # compare results and settings side by side
python runs.py summary RUN                   # show a one-page summary of a run
python runs.py documents RUN --step N        # show the documents used in step N
python runs.py merge RUN --last 5            # average a run's last 5 checkpoints into a model folder
python runs.py save|stop|abort|anneal RUN    # control a live run from any machine with access to its folder
python runs.py parity --config recipes/NAME.yaml --steps 50     # compare losses across strategies
python runs.py sweep --config recipes/NAME.yaml --vary optim.learning_rate=1e-3,2e-3 --output sweeps/x
python runs.py ladder SWEEP --predict parameters=30M,tokens=600M     # predict a larger run's loss
python runs.py mixture --config recipes/NAME.yaml --output sweeps/y  # optimize data mixture weights with small runs
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from pretrain.errors import Problems, run_script
from pretrain.runs.control import COMMANDS
from pretrain_tools.runs.commands import steer
from pretrain_tools.runs.comparison import comparison_text, summary_text
from pretrain_tools.runs.history import require_run
from pretrain_tools.runs.status import print_list, print_status

Commands = argparse._SubParsersAction
"""Return type of `add_subparsers`, which has no public name."""
ROOT_OF_RUNS = {"nargs": "?", "default": Path("runs")}
RUN = {"metavar": "RUN"}
SEVERAL_RUNS = {"nargs": "+", "metavar": "RUN"}
ANY_SETTING = "Override any recipe setting, as in train.py, for example"


def plot(runs: list[Path], output: Path | None) -> None:
    # Imported here, so that `list` and `status` don't load heavy libraries.
    from pretrain_tools.runs.plots import plot_runs

    print(plot_runs(runs, output))


def compare(runs: list[Path]) -> None:
    print(comparison_text(runs))


def summary(run: Path) -> None:
    print(summary_text(run))


def documents(run: Path, **options: int) -> None:
    from pretrain_tools.runs.step_documents import documents_text

    print(documents_text(require_run(run), **options))


def merge(models: list[str], **options: Any) -> None:
    from pretrain_tools.runs.merge import merge_models

    folder, names = merge_models(models, **options)
    print(f"The mean of {', '.join(names)} is in {folder}.")
    print(f"Try: python evaluate.py --model {folder} --data FOLDER")


def parity(config: Path, output: Path, changes: list[str], **options: Any) -> int:
    """Trains a recipe for a few steps with each strategy and compares the losses. Returns 1 if they differ."""
    from pretrain.recipe import pair_up
    from pretrain_tools.experiments.parity import compare_strategies

    return compare_strategies(config, output, changes=pair_up(changes), **options)


def sweep(config: Path, vary: list[str], changes: list[str], parallel: int | None, **options: Any) -> int:
    """Trains a recipe with several settings and compares the results."""
    from pretrain.recipe import pair_up
    from pretrain_tools.experiments.sweep import run_sweep
    from pretrain_tools.experiments.sweep_plan import SweepRequest, read_axes

    problems = Problems()
    axes = problems.attempt(read_axes, vary)
    settings = problems.attempt(pair_up, changes)
    problems.stop_if_any()
    return run_sweep(SweepRequest(config, tuple(axes), tuple(settings), **options), parallel)


def mixture(config: Path, changes: list[str], runs: int, **options: Any) -> int:
    """Trains a recipe on many data mixtures and proposes weights."""
    from pretrain.recipe import pair_up
    from pretrain_tools.experiments.mixture import run_mixture

    return run_mixture(config, pair_up(changes), count=runs, **options)


def ladder(runs: list[Path], **options: Any) -> None:
    """Fits a scaling law to runs and predicts losses."""
    from pretrain_tools.experiments.ladder import report_ladder

    report_ladder(runs, **options)


def positive(text: str, kind: type = float) -> float:
    """Parses a positive number for argparse. Commas may separate thousands."""
    value = kind(text.replace(",", ""))
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be greater than 0, got {text}")
    return value


def natural(text: str) -> int:
    """Parses an integer of at least 1 for argparse."""
    return positive(text, int)


def parser() -> argparse.ArgumentParser:
    """Builds the command line, with a subcommand for each function above."""
    root = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = root.add_subparsers(required=True, metavar="COMMAND")
    add_readers(commands)
    add_merge(commands)
    for name, text in COMMANDS.items():
        command = add_command(commands, name, partial(steer, command=name), text, run=RUN)
        command.add_argument("--timeout", type=positive, default=60.0, help="seconds to wait (default: 60)")
    add_parity(commands)
    add_sweep(commands)
    add_mixture(commands)
    add_ladder(commands)
    return root


def add_command(
    commands: Commands,
    name: str,
    function: Callable,
    help: str,
    epilog: str = "",
    **given: dict[str, Any],
) -> argparse.ArgumentParser:
    """Adds a subcommand that passes its arguments to a function by name.

    given: {positional argument: argparse options}. The default type is Path.
    """
    command = commands.add_parser(name, help=help, epilog=epilog)
    command.set_defaults(function=function)
    for argument, options in given.items():
        command.add_argument(argument, **{"type": Path, **options})
    return command


def add_readers(commands: Commands) -> None:
    add_command(commands, "list", print_list, "list all runs in a folder (default: runs)", folder=ROOT_OF_RUNS)
    default = {**ROOT_OF_RUNS, **RUN}
    add_command(commands, "status", print_status, "show the state and progress of a run", folder=default)
    command = add_command(commands, "plot", plot, "plot the curves of one or more runs", runs=SEVERAL_RUNS)
    text = "output file (default: plot.png in the run folder, or in the folder that contains the runs)"
    command.add_argument("--output", type=Path, metavar="FILE.png", help=text)
    text = "compare results and settings side by side"
    add_command(commands, "compare", compare, text, runs=SEVERAL_RUNS)
    add_command(commands, "summary", summary, "show a one-page summary of a run", run=RUN)
    command = add_command(commands, "documents", documents, "show the documents used in a training step", run=RUN)
    command.add_argument("--step", type=natural, required=True, help="step number as logged (the first step is 1)")
    command.add_argument("--limit", type=natural, default=8, help="number of sequences to show (default: 8)")


def add_merge(commands: Commands) -> None:
    models = {"nargs": "+", "metavar": "MODEL", "help": "a run, RUN@STEP, or a model folder", "type": str}
    text = "average checkpoints or models into a model folder"
    command = add_command(commands, "merge", merge, text, models=models)
    command.add_argument("--last", type=natural, metavar="N", help="with a run: merge its N newest checkpoints")
    text = "raw, or average for the checkpoints' averaged weights; average also accepts a single model (default: raw)"
    command.add_argument("--weights", choices=["raw", "average"], default="raw", help=text)
    command.add_argument(
        "--output", type=Path, metavar="FOLDER", help="output folder (default: merged-FIRST-LAST in the run folder)"
    )
    text = "run Python code from the model folders (off by default)"
    command.add_argument("--trust_remote_code", action="store_true", help=text)


def add_parity(commands: Commands) -> None:
    epilog = f"{ANY_SETTING} --data.sequence_length 256"
    text = "check that a recipe produces the same losses with every strategy"
    command = add_command(commands, "parity", parity, text, epilog)
    command.add_argument("--config", type=Path, required=True, metavar="RECIPE", help="recipe to train")
    command.add_argument("--steps", type=int, default=50, help="optimizer steps per run (default: 50)")
    text = "comma-separated names from accelerate_configs/ (default: all, or none with --mesh)"
    command.add_argument("--strategies", help=text)
    text = "also train combinations of mesh dimensions: all, or a single one such as dp_shard=2,tp=2"
    command.add_argument("--mesh", metavar="SIZES", help=text)
    command.add_argument(
        "--processes", type=int, default=2, help="processes per strategy; single always uses one (default: 2)"
    )
    command.add_argument(
        "--precision",
        choices=["fp32", "bf16", "fp16", "fp8"],
        default="fp32",
        help="training precision (default: fp32)",
    )
    command.add_argument(
        "--output", type=Path, default=Path("runs/parity"), help="output folder (default: runs/parity)"
    )


def add_sweep(commands: Commands) -> None:
    text = "train a recipe with several settings and compare the results; run the same command again to resume"
    command = add_command(commands, "sweep", sweep, text, f"{ANY_SETTING} --budget.steps 500")
    text = "setting and values to try, in all combinations; with --search, a range: optim.learning_rate=1e-4..1e-2"
    command.add_argument("--vary", action="append", required=True, metavar="SETTING=V1,V2", help=text)
    add_small_runs(command, "number of seeds per setting, starting from the recipe's seed (default: 1)")
    command.add_argument("--search", type=natural, metavar="N", help="try N settings chosen by Optuna")


def add_mixture(commands: Commands) -> None:
    text = "train a small recipe on many data mixtures and propose weights; run the same command again to resume"
    command = add_command(commands, "mixture", mixture, text, f"{ANY_SETTING} --budget.steps 500")
    command.add_argument(
        "--runs", type=natural, default=16, help="number of mixtures, including the recipe's own (default: 16)"
    )
    add_small_runs(command, "number of seeds per mixture (default: 1)")


def add_small_runs(command: argparse.ArgumentParser, seeds: str) -> None:
    command.add_argument("--config", type=Path, required=True, metavar="RECIPE", help="base recipe")
    command.add_argument("--seeds", type=natural, default=1, help=seeds)
    command.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="output folder")
    command.add_argument(
        "--parallel", type=natural, metavar="N", help="number of parallel runs (default: one per GPU, or 1)"
    )


def add_ladder(commands: Commands) -> None:
    several = {**SEVERAL_RUNS, "metavar": "RUN_OR_SWEEP"}
    text = "fit a scaling law to runs and predict losses"
    command = add_command(commands, "ladder", ladder, text, runs=several)
    text = "run to predict: parameters=30M,tokens=600M, or a recipe; can be repeated"
    command.add_argument("--predict", action="append", default=[], metavar="RUN", help=text)
    text = (
        "output path without suffix (default: ladder in the given folder, or in the current one if you pass several)"
    )
    command.add_argument("--output", type=Path, metavar="PATH", help=text)


def main() -> int:
    # In commands that train, the remaining arguments are recipe settings.
    arguments, changes = parser().parse_known_args(sys.argv[1:])
    options = vars(arguments)
    function = options.pop("function")
    if function in (parity, sweep, mixture):
        options["changes"] = changes
    elif changes:
        parser().error(f"unrecognized arguments: {' '.join(changes)}")
    return function(**options)


if __name__ == "__main__":
    run_script(main)
