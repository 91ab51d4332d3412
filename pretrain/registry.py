"""Files of your own that a run loads: a model folder's code, `extensions`, and what they register."""

import hashlib
import importlib
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from pretrain.errors import InputError, shortened

OWN_FOLDERS: set[Path] = set()
"""Folders whose files are the user's: an error in one of them is reported with its place."""
LOADED_CODE: dict[str, str] = {}
"""{what was loaded: first 16 digits of the sha256 of its files}. Checkpoints record it."""


def import_file(path: Path, package: str) -> ModuleType:
    """Imports a file as a module of `package`, which stands for its folder: `from .other import X` works there.

    Raises InputError with file, line and message for whatever goes wrong in it.
    """
    path = path.absolute()
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    if package not in sys.modules:
        folder = ModuleType(package)
        folder.__path__ = [str(path.parent)]
        sys.modules[package] = folder
    OWN_FOLDERS.add(path.parent)
    try:
        return importlib.import_module(f"{package}.{path.stem}")
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        raise InputError(error_in_file(error, path)) from error


def error_in_file(error: BaseException, path: Path) -> str:
    """Returns 'mine.py, line 12: NameError: ...' for an error that was raised while `path` was loaded."""
    place = place_of(error) or str(path)
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{place}: {type(error).__name__}: {shortened(' '.join(message.split()), 300)}"


def place_of(error: BaseException) -> str:
    """Returns 'mine.py, line 12', the last place in a file of the user's that led to the error; "" if none did."""
    if isinstance(error, SyntaxError) and error.filename and is_own(error.filename):
        return f"{error.filename}, line {error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_own(frame.filename)]
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


def is_own(file: str) -> bool:
    """Tells if a file is in one of OWN_FOLDERS."""
    path = Path(file)
    return path.parent in OWN_FOLDERS and path.name != "__init__.py"


def digest_of(files: Iterable[Path]) -> str:
    """Hashes the names and contents of files, in any order."""
    whole = hashlib.sha256()
    for path in sorted(files, key=lambda path: path.name):
        whole.update(f"{path.name}\n{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()[:16]
