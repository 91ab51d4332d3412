"""Checks whether 8-bit AdamW works with a sharding, which must not split a quantization block across shards."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from pretrain.mesh_sizes import Sizes, environment_flag
from pretrain.model.build import build_meta_model, once_per_config
from pretrain.model.compile import layers_of
from pretrain.optim.adamw_8bit import has_blocks, unit_rows
from pretrain.parallel.expert_parallel import dimension_to_shard, expert_modules


@dataclass(frozen=True)
class LargeParameter:
    """A parameter whose AdamW moments are stored in 8 bits."""

    name: str
    shape: tuple[int, ...]
    is_expert: bool
    is_in_layer: bool

    def keeps_blocks(self, sizes: Sizes) -> bool:
        """Returns True if no quantization block is split across shards. Requires tp = 1."""
        experts = sizes.ep if self.is_expert else 1
        shards = sizes.fsdp // experts
        rows = self.shape[0] // experts
        if shards > 1 and self.is_in_layer:
            part = torch.empty(rows, *self.shape[1:], device="meta")
            if dimension_to_shard(shards, part) is not None:
                return False
        starts = [rows] * (experts > 1) + [-(-rows // shards)] * (shards > 1)  # the others are multiples of these
        return not any(start % unit_rows(self.shape) for start in starts)


def blocks_problems(model_config: PreTrainedConfig, sizes: Sizes) -> list[str]:
    """Returns error messages if 8-bit AdamW doesn't work with these sizes.

    Doesn't check tp, which always rejects 8-bit AdamW.
    """
    offloaded = (
        "optim.name: adamw_8bit is not supported with fsdp_offload_params; use adamw, or keep the parameters on the "
        "GPU"
    )
    problems = [offloaded] * environment_flag("FSDP_OFFLOAD_PARAMS")
    if sizes.tp > 1 or sizes.fsdp == 1:
        return problems
    cut = [each for each in _large_parameters(model_config) if not each.keeps_blocks(sizes)]
    if not cut:
        return problems
    first = cut[0]
    return [
        *problems,
        f"optim.name: adamw_8bit is not supported with {sizes.fsdp} shards per parameter (dp_shard x cp), because "
        f"sharding {first.name} ({' x '.join(map(str, first.shape))}) would split its quantization blocks of 256 "
        "consecutive elements; use adamw, a smaller dp_shard with dp_replicate for the remaining processes, or a "
        "model whose row counts divide evenly",
    ]


@once_per_config
def _large_parameters(model_config: PreTrainedConfig) -> list[LargeParameter]:
    model = build_meta_model(model_config)
    experts = {parameter for module in expert_modules(model).values() for parameter in module.parameters()}
    in_layers = {parameter for layer in layers_of(model) for parameter in layer.parameters()}
    return [
        LargeParameter(name, tuple(parameter.shape), parameter in experts, parameter in in_layers)
        for name, parameter in model.named_parameters()
        if has_blocks(parameter.shape)
    ]
