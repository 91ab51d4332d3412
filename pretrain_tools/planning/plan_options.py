"""Reads and checks plan.py's hardware and budget options before torch is imported."""

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.errors import InputError, Problems, did_you_mean
from pretrain.gpus import CPU, GIB, GPUS, Gpu, gpu_called
from pretrain.units import parse_count
from pretrain_tools.planning.families import FAMILIES
from pretrain_tools.planning.texts import RecipePlace

if TYPE_CHECKING:
    from pretrain_tools.planning.step_time import Hardware

DIALS = ("hours", "dollars", "flops")
BUDGET_OPTIONS = (*DIALS, "family", "vocabulary", "data", "tokens_per_parameter", "ladder", "write")
"""Options that request a recipe."""
LARGEST_VOCABULARY = 2**22


def parse_arguments(description: str, arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns (plan.py's own options, the recipe settings on the command line)."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--config", metavar="RECIPE", help="recipe to plan")
    add("--gpus", type=int, default=1, help="total number of GPUs [1]")
    add("--gpu", help="GPU model, such as h100, a100 or rtx4090, or cpu for this machine's CPU; for other GPUs, "
        "also pass --gpu_memory and --peak_tflops [h100]")  # fmt: skip
    add("--machines", type=int, help="number of machines [one per 8 GPUs]")
    add("--gpu_memory", metavar="80GB", help="memory per GPU (1 GB is 2^30 bytes)")
    add("--peak_tflops", type=float, help="peak dense TFLOP/s per GPU in the run's precision (for fp8, in bf16)")
    add("--price_per_gpu_hour", type=float, metavar="USD", help="price per GPU-hour")
    add("--network_gbits", type=float, help="network bandwidth per GPU between machines, in Gbit/s")
    add("--mfu", type=float, help="expected MFU, such as 0.45 [depends on the model size]")
    add("--json", action="store_true", help="print the plan as JSON")
    add("--comment", action="store_true", help="print the plan as a header comment for the recipe")
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
    return parser.parse_known_args(arguments)


def option_problems(options: argparse.Namespace) -> Problems:
    """Lists problems with plan.py's own options."""
    problems = Problems()
    gpus = options.gpus
    machines = options.machines
    if gpus < 1:
        problems.append(f"--gpus {gpus}: must be at least 1")
    if machines is not None and (machines < 1 or (gpus > 0 and gpus % machines)):
        problems.append(f"--machines {machines}: must divide the number of GPUs ({gpus})")
    if machines is None and gpus > 8 and gpus % 8:
        problems.append(f"--gpus {gpus}: must be a multiple of 8, the default per machine; otherwise, set --machines")
    if options.mfu is not None and not 0 < options.mfu <= 1:
        problems.append(f"--mfu {options.mfu}: must be above 0 and at most 1; write 40% as 0.4")
    if options.price_per_gpu_hour is not None and not 0 <= options.price_per_gpu_hour < math.inf:
        problems.append(f"--price_per_gpu_hour {options.price_per_gpu_hour:g}: must be at least 0 and finite")
    for name in ("peak_tflops", "network_gbits", *DIALS, "tokens_per_parameter"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            problems.append(f"--{name} {value:g}: must be positive and finite")
    return problems


def parse_size(text: str) -> float:
    """Converts '80GB' to bytes. GB is 2^30 bytes, as in GPU specifications. Raises InputError."""
    try:
        size = float(text.strip().upper().removesuffix("GB"))
    except ValueError:
        size = 0.0
    if not 0 < size < math.inf:
        raise InputError(f"--gpu_memory {text}: must be a size, such as 80GB")
    return size * GIB


def given_figures(options: argparse.Namespace) -> dict[str, float]:
    """Returns {field of Gpu: value given on the command line}. Raises InputError for an invalid --gpu_memory."""
    figures = {
        "memory_bytes": options.gpu_memory and parse_size(options.gpu_memory),
        "bf16_flops": options.peak_tflops and options.peak_tflops * 1e12,
        "fp32_flops": options.peak_tflops and options.peak_tflops * 1e12,
        "price_per_hour": options.price_per_gpu_hour,
        "network_bytes_per_second": options.network_gbits and options.network_gbits * 1e9 / 8,
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def gpu_of(options: argparse.Namespace) -> Gpu | None:
    """Returns the GPU named by --gpu, or None for this machine's CPU, because measuring it requires torch."""
    figures = given_figures(options)
    return None if options.gpu == CPU else find_gpu(options.gpu or "h100", **figures)


def hardware_of(options: argparse.Namespace, gpu: Gpu | None) -> "Hardware":
    """Describes the hardware. Raises InputError if no memory is left for tensors.

    gpu: see `gpu_of`.
    """
    from pretrain_tools.planning.step_time import Hardware

    gpu = gpu or replace(cpu_as_gpu(options.gpus), **given_figures(options))
    hardware = Hardware(gpu, options.gpus, options.machines or -(-options.gpus // 8))
    if hardware.usable_bytes <= 0:
        reserved = gpu.memory_bytes - hardware.usable_bytes
        raise InputError(
            f"memory: {gpu.memory_bytes / GIB:.1f} GB per {hardware.unit} must be more than the {reserved / GIB:.1f} "
            f"GB that plan.py reserves; use {'fewer processes' if gpu.name == CPU else 'GPUs with more memory'}"
        )
    return hardware


def find_gpu(name: str, **given: float) -> Gpu:
    """Looks up a GPU by name. Raises InputError for an unlisted GPU without memory_bytes and bf16_flops.

    given: fields of Gpu that override the table.
    """
    key = name.lower().replace("-", "_").replace(" ", "_")
    if (known := gpu_called(name)) is not None:
        return replace(known, **given)
    if not {"memory_bytes", "bf16_flops"} <= given.keys():
        raise InputError(
            f"--gpu: {name} is not a known GPU{did_you_mean(key, [*GPUS, CPU])}; for other GPUs, also pass "
            "--gpu_memory and --peak_tflops, such as --gpu_memory 80GB --peak_tflops 989"
        )
    # Defaults for a GPU in a typical machine: PCIe 4, 25 Gbit/s, 350 W.
    common = Gpu(key, 0, 0, None, None, 1e12, 32e9, 3e9, 350, 0.0)
    return replace(common, **given)


def cpu_as_gpu(processes: int) -> Gpu:
    """Describes this machine's CPU, shared by this many processes, as a GPU. Measures its speed for 0.5 s."""
    import torch

    from pretrain.hardware import missing_bf16, peak_flops
    from pretrain.limits import available_memory

    has_bf16 = missing_bf16("cpu") is None
    in_fp32 = peak_flops(torch.device("cpu"), "fp32")[0] / processes
    in_bf16 = peak_flops(torch.device("cpu"), "bf16")[0] / processes if has_bf16 else in_fp32
    return Gpu(
        CPU,
        memory_bytes=available_memory() / processes,
        bf16_flops=in_bf16,
        fp8_flops=None,
        fp32_flops=in_fp32,
        memory_bytes_per_second=2e10,
        link_bytes_per_second=5e9,
        network_bytes_per_second=1e8,
        watts=0.0,
        price_per_hour=0.0,
        has_bf16=has_bf16,
    )


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
    # gpu is also None for an unknown --gpu, which has already been reported.
    price = gpu.price_per_hour if gpu else options.price_per_gpu_hour
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
    tokens = manifest.totals("train")[0]
    if not tokens:
        raise InputError(f"--data {given}: contains no training tokens; use shards with a train split")
    return manifest.vocabulary_size, tokens
