"""Reads formats that need a library and a seekable file: parquet, arrow and HDF5."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from pretrain.registry import FORMATS
from pretrain.urls import UnreachableError, open_file
from pretrain_tools.preparation.documents.byte_stream import ByteStream, DamagedFileError
from pretrain_tools.preparation.documents.formats import file_format
from pretrain_tools.preparation.documents.records import Reading, Record, row_records

ROWS_AT_ONCE = 256


def seekable(stream: ByteStream) -> BinaryIO:
    """Opens a seekable file. Makes a temporary copy if the stream is compressed, in an archive, or not seekable."""
    if stream.is_as_stored:
        file = open_file(stream.path)
        if file.seekable():
            return file
        file.close()
    # The unnamed temporary file disappears with the process, even if it is killed.
    spooled = tempfile.TemporaryFile()  # noqa: SIM115 the caller closes it
    for block in stream.blocks:
        spooled.write(block)
    spooled.seek(0)
    return spooled


@contextmanager
def _readable_as(kind: str) -> Iterator[None]:
    """Converts a library's errors to DamagedFileError."""
    try:
        yield
    except (UnreachableError, DamagedFileError):  # a network problem doesn't mean that the file is damaged
        raise
    except Exception as error:  # the libraries raise errors of many types for damaged files
        reason = str(error).strip().split("\n")[0][:200] or type(error).__name__
        raise DamagedFileError(f"cannot be read as {kind} ({reason})") from None


@FORMATS.register("parquet")
@file_format(".parquet", ".pq", place="row")
def read_parquet(stream: ByteStream, reading: Reading, row_group: int | None = None) -> Iterator[Record]:
    """Reads a parquet file, or one of its row groups, with one document per row.

    Raises DamagedFileError with the number of remaining rows.
    """
    from pyarrow import parquet

    with seekable(stream) as file:
        with _readable_as("parquet"):
            table = parquet.ParquetFile(file)
        rows = [table.metadata.row_group(number).num_rows for number in range(table.num_row_groups)]
        groups = range(len(rows)) if row_group is None else range(row_group, row_group + 1)
        place = sum(rows[: groups.start])
        last = sum(rows[: groups.stop])
        try:
            with _readable_as("parquet"):
                columns = list({_column_of(table.schema_arrow, name) for name in reading.fields})
                # Read row groups one by one, so that a damaged group doesn't affect earlier ones.
                batches = (
                    batch
                    for group in groups
                    for batch in table.iter_batches(ROWS_AT_ONCE, [group], columns, use_threads=False)
                )
                for record in _batch_records(batches, reading, place):
                    place = record.place
                    yield record
        except DamagedFileError as error:
            raise DamagedFileError(str(error), last - place) from None


def parquet_row_group_bytes(path: str) -> list[int]:
    """Lists the uncompressed row group sizes in bytes; [] if the file isn't seekable or is damaged."""
    from pyarrow import parquet

    try:
        with open_file(path) as file, _readable_as("parquet"):
            if not file.seekable():
                return []
            metadata = parquet.read_metadata(file)
    except DamagedFileError:
        return []
    return [metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups)]


def _column_of(schema: Any, field: str) -> str:
    """Returns the column that contains a field. Its name is the field's, or the first part of a dotted path."""
    for name in (field, field.split(".")[0]):
        if name in schema.names:
            return name
    raise DamagedFileError(f"no column {field!r} (columns: {', '.join(schema.names[:12])})")


def _batch_records(batches: Iterator[Any], reading: Reading, rows_before: int = 0) -> Iterator[Record]:
    for batch in batches:
        yield from table_records(batch, reading, rows_before)
        rows_before += batch.num_rows


def table_records(table: Any, reading: Reading, rows_before: int) -> Iterator[Record]:
    """Reads an arrow batch or table. The first row's place is rows_before + 1.

    Raises DamagedFileError if a column is missing.
    """
    return row_records({name: _values(table, name) for name in reading.fields}, reading, rows_before)


def _values(table: Any, field: str) -> list[Any]:
    """Converts a column to a list, with text as bytes and nulls as None."""
    import pyarrow as pa
    from pyarrow import compute, types

    name = _column_of(table.schema, field)
    column = table.column(name)
    if name != field:
        try:
            column = compute.struct_field(column, field.split(".")[1:])
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise DamagedFileError(f"no field {field!r} in column {name!r} of type {column.type}") from None
    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if any(is_text(column.type) for is_text in (types.is_string, types.is_large_string, types.is_string_view)):
        # Arrow doesn't guarantee valid UTF-8, so convert to bytes and check each row later.
        column = column.cast(pa.large_binary())
    return column.to_pylist()


@FORMATS.register("arrow")
@file_format(".arrow", ".feather", ".ipc", place="row")
def read_arrow(stream: ByteStream, reading: Reading) -> Iterator[Record]:
    """Reads an Arrow IPC file or stream, with one document per row."""
    import pyarrow as pa

    with seekable(stream) as file, _readable_as("arrow IPC"):
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        table = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
        batches = (table.get_batch(n) for n in range(table.num_record_batches)) if is_file else iter(table)
        try:
            for name in reading.fields:
                _column_of(table.schema, name)
        except DamagedFileError as error:
            raise DamagedFileError(str(error), sum(batch.num_rows for batch in batches)) from None
        pieces = (
            batch.slice(start, ROWS_AT_ONCE) for batch in batches for start in range(0, batch.num_rows, ROWS_AT_ONCE)
        )
        yield from _batch_records(pieces, reading)


@FORMATS.register("hdf5")
@file_format(".h5", ".hdf5", place="row")
def read_hdf5(stream: ByteStream, reading: Reading) -> Iterator[Record]:
    """Reads an HDF5 file with one string dataset per field. Dots or slashes in a field name refer to groups."""
    import h5py

    with seekable(stream) as file, _readable_as("HDF5"), h5py.File(file, "r") as content:
        columns = {name: _string_dataset(content, name) for name in reading.fields}
        if len({len(column) for column in columns.values()}) > 1:
            raise DamagedFileError(f"the datasets {', '.join(columns)} differ in length")
        for start in range(0, len(columns[reading.fields[0]]), ROWS_AT_ONCE):
            values = {name: column[start : start + ROWS_AT_ONCE].tolist() for name, column in columns.items()}
            yield from row_records(values, reading, start)


def _string_dataset(content: Any, text_field: str) -> Any:
    import h5py

    name = text_field if text_field in content else text_field.replace(".", "/")
    found = content.get(name)
    if not isinstance(found, h5py.Dataset):
        others = f"(at the top level: {', '.join(list(content)[:12]) or 'nothing'})"
        lengths = [len(other) for other in content.values() if isinstance(other, h5py.Dataset) and other.ndim]
        raise DamagedFileError(f"no dataset {text_field!r} {others}", max(lengths, default=1))
    if found.ndim != 1 or (h5py.check_string_dtype(found.dtype) is None):
        raise DamagedFileError(
            f"dataset {text_field!r} must contain one-dimensional strings, got {found.dtype} of shape {found.shape}; "
            "to train on token IDs, use the file itself in the recipe: {shards: FILE, tokenizer: NAME}"
        )
    return found
