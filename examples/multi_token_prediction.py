"""Multi-token prediction: additional modules predict tokens after the next one (DeepSeek-V3, arXiv 2412.19437, 2.2).

    python train.py --config recipes/demo.yaml --extensions examples/multi_token_prediction.py \
        --loss.terms '{multi_token_prediction: {depths: 1, coefficient: 0.3}}' --output runs/mtp

At position i, module k concatenates the normalized hidden state of module k - 1 (of the model for k = 1) and the
normalized embedding of token i + k. A linear projection and one block of the model's architecture turn them into the
hidden state that predicts token i + k + 1. The embedding and output head are shared with the model.

The modules are saved in checkpoints, but not in final/.
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
    """Prediction module: combines the previous module's hidden states with token embeddings."""

    def __init__(self, config):
        super().__init__()
        width = config.hidden_size
        self.norm_of_hidden = nn.RMSNorm(width, eps=1e-6)
        self.norm_of_token = nn.RMSNorm(width, eps=1e-6)
        self.projection = nn.Linear(2 * width, width, bias=False)
        nn.init.normal_(self.projection.weight, std=getattr(config, "initializer_range", 0.02))
        # A one-layer model also includes masks, positions and the final norm, for every architecture.
        attention = config._attn_implementation
        self.block = AutoModel.from_config(with_layers(config, 1), attn_implementation=attention, dtype=torch.float32)
        self.block.set_input_embeddings(nn.Identity())  # shared with the model instead

    def forward(self, hidden_BTD, tokens_BTD, attention):
        both = torch.cat([self.norm_of_hidden(hidden_BTD), self.norm_of_token(tokens_BTD)], dim=-1)
        return self.block(inputs_embeds=self.projection(both), use_cache=False, **attention).last_hidden_state


@LOSS_TERMS.register("multi_token_prediction")
class MultiTokenPrediction(LossTerm):
    """Cross-entropy of the tokens after the next one, averaged over the depths."""

    by_token = True  # later tokens come from seen.whole
    embeds = True

    class Options(TermOptions):
        """Options for `multi_token_prediction`."""

        depths: int = 1
        """Number of additional tokens to predict."""
        coefficient: float = 0.3
        """Weight of the loss. DeepSeek-V3 uses 0.3, then 0.1 later in training."""

    def module(self):
        return nn.ModuleList(Depth(self.model_config) for _ in range(self.options.depths))

    def __call__(self, seen: Seen) -> torch.Tensor:
        """Returns the sum over all tokens as a scalar. Targets in a different document are ignored."""
        hidden_BTD = seen.hidden_BTD
        total = hidden_BTD.new_zeros((), dtype=torch.float32)
        all_targets_BT = seen.whole(seen.targets_BT)
        all_documents_BT = seen.whole(seen.documents_BT)
        for k, depth in enumerate(self.trained, start=1):
            # targets[i] is token i + 1, so token i + k is targets[i + k - 1].
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
    """Shifts values to the left by `by` positions. Fills the end of the sequence with IGNORED."""
    moved_BT = values_BT.roll(-by, dims=1)
    if by:
        moved_BT[:, -by:] = IGNORED
    return moved_BT
