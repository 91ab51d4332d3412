"""Runs a script from a copy of the project in a process forked from the warm interpreter.

    python tests/support/in_copy.py COPY/train.py ARGUMENTS

The warm interpreter has imported the project's own modules. This forgets them, so that the copy's are imported.
Programs that the script starts are new interpreters.
"""

import runpy
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    for name in [name for name in sys.modules if name.partition(".")[0] in ("pretrain", "pretrain_tools")]:
        del sys.modules[name]
    if subprocess.Popen.__name__ == "WarmPopen":
        subprocess.Popen = subprocess.Popen.__base__
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
