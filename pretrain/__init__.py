"""Groundwork: pretraining of base language models on the Hugging Face stack.

This package is the trainer. The scripts at the root and pretrain_tools import it, but it imports neither. Its packages
import each other in this order: these files, model, optim, data, parallel, runs, checkpoint, training. Each package
imports only from earlier ones (tests/test_structure.py checks this). These files import from no package:

    config, recipe: every setting of a run; reads settings from YAML and the command line
    old_names: old names of settings
    registry: tables of optimizers, schedules and so on, which your own files can extend
    hardware, gpus: capabilities of this machine; plan.py's table of GPUs
    energy: joules and CO2, measured or estimated
    errors: input errors and exit statuses
    mesh_sizes: sizes of the parallel dimensions, read from the launcher's environment
    launch: a wrapper of accelerate launch, for terminals and schedulers
    terminal: stage messages, the live line, colors and widths
    files, urls, remote: atomic files and folders; files by path or URL; objects below a URL
    commands: commands installed by `pip install .`
    processes: locks; checks for live processes
    deepspeed_build: DeepSpeed's build folder
    units: formats counts, bytes, durations and energies for people
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
