"""Writes files and folders atomically: after a crash, they are either complete or absent.

A file is written under a temporary name, synced and renamed. For a folder, every file is synced, a manifest of sizes
and sha256 hashes is written, and the folder is renamed. The hashes reveal later corruption.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
PACKAGES = Path(__file__).resolve().parents[1]
"""Folder that contains the packages: a checkout, or site-packages."""
IS_CHECKOUT = (PACKAGES / "train.py").is_file()
ROOT = PACKAGES if IS_CHECKOUT else PACKAGES / "groundwork_files"
"""Folder that contains the scripts, accelerate configs and model configs."""

Beat = Callable[[], None]
"""Function that is called regularly during long work, so that a slow disk isn't reported as a hang."""


def or_shipped(path: str | Path) -> Path:
    """Returns the path, or the project's own file at this path if only that file exists."""
    shipped = ROOT / path
    return shipped if not Path(path).exists() and shipped.is_file() else Path(path)


def write_durably(path: Path, content: bytes | str) -> None:
    """Replaces a file atomically: after a crash, it has either the old or the new content."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        with fresh.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = str(path)  # `write` and `fsync` don't name the file
        with suppress(OSError):
            fresh.unlink()
        raise
    fresh.rename(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Syncs a folder's entries to disk, or a file's content."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


FINGERPRINT_BYTES = 1 << 16


def fingerprint_of(file: BinaryIO, size: int) -> str:
    """Hashes a file's size and its first, middle and last 64 KiB, to detect changes without reading the whole file.

    If the file isn't seekable, hashes only the size and the first 64 KiB.
    """
    digest = hashlib.sha256(str(size).encode())
    for start in sorted({0, size // 2, max(0, size - FINGERPRINT_BYTES)}) if file.seekable() else [0]:
        if start:
            file.seek(start)
        digest.update(file.read(FINGERPRINT_BYTES))
    return digest.hexdigest()


def sha256_of(path: Path) -> str:
    """Returns a file's sha256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def as_json(fields: Any) -> bytes:
    """Formats a record of prepared data as JSON."""
    # File names from the command line may not be valid UTF-8.
    return (json.dumps(fields, ensure_ascii=False, indent=1) + "\n").encode(errors="backslashreplace")


SEAL_FILE = "MANIFEST.json"
PROVENANCE_FILE = "provenance.json"
SIGNATURE_FILE = "model.sig"
"""Signature added by publish.py. It covers the manifest, so the manifest can't include it."""
CARD_FILE = "README.md"
PICTURE_FILE = "loss.png"
FORMAT = {"format": "groundwork-checkpoint", "version": 1}
REMOVED = ".removing-"


def commit(unfinished: Path, final: Path, files: Mapping[str, dict]) -> None:
    """Seals the remaining files, writes MANIFEST.json, and renames the folder to its final name.

    Args:
        unfinished: folder with all files, next to `final`.
        files: {name: {bytes, sha256}} of files that are already sealed.
    """
    for path in sorted(unfinished.rglob("*")):
        name = str(path.relative_to(unfinished))
        if path.is_file() and name not in files:
            files = {**files, name: seal(path)}
    contents = {**FORMAT, "files": dict(sorted(files.items()))}
    write_durably(unfinished / SEAL_FILE, json.dumps(contents, indent=1))
    # Sync before the rename. Otherwise, files may be missing from the final folder after a crash.
    for folder in [*(path for path in unfinished.rglob("*") if path.is_dir()), unfinished]:
        sync_folder(folder)
    leftover = final.with_name(f"{REMOVED}{final.name}")
    if os.path.lexists(final):
        delete(leftover)  # from an interrupted replacement
        final.rename(leftover)
    unfinished.rename(final)
    delete(leftover)
    sync_folder(final.parent)


def remove(folder: Path) -> None:
    """Removes a folder. Renames it first, so that it never looks complete while it is being removed."""
    leftover = folder.with_name(f"{REMOVED}{folder.name}")
    folder.rename(leftover)
    delete(leftover)


def delete(path: Path) -> None:
    """Deletes a file, a symlink (but not its target) or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def seal(path: Path) -> dict:
    """Syncs a file to disk and returns its size and sha256."""
    # Sync first, so that the hash describes the data on disk.
    sync_folder(path)
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def damage(folder: Path, rank: int = 0, ranks: int = 1, beat: Beat = lambda: None) -> list[str]:
    """Lists problems with the files in a sealed folder. Each rank checks only its share of the files.

    beat: called before each file, because reading it may take a while.
    """
    try:
        expected = sealed_files((folder / SEAL_FILE).read_bytes())
    except FileNotFoundError:
        return [f"{SEAL_FILE} is missing"]
    except OSError as error:
        return [f"{SEAL_FILE} cannot be read ({type(error).__name__}: {error})"]
    except ValueError as error:
        return [str(error)]
    added = files_of(folder).keys() - {SEAL_FILE, *expected} if rank == 0 else ()
    # Python writes __pycache__ if someone imports the model's own code from the folder.
    problems = [f"{name} is not in the manifest" for name in sorted(added) if "__pycache__/" not in name]
    for name, entry in sorted(expected.items())[rank::ranks]:
        beat()
        problems += damage_of_file(folder / name, name, entry)
    return problems


def files_of(folder: Path) -> dict[str, Path]:
    """Returns {name: path} of a published folder's or checkpoint's own files.

    Excludes provenance.json, its signature, and hidden files, which the Hub and downloads may add.
    """
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {
        name: path
        for name, path in found.items()
        if name not in (PROVENANCE_FILE, SIGNATURE_FILE) and not re.search(r"(^|/)\.", name)
    }


def sealed_files(manifest: bytes) -> dict[str, dict]:
    """Parses a MANIFEST.json into {name: {bytes, sha256}}. Raises ValueError if it is invalid."""
    try:
        contents = json.loads(manifest)
        files = {
            name: {"bytes": entry["bytes"], "sha256": entry["sha256"]} for name, entry in contents["files"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{SEAL_FILE} cannot be read ({type(error).__name__}: {error})") from error
    if {key: contents.get(key) for key in FORMAT} != FORMAT:
        raise ValueError(f"{SEAL_FILE} is not in format {FORMAT['format']} version {FORMAT['version']}")
    return files


def damage_of_file(path: Path, name: str, entry: Mapping[str, object]) -> list[str]:
    """Lists differences between a file and its manifest entry. Computes the hash only if the size matches."""
    try:
        if (size := path.stat().st_size) != entry.get("bytes"):
            return [f"{name} has {size:,} bytes instead of {entry.get('bytes')}"]
        return [] if sha256_of(path) == entry.get("sha256") else [f"{name} does not match its sha256"]
    except FileNotFoundError:
        return [f"{name} is missing"]
    except (OSError, ValueError) as error:  # ValueError: an impossible file name
        return [f"{name} cannot be read ({error})"]


def is_url(path: str | Path) -> bool:
    """Returns True for a URL, False for a path."""
    return URL.match(str(path)) is not None


def place_of(address: str) -> Path | str:
    """Converts a path to a Path. Leaves a URL unchanged, because a Path would drop one of its slashes."""
    return address if is_url(address) else Path(address)


def shown(path: str) -> str:
    """Formats a path or URL for messages and records. Removes a URL's user, password and query, which may be secret.

    Escapes bytes that aren't valid UTF-8.
    """
    if not is_url(path):
        return os.fsencode(path).decode(errors="backslashreplace")
    parts = urlsplit(path)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
