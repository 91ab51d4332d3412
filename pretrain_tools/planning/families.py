"""Model families: layers, heads and feed-forward width for each size, and the model's JSON.

Each family contains its published shapes. Smaller and intermediate shapes keep their ratio of width to depth. The loss
depends little on this ratio: a 6 x 4,288 model is within 3% of a 48 x 1,600 model (Kaplan et al., arXiv 2001.08361,
section 3.2).
"""

import itertools
import json
import math
from dataclasses import dataclass, field
from typing import Any

SMALL_RUNGS = ((2, 128), (4, 128), (4, 192), (4, 256), (6, 320), (6, 384), (8, 512))
"""(layers, width) of models smaller than the published ones, for runs that take minutes."""
LLAMA_RUNGS = (
    *SMALL_RUNGS, (12, 768), (16, 1024), (24, 1536), (24, 2048), (28, 3072), (32, 4096), (40, 5120)
)  # fmt: skip
"""(layers, width) of SMALL_RUNGS and the published Llama models."""
STEPS_BY_WIDTH = ((1024, 64), (2048, 128), (math.inf, 256))
"""(width limit, step between interpolated widths below it)."""
LEAST_RISE = 1.15
"""Minimum size ratio of consecutive shapes."""
NARROW_HEAD = 64
WIDE_HEAD = 128
CHOSEN = 8
"""Experts per token."""
CONTEXTS = ((2e7, 256), (8e7, 512), (2e8, 1024), (4e9, 2048), (math.inf, 4096))
"""(limit on the number of layer parameters, sequence length below it), based on the demo, GPT-2 and Llama 1 and 2."""


def filled(published: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Interpolates (layers, width) linearly between the published shapes."""
    rungs = [*published[:1]]
    for (layers_0, width_0), (layers_1, width_1) in itertools.pairwise(published):
        step = next(step for limit, step in STEPS_BY_WIDTH if width_0 < limit)
        for width in range(width_0 + step, width_1, step):
            layers = round(layers_0 + (layers_1 - layers_0) * (width - width_0) / (width_1 - width_0))
            size = layers * width**2
            # Skip shapes that are too close to the previous shape or the next published one.
            if size >= LEAST_RISE * rungs[-1][0] * rungs[-1][1] ** 2 and LEAST_RISE * size <= layers_1 * width_1**2:
                rungs.append((layers, width))
        rungs.append((layers_1, width_1))
    return tuple(rungs)


@dataclass(frozen=True)
class Family:
    """An architecture and its sizes."""

    name: str
    """model_type in transformers."""
    rungs: tuple[tuple[int, int], ...]
    """(layers, width), smallest first."""
    source: str
    """Source of the shapes."""
    gated: bool = True
    """True if the feed-forward network has three matrices instead of two."""
    feed_forward: float = 8 / 3
    """Ratio of feed-forward width to model width. The width is rounded to a multiple of 64."""
    wide_heads_from: int = 2560
    """Minimum model width for heads of width WIDE_HEAD, as in the large GPT-3 and Llama models."""
    groups_heads: bool = False
    """True for grouped-query attention, as in Qwen3."""
    untied_from: float = 4096
    """Minimum model width for an untied head. Llama and Qwen3 tie the head below 5B parameters."""
    learns_positions: bool = False
    """True for learned position embeddings and GPT-2's config keys."""
    experts: int = 0
    """Number of experts per layer. CHOSEN experts together are as wide as the dense feed-forward network."""
    settings: dict[str, Any] = field(default_factory=dict, hash=False)
    """Additional config.json keys."""


ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "rms_norm_eps": 1e-5}
GPT3 = "Table 2.1 of the GPT-3 paper (arXiv 2005.14165)"
LLAMA = Family(
    "llama",
    filled(LLAMA_RUNGS),
    f"12 x 768, 24 x 1,536 and 24 x 2,048 from {GPT3}, 28 x 3,072 from Llama 3.2, 32 x 4,096 and 40 x 5,120 from "
    "Table 2 of the Llama paper (arXiv 2302.13971)",
    settings=ROPE,
)
QWEN3 = Family(
    "qwen3",
    filled((*SMALL_RUNGS, (16, 768), (28, 1024), (28, 2048), (36, 4096), (40, 5120))),
    "28 x 1,024, 28 x 2,048, 36 x 4,096 and 40 x 5,120 from Table 1 of the Qwen3 paper (arXiv 2505.09388)",
    feed_forward=3.0,
    wide_heads_from=1024,
    groups_heads=True,
    settings=ROPE | {"rms_norm_eps": 1e-6},
)
GPT2 = Family(
    "gpt2",
    filled((*SMALL_RUNGS, (12, 768), (24, 1024), (36, 1280), (48, 1600), (32, 2560), (32, 4096), (40, 5120))),
    f"12 x 768, 24 x 1,024, 36 x 1,280 and 48 x 1,600 from GPT-2, 32 x 2,560 and larger from {GPT3}",
    gated=False,
    feed_forward=4.0,
    untied_from=math.inf,
    learns_positions=True,
    settings={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
)
NANOCHAT = Family(
    "nanochat",
    tuple((depth, 128 * math.ceil(depth / 2)) for depth in (2, 3, *range(4, 40, 2), *range(40, 65, 4))),
    "nanochat's depth rule: width 64 times the depth, head dimension 128, 4x feed-forward width, untied head",
    gated=False,
    feed_forward=4.0,
    wide_heads_from=0,
    untied_from=0,
    settings=ROPE | {"rms_norm_eps": 1e-6, "final_logit_softcapping": 15.0},
)
DEEPONE = Family(
    "deepone",
    filled((*SMALL_RUNGS, (16, 768), (43, 2048), (64, 4096))),
    "16 x 768 from model_configs/deepone_162m.json, width 48 to 64 times the depth: DeepNet's norms are for deep "
    "models (arXiv 2203.00555)",
    untied_from=0,
    settings={"rope_theta": 10000.0},
)
QWEN3_MOE = Family(
    "qwen3_moe",
    filled((*SMALL_RUNGS, (16, 768), (40, 2048))),
    "Qwen3's layers with Qwen3 30B-A3B's experts (arXiv 2505.09388): 8 per token, each 3/8 as wide as the model, "
    "out of 64 experts, as in OLMoE (arXiv 2409.02060)",
    feed_forward=3.0,
    wide_heads_from=1024,
    groups_heads=True,
    experts=64,
    settings=QWEN3.settings,
)
FAMILIES = {family.name: family for family in (LLAMA, QWEN3, GPT2, NANOCHAT, DEEPONE, QWEN3_MOE)}


@dataclass(frozen=True)
class Shape:
    """One model of a family. Parameter counts exclude norms and biases."""

    layers: int
    width: int
    vocabulary: int
    family: Family = LLAMA

    @property
    def head_width(self) -> int:
        return WIDE_HEAD if self.width >= self.family.wide_heads_from else NARROW_HEAD

    @property
    def heads(self) -> int:
        """Number of query heads. Qwen3 models with wide heads have at least 16."""
        least = 16 if self.family.groups_heads and self.head_width == WIDE_HEAD else 1
        return max(least, self.width // self.head_width)

    @property
    def key_heads(self) -> int:
        """Number of key-value heads. With grouped-query attention, half the number of query heads, at most 8."""
        if not self.family.groups_heads or self.heads % 2:
            return self.heads
        return math.gcd(self.heads, 8) if self.heads >= 16 else self.heads // 2

    @property
    def intermediate(self) -> int:
        """Feed-forward width, a multiple of 64."""
        return math.ceil(self.width * self.family.feed_forward / 64) * 64

    @property
    def expert_width(self) -> int:
        """Feed-forward width of an expert, a multiple of 16 as required by the kernels."""
        return math.ceil(self.width * self.family.feed_forward / CHOSEN / 16) * 16

    @property
    def is_tied(self) -> bool:
        return self.width < self.family.untied_from

    @property
    def layer_parameters(self) -> int:
        """Active parameters in the layers' matrices."""
        attention = 2 * self.width * self.head_width * (self.heads + self.key_heads)
        width = self.intermediate if not self.family.experts else CHOSEN * self.expert_width
        router = self.width * self.family.experts
        return self.layers * (attention + (3 if self.family.gated else 2) * self.width * width + router)

    @property
    def active(self) -> int:
        """Active parameters, including the embedding and head."""
        positions = self.sequence_length if self.family.learns_positions else 0
        return self.layer_parameters + ((1 if self.is_tied else 2) * self.vocabulary + positions) * self.width

    @property
    def parameters(self) -> int:
        """All parameters, including inactive experts."""
        others = max(0, self.family.experts - CHOSEN)
        return self.active + self.layers * others * 3 * self.width * self.expert_width

    @property
    def sequence_length(self) -> int:
        """Training sequence length in tokens. Grows with the model size."""
        return next(length for limit, length in CONTEXTS if self.layer_parameters < limit)

    @property
    def flops_per_token(self) -> float:
        """Training FLOPs, using train.py's formula: 6N + 12 x layers x heads x head width x sequence length."""
        products = self.layer_parameters + self.vocabulary * self.width
        return 6 * products + 12 * self.layers * self.heads * self.head_width * self.sequence_length

    @property
    def json_text(self) -> str:
        """The model's config as JSON, for sequences of twice the training length except with learned positions."""
        family = self.family
        values = {"model_type": family.name, "vocab_size": self.vocabulary}
        if family.learns_positions:
            values |= {"n_embd": self.width, "n_layer": self.layers, "n_head": self.heads}
            values["n_positions"] = self.sequence_length
        else:
            values |= {
                "hidden_size": self.width,
                "intermediate_size": self.intermediate,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.key_heads,
                "max_position_embeddings": 2 * self.sequence_length,
            }
        if family.groups_heads:
            values["head_dim"] = self.head_width
        values |= family.settings
        if family.experts:
            values |= {"num_experts": family.experts, "num_experts_per_tok": CHOSEN, "norm_topk_prob": True}
            values["moe_intermediate_size"] = self.expert_width
        values |= {"initializer_range": 0.02, "tie_word_embeddings": self.is_tied}
        return json.dumps(values, indent=2) + "\n"
