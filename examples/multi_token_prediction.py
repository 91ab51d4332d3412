"""Multi-token prediction: further modules predict the tokens after the next (DeepSeek-V3, arXiv 2412.19437, 2.2).

    python train.py --config recipes/demo.yaml --extensions examples/multi_token_prediction.py \
        --loss.terms '{multi_token_prediction: {depths: 1, coefficient: 0.3}}' --output runs/mtp

Module k takes, at position i, the hidden state of module k - 1 (of the model for k = 1) and the embedding of token
i + k, each normed, side by side; a projection and one more block of the model's own architecture make of them the
hidden state from which the model's head predicts token i + k + 1. Embedding and head are the model's own.

The modules train with the model and are in its checkpoints, but not in final/, which is the model alone.
"""

import torch
from torch import nn
from transformers import AutoModel

from pretrain.model.attention import IGNORED
from pretrain.model.loss import next_token_loss
from pretrain.model.loss_terms import LossTerm, Seen, TermOptions
from pretrain.model.small_copy import with_layers
from pretrain.registry import LOSS_TERMS


class Depth(nn.Module):
    """One module: the next hidden states from the previous ones and the embeddings of later tokens."""

    def __init__(self, config):
        super().__init__()
        width = config.hidden_size
        self.norm_of_hidden = nn.RMSNorm(width, eps=1e-6)
        self.norm_of_token = nn.RMSNorm(width, eps=1e-6)
        self.projection = nn.Linear(2 * width, width, bias=False)
        nn.init.normal_(self.projection.weight, std=getattr(config, "initializer_range", 0.02))
        # A model of one layer brings masks, positions and the norm before the head, whatever the architecture.
        attention = config._attn_implementation
        self.block = AutoModel.from_config(with_layers(config, 1), attn_implementation=attention, dtype=torch.float32)
        self.block.set_input_embeddings(nn.Identity())  # the model's own is used instead

    def forward(self, hidden_BTD, tokens_BTD, attention):
        both = torch.cat([self.norm_of_hidden(hidden_BTD), self.norm_of_token(tokens_BTD)], dim=-1)
        return self.block(inputs_embeds=self.projection(both), use_cache=False, **attention).last_hidden_state


@LOSS_TERMS.register("multi_token_prediction")
class MultiTokenPrediction(LossTerm):
    """Cross-entropy of the tokens after the next: the mean over the depths of what each adds up over its tokens."""

    by_token = True  # later tokens come from seen.whole
    embeds = True

    class Options(TermOptions):
        """depths: tokens after the next that are predicted; coefficient: DeepSeek-V3's lambda, 0.3 and later 0.1."""

        depths: int = 1
        coefficient: float = 0.3

    def module(self):
        return nn.ModuleList(Depth(self.model_config) for _ in range(self.options.depths))

    def __call__(self, seen: Seen) -> torch.Tensor:
        """Returns the sum over the tokens (a scalar). No document sees or predicts another one's tokens."""
        hidden_BTD = seen.hidden_BTD
        total = hidden_BTD.new_zeros((), dtype=torch.float32)
        all_targets_BT = seen.whole(seen.targets_BT)
        all_documents_BT = seen.whole(seen.documents_BT)
        for k, depth in enumerate(self.trained, start=1):
            # targets[i] is token i + 1, so token i + k is targets[i + k - 1], and the one after it targets[i + k].
            tokens_BT = seen.own(later(all_targets_BT, k - 1))
            tokens_BTD = seen.embedding(tokens_BT.clamp(min=0))
            hidden_BTD = depth(hidden_BTD, tokens_BTD, seen.attention)
            same_BT = seen.own(later(all_documents_BT, k)) == seen.documents_BT
            targets_BT = seen.own(later(all_targets_BT, k)).where(same_BT, IGNORED)
            bias = getattr(seen.head, "bias", None)
            mean, _ = next_token_loss(hidden_BTD, seen.head.weight, targets_BT, head_bias=bias, cap=seen.cap)
            total = total + mean * (targets_BT != IGNORED).sum()
        return total / self.options.depths


def later(values_BT: torch.Tensor, by: int) -> torch.Tensor:
    """Returns what stands `by` positions later, and IGNORED where that is outside of the sequence."""
    moved_BT = values_BT.roll(-by, dims=1)
    if by:
        moved_BT[:, -by:] = IGNORED
    return moved_BT
