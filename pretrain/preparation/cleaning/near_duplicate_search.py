"""The search for near duplicates in prepared folders: on disk, deterministic, continued after a kill.

Three stages, each of which writes files that are complete or absent:

    runs        for every band, the keys of RUN_DOCUMENTS documents, sorted: 8 bytes per document and band
    pairs       band by band: documents with equal keys are compared, exactly; those that are near duplicates
    duplicates  connected components of all pairs: of each, the first document in the order of the input stays

In memory are 4 bytes per document (the components), 8 per validation document and about half a gigabyte.
"""

import shutil
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.data.input_order import InputOrder
from pretrain.data.manifest import Manifest
from pretrain.data.tokenizer import LoadedTokenizer, backend_of
from pretrain.errors import InputError
from pretrain.files import write_durably
from pretrain.preparation.cleaning.near_duplicates import NearDuplicates

SIGNATURES_SUFFIX = ".signatures"
"""Of the files beside each shard with a signature per document."""
DUPLICATE = np.dtype([("document", "<u4"), ("kept", "<u4")])
"""A document that goes, and the first of its component, which stays; both by their number in the input's order."""
MOST_DOCUMENTS = 1 << 32
RUN_DOCUMENTS = 1 << 21
KEYS_AT_ONCE = 1 << 23
MOST_PARTITIONS = 256
PAIRS_AT_ONCE = 1 << 16
SIGNATURE_MARGIN = 0.3
"""Documents whose signatures agree in so much less than the threshold are not read."""
REJECTED_IN_MEMORY = 1 << 20
NEAR_DUPLICATES_FILE = "near_duplicates.json"
"""Beside the manifest: how many components there are of each size, and examples."""
EXAMPLES_SHOWN = 100
EXCERPT_TOKENS = 200
LINE_SECONDS = 10.0
PAIRS_COMMIT_SECONDS = 30.0


class StageProgress:
    """Says now and then how far a stage is, its rate and the time left; `stop_if_asked` raises to end the work."""

    def __init__(self, say: Callable[[str], None], stop_if_asked: Callable[[], None]):
        self.stop_if_asked, self._say = stop_if_asked, say
        self._stage, self._began, self._first, self._last = "", 0.0, 0, time.monotonic()

    def update(self, stage: str, unit: str, done: int, total: int) -> None:
        """done, total: in `unit`, of the stage."""
        self.stop_if_asked()
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._began, self._first = stage, now, done
        if now - self._last >= LINE_SECONDS and done > self._first:
            rate = (done - self._first) / (now - self._began)
            left = (total - done) / rate
            self._say(f"near duplicates, {stage}: {done:,} of {total:,} {unit}, {rate:,.3g}/s, {left:,.0f} s left")
            self._last = now


class DuplicateSearch:
    """One search, in the folder `work`.

    Args:
        order: the documents, with their signatures beside the shards.
        progress: called often.
    """

    def __init__(self, order: InputOrder, settings: NearDuplicates, work: Path, progress: StageProgress):
        self.order, self._settings, self._work, self._progress = order, settings, work, progress
        self._rejected: set[int] = set()
        if order.documents >= MOST_DOCUMENTS:
            raise InputError(
                f"--near_duplicates: {order.documents:,} documents are more than {MOST_DOCUMENTS:,}; prepare them in "
                "several folders"
            )
        # As few as keep a partition in memory: a key's partition and 32 more of its 40 bits are compared.
        wanted = max(1, -(-order.documents // KEYS_AT_ONCE))
        self._partitions = min(MOST_PARTITIONS, 1 << (wanted - 1).bit_length())
        self._runs = -(-order.documents // RUN_DOCUMENTS)

    @property
    def disk_bytes(self) -> int:
        """What the search still writes, at most."""
        if self._duplicates_path.is_file():
            return 0
        left = sum(not self._run_path(run).is_file() for run in range(self._runs))
        return min(left * RUN_DOCUMENTS, self.order.documents) * 8 * self._settings.bands

    @property
    def _duplicates_path(self) -> Path:
        return self._work / "duplicates"

    def _run_path(self, run: int) -> Path:
        return self._work / "runs" / f"{run:05d}"

    def run(self) -> np.ndarray:
        """The duplicates, by ascending number: records of type DUPLICATE, memory-mapped."""
        if not self._duplicates_path.is_file():
            (self._work / "runs").mkdir(parents=True, exist_ok=True)
            for run in range(self._runs):
                if not self._run_path(run).is_file():
                    self._write_run(run)
                self._progress.update("keys", "runs", run + 1, self._runs)
            write_durably(self._duplicates_path, self._components().tobytes())
        shutil.rmtree(self._work / "runs", ignore_errors=True)
        return np.fromfile(self._duplicates_path, DUPLICATE)

    def _write_run(self, run: int) -> None:
        """(bands, partitions + 1) int64 places, then (bands, documents) uint64 keys and documents, 32 bits of each."""
        first = run * RUN_DOCUMENTS
        stop = min(first + RUN_DOCUMENTS, self.order.documents)
        numbers = np.arange(first, stop)
        signatures = self.order.beside(numbers, SIGNATURES_SUFFIX, self._settings.signature_bytes)
        cuts = np.arange(self._partitions + 1, dtype=np.uint64) << np.uint64(40 - self._partition_bits)
        places = np.empty((self._settings.bands, self._partitions + 1), "<i8")
        entries = np.empty((self._settings.bands, stop - first), "<u8")
        for band in range(self._settings.bands):
            keys = self._settings.band_keys(signatures, band)
            keys = (keys << np.uint64(24)) | np.arange(stop - first, dtype=np.uint64)
            keys.sort()
            places[band] = np.searchsorted(keys >> np.uint64(24), cuts)
            documents = (keys & np.uint64((1 << 24) - 1)) + np.uint64(first)
            entries[band] = ((keys >> np.uint64(24)) << np.uint64(32)) | documents
            self._progress.stop_if_asked()
        write_durably(self._run_path(run), places.tobytes() + entries.tobytes())

    @property
    def _partition_bits(self) -> int:
        return self._partitions.bit_length() - 1

    def _partition(self, band: int, partition: int) -> np.ndarray:
        """Sorted entries of all runs: keys in the upper, documents in the lower 32 bits."""
        pieces = []
        for run in range(self._runs):
            documents = min(RUN_DOCUMENTS, self.order.documents - run * RUN_DOCUMENTS)
            places = np.memmap(self._run_path(run), "<i8", "r", shape=(self._settings.bands, self._partitions + 1))
            begin, stop = places[band, partition : partition + 2].tolist()
            offset = places.nbytes + 8 * (band * documents + begin)
            pieces.append(np.fromfile(self._run_path(run), "<u8", stop - begin, offset=offset))
        entries = np.concatenate([np.empty(0, "<u8"), *pieces])
        entries.sort(kind="stable")
        return entries

    def _components(self) -> np.ndarray:
        parents = np.arange(self.order.documents, dtype=np.uint32)
        path, total, done = self._work / "pairs", self._settings.bands * self._partitions, 0
        found = array("I")
        if path.is_file():
            written = np.fromfile(path, np.uint32)
            done, found = int(written[0]), array("I", written[1:].tobytes())
            for one, other in zip(found[::2], found[1::2], strict=True):
                _join(parents, one, other)
        committed = time.monotonic()
        for part in range(done, total):
            self._progress.update("pairs", "partitions", part, total)
            pairs = _candidates(self._partition(*divmod(part, self._partitions)))
            for pair in self._near_duplicates_among(pairs, parents):
                found.extend(pair)
            if time.monotonic() - committed > PAIRS_COMMIT_SECONDS:
                write_durably(path, np.uint32(part + 1).tobytes() + found.tobytes())
                committed = time.monotonic()
        parents = _roots(parents, parents)
        documents = np.flatnonzero(parents != np.arange(len(parents), dtype=np.uint32))
        duplicates = np.empty(len(documents), DUPLICATE)
        duplicates["document"], duplicates["kept"] = documents, parents[documents]
        return duplicates

    def _near_duplicates_among(self, pairs: np.ndarray, parents: np.ndarray) -> list[tuple[int, int]]:
        """Joins the near duplicates among pairs, (pairs, 2); those that joined something."""
        found = []
        least = self._settings.threshold - SIGNATURE_MARGIN
        for first in range(0, len(pairs), PAIRS_AT_ONCE):
            block = pairs[first : first + PAIRS_AT_ONCE]
            block = block[_roots(parents, block[:, 0]) != _roots(parents, block[:, 1])]
            documents, inverse = np.unique(block, return_inverse=True)
            signatures = self.order.beside(documents, SIGNATURES_SUFFIX, self._settings.signature_bytes)
            inverse = inverse.reshape(-1, 2)
            agreement = (signatures[inverse[:, 0]] == signatures[inverse[:, 1]]).mean(axis=1)
            for one, other in block[agreement >= least].tolist():
                self._progress.stop_if_asked()
                if _root(parents, one) != _root(parents, other) and self._are_near_duplicates(one, other):
                    _join(parents, one, other)
                    found.append((one, other))
        return found

    def _are_near_duplicates(self, one: int, other: int) -> bool:
        pair = one << 32 | other
        if pair in self._rejected:
            return False
        if self.similarity(one, other) >= self._settings.threshold:
            return True
        if len(self._rejected) >= REJECTED_IN_MEMORY:
            self._rejected.clear()
        self._rejected.add(pair)
        return False

    def similarity(self, one: int, other: int) -> float:
        """The Jaccard similarity of two documents."""
        return self._settings.similarity(self.order.ids(one), self.order.ids(other))


def _candidates(entries: np.ndarray) -> np.ndarray:
    """(pairs, 2) of the documents with equal keys: each with the first of them and with the one before it."""
    keys = entries >> np.uint64(32)
    repeats = np.flatnonzero(keys[1:] == keys[:-1]) + 1
    if not len(repeats):
        return np.empty((0, 2), np.int64)
    documents = entries & np.uint64(0xFFFFFFFF)
    is_first = np.ones(len(keys), bool)
    is_first[repeats] = False
    firsts = np.flatnonzero(is_first)
    first = documents[firsts[np.cumsum(is_first)[repeats] - 1]]
    earlier = np.concatenate([first, documents[repeats - 1]])
    pairs = np.unique(earlier << np.uint64(32) | np.tile(documents[repeats], 2))
    return np.stack([pairs >> np.uint64(32), pairs & np.uint64(0xFFFFFFFF)], axis=1).astype(np.int64)


def _roots(parents: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """The first document of the component of each."""
    roots = parents[documents]
    while not np.array_equal(above := parents[roots], roots):
        roots = above
    return roots


def _root(parents: np.ndarray, document: int) -> int:
    while (parent := int(parents[document])) != document:
        parents[document] = parents[parent]
        document = parent
    return document


def _join(parents: np.ndarray, one: int, other: int) -> None:
    one, other = _root(parents, one), _root(parents, other)
    # The smallest number is the root: the first in the order of the input.
    parents[max(one, other)] = min(one, other)


def report_of(
    search: DuplicateSearch, duplicates: np.ndarray, manifests: Sequence[Manifest], tokenizer: LoadedTokenizer
) -> dict[str, Any]:
    """Components by size, and at most EXAMPLES_SHOWN of the documents that go, beside those that stay instead.

    The examples are spread evenly over the input; their texts are decoded from the first EXCERPT_TOKENS ids.
    """
    kept, copies = np.unique(duplicates["kept"], return_counts=True)
    sizes, clusters = np.unique(2 ** np.ceil(np.log2(copies + 1)).astype(np.int64), return_counts=True)
    chosen = (
        duplicates[np.unique(np.linspace(0, len(duplicates) - 1, EXAMPLES_SHOWN).astype(np.int64))]
        if len(kept)
        else []
    )
    decoder = backend_of(tokenizer.json, tokenizer.name)

    def described(number: int) -> dict[str, Any]:
        record = search.order.record(number)
        text = decoder.decode(search.order.ids(number)[:EXCERPT_TOKENS].tolist(), skip_special_tokens=False)
        source = manifests[0].source_names[int(record["source"])]
        return {"source": source, "place": int(record["place"]), "bytes": int(record["text_bytes"]), "text": text}

    examples = [
        {
            "jaccard": round(search.similarity(one, other), 4),
            "copies": int(copies[np.searchsorted(kept, other)]),
            "removed": described(one),
            "kept": described(other),
        }
        for one, other in (entry.tolist() for entry in chosen)
    ]
    return {
        "documents": search.order.documents,
        "removed": len(duplicates),
        "clusters": len(kept),
        "clusters_of_at_most": {str(size): int(number) for size, number in zip(sizes, clusters, strict=True)},
        "largest_cluster": int(copies.max()) + 1 if len(copies) else 0,
        "examples": examples,
    }
