"""All-gathers weights in fp8, which sends half as many bytes as bf16 and rounds each weight only once.

If a local tensor has `fsdp_pre_all_gather` and `fsdp_post_all_gather` methods, fully_shard calls them instead of
casting the tensor. torchao implements these methods in a tensor subclass. Our parameters stay plain tensors, so
optimizers and checkpoints don't have to handle fp8. We only borrow the two methods from a subclass instance that
shares the parameter's memory.
"""

import math

import torch
import torch.distributed as dist
from torch import nn

from pretrain.parallel.mesh_tiles import divided_axes


class Fp8Gathers:
    """Sets up fp8 all-gathers for a module sharded with fully_shard, and computes the scales.

    Each weight matrix has one scale, based on the largest value across all shards. A single all-reduce computes all
    scales, before the first forward pass of each step and before every forward pass without gradients.
    """

    def __init__(self, root: nn.Module, group: dist.ProcessGroup):
        from torchao.float8.float8_linear import Float8Linear
        from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

        self.group = group
        self.is_stale = True
        """True if the scales may be out of date."""
        self.weights = []
        """Weights wrapped in torchao's subclass."""
        for module in root.modules():
            if isinstance(module, Float8Linear):
                part = module.weight.to_local().detach()
                # All ranks must send the same number of rows. fully_shard pads shorter shards with zeros.
                mesh, columns = module.weight.device_mesh, part.shape[1]
                parts = math.prod(mesh.size(axis) for axis, dim in divided_axes(module.weight).items() if dim == 0)
                padded = part.as_strided((math.ceil(module.weight.shape[0] / parts), columns), (columns, 1))
                dtype = module.config.cast_config_weight.target_dtype
                weight = WeightWithDynamicFloat8CastTensor(padded, module.linear_mm_config, dtype)
                for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
                    setattr(module.weight._local_tensor, name, getattr(weight, name))
                self.weights.append(weight)
        if self.weights:
            # Must run before fully_shard's own hook, which makes its streams wait for earlier work.
            root.register_forward_pre_hook(self.measure, prepend=True)

    def measure(self, *_) -> None:
        """Computes the scales for the current weights, unless they have already been computed in this step."""
        from torchao.float8.float8_utils import amax_to_scale

        # Outside of training steps, always recompute: the weights may have been loaded or swapped with their average.
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
