"""Base class for mesh dimensions.

`pretrain.mesh_sizes.DIMENSIONS` lists the subclasses. `MeshStrategy` calls each method on all dimensions larger than
1, innermost first. Subclasses override only the methods they need.
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
    """Base class for mesh dimensions. dp_shard uses it directly, because fully_shard does all the work."""

    repeats_loss = False
    """True if all ranks along this dimension compute the loss of the same tokens, so only the first rank counts."""

    @classmethod
    def recipe_problems(cls, config: RunConfig, sizes: Sizes) -> list[str]:
        """Returns an error message for each recipe setting that doesn't work with these sizes."""
        return []

    @classmethod
    def model_problem(cls, model_config: PreTrainedConfig, sizes: Sizes, schedule: str) -> str | None:
        """Returns an error message if this model can't be split, otherwise None.

        Raises the same errors as `reference_of`.
        """
        return None

    def __init__(self, strategy: Any, name: str):
        self.strategy = strategy
        """The `MeshStrategy`. Untyped because its module imports this one."""
        self.name = name

    @property
    def group(self) -> dist.ProcessGroup:
        """Process group of the ranks that differ from this one only along this dimension."""
        mesh = self.strategy.mesh
        views = (mesh.dense, mesh.expert, mesh.data)  # the first match, so that views share communicators
        return next(view for view in views if self.name in view.mesh_dim_names).get_group(self.name)

    def before_sharding(self, model: "LanguageModelLoss") -> None:
        """Modifies the model while it is still on the meta device."""

    def divide(self, unit: str, module: nn.Module) -> None:
        """Splits the weights of a newly initialized unit before fully_shard shards them."""

    def after_sharding(self, model: "LanguageModelLoss", called: nn.Module) -> None:
        """Prepares the model for training. called: the module that the training loop calls."""

    def combine(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Completes this rank's gradient shards in place, once per step.

        fully_shard has already averaged them over dp_replicate, dp_shard and cp.
        """

    def replicas(self, parts: dict[str, Tensor]) -> list[ReplicaGroup]:
        """Returns this rank's weights that must be bitwise equal on all ranks along this dimension."""
        return []


class Replicas(Dimension):
    """The dp_replicate dimension, whose ranks hold identical shards."""

    def replicas(self, parts: dict[str, Tensor]) -> list[ReplicaGroup]:
        return [(self.group, parts)]
