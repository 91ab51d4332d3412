"""A GPT in plain PyTorch, as a baseline for the benchmarks.

Dimensions: B sequences, T positions, D hidden size, V vocabulary size.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.shapes import Shape


class Block(nn.Module):
    """Transformer block: attention and MLP, each with a LayerNorm in front and a residual connection."""

    def __init__(self, shape: Shape):
        super().__init__()
        width = shape.hidden_size
        self.heads = shape.heads
        self.norm_attention = nn.LayerNorm(width)
        self.norm_mlp = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        qkv = self.qkv(self.norm_attention(x_BTD)).unflatten(-1, (3, self.heads, -1))
        query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).flatten(2))
        return x_BTD + self.down(F.gelu(self.up(self.norm_mlp(x_BTD)), approximate="tanh"))


class PlainGPT(nn.Module):
    """GPT-2 with learned positions, tied embeddings and GPT-2's initialization. Computes the loss from full logits."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary_size, shape.hidden_size)
        self.positions = nn.Embedding(shape.sequence_length, shape.hidden_size)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden_size)
        self.head = nn.Linear(shape.hidden_size, shape.vocabulary_size, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # GPT-2 scales the weights of residual projections by 1 / sqrt(number of residual projections).
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Returns the mean cross-entropy in nats per token."""
        positions_T = torch.arange(input_ids_BT.shape[1], device=input_ids_BT.device)
        x_BTD = self.tokens(input_ids_BT) + self.positions(positions_T)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = self.head(self.norm(x_BTD))
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
