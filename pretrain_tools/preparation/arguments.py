"""Defines prepare_data.py's command line. Imports nothing heavy, so that --help is fast."""

import argparse
from typing import Any

COUNTS = (
    *("min_characters", "max_characters", "decontaminate_words"),
    *("max_documents", "max_tokens", "max_errors", "shard_tokens", "workers", "merge_slices"),
    *("train_tokenizer", "tokenizer_sample_bytes"),
)
"""Options that are counts, such as 10e9, 100M, 10B or 2k."""
# argparse leaves counts and fractions as text, so that one error can report all problems.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "documents": {
        "input": {"nargs": "+", "metavar": "GLOB", "help": "files or URLs: jsonl csv txt parquet ..., .gz .zst"},
        "exclude": {"nargs": "+", "default": [], "metavar": "GLOB", "help": "files to leave out"},
        "dataset": {"metavar": "NAME[:N]", "help": "Hub dataset, preset or local folder; at most N examples"},
        "subset": {"help": "the dataset's subset (configuration)"},
        "split": {"default": "train", "help": "the dataset's split (default: train)"},
        "streaming": {"action": argparse.BooleanOptionalAction, "help": "stream it without a full download"},
        "text_field": {"default": "text", "help": "field or column with the text, such as meta.text"},
        "template": {"help": r"build the text from several fields, such as '{title}\n\n{meta.text}'"},
        "only": {"nargs": "+", "default": [], "metavar": "FIELD=VALUE", "help": "keep only matches: language=en,de"},
        "min_characters": {"help": "drop shorter documents"},
        "max_characters": {"help": "drop longer documents"},
        "deduplicate": {"action": "store_true", "help": "drop exact copies of earlier documents"},
        "near_duplicates": {"metavar": "JACCARD", "help": "drop near copies of earlier documents, such as 0.8"},
        "filter": {"nargs": "+", "default": [], "metavar": "FILTER", "help": "filters: NAME(KEY=VALUE) or FILE.py:F"},
        "clean": {"action": "store_true", "help": "apply FineWeb's filters and drop near duplicates"},
        "language": {"metavar": "CODES", "help": "keep documents in these languages, such as en,de"},
        "decontaminate": {"nargs": "+", "default": [], "metavar": "BENCHMARK", "help": "lm-eval tasks, item files"},
        "decontaminate_words": {"default": "13", "help": "consecutive words in common that count as contamination"},
        "url_field": {"metavar": "FIELD", "help": "field or column with a document's URL, for filters"},
        "split_field": {"metavar": "FIELD", "help": "field with train or validation, as written by --write_text"},
        "input_format": {"help": "jsonl, json, csv, txt, parquet, arrow, hdf5, tar (default: by suffix)"},
        "extensions": {"nargs": "+", "default": [], "metavar": "FILE", "help": "Python files with your own formats"},
        "documents": {"default": "file", "help": "one document per file (default), line or paragraph"},
        "max_documents": {"help": "stop after N documents"},
        "max_tokens": {"help": "stop before more tokens than this, such as 10e9 or 10B"},
        "on_error": {"default": "stop", "help": "action at a bad record: stop (default) or skip"},
        "max_errors": {"default": "100", "help": "with skip: stop after more bad records than this"},
    },
    "output": {
        "tokenizer": {"metavar": "FOLDER|FILE|HUB_ID", "help": "the tokenizer"},
        "output": {"metavar": "FOLDER|URL", "help": "folder to create"},
        "staging": {"default": "staging", "metavar": "FOLDER", "help": "local folder to build URL outputs in"},
        "end_of_document": {"metavar": "TOKEN", "help": "token that ends a document (default: the eos token)"},
        "validation_fraction": {"default": "0.01", "help": "share of documents, chosen by hash (default: 0.01)"},
        "shard_tokens": {"default": "100M", "help": "tokens per shard file (default: 100M)"},
        "write_text": {"action": "store_true", "help": "also write the documents: OUTPUT/text/*.jsonl.zst"},
        "workers": {"help": "processes (default: one per core)"},
        "engine": {"default": "auto", "help": "auto, fast (gigatoken), reference (tokenizers); ray: a cluster"},
        "ray_address": {"metavar": "ADDRESS", "help": "address of the Ray cluster (default: Ray on this machine)"},
        "slice": {"metavar": "I/N", "help": "prepare only slice I of N, from 0, as in a SLURM array"},
        "merge_slices": {"help": "merge N prepared slices into the folder"},
    },
    "other modes": {
        "train_tokenizer": {"metavar": "SIZE", "help": "train a byte-level BPE tokenizer, or extend --tokenizer"},
        "pre_tokenizer": {"metavar": "NAME", "help": "how to split words: gpt4 (default), qwen2 or gpt2"},
        "special_tokens": {"nargs": "+", "default": [], "metavar": "TOKEN", "help": "additional special tokens"},
        "tokenizer_sample_bytes": {"default": "200M", "help": "maximum training text of the tokenizer, in bytes"},
        "train_classifier": {"nargs": 2, "metavar": "GLOB", "help": "train a quality filter on good and other texts"},
        "verify": {"metavar": "FOLDER", "help": "verify every hash and count of a prepared folder"},
        "inspect": {"metavar": "FOLDER", "help": "show a prepared folder's content, and removed samples"},
    },
}  # fmt: skip


def parse_arguments(description: str, argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for title, options in OPTIONS.items():
        group = parser.add_argument_group(title)
        for name, settings in options.items():
            metavar = {"metavar": "N"} if name in COUNTS else {}
            group.add_argument(f"--{name}", **(metavar | settings))
    return parser.parse_args(argv)
