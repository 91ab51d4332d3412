"""Base class of a mesh's dimensions: what it cannot run, how it changes a model, how it completes gradients.

A row of `pretrain.mesh_sizes.DIMENSIONS` names the class of each. For a dimension of several ranks, `MeshStrategy`
calls all of these methods, innermost dimension first; a dimension overrides those that it needs.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig

from pretrain.config import RunConfig
from pretrain.mesh_sizes import Sizes
from pretrain.parallel.replicas import ReplicaGroup

if TYPE_CHECKING:
    from pretrain.model.loss import LanguageModelLoss


class Dimension:
    """A dimension that only divides the ranks, such as dp_shard: fully_shard does the rest."""

    repeats_loss = False
    """True if its ranks compute the loss of the same tokens, so that only that of the first counts."""

    @classmethod
    def recipe_problems(cls, config: RunConfig, sizes: Sizes) -> list[str]:
        """Lists the recipe's settings that do not run with these sizes."""
        return []

    @classmethod
    def model_problem(cls, model_config: PreTrainedConfig, sizes: Sizes, schedule: str) -> str | None:
        """Returns why this model cannot be split, with what works. Raises InputError as `reference_of` does."""
        return None

    def __init__(self, strategy: Any, name: str):
        self.strategy = strategy
        """The `MeshStrategy`; not typed as one, since its module imports this one."""
        self.name = name

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that differ from this one along this dimension alone."""
        mesh = self.strategy.mesh
        views = (mesh.dense, mesh.expert, mesh.data)  # the first that has it, so that views share a communicator
        return next(view for view in views if self.name in view.mesh_dim_names).get_group(self.name)

    def before_sharding(self, model: "LanguageModelLoss") -> None:
        """Changes the whole model, on the meta device."""

    def divide(self, unit: str, module: nn.Module) -> None:
        """Splits the weights of one unit of the model, just initialized, before fully_shard shards them."""

    def after_sharding(self, model: "LanguageModelLoss", called: nn.Module) -> None:
        """Prepares for the steps. called: the module that the loop calls."""

    def combine(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Completes, in place, this rank's parts of the gradients once a step.

        fully_shard has already averaged over dp_replicate, dp_shard and cp.
        """

    def replicas(self, parts: dict[str, Tensor]) -> list[ReplicaGroup]:
        """Lists which of this rank's parts of the weights are bitwise equal on all ranks of the dimension."""
        return []


class Replicas(Dimension):
    """dp_replicate: its ranks hold the same parts of everything."""

    def replicas(self, parts: dict[str, Tensor]) -> list[ReplicaGroup]:
        return [(self.group, parts)]
