"""All-gathers fp8 layers' weights in fp8, which takes half the bytes of bf16 and rounds each weight only once.

Before each all-gather, fully_shard calls a local tensor's `fsdp_pre_all_gather` and `fsdp_post_all_gather` if it has
them, instead of doing its own cast. torchao implements both methods on a tensor subclass. We keep plain parameters, so
optimizers and checkpoints don't have to handle fp8, and attach to each local tensor the two methods of a subclass
instance that shares its memory.
"""

import math

import torch
import torch.distributed as dist
from torch import nn


class Fp8Gathers:
    """The fp8 weights of a module under fully_shard, and their scales.

    Each weight matrix has a single scale, which depends on the largest value across all shards. One all-reduce
    computes the scales of all weights. It runs before the first forward pass of a step, and before every forward pass
    without gradients.
    """

    def __init__(self, root: nn.Module, group: dist.ProcessGroup):
        from torchao.float8.float8_linear import Float8Linear
        from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

        self.group = group
        self.is_stale = True
        """True if the scales may not belong to the current weights."""
        self.weights = []
        """The weights, wrapped in torchao's subclass."""
        for module in root.modules():
            if isinstance(module, Float8Linear):
                part = module.weight.to_local().detach()
                # Every rank must send the same number of rows. fully_shard pads shorter shards with zeros.
                rows, columns = module.weight.shape
                padded = part.as_strided((math.ceil(rows / group.size()), columns), (columns, 1))
                dtype = module.config.cast_config_weight.target_dtype
                weight = WeightWithDynamicFloat8CastTensor(padded, module.linear_mm_config, dtype)
                for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
                    setattr(module.weight._local_tensor, name, getattr(weight, name))
                self.weights.append(weight)
        if self.weights:
            # This hook must run before fully_shard's own hook, which makes its streams wait for earlier work.
            root.register_forward_pre_hook(self.measure, prepend=True)

    def measure(self, *_) -> None:
        """Computes the scales of the current weights, unless this step has already computed them."""
        from torchao.float8.float8_utils import amax_to_scale

        # Outside of a step, we can't rely on the old scales: the weights may have been loaded or swapped with their
        # average.
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
