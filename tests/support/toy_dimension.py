"""Mesh dimension added as described in docs/new_strategy.md.

Like dp_replicate, its ranks read different data and have the same weights. When run as a script, this is
train_strategies.py with the added dimension.
"""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

from pretrain.mesh_sizes import DIMENSIONS, Row
from pretrain.parallel.dimension import Dimension

ROW = Row("support.toy_dimension:Toy", reads=True)


class Toy(Dimension):
    """A dimension that averages gradients across its ranks."""

    def combine(self, gradients):
        for gradient in gradients.values():
            dist.all_reduce(gradient, group=self.group)
        torch._foreach_div_(list(gradients.values()), dist.get_world_size(self.group))

    def replicas(self, parts):
        return [(self.group, parts)]


if __name__ == "__main__":
    DIMENSIONS["toy"] = ROW
    runpy.run_path(str(Path(__file__).with_name("train_strategies.py")), run_name="__main__")
