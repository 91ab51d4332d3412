"""Converts prepare_data.py's command line into a request, and reports all problems in a single error."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from pretrain.data.manifest import MANIFEST_FILE
from pretrain.data.tokenizer import load_tokenizer
from pretrain.errors import Problems
from pretrain.files import is_url
from pretrain.limits import available_cores
from pretrain.registry import load_extensions
from pretrain.units import parse_count
from pretrain_tools.preparation.arguments import COUNTS
from pretrain_tools.preparation.cleaning.decontamination import SHORTEST_RUN_WORDS, read_decontamination
from pretrain_tools.preparation.cleaning.filters import read_cleaning
from pretrain_tools.preparation.cleaning.near_duplicates import NearDuplicates
from pretrain_tools.preparation.cleaning.stages import Cleaning
from pretrain_tools.preparation.collector import UNFINISHED_FOLDER
from pretrain_tools.preparation.documents.formats import DOCUMENT_UNITS
from pretrain_tools.preparation.documents.hub_dataset import open_dataset
from pretrain_tools.preparation.documents.records import Reading, template_problem
from pretrain_tools.preparation.documents.sources import Files, find_sources
from pretrain_tools.preparation.plan import Documents, PreparationOptions, PreparationRequest
from pretrain_tools.preparation.slices import parse_slice, slice_of
from pretrain_tools.preparation.tokenizer_training import PRE_TOKENIZERS, RECORD_FILE
from pretrain_tools.preparation.upload import destination_of

CLEAN_NEAR_DUPLICATES = "0.8"
"""Near-duplicate threshold for --clean."""
SMALLEST_COUNTS = {"max_errors": 0, "decontaminate_words": SHORTEST_RUN_WORDS}
"""Minimum values for COUNTS; 1 for all others."""
REMOVE_DOCUMENTS = ("filter", "language", "clean", "decontaminate", "deduplicate", "near_duplicates", "max_tokens")
"""Options that can't be used to train a tokenizer or a classifier."""


def read_request(arguments: argparse.Namespace) -> PreparationRequest:
    """Creates the request from parsed arguments. Raises InputError listing all problems."""
    problems = Problems()
    _read_counts(arguments, problems)
    problems += _contradictions(arguments)
    problems.attempt(load_extensions, arguments.extensions)
    documents = problems.attempt(_documents, arguments)
    options = _options(arguments, documents, problems)
    tokenizer = None
    if arguments.tokenizer:
        tokenizer = problems.attempt(load_tokenizer, arguments.tokenizer, arguments.end_of_document)
    destination = None
    if is_url(arguments.output or ""):
        last = RECORD_FILE if arguments.train_tokenizer else MANIFEST_FILE
        destination = problems.attempt(destination_of, arguments.output, Path(arguments.staging), last)
    engines = arguments.engine.split(",")
    on_ray = "ray" in engines
    for engine in engines:
        if engine not in ("auto", "reference", "ray"):
            problems.append(f"--engine {engine}: must be auto, reference, ray or reference,ray")
    cores = available_cores()
    most = max(256, 16 * cores)
    if (arguments.workers or 0) > most and not on_ray:
        problems.append(f"--workers {arguments.workers:,}: this machine has {cores} cores; use at most {most:,}")
    slice = problems.attempt(parse_slice, arguments.slice) if arguments.slice is not None else None
    request = PreparationRequest(
        documents,
        options,
        tokenizer,
        destination.local if destination else Path(arguments.output or ""),
        engine="reference" if "reference" in engines else "auto",
        workers=arguments.workers or (None if on_ray else cores),
        on_ray=on_ray,
        ray_address=arguments.ray_address,
        merge_slices=arguments.merge_slices,
        vocabulary_size=arguments.train_tokenizer,
        sample_bytes=arguments.tokenizer_sample_bytes,
        pre_tokenizer=arguments.pre_tokenizer,
        special_tokens=tuple(arguments.special_tokens),
        destination=destination,
    )
    problems.stop_if_any()
    return slice_of(request, *slice) if slice else request


def read_examples(arguments: argparse.Namespace) -> tuple[Path, Reading]:
    """Returns (output folder, reading settings) for --train_classifier. Raises InputError listing all problems."""
    problems = Problems()
    if not arguments.output or is_url(arguments.output):
        problems.append("--output FOLDER is required and must be a local folder")
    other_modes = ("input", "dataset", "tokenizer", "train_tokenizer")
    problems += _unsupported("--train_classifier", arguments, (*other_modes, *REMOVE_DOCUMENTS, "max_documents"))
    problems.attempt(load_extensions, arguments.extensions)
    _read_counts(arguments, problems)
    reading = _reading(arguments, problems)
    problems.stop_if_any()
    return Path(arguments.output), reading


def _read_counts(arguments: argparse.Namespace, problems: list[str]) -> None:
    """Parses COUNTS in place. Adds invalid counts to `problems`."""
    for name in COUNTS:
        text = getattr(arguments, name)
        if text is None:
            continue
        value = parse_count(text)
        smallest = SMALLEST_COUNTS.get(name, 1)
        if not isinstance(value, int) or value < smallest:
            problems.append(
                f"--{name} {text}: must be a whole number of at least {smallest}, such as 5000, 2k, 10M or 1e9"
            )
            value = smallest
        setattr(arguments, name, value)


def _contradictions(arguments: argparse.Namespace) -> list[str]:
    """Lists problems with missing or conflicting options."""
    training = arguments.train_tokenizer
    is_slice = arguments.slice is not None
    has_slices = is_slice or arguments.merge_slices is not None
    checks = {
        "use either --input 'FILES' or --dataset NAME": bool(arguments.input) == bool(arguments.dataset),
        "--output FOLDER is required": not arguments.output,
        "use either --tokenizer FOLDER|FILE|HUB_ID, or --train_tokenizer SIZE to train one": (
            not arguments.tokenizer and not training
        ),
        "--pre_tokenizer and --special_tokens require --train_tokenizer SIZE": (
            (arguments.pre_tokenizer or arguments.special_tokens) and not training
        ),
        "--pre_tokenizer: cannot be combined with --tokenizer, which keeps its own pre-tokenizer": (
            arguments.pre_tokenizer and arguments.tokenizer
        ),
        "--special_tokens: a special token cannot be empty": "" in arguments.special_tokens,
        "use either --slice I/N, or --merge_slices N once all slices are prepared": (
            is_slice and arguments.merge_slices
        ),
        "--slice: not supported with --dataset; use its files instead, such as "
        "--input 'hf://datasets/OWNER/NAME/**/*.parquet'": has_slices and arguments.dataset,
        "--deduplicate: not needed with --near_duplicates, which also removes exact duplicates; omit it": (
            arguments.deduplicate and arguments.near_duplicates
        ),
    }
    problems = [problem for problem, is_there in checks.items() if is_there]
    if training:
        shard_options = ("write_text", "slice", "merge_slices")
        problems += _unsupported("--train_tokenizer", arguments, (*REMOVE_DOCUMENTS, *shard_options))
    if has_slices:
        problems += _unsupported("slices, which cannot share a limit", arguments, ("max_documents", "max_tokens"))
    return problems


def _unsupported(mode: str, arguments: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Lists the options among `names` that were passed, although `mode` doesn't support them."""
    return [f"--{name}: not supported with {mode}; omit it" for name in names if getattr(arguments, name)]


def _documents(arguments: argparse.Namespace) -> Documents | None:
    if arguments.dataset:
        return open_dataset(arguments.dataset, arguments.subset, arguments.split, arguments.streaming)
    if arguments.input:
        own = _own_output(arguments)
        return Files(find_sources(arguments.input, arguments.exclude, arguments.input_format, own_output=own))
    return None


def _own_output(arguments: argparse.Namespace) -> str | None:
    """Returns --output if an earlier call of this command has written it."""
    ours = (RECORD_FILE if arguments.train_tokenizer else MANIFEST_FILE, UNFINISHED_FOLDER)
    is_own = any(Path(arguments.output or "", name).exists() for name in ours)
    return arguments.output if is_own else None


def _options(arguments: argparse.Namespace, documents: Documents | None, problems: Problems) -> PreparationOptions:
    """Creates the options that affect the output. Adds invalid ones to `problems`."""
    choices = {"documents": DOCUMENT_UNITS, "on_error": ("stop", "skip"), "pre_tokenizer": tuple(PRE_TOKENIZERS)}
    for name, allowed in choices.items():
        given = getattr(arguments, name)
        if given is not None and given not in allowed:
            problems.append(f"--{name} {given}: must be {', '.join(allowed[:-1])} or {allowed[-1]}")
    most_documents = [arguments.max_documents, documents and documents.maximum_documents]
    threshold = arguments.near_duplicates
    if arguments.clean and not arguments.deduplicate:
        threshold = threshold or CLEAN_NEAR_DUPLICATES
    return PreparationOptions(
        reading=_reading(arguments, problems),
        format=arguments.input_format,
        validation_fraction=_fraction(problems, arguments.validation_fraction),
        shard_tokens=arguments.shard_tokens,
        max_documents=min((limit for limit in most_documents if limit is not None), default=None),
        max_tokens=arguments.max_tokens,
        on_error=arguments.on_error,
        max_errors=arguments.max_errors,
        deduplicate=arguments.deduplicate,
        write_text=arguments.write_text,
        extensions=tuple(os.path.abspath(file) for file in arguments.extensions),
        near_duplicates=None if threshold is None else problems.attempt(NearDuplicates.parse, threshold),
        cleaning=_cleaning(arguments, problems),
    )


def _cleaning(arguments: argparse.Namespace, problems: Problems) -> Cleaning | None:
    """Creates the cleaning stages. Adds invalid options to `problems`."""
    has_urls = arguments.url_field is not None
    cleaning = problems.attempt(read_cleaning, arguments.filter, arguments.language, arguments.clean, has_urls)
    decontamination = problems.attempt(read_decontamination, arguments.decontaminate, arguments.decontaminate_words)
    if decontamination:
        cleaning = Cleaning((*(cleaning.stages if cleaning else ()), decontamination))
    return cleaning


def _reading(arguments: argparse.Namespace, problems: list[str]) -> Reading:
    """Creates the settings for reading documents. Adds invalid options to `problems`."""
    template = arguments.template
    if template is not None:
        # In single quotes, the shell doesn't interpret escapes.
        template = template.replace("\\n", "\n").replace("\\t", "\t")
        if problem := template_problem(template):
            problems.append(f"--template {arguments.template}: {problem}")
            template = None
    only = []
    for given in arguments.only:
        field, equals, values = given.partition("=")
        if not field or not equals:
            problems.append(f"--only {given}: must be FIELD=VALUE or FIELD=VALUE,VALUE, such as language=en")
        only.append((field, tuple(values.split(","))))
    shortest = arguments.min_characters
    longest = arguments.max_characters
    if shortest and longest and shortest > longest:
        problems.append(f"--min_characters {shortest:,} is greater than --max_characters {longest:,}")
    return Reading(
        arguments.text_field,
        arguments.documents,
        template,
        tuple(only),
        shortest,
        longest,
        url_field=arguments.url_field,
        split_field=arguments.split_field,
    )


def _fraction(problems: list[str], text: str) -> float:
    try:
        fraction = float(text)
    except ValueError:
        fraction = 1.0
    if not 0.0 <= fraction < 1.0:
        problems.append(f"--validation_fraction {text}: must be at least 0 and less than 1, such as 0.01")
    return fraction
