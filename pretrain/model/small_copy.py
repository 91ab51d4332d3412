"""Builds a small copy of any architecture, with the same classes and every layer type, for fast tests.

A model's handling of documents, future tokens and the loss doesn't depend on its size, so training/probe.py tests it
on the copy. We reduce all sizes with known names. If the library rejects the result, we only reduce the number of
layers. The reference for the tests is the copy's forward pass with the library's eager attention.

Shapes: B windows, T positions, V vocabulary.
"""

import contextlib
import copy
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from pretrain.errors import InputError
from pretrain.model.build import KeyedConfig, build_model, on_meta_device, once_per_config
from pretrain.model.model_config import described

VOCABULARY = 96
SMALL_PARAMETERS = 8_000_000
"""Maximum number of parameters in a copy with the model's widths."""
NARROW_PARAMETERS = 64_000_000
LARGEST_PARAMETERS = 700_000_000
"""Maximum number of parameters in a copy with the model's widths, if no narrow copy works.

This is enough for two layers of a 13B model (3 GB in fp32, 30 s).
"""
HEADS = 4
HEAD_WIDTH = 16
WIDTHS = {
    ("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim", "ffn_embed_dim"): HEADS * HEAD_WIDTH,
    ("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "encoder_attention_heads"): HEADS,
    ("head_dim", "v_head_dim", "global_head_dim", "swa_head_dim", "swa_v_head_dim", "rotary_dim"): HEAD_WIDTH,
    (
        "kv_channels",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "kv_lora_rank",
        "q_lora_rank",
        "index_head_dim",
    ): HEAD_WIDTH,
    ("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"): 128,
    ("dense_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"): 64,
    ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"): 32,
    ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "zero_expert_num"): 8,
    ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_token"): 2,
    ("n_group", "topk_group"): 1,
    ("hidden_size_per_layer_input",): 16,
    ("n_groups", "mamba_n_groups", "mamba_ngroups"): 2,
    ("mamba_chunk_size", "chunk_size"): 16,
    ("linear_num_heads", "linear_num_value_heads"): HEADS,
    ("linear_num_key_heads",): HEADS // 2,
    ("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"): HEAD_WIDTH,
    ("lru_width",): HEADS * HEAD_WIDTH,
}
"""{configuration keys: maximum value in the narrow copy}"""
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_global_key_value_heads")
STATE_SPACE_HEADS = (
    ("mamba_expand", "mamba_n_heads", "mamba_d_head"),
    ("mamba_expand", "n_mamba_heads", "mamba_headdim"),
    ("expand", "num_heads", "head_dim"),
    ("expand", "mamba_num_heads", "mamba_head_dim"),
)
"""Configuration keys for (expansion, heads, head width) in state-space layers.

The number of heads x head width is expansion x hidden size.
"""
GROWING = (
    *(name for names in list(WIDTHS)[:2] for name in names),
    *(name for names in list(WIDTHS)[4:7] for name in names),
    *KEY_HEADS,
    "mamba_n_heads", "n_mamba_heads", "mamba_num_heads", "mamba_d_ssm", "lru_width",
    "linear_num_heads", "linear_num_value_heads", "linear_num_key_heads",
)  # fmt: skip
"""Configuration keys that grow with the model's width. The number of heads grows, but not the head width."""
WINDOWS = ("sliding_window", "window_size", "attention_window_size", "attention_chunk_size", "local_attention")
LOGIT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Configuration keys for the soft cap on logits."""
SHORT_WINDOW = 6
"""Length of sliding windows and chunks in the copy, shorter than its sequences."""

DOCUMENT_LENGTHS = ((9, 1, 14), (16, 8))
"""Document lengths in two windows."""
SHORT_DOCUMENT_LENGTHS = ((3, 1, 4), (5, 3))
"""Document lengths for models with too few positions for DOCUMENT_LENGTHS."""
END_OF_DOCUMENT = 1
TOLERANCE = 5e-4
"""Maximum fp32 rounding error, relative to the largest logit. Leaks are much larger."""
VISIBLE = 100 * TOLERANCE
"""Minimum effect of an earlier token, relative to the largest logit, that is needed to detect leaks."""
WEIGHT_FACTORS = (3.0, 10.0, 30.0)
"""Factors for the initial weights, tried in order until tokens affect each other enough."""


def small_copies(config: PreTrainedConfig, failures: list[str]) -> Iterator[PreTrainedConfig]:
    """Yields configurations for small copies that the library can build, most informative first.

    failures: list to which the library's error messages are appended.
    """
    layers = kinds_of_layers(config)
    seen = set()
    # Few layers, short windows and the model's own widths are most informative.
    for narrow, shorter, windows, limit in (
        (False, True, True, SMALL_PARAMETERS),
        (False, True, False, SMALL_PARAMETERS),
        (False, False, False, SMALL_PARAMETERS),
        (True, True, True, NARROW_PARAMETERS),
        (True, True, False, NARROW_PARAMETERS),
        (True, False, True, NARROW_PARAMETERS),
        (True, False, False, NARROW_PARAMETERS),
        (False, True, True, LARGEST_PARAMETERS),
    ):
        values = config.to_dict()
        _shrink_vocabulary(values)
        if windows:
            values |= {name: SHORT_WINDOW for name in WINDOWS if is_above(values.get(name), SHORT_WINDOW)}
        if narrow:
            _narrow(values)
        if shorter and layers is not None:
            _cut_layers(values, config, *layers)
        # Different options may result in the same configuration.
        if (key := repr((values, limit > NARROW_PARAMETERS))) in seen:
            continue
        seen.add(key)
        try:
            small = type(config).from_dict(values)
            if sum(parameter.numel() for parameter in _meta_model(small).parameters()) <= limit:
                yield small
        except Exception as error:  # the library's checks may reject unsupported sizes
            failures.append(described(error))


def with_layers(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """Returns the configuration of a model with only the first `layers` layers."""
    values = config.to_dict()
    _cut_layers(values, config, config.num_hidden_layers, layers)
    return type(config).from_dict(values)


def kinds_of_layers(config: PreTrainedConfig) -> tuple[int, int] | None:
    """Returns (number of layers, number of leading layers with every layer type), or None without a layer list.

    Each type is included twice, unless that requires more than twice as many layers.
    """
    try:
        model = _meta_model(config)
    except Exception:  # building the model will report the error
        return None
    total = getattr(config.get_text_config(), "num_hidden_layers", None)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == total]
    if not lists:
        return None
    types = getattr(config, "layer_types", None) or [None] * total
    kinds = [(types[i], *(_kind(layers[i]) for layers in lists)) for i in range(total)]
    once, twice = (max(_position(kinds, kind, times) for kind in set(kinds)) + 1 for times in (1, 2))
    return total, min(total, max(2, twice if twice <= 2 * once else once))


def _position(kinds: list[Any], kind: Any, times: int) -> int:
    """Returns the index of the `times`-th occurrence of `kind`, or of the last one if there are fewer."""
    found = [index for index, other in enumerate(kinds) if other == kind]
    return found[min(times, len(found)) - 1]


def _kind(layer: nn.Module) -> tuple:
    """Returns the module classes, shapes and options by which layer types differ."""
    found = [(name, tuple(parameter.shape)) for name, parameter in layer.named_parameters()]
    for name, module in layer.named_modules():
        switches = tuple(item for item in sorted(vars(module).items()) if isinstance(item[1], (bool, str)))
        has_window = getattr(module, "sliding_window", None) is not None
        found.append((name, type(module).__name__, switches, has_window))
    return tuple(found)


def _shrink_vocabulary(values: dict[str, Any]) -> None:
    sizes = {name for name in values if name.startswith("vocab_size")}
    values |= {name: VOCABULARY for name in sizes if is_above(values[name], VOCABULARY)}
    for name, value in values.items():
        # Special tokens must be in the small vocabulary.
        if name.endswith("_token_id") and (isinstance(value, list) or is_above(value, VOCABULARY - 1)):
            values[name] = 0


def _narrow(values: dict[str, Any]) -> None:
    widths = {name: width for names, width in WIDTHS.items() for name in names}
    heads = next((values[name] for name in ("num_attention_heads", "n_head", "n_heads") if values.get(name)), None)
    for name, width in widths.items():
        value = values.get(name)
        if is_above(value, width):
            values[name] = width
        elif isinstance(value, list):  # one value per layer
            values[name] = [width if is_above(size, width) else size for size in value]
    for name in KEY_HEADS:
        # Models with fewer key heads than query heads must still have fewer.
        if is_above(values.get(name), 1) and heads:
            values[name] = HEADS if values[name] == heads else HEADS // 2
    for expand, heads, width in STATE_SPACE_HEADS:
        if all(values.get(name) for name in (expand, heads, width)):
            values[width] = HEAD_WIDTH
            values[heads] = values[expand] * HEADS
            if values.get("mamba_d_ssm"):
                values["mamba_d_ssm"] = values[heads] * HEAD_WIDTH


def _cut_layers(values: dict[str, Any], config: PreTrainedConfig, total: int, layers: int) -> None:
    """Reduces the number of layers from `total` to `layers`, in layer counts and in lists with one entry per layer."""
    own_name = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    values[own_name] = layers
    if values.get("decoder_layers") == total:  # in the Bart family, num_hidden_layers is the number of encoder layers
        values["decoder_layers"] = layers
    for name, value in values.items():
        # Strings may have one letter per layer, but "silu" must not be truncated in a model with four layers.
        is_per_layer = isinstance(value, list) or (isinstance(value, str) and name.endswith("pattern"))
        if is_per_layer and len(value) == total:
            values[name] = value[:layers]
        elif isinstance(value, list) and any(part in name for part in ("layer", "idx", "indices")):
            values[name] = [index for index in value if not isinstance(index, int) or index < layers]


def _meta_model(config: PreTrainedConfig) -> nn.Module:
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"  # private; transformers has no public name for it in a config
    with on_meta_device():
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def is_above(value: Any, limit: int) -> bool:
    """Returns True for an integer above the limit."""
    return type(value) is int and value > limit  # not a bool


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread, because the small copy's operations are too short for several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@once_per_config
@one_thread()
def projects_hidden_states(config: PreTrainedConfig) -> bool:
    """Returns True if the logits are exactly head(last hidden state), possibly with a soft cap.

    Runs the small copy and caches the result. Raises the same errors as `reference_of`.
    """
    return is_projection(reference_of(KeyedConfig.of(config)))


@functools.lru_cache(maxsize=4)
@one_thread()
def reference_of(keyed: KeyedConfig) -> PreTrainedModel:
    """Builds the small copy with the library's eager attention, and scales its weights until tokens interact.

    Raises InputError if the architecture needs inputs other than token IDs, or doesn't initialize all weights.
    """
    failures: list[str] = []
    for small in small_copies(keyed.config, failures):
        try:
            model = build_model(small, seed=0, attention="eager").eval()
            _make_context_visible(model)
        except InputError:
            raise
        except Exception as error:  # the library's own forward pass may raise any error
            failures.append(described(error))
            continue
        return model
    reason = failures[-1] if failures else "the library cannot build it from this configuration"
    raise InputError(
        f"model: {keyed.config.model_type} does not run with only token IDs as input ({reason}); complete its "
        "configuration, or use a different architecture (see docs/architectures.md)"
    )


def _make_context_visible(model: PreTrainedModel) -> None:
    """Scales the weight matrices until a document's first token affects the logits of later tokens."""
    # State-space layers exponentiate A_log, so scaling it would cause overflow.
    matrices = [p for name, p in model.named_parameters() if p.dim() >= 2 and "A_log" not in name]
    window = ReferenceWindow.of(model.config)
    first = window.documents[0][1]
    ids_BT = window.ids_BT[:1, first]
    changed_BT = window.with_other_tokens(slice(first.start, first.start + 1))[:1, first]
    now = 1.0
    best = (0.0, 1.0)
    for factor in WEIGHT_FACTORS:
        _multiply(matrices, factor / now)
        now = factor
        logits = logits_of(model, ids_BT)
        change = relative_difference(logits_of(model, changed_BT)[:, 1:], logits[:, 1:])
        best = max(best, (change, factor)) if logits.isfinite().all() else best
        if best[0] > VISIBLE:
            break
    _multiply(matrices, best[1] / now)
    if best[0] < VISIBLE / 10:
        raise RuntimeError("its tokens do not attend to each other; check settings such as sliding_window")


def _multiply(matrices: Sequence[Tensor], factor: float) -> None:
    with torch.no_grad():
        for matrix in matrices:
            matrix.mul_(factor)


@dataclass(frozen=True)
class ReferenceWindow:
    """Two fixed windows with several documents each. As in training, documents start with END_OF_DOCUMENT."""

    ids_BT: Tensor
    """Token IDs (2, T + 1). The last column is only a target."""
    documents: list[tuple[int, slice]]
    """(window, positions) for each document."""
    vocabulary_size: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "ReferenceWindow":
        """Builds windows for this configuration's vocabulary and number of positions."""
        lengths = DOCUMENT_LENGTHS
        if (getattr(config, "max_position_embeddings", None) or sum(lengths[0])) < sum(lengths[0]):
            lengths = SHORT_DOCUMENT_LENGTHS
        generator = torch.Generator().manual_seed(0)
        shape = (len(lengths), sum(lengths[0]) + 1)
        # Random tokens must not be END_OF_DOCUMENT.
        ids_BT = torch.randint(END_OF_DOCUMENT + 1, config.vocab_size, shape, generator=generator)
        documents = []
        for row, row_lengths in enumerate(lengths):
            for length, end in zip(row_lengths, np.cumsum(row_lengths).tolist(), strict=True):
                documents.append((row, slice(end - length, end)))
                ids_BT[row, end - length] = END_OF_DOCUMENT
        return cls(ids_BT, documents, config.vocab_size)

    @property
    def inputs_BT(self) -> Tensor:
        return self.ids_BT[:, :-1]

    def with_other_tokens(self, positions: slice) -> Tensor:
        """Returns ids_BT with different IDs at these positions, none of them END_OF_DOCUMENT."""
        changed_BT = self.ids_BT.clone()
        ordinary = END_OF_DOCUMENT + 1
        choices = self.vocabulary_size - ordinary
        changed_BT[:, positions] = (changed_BT[:, positions] - ordinary + choices // 2) % choices + ordinary
        return changed_BT


@torch.no_grad()
def logits_of(model: PreTrainedModel, ids_BT: Tensor, **arguments) -> Tensor:
    """Returns logits (B, T, V) in fp32 on the CPU, for a model on any device."""
    return model(input_ids=ids_BT.to(model.device), use_cache=False, **arguments).logits.float().cpu()


def relative_difference(found: Tensor, wanted: Tensor) -> float:
    """Returns the largest difference, relative to the largest wanted value. It's infinite if there are NaNs."""
    difference = ((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-9)).item()
    return difference if difference == difference else float("inf")


@functools.lru_cache(maxsize=4)
def reference_logits(reference: PreTrainedModel) -> Tensor:
    """Returns the reference's logits for its window, computed once."""
    return logits_of(reference, ReferenceWindow.of(reference.config).inputs_BT)


@functools.lru_cache(maxsize=4)
def is_projection(reference: PreTrainedModel) -> bool:
    """Returns True if the logits are head(base model's last hidden states), with the soft cap from `logit_cap`."""
    head = reference.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or reference.base_model is reference:
        return False
    ids_BT = ReferenceWindow.of(reference.config).inputs_BT
    try:
        with torch.no_grad():
            hidden_BTD = reference.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
            logits_BTV = F.linear(hidden_BTD, head.weight, head.bias)
    except Exception:  # the base model has a different interface
        return False
    if cap := logit_cap(reference.config):
        uncapped_BTV = logits_BTV
        logits_BTV = cap * (logits_BTV / cap).tanh()
        # The logits are too small to detect if the model caps them.
        if relative_difference(uncapped_BTV, logits_BTV) <= TOLERANCE / 5:
            return False
    wanted_BTV = reference_logits(reference)
    return logits_BTV.shape == wanted_BTV.shape and relative_difference(logits_BTV, wanted_BTV) <= TOLERANCE / 10


def logit_cap(config: PreTrainedConfig) -> float | None:
    """Returns c if the logits are soft-capped as c x tanh(logits / c) (Gemma 2, arXiv 2408.00118), or None."""
    text = config.get_text_config()
    return next((float(cap) for name in LOGIT_CAPS if (cap := getattr(text, name, None))), None)
