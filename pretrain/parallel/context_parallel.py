"""Context parallelism: each rank holds a chunk of every sequence, and computes attention for some of the heads.

All layers except attention process positions independently, so a rank only needs its own positions. For attention, an
all-to-all gives each rank all positions for its share of the heads, and a second all-to-all returns the outputs
(Ulysses, Jacobs et al., arXiv 2309.14509). Any attention implementation works in between, including sliding windows
and documents that cross rank boundaries. docs/long_context.md compares this method with gathering keys and values.

Shapes: B sequences, T positions in a full sequence, P positions on this rank, N ranks per group, H query heads, G key
heads, E head dimension.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pretrain.config import RunConfig, WindowSpec
from pretrain.errors import InputError
from pretrain.mesh_sizes import Sizes, setting
from pretrain.model.attention import in_one_dtype, model_inputs, sdpa
from pretrain.model.build import copy_model, once_per_config
from pretrain.model.loss import LanguageModelLoss
from pretrain.model.model_config import described
from pretrain.model.small_copy import (
    END_OF_DOCUMENT,
    TOLERANCE,
    KeyedConfig,
    ReferenceWindow,
    logits_of,
    one_thread,
    reference_of,
    relative_difference,
)
from pretrain.parallel.dimension import Dimension

PER_HEAD = ("s_aux", "position_bias")
"""Attention arguments with one value per head or per pair of positions."""
EXCHANGING = "groundwork_exchanging"
"""Name under which `exchanging` is registered."""
FOLDED = "groundwork_folded"
"""Prefix of the names under which `folded` is registered, one for each number of chunks."""

Attention = Callable[..., tuple[Tensor, Tensor | None]]
"""Attention function with transformers' attention interface."""


class ContextParallel(Dimension):
    """The context-parallel (cp) dimension of a mesh."""

    @classmethod
    def recipe_problems(cls, config: RunConfig, sizes: Sizes) -> list[str]:
        length = config.data.sequence_length
        if length % sizes.cp == 0:
            return []
        below = length // sizes.cp * sizes.cp
        return [
            f"data.sequence_length: {length:,} cannot be split into {sizes.cp} equal chunks; "
            f"nearest: {f'{below:,} or ' if below else ''}{below + sizes.cp:,}"
        ]

    @classmethod
    def model_problem(cls, model_config: PreTrainedConfig, sizes: Sizes, schedule: str) -> str | None:
        return mixing_problem(model_config) or heads_problem(model_config, sizes.cp, sizes.tp)

    def before_sharding(self, model: LanguageModelLoss) -> None:
        parts = self.strategy.sizes.cp
        group = self.group.group_name
        inside = [module for module in model.loss_terms.modules() if isinstance(module, PreTrainedModel)]
        for attending in (model.causal_lm, *inside):
            exchange_heads(attending, parts, group)
        if model.terms is not None:
            model.terms.sequences = PartsOfSequences(self.strategy.part, parts, group)

    def after_sharding(self, model: LanguageModelLoss, called: nn.Module) -> None:
        cut = functools.partial(part_of_batch, self.strategy.part, self.strategy.sizes.cp)
        called.register_forward_pre_hook(cut, with_kwargs=True)


def heads_problem(model_config: PreTrainedConfig, parts: int, tp: int = 1) -> str | None:
    """Returns an error message if this model's heads can't be split across the ranks, otherwise None."""
    heads = getattr(model_config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return (
            f"model: {model_config.model_type} does not support cp: num_attention_heads is {heads}, must be one "
            "number for all layers; use fsdp2"
        )
    key_heads = getattr(model_config, "num_key_value_heads", None) or heads
    if heads % tp or key_heads % tp:
        return None  # reported by tp
    heads, key_heads = heads // tp, key_heads // tp
    if divides(heads, key_heads, parts):
        return None
    works = [str(n) for n in range(2, heads + 1) if divides(heads, key_heads, n)]
    remedy = f"valid values for {setting('cp')}: {', '.join(works)}" if works else "use fsdp2"
    left = " per tp rank" if tp > 1 else ""
    return (
        f"model: {heads} query heads and {key_heads} key-value heads{left} cannot be split across {parts} "
        f"context-parallel processes; {remedy}"
    )


def divides(heads: int, key_heads: int, parts: int) -> bool:
    """Returns True if the ranks can split the query heads evenly, and either split or share the key heads evenly."""
    return heads % parts == 0 and (key_heads % parts == 0 or parts % key_heads == 0)


def part_of_batch(part: int, parts: int, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Slices a batch to this rank's positions. Registered as a forward pre-hook of `LanguageModelLoss`.

    Attention arguments aren't sliced, because attention runs on full sequences.
    """
    batch = {**dict(zip(("input_ids_BT", "targets_BT"), args, strict=False)), **kwargs}
    length = batch["input_ids_BT"].shape[1] // parts
    if "position_ids" not in batch:
        batch["position_ids"] = torch.arange(parts * length, device=batch["input_ids_BT"].device)[None]
    mine = slice(part * length, (part + 1) * length)
    cut = {name: batch[name][:, mine].contiguous() for name in ("input_ids_BT", "targets_BT", "position_ids")}
    return (), {**batch, **cut}


@dataclass(frozen=True)
class PartsOfSequences:
    """Sequences split across ranks, for loss terms; see `loss_terms.Sequences`."""

    part: int
    parts: int
    group: str

    def whole(self, values_BP: Tensor) -> Tensor:
        """Gathers (B, T, ...) from all ranks (a differentiable collective)."""
        sent_NBP = values_BP.expand(self.parts, *values_BP.shape)
        return exchange(sent_NBP, self.parts, self.group).transpose(0, 1).flatten(1, 2)

    def own(self, values_BT: Tensor) -> Tensor:
        length = values_BT.shape[1] // self.parts
        return values_BT.narrow(1, self.part * length, length)


def exchange_heads(causal_lm: PreTrainedModel, parts: int, group: str) -> None:
    """Makes attention run on full sequences, although the model's inputs are chunks.

    group: name of the process group, for torch's functional collectives.

    Raises InputError for transformers' built-in attention, whose masks would treat a chunk as a full sequence.
    """
    name = causal_lm.config._attn_implementation  # private, but there is no public equivalent
    if name in ("sdpa", "eager"):
        raise InputError(
            f"model: {causal_lm.config.model_type} does not support cp, because it only works with transformers' "
            f"{name} attention, which would treat each chunk as a full sequence; use fsdp2 or another architecture"
        )
    AttentionInterface.register(EXCHANGING, functools.partial(exchanging, ALL_ATTENTION_FUNCTIONS[name], parts, group))
    causal_lm.set_attn_implementation(EXCHANGING)


def exchanging(
    attend: Attention,
    parts: int,
    group: str,
    module: nn.Module,
    query_BHPE: Tensor,
    key_BGPE: Tensor,
    value_BGPE: Tensor,
    attention_mask: Any,
    **kwargs,
) -> tuple[Tensor, None]:
    """Exchanges heads for positions, calls `attend` on full sequences, and reverses the exchange."""
    refuse_per_head(kwargs)
    query_BHPE, key_BGPE, value_BGPE = in_one_dtype(query_BHPE, key_BGPE, value_BGPE)
    copies = max(1, parts // key_BGPE.shape[1])  # with fewer key heads than ranks, some ranks share one
    if copies > 1:
        key_BGPE, value_BGPE = (x.repeat_interleave(copies, dim=1) for x in (key_BGPE, value_BGPE))
    out_BTHE, _ = attend(module, *to_whole((query_BHPE, key_BGPE, value_BGPE), parts, group), attention_mask, **kwargs)
    return to_parts(out_BTHE, parts, group), None


def to_whole(tensors: Sequence[Tensor], parts: int, group: str) -> list[Tensor]:
    """Converts (B, heads, P, E) to (B, heads / N, T, E), with one all-to-all for all tensors."""
    sent = [x.unflatten(1, (parts, -1)).permute(1, 0, 3, 2, 4) for x in tensors]  # (N, B, P, heads / N, E)
    received_NBPW = exchange(torch.cat([x.flatten(3) for x in sent], dim=-1), parts, group)
    whole_BTW = received_NBPW.transpose(0, 1).flatten(1, 2)
    split = whole_BTW.split([x.shape[3] * x.shape[4] for x in sent], dim=-1)
    return [x.unflatten(-1, like.shape[3:]).transpose(1, 2) for x, like in zip(split, sent, strict=True)]


def to_parts(out_BTHE: Tensor, parts: int, group: str) -> Tensor:
    """Converts (B, T, H / N, E) to (B, P, H, E)."""
    sent_NBPW = out_BTHE.flatten(2).unflatten(1, (parts, -1)).transpose(0, 1)
    received_NBPW = exchange(sent_NBPW, parts, group)
    return received_NBPW.permute(1, 2, 0, 3).unflatten(-1, out_BTHE.shape[2:]).flatten(2, 3)


def exchange(x: Tensor, parts: int, group: str) -> Tensor:
    """Sends entry n of (N, ...) to rank n of the group, and returns the received entries, stacked by rank.

    Activation checkpointing repeats the exchange. This is safe, because all ranks recompute at the same time.
    """
    ones = [1] * parts
    # This operator is private. Unlike the public dist.all_to_all_single, it supports autograd and torch.compile.
    received = torch.ops._c10d_functional.all_to_all_single(x.contiguous(), ones, ones, group)
    return torch.ops._c10d_functional.wait_tensor(received)


def refuse_per_head(arguments: dict[str, Any]) -> None:
    if given := [name for name in PER_HEAD if arguments.get(name) is not None]:
        raise InputError(f"this model's attention uses {', '.join(given)}, which cp does not support; use fsdp2")


def folded(parts: int, module, query_RHPE, key_RGPE, value_RGPE, attention_mask, **kwargs) -> tuple[Tensor, None]:
    """Emulates `exchanging` in a single process, with the chunks of a sequence as batch rows (R = B x N)."""
    refuse_per_head(kwargs)
    whole = [x.unflatten(0, (-1, parts)).transpose(1, 2).flatten(2, 3) for x in (query_RHPE, key_RGPE, value_RGPE)]
    out_BTHE, _ = without_cap(module, *whole, attention_mask, **kwargs)
    return out_BTHE.unflatten(1, (parts, -1)).flatten(0, 1), None


def without_cap(module, query, key, value, attention_mask, softcap=None, **kwargs) -> tuple[Tensor, None]:
    """Calls `sdpa` without softcap, which is accurate enough to detect layers that mix positions."""
    return sdpa(module, query, key, value, attention_mask, **kwargs)


for parts in (1, 2):
    AttentionInterface.register(f"{FOLDED}_{parts}", functools.partial(folded, parts))


@once_per_config
@one_thread()
def mixing_problem(model_config: PreTrainedConfig) -> str | None:
    """Returns an error message if the model mixes positions outside of attention, otherwise None.

    Runs a small copy of the model on two half sequences that interact only in attention. Raises the same errors as
    `reference_of`.
    """
    reference = reference_of(KeyedConfig.of(model_config))
    model_type = model_config.model_type
    ids_BT = ReferenceWindow.of(reference.config).ids_BT
    window = WindowSpec(ids_BT.shape[1] - 1, document_mask=True)
    found = []
    try:
        for parts in (1, 2):
            model = copy_model(reference, attention=f"{FOLDED}_{parts}")
            inputs = model_inputs(
                ids_BT.numpy(),
                window,
                end_of_document_id=END_OF_DOCUMENT,
                device=model.device,
                attention="groundwork_sdpa",
            )
            inputs.pop("targets_BT")
            cut = {
                key: inputs.pop(key).unflatten(1, (parts, -1)).flatten(0, 1)
                for key in ("input_ids_BT", "position_ids")
            }
            logits = logits_of(model, cut["input_ids_BT"], position_ids=cut["position_ids"], **inputs)
            found.append(logits.unflatten(0, (-1, parts)).flatten(1, 2))
    except Exception as error:  # model code can fail in any way on unsupported arguments
        # For stateful mixers, transformers' message recommends packages that don't help here.
        if "can't keep packed sequences apart" not in str(error):
            return f"model: {model_type} does not support cp ({described(error)}); use fsdp2 or another architecture"
    else:
        if relative_difference(found[1], found[0]) <= TOLERANCE:
            return None
    return (
        f"model: {model_type} does not support cp, because it mixes positions outside of attention or computes "
        "its own position IDs; use fsdp2, or an architecture such as llama, qwen3, olmo2 or qwen3_moe"
    )
