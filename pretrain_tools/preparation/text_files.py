"""Writes the documents as JSON lines next to the shards, so that cleaned text can be tokenized again.

Lines are compressed once their shard is full. Until then they stay uncompressed, so that a resumed preparation can
truncate them.
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
"""Subfolder of a prepared folder that contains the text."""
TEXT_SUFFIX = ".jsonl.zst"
LEVEL = 3
LINE_BYTES_AT_ONCE = 1 << 20


def document_line(record: Record) -> bytes:
    """Formats a record as a JSON line that prepare_data.py can read again."""
    fields = {"text": record.text.decode(), "id": f"{record.source}:{record.place}", "source": record.source}
    fields["split"] = "validation" if record.is_validation else "train"
    if record.url is not None:
        fields["url"] = record.url
    # A URL may contain a lone surrogate, which has no UTF-8 encoding.
    return json.dumps(fields, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def compress(plain: Path, path: Path) -> None:
    """Compresses a file. The output doesn't depend on the number of cores."""
    import zstandard

    path.parent.mkdir(exist_ok=True)
    # Use at least one thread, because zstd writes different frames without threads.
    compressor = zstandard.ZstdCompressor(level=LEVEL, threads=os.cpu_count() or 1)
    with plain.open("rb") as source, path.open("wb") as target:
        compressor.copy_stream(source, target, size=plain.stat().st_size)


def text_name(shard: str) -> str:
    """Returns the path of a shard's text file: train-00000.bin -> text/train-00000.jsonl.zst."""
    return f"{TEXT_FOLDER}/{Path(shard).stem}{TEXT_SUFFIX}"


def stored_lines(manifest: Manifest) -> Iterator[bytes]:
    """Yields one JSON line per document, in order.

    Raises InputError if a file is damaged, or if more lines are read than there are documents.
    """
    folder = manifest.folder
    try:
        for shard in manifest.shards:
            stream = ByteStream(str(folder / text_name(shard.file)), "zst")
            with io.BufferedReader(stream, LINE_BYTES_AT_ONCE) as lines:
                yield from lines
    except (OSError, DamagedFileError) as error:
        raise InputError(f"{folder / TEXT_FOLDER}: cannot be read ({error}); prepare {folder} again") from None
    raise InputError(f"{folder / TEXT_FOLDER}: contains fewer documents than the shards; prepare {folder} again")
