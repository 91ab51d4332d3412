"""Trains and extends byte-level BPE tokenizers. The result is deterministic."""

import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pretrain.data.tokenizer import USUAL_END_OF_DOCUMENT, LoadedTokenizer, load_tokenizer
from pretrain.errors import InputError
from pretrain.files import as_json
from pretrain_tools.preparation.collector import count_problems
from pretrain_tools.preparation.documents.records import Record, is_drawn
from pretrain_tools.preparation.documents.sources import BEGINNING
from pretrain_tools.preparation.encode import ReferenceEncoder
from pretrain_tools.preparation.encoded_part import Tally
from pretrain_tools.preparation.plan import PreparationRequest, refuse_differences, refuse_other_files
from pretrain_tools.preparation.tokenizer_extension import extended, refuse_words
from pretrain_tools.preparation.worker import read_part

SMALLEST_VOCABULARY = 257
HELD_OUT_BYTES = 2 << 20
# Split long documents, because the pre-tokenizer needs many times the memory of its input.
LONGEST_PIECE_CHARACTERS = 1 << 20
RECORD_FILE = "training.json"
# GPT-4's pattern (cl100k_base, openai/tiktoken): contractions in any case, words with one leading non-letter, up to
# three digits, runs of punctuation, line ends, and spaces except the one before a word.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {"gpt4": SPLIT_PATTERN, "qwen2": SPLIT_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"), "gpt2": None}
"""{value of --pre_tokenizer: pattern that splits text into words}. None uses the tokenizers library's built-in GPT-2
pattern. llama.cpp supports all of them."""


@dataclass
class Sample:
    """Size of the training sample, and held-out text to evaluate the tokenizer on."""

    fraction: float
    limit_bytes: int
    documents: int = 0
    text_bytes: int = 0
    skipped: Tally = field(default_factory=Tally)
    """Counts of skipped documents and bad records."""
    held_out: list[bytes] = field(default_factory=list)

    @property
    def held_out_bytes(self) -> int:
        return sum(map(len, self.held_out))

    @property
    def is_full(self) -> bool:
        return self.text_bytes >= self.limit_bytes


def train_tokenizer(request: PreparationRequest) -> None:
    """Trains a tokenizer, or extends the request's tokenizer, and writes it as a Hugging Face tokenizer folder.

    Trains on a sample of at most `sample_bytes` of text. Reports bytes per token on validation documents, which aren't
    used for training. Raises InputError.
    """
    output = request.output
    base = request.tokenizer
    size = request.vocabulary_size
    limit = request.sample_bytes
    special_tokens = [token for token in dict.fromkeys(request.special_tokens) if token != USUAL_END_OF_DOCUMENT]
    smallest = SMALLEST_VOCABULARY + len(special_tokens)
    if size < smallest and base is None:
        raise InputError(f"--train_tokenizer {size}: must be at least {smallest} (256 bytes plus the special tokens)")
    record = {
        "vocabulary_size": size,
        "sample_bytes": limit,
        "pre_tokenizer": request.pre_tokenizer,
        "special_tokens": special_tokens,
        "extends": base and {"name": base.name, "sha256": base.sha256},
        "options": request.options.as_plan(),
        "sources": request.documents.description(),
        **request.split.as_plan(),
    }
    # Omit defaults, so that folders made before these options existed still match.
    record = {name: value for name, value in record.items() if value}
    refuse_other_files(output, RECORD_FILE)
    if (output / RECORD_FILE).is_file():
        refuse_differences(output, json.loads((output / RECORD_FILE).read_bytes()), record, "was trained")
        print(f"{output}: already complete")
        return
    # If the input size is unknown, use all documents.
    expected = request.documents.expected_text_bytes
    sample = Sample(min(1.0, limit / expected) if expected else 1.0, limit)
    if base is None:
        trained = _trained(_texts(request, sample), size, special_tokens, request.pre_tokenizer or "gpt4")
    else:
        trained = extended(base, _texts(request, sample), size, special_tokens)
    if not sample.documents:
        if sample.held_out:
            advice = "all are in the validation split: set --validation_fraction 0"
        else:
            advice = f"skipped {sample.skipped.skipped_text()}; {sample.skipped.advice_if_empty()}"
        raise InputError(f"the input contains no documents to train on; {advice}")
    temporary = output.with_name(output.name + ".tmp")
    try:
        trained.save(temporary)
        (temporary / RECORD_FILE).write_bytes(as_json(record))
        os.replace(temporary, output)
    except OSError as error:
        raise InputError(f"--output {output}: {error.strerror}; use a writable folder with free space") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _print_summary(output, trained.vocabulary_size, size, sample)
    if base is not None and sample.held_out:
        print(f"  {_bytes_per_token(base, sample.held_out):.3f} with {base.name}")


def _texts(request: PreparationRequest, sample: Sample) -> Iterator[str]:
    for record in itertools.islice(_records(request, sample.skipped), request.options.max_documents):
        text = record.text
        if record.is_validation:
            if sample.held_out_bytes < HELD_OUT_BYTES:
                sample.held_out.append(text)
        elif not sample.is_full and is_drawn(text, sample.fraction, first_byte=8):
            sample.documents += 1
            sample.text_bytes += len(text)
            characters = text.decode()
            for start in range(0, len(characters), LONGEST_PIECE_CHARACTERS):
                yield characters[start : start + LONGEST_PIECE_CHARACTERS]
        if sample.is_full and (sample.held_out_bytes >= HELD_OUT_BYTES or not request.options.validation_fraction):
            break


def _records(request: PreparationRequest, skipped: Tally) -> Iterator[Record]:
    """Yields the documents that a preparation would read, without its limits."""
    for part in request.documents.parts(request.options.reading, BEGINNING):
        records, counts, problems = read_part(part, request.options, request.split)
        skipped.add(counts)
        count_problems(problems, skipped, request.options)
        yield from records


def _trained(
    texts: Iterator[str], vocabulary_size: int, special_tokens: list[str], pre_tokenizer: str
) -> LoadedTokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    pattern = PRE_TOKENIZERS[pre_tokenizer]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    steps = [pre_tokenizers.Split(Regex(pattern), behavior="isolated"), to_bytes] if pattern else [to_bytes]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    refuse_words(special_tokens, tokenizer.pre_tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[USUAL_END_OF_DOCUMENT, *special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": USUAL_END_OF_DOCUMENT,
        "eos_token": USUAL_END_OF_DOCUMENT,
        "pad_token": USUAL_END_OF_DOCUMENT,
        "add_prefix_space": False,
        # True would remove spaces before punctuation when decoding.
        "clean_up_tokenization_spaces": False,
    }
    return LoadedTokenizer(
        name="trained",
        json=tokenizer.to_str(pretty=True).encode(),
        vocabulary_size=tokenizer.get_vocab_size(),
        end_of_document=USUAL_END_OF_DOCUMENT,
        end_of_document_id=tokenizer.token_to_id(USUAL_END_OF_DOCUMENT),
        special_tokens=(USUAL_END_OF_DOCUMENT, *special_tokens),
        files={"tokenizer_config.json": as_json(config)},
    )


def _bytes_per_token(tokenizer: LoadedTokenizer, texts: list[bytes]) -> float:
    tokens = sum(len(ids) for ids in ReferenceEncoder(tokenizer).encode(texts))
    return sum(map(len, texts)) / max(1, tokens)


def _print_summary(output: Path, size: int, asked: int, sample: Sample) -> None:
    print(f"{output}: {size:,} tokens, trained on {sample.text_bytes:,} bytes from {sample.documents:,} documents")
    if size < asked:
        print(f"  Created only {size:,} of {asked:,} tokens: the text has too few pairs to merge. Use more text.")
    if sample.skipped.bad_records:
        print(f"  {sample.skipped.bad_records:,} bad records were skipped.")
    if sample.held_out:
        where = f"on {sample.held_out_bytes:,} bytes of held-out validation documents"
        print(f"  {_bytes_per_token(load_tokenizer(output), sample.held_out):.3f} bytes per token {where}")
