"""Tensor parallelism: each rank holds a slice of every large matrix in the layers, and ranks sum partial results.

Matrices are split according to the model's own plan (transformers' base_model_tp_plan). A column-split matrix needs no
communication. The row-split matrix after it needs one all-reduce of its outputs (Shoeybi et al., arXiv 1909.08053).
The embedding, head and norms are replicated, and each rank computes the loss for its share of the tokens.
"""

import copy
import inspect
import math
import re
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from pretrain.config import RunConfig
from pretrain.mesh_sizes import Sizes
from pretrain.model.attention import IGNORED, autocast_dtype
from pretrain.model.build import once_per_config
from pretrain.model.fp8 import fp8_linear
from pretrain.model.loss import LanguageModelLoss
from pretrain.model.model_config import described
from pretrain.model.small_copy import (
    TOLERANCE,
    KeyedConfig,
    ReferenceWindow,
    one_thread,
    reference_of,
    relative_difference,
)
from pretrain.optim.matrix_exchange import gather_flat
from pretrain.parallel.dimension import Dimension
from pretrain.parallel.mesh_tiles import divided_axes
from pretrain.parallel.replicas import ReplicaGroup

MATRIX_DIMENSION = {"colwise": 0, "rowwise": 1}
"""{style: dimension along which a linear layer's (outputs, inputs) weight is split}"""
SUMMED = "replicated_with_grad_allreduce"
"""Style of a norm that is replicated but only sees this rank's heads, so its gradient needs an all-reduce."""


EXPERTS = re.compile(r"(^|\.)experts(\.|$)")
"""Matches the module and parameter names of stacked experts. Shared experts are plain matrices."""


class TensorParallel(Dimension):
    """The tensor-parallel (tp) dimension of a mesh."""

    repeats_loss = True

    @classmethod
    def recipe_problems(cls, config: RunConfig, sizes: Sizes) -> list[str]:
        problems = []
        if config.optim.name == "adamw_8bit":
            problems.append(
                "optim.name: adamw_8bit is not supported with tp: tp splits matrices by columns, but each scale "
                "covers 256 consecutive elements of a row; use adamw, or adamw_8bit with "
                "dp_shard, dp_replicate, cp, pp or ep"
            )
        return problems

    @classmethod
    def model_problem(cls, model_config: PreTrainedConfig, sizes: Sizes, schedule: str) -> str | None:
        return plan_problem(model_config, sizes.tp, splits_experts=sizes.ep == 1) or input_problem(model_config)

    def before_sharding(self, model: LanguageModelLoss) -> None:
        if model.from_hidden_states:
            share_head(model, self.group)
        if model.terms is not None:
            model.terms.ranks = self.strategy.sizes.tp

    def divide(self, unit: str, module: nn.Module) -> None:
        strategy = self.strategy
        mesh = strategy.mesh.dense["tp"]
        split_unit(strategy.causal_lm, unit, mesh, strategy.device, splits_experts=strategy.sizes.ep == 1)

    def after_sharding(self, model: LanguageModelLoss, called: nn.Module) -> None:
        causal_lm = model.causal_lm
        name_of = self.strategy.name_of
        plan = tensor_plan_of(causal_lm.config)
        prefix = f"{causal_lm.base_model_prefix}."
        self.shares = {
            parameter
            for parameter, name in name_of.items()
            if style_of(name.removeprefix(prefix).rpartition(".")[0], plan) == SUMMED
        }
        """Replicated parameters for which each rank has only its share of the gradient."""
        if model.from_hidden_states:
            # A copied head's gradient is added to the embedding's, so each rank only has its share of that, too.
            head = causal_lm.get_output_embeddings()
            sharing = causal_lm.get_input_embeddings() if self.strategy.copying is head else head
            self.shares.update(parameter for parameter in sharing.parameters() if parameter in name_of)
        self.whole = [
            parameter
            for parameter in name_of
            if not any(parameter.device_mesh.mesh_dim_names[axis] in ("tp", "ep") for axis in divided_axes(parameter))
        ]
        """Parameters that are unsharded, or have the same shard on all tp ranks."""

    def combine(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        whole = {parameter: gradients[parameter] for parameter in self.whole if parameter in gradients}
        self.strategy.sum_gradients(list(whole.values()), self.group)
        # The other gradients should already be equal, but GPU kernels may sum in any order, so we average them to keep
        # the replicas identical.
        others = [grad for parameter, grad in whole.items() if parameter not in self.shares]
        if others:
            torch._foreach_div_(others, self.strategy.sizes.tp)

    def replicas(self, parts: dict[str, Tensor]) -> list[ReplicaGroup]:
        names = [self.strategy.name_of[parameter] for parameter in self.whole]
        return [(self.group, {name: parts[name] for name in names})]


def tensor_plan_of(model_config: Any) -> dict[str, str]:
    """Returns the model's plan as {pattern for module names in the base model: style}, or {} if it has none."""
    plan = dict(getattr(model_config, "base_model_tp_plan", None) or {})
    plan.pop("embed_tokens", None)  # transformers 5.17 adds tied embeddings, which we replicate
    return plan


def style_of(name: str, plan: Mapping[str, str]) -> str | None:
    """Returns the style for a module name, or None. `*` in a pattern matches a layer index."""
    return next((style for pattern, style in plan.items() if re.fullmatch(pattern.replace("*", r"\d+"), name)), None)


def plan_problem(model_config: PreTrainedConfig, size: int, *, splits_experts: bool = True) -> str | None:
    """Returns an error message if the model's plan or sizes don't allow `size` ranks, otherwise None.

    splits_experts: True if tp also splits the experts, which it does if ep = 1.
    """
    plan = tensor_plan_of(model_config)
    unknown = sorted({style for name, style in plan.items() if not EXPERTS.search(name)} - {*MATRIX_DIMENSION, SUMMED})
    if not plan or unknown:
        found = ", ".join(unknown) or "no matrices"
        return (
            f"model: {model_config.model_type} does not support tp: its tensor-parallel plan has {found}; use fsdp2, "
            "or an architecture whose plan only contains colwise and rowwise matrices, such as llama, qwen3, mistral "
            "or deepone"
        )
    heads = getattr(model_config, "num_attention_heads", None)
    dimensions = {
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(model_config, "num_key_value_heads", None) or heads,
    }
    for name in ("intermediate_size", "shared_expert_intermediate_size"):
        if getattr(model_config, name, None):
            dimensions[name] = getattr(model_config, name)
    if splits_experts and any(EXPERTS.search(name) for name in plan):
        width = getattr(model_config, "moe_intermediate_size", None)
        dimensions["moe_intermediate_size"] = width or dimensions.get("intermediate_size")
    if unfit := [name for name, value in dimensions.items() if not isinstance(value, int)]:
        return (
            f"model: {model_config.model_type} does not support tp: its layers differ in "
            f"{' and '.join(unfit)}; use fsdp2"
        )
    if any(value % size for value in dimensions.values()):
        works = [str(n) for n in range(2, heads + 1) if all(value % n == 0 for value in dimensions.values())]
        shape = ", ".join(f"{name} {value}" for name, value in dimensions.items())
        return (
            f"model: {shape} must all be divisible by {size}, the number of tensor-parallel processes; "
            f"{', '.join(works) + ' would work' if works else 'no number would work; use another strategy'}"
        )
    return None


@once_per_config
@one_thread()
def input_problem(model_config: PreTrainedConfig) -> str | None:
    """Returns an error message if the model's code can't be split according to its plan, otherwise None.

    Matrices must be plain linear layers. The tensor passed on by `share_input` must have no other uses, because their
    gradients would be summed over the ranks as well. To detect other uses, a small copy doubles the gradient where tp
    would sum it, and halves it at each column-split matrix. Without other uses, the gradients don't change. Raises
    the same errors as `reference_of`.
    """
    model = copy.deepcopy(reference_of(KeyedConfig.of(model_config)))
    plan = tensor_plan_of(model_config)
    matrices = {}
    for name, module in model.base_model.named_modules():
        style = style_of(name, plan)
        if style not in MATRIX_DIMENSION or EXPERTS.search(name):
            continue
        matrices[name] = style
        if type(module).forward is not nn.Linear.forward:
            return (
                f"model: {model_config.model_type} does not support tp: {name} in its tensor-parallel plan is "
                f"{type(module).__name__}, not nn.Linear; use fsdp2 or pp"
            )
    ids_BT = ReferenceWindow.of(model.config).inputs_BT
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def gradients() -> list[Tensor]:
        logits = model(input_ids=ids_BT, use_cache=False).logits
        every = torch.autograd.grad(logits.float().square().mean(), parameters, allow_unused=True)
        return [gradient for gradient in every if gradient is not None]

    wanted = gradients()
    for parent in parents_of_columns(matrices):
        share_input(model.base_model.get_submodule(parent), lambda x: with_scaled_gradient(x, 2.0))
    for name, style in matrices.items():
        if style == "colwise":
            halve = lambda _, args: with_scaled_gradient(args[0], 0.5)  # noqa: E731
            model.base_model.get_submodule(name).register_forward_pre_hook(halve)
    try:
        found = gradients()
    except Exception as error:  # model code may pass its hidden states in any way
        return f"model: {model_config.model_type} does not support tp ({described(error)}); use fsdp2 or pp"
    differences = [relative_difference(*pair) for pair in zip(found, wanted, strict=True)]
    if max(differences) <= TOLERANCE:
        return None
    return (
        f"model: {model_config.model_type} does not support tp: the inputs of its column-split matrices are also "
        "used elsewhere, so those gradients would be counted once per process; use fsdp2 or pp"
    )


def split_unit(
    causal_lm: PreTrainedModel,
    unit: str,
    mesh: DeviceMesh,
    device: torch.device,
    *,
    splits_experts: bool,
) -> None:
    """Splits the matrices in `unit` according to the model's plan, and frees the full matrices.

    splits_experts: see `plan_problem`.
    """
    module = causal_lm.get_submodule(unit)
    if any(parameter.is_meta for parameter in module.parameters()):
        return  # a tied head uses the embedding's weight
    module.to(device)
    plan = tensor_plan_of(causal_lm.config)
    inside = unit.removeprefix(f"{causal_lm.base_model_prefix}.")
    # Split parameters before modules: functions that replace a module's forward pass read its split parameters.
    names = [*(name for name, _ in module.named_parameters()), *(name for name, _ in module.named_modules())]
    styles = {name: style for name in names if (style := style_of(f"{inside}.{name}", plan))}
    experts = {name: styles.pop(name) for name in list(styles) if EXPERTS.search(name)}
    group = mesh.get_group().group_name
    for parent in parents_of_columns(styles):
        share_input(module.get_submodule(parent), lambda x: SumOfGradients.apply(x, group))
    for name, style in styles.items():
        if style in MATRIX_DIMENSION:
            split_linear(module.get_submodule(name), style, mesh)
    if splits_experts and experts:
        # transformers 5.17 reads the plan from the module.
        module.tp_plan = experts
        takes_plan = "tp_plan" in inspect.signature(apply_tensor_parallelism).parameters
        apply_tensor_parallelism(module, mesh, *([experts] if takes_plan else []))


def split_linear(linear: nn.Linear, style: str, mesh: DeviceMesh) -> None:
    """Replaces a linear layer's weight and bias with this rank's slices, used as plain tensors in the forward pass.

    fully_shard and checkpoints require the parameters to be DTensors. But on the CPU, dispatching an operator on
    DTensors takes several times as long as the operator itself.
    """
    for name, parameter in list(linear.named_parameters()):
        is_whole = style == "rowwise" and name == "bias"
        placement = Replicate() if is_whole else Shard(MATRIX_DIMENSION[style] if name == "weight" else 0)
        # All ranks have initialized the same full matrix, so nothing needs to be sent.
        slice_ = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        setattr(linear, name, nn.Parameter(slice_, requires_grad=parameter.requires_grad))
    # These must be bound methods. torch.compile compares other callables by identity, so it would compile every layer
    # separately and give up after the eighth.
    linear.forward = MethodType(project if style == "colwise" else project_and_sum, linear)
    linear.tp_group_name = mesh.get_group().group_name


def product(linear: nn.Linear, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiplies by this rank's slice, and adds the bias.

    In fp8, each rank scales its slices of the weight, inputs and gradients by their own largest values, which are at
    most those of the whole tensors. So the slices are rounded at least as precisely as with one process.
    """
    weight = linear.weight.to_local()
    is_fp8 = hasattr(linear, "linear_mm_config")
    return fp8_linear(linear, x, weight, bias) if is_fp8 else F.linear(x, weight, bias)


def project(linear: nn.Linear, x: Tensor) -> Tensor:
    """Computes this rank's slice of the outputs."""
    return product(linear, x, None if linear.bias is None else linear.bias.to_local())


def project_and_sum(linear: nn.Linear, x: Tensor) -> Tensor:
    """Multiplies by this rank's slice, and all-reduces the partial outputs."""
    out = Sum.apply(product(linear, x), linear.tp_group_name)
    return out if linear.bias is None else out + linear.bias.to_local().to(out.dtype)


class Sum(torch.autograd.Function):
    """All-reduces a tensor. The gradient, which is equal on all ranks, passes through unchanged."""

    @staticmethod
    def forward(ctx, x: Tensor, group: str) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class SumOfGradients(torch.autograd.Function):
    """Passes a replicated tensor through unchanged, and all-reduces its gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group), None


def with_scaled_gradient(x: Tensor, factor: float) -> Tensor:
    """Returns the tensor unchanged, but scales its gradient."""
    x = x.view_as(x)
    x.register_hook(lambda gradient: gradient * factor)
    return x


def all_reduce(x: Tensor, group: str) -> Tensor:
    # This private operator works with torch.compile.
    summed = torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", group)
    return torch.ops._c10d_functional.wait_tensor(summed)


def parents_of_columns(styles: Mapping[str, str | None]) -> list[str]:
    """Returns the names of modules whose children include column-split matrices."""
    return sorted({name.rpartition(".")[0] for name, style in styles.items() if style == "colwise"})


def share_input(module: nn.Module, pass_on: Callable[[Tensor], Tensor]) -> None:
    """Applies a function to a module's hidden states, once for all of its column-split matrices.

    Otherwise, each matrix would all-reduce its gradient separately. The hidden states are cast to autocast's dtype
    first, so that the gradient is sent in that dtype. `input_problem` rejects models that this would break.
    """

    def replace_input(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        x = args[0] if args else kwargs["hidden_states"]
        x = pass_on(x.to(autocast_dtype(x)))
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})

    module.register_forward_pre_hook(replace_input, with_kwargs=True)


def share_head(model: LanguageModelLoss, group: dist.ProcessGroup) -> None:
    """Makes each rank compute the loss only for its share of the tokens, although all ranks have all hidden states.

    The loss and the head's gradient are this rank's share, but the returned cross-entropy is for all tokens. Without
    gradients, each rank computes the loss for all tokens, because validation records per-token losses
    (`recording_losses`).
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

    def share_gradient(module: nn.Module, args: tuple, looked_up: Tensor) -> None:
        # Every rank looks up all tokens, and the gradients are summed over the ranks later. Lookups in loss terms
        # already have only their share of the gradient.
        if looked_up.requires_grad and module.weight.is_leaf:
            looked_up.register_hook(lambda gradient: gradient / ranks)

    model.loss_of_hidden = loss_of_hidden
    head = model.causal_lm.get_output_embeddings()
    embedding = model.causal_lm.get_input_embeddings()
    if head.weight is embedding.weight:
        embedding.register_forward_hook(share_gradient)


def share_of(x_N: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns this rank's rows. All ranks get the same number, except that the last ones may get fewer or none."""
    rows = math.ceil(x_N.shape[0] / dist.get_world_size(group))
    start = min(rows * dist.get_rank(group), x_N.shape[0])
    return x_N[start : start + rows]


class PartOfRows(torch.autograd.Function):
    """Selects this rank's rows of the hidden states (`share_of`). The backward pass gathers all rows' gradients."""

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
        gather_flat(grad_ND, padded_RD, ctx.group)
        return grad_ND[:count], None


def sum_in_place(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Sums each tensor over the group, with a single collective. With NCCL, this doesn't copy the tensors."""
    if tensors:
        group.allreduce_coalesced(tensors).wait()
