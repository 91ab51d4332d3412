"""Documents to token shards, and tokenizers from documents.

    python prepare_data.py --input 'docs/*.jsonl.zst' --tokenizer gpt2 --output data/docs
    python prepare_data.py --dataset HuggingFaceFW/fineweb-edu --subset sample-10BT --streaming --max_tokens 10e9 \\
        --tokenizer gpt2 --output data/fineweb_edu
    python prepare_data.py --input 'docs/*.txt' --train_tokenizer 32000 --output tokenizers/mine
    python prepare_data.py --verify data/docs

Run the same command again to continue what was interrupted; a finished folder is recognised and left as it is.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.problems import InputError, run_script

if TYPE_CHECKING:
    from pretrain.preparation import Outcome
    from pretrain.preparation_plan import Documents, PreparationOptions

EXIT_PREEMPTED = 75
EXIT_INTERRUPTED = 130
SIGINT = 2


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line. Counts and fractions stay text here, so that all that is wrong can be told at once."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    what = parser.add_argument_group("documents")
    what.add_argument(
        "--input", nargs="+", metavar="GLOB", help="files: jsonl json csv txt parquet arrow h5 tar, .gz .zst"
    )
    what.add_argument("--exclude", nargs="+", default=[], metavar="GLOB", help="files to leave out")
    what.add_argument("--dataset", metavar="NAME[:N]", help="Hub dataset or local folder; at most N examples")
    what.add_argument("--subset", help="the dataset's subset (configuration)")
    what.add_argument("--split", default="train", help="the dataset's split (default: train)")
    what.add_argument("--streaming", action="store_true", help="read the dataset without downloading the whole")
    what.add_argument("--text_field", default="text", help="field or column of the text, such as text or meta.text")
    what.add_argument("--format", help="jsonl, json, csv, txt, parquet, arrow, hdf5 or tar (default: by suffix)")
    what.add_argument("--documents", default="file", help="unit of plain text: file (default), line or paragraph")
    what.add_argument("--max_documents", metavar="N", help="stop after so many documents")
    what.add_argument("--max_tokens", metavar="N", help="stop before more tokens than this, such as 10e9 or 10B")
    what.add_argument("--on_error", default="stop", help="at a bad record: stop (default) or skip")
    what.add_argument("--max_errors", default="100", metavar="N", help="with skip: more bad records than this stop")
    how = parser.add_argument_group("output")
    how.add_argument("--tokenizer", metavar="FOLDER|FILE|HUB_ID", help="the tokenizer")
    how.add_argument("--output", help="folder to make")
    how.add_argument("--end_of_document", metavar="TOKEN", help="token that ends a document (default: the eos token)")
    how.add_argument(
        "--validation_fraction", default="0.01", help="share of documents, chosen by hash (default: 0.01)"
    )
    how.add_argument("--shard_tokens", default="100M", metavar="N", help="tokens per shard file (default: 100M)")
    how.add_argument("--workers", metavar="N", help="processes (default: one per core)")
    how.add_argument("--engine", default="auto", help="auto, fast (gigatoken) or reference (tokenizers)")
    other = parser.add_argument_group("instead")
    other.add_argument("--train_tokenizer", metavar="SIZE", help="train a byte-level BPE tokenizer of so many tokens")
    other.add_argument("--tokenizer_sample_bytes", default="200M", metavar="N", help="text to train it on, at most")
    other.add_argument("--verify", metavar="FOLDER", help="recheck every hash and count of a prepared folder")
    return parser.parse_args(argv)


def count(problems: list[str], name: str, text: str | None, smallest: int = 1) -> int | None:
    """A count such as 10e9, 100M, 10B or 2k; None stays None. What is not one goes to `problems`."""
    from pretrain.config import parse_count

    if text is None:
        return None
    value = parse_count(text)
    if not isinstance(value, int) or value < smallest:
        problems.append(
            f"--{name} {text}: must be a whole number of at least {smallest}, such as 5000, 2k, 10M or 1e9"
        )
        return smallest
    return value


def read_options(arguments: argparse.Namespace) -> "PreparationOptions":
    """The options that decide the output's bytes. Raises InputError with everything that is wrong with them."""
    from pretrain.formats import UNITS, Reading
    from pretrain.preparation_plan import PreparationOptions
    from pretrain.tokenize import ENGINES

    problems: list[str] = []
    try:
        fraction = float(arguments.validation_fraction)
    except ValueError:
        fraction = -1.0
    if not 0.0 <= fraction < 1.0:
        given = arguments.validation_fraction
        problems.append(f"--validation_fraction {given}: must be a number from 0 (none) to below 1, such as 0.01")
    for name, allowed in {"documents": UNITS, "on_error": ("stop", "skip"), "engine": ENGINES}.items():
        given = getattr(arguments, name)
        if given not in allowed:
            problems.append(f"--{name} {given}: must be {', '.join(allowed[:-1])} or {allowed[-1]}")
    options = PreparationOptions(
        reading=Reading(arguments.text_field, arguments.documents),
        format=arguments.format,
        validation_fraction=fraction,
        shard_tokens=count(problems, "shard_tokens", arguments.shard_tokens),
        max_documents=count(problems, "max_documents", arguments.max_documents),
        max_tokens=count(problems, "max_tokens", arguments.max_tokens),
        on_error=arguments.on_error,
        max_errors=count(problems, "max_errors", arguments.max_errors, smallest=0),
    )
    if problems:
        raise InputError(*problems)
    return options


def required_problems(arguments: argparse.Namespace) -> list[str]:
    """What is missing from the command line or does not go together."""
    problems = []
    if bool(arguments.input) == bool(arguments.dataset):
        problems.append("give either --input 'FILES' or --dataset NAME")
    if not arguments.output:
        problems.append("give --output FOLDER, the folder to make")
    if bool(arguments.tokenizer) == bool(arguments.train_tokenizer):
        problems.append("give either --tokenizer FOLDER|FILE|HUB_ID, or --train_tokenizer SIZE to train one")
    return problems


def find_documents(arguments: argparse.Namespace) -> "Documents":
    """The documents that --input or --dataset names."""
    if arguments.dataset:
        from pretrain.hub_dataset import open_dataset

        return open_dataset(arguments.dataset, arguments.subset, arguments.split, arguments.streaming)
    from pretrain.preparation_plan import LocalFiles
    from pretrain.sources import find_sources

    return LocalFiles(find_sources(arguments.input, arguments.exclude, arguments.format))


def gather(problems: list[str], make: Any, *given: Any) -> Any:
    """The result of make(*given); the problems of its InputError are added to `problems` instead of raised."""
    try:
        return make(*given)
    except InputError as error:
        problems.extend(error.problems)
        return None


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def verify(folder: str) -> int:
    """Rechecks a prepared folder and tells what is wrong with it."""
    from pretrain.shards import read_manifest, verify_shards

    problems = verify_shards(folder)
    if problems:
        raise InputError(*problems)
    shards = read_manifest(folder).shards
    print(f"{folder}: all {len(shards)} shards are as they were made ({sum(s.tokens for s in shards):,} tokens)")
    return 0


def print_summary(outcome: "Outcome", output: str) -> None:
    """What was made, in figures, and what to do with it."""
    tally = outcome.tally
    shards = outcome.manifest.shards
    ids_bytes = tally.tokens * outcome.manifest.bytes_per_id
    rows = {
        "documents": f"{tally.documents:,}; skipped {tally.empty_documents:,} empty, {tally.bad_records:,} bad",
        "text": f"{tally.text_bytes:,} bytes",
        "tokens": f"{tally.tokens:,} in {len(shards)} shards of {outcome.manifest.dtype}, {ids_bytes:,} bytes",
        "bytes per token": f"{tally.text_bytes / max(1, tally.tokens - tally.documents):.3f}",
        "validation": f"{tally.validation_tokens:,} tokens, {tally.validation_tokens / max(1, tally.tokens):.2%}",
    }
    if not outcome.already_done:
        rate = outcome.tokens_made / max(outcome.seconds, 1e-9) / 1e6
        rows["time"] = f"{outcome.seconds:.1f} s, {rate:.2f} Mtok/s"
    for name, value in rows.items():
        print(f"  {name:<16} {value}")
    for example in tally.bad_examples:
        print(f"  skipped          {example}")
    for split, tokens in (("train", tally.tokens - tally.validation_tokens), ("validation", tally.validation_tokens)):
        if not tokens:
            print(f"  No document fell into the {split} split: they are chosen by hash. More documents help")
            print("  (--documents paragraph or line makes them of plain text), or another --validation_fraction.")
    vocabulary_size = outcome.manifest.vocabulary_size
    print(f"Next: train a model whose vocab_size is at least {vocabulary_size:,}, such as")
    print(f"  python train.py --config RECIPE.yaml --data.train '[{{shards: {output}}}]' --output runs/NAME")


def train(arguments: argparse.Namespace) -> int:
    """Trains a tokenizer on the documents."""
    from pretrain.tokenizer_training import train_tokenizer

    problems = required_problems(arguments)
    options = gather(problems, read_options, arguments)
    vocabulary_size = count(problems, "train_tokenizer", arguments.train_tokenizer)
    sample_bytes = count(problems, "tokenizer_sample_bytes", arguments.tokenizer_sample_bytes)
    documents = gather(problems, find_documents, arguments) if arguments.input or arguments.dataset else None
    if problems:
        raise InputError(*problems)
    os.environ.setdefault("RAYON_NUM_THREADS", str(count(problems, "workers", arguments.workers) or available_cores()))
    train_tokenizer(documents, Path(arguments.output), vocabulary_size, sample_bytes, options)
    print(f"Next: python prepare_data.py --input ... --tokenizer {arguments.output} --output data/NAME")
    return 0


def main() -> int:
    arguments = parse_arguments()
    if arguments.verify:
        return verify(arguments.verify)
    if arguments.train_tokenizer:
        return train(arguments)
    from pretrain.preparation import StoppedError, prepare
    from pretrain.progress import DocumentProgress
    from pretrain.tokenize import load_tokenizer

    started = time.monotonic()
    problems = required_problems(arguments)
    options = gather(problems, read_options, arguments)
    workers = count(problems, "workers", arguments.workers) or available_cores()
    documents = gather(problems, find_documents, arguments) if arguments.input or arguments.dataset else None
    tokenizer = None
    if arguments.tokenizer:
        tokenizer = gather(problems, load_tokenizer, arguments.tokenizer, arguments.end_of_document)
    if problems:
        raise InputError(*problems)
    with DocumentProgress(documents.total_bytes) as progress:
        try:
            outcome = prepare(
                documents,
                tokenizer,
                Path(arguments.output),
                options,
                engine=arguments.engine,
                workers=workers,
                say=progress.say,
                report=progress.update,
            )
        except StoppedError as stop:
            progress.say(f"stopped; run the same command again to continue {arguments.output}")
            return EXIT_INTERRUPTED if stop.args[0] == SIGINT else EXIT_PREEMPTED
    if outcome.already_done:
        print(f"{arguments.output}: is done already, nothing to do")
    else:
        print(f"{arguments.output}: prepared in {time.monotonic() - started:.1f} s")
    print_summary(outcome, arguments.output)
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    run_script(main)
