"""Base class for a mesh's dimensions: checks, model changes and gradient completion.

`pretrain.mesh_sizes.DIMENSIONS` lists the classes. `MeshStrategy` calls the methods of each dimension with several
ranks, innermost dimension first. A dimension overrides only the methods it needs.
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
    """A dimension that only divides the ranks, such as dp_shard. fully_shard does the rest."""

    repeats_loss = False
    """True if the dimension's ranks compute the loss for the same tokens, so that only the first
    rank's loss counts.
    """

    @classmethod
    def recipe_problems(cls, config: RunConfig, sizes: Sizes) -> list[str]:
        """Lists the recipe settings that don't run with these sizes."""
        return []

    @classmethod
    def model_problem(cls, model_config: PreTrainedConfig, sizes: Sizes, schedule: str) -> str | None:
        """Explains why this model can't be split, with alternatives. Raises InputError as `reference_of` does."""
        return None

    def __init__(self, strategy: Any, name: str):
        self.strategy = strategy
        """The `MeshStrategy`. It has no type here because its module imports this one."""
        self.name = name

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that differ from this one only along this dimension."""
        mesh = self.strategy.mesh
        views = (mesh.dense, mesh.expert, mesh.data)  # the first that has it, so that views share communicators
        return next(view for view in views if self.name in view.mesh_dim_names).get_group(self.name)

    def before_sharding(self, model: "LanguageModelLoss") -> None:
        """Changes the whole model on the meta device."""

    def divide(self, unit: str, module: nn.Module) -> None:
        """Splits the weights of a newly initialized unit of the model before fully_shard shards them."""

    def after_sharding(self, model: "LanguageModelLoss", called: nn.Module) -> None:
        """Prepares the model for training steps. called: the module that the loop calls."""

    def combine(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Completes this rank's parts of the gradients in place, once per step.

        fully_shard has already averaged them over dp_replicate, dp_shard and cp.
        """

    def replicas(self, parts: dict[str, Tensor]) -> list[ReplicaGroup]:
        """Lists this rank's weights that must be bitwise equal on all ranks of the dimension."""
        return []


class Replicas(Dimension):
    """The dp_replicate dimension, whose ranks hold identical parts."""

    def replicas(self, parts: dict[str, Tensor]) -> list[ReplicaGroup]:
        return [(self.group, parts)]
