"""Trains several runs in one set of processes, whose start costs more than a tiny run does.

    accelerate launch ... tests/train_many.py RECIPE '[["--output", "a"], ["--output", "b", "--pipeline.schedule", "1F1B"]]'
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import train
from accelerate.state import AcceleratorState
from pretrain.recipe import pair_up, read_run_config
from pretrain.strategy import Strategy

if __name__ == "__main__":
    Strategy.exit = lambda strategy, code: strategy.barrier()  # the processes outlive a run
    for arguments in json.loads(sys.argv[2]):
        pairs = pair_up(arguments)
        config = read_run_config(sys.argv[1], pairs)
        train.main(config, frozenset(key for key, _ in pairs))
        AcceleratorState._reset_state()  # the next run may have another precision
    sys.stdout.flush()
    os._exit(0)
