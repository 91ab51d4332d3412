"""Expert parallelism: each rank holds some of each layer's experts, and tokens are sent to their experts' ranks.

Each layer sorts its tokens by expert, sends them to the ranks that hold these experts, and receives the outputs
(Lepikhin et al., arXiv 2006.16668). transformers implements this with two all-to-alls in the forward pass and two in
the backward pass. Experts have no capacity limit, so no tokens are dropped. The CPU waits for the GPU once per layer
and forward pass to find out how many rows to send. All other weights are sharded over the other mesh dimensions.
"""

import importlib.util
import math
from collections.abc import Mapping

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from transformers import PreTrainedConfig

from pretrain.mesh_sizes import Sizes, setting
from pretrain.model.attention import autocast_dtype
from pretrain.model.build import build_meta_model
from pretrain.model.routers import expert_parameters, routers_of
from pretrain.optim.optimizers import local_tensor
from pretrain.parallel.dimension import Dimension

DISPATCH = "transformers.distributed.expert_parallel"
"""The transformers module that dispatches tokens. transformers 5.17 doesn't have it."""


class ExpertParallel(Dimension):
    """The expert-parallel (ep) dimension of a mesh."""

    @classmethod
    def model_problem(cls, model_config: PreTrainedConfig, sizes: Sizes, schedule: str) -> str | None:
        if importlib.util.find_spec(DISPATCH) is None:
            return (
                f"model: ep needs a transformers release with {DISPATCH}, such as 5.23; got {transformers.__version__}"
            )
        model = build_meta_model(model_config)
        kind = model_config.model_type
        experts = expert_modules(model)
        counts = {module.num_experts for module in experts.values()}
        names = {f"{name}.{own}" for name, module in experts.items() for own, _ in module.named_parameters()}
        if not counts:
            return f"model: {kind} has no experts; use ddp or fsdp2"
        routed = {
            f"{router.name.rpartition('.')[0]}.{own}"
            for router in routers_of(model)
            for own in expert_parameters(router)[0]
        }
        if routed - names:
            return f"model: some experts in {kind} don't use transformers' experts interface; use fsdp2 or zero3"
        if not any(count % sizes.ep for count in counts):
            return None
        works = [str(n) for n in range(2, max(counts) + 1) if not any(count % n for count in counts)]
        return (
            f"model: {' or '.join(map(str, sorted(counts)))} experts per layer cannot be split across {sizes.ep} "
            f"expert-parallel processes; valid values for {setting('ep')}: {', '.join(works) or 'none; use fsdp2'}"
        )

    def divide(self, unit: str, module: nn.Module) -> None:
        mesh = self.strategy.mesh
        for experts in expert_modules(module).values():
            divide_experts(experts.to(self.strategy.device), mesh.expert["ep"], mesh.dense["tp"])

    def combine(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        # fully_shard divides by the number of ranks with the same experts. But these experts have also processed
        # tokens from other ranks, so we need to divide by the number of all ranks with different tokens.
        # set_gradient_divide_factor would do that, but torch 2.13 divides twice if only one rank holds the experts.
        experts = [grad for parameter, grad in gradients.items() if "ep" in parameter.device_mesh.mesh_dim_names]
        if experts:  # a pipeline stage may have only dense layers
            torch._foreach_mul_(experts, self.strategy.sizes.tp / self.strategy.sizes.ep)


def expert_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Returns {name: module} for modules run by transformers' experts interface.

    Their parameters have shape (experts, ...).
    """
    # There is no public way to recognize these modules.
    return {name: inner for name, inner in module.named_modules() if hasattr(inner, "_is_expert_parallel")}


def pads_much(experts: int, ranks: int) -> bool:
    """Returns True if padding makes a sharded expert stack over 25% larger, for example with 2 experts on 8 ranks."""
    return math.ceil(experts / ranks) * ranks > 1.25 * experts


def dimension_to_shard(ranks: int, parameter: nn.Parameter) -> Shard | None:
    """Returns the dimension along which fully_shard should shard an expert stack, or None for dimension 0.

    The dimension must be divisible by the number of ranks. It must not be split by tp or ep already, because a shard
    would then mix rows of two matrices.
    """
    shape = local_tensor(parameter).shape
    if len(shape) < 3 or not pads_much(shape[0], ranks):
        return None
    taken = {placement.dim for placement in getattr(parameter, "placements", ()) if not placement.is_replicate()}
    free = [dim for dim in range(1, len(shape)) if dim not in taken and shape[dim] % ranks == 0]
    return Shard(free[0]) if free else None


def divide_experts(experts: nn.Module, mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
    """Keeps only this rank's experts in a layer, and routes tokens to the ranks that hold their experts.

    tp_mesh: ranks with the same tokens. Each rank sends a share of them.
    """
    from transformers.distributed.expert_parallel import EpDispatchExpertsParallel, MoEParamShard

    sharding = MoEParamShard(Shard(0), shards_expert_dim=True)
    for name in list(experts._parameters):
        sharding.shard_param(experts, name, mesh)
    # If this is True, transformers masks tokens for experts on other ranks, but such tokens never arrive here.
    experts._is_expert_parallel = False
    EpDispatchExpertsParallel().install_forward(experts, mesh, tp_mesh=tp_mesh, ep_implementation="all_to_all")
    exchanged = experts.forward

    @torch.compiler.disable  # the number of rows changes every step
    def forward(hidden_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
        hidden_ND = hidden_ND.to(autocast_dtype(hidden_ND))  # send rows in half precision
        return exchanged(hidden_ND, chosen_NK, weights_NK)

    experts.forward = forward
