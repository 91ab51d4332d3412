"""Reads the request from the command line of prepare_data.py; reports everything wrong at once."""

import argparse
import os
from pathlib import Path

from pretrain.data.manifest import MANIFEST_FILE
from pretrain.data.tokenizer import load_tokenizer
from pretrain.errors import Problems
from pretrain.units import parse_count
from pretrain.urls import is_url
from pretrain_tools.preparation.cleaning.decontamination import REMOVALS, SHORTEST_RUN_WORDS, read_decontamination
from pretrain_tools.preparation.cleaning.filters import read_cleaning
from pretrain_tools.preparation.cleaning.near_duplicates import NearDuplicates
from pretrain_tools.preparation.cleaning.repeated_text import DIVIDERS, RepeatedText
from pretrain_tools.preparation.cleaning.stages import Cleaning
from pretrain_tools.preparation.documents.formats import DOCUMENT_UNITS
from pretrain_tools.preparation.documents.hub_dataset import open_dataset
from pretrain_tools.preparation.documents.records import Reading, template_problem
from pretrain_tools.preparation.documents.sources import find_sources
from pretrain_tools.preparation.encode import ENGINES
from pretrain_tools.preparation.plan import Documents, Files, PreparationOptions, PreparationRequest
from pretrain_tools.preparation.slices import parse_slice, slice_problems
from pretrain_tools.preparation.tokenizer_training import RECORD_FILE
from pretrain_tools.preparation.upload import Destination, destination_of

CLEAN_NEAR_DUPLICATES = "0.8"
"""The similarity from which --clean leaves out near copies."""


def read_request(arguments: argparse.Namespace) -> PreparationRequest:
    """Reads the request. Raises InputError with everything that is wrong with it."""
    problems = Problems(_missing(arguments))
    options = problems.attempt(_options, arguments)
    documents = problems.attempt(_documents, arguments) if arguments.input or arguments.dataset else None
    tokenizer = None
    if arguments.tokenizer and not arguments.train_tokenizer:
        tokenizer = problems.attempt(load_tokenizer, arguments.tokenizer, arguments.end_of_document)
    destination = None
    if is_url(arguments.output or ""):
        destination = problems.attempt(_destination, arguments)
    engine, on_ray = _engine(arguments)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = _count(problems, arguments, "workers")
    most = max(256, 16 * cores)
    if (workers or 0) > most and not on_ray:
        problems.append(f"--workers {workers:,}: this machine has {cores} cores; at most {most:,}")
    request = PreparationRequest(
        documents,
        options.within(documents) if options and documents else options,
        tokenizer,
        destination.local if destination else Path(arguments.output or ""),
        engine=engine,
        workers=workers or (None if on_ray else cores),
        on_ray=on_ray,
        ray_address=arguments.ray_address,
        slice=problems.attempt(parse_slice, arguments.slice) if arguments.slice is not None else None,
        merge_slices=_count(problems, arguments, "merge_slices"),
        vocabulary_size=_count(problems, arguments, "train_tokenizer"),
        sample_bytes=_count(problems, arguments, "tokenizer_sample_bytes"),
        destination=destination,
        dry_run=_count(problems, arguments, "dry_run"),
    )
    limits = request.options and (request.options.max_documents or request.options.max_tokens)
    if limits and (arguments.repeated_lines or arguments.repeated_paragraphs):
        problems.append("--repeated_lines and --repeated_paragraphs count over all documents: leave out the limits")
    problems += _division_problems(request)
    problems.stop_if_any()
    return request


def read_examples(arguments: argparse.Namespace) -> tuple[Path, Reading]:
    """Reads (output, reading) of --train_classifier. Raises InputError with everything that is wrong."""
    problems = Problems()
    if not arguments.output or is_url(arguments.output):
        problems.append("give --output FOLDER, a folder of this machine for the classifier")
    if arguments.input or arguments.dataset or arguments.tokenizer or arguments.train_tokenizer:
        problems.append("--train_classifier GOOD OTHER: takes its texts itself; leave out --input and --tokenizer")
    reading = _reading(arguments, problems)
    problems.stop_if_any()
    return Path(arguments.output), reading


def _missing(arguments: argparse.Namespace) -> list[str]:
    """Lists what is missing from the command line or given twice."""
    problems = []
    if bool(arguments.input) == bool(arguments.dataset):
        problems.append("give either --input 'FILES' or --dataset NAME")
    if not arguments.output:
        problems.append("give --output FOLDER, the folder to create")
    if bool(arguments.tokenizer) == bool(arguments.train_tokenizer):
        problems.append("give either --tokenizer FOLDER|FILE|HUB_ID, or --train_tokenizer SIZE to train one")
    if arguments.train_tokenizer and arguments.write_text:
        problems.append("--write_text writes documents beside shards, and --train_tokenizer makes none; leave one out")
    if arguments.train_tokenizer and (
        arguments.filter or arguments.language or arguments.clean or arguments.decontaminate
    ):
        problems.append(
            "--filter, --language, --clean, --decontaminate: a tokenizer is trained on the text as it is; leave out"
        )
    return problems


def _division_problems(request: PreparationRequest) -> list[str]:
    """Lists what is wrong with --slice and --merge_slices, and the options that --dry_run excludes."""
    others = {
        "--slice": request.slice,
        "--merge_slices": request.merge_slices,
        "--train_tokenizer": request.vocabulary_size,
    }
    given = [name for name, value in others.items() if value is not None]
    if request.dry_run and given:
        return [f"--dry_run tries a whole preparation on a few documents; leave out {' and '.join(given)}"]
    if request.slice is None and request.merge_slices is None:
        return []
    problems = Problems(slice_problems(request.options) if request.options else [])
    if request.slice and request.merge_slices:
        problems.append("give either --slice I/N, or --merge_slices N when all slices are prepared")
    if request.vocabulary_size:
        problems.append(
            "--slice and --merge_slices: a tokenizer is trained by one machine, on a sample; leave them out"
        )
    if request.documents:
        problems.attempt(request.documents.sliced, 0, 1)
    return problems


def _documents(arguments: argparse.Namespace) -> Documents:
    if arguments.dataset:
        return open_dataset(arguments.dataset, arguments.subset, arguments.split, arguments.streaming)
    return Files(find_sources(arguments.input, arguments.exclude, arguments.input_format))


def _destination(arguments: argparse.Namespace) -> Destination:
    last = RECORD_FILE if arguments.train_tokenizer else MANIFEST_FILE
    return destination_of(arguments.output, Path(arguments.staging), last)


def _engine(arguments: argparse.Namespace) -> tuple[str, bool]:
    """Reads (encoder, on Ray) from --engine, which may name ray and another, separated by a comma."""
    engines = arguments.engine.split(",")
    return ",".join(engine for engine in engines if engine != "ray") or "auto", "ray" in engines


def _options(arguments: argparse.Namespace) -> PreparationOptions:
    """Reads the options that decide the output's bytes. Raises InputError with everything that is wrong."""
    problems = Problems()
    choices = {
        "documents": (arguments.documents, DOCUMENT_UNITS),
        "on_error": (arguments.on_error, ("stop", "skip")),
        "engine": (_engine(arguments)[0], ENGINES),
        "format": (arguments.format, ("shards", "megatron")),
        "decontaminate_remove": (arguments.decontaminate_remove, REMOVALS),
    }
    for name, (given, allowed) in choices.items():
        if given not in allowed:
            also = "; and ray, alone or after a comma" if name == "engine" else ""
            problems.append(f"--{name} {given}: must be {', '.join(allowed[:-1])} or {allowed[-1]}{also}")
    near = None
    threshold = arguments.near_duplicates
    if arguments.clean and not arguments.deduplicate:
        threshold = threshold or CLEAN_NEAR_DUPLICATES
    if threshold is not None:
        given = (threshold, arguments.near_duplicate_bands, arguments.near_duplicate_shingle)
        near = problems.attempt(NearDuplicates.parse, *given)
        if arguments.deduplicate:
            problems.append("--deduplicate: --near_duplicates leaves out exact copies as well; give one of them")
    options = PreparationOptions(
        reading=_reading(arguments, problems),
        format=arguments.input_format,
        validation_fraction=_fraction(problems, arguments.validation_fraction),
        shard_tokens=_count(problems, arguments, "shard_tokens"),
        max_documents=_count(problems, arguments, "max_documents"),
        max_tokens=_count(problems, arguments, "max_tokens"),
        on_error=arguments.on_error,
        max_errors=_count(problems, arguments, "max_errors", smallest=0),
        deduplicate=arguments.deduplicate,
        megatron=arguments.format == "megatron",
        write_text=arguments.write_text,
        near_duplicates=near,
        cleaning=_cleaning(arguments, problems),
    )
    problems.stop_if_any()
    return options


def _cleaning(arguments: argparse.Namespace, problems: list[str]) -> Cleaning | None:
    """Reads repeated text, filters and decontamination; adds what is wrong to `problems`."""
    repeated = [
        RepeatedText(unit, _count(problems, arguments, f"repeated_{unit}"))
        for unit in DIVIDERS
        if getattr(arguments, f"repeated_{unit}") is not None
    ]
    if len(repeated) > 1:
        problems.append("give either --repeated_lines or --repeated_paragraphs")
    words = _count(problems, arguments, "decontaminate_words", smallest=SHORTEST_RUN_WORDS)
    remove = arguments.decontaminate_remove
    has_urls = arguments.url_field is not None
    filters = problems.attempt(read_cleaning, arguments.filter, arguments.language, arguments.clean, has_urls)
    decontamination = problems.attempt(read_decontamination, arguments.decontaminate, words, remove)
    stages = (*repeated, *(filters.stages if filters else ()), *([decontamination] if decontamination else []))
    return Cleaning(stages) if stages else None


def _reading(arguments: argparse.Namespace, problems: list[str]) -> Reading:
    """Reads where the text is and which documents to keep; adds what is wrong to `problems`."""
    template = arguments.template
    if template is not None:
        # A shell passes \n between single quotes through as two characters.
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
    shortest = _count(problems, arguments, "min_characters")
    longest = _count(problems, arguments, "max_characters")
    if shortest and longest and shortest > longest:
        problems.append(f"--min_characters {shortest:,} is more than --max_characters {longest:,}: nothing matches")
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


def _count(problems: list[str], arguments: argparse.Namespace, name: str, smallest: int = 1) -> int | None:
    """Reads a count such as 10e9, 100M, 10B or 2k; None stays None. Adds what is not a count to `problems`."""
    text = getattr(arguments, name)
    if text is None:
        return None
    value = parse_count(text)
    if not isinstance(value, int) or value < smallest:
        problems.append(
            f"--{name} {text}: must be a whole number of at least {smallest}, such as 5000, 2k, 10M or 1e9"
        )
        return smallest
    return value


def _fraction(problems: list[str], text: str) -> float:
    try:
        fraction = float(text)
    except ValueError:
        fraction = 1.0
    if not 0.0 <= fraction < 1.0:
        problems.append(f"--validation_fraction {text}: must be a number from 0 (none) to below 1, such as 0.01")
    return fraction
