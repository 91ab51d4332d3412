"""Model families: layers, heads and feed-forward width for each size, and the model's JSON.

Each family lists its published shapes. Shapes between and below them keep the ratio of width to layers. The loss
depends little on this ratio: 6 x 4,288 ends within 3% of 48 x 1,600 (Kaplan et al., arXiv 2001.08361, section 3.2).
"""

import itertools
import json
import math
from dataclasses import dataclass, field
from typing import Any

SMALL_RUNGS = ((2, 128), (4, 128), (4, 192), (4, 256), (6, 320), (6, 384), (8, 512))
"""(layers, width) below the published shapes, for runs of minutes."""
LLAMA_RUNGS = (
    *SMALL_RUNGS, (12, 768), (16, 1024), (24, 1536), (24, 2048), (28, 3072), (32, 4096), (40, 5120)
)  # fmt: skip
"""(layers, width) of the published Llamas and of SMALL_RUNGS."""
STEPS_BY_WIDTH = ((1024, 64), (2048, 128), (math.inf, 256))
"""(upper limit of width, step between interpolated widths)."""
LEAST_RISE = 1.15
"""Smallest ratio between the sizes of two neighboring shapes."""
NARROW_HEAD = 64
WIDE_HEAD = 128
CHOSEN = 8
"""Experts per token."""
CONTEXTS = ((2e7, 256), (8e7, 512), (2e8, 1024), (4e9, 2048), (math.inf, 4096))
"""(upper limit of parameters in layers, sequence length), based on the demo, GPT-2, Llama and Llama 2."""


def filled(published: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Adds shapes (layers, width) between these. Interpolates the layers linearly."""
    rungs = [*published[:1]]
    for (layers_0, width_0), (layers_1, width_1) in itertools.pairwise(published):
        step = next(step for limit, step in STEPS_BY_WIDTH if width_0 < limit)
        for width in range(width_0 + step, width_1, step):
            layers = round(layers_0 + (layers_1 - layers_0) * (width - width_0) / (width_1 - width_0))
            size = layers * width**2
            # Not too close to the previous shape or to the next published one.
            if size >= LEAST_RISE * rungs[-1][0] * rungs[-1][1] ** 2 and LEAST_RISE * size <= layers_1 * width_1**2:
                rungs.append((layers, width))
        rungs.append((layers_1, width_1))
    return tuple(rungs)


@dataclass(frozen=True)
class Family:
    """An architecture in all its sizes."""

    name: str
    """model_type in transformers."""
    rungs: tuple[tuple[int, int], ...]
    """(layers, width), smallest first."""
    source: str
    """Source of the shapes."""
    gated: bool = True
    """True if the feed-forward network has three matrices instead of two."""
    feed_forward: float = 8 / 3
    """Feed-forward width relative to the model's width, rounded to a multiple of 64."""
    wide_heads_from: int = 2560
    """Model width from which heads have the width WIDE_HEAD, as in the large models of GPT-3 and Llama."""
    groups_heads: bool = False
    """True if query heads share keys and values, as in Qwen3."""
    untied_from: float = 4096
    """Width from which the head isn't tied to the embedding. Llama and Qwen3 tie them below 5B."""
    learns_positions: bool = False
    """True for position embeddings and GPT-2's setting names."""
    experts: int = 0
    """Experts per layer, which replace the feed-forward network. CHOSEN experts together have its width."""
    settings: dict[str, Any] = field(default_factory=dict, hash=False)
    """Other keys of config.json."""


ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "rms_norm_eps": 1e-5}
GPT3 = "GPT-3's table 2.1 (arXiv 2005.14165)"
LLAMA = Family(
    "llama",
    filled(LLAMA_RUNGS),
    f"12 x 768, 24 x 1,536, 24 x 2,048 of {GPT3}, 28 x 3,072 of Llama 3.2, 32 x 4,096, 40 x 5,120 of "
    "Llama's table 2 (arXiv 2302.13971)",
    settings=ROPE,
)
QWEN3 = Family(
    "qwen3",
    filled((*SMALL_RUNGS, (16, 768), (28, 1024), (28, 2048), (36, 4096), (40, 5120))),
    "28 x 1,024, 28 x 2,048, 36 x 4,096 and 40 x 5,120 of Qwen3's table 1 (arXiv 2505.09388)",
    feed_forward=3.0,
    wide_heads_from=1024,
    groups_heads=True,
    settings=ROPE | {"rms_norm_eps": 1e-6},
)
GPT2 = Family(
    "gpt2",
    filled((*SMALL_RUNGS, (12, 768), (24, 1024), (36, 1280), (48, 1600), (32, 2560), (32, 4096), (40, 5120))),
    f"12 x 768, 24 x 1,024, 36 x 1,280 and 48 x 1,600 of GPT-2, 32 x 2,560 and more of {GPT3}",
    gated=False,
    feed_forward=4.0,
    untied_from=math.inf,
    learns_positions=True,
    settings={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
)
NANOCHAT = Family(
    "nanochat",
    tuple((depth, 128 * math.ceil(depth / 2)) for depth in (2, 3, *range(4, 40, 2), *range(40, 65, 4))),
    "64 wide per layer, in heads of 128, feed-forward 4 times as wide, untied: nanochat's rule of one depth",
    gated=False,
    feed_forward=4.0,
    wide_heads_from=0,
    untied_from=0,
    settings=ROPE | {"rms_norm_eps": 1e-6, "final_logit_softcapping": 15.0},
)
DEEPONE = Family(
    "deepone",
    filled((*SMALL_RUNGS, (16, 768), (43, 2048), (64, 4096))),
    "16 x 768 of model_configs/deepone_162m.json, 48 to 64 wide per layer: DeepNet's norms are for deep models "
    "(arXiv 2203.00555)",
    untied_from=0,
    settings={"rope_theta": 10000.0},
)
QWEN3_MOE = Family(
    "qwen3_moe",
    filled((*SMALL_RUNGS, (16, 768), (40, 2048))),
    "Qwen3's layers with Qwen3 30B-A3B's experts (arXiv 2505.09388): 8 per token, each 3/8 as wide as the model, "
    "of 64 experts, as in OLMoE (arXiv 2409.02060)",
    feed_forward=3.0,
    wide_heads_from=1024,
    groups_heads=True,
    experts=64,
    settings=QWEN3.settings,
)
FAMILIES = {family.name: family for family in (LLAMA, QWEN3, GPT2, NANOCHAT, DEEPONE, QWEN3_MOE)}


@dataclass(frozen=True)
class Shape:
    """A family's model: layers, width and vocabulary. Counts exclude norms and biases."""

    layers: int
    width: int
    vocabulary: int
    family: Family = LLAMA

    @property
    def head_width(self) -> int:
        return WIDE_HEAD if self.width >= self.family.wide_heads_from else NARROW_HEAD

    @property
    def heads(self) -> int:
        """Number of heads. Qwen3's smallest model has 16 heads of width 128, together wider than the model."""
        least = 16 if self.family.groups_heads and self.head_width == WIDE_HEAD else 1
        return max(least, self.width // self.head_width)

    @property
    def key_heads(self) -> int:
        """Number of key-value heads: one per head; in Qwen3 half as many, at most 8."""
        if not self.family.groups_heads or self.heads % 2:
            return self.heads
        return math.gcd(self.heads, 8) if self.heads >= 16 else self.heads // 2

    @property
    def intermediate(self) -> int:
        """Width of the feed-forward network, a multiple of 64."""
        return math.ceil(self.width * self.family.feed_forward / 64) * 64

    @property
    def expert_width(self) -> int:
        """Width of an expert, a multiple of 16, for the kernels."""
        return math.ceil(self.width * self.family.feed_forward / CHOSEN / 16) * 16

    @property
    def is_tied(self) -> bool:
        return self.width < self.family.untied_from

    @property
    def layer_parameters(self) -> int:
        """Active parameters in the matrices of all layers."""
        attention = 2 * self.width * self.head_width * (self.heads + self.key_heads)
        # CHOSEN experts per layer are active.
        width = self.intermediate if not self.family.experts else CHOSEN * self.expert_width
        router = self.width * self.family.experts
        return self.layers * (attention + (3 if self.family.gated else 2) * self.width * width + router)

    @property
    def active(self) -> int:
        """Active parameters, including embedding and head."""
        positions = self.sequence_length if self.family.learns_positions else 0
        return self.layer_parameters + ((1 if self.is_tied else 2) * self.vocabulary + positions) * self.width

    @property
    def parameters(self) -> int:
        """All parameters, including inactive experts."""
        others = max(0, self.family.experts - CHOSEN)
        return self.active + self.layers * others * 3 * self.width * self.expert_width

    @property
    def sequence_length(self) -> int:
        """Length of a training sequence, in tokens. Grows with the model."""
        return next(length for limit, length in CONTEXTS if self.layer_parameters < limit)

    @property
    def flops_per_token(self) -> float:
        """Training FLOPs, in train.py's formula: 6N + 12 x layers x heads x head width x sequence length."""
        products = self.layer_parameters + self.vocabulary * self.width
        return 6 * products + 12 * self.layers * self.heads * self.head_width * self.sequence_length

    @property
    def json_text(self) -> str:
        """The model's JSON, for up to twice the sequence length (with learned positions, for the length itself)."""
        return json.dumps(self.config_values, indent=2) + "\n"

    @property
    def config_values(self) -> dict[str, Any]:
        """Keys of config.json."""
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
        return values | {"initializer_range": 0.02, "tie_word_embeddings": self.is_tied}
