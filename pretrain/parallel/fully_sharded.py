"""Fully sharded data parallel (FSDP2) and its hybrid (HSDP), on torch's fully_shard.

Every rank keeps 1/shards of each parameter, gradient and optimizer state, and gathers one layer at a time to compute
with it (Zhao et al., arXiv 2304.11277). HSDP shards inside groups of ranks and replicates across groups.

Accelerate starts the processes and reads its config file. It does not wrap the model: it would put the output head
into a group whose hooks run around the head's own forward, but the loss uses the head's weight without calling it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType, patch_environment
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from pretrain.model.build import InitialWeights, units_of
from pretrain.model.compile import layers_of
from pretrain.model.loss import LanguageModelLoss
from pretrain.optim.optimizers import OptimizerBuilder, total_norm
from pretrain.parallel.launcher import replicas_requested
from pretrain.parallel.replicas import ReplicaGroup
from pretrain.parallel.strategy import Strategy, device_type


class FullySharded(Strategy):
    """FSDP2 and HSDP."""

    parameter_form = "sharded"
    precisions = ("fp32", "bf16")
    compilations = ("auto", "none", "regional")  # compiled whole, the graph would break at every layer's hooks
    holds_whole_model = False

    def make_accelerator(self) -> Accelerator:
        plugin = FullyShardedDataParallelPlugin()
        if device_type() == "cpu":
            # On a CPU accelerate would silently run DDP instead: it allows FSDP on accelerators only.
            PartialState(cpu=True)
            if not dist.is_initialized():  # one process
                dist.init_process_group("gloo")
            # Private, because the public attribute cannot be set.
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        # The mesh is built here because accelerate rejects 2 replicas of 1 shard, which is HSDP on two ranks.
        self.replica_count = replicas_requested() if self.name == "hsdp" else 1
        with patch_environment(ACCELERATE_USE_PARALLELISM_CONFIG="false"):  # whose attention drops masks
            accelerator = Accelerator(fsdp_plugin=plugin, step_scheduler_with_optimizer=False)
        if not accelerator.is_fsdp2:
            raise RuntimeError(f"FSDP2 was asked for, but accelerate runs {accelerator.distributed_type}")
        return accelerator

    def prepare(
        self, model: LanguageModelLoss, weights: InitialWeights, build_optimizer: OptimizerBuilder
    ) -> torch.nn.Module:
        """Prepares as in `Strategy`. No rank ever holds more of the whole model than a layer, or than the rest."""
        self.causal_lm = causal_lm = model.causal_lm
        plugin = self.accelerator.state.fsdp_plugin
        self.reshards = bool(plugin.reshard_after_forward)
        self.reduces_once = not self.reshards or self.config.batch.reduce_once
        self.mesh = device_mesh(self.device.type, self.replica_count, self.ranks.count)
        settings = {"mesh": self.mesh, "offload_policy": plugin.cpu_offload or OffloadPolicy()}
        fill = partial(weights.fill, causal_lm)
        self.model = shard_layers(model, fill, self.precision, reshards=self.reshards, **settings)
        self.offloads = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
        self.optimizer = self.optimizer_of_parameters(build_optimizer)
        return self.model

    @contextmanager
    def accumulate(self, is_last: bool) -> Iterator[None]:
        # Gradients that are not reduced stay unsharded, in fp32, on every rank.
        self.model.set_requires_gradient_sync(is_last or not self.reduces_once)
        self.model.set_requires_all_reduce(is_last)  # between HSDP's replicas
        self.model.set_is_last_backward(is_last)
        yield

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def gradient_norm(self) -> torch.Tensor:
        # One all-reduce; a norm of DTensors takes one per gradient if the gradients are in CPU memory.
        square = total_norm(gradient.to_local() for gradient in self.gradients()).square().to(self.device)
        dist.all_reduce(square, group=self.mesh.get_group("dp_shard"))
        return square.sqrt()

    def replicas(self) -> list[ReplicaGroup]:
        """Lists HSDP's shards, over the groups that each hold a whole model."""
        if self.replica_count == 1:
            return []
        return [(self.mesh["dp_replicate"].get_group(), {n: p.to_local() for p, n in self.name_of.items()})]

    def describe(self) -> dict:
        shape = dict(zip(self.mesh.mesh_dim_names, self.mesh.shape, strict=True))
        sharding = {"reshard_after_forward": self.reshards, "reduce_once": self.reduces_once, "offload": self.offloads}
        return {**super().describe(), "mesh": shape, **sharding}


def shard_layers(
    model: LanguageModelLoss, fill: Callable[[str], None], precision: str, *, reshards: bool, **settings
) -> FSDPModule:
    """Fills a model on the meta device and shards it, a unit at a time.

    Args:
        fill: gives the unit of this name its weights.
        reshards: if True, gathered weights are freed after the forward pass.
        settings: arguments for fully_shard.
    """
    causal_lm = model.causal_lm
    inside = MixedPrecisionPolicy()
    if precision == "bf16":
        # Compute in bf16 on casts of fp32 weights; reduce gradients in fp32 (accelerate's policy would reduce in
        # bf16).
        inside = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = set(layers_of(causal_lm))
    for unit in units_of(causal_lm):
        fill(unit)
        module = causal_lm.get_submodule(unit)
        if module in layers:
            fully_shard(module, reshard_after_forward=reshards, mp_policy=inside, **settings)
    causal_lm.tie_weights()
    # Parameters outside of the layers are used last in forward and first in backward, so they stay gathered.
    outside = replace(inside, output_dtype=torch.float32)
    sharded = fully_shard(model, reshard_after_forward=False, mp_policy=outside, **settings)
    sharded.register_forward_hook(reshard_without_backward)
    return sharded


def reshard_without_backward(model: FSDPModule, *_) -> None:
    """Frees, as a forward hook, weights that were kept for a backward pass if none follows: they would become outdated
    at the next update."""
    if not torch.is_grad_enabled():
        model.reshard()


def device_mesh(device: str, replicas: int, processes: int) -> DeviceMesh:
    """Builds a mesh of one dimension, over which parameters are sharded; for HSDP a replica dimension comes first."""
    if replicas == 1:
        return init_device_mesh(device, (processes,), mesh_dim_names=("dp_shard",))
    shape = (replicas, processes // replicas)
    return init_device_mesh(device, shape, mesh_dim_names=("dp_replicate", "dp_shard"))
