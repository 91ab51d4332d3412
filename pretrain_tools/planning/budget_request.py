"""plan.py's options for a recipe from a budget, read and checked; answers a mistyped one before torch is imported."""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

from pretrain.errors import InputError, Problems, did_you_mean
from pretrain.gpus import CPU, Gpu
from pretrain.units import parse_count
from pretrain_tools.planning.families import FAMILIES, Family

DIALS = ("hours", "dollars", "flops")
BUDGET_OPTIONS = (*DIALS, "family", "vocabulary", "data", "tokens_per_parameter", "optimizer", "ladder", "write")
"""Those that ask for a recipe."""
OPTIMIZERS_CHOSEN = ("muon", "adamw")
LARGEST_VOCABULARY = 2**22
MANIFEST_NAME = "manifest.json"


def add_budget_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("from a budget to a recipe, in the place of --config").add_argument
    add("--hours", type=float, help="time on the GPUs, of everything")
    add("--dollars", type=float, help="the same as money, at the GPUs' price")
    add("--flops", type=float, help="computation of the training alone, such as 1e19")
    add("--family", help=f"{', '.join(FAMILIES)} [llama]")
    add("--vocabulary", metavar="WHAT", help="a tokenizer's folder, prepared shards, or a number of ids")
    add("--data", metavar="FOLDER", help="prepared shards: their vocabulary, and what is repeated counts less")
    add(
        "--tokens_per_parameter", type=float, help="more than 20: a smaller model, trained for longer [Hoffmann's law]"
    )
    add("--optimizer", help=f"{', '.join(OPTIMIZERS_CHOSEN)} [muon]")
    add("--ladder", type=Path, metavar="JSON", help="runs.py ladder's: says what loss to expect")
    add("--write", metavar="RECIPE", help="recipe to write, with a model's JSON in model_configs/")


def asks_for_recipe(arguments: argparse.Namespace) -> bool:
    return any(getattr(arguments, name) is not None for name in BUDGET_OPTIONS)


@dataclass(frozen=True)
class RecipePlace:
    """Where a recipe and its parts go: recipes/mine.yaml, model_configs/mine.json, data/mine, runs/mine."""

    recipe: Path
    shards: Path
    """The data: as given, else to be prepared there."""
    tokenizer: str | None = None
    """For the command that prepares it."""
    is_prepared: bool = False

    @property
    def model(self) -> Path:
        return Path("model_configs", f"{self.recipe.stem}.json")

    @property
    def output(self) -> Path:
        return Path("runs", self.recipe.stem)


@dataclass(frozen=True)
class BudgetRequest:
    """What is asked for; the dials as on the command line."""

    hours: float | None
    dollars: float | None
    flops: float | None
    family: Family
    vocabulary: int
    """Ids."""
    unique_tokens: float
    """Of the data; infinite where none is named."""
    tokens_per_parameter: float | None
    optimizer: str
    mfu: float | None
    ladder: Path | None
    place: RecipePlace
    writes: bool
    as_json: bool


def read_budget_request(
    arguments: argparse.Namespace, rest: list[str], problems: Problems, gpu: Gpu | None
) -> BudgetRequest:
    """Raises InputError with everything wrong.

    Args:
        rest: settings of a recipe on the command line.
        problems: found so far.
        gpu: None for this machine's own, or where it is unknown.
    """
    problems += option_contradictions(arguments, rest, gpu)
    vocabulary, unique_tokens = None, math.inf
    if arguments.vocabulary is not None:
        vocabulary = problems.attempt(vocabulary_asked_for, arguments.vocabulary)
    if arguments.data is not None:
        vocabulary, unique_tokens = problems.attempt(data_asked_for, arguments.data, vocabulary) or (0, 0)
    place = place_of(arguments)
    if arguments.write is not None:
        problems += [
            f"--write: {path} is there already; remove it, or give another name"
            for path in (place.recipe, place.model)
            if path.exists()
        ]
    problems.stop_if_any()
    return BudgetRequest(
        hours=arguments.hours,
        dollars=arguments.dollars,
        flops=arguments.flops,
        family=FAMILIES[arguments.family or "llama"],
        vocabulary=vocabulary,
        unique_tokens=unique_tokens,
        tokens_per_parameter=arguments.tokens_per_parameter,
        optimizer=arguments.optimizer or OPTIMIZERS_CHOSEN[0],
        mfu=arguments.mfu,
        ladder=arguments.ladder,
        place=place,
        writes=arguments.write is not None,
        as_json=arguments.json,
    )


def place_of(arguments: argparse.Namespace) -> RecipePlace:
    recipe, given = Path(arguments.write or "recipes/mine.yaml"), arguments.vocabulary
    if arguments.data is not None:
        return RecipePlace(recipe, Path(arguments.data), is_prepared=True)
    if given is not None and (Path(given) / MANIFEST_NAME).is_file():
        return RecipePlace(recipe, Path(given), is_prepared=True)
    tokenizer = given if given is not None and not isinstance(parse_count(given), int) else None
    return RecipePlace(recipe, Path("data", recipe.stem), tokenizer)


def option_contradictions(arguments: argparse.Namespace, rest: list[str], gpu: Gpu | None) -> Problems:
    """What is wrong with the options alone; arguments as of `read_budget_request`."""
    problems = Problems()
    given = {name: getattr(arguments, name) for name in DIALS if getattr(arguments, name) is not None}
    if len(given) != 1:
        names = f" (got {' and '.join(f'--{name} {value:g}' for name, value in given.items())})" if given else ""
        problems.append(f"budget: give one of --hours, --dollars and --flops{names}")
    positive = (*DIALS, "tokens_per_parameter")
    for name in positive:
        value = getattr(arguments, name)
        if value is not None and not (0 < value < math.inf):
            problems.append(f"--{name} {value:g}: must be above 0, and finite")
    is_cpu = arguments.gpu == CPU
    price = arguments.price_per_gpu_hour if arguments.price_per_gpu_hour is not None else gpu and gpu.price_per_hour
    if arguments.dollars is not None and not price and (is_cpu or gpu is not None):
        problems.append(f"--dollars: {arguments.gpu or 'this machine'} has no price; give --price_per_gpu_hour")
    if arguments.family is not None and arguments.family not in FAMILIES:
        hint = did_you_mean(arguments.family, FAMILIES)
        problems.append(f"--family {arguments.family}: is not one of {', '.join(FAMILIES)}{hint}")
    if arguments.optimizer is not None and arguments.optimizer not in OPTIMIZERS_CHOSEN:
        problems.append(f"--optimizer {arguments.optimizer}: is not one of {', '.join(OPTIMIZERS_CHOSEN)}")
    if arguments.vocabulary is None and arguments.data is None:
        problems.append(
            "--vocabulary: is missing: a tokenizer's folder, prepared shards, or a number of ids; --data gives it too"
        )
    for name in ("config", "calibrate", "comment"):
        if getattr(arguments, name):
            problems.append(f"--{name}: is for a recipe that is there, and a budget makes one; leave one of them out")
    if rest:
        problems.append(f"{rest[0]}: a recipe's settings are chosen here; change them in the recipe that is written")
    if arguments.write is not None and Path(arguments.write).suffix not in (".yaml", ".yml"):
        problems.append(f"--write {arguments.write}: a recipe ends in .yaml")
    return problems


def vocabulary_asked_for(given: str) -> int:
    """Ids of a tokenizer, of prepared shards, or as a number. Raises InputError."""
    count = parse_count(given)
    if isinstance(count, int) or given.lstrip("-").isdecimal():
        count = int(count)
        if not 2 <= count <= LARGEST_VOCABULARY:
            raise InputError(f"--vocabulary {given}: must be from 2 to {LARGEST_VOCABULARY:,} ids")
        return count
    # Here and not above: --help answers without numpy.
    from pretrain.data.shards import read_manifest
    from pretrain.data.tokenizer import load_tokenizer

    if (Path(given) / MANIFEST_NAME).is_file():
        return read_manifest(given).vocabulary_size
    return load_tokenizer(given).vocabulary_size


def data_asked_for(given: str, vocabulary: int | None) -> tuple[int, int]:
    """(ids, tokens of the training split) of prepared shards. Raises InputError."""
    from pretrain.data.shards import read_manifest

    manifest = read_manifest(given)
    if vocabulary is not None and manifest.vocabulary_size > vocabulary:
        raise InputError(
            f"--vocabulary: {vocabulary:,} ids, but --data {given} has {manifest.vocabulary_size:,}; leave it out"
        )
    return vocabulary or manifest.vocabulary_size, manifest.totals("train")[0]
