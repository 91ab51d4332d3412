"""Evaluates models: loss on prepared shards, lm-evaluation-harness tasks, and text samples.

    python evaluate.py --model runs/x --data data/docs                     # loss, perplexity, bits per byte
    python evaluate.py --model runs/x@500 runs/x/final --tasks base        # compare two models
    python evaluate.py --model runs/x --tasks small                        # bits per byte, for models below 1B
    python evaluate.py --model me/llama@main --tasks my_task --include_path tasks --output results.json
    python evaluate.py --model runs/x --interactive                        # continue text that you type
    python evaluate.py --model runs/x/final --prompt 'Once' --max_new_tokens 100
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 2 evaluate.py --model runs/x ...

--model accepts a run (uses its final/ or, if there is none, its newest valid checkpoint), RUN@STEP, RUN@best, RUN@all,
a Hugging Face folder, or a Hub ID, optionally with @REVISION (branch, tag or commit). Results don't depend on the
number of processes.
"""

# The harness may import this file instead of the evaluate library, so importing it must be fast.
import argparse
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

from pretrain.errors import InputError, did_you_mean, run_script
from pretrain.files import place_of
from pretrain.registry import load_extensions
from pretrain.terminal import announce_loading


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--model", nargs="+", default=[], metavar="MODEL", help="one or more models to evaluate (see above)")
    add("--output", type=Path, metavar="FILE", help="also write all results to FILE as JSON")
    add("--weights", default="raw", help="raw, or average for the checkpoint's averaged weights [raw]")
    add(
        "--precision",
        default="auto",
        help="auto, bf16, fp16 or fp32; auto uses the saved dtype for --tasks and the training precision for --data",
    )
    add("--trust_remote_code", action="store_true", help="run Python code from the model folder (off by default)")
    add("--extensions", nargs="+", default=[], metavar="FILE", help="Python files with your own tasks and models")
    add = parser.add_argument_group("lm-evaluation-harness tasks").add_argument
    add(
        "--tasks",
        nargs="+",
        default=[],
        metavar="TASK",
        help="task names, groups, patterns or .yaml files, or a set of tasks: base, small or core (DCLM's CORE)",
    )
    add("--include_path", type=Path, metavar="FOLDER", help="folder with your own task .yaml files")
    add("--eval_bundle", type=Path, metavar="FOLDER", help="folder with DCLM's evaluation bundle, for --tasks core")
    add("--num_fewshot", metavar="N", help="few-shot examples per prompt [the task's default]")
    add("--limit", metavar="N", help="evaluate N documents per task, or a fraction below 1 (for quick tests)")
    add(
        "--batch_size",
        metavar="N",
        help="sequences per forward pass, or auto "
        "[--tasks: auto on a GPU, otherwise 1; --data: from the run, otherwise 8]",
    )
    add = parser.add_argument_group("loss on prepared shards").add_argument
    add("--data", nargs="+", default=[], type=place_of, metavar="FOLDER", help="shard folders or URLs, or a .bin file")
    add("--tokenizer", metavar="NAME", help="tokenizer (folder or Hub ID) for a .bin file made by another tool")
    add("--split", default="validation", help="validation or train [validation]")
    add("--sequences", metavar="N", help="evaluate N sequences spread across the split [all]")
    add(
        "--sequence_length",
        metavar="N",
        help="tokens per sequence [from the run; otherwise from the model, at most 2048]",
    )
    add("--document_mask", metavar="on|off", help="attend only within each document [from the run; otherwise on]")
    add = parser.add_argument_group("text samples").add_argument
    add("--interactive", action="store_true", help="continue text that you type; also works during training")
    add("--prompt", metavar="TEXT", help="continue this text")
    add("--max_new_tokens", default="100", metavar="N", help="maximum number of tokens to generate [100]")
    add("--temperature", default="0.8", metavar="X", help="sampling temperature; 0 for greedy decoding [0.8]")
    add("--top_k", metavar="N", help="sample from the N most likely tokens; 0 for all [50]")
    add("--top_p", metavar="P", help="sample from the most likely tokens with total probability P [all]")
    add("--seed", default="0", metavar="N", help="sampling seed [0]")
    return parser


def read_arguments(argv: list[str]) -> argparse.Namespace:
    """Parses and checks the command line, without reading files. Raises InputError listing all problems."""
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(argv)
    # argparse has no public API to list options.
    flags = [flag for action in parser._actions for flag in action.option_strings]
    problems = [f"{word}: unknown{did_you_mean(word, flags)}" for word in unknown if word.startswith("-")]
    stray = [word for word in unknown if not word.startswith("-")]
    problems += [f"{word}: unexpected argument; put prompts with several words in quotes" for word in stray]
    if not arguments.model:
        problems.append("--model is required; use a run, RUN@STEP, a Hugging Face folder or a Hub ID")
    problems += option_problems(arguments)
    arguments.tasks = [task for text in arguments.tasks for task in text.split(",") if task]
    if arguments.num_fewshot is not None and "core" in arguments.tasks:
        problems.append("--num_fewshot: cannot be used with core, whose few-shot counts are fixed; omit it")
    if arguments.interactive:
        if other := [flag for flag in ("tasks", "data", "output") if getattr(arguments, flag)]:
            problems.append(f"--interactive: cannot be combined with --{', --'.join(other)}")
        if sys.stdin is None:
            problems.append("--interactive: standard input is closed; use a terminal, a pipe or --prompt TEXT")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            problems.append("--interactive: must run in a single process; start it with python evaluate.py")
    elif not arguments.tasks and not arguments.data and arguments.prompt is None:
        problems.append(
            "nothing to do: use --data FOLDER (loss), --tasks NAMES (benchmarks, such as base), --prompt TEXT or "
            "--interactive"
        )
    if problems:
        raise InputError(*problems)
    return arguments


def option_problems(arguments: argparse.Namespace) -> list[str]:
    """Parses the choices and numbers in place. Returns a list of problems. Invalid values stay unchanged."""
    from pydantic import Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

    kinds = {
        "weights": Literal["raw", "average"],
        "precision": Literal["auto", "bf16", "fp16", "fp32"],
        "split": Literal["validation", "train"],
        "document_mask": Literal["on", "off"] | None,
        "batch_size": PositiveInt | Literal["auto"] | None,
        "num_fewshot": NonNegativeInt | None,
        "limit": Annotated[float, Field(gt=0, allow_inf_nan=False)] | None,
        "sequences": PositiveInt | None,
        "sequence_length": PositiveInt | None,
        "max_new_tokens": PositiveInt,
        "temperature": Annotated[float, Field(ge=0, allow_inf_nan=False)],
        "top_k": NonNegativeInt | None,
        "top_p": Annotated[float, Field(gt=0, le=1)] | None,
        "seed": Annotated[int, Field(ge=0, lt=2**63)],
    }
    problems = []
    for name, kind in kinds.items():
        given = getattr(arguments, name)
        try:
            setattr(arguments, name, TypeAdapter(kind).validate_python(given))
        except ValidationError as error:  # an option with several types has an error for each of them
            allowed = [problem["msg"].removeprefix("Input should be ") for problem in error.errors()]
            problems.append(f"--{name} {given}: must be {' or '.join(allowed)}")
    limit = arguments.limit
    if isinstance(limit, float) and limit >= 1 and not limit.is_integer():
        problems.append(f"--limit {limit}: must be a whole number of documents, or a fraction below 1")
    given = [f"--{name}" for name in ("top_k", "top_p") if getattr(arguments, name) is not None]
    if given and arguments.temperature == 0:
        problems.append(
            f"{' and '.join(given)}: cannot be used with --temperature 0, which is greedy decoding; omit one of them"
        )
    return problems


def main(argv: list[str]) -> None:
    arguments = read_arguments(argv)  # before importing torch, so that --help is fast

    announce_loading()
    load_extensions(arguments.extensions)
    if not sys.stderr.isatty():  # fewer lines in a log file; tqdm reads this on import
        os.environ.setdefault("TQDM_MININTERVAL", "10")
    from pretrain_tools.evaluation.evaluate import evaluate_models, talk_to_model

    if arguments.interactive:
        talk_to_model(arguments)
        return
    _, strategy = evaluate_models(arguments)
    strategy.ranks.exit(0)


if __name__ == "__main__":
    run_script(lambda: main(sys.argv[1:]))
