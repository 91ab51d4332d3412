"""Defines the command line of prepare_data.py. Avoids slow imports, so that --help is fast."""

import argparse
from typing import Any

COUNTS = (
    "min_characters", "max_characters", "decontaminate_words", "max_documents", "max_tokens", "max_errors",
    "shard_tokens", "workers", "merge_slices", "train_tokenizer", "tokenizer_sample_bytes",
)  # fmt: skip
"""Options that accept counts such as 10e9, 100M, 10B or 2k."""
# Counts and fractions are parsed in request.py, which reports all problems in a single error.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "documents": {
        "input": {"nargs": "+", "metavar": "GLOB", "help": "files or URLs (jsonl, csv, txt, parquet, .gz, ...)"},
        "exclude": {"nargs": "+", "default": [], "metavar": "GLOB", "help": "files to skip"},
        "dataset": {"metavar": "NAME[:N]", "help": "Hub dataset, preset or local folder; :N reads only N examples"},
        "subset": {"help": "dataset subset (configuration)"},
        "split": {"default": "train", "help": "dataset split (default: train)"},
        "streaming": {"action": argparse.BooleanOptionalAction, "help": "stream the dataset without downloading it"},
        "text_field": {"default": "text", "help": "field or column with the text, such as meta.text"},
        "template": {"help": r"build the text from several fields, such as '{title}\n\n{meta.text}'"},
        "only": {"nargs": "+", "default": [], "metavar": "FIELD=VALUE",
                 "help": "keep only matching records, such as language=en,de"},
        "min_characters": {"help": "drop shorter documents"},
        "max_characters": {"help": "drop longer documents"},
        "deduplicate": {"action": "store_true", "help": "drop exact copies of earlier documents"},
        "near_duplicates": {"metavar": "JACCARD",
                            "help": "drop documents at least this similar to an earlier one, such as 0.8"},
        "filter": {"nargs": "+", "default": [], "metavar": "FILTER",
                   "help": "filters to apply: NAME(KEY=VALUE) or FILE.py:F"},
        "clean": {"action": "store_true", "help": "apply FineWeb's filters and drop near duplicates"},
        "language": {"metavar": "CODES", "help": "keep only documents in these languages, such as en,de"},
        "decontaminate": {"nargs": "+", "default": [], "metavar": "BENCHMARK",
                          "help": "remove documents that overlap with these lm-eval tasks or item files"},
        "decontaminate_words": {"default": "13", "help": "number of consecutive words that must match"},
        "url_field": {"metavar": "FIELD", "help": "field or column with each document's URL, for filters"},
        "split_field": {"metavar": "FIELD", "help": "field that contains train or validation (see --write_text)"},
        "input_format": {"help": "jsonl, json, csv, txt, parquet, arrow, hdf5, tar (default: from the suffix)"},
        "extensions": {"nargs": "+", "default": [], "metavar": "FILE", "help": "Python files with your own formats"},
        "documents": {"default": "file", "help": "one document per file (default), line or paragraph"},
        "max_documents": {"help": "stop after N documents"},
        "max_tokens": {"help": "stop before exceeding this many tokens, such as 10e9 or 10B"},
        "on_error": {"default": "stop", "help": "what to do on a bad record: stop (default) or skip"},
        "max_errors": {"default": "100", "help": "maximum number of bad records to skip (default: 100)"},
    },
    "output": {
        "tokenizer": {"metavar": "FOLDER|FILE|HUB_ID", "help": "tokenizer folder, file or Hub ID"},
        "output": {"metavar": "FOLDER|URL", "help": "output folder or URL"},
        "staging": {"default": "staging", "metavar": "FOLDER", "help": "local working folder for URL outputs"},
        "end_of_document": {"metavar": "TOKEN", "help": "token that ends a document (default: the eos token)"},
        "validation_fraction": {"default": "0.01", "help": "fraction of documents to hold out (default: 0.01)"},
        "shard_tokens": {"default": "100M", "help": "tokens per shard file (default: 100M)"},
        "write_text": {"action": "store_true", "help": "also write the documents to OUTPUT/text/*.jsonl.zst"},
        "workers": {"help": "number of processes (default: one per core)"},
        "engine": {"default": "auto", "help": "auto (gigatoken if possible), reference (tokenizers) or ray (cluster)"},
        "ray_address": {"metavar": "ADDRESS", "help": "Ray cluster address (default: Ray on this machine)"},
        "slice": {"metavar": "I/N", "help": "prepare only slice I of N (I starts at 0), for example in a SLURM array"},
        "merge_slices": {"help": "merge N prepared slices into --output"},
    },
    "other modes": {
        "train_tokenizer": {"metavar": "SIZE", "help": "train a byte-level BPE tokenizer, or extend --tokenizer"},
        "pre_tokenizer": {"metavar": "NAME", "help": "how to split text into words: gpt4 (default), qwen2 or gpt2"},
        "special_tokens": {"nargs": "+", "default": [], "metavar": "TOKEN", "help": "additional special tokens"},
        "tokenizer_sample_bytes": {"default": "200M", "help": "maximum bytes of text to train the tokenizer on"},
        "train_classifier": {"nargs": 2, "metavar": "GLOB",
                             "help": "train a quality filter on good and ordinary documents"},
        "verify": {"metavar": "FOLDER", "help": "verify the sizes and hashes of all files in a prepared folder"},
        "inspect": {"metavar": "FOLDER", "help": "show a prepared folder's contents and samples of removed documents"},
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
