"""Files that a crash leaves either as they were or as they were to become: written aside, on disk, then renamed."""

import json
import os
from pathlib import Path
from typing import Any


def write_durably(path: Path, content: bytes | str) -> None:
    """Replaces a file by rename, so that at every moment the old or the new content is there, also after a crash."""
    fresh = path.with_name(f".{path.name}.new")
    with fresh.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes creations, renames and removals in a folder durable (or, given a file, its content)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_files(folder: Path) -> None:
    """Makes the files of a folder durable, and the folder itself."""
    for path in folder.iterdir():
        sync_folder(path)
    sync_folder(folder)


def as_json(fields: Any) -> bytes:
    """The one way in which the files of record of prepared data are written: the same fields, the same bytes."""
    return (json.dumps(fields, ensure_ascii=False, indent=1) + "\n").encode()
