"""Gathers the weights of fp8 layers in fp8: half the bytes of bf16, and rounded only once, as on one process.

fully_shard calls a local tensor's `fsdp_pre_all_gather` and `fsdp_post_all_gather` in place of its own cast. torchao
has both on a tensor subclass. Here the parameters stay plain, so optimizers and checkpoints don't handle fp8. Their
local tensors borrow the two methods from a subclass instance that shares their memory.
"""

import math

import torch
import torch.distributed as dist
from torch import nn


class Fp8Gathers:
    """The fp8 weights of a module under fully_shard, and their scales.

    A weight has one scale for the whole matrix, so all ranks need the largest value of all shards: one all-reduce for
    all weights, before the first call of a step and before every call without gradients.
    """

    def __init__(self, root: nn.Module, group: dist.ProcessGroup):
        from torchao.float8.float8_linear import Float8Linear
        from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

        self.group = group
        self.is_stale = True
        """True until the scales of the current weights are known."""
        self.weights = []
        """The weights as torchao's subclass."""
        for module in root.modules():
            if isinstance(module, Float8Linear):
                part = module.weight.to_local().detach()
                # All ranks send the same number of rows, because fully_shard pads shorter shards with zeros.
                rows, columns = module.weight.shape
                padded = part.as_strided((math.ceil(rows / group.size()), columns), (columns, 1))
                dtype = module.config.cast_config_weight.target_dtype
                weight = WeightWithDynamicFloat8CastTensor(padded, module.linear_mm_config, dtype)
                for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
                    setattr(module.weight._local_tensor, name, getattr(weight, name))
                self.weights.append(weight)
        if self.weights:
            # It must run first, because fully_shard's own hook makes its streams wait for earlier work.
            root.register_forward_pre_hook(self.measure, prepend=True)

    def measure(self, *_) -> None:
        """Computes the scales of the current weights, unless the step has done so."""
        from torchao.float8.float8_utils import amax_to_scale

        # Outside of a step, the weights may have been swapped with their average, or loaded.
        is_step = torch.is_grad_enabled()
        if is_step and not self.is_stale:
            return
        with torch.no_grad():
            largest = torch.stack(torch._foreach_norm([weight._tensor for weight in self.weights], math.inf))
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
            scales = amax_to_scale(largest, self.weights[0]._dtype)
        for weight, scale in zip(self.weights, scales.unbind(), strict=True):
            weight._precomputed_scale = scale
        self.is_stale = not is_step
