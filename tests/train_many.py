"""Trains several runs in one set of processes, whose start costs more than a tiny run does.

    accelerate launch ... tests/train_many.py RECIPE '[["--output", "a"], ["--output", "b", "--precision", "bf16"]]'

Where a run is continued, what was loaded must come out again to the last bit, or the process fails.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from accelerate.state import AcceleratorState

import train
from pretrain.recipe import pair_up, read_run_config
from pretrain.strategy import Strategy, make_strategy


def make_checked_strategy(config) -> Strategy:
    """The strategy asked for; after a load it compares its tensors with the saved ones."""
    strategy = make_strategy(config)
    load = strategy.load

    def load_and_compare(model, optimizer):
        load(model, optimizer)
        for group, saved in ((strategy.model_tensors(), model), (strategy.optimizer_tensors(), optimizer)):
            assert set(group.shapes) == set(saved)
            for name in group.shapes:
                found = group.fetch(name)
                assert found.dtype == saved[name].dtype and torch.equal(found, saved[name]), name

    strategy.load = load_and_compare
    return strategy


if __name__ == "__main__":
    train.make_strategy = make_checked_strategy
    Strategy.exit = lambda strategy, code: strategy.barrier()  # the processes outlive a run
    for arguments in json.loads(sys.argv[2]):
        pairs = pair_up(arguments)
        config = read_run_config(sys.argv[1], pairs)
        train.main(config, frozenset(key for key, _ in pairs))
        AcceleratorState._reset_state()  # the next run may have another precision
    sys.stdout.flush()
    os._exit(0)
