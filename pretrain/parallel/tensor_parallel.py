"""Tensor parallel: each rank holds a slice of every large matrix of the layers, and ranks sum their partial results.

Groups of ranks that hold a model together are replicas of each other or, with FSDP2, shard each rank's slices further.

It follows the model's own plan (transformers' base_model_tp_plan) with torch's parallelize_module: a matrix split by
columns needs nothing from other ranks, the following one, split by rows, one all-reduce of its outputs (Shoeybi et
al., arXiv 1909.08053). Embedding, head and norms are replicated; each rank computes the loss of its part of the
tokens.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import PreTrainedConfig, PreTrainedModel

from pretrain.config import RunConfig
from pretrain.model.attention import IGNORED
from pretrain.model.build import InitialWeights, units_of
from pretrain.model.loss import LanguageModelLoss
from pretrain.optim.optimizers import OptimizerBuilder
from pretrain.parallel.fully_sharded import shard_layers
from pretrain.parallel.launcher import (
    TP_SIZE,
    environment_flag,
    parallel_size,
    processes_launched,
    uncombined_sizes,
)
from pretrain.parallel.model_parallel import ModelParallel, sum_in_place
from pretrain.parallel.replicas import ReplicaGroup

if TYPE_CHECKING:
    from pretrain.optim.matrix_exchange import Holders

STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
SUMMED = "replicated_with_grad_allreduce"
"""Style of a norm inside a split part: replicated, but each rank only has the gradient of its own heads."""


def tensor_plan_of(model_config: Any) -> dict[str, str]:
    """Returns the model's plan, {pattern of a module's name in the base model: style}; empty if it has none."""
    return dict(getattr(model_config, "base_model_tp_plan", None) or {})


def style_of(name: str, plan: Mapping[str, str]) -> str | None:
    """Returns the style for the module of this name; `*` in a pattern matches a layer's index."""
    return next((style for pattern, style in plan.items() if re.fullmatch(pattern.replace("*", r"\d+"), name)), None)


def plan_problem(model_config: Any, size: int) -> str | None:
    """Returns why this model cannot be split over `size` ranks, with what works; None if it can."""
    plan = tensor_plan_of(model_config)
    unknown = sorted(set(plan.values()) - {*STYLES, SUMMED})
    if not plan or unknown:
        reason = f"has {', '.join(unknown)} in its tensor-parallel plan" if unknown else "has no tensor-parallel plan"
        return (
            f"model: {model_config.model_type} {reason}; use pp or fsdp2, or an architecture whose plan is of colwise "
            "and rowwise alone, such as llama, qwen3, mistral, deepone"
        )
    heads = model_config.num_attention_heads
    dimensions = {
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(model_config, "num_key_value_heads", None) or heads,
        "intermediate_size": model_config.intermediate_size,
    }
    if any(value % size for value in dimensions.values()):
        works = [str(n) for n in range(2, heads + 1) if all(value % n == 0 for value in dimensions.values())]
        shape = ", ".join(f"{name} {value}" for name, value in dimensions.items())
        return (
            f"model: {shape} cannot all be divided by {size} tensor-parallel processes; "
            f"{', '.join(works) + ' can be used' if works else 'no number can: use another strategy'}"
        )
    return None


class TensorParallel(ModelParallel):
    """Slices of every layer on all ranks of a group; several groups share the data."""

    size_variable = TP_SIZE
    experts_problem = "torch's parallelize_module does not split the matrices of stacked experts"
    # Partial results are summed twice per layer, in both passes, so the ranks of a group are neighbors.
    mesh_order = ("data", "model")
    parameter_form = "pieces"

    @classmethod
    def model_problem(cls, model_config: PreTrainedConfig, config: RunConfig, knows_size: bool) -> str | None:
        return plan_problem(model_config, parallel_size(cls.size_variable)) if knows_size else None

    def prepare(
        self, model: LanguageModelLoss, weights: InitialWeights, build_optimizer: OptimizerBuilder
    ) -> torch.nn.Module:
        """Prepares as in `Strategy`. No rank ever holds more than one whole layer."""
        self.causal_lm = causal_lm = model.causal_lm
        plan = tensor_plan_of(causal_lm.config)
        for unit in units_of(causal_lm):
            weights.fill(causal_lm, unit)
            split(causal_lm, unit, plan, self.model_mesh, self.device)
        causal_lm.tie_weights()
        model.to(self.device)
        if model.from_hidden_states:
            share_head(model, self.model_group)
        self._make_optimizer(model, build_optimizer)
        self.model = AutocastModel(model, self.precision)
        return self.model

    def _make_optimizer(self, model: LanguageModelLoss, build_optimizer: OptimizerBuilder) -> None:
        optimizer = separate_kinds(self.optimizer_of_parameters(build_optimizer))
        plan = tensor_plan_of(self.causal_lm.config)
        prefix = f"{self.causal_lm.base_model_prefix}."
        self.summed = {
            parameter
            for parameter, name in self.name_of.items()
            if style_of(name.removeprefix(prefix).rpartition(".")[0], plan) == SUMMED
        }
        """Replicated parameters whose gradient on each rank comes from that rank's own work only."""
        if model.from_hidden_states:
            self.summed.update(self.causal_lm.get_output_embeddings().parameters())
        self.optimizer = self.accelerator.prepare_optimizer(optimizer, device_placement=False)

    def combine_gradients(self) -> None:
        self.sum_whole_gradients()
        self.average_over_data([gradient for gradient, _ in self.local_gradients()])

    def sum_whole_gradients(self) -> None:
        """Sums the gradients of replicated parameters over the ranks of a group."""
        gradients = {p: p.grad for p in self.name_of if p.grad is not None}
        whole = {
            parameter: gradient.to_local() if isinstance(gradient, DTensor) else gradient
            for parameter, gradient in gradients.items()
            if not (isinstance(gradient, DTensor) and is_split(gradient))
        }
        sum_in_place(list(whole.values()), self.model_group)
        # Other gradients should be equal already, but GPU kernels may sum in any order: replicas must not drift apart.
        torch._foreach_div_([whole[parameter] for parameter in whole.keys() - self.summed], self.model_ranks)

    def local_gradients(self) -> list[tuple[Tensor, bool]]:
        gradients = [parameter.grad for parameter in self.name_of if parameter.grad is not None]
        return [
            (gradient.to_local(), is_split(gradient) or self.reports_loss)
            if isinstance(gradient, DTensor)
            else (gradient, self.reports_loss)
            for gradient in gradients
        ]

    def replicas(self) -> list[ReplicaGroup]:
        """Lists what is not split, over the ranks that share the layers; and everything, over their groups."""
        parts = {n: p.to_local() if isinstance(p, DTensor) else p for p, n in self.name_of.items()}
        split_names = {n for p, n in self.name_of.items() if isinstance(p, DTensor) and is_split(p)}
        groups = [(self.model_group, {name: part for name, part in parts.items() if name not in split_names})]
        return [*groups, (self.data_group, parts)] if self.data_ranks > 1 else groups


class ShardedTensorParallel(TensorParallel):
    """Tensor parallel in groups of ranks, and FSDP2 over the groups: no two ranks hold the same matrix."""

    parameter_form = "tiles"  # DTensors sharded along two dimensions; matrix_exchange supports one

    @classmethod
    def problems(cls, config: RunConfig, name: str) -> list[str]:
        problems = super().problems(config, name)
        if environment_flag("FSDP_OFFLOAD_PARAMS"):
            problems.append("launcher: fsdp_offload_params: does not run under fsdp_tp; use fsdp2, or false")
        return problems

    @classmethod
    def size_problems(cls) -> list[str]:
        """Lists problems as in the base class, and sizes that cannot be combined with this strategy."""
        problems = super().size_problems()
        launched = processes_launched()
        if not problems and parallel_size(cls.size_variable) == launched:
            setting = cls.size_variable.lower()
            problems.append(f"launcher: {setting}: all {launched} processes share a model; that is tp.yaml")
        return problems + uncombined_sizes(cls.size_variable, ("dp_replicate", "cp", "sp"))

    def prepare(
        self, model: LanguageModelLoss, weights: InitialWeights, build_optimizer: OptimizerBuilder
    ) -> torch.nn.Module:
        """Prepares as in `Strategy`. No rank ever holds more than one whole layer."""
        self.causal_lm = causal_lm = model.causal_lm
        plan = tensor_plan_of(causal_lm.config)
        if model.from_hidden_states:
            share_head(model, self.model_group)

        def fill(unit: str) -> None:
            weights.fill(causal_lm, unit)
            split(causal_lm, unit, plan, self.model_mesh, self.device)

        reshards = environment_flag("FSDP_RESHARD_AFTER_FORWARD")
        self.model = shard_layers(model, fill, self.precision, mesh=self.data_mesh, reshards=reshards)
        self.reduces_once = not reshards or self.config.batch.reduce_once
        self._make_optimizer(model, build_optimizer)
        return self.model

    @contextmanager
    def accumulate(self, is_last: bool) -> Iterator[None]:
        with super().accumulate(is_last):
            self.model.set_requires_gradient_sync(is_last or not self.reduces_once)
            self.model.set_is_last_backward(is_last)
            yield

    def combine_gradients(self) -> None:
        self.sum_whole_gradients()  # FSDP2 averages over the groups as it reduces the shards

    def gradient_norm(self) -> Tensor:
        square = super().gradient_norm().square()
        dist.all_reduce(square, group=self.data_group)
        return square.sqrt()

    def copies(self) -> "Holders | None":
        return None

    def replicas(self) -> list[ReplicaGroup]:
        """Lists what is not split, over the ranks that share the layers."""
        return super().replicas()[:1]

    def describe(self) -> dict:
        return {**super().describe(), "reduce_once": self.reduces_once}


class AutocastModel(torch.nn.Module):
    """Model under autocast, for strategies that accelerate does not wrap."""

    def __init__(self, model: torch.nn.Module, precision: str):
        super().__init__()
        self.model = model
        self.precision = precision

    def forward(self, input_ids_BT: Tensor, targets_BT: Tensor, **attention_arguments) -> tuple[Tensor, Tensor]:
        """Returns (loss, cross_entropy) as `LanguageModelLoss`; the loss may be only a share: see `share_head`."""
        with torch.autocast(input_ids_BT.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            return self.model(input_ids_BT, targets_BT, **attention_arguments)


def split(causal_lm: PreTrainedModel, unit: str, plan: Mapping[str, str], mesh: Any, device: torch.device) -> None:
    """Splits the modules inside `unit` that the plan names, and frees the whole ones."""
    module = causal_lm.get_submodule(unit)
    if any(parameter.is_meta for parameter in module.parameters()):
        return  # a tied head, whose weight is the embedding's
    module.to(device)
    inside = unit.removeprefix(f"{causal_lm.base_model_prefix}.")
    styles = {name: style_of(f"{inside}.{name}", plan) for name, _ in module.named_modules() if name}
    for parent in {name.rpartition(".")[0] for name, style in styles.items() if style == "colwise"}:
        module.get_submodule(parent).register_forward_pre_hook(partial(as_one_input, mesh), with_kwargs=True)
    styles = {name: STYLES[style]() for name, style in styles.items() if style in STYLES}
    if styles:
        # Every rank has created the same whole matrices, so none has to be sent.
        parallelize_module(module, mesh, styles, src_data_rank=None)


def as_one_input(mesh: DeviceMesh, module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Turns, as a pre-hook of a module with column-split matrices, its hidden states into one DTensor for all of them.

    Otherwise each matrix would create its own DTensor, and all-reduce its part of the gradient separately. The cast to
    autocast's dtype comes first, so that gradients are communicated in it.
    """

    def shared(x: Tensor) -> DTensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return DTensor.from_local(x, mesh, [Replicate()], run_check=False)

    if args:
        return (shared(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": shared(kwargs["hidden_states"])}


def share_head(model: LanguageModelLoss, group: dist.ProcessGroup) -> list[torch.nn.Parameter]:
    """Makes each rank compute the loss of its part of the tokens, whose hidden states all ranks have.

    The loss is then this rank's share, the cross-entropy that of all tokens. Without gradients each rank computes
    all tokens, since validation records the loss of each (`recording_losses`). Returns the parameters whose
    gradients are shares too, to be summed.
    """
    whole_loss = model.loss_of_hidden
    ranks = dist.get_world_size(group)

    def loss_of_hidden(hidden_BTD: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        if not torch.is_grad_enabled():
            return whole_loss(hidden_BTD, targets_BT)
        targets_N = targets_BT.flatten()
        mine_R = share_of(targets_N, group)
        share = (mine_R != IGNORED).sum() / (targets_N != IGNORED).sum().clamp(min=1)
        loss, cross_entropy = whole_loss(PartOfRows.apply(hidden_BTD.flatten(0, 1), group), mine_R)
        cross_entropy = cross_entropy * share
        dist.all_reduce(cross_entropy, group=group)
        return loss * share, cross_entropy

    def share_gradient(module: torch.nn.Module, args: tuple, looked_up: Tensor) -> None:
        if looked_up.requires_grad:  # every rank looks up all tokens, and the gradients will be summed
            looked_up.register_hook(lambda gradient: gradient / ranks)

    model.loss_of_hidden = loss_of_hidden
    head = model.causal_lm.get_output_embeddings()
    embedding = model.causal_lm.get_input_embeddings()
    if head.weight is embedding.weight:
        embedding.register_forward_hook(share_gradient)
    return list(head.parameters())


def share_of(x_N: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns this rank's rows: equal parts in the order of the ranks, the last perhaps shorter or empty."""
    rows = math.ceil(x_N.shape[0] / dist.get_world_size(group))
    start = min(rows * dist.get_rank(group), x_N.shape[0])
    return x_N[start : start + rows]


class PartOfRows(torch.autograd.Function):
    """Selects `share_of` hidden states that every rank has; each rank's backward pass gets all rows' gradients."""

    @staticmethod
    def forward(ctx, hidden_ND: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.shape = hidden_ND.shape
        ctx.group = group
        return share_of(hidden_ND, group)

    @staticmethod
    def backward(ctx, grad_RD: Tensor) -> tuple[Tensor, None]:
        count, width = ctx.shape
        ranks = dist.get_world_size(ctx.group)
        rows = math.ceil(count / ranks)
        grad_ND = grad_RD.new_empty(ranks * rows, width)
        padded_RD = F.pad(grad_RD, (0, 0, 0, rows - grad_RD.shape[0])).contiguous()
        dist.all_gather_into_tensor(grad_ND, padded_RD, group=ctx.group)
        return grad_ND[:count], None


def is_split(tensor: DTensor) -> bool:
    """Tells if a tensor is split over the ranks that hold a model together, whether or not over others too."""
    names = tensor.device_mesh.mesh_dim_names
    return "model" in names and tensor.placements[names.index("model")].is_shard()


def separate_kinds(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Splits groups with both split and whole parameters in two: fused and foreach kernels accept only one kind."""
    groups = list(optimizer.param_groups)
    optimizer.param_groups.clear()
    for group in groups:
        kinds: dict[DeviceMesh | None, list[Tensor]] = {}
        for parameter in group["params"]:
            kinds.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        optimizer.param_groups += [{**group, "params": parameters} for parameters in kinds.values()]
    return optimizer
