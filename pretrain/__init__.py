"""Groundwork: pretraining of base language models on the Hugging Face stack.

This package is the trainer. The scripts at the root and pretrain_tools import it, but it imports neither. The import
order is: the files listed here, model, optim, data, parallel, runs, checkpoint, training. Each package imports only
from earlier ones (tests/test_structure.py checks this).

    config, recipe: all settings, and how they are read from YAML and the command line
    old_names: old names of settings
    registry: tables of optimizers, schedules etc., which your own files can extend
    entries: checks the classes and functions that extensions register
    hardware, gpus: this machine's capabilities, and the GPU table for plan.py
    energy: measured or estimated energy use and CO2
    errors: input errors and exit statuses
    limits: this process's CPU cores and memory, as limited by affinity and control groups
    mesh_sizes: sizes of the parallel dimensions, read from the launcher's environment
    launch: a wrapper around accelerate launch, for terminals and schedulers
    terminal: stage messages, the progress line, colors and widths
    files, urls: atomic writes, local and remote files
    commands: commands installed by `pip install .`
    processes: locks, and checks for live processes
    deepspeed_build: DeepSpeed's build folder
    units: formats counts, bytes, durations and energy, and flattens settings
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
