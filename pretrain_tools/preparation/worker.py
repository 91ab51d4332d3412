"""A worker turns a part's records into ids, each marked as training or validation; and the pool of workers."""

import collections
import gc
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
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
from pretrain_tools.preparation.text_files import document_line
from pretrain_tools.preparation.validation_split import ValidationSplit

PARTS_AHEAD_PER_WORKER = 2
SAMPLE_BYTES = 4096
FIRST_DOCUMENTS = 4
PARENT_CHECK_SECONDS = 0.5


@dataclass(frozen=True)
class EncodingSettings:
    """What a worker needs to know besides the part."""

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
    """Only the hashes of each document's lines are wanted."""


class Problem(NamedTuple):
    """A record that could not be used: its `place` for messages, its `name`, without folders, for the manifest."""

    documents_before: int
    place: str
    name: str
    reason: str
    records: int = 1


@dataclass(frozen=True)
class EncodedPart:
    """The documents of a part in order."""

    ids: np.ndarray
    """End to end, each document closed by the end-of-document id."""
    documents: np.ndarray
    """A record of type DOCUMENT for each; ends count in `ids`, sources in `source_names`."""
    source_names: tuple[str, ...]
    is_validation: np.ndarray
    hashes: np.ndarray | None
    """None unless duplicates are looked for."""
    after: Position
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
    """{suffix: members of archives that are no documents}."""
    problems: tuple[Problem, ...] = ()
    cleaning: CleaningAccount | None = None
    """None where nothing is cleaned."""
    disagreement: str | None = None
    """The text for which the fast path gave wrong ids, if any."""
    stage_seconds: dict[str, float] = field(default_factory=dict)
    """Time a worker spent in each of its stages."""

    def keeping(self, kept: np.ndarray) -> "EncodedPart":
        """The same part with only those documents. kept: (documents,) bool."""
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


def _part_without_documents(hashes: np.ndarray, part: Part, stages: dict[str, float]) -> EncodedPart:
    return EncodedPart(
        ids=np.empty(0, np.uint16),
        documents=np.empty(0, DOCUMENT),
        source_names=(),
        is_validation=np.empty(0, bool),
        hashes=hashes,
        after=part.after,
        input_bytes=part.input_bytes,
        stage_seconds=stages,
    )


@dataclass
class _Texts:
    """What was read from a part; the first five have an element per document, sources by number in `names`."""

    texts: list[bytes] = field(default_factory=list)
    is_validation: list[bool] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    urls: list[str | None] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    empty: int = 0
    filtered: int = 0
    unread_members: Counter[str] = field(default_factory=Counter)
    account: CleaningAccount | None = None

    def lines(self) -> list[bytes]:
        """The documents as they stand, for --write_text."""
        names = list(self.names)
        sources = [names[number] for number in self.sources]
        return list(map(document_line, self.texts, sources, self.places, self.is_validation, self.urls))

    def clean(self, cleaning: Cleaning) -> None:
        """Leaves only the documents that stay, with their new texts, and the account of all."""
        sources = list(self.names)
        names = [sources[number] for number in self.sources]
        kept, self.texts, self.account = cleaning.clean(self.texts, self.urls, names, self.places)
        for name in ("is_validation", "sources", "places", "urls"):
            values = getattr(self, name)
            setattr(self, name, [values[number] for number in kept])
        self.problems = [p._replace(documents_before=bisect_left(kept, p.documents_before)) for p in self.problems]


class PartEncoder:
    """Encodes parts, one after another, in this process."""

    def __init__(self, settings: EncodingSettings):
        # One worker per core: the tokenizers library must not start threads of its own.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._settings, self._encoder = settings, settings.encoder
        self._has_compared = False

    def encode(self, part: Part) -> EncodedPart:
        """Reads, checks, splits and encodes one part."""
        began = time.perf_counter()
        read = self._read(part)
        parsed = cleaned = time.perf_counter()
        stages = {"parse": parsed - began}
        if self._settings.counting is not None:
            hashes = self._settings.counting.distinct_hashes(read.texts)
            stages["count"] = time.perf_counter() - parsed
            return _part_without_documents(hashes, part, stages)
        if self._settings.cleaning is not None:
            read.clean(self._settings.cleaning)
            cleaned = time.perf_counter()
            stages["clean"] = cleaned - parsed
        arrays = self._encoder.encode(read.texts)
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
        documents = document_table(tokens, [len(text) for text in read.texts], read.sources, read.places)
        hashes = document_hashes(ids, np.cumsum(tokens)) if settings.deduplicate else None
        disagreement = self._disagreement(read.texts)
        checked = time.perf_counter()
        stages |= {"tokenise": tokenised - cleaned, "check": checked - tokenised}
        signatures = None
        if settings.near_duplicates is not None:
            signatures = settings.near_duplicates.signatures(*settings.near_duplicates.words(read.texts))
            stages["signatures"] = time.perf_counter() - checked
        return EncodedPart(
            ids=ids,
            documents=documents,
            source_names=tuple(read.names),
            is_validation=np.array(read.is_validation, dtype=bool),
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
                for piece in self._settings.split.pieces(record.text, record.is_validation):
                    read.texts.append(piece.text)
                    read.is_validation.append(piece.is_validation)
                    read.sources.append(read.names.setdefault(source.name, len(read.names)))
                    read.places.append(record.place + piece.lines_before)
                    read.urls.append(record.url)
            elif record.problem is not None:
                where = source.place(record.place), source.recorded_place(record.place)
                read.problems.append(Problem(len(read.texts), *where, record.problem, record.problem_records))
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
        """Compares both paths on the beginnings of the first documents, then of one in the middle of each part."""
        if not isinstance(self._encoder, FastEncoder) or not texts:
            return None
        compared = [texts[len(texts) // 2]] if self._has_compared else texts[:FIRST_DOCUMENTS]
        self._has_compared = True
        return self._encoder.disagreement([t[:SAMPLE_BYTES].decode(errors="ignore").encode() for t in compared])


def encode_parts(parts: Iterable[Part], settings: EncodingSettings, workers: int) -> Iterator[EncodedPart]:
    """Encodes parts in order, with `workers` processes or, when 1, in this one. Raises InputError when one dies."""
    # What workers share when they are forked.
    if settings.counting is not None:
        settings.counting.distinct_hashes([b"compiled once"])
    if settings.near_duplicates is not None:
        settings.near_duplicates.signatures(*settings.near_duplicates.words([b"compiled once"]))
    if settings.cleaning is not None:
        _ = settings.cleaning.opened
    # What is there stays: no collection needs to search it, nor to copy its pages into a worker's memory.
    gc.freeze()
    if workers == 1:
        encoder = PartEncoder(settings)
        yield from map(encoder.encode, parts)
        return
    pool = start_pool(workers, _set_encoder, settings)
    jobs = (pool.submit(_encode_in_worker, part) for part in parts)
    try:
        yield from results_in_order(jobs, Future.result, workers)
    except BrokenProcessPool:
        raise InputError(
            "a worker process died, most likely out of memory; run the same command again with fewer --workers: "
            "it continues where it stopped"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def results_in_order(jobs: Iterator[Any], result: Callable[[Any], EncodedPart], workers: int) -> Iterator[EncodedPart]:
    """The result of each job in order; taking a job from `jobs` starts it, a few per worker ahead."""
    waiting: collections.deque[Any] = collections.deque()
    for job in jobs:
        waiting.append(job)
        if len(waiting) > workers * PARTS_AHEAD_PER_WORKER:
            yield result(waiting.popleft())
    while waiting:
        yield result(waiting.popleft())


# Forked workers start in milliseconds; elsewhere than on Linux forking is not safe.
POOL_CONTEXT = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")


def start_pool(workers: int, prepare: Callable[..., None], *arguments: Any) -> ProcessPoolExecutor:
    """Processes that end with this one. prepare: called with the arguments in each of them first."""
    initial = (os.getpid(), prepare, arguments)
    return ProcessPoolExecutor(workers, POOL_CONTEXT, initializer=_start_worker, initargs=initial)


def _start_worker(parent: int, prepare: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    prepare(*arguments)


_encoder_of_worker: PartEncoder | None = None


def _set_encoder(settings: EncodingSettings) -> None:
    global _encoder_of_worker
    _encoder_of_worker = PartEncoder(settings)


def _end_with_parent(parent: int) -> None:
    """A worker waits for parts on a pipe that its siblings hold open too: without this it would outlive the parent."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_SECONDS)
    os._exit(1)


def _encode_in_worker(part: Part) -> EncodedPart:
    assert _encoder_of_worker is not None
    return _encoder_of_worker.encode(part)
