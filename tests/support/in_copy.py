"""Runs a script from a copy of the project in a process forked from the warm interpreter.

    python tests/support/in_copy.py COPY/train.py ARGUMENTS

The warm interpreter has imported the project's own modules. This forgets them, so that the copy's are imported.
"""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    for name in [name for name in sys.modules if name.partition(".")[0] in ("pretrain", "pretrain_tools")]:
        del sys.modules[name]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
