"""What is kept on disk for the next process: machine code, and tables that take long to make.

In a folder by a hash of this room's sources, in the package or, where that cannot be written, in the user's cache.
"""

import functools
import hashlib
import os
import re
import shutil
import tempfile
import time
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core import entrypoints

# numba would first import awkward, which is installed with gigatoken and extends it: 0.2 s for nothing used here.
entrypoints._already_initialized = True

HERE = Path(__file__).parent
UNUSED_SECONDS = 24 * 3600
"""After which the folder of other sources goes when a new one is made."""


def sources_digest(folder: Path) -> str:
    """Of the names and contents of its modules."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def open_folder(parents: list[Path], digest: str) -> tuple[Path | None, bool]:
    """(the folder of these sources in the first parent that can be written, or None; whether it is new).

    A new one takes the place of those that no process has opened for UNUSED_SECONDS: others may still be in use.
    """
    for parent in parents:
        folder = parent / digest
        with suppress(OSError):
            is_new = not folder.is_dir()
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
            os.utime(folder)
            for other in parent.iterdir() if is_new else ():
                if re.fullmatch("[0-9a-f]{16}", other.name) and time.time() - other.stat().st_mtime > UNUSED_SECONDS:
                    shutil.rmtree(other, ignore_errors=True)
            return folder, is_new
    return None, True


_USERS = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "groundwork")
CACHE_FOLDER, IS_FIRST_USE = open_folder(
    [Path(os.environ.get("NUMBA_CACHE_DIR") or HERE / "__pycache__"), _USERS], sources_digest(HERE)
)


def cached_njit(function: Callable, **options) -> Any:
    """numba.njit whose machine code is kept for these sources only.

    numba compares the source of a function's own module alone, and would go on with what it once inlined from others.
    """
    if CACHE_FOLDER is None:
        return numba.njit(function, **options)
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(CACHE_FOLDER)
    try:
        return numba.njit(function, cache=True, **options)
    finally:
        numba.config.CACHE_DIR = before


def kept_array(make: Callable[[], np.ndarray]) -> Callable[[], np.ndarray]:
    """Reads what `make` made of these sources and this Python's Unicode, once in a process."""

    @functools.cache
    @functools.wraps(make)
    def array() -> np.ndarray:
        if CACHE_FOLDER is None:
            return make()
        path = CACHE_FOLDER / f"{make.__name__}-{unicodedata.unidata_version}.npy"
        with suppress(OSError, ValueError, EOFError):
            return np.load(path)
        made = make()
        with suppress(OSError):
            with tempfile.NamedTemporaryFile(dir=CACHE_FOLDER, delete=False) as file:
                np.save(file, made)
            os.replace(file.name, path)
        return made

    return array
