"""Strategy added as described in docs/new_strategy.md.

When run as a script, this is train.py with the added strategy.
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from accelerate.utils import patch_environment

from pretrain.parallel.launcher import LAUNCHES
from pretrain.parallel.registry import STRATEGIES
from pretrain.parallel.strategy import Strategy
from pretrain_tools.planning.footprints import replicated

TOY_FILE = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
parallelism_config:
  parallelism_config_cp_size: 2
num_machines: 1
machine_rank: 0
rdzv_backend: static
same_network: true
"""


TOY_LAUNCH = ("MULTI_GPU", ("cp",))


class Toy(Strategy):
    """DDP with the parameter form `pieces`."""

    parameter_form = "pieces"

    def make_accelerator(self):
        with patch_environment(ACCELERATE_USE_PARALLELISM_CONFIG="false"):  # accelerate would use context parallelism
            return super().make_accelerator()


def toy_states(work):
    """Returns DDP's memory plus one byte."""
    memory = replicated(work)
    return replace(memory, buffers=memory.buffers + 1)


if __name__ == "__main__":
    STRATEGIES["toy"] = f"{__name__}:Toy"
    LAUNCHES[TOY_LAUNCH] = "toy"
    import train
    from pretrain.recipe import read_command_line

    train.start(read_command_line(sys.argv[1:], ""))
