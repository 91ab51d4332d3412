"""Commands installed by `pip install .`. Each runs one of the project's scripts with this interpreter.

`groundwork-files` prints the folder with the scripts, recipes and accelerate configs:

    files=$(groundwork-files)
    accelerate launch --config_file $files/accelerate_configs/ddp.yaml $files/train.py --config mine.yaml
"""

import os
import sys
from functools import partial

from pretrain.files import ROOT


def run(script: str) -> None:
    """Replaces this process with the script, using the same arguments."""
    os.execv(sys.executable, [sys.executable, str(ROOT / script), *sys.argv[1:]])


def files() -> None:
    print(ROOT)


train = partial(run, "train.py")
prepare_data = partial(run, "prepare_data.py")
evaluate = partial(run, "evaluate.py")
plan = partial(run, "plan.py")
runs = partial(run, "runs.py")
publish = partial(run, "publish.py")
