"""Runs train.py in this process, then prints which project files it loaded, as one line of JSON."""

import json
import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PREFIX = "loaded: "


def tell() -> None:
    """Prints the paths of the loaded files, relative to the root."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    paths = [os.path.relpath(file, ROOT) for file in files if file]
    inside = [path for path in paths if path.startswith(("pretrain/", "pretrain_tools/"))]
    print(PREFIX + json.dumps(sorted(inside)), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.argv = ["train.py", *sys.argv[1:]]
    exit_at_once = os._exit  # distributed processes exit with it
    os._exit = lambda code: (tell(), exit_at_once(code))
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
