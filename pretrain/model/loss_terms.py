"""Terms that a recipe adds to the loss, each a class of an extension; see docs/own_ideas.md.

Shapes: B sequences, T positions, D hidden width, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from pretrain.config import Loss, Section
from pretrain.mesh_sizes import launched_sizes
from pretrain.model.small_copy import logit_cap
from pretrain.registry import LOSS_TERMS


class TermOptions(Section):
    """Base of a term's `Options`."""

    coefficient: float = 1.0
    """Factor of the term in the loss."""


@dataclass(frozen=True)
class Seen:
    """A micro-batch as a term sees it."""

    input_ids_BT: Tensor
    targets_BT: Tensor
    hidden_BTD: Tensor
    """Last hidden states, from which the head makes the logits."""
    documents_BT: Tensor
    """Number of each token's document within its sequence, from 0; all 0 without document_mask."""
    step: int
    """Number of the step, from 0."""
    head: nn.Module
    """Output head: its weight is (V, D)."""
    cap: float | None = None
    """Cap of the model's logits, cap x tanh(logits / cap); None without one."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns (..., V) logits of hidden states (..., D). Pass a few rows at a time: all of them may not fit."""
        logits = F.linear(hidden, self.head.weight, getattr(self.head, "bias", None))
        return logits if self.cap is None else self.cap * (logits.float() / self.cap).tanh()


class LossTerm(ABC):
    """Term of the loss: a sum over tokens. It has no parameters and no state.

    Register a subclass in `registry.LOSS_TERMS`. Its nested class `Options` declares what a recipe may set.
    """

    Options: type[TermOptions] = TermOptions
    by_token = False
    """True if each token's part needs nothing of other tokens: then the term also runs under cp, where a rank has only
    a part of each sequence."""

    def __init__(self, options: TermOptions, model_config: PreTrainedConfig):
        self.options = options
        self.model_config = model_config

    @abstractmethod
    def __call__(self, seen: Seen) -> Tensor:
        """Returns the term of each token (B, T), or their sum. It is divided by all tokens of the step."""


class LossTerms:
    """Terms of a run, and their means since they were last logged."""

    def __init__(self, settings: Loss, model_config: PreTrainedConfig):
        self.terms: dict[str, LossTerm] = {}
        for name, given in settings.terms.items():
            made = LOSS_TERMS[name]
            self.terms[name] = made(made.Options.model_validate(given or {}), model_config)
        self.cap = logit_cap(model_config)
        self.step = 0
        self._sums: Tensor | None = None

    def add(
        self,
        input_ids_BT: Tensor,
        targets_BT: Tensor,
        hidden_BTD: Tensor,
        head: nn.Module,
        arguments: Mapping[str, Any],
    ) -> Tensor:
        """Returns the sum of all terms x their coefficients, per token."""
        positions_BT = arguments.get("position_ids")
        documents_BT = torch.zeros_like(targets_BT)
        if positions_BT is not None:
            documents_BT = ((positions_BT == 0).cumsum(dim=1) - 1).clamp(min=0).expand_as(targets_BT)
        seen = Seen(input_ids_BT, targets_BT, hidden_BTD, documents_BT, self.step, head, self.cap)
        # Every micro-batch of a step has as many tokens, so that the means of all of them are the mean of the step.
        means = [term(seen).float().sum() / targets_BT.numel() for term in self.terms.values()]
        known = torch.stack([*(mean.detach() for mean in means), torch.ones_like(means[0].detach())]).double()
        self._sums = known if self._sums is None else self._sums + known
        return sum(term.options.coefficient * mean for term, mean in zip(self.terms.values(), means, strict=True))

    def figures(self, strategy: Any) -> dict[str, float]:
        """Returns {'loss_NAME': mean over all ranks since the last call}, before coefficients. A collective call."""
        if self._sums is None:
            return {}
        *sums, count = strategy.sum(self._sums.float()).tolist()
        self._sums = None
        return {f"loss_{name}": value / count for name, value in zip(self.terms, sums, strict=True)}


def term_problems(settings: Loss, compile_mode: str) -> list[str]:
    """Lists why the terms do not run under the launched strategy, or with this compilation."""
    if not settings.terms:
        return []
    sizes = launched_sizes()
    problems = [
        f"loss.terms: do not run with {name}, where no rank has all that a term needs; use ddp, fsdp2 or ZeRO"
        for name, size in (("tp", sizes.tp), ("pp", sizes.pp))
        if size > 1
    ]
    needy = [name for name in settings.terms if not LOSS_TERMS[name].by_token]
    if sizes.cp > 1 and needy:
        problems.append(
            f"loss.terms: {', '.join(needy)}: not under cp, where a rank has a part of each sequence, unless the "
            "class says by_token = True; use fsdp2"
        )
    if compile_mode == "full":
        problems.append("loss.terms: run outside compiled code; take compile: regional, or auto")
    return problems
