"""What a worker does: a part's records become ids, split into training and validation; and the pool of workers."""

import collections
import hashlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pretrain.formats import Reading, Record
from pretrain.problems import InputError
from pretrain.shards import dtype_for
from pretrain.sources import Part, Position, Source
from pretrain.tokenize import Encoder, FastEncoder, LoadedTokenizer

PARTS_AHEAD_PER_WORKER = 2
SAMPLE_BYTES = 4096
PARENT_CHECK_SECONDS = 0.5


@dataclass(frozen=True)
class EncodingSettings:
    """What a worker has to know besides the part."""

    tokenizer: LoadedTokenizer
    encoder: Encoder
    reading: Reading
    validation_fraction: float
    stop_at_problem: bool


class Problem(NamedTuple):
    """A record that could not be used: `place` for people, `name` without the machine's folders for the manifest."""

    documents_before: int
    place: str
    name: str
    reason: str


@dataclass(frozen=True)
class EncodedPart:
    """The documents of a part in order: `ids` end to end, each document closed by the end-of-document id.

    The arrays have one element per document, `ids` one per token. `disagreement` tells that the fast path was wrong.
    """

    ids: np.ndarray
    document_tokens: np.ndarray
    document_bytes: np.ndarray
    is_validation: np.ndarray
    empty_documents: int
    problems: tuple[Problem, ...]
    disagreement: str | None
    after: Position
    input_bytes: int


def is_validation_text(text: bytes, fraction: float) -> bool:
    """Whether a document belongs to the validation split: by the first 8 bytes of its text's SHA-256, alone."""
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") < fraction * 2.0**64


class PartEncoder:
    """Encodes parts, one after another, in this process."""

    def __init__(self, settings: EncodingSettings):
        # One worker per core: the tokenizers library must not start threads of its own.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._settings = settings
        self._encoder = settings.encoder

    def encode(self, part: Part) -> EncodedPart:
        """Reads, checks, splits and encodes one part."""
        texts, empty, problems = self._texts(part)
        arrays = self._encoder.encode(texts)
        end = self._settings.tokenizer.end_of_document_id
        self._check_ends(arrays, end)
        dtype = dtype_for(self._settings.tokenizer.vocabulary_size)
        document_tokens = np.array([len(array) + 1 for array in arrays], dtype=np.int64)
        ids = np.full(int(document_tokens.sum()), end, dtype=dtype)
        first = 0
        for array in arrays:
            ids[first : first + len(array)] = array
            first += len(array) + 1
        fraction = self._settings.validation_fraction
        return EncodedPart(
            ids=ids,
            document_tokens=document_tokens,
            document_bytes=np.array([len(text) for text in texts], dtype=np.int64),
            is_validation=np.array([is_validation_text(text, fraction) for text in texts], dtype=bool),
            empty_documents=empty,
            problems=tuple(problems),
            disagreement=self._disagreement(texts),
            after=part.after,
            input_bytes=part.input_bytes,
        )

    def _texts(self, part: Part) -> tuple[list[bytes], int, list[Problem]]:
        texts: list[bytes] = []
        problems: list[Problem] = []
        empty = 0
        for source, record in part.records(self._settings.reading):
            if record.problem is not None:
                problems.append(_problem(len(texts), source, record))
                if self._settings.stop_at_problem:
                    break
            elif record.text:
                texts.append(record.text)
            else:
                empty += 1
        return texts, empty, problems

    def _check_ends(self, arrays: list[np.ndarray], end: int) -> None:
        if any((array == end).any() for array in arrays):
            token = self._settings.tokenizer.end_of_document
            raise InputError(
                f"{self._settings.tokenizer.name}: this tokenizer makes its end-of-document token {token!r} out of "
                "ordinary text, so documents could not be told apart; name another with --end_of_document TOKEN"
            )

    def _disagreement(self, texts: list[bytes]) -> str | None:
        """Compares both paths on a piece of the part's middle document: any text will do, so a piece will."""
        if not isinstance(self._encoder, FastEncoder) or not texts:
            return None
        piece = texts[len(texts) // 2][:SAMPLE_BYTES].decode(errors="ignore").encode()
        return self._encoder.disagreement([piece])


def _problem(documents_before: int, source: Source, record: Record) -> Problem:
    name = source.place(record.place).replace(source.path, source.name, 1)
    return Problem(documents_before, source.place(record.place), name, record.problem)


def encode_parts(parts: Iterable[Part], settings: EncodingSettings, workers: int) -> Iterator[EncodedPart]:
    """Encodes parts with `workers` processes (in this process when 1), in the order of the parts.

    Raises InputError when a worker process dies, which is what running out of memory looks like.
    """
    if workers == 1:
        encoder = PartEncoder(settings)
        yield from map(encoder.encode, parts)
        return
    # Forked workers start in milliseconds; elsewhere than on Linux forking is not safe.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(settings, os.getpid()))
    waiting: collections.deque[Future[EncodedPart]] = collections.deque()
    try:
        for part in parts:
            waiting.append(pool.submit(_encode_in_worker, part))
            if len(waiting) > workers * PARTS_AHEAD_PER_WORKER:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise InputError(
            "a worker process died, most likely for want of memory; run the same command again with fewer --workers: "
            "it continues where it stopped"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_encoder_of_worker: PartEncoder | None = None


def _start_worker(settings: EncodingSettings, parent: int) -> None:
    global _encoder_of_worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    _encoder_of_worker = PartEncoder(settings)


def _end_with_parent(parent: int) -> None:
    """A worker waits for parts on a pipe that its siblings hold open too: without this it would outlive the parent."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_SECONDS)
    os._exit(1)


def _encode_in_worker(part: Part) -> EncodedPart:
    assert _encoder_of_worker is not None
    return _encoder_of_worker.encode(part)
