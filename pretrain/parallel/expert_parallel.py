"""Expert parallel: each rank holds some of every layer's experts, and tokens travel to the experts that they choose.

All else is data parallel: every rank has a part of the batch and full copies of attention, routers and embeddings. A
layer sends its tokens' rows, sorted by expert, to the ranks that hold these experts, and gets the results back
(Lepikhin et al., arXiv 2006.16668), by transformers' exchange: two all-to-alls, and two more for the gradients. No
expert has a capacity, so no token is dropped; the CPU must know how many rows travel, so it waits for the GPU once per
layer and forward pass.

The ranks form a mesh, data x model: those along `model` hold a layer's experts together, those along `data` hold
replicas of the same experts.
"""

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedConfig
from transformers.distributed.expert_parallel import (
    AllToAllEP,
    EpDispatchExpertsParallel,
    EPImplementationInterface,
    MoEParamShard,
)

from pretrain.config import RunConfig
from pretrain.model.build import InitialWeights, build_meta_model, units_of
from pretrain.model.loss import LanguageModelLoss
from pretrain.model.routers import expert_parameters, routers_of
from pretrain.optim.optimizers import OptimizerBuilder
from pretrain.parallel.launcher import EP_SIZE, PP_DEGREE, parallel_size
from pretrain.parallel.model_parallel import ModelParallel, sum_in_place
from pretrain.parallel.replicas import ReplicaGroup
from pretrain.parallel.strategy import Strategy
from pretrain.parallel.tensor_parallel import AutocastModel, separate_kinds

if TYPE_CHECKING:
    from pretrain.optim.matrix_exchange import Holders


class ExpertParallel(ModelParallel):
    """The experts of each layer sharded over the ranks of a group; several groups hold replicas of them."""

    size_variable = EP_SIZE
    all_processes = "all"  # the launcher does not pass on `null`
    # Rows are exchanged four times per layer, so the ranks of a group are neighbors.
    mesh_order = ("data", "model")
    parameter_form = "sharded"
    experts_problem = None

    def __init__(self, precision: str, config: RunConfig | None = None):
        super().__init__(precision, config)
        self.expert_copies = self.data_ranks
        self.data_rank = self.ranks.rank
        self.data_ranks = self.ranks.count

    @classmethod
    def size_problems(cls) -> list[str]:
        degree = os.environ.get(PP_DEGREE, "1")
        if degree == "1":
            return super().size_problems()
        return [
            f"launcher: megatron_lm_pp_degree: {degree} does not go with experts in parallel; remove one of the two"
        ]

    @classmethod
    def model_problem(cls, model_config: PreTrainedConfig, config: RunConfig, knows_size: bool) -> str | None:
        model = build_meta_model(model_config)
        kind = model_config.model_type
        experts = expert_modules(model)
        routers = routers_of(model)
        counts = {module.num_experts for module in experts.values()}
        names = {f"{name}.{own}" for name, module in experts.items() for own, _ in module.named_parameters()}
        if not counts:
            return f"model: {kind} has no experts that could be divided; use ddp or fsdp2"
        routed = {
            f"{router.name.rpartition('.')[0]}.{own}" for router in routers for own in expert_parameters(router)[0]
        }
        if routed - names:
            return f"model: not all experts of {kind} run through transformers' experts interface; use fsdp2 or zero3"
        if not knows_size or not any(count % parallel_size(cls.size_variable) for count in counts):
            return None
        works = [str(n) for n in range(2, max(counts) + 1) if not any(count % n for count in counts)]
        return (
            f"model: {' or '.join(map(str, sorted(counts)))} experts in a layer cannot be divided by "
            f"{parallel_size(cls.size_variable)} expert-parallel processes; {', '.join(works)} can be used, as "
            f"{EP_SIZE.lower()}"
        )

    def prepare(
        self, model: LanguageModelLoss, weights: InitialWeights, build_optimizer: OptimizerBuilder
    ) -> torch.nn.Module:
        """Prepares as in `Strategy`. No rank ever holds more than one whole layer."""
        self.causal_lm = causal_lm = model.causal_lm
        for unit in units_of(causal_lm):
            weights.fill(causal_lm, unit)
            module = causal_lm.get_submodule(unit)
            for experts in expert_modules(module).values():
                divide_experts(experts.to(self.device), self.model_mesh)
        causal_lm.tie_weights()
        model.to(self.device)
        optimizer = separate_kinds(self.optimizer_of_parameters(build_optimizer))
        self.optimizer = self.accelerator.prepare_optimizer(optimizer, device_placement=False)
        self.model = AutocastModel(model, self.precision)
        return self.model

    @property
    def reports_loss(self) -> bool:
        return True

    def combine_gradients(self) -> None:
        """Averages over ranks; experts' gradients are already sums over the ranks that sent them tokens."""
        gradients = [parameter.grad for parameter in self.name_of if parameter.grad is not None]
        whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
        of_experts = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
        sum_in_place(whole, dist.group.WORLD)
        if self.expert_copies > 1:
            sum_in_place(of_experts, self.data_group)
        torch._foreach_div_([*whole, *of_experts], self.ranks.count)

    def local_gradients(self) -> list[tuple[Tensor, bool]]:
        gradients = [parameter.grad for parameter in self.name_of if parameter.grad is not None]
        return [
            (gradient.to_local(), True) if isinstance(gradient, DTensor) else (gradient, self.model_rank == 0)
            for gradient in gradients
        ]

    def copies(self) -> "Holders | None":
        return Strategy.copies(self)

    def replicas(self) -> list[ReplicaGroup]:
        """Lists all but the experts, over all ranks; and the experts, over the groups that hold replicas of them."""
        parts = {name: parameter for parameter, name in self.name_of.items() if isinstance(parameter, DTensor)}
        whole = {name: parameter.detach() for parameter, name in self.name_of.items() if name not in parts}
        groups: list[ReplicaGroup] = [(None, whole)]
        if self.expert_copies > 1:
            groups.append((self.data_group, {name: part.to_local() for name, part in parts.items()}))
        return groups


class ExchangeOfOwnBatches(AllToAllEP):
    """transformers' exchange for ranks that each have a batch of their own."""

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: None = None):
        # The parent's __init__ is skipped: it divides a batch's rows among the ranks of a tensor-parallel mesh.
        self.experts_forward = experts.forward
        self.num_local_experts = experts.num_experts
        self.ep_mesh = ep_mesh
        self.tp_mesh = SimpleNamespace(size=lambda: 1)


EPImplementationInterface.register("own_batches", ExchangeOfOwnBatches)


def expert_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Returns {name: module} of the experts that transformers' experts interface runs, (E, ...) in each parameter."""
    # The interface marks them only by this private attribute.
    return {name: inner for name, inner in module.named_modules() if hasattr(inner, "_is_expert_parallel")}


def divide_experts(experts: nn.Module, mesh: DeviceMesh, tp_mesh: DeviceMesh | None = None) -> None:
    """Keeps only this rank's experts of a layer, and sends the rows of all ranks to them.

    tp_mesh: ranks that hold the same rows, of which each sends its part; None: every rank has rows of its own.
    """
    sharding = MoEParamShard(Shard(0), shards_expert_dim=True)
    for name in list(experts._parameters):
        sharding.shard_param(experts, name, mesh)
    # The library's switch for masking rows of experts on other ranks: no such row arrives here.
    experts._is_expert_parallel = False
    implementation = "own_batches" if tp_mesh is None else "all_to_all"
    EpDispatchExpertsParallel().install_forward(experts, mesh, tp_mesh=tp_mesh, ep_implementation=implementation)
    exchanged = experts.forward

    @torch.compiler.disable  # the numbers of rows change in every step
    def forward(hidden_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
        device_type = hidden_ND.device.type
        if torch.is_autocast_enabled(device_type):
            hidden_ND = hidden_ND.to(torch.get_autocast_dtype(device_type))  # rows are then sent in half precision
        return exchanged(hidden_ND, chosen_NK, weights_NK)

    experts.forward = forward
