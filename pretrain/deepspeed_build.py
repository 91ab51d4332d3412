"""Prepares DeepSpeed's build folder, removes stale locks and finds ninja.

torch uses a lock file for each build. A killed build leaves it behind, and all later builds then wait forever without
a message (torch.utils.file_baton).
"""

import os
import shutil
import socket
import sys
from pathlib import Path

from pretrain.files import IS_CHECKOUT, ROOT

CACHE = (ROOT if IS_CHECKOUT else Path.home()) / ".cache" / "torch_extensions"


def prepare_extensions_folder() -> Path:
    """Sets torch's build folder to one for this machine, unless TORCH_EXTENSIONS_DIR is set. Removes stale locks.
    Adds the Python environment to PATH if ninja is missing from it.

    Must be called before importing DeepSpeed. Returns the folder.
    """
    folder = Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(CACHE / socket.gethostname())))
    folder.mkdir(parents=True, exist_ok=True)
    if not shutil.which("ninja"):  # the environment isn't activated
        os.environ["PATH"] += f"{os.pathsep}{Path(sys.executable).parent}"
    locks = [lock for lock in folder.glob("*/lock") if lock.is_file()]
    held = files_open_here() if locks else set()
    for lock in locks:
        if lock.resolve() not in held:  # a builder keeps its lock open until it is done
            lock.unlink(missing_ok=True)
    return folder


def files_open_here() -> set[Path]:
    """Returns the files that processes on this machine have open, as far as this user can see them."""
    import psutil

    found = set()
    for process in psutil.process_iter():
        try:
            found |= {Path(file.path).resolve() for file in process.open_files()}
        except psutil.Error:
            continue
    return found
