"""The index of a shard: where each document ends, and the file and line that it came from.

train-00000.documents holds one record of 24 bytes per document, in the order of the shard, without a header, so that
`np.memmap(file, DOCUMENT)` opens it.
"""

from pathlib import Path

import numpy as np

from pretrain.errors import InputError

DOCUMENTS_SUFFIX = ".documents"
DOCUMENT = np.dtype([("end", "<u8"), ("place", "<u8"), ("text_bytes", "<u4"), ("source", "<u4")])
"""end: tokens of the shard through the document's end id. place: line, row or number in its source, from 1.
text_bytes: UTF-8 bytes of its text. source: number in the manifest's list of sources, from 0."""


def index_path(shard: Path) -> Path:
    """The index file that belongs to a shard file."""
    return shard.with_suffix(DOCUMENTS_SUFFIX)


def document_table(
    document_tokens: np.ndarray, text_bytes: np.ndarray, sources: np.ndarray, places: np.ndarray
) -> np.ndarray:
    """Records of documents end to end; one element per document in each array, ends counted from 0."""
    table = np.empty(len(document_tokens), DOCUMENT)
    table["end"] = np.cumsum(document_tokens)
    table["text_bytes"], table["source"], table["place"] = text_bytes, sources, places
    return table


def tokens_of(documents: np.ndarray) -> np.ndarray:
    """(documents,) tokens of each document with its end id, from the ends of documents that begin at 0."""
    return np.diff(documents["end"].astype(np.int64), prepend=0)


def chosen_ids(ids: np.ndarray, tokens: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """The ids of those documents, of all that stand end to end in `ids`. tokens, chosen: (documents,), chosen bool."""
    edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False))
    if 100 * len(edges) > len(ids):
        return ids[np.repeat(chosen, tokens)]
    # Few long runs are copied ten times faster than single ids.
    runs = np.concatenate([[0], np.cumsum(tokens)])[edges].reshape(-1, 2)
    return np.concatenate([ids[:0], *(ids[start:stop] for start, stop in runs.tolist())])


def read_index(shard: Path, documents: int) -> np.ndarray | None:
    """The records of a shard, memory-mapped; None without an index. InputError when they are not `documents` many."""
    path = index_path(shard)
    if not path.is_file():
        return None
    if path.stat().st_size != documents * DOCUMENT.itemsize:
        raise InputError(
            f"{path}: has {path.stat().st_size:,} bytes, must have {documents * DOCUMENT.itemsize:,} "
            f"({documents:,} documents); restore the file, or prepare the folder again"
        )
    return np.memmap(path, DOCUMENT, mode="r").view(np.ndarray) if documents else np.empty(0, DOCUMENT)
