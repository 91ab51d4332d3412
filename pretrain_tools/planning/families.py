"""Families of models: how layers, heads and feed-forward follow from a size, and the model's JSON.

A ladder goes through the published shapes of its family; those between and below keep to their ratio of width to
layers. The loss depends little on it: 6 x 4,288 ends within 3 % of 48 x 1,600 (Kaplan et al., arXiv 2001.08361,
section 3.2).
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
"""(width below which it holds, step of the widths between published ones)."""
LEAST_RISE = 1.15
"""Smallest ratio of a shape's size to that of the next smaller one."""
NARROW_HEAD = 64
WIDE_HEAD = 128
CHOSEN = 8
"""Experts per token."""
CONTEXTS = ((2e7, 256), (8e7, 512), (2e8, 1024), (4e9, 2048), (math.inf, 4096))
"""(parameters in layers below which it holds, tokens of a window): the demo's, GPT-2's, Llama's and Llama 2's."""


def filled(published: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Adds shapes (layers, width) at widths between these, their layers on a straight line."""
    rungs = [*published[:1]]
    for (layers_0, width_0), (layers_1, width_1) in itertools.pairwise(published):
        step = next(step for limit, step in STEPS_BY_WIDTH if width_0 < limit)
        for width in range(width_0 + step, width_1, step):
            layers = round(layers_0 + (layers_1 - layers_0) * (width - width_0) / (width_1 - width_0))
            size = layers * width**2
            # Neither too near to the shape before it nor to the published one after it.
            if size >= LEAST_RISE * rungs[-1][0] * rungs[-1][1] ** 2 and LEAST_RISE * size <= layers_1 * width_1**2:
                rungs.append((layers, width))
        rungs.append((layers_1, width_1))
    return tuple(rungs)


@dataclass(frozen=True)
class Family:
    """An architecture at every size."""

    name: str
    """model_type of transformers."""
    rungs: tuple[tuple[int, int], ...]
    """(layers, width), smallest first."""
    source: str
    """The source of the shapes."""
    gated: bool = True
    """Gives the feed-forward network three matrices instead of two."""
    feed_forward: float = 8 / 3
    """Its width relative to the model's, to a multiple of 64."""
    wide_heads_from: int = 2560
    """Width from which heads are WIDE_HEAD wide: GPT-3's and Llama's are in large models alone."""
    groups_heads: bool = False
    """Shares keys and values between query heads, as Qwen3 does."""
    untied_from: float = 4096
    """Width from which the head is not the embedding: Llama and Qwen3 share them in models below 5B."""
    learns_positions: bool = False
    """Has an embedding of positions, and GPT-2's names for its settings."""
    experts: int = 0
    """Experts of a layer, instead of its feed-forward network; CHOSEN of them are together as wide as that."""
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
    "Qwen3's layers with Qwen3 30B-A3B's experts (arXiv 2505.09388): 8 for a token, each 3/8 as wide as the model; 64 "
    "of them, as OLMoE has (arXiv 2409.02060)",
    feed_forward=3.0,
    wide_heads_from=1024,
    groups_heads=True,
    experts=64,
    settings=QWEN3.settings,
)
FAMILIES = {family.name: family for family in (LLAMA, QWEN3, GPT2, NANOCHAT, DEEPONE, QWEN3_MOE)}


@dataclass(frozen=True)
class Shape:
    """A model of a family: layers, width, and the ids of its head. Counts leave out norms and biases."""

    layers: int
    width: int
    vocabulary: int
    family: Family = LLAMA

    @property
    def head_width(self) -> int:
        return WIDE_HEAD if self.width >= self.family.wide_heads_from else NARROW_HEAD

    @property
    def heads(self) -> int:
        """Qwen3's smallest has 16 of 128, whose outputs together are wider than the model."""
        least = 16 if self.family.groups_heads and self.head_width == WIDE_HEAD else 1
        return max(least, self.width // self.head_width)

    @property
    def key_heads(self) -> int:
        """Key-value heads: as many as heads; in Qwen3 half of them, and no more than 8."""
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
        """Parameters in the matrices of all layers that a token meets."""
        attention = 2 * self.width * self.head_width * (self.heads + self.key_heads)
        # A token meets CHOSEN experts of a layer.
        width = self.intermediate if not self.family.experts else CHOSEN * self.expert_width
        router = self.width * self.family.experts
        return self.layers * (attention + (3 if self.family.gated else 2) * self.width * width + router)

    @property
    def active(self) -> int:
        """Parameters that a token meets, with embedding and head."""
        positions = self.sequence_length if self.family.learns_positions else 0
        return self.layer_parameters + ((1 if self.is_tied else 2) * self.vocabulary + positions) * self.width

    @property
    def parameters(self) -> int:
        """All parameters, with the experts that a token is not routed to."""
        others = max(0, self.family.experts - CHOSEN)
        return self.active + self.layers * others * 3 * self.width * self.expert_width

    @property
    def sequence_length(self) -> int:
        """Tokens of a training sequence, which grows with the model."""
        return next(length for limit, length in CONTEXTS if self.layer_parameters < limit)

    @property
    def flops_per_token(self) -> float:
        """FLOPs of training, as train.py counts them: 6N + 12 x layers x heads x head width x sequence length."""
        products = self.layer_parameters + self.vocabulary * self.width
        return 6 * products + 12 * self.layers * self.heads * self.head_width * self.sequence_length

    @property
    def json_text(self) -> str:
        """The model's JSON, for windows of up to twice the length (learned positions: of the length)."""
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
