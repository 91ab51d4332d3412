"""Base of pipeline, tensor and expert parallel: ranks that share one model, and replicas of their group.

The ranks form a mesh, data x model: those along `model` hold one model together and see the same data (under expert
parallel each its own), those along `data` hold the same part of it and see different data.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import patch_environment
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedConfig

from pretrain.config import RunConfig
from pretrain.data.vocabulary import planned_model_config
from pretrain.errors import InputError
from pretrain.model.build import build_meta_model
from pretrain.model.routers import routers_of
from pretrain.optim.optimizers import total_norm
from pretrain.parallel.launcher import FLAGS, parallel_size, sharing_problems
from pretrain.parallel.strategy import Strategy

if TYPE_CHECKING:
    from pretrain.optim.matrix_exchange import Holders


class ModelParallel(Strategy, ABC):
    """Base of the strategies in which a rank holds a part of the model. See `Strategy` for the order of calls."""

    precisions = ("fp32", "bf16")
    compilations = ("auto", "none", "regional")
    holds_whole_model = False
    experts_problem: ClassVar[str | None]
    """Reason why MoE models are not supported; None: they are."""
    size_variable: ClassVar[str]
    """Launcher variable with the number of processes that share a model; in lower case, the config's setting."""
    all_processes: ClassVar[str] = "null"
    """Value of that setting that means all processes."""
    mesh_order: ClassVar[tuple[str, str]]
    """Dimensions of the mesh; the last one is that of neighboring ranks, which have the fastest links."""

    def __init__(self, precision: str, config: RunConfig | None = None):
        super().__init__(precision, config)
        self.model_ranks = parallel_size(self.size_variable)
        sizes = {"model": self.model_ranks, "data": self.ranks.count // self.model_ranks}
        mesh = init_device_mesh(
            self.device.type, tuple(sizes[name] for name in self.mesh_order), mesh_dim_names=self.mesh_order
        )
        self.model_mesh = mesh["model"]
        self.model_group = mesh.get_group("model")
        self.data_mesh = mesh["data"]
        self.data_group = mesh.get_group("data")
        self.model_rank: int = mesh.get_local_rank("model")
        self.data_rank = mesh.get_local_rank("data")
        self.data_ranks = sizes["data"]
        self.ranks_of_mesh: torch.Tensor = mesh.mesh
        self.micro_steps = 0
        """Micro-steps since the last update."""

    @classmethod
    def problems(cls, config: RunConfig, name: str) -> list[str]:
        problems = super().problems(config, name)
        of_size = cls.size_problems()
        try:
            model_config = planned_model_config(config.model, config.data)
            if cls.experts_problem and routers_of(build_meta_model(model_config)):
                problem = (
                    f"launcher: {name} does not train mixtures of experts, as {model_config.model_type} is: "
                    f"{cls.experts_problem}; use ddp, fsdp2, hsdp, zero1 to zero3 or ep"
                )
            else:
                problem = cls.model_problem(model_config, config, not of_size)
        except InputError:
            problem = None  # `derive` reports this problem of the model
        return [*problems, *of_size, *([problem] if problem else [])]

    @classmethod
    @abstractmethod
    def model_problem(cls, model_config: PreTrainedConfig, config: RunConfig, knows_size: bool) -> str | None:
        """Returns why this model cannot be sharded; None if it can.

        knows_size: False if the launcher's number of processes is invalid.
        """

    @classmethod
    def size_problems(cls) -> list[str]:
        """Lists the problems of the number of processes that share a model."""
        return sharing_problems(cls.size_variable, cls.all_processes)

    def make_accelerator(self) -> Accelerator:
        # accelerate must see plain processes: the parallelism is neither Megatron-LM's nor transformers'.
        flags = (FLAGS["MEGATRON_LM"], FLAGS["FSDP"], "ACCELERATE_USE_PARALLELISM_CONFIG")
        with patch_environment(**dict.fromkeys(flags, "false")):
            return super().make_accelerator()

    @property
    def reports_loss(self) -> bool:
        """True on the one rank of a group whose metrics count, so that no data is counted twice."""
        return self.model_rank == 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums over the groups, each of which sees different data; all ranks get the sum."""
        return super().sum(tensor if self.reports_loss else torch.zeros_like(tensor))

    @contextmanager
    def accumulate(self, is_last: bool) -> Iterator[None]:
        """Wraps forward and backward of a micro-step; gradients are exchanged in `update`."""
        self.micro_steps += 1
        yield

    @abstractmethod
    def combine_gradients(self) -> None:
        """Turns every gradient into that of the whole batch, before the gradient norm is computed."""

    @abstractmethod
    def local_gradients(self) -> list[tuple[torch.Tensor, bool]]:
        """Lists (this rank's part of a gradient, True if it counts in the group's sum) for each parameter."""

    def gradient_norm(self) -> torch.Tensor:
        self.combine_gradients()
        self.micro_steps = 0
        counting = [gradient for gradient, counts in self.local_gradients() if counts]
        square = total_norm(counting).square().to(self.device)
        dist.all_reduce(square, group=self.model_group)
        return square.sqrt()

    def copies(self) -> "Holders | None":
        from pretrain.optim.matrix_exchange import Holders

        return Holders(self.data_group, self.device) if self.data_ranks > 1 else None

    def gradients(self) -> list[torch.Tensor]:
        return [gradient for gradient, _ in self.local_gradients()]

    def average_over_data(self, gradients: list[torch.Tensor], extra_divisor: int = 1) -> None:
        """Replaces gradients by their mean over the model's replicas, divided by `extra_divisor` too."""
        if self.data_ranks > 1:
            sum_in_place(gradients, self.data_group)
        if (divisor := self.data_ranks * extra_divisor) > 1:
            torch._foreach_div_(gradients, divisor)

    def describe(self) -> dict:
        return {
            **super().describe(),
            self.size_variable.lower(): self.model_ranks,
            "data_parallel_size": self.data_ranks,
        }


def sum_in_place(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sums each tensor over the ranks of the group, all in one collective; on a GPU without a copy."""
    if tensors:
        group.allreduce_coalesced(tensors).wait()
