"""Finds near duplicates in prepared folders. The search is deterministic and can be resumed.

It runs in two stages. Each stage consists of independent tasks that write one file each and need about 300 MB of
memory:

    candidates  find pairs of documents with equal keys, for one key range of one band
    pairs       compute the exact similarity of all candidates for RUN_DOCUMENTS documents

Finally, one process merges the pairs into connected components and keeps the first document of each.
"""

import hashlib
import os
import socket
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.data.manifest import MANIFEST_FILE, Manifest
from pretrain.data.tokenizer import LoadedTokenizer
from pretrain.errors import InputError
from pretrain.files import write_durably
from pretrain_tools.preparation.cleaning.near_duplicates import NearDuplicates
from pretrain_tools.preparation.documents.document_index import HELD_OUT, InputOrder

SIGNATURES_SUFFIX = ".signatures"
"""Suffix of the signature file next to each shard."""
STAGES = ("candidates", "pairs")
DUPLICATE = np.dtype([("document", "<u4"), ("kept", "<u4")])
"""A removed document and the document kept instead, as indices in input order."""
MOST_DOCUMENTS = 1 << 32
RUN_DOCUMENTS = 1 << 19
KEYS_AT_ONCE = 1 << 22
MOST_PARTITIONS = 256
PAIRS_AT_ONCE = 1 << 16
SIGNATURE_MARGIN = 0.3
"""Pairs are compared exactly only if their estimated similarity is at least the threshold minus this margin."""
NEAR_DUPLICATES_FILE = "near_duplicates.json"
"""File next to the manifest with counts and examples of near duplicates."""
EXAMPLES_SHOWN = 100
EXCERPT_TOKENS = 200


class DuplicateSearch:
    """A near-duplicate search over prepared folders. Picklable, so that workers can run its tasks.

    Temporary files are stored in a subfolder of `work`, named after a hash of the manifests.
    """

    def __init__(
        self, manifests: Sequence[Manifest], settings: NearDuplicates, work: Path, tokenizer: LoadedTokenizer
    ):
        self.order = InputOrder(manifests)
        self.settings = settings
        self._tokenizer = tokenizer
        self._source_names = manifests[0].source_names
        digest = hashlib.sha256(b"".join((manifest.folder / MANIFEST_FILE).read_bytes() for manifest in manifests))
        self._work = work / digest.hexdigest()[:16]
        if self.order.documents >= MOST_DOCUMENTS:
            raise InputError(
                f"--near_duplicates: there are {self.order.documents:,} documents, but the search supports fewer than "
                f"{MOST_DOCUMENTS:,}; split them into several folders"
            )
        # Use as few partitions as memory allows. Keys match if they have the same partition and the same low 32 bits.
        wanted = max(1, -(-self.order.documents // KEYS_AT_ONCE))
        self._partitions = min(MOST_PARTITIONS, 1 << (wanted - 1).bit_length())
        documents = range(self.order.documents)
        self._runs = [documents[first : first + RUN_DOCUMENTS] for first in documents[::RUN_DOCUMENTS]]

    def tasks(self, stage: str) -> int:
        """Returns the number of tasks in a stage."""
        return self.settings.bands * self._partitions if stage == "candidates" else len(self._runs)

    def _path(self, stage: str, task: int) -> Path:
        return self._work.absolute() / stage / f"{task:05d}"

    def missing(self, stage: str) -> list[tuple[str, int]]:
        """Lists the unfinished tasks in a stage as (stage, task)."""
        return [(stage, task) for task in range(self.tasks(stage)) if not self._path(stage, task).is_file()]

    def perform(self, job: tuple[str, int]) -> None:
        """Runs one task, given as (stage, task). The previous stage must be complete."""
        stage, task = job
        found = self._candidates(task) if stage == "candidates" else self._pairs(task)
        path = self._path(stage, task)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Two processes may run the same task, so each writes its own temporary file.
        own = path.with_name(f"{path.name}-{socket.gethostname()}-{os.getpid()}")
        write_durably(own, found)
        own.rename(path)

    def duplicates(self) -> np.ndarray:
        """Returns (duplicates,) DUPLICATE, sorted by removed document. All tasks must be complete."""
        parents: dict[int, int] = {}
        for run in range(len(self._runs)):
            for pair in np.fromfile(self._path("pairs", run), "<u4").reshape(-1, 2).tolist():
                roots = {_root(parents, document) for document in pair}
                if len(roots) > 1:
                    parents[max(roots)] = min(roots)
        return np.array([(document, _root(parents, document)) for document in sorted(parents)], DUPLICATE)

    def _candidates(self, task: int) -> bytes:
        """Computes sorted uint64 pairs. The upper 32 bits are the later document, the lower 32 bits the earlier."""
        band, partition = divmod(task, self._partitions)
        # Band keys have 40 bits. The upper ones choose the partition.
        shift = np.uint64(40 - (self._partitions.bit_length() - 1))
        pieces = [np.empty(0, np.uint64)]
        for run in self._runs:
            keys = self.settings.band_keys(self._signatures(np.array(run)), band)
            chosen = np.flatnonzero(keys >> shift == partition)
            documents = (chosen + run.start).astype(np.uint64)
            pieces.append(keys[chosen] << np.uint64(32) | documents)
        entries = np.concatenate(pieces)
        entries.sort(kind="stable")
        return _same_keys(entries).astype("<u8").tobytes()

    def _signatures(self, documents: np.ndarray) -> np.ndarray:
        return self.order.side_records(documents, SIGNATURES_SUFFIX, self.settings.signature_bytes)

    def _pairs(self, run: int) -> bytes:
        """Computes (pairs, 2) uint32: near-duplicate pairs whose later document is in the run.

        Skips pairs whose documents are already connected through earlier pairs.
        """
        bounds = np.array([self._runs[run].start, self._runs[run].stop], np.uint64) << np.uint64(32)
        pieces = [np.empty(0, "<u8")]
        for task in range(self.tasks("candidates")):
            path = self._path("candidates", task)
            if path.stat().st_size:
                pairs = np.memmap(path, "<u8", mode="r")
                begin, stop = np.searchsorted(pairs, bounds)
                pieces.append(pairs[begin:stop])
        pairs = np.unique(np.concatenate(pieces))
        pairs = np.stack([pairs & np.uint64(0xFFFFFFFF), pairs >> np.uint64(32)], axis=1).astype(np.int64)
        # Cache only two documents, because documents can be large and pairs are sorted.
        words = lru_cache(2)(self._words)
        parents: dict[int, int] = {}
        found = []
        for first in range(0, len(pairs), PAIRS_AT_ONCE):
            block = pairs[first : first + PAIRS_AT_ONCE]
            for one, other in block[self._are_alike(block)].tolist():
                roots = {_root(parents, one), _root(parents, other)}
                if len(roots) == 1:
                    continue
                if self.settings.similarity(words(one), words(other)) >= self.settings.threshold:
                    parents[max(roots)] = min(roots)
                    found.append((one, other))
        return np.array(found, "<u4").tobytes()

    def _are_alike(self, pairs: np.ndarray) -> np.ndarray:
        """Returns (pairs,) bool: True if the signatures are similar enough for an exact comparison."""
        documents, inverse = np.unique(pairs, return_inverse=True)
        signatures = self._signatures(documents)
        inverse = inverse.reshape(-1, 2)
        agreement = (signatures[inverse[:, 0]] == signatures[inverse[:, 1]]).mean(axis=1)
        return agreement >= self.settings.threshold - SIGNATURE_MARGIN

    def report(self, duplicates: np.ndarray) -> dict[str, Any]:
        """Returns counts and up to EXAMPLES_SHOWN examples of near duplicates, evenly spaced across the input."""
        step = max(1, -(-len(duplicates) // EXAMPLES_SHOWN))
        examples = [
            {
                "jaccard": round(self.settings.similarity(self._words(one), self._words(other)), 4),
                "removed": self._described(one),
                "kept": self._described(other),
            }
            for one, other in duplicates[::step].tolist()
        ]
        return {
            "documents": self.order.documents,
            "removed": len(duplicates),
            "clusters": len(np.unique(duplicates["kept"])),
            "examples": examples,
        }

    def _described(self, number: int) -> dict[str, Any]:
        (record,) = self.order.table(number, number + 1)
        return {
            "source": self._source_names[record["source"]],
            "place": int(record["place"] % HELD_OUT),
            "bytes": int(record["text_bytes"]),
            "text": self._text(number, EXCERPT_TOKENS),
        }

    def _words(self, number: int) -> np.ndarray:
        """Returns the hashes of a document's words."""
        return self.settings.words([self._text(number).encode()])[0]

    def _text(self, number: int, most_tokens: int | None = None) -> str:
        """Decodes a document's text from its token IDs, optionally only the first `most_tokens`.

        Spaces may differ from the original text.
        """
        ids = self.order.ids(number)[:most_tokens].tolist()
        return self._tokenizer.backend.decode(ids, skip_special_tokens=False)


def _root(parents: dict[int, int], document: int) -> int:
    """Finds the first document of a connected component (union-find with path compression)."""
    while document in parents:
        above = parents[document]
        parents[document] = parents.get(above, above)
        document = parents[document]
    return document


def _same_keys(entries: np.ndarray) -> np.ndarray:
    """Pairs each document with two earlier documents that have the same key: the first one and the previous one."""
    keys = entries >> np.uint64(32)
    documents = entries & np.uint64(0xFFFFFFFF)
    starts = np.flatnonzero(np.diff(keys, prepend=~keys[:1]))
    firsts = np.repeat(documents[starts], np.diff(starts, append=len(keys)))
    later = np.flatnonzero(documents != firsts)
    earlier = np.concatenate([firsts[later], documents[later - 1]])
    return np.unique(np.tile(documents[later], 2) << np.uint64(32) | earlier)
