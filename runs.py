"""Looks at runs.

python runs.py parity --config recipes/NAME.yaml --steps 50     # the same losses under every strategy?
"""

import argparse
import sys
from pathlib import Path

from pretrain.problems import run_script


def parity(arguments: argparse.Namespace) -> int:
    """Trains the recipe for a few steps under each strategy and compares; exit status 1 if one differs."""
    from pretrain.parity import measure_parity, strategy_names

    return measure_parity(
        arguments.config,
        arguments.output,
        steps=arguments.steps,
        strategies=arguments.strategies.split(",") if arguments.strategies else strategy_names(),
        processes=arguments.processes,
        precision=arguments.precision,
    )


def parser() -> argparse.ArgumentParser:
    """The command line, one subcommand per function above."""
    root = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = root.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("parity", help="does a recipe train alike under every strategy?")
    command.set_defaults(run=parity)
    command.add_argument("--config", type=Path, required=True, metavar="RECIPE")
    command.add_argument("--steps", type=int, default=50, help="optimizer steps of each run (default 50)")
    command.add_argument(
        "--strategies", help="files of accelerate_configs by name, with commas (default: all but zero3_offload_nvme)"
    )
    command.add_argument("--processes", type=int, default=2, help="of every strategy but single (default 2)")
    command.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32", help="(default fp32)")
    command.add_argument("--output", type=Path, default=Path("runs/parity"), help="(default runs/parity)")
    return root


def main() -> int:
    arguments = parser().parse_args(sys.argv[1:])
    return arguments.run(arguments)


if __name__ == "__main__":
    run_script(main)
