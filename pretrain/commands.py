"""Commands installed by `pip install .`. Each runs the project's script of the same name with this interpreter.

`groundwork-files` prints the folder with the scripts, recipes and accelerate configs (see docs/pip.md).
"""

import os
import sys
from pathlib import Path

from pretrain.files import ROOT


def run() -> None:
    """Replaces this process with the script, such as prepare_data.py for groundwork-prepare-data."""
    script = Path(sys.argv[0]).name.removeprefix("groundwork-").replace("-", "_")
    os.execv(sys.executable, [sys.executable, str(ROOT / f"{script}.py"), *sys.argv[1:]])


def files() -> None:
    print(ROOT)
