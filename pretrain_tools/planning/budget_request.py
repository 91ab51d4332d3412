"""Reads and checks plan.py's budget options before torch is imported."""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

from pretrain.errors import InputError, Problems, did_you_mean
from pretrain.gpus import CPU, Gpu
from pretrain.units import parse_count
from pretrain_tools.planning.families import FAMILIES
from pretrain_tools.planning.texts import RecipePlace

DIALS = ("hours", "dollars", "flops")
BUDGET_OPTIONS = (*DIALS, "family", "vocabulary", "data", "tokens_per_parameter", "ladder", "write")
"""Options that request a recipe."""
LARGEST_VOCABULARY = 2**22


def add_budget_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("make a recipe for a budget (instead of --config)").add_argument
    add("--hours", type=float, help="total wall-clock time in hours")
    add("--dollars", type=float, help="budget in US dollars")
    add("--flops", type=float, help="training FLOPs, such as 1e19")
    add("--family", help=f"model family: {', '.join(FAMILIES)} [llama]")
    add("--vocabulary", metavar="FROM", help="tokenizer folder or vocabulary size, if there is no --data")
    add(
        "--data",
        metavar="FOLDER",
        help="prepared shards; determines the vocabulary size, and repeated text counts for less",
    )
    add(
        "--tokens_per_parameter",
        type=float,
        help="training tokens per parameter; with higher values, a smaller model is trained for longer [20]",
    )
    add("--ladder", type=Path, metavar="JSON", help="ladder.json written by runs.py ladder, to predict the loss")
    add("--write", metavar="RECIPE", help="recipe to write; also writes the model's JSON to model_configs/")


def asks_for_recipe(arguments: argparse.Namespace) -> bool:
    return any(getattr(arguments, name) is not None for name in BUDGET_OPTIONS)


@dataclass(frozen=True)
class BudgetRequest:
    """Validated budget options."""

    options: argparse.Namespace
    """plan.py's options (see `add_budget_options`)."""
    vocabulary: int
    """Vocabulary size."""
    unique_tokens: float
    """Number of tokens in the data; infinite without --data."""
    place: RecipePlace


def read_budget_request(
    options: argparse.Namespace, rest: list[str], problems: Problems, gpu: Gpu | None
) -> BudgetRequest:
    """Validates the options and fills in defaults. Raises InputError listing all problems.

    Args:
        rest: recipe settings on the command line.
        problems: problems found so far.
        gpu: None for this machine's CPU, or if --gpu is unknown.
    """
    problems += option_contradictions(options, rest, gpu)
    vocabulary = None
    unique_tokens = math.inf
    if options.vocabulary is not None:
        vocabulary = problems.attempt(vocabulary_asked_for, options.vocabulary)
    if options.data is not None:
        vocabulary, unique_tokens = problems.attempt(data_asked_for, options.data) or (0, 0)
    place = place_of(options)
    if options.write is not None:
        problems += [
            f"--write: {path} already exists; remove it or use a different name"
            for path in (place.recipe, place.model)
            if path.exists()
        ]
    problems.stop_if_any()
    return BudgetRequest(options, vocabulary, unique_tokens, place)


def place_of(options: argparse.Namespace) -> RecipePlace:
    recipe = Path(options.write or "recipes/mine.yaml")
    output = Path("runs", recipe.stem)
    if options.data is not None:
        return RecipePlace(recipe, Path(options.data), output, is_prepared=True)
    given = options.vocabulary
    tokenizer = given if given is not None and not isinstance(parse_count(given), int) else None
    return RecipePlace(recipe, Path("data", recipe.stem), output, tokenizer)


def option_contradictions(options: argparse.Namespace, rest: list[str], gpu: Gpu | None) -> Problems:
    """Lists problems with the options. See `read_budget_request` for the arguments."""
    problems = Problems()
    given = {name: getattr(options, name) for name in DIALS if getattr(options, name) is not None}
    if len(given) != 1:
        names = f" (got {' and '.join(f'--{name} {value:g}' for name, value in given.items())})" if given else ""
        problems.append(f"budget: use exactly one of --hours, --dollars and --flops{names}")
    for name in (*DIALS, "tokens_per_parameter"):
        value = getattr(options, name)
        if value is not None and not (0 < value < math.inf):
            problems.append(f"--{name} {value:g}: must be positive and finite")
    # gpu is also None for an unknown --gpu, which has already been reported.
    price = options.price_per_gpu_hour if options.price_per_gpu_hour is not None else gpu and gpu.price_per_hour
    if options.dollars is not None and not price and (options.gpu == CPU or gpu is not None):
        problems.append(
            f"--dollars: the price of {options.gpu or 'this machine'} is unknown; set --price_per_gpu_hour"
        )
    family = options.family
    if family is not None and family not in FAMILIES:
        problems.append(f"--family {family}: must be one of {', '.join(FAMILIES)}{did_you_mean(family, FAMILIES)}")
    if (options.vocabulary is None) == (options.data is None):
        problems.append("use either --data (prepared shards) or --vocabulary (a tokenizer folder or a number)")
    for name in ("config", "comment", "json"):
        if getattr(options, name):
            problems.append(
                f"--{name}: can't be combined with a budget, because plan.py creates a new recipe for it; omit one"
            )
    if rest:
        problems.append(f"{rest[0]}: with a budget, plan.py chooses the settings; edit the generated recipe instead")
    if options.write is not None and Path(options.write).suffix not in (".yaml", ".yml"):
        problems.append(f"--write {options.write}: recipe names must end in .yaml")
    return problems


def vocabulary_asked_for(given: str) -> int:
    """Returns the vocabulary size for a number or a tokenizer. Raises InputError."""
    count = parse_count(given)
    if isinstance(count, int) or given.lstrip("-").isdecimal():
        count = int(count)
        if not 2 <= count <= LARGEST_VOCABULARY:
            raise InputError(f"--vocabulary {given}: must be between 2 and {LARGEST_VOCABULARY:,}")
        return count
    # Imported here so that --help doesn't need numpy.
    from pretrain.data.tokenizer import load_tokenizer

    return load_tokenizer(given).vocabulary_size


def data_asked_for(given: str) -> tuple[int, int]:
    """Returns (vocabulary size, number of training tokens) of prepared shards. Raises InputError."""
    from pretrain.data.shards import read_manifest

    manifest = read_manifest(given)
    return manifest.vocabulary_size, manifest.totals("train")[0]
