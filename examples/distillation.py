"""Distillation: trains the model to match a teacher's next-token probabilities (Hinton et al., arXiv 1503.02531).

    python train.py --config recipes/demo.yaml --extensions examples/distillation.py \
        --loss.terms '{distillation: {teacher: runs/large/final, coefficient: 0.5}}' --output runs/distilled

The teacher is any causal language model with the same tokenizer. Like the student, it doesn't attend across document
boundaries.
"""

import torch
import torch.nn.functional as F
from pydantic import PositiveFloat, PositiveInt
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from pretrain.errors import InputError
from pretrain.model.loss_terms import LossTerm, Seen, TermOptions
from pretrain.registry import LOSS_TERMS


@LOSS_TERMS.register("distillation")
class Distillation(LossTerm):
    """KL divergence from the teacher's to the student's next-token probabilities, times temperature^2."""

    by_token = True  # the teacher runs on whole sequences

    class Options(TermOptions):
        """Options for `distillation`."""

        teacher: str
        """Teacher model: a folder or Hub ID."""
        temperature: PositiveFloat = 1.0
        """Divisor for the logits of both models."""
        chunk: PositiveInt = 1024
        """Number of tokens per chunk."""

    def __init__(self, options, model_config):
        super().__init__(options, model_config)
        how = {
            "dtype": torch.float32,
            "use_safetensors": True,
            "attn_implementation": "sdpa",  # supports boolean masks
        }
        try:
            teacher = AutoModelForCausalLM.from_pretrained(options.teacher, **how)
        except (OSError, ValueError) as error:
            raise InputError(f"loss.terms.distillation: {options.teacher}: {str(error).splitlines()[0]}") from error
        if teacher.config.vocab_size != model_config.vocab_size:
            raise InputError(
                f"loss.terms.distillation: {options.teacher} has vocab_size {teacher.config.vocab_size:,}, but the "
                f"model has {model_config.vocab_size:,}; both must use the same tokenizer"
            )
        window = getattr(teacher.config, "sliding_window", None)
        if window and window < getattr(model_config, "max_position_embeddings", float("inf")):
            raise InputError(
                f"loss.terms.distillation: {options.teacher} attends to {window:,} tokens, but this example's mask "
                "has no sliding window; use a teacher with full attention"
            )
        self.teacher = teacher.eval().requires_grad_(False)

    def __call__(self, seen: Seen) -> torch.Tensor:
        """Returns the sum over all tokens as a scalar."""
        if self.teacher.device != seen.hidden_BTD.device:
            self.teacher.to(seen.hidden_BTD.device)
        hidden_ND = seen.hidden_BTD.flatten(0, 1)
        with torch.no_grad():
            theirs_NV = self.teacher_logits(seen).flatten(0, 1)
        total = hidden_ND.new_zeros((), dtype=torch.float32)
        for rows in range(0, len(hidden_ND), self.options.chunk):
            here = slice(rows, rows + self.options.chunk)
            # Recompute the logits in the backward pass, so that only one chunk is in memory.
            total = total + checkpoint(self.divergence, seen, hidden_ND[here], theirs_NV[here], use_reentrant=False)
        return total

    def teacher_logits(self, seen: Seen) -> torch.Tensor:
        """Returns the teacher's logits (B, T, V) for this rank's tokens."""
        docs_BT = seen.whole(seen.documents_BT)
        same_BTT = docs_BT[:, :, None] == docs_BT[:, None, :]
        place_T = torch.arange(docs_BT.shape[1], device=docs_BT.device)
        starts_BT = torch.ones_like(docs_BT, dtype=torch.bool)
        starts_BT[:, 1:] = docs_BT[:, 1:] != docs_BT[:, :-1]
        positions_BT = place_T - (place_T * starts_BT).cummax(dim=1).values
        mask_B1TT = same_BTT.tril()[:, None]
        ids_BT = seen.whole(seen.input_ids_BT)
        masks = {"attention_mask": mask_B1TT, "position_ids": positions_BT}
        return seen.own(self.teacher(ids_BT, **masks, use_cache=False).logits)

    def divergence(self, seen: Seen, hidden_CD: torch.Tensor, theirs_CV: torch.Tensor) -> torch.Tensor:
        """Returns the sum of KL(teacher || student) over a chunk's tokens."""
        temperature = self.options.temperature
        ours_CV = F.log_softmax(seen.logits(hidden_CD).float() / temperature, dim=-1)
        theirs_CV = F.log_softmax(theirs_CV.float() / temperature, dim=-1)
        return F.kl_div(ours_CV, theirs_CV, reduction="sum", log_target=True) * temperature**2
