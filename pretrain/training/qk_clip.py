"""QK-clip: limits attention logits by scaling query and key weights per head (MuonClip; Kimi K2, arXiv 2507.20534,
section 2.1).

If a head's largest logit m in a step exceeds tau, its query and key weights and biases are each multiplied by
sqrt(tau / m) after the update. If several query heads share a key head, the key head is scaled only by the largest of
their factors, and each query head by the remaining factor, so the logits of heads below tau don't change.

The training forward passes record the largest logits (`model.largest_logits`).

Shapes: L layers with attention, H query heads, G key heads, N query heads per key head.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from pretrain.model.build import copy_model, once_per_config, transposed_names
from pretrain.model.largest_logits import RECORD
from pretrain.model.small_copy import (
    TOLERANCE,
    KeyedConfig,
    ReferenceWindow,
    logits_of,
    one_thread,
    reference_of,
    relative_difference,
)
from pretrain.optim.optimizers import local_tensor
from pretrain.optim.tiles import take, tile_of, whole_tile
from pretrain.parallel.strategy import Strategy

ATTENTIONS = ("groundwork_sdpa", "groundwork_eager", "groundwork_fa2", "groundwork_fa3")
"""Supported attentions, whose masks depend only on documents and windows."""
FUSED = ("c_attn", "qkv_proj")
"""Names of fused projections, with outputs in the order queries, keys, values."""
OBSERVING = "groundwork_observing"
"""Name of the attention that records a small copy's queries and keys."""


@dataclass(frozen=True)
class HeadRows:
    """Location of the concatenated query or key heads in a parameter."""

    parameter: str
    of_query: bool
    dim: int
    """Output dimension."""
    first: int
    """Index of the first output."""
    width: int
    """Number of outputs per head."""


def head_rows(causal_lm: PreTrainedModel) -> dict[str, list[HeadRows]]:
    """Returns {attention module: locations of its query and key heads}, for known layouts."""
    heads, key_heads = heads_of(causal_lm.config)
    transposed = transposed_names(causal_lm)
    found: dict[str, list[HeadRows]] = {}
    for name, module in causal_lm.named_modules() if heads else ():
        children = dict(module.named_children())
        fused = next((child for child in FUSED if child in children), None)
        matrices = [fused, fused] if fused else ["q_proj", "k_proj"]
        if not children.keys() >= set(matrices):
            continue
        weights = [f"{name}.{child}.weight" for child in matrices]
        outputs = [causal_lm.get_parameter(weight).shape[weight in transposed] for weight in weights]
        widths = [size // (heads + 2 * key_heads) for size in outputs]
        if not fused:
            widths = [outputs[0] // heads, outputs[1] // key_heads]
        if widths[0] != widths[1]:  # such as queries fused with a gate
            continue
        found[name] = [
            HeadRows(
                f"{name}.{child}.{kind}",
                of_query=of_query,
                dim=int(weight in transposed and kind == "weight"),
                first=heads * widths[0] if fused and not of_query else 0,
                width=widths[0],
            )
            for child, weight, of_query in zip(matrices, weights, (True, False), strict=True)
            for kind, _ in children[child].named_parameters(recurse=False)
        ]
    return found


def heads_of(config: PreTrainedConfig) -> tuple[int, int]:
    """Returns (query heads, key heads) per layer; (0, 0) if layers differ or have no heads."""
    heads = getattr(config, "num_attention_heads", None)
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    return (heads, key_heads) if isinstance(heads, int) and isinstance(key_heads, int) else (0, 0)


def factors_of(largest_H: Tensor, tau: float, key_heads: int) -> tuple[Tensor, Tensor]:
    """Returns scaling factors for queries (..., H) and keys (..., G). largest_H: (..., H)."""
    factor_H = torch.where(largest_H > tau, tau / largest_H, 1.0)
    factor_GN = factor_H.unflatten(-1, (key_heads, -1))
    key_G = factor_GN.amax(-1).sqrt()
    return (factor_GN / key_G[..., None]).flatten(-2), key_G


def scale_heads(parameter: nn.Parameter, rows: HeadRows, factors: Tensor) -> None:
    """Multiplies each head's outputs, in this rank's shard of the parameter, by the head's factor."""
    local = local_tensor(parameter)
    each = torch.ones(parameter.shape[rows.dim], device=factors.device)
    each[rows.first : rows.first + len(factors) * rows.width] = factors.repeat_interleave(rows.width)
    tile = tile_of(parameter) if isinstance(parameter, DTensor) else whole_tile(parameter.shape)
    mine = take(each, (tile[rows.dim],)).to(local.device)
    local.mul_(mine[:, None] if local.dim() == 2 and rows.dim == 0 else mine)


class QkClip:
    """QK-clip for the model in training. Has no state between steps.

    Args:
        causal_lm: the model, after `record_largest_logits` and `Strategy.prepare`, before compilation.
        tau: maximum logit.
    """

    def __init__(self, causal_lm: PreTrainedModel, strategy: Strategy, tau: float):
        self.strategy = strategy
        self.tau = tau
        self.heads, self.key_heads = heads_of(causal_lm.config)
        self.parameter_of = {name: parameter for parameter, name in strategy.name_of.items()}
        """{name: parameter} updated by this rank."""
        rows = head_rows(causal_lm)
        self.layers = len(rows)
        self.here: dict[int, tuple[nn.Module, list[HeadRows]]] = {}
        """{layer on this rank: (attention module, locations of its heads)}."""
        for number, (name, of_layer) in enumerate(rows.items()):
            if of_layer[0].parameter in self.parameter_of:
                module = causal_lm.get_submodule(name)
                setattr(module, RECORD, torch.empty(self.heads // strategy.head_parts, device=strategy.device))
                self.here[number] = (module, of_layer)

    def attach(self) -> None:
        """Registers the step callbacks with the strategy."""
        self.strategy.before_step += (self.begin_step,)
        self.strategy.after_update += (self.end_step,)

    def begin_step(self, micro_steps: int) -> None:
        """Clears the recorded logits."""
        for module, _ in self.here.values():
            getattr(module, RECORD).fill_(-torch.inf)

    @torch.no_grad()
    def end_step(self, skipped: Tensor) -> None:
        """Scales heads whose logits exceed tau on any rank, unless the update was skipped."""
        largest_LH = torch.full((self.layers, self.heads), -torch.inf, device=self.strategy.device)
        for number, (module, _) in self.here.items():
            record = getattr(module, RECORD)
            largest_LH[number].narrow(0, self.strategy.head_part * len(record), len(record)).copy_(record)
        if self.strategy.ranks.count > 1:
            dist.all_reduce(largest_LH, op=dist.ReduceOp.MAX)
        largest_LH = torch.where(skipped.to(largest_LH.device).bool(), 0.0, largest_LH)
        of_queries, of_keys = factors_of(largest_LH, self.tau, self.key_heads)
        for number, (_, of_layer) in self.here.items():
            for rows in of_layer:
                scale_heads(
                    self.parameter_of[rows.parameter], rows, (of_queries if rows.of_query else of_keys)[number]
                )


def qk_clip_problem(model_config: PreTrainedConfig, attention: str) -> str | None:
    """Tests QK-clip on a small copy of the model. Returns an error message, or None.

    Raises the InputErrors of `reference_of`.
    """
    if attention not in ATTENTIONS:
        return (
            f"optim.muon.qk_clip: does not support the attention {attention}, whose masks it cannot reproduce; use "
            "attention: auto, sdpa or eager if the model supports it, or qk_clip: null"
        )
    return _scaling_problem(model_config)


@once_per_config
@one_thread()
def _scaling_problem(model_config: PreTrainedConfig) -> str | None:
    reference = reference_of(KeyedConfig.of(model_config))
    model_type = model_config.model_type
    observed: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def observing(module, query, key, value, mask, **arguments):
        from pretrain.parallel.context_parallel import without_cap

        observed[module] = (query, key)
        return without_cap(module, query, key, value, mask, **arguments)

    AttentionInterface.register(OBSERVING, observing)
    model = copy_model(reference, attention=OBSERVING)
    ids_BT = ReferenceWindow.of(model.config).inputs_BT
    logits_of(model, ids_BT)
    heads, key_heads = heads_of(model.config)
    places = {model.get_submodule(name): rows for name, rows in head_rows(model).items()}
    advice = "use qk_clip: null, or an architecture such as llama, qwen2, mistral or gpt2"
    if unknown := [type(module).__name__ for module in observed if module not in places]:
        return f"optim.muon.qk_clip: {model_type}: no query and key weights found in {unknown[0]}; {advice}"
    if not observed or not heads:
        return (
            f"optim.muon.qk_clip: {model_type} has no supported attention, or its layers have different numbers of "
            f"heads; {advice}"
        )
    parameters = dict(model.named_parameters())
    for module in list(observed):
        query, key = observed[module]  # from the last pass
        of_queries = torch.linspace(0.5, 0.9, heads)
        of_keys = torch.linspace(0.6, 0.8, key_heads)
        with torch.no_grad():
            for rows in places[module]:
                scale_heads(parameters[rows.parameter], rows, of_queries if rows.of_query else of_keys)
        logits_of(model, ids_BT)
        found = observed[module]
        wanted = (query * of_queries[:, None, None], key * of_keys[:, None, None])
        if max(relative_difference(*pair) for pair in zip(found, wanted, strict=True)) > TOLERANCE:
            reason = "computes queries and keys that do not scale with their weights (it may normalize them)"
            return f"optim.muon.qk_clip: {model_type} {reason}; {advice}"
    return None
