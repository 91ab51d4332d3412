"""Groundwork: pretraining of base language models on the Hugging Face stack.

The trainer: what is loaded while a model trains. The scripts at the root use it, and pretrain_tools; nothing in it
imports either. A package in it imports only from those named before it (tests/test_structure.py holds the order):
model, optim, data, parallel, runs, checkpoint, training. The modules next to this one import from none of them, so
all may use these:

    config, recipe: every setting of a run; reading it from YAML and the command line
    hardware, gpus: what this machine can do; the GPUs that plan.py knows
    energy: joules and CO2, measured or estimated
    errors: input errors and exit statuses
    launch: accelerate launch, for people at a terminal and for schedulers
    terminal: stages, the live line, colors and widths
    files, urls: files and folders that are whole or absent; files behind addresses
    processes: locks, and which processes live
    deepspeed_build: where DeepSpeed compiles its operators
    units: counts, bytes, durations and energies in words
"""

import sys
from importlib.util import find_spec

if missing := [name for name in ("torch", "transformers", "pydantic") if find_spec(name) is None]:
    print(
        f"{', '.join(missing)}: not installed in {sys.executable}; activate the environment with "
        "`. .venv/bin/activate`, which `make install` creates",
        file=sys.stderr,
    )
    sys.exit(2)
