"""Runs train.py and records the start time of each compilation in the file $COMPILATIONS.

torch.compile uses the backend $BACKEND: inductor, or aot_eager, which runs the traced graphs uncompiled. Backward
passes that are compiled on their first call aren't recorded separately.
"""

import functools
import os
import runpy
import sys
import time
from pathlib import Path

import torch
from torch._dynamo.callback import CallbackTrigger, callback_handler

COMPILATIONS = Path(os.environ["COMPILATIONS"] + os.environ.get("RANK", "0"))


def note(arguments) -> None:
    if arguments.callback_trigger is CallbackTrigger.LAZY_BACKWARD:
        return
    with COMPILATIONS.open("a") as file:
        file.write(f"{time.time()} {arguments}\n")


callback_handler.register_start_callback(note)
torch.compile = functools.partial(torch.compile, backend=os.environ["BACKEND"])
train = Path(__file__).parents[2] / "train.py"
sys.argv[0], sys.path[0] = str(train), str(train.parent)
runpy.run_path(str(train), run_name="__main__")
