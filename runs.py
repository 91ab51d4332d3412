"""Inspects runs and controls live ones.

python runs.py list [FOLDER]                 # list all runs in a folder: state, step, loss, speed, time left
python runs.py status RUN                    # show a run's progress, loss and last events
python runs.py plot RUN...                   # plot curves as a PNG
python runs.py compare RUN...                # compare results and settings side by side
python runs.py summary RUN                   # show a one-page summary of a run
python runs.py documents RUN --step N        # show the documents used in step N
python runs.py merge RUN --last 5            # average a run's last 5 checkpoints into a model folder
python runs.py save RUN                      # save a checkpoint of a live run and continue
python runs.py stop RUN                      # save a checkpoint of a live run and stop it
python runs.py abort RUN                     # stop a live run without saving
python runs.py anneal RUN                    # start the final learning-rate decay of a live run
python runs.py parity --config recipes/NAME.yaml --steps 50     # compare losses across strategies
python runs.py sweep --config recipes/NAME.yaml --vary optim.learning_rate=1e-3,2e-3 --output sweeps/x  # try settings
python runs.py ladder SWEEP --predict parameters=30M,tokens=600M     # predict a larger run's loss
python runs.py mixture --config recipes/NAME.yaml --output sweeps/y  # optimize data mixture weights with small runs

save, stop, abort and anneal work from any machine with access to the run's folder. To resume a sweep or mixture, run
the same command again.
"""

import argparse
import pkgutil
import sys
from pathlib import Path
from typing import Any

from pretrain.errors import Problems, run_script
from pretrain.runs.control import COMMANDS

Commands = argparse._SubParsersAction
"""Return type of `add_subparsers`, which has no public name."""
ROOT_OF_RUNS = {"nargs": "?", "default": Path("runs")}
RUN = {"metavar": "RUN"}
SEVERAL_RUNS = {"nargs": "+", "metavar": "RUN"}
ANY_SETTING = "Override any recipe setting, as in train.py, for example"
TRAINING = ("parity", "sweep", "mixture")
"""Commands that train. Their remaining arguments are recipe settings."""


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
    """Builds the command line. Each subcommand's function is named as MODULE:FUNCTION in pretrain_tools."""
    root = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = root.add_subparsers(required=True, metavar="COMMAND", dest="subcommand")
    add_readers(commands)
    for name in COMMANDS:
        command = add_command(commands, name, "pretrain_tools.runs.commands:steer", run=RUN)
        command.set_defaults(command=name)
        command.add_argument("--timeout", type=positive, default=60.0, help="seconds to wait (default: 60)")
    add_experiments(commands)
    return root


def add_command(
    commands: Commands,
    name: str,
    function: str,
    epilog: str = "",
    **given: dict[str, Any],
) -> argparse.ArgumentParser:
    """Adds a subcommand that passes its arguments to a function by name.

    given: {positional argument: argparse options}. The default type is Path.
    """
    command = commands.add_parser(name, epilog=epilog)
    command.set_defaults(function=function)
    for argument, options in given.items():
        command.add_argument(argument, **{"type": Path, **options})
    return command


def add_readers(commands: Commands) -> None:
    add_command(commands, "list", "pretrain_tools.runs.status:list_text", folder=ROOT_OF_RUNS)
    add_command(commands, "status", "pretrain_tools.runs.status:status_text", folder={**ROOT_OF_RUNS, **RUN})
    command = add_command(commands, "plot", "pretrain_tools.runs.plots:plot_runs", folders=SEVERAL_RUNS)
    text = "output file (default: plot.png in the run folder, or in the folder that contains the runs)"
    command.add_argument("--output", type=Path, metavar="FILE.png", help=text)
    add_command(commands, "compare", "pretrain_tools.runs.comparison:comparison_text", folders=SEVERAL_RUNS)
    add_command(commands, "summary", "pretrain_tools.runs.comparison:summary_text", run=RUN)
    command = add_command(commands, "documents", "pretrain_tools.runs.step_documents:documents_text", run=RUN)
    command.add_argument("--step", type=natural, required=True, help="step number as logged (the first step is 1)")
    command.add_argument("--limit", type=natural, default=8, help="number of sequences to show (default: 8)")

    models = {"nargs": "+", "metavar": "MODEL", "help": "a run, RUN@STEP, or a model folder", "type": str}
    command = add_command(commands, "merge", "pretrain_tools.runs.merge:merge_models", models=models)
    command.add_argument("--last", type=natural, metavar="N", help="with a run: merge its N newest checkpoints")
    text = "raw, or average for the checkpoints' averaged weights; average also accepts a single model (default: raw)"
    command.add_argument("--weights", choices=["raw", "average"], default="raw", help=text)
    command.add_argument(
        "--output", type=Path, metavar="FOLDER", help="output folder (default: merged-FIRST-LAST in the run folder)"
    )
    text = "run Python code from the model folders (off by default)"
    command.add_argument("--trust_remote_code", action="store_true", help=text)


def add_experiments(commands: Commands) -> None:
    epilog = f"{ANY_SETTING} --data.sequence_length 256"
    command = add_command(commands, "parity", "pretrain_tools.experiments.parity:compare_strategies", epilog)
    command.add_argument("--config", dest="recipe", type=Path, required=True, metavar="RECIPE", help="recipe to train")
    command.add_argument("--steps", type=natural, default=50, help="optimizer steps per run (default: 50)")
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

    command = add_command(commands, "sweep", f"{__name__}:sweep", f"{ANY_SETTING} --budget.steps 500")
    text = "setting and values to try, in all combinations; with --search, a range: optim.learning_rate=1e-4..1e-2"
    command.add_argument("--vary", action="append", required=True, metavar="SETTING=V1,V2", help=text)
    add_small_runs(command, "number of seeds per setting, starting from the recipe's seed (default: 1)")
    command.add_argument("--search", type=natural, metavar="N", help="try N settings chosen by Optuna")

    command = add_command(
        commands,
        "mixture",
        "pretrain_tools.experiments.mixture:run_mixture",
        f"{ANY_SETTING} --budget.steps 500",
    )
    command.add_argument(
        "--runs",
        dest="count",
        type=natural,
        default=16,
        help="number of mixtures, including the recipe's own (default: 16)",
    )
    add_small_runs(command, "number of seeds per mixture (default: 1)")

    several = {**SEVERAL_RUNS, "metavar": "RUN_OR_SWEEP"}
    command = add_command(commands, "ladder", "pretrain_tools.experiments.ladder:report_ladder", folders=several)
    text = "run to predict: parameters=30M,tokens=600M, or a recipe; can be repeated"
    command.add_argument("--predict", action="append", default=[], metavar="RUN", help=text)
    text = (
        "output path without suffix (default: ladder in the given folder, or in the current one if you pass several)"
    )
    command.add_argument("--output", type=Path, metavar="PATH", help=text)


def add_small_runs(command: argparse.ArgumentParser, seeds: str) -> None:
    command.add_argument("--config", dest="recipe", type=Path, required=True, metavar="RECIPE", help="base recipe")
    command.add_argument("--seeds", type=natural, default=1, help=seeds)
    command.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="output folder")
    command.add_argument(
        "--parallel", type=natural, metavar="N", help="number of parallel runs (default: one per GPU, or 1)"
    )


def training_options(vary: list[str] | None, rest: list[str]) -> dict[str, Any]:
    """Parses recipe settings and a sweep's --vary. Raises InputError listing all problems."""
    from pretrain.recipe import pair_up
    from pretrain_tools.experiments.sweep_plan import read_axes

    problems = Problems()
    options = {"changes": problems.attempt(pair_up, rest)}
    if vary is not None:
        options["axes"] = problems.attempt(read_axes, vary)
    problems.stop_if_any()
    return {name: tuple(values) for name, values in options.items()}


def sweep(parallel: int | None, **options: Any) -> int:
    """Trains a recipe with several settings and compares the results."""
    from pretrain_tools.experiments.sweep import run_sweep
    from pretrain_tools.experiments.sweep_plan import SweepRequest

    return run_sweep(SweepRequest(**options), parallel)


def main() -> int:
    arguments, rest = parser().parse_known_args(sys.argv[1:])
    options = vars(arguments)
    function = options.pop("function")
    if options.pop("subcommand") in TRAINING:
        options |= training_options(options.pop("vary", None), rest)
    elif rest:
        parser().error(f"unrecognized arguments: {' '.join(rest)}")
    # Import it only now, so that `list` and `status` don't load heavy libraries.
    result = pkgutil.resolve_name(function)(**options)
    if isinstance(result, int):
        return result
    if result is not None:
        print(result)
    return 0


if __name__ == "__main__":
    run_script(main)
