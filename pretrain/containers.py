"""Container formats that need a library or a seekable file: parquet, arrow, HDF5 and webdataset tar."""

import io
import tarfile
import tempfile
from collections.abc import Iterator
from typing import Any, BinaryIO

from pretrain.byte_stream import ByteStream, DamagedFileError
from pretrain.formats import (
    BYTE_ORDER_MARK,
    MAXIMUM_DOCUMENT_BYTES,
    Reading,
    Record,
    checked,
    json_record,
    text_record,
)

ROWS_AT_ONCE = 256


def seekable(stream: ByteStream) -> BinaryIO:
    """The file itself, or, when it is compressed, its content in a temporary file."""
    if not stream.compressed:
        return open(stream.path, "rb")
    spooled = tempfile.TemporaryFile()  # noqa: SIM115 the reader that asked for it closes it
    for block in stream.blocks():
        spooled.write(block)
    spooled.seek(0)
    return spooled


def read_parquet(stream: ByteStream, reading: Reading) -> Iterator[Record]:
    """Parquet: a document per row. A record's place is its row."""
    import pyarrow as pa
    from pyarrow import parquet

    with seekable(stream) as file:
        try:
            table = parquet.ParquetFile(file)
            batches = table.iter_batches(
                ROWS_AT_ONCE, columns=[_column_of(table.schema_arrow, reading)], use_threads=False
            )
            yield from _batch_records(batches, reading)
        except (pa.ArrowException, OSError) as error:
            raise DamagedFileError(f"not readable as parquet ({_first_line(error)})") from None


def read_parquet_rows(stream: ByteStream, reading: Reading, row_group: int) -> Iterator[Record]:
    """The documents of one row group of a parquet file that is not compressed as a whole."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(stream.path)
        first_row = sum(table.metadata.row_group(number).num_rows for number in range(row_group))
        columns = [_column_of(table.schema_arrow, reading)]
        batches = table.iter_batches(ROWS_AT_ONCE, row_groups=[row_group], columns=columns, use_threads=False)
        yield from _batch_records(batches, reading, first_row)
    except (pa.ArrowException, OSError) as error:
        raise DamagedFileError(f"not readable as parquet ({_first_line(error)})") from None


def parquet_row_groups(path: str) -> list[tuple[int, int]] | None:
    """(rows, uncompressed bytes) of every row group; None when the file is not readable as parquet."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        metadata = parquet.read_metadata(path)
    except (pa.ArrowException, OSError):
        return None
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    return [(group.num_rows, group.total_byte_size) for group in groups]


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200] or type(error).__name__


def _column_of(schema: Any, reading: Reading) -> str:
    """The column to read: the field itself, or the column that holds the nested field."""
    for name in (reading.text_field, reading.text_field.split(".")[0]):
        if name in schema.names:
            return name
    raise DamagedFileError(f"no column {reading.text_field!r} (columns: {', '.join(schema.names[:12])})")


def _batch_records(batches: Iterator[Any], reading: Reading, rows_before: int = 0) -> Iterator[Record]:
    for batch in batches:
        values = column_values(batch, reading)
        for place, value in enumerate(values, rows_before + 1):
            yield text_record(place, value, reading.text_field)
        rows_before += len(values)


def column_values(batch: Any, reading: Reading) -> list[Any]:
    """The text column of an arrow batch or table as bytes, None where it is null, other types as they come."""
    import pyarrow as pa
    from pyarrow import compute

    name = _column_of(batch.schema, reading)
    column = batch.column(name)
    if name != reading.text_field:
        for nested in reading.text_field.split(".")[1:]:
            if not pa.types.is_struct(column.type) or column.type.get_field_index(nested) < 0:
                raise DamagedFileError(f"no field {nested!r} in column {name!r} of type {column.type}")
            column = compute.struct_field(column, nested)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type) or _is_view(column.type):
        # As bytes: arrow does not promise that its strings are UTF-8, and our own check names the row.
        column = column.cast(pa.large_binary())
    return column.to_pylist()


def _is_view(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_string_view(kind)


def read_arrow(stream: ByteStream, reading: Reading) -> Iterator[Record]:
    """Arrow IPC, file or stream: a document per row."""
    import pyarrow as pa

    with seekable(stream) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        try:
            table = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
            batches = (table.get_batch(n) for n in range(table.num_record_batches)) if is_file else iter(table)
            yield from _batch_records((part for batch in batches for part in _slices(batch)), reading)
        except (pa.ArrowException, OSError) as error:
            raise DamagedFileError(f"not readable as arrow IPC ({_first_line(error)})") from None


def _slices(batch: Any) -> Iterator[Any]:
    return (batch.slice(start, ROWS_AT_ONCE) for start in range(0, batch.num_rows, ROWS_AT_ONCE))


def read_hdf5(stream: ByteStream, reading: Reading) -> Iterator[Record]:
    """HDF5: a dataset of strings whose name is the text field (dots or slashes lead into groups)."""
    import h5py

    with seekable(stream) as file:
        try:
            with h5py.File(file, "r") as content:
                texts = _string_dataset(content, reading.text_field)
                for start in range(0, len(texts), ROWS_AT_ONCE):
                    values = texts[start : start + ROWS_AT_ONCE].tolist()
                    for place, value in enumerate(values, start + 1):
                        yield text_record(place, value, reading.text_field)
        except (OSError, RuntimeError, KeyError) as error:
            raise DamagedFileError(f"not readable as HDF5 ({_first_line(error)})") from None


def _string_dataset(content: Any, text_field: str) -> Any:
    import h5py

    name = text_field if text_field in content else text_field.replace(".", "/")
    found = content.get(name)
    if not isinstance(found, h5py.Dataset):
        raise DamagedFileError(f"no dataset {text_field!r} (at the top: {', '.join(list(content)[:12]) or 'nothing'})")
    if found.ndim != 1 or (h5py.check_string_dtype(found.dtype) is None):
        raise DamagedFileError(
            f"dataset {text_field!r} holds {found.dtype} of shape {found.shape}, must be a row of strings; "
            "token ids of another tokenizer are not text: give the text, or another --text_field"
        )
    return found


def read_tar(stream: ByteStream, reading: Reading) -> Iterator[Record]:
    """Webdataset tar: a document per sample (members that share a name up to its first dot).

    Its text is the member .txt, else the text field of the member .json. A record's place is the sample.
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
    extension = next(name for name in ("txt", "text", "json") if name in members)
    content = members[extension]
    if content is None:
        return Record(place, None, f"member .{extension} is larger than {MAXIMUM_DOCUMENT_BYTES:,} bytes")
    if extension == "json":
        return json_record(place, content, reading.text_field)
    return checked(place, content.removeprefix(BYTE_ORDER_MARK))
