"""Tokenizes documents and trains tokenizers.

    python prepare_data.py --input 'docs/*.jsonl.zst' --tokenizer gpt2 --output data/docs
    python prepare_data.py --dataset HuggingFaceFW/fineweb-edu --subset sample-10BT --streaming --max_tokens 10e9 \\
        --tokenizer gpt2 --output data/fineweb_edu
    python prepare_data.py --input 'docs/*.txt' --train_tokenizer 32000 --output tokenizers/mine
    python prepare_data.py --dataset tinystories --tokenizer gpt2 --output data/tinystories
    python prepare_data.py --input 's3://mine/docs/*.parquet' --tokenizer gpt2 --output s3://mine/tokens
    python prepare_data.py --input 'web/*.parquet' --clean --tokenizer gpt2 --output data/clean --write_text
    python prepare_data.py --input 'data/clean/text/*' --split_field split --tokenizer gpt2 --output data/again
    python prepare_data.py --inspect data/docs
    python prepare_data.py --verify data/docs

Run the same command again to resume after an interruption. Complete folders aren't changed.
"""

import os
import signal
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pretrain.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, InputError, run_script
from pretrain.terminal import say
from pretrain_tools.preparation.arguments import parse_arguments

if TYPE_CHECKING:
    from argparse import Namespace

    from pretrain.data.manifest import Manifest
    from pretrain_tools.preparation.plan import PreparationRequest


def main() -> int:
    arguments = parse_arguments(__doc__)
    # Import this after parsing, so that --help is fast.
    from pretrain_tools.preparation.request import read_request

    for name in ("verify", "inspect"):
        folder = getattr(arguments, name)
        if folder and arguments.input:
            raise InputError(
                f"--{name} {folder}: reads a prepared folder, so it cannot be combined with --input; prepare the data "
                "with --output first"
            )
    if arguments.verify:
        verify(arguments.verify)
    elif arguments.inspect:
        from pretrain_tools.preparation.inspect import inspection_text

        print(inspection_text(Path(arguments.inspect)))
    elif arguments.train_classifier:
        train_filter(arguments)
    else:
        request = read_request(arguments)
        try:
            return carry_out(request)
        finally:
            if request.on_ray:
                from pretrain_tools.preparation.workers import stop_ray

                stop_ray()
    return 0


def carry_out(request: "PreparationRequest") -> int:
    """Prepares shards or trains a tokenizer. Returns the exit status."""
    destination = request.destination
    if destination:
        destination.open()
    status = train(request) if request.vocabulary_size else prepare_shards(request)
    if status == 0 and destination:
        copied = destination.fill()
        print(f"{destination.shown}: {copied} files copied; {destination.local} is no longer needed")
    return status


def verify(folder: str) -> None:
    """Verifies a prepared folder. Raises InputError listing all problems."""
    from pretrain.data.shards import read_manifest
    from pretrain_tools.preparation.verification import verify_shards

    problems = verify_shards(folder)
    if problems:
        raise InputError(*problems)
    shards = read_manifest(folder).shards
    print(f"{folder}: all {len(shards)} shards verified ({sum(s.tokens for s in shards):,} tokens)")


def train_filter(arguments: "Namespace") -> None:
    """Trains a quality classifier and prints its accuracy on held-out documents."""
    from pretrain_tools.preparation.cleaning.quality_classifier import train_classifier
    from pretrain_tools.preparation.request import read_examples

    output, reading = read_examples(arguments)
    patterns = arguments.train_classifier
    record = train_classifier(*patterns, reading, output, arguments.exclude, arguments.input_format)
    measured = record["held_out"]
    print(f"{output}: trained on {record['good']['texts']:,} good and {record['other']['texts']:,} ordinary documents")
    told = f"balanced accuracy {measured['accuracy']}, AUC {measured['auc']}"
    print(f"  held out         {measured['texts']:,} documents: {told}")
    print(f"Next: python prepare_data.py --input ... --filter 'classifier({output}, minimum=0.5)' --output data/NAME")


def train(request: "PreparationRequest") -> int:
    from pretrain_tools.preparation.tokenizer_training import train_tokenizer

    os.environ.setdefault("RAYON_NUM_THREADS", str(request.workers))
    train_tokenizer(request)
    print(f"Next: python prepare_data.py --input ... --tokenizer {request.output} --output data/NAME")
    return 0


def prepare_shards(request: "PreparationRequest") -> int:
    """Prepares a folder of shards or one slice. Returns the exit status."""
    from pretrain_tools.preparation.encoded_part import Tally
    from pretrain_tools.preparation.inspect import figure_lines
    from pretrain_tools.preparation.prepare import prepare
    from pretrain_tools.preparation.progress import Progress

    started = time.monotonic()
    output = request.output
    with closing(Progress(request.documents.total_bytes, "B")) as progress:

        def report(tally: Tally) -> None:
            note = f"{tally.documents:,} documents, {tally.tokens / 1e6:,.1f} Mtok"
            progress.update(tally.input_bytes, note)

        signal.signal(signal.SIGTERM, interrupt)
        try:
            outcome = prepare(request, report)
        except KeyboardInterrupt as stop:
            say(f"stopped; run the same command again to resume {output}", sys.stderr)
            return EXIT_PREEMPTED if stop.args else EXIT_INTERRUPTED
    how = "already complete" if outcome.already_done else f"prepared in {time.monotonic() - started:.1f} s"
    print(f"{output}: {how}")
    print("\n".join(figure_lines(outcome.manifest, Tally.recorded(output))))
    if request.options.slice:
        print("Next: once all slices are prepared, run the same command with --merge_slices N instead of --slice")
        return 0
    warn_of_empty_splits(outcome.manifest, request.options.validation_fraction)
    ids = outcome.manifest.vocabulary_size
    print(f"Next: train a model with this vocabulary of {ids:,} tokens (vocab_size: auto in the recipe):")
    print(f"  python train.py --config recipes/demo.yaml --data.train '[{{shards: {output}}}]' --output runs/NAME")
    return 0


def interrupt(number: int, frame: object) -> NoReturn:
    """Handles SIGTERM like Ctrl-C."""
    raise KeyboardInterrupt(number)


def warn_of_empty_splits(manifest: "Manifest", fraction: float) -> None:
    """Warns if a requested split is empty."""
    documents = sum(shard.documents for shard in manifest.shards)
    for split in ("train", "validation"):
        if not manifest.of_split(split) and (fraction or split == "train"):
            print(
                f"warning: none of the {documents:,} documents are in the {split} split, which should have "
                f"{fraction if split == 'validation' else 1 - fraction:.2%} of them, chosen by hash. Use more "
                "documents (for plain text, --documents paragraph or line) or a different --validation_fraction, "
                "and a new --output"
            )


if __name__ == "__main__":
    run_script(main)
