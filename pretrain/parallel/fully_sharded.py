"""Fully sharded data parallel (FSDP2) and its hybrid (HSDP), on torch's fully_shard.

Every process keeps 1/shards of each parameter, gradient and optimizer state, and gathers one layer at a time to
compute with it (Zhao et al., arXiv 2304.11277). HSDP shards inside groups of processes and replicates over them.

Accelerate starts the processes and reads the launcher's file. It does not wrap the model: it would put the output
head into a group whose hooks run around the head's own forward, and the loss uses the head's weight without one.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from pretrain.model.compile import layers_of
from pretrain.model.initial_weights import InitialWeights, units_of
from pretrain.model.loss import LanguageModelLoss
from pretrain.optim.gradient_norm import total_norm
from pretrain.optim.optimizers import describe_optimizer, load_optimizer_state, optimizer_state_by_name
from pretrain.parallel.launcher import replicas_requested
from pretrain.parallel.replicas import ReplicaGroup
from pretrain.parallel.strategy import OptimizerBuilder, Strategy, device_type
from pretrain.parallel.tensor_group import TensorGroup


class FullySharded(Strategy):
    """FSDP2 and HSDP."""

    parameter_form = "sharded"
    precisions = ("fp32", "bf16")
    compilations = ("none", "regional")  # compiled whole, the graph would break at every hook of a layer

    def make_accelerator(self) -> Accelerator:
        plugin = FullyShardedDataParallelPlugin()
        if device_type() == "cpu":
            # On a CPU accelerate quietly runs DDP instead: it admits FSDP for accelerators alone.
            PartialState(cpu=True)
            if not dist.is_initialized():  # one process
                dist.init_process_group("gloo")
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        # The mesh is made here: accelerate's own check refuses 2 replicas of 1 shard, which is what two processes are.
        self.replica_count = replicas_requested()
        os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)
        return Accelerator(fsdp_plugin=plugin, step_scheduler_with_optimizer=False)

    def check_started(self) -> None:
        if not self.accelerator.is_fsdp2:
            raise RuntimeError(f"FSDP2 was asked for, but accelerate runs {self.accelerator.distributed_type}")

    def prepare(
        self, model: LanguageModelLoss, weights: InitialWeights, build_optimizer: OptimizerBuilder
    ) -> torch.nn.Module:
        """As in `Strategy`. No process ever holds more of the whole model than one layer, or what is beside them."""
        self.causal_lm = causal_lm = model.causal_lm
        plugin = self.accelerator.state.fsdp_plugin
        self.reshards = bool(plugin.reshard_after_forward)
        self.mesh = device_mesh(self.device.type, self.replica_count, self.ranks.count)
        settings = {
            "mesh": self.mesh,
            "mp_policy": self._mixed_precision(),
            "offload_policy": plugin.cpu_offload or OffloadPolicy(),
        }
        layers = set(layers_of(causal_lm))
        for unit in units_of(causal_lm):
            weights.fill(causal_lm, unit)
            module = causal_lm.get_submodule(unit)
            if module in layers:
                fully_shard(module, reshard_after_forward=self.reshards, **settings)
        causal_lm.tie_weights()
        self.model: FSDPModule = fully_shard(model, reshard_after_forward=self.reshards, **settings)
        self.offloads = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
        named_parameters = list(causal_lm.named_parameters())
        self.name_of = {parameter: name for name, parameter in named_parameters}
        self.optimizer = build_optimizer(named_parameters)
        self.optimizer_built = describe_optimizer(self.optimizer)
        return self.model

    def _mixed_precision(self) -> MixedPrecisionPolicy:
        """Compute in bf16 on copies of fp32 weights; reduce gradients in fp32 (accelerate's policy would in bf16)."""
        if self.precision == "fp32":
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)

    @contextmanager
    def accumulate(self, is_last: bool) -> Iterator[None]:
        # Gradients that are not reduced stay whole on every process. Where even the weights may not, they are
        # reduced in every micro-step.
        self.model.set_requires_gradient_sync(is_last or self.reshards)
        self.model.set_is_last_backward(is_last)
        yield

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def gradient_norm(self) -> torch.Tensor:
        grad_norm = total_norm(self.gradients())
        return (grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm).to(self.device)

    def model_tensors(self) -> TensorGroup:
        return ShardedGroup.of(super().model_tensors().tensors)

    def optimizer_tensors(self) -> TensorGroup:
        return ShardedGroup.of(optimizer_state_by_name(self.optimizer, self.name_of))

    def load(self, model: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor]) -> None:
        load_parts(super().model_tensors().tensors, model)
        load_optimizer_state(self.optimizer, self.name_of, ShardedState(optimizer, self.name_of))

    def replicas(self) -> list[ReplicaGroup]:
        """HSDP: the shards, over the groups that each hold a whole model."""
        if self.replica_count == 1:
            return []
        return [(self.mesh["dp_replicate"].get_group(), {n: p.to_local() for p, n in self.name_of.items()})]

    def describe(self) -> dict:
        shape = dict(zip(self.mesh.mesh_dim_names, self.mesh.shape, strict=True))
        return {**super().describe(), "mesh": shape, "reshard_after_forward": self.reshards, "offload": self.offloads}


def device_mesh(device: str, replicas: int, processes: int) -> DeviceMesh:
    """One dimension, over which parameters are sharded; for HSDP a first one over which they are replicated."""
    if replicas == 1:
        return init_device_mesh(device, (processes,), mesh_dim_names=("dp_shard",))
    shape = (replicas, processes // replicas)
    return init_device_mesh(device, shape, mesh_dim_names=("dp_replicate", "dp_shard"))


class ShardedGroup(TensorGroup):
    """Tensors of which every process holds a part."""

    def whole(self, name: str, wanted: bool = True) -> torch.Tensor | None:
        tensor = self.tensors[name].detach()
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return whole if wanted else None


class ShardedState(Mapping[str, torch.Tensor]):
    """Saved optimizer state, whole, as the parts that go with this process's parts of the parameters."""

    def __init__(self, whole: Mapping[str, torch.Tensor], name_of: Mapping[torch.Tensor, str]):
        self._whole, self._parameters = whole, {name: parameter for parameter, name in name_of.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor, parameter = self._whole[name], self._parameters.get(name.rpartition(".")[0])
        if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
            return tensor
        part = local_part(tensor, parameter).to(parameter.to_local().device)
        return DTensor.from_local(
            part,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)


@torch.no_grad()
def load_parts(tensors: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor]) -> None:
    """Copies whole tensors by name into those that train; into a DTensor the part that this process holds."""
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            tensor.to_local().copy_(local_part(whole[name], tensor))
        else:
            tensor.copy_(whole[name])


def local_part(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """The part of `whole` that this process holds if it is laid out over the processes as `like` is."""
    shape, offset = compute_local_shape_and_global_offset(whole.shape, like.device_mesh, like.placements)
    return whole[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
