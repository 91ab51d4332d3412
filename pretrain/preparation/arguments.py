"""The command line of prepare_data.py: its options, and what they ask for, with all that is wrong told at once."""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.errors import Problems

if TYPE_CHECKING:
    from pretrain.data.tokenizer import LoadedTokenizer
    from pretrain.preparation.documents.records import Reading
    from pretrain.preparation.plan import Documents, PreparationOptions
    from pretrain.preparation.upload import Destination

# Counts and fractions stay text in argparse, so that everything that is wrong can be told at once.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "documents": {
        "input": {"nargs": "+", "metavar": "GLOB", "help": "files or URLs: jsonl csv txt parquet ..., .gz .zst"},
        "exclude": {"nargs": "+", "default": [], "metavar": "GLOB", "help": "files to leave out"},
        "dataset": {"metavar": "NAME[:N]", "help": "Hub dataset, preset or local folder; at most N examples"},
        "subset": {"help": "the dataset's subset (configuration)"},
        "split": {"default": "train", "help": "the dataset's split (default: train)"},
        "streaming": {"action": argparse.BooleanOptionalAction, "help": "read it without a full download"},
        "text_field": {"default": "text", "help": "field or column of the text, such as text or meta.text"},
        "template": {"help": r"build the text from several fields, such as '{title}\n\n{meta.text}'"},
        "only": {"nargs": "+", "default": [], "metavar": "FIELD=VALUE", "help": "keep matches only: language=en,de"},
        "min_characters": {"metavar": "N", "help": "leave out shorter documents"},
        "max_characters": {"metavar": "N", "help": "leave out longer documents"},
        "deduplicate": {"action": "store_true", "help": "leave out exact copies of earlier documents"},
        "input_format": {"help": "jsonl, json, csv, txt, parquet, arrow, hdf5, tar (default: by suffix)"},
        "documents": {"default": "file", "help": "unit of plain text: file (default), line or paragraph"},
        "max_documents": {"metavar": "N", "help": "stop after N documents"},
        "max_tokens": {"metavar": "N", "help": "stop before more tokens than this, such as 10e9 or 10B"},
        "on_error": {"default": "stop", "help": "what to do at a bad record: stop (default) or skip"},
        "max_errors": {"default": "100", "metavar": "N", "help": "with skip: stop after more bad records than this"},
    },
    "output": {
        "tokenizer": {"metavar": "FOLDER|FILE|HUB_ID", "help": "the tokenizer"},
        "output": {"metavar": "FOLDER|URL", "help": "folder to create"},
        "staging": {"default": "staging", "metavar": "FOLDER", "help": "local folder to build URL outputs in"},
        "end_of_document": {"metavar": "TOKEN", "help": "token that ends a document (default: the eos token)"},
        "validation_fraction": {"default": "0.01", "help": "share of documents, chosen by hash (default: 0.01)"},
        "shard_tokens": {"default": "100M", "metavar": "N", "help": "tokens per shard file (default: 100M)"},
        "format": {"default": "shards", "help": "shards (default), or megatron: with an .idx beside each .bin"},
        "workers": {"metavar": "N", "help": "processes (default: one per core)"},
        "engine": {"default": "auto", "help": "auto, fast (gigatoken), reference (tokenizers); ray: a cluster"},
        "ray_address": {"metavar": "ADDRESS", "help": "address of the Ray cluster (default: Ray on this machine)"},
        "slice": {"metavar": "I/N", "help": "prepare only part I of N, from 0: one task of a SLURM array"},
        "merge_slices": {"metavar": "N", "help": "merge N prepared slices into the folder"},
    },
    "instead": {
        "train_tokenizer": {"metavar": "SIZE", "help": "train a byte-level BPE tokenizer of this vocabulary size"},
        "tokenizer_sample_bytes": {"default": "200M", "metavar": "N", "help": "most text to train it on, in bytes"},
        "verify": {"metavar": "FOLDER", "help": "verify every hash and count of a prepared folder"},
        "inspect": {"metavar": "FOLDER", "help": "show what a prepared folder contains: lengths, tokens, a sample"},
    },
}  # fmt: skip


def parse_arguments(description: str, argv: list[str] | None = None) -> argparse.Namespace:
    """The command line as it was given."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for title, options in OPTIONS.items():
        group = parser.add_argument_group(title)
        for name, settings in options.items():
            group.add_argument(f"--{name}", **settings)
    return parser.parse_args(argv)


@dataclass(frozen=True)
class PreparationRequest:
    """What the command line asks for. `vocabulary_size`: of the tokenizer to train; None where one is given.

    `output` is a folder of this machine; `destination` the URL to which it is copied, if any.
    """

    documents: "Documents"
    options: "PreparationOptions"
    tokenizer: "LoadedTokenizer | None"
    output: Path
    destination: "Destination | None"
    engine: str
    workers: int | None
    on_ray: bool
    ray_address: str | None
    slice: tuple[int, int] | None
    merge_slices: int | None
    vocabulary_size: int | None
    sample_bytes: int | None


def read_request(arguments: argparse.Namespace) -> PreparationRequest:
    """What the command line asks for. Raises InputError with everything that is wrong with it."""
    from pretrain.data.tokenizer import load_tokenizer
    from pretrain.preparation.slices import parse_slice

    problems = Problems(_missing(arguments))
    options = problems.attempt(_options, arguments)
    documents = problems.attempt(_documents, arguments) if arguments.input or arguments.dataset else None
    tokenizer = None
    if arguments.tokenizer and not arguments.train_tokenizer:
        tokenizer = problems.attempt(load_tokenizer, arguments.tokenizer, arguments.end_of_document)
    output, destination = problems.attempt(_output, arguments) or (None, None)
    _, on_ray = _engine(arguments.engine)
    request = PreparationRequest(
        documents,
        options,
        tokenizer,
        output,
        destination,
        engine=_engine(arguments.engine)[0],
        workers=_count(problems, arguments, "workers"),
        on_ray=on_ray,
        ray_address=arguments.ray_address,
        slice=problems.attempt(parse_slice, arguments.slice) if arguments.slice is not None else None,
        merge_slices=_count(problems, arguments, "merge_slices"),
        vocabulary_size=_count(problems, arguments, "train_tokenizer"),
        sample_bytes=_count(problems, arguments, "tokenizer_sample_bytes"),
    )
    problems += _division_problems(request)
    most = max(256, 16 * available_cores())
    if (request.workers or 0) > most and not on_ray:
        problems.append(f"--workers {request.workers:,}: this machine has {available_cores()} cores; at most {most:,}")
    problems.stop_if_any()
    return request


def _missing(arguments: argparse.Namespace) -> list[str]:
    """What is missing from the command line or given twice."""
    problems = []
    if bool(arguments.input) == bool(arguments.dataset):
        problems.append("give either --input 'FILES' or --dataset NAME")
    if not arguments.output:
        problems.append("give --output FOLDER, the folder to create")
    if bool(arguments.tokenizer) == bool(arguments.train_tokenizer):
        problems.append("give either --tokenizer FOLDER|FILE|HUB_ID, or --train_tokenizer SIZE to train one")
    return problems


def _division_problems(request: PreparationRequest) -> list[str]:
    """What is wrong with --slice and --merge_slices."""
    from pretrain.preparation.slices import slice_problems

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


def _documents(arguments: argparse.Namespace) -> "Documents":
    """The documents that --input or --dataset names."""
    if arguments.dataset:
        from pretrain.preparation.documents.hub_dataset import open_dataset

        return open_dataset(arguments.dataset, arguments.subset, arguments.split, arguments.streaming)
    from pretrain.preparation.documents.sources import find_sources
    from pretrain.preparation.plan import Files

    return Files(find_sources(arguments.input, arguments.exclude, arguments.input_format))


def _output(arguments: argparse.Namespace) -> "tuple[Path, Destination | None]":
    """(the local folder to create, the URL that it is copied to)."""
    from pretrain.preparation.documents.urls import is_url

    if not is_url(arguments.output or ""):
        return Path(arguments.output or ""), None
    from pretrain.data.manifest import MANIFEST_FILE
    from pretrain.preparation.tokenizer_training import RECORD_FILE
    from pretrain.preparation.upload import destination_of

    last = RECORD_FILE if arguments.train_tokenizer else MANIFEST_FILE
    destination = destination_of(arguments.output, Path(arguments.staging), last)
    return destination.local, destination


def _engine(given: str) -> tuple[str, bool]:
    """(how text is tokenised, whether Ray does it) of --engine: names between commas, ray beside another."""
    engines = given.split(",")
    return ",".join(engine for engine in engines if engine != "ray") or "auto", "ray" in engines


def _options(arguments: argparse.Namespace) -> "PreparationOptions":
    """The options that decide the output's bytes. Raises InputError with everything that is wrong with them."""
    from pretrain.preparation.documents.formats import DOCUMENT_UNITS
    from pretrain.preparation.encode import ENGINES
    from pretrain.preparation.plan import PreparationOptions

    problems = Problems()
    choices = {
        "documents": DOCUMENT_UNITS,
        "on_error": ("stop", "skip"),
        "engine": ENGINES,
        "format": ("shards", "megatron"),
    }
    for name, allowed in choices.items():
        given = _engine(arguments.engine)[0] if name == "engine" else getattr(arguments, name)
        if given not in allowed:
            also = "; and ray, alone or after a comma" if name == "engine" else ""
            problems.append(f"--{name} {given}: must be {', '.join(allowed[:-1])} or {allowed[-1]}{also}")
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
    )
    problems.stop_if_any()
    return options


def _reading(arguments: argparse.Namespace, problems: list[str]) -> "Reading":
    """How to find the text and which documents to take. What is wrong goes to `problems`."""
    from pretrain.preparation.documents.records import Reading, template_problem

    template = arguments.template
    if template is not None:
        # A shell hands over what stands between single quotes as it is.
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
    return Reading(arguments.text_field, arguments.documents, template, tuple(only), shortest, longest)


def _count(problems: list[str], arguments: argparse.Namespace, name: str, smallest: int = 1) -> int | None:
    """A count such as 10e9, 100M, 10B or 2k; None stays None. What is not one goes to `problems`."""
    from pretrain.units import parse_count

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


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
