"""Tensor parallel: each rank holds a slice of every large matrix of the layers, and ranks sum their partial results.

It follows the model's own plan (transformers' base_model_tp_plan) with torch's parallelize_module: a matrix split by
columns needs nothing from other ranks, the following one, split by rows, one all-reduce of its outputs (Shoeybi et
al., arXiv 1909.08053). Embedding, head and norms are replicated; each rank computes the loss of its part of the
tokens.
"""

import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from pretrain.model.attention import IGNORED
from pretrain.model.loss import LanguageModelLoss

STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
SUMMED = "replicated_with_grad_allreduce"
"""Style of a norm inside a split part: replicated, but each rank only has the gradient of its own heads."""


EXPERTS = re.compile(r"(^|\.)experts(\.|$)")
"""Finds a layer's stacked experts in names of modules and parameters; shared experts are plain matrices."""


def tensor_plan_of(model_config: Any) -> dict[str, str]:
    """Returns the model's plan, {pattern of a module's name in the base model: style}; empty if it has none."""
    return dict(getattr(model_config, "base_model_tp_plan", None) or {})


def style_of(name: str, plan: Mapping[str, str]) -> str | None:
    """Returns the style for the module of this name; `*` in a pattern matches a layer's index."""
    return next((style for pattern, style in plan.items() if re.fullmatch(pattern.replace("*", r"\d+"), name)), None)


def plan_problem(model_config: Any, size: int, *, splits_experts: bool = True) -> str | None:
    """Returns why this model cannot be split over `size` ranks, with what works; None if it can."""
    plan = tensor_plan_of(model_config)
    unknown = sorted({style for name, style in plan.items() if not EXPERTS.search(name)} - {*STYLES, SUMMED})
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
    if splits_experts and any(EXPERTS.search(name) for name in plan):
        width = getattr(model_config, "moe_intermediate_size", None)
        dimensions["moe_intermediate_size"] = width or dimensions["intermediate_size"]
    if any(value % size for value in dimensions.values()):
        works = [str(n) for n in range(2, heads + 1) if all(value % n == 0 for value in dimensions.values())]
        shape = ", ".join(f"{name} {value}" for name, value in dimensions.items())
        return (
            f"model: {shape} cannot all be divided by {size} tensor-parallel processes; "
            f"{', '.join(works) + ' can be used' if works else 'no number can: use another strategy'}"
        )
    return None


def split_unit(
    causal_lm: PreTrainedModel,
    unit: str,
    plan: Mapping[str, str],
    mesh: DeviceMesh,
    device: torch.device,
    *,
    splits_experts: bool,
) -> None:
    """Splits what the plan names inside `unit`, and frees the whole matrices; experts only if nothing else divides
    them."""
    split(causal_lm, unit, {name: style for name, style in plan.items() if not EXPERTS.search(name)}, mesh, device)
    if not splits_experts:
        return
    module = causal_lm.get_submodule(unit)
    inside = unit.removeprefix(f"{causal_lm.base_model_prefix}.")
    # Parameters first: the functions that replace a module's forward pass read what splitting leaves.
    names = [*(name for name, _ in module.named_parameters()), *(name for name, _ in module.named_modules())]
    styles = {name: style_of(f"{inside}.{name}", plan) for name in names if EXPERTS.search(name)}
    if styles := {name: style for name, style in styles.items() if style}:
        apply_tensor_parallelism(module, mesh, styles)


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


def sum_in_place(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Sums each tensor over the ranks of the group, all in one collective; on a GPU without a copy."""
    if tensors:
        group.allreduce_coalesced(tensors).wait()
