"""A strategy that is added as docs/strategies.md says: a class, a line in STRATEGIES, a launcher file.

As a program it is train.py, with that strategy known.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from accelerate.utils import patch_environment

from pretrain.parallel.registry import STRATEGIES
from pretrain.parallel.strategy import Strategy

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


class Toy(Strategy):
    """DDP, with a byte of its own."""

    parameter_form = "pieces"

    @classmethod
    def requested(cls):
        return "toy" if os.environ.get("PARALLELISM_CONFIG_CP_SIZE") == "2" else None

    @classmethod
    def footprint(cls, run, layout, sequences):
        memory = super().footprint(run, layout, sequences)
        return replace(memory, buffers=memory.buffers + 1)

    def make_accelerator(self):
        with patch_environment(ACCELERATE_USE_PARALLELISM_CONFIG="false"):  # to accelerate it is context parallelism
            return super().make_accelerator()


if __name__ == "__main__":
    STRATEGIES["toy"] = Toy
    import train
    from pretrain.recipe import read_command_line

    train.start(read_command_line(sys.argv[1:], ""))
