"""Writes documents as compressed JSON lines next to the shards, so that text cleaned once works for every tokenizer.

An unfinished shard's lines are uncompressed, so that a resumed preparation can truncate them. A full shard's lines are
compressed. The bytes depend only on the documents, not on parts, workers or kills.
"""

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

from pretrain.data.manifest import Manifest
from pretrain.errors import InputError
from pretrain_tools.preparation.documents.byte_stream import ByteStream, DamagedFileError
from pretrain_tools.preparation.documents.records import Record

TEXT_FOLDER = "text"
"""Folder in the prepared folder."""
TEXT_SUFFIX = ".jsonl.zst"
LEVEL = 3
LINE_BYTES_AT_ONCE = 1 << 20


def document_line(source: str, record: Record) -> bytes:
    """Formats a record as a JSON line from which prepare_data.py reads the same text."""
    fields = {"text": record.text.decode(), "id": f"{source}:{record.place}", "source": source}
    fields["split"] = "validation" if record.is_validation else "train"
    if record.url is not None:
        fields["url"] = record.url
    # Half of a surrogate pair, possible in a URL, stays escaped.
    return json.dumps(fields, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def compress(plain: Path, path: Path) -> None:
    """Compresses a file durably. The same content gives the same bytes on any number of cores."""
    import zstandard

    path.parent.mkdir(exist_ok=True)
    # At least one thread, because zstd makes different frames without threads.
    compressor = zstandard.ZstdCompressor(level=LEVEL, threads=max(1, os.cpu_count() or 1))
    with plain.open("rb") as source, path.open("wb") as target:
        compressor.copy_stream(source, target, size=plain.stat().st_size)
        target.flush()
        os.fsync(target.fileno())


def text_name(shard: str) -> str:
    """Returns the name of a shard's text in the prepared folder: train-00000.bin -> text/train-00000.jsonl.zst."""
    return f"{TEXT_FOLDER}/{Path(shard).stem}{TEXT_SUFFIX}"


def has_text(manifest: Manifest) -> bool:
    """Returns True if a folder has its documents' text."""
    return any(text_name(shard.file) in shard.beside for shard in manifest.shards)


def stored_lines(manifest: Manifest) -> Iterator[bytes]:
    """Yields the lines of all documents in order.

    Raises InputError at the end, so read only as many lines as the shards have documents.
    """
    folder = manifest.folder
    try:
        for shard in manifest.shards:
            stream = ByteStream(str(folder / text_name(shard.file)), "zst")
            with io.BufferedReader(stream, LINE_BYTES_AT_ONCE) as lines:
                yield from lines
    except (OSError, DamagedFileError) as error:
        raise InputError(f"{folder / TEXT_FOLDER}: cannot be read ({error}); prepare {folder} again") from None
    raise InputError(f"{folder / TEXT_FOLDER}: has fewer documents than the shards; prepare {folder} again")
