"""Routers in transformers' MoE models, coefficients for their losses, and expert matmuls.

Shapes: E experts, K experts per token.
"""

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _grouped_linear, grouped_mm_experts_forward

from pretrain.config import Loss
from pretrain.errors import InputError, Problems

RECORDED = "router_logits"
"""Key under which transformers' classes declare the modules that return router logits."""
TOP_K = ("top_k", "num_experts_per_tok", "moe_top_k", "moe_topk")
"""Attribute names for K in modules and configurations."""
BIASES = ("e_score_correction_bias", "expert_bias")
"""Attribute names of the balancing bias, as in DeepSeek-V3 (Wang et al., arXiv 2408.15664).

It's added to the scores that choose the experts, but not to the scores that weight their outputs.
"""

BALANCE_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
"""Configuration keys for the balancing loss coefficient, on transformers' scale (see training/experts.py)."""
Z_LOSS_COEFFICIENT = "router_z_loss_coef"
EXPERT_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
TAKEN_OVER = ("num_experts", "has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "_is_expert_parallel")
TAKEN_OVER += ("act_fn", "_apply_gate", "post_expert_norm")


@dataclass(frozen=True)
class Router:
    """A router and the MoE block that contains it."""

    name: str
    module: nn.Module
    block: nn.Module
    """Module with the router and its experts."""
    logits_at: int
    """Index of the logits in the router's output."""


def routers_of(model: nn.Module) -> list[Router]:
    """Returns the routers that the model's classes declare, in model order."""
    specs = list(_declared(model))
    places = {
        name: index
        for name, module in model.named_modules()
        for kind, index, layer_name in specs
        if isinstance(module, kind) and (layer_name is None or f".{layer_name.strip('.')}." in f".{name}.")
    }
    # A block that returns its router's logits may also be declared, so we use the innermost modules.
    innermost = [name for name in places if not any(other.startswith(f"{name}.") for other in places)]
    return [
        Router(name, model.get_submodule(name), model.get_submodule(name.rpartition(".")[0]), places[name])
        for name in innermost
    ]


def _declared(model: nn.Module) -> Iterator[tuple[type, int, str | None]]:
    """Yields (class, index of the logits in its output, part of the module name or None) for each declaration."""
    for module in model.modules():
        # Private, but the only place with the index of the logits in a router's output.
        declared = getattr(module, "_can_record_outputs", None) if isinstance(module, PreTrainedModel) else None
        specs = (declared or {}).get(RECORDED) or []
        for spec in specs if isinstance(specs, list) else [specs]:
            kind = getattr(spec, "target_class", spec)
            if isinstance(kind, type):
                yield kind, getattr(spec, "index", 1), getattr(spec, "layer_name", None)


def experts_per_token(router: Router, config: object) -> int | None:
    """Returns K from the router, its block or the configuration, or None."""
    for owner in (router.module, router.block, config, getattr(config, "ffn_config", None)):
        for name in TOP_K:
            if isinstance(value := getattr(owner, name, None), int):
                return value
    return None


def expert_parameters(router: Router) -> tuple[dict[str, nn.Parameter], int]:
    """Returns ({name in the block: parameter} for all routed experts, E), or ({}, 0) if E is unknown.

    transformers 5 stores a layer's experts in one tensor (E, out, in), or (E x out, in) for dbrx. Older code uses a
    list of modules. Shared experts aren't included.
    """
    inside = {id(parameter) for parameter in router.module.parameters()}
    others = {n: p for n, p in router.block.named_parameters() if id(p) not in inside}
    numbers = {name: found[1] for name in others if (found := re.match(r"experts\.(\d+)\.", name))}
    if numbers:
        return {name: others[name] for name in numbers}, len(set(numbers.values()))
    # With ZeRO-3, parameters are empty, and DeepSpeed stores their shapes in ds_shape.
    shapes = {name: tuple(getattr(parameter, "ds_shape", parameter.shape)) for name, parameter in others.items()}
    experts = getattr(router.module, "num_experts", None) or getattr(router.block, "num_experts", None)
    experts = experts or next((shape[0] for shape in shapes.values() if len(shape) == 3), None)
    experts = experts or getattr(getattr(router.block, "experts", None), "num_experts", None)
    if not isinstance(experts, int):
        return {}, 0
    routed = [
        name
        for name, shape in shapes.items()
        if (len(shape) == 3 and (shape[0] == experts or name.startswith("experts.")))
        or (name.startswith("experts.") and shape[0] % experts == 0)
    ]
    return {name: others[name] for name in routed}, experts


def expert_matrices(model: nn.Module) -> dict[str, tuple[int | None, bool]]:
    """Returns how gate and up projections are combined in each expert tensor (E, rows, columns).

    The result is {name: (matrix dimension along which they are concatenated, or None for a single projection; True if
    they are interleaved along it)}.
    """
    found: dict[str, tuple[int | None, bool]] = {}
    for router in routers_of(model):
        parameters, _ = expert_parameters(router)
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items() if parameter.dim() == 3}
        prefix = f"{router.name.rpartition('.')[0]}."
        for name, shape in shapes.items():
            owner, _, key = name.rpartition(".")
            down = shapes.get(f"{owner}.down_proj")
            experts = router.block.get_submodule(owner)
            dim = None
            if key == "gate_up_proj" and down is not None:
                # (2I, H) and (H, I) or, if transposed, (H, 2I) and (I, H).
                dim = 0 if shape[1] == 2 * down[2] else 1 if shape[2] == 2 * down[1] else None
            found[prefix + name] = (dim, dim is not None and not getattr(experts, "is_concatenated", True))
    return found


def biases_in(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Returns (owner, name) for every router bias in a module, both parameters and buffers."""
    return [
        (owner, name)
        for owner in module.modules()
        for name in BIASES
        if isinstance(getattr(owner, name, None), Tensor)
    ]


def balancing_bias(router: Router) -> Tensor | None:
    """Returns a view (E,) of a router's bias, or None if it has no bias."""
    found = biases_in(router.block)
    return getattr(*found[0]).detach().view(-1) if len(found) == 1 else None


def as_buffers(model: nn.Module) -> None:
    """Converts router biases that are parameters without gradients to buffers with the same names.

    All strategies replicate buffers on every rank, and optimizers ignore them.
    """
    for owner, name in biases_in(model):
        if (parameter := owner._parameters.get(name)) is not None and not parameter.requires_grad:
            del owner._parameters[name]
            owner.register_buffer(name, parameter.detach())


def inactive_parameters(model: PreTrainedModel) -> int:
    """Counts the parameters in the E - K experts that a token isn't routed to."""
    inactive = 0
    for router in [*routers_of(model), *_undeclared(model)]:
        parameters, experts = expert_parameters(router)
        chosen = experts_per_token(router, model.config)
        if experts and chosen is not None:
            total = sum(parameter.numel() for parameter in parameters.values())
            inactive += total * max(0, experts - chosen) // experts
    return inactive


def _undeclared(model: nn.Module) -> list[Router]:
    """Returns routers that the model's classes don't declare, such as deepseek_v4's, which hashes the token."""
    known = {router.block for router in routers_of(model)}
    return [
        Router(name, module, model.get_submodule(name.rpartition(".")[0]), 0)
        for name, module in model.named_modules()
        if hasattr(module, "top_k") and hasattr(module, "num_experts") and "weight" in module._parameters
        if model.get_submodule(name.rpartition(".")[0]) not in known
    ]


@dataclass(frozen=True)
class RouterLosses:
    """Coefficients for router losses, and the bias update rate. All are 0 for a model without routers."""

    routers: int = 0
    balance: float = 0.0
    """Coefficient for the mean balancing loss over the layers."""
    z_loss: float = 0.0
    """Coefficient for mean(logsumexp(router logits)^2), averaged over the layers."""
    bias_rate: float = 0.0
    """Change of an expert's bias per step."""

    def in_words(self) -> dict[str, str]:
        """Formats a row for the startup banner. Returns {} for a model without routers."""
        if not self.routers:
            return {}
        bias = f", bias +- {self.bias_rate:g} per step" if self.bias_rate else ""
        return {"routers": f"{self.routers}, balancing loss x {self.balance:g}, z-loss x {self.z_loss:g}{bias}"}


def router_losses(loss: Loss, model: PreTrainedModel) -> RouterLosses:
    """Returns a run's coefficients from the recipe, or from the model if the recipe doesn't set them.

    Raises InputError if neither contains a balancing coefficient, or if there is no router or bias for the recipe's.
    """
    routers = routers_of(model)
    config = model.config
    if loss.router_bias_rate and (problem := bias_problem(config, routers)):
        raise InputError(problem)
    if not routers:
        has_experts = any("experts" in name.split(".") for name, _ in model.named_parameters())
        if loss.router_balance or loss.router_z_loss or (has_experts and loss.router_balance is None):
            remedy = (
                f"use a newer transformers than {transformers.__version__}, such as 5.23, declare the routers of your "
                "own model with _can_record_outputs (see docs/own_code.md), or train without these losses "
                "(loss.router_balance: 0)"
            )
            raise InputError(
                f"model: {config.model_type} declares no routers, which loss.router_balance and loss.router_z_loss "
                f"need; {remedy if has_experts else 'omit both'}"
            )
        return RouterLosses()
    problems = Problems()
    balance = problems.attempt(balance_coefficient, loss, config)
    if (balance or loss.router_bias_rate) and (unknown := [r.name for r in routers if not is_known(r, config)]):
        problems.append(
            f"model: the router {unknown[0]} of {config.model_type} uses an unknown routing method; "
            "use loss.router_balance: 0 to train without the balancing loss"
        )
    problems.stop_if_any()
    own_z_loss = float(getattr(config, Z_LOSS_COEFFICIENT, None) or 0.0)
    z_loss = own_z_loss if loss.router_z_loss is None else loss.router_z_loss
    return RouterLosses(len(routers), balance, z_loss, loss.router_bias_rate)


def bias_problem(model_config: PreTrainedConfig, routers: Sequence[Router]) -> str | None:
    """Returns an error message unless every router has a bias for loss.router_bias_rate to update."""
    if routers and all(balancing_bias(router) is not None for router in routers):
        return None
    return (
        f"loss.router_bias_rate: {model_config.model_type} has no router bias, unlike deepseek_v3, glm4_moe, dots1 "
        "and ernie4_5_moe; omit it, or balance the experts of an MoE model with loss.router_balance"
    )


def is_known(router: Router, config: PreTrainedConfig) -> bool:
    """Returns True if E and K are known, which is required to track the router's choices."""
    return bool(expert_parameters(router)[1]) and experts_per_token(router, config) is not None


def balance_coefficient(loss: Loss, model_config: PreTrainedConfig) -> float:
    """Returns the balancing loss coefficient. Raises InputError if neither the recipe nor the model sets it."""
    if loss.router_balance is not None:
        return loss.router_balance
    for name in BALANCE_COEFFICIENTS:
        if (own := getattr(model_config, name, None)) is not None:
            return float(own)
    if loss.router_bias_rate:
        return 0.0
    raise InputError(
        f"loss.router_balance: {model_config.model_type} is an MoE model whose configuration has no coefficient for "
        "the balancing loss; set loss.router_balance: 0.001, or 0 to train without it (if the model has a router "
        "bias, you can set loss.router_bias_rate: 0.001 instead)"
    )


class CastExperts:
    """Copy of an experts module's attributes, with cast weights, for transformers' grouped_mm."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype):
        for name in (*TAKEN_OVER, *EXPERT_WEIGHTS, *(f"{weight}_bias" for weight in EXPERT_WEIGHTS)):
            value = getattr(experts, name, None)
            is_weight = isinstance(value, Tensor) and value.is_floating_point()
            setattr(self, name, value.to(dtype) if is_weight else value)


def grouped_mm_in_autocast(
    experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Runs transformers' grouped_mm in autocast's dtype.

    torch.nn.functional.grouped_mm ignores autocast, so the expert matmuls would run in fp32. In compiled code,
    transformers would even use a loop that synchronizes with the device.
    """
    device_type = hidden_states.device.type
    if not torch.is_autocast_enabled(device_type):
        return grouped_experts(experts, hidden_states, top_k_index, top_k_weights)
    dtype = torch.get_autocast_dtype(device_type)
    cast = CastExperts(experts, dtype)
    return grouped_experts(cast, hidden_states.to(dtype), top_k_index, top_k_weights)


class _Rows(torch.autograd.Function):
    """Gathers rows, x[index], where each row occurs equally often.

    inverse: sorts the gathered rows by their row in x. The gradient also gathers rows, while torch would add them to
    zeros, with atomic additions in bf16.
    """

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.rows = len(x)
        return x[index]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad[inverse].unflatten(0, (ctx.rows, -1)).sum(1), None, None


def grouped_experts(
    experts: nn.Module | CastExperts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Computes the same as transformers' grouped_mm, with less memory traffic in the backward pass."""
    # Older versions of transformers don't have the first and the last attribute.
    if any(getattr(experts, name, False) for name in ("_is_expert_parallel", "has_bias", "has_post_expert_norm")):
        return grouped_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
    sorted_ids, order = top_k_index.flatten().sort()
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    sorted_ids = sorted_ids.int() if sorted_ids.is_cuda else sorted_ids.float()  # as histc requires
    ends = torch.histc(sorted_ids, experts.num_experts, 0, experts.num_experts - 1).cumsum(0, dtype=torch.int32)
    rows = _Rows.apply(hidden_states, order // top_k_index.shape[-1], place)
    up = experts.gate_up_proj if experts.has_gate else experts.up_proj
    # transformers has no public function that multiplies each expert's rows with its weights.
    rows = _grouped_linear(rows, up, ends, is_transposed=experts.is_transposed)
    rows = experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows)
    rows = _grouped_linear(rows, experts.down_proj, ends, is_transposed=experts.is_transposed)
    weighted = rows * _Rows.apply(top_k_weights.flatten(), order, place)[:, None]
    summed = _Rows.apply(weighted, place, order).unflatten(0, top_k_index.shape).sum(1)
    return summed.to(hidden_states.dtype)


# This replaces transformers' own function for all MoE models.
ALL_EXPERTS_FUNCTIONS.register("grouped_mm", grouped_mm_in_autocast)
# transformers' torch version checks cause this warning in compiled code.
warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`", category=UserWarning)
