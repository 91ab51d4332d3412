"""Groundwork: pretraining of base language models on the Hugging Face stack.

The trainer: the code that is loaded while a model trains. The scripts at the root and pretrain_tools use it; it
imports neither. A package imports only from those named before it (tests/test_structure.py checks the order): these
files, model, optim, data, parallel, runs, checkpoint, training. The files next to this one import from no package, so
all packages may use them:

    config, recipe: every setting of a run; reading settings from YAML and the command line
    old_names: names that settings had before
    registry: files of your own, and what they register
    hardware, gpus: capabilities of this machine; the GPUs that plan.py knows
    energy: joules and CO2, measured or estimated
    errors: input errors and exit statuses
    mesh_sizes: sizes of the parallel dimensions, as the launcher gives them
    launch: accelerate launch, for people at a terminal and for schedulers
    terminal: stages, the live line, colors and widths
    files, urls, remote: files and folders that are complete or absent; files by path or URL; objects below a URL
    commands: what `pip install .` adds to the shell
    processes: locks, and which processes are alive
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
