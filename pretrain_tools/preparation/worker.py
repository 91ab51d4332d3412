"""Workers, which turn the records of parts into ids, each document marked as training or validation."""

import collections
import gc
import itertools
import os
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from pretrain.data.manifest import dtype_for
from pretrain.data.tokenizer import LoadedTokenizer
from pretrain.errors import InputError
from pretrain_tools.preparation.cleaning.account import CleaningAccount
from pretrain_tools.preparation.cleaning.near_duplicates import NearDuplicates
from pretrain_tools.preparation.cleaning.repeated_text import RepeatedText
from pretrain_tools.preparation.cleaning.stages import Cleaning
from pretrain_tools.preparation.deduplicate import document_hashes
from pretrain_tools.preparation.documents.document_index import DOCUMENT, chosen_ids, document_table, tokens_of
from pretrain_tools.preparation.documents.records import Reading
from pretrain_tools.preparation.documents.sources import Part, Position
from pretrain_tools.preparation.encode import Encoder, FastEncoder
from pretrain_tools.preparation.pools import open_pool
from pretrain_tools.preparation.text_files import document_line
from pretrain_tools.preparation.validation_split import ValidationSplit

PARTS_AHEAD_PER_WORKER = 2
SAMPLE_BYTES = 4096
FIRST_DOCUMENTS = 4


@dataclass(frozen=True)
class EncodingSettings:
    """Settings of a worker, the same for all parts."""

    tokenizer: LoadedTokenizer
    encoder: Encoder
    reading: Reading
    split: ValidationSplit
    stop_at_problem: bool
    deduplicate: bool = False
    near_duplicates: NearDuplicates | None = None
    cleaning: Cleaning | None = None
    write_text: bool = False
    counting: RepeatedText | None = None
    """Counts the lines of documents for this stage, instead of encoding them."""


class Problem(NamedTuple):
    """A record that could not be used; `place` is for messages, `name`, without folders, for the manifest."""

    documents_before: int
    place: str
    name: str
    reason: str
    records: int = 1


@dataclass(frozen=True)
class EncodedPart:
    """The documents of a part in order."""

    after: Position
    ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint16))
    """Documents end to end, each closed by the end-of-document id."""
    documents: np.ndarray = field(default_factory=lambda: np.empty(0, DOCUMENT))
    """(documents,) DOCUMENT; ends count in `ids`, sources in `source_names`."""
    source_names: tuple[str, ...] = ()
    is_validation: np.ndarray = field(default_factory=lambda: np.empty(0, bool))
    hashes: np.ndarray | None = None
    """(documents,) uint64; None unless duplicates are looked for."""
    signatures: np.ndarray | None = None
    """(documents, signature_bytes) uint8; None unless near duplicates are looked for."""
    lines: list[bytes] | None = None
    """The documents as text_files.document_line; None unless text is written."""
    input_bytes: int = 0
    empty_documents: int = 0
    filtered_documents: int = 0
    near_duplicate_documents: int = 0
    near_duplicate_bytes: int = 0
    unread_members: dict[str, int] = field(default_factory=dict)
    """{suffix: members of archives that hold no documents}."""
    problems: tuple[Problem, ...] = ()
    cleaning: CleaningAccount | None = None
    """None where nothing is cleaned."""
    disagreement: str | None = None
    """A text for which the fast path gave wrong ids, if any."""
    stage_seconds: dict[str, float] = field(default_factory=dict)
    """{stage of the work: seconds}."""

    def keeping(self, kept: np.ndarray) -> "EncodedPart":
        """Returns the part with some of the documents. kept: (documents,) bool."""
        if kept.all():
            return self
        tokens = tokens_of(self.documents)
        documents = self.documents[kept]
        documents["end"] = np.cumsum(tokens[kept])
        kept_before = np.concatenate([[0], np.cumsum(kept)])
        problems = [p._replace(documents_before=int(kept_before[p.documents_before])) for p in self.problems]
        return replace(
            self,
            ids=chosen_ids(self.ids, tokens, kept),
            documents=documents,
            is_validation=self.is_validation[kept],
            hashes=None if self.hashes is None else self.hashes[kept],
            signatures=None if self.signatures is None else self.signatures[kept],
            lines=None if self.lines is None else list(itertools.compress(self.lines, kept.tolist())),
            problems=tuple(problems),
        )


class _Document(NamedTuple):
    text: bytes
    is_validation: bool
    source: int
    """Number of its name in `names` of _Texts."""
    place: int
    url: str | None


@dataclass
class _Texts:
    """The documents of a part, and what was found besides."""

    documents: list[_Document] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    """{name of a source: its number in the part}."""
    problems: list[Problem] = field(default_factory=list)
    empty: int = 0
    filtered: int = 0
    unread_members: Counter[str] = field(default_factory=Counter)
    account: CleaningAccount | None = None

    @property
    def texts(self) -> list[bytes]:
        return [document.text for document in self.documents]

    def lines(self) -> list[bytes]:
        """Returns the documents as lines for --write_text."""
        names = list(self.names)
        return [document_line(d.text, names[d.source], d.place, d.is_validation, d.url) for d in self.documents]

    def clean(self, cleaning: Cleaning) -> None:
        """Cleans the documents and keeps the account."""
        names = list(self.names)
        sources = [names[document.source] for document in self.documents]
        urls = [d.url for d in self.documents]
        places = [d.place for d in self.documents]
        kept, texts, self.account = cleaning.clean(self.texts, urls, sources, places)
        self.documents = [self.documents[k]._replace(text=text) for k, text in zip(kept, texts, strict=True)]
        self.problems = [p._replace(documents_before=bisect_left(kept, p.documents_before)) for p in self.problems]


class PartEncoder:
    """Encodes parts, one after another, in this process."""

    def __init__(self, settings: EncodingSettings):
        # One worker per core: threads of the tokenizers library would compete for the same cores.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._settings = settings
        self._encoder = settings.encoder
        self._has_compared = False

    def encode(self, part: Part) -> EncodedPart:
        """Reads, cleans, splits and encodes one part."""
        began = time.perf_counter()
        read = self._read(part)
        parsed = cleaned = time.perf_counter()
        stages = {"parse": parsed - began}
        if self._settings.counting is not None:
            hashes = self._settings.counting.distinct_hashes(read.texts)
            stages["count"] = time.perf_counter() - parsed
            return EncodedPart(part.after, hashes=hashes, input_bytes=part.input_bytes, stage_seconds=stages)
        if self._settings.cleaning is not None:
            read.clean(self._settings.cleaning)
            cleaned = time.perf_counter()
            stages["clean"] = cleaned - parsed
        texts = read.texts
        arrays = self._encoder.encode(texts)
        tokenised = time.perf_counter()
        settings = self._settings
        end = settings.tokenizer.end_of_document_id
        self._check_ends(arrays, end)
        tokens = np.array([len(array) + 1 for array in arrays], dtype=np.int64)
        ids = np.full(int(tokens.sum()), end, dtype=dtype_for(settings.tokenizer.vocabulary_size))
        first = 0
        for array in arrays:
            ids[first : first + len(array)] = array
            first += len(array) + 1
        sources = [d.source for d in read.documents]
        places = [d.place for d in read.documents]
        documents = document_table(tokens, list(map(len, texts)), sources, places)
        hashes = document_hashes(ids, np.cumsum(tokens)) if settings.deduplicate else None
        disagreement = self._disagreement(texts)
        checked = time.perf_counter()
        stages |= {"tokenise": tokenised - cleaned, "check": checked - tokenised}
        signatures = None
        if settings.near_duplicates is not None:
            signatures = settings.near_duplicates.signatures(*settings.near_duplicates.words(texts))
            stages["signatures"] = time.perf_counter() - checked
        return EncodedPart(
            ids=ids,
            documents=documents,
            source_names=tuple(read.names),
            is_validation=np.array([d.is_validation for d in read.documents], dtype=bool),
            hashes=hashes,
            signatures=signatures,
            lines=read.lines() if settings.write_text else None,
            empty_documents=read.empty,
            filtered_documents=read.filtered,
            unread_members=dict(read.unread_members),
            problems=tuple(read.problems),
            cleaning=read.account,
            disagreement=disagreement,
            after=part.after,
            input_bytes=part.input_bytes,
            stage_seconds=stages,
        )

    def _read(self, part: Part) -> _Texts:
        read = _Texts()
        for source, record in part.records(self._settings.reading):
            if record.text:
                number = read.names.setdefault(source.name, len(read.names))
                for text, is_validation, lines_before in self._settings.split.pieces(
                    record.text, record.is_validation
                ):
                    place = record.place + lines_before
                    read.documents.append(_Document(text, is_validation, number, place, record.url))
            elif record.problem is not None:
                where = source.place(record.place), source.recorded_place(record.place)
                read.problems.append(Problem(len(read.documents), *where, record.problem, record.problem_records))
                if self._settings.stop_at_problem:
                    break
            elif record.not_read is not None:
                read.unread_members.update(record.not_read)
            elif record.text is None:
                read.filtered += 1
            else:
                read.empty += 1
        return read

    def _check_ends(self, arrays: list[np.ndarray], end: int) -> None:
        if any((array == end).any() for array in arrays):
            token = self._settings.tokenizer.end_of_document
            raise InputError(
                f"{self._settings.tokenizer.name}: this tokenizer makes its end-of-document token {token!r} out of "
                "ordinary text, so documents could not be told apart; name another with --end_of_document TOKEN"
            )

    def _disagreement(self, texts: list[bytes]) -> str | None:
        """Compares both paths on the beginnings of the first documents, later of one document per part."""
        if not isinstance(self._encoder, FastEncoder) or not texts:
            return None
        compared = [texts[len(texts) // 2]] if self._has_compared else texts[:FIRST_DOCUMENTS]
        self._has_compared = True
        return self._encoder.disagreement([t[:SAMPLE_BYTES].decode(errors="ignore").encode() for t in compared])


def encode_parts(parts: Iterable[Part], settings: EncodingSettings, workers: int) -> Iterator[EncodedPart]:
    """Encodes parts in order, with `workers` processes or, when 1, in this one. Raises InputError when one dies."""
    # Workers share this when they are forked.
    if settings.counting is not None:
        settings.counting.distinct_hashes([b"compiled once"])
    if settings.near_duplicates is not None:
        settings.near_duplicates.signatures(*settings.near_duplicates.words([b"compiled once"]))
    if settings.cleaning is not None:
        _ = settings.cleaning.opened
    # What exists now stays: a collection in a worker would copy its pages into the worker's memory.
    gc.freeze()
    if workers == 1:
        encoder = PartEncoder(settings)
        yield from map(encoder.encode, parts)
        return
    with open_pool("a worker process", workers, _encoding, settings) as submit:
        yield from results_in_order(map(submit, parts), Future.result, workers)


def _encoding(settings: EncodingSettings) -> Callable[[Part], EncodedPart]:
    return PartEncoder(settings).encode


def results_in_order(jobs: Iterator[Any], result: Callable[[Any], EncodedPart], workers: int) -> Iterator[EncodedPart]:
    """Yields the result of each job in order. Taking a job from `jobs` starts it, a few per worker ahead."""
    waiting: collections.deque[Any] = collections.deque()
    for job in jobs:
        waiting.append(job)
        if len(waiting) > workers * PARTS_AHEAD_PER_WORKER:
            yield result(waiting.popleft())
    while waiting:
        yield result(waiting.popleft())
