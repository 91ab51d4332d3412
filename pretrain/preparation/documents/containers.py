"""Container formats that need a library or a seekable file: parquet, arrow, HDF5 and webdataset tar."""

import io
import json
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from pretrain.preparation.documents.byte_stream import ByteStream, DamagedFileError
from pretrain.preparation.documents.formats import BYTE_ORDER_MARK
from pretrain.preparation.documents.records import (
    MAXIMUM_DOCUMENT_BYTES,
    Reading,
    Record,
    checked,
    fields_record,
    find_field,
    json_record,
    text_record,
)
from pretrain.preparation.documents.urls import UnreachableError, is_url, open_file

ROWS_AT_ONCE = 256


def seekable(stream: ByteStream, at_once: bool = False) -> BinaryIO:
    """The file itself, or a temporary copy where it is compressed or its server reads only front to back.

    at_once: download a remote file first, for libraries that read many small pieces.
    """
    if not stream.compressed and not (at_once and is_url(stream.path)):
        file = open_file(stream.path)
        if file.seekable():
            return file
        file.close()
    spooled = tempfile.TemporaryFile()  # noqa: SIM115 the reader that asked for it closes it
    for block in stream.blocks():
        spooled.write(block)
    spooled.seek(0)
    return spooled


@contextmanager
def _readable_as(kind: str, *errors: type[Exception]) -> Iterator[None]:
    """Turns what a library raises about a file's content into DamagedFileError."""
    try:
        yield
    except UnreachableError:  # a server that does not answer has damaged nothing
        raise
    except errors as error:
        reason = str(error).strip().split("\n")[0][:200] or type(error).__name__
        raise DamagedFileError(f"not readable as {kind} ({reason})") from None


def read_parquet(stream: ByteStream, reading: Reading) -> Iterator[Record]:
    """Parquet: a document per row, which is its record's place."""
    import pyarrow as pa
    from pyarrow import parquet

    with seekable(stream) as file, _readable_as("parquet", pa.ArrowException, OSError):
        table = parquet.ParquetFile(file)
        columns = _columns_of(table.schema_arrow, reading)
        yield from _batch_records(table.iter_batches(ROWS_AT_ONCE, columns=columns, use_threads=False), reading)


def read_parquet_rows(stream: ByteStream, reading: Reading, row_group: int) -> Iterator[Record]:
    """The documents of one row group of a parquet file that is not compressed as a whole."""
    import pyarrow as pa
    from pyarrow import parquet

    with _readable_as("parquet", pa.ArrowException, OSError):
        table = parquet.ParquetFile(_parquet_place(stream.path))
        first_row = sum(table.metadata.row_group(number).num_rows for number in range(row_group))
        columns = _columns_of(table.schema_arrow, reading)
        batches = table.iter_batches(ROWS_AT_ONCE, row_groups=[row_group], columns=columns, use_threads=False)
        yield from _batch_records(batches, reading, first_row)


def _parquet_place(path: str) -> str | BinaryIO:
    return open_file(path) if is_url(path) else path


def parquet_row_group_bytes(path: str) -> list[int]:
    """Uncompressed bytes of each row group; [] where they cannot be read one by one."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        place = _parquet_place(path)
        if not isinstance(place, str) and not place.seekable():
            return []
        metadata = parquet.read_metadata(place)
    except UnreachableError:
        raise
    except (pa.ArrowException, OSError):
        return []
    return [metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups)]


def _columns_of(schema: Any, reading: Reading) -> list[str]:
    return list(dict.fromkeys(_column_of(schema, name) for name in reading.fields))


def _column_of(schema: Any, field: str) -> str:
    """The column to read: the field itself, or the column that holds the nested field."""
    for name in (field, field.split(".")[0]):
        if name in schema.names:
            return name
    raise DamagedFileError(f"no column {field!r} (columns: {', '.join(schema.names[:12])})")


def _batch_records(batches: Iterator[Any], reading: Reading, rows_before: int = 0) -> Iterator[Record]:
    for batch in batches:
        yield from table_records(batch, reading, rows_before)
        rows_before += batch.num_rows


def table_records(table: Any, reading: Reading, rows_before: int) -> Iterator[Record]:
    """The records of an arrow batch or table, numbered from rows_before + 1; DamagedFileError without the column."""
    if reading.is_plain:
        for place, value in enumerate(_values(table, reading.text_field), rows_before + 1):
            yield text_record(place, value, reading.text_field)
        return
    columns = [_values(table, name) for name in reading.fields]
    for place, row in enumerate(zip(*columns, strict=True), rows_before + 1):
        yield fields_record(place, dict(zip(reading.fields, row, strict=True)).__getitem__, reading)


def _values(table: Any, field: str) -> list[Any]:
    """A column of an arrow batch or table: text as bytes, nulls as None, other types unchanged."""
    import pyarrow as pa
    from pyarrow import compute, types

    name = _column_of(table.schema, field)
    column = table.column(name)
    if name != field:
        for nested in field.split(".")[1:]:
            if not types.is_struct(column.type) or column.type.get_field_index(nested) < 0:
                raise DamagedFileError(f"no field {nested!r} in column {name!r} of type {column.type}")
            column = compute.struct_field(column, nested)
    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if any(is_text(column.type) for is_text in (types.is_string, types.is_large_string, types.is_string_view)):
        # As bytes: arrow does not promise that its strings are UTF-8, and our own check names the row.
        column = column.cast(pa.large_binary())
    return column.to_pylist()


def read_arrow(stream: ByteStream, reading: Reading) -> Iterator[Record]:
    """Arrow IPC, file or stream: a document per row."""
    import pyarrow as pa

    with seekable(stream) as file, _readable_as("arrow IPC", pa.ArrowException, OSError):
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        table = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
        batches = (table.get_batch(n) for n in range(table.num_record_batches)) if is_file else iter(table)
        pieces = (
            batch.slice(start, ROWS_AT_ONCE) for batch in batches for start in range(0, batch.num_rows, ROWS_AT_ONCE)
        )
        yield from _batch_records(pieces, reading)


def read_hdf5(stream: ByteStream, reading: Reading) -> Iterator[Record]:
    """HDF5: a dataset of strings named like the text field (dots or slashes lead into groups)."""
    import h5py

    with (
        seekable(stream, at_once=True) as file,
        _readable_as("HDF5", OSError, RuntimeError, KeyError),
        h5py.File(file, "r") as content,
    ):
        columns = {name: _string_dataset(content, name) for name in reading.fields}
        if len({len(column) for column in columns.values()}) > 1:
            raise DamagedFileError(f"the datasets {', '.join(columns)} differ in length")
        for start in range(0, len(columns[reading.fields[0]]), ROWS_AT_ONCE):
            values = [column[start : start + ROWS_AT_ONCE].tolist() for column in columns.values()]
            for place, row in enumerate(zip(*values, strict=True), start + 1):
                yield fields_record(place, dict(zip(columns, row, strict=True)).__getitem__, reading)


def _string_dataset(content: Any, text_field: str) -> Any:
    import h5py

    name = text_field if text_field in content else text_field.replace(".", "/")
    found = content.get(name)
    if not isinstance(found, h5py.Dataset):
        raise DamagedFileError(f"no dataset {text_field!r} (at the top: {', '.join(list(content)[:12]) or 'nothing'})")
    if found.ndim != 1 or (h5py.check_string_dtype(found.dtype) is None):
        raise DamagedFileError(
            f"dataset {text_field!r} holds {found.dtype} of shape {found.shape}, must be a row of strings; "
            "token ids need no preparation: train on the file itself, {shards: FILE, tokenizer: NAME} in the recipe"
        )
    return found


def read_tar(stream: ByteStream, reading: Reading) -> Iterator[Record]:
    """Webdataset tar: a document per sample, the members that share a name up to its first dot.

    Its text is the .txt member, else the text field of the .json member.
    """
    try:
        with tarfile.open(fileobj=io.BufferedReader(stream), mode="r|") as archive:
            sample, members, place = None, {}, 0
            for member in archive:
                key, _, extension = member.name.rpartition("/")[2].partition(".")
                if not member.isfile() or extension not in ("txt", "text", "json"):
                    continue
                name = (member.name.rpartition("/")[0], key)
                if members and name != sample:
                    place += 1
                    yield _sample_record(place, members, reading)
                    members = {}
                sample = name
                too_large = member.size > MAXIMUM_DOCUMENT_BYTES
                members[extension] = None if too_large else archive.extractfile(member).read()
            if members:
                yield _sample_record(place + 1, members, reading)
    except tarfile.TarError as error:
        raise DamagedFileError(f"damaged tar archive ({error})") from None


def _sample_record(place: int, members: dict[str, bytes | None], reading: Reading) -> Record:
    large = [name for name, content in members.items() if content is None]
    if large:
        return Record(place, None, f"member .{large[0]} is larger than {MAXIMUM_DOCUMENT_BYTES:,} bytes")
    texts = [members[name].removeprefix(BYTE_ORDER_MARK) for name in ("txt", "text") if name in members]
    if reading.is_plain and texts:
        return checked(place, texts[0])
    if not texts:
        return json_record(place, members["json"], reading)
    try:
        fields = json.loads(members.get("json", b"{}"))
    except ValueError as error:
        return Record(place, None, f"broken JSON in its member .json ({error})")
    values = (fields if isinstance(fields, dict) else {}) | {reading.text_field: texts[0]}
    return fields_record(place, lambda name: find_field(values, name), reading, list(values))
