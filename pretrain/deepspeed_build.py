"""Folder in which DeepSpeed compiles its operators; removes the locks of interrupted compilations.

torch locks a build folder by the mere presence of a file. A build that is killed leaves the file behind, and every
later build waits silently and forever (torch.utils.file_baton).
"""

import os
import socket
from pathlib import Path

from pretrain.files import IS_CHECKOUT, ROOT

CACHE = (ROOT if IS_CHECKOUT else Path.home()) / ".cache" / "torch_extensions"


def prepare_extensions_folder() -> Path:
    """Makes torch build in a folder of this machine, unless TORCH_EXTENSIONS_DIR is set, and removes stale locks.

    Must be called before DeepSpeed is imported. Returns the folder.
    """
    folder = Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(CACHE / socket.gethostname())))
    folder.mkdir(parents=True, exist_ok=True)
    locks = [lock for lock in folder.glob("*/lock") if lock.is_file()]
    held = files_open_here() if locks else set()
    for lock in locks:
        if lock.resolve() not in held:  # a builder keeps its lock open until it is done
            lock.unlink(missing_ok=True)
    return folder


def files_open_here() -> set[Path]:
    """Lists the files that processes of this machine have open, as far as this user may see."""
    import psutil

    found = set()
    for process in psutil.process_iter():
        try:
            found |= {Path(file.path).resolve() for file in process.open_files()}
        except psutil.Error:
            continue
    return found
